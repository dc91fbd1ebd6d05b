"""A training step on tensors without values: its activations and its FLOPs, counted by hand and measured by torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainkit import Callback, DataModule, TrainModule
from trainkit.accelerator.prepared_models import CompiledModules
from trainkit.config.compiling import Compilation
from trainkit.memory.report import MemoryEstimate
from trainkit.memory.traced_step import StepTraceError, activation_profile, step_flops
from trainkit.module.activation_checkpointing import CheckpointingChoice, checkpoint_activations
from trainkit.strategy import Contents, Held, Weight, in_backward

Step = Callable[[Any, Tensor], Any]
B, H, T, D = 4, 2, 32, 16  # batch, heads, tokens, width of a head
WIDTH = H * D
LAYERS = [f"layers.{index}" for index in range(4)]  # of `mlp`


class Stepping(TrainModule):
    """Runs a function as its training step."""

    def __init__(self, step: Step, *layers: nn.Module) -> None:
        super().__init__()
        self.step, self.layers, self.seen = step, nn.ModuleList(layers), []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.step(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1000))


def exps(number: int) -> Step:
    """A step that keeps `number` results for the backward, of the size of the batch."""

    def step(module: Any, batch: Tensor) -> Tensor:
        x = batch * module.layers[0].scale
        for _ in range(number):
            x = x.exp()
        return x.sum()

    return step


def residual(block: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    def step(module: Any, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()  # which a reentrant checkpoint needs
        for layer in module.layers:
            batch = batch + block(layer, batch)
        return batch.square().mean()

    return step


def mlp(*, reentrant: bool | None = None, layers: int = 4) -> Stepping:
    """Layers of two matrix products; `reentrant` is that of their checkpoints, if they have any."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)]
    if reentrant is None:
        return Stepping(residual(lambda layer, x: layer(x)), *blocks)
    return Stepping(residual(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)), *blocks)


def attention() -> Stepping:
    def step(module: Any, batch: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in module.layers[0](batch).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return module.layers[1](mixed.transpose(1, 2).flatten(2)).square().mean()

    return Stepping(step, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH))


def tokens() -> Tensor:
    return torch.ones(B, T, WIDTH)


def profile_of(module: TrainModule, batch: Any, precision: str = "32-true") -> tuple[tuple[int, int], ...]:
    trainer = make_trainer(precision=precision)
    return activation_profile(module, batch, trainer.precision_plugin, torch.device("cpu"), trainer)


def flops_of(module: TrainModule, batch: Any) -> int:
    trainer = make_trainer()
    return step_flops(module, batch, 0, trainer.precision_plugin, torch.device("cpu"), trainer)


