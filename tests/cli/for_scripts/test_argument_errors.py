from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.runs.command_lines import command_line

from trainkit.cli.for_scripts.argument_parser import report_errors
from trainkit.errors import CheckpointNotFoundError, ConfigurationError

SHORT = ("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false")
STOPPING = ("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=a")


def message_of(capsys: pytest.CaptureFixture[str], *arguments: str, **options: object) -> str:
    """What is printed after the two lines on how to get help."""
    with pytest.raises(SystemExit) as ended:
        command_line("fit", *arguments, quiet=False, **options)
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


@pytest.mark.parametrize(
    "argument, expected",
    [
        (
            "trainer.callbacks=trainkit.loggers.CSVLogger",
            "trainer.callbacks: trainkit.loggers.CSVLogger is not a subclass of Callback. "
            "Expected the path of one, such as trainkit.callbacks.ModelCheckpoint\n",
        ),
        (
            "lr_scheduler=torch.optim.SGD",
            "lr_scheduler: torch.optim.SGD is not a subclass of LRScheduler or ReduceLROnPlateau. "
            "Expected the path of one, such as torch.optim.lr_scheduler.StepLR\n",
        ),
        (
            "model=torch.optim.SGD",
            "model: torch.optim.SGD is not a subclass of Configured. Expected the path of one\n",
        ),
    ],
)
def test_a_class_of_the_wrong_kind(argument: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message_of(capsys, f"--{argument}", subclass_mode_model=True) == expected
    key, _, path = argument.partition("=")
    first, _, second = key.partition(".")
    value: dict[str, Any] = {"class_path": path}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({first: {second: value} if second else value}))
    assert message_of(capsys, f"--config={tmp_path / 'run.yaml'}", subclass_mode_model=True) == expected


def test_a_wrong_value_in_one_class_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    """The other class of the Union is not what is wrong."""
    wrong = message_of(capsys, "--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=x")
    assert "is not a subclass" not in wrong
    assert "step_size" in wrong


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--model=Wder"], "model: There is no class 'Wder'. Did you mean 'Wider'? Expected"),
        (
            ["--model=helpers.runs.command_lines.Wder"],
            "model: There is no class helpers.runs.command_lines.Wder. Did you mean 'Wider'?",
        ),
        (["--model=none.Wider"], "model: There is no class none.Wider.\n"),
        (
            ["--model=Wider", "--model.widht=3"],
            "model: Wider has no argument 'widht'. Did you mean 'width'? All of them: "
            "--model.help=helpers.runs.command_lines.Wider\n",
        ),
    ],
)
def test_classes_of_the_script(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message_of(capsys, *arguments, subclass_mode_model=True).startswith(expected)


def test_arguments_of_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = message_of(capsys, *STOPPING, "--trainer.callbacks.patienc=3")
    assert unknown == (
        "trainer.callbacks: EarlyStopping has no argument 'patienc'. Did you mean 'patience'? All of them: "
        "--trainer.callbacks.help=trainkit.callbacks.EarlyStopping\n"
    )
    required = message_of(capsys, "--trainer.callbacks=EarlyStopping")
    assert required == (
        "trainer.callbacks: EarlyStopping has no default for monitor. Fix: --trainer.callbacks=EarlyStopping "
        "--trainer.callbacks.monitor=…\n"
    )
    assert message_of(capsys, "--trainer.callbacks+=EarlyStopping") == required
    wrong = message_of(capsys, *STOPPING, "--trainer.callbacks.patience=abc")
    assert wrong.rstrip().endswith("Given value: patience=abc")
    assert "jsonargparse" not in wrong


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--trainer.max_epochs=-5"], "max_epochs must be an integer ≥ -1"),
        (["--trainer.accelerator=cpuu"], "unknown accelerator 'cpuu'"),
        ([*STOPPING, "--trainer.callbacks.patience=-1"], "EarlyStopping(patience=) must be an integer ≥ 0, not -1."),
        ([*SHORT, "--ckpt_path=none"], "none: expected a checkpoint, but this path does not exist."),
    ],
)
def test_a_value_that_only_the_run_refuses(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in message_of(capsys, *arguments)


class Refusing:
    def error(self, message: str, ex: Exception | None = None) -> None:
        raise SystemExit(2)


def test_other_errors_stay() -> None:
    for error in (CheckpointNotFoundError("a"), ValueError("b"), OSError("c")):
        with pytest.raises(type(error), match=str(error)), report_errors(Refusing(), ConfigurationError):
            raise error


def test_one_of_several_processes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit), report_errors(Refusing(), ConfigurationError):
        raise ConfigurationError("x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError), report_errors(Refusing(), ConfigurationError):
        raise ConfigurationError("x")
