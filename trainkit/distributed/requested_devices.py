"""What the user asked for: where to run, and on how many processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Wanted"]


@dataclass(frozen=True)
class Wanted:
    """The arguments of ``Trainer`` that say where a run runs; ``None`` is what the user left open.

    Attributes:
        accelerator: "auto", "cpu", "cuda", "mps" or "xla".
        per_node: processes of each machine; -1: one for each GPU.
        indices: the GPUs of each machine, one for each of its processes.
        nodes: machines.
        as_started: the processes that there are; none are started.
    """

    accelerator: str = "auto"
    per_node: int | None = None
    indices: tuple[int, ...] | None = None
    nodes: int | None = None
    as_started: bool = False
