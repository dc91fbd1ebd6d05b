"""What scripts written for Hugging Face Accelerate import from its `tracking`: the base class of custom trackers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed

from trainkit.errors import MissingMethodError

__all__ = ["GeneralTracker", "on_main_process"]


def on_main_process(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for a method of a tracker with `main_process_only`: the method runs on the main process only."""

    @functools.wraps(method)
    def on_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if getattr(self, "main_process_only", False) and not _is_main() else method(self, *args, **kwargs)

    return on_main


def _is_main() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    from trainkit.launch.environment import read_ranks

    place = read_ranks(os.environ)
    return place is None or place.rank == 0


class GeneralTracker:
    """The base class of your own tracker for `Accelerator(log_with=MyTracker(...))`, as in Accelerate.

    A subclass has the attributes `name` and `requires_logging_directory`, the property `tracker` (the run or writer that it
    uses), and the methods `store_init_configuration` and `log`, called on the main process only. For a `Trainer` too, write
    a `Logger` instead.

    Raises:
        MissingMethodError: An attribute is missing.

    Example:
        ```python
        class PrintTracker(GeneralTracker):
            name = "print"
            requires_logging_directory = False
            tracker = None

            def store_init_configuration(self, values):
                print(values)

            def log(self, values, step=None, **kwargs):
                print(step, values)

        accelerator = Accelerator(log_with=PrintTracker())
        ```
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            kind = type(self).__name__
            raise MissingMethodError(
                f"{kind}: expected the attributes name, requires_logging_directory and tracker, found no {', '.join(missing)}. "
                f"Fix:\n    class {kind}(GeneralTracker):\n        name = 'mine'\n        requires_logging_directory = False\n"
                "        tracker = property(lambda self: self.run)"
            )

    def start(self) -> None:
        """Called first by `init_trackers`."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Log the hyper-parameters; called by `init_trackers` if it has any."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step; called by `Accelerator.log`, with the tracker's part of `log_kwargs`."""

    def finish(self) -> None:
        """End the run; called by `end_training`."""
