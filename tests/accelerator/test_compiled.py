"""`Accelerator(dynamo_backend=, dynamo_plugin=)` compiles in place, and `free_memory` undoes it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.blocks import BlockModule, Counting, block_loader
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit import Accelerator
from trainkit.accelerator.prepared_models import CompiledModules
from trainkit.config.compiling import Compilation
from trainkit.errors import ConfigurationError
from trainkit.utils import TorchDynamoPlugin, is_compiled_module


@pytest.fixture(autouse=True)
def _no_graphs_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def counting() -> Counting:
    return Counting(autograd=True)


def trained(accelerator: Accelerator) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """The module, what `prepare` returned for it, and the losses of two epochs."""
    module = BlockModule()
    model, optimizer, loader = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01), block_loader())
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    return module, model, losses


@pytest.mark.parametrize("use_regional_compilation", [True, False, None])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_own_loop(counting: Counting, use_regional_compilation: bool | None, precision: str) -> None:
    torch.manual_seed(3)
    expected = trained(Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2))[2]
    plugin = TorchDynamoPlugin(counting, use_regional_compilation=use_regional_compilation)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin)
    torch.manual_seed(3)
    module, model, losses = trained(accelerator)
    assert counting.graphs == 2  # whole batches and the short one
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert list(model.state_dict()) == list(module.state_dict()) == list(BlockModule().state_dict())
    assert accelerator.unwrap_model(model) is module
    assert not is_compiled_module(model)
    accelerator.free_memory()
    module(torch.ones(7, 4))
    assert counting.graphs == 2


def test_a_model_that_the_user_has_compiled(counting: Counting) -> None:
    """It is not compiled a second time."""
    own = Counting()
    accelerator = Accelerator(cpu=True, dynamo_backend=counting)
    model = accelerator.prepare(torch.compile(BlockModule(), backend=own))
    model(torch.ones(7, 4))
    assert (counting.graphs, own.graphs) == (0, 1)


def test_a_model_without_blocks(counting: Counting) -> None:
    model = Accelerator(cpu=True, dynamo_backend=counting).prepare(nn.Linear(4, 1))
    model(torch.ones(7, 4))
    assert counting.graphs == 1
    plugin = TorchDynamoPlugin(counting, use_regional_compilation=True)
    with pytest.raises(ConfigurationError, match=r"Linear has no repeated blocks"):
        Accelerator(cpu=True, dynamo_plugin=plugin).prepare(nn.Linear(4, 1))


# ------------------------------------------------------------------------------------------------------ CompiledModules


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        lambda: nn.Linear(8, 8),
    ],
)
def test_torchs_own_layers_are_compiled(make: Any) -> None:
    """`nn.Module.compile` compiles nothing of them, without an error: this is why `CompiledModules` does not use it."""
    blocks, by_torch, by_trainkit = [make() for _ in range(3)], Counting(), Counting()
    inputs = torch.randn(2, 5, 8, requires_grad=True)
    for block in blocks:
        block.compile(backend=by_torch)
        block(inputs)
        block._compiled_call_impl = None
    assert by_torch.graphs == 0, "torch compiles its own layers now: use nn.Module.compile"
    CompiledModules().compile(dict(enumerate(blocks)), Compilation({"backend": by_trainkit}))  # type: ignore[arg-type]
    for block in blocks:
        block(inputs)
    assert by_trainkit.graphs in (1, 3), "one graph for all blocks; torch 2.9 makes one for each of its own layers"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_runs_its_own_forward(copied: Any) -> None:
    module, backend, compiled = BlockModule(), Counting(), CompiledModules()
    compiled.compile({"": module, **dict(module.blocks.named_children())}, Compilation({"backend": backend}))
    other = copied(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert torch.equal(other.eval()(torch.ones(2, 4)), torch.zeros(2, 1))
    assert backend.graphs == 0


def test_a_forward_that_the_user_has_assigned() -> None:
    module, compiled = nn.Linear(4, 4), CompiledModules()
    module.forward = mine = lambda inputs: inputs + 1  # type: ignore[method-assign]
    backend = Counting()
    compiled.compile({"": module}, Compilation({"backend": backend}))
    assert torch.equal(module(torch.zeros(3)), torch.ones(3))
    assert backend.graphs == 1
    compiled.undo()
    assert module.forward is mine


def test_a_forward_that_the_user_assigns_while_it_is_compiled_stays() -> None:
    first, second, compiled = nn.Linear(4, 4), nn.Linear(4, 4), CompiledModules()
    compiled.compile({"first": first, "second": second}, Compilation({"backend": "eager"}))
    second.forward = mine = lambda inputs: inputs + 1  # type: ignore[method-assign]
    compiled.undo()
    assert second.forward is mine
    assert "forward" not in vars(first)


def test_a_block_of_two_models_is_compiled_once() -> None:
    block, backend, compiled = nn.Linear(4, 4), Counting(), CompiledModules()
    for name in ("one", "other"):
        compiled.compile({name: block}, Compilation({"backend": backend}))
    block(torch.ones(4))
    assert backend.graphs == 1
    compiled.undo()
    assert "forward" not in vars(block)


def test_hooks_run_outside() -> None:
    """Also one that `torch.compile` could not trace."""
    module, seen, compiled = BlockModule(), [], CompiledModules()
    module.blocks[0].register_forward_hook(lambda *given: seen.append(torch.compiler.is_compiling()))
    compiled.compile(dict(module.blocks.named_children()), Compilation({"backend": "eager", "fullgraph": True}))
    module(torch.ones(2, 4))
    assert seen == [False]
    compiled.undo()
    assert "forward" not in vars(module.blocks[0])
