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
from trainkit.config.configurations import ProjectConfiguration
from trainkit.state.parts import check_names
from trainkit.unsupported import refuse_unknown

__all__ = ["CheckpointVerbs"]


class CheckpointVerbs:
    """Weights, objects and checkpoints in files.

    The class that has these verbs is the `Loop` that is saved.

    Args:
        options: Of the accelerator: the strategy, the project, whether loaders continue.
        prepared: What `prepare` was given.
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
        """`project_configuration`."""
        return self._project

    @property
    def project_dir(self) -> str | PathLike[str] | None:
        """Folder of the project."""
        return self._project.project_dir

    @property
    def logging_dir(self) -> str | PathLike[str] | None:
        """Folder of the trackers that write files."""
        return self._project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint, with automatic checkpoint naming."""
        return self._project.iteration

    @property
    def run_id(self) -> str:
        """Names the run in its checkpoints; kept when a checkpoint is fully restored."""
        return self._checkpointing.run_id

    @property
    def registered(self) -> list[Any]:
        """The objects that were registered for checkpointing."""
        return self._checkpointing.registered

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to a file, on the main process; other processes do nothing, and need not call it.

        Tensors by name, such as a state dict, become a plain safetensors file, which `safetensors` and `from_pretrained`
        open. Anything else becomes JSON, in which tuples, sets, numpy arrays and the like keep their types; with tensors in it
        a safetensors file that contains the JSON. A tensor with several names (tied weights) is stored once, under the first.
        `trainkit.utils.load(f)` reads all of it. The file is complete or not there.

        It can be the `save_function` of `save_pretrained`.

        Args:
            obj: Numbers, text, tensors, arrays, lists, dicts, …; of other objects their `state_dict()`.
            f: The file; it may have any name. Missing folders are created.
            safe_serialization: Only `True`: a pickle can run code when it is loaded.

        Raises:
            UnsavableError: A value cannot be stored; the message names the path to it.
            CheckpointWriteError: The file cannot be written; what was there is untouched.
            ConfigurationError: `safe_serialization=False`; `f` is not a path; or a state dict of a model that ZeRO-3 has
                sharded (`get_state_dict` has the values).
        """
        self._saving.save(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state of a model, as `save_model` writes it: parameters and buffers by the user's names.

        With sharded parameters all processes call it; the main process gets it, on the host, and the others an empty dict.
        Otherwise each process gets it, and nothing is copied. Use it as
        `save_pretrained(state_dict=accelerator.get_state_dict(model))`.

        Args:
            model: Prepared or not.
            unwrap: No effect: names have no `module.` in front.
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

        Of a model with PEFT adapters only these are written: a folder for `PeftModel.from_pretrained(base, folder)`.
        All processes call it, and the main process writes; when it returns, the files are there for all.

        Args:
            model: Prepared or not; with a `Trainer` any module within its module, in `fit` or after it:
                `trainer.accelerator.save_model(module.model, folder)`.
            save_directory: The folder to write to.
            max_shard_size: Larger models are written to several files, with an index; adapters never are.
            safe_serialization: Only `True`: a pickle can run code when it is loaded.

        Raises:
            CheckpointWriteError: The folder cannot be written.
            ConfigurationError: An adapter of a method whose parameters only PEFT can tell; `safe_serialization=False`.
        """
        self._saving.save_model(model, save_directory, max_shard_size, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects too; they have `state_dict` and `load_state_dict`."""
        self._checkpointing.register(*objects)

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **unknown: Any,
    ) -> Path:
        """Write a checkpoint: models, optimizers, schedulers, loss scale, the loaders' positions, registered objects.

        An existing checkpoint is replaced when the new one is complete. Inside an accumulation window, the position at the
        start of the window is saved. All processes call it, and each writes its part.

        With `ProjectConfiguration(automatic_checkpoint_naming=True)` the folder is `project_dir/checkpoints/checkpoint_N`,
        as in Accelerate whatever `output_dir` is. Checkpoints of an earlier start are then an error, unless this run resumes
        from them (`load_state()`). When the new one is complete, the oldest of the run beyond `total_limit` are removed.

        Args:
            output_dir: The folder that the checkpoint becomes.
            safe_serialization: Only `True`.
            blocking: Return when it is complete on the disk; `False`: when it is copied, and a thread writes it. The next
                `save_state`, and `free_memory`, wait for it and raise what went wrong; the end of the program waits too.

        Returns:
            The folder.

        Raises:
            CheckpointError: It cannot be written, or the folder holds something else; or the last save has failed.
            UnsavableError: A value cannot be stored; the message names the path to it.
            ConfigurationError: No folder is named; or checkpoints of an earlier start are in the way.
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

        As in Accelerate, a prepared loader then starts the epoch of the checkpoint at its first batch, in the same order. A
        script skips what it has trained on, by `accelerator.skip_first_batches(loader, n)` or by counting; a notice says so
        where the checkpoint was saved inside an epoch. With `resume_loaders=True` the next iteration continues where the loop
        was, and does not fetch the samples of a map-style dataset before that. In both cases write the loop as
        `for epoch in range(loader.epoch, n)`. All processes call it; their number may differ from when it was saved.

        Args:
            input_dir: The folder of the checkpoint; also one that a `Trainer` has written, for the parts that it has. With
                `ProjectConfiguration(automatic_checkpoint_naming=True)` the default is the complete one with the highest
                number; damaged ones are named in a warning and skipped.
            load_kwargs: Of Accelerate's `torch.load`; only `None`.
            restore: Only these parts, of "model", "optimizer", "scheduler", "scaler", "loaders", "registered".
            strict: Missing and unexpected names in a model are errors.
            resume_loaders: Continue each prepared loader where it was, as `resume_loaders` does. For loops that do not
                skip batches themselves. Default: only with `DataLoaderConfiguration(use_stateful_dataloader=True)`.

        Raises:
            CheckpointError: Missing, damaged, or it does not fit; the message lists all that does not.
            ConfigurationError: No folder is named.
            UnsupportedArgumentError: An argument of Accelerate's; the message names the replacement.
        """
        given = unknown if load_kwargs is None else {"load_kwargs": load_kwargs, **unknown}
        refuse_unknown("Accelerator.load_state", given, ("input_dir", "restore", "strict", "resume_loaders"))
        wanted = check_names(restore, PARTS)
        loop = cast("Loop", self)
        self._checkpointing.load(loop, input_dir, wanted=wanted, strict=strict, resume_loaders=resume_loaders)

    def resume_loaders(self) -> None:
        """After `load_state`: let the next iteration over each prepared loader continue where the loop was, once.

        Raises:
            ConfigurationError: No positions were loaded, or the loaders have been read since.
            CheckpointError: A position lies inside a micro-batch of the loader.
        """
        self._checkpointing.resume_loaders()
