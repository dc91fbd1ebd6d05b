"""The memory of a strategy: bytes on device, host and disk, by purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from torch import nn
from torch.optim import Optimizer

__all__ = ["Contents", "Footprint", "Held", "StepMemory", "Weight", "in_backward", "unsharded"]


@dataclass(frozen=True)
class Weight:
    """A parameter, without its values.

    Attributes:
        numel: The number of elements.
        itemsize: Bytes of an element in the precision of the run.
        trained: Whether it gets gradients.
        state: Bytes of the optimizer state for it, if the optimizer steps the parameter itself.
    """

    numel: int
    itemsize: int
    trained: bool
    state: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Contents:
    """The parameters, buffers and optimizer state of a run under any strategy.

    Attributes:
        weights: The parameters, each once.
        flat_slots: Tensors of optimizer state per parameter, if the optimizer steps flat float32 parts of them.
        buffers: Bytes of the module's buffers.
        stored_buffers: Bytes of the buffers that a checkpoint contains.
        optimizers: Optimizers of parameters without values.
        window: Micro-batches per optimizer step.
        stored_frozen: Whether a checkpoint contains frozen parameters, as it does for a model without PEFT adapters.
        modules: Modules with these parameters without values, in the same order. Empty: unknown.
        profile: What the forward and backward of a micro-batch add: pairs (bytes of activations, bytes of gradients so far),
            for the moments that can be the peak. Empty: unknown.
    """

    weights: tuple[Weight, ...]
    flat_slots: int = 0
    buffers: int = 0
    stored_buffers: int = 0
    optimizers: tuple[Optimizer, ...] = ()
    window: int = 1
    stored_frozen: bool = True
    modules: tuple[nn.Module, ...] = ()
    profile: tuple[tuple[int, int], ...] = ()

    @property
    def stored_bare(self) -> int:
        """Bytes of frozen parameters and buffers in a checkpoint."""
        frozen = sum(weight.nbytes for weight in self.weights if not weight.trained)
        return self.stored_buffers + (frozen if self.stored_frozen else 0)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The parameters that get gradients."""
        return tuple(weight for weight in self.weights if weight.trained)


@dataclass(frozen=True)
class Held:
    """Bytes by purpose.

    Attributes:
        parameters: Parameters and the module's buffers.
        gradients: Gradients.
        optimizer: Optimizer state.
        masters: Float32 master weights.
        buffers: Communication buffers for gradients and parameters.
        activations: Tensors that a forward and backward create, and the batch.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class StepMemory:
    """The memory of a process at one moment of an optimizer step.

    Attributes:
        device: In device memory.
        host: In host memory. On the CPU the two are one memory.
        reserved: Some of it is not written yet: it counts on a GPU, but not on the host.
    """

    device: Held
    host: Held = field(default_factory=Held)
    reserved: bool = False


@dataclass(frozen=True)
class Footprint:
    """The memory of one process under a strategy.

    Attributes:
        name: The strategy, and what it offloads where.
        moments: The moments of an optimizer step that can be the peak, by name; `"update"` is the step itself, and
            `"backward"` the peak of a forward and backward (`in_backward`).
        checkpoint: Bytes of tensors in a checkpoint, which all processes write together.
        disk: Bytes on NVMe.
        shards_layers: Whether layers are sharded while `configure_model` builds them.
    """

    name: str
    moments: Mapping[str, StepMemory]
    checkpoint: int
    disk: int = 0
    shards_layers: bool = False

    @property
    def device(self) -> Held:
        """The peak on the device."""
        return max((moment.device for moment in self.moments.values()), key=lambda held: held.total)

    @property
    def host(self) -> Held:
        """The peak on the host."""
        return max((moment.host for moment in self.moments.values()), key=lambda held: held.total)

    @property
    def together(self) -> Held:
        """The peak of both together, for the CPU."""
        sums = (moment.device + moment.host for moment in self.moments.values() if not moment.reserved)
        return max(sums, key=lambda held: held.total)


def in_backward(
    contents: Contents, held: Held, host: Held | None = None, *, shards: int = 1, waiting: int = 0, kept: bool = False
) -> dict[str, StepMemory]:
    """The moment `"backward"` of a footprint: the peak of the forward and backward of a micro-batch.

    Args:
        contents: The contents of the run.
        held: What is in device memory during all of it: parameters, optimizer state, buffers, but no gradients.
        host: What is in host memory.
        shards: The number of processes that gradients are sharded over during the backward.
        waiting: With several shards: the most bytes of gradients that are not sharded yet.
        kept: The memory of all gradients is allocated before. It is in an accumulation window of several micro-batches too.

    Returns:
        Nothing if the activations are unknown.
    """
    if not contents.profile:
        return {}
    whole = sum(weight.nbytes for weight in contents.trained)
    before = kept or contents.window > 1
    moments = []
    for activations, so_far in contents.profile:
        sharded = -(-(whole if before else so_far) // shards)
        moments.append((activations, sharded + min(so_far - so_far // shards, waiting)))
    activations, gradients = max(moments, key=sum)
    device = held + Held(gradients=gradients, activations=activations)
    return {"backward": StepMemory(device, host or Held())}


def unsharded(name: str, contents: Contents) -> Footprint:
    """The memory of a process that has everything on its device: `contents` under the strategy `name`."""
    state = sum(weight.state for weight in contents.weights)
    held = Held(parameters=sum(weight.nbytes for weight in contents.weights) + contents.buffers, optimizer=state)
    gradients = sum(weight.nbytes for weight in contents.trained)
    stored = gradients + state + contents.stored_bare  # gradients are as large as the trained parameters
    moments = {"update": StepMemory(replace(held, gradients=gradients)), **in_backward(contents, held)}
    return Footprint(name, moments, checkpoint=stored)
