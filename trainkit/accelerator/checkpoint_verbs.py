"""The verbs of `Accelerator` that write and read files; each is one call of a part."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import nn

from trainkit.accelerator.checkpointing import PARTS, Checkpointing, Loop, Prepared
from trainkit.accelerator.naming import NumberedCheckpoints
from trainkit.accelerator.options import Options
from trainkit.accelerator.saving import Saving, refuse_pickle
from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.names import refuse_unknown
from trainkit.state.training_objects import check_names

__all__ = ["CheckpointVerbs"]


class CheckpointVerbs:
    """The methods of `trainkit.Accelerator` for weights, objects and checkpoints in files.

    Args:
        options: The options of the accelerator.
        prepared: What was prepared.
    """

    def __init__(self, options: Options, prepared: Prepared) -> None:
        self._project = options.project
        self._saving = Saving(options.strategy, prepared.models)
        self._numbered = NumberedCheckpoints(options.project, options.strategy.world)
        self._checkpointing = Checkpointing(options.strategy, self._numbered, prepared, options.resume_loaders)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the loop writes, and how its checkpoints are named."""
        return self._project

    @property
    def project(self) -> ProjectConfiguration:
        """The same as `project_configuration`."""
        return self._project

    @property
    def project_dir(self) -> str | PathLike[str] | None:
        """The folder of the project."""
        return self._project.project_dir

    @property
    def logging_dir(self) -> str | PathLike[str] | None:
        """The folder of trackers that write files."""
        return self._project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with automatic checkpoint naming."""
        return self._project.iteration

    @property
    def run_id(self) -> str:
        """The id of the run in its checkpoints; kept when a checkpoint is restored completely."""
        return self._checkpointing.run_id

    @property
    def registered(self) -> list[Any]:
        """The objects that were registered for checkpointing."""
        return self._checkpointing.registered

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to a file, on the main process; other processes do nothing, and need not call it.

        Tensors by name, such as a state dict, become a plain safetensors file, which `safetensors` and `from_pretrained`
        open. Anything else becomes JSON, in which tuples, sets, numpy arrays and the like keep their types; if it contains
        tensors, a safetensors file that contains the JSON. A tensor with several names (tied weights) is stored once, under
        the first. `trainkit.utils.load(f)` reads all of these. The file is complete or does not exist.

        It can be the `save_function` of `save_pretrained`.

        Args:
            obj: Numbers, text, tensors, arrays, lists, dicts, …; of other objects their `state_dict()`.
            f: The file, with any name. Missing folders are created.
            safe_serialization: Only `True`: a pickle can run code when it is loaded.

        Raises:
            UnsavableError: A value cannot be stored; the message names the path to it.
            CheckpointWriteError: The file cannot be written; an existing file is unchanged.
            ConfigurationError: `safe_serialization=False`; `f` is not a path; or a state dict of a model that ZeRO-3 shards
                (use `get_state_dict`).
        """
        self._saving.save(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a model, with the user's names, as `save_model` writes it.

        With sharded parameters all processes call it; the main process gets it, on the host, and the others an empty dict.
        Otherwise each process gets it, and nothing is copied. Use it as
        `save_pretrained(state_dict=accelerator.get_state_dict(model))`.

        Args:
            model: The model, prepared or not.
            unwrap: No effect: names never begin with `module.`.
        """
        return self._saving.state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as plain safetensors, which `from_pretrained` opens if it is a `transformers` model.

        Of a model with PEFT adapters, only these are written: a folder for `PeftModel.from_pretrained(base, folder)`. All
        processes call it, and the main process writes. When it returns, the files are complete.

        Args:
            model: The model, prepared or not. With a `Trainer`, any module within its module, in `fit` or after it:
                `trainer.accelerator.save_model(module.model, folder)`.
            save_directory: The folder to write to.
            max_shard_size: A larger model is written to several files, with an index. Adapters are always one file.
            safe_serialization: Only `True`: a pickle can run code when it is loaded.

        Raises:
            CheckpointWriteError: The folder cannot be written.
            ConfigurationError: An adapter of a PEFT method whose parameters only PEFT can find; `safe_serialization=False`.
        """
        self._saving.save_model(model, save_directory, max_shard_size, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore the state of these objects too; they need `state_dict` and `load_state_dict`."""
        self._checkpointing.register(*objects)

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **unknown: Any,
    ) -> Path:
        """Save a checkpoint: models, optimizers, schedulers, loss scale, positions of loaders, registered objects.

        An existing checkpoint is replaced when the new one is complete, unless its parameters are finite and the new ones are
        not: the new one is then `<output_dir>-nonfinite`, and a warning says so. Inside an accumulation window, the position at
        the start of the window is saved. All processes call it, and each writes its part.

        With `ProjectConfiguration(automatic_checkpoint_naming=True)` the folder is `project_dir/checkpoints/checkpoint_N`,
        and `output_dir` has no effect, as in Accelerate. Existing checkpoints of an earlier start are then an error, unless
        this run has resumed from them (`load_state()`). When the new one is complete, the oldest of the run beyond
        `total_limit` are removed.

        Args:
            output_dir: The folder that becomes the checkpoint.
            safe_serialization: Only `True`.
            blocking: Return when it is complete on disk; `False`: when it is copied, and a thread writes it. The next
                `save_state`, and `free_memory`, wait for it and raise its error; the end of the program waits too.

        Returns:
            The folder.

        Raises:
            CheckpointError: It cannot be written, the folder contains something else, or the last save failed.
            UnsavableError: A value cannot be stored; the message names the path to it.
            ConfigurationError: No folder is given, or checkpoints of an earlier start exist.
        """
        refuse_unknown("Accelerator.save_state", unknown, ("output_dir", "safe_serialization", "blocking"))
        refuse_pickle("save_state", safe_serialization)
        return self._checkpointing.save(cast("Loop", self), output_dir, blocking=blocking)

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Any = None,
        *,
        restore: Collection[str] | None = None,
        strict: bool = True,
        resume_loaders: bool | None = None,
        **unknown: Any,
    ) -> None:
        """Restore what `save_state` wrote, into objects that were prepared the same way.

        As in Accelerate, a prepared loader then starts the epoch of the checkpoint at its first batch, in the same order.
        The script skips the batches that it has trained on, with `accelerator.skip_first_batches(loader, n)` or by
        counting; a notice says so if the checkpoint was saved inside an epoch. With `resume_loaders=True` the next
        iteration continues at the saved position, and does not fetch earlier samples of a map-style dataset. In both cases
        write the loop as `for epoch in range(loader.epoch, n)`. All processes call it; their number may differ from that of
        the save.

        Args:
            input_dir: The folder of the checkpoint; also one that a `Trainer` has written, for the parts that it has.
                Default, with `ProjectConfiguration(automatic_checkpoint_naming=True)`: the complete one with the highest
                number; a warning names damaged ones, which are skipped.
            load_kwargs: Only `None`.
            restore: Restore only these parts: `"model"`, `"optimizer"`, `"scheduler"`, `"scaler"`, `"loaders"`,
                `"registered"`.
                Default: all.
            strict: A missing or unexpected name in a model is an error.
            resume_loaders: Continue each prepared loader at its position, for loops that do not skip batches themselves.
                Default:
                only with `DataLoaderConfiguration(use_stateful_dataloader=True)`.

        Raises:
            CheckpointError: It is missing or damaged, or does not fit; the message lists every difference.
            ConfigurationError: No folder is given.
            UnsupportedArgumentError: An argument of Accelerate's is not supported; the message says what to use.
        """
        given = unknown if load_kwargs is None else {"load_kwargs": load_kwargs, **unknown}
        refuse_unknown("Accelerator.load_state", given, ("input_dir", "restore", "strict", "resume_loaders"))
        wanted = check_names(restore, PARTS)
        loop = cast("Loop", self)
        self._checkpointing.load(loop, input_dir, wanted=wanted, strict=strict, resume_loaders=resume_loaders)

    def resume_loaders(self) -> None:
        """Continue each prepared loader at its position, in the next iteration after `load_state`.

        Raises:
            ConfigurationError: No positions were loaded, or the loaders have been read since.
            CheckpointError: A position lies inside a micro-batch of the loader.
        """
        self._checkpointing.resume_loaders()
