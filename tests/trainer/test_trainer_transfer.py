"""The hooks that transfer a batch to the device, and modules whose layers are created in the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import DataModule


def transfers(owner: type, name: str, calls: list[Any]) -> type:
    """A subclass with all three transfer hooks, which record their calls and the index of the loader."""

    def before(self: Any, batch: Any, dataloader_idx: int) -> Any:
        calls.append((name, "before", dataloader_idx))
        return batch

    def move(self: Any, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        calls.append((name, "move", dataloader_idx, device.type))
        return batch

    def after(self: Any, batch: Any, dataloader_idx: int) -> Any:
        calls.append((name, "after", dataloader_idx))
        return batch

    hooks = {"on_before_batch_transfer": before, "transfer_batch_to_device": move, "on_after_batch_transfer": after}
    return type(owner.__name__, (owner,), hooks)


def test_transfer_hooks_of_the_module() -> None:
    calls: list[Any] = []
    make_trainer().fit(transfers(TinyModule, "module", calls)(), tiny_loader(4))
    assert calls == [("module", "before", 0), ("module", "move", 0, "cpu"), ("module", "after", 0)]


class Data(DataModule):
    def train_dataloader(self) -> DataLoader:
        return tiny_loader(4)


def test_transfer_hooks_of_a_data_module_go_before_the_modules() -> None:
    """A transfer hook of the data module is called instead of the same hook of the module."""
    calls: list[Any] = []
    module, data = transfers(TinyModule, "module", calls)(), transfers(Data, "data", calls)()
    make_trainer().fit(module, datamodule=data)
    assert calls == [("data", "before", 0), ("data", "move", 0, "cpu"), ("data", "after", 0)]

    class OnlyAfter(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("data", "after", dataloader_idx))
            return batch

    calls.clear()
    make_trainer().fit(module, datamodule=OnlyAfter())
    assert calls == [("module", "before", 0), ("module", "move", 0, "cpu"), ("data", "after", 0)]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_transfer_hooks_of_an_evaluation_know_the_loader(stage: str) -> None:
    class Several(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

        test_step = predict_step = validation_step

    calls: list[Any] = []
    getattr(make_trainer(), stage)(transfers(Several, "module", calls)(), [tiny_loader(4), tiny_loader(4)])
    assert [call[1:3] for call in calls] == [(what, index) for index in (0, 1) for what in ("before", "move", "after")]


def test_what_the_hooks_return_is_what_the_step_gets() -> None:
    class Own:
        """A batch of a custom class."""

        def __init__(self, inputs: Tensor, targets: Tensor) -> None:
            self.parts = [inputs, targets]

    class Module(TinyModule):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return Own(*batch)

        def transfer_batch_to_device(self, batch: Own, device: torch.device, dataloader_idx: int) -> Own:
            batch.parts = [part.to(device) for part in batch.parts]
            return batch

        def on_after_batch_transfer(self, batch: Own, dataloader_idx: int) -> list[Tensor]:
            return [batch.parts[0] * 2, batch.parts[1]]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.got = batch
            return self.loss(batch)

    module = Module()
    make_trainer().fit(module, tiny_loader(4))
    inputs, targets = tiny_loader(4).dataset.tensors
    assert torch.equal(module.got[0], 2 * inputs)
    assert torch.equal(module.got[1], targets)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_randomness_in_transfer_hooks_is_keyed(hook: str, accumulate: int) -> None:
    """The augmentation of an epoch does not depend on other random numbers, or on how often validation runs."""
    drawn: dict[str, list[float]] = {}

    class Module(TinyModule):
        def __init__(self, name: str, disturb: int) -> None:
            super().__init__()
            self.name, self.disturb = name, disturb

        def draw(self, batch: Any, dataloader_idx: int) -> Any:
            if not self.trainer.validating:
                drawn.setdefault(self.name, []).append(float(torch.rand(())))
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.rand(self.disturb)
            return super().training_step(batch, batch_idx)

    setattr(Module, hook, Module.draw)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    make_trainer(**arguments).fit(Module("alone", 0), tiny_loader(16))
    make_trainer(**arguments, val_check_interval=2).fit(Module("disturbed", 1000), tiny_loader(16), tiny_loader(4))
    assert drawn["alone"] == drawn["disturbed"]
    assert len(set(drawn["alone"])) == 8


def test_a_module_is_built_in_the_run() -> None:
    class Late(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            del self.layer

        def setup(self, stage: str) -> None:
            self.order = ["setup"]

        def configure_model(self) -> None:
            self.order.append("configure_model")
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(4, 1)
                assert self.layer.weight.dtype is torch.float64  # not converted afterwards

        def configure_optimizers(self) -> Any:
            self.order.append("configure_optimizers")
            return super().configure_optimizers()

    def fitted(seed: int) -> dict[str, Tensor]:
        module = Late()
        make_trainer(precision="64-true", seed=seed, limit_train_batches=1).fit(module, tiny_loader())
        assert module.order == ["setup", "configure_model", "configure_optimizers"]
        return parameters_of(module)

    first = fitted(1)
    torch.rand(7)  # the initialization depends on the run's seed, not on earlier random numbers
    assert same(first, fitted(1))
    assert not same(first, fitted(2))
