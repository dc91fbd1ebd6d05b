"""`DummyLogger`: a logger that stores nothing."""

from __future__ import annotations

from typing import Any

from trainkit.loggers.base import Logger
from trainkit.loggers.null_experiment import NullExperiment

__all__ = ["DummyLogger"]


class DummyLogger(Logger):
    """Stands for a logger in a `fast_dev_run` and in trials, such as those of `Tuner`.

    `logger.experiment` and all methods exist, and do nothing.

    So a module that calls `self.logger.experiment.add_image(...)` or `self.logger.watch(...)` needs no `if`.
    """

    @property
    def is_main_process(self) -> bool:
        """False: no process writes."""
        return False

    @property
    def save_dir(self) -> None:  # type: ignore[override]  # as of every logger without files
        """`None`: it writes no files."""
        return

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing; some loggers accept more arguments."""

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, with the arguments of any logger."""

    log_text = log_histogram = log_image

    def _require(self, what: str, default: Any, bound: Any) -> None:
        pass  # it stands for a logger that can store images

    def __getattr__(self, name: str) -> NullExperiment:
        if name.startswith("_"):  # pickle, copy and inspect must not find these
            raise AttributeError(name)
        return NullExperiment()
