"""`configure_model` in stage 3: each layer is sharded as soon as it is created, and trains like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, Noisy, RegressionModule, train, trained
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import Wide, strategy
from helpers.zero.zero_resume import ADAMW, assert_portable, case, save, tensors
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Callback, Trainer
from trainkit.errors import ConfigurationError, ModuleError

pytestmark = pytest.mark.zero  # they take long


class Built(RegressionModule):
    """Creates its layers in `configure_model`. One layer initializes itself, the others are initialized by `apply`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), Constant(16, 6), nn.Dropout(0.1))
            self.net.apply(small)


class Constant(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.25)
        nn.init.zeros_(self.bias)


def small(layer: nn.Module) -> None:
    if type(layer) is nn.Linear:
        nn.init.normal_(layer.weight, std=0.3)


class Sizes(Callback):
    """Records the number of parameter elements in this process in `on_fit_start`."""

    def __init__(self) -> None:
        self.setup = -1

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.setup = sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("kind, size", [("zero3", 2), ("zero3-both-cpu", 1), ("zero3-cpu", 3)])
def test_the_same_training(kind: str, size: int, precision: str) -> None:
    """The losses equal those of one device, from the same initial values."""
    arguments = {"precision": precision, "gradient_clip_val": 1.0}
    which = Case(samples=48, make=Built, options={"optimizer": "adamw"}, arguments=arguments)
    record, other = trained(which, size, strategy=strategy(kind)), trained(which, 1)
    assert record.losses.keys() == other.losses.keys()
    if precision == "32-true":
        assert record.losses == pytest.approx(other.losses, rel=2e-6)
    else:
        first = min(record.losses)
        assert record.losses[first] == pytest.approx(other.losses[first], rel=5e-3)


def test_memory_during_and_after_a_run() -> None:
    assert run_world(2, divided) == [(0, [0, 0, 0, 0], True)] * 2
    assert divided() == (0, [96, 16, 96, 6], True)


def divided() -> tuple[int, list[int], bool]:
    """Returns the elements in this process when the fit starts, those at the end, and whether the module can train again."""
    module, watch = Built(), Sizes()
    which = Case(samples=12, make=lambda: module, arguments={"precision": "32-true"})
    train(which, watch, strategy=strategy("zero3"))
    left = [p.numel() for p in module.parameters()]
    return watch.setup, left, len(train(which, strategy=strategy("zero3")).losses) > 0


def test_sharded_parameters_need_stage_3() -> None:
    """Another strategy could not train the module, so this is an error."""
    for said in run_world(2, elsewhere):
        assert said.startswith("4 parameters are sharded by ZeRO-3: configure_model created them in an earlier run")
        assert said.endswith("Continue with strategy='zero3', or start from a checkpoint: Built.load_from_checkpoint(path)")


def elsewhere() -> str:
    module = Built()
    which = Case(samples=12, make=lambda: module, arguments={"precision": "32-true"})
    train(which, strategy=strategy("zero3"))
    with pytest.raises(ConfigurationError) as caught:
        train(which, strategy=strategy("ddp"))
    return str(caught.value)


class Late(Built):
    """Initializes layers after all are created; one function reads the shape, some draw random numbers, some do not."""

    def configure_model(self) -> None:
        super().configure_model()
        nn.init.ones_(self.net[0].bias)
        nn.init.kaiming_uniform_(self.net[0].weight)
        with torch.no_grad():
            self.net[3].weight.normal_(std=0.3).mul_(0.5)


@pytest.mark.parametrize("kind, size", [("zero3", 2), ("zero3-both-cpu", 1)])
def test_layers_can_be_initialized_later(kind: str, size: int) -> None:
    which = Case(samples=12, make=Late, options={"optimizer": "adamw"}, arguments={"precision": "32-true"})
    losses = trained(which, size, strategy=strategy(kind)).losses
    assert losses == pytest.approx(trained(which, 1).losses, rel=2e-6)
    assert losses != pytest.approx(trained(replace(which, make=Built), 1).losses, rel=1e-2)


class Bypassing(Built):
    def configure_model(self) -> None:
        super().configure_model()
        self.net[0].bias.detach().fill_(1.0)


def test_a_lost_change_of_a_sharded_parameter_is_an_error() -> None:
    which = Case(samples=12, make=Bypassing, arguments={"precision": "32-true"})
    train(which, strategy="auto")
    with pytest.raises(
        ModuleError, match="configure_model changed 1 parameters through detach.* after their layers were created"
    ):
        train(which, strategy=strategy("zero3"))
    assert nn.Linear(2, 2).weight.numel() == 4  # layers are no longer sharded


class Raises(Built):
    def configure_model(self) -> None:
        nn.Linear(3, 3)
        raise RuntimeError("boom")


def test_an_error_while_building() -> None:
    before = nn.Linear.__init__, nn.Module.apply
    with pytest.raises(RuntimeError, match="boom"):
        train(Case(samples=12, make=Raises, arguments={"precision": "32-true"}), strategy=strategy("zero3"))
    assert (nn.Linear.__init__, nn.Module.apply) == before


@pytest.mark.parametrize("kind, other", [("zero3", "zero3-both-cpu"), ("ddp", "zero3"), ("zero3", "zero1")])
def test_checkpoints(kind: str, other: str, run_dir: Path) -> None:
    run_world(2, save, case(make=Built), kind, run_dir / "saved")
    assert len(tensors(run_dir / "saved")) == 4 + 3 * 4
    assert_portable(run_dir / "saved", other, 2, make=Built)


def test_the_summary_counts_sharded_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(
        strategy=strategy("zero3"),
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Built(), DataLoader(Noisy(4), 2))
    assert "214       Trainable params" in capsys.readouterr().out


class BuiltWide(RegressionModule):
    """A module that is large enough for NVMe."""

    rates = Wide.rates

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            inner = [part for _ in range(3) for part in (nn.Linear(728, 728), nn.Tanh())]
            self.net = nn.Sequential(nn.Linear(6, 728), nn.Tanh(), *inner, nn.Linear(728, 6))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["zero3-both-nvme", "zero3-params-nvme"])
def test_nvme(kind: str, size: int) -> None:
    which = Case(samples=48, make=BuiltWide, options=ADAMW, arguments={"precision": "32-true"})
    assert trained(which, size, strategy=strategy(kind)).losses == pytest.approx(trained(which, 1).losses, rel=2e-6)


def test_parameters_after_offload_to_a_disk() -> None:
    """After the run, the folder is removed, but the values are in memory and can be trained again."""
    for values in run_world(2, gone):
        assert values


def gone() -> bool:
    module = BuiltWide()
    which = Case(samples=12, make=lambda: module, arguments={"precision": "32-true"})
    train(which, strategy=strategy("zero3-both-nvme"))
    assert all(p.ds_tensor.numel() == -(-p.ds_numel // 2) for p in module.parameters())
    return len(train(which, strategy=strategy("zero3-both-nvme")).losses) > 0
