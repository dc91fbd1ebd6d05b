"""`Precision`: names, dtypes, contexts, and the loss scale. Runs in each precision: `trainer/test_train_loop.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from trainkit import Precision
from trainkit import precision as precisions
from trainkit.config.keys import KEYS, convert_value
from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.precision import MIXED as OF_ACCELERATE
from trainkit.precision import OVER_MASTERS, PRECISIONS, PrecisionSpec, register_precision
from trainkit.strategy import Strategy

CPU = torch.device("cpu")
TRUE = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
NAMES = [*TRUE, *MIXED]  # fp8-mixed is in test_float8_precision.py


def precision(name: Any, **options: Any) -> Precision:
    made = Precision(name, **options)
    made.setup(CPU)
    return made


# Names


def test_the_names_are_lightnings() -> None:
    assert set(PRECISIONS) == {*NAMES, "fp8-mixed"}
    for name, dtype in TRUE.items():
        assert (Precision(name).parameter_dtype, Precision(name).autocast_dtype) == (dtype, None)
    for name, dtype in MIXED.items():
        assert (Precision(name).parameter_dtype, Precision(name).autocast_dtype) == (torch.float32, dtype)


@pytest.mark.parametrize(
    "short, name",
    [
        (32, "32-true"),
        (64, "64-true"),
        (16, "16-mixed"),
        ("32", "32-true"),
        ("64", "64-true"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
    ],
)
def test_short_names(short: Any, name: str) -> None:
    assert Precision(short).name == name
    assert repr(Precision(short)) == f"Precision({name!r})"


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("bf16-mixd", "'bf16-mixed'"),
        ("16-tru", "'16-true'"),
        ("fp8", None),
        (8, None),
        (True, None),
        (None, None),
        (32.0, None),
    ],
)
def test_an_unknown_name(name: Any, nearest: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Precision(name)
    assert f"unknown precision {name!r}; known: 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true, 16-true, fp8-mixed." in str(
        caught.value
    )
    assert nearest is None or f"Did you mean {nearest}?" in str(caught.value)


def test_only_32_true_is_plain() -> None:
    assert [name for name in PRECISIONS if Precision(name).plain] == ["32-true"]


def test_mps_has_no_float64() -> None:
    with pytest.raises(ConfigurationError, match="does not work on MPS, which has no float64. Use precision='32-true'"):
        Precision("64-true").setup(torch.device("mps"))


# Dtypes and contexts


@pytest.mark.parametrize("name", NAMES)
def test_what_a_module_becomes(name: str) -> None:
    module = nn.BatchNorm1d(3)
    weight = module.weight
    assert precision(name).convert_module(module) is module
    assert module.weight is weight  # an optimizer that was created before remains valid
    assert {value.dtype for value in (module.weight, module.bias, module.running_mean)} == {TRUE.get(name, torch.float32)}
    assert module.num_batches_tracked.dtype is torch.int64


@pytest.mark.parametrize("name", NAMES)
def test_complex_tensors_of_a_module_stay_as_they_are(name: str) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("phases", torch.tensor([1.0 + 2.0j]))
    precision(name).convert_module(module)
    assert module.phases.dtype is torch.complex64
    assert module.phases.item() == 1.0 + 2.0j


class Pair(NamedTuple):
    inputs: Tensor
    label: int


@pytest.mark.parametrize("name", NAMES)
def test_what_a_batch_becomes(name: str) -> None:
    batch = {
        "floats": [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
        "numbers": (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)),
        "pair": Pair(torch.zeros(1), 3),
        "text": "a",
        "nothing": None,
    }
    converted = precision(name).convert_input(batch)
    if name in TRUE and name != "32-true":
        assert [t.dtype for t in converted["floats"]] == [TRUE[name]] * 2
        assert [t.dtype for t in converted["numbers"]] == [torch.int64, torch.bool]
        assert isinstance(converted["pair"], Pair)
        assert converted["pair"].inputs.dtype is TRUE[name]
        assert (converted["pair"].label, converted["text"], converted["nothing"]) == (3, "a", None)
        assert batch["floats"][0].dtype is torch.float32  # the user's own batch is not changed
    else:
        assert converted is batch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fails", [False, True])
def test_contexts_and_what_is_left_after_them(name: str, fails: bool) -> None:
    made = precision(name)
    for context, autocast in ((made.init_context(), False), (made.forward_context(), name in MIXED)):
        try:
            with context:
                assert torch.zeros(1).dtype is TRUE.get(name, torch.float32)
                assert torch.is_autocast_enabled("cpu") is autocast
                if autocast:
                    assert torch.get_autocast_dtype("cpu") is MIXED[name]
                    assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype is MIXED[name]
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert torch.get_default_dtype() is torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_contexts_can_be_entered_inside_each_other() -> None:
    made = precision("64-true")
    with made.forward_context():
        with made.forward_context():
            assert torch.zeros(1).dtype is torch.float64
        assert torch.zeros(1).dtype is torch.float64
    assert torch.zeros(1).dtype is torch.float32


# The loss scale


class Weights:
    """Parameters that start at 0, each with its own optimizer. By default, its step subtracts the gradient (SGD with lr=1)."""

    def __init__(self, made: Precision, count: int = 1, adam: bool = False) -> None:
        made.several_optimizers = count > 1
        self.precision = made
        self.parameters = [nn.Parameter(torch.zeros(())) for _ in range(count)]
        kind: Any = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizers = [kind([parameter], lr=1.0) for parameter in self.parameters]

    def backward(self, *slopes: float) -> None:
        """Run the backward pass of a loss with these derivatives."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        terms = [p * slope for p, slope in zip(self.parameters, slopes, strict=True)]
        self.precision.scale(torch.stack(terms).sum()).backward()

    def step(self) -> list[bool]:
        return [self.precision.optimizer_step(optimizer) for optimizer in self.optimizers]

    @property
    def values(self) -> list[float]:
        return [parameter.item() for parameter in self.parameters]

    @property
    def scale(self) -> float:
        assert self.precision.scaler is not None
        return self.precision.scaler.get_scale()


