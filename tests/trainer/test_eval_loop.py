"""Validation, test and prediction: exact metrics, several loaders, and the modes of the module, which are restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Measuring, Memory, exact_loss, make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Callback, CombinedLoader, TrainModule
from trainkit.errors import MetricError

# ---------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 22, 100])
def test_a_mean_is_the_mean_over_all_samples(stage: str, batch_size: int) -> None:
    """This holds for every batch size and for a short last batch, up to the rounding of float64."""
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
    """`log(batch_size=...)` is the weight of a mean over something other than samples."""

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


def test_the_results_of_a_loader_have_no_metrics_of_another() -> None:
    """This holds even for metrics whose names do not contain the index of the loader."""

    class Named(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log(f"own_{dataloader_idx}", float(dataloader_idx), add_dataloader_idx=False)
            self.log("numbered", float(dataloader_idx))
            if dataloader_idx != 1:
                self.log("shared", float(dataloader_idx), add_dataloader_idx=False)

        def on_test_epoch_start(self) -> None:
            self.log("start", 5.0)

        def on_test_epoch_end(self) -> None:
            self.log("end", 6.0)

    loaders = [tiny_loader(8), tiny_loader(4), tiny_loader(8)]
    results = make_trainer().test(Named(), loaders, verbose=False)
    common = {"start": 5.0, "end": 6.0}
    assert results == [
        {"own_0": 0.0, "numbered/dataloader_idx_0": 0.0, "shared": 1.0, **common},
        {"own_1": 1.0, "numbered/dataloader_idx_1": 1.0, **common},
        {"own_2": 2.0, "numbered/dataloader_idx_2": 2.0, "shared": 1.0, **common},
    ]


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
    """The metric is the mean over all loaders, weighted by samples."""

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
    """Several loaders may be a list, a tuple, a dict or a sequential CombinedLoader."""
    seen = []

    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append((dataloader_idx, batch_idx))

    trainer = make_trainer()
    trainer.test(Module(), loaders)
    assert seen == [(0, 0), (0, 1), (1, 0)]
    assert trainer.num_test_batches == [2, 1]


@pytest.mark.parametrize(
    "mode, sizes",
    [("min_size", [8, 6]), ("max_size_cycle", [8, 6, 8]), ("max_size", [8, 6, 4]), ("sequential", [4, 4, 4, 4, 2])],
)
def test_loaders_that_are_read_together(mode: str, sizes: list[int]) -> None:
    """In other modes than `sequential`, a batch is combined from all loaders, and there is one loader."""
    seen = []

    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            parts = [batch] if mode == "sequential" else [part for part in batch.values() if part is not None]
            seen.append(sum(len(part[0]) for part in parts))

    trainer = make_trainer()
    loaders = {"a": tiny_loader(12), "b": tiny_loader(6)}
    trainer.test(Module(), CombinedLoader(loaders, mode=mode))
    assert seen == sizes
    assert trainer.num_test_batches == ([3, 2] if mode == "sequential" else [len(sizes)])
    assert trainer.test_dataloaders == (list(loaders.values()) if mode == "sequential" else loaders)


def test_each_loader_has_randomness_of_its_own() -> None:
    drawn = []

    class Module(TinyModule):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            drawn.append(float(torch.rand(())))

    for _ in range(2):
        make_trainer().test(Module(), [tiny_loader(8), tiny_loader(8)])
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn[:4])) == 4


# ------------------------------------------------------------------------------------------------ the modes of the module


class Modes(TrainModule):
    """A module with one BatchNorm frozen in eval mode and one in training mode. Its hooks record the modes."""

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
    """An evaluation restores the training mode of each submodule."""
    module = Modes()
    modes, before = [part.training for part in module.modules()], parameters_of(module)
    getattr(make_trainer(inference_mode=inference_mode), stage)(module, tiny_loader())
    assert set(module.seen.values()) == {(False, False, inference_mode)}
    assert set(module.seen) == {"step", "start", "epoch_end", "end"}
    assert [part.training for part in module.modules()] == modes
    assert same(before, parameters_of(module))  # BatchNorm statistics did not change
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
    assert (trainer.stage, trainer.validating, trainer._run.evaluation) == (None, False, None)
    assert torch.is_grad_enabled()


def test_evaluation_does_not_move_the_users_generators() -> None:
    module, state = Measuring(), torch.get_rng_state()
    make_trainer().validate(module, tiny_loader(shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_metrics_of_inference_mode_can_be_used_afterwards() -> None:
    """Autograd accepts metrics that were computed in inference mode."""
    module = Measuring()
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(), tiny_loader())
    value = trainer.callback_metrics["loss"]
    weight = nn.Parameter(torch.ones((), dtype=value.dtype))
    (weight * value).backward()
    assert weight.grad is not None


# -------------------------------------------------------------------------------------- no_grad, and inference_mode


class Lazy(TinyModule):
    """Makes in validation what training uses: a cache as an attribute and one as a buffer, a running value, a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.register_buffer("mask", None)
        self.register_buffer("running", torch.zeros(()))
        self.metric = torchmetrics.MeanMetric()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.table is None:
            self.table, self.mask = torch.ones(1), torch.ones(1)
        return self.layer(inputs) * self.table * self.mask

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.running += 1.0
        self.metric.update(1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.running = self.running + 1.0
        self.metric.reset()
        with torch.enable_grad():  # forces, gradient penalties
            inputs = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self(inputs).sum(), inputs)
        self.log("slope", slope.sum())


