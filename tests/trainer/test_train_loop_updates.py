"""Skipped optimizer steps, precisions, and the random numbers of a step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Watching, make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from trainkit import Callback, Precision
from trainkit.console import TrainkitWarning


class Exploding(TinyModule):
    """Uses AdamW and a scheduler. In half precision, the gradients of the batches in `overflow` are infinite."""

    def __init__(self, *overflow: int) -> None:
        super().__init__()
        self.overflow = overflow

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1e38 if batch_idx in self.overflow else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


class WatchingState(Watching):
    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[Any, Any]] = []
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.states.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))
        self.skipped.append(trainer.accelerator.optimizer_step_was_skipped)
        if trainer.scaler is not None:
            self.scales.append(trainer.scaler.get_scale())


def same_state(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[key][slot], second[key][slot]) for key in first for slot in first[key]
    )


def test_an_overflow_skips_the_update() -> None:
    watching = WatchingState()
    trainer = make_trainer(watching, precision=Precision("16-mixed", init_scale=8.0, growth_interval=2))
    trainer.fit(Exploding(1, 2), tiny_loader(24))
    assert [step for step, _, _ in watching.after] == [1, 1, 1, 2, 3, 4]
    assert [rate for _, rate, _ in watching.after] == [0.05, 0.05, 0.05, 0.025, 0.0125, 0.00625]
    assert watching.scales == [8.0, 4.0, 2.0, 2.0, 4.0, 4.0]
    assert watching.skipped == [False, True, True, False, False, False]
    for place in (1, 2):
        assert same(watching.after[place][2], watching.after[0][2])
        assert same_state(watching.states[place], watching.states[0])
    assert not same(watching.after[3][2], watching.after[2][2])
    assert all(value.isfinite().all() for value in parameters_of(trainer.model).values())


def test_an_overflow_in_one_micro_batch_skips_the_whole_window() -> None:
    watching = WatchingState()
    trainer = make_trainer(watching, precision=Precision("16-mixed", init_scale=8.0), accumulate_grad_batches=2)
    trainer.fit(Exploding(2), tiny_loader(24))
    assert [step for step, _, _ in watching.after] == [0, 1, 1, 1, 1, 2]
    assert same(watching.after[3][2], watching.after[1][2])


def test_a_skipped_update_is_not_logged_as_one() -> None:
    """The metrics are logged at the next optimizer step that is made."""
    logger = Memory()
    trainer = make_trainer(logger=logger, log_every_n_steps=1, precision=Precision("16-mixed", init_scale=8.0))
    trainer.fit(Exploding(1), tiny_loader(12))
    assert [step for step, row in logger.rows if "train_loss" in row] == [1, 2]


class SkippingAt(Callback):
    def __init__(self, hook: str, *batches: int) -> None:
        self.batches = batches
        setattr(self, hook, self._skip)

    def _skip(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.batch_idx in self.batches:
            trainer.accelerator.skip_update()


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_start", "on_after_backward"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_skip_update(hook: str, precision: str) -> None:
    watching = WatchingState()
    trainer = make_trainer(SkippingAt(hook, 1, 2), watching, precision=Precision(precision, init_scale=8.0))
    trainer.fit(Exploding(), tiny_loader(24))
    assert [step for step, _, _ in watching.after] == [1, 1, 1, 2, 3, 4]
    assert [rate for _, rate, _ in watching.after] == [0.05, 0.05, 0.05, 0.025, 0.0125, 0.00625]
    assert watching.skipped == [False, True, True, False, False, False]
    for place in (1, 2):
        assert same(watching.after[place][2], watching.after[0][2])
        assert same_state(watching.states[place], watching.states[0])


class Weightless(TinyModule):
    """The first window of two micro-batches has no weight."""

    def batch_weight(self, batch: Any) -> float:
        return float(batch[0][0, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layer.weight * batch[0][0, 0]).sum()


class SteppedByModule(Weightless):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [Weightless, SteppedByModule])
def test_a_window_of_weight_0_has_no_optimizer_step(kind: type[TinyModule]) -> None:
    class Reads(Callback):
        norms: list[float] = []  # noqa: RUF012

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.norms.append(float(module.layer.weight.grad.sum()))

    Reads.norms = []
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]).reshape(6, 1).expand(6, 4).clone()
    trainer = make_trainer(Reads(), accumulate_grad_batches=2)
    trainer.fit(kind(), [[row.reshape(1, 4)] for row in weights])
    assert Reads.norms == [4.0, 8.0]
    assert trainer.global_step == 2


def test_skipping_is_for_one_window() -> None:
    """A request to skip does not affect the next accumulation window, even if its own has no loss or ends early."""

    class Module(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            left_out = self.current_epoch == 0 and batch_idx < 2
            return None if left_out else super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 5 else None

    watching = Watching()
    trainer = make_trainer(SkippingAt("on_train_batch_start", 0, 4), watching, accumulate_grad_batches=2, max_epochs=1)
    with pytest.warns(TrainkitWarning, match="training_step returned None for the first batch"):
        trainer.fit(Module(), tiny_loader(24))
    # a request in a window without a loss; an optimizer step; a request in a window that ends early
    assert [step for step, _, _ in watching.after] == [0, 0, 0, 1, 1]
    trainer = make_trainer(SkippingAt("on_train_batch_start", 4), accumulate_grad_batches=2, max_epochs=2)
    with pytest.warns(TrainkitWarning, match="training_step returned None for the first batch"):
        trainer.fit(Module(), tiny_loader(24))
    # epoch 0: no loss, one step, a request in a window that ends early; epoch 1: two steps and a skipped one
    assert trainer.global_step == 3


def test_nothing_of_an_error_in_the_middle_of_an_update_is_left() -> None:
    """With 16-mixed, the gradients are already unscaled when the error is raised. The next fit starts with a new scaler."""

    class Failing(Callback):
        armed = True

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if self.armed:
                raise KeyError("mine")

    failing = Failing()
    trainer = make_trainer(failing, precision=Precision("16-mixed", init_scale=8.0))
    with pytest.raises(KeyError):
        trainer.fit(Exploding(), tiny_loader(8))
    failing.armed = False
    again, fresh = Exploding(), Exploding()
    again.load_state_dict(fresh.state_dict())
    trainer.fit(again, tiny_loader(24))
    make_trainer(precision=Precision("16-mixed", init_scale=8.0)).fit(fresh, tiny_loader(24))
    assert same(parameters_of(again), parameters_of(fresh))


def test_the_loss_scale_starts_again_with_every_fit() -> None:
    trainer = make_trainer(precision=Precision("16-mixed", init_scale=8.0))
    for _ in range(2):
        trainer.fit(Exploding(0), tiny_loader(16))
        assert trainer.scaler.get_scale() == 4.0


def test_an_optimizer_whose_parameters_got_no_gradient() -> None:
    class Unused(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.other.parameters(), lr=0.1)

    for precision in ("32-true", "16-mixed"):
        trainer = make_trainer(precision=precision)
        trainer.fit(Unused(), tiny_loader(8))
        assert trainer.global_step == 2


# ------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    "name, parameters, inputs, computed",
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-mixed", torch.float32, torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
    ],
)
def test_precisions(name: str, parameters: torch.dtype, inputs: torch.dtype, computed: torch.dtype) -> None:
    class Looking(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("statistics", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.dtypes: dict[str, Any] = {}

        def configure_model(self) -> None:
            self.late = nn.Linear(1, 1)

        def look(self, batch: Any) -> Tensor:
            outputs = self(batch["inputs"])
            self.dtypes |= {"inputs": batch["inputs"].dtype, "computed": outputs.dtype, "labels": batch["labels"].dtype}
            self.dtypes["new"] = torch.zeros(1).dtype
            return self.late(outputs).float().pow(2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.look(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.look(batch))

    module = Looking()
    batches = [{"inputs": torch.randn(3, 4), "labels": torch.arange(3)}]
    trainer = make_trainer(precision=name, max_epochs=2)
    before = copy.deepcopy(module.layer)
    trainer.fit(module, batches, batches)
    mixed = name.endswith("mixed")
    expected = {"inputs": inputs, "computed": computed, "labels": torch.int64, "new": torch.float32 if mixed else parameters}
    assert module.dtypes == expected
    assert {p.dtype for p in module.parameters()} == {parameters}
    assert module.dtype is parameters
    assert (module.statistics.dtype, module.count.dtype) == (parameters, torch.int64)
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {parameters}
    assert trainer.precision == name
    assert not torch.equal(before.weight.to(parameters), module.layer.weight)
    assert torch.get_default_dtype() is torch.float32
    assert math.isfinite(trainer.callback_metrics["val"])
    trainer.validate(module, batches, verbose=False)
    assert module.dtypes == expected
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("short", "name"), [(32, "32-true"), ("16", "16-mixed"), ("bf16", "bf16-mixed"), (64, "64-true")])
def test_lightnings_short_names(short: Any, name: str) -> None:
    assert make_trainer(precision=short).precision == name


# ----------------------------------------------------------------------------------------------------------- randomness


def test_dropout_and_augmentation_are_keyed_by_the_micro_batch() -> None:
    """The random numbers of a step do not depend on how many numbers earlier steps and hooks have drawn."""
    drawn: dict[str, list[float]] = {}

    class Drawing(TinyModule):
        def __init__(self, name: str, extra: int) -> None:
            super().__init__()
            self.name, self.extra = name, extra

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            drawn.setdefault(self.name, []).append(float(torch.rand(())))
            torch.rand(self.extra)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            torch.rand(self.extra)

    for name, extra in (("a", 0), ("b", 1000)):
        make_trainer(max_epochs=2).fit(Drawing(name, extra), tiny_loader(16))
    assert drawn["a"] == drawn["b"]
    assert len(set(drawn["a"])) == 8
    make_trainer(max_epochs=2, seed=2).fit(Drawing("c", 0), tiny_loader(16))
    assert not set(drawn["a"]) & set(drawn["c"])


def test_validation_draws_the_same_each_time_within_an_epoch() -> None:
    drawn: list[float] = []

    class Drawing(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            drawn.append(float(torch.rand(())))

    trainer = make_trainer(val_check_interval=2)
    trainer.fit(Drawing(), tiny_loader(16), tiny_loader(8))
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
