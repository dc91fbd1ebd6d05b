"""`restore_best`, `save_total_limit` and `validate_at_end`: which checkpoints a fit keeps, and what the module has after it."""

from __future__ import annotations

import copy
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.resuming import forked
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn

from trainkit import Callback, TrainModule, load_state_dict
from trainkit.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from trainkit.checkpoint import list_checkpoints, open_checkpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, Preempted
from trainkit.trainer.best_weights import best_mode


class Scripted(TinyModule):
    """Each epoch logs one of these values as `val_loss`, and its negative as `val_score`; a buffer counts batches."""

    def __init__(self, *values: float) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.values = values
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        value = self.values[min(max(self.trainer.global_step - 1, 0) // 4, len(self.values) - 1)]
        self.log_dict({"val_loss": value, "val_score": -value})


class Ended(Callback):
    """What the module had when training ended, before the best weights are restored; when it was validated."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}
        self.validated: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.last = copy.deepcopy(module.state_dict())


def saving(*callbacks: Callback, **arguments: Any) -> Any:
    options = {"max_epochs": 4, "num_sanity_val_steps": 0, "default_root_dir": "runs", "enable_checkpointing": True}
    return make_trainer(*callbacks, **options | arguments)


def fitted(*values: float, callbacks: tuple[Callback, ...] = (), **arguments: Any) -> tuple[Any, Scripted, Ended]:
    """A fit of epochs of four steps, each with a validation."""
    ended, module = Ended(), Scripted(*values)
    trainer = saving(*callbacks, ended, **arguments)
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    return trainer, module, ended


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def steps(trainer: Any) -> list[int]:
    """The steps of the checkpoints that a trainer has kept."""
    folder = Path(trainer.checkpoint_callback.dirpath)
    return sorted(one.manifest.step for one in list_checkpoints(folder) if one.manifest is not None)


# --------------------------------------------------------------------------------------------------- restore_best


def test_the_module_has_the_best_weights(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module, ended = fitted(3.0, 1.0, 2.0, 4.0, restore_best="val_loss")
    best = trainer.checkpoint_callback.best_model_path
    assert open_checkpoint(best).manifest.step == 8
    assert same(module.state_dict(), load_state_dict(best))
    assert module.batches == 8
    assert not same(module.state_dict(), ended.last)
    said = [line for line in caplog.messages if "restore_best" in line]
    assert len(said) == 1
    assert f"{best} (step 8, 2 epochs complete), val_loss=1, the smallest, instead of those of the last step." in said[0]
    assert (trainer.global_step, trainer.current_epoch, trainer.ckpt_path) == (16, 4, best)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("val_loss", "min"),
        ("loss", "min"),
        ("val_loss_epoch", "min"),
        ("val_loss/dataloader_idx_1", "min"),
        ("val_accuracy", "max"),
        ("eval_f1", "max"),
        ("loss_scale", "max"),
    ],
)
def test_which_values_are_good(metric: str, mode: str) -> None:
    assert best_mode(metric) == mode
    [added] = saving(restore_best=metric).checkpoint_callbacks
    assert (added.monitor, added.mode, added.save_top_k) == (metric, mode, 1)


def test_a_name_that_says_the_opposite() -> None:
    class Perplexity(TinyModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("val_perplexity", self.loss(batch).exp())

    trainer = saving(restore_best="val_perplexity", max_epochs=1)
    with pytest.warns(
        TrainkitWarning, match=r"the best. If the lowest is: restore_best=ModelCheckpoint\(monitor='val_perplexity'"
    ):
        trainer.fit(Perplexity(), tiny_loader(), tiny_loader(4))


def test_a_metric_that_should_be_large() -> None:
    trainer, module, _ = fitted(3.0, 1.0, 2.0, restore_best="val_score")
    assert module.batches == 8
    assert "the checkpoint with the largest val_score" in trainer.explain()


def test_the_callback_that_the_user_has() -> None:
    own = ModelCheckpoint(monitor="val_score", mode="min", filename="worst")  # its mode counts
    trainer, module, _ = fitted(1.0, 2.0, 3.0, 2.0, callbacks=(own,), restore_best="val_score")
    assert trainer.checkpoint_callbacks == [own]
    assert module.batches == 12

    given = ModelCheckpoint(monitor="val_score", mode="min", dirpath="given")
    trainer, module, _ = fitted(1.0, 2.0, 3.0, 2.0, restore_best=given)
    assert trainer.checkpoint_callbacks == [given]
    assert module.batches == 12

    other = ModelCheckpoint(every_n_train_steps=3, dirpath="others")
    trainer, module, _ = fitted(2.0, 1.0, 3.0, callbacks=(other,), restore_best="val_loss")
    first, added = trainer.checkpoint_callbacks
    assert (first, added.monitor, added.keep_last) == (other, "val_loss", 0)
    assert module.batches == 8


def test_the_last_is_the_best(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module, ended = fitted(4.0, 3.0, 2.0, 1.0, restore_best="val_loss")
    assert same(module.state_dict(), ended.last)
    assert trainer.ckpt_path is None, "nothing was loaded"
    assert "is of the last step, whose weights the module has" in caplog.text


def test_after_early_stopping() -> None:
    trainer, module, _ = fitted(
        1.0, 2.0, callbacks=(EarlyStopping("val_loss", patience=2),), max_epochs=9, restore_best="val_loss"
    )
    assert (trainer.current_epoch, module.batches) == (3, 4)


def test_the_run_resumes_from_the_last_state_all_the_same() -> None:
    """A run with `restore_best` that is continued is the run that was never stopped; so is its best."""
    whole, module, ended = fitted(3.0, 1.0, 2.0, 4.0, 5.0, max_epochs=6, restore_best="val_loss", default_root_dir="whole")
    _, first, _ = fitted(3.0, 1.0, 2.0, 4.0, 5.0, max_epochs=3, restore_best="val_loss")
    assert first.batches == 8
    again, after = saving(resumed := Ended(), max_epochs=6, restore_best="val_loss"), Scripted(3.0, 1.0, 2.0, 4.0, 5.0)
    again.fit(after, tiny_loader(), tiny_loader(4), ckpt_path="auto")
    assert same(resumed.last, ended.last)
    assert same(after.state_dict(), module.state_dict())
    assert resumed.validated == [16, 20, 24]
    assert steps(again) == steps(whole)


def resumed(*values: float) -> tuple[Any, Scripted, Ended]:
    """The same fit, resumed, with one epoch for each value."""
    ended, module = Ended(), Scripted(*values)
    trainer = saving(ended, restore_best="val_loss", max_epochs=len(values))
    trainer.fit(module, tiny_loader(), tiny_loader(4), ckpt_path="auto")
    return trainer, module, ended


def test_a_best_checkpoint_that_was_removed_before_the_resume(caplog: pytest.LogCaptureFixture) -> None:
    values = (3.0, 1.0, 2.0, 4.0)
    first, _, _ = fitted(*values, restore_best="val_loss", max_epochs=3)
    shutil.rmtree(first.checkpoint_callback.best_model_path)
    trainer, module, _ = resumed(*values)
    best = trainer.checkpoint_callback.best_model_path
    assert (open_checkpoint(best).manifest.step, float(trainer.checkpoint_callback.best_model_score)) == (12, 2.0)
    assert same(module.state_dict(), load_state_dict(best))
    assert any(
        "step-00000008, of the best by 'val_loss', no longer exists; the best of the others" in m for m in caplog.messages
    )


def test_a_best_checkpoint_that_was_removed_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    first, _, _ = fitted(1.0, math.nan, restore_best="val_loss", max_epochs=2)
    shutil.rmtree(first.checkpoint_callback.best_model_path)
    trainer, _, _ = resumed(1.0, math.nan, 5.0)
    assert open_checkpoint(trainer.checkpoint_callback.best_model_path).manifest.step == 12
    assert any("no longer exists; there is no other with a value" in message for message in caplog.messages)


def test_a_run_that_had_ended_already() -> None:
    _, module, _ = fitted(3.0, 1.0, 2.0, restore_best="val_loss")
    trainer, again = saving(restore_best="val_loss"), Scripted(3.0, 1.0, 2.0)
    trainer.fit(again, tiny_loader(), tiny_loader(4), ckpt_path="last")
    assert again.batches == 8
    assert same(again.state_dict(), module.state_dict())


def killed_run(folder: str, kill: int | None) -> list[float]:
    """One process of a run that is killed at a step; returns the weights at its end."""

    class Kill(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    module = Scripted(3.0, 1.0, 2.0, 4.0)
    arguments = {"seed": 3, "restore_best": "val_loss", "save_total_limit": 2, "validate_at_end": True, "max_steps": 18}
    trainer = saving(Kill(), default_root_dir=folder, max_epochs=-1, **arguments)
    trainer.fit(module, tiny_loader(shuffle=True), tiny_loader(4), ckpt_path="auto")
    assert steps(trainer) == [8, 18]
    return [*module.layer.weight.flatten().tolist(), *module.layer.bias.tolist(), float(module.batches)]


def test_a_run_that_is_killed_and_resumed_has_the_same_best_weights() -> None:
    status, expected = forked(lambda: killed_run("plain", None))
    assert status == 0
    for step in (6, 10, 17):
        status, _ = forked(lambda step=step: killed_run("killed", step))  # type: ignore[misc]
        assert os.WIFSIGNALED(status)
    status, answer = forked(lambda: killed_run("killed", None))
    assert status == 0
    assert answer == expected
    assert answer[-1] == 8


class Signalled(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 10:
            os.kill(os.getpid(), self.number)

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_a_fit_that_a_signal_stops_restores_nothing(number: int, kind: type[BaseException]) -> None:
    module, trainer = Scripted(1.0, 2.0), saving(Signalled(number), restore_best="val_loss")
    with pytest.raises(kind):
        trainer.fit(module, tiny_loader(), tiny_loader(4))
    assert module.batches == 10
    assert open_checkpoint(trainer.checkpoint_callback.last_model_path).manifest.step == 10


def test_a_signal_after_the_last_step_restores_nothing() -> None:
    class Late(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    module, trainer = Scripted(1.0, 2.0), saving(Late(), restore_best="val_loss")
    with pytest.raises(Preempted):
        trainer.fit(module, tiny_loader(), tiny_loader(4))
    assert module.batches == 16


@pytest.mark.parametrize("values", [(math.nan,), (math.nan, 2.0, math.nan)])
def test_nan_is_never_the_best(values: tuple[float, ...]) -> None:
    if len(values) == 1:
        with pytest.warns(
            TrainkitWarning, match="no checkpoint has a value of 'val_loss' that is a number, so the module keeps"
        ):
            _, module, _ = fitted(*values, restore_best="val_loss")
        assert module.batches == 16
    else:
        _, module, _ = fitted(*values, restore_best="val_loss")
        assert module.batches == 8


def test_no_validation_was_due() -> None:
    with pytest.warns(TrainkitWarning, match=r"so the module keeps the weights of the last step \(3\)"):
        _, module, ended = fitted(1.0, max_steps=3, restore_best="val_loss")
    assert module.batches == 3
    assert ended.validated == []


@pytest.mark.parametrize("metric", ["val_loss", "eval_loss"])
@pytest.mark.parametrize("arguments", [{}, {"limit_val_batches": 0}])
def test_a_validation_that_cannot_be(metric: str, arguments: dict[str, Any]) -> None:
    trainer = saving(restore_best=metric, **arguments)
    with pytest.raises(ConfigurationError, match=f"restore_best='{metric}' needs a validation, which this fit does not have"):
        trainer.fit(TinyModule(), tiny_loader())


def test_a_metric_of_the_training() -> None:
    trainer, module = saving(restore_best="train_loss", max_epochs=2), TinyModule()
    trainer.fit(module, tiny_loader())
    assert trainer.checkpoint_callback.best_model_score is not None


def lose(path: Path) -> None:
    shutil.rmtree(path)


def flip(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(("damage", "kind"), [(lose, CheckpointNotFoundError), (flip, CorruptCheckpointError)])
def test_the_best_is_missing_or_damaged(damage: Any, kind: type[Exception]) -> None:
    class Damage(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 3:
                trainer._save_policy.wait()
                damage(Path(trainer.checkpoint_callback.best_model_path))

    module, trainer = Scripted(1.0, 2.0), saving(Damage(), restore_best="val_loss")
    with pytest.raises(kind, match=r"restore_best: the best checkpoint cannot be restored, and the module keeps the") as raised:
        trainer.fit(module, tiny_loader(), tiny_loader(4))
    assert "step-00000004" in str(raised.value)
    assert module.batches == 16
    assert open_checkpoint(trainer.checkpoint_callback.last_model_path).manifest.step == 16


def test_save_checkpoint_after_it_saves_weights_only(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer's state is of the last step: a run that resumed from both would be neither."""
    trainer, module, _ = fitted(1.0, 2.0, restore_best="val_loss")
    trainer.save_checkpoint("after")
    assert "the optimizer is that of the last step" in caplog.text
    assert open_checkpoint("after").manifest.contents["resumable"] is False
    assert same(load_state_dict("after"), module.state_dict())
    trainer.fit(module, tiny_loader(), tiny_loader(4))  # a new fit, whose best is its last: it starts from these weights
    assert trainer.global_step == 16


def test_an_error_after_it_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            assert module.batches == 4, "hooks at the end of a fit see the best weights"
            raise ValueError("later")

    trainer = saving(Fails(), restore_best="val_loss")
    with pytest.raises(ValueError, match="later"):
        trainer.fit(Scripted(1.0, 2.0), tiny_loader(), tiny_loader(4))
    assert steps(trainer) == [4, 12, 16]
    assert "nothing was saved, because the module has the weights of the best checkpoint" in caplog.text


def test_averaged_weights() -> None:
    """The metric was computed with the average, and the best checkpoint has it; a save after the fit has it, too."""
    trainer, module, _ = fitted(2.0, 1.0, 3.0, callbacks=(ExponentialMovingAverage(decay=0.5),), restore_best="val_loss")
    best = trainer.checkpoint_callback.best_model_path
    assert open_checkpoint(best).manifest.step == 8
    assert same(module.state_dict(), load_state_dict(best))
    trainer.save_checkpoint("after")
    assert same(load_state_dict("after"), load_state_dict(best))


def test_weights_that_are_averaged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    trainer, module, _ = fitted(4.0, 3.0, 2.0, 1.0, callbacks=(swa,), restore_best="val_loss")
    assert open_checkpoint(trainer.checkpoint_callback.best_model_path).manifest.step == 16
    assert same(module.state_dict(), load_state_dict(trainer.checkpoint_callback.best_model_path))
    assert "instead of those that a callback has averaged at the end" in caplog.text


def test_adapters() -> None:
    """A checkpoint of trained parameters only is enough."""
    peft = pytest.importorskip("peft")

    class Adapted(Scripted):
        def __init__(self, *values: float) -> None:
            super().__init__(*values)
            network = nn.Sequential(nn.Linear(4, 1))
            self.learning_rate = 0.01
            self.layer = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))

    ended, module = Ended(), Adapted(3.0, 1.0, 2.0)
    trainer = saving(ended, restore_best="val_loss")
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    best = open_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert (best.manifest.step, best.manifest.contents["model"]) == (8, "trainable")
    assert module.batches == 8
    assert not same(module.state_dict(), ended.last)


