"""The program of the processes that `notebook_launcher` starts: load the function, call it, save its result."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from trainkit.errors import ConfigurationError, ProcessFailedError

__all__ = ["CALL", "FOLDER", "TASK", "main", "read_reports", "run_replica"]

FOLDER = "TRAINKIT_NOTEBOOK_FOLDER"  # the environment variable with the folder of the call
CALL, TASK = "call", "task.json"  # files for all processes
_RESULT, _FAILURES = "result", "failures.jsonl"  # files from them, in a folder for each start


def main() -> None:
    """Run one of the processes of a call."""
    sys.excepthook = _print_error
    folder = os.environ.pop(FOLDER)
    task = json.loads(Path(folder, TASK).read_text())
    if task["replicas"] is None:
        _run(folder, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    else:
        _launch_replicas(folder, task)


def read_reports(folder: Path) -> tuple[list[dict[str, Any]], bytes | None]:
    """The failures of the last start, in the order in which they happened, and the pickled result of rank 0."""
    last = folder / str(max((int(path.name) for path in folder.iterdir() if path.is_dir()), default=0))
    failures, result = last / _FAILURES, last / _RESULT
    lines = failures.read_text("utf-8", errors="replace").splitlines() if failures.exists() else []
    reports = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a full disk has cut it off
            reports.append(json.loads(line))
    return reports, result.read_bytes() if result.exists() else None


def _launch_replicas(folder: str, task: dict[str, Any]) -> None:
    """Let XLA's runtime start its processes or threads, each of which calls `run_replica`."""
    from trainkit.distributed.failure import summary
    from trainkit.distributed.failure_handling import end_process
    from trainkit.registry import load_strategy

    os.environ.clear()  # the agent's variables, which XLA's runtime would mistake for those of a launcher
    os.environ.update(task["environment"])
    # the runtime would wait for its processes, which do not get the signals that this one gets
    signal.signal(signal.SIGINT, lambda *_: end_process(130))
    try:
        load_strategy("xla").launch(run_replica, (folder,), devices=task["replicas"] or None)
    except Exception as error:  # an error of the runtime, if no replica has reported one
        _report(_start_folder(folder), 0, summary(error), follows=True)
        raise


def run_replica(index: int, folder: str) -> None:
    """Run the function as one XLA replica with this rank."""
    try:
        _run(folder, index, index)
    except Exception as error:
        if not isinstance(error, ProcessFailedError):  # the failure of another replica, which prints it
            _print_error(type(error), error, error.__traceback__)  # without the frames of the runtime
        raise SystemExit(1) from None


def _run(folder: str, rank: int, local_rank: int) -> None:
    from trainkit.distributed.failure import is_communication, summary
    from trainkit.launch.pickling import dump_result, load

    reports = _start_folder(folder)
    _restore(json.loads(Path(folder, TASK).read_text()), local_rank)
    try:
        function, args = load(Path(folder, CALL).read_bytes())
    except Exception as error:
        why = (
            f"notebook_launcher: the function or its arguments cannot be loaded in another process: {summary(error)}. Modules "
            "are imported there from sys.path. Define the function in a cell or in the script, save the module to a file, or "
            "send it by value: cloudpickle.register_pickle_by_value(module)"
        )
        _report(reports, rank, why, refused=True)
        if rank == 0 and not isinstance(error, ImportError | AttributeError):  # their message is enough
            traceback.print_exception(error)
        raise SystemExit(1) from None
    try:
        result = function(*args)
    except Exception as error:
        _report(reports, rank, summary(error), follows=isinstance(error, ProcessFailedError) or is_communication(error))
        raise
    if rank == 0:
        try:
            (reports / _RESULT).write_bytes(dump_result(result))
        except ConfigurationError as error:  # no reason to stop the other ranks
            _report(reports, rank, str(error), refused=True)


def _start_folder(folder: str) -> Path:
    path = Path(folder, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    path.mkdir(exist_ok=True)
    return path


def _report(folder: Path, rank: int, summary: str, refused: bool = False, follows: bool = False) -> None:
    """Report a failure: `refused` if something cannot be sent, `follows` if it follows from that of another rank."""
    with open(folder / _FAILURES, "a", encoding="utf-8") as file:  # one write, which is not mixed with those of other ranks
        file.write(json.dumps({"rank": rank, "summary": summary, "refused": refused, "follows": follows}) + "\n")


def _restore(task: dict[str, Any], local_rank: int) -> None:
    """Set the arguments, the source of cells and the kind of output as in the notebook's process."""
    sys.argv[:] = task["argv"]
    linecache.cache.update((name, tuple(entry)) for name, entry in task["sources"].items())
    for name, shows_progress in task["shows_progress"].items():
        stream = getattr(sys, name)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True)
        if shows_progress and local_rank == 0:
            stream.isatty = lambda: True  # a notebook redraws a line like a terminal


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback, starting at the user's function; nothing for Ctrl-C, which the notebook shows."""
    if kind is KeyboardInterrupt:
        return
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<string>"):
        inner = inner.tb_next
    traceback.print_exception(kind, error, inner or trace)  # which finds the source of cells, unlike sys.__excepthook__
