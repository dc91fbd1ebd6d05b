"""`total_norm` of gradients in float32, compared with the norm in float64."""

from __future__ import annotations

import math

import pytest
import torch

from trainkit import Strategy
from trainkit.optim.gradient_norm import total_norm


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
