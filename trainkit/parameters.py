"""The parameters of a module that is given to a strategy: what they must be, and what is said of them."""

from __future__ import annotations

from torch import nn

from trainkit.console import notice
from trainkit.errors import ConfigurationError
from trainkit.precision import Precision

__all__ = ["note_other_dtypes", "refuse_divided"]


def refuse_divided(module: nn.Module) -> None:
    """Refuse a module that an earlier run has left divided over processes.

    Raises:
        ConfigurationError: parameters are divided, as DeepSpeed leaves them.
    """
    divided = sum(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if divided:
        raise ConfigurationError(
            f"{divided} parameters are divided by ZeRO-3: configure_model has made them in an earlier run on several "
            f"processes, or deepspeed.zero.Init. Go on with strategy='zero3', or start from a checkpoint: "
            f"{type(module).__name__}.load_from_checkpoint(path)"
        )


def note_other_dtypes(module: nn.Module, precision: Precision) -> None:
    """Say which dtypes a precision has left as they were."""
    odd = {str(p.dtype) for p in module.parameters() if p.is_floating_point() and p.dtype != precision.parameter_dtype}
    if odd:
        notice(
            f"precision {precision.name} leaves parameters as they are, and some are {', '.join(sorted(odd))}. To train in "
            "that dtype name it: precision='bf16-true'; for float32: module.float()."
        )
