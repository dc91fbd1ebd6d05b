"""Captures the state of an optimizer as tensors by parameter name, and restores it: all of it, or nothing is changed.

torch's `state_dict` numbers the parameters by their place in the groups, and its `load_state_dict` trusts the numbers.
Here they are translated to names and back, so that a state is never loaded into another parameter. What is no tensor is a
description, which is checked when it is read. With `strict=False`, the optimizer may have other parameters than the saved one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainkit.checkpoint.state_schema import optimizer_problem
from trainkit.console import quantity
from trainkit.errors import CorruptCheckpointError, StateMismatchError, UnsavableError, missing_package
from trainkit.optim.parameter_names import shape_of, without_checkpoint_wrapper
from trainkit.optim.prepared import PreparedOptimizer
from trainkit.registry import load, strategy_infos
from trainkit.state.saved_values import castable, copy_value, is_of_torch, kind_mismatch, snapshot

__all__ = [
    "QUANTIZED_CLASSES",
    "OptimizerState",
    "SavedOptimizer",
    "StoredSlots",
    "capture_optimizer",
    "plan_optimizer",
    "same_groups",
]


# Bytes, like torch's allocators. Kernels may round differently with less, so tensors that are kept must have it, too.
_ALIGNMENT_BYTES = 64

# Options of how an optimizer computes, not of the result: the loading run keeps its own, which may depend on its device.
_EXECUTION = ("foreach", "fused", "capturable")

# Options that only torch's or only DeepSpeed's Adam has, with their defaults; and options decided by the class or the run.
_UNSET = {"amsgrad": False, "bias_correction": True, "differentiable": False, "maximize": False}
_ELSEWHERE = ("decoupled_weight_decay", *_EXECUTION)


# Slots that torch's optimizers count in, as numbers or tensors.
_COUNTERS = ("step", "n_iter", "func_evals")


@dataclass
class OptimizerState:
    """The state of an optimizer in a checkpoint.

    Attributes:
        tensors: Keys are `"<index>/<parameter>/<slot>"`, split at the first and the last `/`; item n of a list has the slot
            `<slot>.<n>`. After a capture the tensors are those of the optimizer, not copies.
        described: Everything else: the class, options and parameter names of the groups, slots that are not tensors, entries
            of the whole optimizer. It is stored as tagged JSON.
        irregular: The keys of tensors that are neither scalar nor of their parameter's shape, of items of lists, and
            `"<index>//<entry>"` for entries of the whole optimizer.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    irregular: list[str] = field(default_factory=list)


def capture_optimizer(optimizer: Optimizer, index: int, names: Mapping[int, str]) -> OptimizerState:
    """The state of an optimizer that a checkpoint stores; no tensor is copied.

    Args:
        optimizer: Its `state_dict` is called, which a subclass may override.
        index: Index of the optimizer in the run.
        names: `trainkit.state.model.parameter_names` of the run's modules.

    Raises:
        UnsavableError: The optimizer contains a parameter that no module has, or the same parameter twice.
    """
    kind = _kind(optimizer)
    groups = [[_name(p, names, index, kind) for p in group["params"]] for group in optimizer.param_groups]
    _check_unique(groups, f"optimizer {index} ({kind})")
    whole = optimizer.state_dict()
    described: dict[str, Any] = {"class": kind, "groups": [{"parameters": group, "options": {}} for group in groups]}
    result = OptimizerState(described=described)
    if not _has_torch_form(whole, groups):
        described["opaque"] = whole
        result.irregular.append(f"{index}//")
        return result
    numbers: dict[Any, tuple[str, Tensor]] = {}
    for group, group_state, packed in zip(optimizer.param_groups, described["groups"], whole["param_groups"], strict=True):
        group_state["options"] = {key: value for key, value in packed.items() if key not in ("params", "param_names")}
        numbers.update(zip(packed["params"], zip(group_state["parameters"], group["params"], strict=True), strict=True))
    described["state"], described["entries"] = {}, {}
    described["more"] = {key: value for key, value in whole.items() if key not in ("state", "param_groups")}
    for number, slots in whole["state"].items():
        if number in numbers:
            name, parameter = numbers[number]
            stored = StoredSlots.of(slots, parameter)
            described["state"][name] = stored.described
            result.tensors.update({f"{index}/{name}/{slot}": tensor for slot, tensor in stored.tensors.items()})
            result.irregular += [f"{index}/{name}/{slot}" for slot in stored.irregular]
        else:
            described["entries"][number] = slots
    result.irregular += [f"{index}//{key}" for key in [*described["entries"], *described["more"]]]
    return result


