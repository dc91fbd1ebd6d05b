"""`--deepspeed_config` on the command line of a script."""

from __future__ import annotations

import pytest

from trainkit.errors import ConfigurationError
from trainkit.launch.script_options import local_rank
from trainkit.strategies.zero.command_line import deepspeed_config


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
    with pytest.raises(ConfigurationError, match="--deepspeed_config has no value. Pass the path of a file"):
        deepspeed_config(line.split())


def test_the_arguments_are_those_that_deepspeed_adds() -> None:
    """DeepSpeed's own parser accepts the same arguments."""
    import argparse

    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--local_rank", type=int, default=-1)
    line = ["--local_rank=1", "--deepspeed", "--deepspeed_config", "ds.json"]
    parsed = parser.parse_args(line)
    assert (parsed.deepspeed_config, parsed.local_rank) == (deepspeed_config(line), local_rank(line)) == ("ds.json", 1)
