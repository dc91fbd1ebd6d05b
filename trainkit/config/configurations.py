"""Arguments of ``Accelerator`` that belong together, as Accelerate has them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainkit.checks import whole_number
from trainkit.errors import UnsupportedArgumentError
from trainkit.paths import local_path

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "ProjectConfiguration"]


@dataclass
class ProjectConfiguration:
    """Where an own loop writes, and how it names its checkpoints.

    Args:
        project_dir: folder of the project.
        logging_dir: folder of the trackers that write files; default: ``project_dir``.
        automatic_checkpoint_naming: ``save_state()`` writes to ``project_dir/checkpoints/checkpoint_0``, ``checkpoint_1``, …,
            and ``load_state()`` reads the newest that is complete.
        total_limit: of these so many are kept; the oldest of the run go when a new one is complete.
        iteration: the number of the next one; ``load_state`` sets it to what comes after those that there are.
        save_on_each_node: only ``False``: a checkpoint is one folder that all machines see.

    Raises:
        ConfigurationError: a limit or number that makes no sense.
        UnsupportedArgumentError: ``save_on_each_node=True``.
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
                "ProjectConfiguration(save_on_each_node=True): a checkpoint is one folder that all machines see. Leave it out, "
                "and let project_dir be on a shared disk."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Take a project's folder, which is also that of the logs if they have none."""
        self.project_dir = _local(project_dir, "project_dir")
        self.logging_dir = self.project_dir if self.logging_dir is None else _local(self.logging_dir, "logging_dir")


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches in an update; default: 1.
        adjust_scheduler: no effect on what is learnt, as in Accelerate: a prepared scheduler advances with updates, however
            many micro-batches they have.
        sync_with_dataloader: only ``True``: the last window of an epoch ends with it, and counts as the mean over what it has.
        sync_each_batch: only ``False``: gradients travel once in a window.

    Raises:
        ConfigurationError: ``num_steps`` is no number ≥ 1.
        UnsupportedArgumentError: what is offered in one way only is asked for in the other.
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
                "GradientAccumulationPlugin(sync_with_dataloader=False): no window goes on over the end of an epoch. Leave it "
                "out: the last window of an epoch counts as the mean over the micro-batches that it has."
            )
        if self.sync_each_batch:
            raise UnsupportedArgumentError(
                "GradientAccumulationPlugin(sync_each_batch=True): gradients travel once in a window. Leave it out; to hold "
                "less of them in memory use strategy='zero2' or 'zero3'."
            )


@dataclass
class DataLoaderConfiguration:
    """How loaders are dealt out; what it says counts as if it were given to ``Accelerator``.

    Args:
        split_batches: as of ``Accelerator``: ``batch_size`` is that of all processes together.
        dispatch_batches: as of ``Accelerator``.
        even_batches: as of ``Accelerator``.
        use_seedable_sampler: no effect: the order of an epoch always is a function of the seed and its number.
        data_seed: only ``None``: the order has the run's seed.
        non_blocking: no effect: batches always travel to a GPU while it works.
        use_stateful_dataloader: ``load_state`` continues each prepared loader where it was, as with ``resume_loaders=True``.

    Raises:
        UnsupportedArgumentError: a ``data_seed``.
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
                f"DataLoaderConfiguration(data_seed={self.data_seed!r}): the order of the data is that of the run's seed. Use "
                f"trainkit.set_seed({self.data_seed!r}) before Accelerator()."
            )


def _local(folder: str | os.PathLike[str] | None, argument: str) -> str | os.PathLike[str] | None:
    """The folder as it was given, but for ``~``; an address is refused."""
    if folder is None:
        return None
    path = local_path(folder, argument)
    return path if os.fspath(folder).startswith("~") else folder