def _check_unique(groups: list[list[str]], title: str) -> None:
    counts = Counter(chain.from_iterable(groups))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UnsavableError(f"{title} contains {', '.join(twice)} more than once. Fix: pass each parameter once.")


def plan_optimizer(
    optimizer: Optimizer,
    index: int,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    described: Mapping[str, Any],
    parameter_dtypes: Mapping[str, torch.dtype],
    what: str,
    *,
    keep: bool = False,
    strict: bool = True,
) -> Callable[[], list[str]]:
    """Compare a captured state with an optimizer. Returns a function that loads it, through `load_state_dict`.

    This allows comparing a whole checkpoint before anything is changed.

    A slot that had the dtype of its parameter gets the parameter's present dtype; other slots, scalars and `step` keep
    theirs. Tensors are moved to the parameter's device, `step` to the device that torch uses for it. Options of the groups
    are restored, except `foreach`, `fused` and `capturable`. A saved group that is missing here is added if its
    parameters belong to the modules and to no other group.

    Args:
        optimizer: An optimizer created like the saved one.
        index: Index of the optimizer in the run.
        names: `trainkit.state.model.parameter_names` of the run's modules.
        tensors: The tensors of all optimizers; they are copy_value, unless `keep`.
        described: The saved `OptimizerState.described`.
        parameter_dtypes: Name → dtype of the parameter in the checkpoint.
        what: What is loaded, for messages, such as `"the checkpoint step-00001200"`.
        keep: The optimizer keeps suitable `tensors` instead of copying them. They must not be used elsewhere any more.
        strict: Other parameters raise an error; False: new parameters start without state.

    Returns:
        A function that loads the state and returns what the user should know, one sentence each.

    Raises:
        StateMismatchError: Another class, other groups or shapes; the message lists all mismatches, and nothing was changed.
        CorruptCheckpointError: The description is malformed or contradicts the tensors.
    """
    saved = SavedOptimizer.read(described, tensors, index, what).with_names_of(set(names.values()))
    kind = _kind(optimizer)
    if saved.kind == kind and (problem := _find_malformed(_bare(optimizer), saved, f"optimizers[{index}]")) is not None:
        raise CorruptCheckpointError(
            f"{what}: the description of optimizer {index} is malformed: {problem}. Fix: use another checkpoint."
        )
    saved, notices = (saved, []) if strict else _match_parameters(optimizer, names, saved)
    complaints, added_groups = _compare_groups(optimizer, names, saved)
    if saved.kind != kind:
        complaints.insert(0, f"it belongs to {saved.kind}, but this run has {kind}")
    if not complaints:
        by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        by_name |= {name: p for group in added_groups for name, p in group.items()}
        complaints = list(_compare_slots(by_name, saved, parameter_dtypes))
    if complaints:
        fits = (
            strict
            and saved.kind == kind
            and not _compare_groups(optimizer, names, _match_parameters(optimizer, names, saved)[0])[0]
        )
        raise StateMismatchError(
            f"{what}: the state of optimizer {index} does not fit:\n  " + "\n  ".join(complaints) + "\nNothing was changed. "
            "Fix: build the same optimizer as when it was saved"
            + (", or load only the matching parameters with strict=False." if fits else ".")
        )
    load = _Load(_bare(optimizer), saved, added_groups, by_name, parameter_dtypes, keep)
    return lambda: notices + load.run(f"{what}: optimizer {index} ({kind})")


