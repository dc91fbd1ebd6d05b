"""Metrics on real processes: the results are those of one process, and a mismatch is an error within seconds, not a hang."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
import torch
import torchmetrics
from helpers.patience import within
from helpers.runs.metric_runs import Run, Step, epoch, evaluation, many, same
from helpers.support import run_python
from helpers.worlds.worlds import run_world

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.launch.joining import join

pytestmark = pytest.mark.prompt


def joined() -> World:
    return join(RequestedDevices(), timeout=timedelta(seconds=30))


def evaluated(batches: int) -> tuple[dict[str, float], str]:
    run = Run(joined())
    results = evaluation(run, many, batches)
    return results, repr((run.rows, run.results))


@pytest.mark.parametrize("size, batches", [(2, 21), (3, 21), (2, 1)])
def test_processes_evaluate_as_one(size: int, batches: int) -> None:
    outcomes = run_world(size, evaluated, batches)
    expected = evaluation(Run(), many, batches)
    assert {text for _, text in outcomes} == {outcomes[0][1]}  # bit for bit
    assert same(outcomes[0][0], expected)


def on_ranks(*ranks: int, **options: bool) -> Step:
    return lambda run, m: run.log("acc", 1.0, **options) if run.world.rank in ranks else None


def ended_with(step: Step, every: int) -> tuple[str, float]:
    run, start = Run(joined()), monotonic()
    try:
        epoch(run, step, 9, every=every)
        run.end()
    except MetricError as error:
        return str(error), monotonic() - start
    return "", 0.0


def on_the_first() -> tuple[str, float]:
    return ended_with(on_ranks(0, on_epoch=True), every=1)


def not_on_the_second() -> tuple[str, float]:
    return ended_with(on_ranks(0, 2, on_epoch=True, on_step=False), every=99)


@pytest.mark.parametrize(
    "job, words",
    [(on_the_first, "logged on rank 0, not on ranks 1, 2."), (not_on_the_second, "logged on ranks 0, 2, not on rank 1.")],
)
def test_a_missing_metric_ends_all_processes_at_once(job: Callable[[], tuple[str, float]], words: str) -> None:
    for text, seconds in run_world(3, job):
        assert text.startswith(f"log('acc'): {words}")
        assert seconds < within(5)


@pytest.mark.world_size(2)
def test_long_names_and_numbers_that_are_none() -> None:
    """Long names with letters outside of ASCII, infinity and NaN are exchanged correctly."""
    world = joined()
    run = Run(world)
    epoch(run, lambda run, m: [run.log(f"{'é' * 50}{n}", math.nan if n else math.inf, on_epoch=True) for n in range(60)], 3)
    ended = run.end()
    assert len(ended) == 60
    assert ended[f"{'é' * 50}0_epoch"] == math.inf
    assert math.isnan(ended[f"{'é' * 50}1_epoch"])


LOGS_OBJECTS_OF_THE_MAIN_PROCESS = """
from datetime import timedelta
import torchmetrics
from helpers.runs.metric_runs import Run, epoch
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.launch.joining import join

run = Run(join(RequestedDevices(), timeout=timedelta(seconds=30)))
metrics = {f"metric{n}": torchmetrics.SumMetric(sync_on_compute=False) for n in range(8)}

def step(run, m):
    for n, (name, metric) in enumerate(metrics.items()):
        metric.update(float(n))
        run.log(name, metric, rank_zero_only=True, on_step=False, on_epoch=True)

epoch(run, step, 2)
assert run.end() == {f"metric{n}": float(n) for n in range(8)}
"""


def test_each_object_of_the_main_process_keeps_its_name_on_other_ranks(run_dir: Path) -> None:
    """Python processes hash strings differently, so the order of a set would assign values to other names."""
    (run_dir / "script.py").write_text(LOGS_OBJECTS_OF_THE_MAIN_PROCESS)
    done = run_python("-m", "trainkit", "launch", "--nproc-per-node", "2", "script.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.world_size(2)
def test_objects_on_processes_are_not_synchronised_twice() -> None:
    import torchmetrics

    world = joined()
    assert torch.distributed.is_initialized()
    run, total, scores = Run(world), torchmetrics.SumMetric(), torchmetrics.AUROC("binary")

    def step(run: Run, m: int) -> None:
        total(torch.tensor(float(m + 1)))
        scores.update(torch.tensor([0.1, 0.9, 0.4]), torch.tensor([0, 1, 1]))
        run.log("total", total, on_step=True, on_epoch=True)
        run.log("scores", scores, on_step=False, on_epoch=True)

    epoch(run, step, 1, every=1)  # one process has no batch, and so no targets: torchmetrics would abort
    assert run.end() == {"total_epoch": 1.0, "scores": 1.0}
    epoch(run, step, 5, every=1)
    assert run.end() == {"total_epoch": 15.0, "scores": 1.0}
    assert total.update_count == 0
    assert [row["total_step"] for kind, row in run.rows if kind] == [1.0, (1 * 1 + 2 * 2) / 3, (3 * 3 + 4 * 4) / 7, 5.0]


def logs_one_that_gathers_at_each_step(in_world: bool) -> str:
    run = Run(joined() if in_world else None)
    metric = torchmetrics.MeanMetric(dist_sync_on_step=True)
    metric.update(1.0)
    try:
        evaluation(run, lambda run, m: run.log("mean", metric), 2)
    except MetricError as error:
        return str(error)
    return ""


def test_an_object_that_gathers_at_each_step() -> None:
    """It is an error, because it would hang in steps in which a rank has no batch; one process gathers nothing."""
    for said in run_world(2, logs_one_that_gathers_at_each_step, True):
        assert "log('mean'): MeanMetric(dist_sync_on_step=True) gathers at each step" in said
    assert logs_one_that_gathers_at_each_step(False) == ""
