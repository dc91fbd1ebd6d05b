"""With the path of a checkpoint, its hyper-parameters are the defaults of the module's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs.command_lines import Configured, Wider, command_line
from torch import nn

from trainkit.cli import TrainkitArgumentParser, TrainkitCLI

OFF = ("--trainer.logger=false", "--verbose=false")


def saved(*arguments: str, **options: Any) -> Path:
    cli = command_line("fit", "--trainer.max_steps=1", "--trainer.logger=false", *arguments, **options)
    return Path(cli.trainer.checkpoint_callback.last_model_path)


def test_they_need_not_be_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = ("--model.encoder=torch.nn.Linear", "--model.encoder.in_features=4", "--model.encoder.out_features=5")
    path = saved(*encoder, "--model.width=5", "--model.dropout=0.3")
    cli = command_line("test", f"--ckpt_path={path}", "--model.dropout=0.7", *OFF)
    assert isinstance(cli.model.layer[0], nn.Linear)
    assert (cli.model.layer[2].in_features, cli.model.layer[1].p) == (5, 0.7), "what is given wins"
    with pytest.raises(SystemExit):
        command_line("test", f"--ckpt_path={path}-missing", *OFF)
    assert "this path does not exist" in capsys.readouterr().err


def test_subclass_mode() -> None:
    path = saved("--model=Wider", "--model.width=4", subclass_mode_model=True)
    cli = command_line("test", "--ckpt_path", str(path), *OFF, subclass_mode_model=True)
    assert type(cli.model) is Wider
    assert cli.model.layer[2].in_features == 4
    assert type(command_line("--model=Configured", run=False, subclass_mode_model=True).model) is Configured


class Linked(TrainkitCLI):
    """A link sets an argument of the module."""

    def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.rate")
        parser.link_arguments("data.width", "model.width", apply_on="instantiate")


@pytest.mark.slow
def test_a_link_wins() -> None:
    path = saved("--data.batch_size=2", "--model.dropout=0.3", kind=Linked)
    cli = command_line("test", f"--ckpt_path={path}", "--data.batch_size=8", *OFF, kind=Linked)
    assert (cli.model.learning_rate, cli.model.layer[1].p) == (8, 0.3)
