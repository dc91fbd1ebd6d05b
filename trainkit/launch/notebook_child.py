"""The program of the processes that ``notebook_launcher`` starts: fetch the function, call it, send back what it returned."""

from __future__ import annotations

import io
import json
import linecache
import os
import signal
import sys
import traceback
from types import TracebackType
from typing import Any

from trainkit.errors import ConfigurationError, ProcessFailedError

__all__ = ["main", "run_replica"]

# What the agent sets for torch.distributed, and XLA's runtime must not take for the variables of a launcher.
_OF_AGENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINKIT_LAUNCHER")
_OF_ELASTIC = ("TORCHELASTIC_", "GROUP_", "ROLE_")


class _Stream(io.TextIOWrapper):
    """Standard output, or standard error, that somebody else passes on; what it looks like there counts."""

    seen = False

    def isatty(self) -> bool:
        """Whether what is written over itself is seen so."""
        return self.seen


def main() -> None:
    """Do the work that was handed to this process; its whole program."""
    sys.excepthook = _print_error
    from trainkit.launch.delivery import HANDED

    handed = json.loads(os.environ.pop(HANDED))
    if handed["replicas"] is None:
        _run(handed, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    else:
        _launch_replicas(handed)


def _launch_replicas(handed: dict[str, Any]) -> None:
    """Let XLA's runtime start its processes, or its threads, each of which calls :func:`run_replica`."""
    from trainkit.distributed.failure import summary
    from trainkit.distributed.process_exit import end_process
    from trainkit.launch.delivery import Worker
    from trainkit.registry import load_strategy

    for name in [name for name in os.environ if name in _OF_AGENT or name.startswith(_OF_ELASTIC)]:
        del os.environ[name]
    os.environ.update(handed["met at"])  # which the user has set, for the hosts of a slice
    # the runtime would wait for its processes, and what is sent to this one does not reach them; the agent ends them
    signal.signal(signal.SIGINT, lambda *_: end_process(130))
    try:
        load_strategy("xla").launch(run_replica, (handed,), devices=handed["replicas"] or None)
    except Exception as error:  # of the runtime, where no replica has told of it
        Worker(handed, 0, 0).failed("calling", summary(error), follows=True)
        raise


def run_replica(index: int, handed: dict[str, Any]) -> None:
    """The work of one replica; ``index`` is its number among all."""
    try:
        _run(handed, index, index)
    except ProcessFailedError:  # another one has failed, and shows it
        raise SystemExit(1) from None
    except Exception as error:  # to be shown here, without what runs replicas
        _print_error(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _run(handed: dict[str, Any], rank: int, local_rank: int) -> None:
    from trainkit.distributed.failure import is_communication, summary
    from trainkit.launch.by_value import pack_result, unpack
    from trainkit.launch.delivery import Worker

    worker = Worker(handed, rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    _settle(worker.settings, local_rank)
    try:
        function, args = unpack(worker.work())
    except Exception as error:
        worker.failed("loading", summary(error))
        if rank == 0 and not isinstance(error, ImportError | AttributeError):  # which say all in their line
            traceback.print_exception(error)
        raise SystemExit(1) from None
    try:
        result = function(*args)
    except Exception as error:
        worker.failed("calling", summary(error), isinstance(error, ProcessFailedError) or is_communication(error))
        raise
    try:
        worker.done(pack_result(result) if rank == 0 else None)
    except ConfigurationError as error:  # nothing that the others should be ended for
        worker.failed("returning", str(error))


def _settle(settings: dict[str, Any], local_rank: int) -> None:
    """Be at home as in the process that has started this one."""
    sys.argv[:] = settings["argv"]
    for name, lines in settings["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    for name, seen in settings["seen"].items():
        if isinstance(getattr(sys, name), _Stream):  # by another replica, which is a thread
            continue
        before = getattr(sys, name).detach()
        stream = _Stream(before, encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True)
        stream.seen = seen and local_rank == 0
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback from the user's function on. Ctrl-C is shown where it was pressed."""
    if kind is KeyboardInterrupt:
        return
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<string>"):
        inner = inner.tb_next
    traceback.print_exception(kind, error, inner or trace)  # which knows the lines of cells, and sys.__excepthook__ does not
