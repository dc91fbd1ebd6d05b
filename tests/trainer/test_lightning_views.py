"""What scripts written for Lightning read and assign inside a Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Recorder, make_trainer, parameters_of, same

from trainkit import Trainer
from trainkit.errors import ConfigurationError


class Seen(Recorder):
    """Records the epoch, the step and the inputs of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.inputs = list[tuple[int, int]](), list[torch.Tensor]()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.positions.append((trainer.current_epoch, trainer.global_step))
        self.inputs.append(batch[0])


def test_a_fit_continues_after_max_epochs_of_the_loop_is_assigned() -> None:
    """With an optimizer that has no state, several fits are one fit: the same order, the same steps, the same parameters."""
    whole, parts, module, again = Seen(), Seen(), TinyModule(), TinyModule()
    again.load_state_dict(module.state_dict())
    make_trainer(whole, max_epochs=3).fit(module, tiny_loader(8, shuffle=True))
    trainer = make_trainer(parts, max_epochs=1)
    trainer.fit(again, tiny_loader(8, shuffle=True))
    trainer.fit_loop.max_epochs += 1
    assert trainer.fit_loop.max_epochs == trainer.max_epochs == 2
    trainer.validate(again, tiny_loader(8), verbose=False)
    trainer.fit(again, tiny_loader(8, shuffle=True))
    trainer = copy.deepcopy(trainer)
    (parts_again,) = (one for one in trainer.callbacks if isinstance(one, Seen))
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    trainer.fit(again, tiny_loader(8, shuffle=True))
    assert whole.positions == parts_again.positions == [(epoch, 2 * epoch + step) for epoch in range(3) for step in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(whole.inputs, parts_again.inputs, strict=True))
    assert same(parameters_of(module), parameters_of(again))
    assert (trainer.current_epoch, trainer.global_step) == (3, 6)


def test_the_optimizer_is_a_new_one() -> None:
    """As in Lightning, whose second fit calls configure_optimizers again."""

    class Momentum(TinyModule):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizers.append(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))
            return optimizers[-1]

    optimizers: list[torch.optim.Optimizer] = []
    module, trainer = Momentum(), make_trainer(max_epochs=1)
    trainer.fit(module, tiny_loader(8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, tiny_loader(8))
    assert trainer.optimizers == [optimizers[1]] != [optimizers[0]]


def test_steps_continue_in_another_epoch() -> None:
    """A fit that has ended inside an epoch has another order of the data afterwards."""
    seen, module = Seen(), TinyModule()
    trainer = make_trainer(seen, max_epochs=-1, max_steps=2)
    trainer.fit(module, tiny_loader(shuffle=True))
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 2
    trainer.fit(module, tiny_loader(shuffle=True))
    assert seen.positions == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert not torch.equal(seen.inputs[0], seen.inputs[2])
    assert (trainer.fit_loop.max_steps, trainer.fit_loop.epoch_loop.max_steps, trainer.global_step) == (4, 4, 4)


@pytest.mark.parametrize("across, every, expected", [(True, 4, [4, 8]), (False, 2, [2, 4, 7, 9])])
def test_the_validation_interval(across: bool, every: int, expected: list[int]) -> None:
    """It counts across epochs and fits, or begins with each epoch."""

    class Validated(Recorder):
        def on_validation_start(self, trainer: Trainer, module: Any) -> None:
            steps.append(trainer.global_step)

    steps: list[int] = []
    options: dict[str, Any] = {"check_val_every_n_epoch": None} if across else {}
    module, loaders = TinyModule(), (tiny_loader(20), tiny_loader(4))
    trainer = make_trainer(Validated(), val_check_interval=every, **options)
    trainer.fit(module, *loaders)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders)
    assert steps == expected


def test_a_new_run_after_it(caplog: pytest.LogCaptureFixture) -> None:
    """Only the next fit continues, and `trainer.max_epochs` lets no fit continue."""
    seen, module = Seen(), TinyModule()
    trainer = make_trainer(seen)
    trainer.fit_loop.max_epochs = 1  # before the first fit
    trainer.fit(module, tiny_loader(4))
    trainer.fit_loop.max_epochs = 1
    with caplog.at_level("INFO", "trainkit"):
        trainer.fit(module, tiny_loader(4))
    assert "the last fit has ended at step 1, 1 epoch complete, and nothing is left to train: max_epochs=1" in caplog.text
    assert seen.positions == [(0, 0)]
    trainer.max_epochs = 2
    trainer.fit(module, tiny_loader(4))
    assert seen.positions == [(0, 0), (0, 0), (1, 1)]


