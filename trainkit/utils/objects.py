"""Exchange objects between processes: `gather_object`, `broadcast_object_list`."""

from __future__ import annotations

from typing import Any

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.console import with_article
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.launch.environment import runtime_is_loaded
from trainkit.launch.joining import joined_world

__all__ = ["broadcast_object_list", "gather_object"]


def gather_object(object: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Concatenate the lists of all ranks, in the order of the ranks, on all ranks. Collective.

    Args:
        object: A list; its length may differ between ranks. Elements are pickled, between processes of the same run.

    Returns:
        One list with all elements.

    Raises:
        ConfigurationError: The argument is not a list or tuple, or no `Accelerator` was created.
        UnsupportedArgumentError: On XLA.
    """
    _check("gather_object", object, list | tuple)
    world = _world("gather_object")
    return [element for own in world.exchange_user_objects(list(object)) for element in own]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Broadcast the elements of a list from one rank, in place. Collective.

    Args:
        object_list: A list of the same length on all ranks. Elements are pickled, as in `gather_object`.
        from_process: The rank to broadcast from.

    Returns:
        The list.

    Raises:
        ConfigurationError: The argument is not a list, lengths differ, or the rank is unknown.
        UnsupportedArgumentError: On XLA.
    """
    _check("broadcast_object_list", object_list, list)
    world = _world("broadcast_object_list")
    lengths = world.exchange([len(object_list), from_process])
    if any(said != lengths[0] for said in lengths):
        shown = ", ".join(f"rank {rank}: {length} from {source}" for rank, (length, source) in enumerate(lengths))
        raise ConfigurationError(f"broadcast_object_list needs the same length and from_process on all ranks, got {shown}.")
    if not isinstance(from_process, int) or not 0 <= from_process < world.size:
        raise ConfigurationError(
            f"broadcast_object_list(from_process={from_process!r}): expected a rank from 0 to {world.size - 1}."
        )
    mine = object_list if world.rank == from_process else None
    object_list[:] = world.exchange_user_objects(mine)[from_process]
    return object_list


def _check(verb: str, given: Any, kind: Any) -> None:
    if not isinstance(given, kind):
        raise ConfigurationError(f"{verb} takes a list, not {with_article(type(given).__name__)}. Write: {verb}([value])")


def _world(verb: str) -> World:
    """The world, once all ranks have called the function."""
    if runtime_is_loaded():
        raise UnsupportedArgumentError(f"{verb} is not supported on XLA. Exchange tensors: accelerator.gather(tensor)")
    world = joined_world()
    CollectiveChecks.of(world).wait(verb)
    return world
