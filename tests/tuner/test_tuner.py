"""`Tuner` on one process: what it finds, and that it leaves no trace."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, DataModule, Trainer
from trainkit.callbacks import BatchSizeFinder, EarlyStopping, GradientClipping, LearningRateFinder
from trainkit.errors import ConfigurationError, DataError, ModuleError, OptimizerError
from trainkit.rng import seed_process
from trainkit.tuner import Tuner, batch_size


class Dropping(TinyModule):
    """Has dropout, BatchNorm and a schedule; records its losses, and what the trainer of each step has."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(self.drop(self.norm(inputs))), targets)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Sized(TinyModule):
    """Runs out of memory with more than `most` samples in a batch; its loader uses `self.batch_size`."""

    def __init__(self, most: int = 20, samples: int = 256) -> None:
        super().__init__()
        self.most, self.samples, self.batch_size = most, samples, 7

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > self.most:
            raise MemoryError

    validation_step = test_step = predict_step

    def train_dataloader(self) -> Any:
        return tiny_loader(self.samples, self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not collect garbage after each trial, which takes longer than the trial."""
    monkeypatch.setattr(batch_size, "release_memory", lambda: None)


def drawn() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


# -------------------------------------------------------------------------------------------------------- nothing changes


def fitted(folder: Path, search: bool) -> tuple[Any, ...]:
    """Losses, metrics, files and generators of a fit with workers, after a search or without one."""
    seed_process(3)
    module, logger = Dropping(), Memory()
    trainer = make_trainer(max_epochs=2, logger=logger, log_every_n_steps=1, default_root_dir=folder)
    loader = tiny_loader(32, shuffle=True, num_workers=2)
    if search:
        before = copy.deepcopy(module.state_dict())
        found = Tuner(trainer).lr_find(module, loader, num_training=20, update_attr=False, max_lr=0.1)
        assert found is not None
        assert len(found.results["lr"]) == 20
        assert all(value.equal(module.state_dict()[name]) for name, value in before.items())
        assert module.losses == []
        assert module._trainer is None
        assert not folder.exists()
    random_numbers = drawn()
    trainer.fit(module, loader)
    return module.losses, logger.rows, trainer.global_step, random_numbers, [p.tolist() for p in module.parameters()]


def test_a_fit_after_lr_find_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain, searched = fitted(tmp_path / "plain", False), fitted(tmp_path / "searched", True)
    assert searched == plain
    assert len(plain[0]) == 16


class Counting(IterableDataset):
    """A stream that continues where it is, with a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 8:
            self.position += 1
            yield torch.full((4,), float(self.position)), torch.ones(1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_the_state_of_a_stream_and_the_generators_of_loaders_are_restored() -> None:
    data, generator = Counting(), torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=2, generator=generator)
    before = generator.get_state()
    Tuner(make_trainer()).lr_find(TinyModule(), loader, num_training=3)
    assert data.position == 0
    assert generator.get_state().equal(before)


def test_an_iterator_is_refused() -> None:
    with pytest.raises(DataError, match="iterator"):
        Tuner(make_trainer()).lr_find(TinyModule(), iter(tiny_loader()))


def test_a_trial_runs_gradient_clipping_and_no_other_callback() -> None:
    class Fails(Callback):
        def on_train_batch_start(self, *given: Any) -> None:
            raise AssertionError

    class Seen(GradientClipping):
        norms = 0

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            Seen.norms += 1
            assert trainer.logger is not None
            assert trainer.loggers[0].log_dir is None
            module.logger.experiment.add_scalar("x", 1)  # has no effect

    class Configured(TinyModule):
        def configure_callbacks(self) -> Any:
            return [Fails()]

    trainer = make_trainer(Fails(), Seen(1.0), logger=Memory())
    Tuner(trainer).lr_find(Configured(), tiny_loader(), num_training=5)
    assert Seen.norms == 5
    assert trainer.global_step == 0
    assert trainer.stage is None


def test_a_module_that_cannot_be_copied() -> None:
    module = TinyModule()
    module.loss_before = module.layer.weight.sum()
    with pytest.raises(ModuleError, match="deepcopy"):
        Tuner(make_trainer()).lr_find(module, tiny_loader())


# ---------------------------------------------------------------------------------------------------------------- lr_find


def test_the_rates_that_a_trial_uses() -> None:
    """One rate for each optimizer step, in all parameter groups; the loss of a step is the mean of its micro-batches."""
    seen: list[tuple[float, ...]] = []

    class Grouped(TinyModule):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 5.0}]
            return torch.optim.SGD(groups, lr=torch.tensor(1.0))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(tuple(float(group["lr"]) for group in optimizer.param_groups))

    tuner = Tuner(make_trainer(accumulate_grad_batches=2))
    found = tuner.lr_find(Grouped(), tiny_loader(), min_lr=1e-4, max_lr=1e-2, num_training=3, update_attr=False)
    assert found is not None
    assert found.results["lr"] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert seen == [(pytest.approx(rate), pytest.approx(rate)) for rate in (1e-4, 1e-3, 1e-2)]
    module = TinyModule()
    first = tuner.lr_find(module, tiny_loader(), min_lr=1e-4, max_lr=1e-2, num_training=3, mode="linear")
    assert first is not None
    assert first.results["lr"] == pytest.approx([1e-4, 0.00505, 1e-2])
    batches = list(tiny_loader())
    expected = (module.loss(batches[0]) + module.loss(batches[1])).item() / 2
    assert first.results["loss"][0] == pytest.approx(expected)


