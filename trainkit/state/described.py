"""The description of an optimizer in a checkpoint, in addition to its tensors; it is checked when it is read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.state_schema import optimizer_problem
from trainkit.console import counted
from trainkit.errors import CorruptCheckpointError
from trainkit.optim.parameter_names import without_checkpoint_wrapper
from trainkit.state.wrapped_tensors import KINDS, put_together, taken_apart

__all__ = ["SavedOptimizer", "StoredSlots", "copied", "is_of_torch", "name_here", "odd_value"]

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

        problem = optimizer_problem(described, f"optimizers[{index}]")
        need(problem is None, str(problem))
        parts = {key: described.get(key, {}) for key in ("state", "entries", "more")}
        self = cls(described["class"], _read_groups(described["groups"], need), opaque=described.get("opaque"))
        need(not any(isinstance(key, int) for key in parts["entries"]), "an entry has an integer key, like a parameter")
        self.entries, self.more = parts["entries"], parts["more"]
        names = {name for own, _ in self.groups for name in own}
        for raw, about in parts["state"].items():
            name = without_checkpoint_wrapper(raw)
            need(name in names, f"state for {name!r}, which is in no group")
            known = all(item["class"] in KINDS for item in about.get("quantized", {}).values())
            need(known, f"an unknown class of quantized slots for {name!r}")
            self.state[name] = StoredSlots(irregular=about.get("irregular", []), described=about)
        self._add_tensors(tensors, index, need)
        return self

    def named_as(self, names: Container[str]) -> SavedOptimizer:
        """With the names of this model for parameters that were pruned when they were saved by an earlier version."""
        groups = [([name_here(name, names) for name in own], options) for own, options in self.groups]
        return replace(self, groups=groups, state={name_here(name, names): stored for name, stored in self.state.items()})

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
        need("params" not in group["options"], "an option is named 'params'")
        own = [without_checkpoint_wrapper(name) for name in group["parameters"]]
        need(names.isdisjoint(own) and len(set(own)) == len(own), "a parameter occurs more than once")
        names.update(own)
        groups.append((own, group["options"]))
    return groups


def name_here(name: str, names: Container[str]) -> str:
    """The name in this model of a parameter that may have been pruned when it was saved, see `SavedOptimizer.named_as`."""
    plain = name.removesuffix("_orig")
    return plain if name not in names and plain in names else name


def _is_complete(slot: str, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether every position of a list has a tensor or a value. The length is not trusted."""
    if about["length"] > len(tensors) + len(about["values"]):
        return False
    return all((f"{slot}.{n}" in tensors) != (str(n) in about["values"]) for n in range(about["length"]))


def is_of_torch(thing: Any) -> bool:
    """Whether the class of an object is one of torch's, whose state has values of known kinds."""
    return type(thing).__module__.partition(".")[0] == "torch"


def odd_value(
    saved: Any, here: Any, path: str, *, may_be_none: bool = False, any_for_none: bool = False, same_length: bool = False
) -> str | None:
    """A saved value of another kind than the one that this program has in its place, as `path: …`; `None` if there is none.

    Only the kinds are compared: numbers, true and false, strings, lists, dicts. Values that only one of the two has are not.

    Args:
        saved: the value in the checkpoint.
        here: the value that it replaces.
        path: its key, for the message.
        may_be_none: a value may be `None` in the checkpoint.
        any_for_none: if it is `None` here, the saved one may also be a container.
        same_length: lists must have the same length.
    """
    if (saved is None and (may_be_none or here is None)) or (here is None and (any_for_none or _is_leaf(saved))):
        return None
    if not _same_kind(saved, here):
        return f"{path}: expected {_kind_of(here)}, got {saved!r:.80}"
    if same_length and isinstance(here, list | tuple) and len(saved) != len(here):
        return f"{path}: expected {counted(len(here), 'item')}, got {saved!r:.80}"
    options = {"may_be_none": may_be_none, "any_for_none": any_for_none, "same_length": same_length}
    inside = (odd_value(one, other, f"{path}[{key!r:.80}]", **options) for key, one, other in _in_both(saved, here))
    return next(filter(None, inside), None)


def _in_both(saved: Any, here: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The items of two containers with the same key or index."""
    if isinstance(here, dict):
        yield from ((key, saved[key], here[key]) for key in saved if key in here)
    elif isinstance(here, list | tuple):
        yield from ((number, one, other) for number, (one, other) in enumerate(zip(saved, here, strict=False)))


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple | set)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def _same_kind(saved: Any, here: Any) -> bool:
    if isinstance(here, bool):
        return isinstance(saved, bool) or (_is_number(saved) and saved in (0, 1))  # some pass 1 for True
    if _is_number(here):
        return _is_number(saved)
    for kind in (str, dict, list | tuple):
        if isinstance(here, kind):
            return isinstance(saved, kind)
    return here is not None


def _kind_of(value: Any) -> str:
    kinds = {bool: "true or false", str: "a string", dict: "a dict", list: "a list", tuple: "a list", type(None): "null"}
    return next((text for kind, text in kinds.items() if isinstance(value, kind)), "a number")


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
