"""`Accelerator` in your own training loop: accumulation windows, clipping, schedulers, skipped optimizer steps.

`prepare` is tested in `tests/trainer/test_prepare.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit.rng
from trainkit import Accelerator, Precision, Strategy, Trainer, set_seed
from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.micro_batch import WHOLE_WINDOW


class Slope(nn.Module):
    """One parameter, 0 at first. `slope(x)` is the parameter times the mean of x, so its gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.mean()


def loader(samples: int = 11, batch_size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(samples))), batch_size=batch_size, **options)


def accelerator(**arguments: Any) -> Accelerator:
    return Accelerator(**{"strategy": Strategy("cpu"), **arguments})


# Accumulation windows


def test_an_update_is_the_mean_over_the_samples_of_its_window() -> None:
    """The gradient of an optimizer step is the mean over the samples of its accumulation window.

    Eleven samples are micro-batches of 2, 2, 2, 2, 2 and 1 samples, in windows of four and two micro-batches.
    """
    engine = accelerator(gradient_accumulation_steps=4)
    model = Slope()
    prepared, optimizer, batches = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader())
    full, updated, gradients = [], [], []
    for (x,) in batches:
        with engine.accumulate(prepared):
            engine.backward(prepared(x))
            full.append(engine.sync_gradients)
            gradients.append(model.weight.grad.item())
            updated.append(optimizer.step())
            optimizer.zero_grad()
    assert full == updated == [False, False, False, True, False, True]
    assert gradients[3] == pytest.approx(sum(range(8)) / 8)
    assert gradients[5] == pytest.approx((8 + 9 + 10) / 3)
    assert model.weight.item() == pytest.approx(-(28 / 8 + 9))
    assert engine.updates == 2


def test_a_loader_that_was_not_prepared_is_counted() -> None:
    engine = accelerator(gradient_accumulation_steps=3)
    model = Slope()
    prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    full = []
    for _ in range(2):
        for (x,) in loader(8):
            with engine.accumulate(prepared):
                engine.backward(prepared(x))
                full.append(engine.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
    assert full == [False, False, True, False, False, True, False, False]  # windows continue past the end of an epoch
    means = [0.5, 2.5, 4.5, 6.5]
    assert model.weight.item() == pytest.approx(-(sum(means[:3]) / 3 + (means[3] + means[0] + means[1]) / 3))


def test_without_accumulation_there_is_nothing_to_say() -> None:
    """Without gradient accumulation, a loop needs no `accumulate`."""
    engine = accelerator()
    model = Slope()
    prepared, optimizer, batches = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader(4))
    for (x,) in batches:
        engine.backward(prepared(x))
        assert engine.sync_gradients
        assert optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == -(0.5 + 2.5)


def test_inside_a_window_nothing_is_zeroed_or_clipped() -> None:
    engine = accelerator(gradient_accumulation_steps=2)
    model = Slope()
    prepared, optimizer, batches = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader(8, 2))
    norms, left = [], []
    for (x,) in batches:
        with engine.accumulate(prepared):
            engine.backward(prepared(x))
            engine.clip_grad_value_(model.parameters(), 3.0)
            norms.append(engine.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            left.append(model.weight.grad)
    assert norms[0] is None
    assert norms[2] is None
    assert norms[1].item() == pytest.approx((0.5 + 2.5) / 2)
    assert norms[3].item() == pytest.approx(3.0)  # clip_grad_value_ has limited 5.5 to 3
    assert [grad is None for grad in left] == [False, True, False, True]
    assert model.weight.item() == pytest.approx(-2.0, rel=1e-5)


@pytest.mark.parametrize("form", [lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: m.weight])
def test_what_can_be_clipped(form: Any) -> None:
    engine = accelerator()
    model = engine.prepare(Slope())
    model.weight.grad = torch.tensor(4.0)
    assert engine.clip_grad_norm_(form(model), 1.0).item() == 4.0
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-5)
    engine.clip_grad_value_(form(model), 0.5)
    assert model.weight.grad.item() == 0.5


def test_clipping_under_a_loss_scale_sees_the_gradient_without_it() -> None:
    engine = accelerator(precision="16-mixed")
    models = Slope(), Slope()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ready = engine.prepare(*models, *optimizers)
    for _ in range(2):
        for model, optimizer in zip(ready[:2], optimizers, strict=True):  # each model has its own backward, clipping and step
            optimizer.zero_grad()
            engine.backward(model(torch.tensor([4.0])))
            assert engine.clip_grad_norm_(model.parameters(), 1.0).item() == 4.0
            assert engine.step(optimizer)
    assert [model.weight.item() for model in models] == [pytest.approx(-2.0, rel=1e-5)] * 2