def _find_malformed(bare: Optimizer, saved: SavedOptimizer, path: str) -> str | None:
    """What `load_state_dict` of torch's optimizers would accept, although the next step fails or computes something else."""
    torchs = is_of_torch(bare)
    groups = bare.param_groups
    for number, (_, options) in enumerate(saved.groups):
        group = groups[min(number, len(groups) - 1)]
        present = {k: v for k, v in group.items() if k not in ("params", "param_names", *_EXECUTION)}
        place = f"{path}.groups[{number}].options"
        foreign = {"may_be_none": not torchs, "any_for_none": not torchs}
        if (problem := kind_mismatch(options, present, place, **foreign, same_length=torchs)) is not None:
            return problem
    for name, stored in saved.state.items() if torchs else ():
        place = f"{path}.state[{name!r:.80}]"
        if "whole" in stored.described:
            return f"{place}.whole: expected slots, got {stored.described['whole']!r:.80}"
        values = stored.described.get("values", {})
        for slot in _COUNTERS:
            if slot in values and not (isinstance(values[slot], Real) and values[slot] >= 0):
                return f"{place}.values.{slot}: expected a number ≥ 0, got {values[slot]!r:.80}"
    return None


def _bare(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _kind(optimizer: Optimizer) -> str:
    """The name of the class; the same for equivalent classes of torch and DeepSpeed."""
    bare = _bare(optimizer)
    name = type(bare).__name__
    decoupled = next((info.adam_classes[name] for info in strategy_infos() if name in info.adam_classes), None)
    if decoupled is None:
        return name
    return "AdamW" if getattr(bare, decoupled, True) else "Adam"


def _name(parameter: Tensor, names: Mapping[int, str], index: int, kind: str) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UnsavableError(
            f"optimizer {index} ({kind}) contains a parameter of shape {shape_of(parameter)} that belongs to no module of the "
            "run, so it has no name in the checkpoint. Fix: make it a parameter of the module: self.weight = "
            "nn.Parameter(...). If its layer was replaced, create the optimizer after that: "
            f"torch.optim.{kind}(model.parameters()); or copy into it: layer.load_state_dict(new.state_dict()). If it belongs "
            "to another model, prepare that too."
        )
    return name


def _has_torch_form(whole: Any, groups: list[list[str]]) -> bool:
    """Whether a `state_dict` has torch's form and the same groups as the optimizer."""
    if not isinstance(whole, Mapping) or not isinstance(whole.get("state"), Mapping):
        return False
    packed = whole.get("param_groups")
    if not isinstance(packed, list) or not all(isinstance(group, Mapping) and "params" in group for group in packed):
        return False
    return [len(group["params"]) for group in packed] == [len(group) for group in groups]


# --------------------------------------------------------------------------------------------------------- comparing


def _compare_groups(
    optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer
) -> tuple[list[str], list[dict[str, Tensor]]]:
    """The mismatches, and the parameters by name of each saved group that is to be added."""
    present = _group_names(optimizer, names)
    complaints: list[str] = []
    for number, (ours, (theirs, options)) in enumerate(zip(present, saved.groups, strict=False)):
        complaints += [
            f"group {number}: the checkpoint has the option {option}, which this optimizer does not have"
            for option in _find_lost_options(options, optimizer.param_groups[number])
        ]
        if theirs != ours:
            complaints.append(f"group {number}: {_difference(theirs, ours)}")
    for number, ours in list(enumerate(present))[len(saved.groups) :]:
        complaints.append(f"group {number} is not in the checkpoint: {', '.join(ours)}")
    added: list[dict[str, Tensor]] = []
    known: Mapping[str, Tensor] = getattr(names, "parameters", {})
    for number, (theirs, _) in list(enumerate(saved.groups))[len(present) :]:
        taken = set(chain(*present, *added))
        free = {name: known[name] for name in theirs if name in known and name not in taken}
        if len(free) == len(theirs):
            added.append(free)
            continue
        odd = [f"{name} ({'in another group' if name in taken else 'not in the model'})" for name in theirs if name not in free]
        complaints.append(f"group {number} is only in the checkpoint and cannot be added: {', '.join(odd)}")
    return complaints, added


def _find_lost_options(options: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    """Saved options that this group does not have, unless they have the default value."""
    lost = {key: value for key, value in options.items() if key in _UNSET and key not in group}
    return [f"{key}={value!r}" for key, value in lost.items() if value != _UNSET[key]]


def _difference(theirs: list[str], ours: list[str]) -> str:
    only_theirs = [name for name in theirs if name not in set(ours)]
    only_ours = [name for name in ours if name not in set(theirs)]
    changes = []
    if only_theirs:
        changes.append(f"only in the checkpoint: {', '.join(only_theirs)}")
    if only_ours:
        changes.append(f"only in this run: {', '.join(only_ours)}")
    return "; ".join(changes) or f"in a different order: {', '.join(theirs)} in the checkpoint, {', '.join(ours)} in this run"


def _compare_slots(parameters: Mapping[str, Tensor], saved: SavedOptimizer, dtypes: Mapping[str, torch.dtype]) -> Iterator[str]:
    for name, stored in saved.state.items():
        parameter = parameters[name]
        if is_lazy(parameter):
            continue
        for slot, shape in stored.shapes:
            if shape != parameter.shape:
                yield f"{name}: {slot} has shape {tuple(shape)}, but the parameter has shape {tuple(parameter.shape)}"
        for slot, tensor in stored.tensors.items():
            dtype = _choose_dtype(slot, tensor, parameter, dtypes.get(name))
            if not castable(tensor, dtype):
                yield f"{name}: {slot} is {tensor.dtype} in the checkpoint and cannot be cast to {dtype}"


def _choose_dtype(slot: str, tensor: Tensor, parameter: Tensor, before: torch.dtype | None) -> torch.dtype:
    """The dtype of the parameter for slots that had its dtype. Counters keep theirs: bfloat16 cannot represent 257."""
    alone = tensor.ndim == 0 and parameter.ndim > 0
    return parameter.dtype if tensor.dtype == before and slot != "step" and not alone else tensor.dtype


# ----------------------------------------------------------------------------------------------------------- loading


@dataclass
class _Load:
    """Loads a saved state into an optimizer.

    Attributes:
        optimizer: The optimizer, without a wrapper.
        saved: The state.
        added_groups: The parameters by name of each saved group that is to be added.
        parameters: All parameters by name.
        dtypes: Name of a parameter → its dtype in the checkpoint.
        keep: Keep suitable tensors instead of copying them.
    """

    optimizer: Optimizer
    saved: SavedOptimizer
    added_groups: list[dict[str, Tensor]]
    parameters: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    keep: bool
    _casts: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter, init=False)

    def run(self, title: str) -> list[str]:
        """Load it, or restore the optimizer. Returns what the user should know.

        Raises:
            StateMismatchError: The optimizer cannot load it.
        """
        groups, state = self.optimizer.param_groups, self.optimizer.state
        contents = [groups, *groups, state, *(slots for slots in state.values() if isinstance(slots, dict))]
        undo = snapshot(self.optimizer, contents, copy)  # loading replaces tensors and does not change them
        try:
            with torch.no_grad():
                notices = _add_groups(self.optimizer, self.saved, self.added_groups)
                if self.saved.opaque is not None:
                    self.optimizer.load_state_dict(copy_value(self.saved.opaque))
                    return notices
                kept_options = self._load_state()
        except Exception as error:
            undo()
            raise StateMismatchError(
                f"{title}: load_state_dict failed: {type(error).__name__}: {error}\nThe optimizer was restored."
            ) from error
        for (before, after), count in self._casts.items():
            tensors = quantity(count, "tensor of optimizer state was", "tensors of optimizer state were")
            notices.append(f"{tensors} cast from {before} to {after}".replace("torch.", ""))
        return notices + kept_options

    def _load_state(self) -> list[str]:
        saved, parameters = self.saved, self.parameters
        numbers = {name: n for n, name in enumerate(chain.from_iterable(names for names, _ in saved.groups))}
        state: dict[Any, Any] = {
            numbers[name]: slots.rebuild(name, self._convert, parameters[name].device) for name, slots in saved.state.items()
        }
        state.update(copy_value(saved.entries))
        groups, kept_options = _groups(self.optimizer, saved, numbers)
        self.optimizer.load_state_dict({**copy_value(saved.more), "state": state, "param_groups": groups})
        for name in saved.state:
            loaded, slots = self.optimizer.state.get(parameters[name]), state[numbers[name]]
            if isinstance(loaded, dict) and isinstance(slots, dict):
                for slot in slots.keys() & loaded.keys() - {"step"}:
                    loaded[slot] = _undo_torch_casts(loaded[slot], slots[slot])
        return kept_options

    def _convert(self, name: str, slot: str, tensor: Tensor) -> Tensor:
        """A saved tensor as the optimizer keeps it."""
        parameter = self.parameters[name]
        dtype = _choose_dtype(slot, tensor, parameter, self.dtypes.get(name))
        if dtype != tensor.dtype:
            self._casts[tensor.dtype, dtype] += 1
        if slot == "step":
            return tensor.to(dtype, copy=True)  # torch moves it if its options require that
        if tensor.shape != parameter.shape:
            return tensor.to(parameter.device, dtype, copy=True)
        # a placeholder parameter repeats one element, so it has strides of 0
        dense = tensor.is_contiguous() if 0 in parameter.stride() else tensor.stride() == parameter.stride()
        fits = (dense, tensor.dtype, tensor.device) == (True, dtype, parameter.device)
        if self.keep and fits and tensor.data_ptr() % _ALIGNMENT_BYTES == 0:
            return tensor
        # with the strides that torch would use
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(tensor)


def _add_groups(optimizer: Optimizer, saved: SavedOptimizer, added_groups: list[dict[str, Tensor]]) -> list[str]:
    notices = []
    for parameters in added_groups:
        number = len(optimizer.param_groups)
        options = {key: value for key, value in copy_value(saved.groups[number][1]).items() if key not in _EXECUTION}
        named = bool(optimizer.param_groups) and "param_names" in optimizer.param_groups[0]
        optimizer.add_param_group({**options, "params": list(parameters.items() if named else parameters.values())})
        notices.append(f"parameter group {number} was added to the optimizer, as in the saved run: {', '.join(parameters)}")
    return notices


def _groups(optimizer: Optimizer, saved: SavedOptimizer, numbers: Mapping[str, int]) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups for `load_state_dict`, and notices about options of this run that are kept."""
    groups, kept = [], []
    for number, (group, (names, options)) in enumerate(zip(optimizer.param_groups, saved.groups, strict=True)):
        taken = {key: v for key, v in copy_value(options).items() if key in group or key not in (*_UNSET, *_ELSEWHERE)}
        for key, value in taken.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                taken[key] = value.to(group[key].device)
        for key in _EXECUTION:
            if key in group:
                if key in taken and taken[key] != group[key]:
                    kept.append(f"group {number} of the optimizer keeps {key}={group[key]!r} (saved: {taken[key]!r})")
                taken[key] = group[key]
        groups.append({**group, **taken, "params": [numbers[name] for name in names]})
    return groups, kept


def _undo_torch_casts(loaded: Any, saved: Any) -> Any:
    """Undo the changes that torch's `load_state_dict` makes to a value.

    It casts all tensors to the parameter's dtype, and treats a string as a list of characters.
    """
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.dtype == loaded.dtype or saved.shape != loaded.shape:
            return loaded
        return saved.to(loaded.device)
    if isinstance(saved, str):
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _undo_torch_casts(value, saved.get(key)) for key, value in loaded.items()}
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(_undo_torch_casts(h, w) for h, w in zip(loaded, saved, strict=True))
    return loaded


_Need = Callable[[bool, str], None]
"""`need(condition, problem)` raises `CorruptCheckpointError` if the condition is false."""


@dataclass
class StoredSlots:
    """The slots that an optimizer keeps for one parameter.

    Attributes:
        tensors: Slot → tensor; item n of a list has the slot `<slot>.<n>`, and an inner tensor of a quantized one
            `<slot>.<name>`.
        irregular: Slots of tensors that are neither scalar nor of the parameter's shape, of items of lists, and of inner
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
        fields = {"values": values, "lists": lists, "quantized": quantized, "irregular": self.irregular}
        self.described = {key: part for key, part in fields.items() if part}
        return self

    def _add_tensor(self, slot: str, tensor: Tensor, parameter: Tensor) -> dict[str, Any] | None:
        """Store a tensor, or the inner tensors of a quantized one; returns the description of a quantized one."""
        apart = _split_quantized(tensor)
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
        tensors = {f"{slot}.{n}": item for n, item in enumerate(items) if isinstance(item, Tensor)}
        rest = {str(n): item for n, item in enumerate(items) if not isinstance(item, Tensor)}
        self._add_irregular(tensors)
        return {"tuple": isinstance(items, tuple), "length": len(items), "values": rest}

    def _add_irregular(self, tensors: dict[str, Tensor]) -> None:
        self.tensors.update({slot: tensor.detach() for slot, tensor in tensors.items()})
        self.irregular += tensors

    @property
    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """The slots that must have the shape of the parameter, each with its shape."""
        for slot, tensor in self.tensors.items():
            if tensor.ndim and slot not in self.irregular:
                yield slot, tensor.shape
        for slot, about in self.described.get("quantized", {}).items():
            yield slot, torch.Size(about["shape"])

    def rebuild(self, name: str, convert: Callable[[str, str, Tensor], Tensor], device: torch.device) -> Any:
        """The inverse of `of`; each tensor is the result of `convert(name, slot, tensor)`, quantized ones are on the device."""
        if "whole" in self.described:
            return copy_value(self.described["whole"])
        lists = self.described.get("lists", {})
        quantized = self.described.get("quantized", {})
        inner_slots = {f"{slot}.{n}" for slot, about in lists.items() for n in range(about["length"])}
        inner_slots |= {f"{slot}.{part}" for slot, about in quantized.items() for part in QUANTIZED_CLASSES[about["class"]][1]}
        slots: dict[Any, Any] = {
            slot: convert(name, slot, tensor) for slot, tensor in self.tensors.items() if slot not in inner_slots
        }
        for slot, about in lists.items():
            items = [
                copy_value(about["values"][str(n)])
                if str(n) in about["values"]
                else convert(name, slot, self.tensors[f"{slot}.{n}"])
                for n in range(about["length"])
            ]
            slots[slot] = tuple(items) if about["tuple"] else items
        for slot, about in quantized.items():
            inner = {
                part: self.tensors[f"{slot}.{part}"].to(device, copy=True) for part in QUANTIZED_CLASSES[about["class"]][1]
            }
            slots[slot] = _join_quantized(about, inner)
        return {**slots, **copy_value(self.described.get("values", {}))}


@dataclass
class SavedOptimizer:
    """The checked content of `trainkit.state.optimizer.OptimizerState.described`, with the tensors.

    Attributes:
        kind: The class.
        groups: For each group the names of the parameters, and the options.
        state: Name of the parameter → its slots.
        entries: State of the whole optimizer.
        more: Entries of the `state_dict` other than state and groups.
        opaque: A whole `state_dict` that does not have torch's form.
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
        fields = {key: described.get(key, {}) for key in ("state", "entries", "more")}
        self = cls(described["class"], _read_groups(described["groups"], need), opaque=described.get("opaque"))
        need(not any(isinstance(key, int) for key in fields["entries"]), "an entry has an integer key, like a parameter")
        self.entries = fields["entries"]
        self.more = fields["more"]
        names = {name for group, _ in self.groups for name in group}
        for raw, about in fields["state"].items():
            name = without_checkpoint_wrapper(raw)
            need(name in names, f"state for {name!r}, which is in no group")
            known = all(item["class"] in QUANTIZED_CLASSES for item in about.get("quantized", {}).values())
            need(known, f"an unknown class of quantized slots for {name!r}")
            self.state[name] = StoredSlots(irregular=about.get("irregular", []), described=about)
        self._add_tensors(tensors, index, need)
        return self

    def with_names_of(self, names: Container[str]) -> SavedOptimizer:
        """With the names of this model for parameters that were pruned when they were saved by an earlier version."""
        groups = [([_present_name(name, names) for name in group], options) for group, options in self.groups]
        return replace(self, groups=groups, state={_present_name(name, names): stored for name, stored in self.state.items()})

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
                complete = all(f"{slot}.{part}" in stored.tensors for part in QUANTIZED_CLASSES[about["class"]][1])
                need(complete, f"the quantized tensor {slot!r} of {name!r} is incomplete")


def _read_groups(listed: list[Any], need: _Need) -> list[tuple[list[str], dict[str, Any]]]:
    """The parameter names and the options of each group."""
    groups: list[tuple[list[str], dict[str, Any]]] = []
    names: set[str] = set()
    for group in listed:
        need("params" not in group["options"], "an option is named 'params'")
        parameters = [without_checkpoint_wrapper(name) for name in group["parameters"]]
        need(names.isdisjoint(parameters) and len(set(parameters)) == len(parameters), "a parameter occurs more than once")
        names.update(parameters)
        groups.append((parameters, group["options"]))
    return groups


def _present_name(name: str, names: Container[str]) -> str:
    """The name in this model of a parameter that may have been pruned when it was saved, see `SavedOptimizer.with_names_of`."""
    plain = name.removesuffix("_orig")
    return plain if name not in names and plain in names else name


def _is_complete(slot: str, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether every position of a list has a tensor or a value. The length is not trusted."""
    if about["length"] > len(tensors) + len(about["values"]):
        return False
    return all((f"{slot}.{n}" in tensors) != (str(n) in about["values"]) for n in range(about["length"]))


def _group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of the parameters, by group."""
    return [
        [names.get(id(p), "a parameter that belongs to no module") for p in group["params"]] for group in optimizer.param_groups
    ]


def _match_parameters(
    optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer
) -> tuple[SavedOptimizer, list[str]]:
    """The saved state, changed to fit the parameters of this optimizer, and notices for the user.

    A group gets the options of the saved group that has most of its parameters. Parameters that were not saved have no state.
    The state of parameters that this optimizer does not have is dropped. State in another form than that of torch's optimizers
    is returned unchanged.
    """
    present = _group_names(optimizer, names)
    theirs = [names_of_group for names_of_group, _ in saved.groups]
    if saved.opaque is not None or present == theirs:
        return saved, []
    matches = _match_groups(present, theirs)
    groups: list[tuple[list[str], dict[str, Any]]] = [
        (group, {} if match is None else saved.groups[match][1]) for group, match in zip(present, matches, strict=True)
    ]
    taken = set(chain.from_iterable(present))
    groups += [saved.groups[number] for number in _find_added_groups(theirs, matches, taken, getattr(names, "parameters", {}))]
    kept = dict.fromkeys(chain.from_iterable(group for group, _ in groups))
    state = {name: slots for name, slots in saved.state.items() if name in kept}
    return replace(saved, groups=groups, state=state), _notices(kept, dict.fromkeys(chain.from_iterable(theirs)))


def _notices(kept: Collection[str], saved: Collection[str]) -> list[str]:
    """What the user should know of parameters that only the optimizer or only the checkpoint has."""
    notices = []
    if fresh := [name for name in kept if name not in saved]:
        notices.append(f"the optimizer starts without state for these parameters: {', '.join(fresh)}")
    if gone := [name for name in saved if name not in kept]:
        notices.append(f"optimizer state was not loaded for parameters that this optimizer does not have: {', '.join(gone)}")
    return notices


def same_groups(optimizer: Optimizer, names: Mapping[int, str], described: Any) -> bool:
    """Whether each group has the parameters of the saved group with the same index, so that a saved schedule fits."""
    if not isinstance(described, dict) or not isinstance(described.get("groups"), list):
        return True  # plan_optimizer raises an error for it
    known = set(names.values())
    theirs = [[_present_name(name, known) for name in group["parameters"]] for group in described["groups"]]
    present = _group_names(optimizer, names)
    matches = _match_groups(present, theirs)
    taken = set(chain.from_iterable(present))
    matches += _find_added_groups(theirs, matches, taken, getattr(names, "parameters", {}))
    return matches == list(range(len(theirs)))


def _match_groups(present: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> list[int | None]:
    """For each group the index of the saved group that has most of its parameters.

    A group without saved parameters gets the saved group of the same index, if that is not assigned.
    """
    matches: list[int | None] = []
    for group in present:
        common = [len(set(group) & set(saved)) for saved in theirs]
        most = max(common, default=0)
        matches.append(common.index(most) if most else None)
    for number, match in enumerate(matches):
        if match is None and number < len(theirs) and number not in matches:
            matches[number] = number
    return matches


def _find_added_groups(
    theirs: Sequence[Sequence[str]], matches: Sequence[int | None], taken: set[str], known: Mapping[str, Tensor]
) -> list[int]:
    """The saved groups that were added during training: their parameters belong to the modules, and to no group here."""
    return [
        number
        for number, group in enumerate(theirs)
        if number not in matches and all(name in known and name not in taken for name in group)
    ]


QUANTIZED_CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "OptimState4bit": ("torchao.optim.subclass_4bit:OptimState4bit", ("codes", "scale", "qmap")),
    "OptimState8bit": ("torchao.optim.subclass_8bit:OptimState8bit", ("codes", "scale", "qmap")),
    "OptimStateFp8": ("torchao.optim.subclass_fp8:OptimStateFp8", ("codes", "scale")),
}
"""Class → its path, and its inner tensors. A checkpoint names one of these, and never a path."""


def _split_quantized(tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The inner tensors of a quantized tensor by name, and its description; `None` if it is none of `QUANTIZED_CLASSES`."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor).__name__ not in QUANTIZED_CLASSES:
        return None
    names, attributes = flatten()
    plain = [tuple(value) if isinstance(value, torch.Size) else value for value in attributes]
    about = {"class": type(tensor).__name__, "attributes": plain, "shape": tuple(tensor.shape)}
    return {name: getattr(tensor, name) for name in names}, about


def _join_quantized(about: dict[str, Any], inner: dict[str, Tensor]) -> Tensor:
    """The inverse of `_split_quantized`.

    Raises:
        MissingPackageError: Torchao is not installed.
    """
    try:
        kind = load(QUANTIZED_CLASSES[about["class"]][0])
    except ImportError as error:
        raise missing_package("torchao", "fp8", f"the state of this optimizer ({about['class']})") from error
    attributes = [torch.Size(value) if isinstance(value, tuple) else value for value in about["attributes"]]
    made: Tensor = kind.__tensor_unflatten__(inner, attributes)
    return made
