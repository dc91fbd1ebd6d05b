"""Placeholders for sharded parameters: they need no memory, and state is loaded for them without a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainkit.optim.parameter_names import parameter_names
from trainkit.optim.stored_optimizer import StoredOptimizer, placeholder_parameter
from trainkit.state.optimizer import capture_optimizer, plan_optimizer


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3)], ids=str)
def test_a_placeholder_has_the_memory_of_one_element(shape: tuple[int, ...]) -> None:
    made = placeholder_parameter(torch.Size(shape), torch.bfloat16)
    assert (made.shape, made.dtype, made.requires_grad) == (shape, torch.bfloat16, False)
    assert made.untyped_storage().nbytes() == 2


def test_loaded_state_is_not_copied() -> None:
    """The state of a checkpoint may be a mapped file that is larger than the memory."""
    layer = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    stored = StoredOptimizer(optimizer, {id(p): placeholder_parameter(p.shape, p.dtype) for p in layer.parameters()})
    saved = capture_optimizer(optimizer, 0, parameter_names([layer]))
    dtypes = dict.fromkeys(("weight", "bias"), torch.float32)
    names = stored.names(parameter_names([layer]))
    plan_optimizer(stored.optimizer, 0, names, saved.tensors, saved.described, dtypes, "it", keep=True)()
    for name, parameter in layer.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            assert stored.state(parameter)[slot].data_ptr() == saved.tensors[f"0/{name}/{slot}"].data_ptr()
