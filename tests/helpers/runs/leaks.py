"""Count the objects that a leak would leave behind, and functions that make many runs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import Tensor

from trainkit import Callback, Trainer, TrainModule
from trainkit.callbacks import EarlyStopping
from trainkit.loggers import CSVLogger


def counted() -> dict[str, int]:
    """Number of objects, threads and file descriptors in this process, of the kinds that a leak would increase."""
    gc.collect()
    kinds = {"trainers": Trainer, "modules": TrainModule, "tensors": Tensor, "callbacks": Callback}
    kinds |= {"optimizers": torch.optim.Optimizer, "loaders": torch.utils.data.DataLoader}
    types = [type(o) for o in gc.get_objects()]  # not isinstance, which reads the __class__ attribute of each object
    counts = {name: sum(issubclass(t, kind) for t in types) for name, kind in kinds.items()}
    counts["threads"] = threading.active_count()
    if os.path.isdir("/proc/self/fd"):
        counts["descriptors"] = len(os.listdir("/proc/self/fd"))
    return counts


def held() -> Counter[Any]:
    """The threads of this process and what its file descriptors refer to.

    `held() - before` is what was added since `before`. What goes in the meantime does not count: earlier tests of this process
    leave files and threads behind that Python frees at any time.
    """
    things: Counter[Any] = Counter(threading.enumerate())
    if os.path.isdir("/proc/self/fd"):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that listdir itself had open
                things[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return things


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)]


def everything(root: Path) -> dict[str, Any]:
    """Arguments of a Trainer that use as many features as possible."""
    return {
        "logger": CSVLogger(root),
        "callbacks": [EarlyStopping("val_loss", patience=100)],
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "num_sanity_val_steps": 1,
        "gradient_clip_val": 1.0,
        "max_time": "01:00:00:00",
        "log_every_n_steps": 1,
        "max_epochs": 1,
        "accelerator": "cpu",
        "default_root_dir": root,
        "seed": 1,
    }


def fits_with_one_trainer(root: Path) -> Callable[[], None]:
    trainer = Trainer(**everything(root))
    module = TinyModule()
    return lambda: trainer.fit(module, tiny_loader(8), tiny_loader(4))


def fits_with_one_trainer_and_new_modules(root: Path) -> Callable[[], None]:
    trainer = Trainer(**everything(root))
    return lambda: trainer.fit(TinyModule(), tiny_loader(8), tiny_loader(4))


def fits_with_new_trainers(root: Path) -> Callable[[], None]:
    module = TinyModule()
    return lambda: Trainer(**everything(root)).fit(module, tiny_loader(8), tiny_loader(4))


def evaluations(root: Path) -> Callable[[], None]:
    trainer, module = Trainer(**everything(root)), TinyModule()

    def run() -> None:
        trainer.validate(module, tiny_loader(8), verbose=False)
        trainer.test(module, tiny_loader(8), verbose=False)
        trainer.predict(module, tiny_loader(8))

    return run
