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
    for given in (encoder, ("--trust", "torch.nn.")):
        cli = command_line("test", f"--ckpt_path={path}", "--model.dropout=0.7", *given, *OFF)
        assert isinstance(cli.model.layer[0], nn.Linear)
        assert (cli.model.layer[2].in_features, cli.model.layer[1].p) == (5, 0.7), "what is given wins"
        assert "trust" not in cli.config.test
    said = refused(capsys, "test", f"--ckpt_path={path}", "--trust=torch.optim.", *OFF)
    assert "required: test.model.encoder. The checkpoint of --ckpt_path has {'class_path': 'torch.nn.Linear'" in said
    assert "Expected the value on the command line: --model.encoder=VALUE. If you trust" in said
    with pytest.raises(SystemExit):
        command_line("test", f"--ckpt_path={path}-missing", *OFF)
    assert "this path does not exist" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any) -> str:
    """What a command line prints that is an error."""
    with pytest.raises(SystemExit):
        command_line(*arguments, **options)
    return capsys.readouterr().err


def test_subclass_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """The class is that of the command line, or of a file; one that only the checkpoint names must be trusted."""
    path = saved("--model=Wider", "--model.width=4", subclass_mode_model=True)
    Path("fit.yaml").write_text("model: {class_path: helpers.runs.command_lines.Wider}")
    for given in (["--model=Wider"], ["--config=fit.yaml"], ["--trust", "helpers.runs."]):
        cli = command_line("test", "--ckpt_path", str(path), *given, *OFF, subclass_mode_model=True)
        assert type(cli.model) is Wider
        assert cli.model.layer[2].in_features == 4
    for given in ([], ["--trust", "torch."]):
        printed = refused(capsys, "test", f"--ckpt_path={path}", *given, *OFF, subclass_mode_model=True)
        assert "has a module of the class 'helpers.runs.command_lines.Wider', and a checkpoint imports nothing" in printed
    assert type(command_line("--model=Configured", run=False, subclass_mode_model=True).model) is Configured
    own = saved("--model=Configured", "--model.width=4", "--trainer.default_root_dir=own", subclass_mode_model=True)
    assert command_line("test", f"--ckpt_path={own}", *OFF, subclass_mode_model=True).model.layer[2].in_features == 4


@pytest.mark.parametrize(
    "given, said",
    [
        (["--trust=torch.nn"], "--trust: expected prefixes of import paths, each with a dot at its end, got ['torch.nn']"),
        (["--trust=torch."], "--trust is for the hyper-parameters of --ckpt_path=PATH"),
        (["--config={trust: [torch.]}"], "trust is an option of the command line"),
    ],
)
def test_trust_that_has_no_effect(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "test", *given, *OFF)


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
