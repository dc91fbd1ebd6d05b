from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit.callback import Callback
from trainkit.callbacks import LambdaCallback
from trainkit.errors import ConfigurationError, HookError, UnknownNameError
from trainkit.module.hook_checks import check_callback
from trainkit.module.hook_table import HOOKS


def test_an_unknown_hook_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'on_train_epoch_end'\?"):
        LambdaCallback(on_train_epochs_end=print)
    with pytest.raises(UnknownNameError, match="Known hooks: setup, teardown"):
        LambdaCallback(state_dict=dict)


def test_what_is_no_function_is_an_error_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="lambda trainer, module, batch, batch_idx: "):
        LambdaCallback(on_train_batch_start="print")


@pytest.mark.parametrize("function", [lambda: None, lambda trainer: None, lambda trainer, module, a, b, c: None])
def test_a_signature_that_cannot_be_called_is_an_error_with_both(function: Any) -> None:
    with pytest.raises(HookError, match=r"expected \(trainer, module, loss\), received \(.*Fix: LambdaCallback"):
        LambdaCallback(on_before_backward=function)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_can_be_given(name: str) -> None:
    calls: list[tuple[Any, ...]] = []
    callback = LambdaCallback(**{name: lambda *arguments: calls.append(arguments)})
    check_callback(callback)
    arguments = ("trainer", "module", *HOOKS[name])
    getattr(callback, name)(*arguments)
    assert calls == [arguments]


def test_other_hooks_stay_idle() -> None:
    callback = LambdaCallback(on_train_start=lambda trainer, module: None)
    assert set(vars(callback)) == {"on_train_start"}
    assert isinstance(callback, Callback)


def test_a_builtin_without_a_readable_signature_is_taken() -> None:
    LambdaCallback(on_fit_start=print, on_fit_end=max)


def test_functions_are_called_in_a_fit(make_trainer) -> None:
    calls: list[Any] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: calls.append((trainer, module)),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
        on_validation_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append("validated"),
        teardown=lambda trainer, module, stage: calls.append(stage),
    )
    trainer, module = make_trainer(callback), TinyModule()
    trainer.fit(module, tiny_loader(samples=8), tiny_loader(samples=4))
    assert calls == [(trainer, module), 0, 1, "validated", "fit"]