@pytest.mark.parametrize("sanity", [0, 1])
def test_what_validation_makes_in_a_fit_is_used_in_training(sanity: int) -> None:
    module = Lazy()
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=sanity)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert "slope" in trainer.callback_metrics
    assert float(module.running) == 4 * 4 + sanity


class GradModes(TinyModule):
    def note(self, *_: Any) -> None:
        self.modes.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    validation_step = test_step = predict_step = note
    on_validation_start = on_validation_epoch_end = on_validation_end = note


def test_each_verb_has_its_mode() -> None:
    module, trainer = GradModes(), make_trainer(num_sanity_val_steps=1)
    for inference_mode in (True, False):
        trainer.inference_mode, module.modes = inference_mode, set()
        trainer.fit(module, tiny_loader(), tiny_loader())
        assert module.modes == {(False, False)}
        for evaluate in (trainer.validate, trainer.test, trainer.predict):
            module.modes = set()
            evaluate(module, tiny_loader())
            assert module.modes == {(inference_mode, False)}


FIX = r"\ntrainkit: validate, test and predict run under torch.inference_mode\(\).* Trainer\(inference_mode=False\)"


def test_torchs_errors_about_inference_tensors_name_the_fix() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)does not require grad and does not have a grad_fn.*" + FIX):
        make_trainer().validate(Lazy(), tiny_loader())

    class Cached(Lazy):
        validation_step = TinyModule.validation_step

    module = Cached()
    make_trainer().validate(module, tiny_loader())
    with pytest.raises(RuntimeError, match=r"(?s)Inference tensors cannot be saved for backward.*" + FIX):
        make_trainer().fit(module, tiny_loader())

    class Assigned(TinyModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.running = torch.zeros(())

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.running += 1.0
            return super().training_step(batch, batch_idx)

    module = Assigned()
    make_trainer().validate(module, tiny_loader())
    with pytest.raises(RuntimeError, match=r"(?s)Inplace update to inference tensor outside InferenceMode.*" + FIX):
        make_trainer().fit(module, tiny_loader())
    for kind in (Lazy, Assigned):  # the fix works
        module, trainer = kind(), make_trainer(inference_mode=False)
        trainer.validate(module, tiny_loader())
        trainer.fit(module, tiny_loader())


def test_other_errors_do_not_name_it() -> None:
    class Detached(TinyModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.loss(batch).backward()

    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        make_trainer().fit(Detached(), tiny_loader(), tiny_loader())
    assert "trainkit" not in str(caught.value)


def test_an_object_that_validate_has_used_can_be_used_in_training() -> None:
    class Logged(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.SumMetric()

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.metric.update(2.0)
            self.log("sum", self.metric)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.metric.update(1.0)
            self.log("sum", self.metric, on_step=False, on_epoch=True)
            return self.loss(batch)

    module = Logged()
    assert make_trainer().validate(module, tiny_loader(), verbose=False) == [{"sum": 8.0}]
    trainer = make_trainer(limit_val_batches=0)
    trainer.fit(module, tiny_loader())
    assert trainer.callback_metrics["sum"] == 4.0
