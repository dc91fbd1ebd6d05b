"""Overriding `optimizer_step` and `backward` of a module; optimizers that call a closure under automatic optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Watching, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world, start_world
from torch import Tensor, nn

from trainkit import Callback
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, HookError, OptimizerError

BF16 = "bf16-mixed"


class Noisy(TinyModule):
    """Has dropout, and buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))  # type: ignore[assignment]


class Plain(Noisy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class Sharp(Noisy):
    """Sharpness-aware minimization (Foret et al. 2021): steps with the gradient at the worst point nearby."""

    radius = 0.05

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        moves = self.climb()
        optimizer_closure()
        with torch.no_grad():
            for parameter, move in moves:
                parameter.sub_(move)
        optimizer.step()

    @torch.no_grad()
    def climb(self) -> list[tuple[Tensor, Tensor]]:
        found = [(p, p.grad.clone()) for p in self.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for _, gradient in found]).norm()
        moves = [(p, gradient * (self.radius / norm)) for p, gradient in found]
        for parameter, move in moves:
            parameter.add_(move)
        return moves


class ByHand(Noisy):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ClosingSGD(torch.optim.SGD):
    """Needs a closure, which it calls `times` times; steps with the last gradient."""

    times = 2

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for _ in range(self.times):
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


def fitted(kind: type[TinyModule], samples: int = 24, *callbacks: Callback, **arguments: Any) -> Any:
    """The parameters and buffers after each micro-batch, and at the end."""
    module = kind()
    watching = Watching()
    make_trainer(watching, *callbacks, **arguments).fit(module, tiny_loader(samples, shuffle=True))
    return [*(parameters for _, _, parameters in watching.after), parameters_of(module)]


def alike(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) > 0 and all(map(same, first, second))


# ----------------------------------------------------------------------------------------------------- a single override


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 4, "precision": "16-mixed"},
        {"accumulate_grad_batches": 2, "precision": BF16},
    ],
)
def test_overrides_that_call_super_change_nothing(arguments: dict[str, Any]) -> None:
    assert alike(fitted(Plain, **arguments), fitted(Noisy, **arguments))


def over_ranks() -> list[Any]:
    return [fitted(kind, 20, gradient_clip_val=0.1, strategy="ddp") for kind in (Noisy, Plain)]


def test_overrides_that_call_super_change_nothing_on_several_processes() -> None:
    """Of five micro-batches one rank has three: the last window is uneven."""
    for plain, overridden in run_world(2, over_ranks):
        assert alike(plain, overridden)


def test_a_warm_up_by_hand() -> None:
    """`global_step` counts the step after `optimizer_step`, as in Lightning."""

    class Warming(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)

    watching = Watching()
    trainer = make_trainer(watching)
    trainer.fit(Warming(), tiny_loader(20))
    assert [(step, round(rate, 6)) for step, rate, _ in watching.after] == [
        (1, 0.025),
        (2, 0.05),
        (3, 0.075),
        (4, 0.1),
        (5, 0.1),
    ]


