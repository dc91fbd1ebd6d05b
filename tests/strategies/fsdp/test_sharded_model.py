"""Models that FSDP shards: frozen, tied and tiny parameters, parameters that a step does not use, and steps without a loss."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import PLAN, assert_like_one_process, joined_fsdp
from helpers.fsdp.placements import MESHES, numbered
from helpers.runs.replicas import Net, by_hand, flat, inputs, joined, over_strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainkit import Precision
from trainkit.distributed.parameter_placement import own_range
from trainkit.errors import ModuleError
from trainkit.micro_batch import MicroBatch
from trainkit.strategies.fsdp.sharded_model import Shards

INTEGER = torch.int8 if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else torch.float64  # torch 2.9: float only


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)


class Uneven(Net):
    """Some parameters have fewer rows than there are ranks, one is a scalar, and one belongs to the root."""

    def __init__(self) -> None:
        super().__init__(width=5)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


class Frozen(Net):
    """A frozen layer, and a frozen parameter of int8."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.table = nn.Parameter(torch.arange(12, dtype=INTEGER).reshape(3, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table.sum(0).to(x.dtype) / 20)


class Strided(Net):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight = nn.Parameter(self.first.weight.detach().T.contiguous().T)
        assert not self.first.weight.is_contiguous()


class Tied(Net):
    """The first layer and the last one have the same weight; the layer between them does not."""

    def __init__(self) -> None:
        super().__init__(width=4)
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            for i, parameter in enumerate(self.middle.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (i + 1) / 2)
            self.last.bias.zero_()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Unused(Net):
    """Odd micro-batches use one layer, even ones the other, and none uses the last; the layers have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.odd, self.even, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        for parameter in (*self.odd.parameters(), *self.even.parameters(), *self.never.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def training_step(self, item: Any, batch_idx: int) -> Tensor:
        layer = self.odd if item % 2 else self.even
        return self(layer(inputs(item, torch.float64))).square().mean()


class Zeros(Unused):
    """The same, with gradients that are zeros instead of missing."""

    def training_step(self, item: Any, batch_idx: int) -> Tensor:
        zero = sum((0 * p.sum() for p in self.parameters()), torch.zeros((), dtype=torch.float64))
        return super().training_step(item, batch_idx) + zero


@pytest.mark.world_size(2)
def test_parameters_of_all_kinds() -> None:
    for make in (Uneven, Frozen, Strided):
        for accumulate in ("once", "reshard"):
            assert_like_one_process(make, accumulate=accumulate)
            assert_like_one_process(make, accumulate=accumulate, wrap=False)
    assert assert_like_one_process(Frozen).table.dtype == INTEGER


@pytest.mark.world_size(4)
def test_fewer_rows_than_ranks() -> None:
    plan = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert_like_one_process(Uneven, plan)
    assert_like_one_process(Uneven, plan, replicas=2)


@pytest.mark.world_size(2)
def test_tied_parameters_stay_tied() -> None:
    """A layer that shares a parameter with the rest of the model is no unit: torch would refuse it, and 2.9 trains wrongly."""
    strategy = joined_fsdp()
    model = strategy.prepare_module(Tied().double())
    assert list(next(iter(strategy._sharded)).units) == ["middle"]
    assert model.first.weight is model.last.weight
    assert isinstance(model.first.weight, DTensor)
    strategy.teardown()
    assert model.first.weight is model.last.weight
    trained = assert_like_one_process(Tied)
    assert trained.first.weight is trained.last.weight


@pytest.mark.world_size(2)
def test_sharding_that_fails_half_way_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def shard(unit: nn.Module, **options: Any) -> None:
        if not isinstance(unit, nn.Linear):
            raise RuntimeError("out of memory")
        fully_shard(unit, **options)

    monkeypatch.setattr("trainkit.strategies.fsdp.sharded_model.fully_shard", shard)
    module, strategy = Net().double(), joined_fsdp()
    with pytest.raises(RuntimeError, match="out of memory"):
        strategy.prepare_module(module)
    strategy.broken = True
    strategy.teardown()
    assert isinstance(module.first.weight, DTensor)
    for part in module.modules():
        assert not isinstance(part, FSDPModule)
        assert not {**part._forward_pre_hooks, **part._forward_hooks}


@pytest.mark.world_size(2)
def test_the_dtype_after_a_run() -> None:
    """Master weights are float32 during the run; after it the module is in the dtype of the precision."""
    strategy = joined_fsdp(precision="bf16-true")
    module = strategy.prepare_module(Net())
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    strategy.teardown()
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


@pytest.mark.world_size(2)
def test_ignored_modules_in_16_bits() -> None:
    """They have no master weights: they are not gathered, so they are 16 bits themselves."""
    strategy = joined_fsdp(precision="bf16-true", ignored_modules="last", wrap=False)
    module = over_strategy(strategy, PLAN, Net())  # type: ignore[arg-type]
    assert {p.dtype for p in module.first.parameters()} == {torch.float32}
    assert {p.dtype for p in module.last.parameters()} == {torch.bfloat16}
    strategy.teardown()
    expected = flat(by_hand(PLAN, Net()))
    assert flat(module) == pytest.approx(expected, abs=2e-2)
    assert flat(Net()) != pytest.approx(expected, abs=2e-2)
    both = [torch.zeros(len(expected)) for _ in range(2)]
    torch.distributed.all_gather(both, torch.tensor(flat(module)))
    assert torch.equal(*both)


class Counts(Precision):
    """Counts how often weights change."""

    changes = 0

    def weights_changed(self, module: nn.Module) -> None:
        self.changes += 1


@pytest.mark.world_size(2)
def test_the_precision_is_told_of_changed_weights() -> None:
    """After an optimizer step, a load, and changes of gathered parameters."""
    precision = Counts("64-true")
    strategy = joined_fsdp(precision=precision)
    module = over_strategy(strategy, PLAN, Net().double())  # type: ignore[arg-type]
    assert precision.changes == len(PLAN)
    strategy.load_weights({})
    with strategy.gathered_parameters(module):
        pass
    assert precision.changes == len(PLAN) + 1
    with strategy.gathered_parameters(module, modified=True):
        pass
    assert precision.changes == len(PLAN) + 2
    strategy.teardown()


@pytest.mark.world_size(2)
def test_freezing_between_steps() -> None:
    def freeze(module: nn.Module, window: int) -> None:
        module.first.requires_grad_(window != 1)

    def plain(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    assert_like_one_process(before=freeze, optimizer=plain)
    assert_like_one_process(before=freeze, optimizer=plain, wrap=False)


@pytest.mark.world_size(2)
@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="needs torch 2.13")
def test_ranks_use_different_parameters() -> None:
    """Rank 0 has the odd micro-batches, rank 1 the even ones. A missing gradient counts as zero; weight decay applies."""
    plan = [[1, 2], [3, 4], [5, 6]]
    assert_like_one_process(Unused, plan, adamw, reference=Zeros, wrap=False)
    assert_like_one_process(Unused, [[1, 2, 3, 4], [5, 6, 7, 8]], adamw, reference=Zeros, wrap=False)


@pytest.mark.world_size(2)
def test_a_unit_that_is_not_called() -> None:
    """The error names its parameters, whether the unit is skipped on one rank or on all."""
    for item, other in ((1, 3), (1, 2)):
        strategy = joined_fsdp()
        with pytest.raises(ModuleError, match=r"reduced no gradient for (odd|even)\.weight, (odd|even)\.bias, never\.weight"):
            over_strategy(strategy, [[item, other]], Unused().double())  # type: ignore[arg-type]
        strategy.broken = True
        strategy.teardown()


class Opaque:
    """An object in which torch finds no tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Packing(nn.Linear):
    """A layer that returns such an object."""

    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


