"""Functions that act on the main process only, under Lightning's names."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from trainkit.accelerator.processes import rank_and_size
from trainkit.console import notice
from trainkit.names import absent

__all__ = [
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

P = ParamSpec("P")
T = TypeVar("T")


class _RankZeroOnly:
    """A decorator: the function runs on the main process only; on the other processes it returns `default`.

    `rank_zero_only.rank` is the rank of this process, as the launcher has set it before the processes are connected. Do not
    decorate a function that communicates with the other processes: they would not take part.

    Example:
        ```python
        @rank_zero_only
        def report(metrics):
            print(metrics)
        ```
    """

    __name__ = "rank_zero_only"
    _rank: int | None = None

    def __call__(self, fn: Callable[P, T], default: T | None = None) -> Callable[P, T | None]:
        """Decorate a function.

        Args:
            fn: The function.
            default: What it returns on the other processes.
        """

        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero

    @property
    def rank(self) -> int:
        """The rank of this process; assign it to set it yourself."""
        return rank_and_size()[0] if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank


rank_zero_only = _RankZeroOnly()
"""A decorator: the function runs on the main process only, and returns `default` on the other processes.

`rank_zero_only(function, default=None)` is the decorated function, and `rank_zero_only.rank` the rank of this process, as the
launcher has set it before the processes are connected. Do not decorate a function that communicates with the other processes.
"""


def rank_zero_info(message: object, *args: Any, stacklevel: int = 1) -> None:
    """Print a notice on the main process, through the logger `trainkit` at level INFO.

    Args:
        message: The text, with `%` placeholders for `args` as in `logging`.
        *args: Values for the placeholders.
        stacklevel: No effect: the line that prints is not shown.
    """
    if rank_zero_only.rank == 0:
        notice(str(message) % args if args else str(message))


def rank_zero_debug(message: object, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
    """Pass a message to the logger `trainkit` at level DEBUG, on the main process.

    Args:
        message: The text, with `%` placeholders for `args`.
        *args: Values for the placeholders.
        stacklevel: The frame that the record names, as in `logging`.
        **kwargs: Arguments of `logging.Logger.debug`.
    """
    if rank_zero_only.rank == 0:
        logging.getLogger("trainkit").debug(message, *args, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_warn(
    message: str | Warning, stacklevel: int = 1, *, category: type[Warning] = UserWarning, **kwargs: Any
) -> None:
    """Warn on the main process.

    Args:
        message: The text, or a warning.
        stacklevel: The frame that the warning names, as in `warnings.warn`; 1 is the caller.
        category: The class of the warning.
        **kwargs: Arguments of `warnings.warn`.
    """
    if rank_zero_only.rank == 0:
        warnings.warn(message, category, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 1, **kwargs: Any) -> None:
    """Warn with a `DeprecationWarning` on the main process; the arguments are those of `rank_zero_warn`."""
    rank_zero_warn(message, stacklevel + 1, category=DeprecationWarning, **kwargs)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """The message with the rank before it: `[rank: 1] message`; without a rank, the message."""
    return message if rank is None else f"[rank: {rank}] {message}"


def __getattr__(name: str) -> Any:
    raise absent("trainkit.utilities.rank_zero", name, __all__)