def test_the_arguments_and_the_order_of_a_step() -> None:
    calls: list[Any] = []

    class Ordered(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            calls.append((epoch, batch_idx, type(optimizer.optimizer).__name__))

            def closure() -> Tensor:
                loss = optimizer_closure()
                calls.append(("closure", bool(torch.isfinite(loss))))
                return loss

            optimizer.step(closure=closure)
            calls.append(self.global_step)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            calls.append("on_before_optimizer_step")

        def configure_gradient_clipping(self, optimizer: Any, *values: Any) -> None:
            calls.append("clipping")

    make_trainer(max_epochs=2, accumulate_grad_batches=2).fit(Ordered(), tiny_loader(8))
    end = [("closure", True), "on_before_optimizer_step", "clipping"]
    assert calls == [(0, 1, "SGD"), *end, 0, (1, 1, "SGD"), *end, 1]


def test_a_closure_without_a_step_makes_no_step() -> None:
    class EverySecond(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    watching = Watching()
    trainer = make_trainer(watching)
    trainer.fit(EverySecond(), tiny_loader(16))
    steps, _, parameters = zip(*watching.after, strict=True)
    assert steps == (0, 1, 1, 2)
    assert same(parameters[1], parameters[2])
    assert not same(parameters[0], parameters[1])


def test_a_step_that_calls_nothing() -> None:
    class Forgetful(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None: ...

    with pytest.raises(OptimizerError, match=r"Forgetful.optimizer_step called neither.*optimizer.step\(closure="):
        make_trainer().fit(Forgetful(), tiny_loader())


def test_a_skipped_update_is_not_counted() -> None:
    class Skipping(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1 and not trainer.skipped:
                trainer.skipped = True
                trainer.accelerator.skip_update()

    trainer = make_trainer(Skipping())
    trainer.skipped = False  # type: ignore[attr-defined]
    trainer.fit(Plain(), tiny_loader(16))
    assert trainer.global_step == 3


def test_the_signature_of_older_versions() -> None:
    class Old(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, closure: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(HookError, match=r"optimizer_step cannot be called.*optimizer_closure.*manual optimization"):
        make_trainer().fit(Old(), tiny_loader())


def test_manual_optimization_calls_no_optimizer_step() -> None:
    class Manual(ByHand, Plain): ...

    with pytest.warns(TrainkitWarning, match=r"Manual.optimizer_step is not called under manual optimization"):
        make_trainer().fit(Manual(), tiny_loader())


# ------------------------------------------------------------------------------------------- gradients computed again


def sharp_by_hand(samples: int, window: int) -> dict[str, Tensor]:
    """The same as `Sharp` in plain torch without dropout: windows of `window` micro-batches of four samples."""
    module = Quiet()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batches = list(tiny_loader(samples))
    for first in range(0, len(batches), window):
        part = batches[first : first + window]

        def compute(part: list[Any] = part) -> None:
            optimizer.zero_grad()
            for batch in part:
                (module.loss(batch) * (1 / len(part))).backward()

        compute()
        moves = module.climb()
        before = [buffer.clone() for buffer in module.buffers()]
        compute()
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)
            for parameter, move in moves:
                parameter.sub_(move)
        optimizer.step()
    return parameters_of(module)


class Quiet(Sharp):
    def __init__(self) -> None:
        super().__init__()
        self.layer[3].p = 0.0


@pytest.mark.parametrize("window", [1, 3])
def test_sharpness_aware_minimization(window: int) -> None:
    module, memory = Quiet(), Memory()
    trainer = make_trainer(accumulate_grad_batches=window, logger=memory, log_every_n_steps=1)
    trainer.fit(module, tiny_loader(24))
    assert same(parameters_of(module), sharp_by_hand(24, window))
    assert trainer.global_step == 6 // window
    assert len(memory.of("train_loss")) == 6 // window  # the metrics of the first forward only


def test_the_same_dropout_and_the_same_loss_again() -> None:
    losses: list[Any] = []

    class Twice(Noisy):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            losses.append((float(optimizer_closure()), gradients(self), float(optimizer_closure()), gradients(self)))
            optimizer.step()

    def gradients(module: nn.Module) -> list[float]:
        return [float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None]

    twice = fitted(Twice, 24, accumulate_grad_batches=2)
    assert len(losses) == 3
    assert all(first == second and before == after for first, before, second, after in losses)
    assert alike(twice, fitted(Noisy, 24, accumulate_grad_batches=2))


class Exact(Sharp):
    """Without BatchNorm, whose statistics are those of one rank, and in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))  # type: ignore[assignment]


def sharp_over_ranks(samples: int) -> list[dict[str, Tensor]]:
    return [fitted(Exact, samples, strategy="ddp", precision="64-true", global_batch_size=16)[-1]]


@pytest.mark.parametrize("samples", [32, 20])
def test_sharpness_aware_minimization_on_several_processes(samples: int) -> None:
    """With 20 samples, the last window is one micro-batch: one rank has no data."""
    ((single,),) = run_world(1, sharp_over_ranks, samples)
    for (found,) in run_world(2, sharp_over_ranks, samples):
        for name, value in found.items():
            torch.testing.assert_close(value, single[name], rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------ optimizers that call a closure


class Closing(Noisy):
    def configure_optimizers(self) -> Any:
        return ClosingSGD(self.parameters(), lr=0.1)


def test_an_optimizer_that_needs_a_closure() -> None:
    """Its second gradient equals the first, because parameters and dropout are the same."""
    assert alike(fitted(Closing, gradient_clip_val=0.1), fitted(Noisy, gradient_clip_val=0.1))


class Newton(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=8, line_search_fn="strong_wolfe")


def test_lbfgs() -> None:
    """The parameters of a loop in plain torch, bit for bit."""
    module, by_hand = Newton(), Newton()
    by_hand.load_state_dict(module.state_dict())
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, tiny_loader(32, batch_size=16))
    optimizer = by_hand.configure_optimizers()
    for _ in range(2):
        for batch in tiny_loader(32, batch_size=16):

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = by_hand.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert same(parameters_of(module), parameters_of(by_hand))
    assert trainer.global_step == 4


def newton_over_ranks(samples: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return fitted(Newton, samples, strategy="ddp", precision="64-true", global_batch_size=16)[-1]


@pytest.mark.parametrize("samples", [32, 20])
def test_lbfgs_on_several_processes(samples: int) -> None:
    """Windows of four micro-batches, and one of a single one: loss and gradient are those of the global batch."""
    (single,) = run_world(1, newton_over_ranks, samples)
    first, second = run_world(2, newton_over_ranks, samples)
    assert same(first, second)
    for name, value in first.items():
        torch.testing.assert_close(value, single[name], rtol=1e-9, atol=1e-11)


class OnOneRank(Noisy):
    """Does something on rank 1 only, in the second step."""

    what = ""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        now = self.global_rank == 1 and self.global_step == 1
        if now and self.what == "skip":
            optimizer_closure()
            return
        if now and self.what == "compute":
            optimizer_closure()
            optimizer_closure()
        optimizer.step(closure=optimizer_closure)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not (self.global_rank == 1 and self.global_step == 1 and self.what == "backward"):
            super().backward(loss)


def on_one_rank(what: str) -> None:
    OnOneRank.what = what
    fitted(OnOneRank, 16, strategy="ddp")


@pytest.mark.parametrize("what, match", [
    ("skip", "OnOneRank.optimizer_step called the optimizer or the closure on some processes only"),
    ("compute", "OnOneRank.optimizer_step called the optimizer or the closure on some processes only"),
    ("backward", "backward of the module did not compute the gradients"),
])  # fmt: skip
def test_one_rank_that_does_something_else_is_an_error_and_no_wait(what: str, match: str) -> None:
    ends = start_world(2, on_one_rank, what).ends()
    assert not any(fine for fine, _ in ends)
    assert any(match in text for _, text in ends)


class Never(Noisy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()


def skipped_over_ranks() -> tuple[bool, list[float]]:
    module = Never()
    before = parameters_of(module.layer[0])
    make_trainer(strategy="ddp").fit(module, tiny_loader(16))
    return same(before, parameters_of(module.layer[0])), module.layer[1].running_mean.tolist()


def test_where_all_ranks_skip_their_buffers_stay_the_same() -> None:
    first, second = run_world(2, skipped_over_ranks)
    assert first == second
    assert first[0]


# ---------------------------------------------------------------------------------------------------- resume, refusals


@pytest.mark.parametrize("kind", [Sharp, Newton, Plain])
def test_a_resumed_run_is_bit_identical(kind: type[TinyModule], tmp_path: Path) -> None:
    def trained(steps: int, folder: str, **fit: Any) -> Any:
        torch.manual_seed(2)
        module = kind()
        trainer = make_trainer(max_steps=steps, max_epochs=-1, default_root_dir=tmp_path / folder)
        trainer.fit(module, tiny_loader(24, shuffle=True), **fit)
        return trainer, parameters_of(module)

    _, whole = trained(8, "whole")
    interrupted, _ = trained(4, "parts")
    path = interrupted.save_checkpoint(tmp_path / "half")
    _, resumed = trained(8, "parts", ckpt_path=path or tmp_path / "half")
    assert same(whole, resumed)


@pytest.mark.parametrize("kind, match", [(Sharp, "called optimizer_closure twice"), (Newton, "LBFGS computes the gradients")])
def test_a_loss_scaler_allows_one_computation(kind: type[TinyModule], match: str) -> None:
    with pytest.raises(OptimizerError, match=rf"{match}.*precision='16-mixed', whose loss scaler.*Use strategy="):
        fitted(kind, precision="16-mixed")


def under_zero(stage: int) -> tuple[bool, list[str]]:
    def told(kind: type[TinyModule]) -> str:
        with pytest.raises((OptimizerError, ConfigurationError)) as caught:
            fitted(kind, 16, strategy=f"zero{stage}")
        return str(caught.value)

    if stage == 1:
        return alike(fitted(Plain, 16, strategy="zero1"), fitted(Noisy, 16, strategy="zero1")), [told(Sharp), told(Newton)]
    return alike(fitted(Stepping, 16, strategy="zero3"), fitted(Noisy, 16, strategy="zero3")), [told(Plain)]


class Stepping(Noisy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.zero
@pytest.mark.parametrize("stage", [1, 3])
def test_under_zero(stage: int) -> None:
    """`optimizer_step` works on every stage, `backward` where gradients are reduced after it."""
    for equal, told in run_world(2, under_zero, stage):
        assert equal
        for message in told:
            assert "ZeRO" in message
            assert "'ddp'" in message


# ----------------------------------------------------------------------------------------------------------- backward


class Doubling(Noisy):
    """Doubles the gradients, and records the losses that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[float] = []

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        self.given.append(float(loss.detach()))
        (loss * 2).backward()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss_of_step = self.loss(batch)
        return self.loss_of_step


class Faster(Noisy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def test_backward_gets_the_loss_by_its_share() -> None:
    module, losses = Doubling(), []

    class Losses(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            losses.append(float(loss.detach()))

    make_trainer(Losses(), accumulate_grad_batches=4).fit(module, tiny_loader(16))
    assert module.given == [loss / 4 for loss in losses]


def doubled_over_ranks() -> list[Any]:
    return [fitted(kind, 20, strategy="ddp", precision="64-true")[-1] for kind in (Doubling, Faster)]


def test_backward_of_several_processes() -> None:
    """Twice the gradient is twice the learning rate; the ranks still average, also in the uneven last window."""
    found = run_world(2, doubled_over_ranks)
    for doubled, faster in found:
        assert same(doubled, found[0][0])
        for name, value in doubled.items():
            torch.testing.assert_close(value, faster[name], rtol=1e-10, atol=1e-12)


def test_backward_under_manual_optimization() -> None:
    class Manual(ByHand, Doubling): ...

    assert alike(fitted(Manual, precision="64-true"), fitted(Doubling, precision="64-true"))


def test_backward_passes_its_arguments_on() -> None:
    class Mapped(Noisy):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, torch.tensor(2.0), retain_graph=True)
            loss.backward(torch.tensor(-1.0))  # the graph is still there; together the gradient of the loss

    assert alike(fitted(Mapped), fitted(Noisy))
