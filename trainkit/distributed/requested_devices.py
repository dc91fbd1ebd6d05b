"""`RequestedDevices`: what a user requested; `find_device`: a device by name, and its random generators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainkit.errors import ConfigurationError

__all__ = ["RequestedDevices", "find_device", "generators_of", "other_generators"]


@dataclass(frozen=True)
class RequestedDevices:
    """The devices and processes that the user requested; `None` where the user gave no argument.

    Attributes:
        accelerator: `"auto"`, `"cpu"`, `"cuda"`, `"mps"` or `"xla"`.
        per_node: Number of processes per node; -1: one per GPU.
        indices: GPU indices on each node, one per process.
        nodes: Number of nodes.
        as_started: Use the existing processes; start no others.
    """

    accelerator: str = "auto"
    per_node: int | None = None
    indices: tuple[int, ...] | None = None
    nodes: int | None = None
    as_started: bool = False


def find_device(device: str | torch.device) -> torch.device:
    """The device; of `"auto"` the current CUDA device, else MPS, else the CPU.

    Raises:
        ConfigurationError: the device does not exist, or its type is not supported.
    """
    if str(device) == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigurationError(f"unknown device {device!r}. Use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'.") from None
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"device {str(resolved)!r}: torch sees no CUDA device. Use accelerator='cpu', or install a CUDA build of torch."
            )
        count = torch.cuda.device_count()
        if resolved.index is not None and resolved.index >= count:
            raise ConfigurationError(
                f"device {str(resolved)!r} does not exist: torch sees {count} CUDA device{'' if count == 1 else 's'}. Use "
                f"{'cuda:0' if count == 1 else f'an index from 0 to {count - 1}'}."
            )
        return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigurationError("device 'mps': this machine or build of torch has no MPS. Use accelerator='cpu'.")
    if resolved.type not in ("cpu", "cuda", "mps"):
        raise ConfigurationError(f"device {str(resolved)!r} is not supported. Use 'cpu', 'cuda' or 'mps'.")
    return resolved


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """The random generators of a device other than the CPU."""
    if device.type == "cuda":
        torch.cuda.init()  # the generators exist from then on
        return (torch.cuda.default_generators[device.index or 0],)
    if device.type == "mps":
        return (torch.mps._get_default_mps_generator(),)
    return ()


def other_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The random generators of the other GPUs that this process sees: a module may have layers there."""
    if device.type != "cuda":
        return ()
    return tuple(one for one in torch.cuda.default_generators if one.device != device)
