"""Checks whether stored tensors fit those of a module, without changing anything."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainkit.checkpoint.tensor_file import memory_key
from trainkit.console import counted
from trainkit.tagged_json.tensors import is_sharded_tensor

__all__ = ["Fit", "castable", "same_bits"]


class _Stored(Protocol):
    aliases: dict[str, str]
    trained: dict[str, bool]


class Fit:
    """Compares stored tensors with those of a module, name by name, and collects the mismatches.

    Args:
        sources: the stored tensors by clean name; tied ones under each name.
        stored: the tied names and the parameters in the checkpoint.
        frozen: names that need not be stored.
        strict: whether missing and unexpected names are an error.

    Attributes:
        missing, unexpected, other: the mismatches.
        whole: what to load, by name in the module's state dict.
        narrow: pairs (target, source) to copy separately: expanded tensors, each element once.
    """

    def __init__(self, sources: Mapping[str, Tensor], stored: _Stored, frozen: set[str], strict: bool) -> None:
        self._sources, self._stored, self._frozen, self._strict = sources, stored, frozen, strict
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.other: list[str] = []
        self.whole: dict[str, Tensor] = {}
        self.narrow: list[tuple[Tensor, Tensor]] = []
        self._pending: list[tuple[str, Tensor]] = []
        self._pairs: list[tuple[str, Tensor, Tensor]] = []  # name, target, source
        self._first: dict[Any, str] = {}  # place of a target → the first name with a source
        self._notices: list[str] = []

    def add(self, raw_name: str, name: str, target: Tensor) -> None:
        """Compare one tensor of the module's state dict with the stored one; `name` is its clean name."""
        if is_lazy(target):
            if name in self._sources:
                self.whole[raw_name] = self._sources[name]
            elif isinstance(target, torch.nn.Parameter) and name not in self._stored.trained:
                self.missing.append(name)  # otherwise it had no shape either when it was saved
            return
        source = self._sources.get(name)
        if source is None:
            self._pending.append((name, target))  # until it is known whether it is tied to one that is stored
            return
        self._first.setdefault(memory_key(target), name)
        if not self._fits(name, target, source):
            return
        self._pairs.append((name, target, source))
        dense = _narrowed(target)
        if dense is target:
            self.whole[raw_name] = source
        else:
            self.narrow.append((dense, source.as_strided(dense.shape, source.stride())))

    def check_shared_memory(self) -> None:
        """After the last tensor: check that names that share memory in the module have the same values in the checkpoint."""
        for name, target in self._pending:
            first = self._first.get(memory_key(target))
            if first is None and name not in self._frozen:
                self.missing.append(name)
            elif first is not None:
                self._notices.append(f"{name} is tied to {first} in this model and gets its value")
        self._note_untied()
        if self.other:
            return
        for group in _overlapping(self._pairs):
            self._check_group(group)

    def complaints(self) -> list[str]:
        """One line for each mismatch; empty if the state can be loaded."""
        lines = []
        if self._strict and self.missing:
            lines.append(f"missing in the checkpoint ({len(self.missing)}): " + ", ".join(self.missing))
        if self._strict and self.unexpected:
            lines.append(f"unexpected in the checkpoint ({len(self.unexpected)}): " + ", ".join(self.unexpected))
        return lines + self.other

    def only_names(self) -> bool:
        """Whether missing and unexpected names are the only mismatches."""
        return not self.other

    def notices(self) -> list[str]:
        """What the user should know after the state is loaded."""
        notices = list(self._notices)
        casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        overflowed = []
        for name, target, source in self._pairs:
            if source.dtype != target.dtype:
                casts[source.dtype, target.dtype] += 1
                if target.is_floating_point() and not target.is_meta and not _all_finite(target) and _all_finite(source):
                    overflowed.append(name)
        for (before, after), count in casts.items():
            notices.append(f"{counted(count, 'tensor was', 'tensors were')} cast from {_dtype(before)} to {_dtype(after)}")
        if overflowed:
            notices.append(f"values outside the range of the model's dtype became infinite or NaN in: {', '.join(overflowed)}")
        if self.missing:
            notices.append(f"not in the checkpoint, so left unchanged: {', '.join(self.missing)}")
        if self.unexpected:
            notices.append(f"not in the model, so not loaded: {', '.join(self.unexpected)}")
        return notices

    def _fits(self, name: str, target: Tensor, source: Tensor) -> bool:
        before = len(self.other)
        if target.shape != source.shape:
            self.other.append(f"{name}: shape {tuple(source.shape)} in the checkpoint, {tuple(target.shape)} in the model")
        elif target.is_meta and not is_sharded_tensor(target):
            self.other.append(f"{name} is on the meta device and has no memory; call module.to_empty(device=...) first")
        elif target.is_inference():
            self.other.append(
                f"{name} was created under torch.inference_mode() and cannot be changed; create the model outside it"
            )
        elif not castable(source, target.dtype):
            self.other.append(f"{name}: {_dtype(source.dtype)} in the checkpoint cannot be cast to {_dtype(target.dtype)}")
        elif not _consistent(target, source):
            self.other.append(f"{name} is expanded in the model, but the checkpoint has different values for one element")
        return len(self.other) == before

    def _note_untied(self) -> None:
        places = {name: memory_key(target) for name, target, _ in self._pairs}
        for alias, stored in self._stored.aliases.items():
            if alias in places and stored in places and places[alias] != places[stored]:
                self._notices.append(
                    f"{alias} was tied to {stored} when saved, but is not tied in this model: both got the same values"
                )

    def _check_group(self, group: list[tuple[str, Tensor, Tensor]]) -> None:
        """Load tensors that share memory into a copy of that memory, and check whether each has its value afterwards."""
        if len({id(source) for _, _, source in group}) == 1 and len({memory_key(target) for _, target, _ in group}) == 1:
            return  # tied in the model and in the checkpoint
        memory = group[0][1].untyped_storage().clone()
        with torch.no_grad():
            trial = [
                torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, t.storage_offset(), t.shape, t.stride())
                for t in (_narrowed(target) for _, target, _ in group)
            ]
            wanted = [source.as_strided(t.shape, source.stride()) for t, (_, _, source) in zip(trial, group, strict=True)]
            for target, source in zip(trial, wanted, strict=True):
                target.copy_(source)
            agree = all(same_bits(t, s.to(t.device, t.dtype)) for t, s in zip(trial, wanted, strict=True))
        names = ", ".join(name for name, _, _ in group)
        if agree:
            self._notices.append(f"{names} share memory in this model, but did not when saved; their values are equal")
        else:
            self.other.append(f"{names} share memory in the model, but the checkpoint has different values for them")


