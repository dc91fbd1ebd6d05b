"""What `training_step` may return, without a run. tests/module/test_hooks_refused.py tests the losses that a run rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.errors import LossError
from trainkit.trainer.module_steps import check_loss, detach_loss, loss_in


def test_the_loss_in_a_dict() -> None:
    loss = torch.ones((), requires_grad=True)
    assert loss_in({"loss": loss, "other": 1}) is loss
    assert loss_in({"loss": None}) is None


@pytest.mark.parametrize(
    "outputs, message",
    [
        (1.0, r"it returned 1.0 \(float\)"),
        ({"other": 1}, r"it returned a dict with the keys \['other'\]"),
        ({"loss": 1.0}, r"outputs\['loss'\] must be a scalar tensor, not 1.0 \(float\)"),
    ],
)
def test_outputs_without_a_loss(outputs: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        loss_in(outputs)


def test_losses_that_train_nothing() -> None:
    check_loss(torch.ones(1, requires_grad=True))
    with pytest.raises(LossError, match=r"not a tensor of shape \(2,\). Return its mean"):
        check_loss(torch.ones(2, requires_grad=True))
    with pytest.raises(LossError, match="has no graph"):
        check_loss(torch.ones(()))


def test_what_hooks_get_has_no_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert not detach_loss(loss)["loss"].requires_grad
    outputs = {"loss": loss, "other": 1}
    given = detach_loss(outputs)
    assert (given["other"], given["loss"].requires_grad, outputs["loss"] is loss) == (1, False, True)
    assert detach_loss(None) is None
