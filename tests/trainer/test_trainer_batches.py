"""How many batches a run reads from its loaders: limits, reloading, unknown lengths, and estimates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Recorder, Seen, make_trainer, run
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainkit import Callback, DataModule
from trainkit.errors import ConfigurationError, EmptyLoaderError, MissingMethodError, ModuleError


@pytest.mark.parametrize("limit, batches", [(1, 1), (3, 3), (100, 8), (1.0, 8), (0.5, 4), (0.3, 2)])
def test_limits(limit: int | float, batches: int) -> None:
    trainer, recorder = run(8, 8, limit_train_batches=limit, limit_val_batches=limit)
    assert len(recorder.batches) == trainer.num_training_batches == batches
    assert trainer.num_val_batches == [batches]
    for stage in ("test", "predict"):
        evaluator = make_trainer(**{f"limit_{stage}_batches": limit})
        result = getattr(evaluator, stage)(TinyModule(), tiny_loader(32))
        assert getattr(evaluator, f"num_{stage}_batches") == [batches]
        assert stage == "test" or len(result) == batches


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"])
@pytest.mark.parametrize("value", [-1, 1.5, -0.1, True, "1"])
def test_limits_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}.*not {value!r}"):
        make_trainer(**{name: value})


def test_a_fraction_that_leaves_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"0.1 of 4 batches leaves no batch.*limit_train_batches=1"):
        run(4, limit_train_batches=0.1)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_validation_that_is_turned_off(limit: int | float) -> None:
    trainer, recorder = run(4, 2, limit_val_batches=limit, num_sanity_val_steps=2)
    assert (recorder.validations, recorder.sanity_checks, trainer.num_val_batches) == ([], 0, [])


def other_loader(samples: int) -> DataLoader:
    """A loader with samples that are not in any `tiny_loader`."""
    return DataLoader(TensorDataset(torch.full((samples, 4), 9.0), torch.ones(samples, 1)), batch_size=4)


@pytest.mark.parametrize("overfit, batches", [(2, 2), (0.5, 4), (1, 1)])
def test_overfit_batches(overfit: int | float, batches: int) -> None:
    """Every epoch trains and validates on the same first batches of the training loader, even if it shuffles."""
    module = Seen()
    trainer = make_trainer(overfit_batches=overfit, max_epochs=3)
    trainer.fit(module, tiny_loader(32, shuffle=True), other_loader(4))
    first = [float(batch[0][0, 0]) for batch in tiny_loader(32)][:batches]
    assert module.training_inputs == first * 3
    assert module.validation_inputs == first * 3
    assert trainer.num_training_batches == batches
    assert trainer.num_val_batches == [batches]


def test_overfitting_reads_a_loader_with_workers_in_both_at_a_time() -> None:
    """Training and validation read the same loader with workers at the same time."""
    module, loader = Seen(), tiny_loader(32, shuffle=True, num_workers=1, persistent_workers=True)
    make_trainer(overfit_batches=4, val_check_interval=2).fit(module, loader, other_loader(4))
    first = [float(batch[0][0, 0]) for batch in tiny_loader(32)][:4]
    assert (module.training_inputs, module.validation_inputs) == (first, first * 2)


def test_overfit_batches_keeps_validation_off() -> None:
    # overfit_batches does not turn on a validation that is off.
    module = Seen()
    make_trainer(overfit_batches=2).fit(module, tiny_loader(32))
    make_trainer(overfit_batches=2, limit_val_batches=0).fit(module, tiny_loader(32), tiny_loader(8))
    assert module.validation_inputs == []


def test_overfitting_does_not_read_a_stream_of_training_that_keeps_its_place() -> None:
    """A stream that saves its position would continue after the validation, so validation reads its own loader."""

    class Stateful(IterableDataset):
        at = 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                self.at += 1
                yield torch.full((4,), float(self.at)), torch.ones(1)

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    module = Seen()
    make_trainer(overfit_batches=2).fit(module, DataLoader(Stateful(), batch_size=2), other_loader(8))
    assert (module.training_inputs, module.validation_inputs) == ([1.0, 3.0], [9.0, 9.0])


def test_shuffling_changes_with_the_epoch() -> None:
    module = Seen()
    make_trainer(max_epochs=2).fit(module, tiny_loader(32, shuffle=True))
    assert module.training_inputs[:8] != module.training_inputs[8:]


@pytest.mark.parametrize("batches", [True, 1, 3])
def test_fast_dev_run(batches: int | bool) -> None:
    logger = Memory()
    trainer, recorder = run(8, 8, max_epochs=50, fast_dev_run=batches, logger=logger, num_sanity_val_steps=5)
    assert trainer.fast_dev_run
    assert trainer.global_step == len(recorder.batches) == int(batches)
    assert (trainer.num_val_batches, recorder.validations, recorder.sanity_checks) == ([int(batches)], [int(batches)], 0)
    assert (len(trainer.loggers), logger.rows) == (1, [])
    assert len(make_trainer(fast_dev_run=batches).predict(TinyModule(), tiny_loader(32))) == int(batches)


def test_fast_dev_run_off() -> None:
    assert run(4, fast_dev_run=False)[0].global_step == run(4, fast_dev_run=0)[0].global_step == 4


def test_global_batch_size() -> None:
    trainer, recorder = run(8, global_batch_size=16)
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (4, 2)
    assert len(recorder.batches) == 8
    with pytest.raises(ConfigurationError, match=r"global_batch_size=10 is not a multiple.*4 × 1. Use 8"):
        run(8, global_batch_size=10)
    with pytest.raises(ConfigurationError, match="needs a loader with a batch_size, which list does not have"):
        make_trainer(global_batch_size=8).fit(TinyModule(), list(tiny_loader()))


def test_two_arguments_that_say_the_same() -> None:
    with pytest.raises(ConfigurationError, match="both set the accumulation"):
        make_trainer(global_batch_size=8, accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError, match="both set when to validate"):
        make_trainer(val_every_n_steps=2, val_check_interval=10)
    with pytest.raises(ConfigurationError, match="both limit the training batches"):
        make_trainer(overfit_batches=2, limit_train_batches=3)
    with pytest.raises(ConfigurationError, match="min_epochs=3 is more than max_epochs=2"):
        make_trainer(min_epochs=3, max_epochs=2)
    with pytest.raises(ConfigurationError, match="min_steps=3 is more than max_steps=2"):
        make_trainer(min_steps=3, max_steps=2)


# ------------------------------------------------------------------------------------------------------------ reloading


class Growing(TinyModule):
    """Each call of a loader method returns a loader with one more batch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = {"train": 0, "val": 0}

    def train_dataloader(self) -> DataLoader:
        self.asked["train"] += 1
        return tiny_loader(4 * self.asked["train"])

    def val_dataloader(self) -> DataLoader:
        self.asked["val"] += 1
        return tiny_loader(4 * self.asked["val"])


