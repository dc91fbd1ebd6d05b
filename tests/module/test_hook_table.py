"""The hooks that exist, their arguments, and the order in which they are called."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Callback, TrainModule
from trainkit.module.hook_table import HOOKS

# Hooks are public API: a new hook or argument also needs a line in the changelog, one in the docs and one here.
FROZEN = {
    "setup": "stage",
    "teardown": "stage",
    "on_fit_start": "",
    "on_fit_end": "",
    "on_sanity_check_start": "",
    "on_sanity_check_end": "",
    "on_train_start": "",
    "on_train_end": "",
    "on_train_epoch_start": "",
    "on_train_epoch_end": "",
    "on_train_batch_start": "batch batch_idx",
    "on_train_batch_end": "outputs batch batch_idx",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_before_optimizer_step": "optimizer",
    "on_before_zero_grad": "optimizer",
    "on_validation_start": "",
    "on_validation_end": "",
    "on_validation_epoch_start": "",
    "on_validation_epoch_end": "",
    "on_validation_batch_start": "batch batch_idx dataloader_idx",
    "on_validation_batch_end": "outputs batch batch_idx dataloader_idx",
    "on_test_start": "",
    "on_test_end": "",
    "on_test_epoch_start": "",
    "on_test_epoch_end": "",
    "on_test_batch_start": "batch batch_idx dataloader_idx",
    "on_test_batch_end": "outputs batch batch_idx dataloader_idx",
    "on_predict_start": "",
    "on_predict_end": "",
    "on_predict_epoch_start": "",
    "on_predict_epoch_end": "",
    "on_predict_batch_start": "batch batch_idx dataloader_idx",
    "on_predict_batch_end": "outputs batch batch_idx dataloader_idx",
    "on_exception": "exception",
    "on_save_checkpoint": "checkpoint",
    "on_load_checkpoint": "checkpoint",
}


def test_the_hooks_are_frozen() -> None:
    assert {name: " ".join(arguments) for name, arguments in HOOKS.items()} == FROZEN


def test_callback_and_module_have_every_hook_with_these_arguments() -> None:
    for name, arguments in HOOKS.items():
        of_callback = list(inspect.signature(getattr(Callback, name)).parameters)
        assert of_callback == ["self", "trainer", "module", *arguments], name
        if name != "on_exception":  # Lightning's modules do not have it
            assert list(inspect.signature(getattr(TrainModule, name)).parameters) == ["self", *arguments], name


# ------------------------------------------------------------------------------------------------------------- order


class Script:
    """The calls in a run, one on each line: owner, hook, and those of its arguments that are strings or integers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, owner: str, name: str, *details: Any) -> None:
        self.lines.append(" ".join([owner, name, *map(str, details)]))


def _details(name: str, arguments: tuple[Any, ...]) -> list[Any]:
    """The stage and the indices in the arguments of a hook, without tensors, batches and optimizers."""
    return [value for value in arguments if isinstance(value, str | int)]


def _noting(owner: str, name: str, skip: int) -> Any:
    def hook(self: Any, *arguments: Any) -> None:
        self.script.note(owner, name, *_details(name, arguments[skip:]))

    return hook


def callback_that_notes(owner: str, last: bool = False) -> type[Callback]:
    methods = {name: _noting(owner, name, 2) for name in HOOKS}
    return type(owner, (Callback,), {**methods, "runs_last": last})


