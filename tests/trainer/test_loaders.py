"""The loaders of a run: where they come from, and their limits, without a Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.bare import make_run
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit import DataModule
from trainkit.errors import ConfigurationError, EmptyLoaderError, MissingMethodError
from trainkit.trainer.loaders import evaluation_loaders, train_loader


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return tiny_loader(8)


class Module(TinyModule):
    def train_dataloader(self) -> Any:
        return tiny_loader(12)


@pytest.mark.parametrize("given, data, batches", [(tiny_loader(4), None, 1), (None, Data(), 2), (None, None, 3)])
def test_what_is_passed_comes_before_the_data_module_and_the_module(given: Any, data: Any, batches: int) -> None:
    run = make_run(Module())
    run.datamodule = data
    assert train_loader(run, given).length == batches
    assert run.train_loader is not None
    assert run.train_source is not None


def test_without_any() -> None:
    """A fit without a training loader is an error."""
    with pytest.raises(MissingMethodError, match=r"trainer\.fit\(module, DataLoader\(\.\.\.\)\)"):
        train_loader(make_run(), None)


def test_a_loader_without_a_batch() -> None:
    with pytest.raises(EmptyLoaderError, match="its 3 samples do not fill one batch of 4"):
        train_loader(make_run(), tiny_loader(3, drop_last=True))


@pytest.mark.parametrize("limit, expected", [(1.0, 4), (0.5, 2), (2, 2), (0, 0), (9, 4)])
def test_a_limit(limit: float, expected: int) -> None:
    assert train_loader(make_run(limit_train_batches=limit), tiny_loader()).length == expected


def test_a_global_batch_size_is_an_accumulation() -> None:
    run = make_run(global_batch_size=12)
    assert train_loader(run, tiny_loader()).window == 3
    assert run.accumulation == run.accelerator.gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    "size, source, message",
    [(6, tiny_loader(), "Use 8, or another"), (8, [torch.zeros(4)], "needs a loader with a batch_size")],
)
def test_a_global_batch_size_that_cannot_be(size: int, source: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_loader(make_run(global_batch_size=size), source)


def test_overfitting_validates_on_the_training_batches() -> None:
    run = make_run(overfit_batches=2)
    train_loader(run, tiny_loader())
    [loader] = evaluation_loaders(run, "validation", tiny_loader(8), sanity=False)
    assert loader.given_source is run.train_source


def test_data_without_a_step() -> None:
    run = make_run()
    run.module.validation_step = None  # type: ignore[assignment]
    assert evaluation_loaders(run, "validation", tiny_loader(), sanity=False) == []

    class NoStep(TinyModule):
        validation_step = TinyModule.__mro__[1].validation_step  # type: ignore[attr-defined]

    with pytest.warns(UserWarning, match="NoStep has no validation_step: nothing is validated"):
        assert evaluation_loaders(make_run(NoStep()), "validation", tiny_loader(), sanity=False) == []


def test_a_step_without_data(caplog: pytest.LogCaptureFixture) -> None:
    """A notice in a fit; none if a limit turns validation off, or for a module without a step."""
    assert evaluation_loaders(make_run(), "validation", None, sanity=False) == []
    assert "TinyModule has a validation_step, but there is no validation data: nothing is validated" in caplog.text
    caplog.clear()
    assert evaluation_loaders(make_run(limit_val_batches=0), "validation", None, sanity=False) == []
    without = make_run()
    without.module.validation_step = None  # type: ignore[assignment]
    assert evaluation_loaders(without, "validation", None, sanity=False) == []
    assert evaluation_loaders(make_run(), "validation", tiny_loader(), sanity=False)
    assert caplog.text == ""


@pytest.mark.parametrize("iterator, times", [(False, 1), (True, 2)])
def test_the_sanity_check_reads_the_loaders_of_the_validation(iterator: bool, times: int) -> None:
    """`val_dataloader` is called once, unless it returns an iterator, which can be read only once."""
    asked: list[Any] = []

    class Own(TinyModule):
        def val_dataloader(self) -> Any:
            asked.append(iter(tiny_loader()) if iterator else tiny_loader())
            return asked[-1]

    run = make_run(Own(), num_sanity_val_steps=1)
    [loader] = evaluation_loaders(run, "validation", None, sanity=False)
    [checked] = evaluation_loaders(run, "validation", None, sanity=True)
    assert len(asked) == times
    assert (loader.given_source, checked.given_source) == (asked[0], asked[-1])
    assert (loader.limit, checked.limit) == (None, 1) if iterator else (4, 1)
    evaluation_loaders(run, "validation", None, sanity=False)  # loaders that are reloaded
    assert len(asked) == times + 1


def test_an_iterator_is_left_alone_by_the_sanity_check(caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(num_sanity_val_steps=1)
    batches = iter(tiny_loader())
    assert evaluation_loaders(run, "validation", batches, sanity=True) == []
    assert "can be read only once" in caplog.text
    assert len(list(batches)) == 4


@pytest.mark.parametrize("steps, expected", [(2, 2), (-1, 3), (9, 3)])
def test_the_sanity_check_has_a_limit_of_its_own(steps: int, expected: int) -> None:
    run = make_run(num_sanity_val_steps=steps, limit_val_batches=3)
    [loader] = evaluation_loaders(run, "validation", tiny_loader(), sanity=True)
    assert loader.length == expected
