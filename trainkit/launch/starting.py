"""A script that was started as one process and requests N becomes a launcher that runs its command line N times."""

from __future__ import annotations

import atexit
import linecache
import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from trainkit.console import echo, warn
from trainkit.errors import ConfigurationError
from trainkit.launch import START_FOLDER

__all__ = ["become_agent", "folder_at_start", "in_notebook", "start_command", "warn_if_cuda_initialized", "watch_cuda"]

_RUNNERS = {"pytest", "pytest.__main__", "unittest.__main__", "ipykernel_launcher", "IPython.__main__", "doctest"}
_PROGRAMS = {"pytest", "py.test", "ipython", "ipython3", "jupyter", "jupyter-lab", "jupyter-notebook"}

# Interpreter options whose value is the next argument, if it is not part of the option.
_WITH_VALUE = "cmWX"

_watching = False
_where: str | None = None


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, or IPython's shell."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython, "get_ipython", lambda: None)() is not None


def become_agent(processes: int) -> NoReturn:
    """Replace this process with a launcher that runs the same command line once for each process and returns their exit code.

    The launcher is a new Python in the same process (same process ID, same terminal): nothing of the script stays in memory or
    runs after this. Functions that the script has registered with `atexit` run, and its output is flushed, before.

    Raises:
        ConfigurationError: this command line cannot be run again.
    """
    command = start_command(processes)
    warn_if_cuda_initialized(f"devices={processes}")
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from trainkit.launch.starting import serve; serve()"
    agent = [sys.executable, "-c", code, str(processes), *command]
    folder = folder_at_start()
    if folder is not None:
        os.chdir(folder)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):  # Output that cannot be written is lost.
                stream.flush()
    if os.name == "nt":  # exec would return to the shell immediately
        os._exit(subprocess.call(agent))
    os.execv(sys.executable, agent)


def serve() -> NoReturn:
    """The program of the launcher, whose arguments are `N command…`."""
    from trainkit.launch.environment import grace, quietly

    environment = quietly(os.environ)
    processes, *command = sys.argv[1:]
    try:
        from trainkit.launch.agent import Job, run_job
        from trainkit.launch.environment import SCRIPT

        code = run_job(Job(tuple(command), environment, int(processes), launcher=SCRIPT, grace=grace(os.environ)))
    except KeyboardInterrupt:  # before there were workers
        code = 130
    except ConfigurationError as error:
        echo(f"trainkit: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def start_command(processes: int) -> list[str]:
    """The command line that has started this process.

    Raises:
        ConfigurationError: it cannot be repeated: a notebook, `-c`, standard input, a test.
    """
    main = sys.modules.get("__main__")
    _, kind = _script(sys.orig_argv)
    reason = _why_not_repeatable(main, kind)
    if reason is not None:
        raise ConfigurationError(
            f"devices={processes} needs {processes} processes, but they cannot be started from {reason}: its command line "
            "cannot be run once for each of them. Create the Trainer inside a function, and start the function: from trainkit "
            f"import notebook_launcher; notebook_launcher(function, num_processes={processes}). Or write the code to a file, "
            f"and start it: trainkit launch --nproc-per-node {processes} script.py   (or python script.py). Or use devices=1."
        )
    return [sys.executable, *sys.orig_argv[1:]]


def folder_at_start() -> str | None:
    """The working directory in which the script was started; `None` if unknown.

    Python puts it in front of the relative path of the script. If that does not show it (a module, an absolute path, a program
    that runs another script), this is the working directory when trainkit was imported.
    """
    at, kind = _script(sys.orig_argv)
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if kind == "script" and file is not None and not os.path.isabs(sys.orig_argv[at]):
        for ending in (sys.orig_argv[at], os.path.join(sys.orig_argv[at], "__main__.py")):
            if file.endswith(os.sep + ending):
                return str(file[: -len(ending)])
    return START_FOLDER


def _why_not_repeatable(main: ModuleType | None, kind: str) -> str | None:
    """The kind of program whose command line cannot be run again; `None` if it can."""
    name = getattr(getattr(main, "__spec__", None), "name", None)
    program = os.path.basename(sys.argv[0]).removesuffix(".exe") if sys.argv else ""
    if in_notebook() or name in ("ipykernel_launcher", "IPython.__main__"):
        return "a notebook"
    if multiprocessing.parent_process() is not None:
        return "a multiprocessing child"
    if getattr(sys, "frozen", False):
        return "a frozen program"
    if kind == "command":
        return "python -c"
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return "an interactive Python"
    if name in _RUNNERS or program in _PROGRAMS:
        return f"{(name or program).split('.')[0]}"
    if kind == "input":
        return "standard input"
    return None if sys.executable and main is not None else "a program that Python is embedded in"


def _script(arguments: list[str]) -> tuple[int, str]:
    """The index of the program in the interpreter's arguments, and its kind: "script", "module", "command" or "input"."""
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        argument = arguments[at]
        at += 1
        if argument.startswith("--"):
            at += argument == "--check-hash-based-pycs"
            continue
        for position, letter in enumerate(argument[1:], 2):
            if letter in "cm":
                return at, "command" if letter == "c" else "module"
            if letter in _WITH_VALUE:
                at += position == len(argument)
                break
    return at, "input" if at >= len(arguments) or arguments[at] == "-" else "script"


# ---------------------------------------------------------------------------------------------------------------- debug mode


def watch_cuda() -> None:
    """In debug mode, record the line that initializes CUDA from now on."""
    from trainkit.config.settings import debugging  # It imports torch, which the launcher must not do before `quietly`.

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
    """In debug mode, warn if this process has initialized CUDA before it starts others."""
    if _where is not None:
        warn(
            f"{launcher} starts processes, but this process has already initialized CUDA, at {_where}. It may use GPU memory "
            "that they need. Move that line after the one that creates the Accelerator or Trainer, or into the function."
        )


def _record_line() -> None:
    from trainkit.distributed.world import file_name_of, find_caller

    global _where
    _, frame = find_caller(sys._getframe())
    if frame is None or frame.f_globals.get("__name__") == "threading":
        _where = f"an unknown line of the thread {threading.current_thread().name!r}"
    else:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        _where = f"{file_name_of(frame)}:{frame.f_lineno}" + (f": {text}" if text else "")
