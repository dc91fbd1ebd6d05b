"""The devices and processes that the user requested."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestedDevices"]


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
