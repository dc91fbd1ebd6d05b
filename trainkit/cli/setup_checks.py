"""The checks of `trainkit test`, which each of its processes runs: small computations with known results.

Each process runs them as `python -m trainkit.cli.setup_checks FOLDER STRATEGY BACKEND`, started by its agent.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit._version import __version__
from trainkit.checkpoint import open_checkpoint
from trainkit.cli.test import print_line
from trainkit.config.settings import VARIABLE
from trainkit.console import quantity
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import TrainkitError
from trainkit.module.train_module import TrainModule
from trainkit.registry import make_strategy
from trainkit.strategy import Strategy
from trainkit.trainer.trainer import Trainer

__all__ = ["CHECKS", "SETTINGS", "Check", "CheckContext", "WrongResultError", "main"]


_SAMPLES, _BATCH, _ACCUMULATION = 21, 2, 2
_STEPS, _SAVED_AT = 6, 3
_LARGEST = 1e-11  # largest relative difference between float64 sums in different orders


class WrongResultError(TrainkitError):
    """A check completed with a wrong result."""


@dataclass
class CheckContext:
    """The objects that all checks use.

    Attributes:
        strategy: A strategy that has joined its processes.
        make: Creates a new strategy of that kind for one run.
        folder: A folder that all processes of the node can access.
    """

    strategy: Strategy
    make: Callable[[], Strategy]
    folder: Path

    @property
    def alone(self) -> Strategy:
        """A strategy for this process only, on its device."""
        return Strategy(self.strategy.device)


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        name: What is checked.
        run: Runs the check on all processes; returns a description of the result, raises an error if the check fails.
        advice: What to do if it fails.
    """

    name: str
    run: Callable[[CheckContext], str]
    advice: str


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise WrongResultError(text)


# --------------------------------------------------------------------------------------------------------- the processes


def _processes(context: CheckContext) -> str:
    """Check that the ranks are different processes with the same versions."""
    world = context.strategy.world
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "torch": torch.__version__, "trainkit": __version__}
    by_rank = world.exchange({**mine, "rank": world.rank, "device": str(context.strategy.device)})
    _require([one["rank"] for one in by_rank] == list(range(world.size)), f"the ranks are {[one['rank'] for one in by_rank]}")
    places = {(one["host"], one["pid"]) for one in by_rank}
    _require(len(places) == world.size, f"{world.size} ranks, but {len(places)} processes")
    for package in ("torch", "trainkit"):
        versions = sorted({one[package] for one in by_rank})
        _require(len(versions) == 1, f"different versions of {package}: {', '.join(versions)}")
    devices = [one["device"] for one in by_rank if one["device"] != "cpu"]
    hosts = [one["host"] for one in by_rank if one["device"] != "cpu"]
    _require(len(set(zip(hosts, devices, strict=True))) == len(devices), f"processes share a device: {', '.join(devices)}")
    return f"{world.size}, started by {world.launcher}, on {', '.join(one['device'] for one in by_rank)}"


# ------------------------------------------------------------------------------------------------------- the collectives


def _collectives(context: CheckContext) -> str:
    """Exchange tensors on the device over the backend, and numbers and objects over the control group."""
    world, device = context.strategy.world, context.strategy.device
    began = time.monotonic()
    everyone = sum(range(1, world.size + 1))
    if world.size > 1:
        total = torch.full((1000,), float(world.rank + 1), device=device)
        dist.all_reduce(total)
        _require(bool((total == everyone).all()), f"the sum of the ranks + 1 is {total[0].item()}, not {everyone}")
        parts = [torch.zeros(2, device=device) for _ in range(world.size)]
        dist.all_gather(parts, torch.full((2,), float(world.rank), device=device))
        _require([part[0].item() for part in parts] == list(range(world.size)), f"all_gather of the ranks returned {parts}")
        last = torch.tensor([float(world.rank)], device=device)
        dist.broadcast(last, src=world.size - 1)
        _require(last.item() == world.size - 1, f"the broadcast from rank {world.size - 1} is {last.item()}")
    objects = world.exchange_state({"rank": world.rank, "tensor": torch.arange(world.rank)})
    _require([len(one["tensor"]) for one in objects] == list(range(world.size)), f"the exchange of objects returned {objects}")
    _require(
        world.begin_largest([world.rank, -world.rank]).wait() == [world.size - 1, 0], "the maximum over the ranks is wrong"
    )
    _require(world.sums([world.rank + 0.5]) == [everyone - 0.5 * world.size], "the sum over the ranks is wrong")
    if world.size == 1:
        return "not needed with one process"
    seconds = time.monotonic() - began
    return f"sum, gather, broadcast over {dist.get_backend()}, objects over the control group, in {seconds:.2f} s"


