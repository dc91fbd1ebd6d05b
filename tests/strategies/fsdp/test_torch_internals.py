"""What `FSDPStrategy` does inside of torch's modules: allocating, removing `fully_shard`, and dropping gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainkit.launch.joining import single_process_group
from trainkit.strategies.fsdp.sharded_model import (
    allocate,
    drop_gradients,
    has_no_values,
    remove_fully_shard,
    without_forward_hooks,
)

CPU = torch.device("cpu")
# dtype → whether `has_no_values` can tell
DTYPES = {torch.float32: True, torch.bfloat16: True, torch.float8_e4m3fn: True, torch.int64: True, torch.int8: True}
DTYPES |= {torch.uint8: False, torch.bool: False, torch.complex64: False}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    with single_process_group("gloo"):
        yield init_device_mesh("cpu", (1,))


class Net(nn.Module):
    """Two layers with the same weight, one without, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"buffer{number}", torch.ones(3).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()))


def units(net: Net, mesh: DeviceMesh, **options: Any) -> list[nn.Module]:
    """Shard a layer and the rest of the model; returns what `fully_shard` was called with."""
    fully_shard(net.middle, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return [net.middle, net]


def test_allocate(mesh: DeviceMesh) -> None:
    """Only tensors on the meta device get memory. They are recognized as without values, and ties stay."""
    with torch.device("meta"):
        net = Net()
    net.middle = nn.Linear(4, 4)  # has values
    net.buffer0 = torch.full((3,), 5.0)
    kept = [net.buffer0, net.middle.weight.detach().clone()]
    units(net, mesh)
    named = ["first.weight", "first.bias", "last.bias", *(f"buffer{number}" for number in range(1, len(DTYPES)))]
    assert allocate(net, CPU) == named
    assert allocate(net, CPU) == []
    assert not any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    assert net.last.weight is net.first.weight
    assert net.buffer0 is kept[0]
    assert torch.equal(net.middle.weight.full_tensor(), kept[1])
    for parameter in (net.first.weight, net.first.bias, net.last.bias):
        assert isinstance(parameter, DTensor)
        assert has_no_values(parameter)
    assert not has_no_values(net.middle.weight)
    assert not has_no_values(net.buffer0)
    for number, can_tell in enumerate(DTYPES.values()):
        assert has_no_values(getattr(net, f"buffer{number}")) is (can_tell and number > 0)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.detach().copy_(torch.ones_like(tensor))
        assert not has_no_values(tensor)


def test_names_are_those_of_the_module() -> None:
    """The module is inside of another one, as its `module`."""
    root = nn.Module()
    with torch.device("meta"):
        root.module = nn.Linear(2, 2)
    assert allocate(root, CPU) == ["weight", "bias"]


@pytest.mark.world_size(2)
def test_a_rank_without_values_cannot_tell() -> None:
    torch.distributed.init_process_group("gloo")
    with torch.device("meta"):
        layer = nn.Linear(3, 1)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    allocate(layer, CPU)
    assert has_no_values(layer.weight) is (torch.distributed.get_rank() == 0)


def attributes(net: nn.Module) -> dict[str, Any]:
    """Of each module its class, its attributes' names and its hooks."""
    tables = [name for name in vars(net) if "hook" in name]
    return {
        name: (type(part), list(vars(part)), {table: dict(vars(part)[table] or {}) for table in tables})
        for name, part in net.named_modules()
    }


def test_remove_fully_shard(mesh: DeviceMesh) -> None:
    """Classes, hooks and attributes are as before, also the user's hooks; the module can be copied and sharded again."""
    net, calls = Net(), []
    for part in (net, net.middle):
        part.register_forward_hook(lambda part, args, outputs: calls.append("after"))
        part.register_forward_pre_hook(lambda part, args: calls.append("before"))
    before, x = attributes(net), torch.ones(2, 4)
    expected = net(x)
    for _ in range(2):
        sharded = units(net, mesh)
        assert all(isinstance(unit, FSDPModule) for unit in sharded)
        assert attributes(net) != before
        assert torch.equal(net(x), expected)
        net.state_dict()
        for unit in sharded:
            unit.reshard()  # type: ignore[operator]
        remove_fully_shard(sharded)
        assert attributes(net) == before
        whole = {id(p): nn.Parameter(p.full_tensor()) for p in net.parameters()}  # type: ignore[attr-defined]
        for part in net.modules():
            for name, parameter in part._parameters.items():
                part._parameters[name] = whole[id(parameter)]
        assert net.last.weight is net.first.weight
        calls.clear()
        assert torch.equal(copy.deepcopy(net)(x), expected)
        assert torch.equal(net(x), expected)
        assert calls == ["before", "before", "after", "after"] * 2
    assert isinstance(net.state_dict()["first.weight"], Tensor)


def test_drop_gradients(mesh: DeviceMesh) -> None:
    """Gradients that torch keeps in another dtype than that of the parameters, until they are reduced."""
    net, x = Net(), torch.ones(2, 4)
    sharded = units(net, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def gradients(*kept: bool) -> list[Tensor]:
        """After a backward pass for each argument but the last one: drop its gradients?"""
        for drops in kept:
            net.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
            net(x).sum().backward()
            if drops:
                drop_gradients(sharded)
        net.set_requires_gradient_sync(True)  # type: ignore[attr-defined]
        net(x).sum().backward()
        found = [p.grad.full_tensor() for p in net.parameters()]  # type: ignore[union-attr]
        net.zero_grad()
        return found

    alone, dropped, twice = gradients(), gradients(True), gradients(False)
    assert all(torch.equal(a, b) for a, b in zip(alone, dropped, strict=True))
    assert all(torch.allclose(2 * a, b, rtol=1e-2) for a, b in zip(alone, twice, strict=True))
    assert any(a.abs().sum() > 0 for a in alone)


def test_without_forward_hooks(mesh: DeviceMesh) -> None:
    """Inside, a forward gathers nothing and the user's hooks run. Afterwards torch's hooks are where they were."""
    net, calls = Net(), []
    net.middle.register_forward_pre_hook(lambda part, args: calls.append("early"))
    sharded = units(net, mesh)
    net.middle.register_forward_pre_hook(lambda part, args: calls.append("late"))
    gone = net.middle.register_forward_pre_hook(lambda part, args: calls.append("gone"))

    def order() -> list[list[int]]:
        return [list(table) for unit in sharded for table in (unit._forward_pre_hooks, unit._forward_hooks)]

    before = order()
    with without_forward_hooks(sharded):
        net.middle(DTensor.from_local(torch.ones(2, 4), mesh))
        assert all(isinstance(p, DTensor) for p in net.middle.parameters())
        assert calls == ["early", "late", "gone"]
    assert order() == before
    with without_forward_hooks(sharded):
        gone.remove()
        net.middle.register_forward_pre_hook(lambda part, args: calls.append("new"))
    calls.clear()
    net(torch.ones(2, 4))
    assert calls == ["early", "late", "new"]
