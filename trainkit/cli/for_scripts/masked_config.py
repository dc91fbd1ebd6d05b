"""A configuration as it is saved with a run: what may be a secret is masked, and a mask is refused when it is read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from trainkit.masking import HIDDEN, mask_value

__all__ = ["MASK", "mask_config", "masked_keys", "needs_secrets"]

MASK = "***masked***"  # not HIDDEN alone, which may be a value of the program


def mask_config(config: Namespace) -> Any:
    """A copy of a configuration in which texts that may be secrets are masked. Numbers stay: `eot_token=50256` is no secret."""
    return _masked("", config)


def masked_keys(config: Namespace) -> list[str]:
    """The keys of the values that contain a mask, as on a command line; with an index for an item of a list."""
    return [key for key, text in _texts("", config) if MASK in text]


def needs_secrets(keys: list[str]) -> str:
    """What is wrong with a configuration that has a mask as the value of `keys`, and what to do."""
    options = " ".join(f'--{key}="$SECRET"' for key in keys if "[" not in key)
    return (
        f"{', '.join(keys)}: found {MASK!r}, which a saved configuration has in place of a password or key. "
        f"Expected the value, such as that of an environment variable. Fix: {options or 'write it into the file'}"
    )


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, Namespace):
        copy = value.clone()
        vars(copy).update({name: _masked(f"{key}.{name}", item) for name, item in vars(value).items()})
        return copy
    if isinstance(value, dict):
        return {name: _masked(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(key, item) for item in value]
    if not isinstance(value, str | os.PathLike) or key.endswith(".class_path"):
        return value
    text = str(value)
    masked: str = mask_value(key, text)
    return value if masked == text else masked.replace(HIDDEN, MASK)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Namespace | dict):
        for name, item in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from _texts(f"{key}.{name}".removeprefix("."), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(f"{key}[{index}]", item)
    elif isinstance(value, str | os.PathLike):
        yield key, str(value)
