"""What of a checkpoint is exported: the tensors of one module, and what the checkpoint knows of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.checkpoint.reader import Checkpoint
from trainkit.errors import CorruptCheckpointError, UnknownNameError, nearest
from trainkit.state.parts import model_stems

__all__ = ["Piece", "take"]

_MODEL = re.compile(r"(model(?:_\d+)?)(?:/(.+))?")


@dataclass
class Piece:
    """One module out of a checkpoint; all names are those within it.

    Attributes:
        tensors: those that are stored.
        aliases: name of a tied tensor → the name in ``tensors`` that it is stored under.
        lacking: parameters that the module has and the checkpoint has not, because they were frozen.
        configs: of the ``transformers`` and PEFT models inside, by path; ``""`` is the module itself.
        within: the PEFT model that this is a part of, whose adapters lie between its parameters; "" if there is none.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    lacking: list[str]
    configs: dict[str, Mapping[str, Any]]
    within: str = ""

    @property
    def kind(self) -> str:
        """ "peft", "transformers" or "safetensors": what the module is, and so its format unless another is asked for."""
        own = self.configs.get("", {})
        if self.within:
            return "safetensors"
        return "peft" if own.get("kind") == "peft" or own.get("adapters") else str(own.get("kind", "safetensors"))


def take(checkpoint: Checkpoint, attribute: str | None) -> Piece:
    """Read and verify the model's tensors, and keep those of one module.

    Args:
        checkpoint: The checkpoint.
        attribute: Path of a module, such as ``"net"`` or ``"net.encoder"``. If your own training loop saved several models:
            ``"model_1"`` for the second, ``"model_1/encoder"`` for a module of it. ``None``: the whole (first) model.

    Raises:
        UnknownNameError: The model has no such module; the message lists the modules.
        CheckpointError: The checkpoint is damaged.
    """
    stem, path = _split(checkpoint, attribute)
    loaded = checkpoint.read({stem, "state"}, unregistered=True)
    tensors, aliases = loaded.tensors.get(stem, {}), checkpoint.manifest.aliases.get(stem, {})
    if missing := [stored for stored in aliases.values() if stored not in tensors]:
        raise CorruptCheckpointError(f"{checkpoint.path}: a tensor is said to be stored as {missing[0]!r}, which is not there")
    trained, configs = _trained_and_configs(loaded.state, stem)
    names = [*tensors, *aliases, *trained]
    if path and not any(name.startswith(f"{path}.") for name in names):
        raise UnknownNameError(_unknown(str(attribute), path, names, configs))
    own, own_aliases = _tensors_inside(tensors, aliases, path)
    own_configs = {p.removeprefix(path).removeprefix("."): config for p, config in configs.items() if _within(p, path)}
    stored = {*own, *own_aliases}
    lacking = [name for name in _inside(trained, path) if name not in stored]
    return Piece(own, own_aliases, lacking, own_configs, _enclosing_peft_model(configs, path))


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
    """The stem of the model's files, and the path within the model."""
    match = None if attribute is None else _MODEL.fullmatch(attribute)
    stems = model_stems(checkpoint.manifest.files)
    if match and len(stems) > 1 and match[1] in stems:
        return match[1], match[2] or ""
    return "model", attribute or ""


def _trained_and_configs(state: Mapping[str, Any], stem: str) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """What the state says of a model: which parameters are trained, and the configurations by path."""
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
    there = ", ".join(tops) or "none"
    is_tensor = " That is a parameter or buffer, and a module is expected." if path in names else ""
    return f"The model has no module {attribute!r}.{is_tensor}{hint} There are: {there}, and those in them."
