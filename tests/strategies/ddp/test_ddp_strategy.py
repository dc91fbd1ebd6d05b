"""`DDPStrategy`: its arguments, and that several processes train exactly like a loop by hand on one process."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.runs.replicas import Net, NoLoss, Plan, by_hand, flat, inputs, joined, over_strategy, own_loop, together
from torch import Tensor, nn

from trainkit import Precision, strategies
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, ModuleError, UnknownNameError
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch
from trainkit.strategies import DDPStrategy
from trainkit.strategies.ddp.ddp_strategy import SyncedBatchNorms

EXACT = 1e-11

# Accumulation windows of 2 × 2 and 3 × 2 micro-batches on two and three processes; some without a loss, some short.
PLANS: dict[int, Plan] = {
    2: [[1, 2, 3, 4], [5, NoLoss, 6, 7], [8, 9, 10, NoLoss], [NoLoss] * 4, [11, 12, 13, 14], [15, 16, 17], [18]],
    3: [
        [1, 2, 3, 4, 5, 6],
        [7, NoLoss, 8, NoLoss, 9, NoLoss],
        [NoLoss] * 6,
        [10, 11, 12, 13, 14, 15],
        [16, 17, 18, 19],
        [20, 21],
        [22, 23, 24],
        [NoLoss],
    ],
}
EVEN: Plan = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10], [11, 12, 13, 14], [15, 16, 17], [18], [19, 20, 21, 22]]
OWN: Plan = [[1, 2, 3, 4], [5, -6, 7, 8], [9, 10, 11, -12], [13, 14, 15], [16]]
COMMON: Plan = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
WITHOUT_WEIGHT: Plan = [[1, 2, 3, -4], [5, -6, NoLoss, NoLoss], [-1, -2, -3, -4], [7, 8, -9, 10], [11, -12]]


def double(**options: Any) -> Net:
    return Net(**options).double()


def same(one: list[float], other: list[float], tolerance: float = EXACT) -> None:
    scale = max(map(abs, other))
    assert all(math.isfinite(value) for value in one)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= tolerance * scale


def all_alike(results: list[list[float]]) -> list[float]:
    """The parameters of one process, which must be bit-identical to those of the other processes."""
    assert all(result == results[0] for result in results)
    return results[0]


# As in the Trainer


def train(plan: Plan, options: dict[str, Any]) -> list[float]:
    strategy = joined(**options)
    module = over_strategy(strategy, plan, double(seed=1 + strategy.rank))
    strategy.teardown()
    return flat(module)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


@cache
def trained(size: int) -> dict[str, list[list[float]]]:
    """The results of all variants, computed on the processes of one world."""
    jobs: dict[str, Any] = {name: (train, PLANS[size], options) for name, options in VARIANTS.items()}
    if size == 2:
        jobs |= {f"static {name}": (train, EVEN, {"static_graph": True, **VARIANTS[name]}) for name in ("plain", "unused")}
        jobs |= {f"weightless {name}": (train, WITHOUT_WEIGHT, VARIANTS[name]) for name in ("plain", "unused")}
        jobs |= {f"own {name}": (train_by_myself, OWN, options) for name, options in VARIANTS.items()}
        jobs |= {f"own held {kind}": (train_by_myself, EVEN[:2], {"static_graph": kind}, True) for kind in (False, True)}
    jobs |= {"trainer's": (train, COMMON, {}), "own": (train_by_myself, COMMON, {})}
    return together(size, jobs)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_is_the_mean_over_the_global_batch(name: str, size: int) -> None:
    same(all_alike(trained(size)[name]), flat(by_hand(PLANS[size], double())))


def test_the_comparison_can_fail() -> None:
    changed = [*PLANS[2][:-1], [19]]
    with pytest.raises(AssertionError):
        same(flat(by_hand(changed, double())), flat(by_hand(PLANS[2], double())))


@pytest.mark.parametrize("name", ["plain", "unused"])
def test_a_static_graph_with_accumulation(name: str) -> None:
    same(all_alike(trained(2)[f"static {name}"]), flat(by_hand(EVEN, double())))


@pytest.mark.parametrize("name", ["plain", "unused"])
def test_micro_batches_with_weight_0(name: str) -> None:
    """Their losses are NaN. In the second accumulation window, one process has a loss with weight 0, the other has no loss."""
    same(all_alike(trained(2)[f"weightless {name}"]), flat(by_hand(WITHOUT_WEIGHT, double())))


@pytest.mark.world_size(2)
def test_gradients_are_averaged_with_the_last_micro_batch_only() -> None:
    sent: list[int] = []

    def hook(state: list[int], bucket: Any) -> Any:
        state.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    strategy = joined(comm_hook=hook, comm_state=sent)
    module = Net()
    step = strategy.step_function(strategy.prepare_module(module), module, "training_step")
    for uneven in (False, True, False):
        for i in range(3):
            before = len(sent)
            micro = MicroBatch(i, i, i == 0, i == 2, 1.0, uneven=uneven)
            strategy.begin_micro_batch(micro)
            strategy.backward(step(i, i), micro)
            assert len(sent) - before == (1 if i == 2 and not uneven else 0)
    assert sent == [sum(p.numel() for p in module.parameters()) + 1] * 2


# As in a training loop with Accelerator


def train_by_myself(plan: Plan, options: dict[str, Any], hold: bool = False) -> list[float]:
    strategy = joined(**options)
    return flat(own_loop(strategy, plan, double(seed=1 + strategy.rank), hold=hold))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_training_loop(name: str) -> None:
    same(all_alike(trained(2)[f"own {name}"]), flat(by_hand(OWN, double())))


@pytest.mark.parametrize("static_graph", [False, True])
def test_no_sync(static_graph: bool) -> None:
    same(all_alike(trained(2)[f"own held {static_graph}"]), flat(by_hand(EVEN[:2], double())))


@pytest.mark.parametrize("size", [2, 3])
def test_trainer_and_own_loop(size: int) -> None:
    """Bit-identical on two processes; on three, the probe parameter changes the buckets, so the order of sums may differ."""
    trainers, own = (all_alike(trained(size)[name]) for name in ("trainer's", "own"))
    same(trainers, own, 0.0 if size == 2 else EXACT)


# What is the same on all processes


class Counting(Net):
    """Its buffers differ between processes, and each forward replaces one of them."""

    def __init__(self, rank: int) -> None:
        super().__init__(seed=rank)
        self.register_buffer("mean", torch.full((2, 3), float(rank)), persistent=False)
        self.register_buffer("flag", torch.tensor([rank == 0, True]))
        self.register_buffer("nothing", None)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + self.rank + 1
        return super().forward(x)


@pytest.mark.world_size(2)
def test_rank_0s_parameters_and_buffers() -> None:
    strategy = joined()
    module = Counting(strategy.rank)
    wrapped = strategy.prepare_module(module)
    assert flat(module) == flat(Counting(0))
    assert module.mean.tolist() == [[0.0] * 3] * 2
    assert module.flag.tolist() == [True, True]
    step = strategy.step_function(wrapped, module, "training_step")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy.backward(step(1, 0))
    assert module.mean[0, 0] == strategy.rank + 1
    strategy.optimizer_step(optimizer)
    assert module.mean.tolist() == [[1.0] * 3] * 2
    assert module.forwards == 1
    module.mean.fill_(strategy.rank)
    strategy.sync_buffers()
    assert module.mean.tolist() == [[0.0] * 3] * 2


@pytest.mark.world_size(3)
def test_different_modules() -> None:
    strategy = joined()
    with pytest.raises(ModuleError, match=r"rank 0 and rank 2 have different modules, .*first.weight: float32\[8, 4\]; "):
        strategy.prepare_module(Net(width=9 if strategy.rank == 2 else 8))


@pytest.mark.world_size(2)
def test_a_lazy_module() -> None:
    with pytest.raises(ModuleError, match=r"weight is uninitialized, .* in configure_model: self\(batch\)"):
        joined().prepare_module(nn.LazyLinear(2))


# Precision


TOLERANCES = {"bf16-true": 0.05, "bf16-mixed": 0.02, "32-true": 1e-5}
LOSSES: Plan = [[1, 2], [3, NoLoss], [5]]


@cache
def in_precisions() -> dict[str, list[Any]]:
    jobs: dict[str, Any] = {name: (precise, name, LOSSES) for name in TOLERANCES}
    jobs |= {f"overflow {len(window)}": (overflow, [window, [3, 4]]) for window in ([1, 2], [1])}
    return together(2, jobs)


@pytest.mark.parametrize("busy", [1, 2])
def test_an_overflow_on_one_process_skips_the_update_on_all(busy: int) -> None:
    """Also in an accumulation window in which the other process has no micro-batch."""
    (parameters, scale), other = in_precisions()[f"overflow {busy}"]
    assert (parameters, scale) == other
    assert scale == 4.0
    same(parameters, flat(by_hand([[3, 4]], Net())), 0.01)


def overflow(plan: Plan) -> tuple[list[float], float]:
    strategy = joined(precision=Precision("16-mixed", init_scale=8.0))
    module, hooks = Net(), list[Any]()

    def before(module: nn.Module, number: int) -> None:
        if strategy.rank == 0 and number == 0:
            hooks.append(module.get_parameter("last.weight").register_hook(lambda gradient: gradient * math.inf))
        elif hooks:
            hooks.pop().remove()

    over_strategy(strategy, plan, module, before=before)
    assert strategy.precision.scaler is not None
    return flat(module), strategy.precision.scaler.get_scale()


def precise(precision: str, plan: Plan) -> list[float]:
    strategy = joined(precision=precision)
    return flat(over_strategy(strategy, plan, Net()))


@pytest.mark.parametrize("precision", TOLERANCES)
def test_other_precisions(precision: str) -> None:
    same(all_alike(in_precisions()[precision]), flat(by_hand(LOSSES, Net())), TOLERANCES[precision])


# Joining


@pytest.mark.world_size(2)
def test_joining() -> None:
    strategy = joined()
    assert (strategy.world_size, strategy.local_rank, strategy.device) == (2, strategy.rank, torch.device("cpu"))
    assert strategy.joined
    strategy.barrier()
    with pytest.raises(ConfigurationError, match="sync_batchnorm=True does not work on the CPU: .* Remove it"):
        joined(sync_batchnorm=True)
    with pytest.raises(ConfigurationError, match=r"DDPStrategy\(device='cpu:0'\) names one device for 2 processes"):
        joined(device="cpu:0")


@pytest.mark.world_size(2)
def test_tear_down_leaves_the_module_alone() -> None:
    strategy = joined()
    module = Net()
    over_strategy(strategy, [[1, 2]], module)
    strategy.teardown()
    module.zero_grad()
    (module.training_step(strategy.rank, 0) * 1.0).backward()  # type: ignore[operator]
    mine = module.last.weight.grad
    assert mine is not None
    assert not torch.equal(*strategy.all_gather(mine))
    over_strategy(strategy, [[1, 2]], module)  # it can be prepared again


# One process


def test_on_one_process_it_is_the_base_class() -> None:
    strategy = DDPStrategy(device="cpu", comm_hook="fp16", static_graph=True)
    strategy.join(RequestedDevices("cpu"))
    module = Net()
    assert strategy.world_size == 1
    assert strategy.prepare_module(module) is strategy.wrap(module) is strategy.unwrap(module) is module
    assert torch.equal(strategy.step_function(module, module, "training_step")(1, 0), module.training_step(1, 0))
    strategy.backward(module.training_step(1, 0))
    strategy.backward(None)
    strategy.skip_backward(torch.zeros(()))
    gradient = module.last.weight.grad
    assert gradient is not None
    kept = gradient.clone()
    strategy.reduce_gradients(module.parameters())
    assert torch.equal(gradient, kept)
    assert strategy.any_loss(False) is False
    assert strategy.all_gather(kept) is strategy.mean(kept) is kept
    strategy.barrier()
    strategy.sync_buffers()
    assert strategy.optimizer_step(torch.optim.SGD(module.parameters(), lr=0.1))
    strategy.teardown()


# Arguments


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be a number > 0, not 0"),
        ({"bucket_cap_mb": True}, "bucket_cap_mb must be a number > 0, not True"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be a number > 0, not '25'"),
        ({"timeout": 0}, "timeout must be a timedelta or a number of seconds > 0, not 0"),
        ({"timeout": "30 min"}, "timeout must be a timedelta or a number of seconds > 0, not '30 min'"),
        ({"comm_hook": 16}, "comm_hook must be one of fp16, bf16, powersgd, or a function .* not 16. For example: "),
        ({"comm_hook": "fp16", "comm_state": {}}, "comm_state needs comm_hook='powersgd' or a function, not 'fp16'. Remove it"),
        ({"comm_state": {}}, "comm_state needs .*, not None"),
        ({"comm_hook": "powersgd", "comm_state": {"rank": 2}}, "comm_state must have options of torch's PowerSGDState.*'rank'"),
        ({"comm_hook": "powersgd", "comm_state": {"start_powerSGD_iter": 1}}, "PowerSGDState.*start_powerSGD_iter"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DDPStrategy(device="cpu", **options)


def test_an_unknown_hook() -> None:
    with pytest.raises(UnknownNameError, match="unknown comm_hook 'fp_16'; known: fp16, .* Did you mean 'fp16'?"):
        DDPStrategy(device="cpu", comm_hook="fp_16")


def test_the_names_of_the_package() -> None:
    assert strategies.DDPStrategy is DDPStrategy
    assert "DDPStrategy" in dir(strategies)
    with pytest.raises(AttributeError, match="has no attribute 'DPPStrategy'. Did you mean 'DDPStrategy'?"):
        strategies.DPPStrategy


@pytest.mark.parametrize("timeout", [90, 90.0, timedelta(minutes=1.5)])
def test_a_timeout_in_seconds(timeout: float | timedelta) -> None:
    assert DDPStrategy(timeout=timeout).timeout == timedelta(seconds=90)


# ------------------------------------------------------------------------------------------------------- sync batchnorm


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.deep = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm2d(3, affine=False), self.norm)
        self.other = nn.LayerNorm(3)


@pytest.mark.world_size(2)
def test_layers_are_converted_and_restored() -> None:
    world = joined().world
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    model, norms = Model(), SyncedBatchNorms()
    users, parameters, names = model.norm, list(model.parameters()), list(model.state_dict())
    norms.convert(model, world)
    synced = [part for part in model.modules() if isinstance(part, nn.SyncBatchNorm)]
    assert len(synced) == 2
    assert model.norm is model.deep[2] is synced[0]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert type(model.other) is nn.LayerNorm

    def groups() -> list[int]:
        return [dist.get_world_size(layer.process_group) for layer in synced]

    assert groups() == [2, 2]
    norms.select_statistics(True)
    assert groups() == [1, 1]
    norms.select_statistics(True)
    norms.select_statistics(False)
    assert groups() == [2, 2]
    synced[0].running_mean = torch.full((3,), 7.0)
    model.eval()
    norms.restore()
    assert model.norm is model.deep[2] is users
    assert users.running_mean is not None
    assert users.running_mean.tolist() == [7.0] * 3
    assert not users.training
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    norms.restore()
    assert not norms
    assert [text.split(":")[0] for text in messages] == (["sync_batchnorm"] if world.is_main else [])


@pytest.mark.world_size(2)
def test_in_a_training_loop() -> None:
    strategy = joined()
    strategy.sync_batchnorm = True  # an error as an argument on the CPU, but in eval mode the layers work there
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    model = strategy.wrap(strategy.prepare_module(module)).eval()
    for uneven, size in ((True, 1), (False, 2)):
        strategy.begin_micro_batch(WHOLE_WINDOW._replace(uneven=uneven))
        model(inputs(1))
        assert isinstance(module[1], nn.SyncBatchNorm)
        assert dist.get_world_size(module[1].process_group) == size
    strategy.teardown()
    assert type(module[1]) is nn.BatchNorm1d
