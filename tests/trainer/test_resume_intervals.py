"""What is due in a resumed run is computed from its own arguments, not from those of the run that saved the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch.utils.data import DataLoader, Sampler, TensorDataset

from trainkit import Callback

EPOCH = 10  # micro-batches


class Validated(Callback):
    """The micro-batches since the start of training at which validation has run."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.at.append(trainer.current_epoch * EPOCH + trainer._run.progress.batch_idx + 1)


class Save(Callback):
    """Saves `there` in a hook of a training micro-batch, or in the validation after it."""

    def __init__(self, hook: str, batch: int) -> None:
        self.batch, self.seen = batch, 0
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *_: Any) -> None:
        at = trainer.current_epoch * EPOCH + trainer._run.progress.batch_idx + 1
        if at == self.batch and not Path("there").exists():
            trainer.save_checkpoint("there")


def fit(*callbacks: Callback, loader: Any = None, ckpt_path: str | None = None, **arguments: Any) -> list[int]:
    validated = Validated()
    trainer = make_trainer(validated, *callbacks, **{"max_epochs": 2, **arguments})
    trainer.fit(TinyModule(), loader or tiny_loader(4 * EPOCH * trainer.world_size), tiny_loader(8), ckpt_path=ckpt_path)
    return validated.at


FOUR, SIX = {"val_check_interval": 4}, {"val_check_interval": 6}
ACROSS: dict[str, Any] = {"check_val_every_n_epoch": None}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4, then 6": (FOUR, SIX),
    "6, then 4": (SIX, FOUR),
    "0.2, then 0.5": ({"val_check_interval": 0.2}, {"val_check_interval": 0.5}),
    "0.5, then 0.2": ({"val_check_interval": 0.5}, {"val_check_interval": 0.2}),
    "epochs, then 4": ({}, FOUR),
    "across epochs: 4, then 6": ({**FOUR, **ACROSS}, {**SIX, **ACROSS}),
    "across epochs: 6, then 4": ({**SIX, **ACROSS}, {**FOUR, **ACROSS}),
    "4, then 6 across epochs": (FOUR, {**SIX, **ACROSS}),
    "6 across epochs, then 4": ({**SIX, **ACROSS}, FOUR),
    "every second epoch, then each": ({**FOUR, "check_val_every_n_epoch": 2}, FOUR),
    "each epoch, then every second": (FOUR, {**FOUR, "check_val_every_n_epoch": 2}),
    "3 steps, then 4": ({"val_every_n_steps": 3}, FOUR),
    "4, then 3 steps": (FOUR, {"val_every_n_steps": 3}),
    "no validation, then 4": ({"limit_val_batches": 0}, FOUR),
    "fewer batches, then all": ({"val_check_interval": 0.5, "limit_train_batches": 8}, {"val_check_interval": 0.5}),
    "4, then windows of 2": (FOUR, {**FOUR, "accumulate_grad_batches": 2}),
    "windows of 4, then 3": ({**FOUR, "accumulate_grad_batches": 4}, {"val_check_interval": 3}),
}


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 10])
@pytest.mark.parametrize("change", CHANGES)
def test_another_interval(change: str, batch: int) -> None:
    before, now = CHANGES[change]
    fit(Save("on_train_batch_start", batch + 1), **before)
    size = before.get("accumulate_grad_batches", 1) * now.get("accumulate_grad_batches", 1)
    if not Path("there").exists() or batch % size:
        pytest.skip("no window ends there")
    assert fit(ckpt_path="there", **now) == [at for at in fit(**now) if at > batch]


@pytest.mark.parametrize("change", ["4, then 6", "6, then 4", "across epochs: 4, then 6", "4, then 6 across epochs"])
@pytest.mark.parametrize("batch", [3, 4, 6, 7, 12, 14])
def test_another_interval_after_the_optimizer_step(change: str, batch: int) -> None:
    """Its validation has not been run, so that it is run if it is due by the new arguments."""
    before, now = CHANGES[change]
    fit(Save("on_train_batch_end", batch), **before)
    assert fit(ckpt_path="there", **now) == [at for at in fit(**now) if at >= batch]


KEPT: dict[str, dict[str, Any]] = {
    "4": FOUR,
    "0.3": {"val_check_interval": 0.3},
    "across epochs": {"val_check_interval": 7, **ACROSS},
    "windows of 4": {"val_check_interval": 8, "accumulate_grad_batches": 4},
    "every second epoch": {**FOUR, "check_val_every_n_epoch": 2},
}


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end"])
@pytest.mark.parametrize("kept", KEPT)
def test_the_same_interval(kept: str, hook: str) -> None:
    """A validation that has run is not run again, and one that was due and has not run is run."""
    whole = fit(**KEPT[kept])
    for batch in range(1, 2 * EPOCH + 1):
        fit(Save(hook, batch), **KEPT[kept])
        if Path("there").exists():
            at_start, window = hook == "on_train_batch_start", KEPT[kept].get("accumulate_grad_batches", 1)
            started = (batch - 1) // EPOCH * EPOCH + (batch - 1) % EPOCH // window * window
            first = started + 1 if at_start or (batch % EPOCH % window and hook == "on_train_batch_end") else batch
            assert fit(ckpt_path="there", **KEPT[kept]) == [at for at in whole if at >= first], batch
            for file in Path("there").iterdir():
                file.unlink()
            Path("there").rmdir()


class Skip(Callback):
    """Skips the rest of the first epoch at its fourth micro-batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if (trainer.current_epoch, batch_idx) == (0, 3) else None


def test_across_epochs_a_micro_batch_that_was_skipped_does_not_count() -> None:
    interval = {**FOUR, **ACROSS}
    whole = fit(Skip(), **interval)
    fit(Skip(), Save("on_train_batch_start", EPOCH + 1), **interval)
    assert fit(ckpt_path="there", **interval) == whole == [11, 15, 19]


class Growing(Sampler[int]):
    """Has 24 samples in the first epoch, and 48 from then on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 48 if self.epoch else 24

    def __iter__(self) -> Any:
        return iter(range(len(self)))


@pytest.mark.parametrize("batch", range(11, 22))
def test_a_part_of_an_epoch_whose_length_has_changed(batch: int) -> None:
    def loader() -> Any:
        return DataLoader(TensorDataset(*tiny_loader(48).dataset.tensors), batch_size=4, sampler=Growing())

    whole = fit(loader=loader(), val_check_interval=0.25)
    fit(Save("on_train_batch_start", batch), loader=loader(), val_check_interval=0.25)
    assert fit(loader=loader(), val_check_interval=0.25, ckpt_path="there") == [at for at in whole if at >= batch]


def on_ranks(interval: int, ckpt_path: str | None) -> list[int]:
    save = [] if ckpt_path else [Save("on_train_batch_start", 6)]
    return fit(*save, val_check_interval=interval, ckpt_path=ckpt_path)


def test_another_interval_on_two_ranks() -> None:
    run_world(2, on_ranks, 4, None)
    assert run_world(2, on_ranks, 6, "there") == [[6, 16]] * 2
