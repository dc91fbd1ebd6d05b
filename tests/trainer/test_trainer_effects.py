"""Each argument of `Trainer` changes a run: one result is observed without it, and another one with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit import Callback, DataModule, Precision, Strategy, Trainer
from trainkit.callbacks import GradientClipping, ModelCheckpoint, ModelSummary, TQDMProgressBar
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import TrainkitError
from trainkit.loggers import CSVLogger, Logger


@dataclass
class Seen(Callback):
    """Records what a run did."""

    train: list[int] = field(default_factory=list)  # batches of each epoch
    validated: list[int] = field(default_factory=list)  # step of each validation batch; -1 in the sanity check
    evaluated: dict[str, int] = field(default_factory=dict)  # batches by stage
    logged: list[int] = field(default_factory=list)  # steps at which the training loss was logged
    made: int = 0  # number of training loaders
    during: dict[str, bool] = field(default_factory=dict)  # settings of torch
    inputs: list[float] = field(default_factory=list)
    largest: float = 0.0  # largest absolute value of a gradient
    norm: float = 0.0  # largest norm of the gradients

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.train.append(0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.train[-1] += 1
        self.inputs.append(batch[0].sum().item())
        self.during["deterministic"] = torch.are_deterministic_algorithms_enabled()
        self.during["benchmark"] = torch.backends.cudnn.benchmark
        self.during["anomaly"] = torch.is_anomaly_enabled()

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        if gradients:
            self.norm = max(self.norm, torch.cat(gradients).norm().item())
            self.largest = max(self.largest, torch.cat(gradients).abs().max().item())

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append(-1 if trainer.sanity_checking else trainer.global_step)

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated["test"] = batch_idx + 1
        self.during["inference"] = torch.is_inference_mode_enabled()

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated["predict"] = batch_idx + 1


class Steps(Logger):
    """Keeps the steps at which the training loss is logged."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def write_metrics(self, metrics: dict[str, float], step: int) -> None:
        if "train_loss" in metrics:
            self.seen.logged.append(step)


class Data(DataModule):
    """Each loader has four batches. The training loaders are counted."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def train_dataloader(self) -> Any:
        self.seen.made += 1
        return tiny_loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return tiny_loader()

    def test_dataloader(self) -> Any:
        return tiny_loader()

    def predict_dataloader(self) -> Any:
        return tiny_loader()


class Stops(Callback):
    """Requests a stop after the first batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = True


def run(**arguments: Any) -> tuple[Trainer, Seen]:
    """A fit of two epochs of four batches, a test and a prediction."""
    seen = Seen()
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callbacks = [seen, *arguments.pop("callbacks", [])]
    given = {"accelerator": "cpu", "max_epochs": 2, "seed": 1, "logger": Steps(seen), **quiet, **arguments}
    trainer = Trainer(callbacks=callbacks, **given)
    torch.manual_seed(0)
    data = Data(seen)
    trainer.fit(TinyModule(), data)
    trainer.test(datamodule=data, verbose=False)
    trainer.predict(datamodule=data)
    return trainer, seen


class Effect(NamedTuple):
    """An argument with a value, what to observe, and the result without the argument and with it."""

    arguments: dict[str, Any]
    look: Callable[[Trainer, Seen], Any]
    without: Any
    given: Any
    always: Mapping[str, Any] = MappingProxyType({})


def attached(kind: type) -> Callable[[Trainer, Seen], bool]:
    return lambda trainer, seen: any(isinstance(callback, kind) for callback in trainer.callbacks)


def saved_with(trainer: Trainer, seen: Seen) -> str:
    [callback] = trainer.checkpoint_callbacks
    return open_checkpoint(callback.last_model_path).manifest.checksum


