"""Metrics of an epoch that is resumed on another number of processes: the results are those of a single process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.metric_runs import Run, epoch, many, same, value_of
from helpers.worlds.threaded import FakeWorld, run_threads
from torch import Tensor, nn

from trainkit.console import TrainkitWarning
from trainkit.distributed.world import World
from trainkit.metrics.store import MetricStore
from trainkit.metrics.sync import gather_states, merge_states
from trainkit.tagged_json.codec import dumps, loads

State = dict[str, Any]


def through_json(state: Any) -> Any:
    """The state as restored from a checkpoint, in memory of its own."""
    tensors: dict[str, Tensor] = {}
    data = dumps({"states": state}, tensors)
    return loads(data, {"state.safetensors": {key: tensor.clone() for key, tensor in tensors.items()}}, "state.json")["states"]


def saved(world: World, store: MetricStore, module: nn.Module | None = None) -> Any:
    """The metrics in a checkpoint: the state of the only process, or a list of states by rank."""
    state = store.state_dict(module)
    return through_json(state if world.size == 1 else gather_states(world, state))


def resumed(world: World, states: Any, module: nn.Module | None = None) -> Run:
    run = Run(world)
    run.store.load_state_dict(merge_states(states, world.rank, world.size), module)
    return run


Step = Callable[[Run, int], None]


def started(world: World, step: Step, batches: int, every: int) -> tuple[Any, list[Any]]:
    run = Run(world)
    epoch(run, step, batches, every=every)
    return saved(world, run.store), run.rows


def ended(world: World, states: Any, step: Step, first: int, batches: int, every: int) -> tuple[State, Run]:
    run = resumed(world, states)
    epoch(run, step, batches, first=first, every=every)
    return run.end(), run


CHANGES = [(2, 1), (1, 2), (2, 3), (3, 2), (4, 1), (4, 2), (1, 4), (2, 2), (3, 3)]


@pytest.mark.parametrize("before, after", CHANGES)
@pytest.mark.parametrize("at", [12, 156])
def test_an_epoch_continues_on_another_number_of_processes(before: int, after: int, at: int) -> None:
    states = run_threads(before, started, many, at, 5)[0][0]
    whole = Run()
    epoch(whole, many, at + 17)
    expected = whole.end()
    for results, run in run_threads(after, ended, states, many, at, at + 17, 5):
        assert same(results, expected)
        assert run.results.callback.keys() == whole.results.callback.keys()


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_number_continues_bit_for_bit(size: int) -> None:
    def whole(world: World) -> str:
        run = Run(world)
        epoch(run, many, 100, every=7)
        return repr((run.end(), run.rows, run.results))

    def in_two(world: World) -> str:
        run = Run(world)
        epoch(run, many, 60, every=7)
        again = resumed(world, saved(world, run.store))
        again.results.load_state_dict(run.results.state_dict())
        for start in range(60, 100, size):  # the log boundaries are at the same steps
            epoch(again, many, min(start + size, 100), first=start, every=7)
        return repr((again.end(), run.rows + again.rows, again.results))

    assert run_threads(size, in_two) == run_threads(size, whole)


def test_twice_in_one_epoch() -> None:
    """An epoch is resumed twice, each time on another number of processes."""
    whole = Run()
    epoch(whole, many, 60)
    expected = whole.end()
    states = run_threads(2, started, many, 12, 5)[0][0]

    def on_the_way(world: World) -> Any:
        run = resumed(world, states)
        epoch(run, many, 36, first=12)
        return saved(world, run.store)

    for size in (3, 1, 2):
        again = run_threads(size, on_the_way)[0]
        for results, _ in run_threads(4, ended, again, many, 36, 60, 5):
            assert same(results, expected)


@pytest.mark.parametrize("before, after", CHANGES)
def test_metrics_that_are_not_logged_again(before: int, after: int) -> None:
    """A metric that is not logged again after the resume is no error, also on ranks that take over no saved values."""

    def step(run: Run, m: int) -> None:
        if m < 12:
            run.log("mean", value_of(m), on_epoch=True, on_step=False)
            run.log("main", float(m), on_epoch=True, on_step=False, rank_zero_only=True, reduce_fx="max")
        run.log("all", 1.0, on_epoch=True, on_step=False, reduce_fx="sum")

    states = run_threads(before, started, step, 12, 5)[0][0]
    whole = Run()
    epoch(whole, step, 24)
    expected = {**whole.end(), "main": float(12 - before)}
    for results, run in run_threads(after, ended, states, step, 12, 24, 5):
        assert same(results, expected)
        assert run.store.schema == 0


@pytest.mark.parametrize("before, after", CHANGES)
def test_a_value_of_a_step_that_no_boundary_has_seen(before: int, after: int) -> None:
    """Values of a step that still wait for a log boundary are saved, and written at the first one after the resume."""

    def step(run: Run, m: int) -> None:
        run.log("sum", float(m), reduce_fx="sum")
        run.log("late", float(m), reduce_fx="max", prog_bar=True)

    states = run_threads(before, started, step, 12, 99)[0][0]

    def flushed(world: World) -> Any:
        run = resumed(world, states)
        assert before == after or run.store.step_values() == run.store.agree_on_step_values()
        run.store.flush_step()
        run.store.flush_step()
        return run.rows, run.results.progress_bar

    rows = [(True, {"sum": float(sum(range(12 - before, 12))), "late": 11.0})]
    assert run_threads(after, flushed) == [(rows, {"late": 11.0})] * after


def test_a_value_of_before_gives_way_to_a_newer_one() -> None:
    """A value that is logged after the resume replaces a saved one, although its batch index may be lower.

    With more processes each of them has fewer batches, so the index is lower after the resume than before.
    """

    def step(run: Run, m: int) -> None:
        run.log("x", float(m), reduce_fx="max")

    def flushed(world: World, states: Any) -> Any:
        run = resumed(world, states)
        epoch(run, lambda run, m: run.log("x", -1.0, reduce_fx="max"), 13, first=12, every=1)  # rank 1 has no batch
        return run.rows

    states = run_threads(1, started, step, 12, 99)[0][0]
    assert run_threads(2, flushed, states) == [[(True, {"x": -1.0})]] * 2


@pytest.mark.parametrize("before, after", CHANGES)
def test_a_pending_step_value_of_an_earlier_epoch(before: int, after: int) -> None:
    """A value of an earlier epoch that still waits for a log boundary is also saved."""

    def waiting(world: World) -> Any:
        run = Run(world)
        epoch(run, lambda run, m: run.log("rare", float(m), on_step=True, on_epoch=True, reduce_fx="max"), 4, every=99)
        run.end()
        run.store.stamp = -1
        epoch(run, lambda run, m: run.log("other", 1.0), 4, every=99)
        return saved(world, run.store)

    states = run_threads(before, waiting)[0]

    def flushed(world: World) -> Any:
        run = resumed(world, states)
        assert "rare" not in run.store.step_values()
        run.store.flush_step()
        return run.rows

    assert run_threads(after, flushed) == [[(True, {"rare_step": 3.0, "other": 1.0})]] * after


def test_the_value_of_a_function_that_is_not_passed_again() -> None:
    """If `reduce_fx` is a function and the metric is not logged again, only one process can save its result."""

    def step(run: Run, m: int) -> None:
        if m < 4:
            run.log("early", float(m), on_step=False, on_epoch=True, reduce_fx=lambda values: values.sum())

    alone = run_threads(1, started, step, 4, 5)[0][0]
    for results, _ in run_threads(2, ended, alone, step, 4, 8, 5):
        assert results == {"early": 6.0}  # the result at the time of the checkpoint
    several = run_threads(2, started, step, 4, 5)[0][0]
    with pytest.warns(
        TrainkitWarning, match=r"log\('early'\): .* its function reduce_fx, .* Its value for this epoch is missing"
    ):
        ((results, _),) = run_threads(1, ended, several, step, 4, 8, 5)
    assert results == {}


def test_functions_get_their_values_in_order_after_each_change() -> None:
    def step(run: Run, m: int) -> None:
        for n in range(2):  # two values in each batch
            run.log("order", float(2 * m + n), on_step=False, on_epoch=True, reduce_fx=in_order)

    def in_order(values: Tensor) -> float:
        assert values.tolist() == list(map(float, range(len(values))))
        return float(len(values))

    states: Any = run_threads(1, started, step, 0, 5)[0][0]
    done = 0
    for size in (2, 3, 1, 4, 2):

        def go(world: World, states: Any, done: int) -> Any:
            run = resumed(world, states)
            epoch(run, step, done + 12, first=done)
            return saved(world, run.store), run.end()

        outcomes = run_threads(size, go, states, done)
        states, done = outcomes[0][0], done + 12
        assert [results for _, results in outcomes] == [{"order": 2.0 * done}] * size


# ------------------------------------------------------------------------------------------------------ torchmetrics


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.SumMetric()
        self.peak = torchmetrics.MaxMetric()
        self.low = torchmetrics.MinMetric()
        self.every = torchmetrics.CatMetric()
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.loose = [torchmetrics.MeanMetric()]

    def step(self, run: Run, m: int) -> None:
        value = value_of(m).float()
        for metric in (self.total, self.peak, self.low, self.extremes, self.loose[0]):
            metric.update(value)
        self.every.update(torch.stack([value, -value]))
        for name in ("total", "peak", "low"):
            run.log(name, getattr(self, name), on_step=False, on_epoch=True)
        run.log("loose", self.loose[0], on_step=False, on_epoch=True)


def with_objects(world: World, states: Any, first: int, batches: int, end: bool) -> Any:
    module = Metrics()
    run = Run(world) if states is None else resumed(world, states, module)
    epoch(run, module.step, batches, first=first)
    if not end:
        return saved(world, run.store, module)
    seen = module.every.value
    return run.end(), sorted(torch.cat(seen).tolist() if seen else []), module.every.update_count


@pytest.mark.parametrize("before, after", CHANGES)
def test_objects_continue_on_another_number_of_processes(before: int, after: int) -> None:
    states = run_threads(before, with_objects, None, 0, 12, False)[0]
    expected, every, updates = with_objects(World(), None, 0, 24, True)
    outcomes = run_threads(after, with_objects, states, 12, 24, True)
    for results, _, _ in outcomes:
        assert results.keys() == expected.keys()
        assert all(math.isclose(results[name], expected[name], rel_tol=1e-5) for name in results)
    assert sorted(value for _, own, _ in outcomes for value in own) == every  # each sample once
    assert sum(count for _, _, count in outcomes) == updates


def test_an_object_whose_states_cannot_be_joined_says_so() -> None:
    def pearson(world: World) -> Any:
        module = nn.ModuleDict({"pearson": torchmetrics.PearsonCorrCoef()})
        module["pearson"].update(torch.arange(4.0) + world.rank, torch.arange(4.0) ** 2)
        return saved(world, Run(world).store, module)

    states = run_threads(2, pearson)[0]
    with pytest.warns(
        TrainkitWarning, match=r"pearson: the states of this torchmetrics object from 2 processes cannot be combined"
    ):
        merged = merge_states(states, 0, 1)
    assert merged["objects"]["pearson"]["updates"] == 1
    assert merge_states(states, 1, 2)["objects"]["pearson"]["updates"] == 1
    assert merge_states(states, 2, 3)["objects"] == {}


def test_what_is_gathered_is_on_the_cpu_and_small() -> None:
    def job(world: FakeWorld) -> Any:
        whole = torch.zeros(1000)
        state = {"stamp": 0, "metrics": [], "objects": {"x": {"states": {"v": [whole[:2]]}}}}
        return gather_states(world, state)

    for states in run_threads(2, job):
        assert len(states) == 2
        assert all(state["objects"]["x"]["states"]["v"][0].untyped_storage().nbytes() == 8 for state in states)
