"""The number of floating-point operations of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["measure_flops"]


def measure_flops(model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None) -> int:
    """Count the FLOPs of a forward pass, and with `loss_fn` of the backward pass too, with `torch.utils.flop_counter`.

    Build the model under `torch.device("meta")` to count without computing. `ThroughputMonitor(measure_flops=True)` counts
    those of the first training batch.

    Args:
        model: No effect: every operation of `forward_fn` counts.
        forward_fn: Returns the output of the model.
        loss_fn: Returns the loss of the output, a scalar. Default: no backward pass.

    Example:
        ```python
        with torch.device("meta"):
            model, x = nn.Linear(64, 10), torch.randn(32, 64)
        flops = measure_flops(model, lambda: model(x), torch.sum)
        ```
    """
    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())
