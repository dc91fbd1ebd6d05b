"""The device of each process, with mocked GPUs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import device_of


class Others(World):
    """One of several ranks, with given values of the other ranks in an exchange."""

    def __init__(self, rank: int, size: int, others: dict[int, Any], local_rank: int | None = None) -> None:
        super().__init__(rank, size, local_rank=rank if local_rank is None else local_rank, local_size=size)
        self.others = others
        self.given: list[Any] = []

    def exchange(self, value: Any) -> list[Any]:
        self.given.append(value)
        return [value if rank == self.rank else self.others[rank] for rank in range(self.size)]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpus(n)` mocks n GPUs and returns the list of devices that were made current."""
    current: list[int] = []

    def there_are(count: int, seen: str = "gpu") -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=f"{seen}{index}"))
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return there_are


def fine(gpu: str) -> dict[str, str | None]:
    return {"problem": None, "gpu": gpu}


def test_the_cpu(gpus: Any) -> None:
    gpus(4)
    assert device_of(RequestedDevices("cpu"), World(1, 2, local_rank=1, local_size=2)) == torch.device("cpu")
    gpus(0)
    assert device_of(RequestedDevices("auto"), World(1, 2, local_rank=1, local_size=2)) == torch.device("cpu")


def test_mps(gpus: Any) -> None:
    gpus(0)
    assert device_of(RequestedDevices("mps"), World()) == torch.device("mps")
    with pytest.raises(ConfigurationError, match="accelerator='mps': there is only one MPS device.*2 processes"):
        device_of(RequestedDevices("mps"), World(0, 2, local_size=2))


@pytest.mark.parametrize("wanted, count, local_rank, expected", [
    (RequestedDevices("auto"), 4, 1, 1),
    (RequestedDevices("cuda", 2), 4, 1, 1),
    (RequestedDevices("cuda", 2, (3, 2)), 4, 1, 2),
    (RequestedDevices("cuda", 2, (3, 2)), 4, 0, 3),
    (RequestedDevices("cuda"), 1, 1, 0),  # SLURM shows each task only its own GPU
])  # fmt: skip
def test_a_gpu_for_each_process(gpus: Any, wanted: RequestedDevices, count: int, local_rank: int, expected: int) -> None:
    current = gpus(count)
    world = Others(local_rank, 2, {1 - local_rank: fine("another")})
    assert device_of(wanted, world) == torch.device("cuda", expected)
    assert current == [expected]
    assert world.given == [fine(f"gpu{expected}")]


@pytest.mark.parametrize("wanted, count, words", [
    (RequestedDevices("cuda"), 0, "rank 1: torch sees no GPU. Use accelerator='cpu'"),
    (RequestedDevices("cuda"), 2, "rank 1: this node has 3 processes, but torch sees 2 GPUs.*--nproc-per-node 2"),
    (RequestedDevices("cuda", 2, (0, 1)), 4, r"rank 1: devices=\[0, 1\] names 2 GPUs, but this node has 3 processes"),
    (RequestedDevices("cuda", 3, (0, 1, 4)), 4, r"rank 1: devices=\[0, 1, 4\]: GPU 4 does not exist: torch sees 4 GPUs, numb"),
])  # fmt: skip
def test_too_few_gpus(gpus: Any, wanted: RequestedDevices, count: int, words: str) -> None:
    """All ranks raise the error of a rank without a GPU, so that no rank waits for it."""
    gpus(count)
    world = Others(1, 3, {0: fine("a"), 2: fine("b")}, local_rank=2)
    with pytest.raises(ConfigurationError, match=words):
        device_of(wanted, world)
    gpus(8)
    healthy = Others(0, 3, {1: world.given[0], 2: fine("b")})
    with pytest.raises(ConfigurationError, match=words):
        device_of(RequestedDevices("cuda"), healthy)


def test_two_ranks_with_the_same_gpu(gpus: Any) -> None:
    gpus(1)
    with pytest.raises(ConfigurationError, match="ranks 0 and 1 have the same GPU"):
        device_of(RequestedDevices("cuda"), Others(1, 2, {0: fine("gpu0")}))


def test_gpus_without_an_id(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace())
    assert device_of(RequestedDevices("cuda"), Others(1, 2, {0: fine("")})) == torch.device("cuda", 0)
