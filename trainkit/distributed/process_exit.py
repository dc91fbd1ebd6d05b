"""The exit of a process: stacks, the error file for torchrun, the order in which ranks exit, and the exit itself."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure

__all__ = [
    "end_after_others",
    "end_process",
    "release_groups",
    "remove_error_file",
    "stacks",
    "write_error_file",
    "write_stderr",
]

_HUB_LINGER = 2.5  # seconds that the main process, which is the hub, waits for other ranks to end
_FLUSH = 1.0  # seconds to flush output
_GROUP_LINGER = 2.0  # seconds for the threads of process groups to end
_OURS = ("trainkit-channel", "trainkit-watchdog")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the file from which torchrun reads why a process failed


def stacks() -> str:
    """The stacks of all threads of this process, the main thread first, without the threads that watch for failures."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda one: one[0] != main):
        name = names.get(ident, f"thread {ident}")
        if name not in _OURS:
            texts.append(f"\n{name}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(texts)


def write_error_file(failure: Failure, rank: int) -> None:
    """Write the error file, from which torchrun shows why a process failed. It shows the file of the first process that ends.

    Args:
        failure: the first failure, so that the file of any process has the right traceback.
        rank: the rank of this process.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    why = "" if failure.rank == rank else f"rank {rank} ended because {failure}\n"
    more = {"py_callstack": f"{why}{failure.text}", "timestamp": str(int(failure.time))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": f"{why}{failure.summary}", "extraInfo": more}}, file)


def remove_error_file() -> None:
    """Remove the file of `write_error_file`: the process continues."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def write_stderr(text: str) -> None:
    """Write to standard error from any thread, even while another thread writes to it."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def end_after_others(channel: Channel, failure: Failure) -> None:
    """Before this process ends because of a failure of another rank: wait for the ranks that must end first.

    The hub is in the main process, which therefore ends after all ranks but the first failed one; that rank prints its
    traceback last. A parent that waits for its children, as `torch.multiprocessing.spawn` does, reports the child that ends
    first: there the first failed rank ends before the others.
    """
    others = set(range(channel.size)) - {channel.rank, failure.rank}
    if multiprocessing.parent_process() is not None:
        channel.wait(lambda: failure.rank in channel.exited, 2 * _HUB_LINGER)
    elif channel.rank == 0:
        channel.wait(lambda: others <= set(channel.exited), _HUB_LINGER)


def release_groups(groups: list[Any]) -> None:
    """Release process groups, and wait until their threads have ended.

    A gloo thread needs the GIL to release a tensor. If it requests the GIL while the interpreter shuts down, the process ends
    by SIGABRT, whatever its exit code (pytorch/pytorch#190489). This also waits for a pending operation, whose peer may have
    exited, so there is a timeout.

    Args:
        groups: the only references to these groups. The threads of other groups continue: torch's DDP keeps a reference to its
            group. Such a thread has no more tensors to release.
    """
    _run_within(_GROUP_LINGER, groups.clear)


def end_process(code: int) -> None:
    """End this process now, whatever its threads are doing, and its daemonic children."""
    _run_within(_FLUSH, _flush)
    _run_within(_FLUSH, _end_children)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_children() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _run_within(limit: float, function: Callable[[], None]) -> None:
    """Call a function that may wait for a lock forever; return after `limit` seconds at the latest."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit)
