"""The program of the processes that ``notebook_launcher`` starts: load the function, call it, save its result."""

from __future__ import annotations

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

__all__ = ["CALL", "SETTINGS", "TASK", "main", "read_reports", "run_replica"]

TASK = "TRAINKIT_NOTEBOOK_TASK"  # the environment variable that tells a process what to do, as JSON
CALL, SETTINGS = "call", "settings.json"  # files for all processes
_RESULT, _FAILURES = "result", "failures.jsonl"  # files from them, in a folder for each start

# Variables that the agent sets for torch.distributed, which XLA's runtime must not take for those of a launcher.
_OF_AGENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINKIT_LAUNCHER")
_OF_ELASTIC = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def main() -> None:
    """The whole program of a process."""
    sys.excepthook = _print_error
    task = json.loads(os.environ.pop(TASK))
    if task["replicas"] is None:
        _run(task, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    else:
        _launch_replicas(task)


def read_reports(folder: Path) -> tuple[list[dict[str, Any]], bytes | None]:
    """Failures in the order in which they happened, and the pickled result of rank 0, of the last start."""
    last = folder / str(max((int(path.name) for path in folder.iterdir() if path.is_dir()), default=0))
    failures, result = last / _FAILURES, last / _RESULT
    lines = failures.read_text("utf-8").splitlines() if failures.exists() else []
    return [json.loads(line) for line in lines], result.read_bytes() if result.exists() else None


def _launch_replicas(task: dict[str, Any]) -> None:
    """Let XLA's runtime start its processes or threads, each of which calls :func:`run_replica`."""
    from trainkit.distributed.failure import summary
    from trainkit.distributed.process_exit import end_process
    from trainkit.registry import load_strategy

    for name in [name for name in os.environ if name in _OF_AGENT or name.startswith(_OF_ELASTIC)]:
        del os.environ[name]
    os.environ.update(task["master"])
    # the runtime would wait for its processes, which do not get the signals that this one gets
    signal.signal(signal.SIGINT, lambda *_: end_process(130))
    try:
        load_strategy("xla").launch(run_replica, (task,), devices=task["replicas"] or None)
    except Exception as error:  # of the runtime, if no replica has reported one
        _report(_start_folder(task), 0, "calling", summary(error), follows=True)
        raise


def run_replica(index: int, task: dict[str, Any]) -> None:
    """Run the function as one XLA replica with this rank."""
    try:
        _run(task, index, index)
    except ProcessFailedError:  # of another replica, which prints it
        raise SystemExit(1) from None
    except Exception as error:  # printed here, without the frames of the runtime
        _print_error(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _run(task: dict[str, Any], rank: int, local_rank: int) -> None:
    from trainkit.distributed.failure import is_communication, summary
    from trainkit.launch.pickling import dump_result, load

    folder = _start_folder(task)
    _restore(json.loads(Path(task["folder"], SETTINGS).read_text()), local_rank)
    try:
        function, args = load(Path(task["folder"], CALL).read_bytes())
    except Exception as error:
        _report(folder, rank, "loading", summary(error))
        if rank == 0 and not isinstance(error, ImportError | AttributeError):  # their message says it all
            traceback.print_exception(error)
        raise SystemExit(1) from None
    try:
        result = function(*args)
    except Exception as error:
        follows = isinstance(error, ProcessFailedError) or is_communication(error)  # of the failure of another rank
        _report(folder, rank, "calling", summary(error), follows)
        raise
    if rank == 0:
        try:
            (folder / _RESULT).write_bytes(dump_result(result))
        except ConfigurationError as error:  # no reason to stop the other ranks
            _report(folder, rank, "returning", str(error))


def _start_folder(task: dict[str, Any]) -> Path:
    folder = Path(task["folder"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    folder.mkdir(exist_ok=True)
    return folder


def _report(folder: Path, rank: int, step: str, summary: str, follows: bool = False) -> None:
    """Tell the notebook of a failure in the step "loading", "calling" or "returning"."""
    with open(folder / _FAILURES, "a", encoding="utf-8") as file:  # one write, which is not mixed with those of other ranks
        file.write(json.dumps({"rank": rank, "step": step, "summary": summary, "follows": follows}) + "\n")


def _restore(settings: dict[str, Any], local_rank: int) -> None:
    """Take over the arguments, the source of cells and the kind of output of the notebook's process."""
    sys.argv[:] = settings["argv"]
    for name, lines in settings["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    for name, shows_progress in settings["shows_progress"].items():
        stream = getattr(sys, name)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True)
        if shows_progress and local_rank == 0:
            stream.isatty = lambda: True  # a notebook redraws a line like a terminal


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback from the user's function on; nothing for Ctrl-C, which the notebook shows."""
    if kind is KeyboardInterrupt:
        return
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<string>"):
        inner = inner.tb_next
    traceback.print_exception(kind, error, inner or trace)  # which finds the source of cells, unlike sys.__excepthook__
