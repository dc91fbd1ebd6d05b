"""Offload to NVMe: the files on disk, the memory that is still used, and failures of the disk."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, Noisy, train, trained
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import NVME, Wide, strategy
from torch import nn
from torch.utils.data import DataLoader

import trainkit
from trainkit import Accelerator, Callback, Trainer
from trainkit.errors import ConfigurationError, OffloadError

pytestmark = pytest.mark.zero

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
ALONE = {"precision": "32-true"}


def files(folder: Path) -> dict[str, int]:
    """The files in a folder: name → bytes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.swp")}


class Measured(Callback):
    """Measures memory and disk in the last step."""

    def __init__(self) -> None:
        self.before = resident()
        self.memory = 0
        self.files: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.memory, self.files = resident() - self.before, files(Path.cwd())


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(kind: str, options: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Train; returns the growth of this process's memory in bytes, and the files of all processes."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: freed memory is returned to the system
    case = Case(samples=8, window=4, make=Deep, options={"optimizer": "adamw"}, arguments={"max_epochs": 2, **ALONE})
    watch = Measured()
    train(case, watch, strategy=strategy(kind, **options))
    return watch.memory, watch.files


class Deep(Wide):
    """A module with 21 million parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(layers=40, **options)


@pytest.mark.parametrize("size", [1, 2])
def test_files_grow_and_memory_shrinks(size: int) -> None:
    elements, mib = 40 * 728 * 728 // size, 2**20
    small = {"sub_group_size": 1_000_000}
    memory, on_disk = run_world(size, measured, "zero3-both-cpu", {})[0]
    less, optimizer = run_world(size, measured, "zero3-nvme", small)[0]
    least, both = run_world(size, measured, "zero3-both-nvme", small)[0]
    assert not on_disk
    state = sum(count for name, count in optimizer.items() if "/rank0/" in name)
    assert state >= 3 * 4 * (elements - 728 * 728)  # master weights and two tensors of AdamW, except for frozen parameters
    assert state < 1.02 * 3 * 4 * elements + mib
    parameters = sum(count for name, count in both.items() if "float32params/rank0" in name)
    assert 4 * elements <= parameters < 1.02 * 4 * elements + mib
    # offloaded tensors are no longer in memory, except for the buffers: four for a sub-group, and those for parameters
    assert less < memory - 0.75 * 3 * 4 * elements
    assert least < memory - 0.75 * 4 * 4 * elements


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_elementwise_optimizers(optimizer: str) -> None:
    """Each optimizer gets the number of buffers that it needs."""
    case = Case(samples=16, window=4, make=AnyOptimizer, options={"optimizer": optimizer}, arguments=ALONE)
    record = trained(case, 1, strategy=strategy("zero3-both-nvme", sub_group_size=400_000))
    assert record.losses == pytest.approx(trained(case, 1).losses, rel=2e-5)


class AnyOptimizer(Wide):
    """Uses an optimizer of torch with two parameter groups; for some optimizers, with all optional state."""

    def configure_optimizers(self) -> Any:
        first, *rest = [p for p in self.net.parameters() if p.requires_grad]
        more = {"RMSprop": {"centered": True, "momentum": 0.9}, "AdamW": {"amsgrad": True}}.get(self.optimizer, {})
        groups = [{"params": [first], "lr": 2e-4}, {"params": rest}]
        return getattr(torch.optim, self.optimizer)(groups, lr=1e-4, **more)


def own_loop(kind: str) -> list[float]:
    """Train two models, each with an optimizer; returns the losses."""
    trainkit.seed_everything(5)
    accelerator = Accelerator(strategy=strategy(kind))
    nets = [Wide().net, nn.Sequential(nn.Linear(6, 728), nn.Tanh(), nn.Linear(728, 728), nn.Tanh(), nn.Linear(728, 6))]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in nets]
    *prepared, loader = accelerator.prepare(*nets, *optimizers, DataLoader(Noisy(12), 2))
    losses = []
    for batch in loader:
        for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
            loss = (model(batch["x"].float()) - batch["y"].float()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.strategy.teardown()
    return losses


@pytest.mark.parametrize("kind", list(NVME))
def test_several_optimizers(kind: str) -> None:
    assert own_loop(kind) == pytest.approx(own_loop("auto"), rel=2e-5)
    assert not files(Path.cwd())


def test_parameters_are_gathered_all_at_once() -> None:
    """Also if there are more parameters than are read ahead. Changes are kept."""
    accelerator = Accelerator(strategy=strategy("zero3-both-nvme", param_buffer_count=1))
    net = Wide(layers=4).net
    before = [p.detach().clone() for p in net.parameters()]
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.strategy.gathered_parameters(net):
            assert all(torch.equal(p, own) for p, own in zip(net.parameters(), before, strict=True))
    with accelerator.strategy.gathered_parameters(net, modified=True), torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    with accelerator.strategy.gathered_parameters(net):
        assert all(torch.equal(p, own + 1.0) for p, own in zip(net.parameters(), before, strict=True))
    accelerator.strategy.teardown()
    assert all(torch.equal(p, own + 1.0) for p, own in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["zero3-nvme", "zero3-both-nvme"])
def test_a_file_that_is_removed_during_training(kind: str) -> None:
    """An error says so, and the folder is removed."""

    class Remove(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            for name in files(Path.cwd()) if batch_idx == 2 else ():
                (Path.cwd() / name).unlink()

    with pytest.raises(OffloadError, match="cannot be read: the file was removed"):
        train(Case(samples=12, make=Wide, arguments=ALONE), Remove(), strategy=strategy(kind))
    assert not [*Path.cwd().iterdir()]


@pytest.mark.parametrize(
    "options",
    [
        {"aio_threads": 2, "aio_block_size": 65536, "aio_queue_depth": 2},
        {"aio_overlap_events": False, "aio_single_submit": True},
        {"max_params_in_cpu": 10**9, "param_buffer_count": 1},
        {"max_params_in_cpu": 600_000, "sub_group_size": 300_000, "optimizer_buffer_count": 7},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    """The losses are the same with all options of the offload."""
    which = Case(samples=24, make=Wide, options={"layers": 3, "optimizer": "adamw"}, arguments=ALONE)
    record = trained(which, 1, strategy=strategy("zero3-both-nvme", **options))
    assert record.losses == pytest.approx(trained(which, 1).losses, rel=2e-5)


def test_an_invalid_block_size() -> None:
    with pytest.raises(ConfigurationError, match="aio_block_size must be a multiple of 4096 bytes, .* not 1000"):
        strategy("zero3-nvme", aio_block_size=1000)


@pytest.mark.parametrize("kind", ["zero3-nvme", "zero3-both-nvme"])
def test_an_evaluation_alone(kind: str) -> None:
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    expected = Trainer(strategy="auto", **quiet).validate(Wide(), DataLoader(Noisy(6), 2), verbose=False)
    assert Trainer(strategy=strategy(kind), **quiet).validate(Wide(), DataLoader(Noisy(6), 2), verbose=False) == [
        pytest.approx(expected[0], rel=1e-6)
    ]
    assert not [*Path.cwd().iterdir()]


def test_a_failed_compilation_leaves_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("the compiler failed")

    monkeypatch.setattr("trainkit.strategies.zero.engine_setup.load", fail)
    with pytest.raises(RuntimeError, match="the compiler failed"):
        train(Case(samples=12, make=Wide, arguments=ALONE), strategy=strategy("zero3-nvme"))
    assert not torch.distributed.is_initialized()


def test_too_few_buffers() -> None:
    with pytest.raises(
        ConfigurationError, match=r"optimizer_buffer_count=3 is too small: this optimizer has 2 .* needs 4 buffers"
    ):
        train(
            Case(samples=12, make=Wide, options={"optimizer": "adamw"}, arguments=ALONE),
            strategy=strategy("zero3-nvme", optimizer_buffer_count=3),
        )
