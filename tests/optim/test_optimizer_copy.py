"""Copies of an optimizer: placeholders without memory, and the size of the state that a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit.optim.optimizer_copy import StoredOptimizer, bare_copy, count_slots, placeholder_parameter, state_bytes
from trainkit.optim.parameter_names import parameter_names
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


SHAPES = [(6, 10), (9,), (), (4, 3, 2), (15, 15)]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in SHAPES]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_what_a_step_leaves(name: str, dtype: torch.dtype) -> None:
    real, empty = parameters(dtype), parameters(dtype, "meta")
    optimizer, planned = OPTIMIZERS[name](real), OPTIMIZERS[name](empty)
    for parameter in real:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = state_bytes(planned)
    left = [sum(v.nbytes for v in optimizer.state[p].values() if isinstance(v, Tensor)) for p in real]
    assert [found[id(p)] for p in empty] == left
    assert not any(p.grad is not None for p in empty)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_state_of_torchao(name: str) -> None:
    """Small parameters, and those that blocks do not fill, have state that is not quantized."""
    make = getattr(pytest.importorskip("torchao.optim"), name)
    shapes = [(7,), (64, 64), (64, 65), (160, 256), (3, 4099)]

    def made(device: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
        return parameters, make(parameters)

    real, optimizer = made("cpu")
    for parameter in real:
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        optimizer.step()
    left = [sum(map(stored_bytes, optimizer.state[p].values())) for p in real]
    empty, planned = made("meta")
    found = state_bytes(planned)
    assert [found[id(p)] for p in empty] == left
    assert left[3] < 160 * 256 * 3


def stored_bytes(value: Tensor) -> int:
    inner = {"codes", "scale", "qmap"} & vars(value).keys()
    return sum(getattr(value, part).nbytes for part in inner) if inner else value.nbytes


def test_groups_have_their_own_options() -> None:
    first, second = parameters()[:2]
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.9}], 0.1)
    assert state_bytes(optimizer) == {id(first): 0, id(second): 36}
    assert count_slots(optimizer) == 1


@pytest.mark.parametrize("name, slots", [("sgd", 0), ("momentum", 1), ("adamw", 2), ("amsgrad", 3), ("adagrad", 1)])
def test_count_slots(name: str, slots: int) -> None:
    assert count_slots(OPTIMIZERS[name](parameters(device="meta"))) == slots
    with torch.device("meta"):
        assert count_slots(OPTIMIZERS[name](parameters())) == slots


def test_count_slots_of_an_optimizer_that_steps_matrices_only() -> None:
    assert count_slots(torch.optim.Muon([torch.nn.Parameter(torch.ones(3, 4))])) == 1


def test_the_optimizer_is_not_changed() -> None:
    real = parameters()
    optimizer = OPTIMIZERS["adamw"](real)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    state_bytes(optimizer)
    assert not calls
    assert not optimizer.state
    assert bare_copy(optimizer).param_groups is optimizer.param_groups
    assert all(torch.equal(p, torch.ones_like(p)) for p in real)