# ------------------------------------------------------------------------------------------------------------- training


class _Probe(TrainModule):
    """Two layers and dropout in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        for parameter in self.net.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        result: Tensor = self.net(batch[0])
        return result

    def _loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _data() -> TensorDataset:
    inputs = torch.sin(torch.arange(_SAMPLES * 8, dtype=torch.float64) * 0.7).reshape(_SAMPLES, 8)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).cos())


def _loader(shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=_BATCH, shuffle=shuffle)


def _trainer(strategy: Strategy, folder: Path, **arguments: Any) -> Trainer:
    return Trainer(strategy=strategy, precision="64-true", seed=1, **_quiet(folder), **arguments)


def _quiet(folder: Path) -> dict[str, Any]:
    """The arguments of a Trainer without output or files."""
    switches = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    return {**dict.fromkeys(switches, False), "default_root_dir": folder}


def _fit(strategy: Strategy, folder: Path, accumulation: int, steps: int = _STEPS, **arguments: Any) -> tuple[Trainer, _Probe]:
    trainer, module = _trainer(strategy, folder, max_steps=steps, accumulate_grad_batches=accumulation), _Probe()
    trainer.fit(module, _loader(shuffle=True), **arguments)
    return trainer, module


def _difference(first: nn.Module, second: nn.Module) -> float:
    """The largest difference between the parameters of two modules, relative to the largest parameter."""
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    largest = max(float(one.detach().abs().max()) for one, _ in pairs)
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs) / largest


def _training(context: CheckContext) -> str:
    """Train with the same global batches on all processes and on one."""
    world = context.strategy.world
    _, module = _fit(context.make(), context.folder, _ACCUMULATION)
    _, reference = _fit(context.alone, context.folder / f"alone-{world.rank}", _ACCUMULATION * world.size)
    difference = max(world.exchange(_difference(reference, module)))
    text = f"parameters after {_STEPS} optimizer steps differ from those of one process by {difference:.1e} (relative)"
    _require(difference <= _LARGEST, text)
    return f"{text}, at most {_LARGEST:.0e}"


# ------------------------------------------------------------------------------------------------------------ evaluation


def _evaluation(context: CheckContext) -> str:
    """Check that every sample is evaluated once, the mean is exact, and predictions are in order."""
    module, trainer = _Probe(), _trainer(context.make(), context.folder)
    (result,) = trainer.validate(module, _loader(), verbose=False)
    module.eval()
    inputs, targets = (part.to(context.strategy.device) for part in _data().tensors)
    with torch.no_grad():
        outputs = module.net(inputs)
        exact = float(((outputs - targets) ** 2).mean())
    difference = abs(result["loss"] - exact) / exact
    _require(difference <= 1e-12, f"the mean over {_SAMPLES} samples is {result['loss']!r}, not {exact!r}")
    predictions = trainer.predict(module, _loader())
    assert predictions is not None
    joined = torch.cat(predictions)
    _require(len(joined) == _SAMPLES, f"{len(joined)} predictions for {_SAMPLES} samples")
    _require(torch.allclose(joined, outputs, rtol=1e-12, atol=1e-14), "the predictions are not in the order of the data")
    return f"{_SAMPLES} samples evaluated once each, exact mean (within {difference:.1e}), predictions in order"


# ------------------------------------------------------------------------------------------------------------ checkpoint


def _checkpoint(context: CheckContext) -> str:
    """All processes write and read a checkpoint; the resumed run equals an uninterrupted one."""
    world, path = context.strategy.world, context.folder / "checkpoint"
    _, whole = _fit(context.make(), context.folder, _ACCUMULATION)
    trainer, _ = _fit(context.make(), context.folder, _ACCUMULATION, steps=_SAVED_AT)
    trainer.save_checkpoint(path)
    open_checkpoint(path).verify()
    size = sum(file.stat().st_size for file in path.iterdir())
    _, resumed = _fit(context.make(), context.folder, _ACCUMULATION, ckpt_path=path)
    difference = max(world.exchange(_difference(whole, resumed)))
    _require(difference <= _LARGEST, f"a resumed run differs from an uninterrupted one by {difference:.1e} (relative)")
    how = "bit for bit" if difference == 0 else f"within {difference:.1e}"
    done = f"written and read by {quantity(world.size, 'process')} ({size / 1024:.0f} KiB)"
    return f"{done}; the resumed run equals an uninterrupted one {how}"


CHECKS = (
    Check("processes", _processes, "Start all processes in the same Python environment, one for each GPU."),
    Check(
        "collectives",
        _collectives,
        "Check the network between the processes. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME set the network interface, "
        "NCCL_DEBUG=INFO prints NCCL's log. Try --backend gloo.",
    ),
    Check("training", _training, "Try --backend gloo: if it works, check the other backend and its driver."),
    Check(
        "evaluation",
        _evaluation,
        "See the error above. If it does not name a cause, report a bug with the output of: trainkit env",
    ),
    Check(
        "checkpoint",
        _checkpoint,
        "All processes must be able to write to the same folder. Set another one: export TMPDIR=FOLDER",
    ),
)


# ---------------------------------------------------------------------------------------------------------- the settings


def _settings(context: CheckContext) -> str:
    """Train with the settings of the configuration file, and check that all processes have equal parameters."""
    world = context.strategy.world
    trainer, module = Trainer(max_steps=2, seed=1, **_quiet(context.folder)), _Probe().float()
    trainer.fit(module, DataLoader(TensorDataset(*(part.float() for part in _data().tensors)), batch_size=_BATCH))
    done = quantity(trainer.global_step, "optimizer step")
    sums = world.exchange([float(parameter.detach().double().sum()) for parameter in module.parameters()])
    _require(
        all(math.isfinite(value) for value in sums[0]), f"after {done} the sums of the parameters are not finite: {sums[0]}"
    )
    _require(all(one == sums[0] for one in sums), f"after {done} the parameters of the processes differ")
    clip, window = trainer._arguments.gradient_clip_val, trainer.accumulate_grad_batches
    more = f", {window} micro-batches each" if window > 1 else ""
    more += f", clipped at {clip}" if clip else ""
    return f"{done} with {trainer.strategy!r}{more}"


SETTINGS = Check(
    "settings",
    _settings,
    "Compare the configuration file with docs/how-to/many-gpus-and-nodes.md#a-configuration-file, or write a new one: "
    "trainkit config",
)
"""The last check, if there is a configuration file."""


_TIMEOUT = timedelta(seconds=60)


def main(arguments: Sequence[str]) -> int:
    """Run the checks until one fails; 0 if all pass."""
    folder, name, backend = Path(arguments[0]), arguments[1], arguments[2]
    logging.getLogger("trainkit").setLevel(logging.WARNING)  # no notices of the runs in the checks
    device = "cuda" if backend == "nccl" else "cpu"
    make = partial(make_strategy, name, device=device, process_group_backend=backend, timeout=_TIMEOUT)
    strategy = make()
    strategy.join(RequestedDevices(accelerator=device))
    world = strategy.world
    context = CheckContext(strategy, make, folder)
    settings = os.environ.pop(VARIABLE, None)  # Only the check of settings uses it.
    for check in CHECKS if settings is None else (*CHECKS, SETTINGS):
        if check is SETTINGS and settings is not None:
            os.environ[VARIABLE] = settings
        error: Exception | None = None
        result = ""
        try:
            result = check.run(context)
        except Exception as caught:
            error = caught
            text = f"{type(caught).__name__}: {caught}"
            if os.environ.get("TRAINKIT_TRACEBACK") == "1":
                text = "".join(traceback.format_exception(caught)).rstrip()
            # before the collective call below, which may hang
            (folder / f"error-{world.rank}.txt").write_text(f"rank {world.rank}: {text}", "utf-8")
        if world.agree(error) is not None:
            return 1
        if world.is_main:
            print_line(check.name, True, result)
            with (folder / "ended").open("a") as file:
                file.write(f"{check.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
