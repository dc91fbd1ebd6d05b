"""`Accelerator(activation_checkpointing=)`: the same steps with recomputed activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit import Accelerator, FullyShardedDataParallelPlugin, set_seed
from trainkit.errors import ConfigurationError, UnsupportedArgumentError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(4, 4), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled() or torch.compiler.is_compiling()
        return x + self.dropout(self.inner(x)).tanh()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def loop(choice: Any, model: nn.Sequential, **arguments: Any) -> Accelerator:
    set_seed(1)
    accelerator = Accelerator(cpu=True, activation_checkpointing=choice, gradient_accumulation_steps=2, **arguments)
    prepared, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(4):
        torch.manual_seed(step)
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.randn(8, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator


@pytest.mark.parametrize("choice", [True, "selective", {"every": 2}])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_parameters_are_equal(choice: Any, precision: str) -> None:
    plain, model = make(), make()
    loop(None, plain, mixed_precision=precision)
    accelerator = loop(choice, model, mixed_precision=precision)
    assert [plain[0].calls, model[0].calls, model[1].calls] == [4, 8, 4 if choice == {"every": 2} else 8]
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert "forward" in vars(model[0])
    accelerator.free_memory()
    assert all("forward" not in vars(part) for part in model)


def test_a_model_that_is_only_evaluated_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    Accelerator(cpu=True, activation_checkpointing=True).prepare_model(model, evaluation_mode=True)
    assert "forward" not in vars(model)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigurationError, match="activation_checkpointing=3: expected True"):
        Accelerator(cpu=True, activation_checkpointing=3)
    with pytest.raises(ConfigurationError, match="Linear has no repeated blocks"):
        Accelerator(cpu=True, activation_checkpointing=True).prepare(nn.Linear(2, 2))
    with pytest.raises(UnsupportedArgumentError, match="backend 'eager'"):
        Accelerator(cpu=True, activation_checkpointing=True, dynamo_backend="eager")
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    with pytest.raises(UnsupportedArgumentError, match="backend 'eager'"):
        Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend="eager")


# torch's tracer reads .grad of the input of a block
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_that_prepare_compiles() -> None:
    """Checkpointing comes first, so that the compiler knows what it may recompute."""
    try:
        plain, model = make(), make()
        loop(None, plain)
        loop(True, model, dynamo_backend="aot_eager")
    finally:
        torch.compiler.reset()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert list(model.state_dict()) == list(plain.state_dict())
