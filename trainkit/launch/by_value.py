"""A function with all that it needs as bytes, for fresh processes of this same user and program; and what comes back of it.

What is defined in a cell, in a function or in a script travels as it is (cloudpickle); what is in a module, by its name. This
is the one place of trainkit that pickles. It is for what goes through a connection to processes that this one has started,
never for what is in a file.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
from torch import Tensor

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError

__all__ = ["pack_call", "pack_result", "unpack"]

_DEEP = 8  # parts of parts that are looked at for the one that cannot be packed

# A tensor elsewhere would take memory of that device, the same one, in all the processes that it goes to.
_AS_IT_IS = ("cpu", "meta")

_FIX = "Make it inside of the function, or give what it is made of."
_OURS = "It is one of the processes already, and the function is run by others: make the Accelerator or Trainer inside of it."


class _BoundError(Exception):
    """Something that belongs to the processes of a run."""


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        """What has met the processes of a run would pass for that elsewhere, and each process would train by itself."""
        kind: Any = type(obj)
        if issubclass(kind, World) or (_is_strategy(kind) and obj.joined):
            raise _BoundError(_OURS)
        if kind is Tensor and obj.device.type not in _AS_IT_IS:
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
        return super().reducer_override(obj)


@functools.cache
def _is_strategy(kind: Any) -> bool:
    return any(base.__module__ == "trainkit.strategy" for base in kind.__mro__)


def pack_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments; :func:`unpack` gives them back, as a tuple of the two, with tensors on the CPU.

    Raises:
        ConfigurationError: something in them cannot be packed; names it.
    """
    try:
        return _packed((function, args))
    except Exception as error:
        parts = [_Part(_named(function), function), *(_Part(f"argument {place}", arg) for place, arg in enumerate(args))]
        found = next(filter(None, map(_culprit, parts)), None)
        part, why = found or (_Part(f"{_named(function)} and its arguments", (function, args)), error)
        bound = isinstance(why, _BoundError)
        raise ConfigurationError(
            f"notebook_launcher: {part} cannot be sent to other processes{'' if bound else f': {_text(why)}'}. "
            f"{_OURS if bound else _FIX}"
        ) from error


def pack_result(result: Any) -> bytes:
    """What a function has returned; tensors come on the CPU.

    Raises:
        ConfigurationError: it cannot be packed.
    """
    try:
        return _packed(result)
    except Exception as error:
        part, why = _culprit(_Part("the result", result)) or (_Part("the result", result), error)
        bound = "it belongs to the processes of the run (of a prepared model, return accelerator.unwrap_model(model))"
        reason = bound if isinstance(why, _BoundError) else _text(why)
        raise ConfigurationError(
            f"notebook_launcher: the function has returned, but {part} cannot be sent back: {reason}. Return what can be "
            "pickled, such as numbers, tensors and a state_dict, or save it to a file."
        ) from error


def unpack(data: bytes) -> Any:
    """What was packed, by a process of the same program."""
    return cloudpickle.loads(data)


def _packed(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


@dataclass(frozen=True)
class _Part:
    """Something with its name, for messages; ``user`` is the function that uses it."""

    name: str
    value: Any
    user: str = ""

    def __str__(self) -> str:
        return f"{self.name} (of type {type(self.value).__name__}{f', used by {self.user}' if self.user else ''})"

    @property
    def is_object(self) -> bool:
        """Whether its parts are its attributes."""
        gathered = isinstance(self.value, functools.partial | Mapping | list | tuple | set | frozenset)
        return not gathered and not inspect.isroutine(self.value)

    def parts(self) -> Iterator[_Part]:
        """What it is made of."""
        name, value, user = self.name, self.value, self.user
        if isinstance(value, functools.partial):
            yield from _Part(name, [value.func, *value.args, *value.keywords.values()], user).parts()
        elif inspect.ismethod(value):
            yield _Part(f"the object of {name}", value.__self__, user)
        elif inspect.isfunction(value):
            yield from (_Part(key, part, _named(value)) for key, part in _used(value).items())
        elif isinstance(value, Mapping):
            yield from (_Part(f"{name}[{key!r}]", part, user) for key, part in value.items())
        elif isinstance(value, list | tuple | set | frozenset):
            yield from (_Part(f"{name}[{place}]", part, user) for place, part in enumerate(value))
        elif self.is_object and hasattr(value, "__dict__") and not inspect.isclass(value) and not inspect.ismodule(value):
            yield from (_Part(f"{name}.{key}", part, user) for key, part in vars(value).items())


def _culprit(part: _Part, depth: int = 0) -> tuple[_Part, Exception] | None:
    """The innermost part that cannot be packed, and why; ``None``: it can be."""
    try:
        _packed(part.value)
    except Exception as error:
        whole = (
            isinstance(error, _BoundError) and part.is_object
        )  # an Accelerator is what the user knows, and not what is in it
        inner = () if whole or depth >= _DEEP else part.parts()
        return next(filter(None, (_culprit(one, depth + 1) for one in inner)), (part, error))
    return None


def _used(function: FunctionType) -> dict[str, Any]:
    """The variables that a function, and the functions in it, use from outside, with its defaults."""
    found: dict[str, Any] = dict(inspect.getclosurevars(function).nonlocals)
    codes = [function.__code__]
    for code in codes:
        found |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    parameters = inspect.signature(function).parameters.values()
    return found | {one.name: one.default for one in parameters if one.default is not one.empty}


def _named(function: Callable[..., Any]) -> str:
    return f"the function {getattr(function, '__name__', type(function).__name__)}"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