class Unpacking(Net):
    """A model with such a layer, whose weight the backward pass needs only if the inputs need gradients."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        former = self.last if last else self.first
        packing = Packing(former.in_features, former.out_features)
        packing.load_state_dict(former.state_dict())
        if last:
            self.last = packing
        else:
            self.first = packing

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out = self.last(getattr(hidden, "value", hidden).tanh())
        return getattr(out, "value", out)


@pytest.mark.world_size(2)
def test_a_unit_that_returns_an_opaque_object() -> None:
    """torch does not gather the unit for its backward: that is an error or does no harm. The gradients are reduced."""
    for accumulate in ("once", "reshard"):
        assert_like_one_process(partial(Unpacking, last=False), accumulate=accumulate)
    with pytest.raises(RuntimeError, match="storage of size 0"):
        over_strategy(joined_fsdp(), [[1, 2]], Unpacking(last=True).double())  # type: ignore[arg-type]


class Skipping(Net):
    """The step of some micro-batches runs the model, and returns no loss."""

    def training_step(self, item: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(item, batch_idx)
        return None if item % 5 == 0 else loss


@pytest.mark.world_size(2)
def test_micro_batches_that_do_not_count() -> None:
    """A micro-batch of weight 0 has a NaN loss, or a step returns no loss: its gradients are zeros, not NaN."""
    ones = [[1, -2], [-3, 4], [5, 6]]
    twos = [[1, -2, 3, 4], [-5, 6, -7, 8], [1, 2, -3, -4], [9, 10, 11, 12]]
    for accumulate in ("once", "reshard"):
        for wrap in ("Linear", False):
            assert_like_one_process(plan=ones, accumulate=accumulate, wrap=wrap)
            assert_like_one_process(plan=twos, accumulate=accumulate, wrap=wrap)
    for wrap in ("Linear", False):
        assert_like_one_process(Skipping, [[1, 5], [10, 2], [3, 4]], wrap=wrap)
        assert_like_one_process(Skipping, [[1, 2, 5, 3], [4, 6, 7, 10], [10, 5, 5, 15]], wrap=wrap)


@pytest.mark.world_size(2)
def test_no_loss_without_a_forward() -> None:
    strategy = joined_fsdp()
    strategy.prepare_module(Net().double())
    with pytest.raises(ModuleError, match="there is no loss, and the model was not called"):
        strategy.skip_backward(None)


@pytest.mark.world_size(2)
def test_a_window_that_was_left() -> None:
    """Gradients of an accumulation window without a last micro-batch do not reach the next one."""
    double, short = {"precision": "64-true"}, {"precision": "bf16-true", "wrap": False}
    for options in (double, {**double, "accumulate": "reshard"}, short):
        strategy = joined_fsdp(**options)
        module = strategy.prepare_module(Net().double())
        step = strategy.step_function(module, module, "training_step")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        found = []
        for left in (False, True):
            places = [(True, False), (True, True)] if left else [(True, True)]
            for first, last in places:
                module.zero_grad()
                strategy.discard_gradients(optimizer)
                micro = MicroBatch(1, 0, first, last, 1.0)
                strategy.begin_micro_batch(micro)
                strategy.backward(step(5 if last else 3, 0), micro)
            found.append([p.grad.full_tensor() for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        strategy.teardown()


@pytest.mark.world_size(2)
def test_no_stale_parameters_after_an_evaluation() -> None:
    """torch keeps the root whole after a forward without gradients: the next one would not see what was written since."""
    for wrap in ("Linear", False):
        plain, strategy = Net().double(), joined_fsdp(wrap=wrap)
        module = strategy.prepare_module(copy.deepcopy(plain))
        step, model = strategy.step_function(module, module, "training_step"), strategy.wrap(module)
        for evaluate in (lambda step=step: step(1, 0), lambda model=model: model(inputs(1, torch.float64))):
            with torch.no_grad():
                evaluate()
                assert all(isinstance(p, DTensor) for p in module.parameters())
                for parameter in (*module.parameters(), *plain.parameters()):
                    parameter.mul_(1.5)
                assert torch.allclose(step(1, 0), plain.training_step(1, 0), rtol=1e-12)
                assert torch.allclose(model(inputs(1, torch.float64)), plain(inputs(1, torch.float64)), rtol=1e-12)
        strategy.teardown()


@pytest.mark.world_size(2)
def test_values_of_rank_0() -> None:
    strategy = joined_fsdp()
    rank = strategy.rank
    module = Net(seed=1 + rank).double()
    module.forwards += 7 * (1 - rank)
    strategy.prepare_module(module)
    assert module.forwards == 7
    strategy.teardown()
    assert flat(module) == flat(Net(seed=1).double())


@pytest.mark.world_size(2)
def test_hooks_on_parameters() -> None:
    """`register_post_accumulate_grad_hook` gets the parameter with its reduced gradient."""
    strategy = joined_fsdp()
    module = strategy.prepare_module(Net().double())
    seen: list[Any] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), p.grad.full_tensor())))
    strategy.backward(strategy.step_function(module, module, "training_step")(1, 0))
    expected = {id(p): p.grad.full_tensor() for p in module.parameters()}
    assert len(seen) == len(expected) == 4
    assert all(torch.equal(gradient, expected[key]) for key, gradient in seen)


@pytest.mark.world_size(2)
def test_gathered_parameters() -> None:
    strategy = joined_fsdp()
    plain = Net().double()
    module = strategy.prepare_module(copy.deepcopy(plain))
    rank, x = strategy.rank, inputs(3, torch.float64)
    with strategy.gathered_parameters(module):
        assert flat(module) == flat(plain)
        if rank == 0:  # no other rank takes part
            assert torch.equal(module(x), plain(x))
        module.first.weight.data.zero_()
    with strategy.gathered_parameters(module.first, modified=True):
        assert flat(module.first) == flat(plain.first)  # the change is lost
        assert isinstance(module.last.weight, DTensor)
        module.first.weight.data.fill_(1.0 + rank)
    with strategy.gathered_parameters(module):
        assert module.first.weight.unique().tolist() == [1.0]
    plain.first.weight.data.fill_(1.0)
    with torch.no_grad():
        assert torch.allclose(strategy.wrap(module)(x), plain(x))


@pytest.mark.world_size(2)
def test_the_module_afterwards() -> None:
    """It is whole and of its own class, can be copied and pickled, and be trained again under any strategy."""
    module = Net().double()
    optional = {name: dict(vars(part)) for name, part in module.named_modules()}
    for strategy in (joined_fsdp(), joined_fsdp(wrap=False, replicas=2), joined(precision="64-true")):
        over_strategy(strategy, [[1, 2, 3, 4]], module)  # type: ignore[arg-type]
        strategy.teardown()
        assert [type(part) for part in module.modules()] == [Net, nn.Linear, nn.Linear]
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        assert {name: vars(part).keys() for name, part in module.named_modules()} == {k: v.keys() for k, v in optional.items()}
        x = inputs(2, torch.float64)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert flat(other) == flat(module)
            assert torch.equal(other(x), module(x))
    again = by_hand([[1, 2, 3, 4]] * 3, Net().double(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert flat(module) == pytest.approx(flat(again), rel=1e-10)


class Failing(Net):
    """Its step fails while the root is whole."""

    def training_step(self, item: Any, batch_idx: int) -> Tensor:
        self(inputs(1, torch.float64))
        raise KeyError("of the user")


@pytest.mark.world_size(2)
def test_a_failed_step() -> None:
    strategy = joined_fsdp()
    module = Failing().double()
    with pytest.raises(KeyError, match="of the user"):
        over_strategy(strategy, PLAN, module)  # type: ignore[arg-type]
    strategy.broken = True  # as the Trainer sets it
    strategy.teardown()
    assert [type(part) for part in module.modules()] == [Failing, nn.Linear, nn.Linear]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


# --------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.world_size(4)
def test_round_trips() -> None:
    """Load a whole tensor and gather it, on each mesh; also state of another dtype than the parameter's."""
    world = joined_fsdp().world
    for sizes in MESHES:
        if math.prod(sizes) > world.size:
            continue
        mesh = init_device_mesh("cpu", sizes)
        cases = [(numbered(shape), placements) for placements in MESHES[sizes] for shape in ((7, 3), (3, 5), (8, 4))]
        zeros = [distribute_tensor(torch.zeros_like(whole), mesh, places, src_data_rank=None) for whole, places in cases]
        shards = Shards(zeros, world)
        for (whole, _), parameter in zip(cases, zeros, strict=True):
            assert parameter in shards
            assert whole not in shards
            state = torch.empty_like(parameter, dtype=torch.float32)
            for tensor in (parameter, state):
                shards.load(tensor, parameter, whole)
                assert torch.equal(tensor.full_tensor(), whole.to(tensor.dtype))
                assert torch.equal(shards.whole(tensor, parameter), whole.to(tensor.dtype))
                stored = shards.make_sharded_tensor(tensor, parameter)
                assert (stored.shape, stored.dtype, stored.is_meta) == (whole.shape, tensor.dtype, True)
                for owner in (None, *range(4)):
                    found = stored.collect(owner)
                    if owner in (None, world.rank):
                        assert found is not None
                        assert torch.equal(found, whole.to(tensor.dtype))
                    else:
                        assert found is None


@pytest.mark.world_size(4)
def test_tensor_parallel_and_sharded_over_the_same_dimension() -> None:
    """`fully_shard` cuts the rows that a tensor-parallel rank has: the ranks are not in the order of the rows."""
    world = joined_fsdp().world
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module, whole = nn.Module(), numbered((7, 3))
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["data"])
    parameter: Any = module.weight
    assert own_range(parameter) == (((0, 2), (4, 6), (2, 4), (6, 7))[world.rank], (0, 3))
    shards = Shards([parameter], world)
    assert torch.equal(shards.whole(parameter, parameter), whole)
    shards.load(parameter, parameter, -whole)
    assert torch.equal(shards.whole(parameter, parameter), -whole)
