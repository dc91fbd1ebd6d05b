"""OmegaConf's containers as plain dicts and lists. They are recognized by what is loaded: omegaconf is never imported here."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_omegaconf", "plain_container", "without_omegaconf"]


def is_omegaconf(value: Any) -> bool:
    """Whether a value is a `DictConfig` or a `ListConfig`."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def plain_container(value: Any) -> Any:
    """The container as dicts and lists. Interpolations are resolved, or none of them if one cannot be resolved.

    Missing values become `"???"`, enums their names, structured configurations dicts.
    """
    omegaconf = sys.modules["omegaconf"]
    convert = omegaconf.OmegaConf.to_container
    try:
        return convert(value, resolve=True, enum_to_str=True)
    except omegaconf.errors.OmegaConfBaseException:
        return convert(value, resolve=False, enum_to_str=True)


def without_omegaconf(value: Any) -> Any:
    """The value itself, or dicts and lists if it is a container."""
    return plain_container(value) if is_omegaconf(value) else value