@pytest.mark.parametrize("place", ["module", "hparams", "datamodule", "named"])
def test_the_suggestion_is_set(place: str) -> None:
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return tiny_loader(64)

    class Rated(TinyModule):
        def configure_optimizers(self) -> Any:
            rates = {"module": lambda: self.learning_rate, "named": lambda: self.rate}
            return torch.optim.SGD(self.parameters(), lr=rates.get(place, lambda: self.trainer.datamodule.lr)())

    module: Any = Dropping() if place == "hparams" else Rated()
    datamodule: Any = Data()
    name = {"named": "rate"}.get(place, "")
    if place == "datamodule":
        module.rate = module.__dict__.pop("learning_rate")
        datamodule.lr = 1.0
    if place == "named":
        module.rate = 1.0
    found = Tuner(make_trainer()).lr_find(module, datamodule, attr_name=name, num_training=50, min_lr=1e-5)
    assert found is not None
    rate = found.suggestion()
    assert rate is not None
    owner = {"hparams": module.hparams, "datamodule": datamodule}.get(place, module)
    attribute = {"hparams": "lr", "datamodule": "lr", "named": "rate"}.get(place, "learning_rate")
    assert getattr(owner, attribute) == rate


class Scaled(TinyModule):
    """Computes its learning rates from the attribute; records those that the steps use."""

    def __init__(self, kind: str) -> None:
        super().__init__(0.5)
        self.kind, self.rates = kind, list[list[float]]()

    def configure_optimizers(self) -> Any:
        rate, groups = self.learning_rate, [{"params": [self.layer.weight]}, {"params": [self.layer.bias]}]
        make: dict[str, Any] = {
            "product": {"lr": 4 * rate},
            "quotient": {"lr": torch.tensor(rate / 64)},
            "one cycle": {"lr": rate},
            "warm-up": {"lr": 2 * rate},
        }
        if self.kind in ("groups", "constant group"):
            groups[0]["lr"] = rate / 10 if self.kind == "groups" else 0.001
        optimizer = torch.optim.SGD(groups, **make.get(self.kind, {"lr": rate}))
        if self.kind == "one cycle":
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3 * rate, rate], total_steps=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        if self.kind == "warm-up":
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": "cosine", "warmup_steps": 2, "total_steps": 9}}
        return optimizer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


@pytest.mark.parametrize(
    "kind, factors, constants",
    [
        ("product", (4, 4), (0, 0)),
        ("quotient", (1 / 64, 1 / 64), (0, 0)),
        ("groups", (0.1, 1), (0, 0)),
        ("constant group", (0, 1), (0.001, 0)),
        ("one cycle", (3, 1), (0, 0)),
        ("warm-up", (2, 2), (0, 0)),
    ],
)
def test_the_trial_trains_with_the_rates_of_the_run(
    kind: str, factors: tuple[float, ...], constants: tuple[float, ...], caplog: Any
) -> None:
    tested: list[list[float]] = []

    class Noting(Scaled):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            tested.append([float(group["lr"]) for group in optimizer.param_groups])

    module = Noting(kind)
    found = Tuner(make_trainer()).lr_find(module, tiny_loader(64), min_lr=1e-4, max_lr=0.3, num_training=30)
    assert found is not None
    for value, rates in zip(found.results["lr"], tested, strict=False):
        assert rates == pytest.approx([c + f * value for f, c in zip(factors, constants, strict=True)], rel=1e-4)
    assert module.learning_rate == found.suggestion()
    run = Scaled(kind)
    run.learning_rate = module.learning_rate
    make_trainer(max_steps=9).fit(run, tiny_loader(64))
    largest = [max(column) for column in zip(*run.rates, strict=True)]
    at = tested[found.results["lr"].index(module.learning_rate)]
    assert largest == pytest.approx(at, rel=1e-4)
    shown = ", ".join(f"{rate:.4g}" for rate in (at if len(set(at)) > 1 else at[:1]))
    assert caplog.text.count(f" of a trial. configure_optimizers makes {shown} of it.") == 1


