"""`fit(ckpt_path=...)` and its `restore` parts, `save_checkpoint`, and evaluation of a checkpoint."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saving import Adam, SaveIn, saved, saving
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import Recorder, Watching, make_trainer, parameters_of, same
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, DataModule, Trainer
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.checkpoint import open_checkpoint, register
from trainkit.console import TrainkitWarning
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
    UnknownNameError,
    UnsavableError,
)
from trainkit.loggers import JSONLLogger
from trainkit.tagged_json import codec
from trainkit.trainer.resume import PARTS

# ------------------------------------------------------------------------------------------------------ which checkpoint


def test_auto_starts_afresh_only_if_there_is_none() -> None:
    recorder = Recorder()
    saving(recorder).fit(Adam(), tiny_loader(), ckpt_path="auto")
    assert recorder.batches[0] == (0, 0)
    recorder = Recorder()
    saving(recorder, max_epochs=2).fit(Adam(), tiny_loader(), ckpt_path="auto")
    assert recorder.batches == [(1, m) for m in range(4)]


def test_last_without_checkpoint_is_an_error() -> None:
    # ckpt_path='last' is an error if there is no checkpoint.
    with pytest.raises(CheckpointNotFoundError, match="ckpt_path='last': there is no checkpoint in .*To start from the"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="last")
    assert not Path("runs").exists(), "a fit that ends before it begins leaves nothing"


def test_a_path() -> None:
    saved(max_epochs=2)
    recorder = Recorder()
    saving(recorder, max_epochs=2).fit(
        Adam(), tiny_loader(shuffle=True), ckpt_path=Path("runs/version_0/checkpoints/step-00000004")
    )
    assert recorder.batches == [(1, m) for m in range(4)]


def test_a_path_that_is_not_there_names_what_is_near() -> None:
    saved()
    with pytest.raises(CheckpointNotFoundError, match="step-00000004"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="runs/version_0/checkpoints/step-0000004")
    with pytest.raises(CheckpointNotFoundError, match="Did you mean 'last'"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="lastt")
    with pytest.raises(ConfigurationError, match="ckpt_path is an empty string"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="")
    with pytest.raises(ConfigurationError, match="ckpt_path must be a path"):
        saving().fit(Adam(), tiny_loader(), ckpt_path=3)


def test_best() -> None:
    trainer = saved(ModelCheckpoint("mine", monitor="val_loss", mode="max"), max_epochs=3)
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.name == "step-00000004", "the loss falls, so the first epoch has the largest"
    for again in (trainer, saving(ModelCheckpoint("mine", monitor="val_loss", mode="max"))):
        module = Adam()
        again.validate(module, tiny_loader(8), verbose=False, ckpt_path="best")
        assert same(parameters_of(module), open_checkpoint(best).read({"model", "state"}).tensors["model"])
    with pytest.raises(CheckpointNotFoundError, match="ModelCheckpoint"):
        make_trainer().validate(Adam(), tiny_loader(), ckpt_path="best")


def test_best_is_of_the_callback_with_a_monitor() -> None:
    """This holds even if a callback without a monitor is first, or if a new process saves at other steps."""
    best = ModelCheckpoint("mine", monitor="val_loss", mode="max")
    trainer = saved(ModelCheckpoint(every_n_train_steps=3), best, max_epochs=3)
    expected = open_checkpoint(best.best_model_path).read({"model", "state"}).tensors["model"]
    other = saving(ModelCheckpoint("mine", every_n_train_steps=2, monitor="val_loss", mode="max"))
    for again in (trainer, other):
        module = Adam()
        again.validate(module, tiny_loader(8), verbose=False, ckpt_path="best")
        assert same(parameters_of(module), expected)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint that was ranked by monitor='val_loss', mode='min' is in"):
        saving(ModelCheckpoint(monitor="val_loss")).validate(Adam(), tiny_loader(8), ckpt_path="best")


def test_best_is_never_of_another_run() -> None:
    """In a folder that several runs share, `"best"` without a fit is an error that names the newest run's best."""
    best = saved(ModelCheckpoint(monitor="val_loss"), max_epochs=2).checkpoint_callback.best_model_path

    def refused(trainer: Trainer, match: str, stage: str = "validate") -> None:
        before = Adam()
        with pytest.raises(CheckpointNotFoundError, match=match):
            getattr(trainer, stage)(before, tiny_loader(8), ckpt_path="best")
        assert same(parameters_of(before), parameters_of(Adam()))

    for stage in ("validate", "test", "fit"):
        refused(saving(ModelCheckpoint(monitor="val_loss")), f"which one is meant. .* is {re.escape(best)}. Fix: pass", stage)
    trial = saving(ModelCheckpoint("named", monitor="val_loss"), fast_dev_run=True)
    refused(trial, "fast_dev_run saves no checkpoint")
    trial.fit(Adam(), tiny_loader(), tiny_loader(8))
    refused(trial, "fast_dev_run saves no checkpoint")
    unranked = saving(ModelCheckpoint(monitor="val_loss"), max_steps=2)  # ends before its validation
    unranked.fit(Adam(), tiny_loader(), tiny_loader(8))
    refused(unranked, "monitor='val_loss', mode='min' is in the fit of this Trainer")


