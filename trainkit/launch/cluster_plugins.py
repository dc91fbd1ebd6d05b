"""Cluster environments among a Trainer's `plugins`: objects of other packages that know the ranks, such as Ray's."""

from __future__ import annotations

from typing import Any

from trainkit.distributed.world import Ranks
from trainkit.errors import ConfigurationError

__all__ = ["check_cluster_environments", "take_cluster_environments"]


def take_cluster_environments(arguments: dict[str, Any]) -> list[Any]:
    """Remove `plugins` from a Trainer's arguments, and return them, if all of them are cluster environments.

    Other plugins stay, and are refused with all other arguments that a Trainer does not have.
    """
    plugins = arguments.get("plugins")
    plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
    if not all(callable(getattr(plugin, name, None)) for plugin in plugins for name in ("world_size", "global_rank")):
        return []
    arguments.pop("plugins", None)
    return list(plugins)


def check_cluster_environments(environments: list[Any], ranks: Ranks) -> None:
    """Compare the ranks of cluster environments with those of this process, which its launcher has set.

    Raises:
        ConfigurationError: They differ.
    """
    world = ranks.world
    ours = {"world_size": world.size, "global_rank": world.rank, "local_rank": world.local_rank, "node_rank": world.node}
    for environment in environments:
        theirs = {name: getattr(environment, name)() for name in ours if hasattr(environment, name)}
        if any(theirs[name] != ours[name] for name in theirs):
            here = ", ".join(f"{name}={ours[name]}" for name in theirs)
            there = ", ".join(f"{name}={value}" for name, value in theirs.items())
            raise ConfigurationError(
                f"plugins: {type(environment).__name__}() has {there}, but for trainkit this process has {here}. A Trainer "
                "reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: set them before you create it."
            )