def castable(source: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` keeps the meaning: no lost fractions or imaginary parts, no integer overflow."""
    if source.dtype == dtype:
        return True
    if not torch.can_cast(source.dtype, dtype):
        return False
    if source.dtype.is_floating_point or source.dtype.is_complex or not source.numel():
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return same_bits(source.to(dtype).to(source.dtype), source)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on one device have the same dtype, shape and bytes; a NaN is equal to itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _narrowed(tensor: Tensor) -> Tensor:
    """The tensor without the repetitions of expanded dimensions; the tensor itself if there are none."""
    shape, strides = list(tensor.shape), tensor.stride()
    narrow = [1 if step == 0 and size > 1 else size for size, step in zip(shape, strides, strict=True)]
    return tensor if narrow == shape else tensor.as_strided(narrow, strides)


def _consistent(target: Tensor, source: Tensor) -> bool:
    dense = _narrowed(target)
    if dense is target:
        return True
    return same_bits(source, source.as_strided(dense.shape, source.stride()).expand(source.shape))


def _overlapping(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> list[list[tuple[str, Tensor, Tensor]]]:
    """Groups of two or more tensors with overlapping ranges of memory."""
    ranges: dict[tuple[torch.device, Any], list[tuple[int, int, tuple[str, Tensor, Tensor]]]] = defaultdict(list)
    for pair in pairs:
        target = pair[1]
        try:
            storage, start = target.untyped_storage()._cdata, int(target.storage_offset()) * target.element_size()
        except (NotImplementedError, RuntimeError):
            continue
        last = sum(int(size - 1) * int(step) for size, step in zip(target.shape, target.stride(), strict=True))
        ranges[target.device, storage].append((start, start + (last + 1) * target.element_size(), pair))
    groups: list[list[tuple[str, Tensor, Tensor]]] = []
    for found in ranges.values():
        end = -1
        for start, stop, pair in sorted((item for item in found if item[0] < item[1]), key=lambda item: item[:2]):
            if start < end:
                groups[-1].append(pair)
            else:
                groups.append([pair])
            end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def _all_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(wide).all())


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
