"""`Trainer(activation_checkpointing=)`: the same training with recomputed activations, under each kind of run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.parity import Case, RegressionModule, train
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import Tensor, nn

from trainkit import Callback, Trainer
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.strategies import DDPStrategy
from trainkit.strategy import Strategy
from trainkit.trainer.trial import run_trial

CHOICES = (True, "selective", {"every": 2})


class Block(nn.Module):
    """Draws from torch's, numpy's and Python's generators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(width, 8), nn.Linear(8, width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))  # kept for the gradient of `inner`
        return x + self.dropout(self.outer(self.dropout(self.inner(x).tanh())))


class Deep(TinyModule):
    """Counts the blocks that run with gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(Block(4), Block(4), Block(4), nn.Linear(4, 1))
        self.ran = 0
        for block in self.layer[:3]:
            block.inner.register_forward_hook(self.count)

    def count(self, *given: Any) -> None:
        self.ran += torch.is_grad_enabled()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class DeepRegression(RegressionModule):
    """The module of the parity tests with blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(Block(6), Block(6), nn.Linear(6, 6))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


def fit(module: Any, *callbacks: Callback, **arguments: Any) -> Any:
    run = {"ckpt_path": arguments.pop("ckpt_path", None)}
    trainer = make_trainer(*callbacks, **{"max_epochs": 2, "accumulate_grad_batches": 2, **arguments})
    trainer.fit(module, tiny_loader(24, shuffle=True), tiny_loader(), **run)
    return trainer


@pytest.mark.parametrize("choice, ran", [(True, 72), ("selective", 72), ({"every": 2}, 60), ("layer.1", 48), (False, 36)])
def test_parameters_are_bit_identical_and_the_module_is_as_before(choice: Any, ran: int) -> None:
    plain, module = Deep(), Deep()
    fit(plain)
    before = [dict(vars(part)).keys() for part in module.modules()]
    fit(module, activation_checkpointing=choice)
    assert same(parameters_of(module), parameters_of(plain))
    assert (plain.ran, module.ran) == (36, ran)  # also in the two validations nothing is recomputed
    assert all("forward" not in vars(part) for part in module.modules())
    assert [dict(vars(part)).keys() for part in module.layer.modules()] == before[-len(list(module.layer.modules())) :]


def test_a_second_fit_with_another_setting() -> None:
    plain, module = Deep(), Deep()
    for choice in (True, None, "layer.0"):
        fit(plain)
        module.ran = plain.ran = 0
        fit(module, activation_checkpointing=choice, seed=7)
        fit(plain, seed=7)
        assert module.ran == {True: 72, None: 36, "layer.0": 48}[choice]
        fit(module)
    assert all("forward" not in vars(part) for part in module.modules())


def test_after_an_error_the_module_is_as_before() -> None:
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert "forward" in vars(module.layer[0])
            raise ValueError("failed")

    module = Deep()
    with pytest.raises(ValueError, match="failed"):
        fit(module, Failing(), activation_checkpointing=True)
    assert "forward" not in vars(module.layer[0])


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.parametrize("choice", [True, "selective"])
def test_other_precisions(choice: Any, precision: str) -> None:
    plain, module = Deep(), Deep()
    fit(plain, precision=precision)
    fit(module, precision=precision, activation_checkpointing=choice)
    assert same(parameters_of(module), parameters_of(plain))


def test_manual_optimization() -> None:
    class Manual(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    plain, module = Manual(), Manual()
    fit(plain, accumulate_grad_batches=1)
    fit(module, accumulate_grad_batches=1, activation_checkpointing=True)
    assert same(parameters_of(module), parameters_of(plain))
    assert module.ran == 2 * plain.ran


def test_layers_of_configure_model() -> None:
    class Late(Deep):
        def configure_model(self) -> None:
            torch.manual_seed(4)
            self.layer = nn.Sequential(Block(4), Block(4), nn.Linear(4, 1))

    plain, module = Late(), Late()
    fit(plain)
    trainer = fit(module, activation_checkpointing=True)
    assert same(parameters_of(module), parameters_of(plain))
    assert "  recomputed     activations of 2 Block (layer.0, layer.1)\n" in trainer.explain()


@pytest.mark.parametrize("before, after", [(True, None), (None, "selective"), (True, True)])
def test_a_run_resumes_exactly_with_and_without_it(before: Any, after: Any, run_dir: Path) -> None:
    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx) == (0, 3):
                trainer.save_checkpoint("half")
                trainer.should_stop = True

    expected, half, resumed = Deep(), Deep(), Deep()
    fit(expected, seed=1)
    fit(half, Saving(), seed=1, activation_checkpointing=before)
    fit(resumed, ckpt_path="half", activation_checkpointing=after)
    assert same(parameters_of(resumed), parameters_of(expected))
    assert not same(parameters_of(half), parameters_of(expected))


