"""Several optimizers in one step on several processes: the same training as on one, a skipped step on all, and resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.elastic import killed, parameters, resumed, undisturbed
from helpers.runs.joint_modules import OneOverflows, OneUnused
from helpers.runs.parity import Case, Noisy, RegressionModule, trained
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from trainkit import Callback, Precision
from trainkit.callbacks import NonFiniteGuard
from trainkit.errors import OptimizerError
from trainkit.strategies import DDPStrategy


class Joint(RegressionModule):
    """SGD for the matrices and AdamW for the rest, each with a schedule."""

    def matrices(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        first = self.matrices([p for p in parameters if p.ndim == 2])
        second = torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01)
        schedule = {"scheduler": CosineAnnealingLR(first, self.trainer.estimated_stepping_batches), "interval": "step"}
        return [{"optimizer": first, "lr_scheduler": schedule}, {"optimizer": second, "lr_scheduler": {"scheduler": "linear"}}]


class WithMuon(Joint):
    def matrices(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.01)


def assert_close(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < limit


@pytest.mark.parametrize("clip", [None, 0.2])
def test_as_on_one_process(clip: float | None) -> None:
    """The last window is short, and some ranks have nothing in it."""
    case = Case(samples=75, make=Joint, arguments={"gradient_clip_val": clip})
    one, two = (trained(case, size) for size in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-11)
    assert two.rates == one.rates
    assert_close(two.parameters[-1], one.parameters[-1], 1e-11)


def test_muon_as_on_one_process() -> None:
    case = Case(samples=96, make=WithMuon, arguments={"precision": "32-true", "max_epochs": 3})
    one, two = (trained(case, size) for size in (1, 2))
    assert len(one.rates) == 12
    assert_close(two.parameters[-1], one.parameters[-1], 5e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_a_step_that_is_skipped_by_all(precision: str) -> None:
    chosen = Precision(precision, init_scale=64.0) if precision == "16-mixed" else precision
    guard = NonFiniteGuard("skip", check=("loss", "grad"))
    module, strategy = OneOverflows(partial(torch.optim.SGD, momentum=0.9)), DDPStrategy(precision=chosen)
    trainer = make_trainer(guard, strategy=strategy, gradient_clip_val=1.0)
    trainer.fit(module, tiny_loader(32))
    assert trainer.global_step == 3
    (state,) = trainer.optimizers[1].state.values()
    assert int(state["step"]) == 3
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert bool(torch.isfinite(module.layer.weight).all())
    ends = strategy.world.exchange(module.layer.weight.tolist())
    assert ends[0] == ends[1]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_an_optimizer_without_any_gradient(strategy: str) -> None:
    with pytest.raises(OptimizerError, match=r"^Adam, optimizer 1 of 2 .* no gradient .*automatic_optimization = False"):
        make_trainer(strategy=strategy).fit(OneUnused(), tiny_loader(32))


class Rows(TinyModule):
    """`SparseAdam` for an embedding with sparse gradients, and AdamW for the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.layer = nn.Linear(4, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        rows = (batch[0][:, 0].abs() * 3).long().clamp(max=5)
        return nn.functional.mse_loss(self.layer(self.embedding(rows)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.embedding.parameters(), lr=0.1), torch.optim.AdamW(self.layer.parameters(), lr=0.1)


@pytest.mark.world_size(2)
def test_sparse_gradients() -> None:
    """The gradient norm is over the sparse gradients and the others. In float64 as on one process."""
    module, expected = Rows().double(), Rows().double()
    trainer = make_trainer(strategy="ddp", gradient_clip_val=0.5, precision="64-true", max_epochs=2)
    trainer.fit(module, tiny_loader(32))
    optimizers = expected.configure_optimizers()
    inputs, targets = tiny_loader(32).dataset.tensors  # type: ignore[attr-defined]
    for start in [*range(0, 32, 8)] * 2:
        expected.zero_grad()
        expected.loss([inputs[start : start + 8].double(), targets[start : start + 8].double()]).backward()
        sparse = expected.embedding.weight.grad
        assert sparse is not None
        dense = [sparse.coalesce().values(), *(p.grad for p in expected.layer.parameters())]
        factor = (0.5 / (nn.utils.get_total_norm(dense) + 1e-6)).clamp(max=1.0)  # type: ignore[arg-type]
        for parameter in expected.parameters():
            parameter.grad = parameter.grad * factor  # type: ignore[operator]
        for optimizer in optimizers:
            optimizer.step()
    assert trainer.global_step == 8
    assert_close([*module.parameters()], [*expected.parameters()], 1e-11)


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
@pytest.mark.parametrize("before, after", [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_checkpoint_moves(before: str, after: str) -> None:
    """With the state of both optimizers: the same training as without a move."""

    def fit(strategy: str, path: str | None = None) -> list[Tensor]:
        saver = Saver()
        trainer = make_trainer(saver, strategy=strategy, max_steps=7, max_epochs=-1, precision="64-true")
        trainer.fit(WithMuon(), DataLoader(Noisy(24), 2, shuffle=True), ckpt_path=path)
        return saver.parameters

    whole = fit(before)
    assert_close(fit(after, "after-3"), whole, 1e-9)


def folders(base: Path, *names: str) -> list[Path]:
    made = [base / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def test_exact_resume(run_dir: Path) -> None:
    """Killed in the middle twice, bit for bit."""
    whole, broken = folders(run_dir, "whole", "broken")
    case = Case(samples=75, make=WithMuon, arguments={"precision": "32-true", "gradient_clip_val": 0.5})
    expected = undisturbed(case, whole, 2)
    killed(case, broken, 2, 0, (1, 2))
    killed(case, broken, 2, 1, (0, 5))
    assert resumed(case, broken, 2, 2) == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))


def test_resumed_on_one_process(run_dir: Path) -> None:
    whole, broken = folders(run_dir, "whole", "broken")
    case = Case(samples=75, make=Joint)
    undisturbed(case, whole, 2)
    killed(case, broken, 2, 0, (1, 2))
    resumed(case, broken, 1, 1)
    assert_close(parameters(broken), parameters(whole), 1e-11)
