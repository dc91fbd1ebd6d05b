"""`BasePredictionWriter`: the base class of callbacks that write predictions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainkit.callback import Callback
from trainkit.checks import choice
from trainkit.errors import ConfigurationError
from trainkit.nested import map_tensors

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["BasePredictionWriter", "WriteInterval"]


class WriteInterval(str, Enum):
    """When predictions are written: `"batch"`, `"epoch"` or `"batch_and_epoch"`."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether they are written after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether they are written at the end."""
        return self is not WriteInterval.BATCH


INTERVALS = tuple(interval.value for interval in WriteInterval)


class BasePredictionWriter(Callback):
    """Base class of callbacks that write the outputs of `predict_step`, in a format of your own.

    Define `write_on_batch_end`, `write_on_epoch_end` or both, and pass the callback to a `Trainer` whose
    `predict(..., return_predictions=False)` keeps no outputs itself. `PredictionWriter` writes files without a class of your
    own.

    Each process writes what it has predicted. `batch_indices` tell which samples of the dataset these are, on any number of
    processes.

    Args:
        write_interval: `"batch"`: call `write_on_batch_end` after each batch; `"epoch"`: call `write_on_epoch_end` at the
            end; `"batch_and_epoch"`: both.

    Attributes:
        interval: `write_interval` as a `WriteInterval`, with `on_batch` and `on_epoch`.

    Raises:
        ConfigurationError: An unknown interval; when prediction starts: the class does not define the method of its interval.

    Example:
        ```python
        class Save(BasePredictionWriter):
            def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
                numpy.save(f"rank-{trainer.global_rank}.npy", torch.cat(predictions).numpy())

        Trainer(callbacks=[Save("epoch")]).predict(module, loader, return_predictions=False)
        ```
    """

    def __init__(self, write_interval: str = "batch") -> None:
        super().__init__()
        choice(write_interval, f"{type(self).__name__}(write_interval=)", INTERVALS)
        self.write_interval, self.interval = write_interval, WriteInterval(write_interval)
        self._kept: list[list[Any]] = []  # predictions by loader and batch, to write at the end
        self._indices: list[list[list[int] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of one batch, on the process that computed it.

        Args:
            trainer: The trainer.
            module: The module.
            prediction: The output of `predict_step`, on its device.
            batch_indices: Indices of the samples in the dataset; `None` if the loader's order is not known.
            batch: The batch.
            batch_idx: Its index on this process.
            dataloader_idx: The index of the loader.
        """

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Sequence[Sequence[int] | None]],
    ) -> None:
        """Write all predictions of this process.

        Args:
            trainer: The trainer.
            module: The module.
            predictions: The outputs of `predict_step` by batch, on the CPU; with several loaders, by loader and batch.
            batch_indices: By loader and batch, as in `write_on_batch_end`.
        """

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._kept, self._indices = [], []
        for part in ("batch", "epoch"):
            method = f"write_on_{part}_end"
            if part in self.interval and getattr(type(self), method) is getattr(BasePredictionWriter, method):
                raise ConfigurationError(
                    f"{type(self).__name__}(write_interval={self.write_interval!r}) does not define {method}, so nothing would "
                    f"be written. Fix: define {method} in {type(self).__name__}, pass another write_interval, or use "
                    "PredictionWriter(output_dir='predictions')"
                )

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        world = trainer.strategy.data_world
        indices = _positions(sources(trainer)[dataloader_idx], number_of(trainer, batch_idx), world.devices)
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            while len(self._kept) <= dataloader_idx:
                self._kept.append([])
                self._indices.append([])
            self._kept[dataloader_idx].append(map_tensors(outputs, lambda tensor: tensor.detach().cpu()))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.interval.on_epoch:
            kept, indices = self._take(trainer)
            if writes_here(trainer):
                self.write_on_epoch_end(trainer, module, kept[0] if len(kept) == 1 else kept, indices)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._kept, self._indices = [], []

    def _take(self, trainer: Trainer) -> tuple[list[list[Any]], list[list[list[int] | None]]]:
        """What was kept, predictions and indices, with a list for each loader; nothing is kept afterwards."""
        kept, indices = self._kept, self._indices
        self._kept, self._indices = [], []
        missing = len(sources(trainer)) - len(kept)  # loaders without a batch on this process
        return kept + [[] for _ in range(missing)], indices + [[] for _ in range(missing)]


def sources(trainer: Trainer) -> list[Any]:
    """The user's loaders for prediction."""
    return trainer._run.evaluation_sources["predict"]


def writes_here(trainer: Trainer) -> bool:
    """Whether this process writes; if all processes have the same predictions, only the main process does."""
    strategy = trainer.strategy
    return strategy.data_world.size == strategy.world.size or strategy.world.is_main


def number_of(trainer: Trainer, batch_idx: int) -> int:
    """The index of a batch of this process in the whole data."""
    world = trainer.strategy.data_world
    return batch_idx * world.size + world.rank


def _positions(source: Any, number: int, devices: int) -> list[int] | None:
    """Indices in the dataset of the samples of a batch (one per device); `None` if the loader does not read it in order."""
    batches = source.batch_sampler if isinstance(source, DataLoader) else None
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    if type(sampler) is not SequentialSampler and not (type(sampler) is DistributedSampler and not sampler.shuffle):
        return None
    size = batches.batch_size * devices
    return list(range(number * size, min((number + 1) * size, len(source.dataset))))
