"""`Saving`: the part of an `Accelerator` that writes weights and objects to files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.accelerator.in_precision import without_wrappers
from trainkit.checkpoint.plain_files import shard_size, write_object, write_weights
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.remote import remote_sync
from trainkit.checkpoint.tensor_file import FiniteCheck
from trainkit.console import notice, shortened, warn
from trainkit.distributed.world import World
from trainkit.errors import CheckpointWriteError, ConfigurationError
from trainkit.optim.parameter_names import clean_names, without_checkpoint_wrapper
from trainkit.paths import local_path
from trainkit.state.model import capture_model
from trainkit.state.pretrained import adapter_folders
from trainkit.state.training_objects import configurations
from trainkit.strategy import Strategy
from trainkit.tagged_json.tensors import is_sharded_tensor

__all__ = ["Saving", "VerbGroup", "refuse_pickle"]

_OF_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


class Saving:
    """Writes weights as safetensors, and objects as safetensors or JSON.

    Args:
        strategy: knows the processes, and gathers sharded parameters.
        models: the prepared models, without wrappers.
    """

    def __init__(self, strategy: Strategy, models: Sequence[nn.Module] = ()) -> None:
        self._strategy, self._models = strategy, models

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to a file, on the main process only.

        Raises:
            UnsavableError: a value cannot be stored; the message names the path to it.
            CheckpointWriteError: the file cannot be written.
            ConfigurationError: wrong arguments; or a state dict without values, of a model that is sharded.
        """
        refuse_pickle("save", safe_serialization)
        if not isinstance(f, str | PathLike):
            raise ConfigurationError(
                f"save(obj, f): f must be the path of a file, not {f!r}. For example: save(obj, 'state.json')"
            )
        if not self._strategy.is_main_process:
            return
        if self._strategy.shards_parameters and isinstance(obj, Mapping):
            self._refuse_without_values(obj)
        write_object(Path(f), obj)
        if str(f).endswith(_OF_PICKLES):
            notice(
                f"{f} is not a pickle file, despite its name. Read it with trainkit.utils.load, or as a safetensors file if it "
                "contains tensors by name."
            )

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole state of a model, prepared or not.

        With sharded parameters it is collective, and empty on all but the main process.
        """
        model = without_wrappers(model, self._strategy)
        placeholders = self._strategy.exported_weights(model)
        sharded = any(is_sharded_tensor(tensor) for tensor in placeholders.values())
        if sharded:
            VerbGroup(self._strategy.world, "get_state_dict").wait()
        state = capture_model(model, placeholders=placeholders)
        tensors = _on_host(state.tensors) if sharded else state.tensors
        if sharded and not self._strategy.is_main_process:
            return {}
        found = {**state.extra, **tensors, **{alias: tensors[name] for alias, name in state.aliases.items()}}
        order = clean_names(model).values()
        return {name: found[name] for name in order if name in found}  # a lazy parameter has no values yet

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model, prepared or not, or only its PEFT adapters. Collective; the main process writes.

        Raises:
            CheckpointWriteError: the folder cannot be written.
            ConfigurationError: an adapter of a method whose parameters only PEFT can tell; `safe_serialization=False`.
        """
        refuse_pickle("save_model", safe_serialization)
        folder = local_path(save_directory, "save_directory")
        world, limit = self._strategy.world, shard_size(max_shard_size)
        group, model = VerbGroup(world, "save_model"), without_wrappers(model, self._strategy)
        placeholders = self._strategy.exported_weights(model)
        if any(is_sharded_tensor(tensor) for tensor in placeholders.values()):
            group.wait()  # they are gathered from all processes
        state = capture_model(model, placeholders=placeholders)
        files, adapters, rank = configurations(state.configs), adapter_folders(state), world.rank
        checks = [FiniteCheck(dict.fromkeys(tensors, True)) for tensors, _ in adapters.values()] or [FiniteCheck(state.trained)]

        def write() -> None:
            for (where, (tensors, config)), check in zip(adapters.items(), checks, strict=False):
                write_weights(
                    folder / where,
                    tensors,
                    {"adapter_config.json": config},
                    max_shard_size=sys.maxsize,
                    stem="adapter_model",
                    rank=rank,
                    check=check,
                )
            if not adapters:
                write_weights(folder, state.tensors, files, max_shard_size=limit, rank=rank, check=checks[0])

        # written before waiting for the other processes, so that the files are there even if those never come
        run_on_all_ranks(group, write, CheckpointWriteError)
        if found := [name for check in checks for name in check.found]:
            warn(f"save_model: parameters in {folder} are not finite: {shortened(found)}.")
        if world.is_main:
            remote_sync.add_log_folder(folder)
            remote_sync.finish()

    def _refuse_without_values(self, state: Mapping[Any, Any]) -> None:
        """Refuse the `state_dict()` of a sharded model: its tensors have no elements.

        Raises:
            ConfigurationError: it is one.
        """
        for model in self._models:
            placeholders = self._strategy.exported_weights(model)
            for name, parameter in model.named_parameters():
                whole, given = placeholders.get(id(parameter)), state.get(without_checkpoint_wrapper(name))
                if whole is not None and whole.numel() and isinstance(given, Tensor) and not given.numel():
                    raise ConfigurationError(
                        f"save(): {name!r} has no values in this state dict, because the parameters are sharded over the "
                        "processes. Gather them: accelerator.save(accelerator.get_state_dict(model), f), with get_state_dict "
                        "on all processes."
                    )


class VerbGroup:
    """The processes in one verb: a process that calls another verb is an error instead of a wait.

    It is a `trainkit.checkpoint.ranks.Group`.

    Args:
        world: the processes.
        verb: what the user has called.
    """

    def __init__(self, world: World, verb: str) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._verb = world, verb

    def exchange(self, value: Any) -> list[Any]:
        """The value of each process, in the order of the ranks.

        Raises:
            CollectiveError: another process called another verb.
        """
        if self._world.channel is None:  # threads, whose own exchange finds that out
            return self._world.exchange(value)
        return CollectiveChecks.of(self._world).exchange(self._verb, value)

    def wait(self) -> None:
        """Wait until all processes have called the verb.

        Raises:
            CollectiveError: another process called another verb.
        """
        self.exchange(None)


def refuse_pickle(verb: str, safe_serialization: bool) -> None:
    """Refuse `safe_serialization=False`.

    Raises:
        ConfigurationError: it is `False`.
    """
    if not safe_serialization:
        raise ConfigurationError(f"{verb}(safe_serialization=False) is not supported: a pickle can run code. Remove it.")


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sharded tensors gathered to the main process's host memory, one at a time. Collective."""
    found = {}
    for name, tensor in tensors.items():
        if is_sharded_tensor(tensor):
            values = cast(Any, tensor).collect(0)
            tensor = tensor if values is None else values.cpu()
        found[name] = tensor
    return found
