"""In which hooks `log` may be called, the names of the values, and when loggers get them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor

from trainkit import Callback
from trainkit.errors import HookError, MetricError
from trainkit.loggers import CSVLogger, JSONLLogger, Logger

Call = Callable[[Any, int], Any]

TRAIN_BATCH = (
    "training_step",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
TRAIN_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
EVALUATION_BATCH = ("_step", "_batch_start", "_batch_end")
EVALUATION_EPOCH = ("_start", "_epoch_start", "_epoch_end")
NOWHERE = (
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "train_dataloader",
    "on_fit_start",
    "on_train_end",
    "on_validation_end",
    "on_fit_end",
    "teardown",
)


def calling(base: type, **calls: Call) -> Any:
    """An object of a subclass of `base`: the nth call of a method runs `call(self, n)`, where n starts at 0."""
    counts: Counter[str] = Counter()

    def method(name: str, call: Call) -> Callable[..., Any]:
        def run(self: Any, *arguments: Any) -> Any:
            counts[name] += 1
            call(self, counts[name] - 1)
            if name in ("training_step", "configure_optimizers"):
                return getattr(base, name)(self, *arguments)
            return None

        return run

    return type("Calling", (base,), {name: method(name, call) for name, call in calls.items()})()


class Silent(TinyModule):
    """Logs nothing in training."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def module(**calls: Call) -> Any:
    return calling(Silent, **calls)


def fitted(subject: Any, *callbacks: Callback, val: Any = None, **arguments: Any) -> tuple[Any, Memory]:
    logger = Memory()
    trainer = make_trainer(*callbacks, **{"logger": logger, "log_every_n_steps": 1, **arguments})
    trainer.fit(subject, tiny_loader(), val)
    return trainer, logger


# Hooks


@pytest.mark.parametrize("hook", TRAIN_BATCH)
def test_in_a_training_batch_it_is_by_step(hook: str) -> None:
    _, logger = fitted(module(**{hook: lambda self, n: self.log("x", float(n))}))
    assert logger.of("x") == {1: 0.0, 2: 1.0, 3: 2.0, 4: 3.0}
    _, logger = fitted(module(**{hook: lambda self, n: self.log("x", float(n), on_step=False, on_epoch=True)}))
    assert logger.of("x") == {4: 1.5}


@pytest.mark.parametrize("hook", TRAIN_EPOCH)
def test_in_a_hook_of_the_epoch_it_is_by_epoch(hook: str) -> None:
    _, logger = fitted(module(**{hook: lambda self, n: self.log("x", float(n))}), max_epochs=2)
    assert logger.of("x") == ({4: 0.0} if hook == "on_train_start" else {4: 0.0, 8: 1.0})
    with pytest.raises(
        MetricError, match=r"log\('x', on_step=True\): an epoch hook has no batch\. Use on_step=False, on_epoch=True"
    ):
        fitted(module(**{hook: lambda self, n: self.log("x", 1.0, on_step=True)}))


@pytest.mark.parametrize("name", ["validation", "test"])
@pytest.mark.parametrize("hook", EVALUATION_BATCH)
def test_in_an_evaluation_batch_it_is_by_epoch(name: str, hook: str) -> None:
    hook = (name if hook == "_step" else f"on_{name}") + hook
    subject = module(**{hook: lambda self, n: self.log("x", float(n))})
    run = getattr(make_trainer(), "validate" if name == "validation" else name)
    (results,) = run(subject, tiny_loader(10, 4), verbose=False)
    assert results["x"] == pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)


@pytest.mark.parametrize("name", ["validation", "test"])
@pytest.mark.parametrize("hook", EVALUATION_EPOCH)
def test_in_a_hook_of_an_evaluation_it_is_by_epoch(name: str, hook: str) -> None:
    subject = module(**{f"on_{name}{hook}": lambda self, n: self.log("x", 7.0)})
    run = getattr(make_trainer(), "validate" if name == "validation" else name)
    (results,) = run(subject, tiny_loader(), verbose=False)
    assert results["x"] == 7.0


