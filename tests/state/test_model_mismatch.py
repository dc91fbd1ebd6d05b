"""A state that does not fit a module is an error before anything is changed."""

from __future__ import annotations

import pytest
import torch
from helpers.resume.saved_state import Extra, differences, frozen_copy, restore_model, stored, unchanged
from torch import Tensor, nn

from trainkit.errors import StateMismatchError

WHAT = "the checkpoint step-4"


def same(a: nn.Module, b: nn.Module) -> bool:
    return differences(dict(a.state_dict()), dict(b.state_dict())) == []


# --------------------------------------------------------------------------------------------------- what does not fit


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "c": Extra(), "d": nn.BatchNorm1d(2)})
    other = nn.ModuleDict({"a": nn.Linear(2, 4), "x": nn.Linear(2, 2), "y": Extra(), "d": nn.BatchNorm1d(2)})
    other["d"].running_mean = other["d"].running_mean.int()
    with unchanged(other), pytest.raises(StateMismatchError) as caught:
        restore_model(other, stored(module), what=WHAT)
    assert str(caught.value).splitlines() == [
        f"{WHAT} does not fit ModuleDict:",
        "  missing in the checkpoint (4): y._extra_state (extra state), x.weight, x.bias, y.kept",
        "  unexpected in the checkpoint (4): b.weight, b.bias, c.kept, c._extra_state",
        "  a.weight: shape (3, 2) in the checkpoint, (4, 2) in the model",
        "  a.bias: shape (3,) in the checkpoint, (4,) in the model",
        "  d.running_mean: float32 in the checkpoint cannot be cast to int32",
        "Nothing was changed. Fix: build the model with the same structure as the saved one, or load another checkpoint.",
    ]


def test_what_fits_with_strict_false() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)})
    other = nn.ModuleDict({"a": nn.Linear(2, 3), "x": nn.Linear(2, 2)})
    untouched = frozen_copy(other["x"].weight)
    with pytest.raises(StateMismatchError, match="or load only the matching tensors with strict=False"):
        restore_model(other, stored(module), what=WHAT)
    notices = restore_model(other, stored(module), strict=False, what=WHAT)
    assert notices == [
        "not in the checkpoint, so left unchanged: x.weight, x.bias",
        "not in the model, so not loaded: b.weight, b.bias",
    ]
    assert torch.equal(other["a"].weight, module["a"].weight)
    assert torch.equal(other["x"].weight, untouched)
    with unchanged(other), pytest.raises(StateMismatchError, match="shape"):
        restore_model(other, stored(nn.ModuleDict({"a": nn.Linear(9, 9)})), strict=False, what=WHAT)


def test_no_memory_to_load_into() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match="weight is on the meta device"):
        restore_model(nn.Linear(2, 2, device="meta"), stored(module), what=WHAT)
    with torch.inference_mode():
        frozen = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match="inference_mode"):
        restore_model(frozen, stored(module), what=WHAT)


# -------------------------------------------------------------------------------------------------------------- dtypes


def test_casts_are_reported() -> None:
    module, other = nn.Linear(3, 2), nn.Linear(3, 2).bfloat16()
    assert restore_model(other, stored(module), what=WHAT) == ["2 tensors were cast from float32 to bfloat16"]
    assert torch.equal(other.weight, module.weight.bfloat16())
    assert restore_model(module.double(), stored(other), what=WHAT) == ["2 tensors were cast from bfloat16 to float64"]
    assert torch.equal(other.weight.double(), module.weight)


def test_float8_from_float32() -> None:
    module = nn.ParameterDict({"w": torch.tensor([1.5, 1e9])})
    other = nn.ParameterDict({"w": torch.zeros(2).to(torch.float8_e5m2)})
    notices = restore_model(other, stored(module), what=WHAT)
    assert notices[0] == "1 tensor was cast from float32 to float8_e5m2"
    assert notices[1].endswith("infinite or NaN in: w")
    assert other["w"][0].item() == 1.5


@pytest.mark.parametrize(
    "here, there, fits",
    [
        (torch.tensor([1, 2]), torch.tensor([0, 0], dtype=torch.uint8), True),
        (torch.tensor([1, 256]), torch.tensor([0, 0], dtype=torch.uint8), False),
        (torch.tensor([1.5]), torch.tensor([0]), False),
        (torch.tensor([1j]), torch.tensor([0.0]), False),
        (torch.tensor([2.0]), torch.tensor([0j]), True),
        (torch.tensor([2]), torch.tensor([True]), False),
        (torch.tensor([True]), torch.tensor([2]), True),
        (torch.tensor([2]), torch.tensor([0.0]), True),
    ],
)
def test_only_casts_that_keep_the_meaning(here: Tensor, there: Tensor, fits: bool) -> None:
    module, other = nn.Module(), nn.Module()
    module.register_buffer("x", here)
    other.register_buffer("x", there)
    if fits:
        restore_model(other, stored(module), what=WHAT)
        assert torch.equal(other.x, here.to(there.dtype))
    else:
        with unchanged(other), pytest.raises(StateMismatchError, match="cannot be cast to"):
            restore_model(other, stored(module), what=WHAT)


# ------------------------------------------------------------------------------------------------------- shared memory


class Views(nn.Module):
    """Two parameters that share two rows of memory, two that are columns of a matrix, and an expanded buffer."""

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        base = torch.randn(6, 2)
        self.a = nn.Parameter(base[:4])
        self.b = nn.Parameter(base[2:] if shared else torch.randn(4, 2))
        self.odd, self.even = nn.Parameter(torch.randn(5, 2)[:, 0]), nn.Parameter(torch.randn(5, 2)[:, 1])
        self.register_buffer("wide", torch.randn(3, 1).expand(3, 4))


def test_views_that_overlap_are_stored_whole() -> None:
    module, other = Views(), Views()
    state = stored(module)
    assert {name: tuple(t.shape) for name, t in state.tensors.items()} == {
        "a": (4, 2), "b": (4, 2), "odd": (5,), "even": (5,), "wide": (3, 4)
    }  # fmt: skip
    restore_model(other, state, what=WHAT)
    assert same(module, other)
    assert other.wide.stride() == (1, 0)
    apart = Views(shared=False)
    restore_model(apart, state, what=WHAT)
    assert same(module, apart)


def test_views_that_cannot_hold_different_values_are_refused() -> None:
    other = Views()
    with unchanged(other), pytest.raises(StateMismatchError, match="a, b share memory in the model, but"):
        restore_model(other, stored(Views(shared=False)), what=WHAT)
    state = stored(other)
    state.tensors["wide"][0, 0] += 1
    with unchanged(other), pytest.raises(StateMismatchError, match="wide is expanded in the model"):
        restore_model(other, state, what=WHAT)
