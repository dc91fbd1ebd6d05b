"""Groups of arguments of `Accelerator`, in Accelerate's classes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainkit.checks import whole_number
from trainkit.errors import UnsupportedArgumentError
from trainkit.paths import disk_path

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "ProjectConfiguration"]


@dataclass
class ProjectConfiguration:
    """Where your own training loop writes, and how it names its checkpoints.

    Args:
        project_dir: The folder of the project.
        logging_dir: The folder of trackers that write files. Default: `project_dir`.
        automatic_checkpoint_naming: `save_state()` writes to `project_dir/checkpoints/checkpoint_0`, `checkpoint_1`, …,
            and `load_state()` reads the newest complete one.
        total_limit: The number of these to keep; the oldest ones of the run are removed after each save. Default: all.
        iteration: The number of the next one; `load_state` sets it to the one after the existing ones.
        save_on_each_node: Only `False`: a checkpoint is one folder that all nodes can access.

    Raises:
        ConfigurationError: A limit or number is negative.
        UnsupportedArgumentError: `save_on_each_node=True`.

    Example:
        ```python
        project = ProjectConfiguration("runs/digits", automatic_checkpoint_naming=True, total_limit=3)
        accelerator = Accelerator(project_config=project)
        ```
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            self.total_limit = whole_number(self.total_limit, "ProjectConfiguration(total_limit=)", 1)
        self.iteration = whole_number(self.iteration, "ProjectConfiguration(iteration=)", 0)
        if self.save_on_each_node:
            raise UnsupportedArgumentError(
                "ProjectConfiguration(save_on_each_node=True): a checkpoint is one folder that all nodes can access. Remove "
                "the argument, and put project_dir on a shared disk."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the project, which is also the folder of the logs if they have none."""
        self.project_dir = _local(project_dir, "project_dir")
        self.logging_dir = self.project_dir if self.logging_dir is None else _local(self.logging_dir, "logging_dir")


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated, for `Accelerator(gradient_accumulation_plugin=)`.

    Args:
        num_steps: Number of micro-batches per optimizer step.
        adjust_scheduler: No effect, as in Accelerate: a prepared scheduler advances with optimizer steps, whatever their
            number of micro-batches.
        sync_with_dataloader: Only `True`: the last accumulation window ends with the epoch, and its gradient is the mean
            over its micro-batches.
        sync_each_batch: Only `False`: gradients are synchronized once per accumulation window.

    Raises:
        ConfigurationError: `num_steps` is not an integer ≥ 1.
        UnsupportedArgumentError: `sync_with_dataloader=False` or `sync_each_batch=True`.

    Example:
        ```python
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
        ```
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:  # Accelerate's default
            self.num_steps = 1
        self.num_steps = whole_number(self.num_steps, "GradientAccumulationPlugin(num_steps=)", 1)
        if not self.sync_with_dataloader:
            raise UnsupportedArgumentError(
                "GradientAccumulationPlugin(sync_with_dataloader=False) is not supported: no accumulation window crosses the "
                "end of an epoch. Remove it: the gradient of the last window is the mean over its micro-batches."
            )
        if self.sync_each_batch:
            raise UnsupportedArgumentError(
                "GradientAccumulationPlugin(sync_each_batch=True) is not supported: gradients are synchronized once per "
                "accumulation window. Remove it; to keep fewer gradients in memory use strategy='zero2', or "
                "FSDPStrategy(accumulate='reshard')."
            )


@dataclass
class DataLoaderConfiguration:
    """How loaders are sharded over the processes, for `Accelerator(dataloader_config=)`.

    Args:
        split_batches: As in `Accelerator`: `batch_size` is the total of all processes.
        dispatch_batches: As in `Accelerator`.
        even_batches: As in `Accelerator`.
        use_seedable_sampler: No effect: the order is always a function of the seed and the epoch.
        data_seed: Only `None`: the seed of the run determines the order.
        non_blocking: No effect: batches are always copied to a GPU while it computes.
        use_stateful_dataloader: `load_state` resumes each prepared loader at its position, as `resume_loaders=True` does.

    Raises:
        UnsupportedArgumentError: A `data_seed` is given.

    Example:
        ```python
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        ```
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.data_seed is not None:
            raise UnsupportedArgumentError(
                f"DataLoaderConfiguration(data_seed={self.data_seed!r}): the seed of the run determines the order of the data. "
                f"Use trainkit.set_seed({self.data_seed!r}) before Accelerator()."
            )


def _local(folder: str | os.PathLike[str] | None, argument: str) -> str | os.PathLike[str] | None:
    """The folder with `~` expanded."""
    if folder is None:
        return None
    path = disk_path(folder, argument, "project_dir='runs', and accelerator.save_state('s3://bucket/step-100') with a path")
    return path if os.fspath(folder).startswith("~") else folder
