"""Training batches that are `None`, because a `collate_fn` found nothing usable in them, and steps that are repeated."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import Recorder, make_trainer, parameters_of, same
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from trainkit import Callback, Trainer
from trainkit.console import TrainkitWarning
from trainkit.errors import DataError
from trainkit.metrics.store import MetricResults, MetricStore
from trainkit.trainer.module_steps import without_effects

UNUSABLE = (0, 3, 5, 6)  # of eight batches; the middle of a window, its start and its end
USABLE = [index for index in range(8) if index not in UNUSABLE]


class Stream(IterableDataset):
    """The samples of a dataset, without a length."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (self.dataset[index] for index in range(len(self.dataset)))


def usable(samples: list[tuple[Tensor, ...]]) -> Any:
    kept = [sample for sample in samples if not sample[0].isnan().any()]
    return default_collate(kept) if kept else None


def nothing(samples: list[tuple[Tensor, ...]]) -> None:
    return None


def loader(collate: Any = usable, stream: bool = False) -> DataLoader:
    """Eight batches of four; the samples of some of them are NaN."""
    inputs, targets = (part.clone() for part in tiny_loader(32).dataset.tensors)
    for batch in UNUSABLE:
        inputs[4 * batch : 4 * batch + 4] = math.nan
    dataset = TensorDataset(inputs, targets)
    return DataLoader(Stream(dataset) if stream else dataset, batch_size=4, collate_fn=collate)


class Lossless(TinyModule):
    """Returns no loss for an unusable batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch[0].isnan().any() else self.loss(batch)


class LastBatch(Callback):
    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch is not None
        self.ended.append((trainer.current_epoch, batch_idx))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind, window", [(TinyModule, 1), (TinyModule, 2), (TinyModule, 3), (ManualModule, 1)])
def test_they_are_skipped(kind: type[TinyModule], window: int, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    recorder, last, module = Recorder(), LastBatch(), kind()
    trainer = make_trainer(recorder, last, max_epochs=2, accumulate_grad_batches=window)
    trainer.fit(module, loader(stream=stream))
    assert recorder.batches == last.ended == [(epoch, index) for epoch in range(2) for index in USABLE]
    assert trainer.global_step == 2 * len({index // window for index in USABLE})
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert caplog.text.count("the training loader yielded None instead of a batch. Such batches are skipped.") == 1


@pytest.mark.parametrize("window", [1, 3])
def test_they_count_like_a_batch_without_a_loss(window: int) -> None:
    ends = []
    for module, own in ((TinyModule(), loader()), (Lossless(), loader(default_collate))):
        torch.nn.init.zeros_(module.layer.weight)
        torch.nn.init.zeros_(module.layer.bias)
        trainer = make_trainer(max_epochs=2, accumulate_grad_batches=window)
        lossless = pytest.warns(TrainkitWarning, match="training_step returned None for the first batch")
        with lossless if isinstance(module, Lossless) else nullcontext():
            trainer.fit(module, own)
        ends.append(parameters_of(module))
    assert same(*ends)


def test_a_resumed_run_is_the_same() -> None:
    whole, first, rest = TinyModule(), TinyModule(), TinyModule()
    first.load_state_dict(whole.state_dict())
    make_trainer(max_epochs=3).fit(whole, loader())
    trainer = make_trainer(max_steps=6, max_epochs=-1)
    trainer.fit(first, loader())
    trainer.save_checkpoint("mine")
    recorder = Recorder()
    make_trainer(recorder, max_epochs=3).fit(rest, loader(), ckpt_path="mine")
    assert recorder.batches[:2] == [(1, 4), (1, 7)]
    assert same(parameters_of(whole), parameters_of(rest))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("window, stream", [(1, False), (3, False), (3, True)])
def test_on_one_of_two_processes(window: int, stream: bool) -> None:
    """Rank 0 has none of batches 0 and 6 of all, rank 1 none of 3 and 5."""
    recorder, module = Recorder(), TinyModule()
    arguments: dict[str, Any] = {"accumulate_grad_batches": window, "log_every_n_steps": 1}
    trainer = make_trainer(recorder, max_epochs=2, strategy="ddp", devices=2, **arguments)
    trainer.fit(module, loader(stream=stream))
    own = [index // 2 for index in USABLE if index % 2 == trainer.global_rank]
    assert recorder.batches == [(epoch, index) for epoch in range(2) for index in own]
    assert trainer.global_step == 2 * -(-4 // window)
    first, second = trainer.strategy.world.rows([*module.layer.weight[0].tolist(), *module.layer.bias.tolist()])
    assert first == second
    assert all(map(math.isfinite, first))


@pytest.mark.world_size(2)
def test_where_each_process_needs_a_batch() -> None:
    trainer = make_trainer(strategy="ddp", devices=2)
    with pytest.raises(DataError, match="yielded None .* manual optimization .* Return a usable one from the collate_fn"):
        trainer.fit(ManualModule(), loader(nothing))


def test_a_repeated_step_leaves_torchmetrics_objects_as_they_were() -> None:
    """A padding micro-batch, or a closure that is computed again, must not count twice."""

    class Holder(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.every = torchmetrics.SumMetric(), torchmetrics.CatMetric()

    module = Holder()
    run = SimpleNamespace(module=module, metrics=MetricStore(lambda *_: None, MetricResults()))
    for metric in (module.total, module.every):
        metric.update(torch.tensor([1.0, 2.0]))
    with without_effects(run, None):
        for metric in (module.total, module.every):
            metric.update(torch.tensor([10.0]))
    assert (float(module.total.compute()), module.total.update_count) == (3.0, 1)
    assert (module.every.compute().tolist(), module.every.update_count) == ([1.0, 2.0], 1)