class NotingModule(TinyModule):
    def __init__(self, script: Script, automatic: bool = True) -> None:
        super().__init__()
        self.script = script
        self.automatic_optimization = automatic

    def prepare_data(self) -> None:
        self.script.note("M", "prepare_data")

    def configure_model(self) -> None:
        self.script.note("M", "configure_model")

    def configure_callbacks(self) -> list[Callback]:
        self.script.note("M", "configure_callbacks")
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.script.note("M", "configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.script.note("M", "training_step", batch_idx)
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.script.note("M", "validation_step", batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.script.note("M", "test_step", batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.script.note("M", "predict_step", batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.script.note("M", "optimizer_zero_grad", epoch, batch_idx)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.script.note("M", "lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)


for _name in HOOKS:
    if _name != "on_exception":
        setattr(NotingModule, _name, _noting("M", _name, 0))


class Scheduled(NotingModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


def noted(run: Any, module: type[NotingModule] = NotingModule, *, automatic: bool = True, **arguments: Any) -> list[str]:
    """Record the calls in `run(trainer, module)`, with a callback A, a callback Z that runs last, and the module M."""
    script = Script()
    early, late = callback_that_notes("A")(), callback_that_notes("Z", last=True)()
    early.script = late.script = script
    trainer = make_trainer(late, early, **arguments)
    run(trainer, module(script, automatic))
    return script.lines


def expected(text: str) -> list[str]:
    """The calls that a text describes: a line `AMZ hook details` stands for one call of each owner, in this order."""
    lines = []
    for line in text.strip().splitlines():
        owners, _, rest = line.strip().partition(" ")
        lines += [f"{owner} {rest}" for owner in owners]
    return lines


VALIDATION = """
    AMZ on_validation_start
    AMZ on_validation_epoch_start
    AMZ on_validation_batch_start 0 0
    M validation_step 0
    AMZ on_validation_batch_end 0 0
    AMZ on_validation_batch_start 1 0
    M validation_step 1
    AMZ on_validation_batch_end 1 0
    AMZ on_validation_epoch_end
    AMZ on_validation_end
"""


def training_epoch(epoch: int) -> str:
    """The calls in an epoch of three micro-batches, two in an accumulation window."""
    return f"""
    AMZ on_train_epoch_start
    AMZ on_train_batch_start 0
    AMZ on_before_zero_grad
    M optimizer_zero_grad {epoch} 0
    M training_step 0
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_train_batch_end 0
    AMZ on_train_batch_start 1
    M training_step 1
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    M lr_scheduler_step
    AMZ on_train_batch_end 1
    AMZ on_train_batch_start 2
    AMZ on_before_zero_grad
    M optimizer_zero_grad {epoch} 2
    M training_step 2
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    M lr_scheduler_step
    AMZ on_train_batch_end 2
    {VALIDATION}
    AMZ on_train_epoch_end
    M lr_scheduler_step
"""


FIT = f"""
    M configure_callbacks
    M prepare_data
    AMZ setup fit
    M configure_model
    M configure_optimizers
    AMZ on_fit_start
    AMZ on_sanity_check_start
    AMZ on_validation_start
    AMZ on_validation_epoch_start
    AMZ on_validation_batch_start 0 0
    M validation_step 0
    AMZ on_validation_batch_end 0 0
    AMZ on_validation_epoch_end
    AMZ on_validation_end
    AMZ on_sanity_check_end
    AMZ on_train_start
    {training_epoch(0)}
    {training_epoch(1)}
    AMZ on_train_end
    AMZ on_fit_end
    AMZ teardown fit
"""


def without_blank_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


def test_order_of_a_fit() -> None:
    """Two epochs of three micro-batches, two in an accumulation window; a sanity check on one batch, validation on two."""
    lines = noted(
        lambda trainer, module: trainer.fit(module, tiny_loader(12), tiny_loader(8)),
        Scheduled,
        max_epochs=2,
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
    )
    assert lines == expected(without_blank_lines(FIT))


MANUAL = """
    M configure_callbacks
    M prepare_data
    AMZ setup fit
    M configure_model
    M configure_optimizers
    AMZ on_fit_start
    AMZ on_train_start
    AMZ on_train_epoch_start
    AMZ on_train_batch_start 0
    M training_step 0
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    AMZ on_train_batch_end 0
    AMZ on_train_epoch_end
    AMZ on_train_end
    AMZ on_fit_end
    AMZ teardown fit
"""


def test_order_of_manual_optimization() -> None:
    lines = noted(lambda trainer, module: trainer.fit(module, tiny_loader(4)), automatic=False)
    assert lines == expected(MANUAL)


def evaluation(stage: str, name: str) -> str:
    return f"""
    M configure_callbacks
    M prepare_data
    AMZ setup {stage}
    M configure_model
    AMZ on_{name}_start
    AMZ on_{name}_epoch_start
    AMZ on_{name}_batch_start 0 0
    M {name}_step 0
    AMZ on_{name}_batch_end 0 0
    AMZ on_{name}_batch_start 1 0
    M {name}_step 1
    AMZ on_{name}_batch_end 1 0
    AMZ on_{name}_epoch_end
    AMZ on_{name}_end
    AMZ teardown {stage}
    """


@pytest.mark.parametrize("stage, name", [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_order_of_an_evaluation(stage: str, name: str) -> None:
    lines = noted(lambda trainer, module: getattr(trainer, stage)(module, tiny_loader(8)))
    assert lines == expected(evaluation(stage, name))


@pytest.mark.parametrize("stage, name", [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_loaders_number_goes_to_the_hooks(stage: str, name: str) -> None:
    class Several(NotingModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

    loaders = [tiny_loader(8), tiny_loader(4)]
    lines = noted(lambda trainer, module: getattr(trainer, stage)(module, loaders), Several)
    starts = [line for line in lines if line.startswith(f"M on_{name}_batch_start")]
    assert starts == [f"M on_{name}_batch_start {place}" for place in ("0 0", "1 0", "0 1")]


def test_an_error_in_a_step_ends_with_on_exception_and_teardown() -> None:
    class Failing(NotingModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    def run(trainer: Any, module: Any) -> None:
        with pytest.raises(KeyError, match="mine"):
            trainer.fit(module, tiny_loader(4))

    lines = noted(run, Failing)
    assert lines[-5:] == expected("AZ on_exception\nAMZ teardown fit")
