"""What scripts written for Hugging Face Accelerate import from its `logging`: a logger that knows of several processes."""

from __future__ import annotations

import logging
import os
from typing import Any

from trainkit.console import speaks

__all__ = ["MultiProcessAdapter", "get_logger"]

_IN_ORDER = "in_order=True"
_LEVELS = ("TRAINKIT_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger, whose methods have two more arguments, to be given by name.

    `main_process_only` (default `True`): the main process logs alone. `in_order` (default `False`): each process logs,
    one after the other in the order of their ranks. That is for all processes, whatever the level is, and
    `main_process_only` has no effect then. Of several processes each says which it is: `[RANK 1] …`.

    Args:
        logger: Of `logging`.
        extra: Of `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._said: set[str] = set()

    # Each of these by itself, and not as the base class has them: the frame of the user's is two above _say everywhere.

    def debug(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `DEBUG`."""
        self._say(logging.DEBUG, msg, args, kwargs)

    def info(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `INFO`."""
        self._say(logging.INFO, msg, args, kwargs)

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `WARNING`."""
        self._say(logging.WARNING, msg, args, kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`warning`, of the same message and arguments once only."""
        what = repr((msg, args))
        if what not in self._said:
            self._said.add(what)
            self._say(logging.WARNING, msg, args, kwargs)

    def error(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `ERROR`."""
        self._say(logging.ERROR, msg, args, kwargs)

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **kwargs: Any) -> None:
        """`error`, with the exception that is being handled."""
        self._say(logging.ERROR, msg, args, {"exc_info": exc_info, **kwargs})

    def critical(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """`log` at level `CRITICAL`."""
        self._say(logging.CRITICAL, msg, args, kwargs)

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, if this process is to.

        Args:
            level: Of `logging`.
            msg: With places for `args`.
            *args: For these places.
            **kwargs: `main_process_only`, `in_order`, and those of `Logger.log`.

        Raises:
            ConfigurationError: `in_order`, and this process has not joined the others yet.
            CollectiveError: `in_order`, and not all processes have come to it.
        """
        self._say(level, msg, args, kwargs)

    def _say(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alone, ordered = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
        enabled = self.isEnabledFor(level)
        if not ordered and not enabled:
            return
        text, options = self.process(msg, kwargs)
        if not ordered:
            from trainkit.accelerator.current import place

            rank, size = place()
            if not alone or (rank == 0 and speaks()):
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
    """The logger of a name, of which only the main process's messages are shown, unless a message is to be shown of all.

    :

    ```python
    logger = get_logger(__name__, log_level="INFO")
    logger.info("loaded")                                  # by the main process
    logger.info("my part: %d", n, main_process_only=False)  # by all
    logger.info("my part: %d", n, in_order=True)            # by all, one after the other
    ```

    It works before the `Accelerator` is made too, by what a launcher has said; `in_order` does not. Where messages go the
    program says, as with any logger: `logging.basicConfig(...)`.

    Args:
        name: As a rule `__name__`.
        log_level: `"INFO"`, say, for this logger and the root logger. Default: `TRAINKIT_LOG_LEVEL`, else
            `ACCELERATE_LOG_LEVEL`; if neither is set nothing is changed.
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[key] for key in _LEVELS if os.environ.get(key)), None)
    if level is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
