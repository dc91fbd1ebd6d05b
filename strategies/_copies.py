"""Modules that every rank has a copy of: check that the copies match, and keep their buffers equal."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.distributed.world import World
from trainkit.errors import ModuleError
from trainkit.strategies._reduction import broadcast

__all__ = ["Buffers", "check_modules_match"]


class Buffers:
    """The buffers of modules. Looks them up at each use, because a module may replace a buffer."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._world: World | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, module: nn.Module, world: World) -> None:
        """Add the buffers of a module that every rank has a copy of."""
        self._world = world
        self._places += [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]

    def present(self) -> list[Tensor]:
        """The current buffers, without those that are `None`."""
        found = [owner.get(name) for owner, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    def sync(self) -> None:
        """Broadcast the buffers from rank 0."""
        present = self.present()
        if present and self._world is not None:
            with self._world.collectives:
                broadcast(present)


def check_modules_match(module: nn.Module, world: World, backend: str) -> None:
    """Check that the modules of all ranks have parameters and buffers of the same names, shapes and dtypes. Collective.

    Args:
        module: the module of this rank.
        world: the ranks of the run.
        backend: name of the backend, for the error message.

    Raises:
        ModuleError: the modules differ, or a parameter or buffer is uninitialized.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ModuleError(
            f"{lazy[0]} is uninitialized, but {backend} needs the shapes of all parameters and buffers. Run a batch through "
            "the module in configure_model: self(batch)"
        )
    mine = [f"{name}: {str(t.dtype).removeprefix('torch.')}{list(getattr(t, 'ds_shape', t.shape))}" for name, t in named]
    by_rank = world.exchange(mine)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            differing = [line for line in [*by_rank[0], *other] if (line in by_rank[0]) != (line in other)]
            raise ModuleError(
                f"rank 0 and rank {rank} have different modules, but all ranks must have the same module. Different: "
                f"{'; '.join(differing[:4]) or 'the order of parameters'}. Build the module the same way on all ranks."
            )
