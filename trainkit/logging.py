"""What scripts written for Hugging Face Accelerate import from its ``logging``: a logger that knows of several processes."""

from __future__ import annotations

import logging
import os
from typing import Any

from trainkit.console import speaks

__all__ = ["MultiProcessAdapter", "get_logger"]

_LEVELS = ("TRAINKIT_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger, whose methods have two more arguments, to be given by name.

    ``main_process_only`` (default ``True``): the main process logs alone. ``in_order`` (default ``False``): each process logs,
    one after the other in the order of their ranks. That is for all processes, whatever the level is, and
    ``main_process_only`` has no effect then. Of several processes each says which it is: ``[RANK 1] …``.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, if this process is to.

        Args:
            level: of :mod:`logging`.
            msg: with places for ``args``.
            *args: for these places.
            **kwargs: ``main_process_only``, ``in_order``, and those of ``Logger.log``.

        Raises:
            ConfigurationError: ``in_order``, and this process has not joined the others yet.
            CollectiveError: ``in_order``, and not all processes have come to it.
        """
        alone, ordered = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # the caller is behind this method
        if ordered:
            self._in_order(level, msg, *args, **{**kwargs, "stacklevel": kwargs["stacklevel"] + 1})
            return
        if not self.isEnabledFor(level):
            return
        rank, size = _place()
        if not alone or (rank == 0 and speaks()):
            text, options = self.process(msg, kwargs)
            self.logger.log(level, _marked(text, rank, size), *args, **options)

    def _in_order(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        from trainkit.accelerator.current import gathering

        verbs = gathering("in_order=True")
        world = verbs.strategy.world
        for rank in range(world.size):
            if rank == world.rank and self.isEnabledFor(level):
                text, options = self.process(msg, kwargs)
                self.logger.log(level, _marked(text, rank, world.size), *args, **options)
            verbs.meeting.wait("log")

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """``warning``, of the same message and arguments once only.

        Args:
            msg: with places for ``args``.
            *args: for these places.
            **kwargs: of :meth:`log`.
        """
        said: set[str] = self.__dict__.setdefault("_said", set())
        what = repr((msg, args))
        if what not in said:
            said.add(what)
            self.log(logging.WARNING, msg, *args, **{"stacklevel": 3, **kwargs})


def _marked(msg: object, rank: int, size: int) -> object:
    return f"[RANK {rank}] {msg}" if size > 1 else msg


def _place() -> tuple[int, int]:
    """Which of how many processes this one is; before it has joined them, as its launcher says."""
    import torch.distributed

    from trainkit.accelerator.current import latest

    accelerator = latest()
    if accelerator is not None:
        return accelerator.world.rank, accelerator.world.size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    from trainkit.launch.environment import read_place

    place = read_place(os.environ)
    return (0, 1) if place is None else (place.rank, place.size)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger of a name, of which only the main process's messages are shown, unless a message is to be shown of all.

    ::

        logger = get_logger(__name__, log_level="INFO")
        logger.info("loaded")                                  # by the main process
        logger.info("my part: %d", n, main_process_only=False)  # by all
        logger.info("my part: %d", n, in_order=True)            # by all, one after the other

    It works before the ``Accelerator`` is made too, by what a launcher has said; ``in_order`` does not. Where messages go the
    program says, as with any logger: ``logging.basicConfig(...)``.

    Args:
        name: as a rule ``__name__``.
        log_level: ``"INFO"``, say, for this logger and the root logger. Default: ``TRAINKIT_LOG_LEVEL``, else
            ``ACCELERATE_LOG_LEVEL``; if neither is set nothing is changed.
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[key] for key in _LEVELS if os.environ.get(key)), None)
    if level is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