def scaled(count: int = 1, init_scale: float = 8.0, growth_interval: int = 100, **options: Any) -> Weights:
    return Weights(precision("16-mixed", init_scale=init_scale, growth_interval=growth_interval), count, **options)


def test_only_16_mixed_has_a_loss_scale() -> None:
    assert [name for name in NAMES if precision(name).scaler is not None] == ["16-mixed"]
    loss = torch.tensor(1.0)
    assert precision("bf16-mixed").scale(loss) is loss
    assert precision("16-mixed").scale(loss).item() == 2.0**16


def test_an_update_sees_the_gradient_without_the_scale() -> None:
    weights = scaled()
    weights.backward(3.0)
    assert weights.parameters[0].grad.item() == 24.0
    assert weights.step() == [True]
    assert weights.values == [-3.0]


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    weights = scaled(adam=True)
    weights.backward(1.0)
    weights.step()
    before = {key: value.clone() for key, value in weights.optimizers[0].state[weights.parameters[0]].items()}
    value = weights.values
    weights.backward(torch.inf)
    assert weights.step() == [False]
    assert weights.values == value
    after = weights.optimizers[0].state[weights.parameters[0]]
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert weights.scale == 4.0


def test_the_scale_grows_after_growth_interval_steps_without_an_overflow() -> None:
    weights = scaled(growth_interval=2)
    scales = []
    for slope in (1.0, 1.0, 1.0, torch.inf, 1.0, 1.0):
        weights.backward(slope)
        weights.step()
        scales.append(weights.scale)
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]


def test_the_scale_is_taken_out_once_however_often_it_is_asked() -> None:
    """Calling `unscale` several times before an optimizer step divides the gradient by the scale once."""
    weights = scaled()
    weights.backward(3.0)
    for _ in range(3):
        weights.precision.unscale(weights.optimizers[0])
        assert weights.parameters[0].grad.item() == 3.0
    weights.step()
    assert weights.values == [-3.0]
    weights.backward(2.0)  # the next optimizer step is unscaled again
    weights.precision.unscale(weights.optimizers[0])
    assert weights.parameters[0].grad.item() == 2.0


def test_a_clipped_gradient_is_what_the_update_uses() -> None:
    weights = scaled()
    weights.backward(3.0)
    weights.precision.unscale(weights.optimizers[0])
    torch.nn.utils.clip_grad_norm_(weights.parameters, 1.0)
    weights.step()
    assert weights.values == [pytest.approx(-1.0, rel=1e-5)]


def test_an_update_that_does_not_happen_leaves_nothing_for_the_next() -> None:
    """After `discard` instead of an optimizer step, the next gradient is unscaled as usual."""
    weights = scaled()
    weights.backward(3.0)
    weights.precision.unscale(weights.optimizers[0])
    weights.precision.discard(weights.optimizers[0])
    weights.precision.discard(weights.optimizers[0])  # a second call has no effect
    weights.backward(2.0)
    weights.precision.unscale(weights.optimizers[0])
    assert weights.parameters[0].grad.item() == 2.0
    weights.step()
    assert weights.values == [-2.0]


@pytest.mark.parametrize("growth_interval", [1, 2, 100])
@pytest.mark.parametrize("clipped", [False, True])
def test_two_optimizers_of_one_loss_share_its_scale(growth_interval: int, clipped: bool) -> None:
    """The scale changes only when no gradient remains that was computed with the old scale."""
    weights = scaled(2, growth_interval=growth_interval)
    for update in range(1, 5):
        weights.backward(1.0, 2.0)
        if clipped:
            for optimizer in weights.optimizers:
                weights.precision.unscale(optimizer)
            assert [p.grad.item() for p in weights.parameters] == [1.0, 2.0]
        assert weights.step() == [True, True]
        assert weights.values == [-1.0 * update, -2.0 * update]


