"""What `state.json` may hold: the one schema of it, for everything that reads or writes a checkpoint.

What belongs to the user (hyper-parameters, states of callbacks, options of optimizers) may be anything that can be stored. Keys
that are not listed are ignored, since a later version may add them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["PHASES", "SCOPES", "optimizer_problem", "scheduler_problem", "state_problem"]

PHASES = ("step", "updated", "validating", "epoch_end")
"""The values of `trainkit.trainer.progress.Phase`."""
SCOPES = ("nowhere", "train batch", "train epoch", "evaluation batch", "evaluation epoch")
"""The values of `trainkit.metrics.record.Scope`."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class _OddError(Exception):
    """A value that the schema does not allow: the path to it, and what is wrong."""


_Check = Callable[[Any, str], None]
"""`check(value, path)` raises `_OddError` if the value is not allowed."""


def state_problem(state: Any) -> str | None:
    """What is wrong with the content of `state.json`, beginning with the key; `None` if nothing is."""
    return _problem(_state, state, "")


def optimizer_problem(described: Any, path: str) -> str | None:
    """The same for the description of one optimizer, whose place is `path`."""
    return _problem(_OPTIMIZER, described, path)


def scheduler_problem(described: Any, path: str) -> str | None:
    """The same for the state of one scheduler."""
    return _problem(_scheduler, described, path)


def _problem(check: _Check, value: Any, path: str) -> str | None:
    try:
        check(value, path)
    except _OddError as odd:
        return str(odd)
    return None


def _refuse(path: str, expected: str, value: Any) -> _OddError:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return _OddError(f"{path or 'the whole file'}: expected {expected}, got {short.repr(value)}")


def _below(path: str, key: Any) -> str:
    """The path of an item: `loop.position`, `optimizers[0]`, `callbacks['Timer']`."""
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r:.100}]"


# ------------------------------------------------------------------------------------------------------------ the parts


def _only(is_right: Callable[[Any], bool], expected: str) -> _Check:
    def check(value: Any, path: str) -> None:
        if not is_right(value):
            raise _refuse(path, expected, value)

    return check


def _anything(value: Any, path: str) -> None:
    """A value of the user's."""


