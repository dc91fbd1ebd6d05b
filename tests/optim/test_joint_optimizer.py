"""`JointOptimizer`: several optimizers as one, by itself and in a `Trainer`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

from trainkit import Accelerator, Callback, Precision
from trainkit.callbacks import LearningRateMonitor, NonFiniteGuard
from trainkit.errors import OptimizerError
from trainkit.optim.joint_optimizer import JointOptimizer

STEPS = 12


class Matrices(TinyModule):
    """Muon for the matrices, AdamW for the rest, each with its own schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))  # type: ignore[assignment]
        self.unused = nn.Linear(2, 2)

    def parts(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        parameters = [*self.layer.parameters()]
        muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02, weight_decay=0.1)
        return muon, torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.05)

    def configure_optimizers(self) -> Any:
        muon, adamw = self.parts()
        schedule = {"scheduler": CosineAnnealingLR(muon, STEPS), "interval": "step"}
        return [{"optimizer": muon, "lr_scheduler": schedule}, {"optimizer": adamw, "lr_scheduler": StepLR(adamw, 1, 0.5)}]


class Seen(Callback):
    """What the hooks that have an optimizer receive."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.calls.append(("zero_grad", trainer.global_step, len(optimizer.param_groups)))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.calls.append(("step", trainer.global_step, len(optimizer.param_groups)))


def data() -> DataLoader[Any]:
    return tiny_loader(24)


def weights(module: Matrices) -> list[Tensor]:
    return [p.detach().clone() for p in module.layer.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def by_hand(module: Matrices, accumulate: int, clip: float | None) -> list[float]:
    """Two epochs of a plain loop; returns the gradient norms."""
    muon, adamw = module.parts()
    cosine, halved, norms = CosineAnnealingLR(muon, STEPS), StepLR(adamw, 1, 0.5), []
    for _ in range(2):
        for index, batch in enumerate(data()):
            if index % accumulate == 0:
                muon.zero_grad()
                adamw.zero_grad()
            loss = module.loss(batch)
            (loss / accumulate if accumulate > 1 else loss).backward()
            if index % accumulate == accumulate - 1:
                if clip is not None:
                    norms.append(
                        float(
                            nn.utils.clip_grad_norm_([*muon.param_groups[0]["params"], *adamw.param_groups[0]["params"]], clip)
                        )
                    )
                muon.step()
                adamw.step()
                cosine.step()
        halved.step()
    return norms


@pytest.mark.parametrize("accumulate, clip", [(1, None), (1, 0.5), (3, 0.5)])
def test_equals_a_loop_by_hand(accumulate: int, clip: float | None) -> None:
    """Bit for bit: one backward pass, one norm over the parameters of both, each schedule at its own interval."""
    module, seen, memory = Matrices(), Seen(), Memory()
    expected = copy.deepcopy(module)
    norms = by_hand(expected, accumulate, clip)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "logger": memory, "log_every_n_steps": 1}
    trainer = make_trainer(seen, max_epochs=2, **options)
    trainer.fit(module, data())
    assert_equal(weights(module), weights(expected))
    assert trainer.global_step == STEPS // accumulate
    assert list(memory.of("grad_norm").values()) == norms
    assert seen.calls == [(name, step, 2) for step in range(STEPS // accumulate) for name in ("zero_grad", "step")]
    assert [type(optimizer).__name__ for optimizer in trainer.optimizers] == ["Muon", "AdamW"]


def test_equals_your_own_loop() -> None:
    module = Matrices()
    found = copy.deepcopy(module)
    trainer = make_trainer(max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(module, data())
    accelerator = Accelerator(cpu=True)
    model, muon, adamw, loader = accelerator.prepare(found, *found.parts(), data())
    cosine, halved = CosineAnnealingLR(muon, STEPS), StepLR(adamw, 1, 0.5)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model.loss(batch))
            accelerator.clip_grad_norm_([*muon.param_groups[0]["params"], *adamw.param_groups[0]["params"]], 0.5)
            for one in (muon, adamw):
                one.step()
                one.zero_grad()
            cosine.step()
        halved.step()
    accelerator.end_training()
    assert_equal(weights(module), weights(found))


def test_one_notice_names_them(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(max_epochs=2).fit(Matrices(), data())
    text = caplog.text
    assert text.count("Muon and AdamW step together after each backward pass") == 1
    assert "automatic_optimization = False" in text


class Apart(Matrices):
    """The loss does not depend on the parameters of the second optimizer."""

    def configure_optimizers(self) -> Any:
        return self.parts()[0], torch.optim.Adam(self.unused.parameters())


def test_an_optimizer_without_any_gradient() -> None:
    module = Apart()
    before = weights(module)
    with pytest.raises(OptimizerError, match=r"^Adam, optimizer 1 of 2 .* no gradient .*automatic_optimization = False"):
        make_trainer().fit(module, data())
    assert_equal(weights(module), before)
    for parameter in module.unused.parameters():
        parameter.requires_grad_(False)  # It is frozen on purpose.
    trainer = make_trainer()
    trainer.fit(module, data())
    assert trainer.global_step == 6


class Later(Apart):
    """The loss depends on the parameters of the second optimizer in the first step only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if self.global_step else loss + self.unused(batch[0][:, :2]).mean()


