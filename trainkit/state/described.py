"""The description of an optimizer in a checkpoint, in addition to its tensors; it is checked when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import CorruptCheckpointError
from trainkit.optim.parameter_names import without_checkpoint_wrapper
from trainkit.state.wrapped_tensors import KINDS, put_together, taken_apart

__all__ = ["SavedOptimizer", "StoredSlots", "copied"]

_Need = Callable[[bool, str], None]
"""`need(condition, problem)` raises `CorruptCheckpointError` if the condition is false."""


@dataclass
class StoredSlots:
    """The slots that an optimizer keeps for one parameter.

    Attributes:
        tensors: slot → tensor; item n of a list has the slot `<slot>.<n>`, and an inner tensor of a quantized one
            `<slot>.<name>`.
        irregular: slots of tensors that are neither scalar nor of the parameter's shape, of items of lists, and of inner
            tensors.
        described: `{"values": {slot: value}, "lists": {slot: {"tuple": bool, "length": n, "values": {position: value}}},
            "quantized": {slot: {"class": name, "attributes": [value], "shape": shape}}, "irregular": [slot]}`, each omitted
            if empty; `{"whole": value}` if the value has no slots.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    irregular: list[str] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: Any, parameter: Tensor) -> StoredSlots:
        """Separate the tensors that an optimizer stores for `parameter` from its other values."""
        if not isinstance(slots, Mapping):
            return cls(described={"whole": slots})
        self = cls()
        values: dict[Any, Any] = {}
        lists: dict[str, Any] = {}
        quantized: dict[str, Any] = {}
        for slot, value in slots.items():
            plain = isinstance(slot, str) and "/" not in slot  # otherwise it cannot be part of a key
            if plain and isinstance(value, Tensor) and slot not in self.tensors:
                if (about := self._add_tensor(slot, value, parameter)) is not None:
                    quantized[slot] = about
            elif plain and type(value) in (list, tuple) and not any(str(other).startswith(f"{slot}.") for other in slots):
                lists[slot] = self._add_list(slot, value)
            else:
                values[slot] = value
        parts = {"values": values, "lists": lists, "quantized": quantized, "irregular": self.irregular}
        self.described = {key: part for key, part in parts.items() if part}
        return self

    def _add_tensor(self, slot: str, tensor: Tensor, parameter: Tensor) -> dict[str, Any] | None:
        """Store a tensor, or the inner tensors of a quantized one; returns the description of a quantized one."""
        apart = taken_apart(tensor)
        if apart is not None:
            inner, about = apart
            self._add_irregular({f"{slot}.{part}": one for part, one in inner.items()})
            return about
        self.tensors[slot] = tensor.detach()
        if tensor.ndim and tensor.shape != parameter.shape:
            self.irregular.append(slot)
        return None

    def _add_list(self, slot: str, items: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
        """Store the tensors of a list, each under its position; returns the description of the list."""
        found = {f"{slot}.{n}": item for n, item in enumerate(items) if isinstance(item, Tensor)}
        rest = {str(n): item for n, item in enumerate(items) if not isinstance(item, Tensor)}
        self._add_irregular(found)
        return {"tuple": isinstance(items, tuple), "length": len(items), "values": rest}

    def _add_irregular(self, found: dict[str, Tensor]) -> None:
        self.tensors.update({slot: tensor.detach() for slot, tensor in found.items()})
        self.irregular += found

    @property
    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """The slots that must have the shape of the parameter, each with its shape."""
        for slot, tensor in self.tensors.items():
            if tensor.ndim and slot not in self.irregular:
                yield slot, tensor.shape
        for slot, about in self.described.get("quantized", {}).items():
            yield slot, torch.Size(about["shape"])

    def rebuilt(self, name: str, convert: Callable[[str, str, Tensor], Tensor], device: torch.device) -> Any:
        """The inverse of `of`; each tensor is the result of `convert(name, slot, tensor)`, quantized ones are on the device."""
        if "whole" in self.described:
            return copied(self.described["whole"])
        lists = self.described.get("lists", {})
        quantized = self.described.get("quantized", {})
        parts = {f"{slot}.{n}" for slot, about in lists.items() for n in range(about["length"])}
        parts |= {f"{slot}.{part}" for slot, about in quantized.items() for part in KINDS[about["class"]][1]}
        slots: dict[Any, Any] = {
            slot: convert(name, slot, tensor) for slot, tensor in self.tensors.items() if slot not in parts
        }
        for slot, about in lists.items():
            items = [
                copied(about["values"][str(n)])
                if str(n) in about["values"]
                else convert(name, slot, self.tensors[f"{slot}.{n}"])
                for n in range(about["length"])
            ]
            slots[slot] = tuple(items) if about["tuple"] else items
        for slot, about in quantized.items():
            inner = {part: self.tensors[f"{slot}.{part}"].to(device, copy=True) for part in KINDS[about["class"]][1]}
            slots[slot] = put_together(about, inner)
        return {**slots, **copied(self.described.get("values", {}))}


@dataclass
class SavedOptimizer:
    """The checked content of `trainkit.state.optimizer.OptimizerState.described`, with the tensors.

    Attributes:
        kind: the class.
        groups: for each group the names of the parameters, and the options.
        state: name of the parameter → its slots.
        entries: state of the whole optimizer.
        more: entries of the `state_dict` other than state and groups.
        opaque: a whole `state_dict` that does not have torch's form.
    """

    kind: str
    groups: list[tuple[list[str], dict[str, Any]]]
    state: dict[str, StoredSlots] = field(default_factory=dict)
    entries: dict[Any, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    opaque: Any = None

    @classmethod
    def read(cls, described: Any, tensors: Mapping[str, Tensor], index: int, what: str) -> SavedOptimizer:
        """Check the description and assign the tensors to their parameters.

        Raises:
            CorruptCheckpointError: The description is malformed, or does not match the tensors.
        """

        def need(condition: bool, problem: str) -> None:
            if not condition:
                raise CorruptCheckpointError(
                    f"{what}: the description of optimizer {index} is malformed: {problem}. Fix: use another checkpoint."
                )

        need(isinstance(described, dict), "it is not a dict")
        kind, listed = described.get("class"), described.get("groups")
        need(isinstance(kind, str) and isinstance(listed, list), "it has no class or no groups")
        parts = {key: described.get(key, {}) for key in ("state", "entries", "more")}
        self = cls(kind, _read_groups(listed, need), opaque=described.get("opaque"))
        for key, part in parts.items():
            need(isinstance(part, dict), f"{key!r} is not a dict")
        need(not any(isinstance(key, int) for key in parts["entries"]), "an entry has an integer key, like a parameter")
        self.entries, self.more = parts["entries"], parts["more"]
        names = {name for own, _ in self.groups for name in own}
        for raw, about in parts["state"].items():
            name = without_checkpoint_wrapper(raw)
            need(name in names, f"state for {name!r}, which is in no group")
            need(_is_valid(about), f"invalid slots for {name!r}")
            self.state[name] = StoredSlots(irregular=about.get("irregular", []), described=about)
        self._add_tensors(tensors, index, need)
        return self

    def _add_tensors(self, tensors: Mapping[str, Tensor], index: int, need: _Need) -> None:
        """Assign the tensors of this optimizer to their parameters."""
        for key, tensor in tensors.items():
            number, _, rest = key.partition("/")
            if number == str(index):
                name, _, slot = rest.rpartition("/")
                name = without_checkpoint_wrapper(name)
                need(name in self.state, f"the tensor {key!r} belongs to no parameter")
                self.state[name].tensors[slot] = tensor
        for name, stored in self.state.items():
            for slot, about in stored.described.get("lists", {}).items():
                need(_is_complete(slot, about, stored.tensors), f"the list {slot!r} of {name!r} is incomplete")
            for slot, about in stored.described.get("quantized", {}).items():
                complete = all(f"{slot}.{part}" in stored.tensors for part in KINDS[about["class"]][1])
                need(complete, f"the quantized tensor {slot!r} of {name!r} is incomplete")


def _read_groups(listed: list[Any], need: _Need) -> list[tuple[list[str], dict[str, Any]]]:
    """The parameter names and the options of each group."""
    groups: list[tuple[list[str], dict[str, Any]]] = []
    names: set[str] = set()
    for group in listed:
        need(isinstance(group, dict) and isinstance(group.get("options"), dict), "a group has no options")
        need(all(isinstance(key, str) and key != "params" for key in group["options"]), "an option has no name")
        own = group.get("parameters")
        need(isinstance(own, list) and all(isinstance(name, str) for name in own), "a group has no parameter names")
        own = [without_checkpoint_wrapper(name) for name in own]
        need(names.isdisjoint(own) and len(set(own)) == len(own), "a parameter occurs more than once")
        names.update(own)
        groups.append((own, group["options"]))
    return groups


def _is_valid(about: Any) -> bool:
    if not isinstance(about, dict) or not isinstance(about.get("values", {}), dict):
        return False
    lists, irregular = about.get("lists", {}), about.get("irregular", [])
    if not isinstance(lists, dict) or not isinstance(irregular, list):
        return False
    for item in lists.values():
        if not isinstance(item, dict) or not isinstance(item.get("tuple"), bool) or not isinstance(item.get("values"), dict):
            return False
        length = item.get("length")
        if type(length) is not int or length < 0:
            return False
    quantized = about.get("quantized", {})
    if not isinstance(quantized, dict) or not all(_is_valid_quantized(item) for item in quantized.values()):
        return False
    return all(isinstance(slot, str) for slot in irregular)


def _is_valid_quantized(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and item.get("class") in KINDS
        and isinstance(item.get("attributes"), list)
        and isinstance(item.get("shape"), tuple)
        and all(type(size) is int for size in item["shape"])
    )


def _is_complete(slot: str, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether every position of a list has a tensor or a value. The length is not trusted."""
    if about["length"] > len(tensors) + len(about["values"]):
        return False
    return all((f"{slot}.{n}" in tensors) != (str(n) in about["values"]) for n in range(about["length"]))


def copied(value: Any) -> Any:
    """Copy containers and tensors; everything else is shared.

    `copy.deepcopy` would copy the whole buffer of a file for each tensor that is a view into it.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        result = value.copy()  # of the same class
        for key, item in value.items():
            result[key] = copied(item)
        return result
    if type(value) in (list, tuple, set):
        return type(value)(copied(item) for item in value)
    return value