def peak_of(module: TrainModule, batch: Tensor) -> int:
    """The bytes that torch allocates at most in a real step, and the batch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        module.training_step(batch, 0).backward()
    now = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most + batch.nbytes


@pytest.mark.parametrize("number", [1, 5])
def test_activations_counted_by_hand(number: int) -> None:
    # the batch, a result of each exp, and the gradient that the backward is computing; the loss and its gradient
    size = 4000
    profile = profile_of(Stepping(exps(number), Scale()), torch.ones(1000))
    # at the end there is the gradient of the parameter; the batch and a gradient that becomes the parameter's
    assert profile == ((2 * size + 8, size), ((number + 2) * size + 8, 0))


# a checkpoint keeps the state of the random generator too, which is not counted
@pytest.mark.parametrize(
    "make, states",
    [(mlp, 0), (attention, 0), (lambda: mlp(reentrant=False), 4 * 5056), (lambda: Stepping(exps(3), Scale()), 0)],
)
def test_activations_as_torch_allocates_them(make: Callable[[], Stepping], states: int) -> None:
    module = make()
    batch = torch.ones(1000) if isinstance(module.layers[0], Scale) else tokens()
    told = max(map(sum, profile_of(module, batch)))
    assert told == pytest.approx(peak_of(module, batch), abs=states)


def test_activations_under_autocast_are_smaller() -> None:
    whole, half = (max(profile_of(mlp(), tokens(), precision))[0] for precision in ("32-true", "bf16-mixed"))
    assert half < 0.8 * whole


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_lowers_activations_and_leaves_the_flops(reentrant: bool) -> None:
    plain, saved = mlp(), mlp(reentrant=reentrant)
    assert max(profile_of(saved, tokens()))[0] < 0.5 * max(profile_of(plain, tokens()))[0]
    assert flops_of(saved, tokens()) == flops_of(plain, tokens())


def recompute(module: Stepping) -> None:
    checkpoint_activations(module, CheckpointingChoice(LAYERS))


def compile_layers(module: Stepping) -> None:
    CompiledModules().compile(dict(module.layers.named_children()), Compilation({"backend": "eager"}))


@pytest.mark.parametrize("changes", [[recompute], [compile_layers], [recompute, compile_layers]])
def test_the_copy_has_its_own_forward_where_a_run_has_replaced_it(changes: list[Callable[[Stepping], None]]) -> None:
    module, plain = mlp(), mlp(reentrant=False if recompute in changes else None)
    for change in changes:
        change(module)
    assert profile_of(module, tokens()) == profile_of(plain, tokens())
    assert flops_of(module, tokens()) == flops_of(plain, tokens())


def test_flops_counted_by_hand() -> None:
    # a forward and the gradients of both factors for each product; the batch of `attention` needs no gradient
    assert flops_of(mlp(layers=1), tokens()) == 2 * 3 * 2 * B * T * WIDTH * 4 * WIDTH
    projections = 2 * B * T * WIDTH * (2 * 3 * WIDTH + 3 * WIDTH)
    assert flops_of(attention(), tokens()) == projections + 6 * 2 * B * H * T * T * D


def test_compiled_code_is_counted() -> None:
    in_place, wrapped = mlp(layers=1), mlp(layers=1)
    in_place.layers[0].compile(backend="eager")
    wrapped.layers[0] = torch.compile(wrapped.layers[0], backend="eager")
    wrapped.step = torch.compile(wrapped.step, backend="eager")
    assert flops_of(in_place, tokens()) == flops_of(wrapped, tokens()) == flops_of(mlp(layers=1), tokens())


def reads_a_value(module: Any, batch: Tensor) -> Tensor:
    return module.layers[0].scale.sum() * (2.0 if batch.sum() > 0 else 1.0)


def depends_on_values(module: Any, batch: Tensor) -> Tensor:
    return (module.layers[0].scale * batch)[batch > 0].sum()


def communicates(module: Any, batch: Tensor) -> Tensor:
    torch.ops._c10d_functional.all_reduce(batch, "sum", "0")
    return batch.sum()


@pytest.mark.parametrize(
    "step, reason",
    [
        (reads_a_value, r"it reads the value of a tensor \(aten.*\), in test_traced_step.py, line \d+"),
        (depends_on_values, "it reads the value of a tensor"),
        (communicates, "it communicates with other ranks"),
        (lambda module, batch: None, "returned no loss"),
        (lambda module, batch: module.absent, "AttributeError: .*'absent', in test_traced_step.py, line"),
    ],
)
def test_what_cannot_be_traced_has_a_reason(step: Step, reason: str) -> None:
    for trace in (profile_of, flops_of):
        with pytest.raises(StepTraceError, match=reason):
            trace(Stepping(step, Scale()), torch.ones(1000))
    assert torch.ones(1).item() == 1.0  # no mode is left behind


def plan(module: TrainModule, *data: Any, trainer: dict[str, Any] | None = None, **options: Any) -> MemoryEstimate:
    return make_trainer(**(trainer or {})).plan(module, *data, **options)


def backward(made: MemoryEstimate, strategy: str, processes: int) -> Held:
    rows = {(row.strategy, row.processes): row for row in made.rows}
    return rows[strategy, processes].footprint.moments["backward"].device


def test_a_plan_has_activations() -> None:
    made = plan(Stepping(exps(5), Scale()), [torch.ones(1000)], processes=(1, 2, 1024))
    assert backward(made, "single", 1) == Held(parameters=4000, activations=7 * 4000 + 8)
    assert backward(made, "ddp", 2) == Held(parameters=4000, buffers=4000, activations=7 * 4000 + 8)
    assert backward(made, "zero3", 1024).activations == 7 * 4000 + 8
    assert "activations" in str(made).splitlines()[1].split()
    assert "Not included: temporary memory" in str(made)


def test_an_accumulation_window_keeps_gradients() -> None:
    made = plan(Stepping(exps(5), Scale()), [torch.ones(1000)], trainer={"accumulate_grad_batches": 2}, processes=(1,))
    assert backward(made, "single", 1) == Held(parameters=4000, gradients=4000, activations=7 * 4000 + 8)


@pytest.mark.parametrize(
    "given", [{"activation_checkpointing": LAYERS}, {"compile": {"modules": LAYERS, "backend": "aot_eager"}}]
)
def test_a_plan_of_a_trainer_that_recomputes_or_compiles(given: dict[str, Any]) -> None:
    recomputed = "activation_checkpointing" in given
    module, plain = mlp(), mlp(reentrant=False if recomputed else None)
    with_argument, by_hand = (
        plan(one, [tokens()], trainer=more, processes=(1,)) for one, more in ((module, given), (plain, {}))
    )
    assert with_argument.untraced == ""
    assert backward(with_argument, "single", 1) == backward(by_hand, "single", 1)
    assert all("forward" not in vars(part) for part in module.modules())


def test_a_plan_inside_a_run_that_recomputes() -> None:
    seen: list[Held] = []

    class Planning(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(backward(trainer.plan(module, [tokens()], processes=(1,)), "single", 1))

    make_trainer(Planning(), activation_checkpointing=LAYERS, max_steps=1).fit(mlp(), [tokens()])
    assert seen == [backward(plan(mlp(reentrant=False), [tokens()], processes=(1,)), "single", 1)]


def test_gradients_that_come_while_activations_go() -> None:
    contents = Contents((Weight(100, 4, True),), profile=((50, 400), (300, 0)))
    assert in_backward(contents, Held(7))["backward"].device == Held(7, gradients=400, activations=50)
    assert in_backward(contents, Held(7), shards=4)["backward"].device == Held(7, activations=300)
    assert in_backward(contents, Held(7), shards=4, waiting=260)["backward"].device == Held(7, gradients=360, activations=50)
    assert in_backward(contents, Held(7), kept=True)["backward"].device == Held(7, gradients=400, activations=300)
    assert in_backward(Contents(()), Held(7)) == {}


class Data(DataModule):
    def setup(self, stage: str) -> None:
        self.batches = [torch.ones(1000)]

    def train_dataloader(self) -> Any:
        return self.batches


class Loading(Stepping):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 1000), batch_size=None, num_workers=2)


@pytest.mark.parametrize("module, data", [(Stepping(exps(5), Scale()), [Data()]), (Loading(exps(5), Scale()), [])])
def test_where_the_batch_comes_from(module: Stepping, data: list[Any]) -> None:
    assert backward(plan(module, *data, processes=(1,)), "single", 1).activations == 7 * 4000 + 8


def fails() -> Any:
    raise RuntimeError("no such file")


class Unready(Stepping):
    def train_dataloader(self) -> Any:
        return fails()


@pytest.mark.parametrize(
    "module, data, reason",
    [
        (Stepping(exps(1), Scale()), [], r"trainer\.plan\(module, DataLoader"),
        (Stepping(exps(1), Scale()), [iter([torch.ones(1000)])], "can be read only once"),
        (Stepping(exps(1), Scale()), [[]], "has no batch"),
        (Unready(exps(1), Scale()), [], "RuntimeError: no such file, in test_traced_step.py, line"),
        (Stepping(reads_a_value, Scale()), [[torch.ones(1000)]], "reads the value of a tensor"),
    ],
)
def test_a_plan_without_activations_says_why(module: Stepping, data: list[Any], reason: str) -> None:
    made = plan(module, *data, processes=(1,))
    (line,) = [line for line in str(made).splitlines() if line.startswith("Activations are not included")]
    assert re.search(reason, line)
    assert "activations" not in str(made).splitlines()[1].split()


def test_a_plan_leaves_the_module_and_the_random_numbers_alone() -> None:
    def step(module: Any, batch: Tensor) -> Tensor:
        module.last = (batch * module.layers[0].scale).sum()
        module.seen.append(module.last)
        module.log("loss", module.last + torch.rand(()))
        return module.last

    module = Stepping(step, Scale())
    before, state = dict(vars(module)), torch.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.ones(8, 1000), shuffle=True)
    made = plan(module, loader, processes=(1,))
    assert backward(made, "single", 1).activations > 0
    assert vars(module) == before
    assert module.seen == []
    assert module.layers[0].scale.grad is None
    assert torch.equal(torch.get_rng_state(), state)
