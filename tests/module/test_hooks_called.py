"""The order in which the hooks of callbacks and modules are called, and the arguments that they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Callback
from trainkit.errors import HookError
from trainkit.module.hook_table import HOOKS


def test_callback_without_hooks_adds_no_calls() -> None:
    # callbacks that override no hook are not in the tuples of functions that the loops call
    trainer, bare = make_trainer(*(Callback() for _ in range(10))), make_trainer()
    trainer.fit(TinyModule(), tiny_loader(4))
    bare.fit(TinyModule(), tiny_loader(4))
    assert not any(trainer._run.hooks.owners.values())
    for name in HOOKS:
        assert len(getattr(trainer._run.hooks, name)) == len(getattr(bare._run.hooks, name)), name


def test_callbacks_come_in_their_order_those_that_run_last_after_the_module() -> None:
    calls: list[str] = []

    def callback(name: str, last: bool) -> Callback:
        def on_train_start(self: Any, trainer: Any, module: Any) -> None:
            calls.append(name)

        return type(name, (Callback,), {"on_train_start": on_train_start, "runs_last": last})()

    class Module(TinyModule):
        def on_train_start(self) -> None:
            calls.append("module")

    trainer = make_trainer(callback("c", True), callback("a", False), callback("d", True), callback("b", False))
    trainer.fit(Module(), tiny_loader(4))
    assert calls == ["a", "b", "module", "c", "d"]


def test_a_hook_set_on_the_object_counts() -> None:
    # a function that is assigned to an object as a hook is called like a method of its class
    module, calls = TinyModule(), []
    module.on_train_start = lambda: calls.append("module")
    callback = Callback()
    callback.on_train_start = lambda trainer, module: calls.append("callback")
    make_trainer(callback).fit(module, tiny_loader(4))
    assert calls == ["callback", "module"]


def test_hooks_without_the_loaders_number_work_with_one_loader_only() -> None:
    # an evaluation hook may omit the parameter dataloader_idx only if there is one loader
    class Short(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", 1.0)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = batch_idx

    module = Short()
    make_trainer().validate(module, tiny_loader(8))
    assert module.seen == 1
    with pytest.raises(HookError, match=r"Short.on_validation_batch_end must take dataloader_idx.*def on_validation_batch_end"):
        make_trainer().validate(module, [tiny_loader(8), tiny_loader(8)])


def test_what_hooks_get() -> None:
    seen: dict[str, Any] = {}

    class Looking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen["outputs"] = outputs
            seen["batch"] = batch

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen["optimizer"] = optimizer

        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            seen["loss"] = loss

    class Returning(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "extra": "kept"}

    for module in (TinyModule(), Returning()):
        trainer = make_trainer(Looking())
        trainer.fit(module, tiny_loader(4))
        assert seen["optimizer"] is trainer.optimizers[0]
        assert isinstance(seen["optimizer"], torch.optim.SGD)
        assert seen["loss"].grad_fn is not None
        assert not seen["outputs"]["loss"].requires_grad
        assert float(seen["outputs"]["loss"]) == float(seen["loss"].detach())
        assert [tuple(part.shape) for part in seen["batch"]] == [(4, 4), (4, 1)]
    assert seen["outputs"]["extra"] == "kept"
