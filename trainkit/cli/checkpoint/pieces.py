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
    """Read the model's tensors, all of them verified, and keep those of an attribute.

    Args:
        checkpoint: the checkpoint.
        attribute: path of a module, such as ``"net"`` or ``"net.encoder"``; in the checkpoint of an own loop with several
            models ``"model_1"`` for the second, ``"model_1/encoder"`` for a module of it. ``None``: the whole (first) model.

    Raises:
        UnknownNameError: there is no such attribute; the message lists those that there are.
        CheckpointError: it is damaged.
    """
    stem, path = _split(checkpoint, attribute)
    loaded = checkpoint.read({stem, "state"}, unregistered=True)
    tensors, aliases = loaded.tensors.get(stem, {}), checkpoint.manifest.aliases.get(stem, {})
    for stored in aliases.values():
        if stored not in tensors:
            raise CorruptCheckpointError(f"{checkpoint.path}: a tensor is said to be stored as {stored!r}, which is not there")
    about = _model(loaded.state, stem)
    trained, configs = about.get("trained"), about.get("configs")
    trained = trained if isinstance(trained, Mapping) else {}
    configs = {p: c for p, c in configs.items() if isinstance(c, Mapping)} if isinstance(configs, Mapping) else {}
    names = [*tensors, *aliases, *trained]
    if path and not any(name.startswith(f"{path}.") for name in names):
        raise UnknownNameError(_unknown(str(attribute), path, names, configs))

    def inside(mapping: Mapping[str, Any]) -> dict[str, Any]:
        start = f"{path}." if path else ""
        return {name.removeprefix(start): value for name, value in mapping.items() if name.startswith(start)}

    own_configs = {p.removeprefix(path).removeprefix("."): c for p, c in configs.items() if _within(p, path)}
    own, own_aliases = inside(tensors), {}
    for alias, stored in inside(aliases).items():
        if not path or stored.startswith(f"{path}."):
            own_aliases[alias] = stored.removeprefix(f"{path}." if path else "")
        elif (first := next((name for name, tensor in own.items() if tensor is tensors[stored]), None)) is not None:
            own_aliases[alias] = first
        else:  # tied to something outside, under whose name it is stored
            own[alias] = tensors[stored]
    lacking = [name for name in inside(trained) if name not in own and name not in own_aliases]
    outer = [p or "the model" for p, c in configs.items() if c.get("kind") == "peft" and p != path and _within(path, p)]
    return Piece(own, own_aliases, lacking, own_configs, outer[0] if outer else "")


def _split(checkpoint: Checkpoint, attribute: str | None) -> tuple[str, str]:
    """The stem of the model's files, and the path within the model."""
    match = None if attribute is None else _MODEL.fullmatch(attribute)
    stems = model_stems(checkpoint.manifest.files)
    if match and len(stems) > 1 and match[1] in stems:
        return match[1], match[2] or ""
    return "model", attribute or ""


def _model(state: Mapping[str, Any], stem: str) -> Mapping[str, Any]:
    models, number = state.get("models"), int(stem.partition("_")[2] or 0)
    own = models[number] if isinstance(models, list) and number < len(models) else {}
    return own if isinstance(own, Mapping) else {}


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
