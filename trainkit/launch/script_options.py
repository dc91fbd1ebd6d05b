"""Options that a launcher passes on the command line of a script, in particular `--local_rank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainkit.errors import ConfigurationError
from trainkit.launch.rank_info import RankInfo

__all__ = ["local_rank", "option", "options", "placed"]


def local_rank(argv: Sequence[str]) -> int | None:
    """The local rank by `--local_rank N` or `--local_rank=N`, also with a hyphen.

    Returns:
        The local rank; `None` if it is not given, is negative, which by custom means a single process, or is not a number,
        which the script's own parser will refuse.
    """
    text = option(argv, "local_rank") or ""
    return int(text) if text.isascii() and text.isdigit() else None


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of the option `--name VALUE` or `--name=VALUE`, also with hyphens.

    Returns:
        The value, the last of several, as in argparse; `""` if no value follows; `None` if the option is not given.
    """
    return next(iter(reversed(options(argv, name))), None)


def options(argv: Sequence[str], name: str) -> list[str]:
    """The values of an option that may be given several times."""
    names = {f"--{name}", f"--{name.replace('_', '-')}"}
    values: list[str] = []
    for at, argument in enumerate(argv):
        if argument == "--":  # the rest are not options
            break
        option, equals, given = argument.partition("=")
        if option in names:
            following = argv[at + 1] if at + 1 < len(argv) else ""
            values.append(given if equals else "" if following.startswith("--") else following)
    return values


def placed(place: RankInfo | None, argv: Sequence[str]) -> RankInfo | None:
    """The ranks of this process, checked against the `--local_rank` on its command line.

    DeepSpeed's launcher and `torch.distributed.launch` pass it in addition to environment variables.

    Args:
        place: the ranks in environment variables; `None`: this is a single process.
        argv: the arguments of the script.

    Returns:
        The ranks, with the local rank from the argument if no variable sets it.

    Raises:
        ConfigurationError: the argument contradicts the variables, or is not 0 and there are no variables.
    """
    given = local_rank(argv)
    if given is None:
        return place
    if place is None:
        if given == 0:  # a single process has this local rank too
            return None
        raise ConfigurationError(
            f"--local_rank={given} means that this is one of several processes, but RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT are not set, so it would train alone. Start the script with a launcher, which sets them: trainkit "
            "launch --nproc-per-node N script.py   (or deepspeed, or torchrun). For a single process, remove --local_rank."
        )
    if place.local_rank is None:
        return replace(place, local_rank=given)
    if place.local_rank != given:
        raise ConfigurationError(
            f"--local_rank={given}, but the local rank of this process is {place.local_rank} according to {place.launcher} "
            f"({place.reason}). Remove --local_rank: the launcher passes it if necessary."
        )
    return place
