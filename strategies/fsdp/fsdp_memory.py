"""The memory of a process under `FSDPStrategy`, for `Trainer.plan`."""

from __future__ import annotations

from trainkit.footprint import Contents, Footprint, Held, Moment

__all__ = ["footprint"]


def footprint(contents: Contents, shards: int, name: str) -> Footprint:
    """Sharded parameters, gradients and optimizer state, and the largest parameter twice: gathered, and its gradient."""
    trained = sum(weight.nbytes for weight in contents.trained)
    state = sum(weight.state for weight in contents.weights)
    largest = max((weight.nbytes for weight in contents.weights), default=0)
    held = Held(
        parameters=_share(sum(weight.nbytes for weight in contents.weights), shards) + contents.buffers,
        gradients=_share(trained, shards),
        optimizer=_share(state, shards),
        buffers=2 * largest if shards > 1 else 0,
    )
    return Footprint(name, {"update": Moment(held)}, checkpoint=trained + state + contents.stored_bare)


def _share(total: int, shards: int) -> int:
    return -(-total // shards)
