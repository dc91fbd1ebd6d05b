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
    """A logger whose methods have two more keyword arguments.

    `main_process_only` (default `True`): only the main process logs. `in_order` (default `False`): all processes log, one
    after the other, in the order of their ranks. All processes must then make the call, even if the level is disabled, and
    `main_process_only` has no effect. With several processes, each message begins with the rank: `[RANK 1] …`.

    Args:
        logger: the logger of `logging`.
        extra: see `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._logged_once: set[str] = set()

    # The base class's methods call each other. Here each calls _emit directly, so that the user's frame is always two above it.

    def debug(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `DEBUG`."""
        self._emit(logging.DEBUG, msg, args, kwargs)

    def info(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `INFO`."""
        self._emit(logging.INFO, msg, args, kwargs)

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `WARNING`."""
        self._emit(logging.WARNING, msg, args, kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`warning`, but only once for the same message and arguments."""
        what = repr((msg, args))
        if what not in self._logged_once:
            self._logged_once.add(what)
            self._emit(logging.WARNING, msg, args, kwargs)

    def error(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `ERROR`."""
        self._emit(logging.ERROR, msg, args, kwargs)

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **kwargs: Any) -> None:
        """`error`, with the traceback of the current exception."""
        self._emit(logging.ERROR, msg, args, {"exc_info": exc_info, **kwargs})

    def critical(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `CRITICAL`."""
        self._emit(logging.CRITICAL, msg, args, kwargs)

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, on the processes that `main_process_only` and `in_order` select.

        Args:
            level: the level of `logging`.
            msg: the message, a format string for `args`.
            *args: the arguments of the message.
            **kwargs: `main_process_only`, `in_order`, and the arguments of `logging.Logger.log`.

        Raises:
            ConfigurationError: `in_order` before this process has joined the others.
            CollectiveError: `in_order`, and not all processes make the call.
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
            from trainkit.accelerator.current import place

            rank, size = place()
            if not alone or (rank == 0 and prints_here()):
                self.logger.log(level, _marked(text, rank, size), *args, **options)
            return
        from trainkit.accelerator.current import gathering

        part = gathering(_IN_ORDER)
        world = part.world
        for rank in range(world.size):
            if rank == world.rank and enabled:
                self.logger.log(level, _marked(text, rank, world.size), *args, **options)
            part.wait(_IN_ORDER)


def _marked(msg: object, rank: int, size: int) -> object:
    return f"[RANK {rank}] {msg}" if size > 1 else msg


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger with this name that logs on the main process, or on all processes if a call asks for it.

    :

    ```python
    logger = get_logger(__name__, log_level="INFO")
    logger.info("loaded")                                  # by the main process
    logger.info("my part: %d", n, main_process_only=False)  # by all
    logger.info("my part: %d", n, in_order=True)            # by all, one after the other
    ```

    It also works before the `Accelerator` is created, with the rank from the launcher's environment variables; `in_order`
    does not. Configure the output as for any logger: `logging.basicConfig(...)`.

    Args:
        name: usually `__name__`.
        log_level: a level such as `"INFO"`, for this logger and the root logger. Default: the environment variable
            `TRAINKIT_LOG_LEVEL`, else `ACCELERATE_LOG_LEVEL`, else the levels are not changed.
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[key] for key in _LEVELS if os.environ.get(key)), None)
    if level is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
