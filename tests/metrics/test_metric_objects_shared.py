"""One torchmetrics object under several names, in compositions and for several loaders: the same on one and two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.trainers import Memory, make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import TrainModule
from trainkit.errors import MetricError

FIRST = torch.tensor([0.0, 2.0, 1.0, 1.5, 0.5])  # mean 1, in batches of 1: the second of two processes has fewer
SECOND = torch.tensor([3.0, 4.0, 2.0])  # mean 3


class Objects(nn.Module):
    """The objects of one shape; `loose` ones are no attributes, so that a checkpoint finds no path to them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total, self.peak = torchmetrics.MeanMetric(), torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.clone = self.mean.clone()
        self.both = self.total + self.peak
        self.scaled = self.total * 2.0
        self.scores = torchmetrics.AUROC("binary")  # its states are lists
        self.group = torchmetrics.MetricCollection(
            [torchmetrics.Precision("binary"), torchmetrics.Recall("binary"), torchmetrics.AUROC("binary")]
        )
        self.loose = [torchmetrics.MeanMetric()]


Log = Callable[..., None]


def two_names(own: Any, x: Tensor, log: Log) -> None:
    own.mean.update(x)
    log("one", own.mean)
    log("other", own.mean)


def composition(own: Any, x: Tensor, log: Log) -> None:
    own.both.update(x)
    log("both", own.both)
    log("total", own.total)
    log("peak", own.peak)
    log("scaled", own.scaled)


def parts_first(own: Any, x: Tensor, log: Log) -> None:
    own.total.update(x)
    own.peak.update(x)
    log("peak", own.peak)
    log("total", own.total)
    log("both", own.both)


def clones(own: Any, x: Tensor, log: Log) -> None:
    own.mean.update(x)
    own.clone.update(-x)
    log("mean", own.mean)
    log("clone", own.clone)


def step_and_epoch(own: Any, x: Tensor, log: Log) -> None:
    own.mean(x)
    log("one", own.mean, on_step=True)
    log("other", own.mean)


def lists(own: Any, x: Tensor, log: Log) -> None:
    own.scores.update(x / 4, (x > 0.9).long())
    log("one", own.scores)
    log("other", own.scores)


def collection(own: Any, x: Tensor, log: Log) -> None:
    own.group.update(x / 3, (x > 0.9).long())
    for name, metric in own.group.items():
        log(name, metric)
    log("again", own.group["BinaryAUROC"])


def loose(own: Any, x: Tensor, log: Log) -> None:
    own.loose[0].update(x)
    log("one", own.loose[0])
    log("other", own.loose[0])


# What is logged in a step, and the values of the epoch over FIRST, written by hand.
SHAPES: dict[str, tuple[Callable[[Any, Tensor, Log], None], dict[str, float]]] = {
    "two names": (two_names, {"one": 1.0, "other": 1.0}),
    "composition": (composition, {"both": 7.0, "total": 5.0, "peak": 2.0, "scaled": 10.0}),
    "parts first": (parts_first, {"both": 7.0, "total": 5.0, "peak": 2.0}),
    "clones": (clones, {"mean": 1.0, "clone": -1.0}),
    "step and epoch": (step_and_epoch, {"one_epoch": 1.0, "other": 1.0}),
    "lists": (lists, {"one": 1.0, "other": 1.0}),
    # 2, 1 and 1.5 are positive, and only 2 / 3 is predicted to be
    "collection": (collection, {"BinaryPrecision": 1.0, "BinaryRecall": 1 / 3, "BinaryAUROC": 1.0, "again": 1.0}),
    "loose": (loose, {"one": 1.0, "other": 1.0}),
}
EXPECTED = {f"{shape}/{name}": value for shape, (_, values) in SHAPES.items() for name, value in values.items()}


