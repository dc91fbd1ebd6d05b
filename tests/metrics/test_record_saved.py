"""Metrics of an epoch that is interrupted and resumed: the results are, bit for bit, those of an uninterrupted epoch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs import metric_runs
from torch import Tensor, nn

from trainkit.console import TrainkitWarning
from trainkit.errors import MetricError
from trainkit.metrics.metric_objects import capture_objects, count_updates, restore_objects
from trainkit.metrics.store import MetricResults, Scope
from trainkit.tagged_json.codec import dumps, loads

pytestmark = pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")

BATCHES = 150  # more than 64, because values are summed in groups of 64


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """The state as restored from a checkpoint, in memory of its own."""
    tensors: dict[str, Tensor] = {}
    data = dumps(state, tensors)
    return loads(data, {"state.safetensors": {key: tensor.clone() for key, tensor in tensors.items()}}, "state.json")


class Run(metric_runs.Run):
    """A run of one process, one training batch at a time."""

    def batch(self, index: int, step: Callable[[Run, int], None], every: int = 7) -> None:
        self.store.scope, self.store.stamp = Scope.TRAIN_BATCH, index
        self.store.batch = torch.zeros(index % 5 + 1, 2)
        step(self, index)
        if (index + 1) % every == 0:
            self.store.flush_step()

    def end(self) -> dict[str, float]:
        self.store.batch, self.store.scope = None, Scope.TRAIN_EPOCH
        return self.store.flush_epoch()


def resumed(run: Run, **objects: Any) -> Run:
    """A new run with the saved state of this run, as in a process that resumes."""
    other = Run()
    module = objects.pop("module", None)
    state = run.store.state_dict(module) if module is not None else run.store.state_dict()
    into = {"module": objects["into"]} if "into" in objects else {}
    other.store.load_state_dict(through_json(state), **into)
    other.results.load_state_dict(through_json(run.results.state_dict()))
    return other


def many(run: Run, index: int) -> None:
    """Metrics of many names, types and options. Their sums depend on the order of the values."""
    value = torch.randn((), generator=torch.Generator().manual_seed(index)) * 10 ** (index % 7)
    run.log("both", value, on_step=True, on_epoch=True, prog_bar=True)
    run.log("by_step", value.double() / 3)
    run.log("mean", value.bfloat16(), on_step=False, on_epoch=True)
    run.log("weighed", value, on_epoch=True, batch_size=torch.tensor(index % 3))
    run.log("sum", value * 1.1, on_step=False, on_epoch=True, reduce_fx=torch.sum)
    run.log("min", float(value), on_epoch=True, reduce_fx=min)
    run.log("max", index, on_epoch=True, reduce_fx="max")
    run.log("mixed", float(value) if index % 2 else value.reshape(1), on_epoch=True, on_step=False)
    run.log("silent", value, on_epoch=True, logger=False)
    run.log("graph", (value * torch.ones((), requires_grad=True)), enable_graph=True, on_epoch=True)
    run.log("own", value, on_epoch=True, on_step=False, reduce_fx=lambda values: values.median())
    if index < 3:
        run.log("early", value, on_epoch=True)
    if index == 100:
        run.log("late", value, on_epoch=True)


def bits(rows: Any) -> str:
    """A text with every number exactly, including NaN and −0.0. Checkpoints contain no autograd graphs, so they are removed."""
    return re.sub(r", grad_fn=<\w+>|, requires_grad=True", "", repr(rows))


@pytest.mark.parametrize("at", [1, 2, 5, 6, 7, 63, 64, 65, 100, 128, 149, 150])
def test_an_epoch_comes_out_bit_for_bit(at: int) -> None:
    whole, first = Run(), Run()
    for index in range(BATCHES):
        whole.batch(index, many)
        if index < at:
            first.batch(index, many)
    second = resumed(first)
    before = len(first.rows)
    assert bits(second.results) == bits(first.results)
    for index in range(at, BATCHES):
        second.batch(index, many)
    assert bits(second.end()) == bits(whole.end())
    assert bits(first.rows + second.rows) == bits(whole.rows)
    assert len(first.rows) == before
    assert bits(second.results.callback.keys()) == bits(whole.results.callback.keys())
    assert bits(second.results) == bits(whole.results)
    for run in (second, whole):  # a value of a step that still waits for a log boundary is kept for the next epoch
        run.batch(0, many, every=1)
    assert bits(second.rows[-1]) == bits(whole.rows[-1])


def test_many_resumes_in_one_epoch() -> None:
    whole, run = Run(), Run()
    rows: list[Any] = []
    for index in range(BATCHES):
        whole.batch(index, many)
        run.batch(index, many)
        if index % 11 == 0:
            rows += run.rows
            run = resumed(resumed(run))  # the second resume follows before anything is logged
    assert bits(run.end()) == bits(whole.end())
    assert bits(rows + run.rows) == bits(whole.rows)


def test_a_function_that_is_not_passed_again() -> None:
    def of_two(values: Tensor) -> Tensor:
        return values[1]

    first = Run()
    first.batch(0, lambda run, _: run.log("second", 1.0, on_step=False, on_epoch=True, reduce_fx=of_two))
    for again in (True, False):
        second = resumed(first)
        if again:
            second.batch(1, lambda run, _: run.log("second", 2.0, on_step=False, on_epoch=True, reduce_fx=of_two))
            assert second.end() == {"second": 2.0}
        else:
            with pytest.warns(TrainkitWarning, match=r"log\('second'\): .* its function reduce_fx.*log it in the last batch"):
                assert second.end() == {}


def test_a_state_is_small_and_independent() -> None:
    """It has one tensor for the stored values of a metric, and later calls of `log` do not change it."""
    run = Run()
    for index in range(63):
        run.batch(index, many)
    state = run.store.state_dict()
    tensors: dict[str, Tensor] = {}
    data = dumps(state, tensors)
    assert len(tensors) <= 4 * len(state["metrics"])
    for index in range(63, 130):
        run.batch(index, many)
    run.end()
    again: dict[str, Tensor] = {}
    assert dumps(state, again) == data
    assert all(torch.equal(tensors[key], again[key]) for key in tensors)


def test_what_cannot_be_compared_as_numbers() -> None:
    """NaN, −0.0, infinity and very large numbers are restored exactly."""
    values = [math.nan, -0.0, math.inf, 1e308]
    for value in values:
        whole, first = Run(), Run()
        for run in (whole, first):
            run.batch(0, lambda run, _, value=value: run.log("x", value, on_epoch=True))
        second = resumed(first)
        assert bits(second.end()) == bits(whole.end())


# ------------------------------------------------------------------------------------------------------ other options


def one(**options: Any) -> Callable[[Run, int], None]:
    return lambda run, index: run.log("x", torch.tensor(float(index)), **options)


@pytest.mark.parametrize(
    "before, after",
    [
        ({"on_epoch": True}, {"on_epoch": True, "prog_bar": True}),
        ({"on_epoch": True}, {"on_epoch": True, "on_step": True}),
        ({"on_epoch": True, "logger": False}, {"on_epoch": True}),
        ({"on_epoch": True, "reduce_fx": "mean"}, {"on_epoch": True, "reduce_fx": torch.mean}),
        ({"on_epoch": True, "reduce_fx": lambda v: v.sum()}, {"on_epoch": True, "reduce_fx": lambda v: v.sum() + 0}),
        ({}, {"on_epoch": True}),  # nothing of the epoch was saved
    ],
)
def test_options_that_may_change_across_a_resume(before: dict[str, Any], after: dict[str, Any]) -> None:
    first = Run()
    first.batch(0, one(**before))
    second = resumed(first)
    for index in (1, 2):
        second.batch(index, one(**after), every=1)
    assert second.end()
    assert second.rows[0][1].keys() == {"x_step" if after.get("on_epoch") else "x"}
    assert ("x_epoch" in second.results.progress_bar) is bool(after.get("prog_bar"))


@pytest.mark.parametrize(
    "before, after",
    [
        ({"on_epoch": True}, {}),
        ({"on_epoch": True}, {"on_step": False, "on_epoch": True}),
        ({"on_epoch": True}, {"on_epoch": True, "reduce_fx": "sum"}),
        ({"on_epoch": True}, {"on_epoch": True, "reduce_fx": lambda v: v.sum()}),
        ({"on_epoch": True, "reduce_fx": lambda v: v.sum()}, {"on_epoch": True}),
    ],
)
def test_other_options_in_the_epoch_that_continues_are_an_error(before: dict[str, Any], after: dict[str, Any]) -> None:
    first = Run()
    first.batch(0, one(**before))
    second = resumed(first)
    with pytest.raises(
        MetricError, match=r"log\('x'\): the options differ from those before the checkpoint.*Use the same options"
    ):
        second.batch(1, one(**after))
    third = resumed(first)
    third.store.discard()
    third.batch(1, one(**after))


def test_after_the_first_call_the_rules_of_an_epoch_hold() -> None:
    first = Run()
    first.batch(0, one(on_epoch=True))
    second = resumed(first)
    second.batch(1, one(on_epoch=True))
    with pytest.raises(MetricError, match="called twice in one epoch with different options"):
        second.batch(2, one(on_epoch=True, reduce_fx="sum"))


def test_a_metric_of_an_epoch_hook_and_of_a_loader_come_back() -> None:
    first = Run()
    first.store.scope = Scope.TRAIN_EPOCH
    first.log("hook", 2.0)
    first.store.scope, first.store.suffix = Scope.EVAL_BATCH, "/dataloader_idx_1"
    first.log("x", 4.0, batch_size=3)
    second = resumed(first)
    second.store.scope, second.store.suffix = Scope.EVAL_BATCH, "/dataloader_idx_1"
    second.log("x", 8.0, batch_size=1)
    second.store.suffix = ""
    second.store.scope = Scope.TRAIN_EPOCH
    second.log("hook", 4.0)
    assert second.end() == {"hook": 3.0, "x/dataloader_idx_1": 5.0}


# ------------------------------------------------------------------------------------------------------------- stamps


def test_the_stamp_tells_when_a_value_came() -> None:
    """`last_stamp` returns the index of the batch in this epoch that has logged a value."""
    run = Run()
    run.batch(3, lambda run, _: (run.log("often", 1.0, on_epoch=True), run.log("rare", 1.0)))
    run.batch(4, lambda run, _: (run.log("often", 1.0, on_epoch=True), run.log("mean", 1.0, on_step=False, on_epoch=True)))
    for one in (run, resumed(run)):
        stamps = [one.store.last_stamp(name) for name in ("often", "often_step", "rare", "rare_step", "mean", "absent")]
        assert stamps == [4, 4, 3, None, None, None]
        assert one.store.stamp == 4
    run.store.flush_step()
    assert run.store.last_stamp("rare") == 3
    run.batch(5, lambda run, _: run.log("waits", 1.0))
    run.end()
    assert run.store.last_stamp("often") is None
    assert run.store.last_stamp("waits") is None  # of the last epoch; it still waits for a log boundary
    assert run.store.pending


# ------------------------------------------------------------------------------------------------------------ results


def test_results_come_back_in_place() -> None:
    first, second = MetricResults(), MetricResults({"old": 1.0}, {"old": 1.0}, {"old": 1.0})
    held = second.callback
    with torch.inference_mode():
        of_a_validation = torch.tensor([0.25], dtype=torch.float64)
    first.callback.update(loss=torch.tensor(0.1), val=of_a_validation, plain=0.1, none=math.nan)
    first.progress_bar["loss"] = 0.1
    first.logged["loss"] = -math.inf
    second.load_state_dict(through_json(first.state_dict()))
    assert bits(second) == bits(first)
    assert second.callback is held
    assert second.callback["val"].dtype == torch.float64


# ------------------------------------------------------------------------------------------------------- torchmetrics


class WithMetrics(nn.Module):
    """Torchmetrics objects as attributes, in a collection, and in a list (`loose`), where the module does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.mse = torchmetrics.MeanSquaredError()
        self.pairs = torchmetrics.SpearmanCorrCoef()  # its state contains all values
        self.several = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "rmse": torchmetrics.MeanSquaredError(squared=False)}
        )
        self.running = torchmetrics.RunningMean(window=5)
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.unlogged = torchmetrics.MeanMetric()
        self.shared = torchmetrics.wrappers.MinMaxMetric(self.unlogged)
        self.classes = torchmetrics.ClasswiseWrapper(torchmetrics.Accuracy("multiclass", num_classes=3, average=None))
        self.strapped = torchmetrics.BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=2)
        self.loose = [torchmetrics.MeanAbsoluteError(), torchmetrics.MaxMetric(), torchmetrics.CatMetric()]

    def step(self, run: Run, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
        self.mse(x, y)
        run.log("mse", self.mse, on_epoch=True)
        self.pairs.update(x, y)
        run.log("pairs", self.pairs, on_step=False, on_epoch=True)
        self.several(x, y)
        for name, metric in self.several.items(keep_base=False, copy_state=False):
            run.log(f"several/{name}", metric, on_epoch=True, on_step=False)
        self.running(x)
        run.log("running", self.running, on_epoch=True)
        self.unlogged.update(x)
        if index % 2 == 0:
            self.shared.compute()
        self.classes.update(x.topk(3).indices % 3, y.topk(3).indices % 3)
        torch.manual_seed(index)
        self.strapped.update(x)

    def step_loosely(self, run: Run, index: int) -> None:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        mae, largest, everything = self.loose
        mae(x, x.flip(0))
        largest(x)
        everything.update(x)
        run.log("mae", mae, on_epoch=True)
        run.log("largest", largest, on_epoch=True)


@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize("used", [False, True])
def test_objects_of_the_module_come_back_before_the_first_step(at: int, used: bool) -> None:
    module, other = WithMetrics(), WithMetrics()
    whole, first = Run(), Run()
    for index in range(at):
        first.batch(index, module.step)
    if used:  # by an earlier run in this process
        other.unlogged.update(1e9)
        other.shared.compute()
        for index in range(50, 53):
            Run().batch(index, other.step)
        other.extremes.update(1.0)
    second = resumed(first, module=module, into=other)
    assert other.extremes._update_count == 0
    for index in range(at, 9):
        second.batch(index, other.step)
    reference = WithMetrics()
    for index in range(9):
        whole.batch(index, reference.step)
    for name in ("unlogged", "shared", "classes", "strapped"):
        assert bits(getattr(other, name).compute()) == bits(getattr(reference, name).compute())
    assert bits(second.end()) == bits(whole.end())
    assert bits(first.rows + second.rows) == bits(whole.rows)
    assert other.mse._update_count == 0  # reset at the end of the epoch


@pytest.mark.parametrize("at", [1, 4, 8])
def test_objects_that_the_module_does_not_know_are_joined_when_they_are_logged_again(at: int) -> None:
    module, other, reference = WithMetrics(), WithMetrics(), WithMetrics()
    whole, first = Run(), Run()
    for index in range(9):
        whole.batch(index, reference.step_loosely)
        if index < at:
            first.batch(index, module.step_loosely)
    second = resumed(first, module=module, into=other)
    for index in range(at, 9):
        second.batch(index, other.step_loosely)
        if index == at:
            again = WithMetrics()
            third = resumed(second)
    assert other.loose[0]._update_count == 9
    ended = whole.end()
    assert bits(second.end()) == bits(ended)
    for index in range(at + 1, 9):
        third.batch(index, again.step_loosely)
    if at < 8:
        assert bits(third.end()) == bits(ended)


def test_without_the_module_objects_are_joined_too() -> None:
    module, other, whole = WithMetrics(), WithMetrics(), WithMetrics()

    def step(module: WithMetrics) -> Callable[[Run, int], None]:
        def log(run: Run, index: int) -> None:
            module.mse(torch.arange(4.0), torch.full((4,), float(index)))
            run.log("mse", module.mse, on_epoch=True)

        return log

    first, reference = Run(), Run()
    for index in range(6):
        reference.batch(index, step(whole))
        if index < 3:
            first.batch(index, step(module))
    second = resumed(first)
    for index in range(3, 6):
        second.batch(index, step(other))
    assert bits(second.end()) == bits(reference.end())


def test_an_object_that_is_not_logged_again() -> None:
    module, other = WithMetrics(), WithMetrics()
    first = Run()
    first.batch(0, module.step_loosely)
    first.batch(1, lambda run, _: (module.mse(torch.ones(2), torch.zeros(2)), run.log("mse", module.mse, on_epoch=True)))
    second = resumed(first, module=module, into=other)
    with pytest.warns(TrainkitWarning) as caught:
        assert second.end() == {"mse_epoch": 1.0}  # found by its attribute path
    assert sorted(str(warning.message)[:60] for warning in caught) == [
        "log('largest'): a checkpoint cannot contain its torchmetrics",
        "log('mae'): a checkpoint cannot contain its torchmetrics obj",
    ]
    assert "keep the object as an attribute of the module" in str(caught[0].message)


def test_an_object_whose_states_cannot_be_joined_says_so() -> None:
    class Own(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("last", torch.tensor(0.0), dist_reduce_fx=None)

        def update(self, value: float) -> None:
            self.last += value

        def compute(self) -> Tensor:
            return self.last

    first, metrics = Run(), [Own(), Own()]

    def step(metric: Own) -> Callable[[Run, int], None]:
        return lambda run, index: (metric.update(1.0), run.log("own", metric, on_step=False, on_epoch=True))[1]

    first.batch(0, step(metrics[0]))
    second = resumed(first)
    with pytest.warns(TrainkitWarning, match=r"log\('own'\): the state of this Own from before the resume cannot be combined"):
        second.batch(1, step(metrics[1]))
    assert second.end() == {"own": 1.0}


@pytest.mark.parametrize("number", [True, False])
def test_a_number_in_the_place_of_an_object(number: bool) -> None:
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    first = Run()
    first.batch(0, lambda run, _: run.log("x", 1.0 if number else metric, on_step=False, on_epoch=True))
    second = resumed(first)
    with pytest.raises(MetricError, match="options differ from those before") if number else nullcontext():
        second.batch(1, lambda run, _: run.log("x", metric if number else 1.0, on_step=False, on_epoch=True))


def test_objects_of_a_module_alone() -> None:
    module, other = WithMetrics(), WithMetrics()
    module.unlogged.update(3.0)
    module.mse.update(torch.ones(2), torch.zeros(2))
    before = count_updates(module)
    assert before["mse"] == before["unlogged"] == 1
    module.mse.update(torch.ones(2), torch.zeros(2))  # in an evaluation that will be repeated
    module.pairs.update(torch.ones(2), torch.zeros(2))
    always = {"classes", "extremes", "running", "shared"}  # wrappers, which count their own updates
    assert set(capture_objects(module)) - always == {"unlogged", "mse", "pairs"}
    state = through_json(capture_objects(module, before))
    assert set(state) - always == {"unlogged"}
    assert other.unlogged.device == torch.device("cpu")
    found = restore_objects(other, state)
    assert found["unlogged"] is other.unlogged
    assert other.unlogged.compute() == 3.0
    state["unlogged"]["states"]["mean_value"] += 1
    assert other.unlogged.compute() == 3.0  # not changed: it has its own memory
    with pytest.warns(TrainkitWarning, match="torchmetrics objects that the module does not have; ignoring them: gone"):
        restore_objects(other, {"gone": state["unlogged"]})
    assert other.unlogged._update_count == 0
    with pytest.warns(TrainkitWarning, match="unlogged: the states of this MeanMetric in the checkpoint differ"):
        restore_objects(other, {"unlogged": {"updates": 1, "states": {}, "counters": {}}})