def test_a_clipped_gradient_that_is_thrown_away_does_not_spoil_the_next() -> None:
    """With a loss scale: if a loop clips but makes no step, the next gradient is not unscaled by mistake."""
    engine = accelerator(precision=Precision("16-mixed", init_scale=8.0))
    model = Slope()
    prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for x in (100.0, 4.0):
        with engine.accumulate(prepared):
            engine.backward(prepared(torch.tensor([x])))
            norm = engine.clip_grad_norm_(model.parameters(), 50.0)
            assert norm.item() == x
            if norm < 50.0:
                optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -4.0


# Schedulers and skipped optimizer steps


def scheduled(engine: Accelerator, *, of_prepared: bool = False) -> tuple[Slope, nn.Module, Any, Any]:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    if of_prepared:
        prepared, ready = engine.prepare(model, optimizer)
        return model, prepared, ready, engine.prepare(torch.optim.lr_scheduler.StepLR(ready, 1, gamma=0.5))
    return model, *engine.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))


@pytest.mark.parametrize("of_prepared", [False, True])
def test_a_scheduler_counts_updates(of_prepared: bool) -> None:
    engine = accelerator(gradient_accumulation_steps=3)
    _, prepared, optimizer, scheduler = scheduled(engine, of_prepared=of_prepared)
    rates = []
    for (x,) in loader(14):
        with engine.accumulate(prepared):
            engine.backward(prepared(x))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert scheduler.get_last_lr() == [0.25]  # other attributes are those of the user's scheduler


@pytest.mark.parametrize("how", ["asked", "overflow"])
def test_a_skipped_update_changes_nothing_and_the_scheduler_waits(how: str) -> None:
    precision = Precision("16-mixed", init_scale=8.0) if how == "overflow" else None
    engine = accelerator(precision=precision)
    model, prepared, optimizer, scheduler = scheduled(engine)
    results, states, rates, skipped = [], [], [], []
    for number in range(4):
        with engine.accumulate(prepared):
            bad = number in (1, 2)
            engine.backward(prepared(torch.tensor([torch.inf if bad and how == "overflow" else 1.0])))
            if bad and how == "asked":
                engine.skip_update()
            results.append(optimizer.step())
            scheduler.step()
            optimizer.zero_grad()
            skipped.append(engine.optimizer_step_was_skipped)
            states.append((model.weight.item(), optimizer.state[model.weight]["momentum_buffer"].item()))
            rates.append(optimizer.param_groups[0]["lr"])
    assert results == [True, False, False, True]
    assert skipped == [False, True, True, False]
    assert rates == [0.5, 0.5, 0.5, 0.25]
    assert states[0] == states[1] == states[2] == (-1.0, 1.0)
    assert states[3] == (-1.75, 1.5)
    assert engine.updates == 2


def test_each_scheduler_waits_for_its_own_optimizer() -> None:
    engine = accelerator(precision=Precision("16-mixed", init_scale=8.0))
    models = Slope(), Slope()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    ready = engine.prepare(*optimizers, *schedulers)
    engine.backward(models[0](torch.tensor([torch.inf])) + models[1](torch.tensor([3.0])))
    assert [optimizer.step() for optimizer in ready[:2]] == [False, True]
    for scheduler in ready[2:]:
        scheduler.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [1.0, 0.5]
    assert [model.weight.item() for model in models] == [0.0, -3.0]


def test_a_closure() -> None:
    """`optimizer.step(closure)`, as LBFGS needs it."""
    engine = accelerator()
    model = Slope()
    prepared, optimizer = engine.prepare(model, torch.optim.LBFGS(model.parameters(), lr=1.0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (prepared(torch.ones(1)) - 3.0) ** 2
        engine.backward(loss)
        return loss

    for _ in range(5):
        assert optimizer.step(closure) is True
    assert model.weight.item() == pytest.approx(3.0, abs=1e-4)


def test_the_loss_may_be_nan_where_a_micro_batch_has_no_weight() -> None:
    """A micro-batch of share 0 leaves no gradient, even if its loss is NaN."""
    engine = accelerator()
    model = engine.prepare(Slope())
    engine.accumulation.begin(WHOLE_WINDOW._replace(share=0.0))
    engine.backward(model(torch.tensor([torch.nan])))
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "form", [lambda ready: ready, lambda ready: [ready], lambda ready: ready.optimizer, lambda ready: None]
)
def test_gradients_are_unscaled_once(form: Any) -> None:
    engine, model = accelerator(precision=Precision("16-mixed", init_scale=1024.0)), Slope()
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        engine.backward(model(torch.ones(1)))
        engine.unscale_gradients(form(optimizer))
        assert engine.unwrap_model(model).weight.grad.item() == 1.0
        assert optimizer.step()
        optimizer.zero_grad()


def test_a_skipped_window_is_skipped_by_all_optimizers_and_by_no_later_one() -> None:
    engine, models = accelerator(), [Slope(), Slope()]
    prepared = engine.prepare(*models, *(torch.optim.SGD(model.parameters(), lr=1.0) for model in models))
    models, optimizers = prepared[:2], prepared[2:]

    def backward() -> None:
        engine.backward(sum(model(torch.ones(1)) for model in models))

    backward()
    engine.skip_update()
    assert [optimizer.step() for optimizer in optimizers] == [False, False]
    backward()
    engine.skip_update()
    for optimizer in optimizers:
        optimizer.zero_grad()  # without a step
    backward()
    assert [optimizer.step() for optimizer in optimizers] == [True, True]
    assert not engine.optimizer_step_was_skipped


def test_one_skipped_step_of_several() -> None:
    engine = accelerator(precision=Precision("16-mixed", init_scale=4.0))
    one, other = Slope(), Slope()
    one, other, first, second = engine.prepare(
        one, other, torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(other.parameters(), lr=1.0)
    )
    engine.backward(one(torch.tensor([torch.inf])) + other(torch.ones(1)))
    assert [first.step(), second.step()] == [False, True]
    assert [first.step_was_skipped, second.step_was_skipped] == [True, False]
    assert engine.optimizer_step_was_skipped


@pytest.mark.world_size(2)
def test_gradients_of_an_optimizer_without_its_model_would_not_be_averaged() -> None:
    model, accelerator = nn.Linear(1, 1), Accelerator()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ConfigurationError, match=r"backward: an optimizer has been prepared but no model.*Prepare the model"):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(torch.full((1, 1), float(accelerator.process_index))).sum())
    before = float(model.weight)
    optimizer.step()
    assert float(model.weight) == pytest.approx(before - 0.5)


