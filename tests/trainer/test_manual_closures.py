"""Manual optimization with one optimizer: closures, the step count, and arguments that need automatic optimization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Recorder, make_trainer, parameters_of, same
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from trainkit import Callback
from trainkit.callbacks import GradientClipping
from trainkit.errors import ConfigurationError, MetricError


def test_manual_is_automatic() -> None:
    """Manual optimization with the usual calls gives the same parameters as automatic optimization."""
    manual, automatic = ManualModule(), TinyModule()
    manual.load_state_dict(automatic.state_dict())
    for module in (manual, automatic):
        make_trainer(max_epochs=2).fit(module, tiny_loader(14, shuffle=True))
    assert same(parameters_of(manual), parameters_of(automatic))


def test_lbfgs_with_a_closure() -> None:
    """LBFGS fits a line exactly, and gives the same parameters as a loop in plain torch."""

    class Fitting(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")

    module = Fitting()
    by_hand = TinyModule()
    by_hand.load_state_dict(module.state_dict())
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, tiny_loader(16, batch_size=16))
    assert trainer.global_step == 2

    optimizer = torch.optim.LBFGS(by_hand.parameters(), line_search_fn="strong_wolfe")
    (batch,) = tiny_loader(16, batch_size=16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = by_hand.loss(batch)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert same(parameters_of(module), parameters_of(by_hand))
    assert float(module.loss(batch).detach()) < 1e-8


def test_a_closure_cannot_work_with_a_loss_scaler() -> None:
    class Closing(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.optimizers().step(lambda: self.loss(batch))

    with pytest.raises(ConfigurationError, match=r"closure.*16-mixed.*precision='bf16-mixed'"):
        make_trainer(precision="16-mixed").fit(Closing(), tiny_loader())


def test_global_step_counts_training_steps_in_which_any_optimizer_stepped() -> None:
    class Every(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.step()
                optimizer.zero_grad()

    recorder, logger = Recorder(), Memory()
    trainer = make_trainer(recorder, max_epochs=2, val_every_n_steps=2, logger=logger, log_every_n_steps=1)
    trainer.fit(Every(), tiny_loader(16), tiny_loader(4))
    assert trainer.global_step == 4
    assert recorder.validations == [2, 4]
    assert len(recorder.batches) == 8


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_one_optimizer_and_one_scheduler_are_no_list() -> None:
    """`optimizers()` and `lr_schedulers()` return a single object itself and not a list."""

    class One(ManualModule):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            assert not isinstance(self.optimizers(), list)
            assert isinstance(self.lr_schedulers(), StepLR)

    make_trainer().fit(One(), tiny_loader(4))
    assert ManualModule().automatic_optimization is False


def test_trainer_never_steps_schedulers_in_manual_optimization() -> None:
    """With manual optimization, the Trainer never steps the schedulers."""

    class Scheduled(ManualModule):
        def configure_optimizers(self) -> Any:
            self.inner = super().configure_optimizers()
            return [self.inner], [{"scheduler": StepLR(self.inner, 1, 0.5), "interval": "step"}, StepLR(self.inner, 1, 0.5)]

    module = Scheduled()
    make_trainer(max_epochs=2).fit(module, tiny_loader())
    assert module.inner.param_groups[0]["lr"] == 0.1


# --------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"accumulate_grad_batches": 2},
            r"accumulate_grad_batches=2\) needs automatic optimization.*: if \(batch_idx \+ 1\) % 2 == 0: opt\.step\(\)",
        ),
        (
            {"global_batch_size": 4},
            r"global_batch_size=4\) needs automatic optimization.*: if \(batch_idx \+ 1\) % n == 0: opt\.step\(\)",
        ),
        ({"global_batch_size": 8}, r"global_batch_size=8\) needs automatic optimization"),
        ({"gradient_clip_val": 1.0}, r"self.clip_gradients\(optimizer"),
    ],
)
def test_arguments_without_effect_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_trainer(**arguments).fit(ManualModule(), tiny_loader())


def test_overrides_that_are_never_called() -> None:
    class Weighing(ManualModule):
        def batch_weight(self, batch: Any) -> float:
            return 1.0

    with pytest.raises(ConfigurationError, match="batch_weight needs automatic optimization"):
        make_trainer().fit(Weighing(), tiny_loader())
    with pytest.raises(ConfigurationError, match="need automatic optimization"):
        make_trainer(GradientClipping(1.0)).fit(ManualModule(), tiny_loader())


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_trainer_never_calls_clipping_in_manual_optimization() -> None:
    """With manual optimization, the Trainer never calls configure_gradient_clipping: the module does."""
    calls = []

    class Clipping(ManualModule):
        def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None:
            calls.append(value)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.configure_gradient_clipping(self.optimizers(), 2.0)

    make_trainer().fit(Clipping(), tiny_loader(8))
    assert calls == [2.0, 2.0]


def test_manual_backward_under_automatic_optimization() -> None:
    class Confused(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    with pytest.raises(ConfigurationError, match=r"automatic_optimization = False in __init__"):
        make_trainer().fit(Confused(), tiny_loader())


def test_an_update_can_be_skipped_by_a_hook() -> None:
    class Guard(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.batch_idx == 1:
                trainer.accelerator.skip_update()

    class Asking(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                self.trainer.accelerator.skip_update()  # no optimizer step follows that could be skipped
                return
            super().training_step(batch, batch_idx)

    trainer = make_trainer(Guard())
    trainer.fit(Asking(), tiny_loader(24))
    assert trainer.global_step == 4


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_what_training_step_returns_goes_to_the_hooks() -> None:
    seen = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    class Returning(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return ["anything", batch_idx]

    make_trainer(Looking()).fit(Returning(), tiny_loader(8))
    assert seen == [["anything", 0], ["anything", 1]]


def test_logging_in_a_hook_of_fit_is_refused() -> None:
    class Early(ManualModule):
        def on_fit_start(self) -> None:
            self.log("x", 1.0)

    with pytest.raises(MetricError, match=r"log\('x'\) cannot be called here"):
        make_trainer().fit(Early(), tiny_loader())
