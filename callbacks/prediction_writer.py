"""`PredictionWriter`: writes predictions to files, one per process or one for all."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainkit.callbacks.base_prediction_writer import INTERVALS, BasePredictionWriter, number_of, sources, writes_here
from trainkit.checks import choice
from trainkit.console import with_article
from trainkit.errors import ConfigurationError
from trainkit.loggers.csv_logs import JSONLWriter
from trainkit.names import lazily
from trainkit.paths import disk_path

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["PredictionWriter"]

# where Lightning has it; other names of its file are an error that says what to use
__getattr__, _ = lazily(globals(), {"WriteInterval": ".base_prediction_writer"})

_OURS = re.compile(r"dataloader_\d+|(batch-\d+|predictions|rank-\d+)\.(safetensors|jsonl)")
_ROWS = 32  # batches per process that are gathered at a time


class PredictionWriter(BasePredictionWriter):
    """Writes the outputs of `predict_step` to files, for `predict(..., return_predictions=False)`.

    It writes tensors, and dicts and lists of only tensors, as safetensors, and everything else as JSON lines,
    `{"batch": 12, "indices": [48, 49], "prediction": …}`, where numbers that are not finite are strings.

    * by batch: `batch-00000012.safetensors`, or lines in `rank-<rank>.jsonl`. The number is that of the batch in the whole
      data, so the safetensors files are the same for any number of processes.
    * by epoch: `rank-<rank>.safetensors` or `.jsonl`; with `once=True` one file, `predictions.safetensors` or
      `.jsonl`, in the order of the data. Tensors of all batches are concatenated along their first dimension if their shapes
      allow it, else named by batch, `prediction/00000012`.

    A tensor is called "prediction", or by its key in a dict or list, with "/" between nested keys. The indices are
    "batch_indices". With several loaders each has its own folder, `dataloader_<index>`.

    A subclass that overrides `write_on_batch_end` or `write_on_epoch_end` needs no `output_dir`.

    Args:
        write_interval: `"batch"`: after each batch; `"epoch"`: at the end; `"batch_and_epoch"`. Default: `"epoch"` with
            `once`, else `"batch"`.
        output_dir: The folder, without predictions of an earlier run.
        once: The main process writes the predictions of all processes at the end, and only it calls
            `write_on_epoch_end`.

    Raises:
        ConfigurationError: An unknown interval, or `once` with `"batch"`; when prediction starts: no folder, or one with
            predictions; while writing: a value that is neither a tensor nor plain.

    Example:
        ```python
        writer = PredictionWriter(output_dir="predictions", once=True)
        Trainer(callbacks=[writer]).predict(module, loader, return_predictions=False)
        ```
    """

    def __init__(
        self, write_interval: str | None = None, output_dir: str | os.PathLike[str] | None = None, once: bool = False
    ) -> None:
        interval = ("epoch" if once else "batch") if write_interval is None else write_interval
        if interval not in INTERVALS and isinstance(interval, str | os.PathLike) and output_dir is None:
            raise ConfigurationError(
                f"PredictionWriter(write_interval=...) expected one of {', '.join(map(repr, INTERVALS))}, got {interval!r}. "
                f"Fix, if that is the folder: PredictionWriter(output_dir={str(interval)!r})"
            )
        choice(interval, "PredictionWriter(write_interval=)", INTERVALS)
        super().__init__(interval)
        if once and interval == "batch":
            raise ConfigurationError(
                "PredictionWriter(write_interval='batch', once=True): each process writes its own batches. Fix, to write one "
                "file: PredictionWriter(output_dir='predictions', once=True)"
            )
        fix = "PredictionWriter(output_dir='predictions'), and copy the files afterwards"
        self.output_dir = None if output_dir is None else disk_path(output_dir, "PredictionWriter(output_dir=)", fix)
        self.once = once
        self._lines: dict[Path, JSONLWriter] = {}

    # ------------------------------------------------------------------ what a subclass overrides

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
        """As in `BasePredictionWriter`, to files."""
        if not writes_here(trainer):
            return
        number = number_of(trainer, batch_idx)
        folder = self._folder(trainer, dataloader_idx)
        named = _name_tensors(prediction)
        if named is None:
            self._write_lines(folder / f"rank-{trainer.global_rank}.jsonl", [(number, batch_indices, prediction)])
        else:
            _write_tensors(folder / f"batch-{number:08d}.safetensors", _with_indices(named, batch_indices))

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Sequence[Sequence[int] | None]],
    ) -> None:
        """As in `BasePredictionWriter`, to files; with `once`, of all processes on the main process."""
        ranks = 1 if self.once else trainer.strategy.data_world.size
        first = 0 if self.once else trainer.strategy.data_world.rank
        by_loader = [predictions] if len(batch_indices) == 1 else predictions
        for loader, (outputs, indices) in enumerate(zip(by_loader, batch_indices, strict=True)):
            stem = self._folder(trainer, loader) / ("predictions" if self.once else f"rank-{first}")
            numbers = range(first, first + len(outputs) * ranks, ranks)
            batches = [_name_tensors(prediction) for prediction in outputs]
            if outputs and all(named is not None for named in batches):
                named = [_with_indices(named or {}, chosen) for named, chosen in zip(batches, indices, strict=True)]
                _write_tensors(stem.with_suffix(".safetensors"), _join_columns(named, numbers))
            elif outputs:
                self._write_lines(stem.with_suffix(".jsonl"), list(zip(numbers, indices, outputs, strict=True)))

    # ------------------------------------------------------------------ hooks

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_predict_start(trainer, module)
        kind = type(self)
        writes = ("batch" in self.write_interval and kind.write_on_batch_end is PredictionWriter.write_on_batch_end) or (
            "epoch" in self.write_interval and kind.write_on_epoch_end is PredictionWriter.write_on_epoch_end
        )
        if not writes:
            return
        if self.output_dir is None:
            raise ConfigurationError(
                f"{kind.__name__} has no folder to write to. Fix: {kind.__name__}(output_dir='predictions'), or define "
                "write_on_batch_end or write_on_epoch_end"
            )
        folder = Path(self.output_dir)
        earlier = sorted(path.name for path in folder.iterdir() if _OURS.fullmatch(path.name)) if folder.is_dir() else []
        problem = trainer.strategy.world.from_main(earlier[:1])  # before any process writes
        if problem:
            raise ConfigurationError(
                f"{kind.__name__}: {folder} already contains predictions ({problem[0]}), and would mix them with the new ones. "
                f"Fix: remove them, or write to another folder, {kind.__name__}(output_dir='predictions-2')"
            )

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not self.once:
            super().on_predict_epoch_end(trainer, module)
            return
        kept, indices = (_gather_on_main(trainer, lists) for lists in self._take(trainer))
        if trainer.is_global_zero:
            self.write_on_epoch_end(trainer, module, kept[0] if len(kept) == 1 else kept, indices)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        for writer in self._lines.values():
            writer.close()
        self._lines = {}
        super().teardown(trainer, module, stage)

    # ------------------------------------------------------------------ inside

    def _folder(self, trainer: Trainer, loader: int) -> Path:
        assert self.output_dir is not None
        folder = Path(self.output_dir)
        return folder / f"dataloader_{loader}" if len(sources(trainer)) > 1 else folder

    def _write_lines(self, path: Path, rows: Sequence[tuple[int, Sequence[int] | None, Any]]) -> None:
        if path not in self._lines:
            self._lines[path] = JSONLWriter(path)
        for number, indices, prediction in rows:
            chosen = None if indices is None else list(indices)
            self._lines[path].write({"batch": number, "indices": chosen, "prediction": _plain(prediction, "prediction")})


def _gather_on_main(trainer: Trainer, by_loader: list[list[Any]]) -> list[list[Any]]:
    """Gather by loader, in the order of the batches, on the main process, a few batches at a time. Collective."""
    world = trainer.strategy.data_world
    gathered: list[list[Any]] = []
    for mine, rows in zip(by_loader, world.largest([len(each) for each in by_loader]), strict=True):
        gathered.append([])
        for start in range(0, rows, _ROWS):
            by_rank = world.exchange_user_objects(mine[start : start + _ROWS])
            for row in range(_ROWS if world.is_main else 0):
                gathered[-1] += [each[row] for each in by_rank if row < len(each)]
    return gathered


def _name_tensors(value: Any) -> dict[str, Tensor] | None:
    """The tensors of a prediction by name; `None` if it contains anything else."""
    if isinstance(value, Tensor):
        return {"prediction": value}
    named: dict[str, Tensor] = {}
    for name, item in _items(value, ""):
        if not isinstance(item, Tensor) or name in named:
            return None
        named[name] = item
    return named or None


def _items(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        inner: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    else:
        yield path, value
        return
    for key, item in inner:
        yield from _items(item, f"{path}/{key}" if path else str(key))


def _with_indices(named: dict[str, Tensor], indices: Sequence[int] | None) -> dict[str, Tensor]:
    """Add the indices, unless the user has a tensor of that name."""
    return named if indices is None else {"batch_indices": torch.tensor(indices), **named}


def _join_columns(batches: list[dict[str, Tensor]], numbers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of all batches, each concatenated along its first dimension if possible."""
    columns: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for named in batches for name in named):
        parts = {number: named[name] for number, named in zip(numbers, batches, strict=True) if name in named}
        kinds = {(part.dtype, part.shape[1:], part.ndim > 0) for part in parts.values()}
        if len(parts) == len(batches) and len(kinds) == 1 and next(iter(kinds))[2]:
            columns[name] = torch.cat(list(parts.values()))
        else:
            columns |= {f"{name}/{number:08d}": part for number, part in parts.items()}
    return columns


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # a reader sees the whole file or none
    try:
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(copies, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any, where: str) -> Any:
    """Convert a prediction to JSON values."""
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    raise ConfigurationError(
        f"PredictionWriter cannot write {where}, {with_article(type(value).__name__)}: expected tensors, numbers, strings, "
        "lists and dicts. Fix: return these from predict_step, or define write_on_batch_end in a subclass"
    )
