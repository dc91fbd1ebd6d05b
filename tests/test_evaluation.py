"""Validation, test and prediction: exact metrics, several loaders, and a module that is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainers import Memory, make_trainer, parameters_of, same

from trainkit import Callback, CombinedLoader, DataModule, TrainModule
from trainkit.errors import ConfigurationError, DataError, MetricError, MissingMethodError, ModuleError

STAGES = [("validate", "validation"), ("test", "test")]


class Measuring(TinyModule):
    """Logs its loss and more in every evaluation, for one loader or several."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("largest", batch[0].max(), reduce_fx="max")
        self.log("smallest", batch[0].min(), reduce_fx="min")
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        return loss

    test_step = validation_step


def exact_loss(module: TinyModule, loader: DataLoader) -> float:
    inputs, targets = (part.double() for part in loader.dataset.tensors)
    layer = nn.Linear(4, 1).double()
    layer.load_state_dict(module.layer.state_dict())
    return float(F.mse_loss(layer(inputs), targets).detach())


# ---------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 22, 100])
def test_a_mean_is_the_mean_over_all_samples(stage: str, batch_size: int) -> None:
    """Whatever the batch size and however short the last batch, to the last bits of float64."""
    module, loader = Measuring(), tiny_loader(22, batch_size=batch_size)
    (result,) = getattr(make_trainer(precision="64-true"), stage)(module, loader, verbose=False)
    assert result["loss"] == pytest.approx(exact_loss(module, loader), rel=1e-14)
    assert result["samples"] == 22
    assert result["largest"] == pytest.approx(float(loader.dataset.tensors[0].max()))
    assert result["smallest"] == pytest.approx(float(loader.dataset.tensors[0].min()))


def test_every_sample_once() -> None:
    seen: list[float] = []

    class Module(Measuring):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[0][:, 0].tolist())

    loader = tiny_loader(23, batch_size=4, shuffle=True)
    make_trainer().test(Module(), loader)
    assert sorted(seen) == sorted(loader.dataset.tensors[0][:, 0].tolist())


def test_a_metrics_own_weight() -> None:
    """``batch_size`` in ``log`` for means over something else than samples."""

    class Tokens(TinyModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            (values,) = batch
            counted = values[values > 0]
            self.log("mean", counted.mean() if len(counted) else 0.0, batch_size=len(counted))

    values = torch.tensor([1.0, 2.0, -1.0, -1.0, 7.0, -1.0, -1.0, -1.0, -1.0, -1.0])
    (result,) = make_trainer().test(Tokens(), DataLoader(TensorDataset(values), batch_size=3), verbose=False)
    assert result == {"mean": pytest.approx(10 / 3)}


def test_results_are_what_trainer_and_loggers_have() -> None:
    logger = Memory()
    trainer = make_trainer(logger=logger)
    (result,) = trainer.validate(Measuring(), tiny_loader(), verbose=False)
    assert set(result) == {"loss", "largest", "smallest", "samples"}
    assert all(isinstance(value, float) for value in result.values())
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == result
    assert trainer.logged_metrics == result
    assert logger.rows == [(0, {**result, "epoch": 0})]


def test_step_and_epoch_values() -> None:
    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            self.log("of_step", float(batch_idx), on_step=True, on_epoch=False)
            self.log("hidden", 1.0, logger=False)

    logger = Memory()
    trainer = make_trainer(logger=logger)
    (result,) = trainer.test(Module(), tiny_loader(12), verbose=False)
    assert result == {"both_epoch": 1.0, "hidden": 1.0}
    assert list(logger.of("both_step").values()) == list(logger.of("of_step").values()) == [0.0, 1.0, 2.0]
    assert list(logger.of("both_epoch").values()) == [1.0]
    assert not logger.of("hidden")
    assert float(trainer.callback_metrics["both"]) == 1.0


def test_what_is_logged_at_the_end_of_an_evaluation() -> None:
    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("of_batches", float(batch_idx))

        def on_test_epoch_end(self) -> None:
            self.log("at_end", 5.0)

    class Late(Callback):
        runs_last = True

        def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
            self.seen = dict(trainer.callback_metrics)
            self.log("later", 7.0)

    late = Late()
    (result,) = make_trainer(late).test(Module(), tiny_loader(8), verbose=False)
    assert result == {"of_batches": 0.5, "at_end": 5.0, "later": 7.0}
    assert set(late.seen) == {"of_batches", "at_end"}


def test_validation_in_a_fit_has_the_same_results() -> None:
    module = Measuring()
    trainer = make_trainer(precision="64-true")
    trainer.fit(module, tiny_loader(), tiny_loader(22))
    inside = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "train_loss"}
    (outside,) = trainer.validate(module, tiny_loader(22), verbose=False)
    assert inside == outside
    assert outside["loss"] == pytest.approx(exact_loss(module, tiny_loader(22)), rel=1e-14)


