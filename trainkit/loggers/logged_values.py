"""Converts what users log to plain numbers, arrays and hyper-parameters.

Torch is not imported: a tensor is recognized by its methods, so that reading and writing text files stays fast.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.console import warn
from trainkit.errors import ConfigurationError, MetricError
from trainkit.masking import mask_value
from trainkit.tagged_json.codec import plain_container

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["as_array", "as_images", "as_step", "flatten", "number", "plain", "take_step"]

_STEPS = 2.0**63  # TensorBoard and others store steps as 64-bit integers


def number(name: Any, value: Any) -> int | float:
    """`value` as a Python int or float; raises `MetricError` if it is not one real number."""
    if not isinstance(name, str) or not name:
        raise MetricError(f"Metric: expected a name, got {name!r}. Fix: log_metrics({{'loss': loss}}, step)")
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value)  # NumPy's float64 is a subclass of float
    if not isinstance(value, str | bytes | complex) and (hasattr(value, "__float__") or hasattr(value, "__index__")):
        try:
            item = value.item() if hasattr(value, "item") else value
            return int(item) if hasattr(item, "__index__") else float(item)
        except (TypeError, ValueError, RuntimeError) as error:  # more than one element, or complex
            raise MetricError(_not_a_number(name, value)) from error
    raise MetricError(_not_a_number(name, value))


def _not_a_number(name: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    what = f"{kind} {value!r}" if shape is None else f"{kind} of shape {tuple(shape)}"
    fix = f"reduce it first: {{{name!r}: value.mean()}}"
    if isinstance(value, Mapping):
        fix = f"log each value under its own name: {{f'{name}/{{key}}': v for key, v in value.items()}}"
    elif shape is None:
        fix = "convert it with float(value)"
    return f"Metric {name!r}: expected one real number, got {what}. Fix: {fix}"


def as_array(value: Any) -> npt.NDArray[Any]:
    """A tensor (of any device and dtype), array or nested list as a NumPy array."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.float()  # NumPy has no bfloat16
        value = value.numpy()
    return np.asarray(value)


def as_step(step: Any) -> int:
    """`step` as a Python int; raises `ConfigurationError` if it is not an integer."""
    try:
        return operator.index(step)
    except TypeError:
        raise ConfigurationError(
            f"step: expected a whole number, got {step!r}. Fix: log_metrics(metrics, step=trainer.global_step)"
        ) from None


def take_step(values: dict[str, Any]) -> int | None:
    """Remove the metric "step", which replaces the step of a row, as in Lightning; `None` if there is none that can be one."""
    value = values.pop("step", None)
    if value is None:
        return None
    if abs(value) < _STEPS:  # False for NaN
        return int(value)
    warn(
        f"the metric 'step' replaces the step of what is logged; expected a number between -2**63 and 2**63, got {value}, "
        "which is ignored. Fix: self.log('step', float(self.global_step)), or log it under another name"
    )
    return None


def as_images(key: str, image: Any) -> list[npt.NDArray[np.uint8]]:
    """One image or a list of them as uint8 arrays of shape (height, width, channels).

    An image is (C, H, W), (H, W, C) or (H, W) with C in 1, 3, 4; if both the first two are possible, it is the first.
    Floating-point values are clipped to [0, 1], and NaN becomes 0.
    """
    images = image if isinstance(image, list | tuple) else [image]
    return [_as_image(key, one) for one in images]


def _as_image(key: str, image: Any) -> npt.NDArray[np.uint8]:
    import numpy as np

    array = as_array(image)
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3 and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or array.size == 0 or array.dtype.kind not in "biuf":
        raise MetricError(
            f"Image {key!r}: expected a tensor or array of shape (C, H, W), (H, W, C) or (H, W) with C in 1, 3, 4, "
            f"got shape {as_array(image).shape} and dtype {array.dtype}. Fix: pass a list for several images, "
            f"log_image({key!r}, list(images), step)"
        )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0) * 255.0
        array = array.round()
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    return np.ascontiguousarray(array.clip(0, 255).astype(np.uint8))


def plain(params: Any) -> tuple[dict[str, Any], list[str]]:
    """Convert hyper-parameters to dicts, lists, strings and numbers; also returns the key paths of objects written as text.

    Accepts a mapping, an `argparse.Namespace` or a dataclass instance. Tuples and sets become lists; paths, enums, dtypes,
    devices, functions and classes their names; OmegaConf's containers dicts and lists. Texts that may be secrets are masked.
    """
    fields = _as_mapping(plain_container(params))
    if fields is None:
        raise ConfigurationError(
            f"log_hyperparams: expected a dict, an argparse.Namespace or a dataclass, got {type(params).__name__}. "
            "Fix: logger.log_hyperparams(dict(lr=1e-3))"
        )
    as_text: list[str] = []
    return {str(key): _plain(value, str(key), as_text) for key, value in fields.items()}, as_text


def _as_mapping(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _plain(value: Any, path: str, as_text: list[str], depth: int = 0) -> Any:
    if value is None:
        return None
    if depth > 32:  # a structure that contains itself
        as_text.append(path)
        return f"<{type(value).__name__}>"
    value = plain_container(value)
    if (fields := _as_mapping(value)) is not None:
        return {str(key): _plain(one, f"{path}.{key}", as_text, depth + 1) for key, one in fields.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{path}[{index}]", as_text, depth + 1) for index, one in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [_plain(one, path, as_text, depth + 1) for one in sorted(value, key=repr)]
    if getattr(value, "shape", None) == ():  # a tensor or a NumPy scalar
        return _plain(value.item(), path, as_text, depth + 1)
    if isinstance(value, functools.partial):
        named = [f"{name}={_plain(one, path, as_text, depth + 1)}" for name, one in value.keywords.items()]
        parts = [str(_plain(one, path, as_text, depth + 1)) for one in (value.func, *value.args)]
        return f"partial({', '.join(parts + named)})"
    leaf = _plain_leaf(value, path, as_text)
    return mask_value(path, leaf) if isinstance(leaf, str) else leaf


def _plain_leaf(value: Any, path: str, as_text: list[str]) -> bool | int | float | str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    for base in (bool, int, float, str):  # Subclasses count too, such as NumPy's str.
        if isinstance(value, base):
            return base(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("device", "dtype"):
        return str(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    as_text.append(path)
    return str(value)


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested plain hyper-parameters: names joined by "/", lists as text."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}/"))
        elif isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            flat[name] = value
        else:
            flat[name] = str(value)
    return flat
