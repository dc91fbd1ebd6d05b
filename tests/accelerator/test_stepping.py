"""Optimizer steps, and errors for torch's own calls where those of the accelerator are needed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit import Accelerator
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, OptimizerError, UnsavableError


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def begun(**arguments: Any) -> tuple[Accelerator, nn.Linear, Any, Any, torch.optim.Optimizer]:
    """An accelerator, the model, the prepared model, the prepared optimizer, and the user's own optimizer."""
    accelerator, model = Accelerator(cpu=True, **arguments), line()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    return accelerator, model, *accelerator.prepare(model, own), own


def once(model: Any) -> Tensor:
    return model(torch.ones(1, 1)).sum()


DELICATE: list[dict[str, Any]] = [{"gradient_accumulation_steps": 2}, {"mixed_precision": "fp16"}, {"strategy": "zero1"}]


@pytest.mark.parametrize("arguments", DELICATE, ids=["windows", "scale", "zero"])
def test_gradients_of_torchs_own_backward_are_refused(arguments: dict[str, Any]) -> None:
    """A step after `loss.backward()` instead of `accelerator.backward(loss)` is an error."""
    if "strategy" in arguments:
        pytest.importorskip("deepspeed")
    accelerator, _, prepared, optimizer, _ = begun(**arguments)
    for _ in range(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(once(prepared))
            optimizer.step()  # correct use
            optimizer.zero_grad()
    assert accelerator.updates > 0
    while True:
        with accelerator.accumulate(prepared):
            once(prepared).backward()
            if accelerator.sync_gradients:
                break
            optimizer.step()  # no step is due inside the window
    with pytest.raises(ConfigurationError, match=r"no accelerator.backward\(loss\) since the last step.*instead of loss"):
        optimizer.step()
    accelerator.free_memory()


@pytest.mark.parametrize("arguments", DELICATE, ids=["windows", "scale", "zero"])
def test_steps_of_the_optimizer_as_it_was_are_refused(arguments: dict[str, Any]) -> None:
    """`step` of the optimizer that was passed to `prepare` is an error, until `free_memory`."""
    if "strategy" in arguments:
        pytest.importorskip("deepspeed")
    accelerator, model, prepared, _, own = begun(**arguments)
    with accelerator.accumulate(prepared):
        accelerator.backward(once(prepared))
        with pytest.raises(
            ConfigurationError, match=r"SGD.step\(\) was called on the optimizer that was passed to prepare.*Use what prepare"
        ):
            own.step()
    accelerator.free_memory()
    assert model.weight.item() == 0.0
    model.weight.grad = torch.ones(1, 1)
    own.step()  # allowed after free_memory
    assert model.weight.item() == -1.0


def test_where_they_are_right_they_work() -> None:
    """Without accumulation, loss scale and ZeRO, torch's own `backward` and `step` work."""
    accelerator, model, prepared, optimizer, own = begun()
    once(prepared).backward()
    optimizer.step()
    assert model.weight.item() == -1.0
    own.step()
    assert model.weight.item() == -2.0
    model.weight.grad = torch.full((1, 1), 3.0)  # computed in another way than by backward
    optimizer.step()
    assert model.weight.item() == -5.0
    accelerator.gradient_accumulation_steps = 2
    del accelerator, prepared, optimizer
    gc.collect()
    own.step()  # no reference to the accelerator is left
    assert model.weight.item() == -8.0


def test_gradients_that_were_not_computed_are_no_reason_to_refuse_the_next() -> None:
    """After a window with `backward(None)`, which makes no step, the next window is trained."""
    accelerator, model, prepared, optimizer, _ = begun(gradient_accumulation_steps=2)
    for _ in range(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(None)
            optimizer.step()
    for _ in range(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(once(prepared))
            optimizer.step()
    assert model.weight.item() == -1.0


def test_a_step_before_there_are_gradients_does_no_harm() -> None:
    """`step` before any `backward` changes nothing; some scripts call it so that torch does not warn about the scheduler."""
    accelerator, model, prepared, optimizer, _ = begun(gradient_accumulation_steps=2)
    optimizer.zero_grad()
    optimizer.step()
    for _ in range(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(once(prepared))
            optimizer.step()
    assert model.weight.item() == -1.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_at_the_head_clears_at_the_beginning_of_a_window_only(set_to_none: bool) -> None:
    """`zero_grad` at the start of the body of `accumulate` clears earlier gradients, but not those of the window."""
    accelerator, model, prepared, optimizer, _ = begun(gradient_accumulation_steps=3)
    model.weight.grad = torch.full((1, 1), 7.0)
    seen = []
    for _ in range(6):
        with accelerator.accumulate(prepared):
            optimizer.zero_grad(set_to_none=set_to_none)
            accelerator.backward(once(prepared))
            seen.append(round(model.weight.grad.item(), 5))
            optimizer.step()
    assert seen == [0.33333, 0.66667, 1.0] * 2
    assert model.weight.item() == pytest.approx(-2.0)


def test_zero_grad_after_the_backward_pass_drops_a_window() -> None:
    """A loop that calls `zero_grad` without `step` at the end of a window drops the gradients of the window."""
    accelerator, model, prepared, optimizer, _ = begun(gradient_accumulation_steps=2)
    for place in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(once(prepared))
            if place > 1:
                optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -1.0


@pytest.mark.parametrize("weight", [None, 3])
def test_without_accumulate_each_step_is_an_optimizer_step_and_a_notice_says_so_once(
    weight: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop counts the accumulation windows itself, with a loader that was not prepared."""
    accelerator, model, prepared, optimizer, _ = begun(gradient_accumulation_steps=2)
    caplog.clear()
    for place in range(4):
        assert accelerator.sync_gradients
        accelerator.backward(once(prepared), weight=weight)
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -2.0
    (text,) = (record.getMessage() for record in caplog.records)
    assert "gradient_accumulation_steps=2, but backward is called outside of accumulate()" in text
    assert "with accelerator.accumulate(model):" in text


def test_each_of_two_optimizers_has_its_step() -> None:
    accelerator, first, second = Accelerator(cpu=True, gradient_accumulation_steps=2), line(), line()
    models = accelerator.prepare(first, second)
    optimizers = accelerator.prepare(*(torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)))
    for _ in range(2):
        with accelerator.accumulate(*models):
            accelerator.backward(once(models[0]) + once(models[1]))
            for optimizer in optimizers:
                optimizer.step()
    assert first.weight.item() == second.weight.item() == -1.0


def test_a_model_that_is_called_unprepared_warns_once() -> None:
    accelerator, model, prepared, *_ = begun(mixed_precision="bf16")
    with pytest.warns(TrainkitWarning, match=r"not computed in bf16-mixed: no prepared model has been called"):
        accelerator.backward(once(model))
    accelerator.backward(once(model))  # no second warning, which would be an error
    accelerator, model, prepared, *_ = begun(mixed_precision="bf16")
    with accelerator.autocast():
        loss = once(model)
    accelerator.backward(loss)  # no warning: computed in bf16 by autocast
    accelerator, model, prepared, *_ = begun(mixed_precision="bf16")
    accelerator.backward(once(prepared))
    accelerator.backward(once(model))  # no warning: a part of a loss may be computed in float32


def test_gradients_that_zero_would_lose_are_reported() -> None:
    pytest.importorskip("deepspeed")
    accelerator = Accelerator(cpu=True, strategy="zero1")
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = accelerator.unwrap_model(model).weight.item()
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.backward(model(torch.full((1, 1), 10.0)).sum())
    optimizer.step()
    assert accelerator.unwrap_model(model).weight.item() == pytest.approx(before - 11.0)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigurationError, match=r"no optimizer step since the last one.*gradient_accumulation_steps=n"):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert accelerator.unwrap_model(model).weight.item() == pytest.approx(before - 12.0)
    accelerator.free_memory()


# --------------------------------------------------------------------------------------------- parameters of replaced layers


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3))


def trained(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("when", ["before prepare", "after prepare", "all of them", "weight norm", "tied"])
def test_an_optimizer_of_a_replaced_layer_is_refused_at_the_first_step(when: str) -> None:
    accelerator, plain = Accelerator(cpu=True), two_layers()
    optimizer = torch.optim.AdamW(plain.parameters())
    count, shape = 2, r"\(3, 2\)"
    if when == "before prepare":
        plain[1] = nn.Linear(2, 3)
    model, prepared = accelerator.prepare(plain, optimizer)
    if when == "after prepare":
        plain[1] = nn.Linear(2, 3)
    elif when == "all of them":
        plain[0], plain[1] = nn.Linear(1, 2), nn.Linear(2, 3)
        count, shape = 4, r"\(2, 1\)"
    elif when == "weight norm":
        nn.utils.parametrizations.weight_norm(plain[1])
        count = 1
    elif when == "tied":
        plain[1].bias = nn.Parameter(torch.zeros(3))
        count, shape = 1, r"\(3,\)"
    text = rf"AdamW trains {count} parameters? that the model does not have \(the first of shape {shape}\).*"
    line = r"optimizer = torch.optim.AdamW\(model.parameters\(\)\); model, optimizer = accelerator.prepare\(model, optimizer\)"
    with pytest.raises(OptimizerError, match=text + line):
        trained(accelerator, model, prepared)


def test_a_layer_that_is_replaced_in_the_middle_is_found_in_the_next_epoch_and_by_the_first_save() -> None:
    accelerator, plain = Accelerator(cpu=True), two_layers()
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [torch.ones(1, 1)] * 2)
    for _ in loader:
        trained(accelerator, model, optimizer)
    plain[1] = nn.Linear(2, 3)
    with pytest.raises(UnsavableError, match=r"shape \(3, 2\) that belongs to no module.*create the optimizer after that"):
        accelerator.save_state("there")
    next(iter(loader))
    with pytest.raises(OptimizerError, match="SGD trains 2 parameters that the model does not have"):
        trained(accelerator, model, optimizer)


@pytest.mark.parametrize(
    "change", ["parametrized", "wrapped", "tied before", "frozen", "loose tensor", "another model", "lazy"]
)
def test_what_is_no_replaced_layer_is_trained(change: str) -> None:
    accelerator, plain = Accelerator(cpu=True), two_layers()
    if change == "tied before":
        plain[1].bias = nn.Parameter(torch.zeros(3))
    elif change == "lazy":
        plain = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 3))
        plain(torch.ones(1, 1))
    trains = [*plain.parameters()]
    if change == "loose tensor":  # such as a temperature: it cannot be saved, which a save says
        trains.append(torch.zeros(1, requires_grad=True))
    elif change == "another model":  # that the loop moves and averages itself
        trains = [*two_layers().parameters()]
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(trains, lr=0.1))
    if change == "parametrized":
        nn.utils.parametrize.register_parametrization(plain[1], "weight", nn.Identity())
    elif change == "wrapped":  # as adapters do
        plain[1] = nn.Sequential(plain[1], nn.Linear(3, 3).requires_grad_(False))
    elif change == "frozen":
        plain[0].requires_grad_(False)
    trained(accelerator, model, optimizer, steps=2)
    assert accelerator.updates == 2
    if change in ("loose tensor", "another model"):
        with pytest.raises(UnsavableError, match="belongs to no module of the run.*prepare that too"):
            accelerator.save_state("there")
    else:
        accelerator.save_state("there")
