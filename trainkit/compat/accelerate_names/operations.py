"""What Accelerate's functions do on several processes: exchange tensors and objects, seed, show one progress bar.

They use the process's `trainkit.Accelerator`; of several, the last one, if it has prepared something. A single process
needs none.
"""

from __future__ import annotations

from typing import Any

import torch
from tqdm.auto import tqdm as _tqdm

from trainkit.accelerator.processes import gathering, rank_and_size
from trainkit.checks import is_whole
from trainkit.console import prints_here, with_article
from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.launch.environment import runtime_is_loaded
from trainkit.launch.joining import joined_world
from trainkit.nested import move
from trainkit.rng import seed_everything, seed_process

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
    "tqdm",
    "wait_for_everyone",
]


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all ranks, as `Accelerator.gather` does. Collective.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts; the same containers on all ranks.

    Raises:
        ConfigurationError: No `Accelerator` was created, or an item is not a tensor.
        CollectiveError: Containers, shapes or dtypes differ between ranks.
    """
    return gathering("gather").gather(tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce tensors over all ranks, as `Accelerator.reduce` does; by default the mean, as in Accelerate. Collective.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts; with the same shapes on all ranks.
        reduction: `"mean"`, `"sum"`, `"max"`, or `"none"`, which only scales.
        scale: Multiplies the result.

    Raises:
        ConfigurationError: As in `gather`; or the reduction is unknown.
        CollectiveError: As in `gather`.
    """
    return gathering("reduce").reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors to the largest size of all ranks, as `Accelerator.pad_across_processes` does. Collective.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts.
        dim: The dimension to pad.
        pad_index: The value of the padding.
        pad_first: Pad at the start instead of the end.

    Raises:
        ConfigurationError: As in `gather`.
        CollectiveError: As in `gather`.
    """
    return gathering("pad_across_processes").pad_across_processes(tensor, dim, pad_index, pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcast tensors from one rank to all, on the device. Collective.

    The argument is not changed: use the result. With XLA's SPMD, which has one process, the result is the argument.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts; with the same shapes and dtypes on all ranks.
        from_process: The rank to broadcast from.

    Raises:
        ConfigurationError: As in `gather`; or the rank is unknown, or differs between processes.
        CollectiveError: As in `gather`.
    """
    part = gathering("broadcast")
    size = part.world.size
    if not is_whole(from_process) or not 0 <= from_process < size:
        raise ConfigurationError(f"broadcast(from_process={from_process!r}): expected a rank from 0 to {size - 1}.")
    return part.broadcast(tensor, from_process)


def wait_for_everyone() -> None:
    """Wait until all processes have called it, as `Accelerator.wait_for_everyone` does. Collective.

    Raises:
        ConfigurationError: As in `gather`.
        CollectiveError: As in `gather`.
    """
    gathering("wait_for_everyone").wait("wait_for_everyone")


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: None = None) -> Any:
    """Move a batch to a device: its tensors and other objects with a `.to(device)`. Prepared loaders already do this.

    Args:
        tensor: Tensors in lists, tuples, dicts and dataclasses.
        device: A `torch.device`, its name or its index.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Only `None`.

    Raises:
        UnsupportedArgumentError: `skip_keys`.
    """
    if skip_keys is not None:
        raise UnsupportedArgumentError(
            "send_to_device(skip_keys=...) is not supported. Remove these keys from the batch first."
        )
    return move(tensor, torch.device(device), non_blocking)


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
    return [element for elements in world.exchange_user_objects(list(object)) for element in elements]


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


def _check(verb: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise ConfigurationError(f"{verb} takes a list, not {with_article(type(value).__name__)}. Write: {verb}([value])")


def _world(verb: str) -> World:
    """The world, once all ranks have called the function."""
    if runtime_is_loaded():
        raise UnsupportedArgumentError(f"{verb} is not supported on XLA. Exchange tensors: accelerator.gather(tensor)")
    world = joined_world()
    CollectiveChecks.of(world).wait(verb)
    return world


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed every generator, as `seed_everything` does.

    Args:
        seed: An integer from 0 to 2**64 - 1, the same on all ranks.
        device_specific: Seed the global generators of rank r with `seed + r`, so that random numbers differ between ranks.
            Prepared loaders still use `seed`: each micro-batch has its own random numbers.
        deterministic: Also call `torch.use_deterministic_algorithms(True)`.
    """
    seed_everything(seed)
    if device_specific:
        seed_process(seed + rank_and_size()[0])
    if deterministic:
        torch.use_deterministic_algorithms(True)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown in the main process only. Create the `Accelerator` first.

    Args:
        *args: The arguments of `tqdm.auto.tqdm`.
        main_process_only: `False`: each process shows its own bar.
        **kwargs: The arguments of `tqdm.auto.tqdm`.

    Raises:
        ConfigurationError: The first argument is `True` or `False`, as in old versions of Accelerate.
    """
    if args and isinstance(args[0], bool):
        raise ConfigurationError(f"tqdm({args[0]}, ...): write tqdm(..., main_process_only={args[0]}).")
    hidden = main_process_only and not prints_here()
    return _tqdm(*args, **{**kwargs, "disable": True} if hidden else kwargs)