@pytest.mark.parametrize("every, lengths", [(0, [1, 1, 1, 1]), (1, [1, 2, 3, 4]), (2, [1, 1, 2, 2])])
def test_reload_dataloaders_every_n_epochs(every: int, lengths: list[int]) -> None:
    module = Growing()
    recorder = Recorder()
    trainer = make_trainer(recorder, max_epochs=4, reload_dataloaders_every_n_epochs=every)
    trainer.fit(module)
    assert recorder.batches == [(epoch, batch) for epoch, length in enumerate(lengths) for batch in range(length)]
    assert recorder.validations == [sum(lengths[: epoch + 1]) for epoch in range(4)]  # even if the length has changed
    assert module.asked == {"train": max(lengths), "val": max(lengths)}
    assert trainer.num_training_batches == trainer.num_val_batches[0] == lengths[-1]


@pytest.mark.parametrize(
    "arguments, asked",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"check_val_every_n_epoch": 2}, [0, 1, 3]),
        ({"check_val_every_n_epoch": 3}, [0, 2]),
        ({"val_every_n_steps": 5}, [0, 2, 4]),
        ({"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": 2}, [0, 3]),
    ],
)
def test_validation_loaders_are_asked_for_in_epochs_that_validate(arguments: dict[str, Any], asked: list[int]) -> None:
    """And once at the start of the fit, to plan the validation."""
    epochs: dict[str, list[int]] = {"train": [], "val": []}

    class Asked(TinyModule):
        def train_dataloader(self) -> DataLoader:
            epochs["train"].append(self.trainer.current_epoch)
            return tiny_loader(8)

        def val_dataloader(self) -> DataLoader:
            epochs["val"].append(self.trainer.current_epoch)
            return tiny_loader(4)

    make_trainer(**{"max_epochs": 5, "reload_dataloaders_every_n_epochs": 1, **arguments}).fit(Asked())
    assert epochs["val"] == asked
    assert epochs["train"] == list(range(0, 5, arguments.get("reload_dataloaders_every_n_epochs", 1)))


