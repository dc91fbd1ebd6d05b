"""StochasticWeightAveraging: the average, the learning rates, the statistics of BatchNorm, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Watching, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, update_bn

from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint, StochasticWeightAveraging
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import ConfigurationError


class Normed(TinyModule):
    """With BatchNorm, momentum and a schedule that `StochasticWeightAveraging` replaces."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.groups = groups
        self.layer = nn.Sequential(  # type: ignore[assignment]
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        chosen = [{"params": parameters[number :: self.groups]} for number in range(self.groups)]
        optimizer = torch.optim.SGD(chosen, lr=0.02, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Starts(Callback):
    """Records the weights at the start of each epoch, and the learning rates in it."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.weights.append(parameters_of(module))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.batch_idx == 0:
            self.rates.append(optimizer.param_groups[-1]["lr"])


@pytest.mark.parametrize("start", [4, 0.667])
def test_the_average_is_of_the_starts_of_the_last_epochs(start: Any) -> None:
    """With six epochs: those with the indices 3, 4 and 5. The weights of training do not change."""
    starts, alone, module = Starts(), Starts(), Normed()
    average = StochasticWeightAveraging(0.005, swa_epoch_start=start)
    make_trainer(starts, average, max_epochs=6).fit(module, tiny_loader())
    assert average.n_averaged == 3
    weights = torch.stack([state["layer.0.weight"] for state in starts.weights[3:]])
    torch.testing.assert_close(module.layer[0].weight.detach(), weights.mean(0))
    make_trainer(alone, max_epochs=6).fit(Normed(), tiny_loader())
    for ours, theirs in zip(starts.weights[:4], alone.weights[:4], strict=True):
        assert same(ours, theirs)


def test_an_average_of_ones_own() -> None:
    starts, module = Starts(), Normed()
    average = StochasticWeightAveraging(0.005, 2, avg_fn=lambda average, value, number: value, device=None)
    make_trainer(starts, average, max_epochs=3).fit(module, tiny_loader())
    assert torch.equal(module.layer[0].weight, starts.weights[-1]["layer.0.weight"])


def test_where_the_average_is_kept() -> None:
    class Kept(StochasticWeightAveraging):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            """Nothing: there are no values on the device meta."""

    average = Kept(0.005, 1, device="meta")
    make_trainer(average).fit(Normed(), tiny_loader())
    assert {value.device.type for value in average._average.values()} == {"meta"}


@pytest.mark.parametrize(("strategy", "epochs"), [("cos", 2), ("linear", 3), ("cos", 0)])
def test_the_learning_rates_are_those_of_torch(strategy: Any, epochs: int, caplog: pytest.LogCaptureFixture) -> None:
    """From the start epoch on `SWALR` replaces the schedule of the module; here with one rate for each group."""
    starts = Starts()
    average = StochasticWeightAveraging([0.3, 0.001], 3, epochs, strategy)
    trainer = make_trainer(starts, average, max_epochs=7)
    with caplog.at_level("INFO", "trainkit"):
        trainer.fit(Normed(groups=2), tiny_loader())
    assert caplog.text.count("epoch 2 on, SWALR replaces StepLR, and the learning rate becomes swa_lrs=[0.3, 0.001].") == 1
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=0.02)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for epoch in range(7):
        if epoch == 2:
            schedule = SWALR(optimizer, [0.3, 0.001], epochs, strategy)  # type: ignore[arg-type]
        assert starts.rates[epoch] == pytest.approx(optimizer.param_groups[1]["lr"], rel=1e-12)
        optimizer.step()
        schedule.step()
    assert isinstance(trainer.lr_scheduler_configs[0].scheduler, SWALR)


def test_statistics_of_batch_norm_are_those_of_the_averaged_weights() -> None:
    """As torch computes them; a layer in eval mode keeps its own, and nothing is logged."""

    class Frozen(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.BatchNorm1d(4, affine=False).eval()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(self.frozen(inputs))

    module = Frozen()
    trainer = make_trainer(StochasticWeightAveraging(0.005, 2), max_epochs=3)
    trainer.fit(module, tiny_loader())
    ours = parameters_of(module)
    assert ours["frozen.num_batches_tracked"] == 0
    assert module.layer[1].momentum == 0.1
    assert "log" not in vars(module)
    update_bn([module.frozen(inputs) for inputs, _ in tiny_loader()], module.layer)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(ours[f"layer.1.{name}"], module.state_dict()[f"layer.1.{name}"])
    assert ours["layer.1.num_batches_tracked"] == 4


def test_an_error_in_the_pass_leaves_the_trained_weights() -> None:
    class Failing(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if not loss.requires_grad and batch_idx == 1:
                raise ValueError("mine")
            return loss

    module, watching = Failing(), Watching()
    with pytest.raises(ValueError, match="mine"):
        make_trainer(StochasticWeightAveraging(0.005, 2), watching, max_epochs=3).fit(module, tiny_loader())
    assert same(parameters_of(module), watching.after[-1][2])


class SaveAt(Callback):
    """Saves in the middle of each epoch, at its end, and when training ends."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(f"middle-{trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(f"end-{trainer.current_epoch}")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint("end")


def fit(*callbacks: Callback, epochs: int = 5, **options: Any) -> tuple[Any, ...]:
    average, module = StochasticWeightAveraging(0.005, 3, 2), Normed()
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = make_trainer(average, *callbacks, max_epochs=epochs, enable_checkpointing=saves)
    trainer.fit(module, tiny_loader(shuffle=True), tiny_loader(4), **options)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert average._trained is not None
    return parameters_of(module), average._trained, metrics


def equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return same(first[0], second[0]) and same(first[1], second[1]) and first[2] == second[2]


def test_resume(run_dir: Path) -> None:
    """From before, inside and after the averaged epochs, bit for bit."""
    reference = fit(SaveAt())
    for path in ("middle-1", "end-1", "middle-2", "end-3", "middle-4", "end-4"):
        assert equal(fit(ckpt_path=path), reference), path
    assert equal(fit(ckpt_path="end"), reference)
    assert equal(fit(epochs=7, ckpt_path="end"), fit(epochs=7))
    assert same(Normed.load_from_checkpoint("end").state_dict(), reference[0])  # the average
    assert not same(Normed.load_from_checkpoint("end-4").state_dict(), reference[0])  # the trained weights


def test_the_newest_checkpoint_has_the_average(run_dir: Path) -> None:
    """It is not ranked, since the metric is of the trained weights; a resume continues with these, and saves it once."""

    def run(epochs: int = 5, ckpt_path: str | None = None, keep_last: int = 2) -> tuple[Any, tuple[Any, ...]]:
        saves = ModelCheckpoint("mine", "{val_loss:.2f}", "val_loss", keep_last=keep_last)
        return saves, fit(saves, epochs=epochs, ckpt_path=ckpt_path)

    saves, reference = run()
    assert same(Normed.load_from_checkpoint(saves.last_model_path).state_dict(), reference[0])
    assert not same(Normed.load_from_checkpoint(saves.best_model_path).state_dict(), reference[0])
    assert (saves.current_score, Path(saves.last_model_path).name) == (None, "step-00000020")
    assert "val_loss" not in open_checkpoint(saves.last_model_path).manifest.metrics
    again, ours = run(ckpt_path="last")
    assert equal(ours, reference)
    assert again.last_model_path == saves.last_model_path
    assert equal(run(7, "last")[1], fit(epochs=7))
    saves, _ = run(keep_last=0)
    assert saves.last_model_path == saves.best_model_path


def test_weights_alone_start_another_run(run_dir: Path) -> None:
    """A fit that takes only the weights begins without an average, with the schedule of the module."""
    fit(SaveAt())
    starts = Starts()
    trainer = make_trainer(starts, StochasticWeightAveraging(0.005, 9), max_epochs=2)
    with pytest.warns(UserWarning, match="never begins, because max_epochs is 2"):
        trainer.fit(Normed(), tiny_loader(), ckpt_path="end-4", restore={"model"})
    assert starts.rates == pytest.approx([0.02, 0.018])


def _two() -> dict[str, Tensor]:
    module = Normed()
    trainer = make_trainer(StochasticWeightAveraging(0.005, 2), SaveAt(), max_epochs=3, strategy="ddp", devices=2)
    trainer.fit(module, tiny_loader(20))
    ours = parameters_of(module)
    update_bn(tiny_loader(20), module.layer)  # all batches of both ranks
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(ours[f"layer.1.{name}"], module.state_dict()[f"layer.1.{name}"])
    return ours


def test_two_processes_with_different_numbers_of_batches(run_dir: Path) -> None:
    """Each batch counts once, on whichever rank it was read."""
    first, second = run_world(2, _two)
    assert same(first, second)


def test_what_is_refused() -> None:
    for wrong in (
        {"swa_lrs": 0.0},
        {"swa_lrs": [0.1, -1.0]},
        {"swa_lrs": 0.1, "swa_epoch_start": 1.5},
        {"swa_lrs": 0.1, "swa_epoch_start": 0},
        {"swa_lrs": 0.1, "annealing_epochs": -1},
        {"swa_lrs": 0.1, "annealing_strategy": "step"},
        {"swa_lrs": 0.1, "avg_fn": 3},
    ):
        with pytest.raises(ConfigurationError, match=list(wrong)[-1]):
            StochasticWeightAveraging(**wrong)  # type: ignore[arg-type]

    class Manual(Normed):
        automatic_optimization = False

    with pytest.raises(ConfigurationError, match=r"averages whole parameters.*strategy='ddp'\)$"):
        make_trainer(StochasticWeightAveraging(0.1), strategy="fsdp").fit(Normed(), tiny_loader())
    with pytest.raises(ConfigurationError, match="needs automatic optimization"):
        make_trainer(StochasticWeightAveraging(0.1)).fit(Manual(), tiny_loader())
    with pytest.raises(ConfigurationError, match="2 learning rates, but the optimizer has 1 parameter group"):
        make_trainer(StochasticWeightAveraging([0.1, 0.2])).fit(Normed(), tiny_loader())
    with pytest.raises(ConfigurationError, match="fraction of max_epochs, which has no limit"):
        make_trainer(StochasticWeightAveraging(0.1), max_epochs=-1, max_steps=3).fit(Normed(), tiny_loader())
