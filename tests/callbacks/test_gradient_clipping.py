from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit.callbacks import GradientClipping
from trainkit.errors import ConfigurationError
from trainkit.precision import Precision


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0,), ["greater than 0", "gradient_clip_val=None"]),
        ((-1.0,), ["greater than 0", "-1.0"]),
        ((math.nan,), ["nan"]),
        ((True,), ["True"]),
        (("1.0",), ["'1.0'"]),
        ((1.0, "l2"), ["'norm', 'value'", "'l2'"]),
        ((1.0, "norm", 0.0), ["norm_type", "> 0"]),
        ((1.0, "value", 1.0), ["norm_type", "no meaning", "gradient_clip_algorithm='norm'"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: tuple[Any, ...], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        GradientClipping(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_manual_optimization_is_refused(trainer) -> None:
    module = TinyModule()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r"self\.clip_gradients"):
        GradientClipping(1.0).on_fit_start(trainer, module)


class Overriding(TinyModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.asked = (optimizer, gradient_clip_val, gradient_clip_algorithm)


def test_another_norm_cannot_reach_an_override(trainer) -> None:
    GradientClipping(1.0).on_fit_start(trainer, Overriding())
    GradientClipping(1.0, norm_type=math.inf).on_fit_start(trainer, TinyModule())
    with pytest.raises(ConfigurationError, match=r"Overriding.configure_gradient_clipping"):
        GradientClipping(1.0, norm_type=math.inf).on_fit_start(trainer, Overriding())


def test_an_override_decides_and_nothing_is_logged_without_a_norm(trainer) -> None:
    module, callback = Overriding(), GradientClipping(None)
    optimizer = module.configure_optimizers()
    callback.on_before_optimizer_step(trainer, module, optimizer)
    assert module.asked == (optimizer, None, None)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_norm_is_logged_at_log_boundaries_only(trainer, module, lazy: bool) -> None:
    """With lazy tensors it is logged in every step: steps that log more would be compiled as another graph."""
    norm = torch.tensor(3.0)
    trainer.strategy.lazy_tensors = lazy
    module.configure_gradient_clipping = lambda *arguments: norm
    for log_norm, should_log in [(True, True), (True, False), (False, True)]:
        callback = GradientClipping(1.0, log_norm=log_norm)
        callback._module = module
        trainer.should_log = should_log
        module.logged.clear()
        callback.on_before_optimizer_step(trainer, module, None)
        assert module.logged == ({"grad_norm": norm} if log_norm and (should_log or lazy) else {})
    callback = GradientClipping(1.0)
    callback._module, trainer.should_log = module, True
    callback.on_before_optimizer_step(trainer, module, None)
    assert module.options == {"on_step": True, "on_epoch": False}


def test_touches_the_gradients_last() -> None:
    assert GradientClipping.runs_last


class Recording(torch.optim.SGD):
    """SGD that records the gradient of each optimizer step as one vector."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        self.gradients.append(torch.cat(grads).clone())
        return super().step(closure)


class Recorded(TinyModule):
    def configure_optimizers(self):
        self.optimizer = Recording(self.parameters(), lr=0.1)
        return self.optimizer


def gradients_of(trainer: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Recorded()
    trainer.fit(module, tiny_loader(shuffle=False))
    return module.optimizer.gradients


def test_a_fit_clips_by_norm_and_logs_the_norm_before(make_trainer) -> None:
    free, clipped = make_trainer(), make_trainer(gradient_clip_val=0.5)
    unclipped, gradients = gradients_of(free), gradients_of(clipped)
    norms = clipped.logger.of("grad_norm")
    assert norms[1] == pytest.approx(unclipped[0].norm().item())
    assert norms[1] > 0.5  # otherwise nothing would be clipped
    for step, gradient in enumerate(gradients, start=1):
        assert gradient.norm().item() == pytest.approx(min(0.5, norms[step]), rel=1e-5)
    torch.testing.assert_close(gradients[0], unclipped[0] * 0.5 / norms[1])
    assert free.logger.of("grad_norm") == {}


def test_a_fit_clips_value_by_value(make_trainer) -> None:
    unclipped = gradients_of(make_trainer())
    trainer = make_trainer(gradient_clip_val=0.25, gradient_clip_algorithm="value")
    gradients = gradients_of(trainer)
    assert torch.equal(gradients[0], unclipped[0].clamp(-0.25, 0.25))
    assert trainer.logger.of("grad_norm")[1] == pytest.approx(unclipped[0].norm().item())


def test_the_largest_value_as_norm(make_trainer) -> None:
    unclipped = gradients_of(make_trainer())
    trainer = make_trainer(GradientClipping(0.25, norm_type=math.inf))
    gradients = gradients_of(trainer)
    assert trainer.logger.of("grad_norm")[1] == unclipped[0].abs().max().item()
    assert gradients[0].abs().max().item() == pytest.approx(0.25, rel=1e-5)


def test_inf_clips_nothing_but_logs(make_trainer) -> None:
    trainer = make_trainer(GradientClipping(math.inf))
    gradients = gradients_of(trainer)
    assert torch.equal(gradients[0], gradients_of(make_trainer())[0])
    assert trainer.logger.of("grad_norm")[1] == pytest.approx(gradients[0].norm().item())


def test_the_trainer_logs_the_norm_without_clipping(make_trainer) -> None:
    trainer = make_trainer(log_grad_norm=True)
    gradients = gradients_of(trainer)
    assert torch.equal(gradients[0], gradients_of(make_trainer())[0])
    assert trainer.logger.of("grad_norm")[1] == pytest.approx(gradients[0].norm().item())


def test_the_trainer_logs_the_norm_next_to_clipping(make_trainer) -> None:
    unclipped = gradients_of(make_trainer())[0].norm().item()
    for own in ({"gradient_clip_val": 0.5}, {"callbacks": [GradientClipping(0.5)]}):
        trainer = make_trainer(*own.pop("callbacks", []), log_grad_norm=True, **own)
        assert gradients_of(trainer)[0].norm().item() == pytest.approx(0.5, rel=1e-5)
        assert trainer.logger.of("grad_norm")[1] == pytest.approx(unclipped)
        assert sum(isinstance(callback, GradientClipping) for callback in trainer.callbacks) == 1
    with pytest.raises(ConfigurationError, match="contradict"):
        make_trainer(GradientClipping(0.5, log_norm=False), log_grad_norm=True)


def test_the_norm_is_logged_where_the_module_clips(make_trainer) -> None:
    """The override gets no value of its own to clip by."""
    module = Overriding()
    trainer = make_trainer(log_grad_norm=True, limit_train_batches=1)
    trainer.fit(module, tiny_loader())
    assert module.asked[1:] == (None, None)
    assert trainer.logger.of("grad_norm")[1] > 0


def test_the_gradient_of_a_window_is_clipped_whole(make_trainer) -> None:
    unclipped = gradients_of(make_trainer(accumulate_grad_batches=4))
    trainer = make_trainer(accumulate_grad_batches=4, gradient_clip_val=0.5)
    gradients = gradients_of(trainer)
    assert len(gradients) == len(unclipped) == 1
    assert trainer.logger.of("grad_norm")[1] == pytest.approx(unclipped[0].norm().item())
    assert gradients[0].norm().item() == pytest.approx(0.5, rel=1e-5)


def test_under_a_loss_scaler_the_unscaled_gradient_is_clipped(make_trainer) -> None:
    trainer = make_trainer(precision=Precision("16-mixed", init_scale=256.0), gradient_clip_val=0.5)
    gradients = gradients_of(trainer)
    norms = trainer.logger.of("grad_norm")
    assert norms[1] == pytest.approx(gradients_of(make_trainer())[0].norm().item(), rel=1e-2)  # without the loss scale
    assert gradients[0].norm().item() == pytest.approx(0.5, rel=1e-5)


def test_an_override_in_a_fit(make_trainer) -> None:
    module = Overriding()
    make_trainer(gradient_clip_val=0.5, limit_train_batches=1).fit(module, tiny_loader())
    assert isinstance(module.asked[0], torch.optim.SGD)
    assert module.asked[1:] == (0.5, None)
