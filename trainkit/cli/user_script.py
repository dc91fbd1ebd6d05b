"""Run a user's script inside a command: for `trainkit plan` and `trainkit verify-resume`."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import ConfigurationError

__all__ = ["existing_script", "run_script", "script_traceback"]


def existing_script(path: str, example: str) -> str:
    """The path of a script; raises if it does not exist. `example` is a command for the message."""
    script = Path(path)
    if not script.is_file():
        problem = "is a folder" if script.is_dir() else "does not exist"
        raise ConfigurationError(f"Expected a Python file, got {path!r}, which {problem}. Fix: {example}")
    return str(script)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as `__main__` in this process."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [script, *arguments], [str(Path(script).resolve().parent), *sys.path]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def script_traceback(error: Exception, script: str) -> str:
    """The traceback of an error, starting at the first frame in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