class Shapes(TrainModule):
    """Logs all shapes in the steps of one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.stage, self.saves = stage, False
        self.objects = nn.ModuleDict({shape: Objects() for shape in SHAPES})

    def log_shapes(self, x: Tensor) -> None:
        for shape, (use, _) in SHAPES.items():
            use(
                self.objects[shape],
                x,
                lambda name, value, on_step=False, shape=shape: self.log(
                    f"{shape}/{name}", value, on_step=on_step, on_epoch=True
                ),
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.stage == "train":
            self.log_shapes(batch)
        return (self.weight * batch).mean() * 0.0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.stage == "validation":
            self.log_shapes(batch)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.saves and (self.current_epoch, batch_idx) == (0, 1):
            self.trainer.save_checkpoint("middle")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def strategy() -> str:
    return "ddp" if torch.distributed.is_torchelastic_launched() else "auto"


def values_of_epochs(stage: str, saves: bool = False, **options: Any) -> list[dict[str, float]]:
    """The values of each of two epochs."""
    memory, module = Memory(), Shapes(stage)
    module.saves = saves
    trainer = make_trainer(logger=memory, max_epochs=2, strategy=strategy(), num_sanity_val_steps=2)
    trainer.fit(module, DataLoader(FIRST, 1), DataLoader(FIRST, 1), **options)
    return [{name: row[name] for name in EXPECTED} for _, row in memory.rows if set(EXPECTED) <= set(row)]


def all_values() -> list[list[dict[str, float]]]:
    """In validation, in training, and in a training that is resumed from the second step of the first epoch."""
    return [
        values_of_epochs("validation"),
        values_of_epochs("train", saves=True),
        values_of_epochs("train", ckpt_path="middle"),
    ]


def test_shapes_on_one_process() -> None:
    assert all_values() == [[pytest.approx(EXPECTED)] * 2] * 3


def test_shapes_on_two_processes() -> None:
    assert run_world(2, all_values)[0] == [[pytest.approx(EXPECTED)] * 2] * 3


# ---------------------------------------------------------------------------------------------------- several loaders


class Loaders(TrainModule):
    """Logs objects in validation or test, for each of two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.mean, self.total, self.own = torchmetrics.MeanMetric(), torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.twice = self.total * 2.0
        self.scores = torchmetrics.AUROC("binary")
        self.pearson = torchmetrics.PearsonCorrCoef()  # its states cannot be merged, and need not be
        self.single = nn.ModuleList([torchmetrics.MeanMetric(), torchmetrics.MeanMetric()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).mean() * 0.0

    def evaluate(self, x: Tensor, dataloader_idx: int) -> None:
        self.mean.update(x)
        self.twice.update(x)
        self.scores.update(x / 4, (x > 0.9).long() if dataloader_idx == 0 else (x < 3.5).long())
        self.pearson.update(torch.stack([x[0], x[0] + 1]), torch.stack([x[0], x[0] + 1]) * (1 - 2 * dataloader_idx))
        self.single[dataloader_idx].update(x)
        self.log("mean", self.mean)
        self.log("again", self.mean)
        self.log("twice", self.twice)
        self.log("of_all", self.mean, add_dataloader_idx=False)
        self.log("scores", self.scores)
        self.log("pearson", self.pearson)
        self.log("single", self.single[dataloader_idx])
        if dataloader_idx == 1:
            self.log("only", self.total)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        self.evaluate(batch, dataloader_idx)

    test_step = validation_step

    def at_end(self) -> None:
        self.log("sum_of_all", self.total)
        self.log("by_hand", sum(metric.compute() for metric in self.single), rank_zero_only=True)

    on_validation_epoch_end = on_test_epoch_end = at_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


OF_LOADERS = {
    "mean/dataloader_idx_0": 1.0,
    "mean/dataloader_idx_1": 3.0,
    "again/dataloader_idx_0": 1.0,
    "again/dataloader_idx_1": 3.0,
    "twice/dataloader_idx_0": 10.0,
    "twice/dataloader_idx_1": 18.0,
    "single/dataloader_idx_0": 1.0,
    "single/dataloader_idx_1": 3.0,
    "scores/dataloader_idx_0": 1.0,
    "scores/dataloader_idx_1": 0.0,
    "pearson/dataloader_idx_0": 1.0,
    "pearson/dataloader_idx_1": -1.0,
    "only/dataloader_idx_1": 9.0,
    "of_all": 14 / 8,
    "sum_of_all": 14.0,
}


def check_loaders() -> None:
    loaders = [DataLoader(FIRST, 1), DataLoader(SECOND, 1)]
    trainer, module = make_trainer(max_epochs=2, strategy=strategy(), num_sanity_val_steps=2), Loaders()
    trainer.fit(module, DataLoader(FIRST, 1), loaders)
    fitted = trainer.callback_metrics
    trainer.test(module, loaders, verbose=False)
    for found in (fitted, trainer.callback_metrics):
        values = {name: float(value) for name, value in found.items()}
        if trainer.world_size == 1:
            assert values.pop("by_hand") == 4.0  # each object that only one loader has used still has its states
        values.pop("by_hand", None)
        assert values == pytest.approx(OF_LOADERS, abs=1e-5)


def test_each_loader_has_a_value_of_its_own() -> None:
    check_loaders()


def test_each_loader_has_a_value_of_its_own_on_two_processes() -> None:
    run_world(2, check_loaders)


@pytest.mark.parametrize("in_step", [True, False])
def test_states_of_several_loaders_that_cannot_be_merged(in_step: bool) -> None:
    class Total(Loaders):
        def evaluate(self, x: Tensor, dataloader_idx: int) -> None:
            self.pearson.update(torch.stack([x[0], x[0] + 1]), torch.stack([x[0], x[0] + 1]))
            self.log("each", self.pearson)
            if in_step:
                self.log("all", self.pearson, add_dataloader_idx=False)

        def at_end(self) -> None:
            if not in_step:
                self.log("all", self.pearson)

        on_validation_epoch_end = on_test_epoch_end = at_end

    loaders = [DataLoader(FIRST, 1), DataLoader(SECOND, 1)]
    words = r"log\('all'\): this PearsonCorrCoef is also logged for each loader, as 'each/dataloader_idx_0', "
    with pytest.raises(MetricError, match=words):
        make_trainer().validate(Total(), loaders)


@pytest.mark.parametrize("in_training, in_validation", [("total", "total"), ("both", "total"), ("total", "both")])
def test_an_object_of_training_and_validation_at_once(in_training: str, in_validation: str) -> None:
    """Also as a part of a composition; both keys are named."""

    class Mixed(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.total = torchmetrics.SumMetric()
            self.both = self.total + torchmetrics.MaxMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            metric = getattr(self, in_training)
            metric(batch)
            self.log("train_total", metric)
            return (self.weight * batch).mean() * 0.0

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            metric = getattr(self, in_validation)
            metric.update(batch)
            self.log("val_total", metric)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    words = (
        r"log\('val_total'\): .* is also logged in training, as 'train_total'.* self.val_metric = self.train_metric.clone\(\)"
    )
    with pytest.raises(MetricError, match=words):
        make_trainer().fit(Mixed(), DataLoader(FIRST, 1), DataLoader(FIRST, 1))
