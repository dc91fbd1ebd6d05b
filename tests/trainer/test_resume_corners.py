"""Special cases of a resume: runs that were stopped, ends of epochs, reloaded loaders, and streams that save their position."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saving import Adam, SaveIn, saved, saving
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import Recorder, make_trainer, parameters_of, same
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Accelerator, Callback, set_seed
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import ConfigurationError, Preempted, StateMismatchError


class StopAt(Callback):
    """Sets `should_stop` in a hook at a step."""

    def __init__(self, step: int, hook: str = "on_train_batch_end") -> None:
        self.step = step
        setattr(self, hook, self._stop)

    def _stop(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class Signal(Callback):
    """Sends a signal to this process in the n-th call of a hook."""

    def __init__(self, hook: str, number: int, sent: int = signal.SIGTERM) -> None:
        self.calls, self.number, self.sent = 0, number, sent
        setattr(self, hook, self._send)

    def _send(self, trainer: Any, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.number:
            os.kill(os.getpid(), self.sent)


# --------------------------------------------------------------------------------------------------- runs that were stopped


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize("every", [None, 1, 1000])
def test_a_run_that_was_asked_to_stop_resumes(every: int | None, hook: str) -> None:
    """The resumed run does not stop again: it continues after the last batch, and repeats or skips none."""
    step = 5 if hook == "on_train_batch_end" else 4
    callback = ModelCheckpoint() if every is None else ModelCheckpoint(every_n_train_steps=every)
    first, second = Recorder(), Recorder()
    saving(callback, StopAt(step, hook), first, max_epochs=3).fit(Adam(), tiny_loader())
    again = ModelCheckpoint() if every is None else ModelCheckpoint(every_n_train_steps=every)
    module = Adam()
    saving(again, second, max_epochs=3).fit(module, tiny_loader(), ckpt_path="auto")
    assert first.batches + second.batches == [(epoch, m) for epoch in range(3) for m in range(4)]
    whole = Adam()
    make_trainer(max_epochs=3).fit(whole, tiny_loader())
    assert same(parameters_of(module), parameters_of(whole))


def test_a_stop_that_min_epochs_holds_up_is_not_forgotten() -> None:
    """A stop request that waits for min_epochs is saved, and ends the resumed run after min_epochs."""
    recorder = Recorder()
    saving(StopAt(2), max_epochs=9, min_epochs=3, max_steps=8).fit(Adam(), tiny_loader())
    trainer = saving(recorder, max_epochs=9, min_epochs=3)
    trainer.fit(Adam(), tiny_loader(), ckpt_path="runs/version_0/checkpoints/step-00000004")
    assert (trainer.current_epoch, recorder.batches[-1]) == (3, (2, 3))


def test_early_stopped_run_resumes_without_training() -> None:
    """A run that EarlyStopping has ended trains no batch when it is resumed with the same patience."""

    class Flat(Adam):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    saved(EarlyStopping("val_loss", patience=2), module=Flat(), max_epochs=20)
    recorder = Recorder()
    saving(EarlyStopping("val_loss", patience=2), recorder, max_epochs=20).fit(
        Flat(), tiny_loader(), tiny_loader(8), ckpt_path="auto"
    )
    assert recorder.batches == []


@pytest.mark.parametrize("hook, number", [("on_train_batch_end", 8), ("on_validation_batch_end", 3)])
def test_a_signal_at_the_last_step_leaves_nothing_undone(hook: str, number: int) -> None:
    """The resumed run makes the final validation, and calls the final hooks, if the interrupted run did not."""

    def run(*callbacks: Callback, **arguments: Any) -> Any:
        trainer = saving(*callbacks, max_steps=8, max_epochs=2, val_check_interval=4)
        trainer.fit(Adam(), tiny_loader(), tiny_loader(8), **arguments)
        return trainer

    whole = Recorder()
    expected = make_trainer(whole, max_steps=8, max_epochs=2, val_check_interval=4)
    expected.fit(Adam(), tiny_loader(), tiny_loader(8))
    first, second = Recorder(), Recorder()
    with pytest.raises(Preempted):
        run(first, Signal(hook, number))
    trainer = run(second, ckpt_path="auto")
    assert trainer.callback_metrics == expected.callback_metrics
    assert trainer.current_epoch == expected.current_epoch
    assert first.epochs + second.epochs == whole.epochs
    assert set(first.validations + second.validations) == set(whole.validations)


# -------------------------------------------------------------------------------------------------------- ends of epochs


@pytest.mark.parametrize("arguments", [{"val_check_interval": 3}, {"val_check_interval": 3, "check_val_every_n_epoch": None}])
def test_validation_keeps_its_cadence_when_a_run_gets_more_steps(arguments: dict[str, Any]) -> None:
    def run(steps: int, recorder: Recorder, **given: Any) -> None:
        trainer = saving(recorder, max_steps=steps, **arguments)
        trainer.fit(Adam(), tiny_loader(20), tiny_loader(8), **given)

    whole, first, second = Recorder(), Recorder(), Recorder()
    make_trainer(whole, max_steps=14, **arguments).fit(Adam(), tiny_loader(20), tiny_loader(8))
    run(4, first)
    run(14, second, ckpt_path="auto")
    assert first.validations + second.validations == whole.validations


def test_a_save_at_the_end_of_an_epoch_counts_its_batches_once() -> None:
    arguments: dict[str, Any] = {"max_steps": 20, "val_check_interval": 5, "check_val_every_n_epoch": None}
    whole, second = Recorder(), Recorder()
    make_trainer(whole, SaveIn("on_train_epoch_end", 1), **arguments).fit(Adam(), tiny_loader(), tiny_loader(8))
    make_trainer(second, **arguments).fit(Adam(), tiny_loader(), tiny_loader(8), ckpt_path="there")
    assert second.validations == whole.validations


def test_a_save_at_the_end_of_an_epoch_that_was_left_early() -> None:
    """A resumed run with more steps trains the rest of the epoch."""
    recorder = Recorder()
    make_trainer(SaveIn("on_train_epoch_end", 1), max_steps=3, max_epochs=2).fit(Adam(), tiny_loader(20))
    make_trainer(recorder, max_epochs=2).fit(Adam(), tiny_loader(20), ckpt_path="there")
    assert recorder.batches == [(0, 3), (0, 4), *((1, m) for m in range(5))]


def test_the_steps_of_a_validation_log_at_the_end_of_an_epoch_of_unknown_length() -> None:
    """After a resume, the validation counters are those of an uninterrupted run, even if the training length is unknown."""

    class Stepwise(Adam):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            steps.append((trainer.global_step, trainer._run.validation.count))

    class Unsized:
        def __iter__(self) -> Any:
            return iter(list(tiny_loader()))

    steps: list[tuple[int, int]] = []
    make_trainer(max_epochs=2).fit(Stepwise(), Unsized(), tiny_loader(8))
    whole = list(steps)
    steps.clear()
    with pytest.raises(Preempted):
        saving(Signal("on_validation_batch_end", 1), max_epochs=2).fit(Stepwise(), Unsized(), tiny_loader(8))
    steps.clear()
    saving(max_epochs=2).fit(Stepwise(), Unsized(), tiny_loader(8), ckpt_path="auto")
    assert steps == whole


# ------------------------------------------------------------------------------------------------------------------ data


def test_loaders_that_are_asked_for_by_epoch() -> None:
    """A resumed run requests the loaders that an uninterrupted run has at that epoch."""

    class Sharded(Adam):
        def train_dataloader(self) -> Any:
            asked.append(self.trainer.current_epoch)
            return tiny_loader(8 * (1 + self.trainer.current_epoch // 2))

    asked: list[int] = []
    arguments: dict[str, Any] = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2}
    make_trainer(**arguments).fit(Sharded())
    whole = list(asked)
    asked.clear()
    make_trainer(SaveIn("on_train_batch_end", 11), **arguments).fit(Sharded())
    asked.clear()
    recorder = Recorder()
    make_trainer(recorder, **arguments).fit(Sharded(), ckpt_path="there")
    assert (whole, asked) == ([0, 2, 4], [2, 4])
    assert recorder.batches[0] == (3, 3)


class Endless(IterableDataset):
    """A stream that continues from epoch to epoch, and saves its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.full((4,), float(self.at)), torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Read(Adam):
    """Records the samples that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(float(batch[0][0, 0]))
        return self.loss(batch)


@pytest.mark.parametrize("limit", [3, 12])
def test_a_stream_continues_past_the_ends_of_epochs(limit: int) -> None:
    arguments = {"limit_train_batches": limit, "max_epochs": 3}
    whole, rest = Read(), Read()
    make_trainer(**arguments).fit(whole, DataLoader(Endless(), batch_size=1))
    saving(**{**arguments, "max_epochs": 2}).fit(Read(), DataLoader(Endless(), batch_size=1))
    saving(**arguments).fit(rest, DataLoader(Endless(), batch_size=1), ckpt_path="auto")
    assert rest.read == whole.read[-limit:]


def test_a_state_that_was_loaded_and_not_yet_used_is_saved_again() -> None:
    """A loader's state that is loaded, not read from, and saved again is unchanged."""

    def loop() -> tuple[Accelerator, Any]:
        set_seed(3)
        accelerator = Accelerator()
        _, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(Endless(), batch_size=1))
        return accelerator, loader

    accelerator, loader = loop()
    reading = iter(loader)
    for _ in range(5):
        next(reading)
    accelerator.save_state("first")
    accelerator, loader = loop()
    accelerator.load_state("first", resume_loaders=True)
    accelerator.save_state("second")
    accelerator, loader = loop()
    accelerator.load_state("second", resume_loaders=True)
    assert float(next(iter(loader))[0][0, 0]) == 6.0


