"""The part of ``trainkit launch --hostfile`` on each machine: ``python -m trainkit.cli.launch_child`` and what launch takes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from trainkit.launch.lifeline import Lifeline

__all__ = ["main"]

_FAILED = 2


def main(arguments: Sequence[str]) -> int:
    """Run the workers of this machine when all machines are ready; returns their exit code."""
    unknown = _unknown_address(arguments)
    if unknown is not None:
        print(unknown, file=sys.stderr)
        return _FAILED
    with Lifeline() as lifeline:
        if not lifeline.begin():
            return _FAILED
        from trainkit.cli import main as command  # which may import much: the starter must be heard meanwhile

        code = command.main(["launch", *arguments])
        lifeline.end(code)
    return code


def _unknown_address(arguments: Sequence[str]) -> str | None:
    """What to say where the first machine has a name that is for ssh alone: the agents would look for it in vain."""
    if list(arguments[2:3]) != ["--master-addr"]:  # a single machine
        return None
    address = arguments[3]
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return (
            f"{socket.gethostname()} does not know {address!r}, where the machines are to meet: {error.strerror or error}. "
            "Name the first one as the others know it: --master-addr HOST"
        )
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
