"""SHA-256 of what passes by."""

from __future__ import annotations

import hashlib
import queue
import threading
from types import TracebackType

__all__ = ["Digest"]

_LARGE = 2**19  # bytes of a piece from which on a thread pays


class Digest:
    """SHA-256 in a thread of its own, a few pieces behind, so that hashing and the disk need not wait for each other.

    Used as a context, it leaves no thread behind, whatever happens. Small amounts are hashed without one.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(maxsize=2)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Digest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._join()

    def update(self, piece: memoryview) -> None:
        """Take a piece; its bytes must not change before ``hexdigest``."""
        if self._thread is None and (len(piece) < _LARGE or not self._start()):
            self._hash.update(piece)
        else:
            self._pieces.put(piece)

    def hexdigest(self) -> str:
        """The digest of all pieces, 64 hexadecimal digits."""
        self._join()
        return self._hash.hexdigest()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="trainkit-digest", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: at the end of the interpreter, or the system's limit
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._hash.update(piece)

    def _join(self) -> None:
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