def test_a_position_that_does_not_fit_leaves_an_own_loop_as_it_was() -> None:
    """If load_state fails because of the position in the data, it does not change the model."""

    def loop(batch_size: int) -> tuple[Accelerator, Any, Any]:
        set_seed(3)
        accelerator, model = Accelerator(), torch.nn.Linear(4, 1)
        _, loader = accelerator.prepare(model, tiny_loader(24, batch_size=batch_size))
        return accelerator, model, loader

    accelerator, _, loader = loop(4)
    next(iter(loader))
    accelerator.save_state("there")
    accelerator, model, _ = loop(3)
    before = parameters_of(model)
    with pytest.raises(StateMismatchError, match="is inside a micro-batch"):
        accelerator.load_state("there", resume_loaders=True)
    assert same(parameters_of(model), before)


# ------------------------------------------------------------------------------------------------------ after a run


def test_an_interrupted_trainer_can_be_used() -> None:
    trainer = saving(Signal("on_train_batch_end", 2, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Adam(), tiny_loader())
    assert trainer.validate(Adam(), tiny_loader(8), verbose=False)


def test_a_refused_fit_inside_a_fit_leaves_the_outer_one_its_signals() -> None:
    """The outer fit still handles signals after a nested fit was rejected."""

    class Nested(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with pytest.raises(ConfigurationError, match="is running 'fit'"):
                trainer.fit(Adam(), tiny_loader())

    recorder = Recorder()
    with pytest.raises(Preempted):
        saving(Nested(), Signal("on_train_batch_end", 3), recorder).fit(Adam(), tiny_loader(48))
    assert len(recorder.batches) == 3


def test_an_interrupt_in_the_tear_down_gives_everything_back() -> None:
    """Ctrl-C in a teardown leaves no thread behind, and the folder can be used again."""

    class Interrupting(Callback):
        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saving(Interrupting()).fit(Adam(), tiny_loader())
    assert not [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    saving(max_epochs=2).fit(Adam(), tiny_loader(), ckpt_path="auto")


def test_weights_of_another_module_are_not_saved_as_the_runs(caplog: pytest.LogCaptureFixture) -> None:
    """After an evaluation of another module, only its weights are saved, and a notice says so."""
    trainer = make_trainer()
    trainer.fit(Adam(), tiny_loader())
    trainer.validate(Adam(), tiny_loader(8), verbose=False)
    trainer.save_checkpoint("there")
    assert "this Trainer has not run fit with the module, so save_checkpoint saves its weights only" in caplog.text
    assert not open_checkpoint("there").manifest.contents["resumable"]
    trainer.save_checkpoint("there", weights_only=True)


def test_the_best_of_weights_only_checkpoints() -> None:
    """A new process finds the best checkpoint as well, because the manifests contain the scores."""

    def callback() -> ModelCheckpoint:
        return ModelCheckpoint("weights", monitor="val_loss", mode="max", save_weights_only=True, keep_last=-1)

    saved(callback(), max_epochs=3)
    module = Adam()
    saving(callback()).validate(module, tiny_loader(8), verbose=False, ckpt_path="best")
    expected = Adam.load_from_checkpoint(Path("weights/step-00000004"))
    assert same(parameters_of(module), parameters_of(expected))
