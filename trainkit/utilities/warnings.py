"""Classes of warnings, for filters that scripts written for Lightning install."""

from __future__ import annotations

from typing import Any

from trainkit.names import absent

__all__ = ["LightningDeprecationWarning", "PossibleUserWarning"]


class PossibleUserWarning(UserWarning):
    """Lightning's class of hints that may not apply. trainkit prints its hints once, and does not warn with this class."""


class LightningDeprecationWarning(DeprecationWarning):
    """Lightning's class for its own deprecated names. trainkit does not warn with it."""


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