@pytest.mark.parametrize(
    "rate, text",
    [
        (lambda own: 0.1, "does not use 'learning_rate': the learning rate stays 0.1 when it changes"),
        (lambda own: min(own, 0.01), r"do not grow evenly with it \(1e-08 → 1e-08, 0.0001 → 0.0001, 1 → 0.01\)"),
        (lambda own: own**2, "do not grow evenly"),
    ],
)
def test_rates_that_cannot_be_searched(rate: Any, text: str) -> None:
    class Own(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate(self.learning_rate))

    module = Own()
    with pytest.raises(ConfigurationError, match=text):
        Tuner(make_trainer()).lr_find(module, tiny_loader())
    assert module.learning_rate == 0.1
    found = Tuner(make_trainer()).lr_find(module, tiny_loader(), num_training=3, update_attr=False, max_lr=0.1)
    assert found is not None
    assert found.results["lr"] == pytest.approx([1e-8, 0.1**4.5, 0.1])  # of the optimizer


def test_hparams_of_a_data_module_that_a_trial_shares() -> None:
    class Data(DataModule):
        def __init__(self, lr: float = 0.5) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return tiny_loader(64)

    class Rated(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=2 * self.trainer.datamodule.hparams.lr)

    data, module = Data(), Rated()
    found = Tuner(make_trainer()).lr_find(module, data, update_attr=False, num_training=20, max_lr=0.1)
    assert data.hparams.lr == 0.5
    again = Tuner(make_trainer()).lr_find(module, data, num_training=20, max_lr=0.1)
    assert found is not None
    assert again is not None
    assert found.results == again.results
    assert data.hparams.lr == found.suggestion()


def test_a_data_module_by_its_name() -> None:
    class Data(DataModule):
        calls: list[str] = []  # noqa: RUF012

        def prepare_data(self) -> None:
            self.calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            self.calls.append(stage)

        def train_dataloader(self) -> Any:
            return tiny_loader()

        def teardown(self, stage: str) -> None:
            self.calls.append("teardown")

    data = Data()
    trainer = make_trainer(LearningRateFinder(num_training_steps=2, update_attr=False))
    trainer.fit(TinyModule(), datamodule=data)
    assert data.calls == ["prepare_data", "fit", "teardown"]  # the callback uses what the fit has set up
    Tuner(make_trainer()).lr_find(TinyModule(), datamodule=data, num_training=2)
    assert data.calls == ["prepare_data", "fit", "teardown"] * 2
    assert data.trainer is trainer


def test_a_search_stops_when_the_loss_diverges() -> None:
    tuner, module = Tuner(make_trainer()), TinyModule()
    found = tuner.lr_find(module, tiny_loader(), max_lr=100.0, num_training=60)
    assert found is not None
    losses = found.results["loss"]
    assert len(losses) == len(found.results["lr"]) < 60
    assert losses[-1] > 4 * min(losses[:-1])
    assert all(loss <= 4 * min(losses[: i + 1]) for i, loss in enumerate(losses[:-1]))
    whole = tuner.lr_find(module, tiny_loader(), max_lr=100.0, num_training=60, early_stop_threshold=None)
    assert whole is not None
    assert len(whole.results["lr"]) == 60


def test_nothing_is_searched_in_a_fast_dev_run() -> None:
    tuner = Tuner(make_trainer(fast_dev_run=True))
    assert tuner.lr_find(TinyModule(), tiny_loader()) is None
    assert tuner.scale_batch_size(Sized()) is None


class Two(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"method": "test"}, ConfigurationError, "method='fit'"),
        ({"dataloaders": [1]}, ConfigurationError, "train_dataloaders=train_loader"),
        ({"mode": "cosine"}, ConfigurationError, "exponential"),
        ({"min_lr": 0.0}, ConfigurationError, "min_lr"),
        ({"max_lr": 1e-9}, ConfigurationError, "more than min_lr"),
        ({"num_training": 0}, ConfigurationError, "num_training"),
        ({"early_stop_threshold": -1.0}, ConfigurationError, "early_stop_threshold"),
        ({"attr_name": "missing"}, ConfigurationError, "none of these: missing"),
        ({"model": Two()}, OptimizerError, "2 optimizers"),
    ],
)
def test_wrong_arguments_of_lr_find(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"model": TinyModule(), "train_dataloaders": tiny_loader(), "val_dataloaders": tiny_loader(), **arguments}
    with pytest.raises(error, match=text):
        Tuner(make_trainer()).lr_find(**arguments)


def test_a_trainer_whose_callback_searches() -> None:
    with pytest.raises(ConfigurationError, match="LearningRateFinder"):
        Tuner(make_trainer(LearningRateFinder())).lr_find(TinyModule(), tiny_loader())
    with pytest.raises(ConfigurationError, match="BatchSizeFinder"):
        Tuner(make_trainer(BatchSizeFinder())).scale_batch_size(Sized())


