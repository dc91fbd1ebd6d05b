"""Objects of torchmetrics on several processes compute the value of one object that has seen all batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.metric_runs import Run, epoch, evaluation
from helpers.worlds.threaded import FakeWorld, run_threads
from torch import Tensor, nn

from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.metrics.metric_objects import compact, compute_over_ranks, states_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Metric `"),
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets"),
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero"),
]


class InOrder(torchmetrics.CatMetric):
    """A metric that depends on the order of its values."""

    def compute(self) -> Tensor:
        values = super().compute().reshape(-1)
        return (values * torch.arange(1, len(values) + 1)).sum()


class AllKinds(torchmetrics.Metric):
    """A metric with one state for each kind of `dist_reduce_fx`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("constant", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("largest", torch.tensor(-9.0), dist_reduce_fx="max")
        self.add_state("smallest", torch.tensor(9.0), dist_reduce_fx="min")
        self.add_state("whole", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("pairs", [], dist_reduce_fx=None)
        self.add_state("own", torch.tensor(0.0), dist_reduce_fx=lambda stack: stack.sum(0))
        self.add_state("own_list", [], dist_reduce_fx=sum)

    def update(self, values: Tensor) -> None:
        self.constant = torch.tensor(4.0)
        self.largest = torch.maximum(self.largest, values.max())
        self.smallest = torch.minimum(self.smallest, values.min())
        self.whole += len(values)
        self.pairs += [values[:1], 2 * values[:1]]  # two tensors in each call of update
        self.own += values.sum()
        self.own_list.append(values.sum())

    def compute(self) -> Tensor:
        assert self.whole.dtype == torch.int64
        own = sum(self.own_list) if isinstance(self.own_list, list) else self.own_list
        parts = (self.constant, self.largest, 3 * self.smallest, self.whole, self.own, own, sum(map(float, self.pairs)))
        return torch.stack([torch.as_tensor(part).double() for part in parts]).sum()


class Metrics(nn.Module):
    """Many kinds of torchmetrics objects. Those in the list `loose` are not attributes of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.mse = torchmetrics.MeanSquaredError()
        self.auroc = torchmetrics.AUROC("binary")  # its states are lists of floats and of integers
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=3)
        self.spearman = torchmetrics.SpearmanCorrCoef()
        self.pearson = torchmetrics.PearsonCorrCoef()  # only the object can combine its states
        self.several = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "rmse": torchmetrics.MeanSquaredError(squared=False)}, prefix="c/"
        )
        self.both = torchmetrics.MeanMetric() + torchmetrics.SumMetric()
        self.peak = torchmetrics.MaxMetric()
        self.kinds = AllKinds()
        self.order = InOrder()
        self.loose = [torchmetrics.MeanAbsoluteError()]

    def step(self, run: Run, m: int) -> None:
        generator = torch.Generator().manual_seed(m)
        x, y = torch.randn(2, m % 5 + 1, generator=generator)
        self.mse(x, y)
        run.log("mse", self.mse, on_step=True, on_epoch=True)
        self.auroc.update(x.sigmoid(), (y > 0).long())
        self.f1.update(*torch.randint(0, 3, (2, m % 5 + 1), generator=generator))
        self.spearman.update(x, y)
        self.pearson.update(x, y)
        self.several(x, y)
        for name, metric in self.several.items():
            run.log(name, metric, on_epoch=True, on_step=True)
        for metric in (self.both, self.peak, self.kinds, self.order):
            metric.update(x)
        self.loose[0].update(x, y)
        for name in ("auroc", "f1", "spearman", "pearson", "both", "peak", "kinds", "order"):
            run.log(name, getattr(self, name), on_step=False, on_epoch=True)
        run.log("loose", self.loose[0], on_step=False, on_epoch=True)


def evaluated(world: World | None, batches: int) -> dict[str, float]:
    run, metrics = Run(world), Metrics()
    with torch.inference_mode():
        results = [evaluation(run, metrics.step, batches) for _ in range(2)]
    assert repr(results[0]) == repr(results[1])  # the objects are reset after an evaluation
    assert all(metric.update_count == 0 for metric in (metrics.mse, metrics.order, *metrics.several.values()))
    assert metrics.order.value == metrics.auroc.preds == metrics.kinds.own_list == []
    return results[0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batches", [1, 2, 7, 20])
def test_objects_come_to_what_one_process_has(batches: int, size: int) -> None:
    expected = evaluated(None, batches)
    outcomes = run_threads(size, evaluated, batches)
    assert all(repr(outcome) == repr(outcomes[0]) for outcome in outcomes)
    assert list(outcomes[0]) == list(expected)
    for name, value in outcomes[0].items():
        near = pytest.approx(expected[name], rel=1e-5, abs=1e-6, nan_ok=True)  # torchmetrics computes in float32
        assert value == near, name


def test_their_values_of_a_step_are_reduced_as_numbers_are() -> None:
    metrics = {rank: torchmetrics.MeanSquaredError() for rank in range(2)}

    def step(run: Run, m: int) -> None:
        metrics[run.world.rank](torch.full((2,), float(m)), torch.zeros(2))
        run.log("mse", metrics[run.world.rank], on_step=True, on_epoch=False)

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, step, 4, every=1)
        assert metrics[world.rank].update_count == 2
        run.end()
        assert metrics[world.rank].update_count == 0  # although only values of steps are logged
        return run.rows

    sizes = [m % 5 + 1 for m in range(4)]
    rows = [
        (0 * sizes[0] + 1 * sizes[1]) / (sizes[0] + sizes[1]),
        (4 * sizes[2] + 9 * sizes[3]) / (sizes[2] + sizes[3]),
    ]
    assert run_threads(2, job) == [[(True, {"mse": row}) for row in rows]] * 2


def test_running_windows() -> None:
    def job(world: World | None) -> dict[str, float]:
        metric, run = torchmetrics.RunningSum(window=3), Run(world)

        def step(run: Run, m: int) -> None:
            metric.update(torch.tensor(float(10**m)))
            run.log("sum", metric, on_step=False, on_epoch=True)

        epoch(run, step, 7)
        return run.end()

    assert job(None) == {"sum": 1110000.0}
    # each process keeps its last three updates: batches 2, 4 and 6 on rank 0, batches 1, 3 and 5 on rank 1
    assert run_threads(2, job) == [{"sum": 1111110.0}] * 2


def test_rank_zero_only_is_not_synchronised() -> None:
    def job(world: FakeWorld) -> Any:
        metric, run = torchmetrics.CatMetric(), Run(world)

        def step(run: Run, m: int) -> None:
            metric.update(torch.tensor(float(m)))
            run.log("first", metric, rank_zero_only=True, on_step=False, on_epoch=True)

        epoch(run, step, 2)
        ended = run.end()
        assert metric.value == []  # on both ranks
        return ended

    assert run_threads(2, job) == [{"first": 0.0}] * 2


class Strange:
    """A metric of another library, with `compute` and `reset`."""

    def __init__(self) -> None:
        self.total = 0.0

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0


def test_an_object_of_another_library() -> None:
    def job(world: World | None, main_only: bool) -> Any:
        metric, run = Strange(), Run(world)

        def step(run: Run, m: int) -> None:
            metric.total += 1.0
            run.log("strange", metric, on_step=False, on_epoch=True, rank_zero_only=main_only)

        epoch(run, step, 4)
        return run.end()

    assert job(None, False) == {"strange": 4.0}
    assert run_threads(2, job, True) == [{"strange": 2.0}] * 2
    with pytest.raises(MetricError, match=r"log\('strange'\): the states of a Strange on several processes cannot be combined"):
        run_threads(2, job, False)


def test_states_that_cannot_be_combined() -> None:
    class Shapes(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("counts", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, size: int) -> None:
            self.counts = torch.ones(size)

        def compute(self) -> Tensor:
            return self.counts.sum()

    def job(world: FakeWorld) -> str:
        metric, run = Shapes(), Run(world)

        def step(run: Run, m: int) -> None:
            metric.update(m + 2)
            run.log("shapes", metric, on_step=False, on_epoch=True)

        epoch(run, step, 2)
        with pytest.raises(MetricError) as caught:
            run.end()
        return str(caught.value)

    for text in run_threads(2, job):
        assert text.startswith("log('shapes'): the states of this Shapes on different processes cannot be combined: ")
        assert "rank_zero_only=True" in text


def test_a_value_that_is_no_number_is_an_error_everywhere() -> None:
    def job(world: FakeWorld) -> str:
        metric, run = torchmetrics.CatMetric(), Run(world)

        def step(run: Run, m: int) -> None:
            metric.update(torch.zeros(2))
            run.log("values", metric, on_step=False, on_epoch=True)

        epoch(run, step, 1)
        with pytest.raises(MetricError) as caught:
            run.end()
        return str(caught.value)

    first, second = run_threads(2, job)
    assert first.startswith("log('values'): the result must be a number or a tensor with one element")
    assert second == f"rank 0: MetricError: {first}"  # rank 1 had no batch and no object


def test_an_object_continues_with_what_it_had() -> None:
    mine, other = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()
    mine.update(torch.ones(2), torch.zeros(2))
    other.update(torch.full((2,), 3.0), torch.zeros(2))
    told = [states_of(mine), states_of(other), states_of(torchmetrics.MeanSquaredError())]
    assert told[2] == {}
    assert compute_over_ranks("mse", mine, told) == 5.0
    assert mine.compute() == 1.0
    assert mine._to_sync
    assert mine.update_count == 1
    assert compute_over_ranks("mse", torchmetrics.MeanSquaredError(), told) == 5.0


@pytest.mark.parametrize("reduction", ["mean", "max", "min", "sum"])
def test_a_process_without_an_update_does_not_count(reduction: str) -> None:
    class One(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(0.0), dist_reduce_fx=reduction)

        def update(self, value: float) -> None:
            self.value = torch.tensor(value)

        def compute(self) -> Tensor:
            return self.value

    def value_of(*values: float | None) -> float:
        objects = [One() for _ in values]
        for metric, value in zip(objects, values, strict=True):
            if value is not None:
                metric.update(value)
        return float(compute_over_ranks("x", objects[0], [states_of(metric) for metric in objects]))

    combine = {"mean": lambda given: sum(given) / len(given), "max": max, "min": min, "sum": sum}[reduction]
    for values in ((None, -2.0), (3.0, None), (3.0, 5.0), (None, 3.0, -4.0)):
        assert value_of(*values) == combine([value for value in values if value is not None])


def test_what_is_sent_brings_no_more_memory_than_its_own() -> None:
    whole = torch.zeros(1000, requires_grad=True)
    part = compact(whole[:3])
    assert part.untyped_storage().nbytes() == 12
    assert not part.requires_grad
    assert compact(torch.zeros(3)).shape == (3,)
