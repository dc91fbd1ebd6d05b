"""The last things that a process does: what it leaves behind, whom it lets go first, and its end."""

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

__all__ = ["end_process", "leave_word", "let_go", "outlive", "say", "stacks", "take_back_word"]

_SETTLED = 2.5  # seconds that the main process, which is the hub, outlives the others
_FLUSH = 1.0  # seconds that output already written has to get out
_PARTED = 2.0  # seconds that the threads of process groups have to end
_OURS = ("trainkit-channel", "trainkit-watchdog")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun reads why a process has failed


def stacks() -> str:
    """What every thread of this process is doing, the main one first; without those that are here to tell of it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda one: one[0] != main):
        name = names.get(ident, f"thread {ident}")
        if name not in _OURS:
            texts.append(f"\n{name}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(texts)


def leave_word(failure: Failure, rank: int) -> None:
    """Tell torchrun why this process fails. It shows what it has of the process whose end it sees first.

    Args:
        failure: the first one; so that the right traceback is shown whichever process that is.
        rank: of this process.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    why = "" if failure.rank == rank else f"rank {rank} ended because {failure}\n"
    more = {"py_callstack": f"{why}{failure.text}", "timestamp": str(int(failure.time))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": f"{why}{failure.summary}", "extraInfo": more}}, file)


def take_back_word() -> None:
    """Remove what :func:`leave_word` has left: the process goes on."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def say(text: str) -> None:
    """Write to standard error from any thread, even if another one is in the middle of that."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def outlive(channel: Channel, failure: Failure) -> None:
    """Before this process ends because of another one: let those go first that must.

    The hub is in the main process, which therefore ends after all but the first that has failed; that one prints its
    traceback last. A parent that waits for its children, as ``torch.multiprocessing.spawn`` does, reports the one that ends
    first, so there it is the other way round.
    """
    others = set(range(channel.size)) - {channel.rank, failure.rank}
    if multiprocessing.parent_process() is not None:
        channel.wait(lambda: failure.rank in channel.gone, 2 * _SETTLED)
    elif channel.rank == 0:
        channel.wait(lambda: others <= set(channel.gone), _SETTLED)


def let_go(groups: list[Any]) -> None:
    """Drop process groups, and wait until their threads have ended.

    A thread of gloo's needs Python's lock to forget a tensor that it has worked on. If it asks for it while the interpreter
    shuts down, the process ends by SIGABRT, whatever its exit code was to be (pytorch/pytorch#190489). An operation that is
    under way is waited for too, and its partner may be gone: so there is a limit.

    Args:
        groups: nobody else refers to them. Of others the threads stay: torch's DDP, once it was used, refers to its group for
            good. What such a thread has to forget was long ago, and meanwhile it can have the lock.
    """
    _within(_PARTED, groups.clear)


def end_process(code: int) -> None:
    """End this process now, whatever its threads are doing; its children too, if they are to end with it."""
    _within(_FLUSH, _flush)
    _within(_FLUSH, _end_children)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_children() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _within(limit: float, function: Callable[[], None]) -> None:
    """Call what may wait for a lock that a thread will never give back."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit)