@pytest.mark.parametrize("hook", NOWHERE)
def test_where_there_is_nothing_that_it_could_belong_to(hook: str) -> None:
    """A value logged there would be lost: no step or epoch is running."""
    loader = None if hook == "train_dataloader" else tiny_loader()
    with pytest.raises(MetricError, match=r"log\('x'\) cannot be called here"):
        make_trainer().fit(module(**{hook: lambda self, n: self.log("x", 1.0)}), loader, tiny_loader())


@pytest.mark.parametrize("hook", ["predict_step", "on_predict_start", "on_predict_epoch_end", "on_predict_end"])
def test_prediction_has_no_metrics(hook: str) -> None:
    with pytest.raises(MetricError, match=r"log\('x'\) cannot be called here"):
        make_trainer().predict(module(**{hook: lambda self, n: self.log("x", 1.0)}), tiny_loader())


@pytest.mark.parametrize("hook", ["on_test_end", "on_validation_end"])
def test_an_evaluation_that_is_over_takes_nothing_more(hook: str) -> None:
    run = getattr(make_trainer(), "test" if "test" in hook else "validate")
    with pytest.raises(MetricError, match=r"log\('x'\) cannot be called here"):
        run(module(**{hook: lambda self, n: self.log("x", 1.0)}), tiny_loader(), verbose=False)


def test_by_step_in_an_evaluation_counts_its_batches() -> None:
    """With `on_step=True` in a validation, loggers get the number of validation batches so far as the step."""
    logger = Memory()
    subject = module(validation_step=lambda self, n: self.log("x", float(n), on_step=True))
    make_trainer(logger=logger, max_epochs=2).fit(subject, tiny_loader(), tiny_loader(8))
    assert logger.of("x_step") == {1: 0.0, 2: 1.0, 3: 2.0, 4: 3.0}  # two batches in each of two validations
    assert logger.of("x_epoch") == {4: 0.5, 8: 2.5}


# Callbacks


@pytest.mark.parametrize("hook", [*TRAIN_BATCH[1:], "on_train_epoch_end"])
def test_callbacks_log_as_the_module_does(hook: str) -> None:
    callback = calling(Callback, **{hook: lambda self, n: self.log_dict({"x": float(n), "y": 1.0})})
    _, logger = fitted(TinyModule(), callback)
    assert logger.of("x") == ({4: 0.0} if hook == "on_train_epoch_end" else {1: 0.0, 2: 1.0, 3: 2.0, 4: 3.0})
    assert set(logger.of("y").values()) == {1.0}


