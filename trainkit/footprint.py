"""What a strategy answers where a plan asks for memory: bytes on device, host and disk, by what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from torch.optim import Optimizer

__all__ = ["Contents", "Footprint", "Held", "Moment", "Weight", "undivided"]


@dataclass(frozen=True)
class Weight:
    """A parameter, without its values.

    Attributes:
        numel: its elements.
        itemsize: bytes of one, in the precision of the run.
        trained: it gets gradients.
        state: bytes of the optimizer's state for it, where the parameter is stepped as it is.
    """

    numel: int
    itemsize: int
    trained: bool
    state: int = 0

    @property
    def nbytes(self) -> int:
        """Of the parameter."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Contents:
    """What a run has to keep, whichever strategy keeps it.

    Attributes:
        weights: the parameters, each once.
        flat_slots: tensors that the optimizer keeps for each one, where it steps flat float32 parts of them.
        buffers: bytes of the module's buffers.
        stored_buffers: bytes of those that a checkpoint has.
        optimizers: over parameters without values.
        window: micro-batches in an update.
        stored_frozen: a checkpoint has frozen parameters too, which it has not of a model with PEFT adapters.
    """

    weights: tuple[Weight, ...]
    flat_slots: int = 0
    buffers: int = 0
    stored_buffers: int = 0
    optimizers: tuple[Optimizer, ...] = ()
    window: int = 1
    stored_frozen: bool = True

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
    """Bytes by what they are for.

    Attributes:
        parameters: and the module's buffers.
        gradients: whatever they are in at that moment.
        optimizer: the optimizer's state.
        masters: float32 copies that are updated in the parameters' stead.
        buffers: that gradients and parameters travel in.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class Moment:
    """What a process holds at one moment of an update.

    Attributes:
        device: in the memory of its device.
        host: in that of its machine. On the CPU the two are one memory.
        reserved: some of it is not written to yet, which a GPU has to have all the same, and a host not.
    """

    device: Held
    host: Held = field(default_factory=Held)
    reserved: bool = False


@dataclass(frozen=True)
class Footprint:
    """What one process holds under a strategy.

    Attributes:
        name: of the strategy, and of where it puts things.
        moments: the moments of an update that can be the largest, by name. ``"update"`` is that of the optimizer's step.
        checkpoint: bytes of tensors in a checkpoint, which all processes write together.
        disk: bytes on NVMe.
        divides_layers: what ``configure_model`` makes is divided as it is made.
    """

    name: str
    moments: Mapping[str, Moment]
    checkpoint: int
    disk: int = 0
    divides_layers: bool = False

    @property
    def device(self) -> Held:
        """The most on the device."""
        return max((moment.device for moment in self.moments.values()), key=lambda held: held.total)

    @property
    def host(self) -> Held:
        """The most on the host, beside the device."""
        return max((moment.host for moment in self.moments.values()), key=lambda held: held.total)

    @property
    def together(self) -> Held:
        """The most of both at a time, which is what there is on the CPU."""
        sums = (moment.device + moment.host for moment in self.moments.values() if not moment.reserved)
        return max(sums, key=lambda held: held.total)


def undivided(name: str, contents: Contents) -> Footprint:
    """What a process holds that has all of it on its device.

    Args:
        name: of the strategy.
        contents: of the model and its optimizer.
    """
    state = sum(weight.state for weight in contents.weights)
    held = Held(
        parameters=sum(weight.nbytes for weight in contents.weights) + contents.buffers,
        gradients=sum(weight.nbytes for weight in contents.trained),
        optimizer=state,
    )
    stored = held.gradients + state + contents.stored_bare  # gradients are as large as what is trained
    return Footprint(name, {"update": Moment(held)}, checkpoint=stored)
