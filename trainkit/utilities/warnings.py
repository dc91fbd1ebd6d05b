"""Classes of warnings, for filters that scripts written for Lightning install."""

from __future__ import annotations

from typing import Any

from trainkit.compat.lightning_names import LightningDeprecationWarning, PossibleUserWarning
from trainkit.names import absent

__all__ = ["LightningDeprecationWarning", "PossibleUserWarning"]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