# ------------------------------------------------------------------------------------------------------- scale_batch_size


def tried(caplog: Any, **arguments: Any) -> tuple[int | None, list[int]]:
    """The size found, and the sizes that were tried."""
    module = arguments.pop("module", None) or Sized()
    trainer: Trainer = arguments.pop("trainer", None) or make_trainer()
    size = Tuner(trainer).scale_batch_size(module, **arguments)
    assert getattr(module, arguments.get("batch_arg_name", "batch_size")) == size
    lines = [record.message for record in caplog.records if record.message.startswith("batch size ")]
    return size, [int(line.removeprefix("batch size ").partition(":")[0]) for line in lines]


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_the_size_is_doubled_until_it_does_not_fit(caplog: Any, method: str) -> None:
    assert tried(caplog, method=method) == (16, [2, 4, 8, 16, 32])


@pytest.mark.parametrize(
    "arguments, found",
    [
        ({"mode": "binsearch", "margin": 0.0}, (20, [2, 4, 8, 16, 32, 24, 20, 22, 21])),
        ({"mode": "binsearch"}, (19, [2, 4, 8, 16, 32, 24, 20, 22, 21])),
        ({"init_val": 100}, (12, [100, 50, 25, 12])),
        ({"max_trials": 3}, (8, [2, 4, 8])),
        ({"max_val": 12}, (12, [2, 4, 8, 12])),
        ({"module": Sized(most=1000, samples=10)}, (10, [2, 4, 8, 10])),
    ],
)
def test_searches(caplog: Any, arguments: dict[str, Any], found: tuple[int, list[int]]) -> None:
    assert tried(caplog, **arguments) == found


def test_the_steps_of_a_trial_and_the_name_of_the_size(caplog: Any) -> None:
    steps: list[tuple[int, int]] = []

    class Named(Sized):
        size = 7

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            steps.append((len(batch[0]), self.trainer.global_step))
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return tiny_loader(64, self.size)

    trainer = make_trainer(accumulate_grad_batches=8)
    tried(caplog, trainer=trainer, module=Named(), batch_arg_name="size", steps_per_trial=2, max_trials=1)
    assert steps == [(2, 0), (2, 0), (2, 1), (2, 1)]  # a window needs as much memory with two micro-batches as with eight


def test_the_batches_of_a_loader_that_scales_the_size(caplog: Any) -> None:
    class Doubled(Sized):
        def train_dataloader(self) -> Any:
            return tiny_loader(64, 2 * self.batch_size)

    assert tried(caplog, module=Doubled()) == (8, [2, 4, 8, 16])
    assert "batch_size is 8 from now on, after 4 trials. The batches of the loader then have 16." in caplog.text


def test_a_data_module_with_the_size() -> None:
    class Data(DataModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def setup(self, stage: str) -> None:
            self.source = tiny_loader(64).dataset

        def train_dataloader(self) -> Any:
            return DataLoader(self.source, batch_size=self.hparams.batch_size)

    class Plain(Sized):
        train_dataloader = None  # type: ignore[assignment]

    data = Data()
    module = Plain()
    del module.batch_size
    assert Tuner(make_trainer()).scale_batch_size(module, datamodule=data) == 16
    assert data.hparams.batch_size == 16
    assert not hasattr(data, "source")  # the trials have set up copies


def test_an_error_that_is_no_shortage_of_memory_restores_the_size() -> None:
    class Broken(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ValueError("broken")

    module = Broken()
    with pytest.raises(ValueError, match="broken"):
        Tuner(make_trainer()).scale_batch_size(module)
    assert module.batch_size == 7


class Fixed(Sized):
    def train_dataloader(self) -> Any:
        return tiny_loader(64, 4)


class Several(Sized):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return [tiny_loader(64, self.batch_size)] * 2


@pytest.mark.parametrize(
    "module, arguments, text",
    [
        (Sized(), {"train_dataloaders": tiny_loader()}, "batch size is fixed"),
        (Sized(), {"val_dataloaders": tiny_loader()}, "batch size is fixed"),
        (Sized(), {"dataloaders": tiny_loader(), "method": "test"}, "batch size is fixed"),
        (Sized(), {"method": "train"}, "method"),
        (Sized(), {"mode": "linear"}, "power"),
        (Sized(), {"margin": 1.0}, "margin"),
        (Sized(), {"steps_per_trial": 0}, "steps_per_trial"),
        (Sized(), {"batch_arg_name": "missing"}, "none of these: missing"),
        (Sized(most=0), {}, "no batch size fits"),
        (Fixed(), {}, "stays 4"),
        (Several(), {"method": "validate"}, "2 loaders"),
    ],
)
def test_wrong_arguments_of_scale_batch_size(module: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Tuner(make_trainer(EarlyStopping("val_loss"))).scale_batch_size(module, **arguments)
    assert module.batch_size == 7