def _maybe(inner: _Check) -> _Check:
    def check(value: Any, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def _items(inner: _Check) -> _Check:
    def check(value: Any, path: str) -> None:
        if type(value) is not list:
            raise _refuse(path, "a list", value)
        for number, item in enumerate(value):
            inner(item, f"{path}[{number}]")

    return check


def _pair(first: _Check, second: _Check) -> _Check:
    """A list of two items."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise _refuse(path, "a list of two items", value)
        first(value[0], f"{path}[0]")
        second(value[1], f"{path}[1]")

    return check


def _by_name(inner: _Check, names: type = str) -> _Check:
    """A dict whose keys are strings, or anything that `names` allows."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _refuse(path, "a dict", value)
        for name, item in value.items():
            if not isinstance(name, names):
                raise _refuse(path, "only strings as keys", name)
            inner(item, _below(path, name))

    return check


def _record(needed: Mapping[str, _Check], more: Mapping[str, _Check] | None = None) -> _Check:
    """A dict with these keys, and perhaps with those of `more`."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _refuse(path, "a dict", value)
        for name, inner in {**needed, **(more or {})}.items():
            if name in value:
                inner(value[name], _below(path, name))
            elif name in needed:
                raise _OddError(f"{_below(path, name)}: is missing")

    return check


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_text = _only(lambda value: isinstance(value, str), "a string")
_flag = _only(lambda value: isinstance(value, bool), "true or false")
# An option of `log` that is stored as the user passed it.
_switch = _only(lambda value: value is None or isinstance(value, (bool, np.bool_)) or value in (0, 1), "true, false or null")
_count = _only(lambda value: _is_whole(value) and value >= 0, "an integer ≥ 0")
_positive = _only(lambda value: _is_whole(value) and value >= 1, "an integer ≥ 1")
_count_or_minus_one = _only(lambda value: _is_whole(value) and value >= -1, "an integer ≥ -1")
_whole = _only(_is_whole, "an integer")
_number = _only(_is_number, "a number")
_weight = _only(lambda value: _is_number(value) and value >= 0, "a number ≥ 0")
_factor = _only(lambda value: isinstance(value, Tensor) or (_is_number(value) and value > 0), "a number > 0")
_reading = _only(lambda value: _is_number(value) or isinstance(value, Tensor), "a number or a tensor")
_digest = _only(lambda value: isinstance(value, str) and _SHA256.fullmatch(value) is not None, "64 hexadecimal digits")
_tensor = _only(lambda value: isinstance(value, Tensor), "a tensor")
_phase = _only(lambda value: value in PHASES, f"one of {', '.join(PHASES)}")
_scope = _only(lambda value: value in SCOPES, f"one of {', '.join(SCOPES)}")
_reduction = _only(lambda value: value in ("mean", "sum", "min", "max"), "mean, sum, min or max")
_free_dict = _only(lambda value: isinstance(value, dict), "a dict")


def _value(value: Any, path: str) -> None:
    """A value of a metric; a tensor of another device than the CPU is stored with the type of its device."""
    (_on_device if isinstance(value, dict) else _reading)(value, path)


def _total(value: Any, path: str) -> None:
    (_on_device if isinstance(value, dict) else _tensor)(value, path)


def _values(value: Any, path: str) -> None:
    (_items(_value) if isinstance(value, list) else _on_device if isinstance(value, dict) else _tensor)(value, path)


def _classes(value: Any, path: str) -> None:
    """The schedulers inside a scheduler, each as `[class, the schedulers inside it]`."""
    _items(_anything)(value, path)
    for number, part in enumerate(value):
        if not isinstance(part, list) or len(part) != 2 or not isinstance(part[0], str):
            raise _refuse(f"{path}[{number}]", "a class and a list", part)
        _classes(part[1], f"{path}[{number}][1]")


def _scheduler(value: Any, path: str) -> None:
    inner = {"class": _text, "state": _by_name(_anything), "inner": _by_name(_scheduler)}
    _record(inner, {"chained": _classes, "opt_called": _flag})(value, path)


def _position(value: Any, path: str) -> None:
    """The position of a loader; see `trainkit.data.PreparedLoader.position`."""
    _AT(value, path)
    if value.get("splits"):
        for name in ("processes", "rank"):
            if name not in value:
                raise _OddError(f"{_below(path, name)}: is missing")
        count = value["processes"]
        for name in ("iterable", "replay") if value["rank"] is None else ():
            states = value.get(name)
            if states is not None and not (isinstance(states, list) and len(states) == count):
                raise _refuse(_below(path, name), f"a list of {count} states", states)
    elif isinstance(value.get("replay"), list):
        raise _refuse(_below(path, "replay"), "a dict", value["replay"])


def _replay(value: Any, path: str) -> None:
    """What shows whether an iterable continues where it was saved; that of one process, or those of each process."""
    (_items(_REPLAY) if isinstance(value, list) else _REPLAY)(value, path)


def _metrics(value: Any, path: str) -> None:
    """The metrics of one process, or those of each process."""
    if not isinstance(value, list):
        _METRICS(value, path)
        return
    _items(_METRICS)(value, path)
    if not value:
        raise _refuse(path, "at least one item", value)


def _metric(value: Any, path: str) -> None:
    """The state of one metric; each value of its epoch has a weight, and perhaps a stamp."""
    _METRIC(value, path)
    values = value["values"]["value"] if isinstance(value["values"], dict) else value["values"]
    if isinstance(values, Tensor) and values.ndim != 1:
        raise _refuse(_below(path, "values"), "a vector", values)
    for name in ("weights", "stamps"):
        if value[name] is not None and len(value[name]) != len(values):
            raise _refuse(_below(path, name), f"a list of length {len(values)}", value[name])


def _logger(value: Any, path: str) -> None:
    _record({"kind": _text, "state": _anything})(value, path)
    if value["kind"] in _OF_FILES:
        _record({}, {**_LOG, "files": _OF_FILES[value["kind"]]})(value["state"], _below(path, "state"))
        if "folder" in value["state"]:
            _record(dict.fromkeys(("version", "name"), _anything))(value["state"], _below(path, "state"))


def _state(value: Any, path: str) -> None:
    _record({}, _PARTS)(value, path)
    for key, others in _TOGETHER.items():
        if key in value:
            for other in others:
                if other not in value:
                    raise _OddError(f"{other}: is missing")


# ----------------------------------------------------------------------------------------------------------- the tables

_on_device = _record({"value": _tensor, "device": _text})
_REPLAY = _maybe(
    _record({"last": _text, "before": _maybe(_pair(_count, _anything)), "origin": _anything}),
)
_AT = _record(
    {
        "epoch": _count,
        "batches": _count,
        "samples": _maybe(_count),
        "complete": _flag,
        "dataset": _maybe(_count),
        "iterable": _anything,
    },
    {"processes": _positive, "rank": _maybe(_count), "splits": _flag, "replay": _replay},
)
_OBJECT = _record(
    {
        "updates": _count,
        "counters": _by_name(_anything),
        "states": _by_name(_only(lambda value: isinstance(value, (Tensor, list)), "a tensor or a list")),
        "reductions": _by_name(_text),
    }
)
_METRIC = _record(
    {
        **dict.fromkeys(("name", "suffix"), _text),
        **dict.fromkeys(("prog_bar", "logger", "main_only"), _switch),
        **dict.fromkeys(("on_step", "on_epoch", "updated", "fresh", "is_object"), _flag),
        "scope": _scope,
        "reduce_fx": _maybe(_reduction),
        "since": _count_or_minus_one,
        "stamp": _count_or_minus_one,
        "step_value": _maybe(_value),
        "step_weight": _maybe(_weight),
        "weight": _weight,
        "total": _maybe(_total),
        "weights": _items(_weight),
        "values": _values,
        "stamps": _maybe(_items(_whole)),
        "so_far": _maybe(_value),
    },
    {
        "path": _maybe(_text),
        "object": _maybe(_OBJECT),
        "window": _whole,
        "earlier": _items(_pair(_value, _weight)),
        "shared": _maybe(_pair(_text, _text)),
    },
)
_METRICS = _record({"stamp": _count_or_minus_one, "metrics": _items(_metric), "objects": _by_name(_OBJECT)})
_SLOTS = _record(
    {},
    {
        "values": _free_dict,
        "whole": _anything,
        "irregular": _items(_text),
        "lists": _by_name(_record({"tuple": _flag, "length": _count, "values": _by_name(_anything)})),
        "quantized": _by_name(
            _record(
                {
                    "class": _text,
                    "attributes": _items(_anything),
                    "shape": _only(
                        lambda value: isinstance(value, tuple) and all(_is_whole(size) and size >= 0 for size in value),
                        "a tuple of integers ≥ 0",
                    ),
                }
            )
        ),
    },
)
_OPTIMIZER = _record(
    {"class": _text, "groups": _items(_record({"parameters": _items(_text), "options": _by_name(_anything)}))},
    {"state": _by_name(_SLOTS), "entries": _free_dict, "more": _free_dict, "opaque": _anything},
)
_LOOP = _record(
    {
        **dict.fromkeys(("global_step", "current_epoch", "validated", "earlier_batches", "validation_batches"), _count),
        **dict.fromkeys(("validation_pending", "epoch_complete", "stop_asked", "stopping", "should_stop"), _flag),
        "phase": _phase,
        "position": _position,
        "computed": _by_name(_count),
    },
    {"advanced": _by_name(_count), "window": _count, "validated_step": _count, "largest_part": _maybe(_count)},
)
# The loggers of trainkit that write files, and the positions in their files.
_ENDS = dict.fromkeys(("first", "last"), _text)
_OF_FILES: dict[str, _Check] = {
    "CSVLogger": _by_name(_record({"rows": _count, "columns": _count, **_ENDS})),
    "JSONLLogger": _by_name(_record({"bytes": _count, **_ENDS})),
    "TensorBoardLogger": _record({}, {"sizes": _by_name(_count), "hparams": _free_dict, "page": _maybe(_items(_free_dict))}),
}
_LOG = {
    "last_step": _whole,
    "folder": _text,
    "version": _only(lambda value: value is None or isinstance(value, str) or _is_whole(value), "an integer, a string or null"),
    "name": _maybe(_text),
    "folder_id": _text,
}


def _hparams_schema(key: str) -> dict[str, _Check]:
    """The hyper-parameters of a module or a data module."""
    attributes = _items(_pair(_items(_anything), _maybe(_items(_text))))
    return {
        key: _free_dict,
        f"{key}_name": _maybe(_text),
        f"{key}_omegaconf": _items(_anything),
        f"{key}_class": _text,
        f"{key}_attributes": attributes,
        f"{key}_omitted": _items(_text),
    }


_PARTS: dict[str, _Check] = {
    "models": _items(
        _record(
            {"trained": _by_name(_flag), "fingerprint": _maybe(_digest)},
            {"extra": _by_name(_anything), "configs": _by_name(_record({"kind": _text}))},
        )
    ),
    "optimizers": _items(_OPTIMIZER),
    "schedulers": _items(_scheduler),
    "scaler": _maybe(
        _record(
            {},
            {
                **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), _factor),
                "growth_interval": _positive,
                "_growth_tracker": _count,
            },
        )
    ),
    **_hparams_schema("hyper_parameters"),
    **_hparams_schema("datamodule_hyper_parameters"),
    "datamodule": _anything,
    "module": _text,
    "loop": _LOOP,
    "metrics": _metrics,
    "results": _record(
        {"callback": _by_name(_value), "progress_bar": _by_name(_reading), "logged": _by_name(_reading)},
        {"evaluated": _items(_text)},
    ),
    "callbacks": _by_name(_anything),
    "loggers": _items(_logger),
    "user": _free_dict,
    "omitted": _items(_text),
    "loaders": _items(_position),
    "window": _count,
    "windows": _items(_pair(_maybe(_count), _count)),
    "read_ahead": _items(_count),
    "registered": _items(_anything),
}
# What is only useful together.
_TOGETHER = {
    "loop": ("models", "optimizers", "schedulers", "metrics", "results", "callbacks", "loggers"),
    "loaders": ("models", "optimizers", "schedulers", "registered"),
    "optimizers": ("models", "schedulers"),
    "hyper_parameters": ("models",),
    "datamodule_hyper_parameters": ("datamodule",),
}