def test_fast_dev_run_does_nothing() -> None:
    module, trainer = Scripted(1.0), saving(restore_best="val_loss", save_total_limit=1, fast_dev_run=True)
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    assert module.batches == 1
    assert not list(Path("runs").rglob("step-*"))


class Replaces(Scripted):
    def configure_callbacks(self) -> list[Callback]:
        return [ModelCheckpoint()]


def test_what_contradicts_it() -> None:
    with pytest.raises(
        ConfigurationError, match="restore_best must be the name of a logged metric or a ModelCheckpoint, not 3"
    ):
        saving(restore_best=3)
    with pytest.raises(ConfigurationError, match="restore_best is a ModelCheckpoint without a monitor"):
        saving(restore_best=ModelCheckpoint())
    with pytest.raises(ConfigurationError, match="ModelCheckpoint that keeps the best checkpoint, and there is none"):
        saving(restore_best="val_loss", enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint\(save_top_k=0\) ranks none"):
        saving(ModelCheckpoint(monitor="val_loss", save_top_k=0), restore_best="val_loss")
    with pytest.raises(ConfigurationError, match="configure_callbacks of the module has replaced it"):
        saving(restore_best="val_loss").fit(Replaces(1.0), tiny_loader(), tiny_loader(4))


def test_two_callbacks_with_its_metric() -> None:
    both = [ModelCheckpoint(monitor="val_loss"), ModelCheckpoint(monitor="val_loss", every_n_train_steps=4)]
    with pytest.raises(ConfigurationError, match=r"restore_best='val_loss' is the metric of 2 callbacks, .* restore_best=best"):
        fitted(1.0, callbacks=(*both,), restore_best="val_loss")
    _, module, _ = fitted(3.0, 1.0, 2.0, callbacks=(*both,), restore_best=both[1], max_epochs=3)
    assert same(module.state_dict(), load_state_dict(both[1].best_model_path))


# ----------------------------------------------------------------------------------------------- save_total_limit


@pytest.mark.parametrize(
    ("values", "limit", "kept"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0), 1, [4, 20]),  # the best and the newest, as in the Hugging Face Trainer
        ((5.0, 4.0, 3.0, 2.0, 1.0), 1, [20]),
        ((1.0, 2.0, 3.0, 4.0, 5.0), 2, [4, 20]),
        ((5.0, 4.0, 3.0, 2.0, 1.0), 2, [16, 20]),
        ((3.0, 1.0, 2.0, 4.0, 5.0), 3, [8, 16, 20]),
        ((3.0, 1.0, 2.0, 4.0, 5.0), 9, [4, 8, 12, 16, 20]),
    ],
)
def test_how_many_checkpoints_are_kept(values: tuple[float, ...], limit: int, kept: list[int]) -> None:
    trainer, _, _ = fitted(*values, max_epochs=5, restore_best="val_loss", save_total_limit=limit)
    assert steps(trainer) == kept
    assert f"keep           at most {limit} checkpoint" in trainer.explain()


