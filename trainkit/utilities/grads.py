"""The norm of each parameter's gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigurationError

__all__ = ["grad_norm"]


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of the gradient of each parameter, and of all of them.

    It reads `parameter.grad`, so call it where gradients are complete, in `on_before_optimizer_step`. Under ZeRO the
    gradients are sharded and `parameter.grad` is not set: use `GradientClipping(float("inf"))`, which logs the norm.

    Args:
        module: The module.
        norm_type: The p of the p-norm, a positive number, or `"inf"`.
        group_separator: Separates the name of the group and the parameter's name.

    Returns:
        `grad_2.0_norm/weight` and so on → the norm, a scalar on the device of the gradient; `grad_2.0_norm_total` → the norm
        of these norms. Empty if no parameter has a gradient.

    Raises:
        ConfigurationError: `norm_type` is not positive.

    Example:
        ```python
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self.net, norm_type=2))
        ```
    """
    p = float(norm_type)
    if not p > 0:
        raise ConfigurationError(f"norm_type must be a positive number or 'inf', not {norm_type!r}. For example: norm_type=2")
    with torch.no_grad():
        norms = {
            f"grad_{p}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad, p)
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        if norms:
            device = next(iter(norms.values())).device
            norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack([one.to(device) for one in norms.values()]), p)
    return norms
