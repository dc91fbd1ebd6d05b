"""Measure the memory that real runs use, to compare it with `trainer.plan()`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.runs.trainers import make_trainer
from helpers.zero.zero_cases import strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from trainkit import TrainModule

__all__ = ["Planned", "Tied", "bytes_at_the_peak", "bytes_in_the_update", "live_bytes"]

_PEAK = "second update"


class Watched(torch.optim.AdamW):
    """AdamW that calls functions at the end of each step, while parameters, gradients and optimizer state are in memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, fused=True, **options)  # other implementations create temporary tensors as large as their state
        self.look: list[Callable[[], None]] = []

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for each in self.look:
            each()
        return result


class Planned(TrainModule):
    """A few layers of different sizes; one is frozen, and some are small."""

    def __init__(self, width: int = 512, look: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.look = look
        self.embedding = nn.Embedding(2000, width)
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 7)
        self.register_buffer("scale", torch.ones(width))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 1:
            gc.collect()  # unreachable objects that are still in memory would change the result by chance
            with torch.profiler.record_function(_PEAK):
                pass
        return self.head(self.frozen(self.net(self.embedding(batch)) * self.scale)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = Watched([p for p in self.parameters() if p.requires_grad], lr=1e-4)
        optimizer.look += [] if self.look is None else [self.look]
        return optimizer


class Tied(Planned):
    """Two layers share a weight."""

    def __init__(self, width: int = 512) -> None:
        super().__init__(width)
        self.other = nn.Linear(width, 2000, bias=False)
        self.other.weight = self.embedding.weight


def live_bytes() -> int:
    """Bytes of all CPU tensors that Python can find, each storage counted once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            for whole in (thing, thing.grad if thing.is_leaf else None):
                tensor = whole.detach().to_local() if isinstance(whole, DTensor) else whole
                if tensor is not None and tensor.device.type == "cpu":
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def bytes_in_the_update(kinds: list[str], precision: str, **options: Any) -> dict[str, int]:
    """Strategy → bytes of the tensors that a run adds to this process, at the end of the second optimizer step."""
    found: dict[str, int] = {}
    for kind in kinds:
        seen: list[int] = []
        with _quiet():
            before = live_bytes()
            _train(kind, precision, lambda seen=seen, before=before: seen.append(live_bytes() - before), **options)
        found[kind] = seen[-1]
    return found


def bytes_at_the_peak(kinds: list[str], precision: str, **options: Any) -> dict[str, int]:
    """Strategy → maximum bytes that torch has allocated at one time during the second optimizer step."""
    return {kind: _peak(kind, precision, options) for kind in kinds}


def _peak(kind: str, precision: str, options: dict[str, Any]) -> int:
    gc.collect()  # memory of an earlier run that is freed during this one would be subtracted from it
    with _quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _train(kind, precision, None, **options)
    total = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _PEAK:
            peak = total
        elif event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def _train(kind: str, precision: str, look: Callable[[], None] | None, **options: Any) -> None:
    module = Planned(look=look)
    if "zero3" in kind:
        options = {"param_persistence_threshold": 100_000, **options}
    data = DataLoader(torch.arange(32).remainder(2000), batch_size=1)  # type: ignore[arg-type]
    trainer = make_trainer(strategy=strategy(kind, **options), precision=precision, max_steps=2)
    trainer.fit(module, data)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `live_bytes` looks at all objects, and some warn of deprecated attributes
        yield
