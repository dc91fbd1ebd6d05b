"""`SpikeDetection`: stops training when the loss jumps far above its recent mean."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.checks import choice, real_number, whole_number
from trainkit.console import warn
from trainkit.errors import LossError, TrainingSpikeException
from trainkit.loggers.log_folder import replace_file
from trainkit.nested import copy_to_host

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["SpikeDetection"]

_FILE = "skip_batches.json"


class _Loss(NamedTuple):
    """The loss of a micro-batch, which may still be on its way from the device."""

    batch_idx: int
    value: Tensor | float
    ready: Any  # an event of the device, or None


class SpikeDetection(Callback):
    """Stops training with a `TrainingSpikeException` when the loss of a micro-batch is a spike, on all processes together.

    A loss is a spike if it is worse than the one before, and its distance from the mean of the last `window` losses is at
    least `atol` and at least `rtol` times that mean. A loss that is not finite is a spike too, with `finite_only`. Each
    process judges its own losses, and a spike on one of them counts for all.

    The indices of the spike's micro-batch and of the one before, which may have spoiled the parameters, are added to
    `bad_batches` and written to a JSON file by the main process.

    The loss is copied to the host while the device continues, and is judged before the next optimizer step: the exception
    comes after the forward and backward of the next accumulation window, and no further optimizer step is made. With
    several processes that costs one small all-reduce on the host for each optimizer step. Before a checkpoint is saved all
    losses are judged, so none contains a spike that was found later. A resumed run continues with the same losses in mind.

    Args:
        mode: `"min"`: a spike is high; `"max"`: a spike is low, for a `training_step` whose loss grows.
        window: Number of losses in the running mean.
        warmup: Number of micro-batches before the first one that is judged.
        atol: Smallest absolute distance of a spike; `None`: any.
        rtol: Smallest distance of a spike relative to the mean; `None`: any.
        exclude_batches_path: The JSON file, or its folder. Default: `skip_batches.json` in `default_root_dir`.
        finite_only: Infinite and NaN losses are spikes. `False`: they are ignored.

    Attributes:
        bad_batches: Indices in their epoch of the micro-batches to skip, as in the file.

    Raises:
        ConfigurationError: An argument is out of its range.
        LossError: `training_step` returned no loss.
        TrainingSpikeException: While training; has the index of the spike's micro-batch as `batch_idx`.

    Example:
        ```python
        trainer = Trainer(callbacks=[SpikeDetection(window=100, warmup=100, rtol=3.0)])
        try:
            trainer.fit(module, train_loader)
        except TrainingSpikeException as spike:
            print(spike.batch_idx)
        ```
    """

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        super().__init__()
        self.mode = choice(mode, "SpikeDetection(mode=)", ("min", "max"))
        self.window = whole_number(window, "SpikeDetection(window=)", 1)
        self.warmup = whole_number(warmup, "SpikeDetection(warmup=)", 0)
        self.atol = real_number(atol, "SpikeDetection(atol=)", least=0, optional=True)
        self.rtol = real_number(rtol, "SpikeDetection(rtol=)", least=0, optional=True)
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.bad_batches: list[int] = []
        self._recent: deque[float] = deque(maxlen=self.window)
        self._seen = 0
        self._pending: list[_Loss] = []
        self._due = 0  # number of pending losses of windows that are complete
        self._found: tuple[str, int] | None = None  # the message about a spike, and its micro-batch
        self._saved: Mapping[str, Any] = {}  # the losses in the checkpoint, until the state is restored

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._recent.clear()
            self._pending = []
            self._due = 0
            self._seen = 0
            self._found = None

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if outputs is None:
            return
        if not isinstance(loss, Tensor):
            raise LossError(
                f"SpikeDetection needs the loss, and training_step returned {type(outputs).__name__}. Expected a scalar "
                "tensor, or a dict with it under 'loss'. Fix: return {'loss': loss.detach()}"
            )
        self._pending.append(_Loss(batch_idx, *copy_to_host(loss.detach())))
        if trainer.accelerator.sync_gradients:
            self._due = len(self._pending)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        self._judge(trainer, self._due)  # The losses of the current window may still be computed.

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.check_now(trainer)

    def check_now(self, trainer: Trainer) -> None:
        """Judge the losses that were not judged yet. Collective.

        Args:
            trainer: The trainer of the run.

        Raises:
            TrainingSpikeException: One of them is a spike, on any process.
        """
        self._judge(trainer, len(self._pending))

    def _judge(self, trainer: Trainer, count: int) -> None:
        """Judge the first losses that were not judged yet. Collective."""
        pending, self._pending, self._due = self._pending[:count], self._pending[count:], 0
        spike = -1
        for loss in pending:
            value = _read(loss)
            if spike < 0 and self._is_spike(value):
                spike = loss.batch_idx
            elif spike < 0:
                self._keep(value)
        world = trainer.strategy.data_world
        if world.size > 1:
            spike = max(world.largest([spike]))
        if spike >= 0:
            self._stop(trainer, spike)

    def _is_spike(self, value: float) -> bool:
        judged, self._seen = self._seen >= self.warmup, self._seen + 1
        if not math.isfinite(value):
            return self.finite_only and judged
        if not judged or not self._recent:
            return False
        change = value - self._recent[-1]
        if change <= 0 if self.mode == "min" else change >= 0:
            return False
        mean = math.fsum(self._recent) / len(self._recent)
        distance = abs(value - mean)
        return (self.atol is None or distance >= self.atol) and (self.rtol is None or distance >= abs(self.rtol * mean))

    def _keep(self, value: float) -> None:
        if math.isfinite(value):
            self._recent.append(value)

    def _stop(self, trainer: Trainer, batch_idx: int) -> None:
        self.bad_batches += [batch_idx - 1, batch_idx] if batch_idx else [batch_idx]
        path = Path(trainer.default_root_dir) if self.exclude_batches_path is None else Path(self.exclude_batches_path)
        path = path if path.suffix == ".json" else path / _FILE
        if trainer.is_global_zero:
            try:
                replace_file(path, lambda file: json.dump(self.bad_batches, file, indent=4))  # a link there is not followed
            except OSError as error:  # the spike is what the user must see
                warn(f"SpikeDetection could not write {path}: {error}. The micro-batches to skip: {self.bad_batches}")
        self._found = (
            f"the loss of micro-batch {batch_idx} in epoch {trainer.current_epoch} is a spike, compared with the mean of the "
            f"{self.window} losses before it. Expected a loss that changes slowly. {path} lists the micro-batches to skip. "
            "Fix: resume from an earlier checkpoint and skip them, or lower the learning rate or clip: "
            "Trainer(gradient_clip_val=1.0)",
            batch_idx,
        )
        raise TrainingSpikeException(*self._found)

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Raise before parameters after a spike are saved, also when the error is handled; add the losses of each rank."""
        if self._found is not None:
            raise TrainingSpikeException(*self._found)
        self.check_now(trainer)
        state = {"recent": list(self._recent), "seen": self._seen}
        checkpoint[self.state_key] = trainer.strategy.data_world.exchange(state)

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        by_rank = checkpoint.get(self.state_key)
        self._saved = by_rank[trainer.strategy.data_world.rank % len(by_rank)] if by_rank else {}

    def state_dict(self) -> dict[str, Any]:
        return {"bad_batches": list(self.bad_batches)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.bad_batches = list(state_dict["bad_batches"])
        if self._saved:
            self._recent, self._seen = deque(self._saved["recent"], maxlen=self.window), self._saved["seen"]


def _read(loss: _Loss) -> float:
    if loss.ready is not None:
        loss.ready.synchronize()  # This loss is one window old: the forward and backward of a whole window are queued after it.
    return float(loss.value)
