"""What a module shows of its run. More is in `test_train_module.py`."""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch.utils.tensorboard import SummaryWriter

import trainkit.callbacks
from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ModuleError, NotAvailableError


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


def walked(thing: Any) -> set[str]:
    """The public properties of an object; reading one raises nothing, or an AttributeError that says more than its name."""
    names = {name for name in dir(type(thing)) if isinstance(getattr(type(thing), name), property) and name[0] != "_"}
    for name in names:
        with suppress(NotAvailableError):  # an AttributeError of another kind fails the test
            getattr(thing, name)
    return names


def test_tools_may_look_at_every_property() -> None:
    """`inspect`, `torch.jit` and `hasattr` read all attributes, of modules and trainers before and after a run."""
    fresh, module = TinyModule(), TinyModule()
    callbacks = [kind() for kind in without_arguments()]
    loose = [kind() for kind in without_arguments()]
    trainer = make_trainer(ModelCheckpoint(), max_epochs=1, enable_checkpointing=True)
    before = make_trainer()
    trainer.fit(module, tiny_loader(4))
    for thing in (fresh, module, trainer, before, *trainer.callbacks, *callbacks, *loose):
        walked(thing)
        inspect.getmembers(thing)
    assert {"sample_mask", "trainer", "device"} <= walked(module)
    assert len(callbacks) > 20
    assert not hasattr(fresh, "sample_mask")
    assert not hasattr(before, "lightning_module")
    with pytest.raises(NotAvailableError, match="not attached to a Trainer"):
        fresh.sample_mask


def without_arguments() -> list[Any]:
    """The callbacks that need no argument."""
    found = []
    for name in trainkit.callbacks.__all__:
        kind = getattr(trainkit.callbacks, name)
        if not (inspect.isclass(kind) and issubclass(kind, Callback)):
            continue
        needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
        if not needed:
            found.append(kind)
    return found


@pytest.mark.parametrize("attached", [False, True])
def test_a_module_can_be_traced_scripted_and_drawn(attached: bool, run_dir: Path) -> None:
    module, batch = TinyModule(), torch.ones(2, 4)
    if attached:
        make_trainer(max_epochs=1).fit(module, tiny_loader(4))
    expected = module(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises torch.export
        assert torch.equal(torch.jit.trace(module, batch)(batch), expected)
        assert torch.equal(torch.jit.script(module)(batch), expected)
        with SummaryWriter(str(run_dir)) as writer:
            writer.add_graph(module, batch)
    assert list(run_dir.glob("events*"))


def test_an_error_of_an_own_property_is_shown() -> None:
    """`nn.Module` says that the property is missing."""

    class Wrong(TinyModule):
        @property
        def size(self) -> int:
            return self.layer.missing  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'missing'"):
        Wrong().size
