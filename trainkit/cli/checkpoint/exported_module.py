"""One module of a checkpoint, as an export reads it."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.checkpoint.reader import Checkpoint
from trainkit.errors import CorruptCheckpointError, UnknownNameError, nearest
from trainkit.state.training_objects import model_stems

__all__ = ["ExportedModule", "aliases_of", "read_module"]

_MODEL = re.compile(r"(model(?:_\d+)?)(?:/(.+))?")


@dataclass
class ExportedModule:
    """One module of a checkpoint. All names are relative to the module.

    Attributes:
        tensors: The stored tensors.
        aliases: Name of a tied tensor → the name in `tensors` under which it is stored.
        missing_frozen: Names of parameters that the checkpoint does not contain because they were frozen.
        configs: Configurations of the `transformers` and PEFT models inside, by path; `""` is the module itself.
        peft_parent: The PEFT model that contains this module, with adapters between its parameters; "" if there is none.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    missing_frozen: list[str]
    configs: dict[str, Mapping[str, Any]]
    peft_parent: str = ""

    @property
    def kind(self) -> str:
        """The default format of the module: "peft", "transformers" or "safetensors"."""
        own = self.configs.get("", {})
        if self.peft_parent:
            return "safetensors"
        return "peft" if own.get("kind") == "peft" or own.get("adapters") else str(own.get("kind", "safetensors"))


def read_module(checkpoint: Checkpoint, attribute: str | None) -> ExportedModule:
    """Read and verify the model's tensors, and keep those of one module.

    Args:
        checkpoint: The checkpoint.
        attribute: Path of a module, such as `"net"` or `"net.encoder"`. If your own training loop saved several models:
            `"model_1"` for the second, `"model_1/encoder"` for a module of it. `None`: the whole (first) model.

    Raises:
        UnknownNameError: The model has no such module; the message lists the modules.
        CheckpointError: The checkpoint is damaged.
    """
    stem, path = _split(checkpoint, attribute)
    loaded = checkpoint.read({stem, "state"}, unregistered=True)
    tensors = loaded.tensors.get(stem, {})
    aliases = aliases_of(checkpoint, stem, tensors)
    trained, configs = _split_adapters(loaded.state, stem)
    names = [*tensors, *aliases, *trained]
    if path and not any(name.startswith(f"{path}.") for name in names):
        raise UnknownNameError(_unknown(str(attribute), path, names, configs))
    own, own_aliases = _tensors_inside(tensors, aliases, path)
    own_configs = {p.removeprefix(path).removeprefix("."): config for p, config in configs.items() if _within(p, path)}
    stored = {*own, *own_aliases}
    missing_frozen = [name for name in _inside(trained, path) if name not in stored]
    return ExportedModule(own, own_aliases, missing_frozen, own_configs, _enclosing_peft_model(configs, path))


def aliases_of(checkpoint: Checkpoint, stem: str, tensors: Container[str]) -> Mapping[str, str]:
    """Name of a tied tensor → the name under which it is stored, which must be in `tensors`."""
    aliases = checkpoint.manifest.aliases.get(stem, {})
    if missing := [stored for stored in aliases.values() if stored not in tensors]:
        raise CorruptCheckpointError(f"{checkpoint.path}: the manifest names the tensor {missing[0]!r}, which is missing")
    return aliases


def _inside(mapping: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The entries of a module, by their names within it."""
    start = f"{path}." if path else ""
    return {name.removeprefix(start): value for name, value in mapping.items() if name.startswith(start)}


def _tensors_inside(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str], path: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a module and its aliases, each with a name within the module."""
    own, own_aliases = _inside(tensors, path), {}
    for alias, stored in _inside(aliases, path).items():
        if _within(stored, path):
            own_aliases[alias] = stored.removeprefix(f"{path}." if path else "")
        elif (first := next((name for name, tensor in own.items() if tensor is tensors[stored]), None)) is not None:
            own_aliases[alias] = first
        else:  # tied to a tensor outside the module, under whose name it is stored
            own[alias] = tensors[stored]
    return own, own_aliases


def _enclosing_peft_model(configs: Mapping[str, Mapping[str, Any]], path: str) -> str:
    """The path of the PEFT model around a module; "" if there is none."""
    outer = [p for p, config in configs.items() if config.get("kind") == "peft" and p != path and _within(path, p)]
    return (outer[0] or "the model") if outer else ""


def _split(checkpoint: Checkpoint, attribute: str | None) -> tuple[str, str]:
    """The stem of the model's files, and the path of the module in the model."""
    match = None if attribute is None else _MODEL.fullmatch(attribute)
    stems = model_stems(checkpoint.manifest.files)
    if match and len(stems) > 1 and match[1] in stems:
        return match[1], match[2] or ""
    return "model", attribute or ""


def _split_adapters(state: Mapping[str, Any], stem: str) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """The trained parameters of a model and its configurations by path, as the state names them."""
    models, number = state.get("models"), int(stem.partition("_")[2] or 0)
    about = models[number] if isinstance(models, list) and number < len(models) else {}
    trained, configs = (_mapping(_mapping(about).get(key)) for key in ("trained", "configs"))
    return trained, {path: config for path, config in configs.items() if isinstance(config, Mapping)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _unknown(attribute: str, path: str, names: list[str], configs: Mapping[str, Any]) -> str:
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    tops = [*sorted({name.partition(".")[0] for name in names if "." in name}), *(p for p in configs if "." in p)]
    every = {".".join(module.split(".")[: depth + 1]) for module in modules for depth in range(module.count(".") + 1)}
    hint = nearest(path, tops) or nearest(path, sorted(every - {""}))
    is_tensor = " It is a parameter or buffer; expected a module." if path in names else ""
    return (
        f"The model has no module {attribute!r}.{is_tensor}{hint} Modules: {', '.join(tops) or 'none'}, and their submodules."
    )
