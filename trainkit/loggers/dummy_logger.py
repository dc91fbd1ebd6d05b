"""`DummyLogger`: the logger of runs that log nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.loggers.base import Logger, NullExperiment

__all__ = ["DummyLogger"]


class DummyLogger(Logger):
    """Accepts every call and writes nothing, so that a module that calls its logger also works without one.

    A Trainer with `fast_dev_run` has it instead of its loggers.
    """

    _in_run_folder = False

    @property
    def experiment(self) -> Any:
        """An object whose attributes and calls do nothing."""
        return NullExperiment()

    @property
    def save_dir(self) -> Any:
        """`None`: there is no folder."""
        return None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Do nothing."""

    def log_hyperparams(self, params: Any) -> None:
        """Do nothing."""

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, with the arguments of any logger."""

    log_text = log_histogram = log_image

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:  # methods that only one logger has, such as watch
            return getattr(NullExperiment(), name)