def test_what_the_loop_shows() -> None:
    trainer = make_trainer(max_epochs=3, min_epochs=2, max_steps=9, min_steps=4)
    loop = trainer.fit_loop
    assert (loop.max_epochs, loop.min_epochs, loop.max_steps, loop.min_steps, loop.batch_idx) == (3, 2, 9, 4, -1)
    steps = loop.epoch_loop
    assert (steps.max_steps, steps.min_steps, steps.batch_idx, steps.global_step, steps._batches_that_stepped) == (
        9,
        4,
        -1,
        0,
        0,
    )
    loop.min_epochs, steps.min_steps = 1, None
    assert (trainer.min_epochs, trainer.min_steps) == (1, None)


def test_what_is_read_to_continue() -> None:
    """A script that trains in parts adds to the number of epochs that have begun."""
    trainer, module = make_trainer(max_epochs=2), TinyModule()
    progress = trainer.fit_loop.epoch_progress.current
    assert (progress.ready, progress.completed) == (0, 0)
    trainer.fit(module, tiny_loader(4))
    assert (progress.ready, progress.completed) == (2, 2)
    trainer.fit_loop.max_epochs = progress.ready + 1
    trainer.fit(module, tiny_loader(4))
    assert (progress.ready, progress.completed, trainer.global_step) == (3, 3, 3)
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop\.epoch_progress has no 'total'"):
        _ = trainer.fit_loop.epoch_progress.total  # type: ignore[attr-defined]
    stopped = make_trainer(max_epochs=2, max_steps=1)
    stopped.fit(module, tiny_loader(8))
    assert (stopped.fit_loop.epoch_progress.current.ready, stopped.current_epoch) == (1, 0)


def test_a_maximum_below_the_minimum_lowers_it() -> None:
    """A script that trains in parts assigns both, in either order; in Lightning the maximum prevails."""
    trainer = make_trainer(max_epochs=2, min_epochs=2)
    trainer.fit_loop.max_epochs = 1
    assert (trainer.max_epochs, trainer.min_epochs) == (1, 1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit_loop.min_epochs = 2
    assert (trainer.max_epochs, trainer.min_epochs) == (3, 2)


def test_whether_there_is_validation_data_is_known_to_configure_optimizers() -> None:
    class Asks(TinyModule):
        defined: bool | None = None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.defined = self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
            return super().configure_optimizers()

    found = []
    for loaders in ([], [tiny_loader(4)]):
        module = Asks()
        make_trainer(max_epochs=1).fit(module, tiny_loader(4), *loaders)
        found.append(module.defined)
    assert found == [False, True]


def test_what_is_refused() -> None:
    class Assigns(TinyModule):
        def on_train_start(self) -> None:
            self.trainer.fit_loop.max_epochs = 2

    trainer = make_trainer()
    with pytest.raises(ConfigurationError, match=r"trainer\.max_epochs cannot change during a run"):
        trainer.fit(Assigns(), tiny_loader(4))
    with pytest.raises(ConfigurationError, match="max_epochs must be"):
        trainer.fit_loop.max_epochs = "two"  # type: ignore[assignment]
    told = r"has no 'current_epoch'. Use trainer.current_epoch, trainer.global_step and trainer.batch_idx"
    with pytest.raises(AttributeError, match=rf"trainer\.fit_loop {told}"):
        trainer.fit_loop.current_epoch = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=rf"trainer\.fit_loop\.epoch_loop {told}"):
        _ = trainer.fit_loop.epoch_loop.current_epoch  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        trainer.fit_loop.max_steps = 3  # type: ignore[misc]  # as in Lightning


def test_whether_a_run_is_distributed() -> None:
    trainer = make_trainer()
    assert trainer._accelerator_connector.is_distributed is False
    with pytest.raises(AttributeError, match=r"trainer\._accelerator_connector has no '_flags'. Use trainer\.strategy"):
        _ = trainer._accelerator_connector._flags  # type: ignore[attr-defined]


@pytest.mark.world_size(2)
def test_two_processes_are_distributed() -> None:
    assert make_trainer(strategy="ddp")._accelerator_connector.is_distributed is True