def test_best_of_a_run_whose_logger_was_given_a_name() -> None:
    def trainer() -> Trainer:
        return saving(ModelCheckpoint(monitor="val_loss"), logger=JSONLLogger("runs", name="mine"))

    first = trainer()
    first.fit(Adam(), tiny_loader(), tiny_loader(8))
    again = trainer()
    again.validate(Adam(), tiny_loader(8), verbose=False, ckpt_path="best")
    assert again.ckpt_path == first.checkpoint_callback.best_model_path  # type: ignore[attr-defined]


def test_a_damaged_one_is_passed_over_and_named() -> None:
    saved(max_epochs=2)
    file = Path("runs/version_0/checkpoints/step-00000008/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    trainer = saving(max_epochs=2)
    with pytest.warns(UserWarning, match="damaged and skipped: .*step-00000008.*model.safetensors"):
        trainer.fit(Adam(), tiny_loader(), ckpt_path="auto")
    assert trainer._save_policy.resumed_from.name == "step-00000004"
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="runs/version_0/checkpoints/step-00000008")


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(
    "hook, number",
    [
        ("on_train_batch_start", 3),
        ("on_train_batch_end", 3),
        ("on_train_batch_end", 6),
        ("on_before_optimizer_step", 2),
        ("on_validation_start", 2),
        ("on_validation_batch_end", 3),
        ("on_validation_end", 2),
        ("on_train_epoch_end", 1),
        ("on_train_epoch_start", 2),
        ("on_train_end", 1),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_checkpoint_of_any_hook_resumes_exactly(hook: str, number: int, accumulate: int) -> None:
    """Wherever a user saves, the run that resumes from there ends with the same numbers and logs no row twice."""
    arguments: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "val_check_interval": 2}
    arguments |= {"log_every_n_steps": 1}

    def loaders() -> tuple[DataLoader, DataLoader]:
        return tiny_loader(22, shuffle=True), tiny_loader(8)

    expected = Adam()
    make_trainer(**arguments).fit(expected, *loaders())
    first = make_trainer(SaveIn(hook, number), logger=JSONLLogger("logs"), **arguments)
    first.fit(Adam(), *loaders())
    rows = Path("logs/default/version_0/metrics.jsonl").read_text()
    resumed = Adam()
    trainer = make_trainer(logger=JSONLLogger("logs"), **arguments)
    trainer.fit(resumed, *loaders(), ckpt_path="there", restore=PARTS)
    assert Path("logs/default/version_0/metrics.jsonl").read_text() == rows
    assert same(parameters_of(resumed), parameters_of(expected))
    assert trainer.global_step == first.global_step
    assert trainer.callback_metrics == first.callback_metrics
    assert trainer.optimizers[0].param_groups[0]["lr"] == first.optimizers[0].param_groups[0]["lr"]


def test_means_of_an_epoch_survive_a_resume_in_its_middle() -> None:
    class Both(Adam):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    whole = make_trainer()
    whole.fit(Both(), tiny_loader(22, shuffle=True))
    make_trainer(SaveIn("on_train_batch_end", 3)).fit(Both(), tiny_loader(22, shuffle=True))
    resumed = make_trainer()
    resumed.fit(Both(), tiny_loader(22, shuffle=True), ckpt_path="there")
    assert float(resumed.callback_metrics["loss_epoch"]).hex() == float(whole.callback_metrics["loss_epoch"]).hex()


def test_no_skipped_sample_is_fetched() -> None:
    class Counted(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.fetched: list[int] = []

        def __len__(self) -> int:
            return 4000

        def __getitem__(self, index: int) -> Any:
            self.fetched.append(index)
            return torch.ones(4), torch.ones(1)

    def loader() -> DataLoader:
        return DataLoader(Counted(), batch_size=4, shuffle=True)

    first = loader()
    saving(ModelCheckpoint(every_n_train_steps=990), max_steps=991).fit(Adam(), first)
    second = loader()
    saving().fit(Adam(), second, ckpt_path="runs/version_0/checkpoints/step-00000990")
    assert second.dataset.fetched[: 4 * 1] == first.dataset.fetched[990 * 4 : 991 * 4]
    assert len(second.dataset.fetched) == 4000 - 990 * 4


def test_an_iterable_with_a_state_continues_from_it() -> None:
    class Stream(IterableDataset):
        def __init__(self) -> None:
            self.at, self.read = 0, 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

        def __iter__(self) -> Any:
            while self.at < 20:
                self.at += 1
                self.read += 1
                yield torch.full((4,), float(self.at)), torch.ones(1)
            self.at = 0

    expected = Adam()
    make_trainer().fit(expected, DataLoader(Stream(), batch_size=2))
    make_trainer(SaveIn("on_train_batch_end", 4)).fit(Adam(), DataLoader(Stream(), batch_size=2))
    resumed, stream = Adam(), Stream()
    make_trainer().fit(resumed, DataLoader(stream, batch_size=2), ckpt_path="there")
    assert stream.read == 14, "the last batch again, to compare it"
    assert same(parameters_of(resumed), parameters_of(expected))


def test_an_iterable_without_a_state_is_skipped_through(caplog: pytest.LogCaptureFixture) -> None:
    def batches() -> list[Any]:
        return list(tiny_loader(24))

    class Iterable:
        def __iter__(self) -> Any:
            return iter(batches())

    expected = Adam()
    make_trainer().fit(expected, Iterable())
    make_trainer(SaveIn("on_train_batch_end", 4)).fit(Adam(), Iterable())
    resumed = Adam()
    caplog.clear()
    make_trainer().fit(resumed, Iterable(), ckpt_path="there")
    assert same(parameters_of(resumed), parameters_of(expected))
    assert "skipping through 4 batches" in caplog.text


def test_another_batch_size() -> None:
    """The position counts samples, so a batch size that divides them resumes at the right sample."""
    make_trainer(SaveIn("on_train_batch_end", 4)).fit(Adam(), tiny_loader(24, batch_size=3))
    recorder = Recorder()
    make_trainer(recorder).fit(Adam(), tiny_loader(24, batch_size=6), ckpt_path="there")
    assert recorder.batches == [(0, 2), (0, 3)]
    with pytest.raises(StateMismatchError, match="12 samples of the epoch, which is inside a micro-batch of 8"):
        make_trainer().fit(Adam(), tiny_loader(24, batch_size=8), ckpt_path="there")


def test_another_dataset_is_said() -> None:
    """A dataset with another number of samples causes a warning."""
    make_trainer(SaveIn("on_train_batch_end", 2)).fit(Adam(), tiny_loader(24))
    with pytest.warns(UserWarning, match="the dataset has 32 samples, but had 24 when"):
        make_trainer().fit(Adam(), tiny_loader(32), ckpt_path="there")


def test_the_seed_comes_from_the_checkpoint() -> None:
    """A Trainer without a seed draws one, but a resumed run must use the seed of the checkpoint."""
    saved(seed=7)
    trainer = saving(seed=None, max_epochs=2)
    assert trainer.seed != 7
    trainer.fit(Adam(), tiny_loader(), ckpt_path="auto")
    assert trainer.seed == 7
    with pytest.warns(UserWarning, match="seed=8, but the checkpoint's run had seed=7"):
        saving(seed=8, max_epochs=3).fit(Adam(), tiny_loader(), ckpt_path="auto")


# ---------------------------------------------------------------------------------------------------------------- parts


def test_only_the_model(caplog: pytest.LogCaptureFixture) -> None:
    trainer = saved(max_epochs=2)
    before = trainer._save_policy.run_id
    module, recorder = Adam(), Recorder()
    again = saving(recorder)
    again.fit(module, tiny_loader(), ckpt_path="auto", restore={"model"})
    assert recorder.batches == [(0, m) for m in range(4)], "a run of its own"
    assert again._save_policy.run_id != before
    said = caplog.text
    assert "restored: model. Not restored: optimizer, scheduler, scaler, loop, callbacks, loggers." in said


def test_unknown_parts() -> None:
    saved()
    with pytest.raises(UnknownNameError, match="unknown part 'optimiser'.*Did you mean 'optimizer'"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="auto", restore={"model", "optimiser"})
    with pytest.raises(ConfigurationError, match="need a checkpoint"):
        saving().fit(Adam(), tiny_loader(), restore={"model"})


def test_a_new_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the learning-rate schedule is scaled to the new value. Other options replace the restored ones."""
    saved(max_epochs=1)
    watching = Watching()
    trainer = saving(watching, max_epochs=2)
    trainer.fit(Adam(), tiny_loader(), ckpt_path="auto", overrides={"lr": 0.01, "eps": 1e-5})
    assert [rate for _, rate, _ in watching.after] == pytest.approx([0.01 * 0.9**n for n in range(5, 9)])
    assert trainer.optimizers[0].param_groups[0]["eps"] == 1e-5
    said = caplog.text
    assert "lr is 0.01 from now on" in said
    for wrong in ("big", -1.0, True, float("nan")):
        with pytest.raises(ConfigurationError, match="overrides: lr must be a number ≥ 0"):
            saving(max_epochs=3).fit(Adam(), tiny_loader(), ckpt_path="auto", overrides={"lr": wrong})
    with pytest.raises(UnknownNameError, match="no optimizer has the option 'learning_rate'"):
        saving(max_epochs=3).fit(Adam(), tiny_loader(), ckpt_path="auto", overrides={"learning_rate": 1.0})


def test_what_does_not_fit_is_listed_whole() -> None:
    """The error lists every parameter that does not match, and nothing is loaded."""
    path = saved().checkpoint_callback.last_model_path

    class Other(Adam):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.extra = nn.Linear(2, 2)

    module = Other()
    before = parameters_of(module)
    with pytest.raises(StateMismatchError) as caught:
        saving().fit(module, tiny_loader(), ckpt_path=path, restore={"model"})
    text = str(caught.value)
    assert all(name in text for name in ("layer.weight", "layer.bias", "extra.weight", "extra.bias", "(1, 4)", "(2, 4)"))
    assert same(parameters_of(module), before)


def test_weights_only_cannot_be_resumed() -> None:
    trainer = saved()
    trainer.save_checkpoint("weights", weights_only=True)
    assert not (Path("weights") / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"is a weights-only checkpoint.*restore=\{'model'\}"):
        saving().fit(Adam(), tiny_loader(), ckpt_path="weights")
    module = Adam()
    saving(max_steps=0).fit(module, tiny_loader(), ckpt_path="weights", restore="model")


# ------------------------------------------------------------------------------------------------------------ hooks, state


def test_hooks_see_and_change_the_checkpoint() -> None:
    class Module(Adam):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert {"state_dict", "epoch", "global_step", "callbacks", "hyper_parameters"} <= set(checkpoint)
            checkpoint["mine"] = {"tuple": (1, 2), "tensor": torch.arange(3)}
            checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["mine"], checkpoint["global_step"]
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}

    trainer = saved(module=Module())
    assert "old.layer.weight" in open_checkpoint("runs/version_0/checkpoints/step-00000004").read().tensors["model"]
    module = Module()
    saving(max_epochs=1).fit(module, tiny_loader(), ckpt_path="auto")
    mine, step = module.seen
    assert step == 4
    assert mine["tuple"] == (1, 2)
    assert mine["tensor"].tolist() == [0, 1, 2]
    assert same(parameters_of(module), parameters_of(trainer.model))


def test_no_memory_is_kept_for_the_checkpoint() -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            seen.extend(weakref.ref(tensor) for tensor in checkpoint["state_dict"].values())

        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen[:] = [reference() for reference in seen]

    saved()
    saving(Watch(), max_epochs=2).fit(Adam(), tiny_loader(), ckpt_path="last")
    assert seen
    assert all(tensor is None for tensor in seen)


def test_state_of_callbacks_and_data() -> None:
    class Counting(Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    class Data(DataModule):
        shard = 0

        def train_dataloader(self) -> Any:
            return tiny_loader()

        def state_dict(self) -> dict[str, Any]:
            return {"shard": self.shard}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.shard = state_dict["shard"]

    data = Data()
    data.shard = 5
    saving(Counting(), Counting()).fit(Adam(), data)
    first, second, data = Counting(), Counting(), Data()
    saving(first, second, max_epochs=2).fit(Adam(), data, ckpt_path="auto")
    assert (first.count, second.count, data.shard) == (8, 8, 5)


def test_what_cannot_be_saved_fails_at_the_start() -> None:
    class Bad(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"outer": {"inner": object()}}

    recorder = Recorder()
    with pytest.raises(UnsavableError, match=re.escape("""["outer"]["inner"]""")):
        saving(Bad(), recorder).fit(Adam(), tiny_loader())
    assert recorder.batches == []


def test_a_state_that_is_created_too_late_is_explained() -> None:
    class Late(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

    with pytest.raises(
        UnsavableError, match=r"AttributeError: .*'count'.* before on_fit_start.* in __init__ or setup"
    ) as caught:
        saving(Late()).fit(Adam(), tiny_loader())
    assert isinstance(caught.value.__cause__, AttributeError)


class Average:
    """An object that a checkpoint cannot store as it is."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}


def test_what_a_hook_adds_can_be_omitted() -> None:
    """The hook may be that of a package, and its object may be code."""

    class Adding(Adam):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["fine"] = 1
            checkpoint["average"] = {"slow": Average(0.5)}
            checkpoint["hyper_parameters"]["act"] = torch.relu

    trainer = saving(omit_from_checkpoint=["average", "hyper_parameters.act"])
    trainer.fit(Adding(), tiny_loader())
    state = open_checkpoint(trainer.checkpoint_callback.last_model_path).read().state
    assert state["user"] == {"fine": 1}
    assert "act" not in state["hyper_parameters"]
    assert state["omitted"] == ["average", "hyper_parameters.act"]

    class Needing(Adding):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.got = checkpoint["average"]["slow"]

    path = trainer.checkpoint_callback.last_model_path
    again = Needing()
    saving(max_epochs=2, omit_from_checkpoint=["average", "hyper_parameters.act"]).fit(again, tiny_loader(), ckpt_path=path)
    assert isinstance(again.got, Average), "what its on_save_checkpoint adds now"
    assert isinstance(Needing.load_from_checkpoint(path).got, Average)
    unknown = pytest.warns(TrainkitWarning, match="names averge, which no on_save_checkpoint has added. Added: .*average")
    with unknown, pytest.raises(UnsavableError):
        saving(omit_from_checkpoint="averge").fit(Adding(), tiny_loader())
    for wrong, said in ((["state_dict"], "'state_dict' is needed to resume"), (3, "must be a name or a list of names, not 3")):
        with pytest.raises(ConfigurationError, match=said):
            Trainer(omit_from_checkpoint=wrong)  # type: ignore[arg-type]


def test_what_a_hook_adds_and_cannot_be_stored_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message has four fixes, each of which works; the fourth is tested below."""

    class Adding(Adam):
        way = 0

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["fine"] = {"a": 1}
            checkpoint["average"] = {"slow": Average(0.5)} if self.way in (0, 2) else Average(0.5).state_dict()
            checkpoint["hyper_parameters"]["act"] = torch.relu
            if self.way:
                del checkpoint["hyper_parameters"]["act"]
            if self.way == 3:
                del checkpoint["average"]

    recorder = Recorder()
    with pytest.raises(UnsavableError) as caught:
        saving(recorder).fit(Adding(), tiny_loader())
    assert recorder.batches == []
    lines = str(caught.value).splitlines()
    assert lines[0] == "on_save_checkpoint added values to the checkpoint that cannot be stored:"
    assert lines[1].startswith('  checkpoint["average"]["slow"] cannot be stored: it is a ')
    assert lines[2].startswith("  checkpoint[\"hyper_parameters\"]['act'] cannot be stored: it is code")
    assert 'checkpoint["average"] = self.thing.state_dict()' in lines[4]
    assert "trainkit.checkpoint.register(Average, encode, decode)" in lines[5]
    assert 'remove the line checkpoint["average"] = ...' in lines[6]
    assert "Trainer(omit_from_checkpoint=['average', 'hyper_parameters.act'])" in lines[7]

    monkeypatch.setattr(codec, "_by_kind", {})
    monkeypatch.setattr(codec, "_by_name", {})
    for way in (1, 3, 2):
        if way == 2:
            register(Average, Average.state_dict, lambda state: Average(**state))
        module = Adding()
        module.way = way
        trainer = saving()
        trainer.fit(module, tiny_loader())
        kept = open_checkpoint(trainer.checkpoint_callback.last_model_path).read().state["user"]
        assert kept["fine"] == {"a": 1}
        if way == 1:
            assert kept["average"] == {"value": 0.5}
        elif way == 2:
            assert kept["average"]["slow"].value == 0.5
        else:
            assert "average" not in kept


def test_a_run_that_early_stopping_ended_resumes_with_more_patience() -> None:
    class Flat(Adam):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    saved(EarlyStopping("val_loss", patience=2), module=Flat(), max_epochs=20)
    same_patience = saving(EarlyStopping("val_loss", patience=2), max_epochs=20)
    same_patience.fit(Flat(), tiny_loader(), tiny_loader(8), ckpt_path="auto")
    assert same_patience.current_epoch == 3
    more = saving(EarlyStopping("val_loss", patience=4), max_epochs=20)
    more.fit(Flat(), tiny_loader(), tiny_loader(8), ckpt_path="auto")
    assert more.current_epoch == 5


# ---------------------------------------------------------------------------------------------------- save_checkpoint


def test_save_checkpoint_after_a_fit_replaces_what_is_there() -> None:
    trainer = make_trainer()
    with pytest.raises(Exception, match="saves what was run"):
        trainer.save_checkpoint("there")
    trainer.fit(Adam(), tiny_loader())
    trainer.save_checkpoint("there")
    first = open_checkpoint("there").manifest
    trainer.fit(Adam(), tiny_loader(), ckpt_path="there")
    trainer.save_checkpoint("there")
    assert open_checkpoint("there").manifest.save_counter != first.save_counter or first.run_id
    Path("other").mkdir()
    Path("other/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        trainer.save_checkpoint("other")
    assert Path("other/notes.txt").read_text() == "mine"


def test_not_blocking() -> None:
    """With blocking=False, the checkpoint has the parameters at the time of the call."""

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.before = parameters_of(module)
                trainer.save_checkpoint("there", blocking=False)
                with torch.no_grad():
                    module.layer.weight.fill_(7.0)  # a change after the call must not be saved

    callback = Saving()
    make_trainer(callback).fit(Adam(), tiny_loader())
    assert same(open_checkpoint("there").read().tensors["model"], callback.before)


def test_state_json_is_json() -> None:
    saved()
    folder = Path("runs/version_0/checkpoints/step-00000004")
    state = json.loads((folder / "state.json").read_text())
    assert state["loop"]["global_step"] == 4
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "manifest.sha256",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
    ]


def test_another_run_leaves_the_log_of_the_first_alone() -> None:
    """Resuming from another run's checkpoint in a new folder is a new run, with its own log."""
    first = saved(logger=JSONLLogger("logs"), max_epochs=2)
    log = Path("logs/default/version_0/metrics.jsonl")
    before = log.read_text()
    other = make_trainer(logger=JSONLLogger("logs"), max_epochs=2)
    other.fit(Adam(), tiny_loader(), tiny_loader(8), ckpt_path="logs/default/version_0/checkpoints/step-00000004")
    assert log.read_text() == before
    assert other._save_policy.run_id != first._save_policy.run_id
    assert Path("logs/default/version_1/metrics.jsonl").exists()


def test_what_becomes_unsavable_on_the_way_ends_the_run_at_the_first_save() -> None:
    """No later save could succeed, so training on would only lose more; the error names the value."""

    class Turning(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"fine": 1} if self.epochs < 2 else {"bad": object()}

        epochs = 0

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.epochs += 1

    trainer = saving(Turning(), max_epochs=9)
    with pytest.raises(UnsavableError, match=r"\[\"bad\"\] cannot be stored: it is a builtins.object"):
        trainer.fit(Adam(), tiny_loader())
    assert trainer.current_epoch == 2  # of 9
    assert [path.name for path in Path("runs/version_0/checkpoints").glob("step-*")] == ["step-00000004"]


def test_data_that_is_split_in_setup_is_split_alike() -> None:
    """The seed of the checkpoint is set before `setup` is called, even if the Trainer was given no seed."""

    class Split(DataModule):
        def setup(self, stage: str) -> None:
            self.mine = torch.utils.data.random_split(tiny_loader(24).dataset, [16, 8])[0]

        def train_dataloader(self) -> Any:
            return DataLoader(self.mine, batch_size=4)

    first, second = Split(), Split()
    torch.manual_seed(1)
    saving(seed=None).fit(Adam(), first)
    torch.manual_seed(2)
    saving(seed=None, max_epochs=2).fit(Adam(), second, ckpt_path="auto")
    assert first.mine.indices == second.mine.indices


def test_a_trial_run_of_a_checkpoint_makes_its_step(caplog: pytest.LogCaptureFixture) -> None:
    # fast_dev_run makes one step even with a checkpoint, and saves none.
    saved()
    recorder = Recorder()
    trainer = saving(recorder, fast_dev_run=True)
    trainer.fit(Adam(), tiny_loader(), ckpt_path="auto")
    assert (recorder.batches, trainer.global_step) == ([(0, 0)], 1)
    assert len(list(Path("runs/version_0/checkpoints").glob("step-*"))) == 1


def test_an_evaluation_without_a_checkpoint_says_so(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(default_root_dir="runs").validate(Adam(), tiny_loader(8), verbose=False, ckpt_path="auto")
    assert f"there is no checkpoint in {Path('runs').absolute()}: the weights are not changed." in caplog.text


def test_a_step_that_a_scheduler_has_ended_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer has made its step, but the scheduler has not, so no run could resume from this state."""

    class Short(Adam):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    with pytest.raises(ValueError, match="Tried to step"):
        saving(max_epochs=3).fit(Short(), tiny_loader())
    assert [path.name for path in Path("runs/version_0/checkpoints").glob("step-*")] == ["step-00000004"]
    assert "because the step that failed had begun to change the parameters" in caplog.text


def test_epochs_in_messages_agree_with_file_names(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """File names count epochs from 0, so a message gives the number of complete epochs."""

    def fit(epochs: int) -> None:
        saving = ModelCheckpoint(dirpath="saved", filename="{epoch}-{step}")
        trainer = make_trainer(saving, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(Adam(), tiny_loader(), ckpt_path="auto")

    fit(1)
    fit(2)
    fit(2)
    text = caplog.text
    assert "epoch=0-step=4 (step 4, 1 epoch complete)" in text
    assert "epoch=1-step=8 (step 8, 2 epochs complete)" in text
    assert "the checkpoint is of step 8, 2 epochs complete, and nothing is left to train" in text


def test_an_evaluation_without_a_module_uses_the_best_of_the_fit(caplog: pytest.LogCaptureFixture) -> None:
    """As in Lightning. Without a monitor, or with the module, it evaluates the module as it is."""

    class Worsening(Adam):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.global_step))

    def evaluated(*callbacks: Any, **given: Any) -> dict[str, Any]:
        trainer = saving(*callbacks, max_epochs=2)
        module = Worsening()
        trainer.fit(module, tiny_loader(), tiny_loader(8))
        trainer.test(dataloaders=tiny_loader(8), verbose=False, **dict.fromkeys(given, module))
        return parameters_of(module)

    best = evaluated(ModelCheckpoint(monitor="val_loss"))
    assert "test was given no module: it uses the best checkpoint, " in caplog.text
    assert "step-00000004" in caplog.text
    last = evaluated(ModelCheckpoint(monitor="val_loss"), model=True)
    assert not same(best, last)
    assert same(evaluated(ModelCheckpoint()), last)