def test_nothing_is_logged_in_prediction() -> None:
    class Logging(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.raises(MetricError, match=r"log\('x'\) cannot be called here"):
        make_trainer().predict(Logging(), tiny_loader())


# ------------------------------------------------------------------------------------------------------ several loaders


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_several_loaders(stage: str) -> None:
    class Module(Measuring):
        def on_validation_epoch_end(self) -> None:
            self.log("common", 3.0)

        on_test_epoch_end = on_validation_epoch_end

    module, loaders = Module(), [tiny_loader(22), tiny_loader(6, batch_size=3)]
    trainer = make_trainer(precision="64-true")
    results = getattr(trainer, stage)(module, loaders, verbose=False)
    assert len(results) == 2
    for index, (result, loader) in enumerate(zip(results, loaders, strict=True)):
        suffix = f"/dataloader_idx_{index}"
        assert set(result) == {f"{name}{suffix}" for name in ("loss", "largest", "smallest", "samples")} | {"common"}
        assert result[f"loss{suffix}"] == pytest.approx(exact_loss(module, loader), rel=1e-14)
        assert result["common"] == 3.0
    assert set(trainer.callback_metrics) == set(results[0]) | set(results[1])


def test_without_the_loaders_number_in_the_name() -> None:
    """One metric over all loaders, weighted by samples."""

    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("mean", float(dataloader_idx), add_dataloader_idx=False)

    results = make_trainer().test(Module(), [tiny_loader(12), tiny_loader(4)], verbose=False)
    assert results == [{"mean": 0.25}, {"mean": 0.25}]


@pytest.mark.parametrize(
    "loaders",
    [
        [tiny_loader(8), tiny_loader(4)],
        (tiny_loader(8), tiny_loader(4)),
        {"a": tiny_loader(8), "b": tiny_loader(4)},
        CombinedLoader([tiny_loader(8), tiny_loader(4)], mode="sequential"),
    ],
)
def test_ways_of_giving_several(loaders: Any) -> None:
    seen = []

    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append((dataloader_idx, batch_idx))

    trainer = make_trainer()
    trainer.test(Module(), loaders)
    assert seen == [(0, 0), (0, 1), (1, 0)]
    assert trainer.num_test_batches == [2, 1]


def test_other_modes_than_one_after_the_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one after the other, not in mode 'min_size'"):
        make_trainer().test(Measuring(), CombinedLoader([tiny_loader(), tiny_loader()], mode="min_size"))


def test_each_loader_has_randomness_of_its_own() -> None:
    drawn = []

    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            drawn.append(float(torch.rand(())))

    for _ in range(2):
        make_trainer().test(Module(), [tiny_loader(8), tiny_loader(8)])
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn[:4])) == 4


# --------------------------------------------------------------------------------------------------- the module as it was


