"""``Place``: which of how many processes this one is; and how such numbers are read from environment variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.errors import ConfigurationError

__all__ = ["Place", "checked", "is_local", "number", "port_number", "stable_port"]

_FIRST_PORT, _PORTS = 12000, 16000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Place:
    """What a launcher says of the process that it started.

    Attributes:
        rank: the number of the process among all, from 0.
        size: the number of processes.
        local_rank: its number among those of its machine; ``None``: not said.
        local_size: the processes of its machine; ``None``: not said.
        node: the number of its machine; ``None``: not said.
        nodes: the number of machines; ``None``: not said.
        master_addr: a name or address of the machine of rank 0; "" for a single process.
        master_port: the port there at which the processes meet; 0 for a single process.
        launcher: what started the process, for messages: "torchrun", "SLURM", …
        reason: by what it was recognised, for messages.
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
    """The first of the variables that is set, as an integer from 0 on; ``None`` if none is set.

    Raises:
        ConfigurationError: it is no such number.
    """
    name = next((name for name in names if env.get(name, "") != ""), None)
    if name is None:
        return None
    text = env[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ConfigurationError(f"{name} must be a whole number from 0 on, got {env[name]!r}. Unset it, or set it right.")
    return int(text)


def port_number(env: Mapping[str, str], name: str) -> int | None:
    """The variable as a port; ``None`` if it is not set."""
    port = number(env, name)
    if port is not None and not 0 < port < 2**16:
        raise ConfigurationError(f"{name} must be a port from 1 to 65535, got {port}.")
    return port


def stable_port(*job: str | None) -> int:
    """A port that all processes of a job work out alike, and another job most likely not."""
    text = ".".join(part or "" for part in job)
    return _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS


def is_local(address: str) -> bool:
    """Whether an address can only mean the machine that uses it."""
    return address in ("localhost", "::1") or address.startswith("127.")


def checked(place: Place, rank: str, size: str, local_rank: str = "", local_size: str = "") -> Place:
    """The place, if its numbers fit each other.

    Args:
        place: what was read.
        rank: the variable that the rank was read from; likewise ``size``, ``local_rank``, ``local_size``.

    Raises:
        ConfigurationError: they do not fit.
    """
    pairs = [
        (rank, place.rank, size, place.size),
        (local_rank, place.local_rank, local_size, place.local_size),
        (local_rank, place.local_rank, size, place.size),
        ("the number of the machine", place.node, "the number of machines", place.nodes),
    ]
    for low, lower, high, higher in pairs:
        if lower is not None and higher is not None and lower >= higher:
            raise ConfigurationError(
                f"{low}={lower}, but {high}={higher}: of {higher} the numbers go from 0 to {higher - 1}. {place.launcher} sets "
                "these variables; if you set them yourself, set all of them, or unset them and use: "
                "trainkit launch --nproc-per-node N script.py"
            )
    if place.local_size is not None and place.local_size > place.size:
        raise ConfigurationError(
            f"{local_size}={place.local_size}, but {size}={place.size}: no machine has more of the processes than there are."
        )
    return place
