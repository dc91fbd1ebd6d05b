"""`TrainkitArgumentParser`: which classes it accepts, and what it says about wrong arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.command_lines import Configured, Numbers, command_line

from trainkit import Callback, Trainer
from trainkit.callbacks import EarlyStopping
from trainkit.cli import TrainkitArgumentParser
from trainkit.errors import ConfigurationError


def test_kinds_of_classes() -> None:
    parser = TrainkitArgumentParser()
    assert "trainer.max_epochs" in parser.add_lightning_class_args(Trainer, "trainer")
    assert parser.add_lightning_class_args(Configured, "model", subclass_mode=True, required=False) == ["model"]
    assert parser.add_lightning_class_args(Numbers, "data") == ["data.batch_size", "data.samples"]
    assert parser.callback_keys == []
    parser.add_lightning_class_args(EarlyStopping, "stopping")
    parser.add_lightning_class_args(Callback, "other", subclass_mode=True, required=False)
    assert parser.callback_keys == ["stopping", "other"]
    assert parser.parse_args(["--stopping.monitor=a"]).model is None


def test_other_classes_are_refused() -> None:
    def untyped():  # type: ignore[no-untyped-def]
        return None

    parser = TrainkitArgumentParser()
    for kind in (dict, torch.nn.Linear, untyped):
        with pytest.raises(ConfigurationError, match=r"expected a subclass of Trainer, .*parser.add_class_arguments"):
            parser.add_lightning_class_args(kind, "x")
    for add, wrong in ((parser.add_optimizer_args, dict), (parser.add_lr_scheduler_args, (torch.optim.Adam,))):
        with pytest.raises(ConfigurationError, match="expected a subclass of (Optimizer|LRScheduler or ReduceLROnPlateau)"):
            add(wrong, "x")  # type: ignore[operator]


def test_options_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE_WIDTH", "3")
    parser = TrainkitArgumentParser("prog", description="text", env_prefix="MINE", default_env=True, epilog="end")
    parser.add_argument("--width", type=int)
    assert (parser.prog, parser.description, parser.epilog) == ("prog", "text", "end")
    assert parser.parse_args([]).width == 3


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["fit", "--trainer.max_epoch=3"],
            "unrecognized arguments: --trainer.max_epoch=3. Did you mean '--trainer.max_epochs'?",
        ),
        (["fit", "--model.widht", "3"], "Did you mean '--model.width'?"),
        (["fit", "--config=bad.yaml"], "does not accept option 'trainer.max_epoch'. Did you mean '--trainer.max_epochs'?"),
        (["fit", "--trainer.callbacks+=EarlyStoping"], "There is no class 'EarlyStoping'. Did you mean 'EarlyStopping'?"),
        (["fit", "--optimizer=Adm"], "There is no class 'Adm'. Did you mean 'Adam'?"),
        (["fit", "--model.width=wide"], "Expected a <class 'int'>. Got value: wide"),
        (["fti"], "invalid choice: 'fti' (choose from"),
        (["fit", "--config=none.yaml"], "File does not exist"),
    ],
)
def test_wrong_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text("trainer: {max_epoch: 3}")
    with pytest.raises(SystemExit) as ended:
        command_line(*arguments, quiet=False)
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert expected in printed.err
    assert len(printed.err.splitlines()) < 16, "no page of options before the message"


def test_an_error_has_its_cause() -> None:
    parser: Any = TrainkitArgumentParser(exit_on_error=False)
    cause = ValueError("x")
    with pytest.raises(Exception, match="unrecognized arguments: --helpp. Did you mean '--help'") as raised:
        parser.error("unrecognized arguments: --helpp", cause)
    assert raised.value.__cause__ is cause
