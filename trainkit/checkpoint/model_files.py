"""The files that the weights of a model are in if another program opens them by its own names.

`from_pretrained` looks for the weights of a model in `model.safetensors`, and for those of an adapter in
`adapter_model.safetensors`, by the names that the model itself has. In a module that trains it, they have other names. The
manifest says how they differ, and everything above the files uses the module's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ADAPTER", "MODEL", "MODULE", "ModelFiles", "files_problem", "model_name", "split_names"]

MODEL = "model"
ADAPTER = "adapter_model"
MODULE = "module"
"""The stem of the file with the parameters and buffers that belong to no other file."""

ModelFiles = Mapping[str, Mapping[str, Any]]
"""Stem of the file → `"prefix"`, which the names in it lack, and `"names"`: name in the file → name after the prefix.

A file without `"names"` has all tensors whose names start with its prefix, except those of other files before it.
"""


def model_name(file: Mapping[str, Any], name: str) -> str:
    """The name in the model of a tensor that has `name` in the file."""
    return str(file["prefix"]) + str(file.get("names", {}).get(name, name))


def split_names(names: Iterable[str], files: ModelFiles) -> dict[str, dict[str, str]]:
    """Assign the tensors of a model to files: stem → name in the file → name in the model; without files that have none.

    Args:
        names: The names in the model.
        files: The files; empty: all are in `model`, by these names.
    """
    if not files:
        return {MODEL: {name: name for name in names}}
    own = {model_name(file, name): (stem, name) for stem, file in files.items() for name in file.get("names", {})}
    prefixes = [(stem, str(file["prefix"])) for stem, file in files.items() if not file.get("names")]
    by_file: dict[str, dict[str, str]] = {stem: {} for stem in files}
    for name in names:
        if name in own:
            stem, inside = own[name]
        else:
            stem, prefix = next((stem, prefix) for stem, prefix in prefixes if name.startswith(prefix))
            inside = name.removeprefix(prefix)
        by_file[stem][inside] = name
    return {stem: inside for stem, inside in by_file.items() if inside} or {MODEL: {}}


def files_problem(value: Any) -> str | None:
    """What is wrong with decoded `ModelFiles`; `None` if they are valid."""
    expected = f"an object with {MODEL!r}, {ADAPTER!r} or {MODULE!r}, each with a 'prefix' and perhaps 'names'"
    if not isinstance(value, dict) or not all(isinstance(file, dict) for file in value.values()):
        return f"expected {expected}"
    for stem, file in value.items():
        names = file.get("names", {})
        texts = isinstance(names, dict) and all(isinstance(text, str) for pair in names.items() for text in pair)
        if stem not in (MODEL, ADAPTER, MODULE) or not isinstance(file.get("prefix"), str) or not texts:
            return f"[{stem!r:.80}]: expected {expected}"
    return None
