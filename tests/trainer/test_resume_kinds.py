"""Resuming runs with other precisions, manual optimization, parameter groups added during training, and combined loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.resume.saving import Adam, SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainkit import Accelerator, Callback, Trainer, set_seed
from trainkit.checkpoint import open_checkpoint


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "64-true"])
def test_other_precisions(precision: str) -> None:
    """With 16-mixed, the loss scale is restored as well, even after a skipped optimizer step."""

    class Overflowing(Adam):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1e4 if batch_idx == 1 else 1.0)

    def run(*callbacks: Callback, **arguments: Any) -> tuple[Trainer, Any]:
        trainer, module = make_trainer(*callbacks, precision=precision, max_epochs=2), Overflowing()
        trainer.fit(module, tiny_loader(24, shuffle=True), **arguments)
        return trainer, module

    whole, expected = run()
    run(SaveIn("on_train_batch_end", 4))
    resumed, module = run(ckpt_path="there")
    assert same(parameters_of(module), parameters_of(expected))
    assert resumed.global_step == whole.global_step
    if precision == "16-mixed":
        assert resumed.scaler.get_scale() == whole.scaler.get_scale()


def test_manual_optimization_with_two_optimizers_and_schedulers() -> None:
    class Two(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(4)
            self.layer, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            first.step()
            first.zero_grad()
            if batch_idx % 2:
                self.manual_backward((self.other(batch[0]) - self.layer(batch[0]).detach()).square().mean())
                second.step()
                second.zero_grad()
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.layer.parameters(), lr=0.05, momentum=0.9)
            second = torch.optim.Adam(self.other.parameters(), lr=0.1)
            return [first, second], [torch.optim.lr_scheduler.StepLR(second, 2)]

    def run(*callbacks: Callback, **arguments: Any) -> Any:
        module = Two()
        make_trainer(*callbacks, max_epochs=2).fit(module, tiny_loader(24, shuffle=True), **arguments)
        return module

    expected = run()
    for number in (2, 3, 7):
        run(SaveIn("on_train_batch_end", number))
        assert same(parameters_of(run(ckpt_path="there")), parameters_of(expected))


def test_layers_that_were_unfrozen_on_the_way() -> None:
    """After the resume their parameters are trained as well, in the parameter group that was added for them."""

    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1 and not module.body.weight.requires_grad:
                module.body.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(module.body.parameters()), "lr": 0.01})

    class Frozen(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.body, self.layer = nn.Linear(4, 4), nn.Linear(4, 1)
            self.body.requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(self.body(inputs).relu())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.layer.parameters(), lr=0.05)

    def run(*callbacks: Callback, **arguments: Any) -> Any:
        module = Frozen()
        make_trainer(Unfreeze(), *callbacks, max_epochs=3).fit(module, tiny_loader(24, shuffle=True), **arguments)
        return module

    expected = run()
    run(SaveIn("on_train_batch_end", 9))
    assert same(parameters_of(run(ckpt_path="there")), parameters_of(expected))


def test_loaders_read_together() -> None:
    def loaders() -> Any:
        return {"a": tiny_loader(24, shuffle=True), "b": tiny_loader(8, batch_size=2, shuffle=True)}

    class Both(Adam):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    def run(*callbacks: Callback, **arguments: Any) -> Any:
        module = Both()
        make_trainer(*callbacks, max_epochs=2).fit(module, loaders(), **arguments)
        return module

    expected = run()
    run(SaveIn("on_train_batch_end", 5))
    assert same(parameters_of(run(ckpt_path="there")), parameters_of(expected))


class Deep(Adam):
    """A block with dropout, and a linear layer. With `wrapped`, the block uses activation checkpointing."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        block: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3))
        block.register_buffer("kept", torch.arange(3.0))
        self.layer = nn.Sequential(checkpoint_wrapper(block) if wrapped else block, nn.Linear(8, 1))


@pytest.mark.parametrize("before, after", [(True, False), (False, True), (True, True)])
def test_activation_checkpointing_leaves_no_trace(before: bool, after: bool) -> None:
    """A checkpoint of a module with torch's `checkpoint_wrapper` resumes exactly without it, and vice versa."""

    def run(wrapped: bool, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
        module = Deep(wrapped)
        module.layer[1].bias.requires_grad = False
        make_trainer(*callbacks, max_epochs=2).fit(module, tiny_loader(24, shuffle=True), **arguments)
        return module.state_dict()

    expected = run(False)
    run(before, SaveIn("on_train_batch_end", 3))
    loaded = open_checkpoint("there").read()
    assert not [name for part in loaded.tensors.values() for name in part if "_checkpoint_wrapped_module" in name]
    assert "_checkpoint_wrapped_module" not in repr(loaded.state)
    assert same(run(after, ckpt_path="there"), expected)


@pytest.mark.parametrize("before, after", [(True, False), (False, True)])
def test_activation_checkpointing_in_an_own_loop(before: bool, after: bool) -> None:
    def loop(wrapped: bool, steps: range) -> dict[str, Any]:
        set_seed(1)
        accelerator = Accelerator()
        plain = Deep(wrapped).layer
        model, optimizer = accelerator.prepare(plain, torch.optim.Adam(plain.parameters(), lr=0.1))
        if steps.start:
            accelerator.load_state("half")
        for step in steps:
            torch.manual_seed(step)
            accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state("half")
        return plain.state_dict()

    expected = loop(False, range(8))
    loop(before, range(4))
    assert same(loop(after, range(4, 8)), expected)


def test_a_checkpoint_that_has_the_names_of_the_wrapper_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions of trainkit saved optimizer state under names with `_checkpoint_wrapped_module`."""
    expected = Deep(True)
    make_trainer(max_epochs=2).fit(expected, tiny_loader(24, shuffle=True))
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.optim.parameter_names._wrapper_paths", lambda module: set())
        make_trainer(SaveIn("on_train_batch_end", 3), max_epochs=2).fit(Deep(True), tiny_loader(24, shuffle=True))
    assert "0/layer.0._checkpoint_wrapped_module.0.weight/exp_avg" in open_checkpoint("there").read().tensors["optimizer"]
    for wrapped in (True, False):
        module = Deep(wrapped)
        make_trainer(max_epochs=2).fit(module, tiny_loader(24, shuffle=True), ckpt_path="there")
        assert same(module.state_dict(), expected.state_dict())
