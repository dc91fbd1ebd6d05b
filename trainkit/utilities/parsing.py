"""The arguments of a constructor, from its frame."""

from __future__ import annotations

from typing import Any

from trainkit.compat.lightning_names import get_init_args
from trainkit.module.hparams import AttributeDict
from trainkit.names import absent

__all__ = ["AttributeDict", "get_init_args"]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
