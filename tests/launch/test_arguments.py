"""What is read from the command line of a script, and what of it contradicts the variables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainkit.errors import ConfigurationError
from trainkit.launch.arguments import deepspeed_config, local_rank, placed
from trainkit.launch.place import Place

PLACE = Place(3, 4, 1, 2, 1, 2, "10.0.0.1", 29500, "deepspeed", "it says so")


@pytest.mark.parametrize("line, expected", [
    ("", None),
    ("--deepspeed", None),
    ("--local_rank=0 --deepspeed --deepspeed_config ds.json --epochs 3", "ds.json"),
    ("--deepspeed_config=conf/a=b.json", "conf/a=b.json"),
    ("--deepspeed-config ds.json", "ds.json"),
    ("--deepspeed_config a.json --deepspeed_config=b.json", "b.json"),
    ("--deepspeed_config -", "-"),
    ("--deepspeed_config_file ds.json --my_deepspeed_config x", None),
    ("-- --deepspeed_config ds.json", None),
    ("deepspeed_config ds.json", None),
])  # fmt: skip
def test_the_file_with_deepspeeds_configuration(line: str, expected: str | None) -> None:
    assert deepspeed_config(line.split()) == expected


@pytest.mark.parametrize("line", ["--deepspeed_config", "--deepspeed_config=", "--deepspeed_config --epochs 3"])
def test_no_file_with_deepspeeds_configuration(line: str) -> None:
    with pytest.raises(ConfigurationError, match="--deepspeed_config needs the path of a file"):
        deepspeed_config(line.split())


def test_the_arguments_are_those_that_deepspeed_adds() -> None:
    """Its own parser takes what we read."""
    import argparse

    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--local_rank", type=int, default=-1)
    line = ["--local_rank=1", "--deepspeed", "--deepspeed_config", "ds.json"]
    parsed = parser.parse_args(line)
    assert (parsed.deepspeed_config, parsed.local_rank) == (deepspeed_config(line), local_rank(line)) == ("ds.json", 1)


@pytest.mark.parametrize("line, expected", [
    ("", None),
    ("--local_rank=1", 1),
    ("--local_rank 1 --x", 1),
    ("--local-rank=12", 12),  # torch.distributed.launch
    ("--local_rank=0 --local_rank=1", 1),  # as argparse has it
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
    assert placed(PLACE, []) is PLACE
    assert placed(PLACE, ["--local_rank=1"]) is PLACE
    assert placed(None, []) is None


def test_where_only_the_argument_says_it() -> None:
    """``torch.distributed.launch`` of torch 1.8 and before."""
    assert placed(replace(PLACE, local_rank=None), ["--local_rank=1"]) == PLACE


def test_an_argument_that_contradicts_the_variables() -> None:
    with pytest.raises(ConfigurationError, match=r"--local_rank=0, but deepspeed says .* the number 1 .*\(it says so\). Leave"):
        placed(PLACE, ["--local_rank=0"])


def test_an_argument_without_variables() -> None:
    assert placed(None, ["--local_rank=0"]) is None
    with pytest.raises(
        ConfigurationError, match=r"--local_rank=1 says .* RANK, .* are not set, so it would train alone. Start"
    ):
        placed(None, ["--local_rank=1"])
