"""The file that names the machines of a job, in the form that DeepSpeed and MPI have: ``hostname slots=8``, one a line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import ConfigurationError

__all__ = ["Host", "parse_hostfile", "read_hostfile"]

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: as ssh knows it: a name, an address, or ``user@name``.
        slots: how many processes run there.
    """

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str | Path) -> list[Host]:
    """The machines that a file names, in its order.

    Raises:
        ConfigurationError: it cannot be read, or :func:`parse_hostfile` does not take it.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"the hostfile {str(path)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"the hostfile {str(path)!r} is no text. It should have lines such as: node1 slots=8"
        ) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str) -> list[Host]:
    """The machines that a text names. Empty lines count for nothing, nor does what follows a ``#``.

    Args:
        text: of the file.
        source: its name, for messages.

    Raises:
        ConfigurationError: a line is no such line, or names a machine again; or there is none.
    """
    found: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = re.sub(r"(^|\s)#.*", "", line).strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None or not int(match[2]) or match[1].startswith("-"):  # which ssh would take for an option
            raise ConfigurationError(
                f"{source}, line {number}: expected the name of a machine and how many processes it is to run, as "
                f"'node1 slots=8', not {content!r}."
            )
        host = Host(match[1], int(match[2]))
        if host.address in found:
            raise ConfigurationError(
                f"{source}, line {number}: {host.address!r} is in line {found[host.address][0]} already. Name each machine "
                "once, with all its slots."
            )
        found[host.address] = number, host
    if not found:
        raise ConfigurationError(f"{source} names no machine. It should have lines such as: node1 slots=8")
    return [host for _, host in found.values()]
