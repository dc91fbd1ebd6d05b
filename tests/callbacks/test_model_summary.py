from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import nn

from trainkit.callbacks import ModelSummary
from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.utilities.summary import summarize


@pytest.mark.parametrize("depth", [-2, 1.5, True, "all"])
def test_a_wrong_depth_is_an_error(depth: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_depth"):
        ModelSummary(max_depth=depth)


def test_the_callback_prints_on_the_main_process_only(trainer, capsys) -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    ModelSummary().on_fit_start(trainer, net)
    assert capsys.readouterr().out == f"{summarize(net)}\n"
    ModelSummary(max_depth=0).on_fit_start(trainer, net)
    trainer.is_global_zero = False
    ModelSummary().on_fit_start(trainer, net)
    assert capsys.readouterr().out == ""


def test_a_fit_prints_it_unless_told(make_trainer, capsys) -> None:
    make_trainer(enable_model_summary=True).fit(TinyModule(), tiny_loader())
    assert str(summarize(TinyModule())) in capsys.readouterr().out
    make_trainer().fit(TinyModule(), tiny_loader())
    assert "params" not in capsys.readouterr().out


def test_a_fit_with_a_summary_of_its_own_prints_one(make_trainer, capsys) -> None:
    make_trainer(ModelSummary(max_depth=-1), enable_model_summary=True).fit(TinyModule(), tiny_loader())
    assert capsys.readouterr().out.count("Trainable params") == 1


def test_a_fit_is_the_same_with_an_example(make_trainer, capsys) -> None:
    weights = []
    for example in (None, torch.zeros(2, 4)):
        torch.manual_seed(0)
        module = TinyModule()
        module.example_input_array = example
        make_trainer(enable_model_summary=True).fit(module, tiny_loader(shuffle=True))
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)
    assert "16    | [2, 4]   | [2, 1]" in capsys.readouterr().out


class Counts(ModelSummary):
    """A summary as a script for Lightning writes it."""

    seen: list[Any]

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **options: Any,
    ) -> None:
        counts = (total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        Counts.seen = [dict(summary_data), *counts, options]


def test_a_summary_of_a_user(make_trainer, capsys) -> None:
    make_trainer(Counts(style="short"), enable_model_summary=True).fit(TinyModule(), tiny_loader())
    assert capsys.readouterr().out == ""
    columns = {" ": ["0"], "Name": ["layer"], "Type": ["Linear"], "Params": ["5  "], "Mode": ["train"], "FLOPs": ["0  "]}
    assert Counts.seen == [columns, 5, 5, 0.00002, {"train": 1, "eval": 0}, 0, {"style": "short"}]


def test_an_argument_that_nothing_reads_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="no argument 'maxdepth'"):
        ModelSummary(maxdepth=2)


def test_parameters_that_the_numbers_do_not_show_are_announced(make_trainer, caplog) -> None:
    class Tied(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.tied = self.layer

    make_trainer(ModelSummary()).fit(Tied(), tiny_loader())
    assert "ModelSummary: 2 parameters have another name too and count once." in caplog.text
