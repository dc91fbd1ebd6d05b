"""Gradients of a whole optimizer: norms as accurate as in float64, `clear_gradients` as torch, `toggle` and `untoggle`."""

from __future__ import annotations

import math

import pytest
import torch

from trainkit import Accelerator, Strategy
from trainkit.optim.optimizer_gradients import clear_gradients, toggle, total_norm, untoggle


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("sizes", [[3], [4096], [4097, 7], [16_385], [3_000_000, 12_288, 5]])
def test_as_in_float64(sizes: list[int], norm_type: float) -> None:
    gradients = [torch.randn(size).pow(3) for size in sizes]
    exact = torch.linalg.vector_norm(torch.cat(gradients).double(), norm_type)
    assert total_norm(gradients, norm_type).item() == pytest.approx(exact.item(), rel=1e-6)


def test_torch_alone_would_not_do() -> None:
    """torch's own norm of a large float32 tensor is inexact. If it no longer is, `total_norm` can be removed."""
    gradient = torch.randn(3_000_000).pow(3)
    alone = torch.nn.utils.get_total_norm([gradient])
    assert alone.item() != pytest.approx(gradient.double().norm().item(), rel=1e-5)


def test_small_gradients_match_torch() -> None:
    # for small gradients, the result is exactly that of torch
    gradients = [torch.randn(50, 60), torch.randn(7)]
    assert torch.equal(total_norm(gradients), torch.nn.utils.get_total_norm(gradients))


def test_any_layout() -> None:
    gradient = torch.randn(300, 200).t()
    assert total_norm([gradient]).item() == pytest.approx(gradient.double().norm().item(), rel=1e-6)
    assert total_norm([torch.eye(300).to_sparse().to_dense()]).item() == pytest.approx(300**0.5)


def test_nothing_and_what_is_not_finite() -> None:
    # without gradients the norm is 0; with NaN or infinity in a gradient it is NaN or infinity
    assert total_norm([]).item() == 0.0
    large = torch.ones(20_000)
    large[17_000] = math.nan
    assert math.isnan(total_norm([large]).item())
    large[17_000] = math.inf
    assert total_norm([large]).item() == math.inf


def test_clipping_a_large_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3_000_000))
    parameter.grad = torch.randn(3_000_000).pow(3)
    exact = parameter.grad.double().norm().item()
    assert Strategy("cpu").clip_grad_norm_([parameter], 2.0).item() == pytest.approx(exact, rel=1e-6)
    assert parameter.grad.double().norm().item() == pytest.approx(2.0, rel=1e-5)


def parameters(count: int) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones(2)
    return made


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1


def test_every_group_is_cleared_also_one_that_came_later() -> None:
    first, second, third = parameters(3)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.1}], lr=1.0)
    optimizer.add_param_group({"params": [third]})
    clear_gradients(optimizer)
    assert first.grad is second.grad is third.grad is None


def test_parameters_of_others_keep_their_gradients() -> None:
    own, other = parameters(2)
    clear_gradients(torch.optim.AdamW([own]))
    assert own.grad is None
    assert other.grad is not None


def test_an_optimizer_with_its_own_zero_grad_is_asked() -> None:
    # clear_gradients calls zero_grad if the class of the optimizer overrides it
    (parameter,) = parameters(1)
    optimizer = Counting([parameter], lr=1.0)
    clear_gradients(optimizer)
    assert optimizer.calls == 1
    assert parameter.grad is not None


def test_a_zero_grad_that_was_replaced_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # clear_gradients calls zero_grad if it was assigned to the optimizer
    (parameter,) = parameters(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    calls: list[str] = []
    monkeypatch.setattr(optimizer, "zero_grad", lambda: calls.append("zero_grad"))
    clear_gradients(optimizer)
    assert calls == ["zero_grad"]
    assert parameter.grad is not None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_prepared_optimizer_sets_to_none_or_to_zero(set_to_none: bool) -> None:
    (parameter,) = parameters(1)
    optimizer = Accelerator().prepare(torch.optim.SGD([parameter], lr=1.0))
    optimizer.zero_grad(set_to_none)
    if set_to_none:
        assert parameter.grad is None
    else:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [0.0, 0.0]


def test_untoggle_restores_requires_grad() -> None:
    # toggle sets requires_grad to False for parameters of other optimizers only; untoggle restores it
    own, both, other, frozen = made = parameters(4)
    frozen.requires_grad_(False)
    one = torch.optim.SGD([own, both], lr=1.0)
    two, three = torch.optim.SGD([both, other], lr=1.0), torch.optim.SGD([other, frozen], lr=1.0)
    before = toggle(one, [one, two, three])
    assert [p.requires_grad for p in made] == [True, True, False, False]
    untoggle(before)
    assert [p.requires_grad for p in made] == [True, True, True, False]
