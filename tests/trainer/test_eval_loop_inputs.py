"""Prediction, and the inputs of an evaluation: modules and loaders, given or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Measuring, Memory, exact_loss, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit import Callback, DataModule, TrainModule
from trainkit.errors import DataError, MissingMethodError, ModuleError


def test_predictions() -> None:
    module, loader = TinyModule(), tiny_loader(10)
    trainer = make_trainer()
    outputs = trainer.predict(module, loader)
    assert [tuple(part.shape) for part in outputs] == [(4, 1), (4, 1), (2, 1)]
    torch.testing.assert_close(torch.cat(outputs), module(loader.dataset.tensors[0]).detach())


def test_predictions_of_several_loaders() -> None:
    class Module(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[int, int]:
            return dataloader_idx, batch_idx

    outputs = make_trainer().predict(Module(), [tiny_loader(8), tiny_loader(4)])
    assert outputs == [[(0, 0), (0, 1)], [(1, 0)]]


def test_predictions_of_nested_lists_of_loaders() -> None:
    """As in Lightning, each loader in nested lists and dicts counts; a list of numbers or strings is a loader as well."""

    class Module(TrainModule):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch, batch_idx, dataloader_idx

    def predicted(source: Any) -> Any:
        return make_trainer().predict(Module(), source)

    two = [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1), (3, 1, 1)]]
    assert predicted([[0, 1], [2, 3]]) == two
    assert predicted({"a": [0, 1], "b": [2, 3]}) == two
    assert predicted([{"a": [0, 1], "b": [2, 3]}]) == two
    assert predicted([0, 1]) == two[0]
    nested = [[DataLoader([0, 1], batch_size=None), DataLoader([2, 3], batch_size=None)], [DataLoader([4], batch_size=None)]]
    assert predicted(nested) == [*two, [(4, 0, 2)]]


def test_predictions_of_a_list_of_batches() -> None:
    """A list of tuples of tensors is one loader; each tuple is a batch of inputs and targets."""
    batches = [(torch.ones(2, 4), torch.ones(2, 1)), (torch.ones(3, 4), torch.ones(3, 1))]
    assert [len(part) for part in make_trainer().predict(TinyModule(), batches)] == [2, 3]


class Variadic(Measuring):
    """Its steps take any arguments, like those of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Any, ...]] = []

    def validation_step(self, *arguments: Any) -> None:
        self.taken.append(arguments[1:])

    def test_step(self, batch: Any, *arguments: Any, **named: Any) -> None:
        self.taken.append(arguments)

    def predict_step(self, batch: Any, batch_idx: int, *arguments: Any) -> None:
        self.taken.append((batch_idx, *arguments))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_loaders_number_reaches_variadic_steps_only_with_several_loaders(stage: str) -> None:
    module = Variadic()
    getattr(make_trainer(), stage)(module, tiny_loader(8))
    assert module.taken == [(0,), (1,)]
    module.taken.clear()
    getattr(make_trainer(), stage)(module, [tiny_loader(8), tiny_loader(4)])
    assert module.taken == [(0, 0), (1, 0), (0, 1)]


def test_predictions_that_are_not_kept() -> None:
    seen = []

    class Writing(Callback):
        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs.shape)

    trainer = make_trainer(Writing())
    assert trainer.predict(TinyModule(), tiny_loader(8), return_predictions=False) is None
    assert len(seen) == 2
    assert len(trainer.predict(TinyModule(), tiny_loader(8))) == 2
    assert len(trainer.predict(TinyModule(), tiny_loader(8), return_predictions=None)) == 2  # Lightning's default


def test_prediction_calls_forward_by_default() -> None:
    class Doubling(TrainModule):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * inputs

    outputs = make_trainer().predict(Doubling(), [torch.ones(2), torch.ones(3)])
    assert [part.tolist() for part in outputs] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    several = make_trainer().predict(Doubling(), [DataLoader(torch.ones(2)), DataLoader(torch.ones(1))])
    assert [[part.tolist() for part in outputs] for outputs in several] == [[[2.0], [2.0]], [[2.0]]]


def test_prediction_without_forward() -> None:
    with pytest.raises(MissingMethodError, match="has no predict_step. Define: .*or forward"):
        make_trainer().predict(TrainModule(), [torch.ones(2)])


# ------------------------------------------------------------------------------------------------------ modules and data


def test_the_module_of_the_last_run() -> None:
    module, trainer = Measuring(), make_trainer()
    trainer.fit(module, tiny_loader())
    (result,) = trainer.validate(dataloaders=tiny_loader(), verbose=False)
    assert result["loss"] == pytest.approx(exact_loss(module, tiny_loader()), rel=1e-6)
    assert len(trainer.predict(dataloaders=tiny_loader())) == 4