SAVES = {"enable_checkpointing": True}
EFFECTS: dict[str, Effect] = {
    "strategy": Effect({"strategy": Strategy("cpu", "64-true")}, lambda t, s: t.strategy.precision.name, "32-true", "64-true"),
    "precision": Effect(
        {"precision": Precision("bf16-true")}, lambda t, s: next(t.model.parameters()).dtype, torch.float32, torch.bfloat16
    ),
    "logger": Effect({"logger": CSVLogger("logs")}, lambda t, s: Path("logs/default/version_0").exists(), False, True),
    "callbacks": Effect({"callbacks": [Stops()]}, lambda t, s: len(s.train), 2, 1),
    "default_root_dir": Effect(
        {"default_root_dir": "there"},
        lambda t, s: [path.name for path in Path().iterdir()],
        ["trainkit_runs"],
        ["there"],
        {"enable_checkpointing": True},
    ),
    "max_epochs": Effect({"max_epochs": 3}, lambda t, s: s.train, [4, 4], [4, 4, 4]),
    "min_epochs": Effect({"min_epochs": 2}, lambda t, s: len(s.train), 1, 2, {"callbacks": [Stops()]}),
    "max_steps": Effect({"max_steps": 3}, lambda t, s: t.global_step, 8, 3),
    "min_steps": Effect({"min_steps": 6}, lambda t, s: t.global_step >= 6, False, True, {"callbacks": [Stops()]}),
    "max_time": Effect({"max_time": timedelta(microseconds=1)}, lambda t, s: t.global_step < 8, False, True),
    "limit_train_batches": Effect({"limit_train_batches": 0.5}, lambda t, s: s.train, [4, 4], [2, 2]),
    "limit_val_batches": Effect({"limit_val_batches": 1}, lambda t, s: s.validated, [-1, -1, *[4] * 4, *[8] * 4], [-1, 4, 8]),
    "limit_test_batches": Effect({"limit_test_batches": 3}, lambda t, s: s.evaluated["test"], 4, 3),
    "limit_predict_batches": Effect({"limit_predict_batches": 3}, lambda t, s: s.evaluated["predict"], 4, 3),
    "overfit_batches": Effect({"overfit_batches": 1}, lambda t, s: (len(s.inputs), len({*s.inputs})), (8, 8), (2, 1)),
    "fast_dev_run": Effect({"fast_dev_run": 2}, lambda t, s: (s.train, s.evaluated["test"]), ([4, 4], 4), ([2], 2)),
    "num_sanity_val_steps": Effect({"num_sanity_val_steps": 3}, lambda t, s: s.validated.count(-1), 2, 3),
    "val_check_interval": Effect(
        {"val_check_interval": 0.5}, lambda t, s: sorted({*s.validated}), [-1, 4, 8], [-1, 2, 4, 6, 8]
    ),
    "val_every_n_steps": Effect({"val_every_n_steps": 3}, lambda t, s: sorted({*s.validated}), [-1, 4, 8], [-1, 3, 6]),
    "validate_at_end": Effect(
        {"validate_at_end": True}, lambda t, s: sorted({*s.validated}), [-1, 4], [-1, 4, 6], {"max_steps": 6}
    ),
    "check_val_every_n_epoch": Effect({"check_val_every_n_epoch": 2}, lambda t, s: sorted({*s.validated}), [-1, 4, 8], [-1, 8]),
    "accumulate_grad_batches": Effect({"accumulate_grad_batches": 2}, lambda t, s: t.global_step, 8, 4),
    "global_batch_size": Effect({"global_batch_size": 8}, lambda t, s: t.global_step, 8, 4),
    "auto_micro_batch": Effect({"auto_micro_batch": True}, lambda t, s: t._run.arguments.auto_micro_batch, False, True),
    "gradient_clip_val": Effect({"gradient_clip_val": 1e-3}, lambda t, s: s.norm < 1.01e-3, False, True),
    "gradient_clip_algorithm": Effect(
        {"gradient_clip_algorithm": "value"}, lambda t, s: s.largest == 1.0, False, True, {"gradient_clip_val": 1.0}
    ),
    "activation_checkpointing": Effect(
        {"activation_checkpointing": "Linear"}, lambda t, s: t._run.recomputed is not None, False, True
    ),
    "compile": Effect({"compile": {"backend": "aot_eager"}}, lambda t, s: t._run.compilation is not None, False, True),
    "log_grad_norm": Effect({"log_grad_norm": True}, attached(GradientClipping), False, True),
    "log_every_n_steps": Effect({"log_every_n_steps": 3}, lambda t, s: s.logged, [], [3, 6]),
    "enable_progress_bar": Effect({"enable_progress_bar": True}, attached(TQDMProgressBar), False, True),
    "enable_model_summary": Effect({"enable_model_summary": True}, attached(ModelSummary), False, True),
    "enable_checkpointing": Effect({"enable_checkpointing": True}, attached(ModelCheckpoint), False, True),
    "restore_best": Effect(
        {"restore_best": "val_loss"}, lambda t, s: [one.monitor for one in t.checkpoint_callbacks], [None], ["val_loss"], SAVES
    ),
    "save_total_limit": Effect({"save_total_limit": 1}, lambda t, s: len([*Path().rglob("step-*")]), 2, 1, SAVES),
    "checksum": Effect({"checksum": "sha256"}, saved_with, "xxh3-128", "sha256", {"enable_checkpointing": True}),
    "deterministic": Effect({"deterministic": True}, lambda t, s: s.during["deterministic"], False, True),
    "benchmark": Effect({"benchmark": True}, lambda t, s: s.during["benchmark"], False, True),
    "inference_mode": Effect({"inference_mode": False}, lambda t, s: s.during["inference"], True, False),
    "detect_anomaly": Effect({"detect_anomaly": True}, lambda t, s: s.during["anomaly"], False, True),
    "reload_dataloaders_every_n_epochs": Effect({"reload_dataloaders_every_n_epochs": 1}, lambda t, s: s.made, 1, 2),
    "profiler": Effect({"profiler": "simple"}, lambda t, s: type(t.profiler).__name__, "PassThroughProfiler", "SimpleProfiler"),
    "seed": Effect({"seed": 2}, lambda t, s: round(s.inputs[0], 4), 2.9179, 1.9411),
}

# Arguments that only affect runs on several processes, on another device, in a job, or with hooks that add to checkpoints. The
# error for an invalid value shows that they are read.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accelerator": ({"accelerator": "tpus"}, "unknown accelerator 'tpus'"),
    "devices": ({"devices": 2, "strategy": Strategy("cpu")}, "devices"),
    "num_nodes": ({"num_nodes": 0}, "num_nodes"),
    "sync_batchnorm": ({"sync_batchnorm": True, "strategy": Strategy("cpu")}, "works with strategy='ddp' only"),
    "slurm_requeue": ({"slurm_requeue": "yes"}, "slurm_requeue"),
    "omit_from_checkpoint": ({"omit_from_checkpoint": "epoch"}, "'epoch' is needed to resume"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_an_argument_makes_a_difference(name: str, run_dir: Path) -> None:
    effect = EFFECTS[name]
    assert effect.look(*run(**effect.always)) == effect.without
    for path in run_dir.iterdir():
        path.rename(run_dir.parent / f"{path.name} of {name}, before")
    together = {**effect.always, **effect.arguments}
    assert effect.look(*run(**together)) == effect.given


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_is_looked_at(name: str) -> None:
    arguments, words = REFUSED[name]
    with pytest.raises(TrainkitError, match=words):
        Trainer(**arguments)


def test_all_arguments_are_here() -> None:
    assert {*EFFECTS, *REFUSED} == {*inspect.signature(Trainer).parameters} - {"unknown"}
