"""Recomputed activations give the same gradients and names, and the modules are as before when they are restored."""

from __future__ import annotations

import copy
import inspect
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError
from trainkit.module import activation_checkpointing
from trainkit.module.activation_checkpointing import (
    CheckpointedModules,
    checkpoint_activations,
    checkpointing_choice,
    refuse_eager_backend,
)


class Block(nn.Module):
    """Draws from torch's, numpy's and Python's generators; counts the calls of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        x = x * (scale + random.random() + float(np.random.rand()))  # kept for the gradient of `inner`
        return x + self.dropout(self.outer(F.gelu(self.dropout(self.inner(x)))))


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def on(model: nn.Module, value: Any = True) -> CheckpointedModules:
    chosen = checkpointing_choice(value)
    assert chosen is not None
    return checkpoint_activations(model, chosen)


def seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of a seeded step of two micro-batches, and numbers that are drawn after it."""
    model.zero_grad()
    seeded()
    batches = torch.randn(2, 5, 6)
    for batch in batches:
        model(batch).square().mean().backward()
    drawn = torch.tensor([torch.rand(()), np.random.rand(), random.random()])
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [drawn]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def _no_graphs_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "value, chosen",
    [
        (True, [0, 1, 2, 3]),
        ("selective", [0, 1, 2, 3]),
        (Block, [0, 1, 2, 3]),
        ("Block", [0, 1, 2, 3]),
        (["layers.1", "layers.3"], [1, 3]),
        (lambda name, module: name.endswith("2"), [2]),
        ({"every": 2}, [0, 2]),
        ({"modules": Block, "policy": "selective", "every": 3}, [0, 3]),
    ],
)
def test_gradients_and_random_numbers_are_equal_and_only_the_chosen_blocks_run_twice(value: Any, chosen: list[int]) -> None:
    model = make()
    expected = gradients(model)
    for layer in model.layers:
        layer.calls = 0
    result = on(model, value)
    assert list(result.classes) == [f"layers.{index}" for index in chosen]
    assert same(gradients(model), expected)
    assert [layer.calls for layer in model.layers] == [4 if index in chosen else 2 for index in range(4)]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


def test_selective_keeps_products_and_recomputes_the_rest() -> None:
    counts = {}
    for value in (False, True, "selective"):
        model = make()
        if value:
            on(model, value)
        loss = model(torch.randn(5, 6)).sum()
        with Counting() as counting:
            loss.backward()
        counts[value] = counting.counts["aten::addmm"], counting.counts["aten::gelu"]
    assert counts == {False: (0, 0), True: (8, 4), "selective": (0, 4)}


