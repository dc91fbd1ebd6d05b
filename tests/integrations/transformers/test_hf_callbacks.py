"""Callbacks of transformers in a run of trainkit: which events there are, what the flags do, and what a checkpoint keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hugging_face.training_arguments import arguments as short_run
from helpers.hugging_face.training_arguments import model, rows
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as TheirTrainer
from transformers.trainer_callback import ExportableState

from trainkit import Trainer
from trainkit.console import TrainkitWarning
from trainkit.errors import MissingMetricError
from trainkit.integrations.transformers import TransformersModule
from trainkit.integrations.transformers.hf_callbacks import HuggingFaceEvents

EVENTS = (
    *("init_end", "train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "pre_optimizer_step", "optimizer_step"),
    *("substep_end", "step_end", "evaluate", "save", "log", "prediction_step"),
)


class Recorder(TrainerCallback):
    """The names of the events in their order, with the step."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.keywords: set[str] = set()

    def record(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"{event} {state.global_step}")
        self.keywords |= {name for name, value in kwargs.items() if value is not None}


def _handler(event: str) -> Any:
    return lambda self, args, state, control, **kwargs: self.record(event, args, state, control, **kwargs)


for _event in EVENTS:
    setattr(Recorder, f"on_{_event}", _handler(_event))


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings = {"per_device_train_batch_size": 2, "max_steps": -1, "num_train_epochs": 2, "learning_rate": 1e-2}
    settings |= {"per_device_eval_batch_size": 4, "label_smoothing_factor": 0.1, "disable_tqdm": False}
    return short_run(folder, **{**settings, **options})


def trained(
    args: TrainingArguments, *callbacks: Any, count: int = 8, ckpt: str | None = None
) -> tuple[Trainer, HuggingFaceEvents]:
    module, data, trainer = TransformersModule.from_arguments(
        model(), args, train_dataset=rows(count), eval_dataset=rows(6), callbacks=list(callbacks)
    )
    trainer.fit(module, data, ckpt_path=ckpt)
    return trainer, next(one for one in trainer.callbacks if isinstance(one, HuggingFaceEvents))


def numbers(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in history]


def test_the_events_are_those_of_transformers(tmp_path: Path) -> None:
    """But for the end of an epoch, which comes before the log of its last step, there and here before its evaluation."""
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    ours, theirs = Recorder(), Recorder()
    _, events = trained(arguments(tmp_path / "ours", **options), ours, count=9)
    trainer = TheirTrainer(
        model(), arguments(tmp_path / "theirs", **options), train_dataset=rows(9), eval_dataset=rows(6), callbacks=[theirs]
    )
    trainer.train()

    def moved(recorded: list[str]) -> list[str]:
        """Without the ends of epochs; those are compared by themselves."""
        return [event for event in recorded if not event.startswith("epoch_end")]

    assert moved(ours.events) == moved(theirs.events)
    ends = [[event for event in one.events if event.startswith("epoch_end")] for one in (ours, theirs)]
    assert ends[0] == ends[1]
    assert ours.events.index("epoch_end 3") < ours.events.index("evaluate 3")
    assert ours.keywords >= theirs.keywords - {"eval_dataloader"}
    assert len(events.state.log_history) == len(trainer.state.log_history)
    for mine, other in zip(numbers(events.state.log_history), numbers(trainer.state.log_history), strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-7)


class SetFlag(TrainerCallback):
    """Sets a flag in an event at a step."""

    def __init__(self, event: str, step: int, flag: str, rank: int | None = None) -> None:
        self.step, self.flag, self.rank = step, flag, rank
        setattr(type(self), event, type(self)._act)

    def _act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step and self.rank in (None, args.process_index):
            setattr(control, self.flag, True)
        return control


def flag(event: str, step: int, name: str, rank: int | None = None) -> SetFlag:
    """A class of its own, whose method is that of the event."""
    kind = type("SetsOneFlag", (SetFlag,), {})
    return kind(event, step, name, rank)  # type: ignore[no-any-return]


def steps_with(events: HuggingFaceEvents, key: str) -> list[float]:
    return [entry["step"] for entry in events.state.log_history if key in entry]


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_log", "on_optimizer_step"])
def test_training_stops_with_the_step_in_which_a_callback_asks_for_it(event: str, tmp_path: Path) -> None:
    step = 2 if event in ("on_step_begin", "on_optimizer_step") else 3  # There the step is not counted yet.
    trainer, events = trained(arguments(tmp_path), flag(event, step, "should_training_stop"))
    assert trainer.global_step == 3
    assert events.state.global_step == 3


def test_a_stop_in_an_evaluation_acts_at_once(tmp_path: Path) -> None:
    stop = flag("on_evaluate", 2, "should_training_stop")
    trainer, _ = trained(arguments(tmp_path, eval_strategy="steps", eval_steps=2), stop)
    assert trainer.global_step == 2


def test_an_epoch_stops(tmp_path: Path) -> None:
    """The rest of it is skipped, and it is evaluated."""
    recorder = Recorder()
    stop = flag("on_step_end", 2, "should_epoch_stop")
    trainer, events = trained(arguments(tmp_path, eval_strategy="epoch"), stop, recorder)
    assert trainer.global_step == 2 + 4
    assert trainer.current_epoch == 2
    assert steps_with(events, "eval_loss") == [2, 6]
    assert [event for event in recorder.events if "epoch" in event] == [
        "epoch_begin 0",
        "epoch_end 2",
        "epoch_begin 2",
        "epoch_end 6",
    ]


def test_an_evaluation_is_requested(tmp_path: Path) -> None:
    _, events = trained(
        arguments(tmp_path), flag("on_step_end", 3, "should_evaluate"), flag("on_epoch_end", 8, "should_evaluate")
    )
    assert steps_with(events, "eval_loss") == [3, 8]


