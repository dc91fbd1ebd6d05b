"""``Memory``: a few short texts that outlive a restart of the processes, kept by the agent that restarts them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from trainkit.distributed.stores import connected

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["MEMORY", "Memory", "restarts"]

# Where our own agent keeps its store: "host:port".
MEMORY = "TRAINKIT_MEMORY"

_TIMEOUT = timedelta(seconds=30)


class Memory:
    """Texts by name, in the store of the agent.

    Args:
        host: of the agent that keeps the store.
        port: there.
        run: tells the jobs apart that use the same store.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        self._host, self._port, self._run = host, port, run

    def __repr__(self) -> str:
        return f"Memory({self._host!r}, {self._port}, {self._run!r})"

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Memory | None:
        """The memory that the environment variables tell of; ``None`` where no agent can restart this process."""
        run = env.get("TORCHELASTIC_RUN_ID", "")
        host, _, port = env.get(MEMORY, "").rpartition(":")
        if host and port.isdigit():
            return cls(host, int(port), run)
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent keeps one store over all restarts
            host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
            if host and port.isdigit():
                return cls(host, int(port), run)
        return None

    def set(self, key: str, text: str) -> None:
        """Keep a text under a name."""
        self._store().set(self._name(key), text)

    def get(self, key: str) -> str | None:
        """The text that is kept under a name; ``None`` if there is none."""
        store = self._store()
        if not store.check([self._name(key)]):
            return None
        kept: bytes = store.get(self._name(key))
        return kept.decode()

    def _store(self) -> TCPStore:
        from torch._C._distributed_c10d import TCPStore  # not in every build of torch

        def connect() -> TCPStore:
            return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)

        return connected(connect, self._port, _TIMEOUT.total_seconds())

    def _name(self, key: str) -> str:
        return f"trainkit/{self._run}/{key}"


def restarts(env: Mapping[str, str]) -> int:
    """How often the launcher has started the processes anew, as far as it says so."""
    count = env.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0
