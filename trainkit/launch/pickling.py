"""Pickle a function and its arguments for the processes that `notebook_launcher` starts, and its result on the way back.

cloudpickle sends what is defined in a cell or a script by value, and what is in a module by name. This is the only module of
trainkit that unpickles: only bytes that its own processes exchange during one call, never a file of the user.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

import cloudpickle  # noqa: TID251
from torch import Tensor

from trainkit.distributed.failure import summary
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError

__all__ = ["dump_call", "dump_result", "load"]

_MAX_DEPTH = 8  # how deep to search an object for the part that cannot be pickled
_NOT_SENT = (
    "{part} cannot be sent to other processes: {reason}. Create it inside the function, or pass the values that it is built "
    "from."
)
_NOT_RETURNED = (
    "the function has returned, but {part} cannot be sent back: {reason}. Return numbers, tensors, a state_dict or "
    "accelerator.unwrap_model(model), or save the result to a file."
)


class _BoundError(Exception):
    """An object that belongs to a running process group."""


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        """Refuse objects of a process group. Move tensors to the CPU: otherwise every process would use the same device."""
        kind: Any = type(obj)
        is_strategy = any(base.__module__ == "trainkit.strategy" for base in kind.__mro__)
        if issubclass(kind, World) or (is_strategy and obj.joined):
            raise _BoundError
        if kind is Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def dump_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments; `load` returns them as a tuple, with tensors on the CPU.

    Raises:
        ConfigurationError: a part cannot be pickled; the message names it.
    """
    parts = {_name(function): function, **{f"argument {index}": value for index, value in enumerate(args)}}
    return _dump_or_explain((function, args), parts, _NOT_SENT)


def dump_result(result: Any) -> bytes:
    """Like `dump_call`, for what the function returned."""
    return _dump_or_explain(result, {"the result": result}, _NOT_RETURNED)


def load(data: bytes) -> Any:
    """Unpickle what a process of the same launch has pickled."""
    return cloudpickle.loads(data)


def _dump(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _dump_or_explain(value: Any, parts: Mapping[str, Any], message: str) -> bytes:
    try:
        return _dump(value)
    except Exception as error:
        part, why = _first_unpicklable(parts) or (next(iter(parts)), error)
        reason = "it belongs to this process" if isinstance(why, _BoundError) else summary(why).rstrip(".")
        raise ConfigurationError(f"notebook_launcher: {message.format(part=part, reason=reason)}") from error


def _first_unpicklable(parts: Mapping[str, Any], depth: int = 0) -> tuple[str, Exception] | None:
    """Name and type of the innermost part that cannot be pickled, and the error."""
    for name, value in parts.items():
        try:
            _dump(value)
        except Exception as error:
            known = isinstance(error, _BoundError) and hasattr(value, "__dict__") and not inspect.isroutine(value)
            inner = {} if known or depth >= _MAX_DEPTH else _parts(name, value)  # users know an Accelerator, not its parts
            return _first_unpicklable(inner, depth + 1) or (f"{name} (of type {type(value).__name__})", error)
    return None


def _parts(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, functools.partial):
        value = [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return {f"the object of {name}": value.__self__}
    if inspect.isfunction(value):
        return {f"{key}, used by {_name(value)}": part for key, part in _outer_variables(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return {f"{name}[{index}]": part for index, part in enumerate(value)}
    if inspect.isclass(value) or inspect.ismodule(value):
        return {}
    return {f"{name}.{key}": part for key, part in getattr(value, "__dict__", {}).items()}


def _outer_variables(function: FunctionType) -> dict[str, Any]:
    """Variables that a function and the functions inside it use from outside, and its defaults."""
    found: dict[str, Any] = dict(inspect.getclosurevars(function).nonlocals)
    codes = [function.__code__]
    for code in codes:
        found |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    parameters = inspect.signature(function).parameters.values()
    return found | {one.name: one.default for one in parameters if one.default is not one.empty}


def _name(function: Callable[..., Any]) -> str:
    return f"the function {getattr(function, '__name__', type(function).__name__)}"