def test_a_save_is_requested(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=100)
    recorder = Recorder()
    trained(args, flag("on_step_end", 3, "should_save"), recorder)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-3", "checkpoint-8"]
    assert [event for event in recorder.events if event.startswith("save")] == ["save 3", "save 8"]


def test_a_request_to_save_where_nothing_is_saved_is_reported(tmp_path: Path) -> None:
    with pytest.warns(TrainkitWarning, match=r"control\.should_save has no effect"):
        trained(arguments(tmp_path), flag("on_step_end", 3, "should_save"))


def test_a_log_is_requested(tmp_path: Path) -> None:
    """Its loss is the mean since the last one."""
    every, asked = arguments(tmp_path), arguments(tmp_path, logging_steps=100)
    _, all_of_them = trained(every)
    _, events = trained(asked, flag("on_step_end", 3, "should_log"))
    assert steps_with(events, "loss") == [3]
    losses = [entry["loss"] for entry in all_of_them.state.log_history if "loss" in entry]
    assert events.state.log_history[0]["loss"] == pytest.approx(sum(losses[:3]) / 3)
    assert events.training_loss == pytest.approx(sum(losses) / 8)
    assert events.train_metrics["train_loss"] == events.training_loss


def test_the_checkpoint_is_complete_when_on_save_is_called(tmp_path: Path) -> None:
    found: list[bool] = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "manifest.sha256").exists())

    trained(arguments(tmp_path, save_strategy="steps", save_steps=2), Look())
    assert found == [True] * 4


def test_early_stopping_of_transformers(tmp_path: Path) -> None:
    best = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    values = iter([3.0, 2.0, 2.5, 2.5, 2.5])
    args = arguments(tmp_path, metric_for_best_model="error", greater_is_better=False, **best)
    module, data, trainer = TransformersModule.from_arguments(
        model(),
        args,
        train_dataset=rows(8),
        eval_dataset=rows(6),
        compute_metrics=lambda found: {"error": next(values)},
        callbacks=[EarlyStoppingCallback(2)],
    )
    trainer.fit(module, data)
    assert trainer.global_step == 4
    best_weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    weights = module.model.state_dict()
    assert best_weights.keys() == {f"model.{name}" for name in weights} or best_weights.keys() == set(weights)
    for name, value in best_weights.items():
        assert torch.equal(weights[name.removeprefix("model.")], value)


def test_the_metrics_of_an_evaluation_have_the_epoch(tmp_path: Path) -> None:
    """As in transformers, where the log adds it to the metrics that the callbacks get."""
    epochs = []

    class Epochs(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            epochs.append(metrics["epoch"])

    trained(arguments(tmp_path, eval_strategy="steps", eval_steps=2), Epochs())
    assert epochs == [0.5, 1.0, 1.5, 2.0]


def test_a_metric_that_is_missing_is_named(tmp_path: Path) -> None:
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "f1"}
    with pytest.raises(MissingMetricError, match="the evaluation has no 'eval_f1', only eval_loss"):
        trained(arguments(tmp_path, **best))


class Counting(TrainerCallback, ExportableState):
    """Counts steps, and keeps the count in checkpoints."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.count = start, start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


def test_the_state_of_callbacks_and_the_log_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Also a mean of losses that a resumed run continues."""
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    _, whole = trained(arguments(tmp_path / "whole", **options))
    trained(arguments(tmp_path / "cut", **options), Counting(10), flag("on_step_end", 3, "should_training_stop"))
    counting = Counting(10)
    _, events = trained(arguments(tmp_path / "cut", **options), counting, ckpt="last")
    assert counting.count == 18
    entries = [[entry for entry in numbers(one.state.log_history) if "loss" in entry] for one in (events, whole)]
    assert entries[0] == entries[1]


@pytest.mark.world_size(2)
def test_a_flag_of_one_rank_acts_on_all(tmp_path: Path) -> None:
    """In the last step of an epoch too, in which one rank has no data; the loss is that of all ranks."""
    stops = flag("on_step_end", 5, "should_training_stop", rank=1)
    evaluates = flag("on_step_end", 2, "should_evaluate", rank=1)
    args = arguments(tmp_path, save_strategy="steps", save_steps=100)
    trainer, events = trained(args, stops, evaluates, flag("on_step_end", 3, "should_save", rank=1), count=10)
    assert trainer.world_size == 2
    assert trainer.global_step == 5
    assert steps_with(events, "eval_loss") == [2]
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-3", "checkpoint-5"]
    assert steps_with(events, "loss") == [1, 2, 3, 4, 5]
    losses = [entry["loss"] for entry in events.state.log_history if "loss" in entry]
    assert trainer.strategy.world.exchange(losses) == [losses, losses]
    assert all(map(math.isfinite, losses))


@pytest.mark.world_size(2)
def test_callbacks_that_only_one_rank_has(tmp_path: Path) -> None:
    """As after `if trainer.is_world_process_zero(): trainer.add_callback(...)`."""
    args = arguments(tmp_path, save_strategy="steps", save_steps=100, eval_strategy="steps", eval_steps=1)
    own = [flag("on_evaluate", 2, "should_save"), flag("on_save", 2, "should_training_stop"), Recorder()]
    trainer, _ = trained(args, *(own if args.process_index == 1 else []), count=10)
    assert trainer.global_step == 3
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("event", ["on_evaluate", "on_epoch_begin"])
def test_a_flag_of_one_rank_in_an_event_of_no_step(event: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=100, eval_strategy="epoch")
    trainer, _ = trained(args, flag(event, 3, "should_training_stop", rank=1), count=10)
    assert trainer.global_step == (3 if event == "on_evaluate" else 4)
