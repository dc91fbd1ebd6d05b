"""The float16 loss scale under ZeRO: PyTorch's `GradScaler`, which checks the gradient norm instead of the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainkit.precision import Precision

__all__ = ["LossScale"]


class LossScale:
    """The loss scale of one engine's gradients.

    Args:
        precision: the precision, whose scaler, if it has one, scales the losses before the backward pass.
        device: the device of the gradient norm.

    Attributes:
        factor: what the true gradients are multiplied by.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision, self.factor = precision, 1.0
        self._norm = nn.Parameter(torch.zeros((), device=device))
        # the scaler steps this optimizer, which changes nothing
        self._optimizer = torch.optim.SGD([self._norm], lr=0.0)

    @property
    def value(self) -> float:
        """The factor by which the gradients of this accumulation window are scaled."""
        scaler = self._precision.scaler
        return (1.0 if scaler is None else float(scaler.get_scale())) / self.factor

    def allows(self, norm: Callable[[], Tensor]) -> bool:
        """Whether to run the optimizer step: `False` if the scaled norm is not finite. Also updates the scale.

        Args:
            norm: returns the scaled gradient norm; called only if there is a scaler.
        """
        if self._precision.scaler is None:
            return True
        self._norm.grad = norm().to(self._norm, copy=True)
        return self._precision.optimizer_step(self._optimizer)