def test_callbacks_that_run_last_can_still_log_at_the_end_of_an_epoch() -> None:
    class Last(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("seen", trainer.callback_metrics["train_loss_epoch"] * 2)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("val_seen", trainer.callback_metrics["val_loss"] * 2)

    class Both(TinyModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

    trainer, logger = fitted(Both(), Last(), val=tiny_loader())
    assert logger.of("seen")[4] == 2 * logger.of("train_loss_epoch")[4]
    assert logger.of("val_seen")[4] == 2 * logger.of("val_loss")[4]
    assert trainer.callback_metrics["val_seen"].item() == logger.of("val_seen")[4]


def test_a_callback_that_is_not_running_cannot_log() -> None:
    callback = Callback()
    with pytest.raises(HookError, match=r"Callback\.log works only in a run of a Trainer"):
        callback.log("x", 1.0)
    fitted(TinyModule(), callback)
    with pytest.raises(HookError, match=r"Trainer\(callbacks=\[\.\.\.\]\)\.fit"):
        callback.log_dict({"x": 1.0})


# Names


def test_names_by_step_and_by_epoch() -> None:
    def step(self: Any, n: int) -> None:
        self.log("both", float(n), on_step=True, on_epoch=True, prog_bar=True)
        self.log("step", float(n), logger=False, prog_bar=True)
        self.log("quiet", float(n), on_step=False, on_epoch=True, logger=False)

    trainer, logger = fitted(module(training_step=step))
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert values == {"both": 1.5, "both_step": 3.0, "both_epoch": 1.5, "step": 3.0, "quiet": 1.5}
    assert trainer.logged_metrics == {"both_step": 3.0, "both_epoch": 1.5}
    assert trainer.progress_bar_metrics == {"both_step": 3.0, "both_epoch": 1.5, "step": 3.0}
    assert {name for _, row in logger.rows for name in row} == {"both_step", "both_epoch", "epoch"}


class Plain(Logger):
    """A logger as it is written for Lightning: it has its own `log_metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


@pytest.mark.parametrize("by", ["step", "epoch", "dict", "validation", "end"])
def test_a_metric_called_step_is_the_x_axis(by: str) -> None:
    """In each logger, also in one that does not know it, like that of Lightning; it stays in `logged_metrics`."""

    def step(self: Any, n: int) -> None:
        x = 100.0 + self.current_epoch
        if by == "step":
            self.log("step", x)
            self.log("loss", float(n))
        if by == "epoch":
            self.log("step", x, on_step=False, on_epoch=True)
            self.log("loss", float(n), on_step=False, on_epoch=True)
        if by == "dict":
            self.log_dict({"step": x, "loss": float(n)}, on_step=False, on_epoch=True)

    class Stepped(TinyModule):
        count = -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count += 1
            step(self, self.count)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if by == "validation":
                self.log_dict({"step": 100.0 + self.current_epoch, "loss": 1.0})

        def on_train_epoch_end(self) -> None:
            if by == "end":
                self.log_dict({"step": 100.0 + self.current_epoch, "loss": 1.0})

    loggers = [Plain(), Memory()]
    trainer = make_trainer(logger=loggers, log_every_n_steps=2, max_epochs=2)
    trainer.fit(Stepped(), tiny_loader(), tiny_loader())
    for logger in loggers:
        assert [x for x, _ in logger.rows] == ([100, 100, 101, 101] if by == "step" else [100, 101])
        assert all(set(row) == {"epoch", "loss"} for _, row in logger.rows)
    assert trainer.logged_metrics["step"] == trainer.callback_metrics["step"] == 101.0


def test_within_an_epoch_the_name_is_the_value_of_the_step() -> None:
    seen: list[dict[str, float]] = []

    def step(self: Any, n: int) -> None:
        self.log("x", float(n), on_step=True, on_epoch=True)
        seen.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    fitted(module(training_step=step), max_epochs=2)
    assert seen[1] == {"x": 1.0, "x_step": 1.0}
    assert seen[5] == {"x": 5.0, "x_step": 5.0, "x_epoch": 1.5}


def test_several_loaders_have_their_numbers_in_the_names() -> None:
    class Several(TinyModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
            self.log("x", batch_idx + 10.0 * dataloader_idx, on_step=True, on_epoch=True)
            self.log("all", batch_idx + 10.0 * dataloader_idx, add_dataloader_idx=False)

        def on_validation_epoch_end(self) -> None:
            self.log("end", 1.0)

    logger = Memory()
    trainer = make_trainer(logger=logger)
    results = trainer.validate(Several(), [tiny_loader(8), tiny_loader(4), tiny_loader(12)], verbose=False)
    common = {"all": pytest.approx((0 + 1 + 10 + 20 + 21 + 22) / 6), "end": 1.0}
    assert results == [
        {"x_epoch/dataloader_idx_0": 0.5, **common},
        {"x_epoch/dataloader_idx_1": 10.0, **common},
        {"x_epoch/dataloader_idx_2": 21.0, **common},
    ]
    known = trainer.callback_metrics
    assert known["x/dataloader_idx_2"].item() == 21.0
    assert "x_step/dataloader_idx_0" not in known  # values of evaluation steps cannot be monitored
    assert logger.of("x_step/dataloader_idx_2") == {4: 20.0, 5: 21.0, 6: 22.0}


def test_ten_loaders_are_told_apart() -> None:
    class Several(TinyModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
            self.log("n", float(dataloader_idx))

    results = make_trainer().validate(Several(), [tiny_loader(4)] * 12, verbose=False)
    assert results == [{f"n/dataloader_idx_{number}": float(number)} for number in range(12)]


# Log boundaries


def test_rows_are_written_at_log_boundaries_and_at_the_end_of_an_epoch(run_dir: Path) -> None:
    """Eleven micro-batches in accumulation windows of two are six optimizer steps per epoch."""

    def step(self: Any, n: int) -> None:
        self.log("x", float(n), on_step=True, on_epoch=True)

    trainer = make_trainer(
        logger=[CSVLogger(), JSONLLogger()],
        log_every_n_steps=4,
        accumulate_grad_batches=2,
        max_epochs=2,
        default_root_dir=run_dir,
    )
    trainer.fit(module(training_step=step), tiny_loader(44, 4))
    (csv_file,) = run_dir.rglob("metrics.csv")
    (jsonl_file,) = run_dir.rglob("metrics.jsonl")
    table = csv.DictReader(csv_file.read_text().splitlines())
    rows = [{name: float(value) for name, value in row.items() if value} for row in table]
    expected = [
        {"step": 4, "epoch": 0, "x_step": 6.5},  # the mean of the micro-batches of step 4
        {"step": 6, "epoch": 0, "x_epoch": 5.0},
        {"step": 8, "epoch": 1, "x_step": 13.5},
        {"step": 12, "epoch": 1, "x_step": 21.0},
        {"step": 12, "epoch": 1, "x_epoch": 16.0},
    ]
    assert rows == expected
    written = [json.loads(line) for line in jsonl_file.read_text().splitlines()]
    assert [{name: row[name] for name in row if name in ("step", "epoch", "x_step", "x_epoch")} for row in written] == expected


def test_what_is_logged_rarely_is_written_once_at_the_next_boundary() -> None:
    def step(self: Any, n: int) -> None:
        if n in (1, 6):  # in steps 2 and 7; an epoch has four steps
            self.log("x", float(n))

    trainer, logger = fitted(module(training_step=step), log_every_n_steps=5, max_epochs=5)
    assert logger.of("x") == {5: 1.0, 10: 6.0}
    assert trainer.callback_metrics["x"].item() == 6.0


def test_a_value_that_waits_for_a_boundary_does_not_hide_the_epochs() -> None:
    def step(self: Any, n: int) -> None:
        self.log("x", float(n), on_step=True, on_epoch=True)

    trainer, logger = fitted(module(training_step=step), log_every_n_steps=50)
    assert logger.of("x_step") == {}
    assert logger.of("x_epoch") == {4: 1.5}
    assert trainer.callback_metrics["x"].item() == 1.5


def test_without_boundaries_only_epochs_are_logged() -> None:
    _, logger = fitted(module(training_step=lambda self, n: self.log("x", float(n), on_epoch=True)), log_every_n_steps=0)
    assert [set(row) for _, row in logger.rows] == [{"x_epoch", "epoch"}]


def test_each_epoch_starts_again() -> None:
    _, logger = fitted(module(training_step=lambda self, n: self.log("x", float(n), on_epoch=True)), max_epochs=3)
    assert logger.of("x_epoch") == {4: 1.5, 8: 5.5, 12: 9.5}


def test_a_validation_sees_what_training_has_logged_by_step() -> None:
    seen: list[dict[str, float]] = []

    class Monitor(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen.append({name: value.item() for name, value in trainer.callback_metrics.items() if name != "val_loss"})

    fitted(module(training_step=lambda self, n: self.log("x", float(n))), Monitor(), val=tiny_loader(), val_check_interval=2)
    assert seen == [{"x": 1.0}, {"x": 3.0}]


def test_lightnings_other_options_are_taken() -> None:
    def step(self: Any, n: int) -> None:
        self.log("x", float(n), sync_dist=True, sync_dist_group=None, metric_attribute="x", rank_zero_only=True)

    assert fitted(module(training_step=step))[1].of("x") == {1: 0.0, 2: 1.0, 3: 2.0, 4: 3.0}