def test_a_trainer_that_has_run_nothing() -> None:
    with pytest.raises(ModuleError, match=r"has run no module yet. Call trainer.fit\(module\)"):
        make_trainer().validate(dataloaders=tiny_loader())


STAGES = [("validate", "validation"), ("test", "test")]


@pytest.mark.parametrize("stage, name", [*STAGES, ("predict", "predict")])
def test_no_data(stage: str, name: str) -> None:
    module, trainer = Measuring(), make_trainer()
    with pytest.raises(MissingMethodError, match=rf"{stage} needs data: trainer.{stage}\(module, DataLoader"):
        getattr(trainer, stage)(module)
    # the data of an earlier run is not used
    trainer.fit(module, tiny_loader(), tiny_loader())
    getattr(trainer, stage)(module, tiny_loader())
    with pytest.raises(MissingMethodError, match=f"{stage} needs data"):
        getattr(trainer, stage)(module)


@pytest.mark.parametrize("stage, name", STAGES)
def test_no_step(stage: str, name: str) -> None:
    with pytest.raises(MissingMethodError, match=rf"TrainModule has no {name}_step. Define: def {name}_step"):
        getattr(make_trainer(), stage)(TrainModule(), tiny_loader())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_limit_of_zero_batches(stage: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """With a limit of 0 batches nothing is evaluated, and a log line says so. The loader is not created: it may not exist."""
    short = {"validate": "val"}.get(stage, stage)
    trainer, module = make_trainer(**{f"limit_{short}_batches": 0}), Measuring()
    setattr(module, f"{short}_dataloader", lambda: pytest.fail("the loader was created"))
    assert getattr(trainer, stage)(module) in ([], None)
    if stage == "validate":
        trainer.fit(module, tiny_loader(4))
    assert f"nothing to {stage}" in caplog.text


def test_loaders_of_the_module_and_of_a_data_module() -> None:
    class Module(Measuring):
        def val_dataloader(self) -> DataLoader:
            return tiny_loader(8)

        def predict_dataloader(self) -> list[DataLoader]:
            return [tiny_loader(4)]

    class Data(DataModule):
        def val_dataloader(self) -> DataLoader:
            return tiny_loader(12)

    trainer, module = make_trainer(), Module()
    assert trainer.validate(module, verbose=False)[0]["samples"] == 8
    assert trainer.validate(module, datamodule=Data(), verbose=False)[0]["samples"] == 12
    assert trainer.validate(module, Data(), verbose=False)[0]["samples"] == 12
    assert trainer.validate(module, tiny_loader(4), verbose=False)[0]["samples"] == 4
    assert len(trainer.predict(module)) == 1


@pytest.mark.parametrize("thing", [5, object(), Measuring()])
def test_what_is_no_loader(thing: Any) -> None:
    with pytest.raises(DataError, match="must be a DataLoader or an iterable"):
        make_trainer().validate(Measuring(), thing)
    with pytest.raises(DataError, match="must be a DataLoader, an iterable"):
        make_trainer().fit(Measuring(), thing)


def test_the_table_of_results(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer()
    trainer.validate(Measuring(), tiny_loader())
    assert "loss" in (out := capsys.readouterr().out)
    assert "samples" in out
    trainer.test(Measuring(), [tiny_loader(), tiny_loader(8)])
    out = capsys.readouterr().out
    assert "loader 0" in out
    assert "loader 1" in out
    trainer.validate(Measuring(), tiny_loader(), verbose=False)
    assert capsys.readouterr().out == ""


def test_validating_and_stage() -> None:
    seen = {}

    class Looking(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            seen[trainer.stage] = trainer.validating, trainer.sanity_checking

        def on_test_start(self, trainer: Any, module: Any) -> None:
            seen[trainer.stage] = trainer.validating, trainer.sanity_checking

        def on_predict_start(self, trainer: Any, module: Any) -> None:
            seen[trainer.stage] = trainer.validating, trainer.sanity_checking

    trainer, module = make_trainer(Looking()), Measuring()
    trainer.fit(module, tiny_loader(), tiny_loader())
    trainer.validate(module, tiny_loader())
    trainer.test(module, tiny_loader())
    trainer.predict(module, tiny_loader())
    assert seen == {"fit": (True, False), "validate": (True, False), "test": (False, False), "predict": (False, False)}
    assert (trainer.stage, trainer.validating) == (None, False)


def test_validate_keeps_the_counters_of_the_fit() -> None:
    logger = Memory()
    trainer = make_trainer(max_epochs=2, logger=logger)
    trainer.fit(Measuring(), tiny_loader())
    trainer.validate(dataloaders=tiny_loader(), verbose=False)
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert list(logger.of("samples")) == [8]
