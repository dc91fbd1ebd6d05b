"""Evaluation on several processes: each sample once, the results and order of one process, and the same end on all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Measuring, Memory, make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainkit import Callback
from trainkit.errors import ConfigurationError, EmptyLoaderError, MetricError, Preempted
from trainkit.trainer.eval_loop import gather_predictions


def trainer_of(*callbacks: Callback, **arguments: Any) -> Any:
    """A Trainer with strategy='ddp' in a world of processes, and for one process otherwise."""
    several = "WORLD_SIZE" in os.environ
    return make_trainer(*callbacks, precision="64-true", **({"strategy": "ddp"} if several else {}), **arguments)


class Watches(Measuring):
    """Records the samples that it has seen, by their first input, and their batch_idx."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[tuple[int, int, list[float]]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.seen.append((dataloader_idx, batch_idx, batch[0][:, 0].tolist()))
        self.log("first", batch[0][0, 0], reduce_fx=lambda values: values.max() - values.min())
        return super().validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"rows": batch[0][:, :1], "numbers": (batch_idx, dataloader_idx)}


# ---------------------------------------------------------------------------------------------------------------- exact


CASES = [(21, 4), (21, 1), (21, 30), (24, 4), (1, 4), (2, 1)]  # samples, batch size


def validated() -> list[Any]:
    found = []
    for samples, batch_size in CASES:
        module, trainer = Watches(), trainer_of()
        (result,) = trainer.validate(module, tiny_loader(samples, batch_size=batch_size), verbose=False)
        found.append((result, module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_the_metrics_of_one_process(size: int) -> None:
    """The metrics are those of one process, and each rank reads every `size`-th batch."""
    worlds = run_world(size, validated)
    for case, (alone, batches, _) in enumerate(validated()):
        for result, seen, known in (own[case] for own in worlds):
            assert result.keys() == alone.keys()
            assert result == worlds[0][case][0]  # bit-identical on all ranks
            assert known == result
            for name, value in alone.items():
                assert result[name] == pytest.approx(value, rel=1e-12, abs=0), (CASES[case], name)
            assert [row for _, row, _ in seen] == list(range(len(seen)))
        dealt = {row * size + rank: sample for rank, own in enumerate(worlds) for _, row, sample in own[case][1]}
        assert [dealt[m] for m in range(len(dealt))] == [sample for _, _, sample in batches]


def limited() -> list[Any]:
    found = []
    for limit in (2, 0.5, 1.0, 1):
        module, trainer = Watches(), trainer_of(limit_val_batches=limit)
        trainer.validate(module, tiny_loader(24), verbose=False)
        found.append((len(module.seen), trainer.num_val_batches, trainer._run.evaluations["validation"].count))
    return found


def test_limits() -> None:
    """An integer is a number of batches per rank; a fraction refers to the batches of all ranks."""
    first, second = run_world(2, limited)
    assert first == [(2, [2], 4), (2, [2], 3), (3, [3], 6), (1, [1], 2)]
    assert second == [(2, [2], 4), (1, [2], 3), (3, [3], 6), (1, [1], 2)]


def two_loaders() -> Any:
    module, trainer = Watches(), trainer_of()
    loaders = [tiny_loader(10), tiny_loader(3, batch_size=2)]
    results = trainer.validate(module, loaders, verbose=False)
    return results, [[p["rows"].tolist() for p in own] for own in trainer.predict(module, loaders)]


def test_several_loaders() -> None:
    alone, expected = two_loaders()
    for results, predictions in run_world(3, two_loaders):
        for result, of_one in zip(results, alone, strict=True):
            assert result == pytest.approx(of_one, rel=1e-12, abs=0)
        assert [len(own) for own in predictions] == [3, 2]
        assert predictions == expected


def named_loaders() -> Any:
    class Named(Watches):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log(f"own_{dataloader_idx}", float(dataloader_idx), add_dataloader_idx=False)

    loaders = [tiny_loader(8), tiny_loader(3), tiny_loader(10)]  # one batch in the second: the other rank has none
    return trainer_of().test(Named(), loaders, verbose=False)


def test_the_results_of_a_loader_are_its_own() -> None:
    """Also on a rank that had no batch of that loader."""
    for results in run_world(2, named_loaders):
        assert results == [{"own_0": 0.0}, {"own_1": 1.0}, {"own_2": 2.0}]


def with_a_small_loader_first(in_hook: bool = False) -> Any:
    class Module(Watches):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            if (dataloader_idx, batch_idx) == (0, 0):
                self.log("only here", 1.0, add_dataloader_idx=False)
            return super().validation_step(batch, batch_idx, dataloader_idx)

        def on_validation_epoch_end(self) -> None:
            if in_hook and self.global_rank == 0:
                self.log("in a hook", 1.0)

    loaders = [tiny_loader(2), DataLoader(Stream(None, 2), batch_size=2), tiny_loader(21)]
    return trainer_of().validate(Module(), loaders, verbose=False)


def test_a_loader_with_fewer_batches_than_processes_before_another() -> None:
    alone = with_a_small_loader_first()
    for results in run_world(3, with_a_small_loader_first):
        for result, of_one in zip(results, alone, strict=True):
            assert result == pytest.approx(of_one, rel=1e-12, abs=0)


@pytest.mark.world_size(3)
def test_a_metric_of_one_process_in_a_hook_after_such_a_loader() -> None:
    """A metric that only one rank logs in a hook is an error on all ranks."""
    with pytest.raises(MetricError, match=r"log\('in a hook'\): logged on rank 0, not on ranks 1, 2\."):
        with_a_small_loader_first(in_hook=True)


# ----------------------------------------------------------------------------------------------------- unknown lengths


class Stream(IterableDataset[Any]):
    """The samples of `tiny_loader`. With `counts`, it splits them itself: one number of samples per rank."""

    def __init__(self, counts: list[int] | None, samples: int = 11) -> None:
        self.counts, self.samples = counts, samples

    def __iter__(self) -> Iterator[Any]:
        data = tiny_loader(self.samples).dataset
        if self.counts is None:
            yield from data
            return
        rank = int(os.environ["RANK"])
        start = sum(self.counts[:rank])
        yield from [data[i] for i in range(start, start + self.counts[rank])]


SPLITS = [None, [7, 4], [3, 8], [0, 11], [11, 0]]


def streamed(splits: list[Any]) -> list[Any]:
    found = []
    for counts in splits:
        module, trainer = Watches(), trainer_of()
        (result,) = trainer.validate(module, DataLoader(Stream(counts), batch_size=2), verbose=False)
        del result["first"]  # its `reduce_fx` gets one value per batch, and the batches differ
        found.append((result, [sample for _, _, sample in module.seen], trainer._run.evaluations["validation"].count))
    return found


def test_streams_end_together() -> None:
    ((exact, _, batches),) = streamed([None])
    worlds = run_world(2, streamed, SPLITS)
    for case, counts in enumerate(SPLITS):
        seen = sorted(value for own in worlds for sample in own[case][1] for value in sample)
        assert seen == sorted(tiny_loader(11).dataset.tensors[0].double()[:, 0].tolist())
        for own in worlds:
            result, _, count = own[case]
            assert result == pytest.approx(exact, rel=1e-12, abs=0)
            assert count == (batches if counts is None else sum((part + 1) // 2 for part in counts))


@pytest.mark.world_size(2)
def test_a_stream_without_a_batch_on_any_process_is_refused_by_all() -> None:
    with pytest.raises(EmptyLoaderError, match="validation loader 0 yielded no batch"):
        trainer_of().validate(Watches(), DataLoader(Stream(None, 0), batch_size=2), verbose=False)


# ------------------------------------------------------------------------------------------------------------ prediction


def predicted() -> list[Any]:
    found: list[Any] = []
    for samples, batch_size in [(21, 4), (1, 1), (9, 2)]:
        got = trainer_of().predict(Watches(), tiny_loader(samples, batch_size=batch_size))
        rows = [value for prediction in got for value in prediction["rows"][:, 0].tolist()]
        found.append((rows, [prediction["numbers"] for prediction in got]))
    trainer = trainer_of()
    nothing = trainer.predict(Watches(), tiny_loader(21), return_predictions=False)
    return [*found, nothing, trainer._run.evaluations["predict"].outputs]


@pytest.mark.parametrize("size", [2, 3])
def test_predictions_come_in_the_order_of_the_data(size: int) -> None:
    *alone, _, _ = predicted()
    for *found, nothing, kept in run_world(size, predicted):
        for (rows, numbers), (expected, ms) in zip(found, alone, strict=True):
            assert rows == expected
            assert numbers == [(m // size, 0) for m, _ in ms]
        assert nothing is None
        assert kept == [[]]  # outputs that are not returned are not gathered


def memory_of_views() -> list[int]:
    world = trainer_of().strategy.world
    large = torch.zeros(1000, 1000)
    mine = [large[:2, 0]] * 2 if world.is_main else [torch.eye(2).to_sparse()]
    (gathered,) = gather_predictions(world, [mine], torch.device("cpu"))
    return [0 if tensor.is_sparse else tensor.untyped_storage().nbytes() for tensor in gathered]


def test_gathering_a_view_sends_only_its_elements() -> None:
    """Gathering a view of a large tensor sends only the elements of the view."""
    assert run_world(2, memory_of_views) == [[8, 0, 8]] * 2


@pytest.mark.world_size(2)
def test_what_cannot_be_sent_is_named() -> None:
    class Module(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return (number for number in range(3))

    with pytest.raises(ConfigurationError, match=r"predict_step must return tensors.*generator.*PredictionWriter"):
        trainer_of().predict(Module(), tiny_loader(8))


# ----------------------------------------------------------------------------------------------------- metrics by step


def logged_by_step(samples: int) -> Any:
    class Steps(TinyModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", batch[0][0, 0].double(), on_step=True, on_epoch=True)
            if batch_idx % 2:
                self.log("odd", float(batch_idx), on_step=True, on_epoch=False)

    logger = Memory()
    trainer = trainer_of(logger=logger)
    trainer.test(Steps(), tiny_loader(samples, batch_size=2), verbose=False)
    trainer.test(Steps(), DataLoader(Stream(None, samples), batch_size=2), verbose=False)
    return logger.rows


def test_values_by_step_are_those_of_one_process() -> None:
    alone = logged_by_step(9)
    main, other = run_world(2, logged_by_step, 9)
    assert not other
    values = [(step, row["value_step"]) for step, row in main if "value_step" in row]
    assert values == [(step, row["value_step"]) for step, row in alone if "value_step" in row]
    assert [step for step, _ in values] == [1, 2, 3, 4, 5] * 2
    assert [row["value_epoch"] for _, row in main if "value_epoch" in row] == pytest.approx(
        [row["value_epoch"] for _, row in alone if "value_epoch" in row], rel=1e-12
    )
    assert [step for step, row in main if "odd" in row] == [3, 4] * 2


# --------------------------------------------------------------------------------------------------------------- signals


class SignalTo(Callback):
    """One rank sends itself SIGTERM after one batch of the validation."""

    def __init__(self, rank: int, row: int) -> None:
        self.rank, self.row = rank, row
        self.rows: list[int] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch_idx)
        if (trainer.global_rank, batch_idx) == (self.rank, self.row):
            os.kill(os.getpid(), signal.SIGTERM)


def ended_in_validation(rank: int, row: int, known: bool) -> Any:
    callback = SignalTo(rank, row)
    trainer = trainer_of(callback, val_every_n_steps=1)
    loader = tiny_loader(20, batch_size=2) if known else DataLoader(Stream(None, 20), batch_size=2)
    try:
        trainer.fit(TinyModule(), tiny_loader(64), loader)
    except Preempted as ending:
        return callback.rows, str(ending), ending.code
    return callback.rows, "", 0


@pytest.mark.parametrize("rank, row, known", [(0, 0, True), (1, 2, True), (1, 4, True), (1, 2, False), (0, 4, False)])
def test_sigterm_on_one_process_ends_the_evaluation_on_all(rank: int, row: int, known: bool) -> None:
    worlds = run_world(2, ended_in_validation, rank, row, known)
    assert worlds == [(list(range(row + 1)), "SIGTERM at step 1, in the validation", 143)] * 2


# ------------------------------------------------------------------------------------------------------------------ rest


class NoisySamples(Dataset[Any]):
    """Adds random noise to each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(()) + index


def noises(workers: int) -> Any:
    class Draws(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch + torch.rand(())

    loader = DataLoader(NoisySamples(), batch_size=3, num_workers=workers)
    return [prediction.tolist() for prediction in trainer_of().predict(Draws(), loader)]


def test_augmentation_is_that_of_one_process() -> None:
    assert run_world(3, noises, 2) == [noises(0)] * 3
