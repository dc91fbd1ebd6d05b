"""The loss scale of float16 under ZeRO: torch's, which is shown the norm of gradients that no process has whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainkit.precision import Precision

__all__ = ["LossScale"]


class LossScale:
    """The scale of one engine's gradients.

    Args:
        precision: whose scaler it is, if it has one; the losses are scaled by it before their backward passes.
        device: of the norm.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._shown = nn.Parameter(torch.zeros((), device=device))
        # what torch's scaler takes for the optimizer: an update of nothing
        self._optimizer = torch.optim.SGD([self._shown], lr=0.0)

    @property
    def value(self) -> float:
        """What the gradients of this window are too large by."""
        scaler = self._precision.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def allows(self, norm: Callable[[], Tensor]) -> bool:
        """Whether the update is to be made: not where the scaled norm is not finite. The scale is changed as torch does it.

        Args:
            norm: asked for only where there is a scale.
        """
        if self._precision.scaler is None:
            return True
        self._shown.grad = norm().to(self._shown, copy=True)
        return self._precision.optimizer_step(self._optimizer)