def test_only_the_first_step_needs_gradients(run_dir: Path) -> None:
    """Not the first one after a resume."""
    module = Later()
    trainer = make_trainer()
    trainer.fit(module, data())
    trainer.save_checkpoint("saved")
    trainer = make_trainer(max_epochs=2)
    trainer.fit(Later(), data(), ckpt_path="saved")
    assert trainer.global_step == 12


class Overflowing(Matrices):
    """In some steps only the gradient of one optimizer, the second, is infinite."""

    infinite = (2, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx in self.infinite:
            bias = self.layer[0].bias  # type: ignore[index]
            loss = loss + bias.sum() * torch.inf - bias.detach().sum() * torch.inf
        return loss


class Steps(Callback):
    """The parameters and rates at each end of a window."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(weights(module))
        self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers])


@pytest.mark.parametrize("way", ["scaler", "guard"])
def test_a_skipped_step_skips_all(way: str) -> None:
    """The loss scaler and `NonFiniteGuard` decide once: parameters, state and schedules of both stay as they are."""
    steps, guard = Steps(), NonFiniteGuard("skip", check=("loss",) if way == "scaler" else ("grad",))
    precision = Precision("16-mixed", init_scale=64.0) if way == "scaler" else "32-true"
    module = Overflowing()
    with torch.no_grad():
        module.layer[0].bias.fill_(0.0)  # type: ignore[index]
    trainer = make_trainer(steps, guard, max_epochs=1, gradient_clip_val=1.0, precision=precision)
    trainer.fit(module, data())
    assert trainer.global_step == 4
    for index in range(1, 6):
        same = all(torch.equal(a, b) for a, b in zip(steps.weights[index], steps.weights[index - 1], strict=True))
        assert same == (index in Overflowing.infinite)
        assert (steps.rates[index] == steps.rates[index - 1]) == (index in Overflowing.infinite)
    assert {int(state["step"]) for state in trainer.optimizers[1].state.values()} == {4}
    if way == "scaler":
        assert trainer.scaler is not None
        assert trainer.scaler.get_scale() == 16.0  # halved once for each of the two steps, and not once for each optimizer


def test_the_hooks_of_the_module() -> None:
    """`optimizer_step` and `optimizer_zero_grad` are called once for all of them."""

    class Own(Matrices):
        calls: list[str]

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.calls.append("step")
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.calls.append("zero_grad")
            optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return self.parts()

    module = Own()
    module.calls = []
    expected = copy.deepcopy(module)
    trainer = make_trainer()
    trainer.fit(module, data())
    assert module.calls == ["zero_grad", "step"] * 6
    assert trainer.global_step == 6
    optimizers = expected.parts()
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.01
    for batch in data():
        expected.zero_grad()
        expected.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(weights(module), weights(expected))


def test_the_monitor_names_each() -> None:
    memory = Memory()
    trainer = make_trainer(LearningRateMonitor(), logger=memory, log_every_n_steps=1)
    trainer.fit(Matrices(), data())
    assert list(memory.of("lr-Muon")) == [1, 2, 3, 4, 5, 6]
    assert set(memory.of("lr-AdamW").values()) == {0.05}


def test_what_the_loop_gets() -> None:
    module = Matrices()
    muon, adamw = module.parts()
    joint = JointOptimizer([muon, adamw])
    assert isinstance(joint, torch.optim.Optimizer)
    assert joint.names == "Muon and AdamW"
    assert joint.param_groups == [*muon.param_groups, *adamw.param_groups]
    assert "Muon" in repr(joint)
    calls: list[str] = []
    handles = [joint.register_step_pre_hook(lambda *_: calls.append("before"))]
    handles.append(joint.register_step_post_hook(lambda *_: calls.append("after")))
    handles.append(muon.register_step_post_hook(lambda *_: calls.append("Muon has stepped")))
    handles.append(adamw.register_step_pre_hook(lambda *_: calls.append("AdamW steps")))
    module.loss(next(iter(data()))).backward()
    joint.step()
    assert calls == ["before", "Muon has stepped", "AdamW steps", "after"]
    assert joint.state == {**muon.state, **adamw.state}
    for handle in handles:
        handle.remove()
    for clear in (True, False):
        joint.zero_grad(set_to_none=clear)
        assert all(p.grad is None or (not clear and not p.grad.any()) for p in module.layer.parameters())
        module.loss(next(iter(data()))).backward()
    for call in (lambda: joint.state_dict(), lambda: joint.load_state_dict({}), lambda: joint.add_param_group({})):
        with pytest.raises(OptimizerError, match=r"Muon and AdamW step together.*trainer\.optimizers\[0\]"):
            call()
