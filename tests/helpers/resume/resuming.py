"""Runs that are killed and resume: `from helpers.resume.resuming import Run, forked`."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainkit import Callback, Trainer, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import JSONLLogger

__all__ = ["Augmented", "Run", "SmallTransformer", "fork", "forked", "read_trace"]

WIDTH, LENGTH, CLASSES = 16, 6, 5

# The first optimizer of a process imports torch._dynamo, which takes seconds: do it here, not in each forked process.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])


class Augmented(Dataset):
    """Sequences with augmentation from torch, numpy and `random`; each sample contains its index."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(samples, LENGTH, WIDTH, generator=generator)
        self.targets = torch.randint(CLASSES, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.randn(LENGTH, WIDTH) * 0.1 + float(np.random.rand()) * 0.1 + random.random() * 0.1
        return self.inputs[index] + noise, self.targets[index], index


class SmallTransformer(TrainModule):
    """A transformer layer with dropout, mixup with numpy in the training step, AdamW, and warm-up and cosine decay by step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.steps = steps
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.body(inputs).mean(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, _ = batch
        share = float(np.random.beta(0.4, 0.4))
        mixed = share * inputs + (1 - share) * inputs.flip(0)
        logits = self(mixed)
        cross_entropy = nn.functional.cross_entropy
        loss = share * cross_entropy(logits, targets) + (1 - share) * cross_entropy(logits, targets.flip(0))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self(inputs), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedulers = torch.optim.lr_scheduler
        warm_up = schedulers.LinearLR(optimizer, 0.1, total_iters=5)
        cosine = schedulers.CosineAnnealingLR(optimizer, self.steps - 5)
        schedule = schedulers.SequentialLR(optimizer, [warm_up, cosine], [5])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Trace(Callback):
    """Writes the position, samples, loss and learning rate of each micro-batch, bit for bit, to a file that survives a kill."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        line = [trainer.current_epoch, batch_idx, batch[2].tolist(), float(outputs["loss"]).hex(), float(rate).hex()]
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


class Kill(Callback):
    """Kills the process with SIGKILL in a hook, as soon as `step` optimizer steps are done."""

    def __init__(self, step: int, hook: str) -> None:
        self.step = step
        setattr(self, hook, self._kill)

    def _kill(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Run:
    """One process of a run in the current directory; the next process resumes from the newest checkpoint.

    Attributes:
        trace: File for a line about each micro-batch.
        folder: Folder for checkpoints and logs.
        workers: `num_workers` of the DataLoaders.
        precision: Precision of the Trainer.
        save_every: Number of optimizer steps between checkpoints.
        kill_at: Number of optimizer steps after which the process kills itself; 0: never.
        kill_in: Hook in which it kills itself.
    """

    trace: str = "trace.jsonl"
    folder: str = "runs"
    workers: int = 0
    precision: str = "32-true"
    save_every: int = 3
    kill_at: int = 0
    kill_in: str = "on_train_batch_start"
    epochs: int = 3
    samples: int = 46
    batch_size: int = 4
    accumulate: int = 2

    @property
    def updates(self) -> int:
        """Number of optimizer steps of the whole fit."""
        batches = -(-self.samples // self.batch_size)
        return self.epochs * -(-batches // self.accumulate)

    def trainer(self, *callbacks: Callback) -> Trainer:
        """The Trainer of the run."""
        kill = [Kill(self.kill_at, self.kill_in)] if self.kill_at else []
        return Trainer(
            accelerator="cpu",
            precision=self.precision,
            seed=5,
            max_epochs=self.epochs,
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=1.0,
            default_root_dir=self.folder,
            logger=JSONLLogger(f"{self.folder}/logs"),
            log_every_n_steps=1,
            callbacks=[
                Trace(self.trace),
                ModelCheckpoint(every_n_train_steps=self.save_every),
                ModelCheckpoint(monitor="val_loss", every_n_epochs=1, keep_last=1),
                *callbacks,
                *kill,
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=1,
        )

    def callbacks(self) -> list[Callback]:
        """More callbacks, for subclasses to override."""
        return []

    def go(self) -> dict[str, Any]:
        """Train, from the newest checkpoint if there is one; returns the final parameters and metrics."""
        torch.manual_seed(0)
        options = {"batch_size": self.batch_size, "num_workers": self.workers}
        training = DataLoader(Augmented(self.samples), shuffle=True, **options)
        validation = DataLoader(Augmented(10), **options)
        module = SmallTransformer(self.updates)
        trainer = self.trainer(*self.callbacks())
        trainer.fit(module, training, validation, ckpt_path="auto")
        state = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
        metrics = {name: float(value).hex() for name, value in trainer.callback_metrics.items()}
        return {"state": state, "metrics": metrics, "step": trainer.global_step}

    def describe(self) -> dict[str, Any]:
        """The attributes as a dict."""
        return asdict(self)


def fork(work: Callable[[], None]) -> int:
    """Call `work` in a forked process, which then exits like a script; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    # Do not collect objects of earlier tests in this process: some would wait for threads that a fork does not have.
    gc.freeze()
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt as error:
        print(f"KeyboardInterrupt: {error}", file=sys.stderr)
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(work: Callable[[], Any], answer: str = "answer.json") -> tuple[int, Any]:
    """Run `work` in a forked process and wait for it; returns its wait status, and its result or None if it did not finish."""
    Path(answer).unlink(missing_ok=True)

    def child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Path(answer).write_text(json.dumps(work()))

    process = fork(child)
    _, status = os.waitpid(process, 0)
    path = Path(answer)
    return status, json.loads(path.read_text()) if path.exists() else None


def read_trace(path: str) -> dict[tuple[int, int], list[Any]]:
    """(epoch, batch) → samples, loss and learning rate; for micro-batches that were done twice, of the last time."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {(line[0], line[1]): line[2:] for line in lines}
