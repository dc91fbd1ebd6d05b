"""The memory of `FSDPStrategy`: bytes on the device and on the host.

In addition to a rank's shards of parameters, gradients and optimizer state, torch's `fully_shard` allocates:

- from the forward to the backward, the whole parameters of the root; those of the unit that runs; and the result of another
  all-gather: in the forward that of the same unit, in the backward that of the next one, which is gathered in advance;
- in the backward, the whole gradients of the root, those of the unit that runs, and the reduce-scatter input of
  the unit before;
- at the end of the backward, the whole gradients of the root, and their copy as its reduce-scatter input;
- in a step of an optimizer that needs whole parameters, such as Muon, one of them with its gradient and its state.

`benchmarks/plan.py` compares these numbers with real runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainkit.strategies._whole_steps import largest_gathered
from trainkit.strategies.fsdp.sharded_models import FSDPOptions, refuse_optimizer
from trainkit.strategies.fsdp.units import choose_units, find_ignored_parameters
from trainkit.strategy import Contents, Footprint, Held, StepMemory, Weight, footprint_on_one_device, in_backward

__all__ = ["footprint"]

_MASTER = 4  # bytes of a float32 element


def footprint(contents: Contents, options: FSDPOptions, processes: int, name: str) -> Footprint:
    """See `trainkit.Strategy.footprint`. Parameters of 16 bits have float32 shards, unless the user gave `mixed_precision`.

    Raises:
        OptimizerError: FSDP does not support an optimizer.
        ConfigurationError: `wrap` or `ignored_modules` matches no module.
    """
    for optimizer in contents.optimizers:
        refuse_optimizer(optimizer)
    sizes = _ShardedRun(contents, options)
    offloads = options.offload_params is not None
    if processes == 1 and not (offloads or sizes.masters or options.mixed_precision):
        return footprint_on_one_device(name, contents)
    shards = max(1, processes // options.replicas)
    kept, gradients = sizes.shards(shards)
    stays = sizes.not_sharded()
    device, host = (stays, kept) if offloads else (stays + kept, Held())
    here, there = (Held(), host + gradients) if offloads else (gradients, host)
    unit, root = sizes.in_reductions(shards)
    gathered = largest_gathered(sizes.stored)
    moments = {
        "update": StepMemory(device + here + Held(buffers=gathered), there),
        "forward": StepMemory(device + sizes.in_forward(shards), host),
        "reduce a unit": StepMemory(device + here + unit, there),
        "reduce the root": StepMemory(device + here + root, there),
        **sizes.in_backward(device, there, shards, offloads),
    }
    stored = sizes.stored
    checkpoint = _nbytes(stored.trained) + _state(stored.weights) + stored.stored_bare
    return Footprint(f"{name}, both on cpu" if offloads else name, moments, checkpoint)


@dataclass(frozen=True)
class _WholeUnit:
    """Bytes of the whole tensors of a unit: its parameters, its gradients, and its reduce-scatter input."""

    parameters: int = 0
    gradients: int = 0
    reduced: int = 0


class _ShardedRun:
    """The parts of a run that `fully_shard` allocates.

    Args:
        contents: The contents of the run, in its precision.

    Attributes:
        masters: Parameters of 16 bits have float32 shards.
        stored: The contents with the parameters that the shards hold.
        sharded: The sharded parameters.
        ignored: The parameters that are whole on each rank.
        root: The parameters that belong to no unit.
        unit: The largest unit.
        all: Everything that is sharded.
    """

    def __init__(self, contents: Contents, options: FSDPOptions) -> None:
        self._contents, self._options, policy = contents, options, options.mixed_precision
        self.masters = policy is None and any(weight.itemsize < _MASTER for weight in contents.weights)
        self.stored = _with_masters(contents) if self.masters else contents
        self._compute = _itemsize(policy.param_dtype) if policy else None
        self._reduce = _MASTER if self.masters else _itemsize(policy.reduce_dtype) if policy else None
        units, ignored = _members(contents, options)
        every = set(range(len(contents.weights)))
        self.sharded, self.ignored = self._select_weights(every - ignored), self._select_weights(ignored)
        self.all = self._unit(every - ignored)
        self.root = self._unit(every - ignored.union(*units))
        made = [self._unit(unit - ignored) for unit in units]
        self.unit = max(made, key=lambda unit: unit.parameters, default=_WholeUnit())

    def _select_weights(self, indices: set[int]) -> tuple[Weight, ...]:
        return tuple(self.stored.weights[i] for i in sorted(indices))

    def _unit(self, indices: set[int]) -> _WholeUnit:
        listed, parts = [self._contents.weights[i] for i in indices], self._options.tensor_parallel
        trained = [weight for weight in listed if weight.trained]
        reduced = sum(weight.numel * (self._reduce or self._compute or weight.itemsize) for weight in trained)
        return _WholeUnit(
            self._count_compute_bytes(listed) // parts, self._count_compute_bytes(trained) // parts, reduced // parts
        )

    def _count_compute_bytes(self, weights: list[Weight]) -> int:
        return sum(weight.numel * (self._compute or weight.itemsize) for weight in weights)

    def shards(self, shards: int) -> tuple[Held, Held]:
        """A rank's parameters and optimizer state, and its gradients."""
        weights = sum(-(-weight.nbytes // shards) for weight in self.sharded)
        gradients = sum(-(-weight.nbytes // shards) for weight in self.sharded if weight.trained)
        optimizer = -(-_state(self.sharded) // shards)
        kept = Held(masters=weights, optimizer=optimizer) if self.masters else Held(parameters=weights, optimizer=optimizer)
        return kept, Held(gradients=gradients)

    def not_sharded(self) -> Held:
        """Buffers, and the parameters that are whole on each rank, with their gradients and optimizer state."""
        gradients = _nbytes(weight for weight in self.ignored if weight.trained)
        return Held(self.stored.buffers + _nbytes(self.ignored), gradients, _state(self.ignored))

    @property
    def _accumulates_whole(self) -> bool:
        return self.stored.window > 1 and self._options.accumulate == "once"

    def _count_gathered_bytes(self, shards: int) -> int:
        """Bytes of whole parameters in the backward."""
        groups = self._options.reshard_after_forward
        if groups is False:
            return self.all.parameters
        copies = 2 if shards > 1 else 1
        between = self.all.parameters // groups if groups not in (None, True) else 0
        return self.root.parameters + min(copies * self.unit.parameters, self.all.parameters - self.root.parameters) + between

    def in_forward(self, shards: int) -> Held:
        """What a forward adds."""
        first = 2 * self.root.parameters if shards > 1 else self.root.parameters  # while its result is copied
        activations = max((held for held, gradients in self.stored.profile if not gradients), default=0)
        return Held(buffers=max(first, self._count_gathered_bytes(shards)), activations=activations)

    def in_reductions(self, shards: int) -> tuple[Held, Held]:
        """What the reduction of the last unit, and that of the root, add to all sharded gradients, without activations."""
        root, unit = self.root, self.unit
        waiting = self.all.gradients if self._accumulates_whole else root.gradients + unit.gradients
        late = -(-waiting // shards)  # The shards of these gradients are counted already.
        return (
            Held(gradients=waiting - late, buffers=self._count_gathered_bytes(shards) + unit.reduced),
            Held(gradients=root.gradients - -(-root.gradients // shards), buffers=root.reduced),
        )

    def in_backward(self, device: Held, host: Held, shards: int, offloads: bool) -> dict[str, StepMemory]:
        """The moment with activations."""
        root, unit = self.root, self.unit
        held = device + Held(buffers=self._count_gathered_bytes(shards))
        contents = replace(self.stored, weights=self.sharded)
        if self._accumulates_whole or shards == 1:  # all gradients are whole
            return in_backward(contents, held + Held(buffers=unit.reduced), host)
        parts = max(self.all.gradients, 1) if offloads else shards
        waiting = root.gradients + unit.gradients + unit.reduced
        return in_backward(contents, held, host, shards=parts, waiting=waiting)


def _members(contents: Contents, options: FSDPOptions) -> tuple[list[set[int]], set[int]]:
    """The indices of the weights of each unit, and of the ignored ones."""
    index = {id(parameter): i for i, parameter in enumerate(nn.ModuleList(contents.modules).parameters())}
    units: list[set[int]] = []
    ignored: set[int] = set()
    for module in contents.modules:
        ignored |= {index[id(parameter)] for parameter in find_ignored_parameters(module, options.ignored_modules)}
        taken: set[int] = set()
        for unit in reversed(choose_units(module, options.wrap).values()):  # units inside of units first
            units.append({index[id(parameter)] for parameter in unit.parameters()} - taken)
            taken |= units[-1]
    return units, ignored


def _with_masters(contents: Contents) -> Contents:
    """Contents whose parameters, gradients and optimizer state are float32."""
    weights = tuple(
        replace(weight, itemsize=_MASTER, state=_MASTER * contents.flat_slots * weight.numel if weight.trained else 0)
        for weight in contents.weights
    )
    ratio = _nbytes(weights) / max(_nbytes(contents.weights), 1)
    profile = tuple((activations, round(ratio * gradients)) for activations, gradients in contents.profile)
    return replace(contents, weights=weights, profile=profile)


def _nbytes(weights: Iterable[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def _state(weights: Iterable[Weight]) -> int:
    return sum(weight.state for weight in weights)


def _itemsize(dtype: torch.dtype | None) -> int | None:
    return None if dtype is None else dtype.itemsize