def test_a_second_training_begins_again() -> None:
    """After `free_memory`, a second training starts with a new accumulation window, loss scale and step count."""
    engine = accelerator(precision=Precision("16-mixed", init_scale=1024.0), gradient_accumulation_steps=3)
    for _ in range(2):
        model = Slope()
        model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        synced = []
        for place in range(4):
            with engine.accumulate(model):
                engine.backward(model(torch.tensor([torch.inf if place == 2 else 1.0])))
                optimizer.step()
                optimizer.zero_grad()
            synced.append(engine.sync_gradients)
        assert synced == [False, False, True, False]
        assert engine.strategy.precision.scaler is not None
        assert engine.strategy.precision.scaler.get_scale() == 512.0
        engine.free_memory(model, optimizer)
    assert (engine.updates, engine.optimizer_step_was_skipped) == (0, False)


# Seeds


def order(batches: Any) -> list[float]:
    return torch.cat([x for (x,) in batches]).tolist()


def test_the_order_is_the_seeds_and_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the samples depends only on the seed and the epoch."""
    monkeypatch.setattr(trainkit.rng, "_process_seed", None)  # restored at the end of the test
    set_seed(5)
    batches = accelerator().prepare(loader(32, shuffle=True))
    first, second = order(batches), order(batches)
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second
    batches.set_epoch(0)
    assert order(batches) == first
    set_seed(5)
    assert order(accelerator().prepare(loader(32, shuffle=True))) == first
    set_seed(6)
    assert order(accelerator().prepare(loader(32, shuffle=True))) != first


def test_loaders_that_are_read_side_by_side_are_ordered_each_in_its_own_way() -> None:
    one, other = accelerator().prepare(loader(32, shuffle=True), loader(32, shuffle=True))
    assert order(one) != order(other)


def test_the_generators_do_not_depend_on_what_was_drawn_before() -> None:
    engine = accelerator()
    batches = engine.prepare(loader(8))
    drawn = [torch.rand(()).item() for _ in batches]
    torch.rand(100)
    batches.set_epoch(0)
    assert [torch.rand(()).item() for _ in batches] == drawn
    assert len(set(drawn)) == 4


# Arguments


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_gradient_accumulation_steps(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps must be an integer ≥ 1, not"):
        accelerator(gradient_accumulation_steps=steps)


def test_an_unknown_argument() -> None:
    with pytest.raises(UnknownNameError, match=r"Accelerator has no argument 'precison'\. Did you mean 'precision'\?"):
        accelerator(precison="bf16-mixed")


def test_other_attributes(capsys: pytest.CaptureFixture[str]) -> None:
    """Attributes and methods that no other test of this file covers."""
    engine = accelerator(gradient_accumulation_steps=3, precision="bf16-mixed")
    assert (engine.device, engine.is_main_process) == (torch.device("cpu"), True)
    assert engine.gradient_accumulation_steps == 3
    assert engine.strategy.precision.name == "bf16-mixed"
    engine.print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"
    with engine.autocast():
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype is torch.bfloat16


def test_a_trainers_engine_is_one_too() -> None:
    """`trainer.accelerator` is an `Accelerator`."""
    assert isinstance(Trainer(accelerator="cpu", logger=False, max_epochs=1).accelerator, Accelerator)