def test_a_limit_without_a_metric() -> None:
    trainer, _, _ = fitted(1.0, save_total_limit=1)
    assert steps(trainer) == [16]
    trainer, _, _ = fitted(1.0, save_total_limit=3)
    assert steps(trainer) == [8, 12, 16]


@pytest.mark.filterwarnings("ignore:ModelCheckpoint. 'val_loss' was logged before step:trainkit.console.TrainkitWarning")
def test_a_limit_for_the_callback_of_the_user() -> None:
    own = ModelCheckpoint(monitor="val_loss", every_n_train_steps=1, every_n_epochs=1, save_top_k=2)
    trainer, _, _ = fitted(3.0, 1.0, 2.0, 4.0, callbacks=(own,), save_total_limit=4)
    assert steps(trainer) == [8, 12, 15, 16]


def test_a_limit_holds_over_a_resume() -> None:
    fitted(1.0, 2.0, 3.0, 4.0, 5.0, max_epochs=3, restore_best="val_loss", save_total_limit=2)
    trainer = saving(max_epochs=5, restore_best="val_loss", save_total_limit=2)
    trainer.fit(Scripted(1.0, 2.0, 3.0, 4.0, 5.0), tiny_loader(), tiny_loader(4), ckpt_path="auto")
    assert steps(trainer) == [4, 20]


