"""Options of a script's command line, and options that contradict the environment variables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainkit.errors import ConfigurationError
from trainkit.launch.environment import RankInfo, local_rank, with_local_rank

PLACE = RankInfo(3, 4, 1, 2, 1, 2, "10.0.0.1", 29500, "deepspeed", "it says so")


@pytest.mark.parametrize("line, expected", [
    ("", None),
    ("--local_rank=1", 1),
    ("--local_rank 1 --x", 1),
    ("--local-rank=12", 12),  # torch.distributed.launch
    ("--local_rank=0 --local_rank=1", 1),  # the last one counts, as with argparse
    ("--local_rank=-1", None),
    ("--local_rank -1", None),
    ("--local_rank --x", None),
    ("--local_rank", None),
    ("--local_rank=", None),
    ("--local_rank=auto", None),
    ("--my_local_rank 1", None),
    ("-- --local_rank=1", None),
])  # fmt: skip
def test_local_ranks(line: str, expected: int | None) -> None:
    assert local_rank(line.split()) == expected


def test_an_argument_that_agrees() -> None:
    """A `--local_rank` that agrees with the variables, or no such option, changes nothing."""
    assert with_local_rank(PLACE, []) is PLACE
    assert with_local_rank(PLACE, ["--local_rank=1"]) is PLACE
    assert with_local_rank(None, []) is None


def test_only_the_argument_has_the_local_rank() -> None:
    """`torch.distributed.launch` of torch 1.8 and earlier passes the local rank only as an argument."""
    assert with_local_rank(replace(PLACE, local_rank=None), ["--local_rank=1"]) == PLACE


def test_an_argument_that_contradicts_the_variables() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--local_rank=0, but the local rank .* is 1 .* deepspeed \(it says so\). Remove"
    ):
        with_local_rank(PLACE, ["--local_rank=0"])


def test_an_argument_without_variables() -> None:
    """`--local_rank=1` without the variables of a launcher is an error; `--local_rank=0` is one process."""
    assert with_local_rank(None, ["--local_rank=0"]) is None
    with pytest.raises(
        ConfigurationError, match=r"--local_rank=1 means .* RANK, .* are not set, so it would train alone. Start"
    ):
        with_local_rank(None, ["--local_rank=1"])