def test_evaluations_after_a_fit_and_alone() -> None:
    module = Deep()
    trainer = make_trainer(activation_checkpointing=True)
    trainer.validate(module, tiny_loader(), verbose=False)
    trainer.fit(module, tiny_loader(), tiny_loader())
    ran = module.ran
    trainer.test(module, tiny_loader(), verbose=False)
    assert module.ran == ran == 24
    assert "forward" not in vars(module.layer[0])


def test_explain() -> None:
    assert "recomputed" not in make_trainer().explain()
    trainer = make_trainer(activation_checkpointing={"policy": "selective", "every": 2})
    kept = "; matrix products, convolutions and attention are kept\n"
    assert f"  recomputed     activations of the repeated blocks, one in 2{kept}" in trainer.explain()
    trainer.fit(Deep(), tiny_loader())
    assert f"  recomputed     activations of 2 Block (layer.0, layer.2){kept}" in trainer.explain()
    named = make_trainer(activation_checkpointing=[Block, "layer.*"])
    assert "  recomputed     activations of Block, layer.*\n" in named.explain()


def test_a_trial_of_the_tuner_measures_with_it() -> None:
    """A trial runs on a copy of the module. If the fit has begun, the copy recomputes its activations already."""
    seen: list[int] = []

    class Watching(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(sum("forward" in vars(part) for part in module.modules()))

    module = Deep()
    trainer = make_trainer(activation_checkpointing=True)
    run_trial(trainer, "fit", module, Watching(), dataloaders=tiny_loader(), max_steps=1)

    class Begun(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trial = run_trial(
                trainer, "fit", module, Watching(), dataloaders=tiny_loader(), max_steps=1, alone=True, begun=True
            )
            seen.append(int(trial._run.recomputed is not None))

    fit(module, Begun(), activation_checkpointing=True)
    assert seen == [3, 3, 0]


def test_wrong_arguments_are_found_when_the_trainer_is_made() -> None:
    with pytest.raises(ConfigurationError, match="activation_checkpointing=3: expected True"):
        Trainer(activation_checkpointing=3)
    with pytest.raises(ConfigurationError, match="TinyModule has no repeated blocks"):
        fit(TinyModule(), activation_checkpointing=True)


class Lazy(Strategy):
    name, lazy_tensors = "lazy", True


def test_a_strategy_with_lazy_tensors_is_refused() -> None:
    make_trainer(strategy=Lazy())
    with pytest.raises(UnsupportedArgumentError, match="does not work with Lazy.*torch_xla.utils.checkpoint.checkpoint"):
        make_trainer(strategy=Lazy(), activation_checkpointing=True)


# ------------------------------------------------------------------------------------------------------ several processes


def case(choice: Any) -> Case:
    return Case(samples=22, window=4, make=DeepRegression, arguments={"activation_checkpointing": choice, "max_epochs": 1})


def under_ddp() -> list[list[Tensor]]:
    options: tuple[dict[str, Any], ...] = ({}, {"static_graph": True})
    return [train(case(choice), strategy=DDPStrategy(**each)).parameters[-1] for choice in CHOICES for each in options]


@pytest.mark.world_size(2)
def test_ddp() -> None:
    """The same parameters as in one process without recomputation, with an incomplete window and a rank without a batch."""
    expected = train(case(None)).parameters[-1]
    results = run_world(2, under_ddp)
    for parameters in (*results[0], *results[1]):
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-12)


def test_a_backend_that_would_recompute_other_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedArgumentError, match="does not work with torch.compile's backend 'eager'"):
        Trainer(activation_checkpointing=True, compile={"backend": "eager"}, logger=False)
