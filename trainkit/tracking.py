"""What scripts written for Hugging Face Accelerate import from its ``tracking``: the base of trackers of their own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.errors import MissingMethodError

__all__ = ["GeneralTracker", "on_main_process"]


def on_main_process(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a tracker: on other processes than the main one it does nothing, if ``main_process_only``."""

    @functools.wraps(method)
    def on_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not _is_main():
            return None
        return method(self, *args, **kwargs)

    return on_main


def _is_main() -> bool:
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    from trainkit.launch.environment import read_place

    place = read_place(os.environ)
    return place is None or place.rank == 0


class GeneralTracker:
    """A tracker of your own for ``Accelerator(log_with=MyTracker(...))``, in the form that Accelerate gives it.

    A subclass has the attributes ``name`` and ``requires_logging_directory``, the property ``tracker``, which is the run or
    writer behind it, and the methods ``store_init_configuration`` and ``log``. They are called on the main process only. A
    ``trainkit.loggers.Logger`` serves as well, and for a ``Trainer`` too.

    Raises:
        MissingMethodError: one of these is not there; when the subclass calls ``super().__init__()``.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        lacking = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if lacking and not _blank:
            kind = type(self).__name__
            raise MissingMethodError(
                f"{kind}: expected the attributes name, requires_logging_directory and tracker, found no {', '.join(lacking)}. "
                f"Fix:\n    class {kind}(GeneralTracker):\n        name = 'mine'\n        requires_logging_directory = False\n"
                "        tracker = property(lambda self: self.run)"
            )

    def start(self) -> None:
        """Called by ``init_trackers``, before anything else."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyper-parameters; called by ``init_trackers``, if it was given some."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep the values of a step; called by ``Accelerator.log``, with the tracker's part of its ``log_kwargs``."""

    def finish(self) -> None:
        """Give back what is held; called by ``end_training``."""
