"""Compares saved values with those that they replace, copies them, and restores what a failed load has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainkit.console import quantity

__all__ = ["castable", "copy_value", "is_of_torch", "kind_mismatch", "same_bits", "snapshot"]


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


def copy_value(value: Any) -> Any:
    """Copy containers and tensors; everything else is shared.

    `copy.deepcopy` would copy the whole buffer of a file for each tensor that is a view into it.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        result = value.copy()  # The copy has the same class.
        for key, item in value.items():
            result[key] = copy_value(item)
        return result
    if type(value) in (list, tuple, set):
        return type(value)(copy_value(item) for item in value)
    return value


def is_of_torch(thing: Any) -> bool:
    """Whether the class of an object is one of torch's, whose state has values of known kinds."""
    return type(thing).__module__.partition(".")[0] == "torch"


def kind_mismatch(
    saved: Any, present: Any, path: str, *, may_be_none: bool = False, any_for_none: bool = False, same_length: bool = False
) -> str | None:
    """A saved value of another kind than the one that this program has in its place, as `path: …`; `None` if there is none.

    Only the kinds are compared: numbers, true and false, strings, lists, dicts. Values that only one of the two has are not.

    Args:
        saved: The value in the checkpoint.
        present: The value that it replaces.
        path: Its key, for the message.
        may_be_none: A value may be `None` in the checkpoint.
        any_for_none: If the present value is `None`, the saved one may also be a container.
        same_length: Lists must have the same length.
    """
    if (saved is None and (may_be_none or present is None)) or (present is None and (any_for_none or _is_leaf(saved))):
        return None
    if not _same_kind(saved, present):
        return f"{path}: expected {_kind_of(present)}, got {saved!r:.80}"
    if same_length and isinstance(present, list | tuple) and len(saved) != len(present):
        return f"{path}: expected {quantity(len(present), 'item')}, got {saved!r:.80}"
    options = {"may_be_none": may_be_none, "any_for_none": any_for_none, "same_length": same_length}
    inside = (kind_mismatch(one, other, f"{path}[{key!r:.80}]", **options) for key, one, other in _in_both(saved, present))
    return next(filter(None, inside), None)


def _in_both(saved: Any, present: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The items of two containers with the same key or index."""
    if isinstance(present, dict):
        yield from ((key, saved[key], present[key]) for key in saved if key in present)
    elif isinstance(present, list | tuple):
        yield from ((number, one, other) for number, (one, other) in enumerate(zip(saved, present, strict=False)))


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple | set)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def _same_kind(saved: Any, present: Any) -> bool:
    if isinstance(present, bool):
        return isinstance(saved, bool) or (_is_number(saved) and saved in (0, 1))  # Some users pass 1 for True.
    if _is_number(present):
        return _is_number(saved)
    for kind in (str, dict, list | tuple):
        if isinstance(present, kind):
            return isinstance(saved, kind)
    return present is not None


def _kind_of(value: Any) -> str:
    kinds = {bool: "true or false", str: "a string", dict: "a dict", list: "a list", tuple: "a list", type(None): "null"}
    return next((text for kind, text in kinds.items() if isinstance(value, kind)), "a number")


def snapshot(thing: Any, contents: Iterable[Any], copied: Callable[[Any], Any]) -> Callable[[], None]:
    """A function that restores an object after a load has failed.

    Args:
        thing: The object, whose attributes are restored.
        contents: Lists and dicts whose items are restored; they stay the same objects.
        copied: Makes a copy of one of these.
    """
    attributes, before = dict(vars(thing)), [(container, copied(container)) for container in contents]

    def undo() -> None:
        vars(thing).clear()
        vars(thing).update(attributes)
        for container, items in before:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)

    return undo