def test_attention_with_dropout_is_not_kept() -> None:
    """A kept operation does not advance the generator in the recomputation, so later dropout would differ without an error."""
    policy, aten = activation_checkpointing._keep_expensive, torch.ops.aten
    query = torch.zeros(1, 1, 2, 4)
    for operation, before in (
        (aten._scaled_dot_product_flash_attention.default, ()),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, ()),
        (aten._scaled_dot_product_efficient_attention.default, (None, False)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, False)),
    ):
        args = query, query, query, *before
        assert policy(None, operation, *args) == CheckpointPolicy.MUST_SAVE
        assert policy(None, operation, *args, 0.0) == CheckpointPolicy.MUST_SAVE
        assert policy(None, operation, *args, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
        assert policy(None, operation, *args, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    random_ones = [op for op in activation_checkpointing._EXPENSIVE if torch.Tag.nondeterministic_seeded in op.tags]
    assert all(any(argument.name == "dropout_p" for argument in op._schema.arguments) for op in random_ones)


@pytest.mark.parametrize("value", [True, "selective"])
def test_without_gradients_the_block_is_called_as_it_is(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    on(model, value)
    monkeypatch.setattr(activation_checkpointing, "checkpoint", None)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            model(torch.randn(5, 6))
    assert [layer.calls for layer in model.layers] == [2, 2, 2, 2]


def test_torch_sees_the_devices_of_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the generators of the devices that it finds in its arguments, and not in keywords."""
    seen: list[Any] = []
    monkeypatch.setattr(activation_checkpointing, "checkpoint", lambda run, *args, **options: seen.extend(tree_leaves(args)))
    model, x = make(), torch.randn(5, 6)
    on(model)
    model.layers[0](x=x)
    assert any(one is x for one in seen)


def test_what_users_see_of_a_module_stays() -> None:
    model = make()
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    modules, signature = [type(module) for module in model.modules()], inspect.signature(model.layers[0].forward)
    result = on(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == modules
    assert inspect.signature(model.layers[0].forward) == signature
    assert str(result) == "4 Block (layers.0, layers.1, ..., layers.3)"
    result.restore()
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: cloudpickle.loads(cloudpickle.dumps(model))])
@pytest.mark.parametrize("value", [True, "selective"])
def test_a_copy_computes_with_its_own_parameters(value: Any, copied: Any) -> None:
    model = make()
    on(model, value)
    expected = gradients(model)
    other = copied(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert same(gradients(other), expected)


def test_a_forward_that_another_library_has_replaced_comes_back() -> None:
    model = make()
    replaced = model.layers[0].forward = lambda x, scale: 2 * x
    expected = gradients(model)
    result = on(model)
    assert same(gradients(model), expected)
    result.restore()
    assert model.layers[0].forward is replaced


def test_two_forwards_before_a_backward_and_a_graph_that_is_kept() -> None:
    results = []
    for value in (None, True):
        model = make()
        if value:
            on(model)
        seeded()
        first, second = model(torch.ones(5, 6)).sum(), model(torch.zeros(5, 6)).sum()
        first.backward(retain_graph=True)
        (first + second).backward()
        results.append([p.grad for p in model.parameters()])
    assert same(*results)


class Normalized(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).tanh()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("value", [True, "selective"])
def test_batchnorm_counts_each_batch_once(value: Any, momentum: float | None) -> None:
    """Statistics that are updated twice would change evaluations, without an error."""
    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Normalized(momentum) for _ in range(3)))
        if recomputed:
            on(model, value)
        results.append(gradients(model) + gradients(model) + list(model.buffers()))
        assert {block.norm.momentum for block in model} == {momentum}
    assert same(*results)
    assert int(results[1][-1]) == 4


def test_blocks_without_trained_parameters() -> None:
    model = make()
    model.layers[:2].requires_grad_(False)
    expected = gradients(model)
    on(model)
    assert same(gradients(model), expected)


@pytest.mark.parametrize("value", [True, "selective"])
@pytest.mark.usefixtures("_no_graphs_left")
# torch's tracer reads .grad of the input of a block
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_block(value: Any) -> None:
    """Checkpointing first, then compiling: one graph without a break, and the gradients of the eager block."""

    class Traced(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return x + self.dropout(self.outer(F.gelu(self.dropout(self.inner(x))))) * scale

    model = make()
    model.layers = nn.ModuleList(Traced() for _ in range(2))
    expected = gradients(model)
    on(model, value)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.allclose, gradients(model), expected))


@pytest.mark.parametrize(
    "value, error, said",
    [
        (1, ConfigurationError, "expected True, 'selective', a class"),
        ("", ConfigurationError, "expected True"),
        ([], ConfigurationError, "expected True"),
        ({"module": Block}, UnknownNameError, "has no key 'module'; known: modules, policy, every. Did you mean 'modules'"),
        ({"policy": "some"}, ConfigurationError, "must be one of 'full', 'selective'"),
        ({"every": 0}, ConfigurationError, r"activation_checkpointing\['every'\] must be an integer ≥ 1"),
        ("Blok", UnknownNameError, "Did you mean 'Block'"),
        (nn.ModuleList, ConfigurationError, "layers is a ModuleList, which has no forward.*Choose"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(value: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        on(make(), value)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ConfigurationError, match=r"Linear has no repeated blocks.*activation_checkpointing=Block"):
        on(nn.Linear(2, 2))


def test_off() -> None:
    assert checkpointing_choice(None) is checkpointing_choice(False) is None


def test_a_backend_that_does_not_keep_the_generator_is_refused() -> None:
    refuse_eager_backend(None, "eager")
    refuse_eager_backend(True, "aot_eager")
    with pytest.raises(UnsupportedArgumentError, match="backend 'eager'.*gradients would be wrong"):
        refuse_eager_backend(True, "eager")
