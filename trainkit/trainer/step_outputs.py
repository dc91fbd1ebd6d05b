"""What `training_step` returned: the loss in it, and what `on_train_batch_end` gets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainkit.errors import LossError

__all__ = ["check_loss", "detached", "loss_in"]


def loss_in(outputs: Any) -> Tensor | None:
    """The loss in the dict that `training_step` returned.

    Raises:
        LossError: it is not a dict with a loss.
    """
    if not isinstance(outputs, dict) or "loss" not in outputs:
        raise LossError(
            "training_step must return the mean loss (a scalar tensor), a dict with it under 'loss', or None; it returned "
            f"{_describe(outputs)}."
        )
    loss = outputs["loss"]
    if loss is not None and not isinstance(loss, Tensor):
        raise LossError(f"training_step: outputs['loss'] must be a scalar tensor, not {_describe(loss)}.")
    return loss


def check_loss(loss: Tensor) -> None:
    """Raise a `LossError` for a loss that cannot be trained on."""
    if loss.numel() != 1:
        raise LossError(
            f"training_step must return a scalar loss, not a tensor of shape {tuple(loss.shape)}. Return its mean: "
            "return loss.mean()"
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss that training_step returned has no graph, so nothing can be trained. Do not use .item(), .detach() or "
            "torch.no_grad() to compute it, and check that at least one parameter has requires_grad=True."
        )


def detached(outputs: Any) -> Any:
    """What `on_train_batch_end` gets: the outputs as a dict, the loss without its graph."""
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        return {**outputs, "loss": outputs["loss"].detach()}
    return outputs


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"
    return f"{value!r} ({type(value).__name__})"