class Modes(TrainModule):
    """With BatchNorm that is frozen in eval mode, dropout that is on, and a part whose hook looks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.net[1].eval()
        self.seen: dict[str, Any] = {}

    def look(self, where: str) -> None:
        state = any(part.training for part in self.modules()), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.seen[where] = state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert [part.training for part in self.net] == [True, False, True, True, True]
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.look("step")
        self.log("value", self.net(batch[0]).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look("step")
        return self.net(batch[0])

    def on_validation_start(self) -> None:
        self.look("start")

    def on_validation_epoch_end(self) -> None:
        self.look("epoch_end")

    def on_validation_end(self) -> None:
        self.look("end")

    on_test_start = on_predict_start = on_validation_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_end = on_predict_end = on_validation_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_the_modes_of_all_parts_come_back(stage: str, inference_mode: bool) -> None:
    module = Modes()
    modes, before = [part.training for part in module.modules()], parameters_of(module)
    getattr(make_trainer(inference_mode=inference_mode), stage)(module, tiny_loader())
    assert set(module.seen.values()) == {(False, False, inference_mode)}
    assert set(module.seen) == {"step", "start", "epoch_end", "end"}
    assert [part.training for part in module.modules()] == modes
    assert same(before, parameters_of(module))  # no statistics were gathered
    assert torch.is_grad_enabled()


def test_modes_in_a_fit() -> None:
    module = Modes()
    frozen = module.net[1].running_mean.clone()
    make_trainer(max_epochs=2, num_sanity_val_steps=1, val_check_interval=2).fit(module, tiny_loader(), tiny_loader(8))
    assert torch.equal(module.net[1].running_mean, frozen)
    assert not torch.equal(module.net[3].running_mean, torch.zeros(4))
    assert [part.training for part in module.net] == [True, False, True, True, True]


def test_modes_come_back_after_an_error() -> None:
    class Failing(Modes):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("mine")

    module = Failing()
    trainer = make_trainer()
    with pytest.raises(KeyError):
        trainer.fit(module, tiny_loader(), tiny_loader())
    assert [part.training for part in module.net] == [True, False, True, True, True]
    assert (trainer.stage, trainer.validating, trainer.active_plan) == (None, False, None)
    assert torch.is_grad_enabled()


def test_evaluation_does_not_move_the_users_generators() -> None:
    module, state = Measuring(), torch.get_rng_state()
    make_trainer().validate(module, tiny_loader(shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_metrics_of_inference_mode_can_be_used_afterwards() -> None:
    module = Measuring()
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(), tiny_loader())
    value = trainer.callback_metrics["loss"]
    weight = nn.Parameter(torch.ones((), dtype=value.dtype))
    (weight * value).backward()
    assert weight.grad is not None


# -------------------------------------------------------------------------------------------------------------- predict


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


def test_predictions_that_are_not_kept() -> None:
    seen = []

    class Writing(Callback):
        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs.shape)

    trainer = make_trainer(Writing())
    assert trainer.predict(TinyModule(), tiny_loader(8), return_predictions=False) is None
    assert len(seen) == 2
    assert len(trainer.predict(TinyModule(), tiny_loader(8))) == 2


def test_prediction_calls_forward_by_default() -> None:
    class Doubling(TrainModule):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * inputs

    outputs = make_trainer().predict(Doubling(), [torch.ones(2), torch.ones(3)])
    assert [part.tolist() for part in outputs] == [[2.0, 2.0], [2.0, 2.0, 2.0]]


def test_prediction_without_forward() -> None:
    with pytest.raises(MissingMethodError, match="has no forward"):
        make_trainer().predict(TrainModule(), [torch.ones(2)])


# ------------------------------------------------------------------------------------------------- what is given, or not


def test_the_module_of_the_last_run() -> None:
    module, trainer = Measuring(), make_trainer()
    trainer.fit(module, tiny_loader())
    (result,) = trainer.validate(dataloaders=tiny_loader(), verbose=False)
    assert result["loss"] == pytest.approx(exact_loss(module, tiny_loader()), rel=1e-6)
    assert len(trainer.predict(dataloaders=tiny_loader())) == 4


def test_a_trainer_that_has_run_nothing() -> None:
    with pytest.raises(ModuleError, match=r"has run no module yet. Call trainer.fit\(module\)"):
        make_trainer().validate(dataloaders=tiny_loader())


@pytest.mark.parametrize("stage, name", [*STAGES, ("predict", "predict")])
def test_no_data(stage: str, name: str) -> None:
    module, trainer = Measuring(), make_trainer()
    with pytest.raises(MissingMethodError, match=rf"{stage} needs data: trainer.{stage}\(module, DataLoader"):
        getattr(trainer, stage)(module)
    # nor those of an earlier run
    trainer.fit(module, tiny_loader(), tiny_loader())
    getattr(trainer, stage)(module, tiny_loader())
    with pytest.raises(MissingMethodError, match=f"{stage} needs data"):
        getattr(trainer, stage)(module)


@pytest.mark.parametrize("stage, name", STAGES)
def test_no_step(stage: str, name: str) -> None:
    with pytest.raises(MissingMethodError, match=rf"TrainModule has no {name}_step. Define: def {name}_step"):
        getattr(make_trainer(), stage)(TrainModule(), tiny_loader())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_limit_of_none(stage: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    short = {"validate": "val"}.get(stage, stage)
    trainer = make_trainer(**{f"limit_{short}_batches": 0})
    assert getattr(trainer, stage)(Measuring(), tiny_loader()) in ([], None)
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
