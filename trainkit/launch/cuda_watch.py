"""Which line of a script has initialised CUDA: in debug mode it is noted, and told at a launch that comes after it."""

from __future__ import annotations

import linecache
import sys
import threading

from trainkit.config.carried import debugging
from trainkit.console import warn
from trainkit.distributed.collective_tracker import file_name_of, find_caller

__all__ = ["cuda_initialised_at", "tell_of_cuda", "watch_cuda"]

_watching = False
_at: str | None = None


def watch_cuda() -> None:
    """In debug mode, note from here on which line initialises CUDA; see :func:`trainkit.config.carried.debugging`."""
    global _watching, _at
    if _watching or not debugging():
        return
    import torch

    _watching = True
    if torch.cuda.is_initialized():
        _at = "an earlier line than 'import trainkit' (import it first to see which)"
    else:
        torch.cuda._lazy_call(_note)  # torch calls it within its own initialisation


def cuda_initialised_at() -> str | None:
    """The line that has initialised CUDA in this process: ``"train.py:12: model.cuda()"``.

    Returns:
        ``None`` if none has, or if this is not debug mode.
    """
    return _at


def tell_of_cuda(launch: str) -> None:
    """In debug mode, warn if CUDA was initialised in this process before it starts others.

    Args:
        launch: what starts them, as the user calls it.
    """
    if _at is not None:
        warn(
            f"{launch} starts processes, and CUDA was initialised in this one before, at {_at}. It may hold memory of a GPU "
            "that theirs need, and they set up all of that again. Move the line behind the one that makes the Accelerator or "
            "Trainer, or into the function that is launched."
        )


def _note() -> None:
    global _at
    _, script = find_caller(sys._getframe())
    if script is None or script.f_globals.get("__name__") == "threading":
        _at = f"an unknown place, in the thread {threading.current_thread().name!r}"
    else:
        text = linecache.getline(script.f_code.co_filename, script.f_lineno).strip()
        _at = f"{file_name_of(script)}:{script.f_lineno}" + (f": {text}" if text else "")
