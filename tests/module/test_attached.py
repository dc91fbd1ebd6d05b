"""What a module shows of its run. More is in `test_train_module.py`."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.errors import ModuleError


def test_a_trainer_can_be_assigned() -> None:
    trainer, module = make_trainer(), TinyModule()
    module.child = TinyModule()
    module.trainer = trainer
    assert module.trainer is module.child.trainer is trainer
    module.trainer = None
    with pytest.raises(ModuleError, match="not attached to a Trainer"):
        module.child.trainer
    assert not any("trainer" in name for name in module.state_dict())


def test_the_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TinyModule().on_gpu is False
    monkeypatch.setattr(TinyModule, "device", torch.device("cuda", 0))
    assert TinyModule().on_gpu is True


def test_one_optimizer_is_toggled() -> None:
    seen = []

    class Two(TinyModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            first, _ = self.optimizers()
            with suppress(KeyError), self.toggled_optimizer(first):
                seen.append((self.layer.weight.requires_grad, self.other.weight.requires_grad))
                raise KeyError
            seen.append((self.layer.weight.requires_grad, self.other.weight.requires_grad))
            self.manual_backward(self.loss(batch))
            first.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.other)]

    make_trainer(max_steps=1).fit(Two(), tiny_loader())
    assert seen == [(True, False), (True, True)]


def test_modules_inside_follow_the_run() -> None:
    steps = []

    class Outer(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyModule()

        def on_train_batch_end(self, *given: object) -> None:
            steps.append((self.inner.global_step, self.inner.trainer is self.trainer))

    make_trainer(max_steps=2).fit(Outer(), tiny_loader())
    assert steps == [(1, True), (2, True)]
