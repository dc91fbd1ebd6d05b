"""`load_from_checkpoint` of a module that `TrainkitCLI` created, and `save_hyperparameters` of such a module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.runs.command_lines import Configured, Numbers, Wider, command_line
from helpers.runs.tiny import TinyModule
from helpers.runs.trainers import parameters_of, same
from torch import nn

from trainkit import DataModule, TrainModule
from trainkit.checkpoint import open_checkpoint
from trainkit.cli import TrainkitCLI
from trainkit.cli.for_scripts.saved_arguments import module_from_config
from trainkit.errors import CheckpointError, StateMismatchError
from trainkit.module.from_checkpoint import Trust

ENCODER = ("--model.encoder=torch.nn.Linear", "--model.encoder.in_features=4", "--model.encoder.out_features=4")


def fit(*arguments: str, **options: Any) -> tuple[TrainkitCLI, Path]:
    """A fit, and its newest checkpoint."""
    cli = command_line("fit", "--trainer.max_steps=1", "--trainer.logger=false", *arguments, **options)
    return cli, Path(cli.trainer.checkpoint_callback.last_model_path)


def test_an_argument_that_is_an_object() -> None:
    cli, path = fit(*ENCODER, "--model.dropout=0.3")
    values = open_checkpoint(path).read({"state"}).state["hyper_parameters"]
    assert values["encoder"]["class_path"] == "torch.nn.Linear"
    assert values["dropout"] == 0.3
    with pytest.raises(
        CheckpointError, match=r"imports nothing: encoder \(.*torch.nn.Linear.*load_from_checkpoint\(path, encoder="
    ):
        Configured.load_from_checkpoint(path)
    module = Configured.load_from_checkpoint(path, trust=["torch.nn."])
    assert same(parameters_of(module), parameters_of(cli.model))
    assert module.hparams == cli.model.hparams, "so a checkpoint of this module can be loaded too"
    other = Configured.load_from_checkpoint(path, dropout=0.5, trust=["torch.nn."])
    assert (other.layer[1].p, other.hparams["dropout"]) == (0.5, 0.5)
    given = {"encoder": nn.Linear(4, 4, bias=True)}
    assert same(parameters_of(Configured.load_from_checkpoint(path, **given)), parameters_of(cli.model))
    with pytest.raises(StateMismatchError, match="layer"):
        Configured.load_from_checkpoint(path, width=5, **given)
    with pytest.raises(CheckpointError, match=r"do not fit Configured.*Pass the arguments that have changed.*module.width"):
        Configured.load_from_checkpoint(path, width="wide", **given)


def test_subclass_mode() -> None:
    cli, path = fit("--model=Wider", "--model.width=4", subclass_mode_model=True)
    for kind in (TrainModule, Configured, Wider):
        module = kind.load_from_checkpoint(path, trust=["helpers.runs."])
        assert type(module) is Wider
        assert same(parameters_of(module), parameters_of(cli.model))
    assert type(Wider.load_from_checkpoint(path)) is Wider, "the caller names the class"
    assert "class_path" not in cli.model.hparams, "the hyper-parameters are the same as without subclass mode"
    for kind, trust in ((TrainModule, []), (Configured, ["torch."]), (TinyOther, ["helpers.runs."])):
        with pytest.raises(CheckpointError, match=rf"'helpers.runs.command_lines.Wider', not {kind.__name__}.*Wider.load_from"):
            kind.load_from_checkpoint(path, trust=trust)


class Saved(Numbers):
    def __init__(self, batch_size: int = 4, samples: int = 16) -> None:
        super().__init__(batch_size, samples)
        self.save_hyperparameters()


def test_a_data_module() -> None:
    _, path = fit("--data.samples=8", datamodule_class=Saved)
    for kind in (DataModule, Saved):
        data = kind.load_from_checkpoint(path, batch_size=2, trust=[f"{__name__}."])
        assert type(data) is Saved
        assert (data.batch_size, data.samples) == (2, 8)


class TinyOther(TinyModule):
    """A class that no command line created."""


def loaded(kind: type, **saved: Any) -> Any:
    return module_from_config(kind, f"x.{kind.__name__}", saved, {}, Trust(), "a checkpoint")


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("planted.py").write_text("open('ran', 'w')\nclass Encoder: pass")
    monkeypatch.syspath_prepend(".")
    inner = {"class_path": "torch.nn.Sequential", "init_args": {"args": [{"class_path": "planted.Encoder"}]}}
    for encoder in ({"class_path": "planted.Encoder"}, inner, "planted.Encoder", {"class_path": "torch.nn.Identity"}):
        with pytest.raises(CheckpointError, match=r"imports nothing: encoder \("):
            loaded(Configured, encoder=encoder)
    with pytest.raises(CheckpointError, match="has no arguments 'encoder.class_path'"):
        loaded(Configured, **{"encoder.class_path": "planted.Encoder"})
    assert "planted" not in sys.modules
    assert not Path("ran").exists()


class Untyped(TinyModule):
    """A module with an argument of no type."""

    def __init__(self, anything=None, rate: float = 0.1) -> None:  # type: ignore[no-untyped-def]
        super().__init__(rate)
        self.save_hyperparameters()
        self.anything = anything


def test_a_class_for_an_argument_without_a_type_stays_a_dict() -> None:
    """Otherwise a checkpoint could create an object of any class."""
    spec = {"class_path": "torch.nn.Identity"}
    module = loaded(Untyped, anything=spec)
    assert module.anything == spec
    assert module.hparams["anything"] == spec
    cli = command_line(f"--model.anything={json.dumps(spec)}", run=False, model_class=Untyped)
    assert cli.model.anything["class_path"] == "torch.nn.Identity"


class Keeping(TinyModule):
    """A module that keeps its other arguments."""

    def __init__(self, rate: float = 0.1, **kwargs: object) -> None:
        super().__init__(rate)
        self.save_hyperparameters()
        self.kwargs = kwargs


def test_arguments_without_a_name() -> None:
    config = {"model": {"class_path": f"{__name__}.Keeping", "dict_kwargs": {"x": 1}}}
    cli, path = fit(
        f"--config={json.dumps({**config, 'data': {'samples': 8}})}", model_class=TrainModule, subclass_mode_model=True
    )
    module = Keeping.load_from_checkpoint(path)
    assert module.kwargs == cli.model.kwargs == {"x": 1}
    assert module.hparams == cli.model.hparams
    with pytest.raises(CheckpointError, match="do not fit Configured"):
        loaded(Configured, x=1)


def test_without_support_the_arguments_are_saved() -> None:
    with pytest.warns(UserWarning, match="cannot store these hyper-parameters.*encoder"):
        cli, path = fit(*ENCODER, load_from_checkpoint_support=False)
    assert cli.model.hparams["encoder"] is cli.model.layer[0]
    assert "hyper_parameters_class" not in open_checkpoint(path).read({"state"}).state


def test_a_module_inside_the_module_keeps_its_own_hyper_parameters() -> None:
    teacher = ("--model.teacher=helpers.runs.command_lines.Wider", "--model.teacher.width=8")
    cli = command_line("--model=Wider", "--model.width=4", *teacher, run=False, subclass_mode_model=True)
    assert (cli.model.hparams["width"], cli.model.teacher.hparams["width"]) == (4, 8)


class Partly(TinyModule):
    """A module that saves some of its arguments."""

    def __init__(self, encoder: nn.Module | None = None, rate: float = 0.1, note: str = "") -> None:
        super().__init__(rate)
        self.save_hyperparameters("encoder", "rate")
        self.save_hyperparameters({"more": 1})
        self.layer = nn.Sequential(encoder or nn.Identity(), nn.Linear(4, 1))


@pytest.mark.slow
def test_some_arguments() -> None:
    cli, path = fit(*ENCODER, "--model.note=a", model_class=Partly)
    assert sorted(cli.model.hparams) == ["encoder", "more", "rate"]
    assert same(parameters_of(Partly.load_from_checkpoint(path, trust=["torch.nn."])), parameters_of(cli.model))
