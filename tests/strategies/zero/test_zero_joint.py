"""Several optimizers in one step, and those that need whole parameters, under ZeRO: the same training as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.elastic import killed, parameters, resumed, undisturbed
from helpers.runs.joint_modules import OneOverflows, OneUnused
from helpers.runs.parity import Case, Noisy, RegressionModule, trained
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.zero.zero_cases import STAGES, strategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from trainkit import Callback, Precision
from trainkit.errors import OptimizerError
from trainkit.strategies.zero.whole_steps import WholeSteps


class Joint(RegressionModule):
    """SGD for the matrices, Adagrad, which begins with state, for one bias and AdamW for the other, with schedules."""

    def matrices(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        first = self.matrices([p for p in parameters if p.ndim == 2])
        one, other = (p for p in parameters if p.ndim != 2)
        schedule = {"scheduler": CosineAnnealingLR(first, self.trainer.estimated_stepping_batches), "interval": "step"}
        return [
            {"optimizer": first, "lr_scheduler": schedule},
            {"optimizer": torch.optim.AdamW([one], lr=0.01), "lr_scheduler": {"scheduler": "linear"}},
            {"optimizer": torch.optim.Adagrad([other], lr=0.05, initial_accumulator_value=0.1)},
        ]


class WithMuon(Joint):
    def matrices(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.01)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("make", [Joint, WithMuon])
@pytest.mark.parametrize("kind, size", [*((kind, 2) for kind in STAGES), ("zero2", 1), ("zero3", 3)])
def test_as_on_one_process(make: type, kind: str, size: int) -> None:
    """The last window is short."""
    case = Case(samples=75, make=make, arguments={"precision": "32-true", "gradient_clip_val": 0.5})
    one, some = trained(case, 1), trained(case, size, strategy=strategy(kind))
    assert some.losses == pytest.approx(one.losses, rel=2e-6)
    assert some.rates == one.rates
    assert difference(some.parameters[-1], one.parameters[-1]) < 5e-6


@pytest.mark.parametrize(
    "kind, options",
    [("zero2", {"round_robin_gradients": True}), ("zero3", {"sub_group_size": 40}), ("zero1", {}), ("zero3-cpu", {})],
)
def test_accumulated(kind: str, options: dict[str, Any]) -> None:
    """With parts in another order, and in several flat shards of a group. Some ranks have nothing in the last window."""
    case = Case(samples=50, window=12, make=WithMuon, arguments={"precision": "32-true"})
    one, two = trained(case, 1), trained(case, 2, strategy=strategy(kind, **options))
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert difference(two.parameters[-1], one.parameters[-1]) < 5e-6


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_exact_resume(kind: str, run_dir: Path) -> None:
    """Killed in the middle, bit for bit, with the state of Muon, AdamW and Adagrad."""
    whole, broken = run_dir / "whole", run_dir / "broken"
    whole.mkdir()
    broken.mkdir()
    case = Case(samples=35, make=WithMuon, arguments={"precision": "32-true", "gradient_clip_val": 0.5})
    expected = undisturbed(case, whole, 2, strategy=strategy(kind))
    killed(case, broken, 2, 0, (1, 2), strategy=strategy(kind))
    assert resumed(case, broken, 2, 1, strategy=strategy(kind)) == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))


class Saver(Callback):
    """Saves after three steps, and keeps the whole parameters at the end."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint("after-3")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.gathered_parameters(module):
            self.parameters = [p.detach().clone() for p in module.parameters()]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("before, after", [("ddp", "zero2"), ("zero3", "fsdp"), ("zero2", "ddp"), ("fsdp", "zero3")])
def test_a_checkpoint_moves(before: str, after: str) -> None:
    """With the state of all optimizers: the same training as without a move."""

    def fit(kind: str, path: str | None = None) -> list[Tensor]:
        saver = Saver()
        made = "fsdp" if kind == "fsdp" else strategy(kind)
        trainer = make_trainer(saver, strategy=made, max_steps=7, max_epochs=-1)
        trainer.fit(WithMuon(), DataLoader(Noisy(24), 2, shuffle=True), ckpt_path=path)
        return saver.parameters

    whole = fit(before)
    assert difference(fit(after, "after-3"), whole) < 5e-6


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_a_step_that_is_skipped_by_all(kind: str) -> None:
    module, made = OneOverflows(torch.optim.Muon), strategy(kind, precision=Precision("16-mixed", init_scale=64.0))
    trainer = make_trainer(strategy=made, gradient_clip_val=1.0)
    trainer.fit(module, tiny_loader(32))
    assert trainer.global_step == 3
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert bool(torch.isfinite(module.layer.weight).all())
    ends = made.world.exchange(module.layer.weight.tolist())
    assert ends[0] == ends[1]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", list(STAGES))
def test_an_optimizer_without_any_gradient(kind: str) -> None:
    with pytest.raises(OptimizerError, match=r"^Adam, optimizer 1 of 2 .* no gradient .*automatic_optimization = False"):
        make_trainer(strategy=strategy(kind), gradient_clip_val=1.0).fit(OneUnused(), tiny_loader(32))


class Lars(torch.optim.SGD):
    """The learning rate of each parameter is scaled by its norm, and counts its steps."""

    counts = 1

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + (1 if self.counts == 1 else parameter.numel())
                scale = float(parameter.detach().norm() / (parameter.grad.norm() + 1e-6))
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * scale / min(state["count"], 10))


class CountsElements(Lars):
    counts = 2


class WithLars(RegressionModule):
    kind: type[Lars] = Lars

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.05)


@pytest.mark.parametrize("kind", ["zero1-cpu", "zero3"])
def test_an_unknown_optimizer_that_needs_whole_parameters(kind: str) -> None:
    """It is found by trial; alone, with a number in its state."""
    case = Case(samples=48, make=WithLars, arguments={"precision": "32-true"})
    one, two = trained(case, 1), trained(case, 2, strategy=strategy(kind))
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert difference(two.parameters[-1], one.parameters[-1]) < 5e-6


@pytest.mark.world_size(2)
def test_a_number_that_differs_between_parameters() -> None:
    module = WithLars()
    module.kind = CountsElements
    with pytest.raises(OptimizerError, match=r"CountsElements does not work under ZeRO: its state \(count\) has a number"):
        make_trainer(strategy=strategy("zero2")).fit(module, DataLoader(Noisy(24), 2))


def test_one_whole_parameter_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank has more than one whole matrix at a time: each one is stepped by one rank."""
    shapes: list[Any] = []
    step = WholeSteps._step_whole

    def counted(optimizer: Any, group: Any, shape: Any, *rest: Any) -> Any:
        shapes.append(tuple(shape))
        return step(optimizer, group, shape, *rest)

    monkeypatch.setattr(WholeSteps, "_step_whole", staticmethod(counted))
    make_trainer(strategy=strategy("zero2"), max_steps=2).fit(WithMuon(), DataLoader(Noisy(24), 2))
    assert shapes == [(16, 6), (6, 16)] * 2
