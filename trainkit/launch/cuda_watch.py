"""In debug mode: record which line initializes CUDA, and name it in a warning when processes are started later."""

from __future__ import annotations

import linecache
import sys
import threading

from trainkit.config.settings import debugging
from trainkit.console import warn
from trainkit.distributed.world import file_name_of, find_caller

__all__ = ["warn_if_cuda_initialized", "watch_cuda"]

_watching = False
_where: str | None = None


def watch_cuda() -> None:
    """In debug mode, record the line that initializes CUDA from now on."""
    global _watching, _where
    if _watching or not debugging():
        return
    import torch

    _watching = True
    if torch.cuda.is_initialized():
        _where = "a line before 'import trainkit' (to see which, import trainkit first)"
    else:
        torch.cuda._lazy_call(_record_line)  # torch has no public hook


def warn_if_cuda_initialized(launcher: str) -> None:
    """In debug mode, warn if this process has initialized CUDA before it starts others.

    Args:
        launcher: what starts them, as the user calls it.
    """
    if _where is not None:
        warn(
            f"{launcher} starts processes, but this process has already initialized CUDA, at {_where}. It may use GPU memory "
            "that they need. Move that line after the one that creates the Accelerator or Trainer, or into the function."
        )


def _record_line() -> None:
    global _where
    _, frame = find_caller(sys._getframe())
    if frame is None or frame.f_globals.get("__name__") == "threading":
        _where = f"an unknown line of the thread {threading.current_thread().name!r}"
    else:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        _where = f"{file_name_of(frame)}:{frame.f_lineno}" + (f": {text}" if text else "")
