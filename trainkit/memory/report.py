"""`trainer.plan(module)`: the memory of each strategy by number of processes, and the smallest one that fits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from trainkit.console import quantity
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.memory.inventory import parse_bytes
from trainkit.registry import load_footprints
from trainkit.strategy import Contents, Footprint, Held

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = ["PROCESSES", "MemoryEstimate", "Row", "estimate_contents", "size_text"]

PROCESSES = (1, 2, 4, 8)
_NOT_IN_IT = (
    "temporary memory of kernels and of the optimizer step (fused=True needs none), the memory of Python, torch and the "
    "libraries of the device (about 0.5 GiB per process), fragmentation, loader workers."
)


@dataclass(frozen=True)
class Row:
    """One strategy with one number of processes.

    Attributes:
        processes: The number of processes on all nodes.
        footprint: The memory of one process.
        per_host: The number of processes per node.
        device: Bytes on the device of a process; 0 on the CPU.
        host: Bytes on a node, for all its processes.
        fits: Whether it fits; `None`: the memory of the device is unknown.
        own: Whether it is the strategy of the trainer.
    """

    processes: int
    footprint: Footprint
    per_host: int
    device: int
    host: int
    fits: bool | None
    own: bool

    @property
    def strategy(self) -> str:
        """The name, and what is offloaded where."""
        return self.footprint.name


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of parameters, gradients, optimizer state, masters and buffers; `str()` is the table.

    Attributes:
        rows: One row per strategy and number of processes, the fastest strategies first.
        precision: The precision of the run.
        parameters: The number of elements of all parameters.
        trained: The number of elements of trainable parameters.
        on_cpu: The device is the CPU: device and host share one memory.
        device_memory: Bytes of a device; `None`: unknown.
        host_memory: Bytes of a node.
        start: Bytes that each process allocates in host memory to build the module; none under ZeRO-3 if `late`.
        late: The layers are built in `configure_model`.
        notes: The strategies that cannot be used, and why.
        untraced: Why activations are not included; empty if they are.
    """

    rows: tuple[Row, ...]
    precision: str
    parameters: int
    trained: int
    on_cpu: bool
    device_memory: int | None
    host_memory: int
    start: int
    late: bool
    notes: tuple[str, ...]
    untraced: str

    @property
    def smallest(self) -> Row | None:
        """The first row that fits: the fastest strategy, with the fewest processes."""
        return next((row for row in self.rows if row.fits), None)

    def smallest_on(self, processes: int) -> Row | None:
        """The fastest strategy that fits with this number of processes."""
        return next((row for row in self.rows if row.fits and row.processes == processes), None)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def estimate_contents(
    strategy: Strategy,
    contents: Contents,
    start: int,
    late: bool = False,
    processes: Sequence[int] = PROCESSES,
    per_host: int | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    untraced: str = "",
) -> MemoryEstimate:
    """The memory estimate of a run; for the other arguments see `trainkit.Trainer.plan`.

    Args:
        strategy: The run's strategy.
        contents: The parameters, and the state that the optimizer has for them.
        start: Bytes that each process allocates in host memory to build the module.
        late: The layers are built in `configure_model`.
        untraced: Why the contents have no activations.

    Raises:
        ConfigurationError: A number of processes is not a whole number ≥ 1.
    """
    _check_counts("processes", list(processes))
    if per_host is not None:
        _check_counts("per_host", [per_host])
    on_cpu = strategy.device.type != "cuda" and device_memory is None
    device = None if on_cpu else _device_memory(strategy, device_memory)
    host = _host_memory(host_memory)
    rows: list[Row] = []
    notes: list[str] = []
    for held, number, of_run in _footprints(strategy, contents, sorted(set(processes)), notes):
        each = min(number, per_host or number)
        first = 0 if late and held.shards_layers else start
        rows.append(_row(held, number, each, on_cpu, device, host, first, of_run))
    return MemoryEstimate(
        rows=tuple(rows),
        precision=strategy.precision.name,
        parameters=sum(weight.numel for weight in contents.weights),
        trained=sum(weight.numel for weight in contents.trained),
        on_cpu=on_cpu,
        device_memory=device,
        host_memory=host,
        start=start,
        late=late,
        notes=tuple(_merged(notes)),
        untraced=untraced,
    )