def test_steps_of_validation_continue_after_reloading() -> None:
    class Logging(Growing):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("by_batch", float(batch_idx), on_step=True, on_epoch=False)

    logger = Memory()
    make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, logger=logger).fit(Logging())
    assert [row["by_batch"] for _, row in logger.rows if "by_batch" in row] == [0.0, 0.0, 1.0, 0.0, 1.0, 2.0]
    assert [step for step, row in logger.rows if "by_batch" in row] == [1, 2, 3, 4, 5, 6]


def test_reloading_keeps_no_loader_of_before() -> None:
    """Reloading releases the previous loaders."""
    kept = []

    class Looking(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            kept.append(len(trainer.accelerator.loaders))

    make_trainer(Looking(), max_epochs=5, reload_dataloaders_every_n_epochs=1).fit(Growing())
    assert kept == [2] * 5


def test_the_data_modules_loaders_are_reloaded() -> None:
    class Data(DataModule):
        asked = 0

        def train_dataloader(self) -> DataLoader:
            self.asked += 1
            return tiny_loader(4 * self.asked)

    data = Data()
    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(TinyModule(), datamodule=data)
    assert (data.asked, trainer.global_step) == (3, 6)


# ----------------------------------------------------------------------------------------------------- unknown lengths


class Stream(IterableDataset):
    """The samples of `tiny_loader` as a stream without a length. The subclass `WrongLength` has a wrong length."""

    def __init__(self, samples: int) -> None:
        self.samples = list(tiny_loader(samples).dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class WrongLength(Stream):
    def __len__(self) -> int:
        return 2 * len(self.samples)


@pytest.mark.parametrize("kind", [Stream, WrongLength])
def test_a_stream_ends_when_it_ends(kind: type[Stream]) -> None:
    recorder = Recorder()
    trainer = make_trainer(recorder, max_epochs=2, accumulate_grad_batches=3)
    trainer.fit(TinyModule(), DataLoader(kind(20), batch_size=4), DataLoader(kind(8), batch_size=4))
    assert recorder.batches == [(epoch, batch) for epoch in range(2) for batch in range(5)]
    assert trainer.global_step == 4
    assert recorder.validations == [2, 4]
    assert trainer.num_val_batches == [math.inf if kind is Stream else 4]
    if kind is Stream:
        assert trainer.num_training_batches == math.inf
        assert trainer.estimated_stepping_batches == math.inf


@pytest.mark.parametrize("kind", [Stream, WrongLength])
@pytest.mark.parametrize("arguments, updates", [({}, 10), ({"accumulate_grad_batches": 2}, 6), ({"max_steps": 7}, 7)])
def test_a_stream_under_a_limit_has_a_length(kind: type[Stream], arguments: dict[str, Any], updates: int) -> None:
    """With limit_train_batches, the number of optimizer steps is known, so a learning-rate schedule can be built."""
    found: list[tuple[int | float, int | float]] = []

    class Asking(TinyModule):
        def configure_optimizers(self) -> Any:
            found.append((self.trainer.num_training_batches, self.trainer.estimated_stepping_batches))
            return super().configure_optimizers()

    trainer = make_trainer(max_epochs=2, limit_train_batches=5, **arguments)
    trainer.fit(Asking(), DataLoader(kind(80), batch_size=4))
    assert found == [(5, updates)]
    assert trainer.global_step == updates


def test_limits_and_intervals_of_a_stream() -> None:
    def fit(**arguments: Any) -> Recorder:
        recorder = Recorder()
        trainer = make_trainer(recorder, **arguments)
        trainer.fit(TinyModule(), DataLoader(Stream(20), batch_size=4), tiny_loader(4))
        return recorder

    assert len(fit(limit_train_batches=3).batches) == 3
    assert fit(val_check_interval=2).validations == [2, 4]
    assert fit(max_epochs=-1, max_steps=7).batches[-1] == (1, 1)
    with pytest.raises(ConfigurationError, match=r"val_check_interval=0.5 is a fraction, but the length of .* is unknown"):
        fit(val_check_interval=0.5)
    with pytest.raises(ConfigurationError, match=r"limit_train_batches=0.5 is a fraction"):
        fit(limit_train_batches=0.5)


def test_an_iterator_that_is_used_up() -> None:
    with pytest.raises(EmptyLoaderError, match="only once"):
        make_trainer(max_epochs=2).fit(TinyModule(), (batch for batch in tiny_loader()))
    with pytest.raises(EmptyLoaderError, match="only once"):
        make_trainer(max_epochs=2).fit(TinyModule(), tiny_loader(), (batch for batch in tiny_loader()))


def test_a_loader_that_is_empty_later() -> None:
    class Once:
        epochs = 0

        def __iter__(self) -> Iterator[Any]:
            self.epochs += 1
            return iter(tiny_loader(8) if self.epochs == 1 else [])

    trainer = make_trainer(max_epochs=3)
    with pytest.raises(EmptyLoaderError, match="yielded no batch"):
        trainer.fit(TinyModule(), Once())
    assert trainer.current_epoch == 1


class Nothing(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class NoSamples(Dataset):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("loader", [DataLoader(Nothing()), DataLoader(NoSamples()), [], tiny_loader(3, drop_last=True)])
def test_empty_loaders(loader: Any) -> None:
    with pytest.raises(EmptyLoaderError, match="no batch"):
        make_trainer().fit(TinyModule(), loader)
    for stage in ("validate", "test", "predict"):
        error, words = (MissingMethodError, "needs data") if loader == [] else (EmptyLoaderError, "no batch")
        with pytest.raises(error, match=words):
            getattr(make_trainer(), stage)(TinyModule(), loader)


# -------------------------------------------------------------------------------- the estimated number of optimizer steps


@pytest.mark.parametrize(
    "arguments, updates",
    [
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9),
        ({"max_epochs": 3, "global_batch_size": 12}, 6),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": -1, "max_steps": 7}, 7),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 30, "overfit_batches": 1}, 30),
        ({"max_epochs": 3, "fast_dev_run": True}, 1),
    ],
)
def test_estimated_stepping_batches(arguments: dict[str, Any], updates: int) -> None:
    class Asking(TinyModule):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Asking()
    trainer, _ = run(5, module=module, **arguments)
    assert module.estimate == trainer.estimated_stepping_batches == trainer.global_step == updates


def test_the_estimate_is_not_that_of_an_earlier_fit() -> None:
    class Early(TinyModule):
        def setup(self, stage: str) -> None:
            self.trainer.estimated_stepping_batches

    trainer, _ = run(4)
    with pytest.raises(ModuleError, match=r"not known yet.*configure_optimizers"):
        trainer.fit(Early(), tiny_loader())
    with pytest.raises(ModuleError, match="not known yet"):
        make_trainer().estimated_stepping_batches
