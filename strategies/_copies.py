"""Modules of which each process has one: that they are alike, and that their buffers stay so."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.distributed.world import World
from trainkit.errors import ModuleError
from trainkit.strategies._reduction import broadcast

__all__ = ["Buffers", "refuse_unlike"]


class Buffers:
    """The buffers of modules, wherever these keep them at the time: a module may replace one."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._world: World | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, module: nn.Module, world: World) -> None:
        """Those of a module too, of which each of the processes has one."""
        self._world = world
        self._places += [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]

    def present(self) -> list[Tensor]:
        """Those that there are now."""
        found = [owner.get(name) for owner, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    def sync(self) -> None:
        """Rank 0's values, on every process."""
        present = self.present()
        if present and self._world is not None:
            with self._world.collectives:
                broadcast(present)


def refuse_unlike(module: nn.Module, world: World, backend: str) -> None:
    """Refuse modules that are not alike on all processes; collective.

    Args:
        module: this process's.
        world: the processes.
        backend: that must know the shapes of parameters, for the message.

    Raises:
        ModuleError: they differ, or have parameters without a shape.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ModuleError(
            f"{lazy[0]} has no shape yet, and {backend} must know it on all processes. Run a batch through the module first, "
            "in configure_model."
        )
    mine = [f"{name}: {str(t.dtype).removeprefix('torch.')}{list(getattr(t, 'ds_shape', t.shape))}" for name, t in named]
    said = world.exchange(mine)
    for rank, other in enumerate(said):
        if other != said[0]:
            differing = [line for line in [*said[0], *other] if (line in said[0]) != (line in other)]
            raise ModuleError(
                f"rank 0 and rank {rank} have different modules, while each must have a copy of the same: "
                f"{'; '.join(differing[:4]) or 'the order of parameters'}. Build it the same way on all processes."
            )
