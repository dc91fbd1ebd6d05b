"""`GradientAccumulationScheduler`: windows by epoch, exact resume, several processes, strategies, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.resume.saving import Adam, SaveIn
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import strategy
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, Trainer
from trainkit.callbacks import GradientAccumulationScheduler
from trainkit.errors import ConfigurationError

SCHEDULE = {0: 4, 1: 1, 3: 8, 4: 2}  # of 8 micro-batches in each epoch


def fit(*callbacks: Callback, loader: Any = None, module: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    module = Adam() if module is None else module
    loader = tiny_loader(31, shuffle=True) if loader is None else loader
    trainer = make_trainer(*callbacks, **{"max_epochs": 5, "accumulate_grad_batches": SCHEDULE, **options})
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer, module


class Steps(Callback):
    """Records the optimizer steps of each epoch, and what the trainer says of its windows."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.sizes: list[int] = []
        self.estimated = 0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.sizes.append(trainer.accumulate_grad_batches)
        self.estimated = trainer.estimated_stepping_batches

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step - sum(self.steps))


@pytest.mark.parametrize("as_argument", [True, False])
def test_each_epoch_has_its_window(as_argument: bool) -> None:
    steps = Steps()
    own: list[Callback] = [] if as_argument else [GradientAccumulationScheduler(SCHEDULE)]
    trainer, _ = fit(*own, steps, **({} if as_argument else {"accumulate_grad_batches": 1}))
    assert steps.steps == [2, 8, 8, 1, 4]
    assert steps.sizes == [4, 1, 1, 8, 2]
    assert steps.estimated == trainer.global_step == 23
    assert "4 from epoch 0 on, 1 from epoch 1 on, 8 from epoch 3 on, 2 from epoch 4 on" in trainer.explain()


def test_the_numbers_of_a_schedule() -> None:
    scheduler = GradientAccumulationScheduler({2: 3})
    assert [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(4)] == [1, 1, 3, 3]
    assert scheduler.epochs == [0, 2]
    assert scheduler.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


def test_an_epoch_is_that_of_a_run_with_its_number() -> None:
    _, expected = fit(max_epochs=2, accumulate_grad_batches={0: 4, 1: 2})
    fit(SaveIn("on_train_end"), max_epochs=1, accumulate_grad_batches=4)
    _, module = fit(max_epochs=2, accumulate_grad_batches=2, ckpt_path="there")
    assert same(parameters_of(module), parameters_of(expected))


@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 2}])
def test_a_resumed_run_is_bit_identical(options: Any) -> None:
    trainer, expected = fit(**options)
    for hook, number in [("on_train_batch_end", n) for n in (3, 6, 8, 13, 30, 37)] + [("on_train_epoch_end", 3)]:
        fit(SaveIn(hook, number), **options)
        resumed, module = fit(ckpt_path="there", **options)
        assert same(parameters_of(module), parameters_of(expected)), (hook, number)
        assert resumed.global_step == trainer.global_step


class Stream(IterableDataset):
    """A stream that continues from its state."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        data = tiny_loader(40).dataset
        while self.done < len(data):
            self.done += 1
            yield data[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def test_a_stream_in_a_window_that_is_larger_than_the_first(caplog: Any) -> None:
    """Its state at the start of the window is kept, so nothing is read again."""

    def run(*callbacks: Callback, **options: Any) -> Any:
        loader = DataLoader(Stream(), batch_size=2)
        return fit(*callbacks, loader=loader, max_epochs=3, accumulate_grad_batches={0: 1, 1: 8}, **options)[1]

    expected = run()
    run(SaveIn("on_train_batch_end", 20 + 15))
    assert same(parameters_of(run(ckpt_path="there")), parameters_of(expected))
    assert "skipping through" not in caplog.text


def on_processes(kind: str) -> list[dict[str, Any]]:
    def run(*callbacks: Callback, **options: Any) -> Any:
        found = strategy(kind)
        schedule = {0: 2, 1: 1, 2: 4}
        return parameters_of(fit(*callbacks, strategy=found, accumulate_grad_batches=schedule, max_epochs=3, **options)[1])

    found = [run()]
    for hook, number in (("on_before_zero_grad", 2), ("on_before_zero_grad", 7), ("on_train_epoch_end", 2)):
        run(SaveIn(hook, number))
        found.append(run(ckpt_path="there"))
    return found


@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.zero) for kind in ("zero1", "zero2", "zero3"))])
def test_on_two_processes(kind: str) -> None:
    """The ranks agree, a resumed run is bit-identical, and the run is that of one process with windows twice as large."""
    first, second = run_world(2, on_processes, kind)
    assert all(same(found, first[0]) for found in first + second)
    alone = parameters_of(fit(accumulate_grad_batches={0: 4, 1: 2, 2: 8}, max_epochs=3)[1])
    assert all(torch.allclose(first[0][name], alone[name], atol=1e-4) for name in alone)


def test_what_is_refused() -> None:
    for schedule in ({}, 4, {-1: 2}, {0: 0}, {0: 2.0}, {"0": 2}):
        with pytest.raises(ConfigurationError, match="Fix: accumulate_grad_batches={0: 8, 4: 4}"):
            GradientAccumulationScheduler(schedule)
    with pytest.raises(ConfigurationError, match=r"schedule of gradient accumulation .* not \{-1: 2\}"):
        Trainer(accelerator="cpu", accumulate_grad_batches={-1: 2})
    scheduler = GradientAccumulationScheduler({1: 2})
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches and a GradientAccumulationScheduler in callbacks"):
        make_trainer(scheduler, accumulate_grad_batches={0: 2})
    with pytest.raises(ConfigurationError, match=r"accumulate_grad_batches=2 and a GradientAccumulationScheduler both set"):
        fit(scheduler, accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError, match=r"global_batch_size=8 and a GradientAccumulationScheduler both set"):
        fit(scheduler, accumulate_grad_batches=1, global_batch_size=8)
    module = Adam()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r"accumulate_grad_batches=\{0: 1, 1: 2\}\) needs automatic optimization"):
        fit(scheduler, module=module, accumulate_grad_batches=1)