def _check_counts(name: str, numbers: list[int]) -> None:
    if not numbers or any(type(n) is not int or n < 1 for n in numbers):
        raise ConfigurationError(f"{name} must be whole numbers ≥ 1, not {numbers}. For example: processes=(1, 2, 4, 8)")


def _footprints(
    strategy: Strategy, contents: Contents, processes: Sequence[int], notes: list[str]
) -> Iterator[tuple[Footprint, int, bool]]:
    """Each strategy with each useful number of processes, and whether it is the run's own strategy.

    Args:
        strategy: The run's strategy.
        contents: See `estimate_contents`.
        processes: The numbers of processes, ascending.
        notes: Receives the reason for each strategy that cannot be used.
    """
    for one, of_run in _candidates(strategy, notes):
        for number in processes:
            try:
                held = one.footprint(contents, number)
            except TrainkitError as error:
                notes.append(f"{_name_of(one)}: {error}")
                break
            if contents.profile and "backward" not in held.moments:
                notes.append(f"{held.name}: activations are not included, because its footprint does not count them.")
            if not _pointless(held.name, number) or (of_run and number == strategy.world_size):
                yield held, number, of_run


def _row(held: Footprint, number: int, each: int, on_cpu: bool, device: int | None, host: int, start: int, of_run: bool) -> Row:
    here = 0 if on_cpu else held.device.total
    there = each * (held.together.total if on_cpu else held.host.total)
    most = max(there, each * start)  # the module is built before it is sharded or moved
    fits = most <= host and (on_cpu or device is None or here <= device)
    return Row(number, held, each, here, there, None if fits and not on_cpu and device is None else fits, of_run)


def _candidates(strategy: Strategy, notes: list[str]) -> Iterator[tuple[Any, bool]]:
    """The strategies to compare, the fastest first; the run's own strategy replaces the default one of that name."""
    empty = Contents(())
    name, seen = strategy.footprint(empty, 1).name, False
    for one in load_footprints():
        if strategy.precision.name not in one.supported_precisions:
            supported = ", ".join(one.supported_precisions)
            notes.append(f"{_name_of(one)}: does not support {strategy.precision.name}; it supports {supported}.")
            continue
        of_run = _name_of(one) == name
        seen |= of_run
        yield (strategy, True) if of_run else (one, False)
    if not seen:
        yield strategy, True


def _name_of(one: Any) -> str:
    return str(one.footprint(Contents(()), 1).name)


def _merged(notes: list[str]) -> list[str]:
    """Notes with the same text for several strategies, as one."""
    by_text: dict[str, list[str]] = {}
    for note in notes:
        name, _, text = note.partition(": ")
        by_text.setdefault(text, []).append(name)
    return [f"{'; '.join(names)}: {text}" for text, names in by_text.items()]


def _pointless(name: str, processes: int) -> bool:
    """One device with several processes; or sharding over one process without offload."""
    return processes > 1 if name == "single" else processes == 1 and " on " not in name


def _device_memory(strategy: Strategy, amount: int | str | None) -> int | None:
    if amount is not None:
        return parse_bytes(str(amount))
    return torch.cuda.get_device_properties(strategy.device).total_memory if strategy.device.type == "cuda" else None


def _host_memory(amount: int | str | None) -> int:
    if amount is not None:
        return parse_bytes(str(amount))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise ConfigurationError("the memory of this system is unknown. Write: host_memory='64G', or --host-memory 64G")


# ---------------------------------------------------------------------------------------------------------- the table


