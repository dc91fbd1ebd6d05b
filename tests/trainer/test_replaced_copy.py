"""A module that replaces an untrained copy of itself, of which the optimizer has the old parameters: fit, save and resume."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import differences
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor, nn

from trainkit import Accelerator, Callback
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.errors import ModuleError, OptimizerError, TrainkitError, UnsavableError
from trainkit.strategies.ddp import DDPStrategy

STEPS = 4  # of an epoch
NOTICE = (
    "6 untrained parameters were replaced in the module (target.0.weight, target.0.bias, target.1.weight, target.1.bias, "
    "target.2.weight, …), and AdamW does not train the new ones. If it should, copy into them: "
    "module.layer.load_state_dict(new.state_dict())"
)


class WithTarget(TinyModule):
    """Learns from a copy of its layers too, which it replaces after each epoch; the optimizer has the parameters of both."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = frozen
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.replace()

    def replace(self) -> None:
        self.target = deepcopy(self.layer).requires_grad_(not self.frozen)

    def targets(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.target.eval()(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, _ = batch
        return self.loss(batch) + nn.functional.mse_loss(self(inputs), self.targets(inputs))

    def on_train_epoch_end(self) -> None:
        self.replace()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class SaveAt(Callback):
    """Saves in a hook, at one optimizer step."""

    def __init__(self, hook: str, step: int, path: str = "middle") -> None:
        self.step, self.path = step, path
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


PLACES = {
    "before": ("on_train_batch_end", STEPS),  # the resumed run replaces the copy before its first step
    "after": ("on_train_epoch_start", STEPS),
    "later": ("on_train_batch_end", 2 * STEPS + 2),
}


def train(frozen: bool, options: dict[str, Any]) -> None:
    """The unbroken run, which saves at three places."""
    fit(frozen, options, "whole", [SaveAt(hook, step, path) for path, (hook, step) in PLACES.items()])


def resume(frozen: bool, options: dict[str, Any]) -> None:
    """Another process resumes at each of them."""
    for path in PLACES:
        fit(frozen, options, f"{path}-resumed", [], path)


def fit(frozen: bool, options: dict[str, Any], result: str, callbacks: list[Callback], ckpt_path: str | None = None) -> None:
    strategy = {"strategy": DDPStrategy(**options)} if options else {}
    trainer = make_trainer(*callbacks, max_epochs=4, **strategy)
    samples = 4 * STEPS * (2 if options else 1)
    trainer.fit(WithTarget(frozen), tiny_loader(samples, shuffle=True), ckpt_path=ckpt_path)
    trainer.save_checkpoint(result)


@pytest.mark.parametrize(
    "size, frozen, options",
    [
        (1, False, {}),
        (1, True, {}),
        (2, False, {"find_unused_parameters": True}),
        (2, True, {"find_unused_parameters": True}),
        (2, True, {"find_unused_parameters": False}),
        (2, False, {"static_graph": True}),
    ],
)
def test_a_resumed_run_equals_the_unbroken_one(run_dir: Path, size: int, frozen: bool, options: dict[str, Any]) -> None:
    run_world(size, train, frozen, options)
    run_world(size, resume, frozen, options)
    whole = open_checkpoint("whole").read()
    for path in PLACES:
        resumed = open_checkpoint(f"{path}-resumed").read()
        assert resumed.manifest.step == whole.manifest.step == 4 * STEPS
        assert differences(whole.tensors, resumed.tensors) == []
        for part in ("models", "optimizers"):
            assert differences(whole.state[part], resumed.state[part], part) == []
    described = whole.state["optimizers"][0]
    assert "target.0.weight" in described["groups"][0]["parameters"]
    assert [name for name in described["state"] if name.startswith("target")] == []


def without_search() -> str:
    with pytest.raises(ModuleError) as caught:
        make_trainer(max_epochs=1, strategy="ddp").fit(WithTarget(), tiny_loader(8 * STEPS))
    return str(caught.value)


def test_ddp_says_what_to_write_for_a_copy_that_is_not_frozen() -> None:
    for text in run_world(2, without_search):
        assert "the loss does not depend on target.0.weight" in text
        assert "Freeze them with requires_grad_(False), or use strategy=DDPStrategy(find_unused_parameters=True)" in text


class Fresh(WithTarget):
    """Its new copy is built as in `__init__`: sharded parameters cannot be copied."""

    def on_train_epoch_end(self) -> None:
        self.target = WithTarget(frozen=True).layer.requires_grad_(False)


def sharded(strategy: str) -> str:
    with pytest.raises(TrainkitError) as caught:
        make_trainer(max_epochs=2, strategy=strategy).fit(Fresh(frozen=True), tiny_loader(8 * STEPS))
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_a_strategy_that_keeps_the_optimizer_state_says_what_to_write(strategy: str) -> None:
    for text in run_world(2, sharded, strategy):
        assert "load_state_dict(new.state_dict())" in text


def test_a_notice_says_once_what_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(SaveAt("on_train_epoch_start", STEPS), max_epochs=3)
    trainer.fit(WithTarget(), tiny_loader())
    assert caplog.text.count(NOTICE) == 1


class Learning(WithTarget):
    """Its new copy gets gradients, which the optimizer never applies."""

    def targets(self, inputs: Tensor) -> Tensor:
        return self.target(inputs) if self.current_epoch else super().targets(inputs)


class Trained(WithTarget):
    """Its copy was trained by an optimizer that keeps no state, before it was replaced."""

    def targets(self, inputs: Tensor) -> Tensor:
        return self.target(inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, fused=True)


class Resized(WithTarget):
    """Its new copy has another shape."""

    def on_train_epoch_end(self) -> None:
        self.target = nn.Linear(4, 1)


class Renamed(WithTarget):
    """The new copy has another name."""

    def on_train_epoch_end(self) -> None:
        self.new, self.target = deepcopy(self.layer), None

    def targets(self, inputs: Tensor) -> Tensor:
        return torch.zeros(len(inputs), 1)


@pytest.mark.parametrize("kind, count", [(Learning, 6), (Trained, 6), (Resized, 6), (Renamed, 6)])
def test_what_is_trained_or_cannot_be_named_is_refused(kind: type[WithTarget], count: int) -> None:
    with pytest.raises(OptimizerError, match=f"trains {count} parameters that the model does not have"):
        make_trainer(max_epochs=2).fit(kind(), tiny_loader())
    if kind is not Learning:  # which has no gradient yet
        with pytest.raises(UnsavableError, match=r"or copy into it: layer.load_state_dict\(new.state_dict\(\)\)"):
            make_trainer(SaveAt("on_train_epoch_start", STEPS), max_epochs=2).fit(kind(), tiny_loader())


def test_your_own_loop(run_dir: Path) -> None:
    def epoch(accelerator: Accelerator, module: WithTarget, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            accelerator.backward(module.training_step(batch, 0))
            optimizer.step()
            optimizer.zero_grad()
        module.replace()

    accelerator, plain = Accelerator(cpu=True), WithTarget()
    prepared = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), tiny_loader())
    run = (accelerator, plain, prepared[1], prepared[2])
    epoch(*run)
    accelerator.save_state("middle")
    epoch(*run)
    accelerator.save_state("whole")
    accelerator.load_state("middle")  # into the optimizer of the copy that was replaced
    epoch(*run)
    accelerator.save_state("again")
    one, other = open_checkpoint("whole").read(), open_checkpoint("again").read()
    assert differences(one.tensors, other.tensors) == []
