"""Weights and objects of own loops in files: ``save``, ``save_model``, ``get_state_dict``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.checkpoint.weights import shard_size, write_weights
from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import CheckpointWriteError, ConfigurationError
from trainkit.paths import local_path
from trainkit.state.adapters import adapter_folders
from trainkit.state.model import capture_model, clean_names
from trainkit.state.names import without_checkpoint_wrapper
from trainkit.state.parts import configurations
from trainkit.state.single_file import write_object
from trainkit.tagged_json.tensors import is_sharded_tensor

if TYPE_CHECKING:
    from trainkit.accelerator import Accelerator

__all__ = ["SavingVerbs", "meet", "refuse_pickle"]

_OF_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


class SavingVerbs:
    """The verbs of :class:`trainkit.Accelerator` that write weights and objects."""

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to a file, on the main process; other processes do nothing, and need not call it.

        Tensors by name, such as a state dict, become a plain safetensors file, which ``safetensors`` and ``from_pretrained``
        open; anything else becomes JSON, in which tuples, sets, numpy arrays and the like keep their types; tensors within it
        make it a safetensors file that holds the JSON. A tensor that has several names (tied weights) is stored once, under the
        first. ``trainkit.utils.load(f)`` reads all of it back. The file is complete under its name or not there.

        It serves as ``save_function`` of ``save_pretrained``.

        Args:
            obj: of numbers, text, tensors, arrays, lists, dicts, …; of objects their ``state_dict()``.
            f: the file; it may have any name. Folders above it are made.
            safe_serialization: only ``True``: what pickle loads can run code.

        Raises:
            UnsavableError: something in it cannot be stored; names the path to it.
            CheckpointWriteError: the file cannot be written; what was there is untouched.
            ConfigurationError: ``safe_serialization=False``; ``f`` is no path; or a state dict of a model that ZeRO-3 has
                divided (:meth:`get_state_dict` has the values).
        """
        refuse_pickle("save", safe_serialization)
        if not isinstance(f, str | PathLike):
            raise ConfigurationError(f"save(obj, f): f is the path of a file, not {f!r}. For example: save(obj, 'state.json')")
        accelerator = self._accelerator()
        if not accelerator.is_main_process:
            return
        if accelerator.strategy.sharded_parameters and isinstance(obj, Mapping):
            _refuse_without_values(accelerator, obj)
        write_object(Path(f), obj)
        if str(f).endswith(_OF_PICKLES):
            notice(
                f"{f} is no pickle, whatever its name says: read it by trainkit.utils.load, or as a safetensors file if it "
                "holds tensors by name."
            )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state of a model, as :meth:`save_model` writes it: parameters and buffers by the names that the user knows.

        Under ZeRO all processes call it, and the main one gets it, on the host; the others get an empty dict. Otherwise each
        process has it, and nothing is copied. For ``save_pretrained(state_dict=accelerator.get_state_dict(model))``.

        Args:
            model: prepared or not.
            unwrap: no effect: names have no ``module.`` in front.
        """
        accelerator = self._accelerator()
        inner = accelerator.unwrap_model(model)
        standins = accelerator.strategy.exported_weights(inner)
        divided = any(is_sharded_tensor(tensor) for tensor in standins.values())
        if divided:
            meet(accelerator.world, "get_state_dict")
        state = capture_model(inner, standins=standins)
        tensors = _gathered(state.tensors) if divided else state.tensors
        if divided and not accelerator.is_main_process:
            return {}
        found = {**state.extra, **tensors, **{alias: tensors[name] for alias, name in state.aliases.items()}}
        order = clean_names(inner).values()
        return {name: found[name] for name in order if name in found}  # a lazy parameter has no values yet

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as plain safetensors, which ``from_pretrained`` opens if it is a ``transformers`` model.

        Of one with PEFT adapters these are written, and not the base: a folder for ``PeftModel.from_pretrained(base, folder)``.
        Of several processes all call it, and the main one writes; when it returns the files are there for all.

        Args:
            model: prepared or not; with a ``Trainer`` any module within its module, in ``fit`` or after it:
                ``trainer.accelerator.save_model(module.model, folder)``.
            save_directory: the folder to write to.
            max_shard_size: larger models are written to several files, with an index; adapters never are.
            safe_serialization: only ``True``: what pickle loads can run code.

        Raises:
            CheckpointWriteError: the folder cannot be written.
            ConfigurationError: an adapter of a method whose parameters only PEFT can tell; ``safe_serialization=False``.
        """
        refuse_pickle("save_model", safe_serialization)
        folder = local_path(save_directory, "save_directory")
        accelerator = self._accelerator()
        inner, size = accelerator.unwrap_model(model), shard_size(max_shard_size)
        standins = accelerator.strategy.exported_weights(inner)
        if any(is_sharded_tensor(tensor) for tensor in standins.values()):
            meet(accelerator.world, "save_model")  # they are gathered from all
        state = capture_model(inner, standins=standins)
        files, adapters = configurations(state.configs), adapter_folders(state)
        rank = accelerator.world.rank

        def write() -> None:
            for where, (tensors, config) in adapters.items():
                beside = {"adapter_config.json": config}
                write_weights(folder / where, tensors, beside, max_shard_size=sys.maxsize, stem="adapter_model", rank=rank)
            if not adapters:
                write_weights(folder, state.tensors, files, max_shard_size=size, rank=rank)

        # written before the others are waited for: it is there even if they never come
        run_on_all_ranks(_Met(accelerator.world, "save_model"), write, CheckpointWriteError)

    def _accelerator(self) -> Accelerator:
        return cast("Accelerator", self)


class _Met:
    """The processes, which meet in a verb: one that comes to another verb is found out instead of waited for."""

    def __init__(self, world: World, verb: str) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._verb = world, verb

    def exchange(self, value: Any) -> list[Any]:
        if self._world.channel is None:  # threads, which find it out by themselves
            return self._world.exchange(value)
        return CollectiveChecks.of(self._world).exchange(self._verb, value)


def meet(world: World, verb: str) -> None:
    """Wait until all processes have called a verb.

    Raises:
        CollectiveError: another one has called another.
    """
    _Met(world, verb).exchange(None)


def refuse_pickle(verb: str, safe_serialization: bool) -> None:
    """Refuse to write what runs code when it is read.

    Raises:
        ConfigurationError: ``safe_serialization=False``.
    """
    if not safe_serialization:
        raise ConfigurationError(f"{verb}(safe_serialization=False) is not offered: a pickle can run code. Leave it out.")


def _refuse_without_values(accelerator: Accelerator, state: Mapping[Any, Any]) -> None:
    """Refuse what a divided model's own ``state_dict`` returns: tensors without elements, which nobody would notice.

    Raises:
        ConfigurationError: it is one.
    """
    for model in map(accelerator.unwrap_model, accelerator._models):
        standins = accelerator.strategy.exported_weights(model)
        for name, parameter in model.named_parameters():
            whole, given = standins.get(id(parameter)), state.get(without_checkpoint_wrapper(name))
            if whole is not None and whole.numel() and isinstance(given, Tensor) and not given.numel():
                raise ConfigurationError(
                    f"save(): {name!r} has no values in this state dict, as the parameters are divided over the processes. "
                    "Gather them: accelerator.save(accelerator.get_state_dict(model), f), with get_state_dict on all processes."
                )


def _gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ShardedTensor tensors whole on the main process's host, one after the other; collective."""
    found = {}
    for name, tensor in tensors.items():
        if is_sharded_tensor(tensor):
            values = cast(Any, tensor).collect(0)
            tensor = tensor if values is None else values.cpu()
        found[name] = tensor
    return found
