"""Metrics on several processes: all have the results of one process, and a mismatch is an error instead of a hang.

The processes are threads. Real ones are tested in `test_metric_processes.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.runs.metric_runs import Run, Step, epoch, evaluation, many, same, sized, value_of
from helpers.worlds.threaded import FakeWorld, run_threads
from torch import Tensor

from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.metrics.store import Scope
from trainkit.micro_batch import NO_BATCH

# -------------------------------------------------------------------------------------------------------- evaluation


def evaluated(world: World | None, batches: int) -> tuple[dict[str, float], Run]:
    run = Run(world)
    return evaluation(run, many, batches), run


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("batches", [1, 2, 5, 21, 150])
def test_an_evaluation_is_that_of_one_process(batches: int, size: int) -> None:
    expected, alone = evaluated(None, batches)
    rows = [row for row in alone.rows if row[0] is True]
    for results, run in run_threads(size, evaluated, batches):
        assert same(results, expected)
        assert list(results) == list(expected)
        assert [row for row in run.rows if row[0] is not False] == [(n + 1, row) for n, (_, row) in enumerate(rows)]
        assert same(run.rows[-1][1], alone.rows[-1][1])
        assert same(run.results.callback, alone.results.callback)
        assert same(run.results.progress_bar, alone.results.progress_bar)
        assert same(run.results.logged, alone.results.logged)


def test_an_epoch_takes_one_exchange_and_one_more_for_functions() -> None:
    def job(world: FakeWorld, function: Any) -> int:
        run = Run(world)
        epoch(run, lambda run, m: run.log("x", value_of(m), on_epoch=True, on_step=False, reduce_fx=function), 20, every=99)
        run.end()
        return world.exchanges

    assert run_threads(2, job, "mean") == [1, 1]
    assert run_threads(2, job, torch.median) == [2, 2]


def test_one_process_exchanges_nothing() -> None:
    class Alone(World):
        def _gathered(self, data: bytes) -> list[bytes]:
            raise AssertionError

        exchange = exchange_state = _gathered  # type: ignore[assignment]

    run = Run(Alone())
    epoch(run, many, 9)
    run.store.agree_on_step_values()
    assert run.end()
    assert run.store.schema == 0


def test_several_loaders() -> None:
    """A rank may have batches of one loader and none of another."""

    def job(world: World | None) -> dict[str, float]:
        run = Run(world)
        rank, size = run.world.rank, run.world.size
        run.store.discard()
        for index, (batches, before) in enumerate([(5, 0), (1, 5)]):
            run.store.suffix, run.store.scope = f"/dataloader_idx_{index}", Scope.EVAL_BATCH
            for m in range(rank, batches, size):
                run.store.stamp, run.store.batch = before + m // size * size, sized(m)
                run.log("loss", value_of(m))
                run.log("overall", value_of(m), add_dataloader_idx=False, reduce_fx=lambda values: values[-1])
        run.store.suffix = ""
        return run.end(Scope.EVAL_EPOCH)

    expected = job(None)
    assert list(expected) == ["loss/dataloader_idx_0", "overall", "loss/dataloader_idx_1"]
    for results in run_threads(3, job):
        assert same(results, expected)


def test_an_evaluation_step_without_a_batch_on_one_rank() -> None:
    """An evaluation step in which one of three ranks has no batch."""

    def job(world: FakeWorld) -> list[Any]:
        run = Run(world)
        run.store.scope = Scope.EVAL_BATCH
        had = world.rank != 1
        if had:
            run.store.stamp, run.store.batch = 10, sized(1)
            run.log("x", float(world.rank), on_step=True, on_epoch=False)
            if world.rank == 2:
                run.log("only", 1.0, on_step=True, on_epoch=False)  # not reduced, so one rank may log it alone
        assert run.store.pending == had
        run.store.flush_row(world, had, 12)
        assert not run.store.pending
        return run.rows

    rows = [(11, {"x": 0.0}), (12, {"x": 2.0, "only": 1.0})]
    assert run_threads(3, job) == [rows] * 3


# ---------------------------------------------------------------------------------------------------------- training


def test_the_values_of_a_step_are_reduced_and_the_same_everywhere() -> None:
    def step(run: Run, m: int) -> None:
        run.log("mean", float(m), prog_bar=True)
        run.log("sum", float(m), reduce_fx="sum")
        run.log("own", torch.tensor(float(m)), reduce_fx=lambda values: (values * torch.tensor([1.0, 10.0, 100.0])).sum())
        run.log("both", m, on_epoch=True, batch_size=m)

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, step, 7, every=1)  # in the third step only rank 0 has a micro-batch
        return run.rows, run.results.progress_bar, {k: float(v) for k, v in run.results.callback.items()}, world.calls

    outcomes = run_threads(3, job)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    rows, bar, callback, calls = outcomes[0]
    boundary = ["combine", "combine", "exchange"]  # the control word, the numbers, the values for the function
    assert calls == [*boundary, *boundary, "combine", "from_main", "combine", "exchange"]  # ranks without a batch know no names
    weights = [m % 5 + 1 for m in range(7)]  # the batch sizes of `sized`
    for row, ms in enumerate([range(3), range(3, 6), range(6, 7)]):
        mean = sum(m * weights[m] for m in ms) / sum(weights[m] for m in ms)
        squares, total = sum(m * m for m in ms), sum(ms)
        own = float(ms[0]) if len(ms) == 1 else sum(m * 10.0**n for n, m in enumerate(ms))
        assert rows[row] == (True, {"mean": mean, "sum": float(total), "own": own, "both_step": squares / total})
    assert bar == {"mean": 6.0}
    assert callback == {"mean": 6.0, "sum": 6.0, "own": 6.0, "both": 6.0, "both_step": 6.0}


def test_a_boundary_takes_a_control_word_and_one_reduction() -> None:
    """Nothing is gathered, whatever is logged; nothing but the word is sent when nothing was logged."""

    def step(run: Run, m: int) -> None:
        if m >= 9:
            return
        for reduce_fx in ("mean", "sum", "min", "max"):
            run.log(reduce_fx, float(m), reduce_fx=reduce_fx)

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, step, 15, every=1)
        return run.rows, world.calls

    for rows, calls in run_threads(3, job):
        expected = [{"mean": 8 / 6, "sum": 3.0, "min": 0.0, "max": 2.0}, {"sum": 12.0, "min": 3.0, "max": 5.0}]
        assert rows[0] == (True, expected[0])
        assert rows[1][1].items() > expected[1].items()
        assert len(rows) == 3
        assert calls == ["combine", "combine"] * 3 + ["combine"] * 2  # the word and the numbers; then the word alone


@pytest.mark.parametrize("size", [2, 3])
def test_an_extra_name_at_a_boundary_is_named_before_anything_is_reduced(size: int) -> None:
    def job(world: FakeWorld) -> Any:
        run = Run(world)

        def step(run: Run, m: int) -> None:
            run.log("all", 1.0)
            if world.rank == size - 1:
                run.log("extra", 1.0)

        with pytest.raises(MetricError) as caught:
            epoch(run, step, 2 * size, every=1)
        return str(caught.value), world.calls

    others = "rank 0" if size == 2 else "ranks 0, 1"
    for text, calls in run_threads(size, job):
        assert text.startswith(f"log('extra'): logged on rank {size - 1}, not on {others}.")
        assert calls == ["combine", "exchange"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_sum_of_a_step_does_not_depend_on_the_order_of_the_ranks(size: int) -> None:
    """Also where the rounding errors are larger than the result; infinities stay what they are."""
    values = [1e16, 1.0, -1e16, 3.0, 1e-9][:size]

    def job(world: FakeWorld, values: list[float]) -> Any:
        run = Run(world)
        run.store.scope, run.store.stamp, run.store.batch = Scope.TRAIN_BATCH, 0, torch.zeros(2, 1)
        run.log("sum", values[world.rank], reduce_fx="sum")
        run.log("mean", values[world.rank])
        run.log("infinite", math.inf if world.rank else values[0], reduce_fx="sum")
        run.log("nan", math.nan if world.rank else 1.0, reduce_fx="max")
        run.store.flush_step()
        return run.rows[0][1]

    for order in (values, values[::-1], sorted(values)):
        for row in run_threads(size, job, order):
            assert row["sum"] == math.fsum(values)
            assert row["mean"] == math.fsum(values) / size
            assert row["infinite"] == math.inf
            assert math.isnan(row["nan"])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batches", [1, 7, 40])
def test_a_training_epoch_is_that_of_one_process(batches: int, size: int) -> None:
    def job(world: World | None) -> tuple[dict[str, float], Run]:
        run = Run(world)
        epoch(run, many, batches)
        return run.end(), run

    expected, alone = job(None)
    for results, run in run_threads(size, job):
        assert same(results, expected)
        assert run.results.callback.keys() == alone.results.callback.keys()
        assert run.store.step_values() == {}


def test_what_is_logged_rarely_waits_for_a_boundary_of_the_next_epoch() -> None:
    def step(run: Run, m: int) -> None:
        if m == 3:
            run.log("rare", float(m), on_step=True, on_epoch=True)  # in the last step, where only rank 0 has a batch

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        for _ in range(2):
            run.store.stamp = -1
            epoch(run, step, 4, every=99)
            run.end()
        assert run.store.pending
        run.store.scope, run.store.stamp, run.store.batch = Scope.TRAIN_BATCH, 0, sized(0)
        run.store.flush_step()
        run.store.flush_step()
        return run.rows

    rows = [(False, {"rare_epoch": 3.0}), (False, {"rare_epoch": 3.0}), (True, {"rare_step": 3.0})]
    assert run_threads(3, job) == [rows] * 3


def test_a_newer_value_takes_the_place_of_one_that_waits() -> None:
    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, lambda run, m: run.log("x", float(m)), 2, every=99)
        run.end()
        run.store.stamp = -1
        epoch(run, lambda run, m: run.log("x", 7.0), 1, every=1)  # rank 1 has no batch in this epoch
        return run.rows

    assert run_threads(2, job) == [[(True, {"x": 7.0})]] * 2


def test_callbacks_decide_on_values_that_are_the_same() -> None:
    """`agree_on_step_values` reduces values before a log boundary, so that callbacks decide the same on all ranks."""

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, lambda run, m: run.log("x", float(m), on_epoch=True), 5, every=99)
        live = dict(run.store.step_values())
        agreed = run.store.agree_on_step_values()
        assert live["x"] == {0: 4.0, 1: 3.0}[world.rank]
        assert {name: float(value) for name, value in agreed.items()} == {"x": 4.0, "x_step": 4.0}
        assert run.store.step_values() == agreed
        assert run.store.last_stamp("x") == 2
        assert run.store.pending  # loggers get it once, at the next log boundary
        run.store.flush_step()
        run.log("x", 10.0 + world.rank, on_epoch=True)
        assert run.store.step_values()["x"] == 10.0 + world.rank
        return run.rows, agreed["x"].dtype

    assert run_threads(2, job) == [([(True, {"x_step": 4.0})], torch.float64)] * 2


def test_what_is_logged_in_a_window_without_a_batch_weighs_nothing() -> None:
    """Hooks around the optimizer step run on every rank, even without a micro-batch in the accumulation window."""

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        run.store.scope = Scope.TRAIN_BATCH
        for row, there in enumerate([2, 1]):
            run.store.batch = torch.zeros(4, 1)
            if world.rank < there:
                run.store.stamp = row
            else:
                run.store.batch = NO_BATCH
            run.log("norm", 1.0 + row + world.rank, on_step=True, on_epoch=True)
            run.store.flush_step()
        return run.rows, run.end()

    steps = [(True, {"norm_step": 1.5}), (True, {"norm_step": 2.0})]
    epoch_row = {"norm_epoch": (1.0 + 2.0 + 2.0) / 3}
    assert run_threads(2, job) == [([*steps, (False, epoch_row)], epoch_row)] * 2


def test_the_same_value_once_more_after_agreeing() -> None:
    def job(world: FakeWorld) -> Any:
        run = Run(world)
        for row in range(2):
            run.store.scope, run.store.stamp, run.store.batch = Scope.TRAIN_BATCH, row, sized(0)
            run.log("x", 1.0 + world.rank * row, reduce_fx="sum")
            run.store.agree_on_step_values()
            run.store.flush_step()
        return run.rows

    assert run_threads(2, job) == [[(True, {"x": 2.0}), (True, {"x": 3.0})]] * 2


# -------------------------------------------------------------------------------------------- mismatches between ranks


def failing(size: int, step: Step, batches: int = 8, every: int = 99) -> list[str]:
    """The error on each rank."""

    def job(world: FakeWorld) -> str:
        run = Run(world)

        def go() -> None:
            epoch(run, step, batches, every=every)
            run.end()

        with pytest.raises(MetricError) as caught:
            go()
        assert run.rows == []
        return str(caught.value)

    return run_threads(size, job)


def on_ranks(*ranks: int, **options: Any) -> Step:
    return lambda run, m: run.log("acc", 1.0, **options) if run.world.rank in ranks else None


@pytest.mark.parametrize("options", [{"on_epoch": True, "on_step": False}, {}, {"on_epoch": True, "reduce_fx": torch.median}])
@pytest.mark.parametrize("every", [1, 99])
def test_a_metric_that_is_logged_on_some_ranks_only(every: int, options: dict[str, Any]) -> None:
    for ranks, words in [((0,), "logged on rank 0, not on ranks 1, 2."), ((1, 2), "logged on ranks 1, 2, not on rank 0.")]:
        texts = failing(3, on_ranks(*ranks, **options), every=every)
        assert len(set(texts)) == 1
        assert texts[0].startswith(f"log('acc'): {words}")


def test_a_metric_that_is_logged_on_one_rank_only_in_an_epoch_hook() -> None:
    def job(world: FakeWorld) -> str:
        run = Run(world)
        epoch(run, lambda run, m: None, 5)
        run.store.scope = Scope.TRAIN_EPOCH
        if world.rank == 0:
            run.log("acc", 1.0)
        with pytest.raises(MetricError) as caught:
            run.end()
        return str(caught.value)

    assert all("logged on rank 0, not on rank 1." in text for text in run_threads(2, job))


def test_options_that_differ_between_ranks() -> None:
    texts = failing(2, lambda run, m: run.log("x", 1.0, on_epoch=run.world.rank == 0), every=1)
    assert texts == [texts[0]] * 2
    assert "logged on rank 0 with on_epoch=True, on rank 1 with on_epoch=False" in texts[0]


def test_a_function_that_fails() -> None:
    def largest_gap(values: Tensor) -> Tensor:
        raise ZeroDivisionError("no gap")

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, lambda run, m: run.log("gap", 1.0, on_step=False, on_epoch=True, reduce_fx=largest_gap), 1)
        with pytest.raises(MetricError if world.rank else ZeroDivisionError) as caught:
            run.end()
        return str(caught.value)

    # rank 1 had no batch and does not know the function
    assert run_threads(2, job) == ["no gap", "rank 0: ZeroDivisionError: no gap"]


def test_a_function_that_one_process_does_not_know() -> None:
    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, lambda run, m: run.log("x", float(m), on_epoch=True, reduce_fx=lambda values: values.sum()), 2, every=1)
        return run.end(), run.rows

    rows = [(True, {"x_step": 1.0}), (False, {"x_epoch": 1.0})]
    assert run_threads(3, job) == [({"x_epoch": 1.0}, rows)] * 3


# ---------------------------------------------------------------------------------------------------- rank_zero_only


def test_rank_zero_only() -> None:
    def step(run: Run, m: int) -> None:
        run.log("x", float(m), on_step=True, on_epoch=True, prog_bar=True, rank_zero_only=True)
        if run.world.rank == 0:
            run.log("alone", float(m), rank_zero_only=True, on_epoch=True, on_step=False, reduce_fx=lambda values: values[-1])
        else:
            run.log(3, "no number", rank_zero_only=True)  # type: ignore[arg-type]  # ignored on this rank

    def job(world: FakeWorld) -> Any:
        run = Run(world)
        epoch(run, step, 8, every=2)
        assert run.store.schema == 0
        ended = run.end()
        return ended, run.rows, run.results.progress_bar, {k: float(v) for k, v in run.results.callback.items()}

    outcomes = run_threads(2, job)
    assert outcomes[0] == outcomes[1]
    ended, rows, bar, callback = outcomes[0]
    sizes = [m % 5 + 1 for m in range(0, 8, 2)]
    mean = sum(m * size for m, size in zip(range(0, 8, 2), sizes, strict=True)) / sum(sizes)
    assert ended == {"x_epoch": mean, "alone": 6.0}
    assert rows == [(True, {"x_step": 2.0}), (True, {"x_step": 6.0}), (False, ended)]
    assert bar == {"x_step": 6.0, "x_epoch": mean}
    assert callback == {"x": mean, "x_step": 6.0, "x_epoch": mean, "alone": 6.0}


def test_rank_zero_only_and_then_not() -> None:
    """It is an error on one process, too: all calls with a name in an epoch have the same options."""
    with pytest.raises(MetricError, match=r"log\('x'\) was called twice in one epoch with different options"):
        epoch(Run(), lambda run, m: run.log("x", 1.0, on_epoch=True, rank_zero_only=m > 0), 2)


# ------------------------------------------------------------------------------------------------------------ schema


def test_the_schema_is_the_same_in_whatever_order() -> None:
    """`schema` is a checksum of the names and of the options that must match. It does not depend on the order."""

    def job(world: FakeWorld, **other: Any) -> list[int]:
        run, seen = Run(world), []
        run.store.scope, run.store.stamp, run.store.batch = Scope.TRAIN_BATCH, 0, sized(0)
        seen.append(run.store.schema)
        for name in ("ab", "ba")[world.rank]:
            run.log(name, 1.0, **(other if world.rank else {}))
            seen.append(run.store.schema)
        run.store.check_schema(world) if not other or "prog_bar" in other else None
        run.log("main", 1.0, rank_zero_only=True)
        seen.append(run.store.schema)
        run.store.discard()
        seen.append(run.store.schema)
        return seen

    (none, a, both, still, gone), (_, b, other, _, _) = run_threads(2, job)
    assert none == gone == 0
    assert both == still == other
    assert len({0, a, b, both}) == 4
    assert max(a, b, both) < 2**62
    for option in ({"on_epoch": True}, {"reduce_fx": "sum"}, {"reduce_fx": torch.median}):
        first, second = run_threads(2, lambda world, option=option: job(world, **option))
        assert first[2] != second[2]
    first, second = run_threads(2, lambda world: job(world, prog_bar=True, logger=False))
    assert first == [none, a, both, both, 0]
    assert second[2] == both


def test_a_schema_that_differs_names_key_and_ranks() -> None:
    def job(world: FakeWorld, batches: int) -> str:
        run = Run(world)

        def step(run: Run, m: int) -> None:
            run.log("all", 1.0)
            if m == 4:
                run.log("acc", 1.0)

        epoch(run, step, batches)
        try:
            run.store.check_schema(world)
        except MetricError as error:
            return str(error)
        return ""

    assert run_threads(2, job, 5) == ["", ""]  # rank 1 has no batch in the step of micro-batch 4
    assert all("log('acc'): logged on rank 0, not on rank 1." in text for text in run_threads(2, job, 6))


def test_the_schema_is_that_of_this_epoch() -> None:
    def job(world: FakeWorld) -> list[int]:
        run, seen = Run(world), []
        for name in ("a", "a", "b"):
            run.store.stamp = -1
            epoch(run, lambda run, m, name=name: run.log(name, 1.0), 4, every=99)
            seen.append(run.store.schema)
            run.end()
            assert run.store.schema == 0
            assert run.store.schema_entries() == []
        return seen

    first, second = run_threads(2, job)
    assert first == second
    assert first[0] == first[1] != first[2]


def test_an_option_that_changes_while_nothing_is_kept() -> None:
    def job(world: FakeWorld) -> list[int]:
        run = Run(world)
        epoch(run, lambda run, m: run.log("x", 1.0, reduce_fx="sum"), 2, every=1)
        before = run.store.schema
        epoch(run, lambda run, m: run.log("x", 1.0, reduce_fx="max"), 2, every=1)
        epoch(run, lambda run, m: run.log("x", 1.0, reduce_fx="sum"), 2, every=1)
        return [before, run.store.schema]

    for before, after in run_threads(2, job):
        assert before == after
