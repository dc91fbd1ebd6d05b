"""`GradientClipping`: what `Trainer(gradient_clip_val=...)` and `Trainer(log_grad_norm=True)` attach."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.checks import choice, real_number
from trainkit.errors import ConfigurationError
from trainkit.module.overridable_hooks import is_overridden

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["GradientClipping"]


class GradientClipping(Callback):
    """Clips the gradient before each optimizer step, by norm or by value, and logs its norm as `grad_norm`.

    It calls `module.configure_gradient_clipping`, so a module can override how it clips. It clips the gradient of the whole
    accumulation window, after unscaling under `16-mixed`. The logged norm is that before clipping; nothing waits for the
    device.

    Args:
        gradient_clip_val: Maximum norm of all gradients of the optimizer together, or maximum absolute value of each
            element; greater than 0. `inf` only logs the norm, which is computed at log boundaries only. None and `inf`
            leave the value to an overridden `configure_gradient_clipping`.
        gradient_clip_algorithm: `"norm"` (the default) scales all gradients by one factor (Pascanu, Mikolov, Bengio: On the
            difficulty of training recurrent neural networks, ICML 2013); `"value"` clips each element.
        norm_type: The norm; `inf` is the largest absolute value. Only for `"norm"`.
        log_norm: Log the norm at log boundaries.

    Raises:
        ConfigurationError: An argument out of its range; when training starts: manual optimization, or a `norm_type`
            other than 2 with a module that overrides `configure_gradient_clipping`.

    Example:
        ```python
        trainer = Trainer(callbacks=[GradientClipping(1.0)])   # the same as Trainer(gradient_clip_val=1.0)
        ```
    """

    runs_last = True

    def __init__(
        self,
        gradient_clip_val: float | None,
        gradient_clip_algorithm: str | None = None,
        norm_type: float = 2.0,
        log_norm: bool = True,
    ) -> None:
        super().__init__()
        real_number(gradient_clip_val, "GradientClipping(gradient_clip_val=)", example=1.0, optional=True)
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            raise ConfigurationError(
                f"gradient_clip_val expected a number greater than 0, got {gradient_clip_val!r}. Fix: gradient_clip_val=None "
                "to turn clipping off, or GradientClipping(float('inf')) to log the norm without clipping"
            )
        choice(gradient_clip_algorithm, "GradientClipping(gradient_clip_algorithm=)", ("norm", "value"), optional=True)
        real_number(norm_type, "GradientClipping(norm_type=)", above=0, fix="GradientClipping(1.0, norm_type=2.0)")
        if norm_type != 2.0 and gradient_clip_algorithm == "value":
            raise ConfigurationError(
                f"GradientClipping(norm_type={norm_type!r}) has no meaning with gradient_clip_algorithm='value'. "
                "Fix: remove norm_type, or set gradient_clip_algorithm='norm'"
            )
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.norm_type = float(norm_type)
        self.log_norm = log_norm
        self._measures = gradient_clip_val == math.inf or gradient_clip_algorithm == "value"  # clipping computes no norm

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not module.automatic_optimization:
            raise ConfigurationError(
                "GradientClipping, gradient_clip_val, log_grad_norm and configure_gradient_clipping need automatic "
                "optimization. Under automatic_optimization = False clip in training_step, before the optimizer step:\n"
                "    self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm='norm')"
            )
        if self.norm_type != 2.0 and _overrides_clipping(module):
            raise ConfigurationError(
                f"GradientClipping(norm_type={self.norm_type}) has no effect on {type(module).__name__}."
                "configure_gradient_clipping, which decides how it clips. Fix: remove norm_type, or the override"
            )

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        # With lazy tensors, logging in only some steps would add a graph.
        due = trainer.should_log or trainer.strategy.lazy_tensors
        before = self._norm(trainer, optimizer) if self._measures and self.log_norm and due else None
        clipped = self._clip(trainer, module, optimizer)
        norm = clipped if before is None else before
        if self.log_norm and isinstance(norm, Tensor) and due:
            self.log("grad_norm", norm, on_step=True, on_epoch=False)

    def _norm(self, trainer: Trainer, optimizer: Optimizer) -> Tensor | None:
        sharded = trainer.strategy.gradient_norm(optimizer) if self.norm_type == 2.0 else None
        return self._clip_norm(trainer, optimizer, math.inf) if sharded is None else sharded

    def _clip(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> Any:
        value = None if self.gradient_clip_val == math.inf else self.gradient_clip_val
        if self.norm_type == 2.0 or value is None:
            return module.configure_gradient_clipping(optimizer, value, self.gradient_clip_algorithm)
        return self._clip_norm(trainer, optimizer, value)

    def _clip_norm(self, trainer: Trainer, optimizer: Optimizer, value: float) -> Tensor | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return trainer.accelerator.clip_grad_norm_(parameters, value, norm_type=self.norm_type)


def _overrides_clipping(module: TrainModule) -> bool:
    from trainkit.module.train_module import TrainModule

    return is_overridden(module, "configure_gradient_clipping", TrainModule)