def test_an_overflow_for_one_optimizer_does_not_disturb_the_other() -> None:
    weights = scaled(2)
    weights.backward(torch.inf, 2.0)
    assert weights.step() == [False, True]
    assert weights.values == [0.0, -2.0]
    weights.backward(1.0, 2.0)
    assert weights.scale == 4.0
    assert weights.step() == [True, True]
    assert weights.values == [-1.0, -4.0]


def test_two_losses_each_with_its_optimizer() -> None:
    weights = scaled(2, growth_interval=1)
    for update in range(1, 4):
        for index in (0, 1):
            weights.optimizers[index].zero_grad()
            weights.precision.scale(weights.parameters[index] * 3.0).backward()
            weights.precision.unscale(weights.optimizers[index])
            assert weights.parameters[index].grad.item() == 3.0
            assert weights.precision.optimizer_step(weights.optimizers[index])
        assert weights.values == [-3.0 * update] * 2


def test_two_steps_with_one_backward() -> None:
    for weights in (scaled(1), scaled(2)):
        weights.backward(*[1.0] * len(weights.parameters))
        weights.precision.optimizer_step(weights.optimizers[0])
        weights.parameters[0].grad.fill_(weights.scale)  # a gradient of 1 times the scale, set without a backward pass
        weights.precision.optimizer_step(weights.optimizers[0])
        assert weights.values[0] == -2.0


def test_an_optimizer_without_gradients_steps_as_torch_does() -> None:
    weights = scaled()
    assert weights.step() == [True]
    assert weights.values == [0.0]


def test_a_closure_needs_a_precision_without_a_scale() -> None:
    weights = scaled()
    with pytest.raises(ConfigurationError, match=r"closure \(LBFGS\) does not work with precision='16-mixed'.*'bf16-mixed' or"):
        weights.precision.optimizer_step(weights.optimizers[0], lambda: torch.tensor(0.0))
    plain = Weights(precision("bf16-mixed"))

    def closure() -> Tensor:
        plain.backward(3.0)
        return torch.tensor(0.0)

    assert plain.precision.optimizer_step(plain.optimizers[0], closure)
    assert plain.values == [-3.0]


def test_reset_is_the_start_of_a_run() -> None:
    """`reset` restores the initial loss scale, and forgets which gradients were unscaled."""
    weights = scaled()
    weights.backward(torch.inf)
    weights.step()
    weights.backward(1.0)
    weights.precision.unscale(weights.optimizers[0])
    weights.precision.reset()
    assert weights.scale == 8.0
    weights.backward(3.0)
    weights.step()
    assert weights.values == [-3.0]


# Registered precisions


@pytest.fixture
def halves() -> Iterator[PrecisionSpec]:
    """Register a precision for one test."""
    tables = (PRECISIONS, OF_ACCELERATE, OVER_MASTERS, precisions._ALIASES)
    before = [dict(table) for table in tables]

    class Scaler(torch.amp.GradScaler):
        pass

    spec = PrecisionSpec("half", torch.float32, torch.float16, Scaler, ("h",), "halves", refused={"meta": "which is nothing"})
    register_precision(spec)
    yield spec
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def test_a_registered_precision_is_like_the_others(halves: PrecisionSpec) -> None:
    made = precision("h")
    assert (made.name, made.spec, made.autocast_dtype, made.plain) == ("half", halves, torch.float16, False)
    assert type(made.scaler) is halves.scaler
    assert OF_ACCELERATE["halves"] == "half"
    assert convert_value("mixed_precision", "halves", KEYS, "mixed_precision") == "halves"
    assert Strategy("cpu", precision="half").precision.name == "half"
    with pytest.raises(ConfigurationError, match=r"precision='half' does not work on META, which is nothing\. Use"):
        made.setup(torch.device("meta"))


def test_accelerates_names_stand_from_fine_to_coarse(halves: PrecisionSpec) -> None:
    assert list(OF_ACCELERATE) == ["no", "fp16", "halves", "bf16", "fp8"]
    assert OVER_MASTERS == {"no": "32-true", "fp16": "16-true", "bf16": "bf16-true"}


@pytest.mark.parametrize(
    "spec, name",
    [
        (PrecisionSpec("32-true", torch.float32), "32-true"),
        (PrecisionSpec("bf16", torch.float32), "bf16"),
        (PrecisionSpec("mine", torch.float32, aliases=("m", "64")), "64"),
        (PrecisionSpec("mine", torch.float32, mixed_precision="no"), "no"),
        (PrecisionSpec("mine", torch.float32, over_masters="fp16"), "fp16"),
    ],
)
def test_a_name_that_is_taken(spec: PrecisionSpec, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the name '{name}' is taken, .*unique. Choose another: PrecisionSpec"):
        register_precision(spec)
    assert "mine" not in PRECISIONS
