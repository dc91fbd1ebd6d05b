"""The hostfile, in the form of DeepSpeed and MPI: lines such as `hostname slots=8`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from trainkit.errors import ConfigurationError

__all__ = ["Host", "read_hostfile"]


class Host(NamedTuple):
    """A host, by the name that ssh knows (also `user@name`), and its number of processes."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file, in its order; `#` begins a comment.

    Raises:
        ConfigurationError: no such file, a wrong line, a host that is named twice, or no hosts.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file with lines such as: node1 slots=8"
        raise ConfigurationError(f"the hostfile {str(path)!r} cannot be read: {why}.") from error
    hosts: dict[str, tuple[Host, int]] = {}  # by address, with the line
    for number, line in enumerate(text.splitlines(), 1):
        content = re.sub(r"(^|\s)#.*", "", line).strip()
        if not content:
            continue
        match = re.fullmatch(r"([^\s-]\S*)\s+slots=0*([1-9]\d*)", content)  # ssh would take -x for an option
        if match is None:
            problem = f"expected a host and its number of processes, such as 'node1 slots=8', not {content!r}."
            raise ConfigurationError(f"{path}, line {number}: {problem}")
        host = Host(match[1], int(match[2]))
        if host.address in hosts:
            problem = f"{host.address!r} is already in line {hosts[host.address][1]}. Name each host once, with all its slots."
            raise ConfigurationError(f"{path}, line {number}: {problem}")
        hosts[host.address] = host, number
    if not hosts:
        raise ConfigurationError(f"{path} contains no hosts. Expected lines such as: node1 slots=8")
    return [host for host, _ in hosts.values()]