def _lines(estimate: MemoryEstimate) -> Iterator[str]:
    scale, unit = _unit([row.footprint.together.total for row in estimate.rows])
    yield (
        f"{estimate.parameters:,} parameters, {estimate.trained:,} of them trainable, {estimate.precision}. "
        f"{unit} at the peak of an optimizer step, after the first one:"
    )
    disk = any(row.footprint.disk for row in estimate.rows)
    here = ["a process"] if estimate.on_cpu else ["a device", "+ host"]
    heads = [*_parts(estimate), *here, "a node", *(["NVMe"] if disk else []), "checkpoint"]
    width = max([len(row.strategy) for row in estimate.rows], default=0) + 2
    last = "  fits" if any(row.fits is not None for row in estimate.rows) else ""
    yield f"  {'strategy':<{width}}{'processes':>9}" + "".join(f"{head:>12}" for head in heads) + last
    for row in estimate.rows:
        cells = "".join(f"{value / scale:>12.2f}" for value in _values(estimate, row, disk))
        mark = "*" if row.own else " "
        fits = "" if row.fits is None else "  yes" if row.fits else "  no"
        yield f"{mark} {row.strategy:<{width}}{row.processes:>9}{cells}{fits}"
    yield from _below(estimate, scale, unit)


def _parts(estimate: MemoryEstimate) -> list[str]:
    """The columns of device memory by purpose."""
    return [part.name for part in fields(Held) if part.name != "activations" or not estimate.untraced]


def _values(estimate: MemoryEstimate, row: Row, disk: bool) -> list[int]:
    """The bytes in a row of the table, in the order of its columns."""
    footprint = row.footprint
    held = footprint.together if estimate.on_cpu else footprint.device
    sums = [held.total] if estimate.on_cpu else [held.total, footprint.host.total]
    parts = [getattr(held, part) for part in _parts(estimate)]
    return [*parts, *sums, row.host, *([footprint.disk] if disk else []), footprint.checkpoint]


def _below(estimate: MemoryEstimate, scale: int, unit: str) -> Iterator[str]:
    if any(row.own for row in estimate.rows):
        yield "* this Trainer's strategy, with its options; the others have their defaults."
    if estimate.on_cpu:
        yield "On the CPU, device and host share one memory: each column includes both. For a GPU write: --device-memory 80G"
    else:
        yield "The columns up to 'a device' are device memory; '+ host' is the host memory of the process."
    first = "Each process except in stage 3" if estimate.late else "Each process"
    advice = "" if estimate.late else " Stage 3 does not need this if configure_model builds the layers."
    yield f"{first} starts with the whole module in host memory, {size_text(estimate.start)}, which must fit too.{advice}"
    yield "While a checkpoint is written in the background, each process keeps a copy of its part in host memory."
    if estimate.untraced:
        yield f"Activations are not included: {estimate.untraced}"
        yield f"Not included: activations and the batch, {_NOT_IN_IT}"
    else:
        yield (
            "Activations are those of a forward and backward with the shapes of the first batch. A row shows its peak: if that "
            "is the optimizer step, there are none."
        )
        yield f"Not included: {_NOT_IN_IT}"
    yield from estimate.notes
    limits = f"{size_text(estimate.host_memory)} a node"
    if estimate.on_cpu or estimate.device_memory is not None:
        limits = limits if estimate.on_cpu else f"{size_text(estimate.device_memory or 0)} a device and {limits}"
        smallest = estimate.smallest
        processes = "" if smallest is None else f", {quantity(smallest.processes, 'process')}"
        yield f"Smallest that fits in {limits}: {_named(smallest)}{processes}"
        for number in sorted({row.processes for row in estimate.rows}):
            yield f"  on {number:>3} process{'es' if number > 1 else '  '}  {_named(estimate.smallest_on(number))}"
    else:
        yield "There is no GPU, so it is unknown what fits. Write: --device-memory 80G, or plan(device_memory='80G')"


def _named(row: Row | None) -> str:
    return "none of these" if row is None else row.strategy


def _unit(values: Sequence[int]) -> tuple[int, str]:
    largest = max(values, default=0)
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB") if largest >= 2**20 else (2**10, "KiB")


def size_text(value: int) -> str:
    """Bytes as text, such as 1.5 GiB."""
    scale, unit = _unit([value])
    return f"{value / scale:.1f} {unit}"
