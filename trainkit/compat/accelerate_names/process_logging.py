"""What scripts written for Hugging Face Accelerate import from its `logging`: a logger for several processes."""

from __future__ import annotations

import logging
import os
from typing import Any

from trainkit.console import prints_here

__all__ = ["MultiProcessAdapter", "get_logger"]

_IN_ORDER = "in_order=True"
_LEVELS = ("TRAINKIT_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger whose methods have two more keyword arguments, `main_process_only` and `in_order`. Made by `get_logger`.

    With `main_process_only=True` (the default) only the main process logs. With `in_order=True` (default `False`) each
    process logs, one after the other in the order of their ranks; all processes must call it, whatever the level is, and
    `main_process_only` has no effect. With several processes each message says its rank: `[RANK 1] …`.

    Args:
        logger: A logger of `logging`.
        extra: As in `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._logged_once: set[str] = set()

    # The base class's methods call each other. Here each calls _emit directly, so that the user's frame is always two above it.

    def debug(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level `DEBUG`, see `log`."""
        self._emit(logging.DEBUG, msg, args, kwargs)

    def info(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level `INFO`, see `log`."""
        self._emit(logging.INFO, msg, args, kwargs)

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level `WARNING`, see `log`."""
        self._emit(logging.WARNING, msg, args, kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level `WARNING`, the same message and arguments only once."""
        what = repr((msg, args))
        if what not in self._logged_once:
            self._logged_once.add(what)
            self._emit(logging.WARNING, msg, args, kwargs)

    def error(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level `ERROR`, see `log`."""
        self._emit(logging.ERROR, msg, args, kwargs)

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **kwargs: Any) -> None:
        """Log at level `ERROR`, with the exception that is being handled."""
        self._emit(logging.ERROR, msg, args, {"exc_info": exc_info, **kwargs})

    def critical(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level `CRITICAL`, see `log`."""
        self._emit(logging.CRITICAL, msg, args, kwargs)

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, on the processes that the arguments select.

        Args:
            level: A level of `logging`.
            msg: The message, with placeholders for `args`.
            *args: The values of the placeholders.
            **kwargs: `main_process_only`, `in_order`, and those of `logging.Logger.log`.

        Raises:
            ConfigurationError: `in_order` before this process has joined the others.
            CollectiveError: `in_order`, and not all processes call it.
        """
        self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alone, ordered = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
        enabled = self.isEnabledFor(level)
        if not ordered and not enabled:
            return
        text, options = self.process(msg, kwargs)
        if not ordered:
            from trainkit.accelerator.processes import rank_and_size

            rank, size = rank_and_size()
            if not alone or (rank == 0 and prints_here()):
                self.logger.log(level, _marked(text, rank, size), *args, **options)
            return
        from trainkit.accelerator.processes import gathering

        part = gathering(_IN_ORDER)
        world = part.world
        for rank in range(world.size):
            if rank == world.rank and enabled:
                self.logger.log(level, _marked(text, rank, world.size), *args, **options)
            part.wait(_IN_ORDER)


def _marked(msg: object, rank: int, size: int) -> object:
    return f"[RANK {rank}] {msg}" if size > 1 else msg


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger of a name, whose messages appear on the main process only, unless a call asks for all processes.

    It also works before the `Accelerator` is created, except `in_order`. As with any logger, the program sets where
    messages go: `logging.basicConfig(...)`.

    Args:
        name: Usually `__name__`.
        log_level: The level of this logger and of the root logger, such as `"INFO"`. Default: the environment variable
            `TRAINKIT_LOG_LEVEL`, otherwise `ACCELERATE_LOG_LEVEL`, otherwise unchanged.

    Example:
        ```python
        logger = get_logger(__name__, log_level="INFO")
        logger.info("loaded")  # by the main process
        logger.info("my part: %d", n, main_process_only=False)  # by all processes
        logger.info("my part: %d", n, in_order=True)  # by all processes, one after the other
        ```
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[key] for key in _LEVELS if os.environ.get(key)), None)
    if level is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
