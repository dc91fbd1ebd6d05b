"""`RankInfo`: the ranks that a launcher has set for this process. Functions that read numbers from environment variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.errors import ConfigurationError

__all__ = ["RankInfo", "checked", "is_local", "number", "port_number", "stable_port"]

_FIRST_PORT, _PORTS = 12000, 16000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class RankInfo:
    """What a launcher has set for the process that it started; `None`: not set.

    Attributes:
        rank: rank of the process.
        size: number of processes (world size).
        local_rank: rank among the processes of its node.
        local_size: number of processes of its node.
        node: rank of its node.
        nodes: number of nodes.
        master_addr: name or address of the node of rank 0; "" for a single process.
        master_port: port on that node; 0 for a single process.
        launcher: what started the process, for messages: "torchrun", "SLURM", …
        reason: how the launcher was recognized, for messages.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    nodes: int | None
    master_addr: str
    master_port: int
    launcher: str
    reason: str


def number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set, as an integer ≥ 0; `None` if none is set.

    Raises:
        ConfigurationError: it is not such a number.
    """
    name = next((name for name in names if env.get(name, "") != ""), None)
    if name is None:
        return None
    text = env[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ConfigurationError(f"{name} must be an integer ≥ 0, not {env[name]!r}. Correct it, or unset it: unset {name}")
    return int(text)


def port_number(env: Mapping[str, str], name: str) -> int | None:
    """The variable as a port; `None` if it is not set."""
    port = number(env, name)
    if port is not None and not 0 < port < 2**16:
        raise ConfigurationError(f"{name} must be a port from 1 to 65535, not {port}.")
    return port


def stable_port(*job: str | None) -> int:
    """A port that is the same for all processes of a job, and most likely different for another job."""
    text = ".".join(part or "" for part in job)
    return _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS


def is_local(address: str) -> bool:
    """Whether an address is a loopback address, which no other node can reach."""
    return address in ("localhost", "::1") or address.startswith("127.")


def checked(place: RankInfo, rank: str, size: str, local_rank: str = "", local_size: str = "") -> RankInfo:
    """The ranks, if they are consistent.

    Args:
        place: the numbers that were read.
        rank: the name of the variable of the rank, for messages.
        size: the name of the variable of the number of processes.
        local_rank: the name of the variable of the local rank.
        local_size: the name of the variable of the number of local processes.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """
    pairs = [
        (rank, place.rank, size, place.size),
        (local_rank, place.local_rank, local_size, place.local_size),
        (local_rank, place.local_rank, size, place.size),
        ("the rank of the node", place.node, "the number of nodes", place.nodes),
    ]
    for low, lower, high, higher in pairs:
        if lower is not None and higher is not None and lower >= higher:
            raise ConfigurationError(
                f"{low}={lower}, but {high}={higher}, which allows 0 to {higher - 1}. {place.launcher} sets these variables. "
                "If you set them yourself, set all of them, or unset them and use: trainkit launch --nproc-per-node N script.py"
            )
    if place.local_size is not None and place.local_size > place.size:
        raise ConfigurationError(
            f"{local_size}={place.local_size}, but {size}={place.size}: a node cannot have more processes than there are in "
            "all. Set both, or unset them and use: trainkit launch --nproc-per-node N script.py"
        )
    return place
