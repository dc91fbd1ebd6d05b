"""What is read from the command line of a script: the options of its launcher and its user, ``--local_rank`` above all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainkit.errors import ConfigurationError
from trainkit.launch.place import Place

__all__ = ["local_rank", "option", "placed"]


def local_rank(argv: Sequence[str]) -> int | None:
    """The number of the process on its machine by ``--local_rank N`` or ``--local_rank=N``, hyphens likewise.

    Returns:
        It; ``None`` if it is not given, is below 0, which by custom means one process alone, or is no number, which the
        script's own parser will not take.
    """
    text = option(argv, "local_rank") or ""
    return int(text) if text.isascii() and text.isdigit() else None


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of the option ``--name VALUE`` or ``--name=VALUE``, also with hyphens.

    Returns:
        The value, of several the last one, as in argparse; ``""`` if none follows; ``None`` if the option is not given.
    """
    names = {f"--{name}", f"--{name.replace('_', '-')}"}
    value: str | None = None
    for at, argument in enumerate(argv):
        if argument == "--":  # what follows are no options
            break
        option, equals, given = argument.partition("=")
        if option in names:
            following = argv[at + 1] if at + 1 < len(argv) else ""
            value = given if equals else "" if following.startswith("--") else following
    return value


def placed(place: Place | None, argv: Sequence[str]) -> Place | None:
    """The place of this process, if it agrees with the ``--local_rank`` on its command line.

    DeepSpeed's launcher and ``torch.distributed.launch`` pass it beside the variables that they set.

    Args:
        place: what the variables say; ``None``: nobody has started several processes.
        argv: the arguments of the script.

    Returns:
        The place, with the local rank where only the argument says it.

    Raises:
        ConfigurationError: it contradicts the variables, or there are none and it is not 0.
    """
    said = local_rank(argv)
    if said is None:
        return place
    if place is None:
        if said == 0:  # the only process has this number too
            return None
        raise ConfigurationError(
            f"--local_rank={said} says that this is one of several processes, but RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT are not set, so it would train alone. Start the script with what sets them: trainkit launch "
            "--nproc-per-node N script.py   (or deepspeed, or torchrun); for a single process leave --local_rank out."
        )
    if place.local_rank is None:
        return replace(place, local_rank=said)
    if place.local_rank != said:
        raise ConfigurationError(
            f"--local_rank={said}, but {place.launcher} says that this process has the number {place.local_rank} on its "
            f"machine ({place.reason}). Leave --local_rank out: what starts the processes passes it, if it has to be passed."
        )
    return place
