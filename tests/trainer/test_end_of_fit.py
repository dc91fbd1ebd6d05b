"""Every fit ends with one log line: why it stopped, and where its checkpoints and logs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.resume.saving import saving
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit import Callback
from trainkit.callbacks import EarlyStopping, Timer
from trainkit.loggers import CSVLogger


class Worse(TinyModule):
    """Its validation loss grows."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.trainer.current_epoch))


class Stopping(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = True


def fit(*callbacks: Callback, module: Any = None, ckpt_path: str | None = None, **arguments: Any) -> Any:
    trainer = saving(*callbacks, **{"max_epochs": 3, **arguments})
    trainer.fit(module or TinyModule(), tiny_loader(), tiny_loader(8), ckpt_path=ckpt_path)
    return trainer


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("fit ended")]


PLACE = "Checkpoints in runs/version_0/checkpoints"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, "fit ended at step 12, epoch 3: max_epochs=3 reached."),
        ({"max_steps": 5}, "fit ended at step 5, epoch 1: max_steps=5 reached."),
    ],
)
def test_a_limit(arguments: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(**arguments)
    assert caplog.messages[-1] == f"{expected} {PLACE}"
    assert len(ends(caplog)) == 1


def test_where_the_logs_are(caplog: pytest.LogCaptureFixture) -> None:
    fit(logger=CSVLogger())
    place = "runs/logs/default/version_0"
    assert caplog.messages[-1].endswith(f"Checkpoints in {place}/checkpoints; logs in {place}")


def test_without_checkpoints_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    fit(enable_checkpointing=False)
    assert caplog.messages[-1] == "fit ended at step 12, epoch 3: max_epochs=3 reached."


def test_a_trial_run(caplog: pytest.LogCaptureFixture) -> None:
    fit(fast_dev_run=True)
    assert caplog.messages[-1] == "fit ended at step 1, epoch 1: fast_dev_run, which writes nothing."


def test_a_stop_that_was_requested(caplog: pytest.LogCaptureFixture) -> None:
    fit(Stopping())
    assert caplog.messages[-1] == f"fit ended at step 2, epoch 0: trainer.should_stop was set. {PLACE}"


def test_early_stopping_and_what_a_resume_of_it_says(caplog: pytest.LogCaptureFixture) -> None:
    fit(EarlyStopping("val_loss", patience=2), module=Worse(), max_epochs=9)
    assert ends(caplog) == [
        "fit ended at step 12, epoch 3: EarlyStopping: val_loss has not improved for 2 checks. Best value: 0. " + PLACE
    ]
    caplog.clear()
    trainer = fit(EarlyStopping("val_loss", patience=2), module=Worse(), max_epochs=9, ckpt_path="auto")
    assert trainer.global_step == 12
    assert (
        "EarlyStopping had stopped the resumed run: val_loss had not improved for 2 checks. It does not train "
        "further. To continue, raise patience=2: EarlyStopping('val_loss', patience=5)"
    ) in caplog.messages
    assert ends(caplog) == [f"fit ended at step 12, epoch 3: EarlyStopping: val_loss had not improved for 2 checks. {PLACE}"]
    trainer = fit(EarlyStopping("val_loss", patience=5), module=Worse(), max_epochs=9, ckpt_path="auto")
    assert trainer.global_step > 12, "the advice works"


def test_a_time_limit_and_what_a_resume_of_it_says(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Callback):
        """Sets the elapsed time of the Timer to its limit after the second batch."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                timer._before["train"] = 3600.0

    for step in (3, 3):
        caplog.clear()
        timer = Timer("00:01:00:00", verbose=False)
        trainer = fit(Late(), timer, ckpt_path="auto")
        assert trainer.global_step == step
        assert ends(caplog) == [f"fit ended at step 3, epoch 0: Timer: the time limit of 1:00:00 is reached. {PLACE}"]
    assert any("has no time left: the time limit of 1:00:00 is reached" in text for text in caplog.messages)


def test_max_epochs_were_reached_before_the_resume(caplog: pytest.LogCaptureFixture) -> None:
    fit()
    caplog.clear()
    fit(ckpt_path="auto")
    assert any("nothing is left to train: max_epochs=3" in text for text in caplog.messages)
    assert ends(caplog) == [f"fit ended at step 12, epoch 3: max_epochs=3 reached. {PLACE}"]


def test_a_path_elsewhere_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder outside the working directory is shown with its absolute path."""
    root = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    fit(default_root_dir=root)
    assert caplog.messages[-1].endswith(f"Checkpoints in {root}/version_0/checkpoints")


class Overflowing(TinyModule):
    """Its loss is infinite for the first `batches` batches of each epoch."""

    def __init__(self, batches: int = 1000) -> None:
        super().__init__()
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx < self.batches else loss


@pytest.mark.parametrize("batches, skipped", [(4, "4 steps were"), (1, "1 step was")])
def test_the_loss_scaler_skipped_every_step(batches: int, skipped: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(module=Overflowing(), precision="16-mixed", max_epochs=1, limit_train_batches=batches)
    assert trainer.global_step == 0
    assert caplog.messages[-1] == (
        f"fit ended at step 0, epoch 1: max_epochs=1 reached. No optimizer step was made: {skipped} skipped, because the "
        "scaled gradients were infinite or NaN. Check that the loss is finite. If it is, the loss scale is still adapting: "
        f"train for more steps, or use Trainer(precision='bf16-mixed'). {PLACE}"
    )


def test_the_loss_scaler_skipped_some_steps(caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(module=Overflowing(batches=1), precision="16-mixed", max_epochs=9)
    assert trainer.global_step > 0
    assert "No optimizer step" not in caplog.messages[-1]