class Spoils(Callback):
    """The parameters are not finite from a step on."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 10:
            with torch.no_grad():
                module.layer.bias.fill_(math.nan)


@pytest.mark.filterwarnings("ignore::trainkit.console.TrainkitWarning")
def test_a_state_that_is_not_finite_evicts_no_finite_one() -> None:
    trainer, module, _ = fitted(2.0, 3.0, 1.0, 0.5, callbacks=(Spoils(),), restore_best="val_loss", save_total_limit=1)
    assert steps(trainer) == [4, 8, 16]  # the best, the newest finite one, the newest
    assert module.batches == 4
    trainer, _, _ = fitted(1.0, callbacks=(Spoils(),), save_total_limit=1, default_root_dir="unranked")
    assert steps(trainer) == [8, 16]


def test_what_contradicts_a_limit() -> None:
    with pytest.raises(ConfigurationError, match="save_total_limit must be an integer ≥ 1"):
        saving(save_total_limit=0)
    with pytest.raises(ConfigurationError, match="this Trainer has 0: enable_checkpointing=False"):
        saving(save_total_limit=2, enable_checkpointing=False)
    with pytest.raises(
        ConfigurationError, match="save_total_limit=2 is the number of checkpoints that one ModelCheckpoint keeps"
    ):
        saving(ModelCheckpoint(every_n_train_steps=3), restore_best="val_loss", save_total_limit=2)
    for options in ({"save_top_k": 3}, {"save_top_k": -1}, {"keep_last": -1}):
        with pytest.raises(ConfigurationError, match="contradict each other"):
            saving(ModelCheckpoint(monitor="val_loss", **options), save_total_limit=2)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- validate_at_end


class Requests(Callback):
    """Requests the end of training in a hook."""

    def __init__(self, hook: str, at: int) -> None:
        def request(trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step >= at:
                trainer.should_stop = True

        setattr(self, hook, request)


@pytest.mark.parametrize(
    ("arguments", "callbacks", "without", "given"),
    [
        ({"max_steps": 6}, (), [4], [4, 6]),
        ({"max_steps": 8}, (), [4, 8], [4, 8]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, (), [8], [8, 12]),
        ({"max_epochs": 2, "check_val_every_n_epoch": 2}, (), [8], [8]),
        ({"val_every_n_steps": 3, "max_epochs": 2}, (), [3, 6], [3, 6, 8]),
        ({"accumulate_grad_batches": 3, "max_steps": 3}, (), [2], [2, 3]),
        ({"val_check_interval": 3, "limit_train_batches": 3, "max_epochs": 2}, (), [3, 6], [3, 6]),
        ({}, (Requests("on_train_batch_end", 5),), [4], [4, 6]),
        ({}, (Requests("on_train_epoch_end", 8),), [4, 8], [4, 8]),
        ({"check_val_every_n_epoch": 2}, (Requests("on_train_epoch_end", 4),), [], [4]),
        ({"check_val_every_n_epoch": 2, "min_epochs": 3}, (Requests("on_train_epoch_end", 4),), [8], [8, 12]),
    ],
)
def test_the_last_step_is_validated_once(
    arguments: dict[str, Any], callbacks: tuple[Callback, ...], without: list[int], given: list[int]
) -> None:
    arguments = {"enable_checkpointing": False, **arguments}
    assert fitted(1.0, callbacks=callbacks, **arguments)[2].validated == without
    trainer, _, ended = fitted(1.0, callbacks=callbacks, validate_at_end=True, **arguments)
    assert ended.validated == given
    assert trainer.global_step == given[-1]
    assert "and after the last optimizer step" in trainer.explain()


def test_an_epoch_of_unknown_length() -> None:
    ended = Ended()
    trainer = saving(ended, max_epochs=1, check_val_every_n_epoch=None, val_check_interval=3, validate_at_end=True)
    trainer.fit(Scripted(1.0), (batch for batch in list(tiny_loader()) * 2), tiny_loader(4))
    assert ended.validated == [3, 6, 8]


@pytest.mark.parametrize("steps_", [6, 8])
def test_the_last_checkpoint_has_the_metrics_and_can_be_the_best(steps_: int) -> None:
    arguments = {"max_steps": steps_, "check_val_every_n_epoch": 9, "validate_at_end": True, "restore_best": "val_loss"}
    trainer, module, _ = fitted(2.0, 1.0, **arguments)
    last = open_checkpoint(trainer.checkpoint_callback.last_model_path)
    assert (last.manifest.step, last.manifest.metrics["val_loss"]) == (steps_, 1.0)
    assert trainer.checkpoint_callback.best_model_path == str(last.path)
    assert module.batches == steps_


def test_a_run_that_ended_is_not_validated_again() -> None:
    fitted(1.0, max_steps=6, validate_at_end=True)
    ended = Ended()
    trainer = saving(ended, max_steps=6, validate_at_end=True)
    trainer.fit(Scripted(1.0), tiny_loader(), tiny_loader(4), ckpt_path="last")
    assert ended.validated == []


def test_a_signal_in_the_last_validation() -> None:
    """The resumed run repeats the validation, and only that."""

    class Signals(Ended):
        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, loader: int = 0) -> None:
            if trainer.global_step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        saving(Signals(), max_steps=6, validate_at_end=True).fit(Scripted(1.0), tiny_loader(), tiny_loader(4))
    ended, module = Ended(), Scripted(1.0)
    trainer = saving(ended, max_steps=6, validate_at_end=True)
    trainer.fit(module, tiny_loader(), tiny_loader(4), ckpt_path="last")
    assert (ended.validated, trainer.global_step, module.batches) == ([6], 6, 6)


def test_it_needs_a_validation() -> None:
    with pytest.raises(ConfigurationError, match="validate_at_end=True needs a validation, which this fit does not have"):
        saving(validate_at_end=True).fit(TinyModule(), tiny_loader())
    saving(validate_at_end=True, limit_val_batches=0, max_steps=1).fit(TinyModule(), tiny_loader())


# ----------------------------------------------------------------------------------------------- several processes


class Wide(TrainModule):
    """Large enough to be sharded; its validations log a value of their step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", float(abs(self.trainer.global_step - 4)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def restored(**arguments: Any) -> None:
    """The module of each rank has the weights of step 4; a resumed run continues from step 7."""
    module = Wide()
    options = {"devices": 2, "restore_best": "val_loss", "save_total_limit": 2, "validate_at_end": True, **arguments}
    trainer = saving(max_steps=7, max_epochs=-1, val_every_n_steps=2, **options)
    trainer.fit(module, tiny_loader(32), tiny_loader(8))
    assert trainer.ckpt_path is not None, trainer.callback_metrics
    best = load_state_dict(trainer.ckpt_path)
    assert open_checkpoint(trainer.ckpt_path).manifest.step == 4
    assert trainer.callback_metrics["val_loss"] == 3
    assert steps(trainer) == [4, 7]
    for name, value in module.state_dict().items():
        assert torch.equal(value, best[name].to(value.dtype)), name
    trainer = saving(max_steps=9, max_epochs=-1, val_every_n_steps=2, **options)
    after = Wide()
    trainer.fit(after, tiny_loader(32), tiny_loader(8), ckpt_path="auto")
    assert trainer.global_step == 9
    assert after.batches == best["batches"]
    assert steps(trainer) == [4, 9]


@pytest.mark.world_size(2)
def test_on_two_processes() -> None:
    restored(strategy="ddp")


@pytest.mark.world_size(2)
def test_sharded() -> None:
    restored(strategy="fsdp")


@pytest.mark.zero
@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_zero(stage: int) -> None:
    restored(strategy=f"zero{stage}")


class StopsOne(Ended):
    """One rank requests the end of training at the end of an epoch."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.by_rank = trainer.strategy.world.exchange(self.validated)


@pytest.mark.world_size(2)
def test_one_rank_requests_the_end() -> None:
    seen = StopsOne()
    saving(seen, strategy="ddp", devices=2, check_val_every_n_epoch=2, validate_at_end=True).fit(
        Scripted(1.0), tiny_loader(), tiny_loader(8)
    )
    assert seen.by_rank == [[2], [2]]
