"""Values that `log` accepts, and their reduction by step and by epoch. Hooks are tested in `test_metrics_hooks.py`."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor

from trainkit import Callback, Trainer
from trainkit.console import TrainkitWarning
from trainkit.errors import MetricError, UnknownNameError

Step = Callable[[TinyModule, int], Any]


def in_training(step: Step) -> TinyModule:
    """A module that calls `step(module, batch_idx)` in each training step."""

    class Logging(TinyModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            step(self, batch_idx)
            return self.loss(batch)

    return Logging()


def in_validation(step: Step) -> TinyModule:
    """A module that calls `step(module, batch_idx)` in each validation step."""

    class Logging(TinyModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            step(self, batch_idx)

    return Logging()


def batches(sizes: list[int]) -> list[list[Tensor]]:
    return [[torch.zeros(size, 4), torch.zeros(size, 1)] for size in sizes]


def trained(step: Step, loader: Any = None, **arguments: Any) -> tuple[Trainer, Memory]:
    logger = Memory()
    trainer = make_trainer(**{"logger": logger, "log_every_n_steps": 1, **arguments})
    trainer.fit(in_training(step), tiny_loader() if loader is None else loader)
    return trainer, logger


def validated(step: Step, sizes: list[int]) -> dict[str, float]:
    (results,) = make_trainer().validate(in_validation(step), batches(sizes), verbose=False)
    return results


# Reductions


@pytest.mark.parametrize("name, value", [("avg", 1.5), ("SUM", 6.0), ("Max", 3.0)])
def test_names_of_reductions_as_lightning_accepts_them(name: str, value: float) -> None:
    trainer, _ = trained(lambda m, i: m.log("x", float(i), on_step=False, on_epoch=True, reduce_fx=name))
    assert trainer.callback_metrics["x"].item() == value


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 128, 150])
def test_an_epochs_reductions_are_exact(count: int) -> None:
    generator = np.random.default_rng(count)
    values = (generator.standard_normal(count) * 10.0 ** generator.integers(-6, 7, count)).tolist()
    sizes = generator.integers(1, 9, count).tolist()

    def step(module: TinyModule, i: int) -> None:
        value = torch.tensor(values[i], dtype=torch.float64)
        for reduction in ("mean", "sum", "min", "max"):
            module.log(reduction, value, reduce_fx=reduction)
        module.log("own", value, reduce_fx=lambda every: every.abs().max())
        module.log("given", value, batch_size=i)
        module.log("number", values[i])

    results = validated(step, sizes)
    scale = math.fsum(map(abs, values))
    mean = math.fsum(v * s for v, s in zip(values, sizes, strict=True)) / sum(sizes)
    assert results["mean"] == pytest.approx(mean, rel=1e-12, abs=1e-14 * scale)
    assert results["number"] == pytest.approx(mean, rel=1e-12, abs=1e-14 * scale)
    assert results["sum"] == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-14 * scale)
    assert results["min"] == min(values)
    assert results["max"] == max(values)
    assert results["own"] == max(map(abs, values))
    if count > 1:
        given = math.fsum(v * i for i, v in enumerate(values)) / (count * (count - 1) / 2)
        assert results["given"] == pytest.approx(given, rel=1e-12, abs=1e-14 * scale)
    else:
        assert math.isnan(results["given"])  # a mean of total weight 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool])
def test_sums_of_any_dtype_are_taken_in_float64(dtype: torch.dtype) -> None:
    values = torch.linspace(0.1, 3.0, 100).to(dtype)
    exact = math.fsum(values.double().tolist())
    results = validated(lambda m, i: (m.log("sum", values[i], reduce_fx="sum"), m.log("mean", values[i])), [1] * 100)
    assert results["sum"] == pytest.approx(exact, rel=1e-14)
    assert results["mean"] == pytest.approx(exact / 100, rel=1e-14)


def test_an_epoch_holds_a_bounded_number_of_values() -> None:
    """Fewer than 64 values are kept, however long the epoch is. Only a function as `reduce_fx` needs all values."""
    held: list[int] = []

    def step(module: TinyModule, i: int) -> None:
        module.log("x", torch.ones(()))
        held.extend(len(metric.values) for metric in module.trainer._run.metrics._metrics.values())

    validated(step, [1] * 200)
    assert max(held) < 64


def test_a_mean_is_weighted_by_samples() -> None:
    assert validated(lambda m, i: m.log("x", float(i)), [4, 4, 2]) == {"x": pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)}
    trainer, _ = trained(lambda m, i: m.log("x", float(i), on_epoch=True), tiny_loader(10, 4))
    assert trainer.callback_metrics["x"].item() == pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)


@pytest.mark.parametrize("size", [3, 3.0, np.int64(3), torch.tensor(3)])
def test_batch_size_takes_whatever_is_a_number(size: Any) -> None:
    def step(module: TinyModule, i: int) -> None:
        module.log("x", float(i), batch_size=size if i == 0 else 1)

    assert validated(step, [1, 1]) == {"x": 0.25}


@pytest.mark.parametrize("size", [-1, "4", math.nan, math.inf, True, [4], torch.ones(2)])
def test_an_invalid_batch_size(size: Any) -> None:
    with pytest.raises(MetricError, match=r"log\('x'\): batch_size must be a number of samples ≥ 0, not .*len\(x\)"):
        validated(lambda m, i: m.log("x", 1.0, batch_size=size), [1])


def test_a_function_gets_all_values_of_the_epoch_in_float64() -> None:
    seen: list[Tensor] = []

    def reduce(values: Tensor) -> Tensor:
        seen.append(values)
        return values[-1]

    assert validated(lambda m, i: m.log("x", float(i), reduce_fx=reduce), [1] * 70) == {"x": 69.0}
    assert len(seen) == 1
    assert seen[0].dtype is torch.float64
    assert seen[0].tolist() == list(map(float, range(70)))


@pytest.mark.parametrize("function, value", [(torch.mean, 4 / 5), (torch.sum, 1.0), (torch.max, 1.0), (max, 1.0), (min, 0.0)])
def test_torchs_functions_mean_what_their_names_do(function: Any, value: float) -> None:
    """`reduce_fx=torch.mean` is the same as `reduce_fx="mean"`, and so on. The mean is weighted by samples."""
    assert validated(lambda m, i: m.log("x", float(i), reduce_fx=function), [1, 4]) == {"x": value}


def test_a_function_written_in_the_call_is_the_same_each_time() -> None:
    assert validated(lambda m, i: m.log("x", float(i), reduce_fx=lambda values: values.max()), [1, 1, 1]) == {"x": 2.0}


@pytest.mark.parametrize(
    "reduction, words",
    [
        ("men", "unknown reduce_fx 'men'; known: mean, sum, min, max, or a function. Did you mean 'mean'?"),
        (5, "not 5"),
        (None, "not None"),
    ],
)
def test_an_unknown_reduction(reduction: Any, words: str) -> None:
    kind = UnknownNameError if isinstance(reduction, str) else MetricError
    with pytest.raises(kind) as caught:
        validated(lambda m, i: m.log("x", 1.0, reduce_fx=reduction), [1])
    assert words in str(caught.value)


def test_a_function_that_does_not_return_a_number() -> None:
    with pytest.raises(MetricError, match=r"log\('x'\): the result must be a number .* not tensor\(\[0\., 1\.\]"):
        validated(lambda m, i: m.log("x", float(i), reduce_fx=torch.clone), [1, 1])


def test_log_dict_takes_a_dict() -> None:
    assert validated(lambda m, i: m.log_dict({"a": 1.0, "b": torch.ones(())}, prog_bar=True), [1]) == {"a": 1.0, "b": 1.0}
    with pytest.raises(MetricError, match=r"log_dict expected a dict of names and values, received list. For example"):
        validated(lambda m, i: m.log_dict([("a", 1.0)]), [1])
    with pytest.raises(UnknownNameError, match=r"log_dict has no argument 'on_epohc'. Did you mean 'on_epoch'\?"):
        validated(lambda m, i: m.log_dict({"a": 1.0}, on_epohc=True), [1])


# Values


@pytest.mark.parametrize(
    "value, number",
    [
        (2, 2.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (np.array([0.25]), 0.25),
        (fractions.Fraction(1, 4), 0.25),
        (decimal.Decimal("0.25"), 0.25),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([[0.25]]), 0.25),
        (torch.tensor(7), 7.0),
        (torch.tensor(True), 1.0),
        (torch.nn.Parameter(torch.tensor(0.25)), 0.25),
        (math.inf, math.inf),
    ],
)
def test_values_that_are_numbers(value: Any, number: float) -> None:
    trainer, logger = trained(lambda m, i: m.log("x", value, on_step=True, on_epoch=True, prog_bar=True))
    assert logger.of("x_step") == dict.fromkeys((1, 2, 3, 4), number)
    assert logger.of("x_epoch") == {4: number}
    assert trainer.progress_bar_metrics == {"x_step": number, "x_epoch": number}
    assert {type(v) for _, row in logger.rows for name, v in row.items() if name != "epoch"} == {float}


@pytest.mark.parametrize(
    "value, words",
    [
        ("0.5", "not '0.5'"),
        (b"1", "not b'1'"),
        (None, "not None"),
        ([1.0], "not list"),
        ({"a": 1.0}, "not dict. Use log_dict"),
        (1j, "not complex"),
        (object(), "not object"),
        (torch.ones(2), "not a tensor of shape (2,). Reduce it first, for example with .mean()"),
        (torch.ones(0), "not a tensor of shape (0,)"),
        (torch.tensor(1j), "real number"),
        (np.ones(2), "not ndarray"),
        (torchmetrics.MeanMetric, "not the class MeanMetric. Use an object: MeanMetric()"),
    ],
)
def test_values_that_are_not_numbers(value: Any, words: str) -> None:
    with pytest.raises(MetricError) as caught:
        trained(lambda m, i: m.log("x", value))
    assert "log('x')" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["", 3, None, ["x"]])
def test_an_invalid_name(name: Any) -> None:
    with pytest.raises(MetricError, match="the name of a metric must be a non-empty string"):
        trained(lambda m, i: m.log(name, 1.0))


def test_a_module_may_log_the_epoch_and_the_step_of_a_row() -> None:
    trainer, logger = trained(lambda m, i: m.log_dict({"epoch": 7.0, "step": 30.0 + i, "x": 1.0}))
    assert logger.rows == [(30 + i, {"epoch": 7.0, "x": 1.0}) for i in range(len(logger.rows))] != []
    assert trainer.callback_metrics["epoch"].item() == trainer.logged_metrics["epoch"].item() == 7.0


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(-math.inf), 1e300])
def test_a_step_of_a_row_that_cannot_be_one_is_ignored(value: Any) -> None:
    with pytest.warns(TrainkitWarning, match=r"the metric 'step' .* expected a number between .*, got .*self\.global_step"):
        _, logger = trained(lambda m, i: m.log_dict({"step": value if i else 30.0, "x": 1.0}))
    assert [step for step, _ in logger.rows[:3]] == [30, 2, 3]


def test_the_tensor_may_be_changed_in_place_afterwards() -> None:
    total = torch.zeros(())

    def step(module: TinyModule, i: int) -> None:
        total.fill_(float(i))
        module.log("x", total, on_step=True, on_epoch=True)
        total.fill_(1000.0)

    trainer, logger = trained(step)
    assert logger.of("x_step") == {1: 0.0, 2: 1.0, 3: 2.0, 4: 3.0}
    assert trainer.callback_metrics["x_epoch"].item() == 1.5


def test_a_graph_is_kept_only_where_it_is_asked_for() -> None:
    def step(module: TinyModule, i: int) -> None:
        module.log("with", module.layer.weight.sum(), on_epoch=True, enable_graph=True)
        module.log("without", module.layer.weight.sum(), on_epoch=True)

    known = trained(step)[0].callback_metrics
    assert {name: value.requires_grad for name, value in known.items()} == {
        **dict.fromkeys(("with", "with_step", "with_epoch"), True),
        **dict.fromkeys(("without", "without_step", "without_epoch"), False),
    }
    known["with"].backward()


def test_one_name_has_one_set_of_options() -> None:
    for change_at in (1, 10, 64, 100):  # values are summed in groups of 64

        def step(module: TinyModule, i: int, change_at: int = change_at) -> None:
            module.log("x", 1.0, prog_bar=i >= change_at)

        with pytest.raises(MetricError, match=r"log\('x'\) was called twice in one epoch with different options"):
            validated(step, [1] * 101)


def test_options_may_change_with_the_epoch() -> None:
    _, logger = trained(lambda m, i: m.log("x", 1.0, on_epoch=m.current_epoch == 1), max_epochs=2)
    assert list(logger.of("x")) == [1, 2, 3, 4]
    assert list(logger.of("x_step")) == [5, 6, 7, 8]
    assert list(logger.of("x_epoch")) == [8]


def test_neither_by_step_nor_by_epoch() -> None:
    with pytest.raises(MetricError, match=r"log\('x'\): with on_step=False and on_epoch=False nothing is logged"):
        trained(lambda m, i: m.log("x", 1.0, on_step=False, on_epoch=False))


def test_without_a_trainer_logging_is_a_warning() -> None:
    with pytest.warns(TrainkitWarning, match=r"log\('x'\) outside a Trainer does nothing") as caught:
        TinyModule().log("x", 1.0)
    assert caught[0].filename == __file__


# Waiting for the device


def test_between_log_boundaries_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "nonzero"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            reads.append(1)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)

    class Watch(Callback):
        def __init__(self) -> None:
            self.after: dict[int, int] = {}  # global_step → reads until the start of the next batch

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.after[trainer.global_step] = len(reads)
            reads.clear()

    def step(module: TinyModule, i: int) -> None:
        weight = module.layer.weight
        for number in range(5):
            module.log(f"x{number}", weight.sum() * number, on_step=True, on_epoch=True, prog_bar=True)
        module.log("peak", weight.abs().max(), on_epoch=True, reduce_fx="max")

    watch = Watch()
    loader = batches([4] * 150)  # more than 64, so that values are summed during the epoch
    trainer = make_trainer(watch, logger=Memory(), log_every_n_steps=50)
    trainer.fit(in_training(step), loader)
    assert set(watch.after) == set(range(150))
    # all metrics, and then the loss, which is checked to be finite: at that moment the device has nothing to do
    assert {step: count for step, count in watch.after.items() if step and count} == {50: 2, 100: 2}
