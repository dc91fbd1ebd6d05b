"""What trainkit says to the user: notices (facts worth knowing, on standard error) and warnings (something is likely wrong).

Notices go through ``logging.getLogger("trainkit")`` at level INFO; a program that configures logging gets them its way.
"""

from __future__ import annotations

import logging
import sys
import warnings

__all__ = ["TrainkitWarning", "notice", "warn"]

_LOGGER = logging.getLogger("trainkit")


class TrainkitWarning(UserWarning):
    """Something that trainkit can go on with, but that the user most likely did not mean."""


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection and capture work."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_HANDLER = _StandardError()
_HANDLER.setFormatter(logging.Formatter("trainkit: %(message)s"))


def notice(text: str) -> None:
    """Print one line ``trainkit: …`` on standard error, unless the program has silenced the logger."""
    if logging.getLogger().handlers or any(handler is not _HANDLER for handler in _LOGGER.handlers):
        _LOGGER.removeHandler(_HANDLER)  # the program has logging of its own by now: it must not say everything twice
    else:
        _LOGGER.addHandler(_HANDLER)
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.info(text)


def warn(text: str) -> None:
    """Warn with :class:`TrainkitWarning`."""
    warnings.warn(text, TrainkitWarning, stacklevel=3)
