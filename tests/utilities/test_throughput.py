"""`measure_flops`."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.utilities import measure_flops


def test_forward_and_backward() -> None:
    with torch.device("meta"):
        net, x = nn.Linear(4, 2, bias=False), torch.randn(8, 4)
    forward = 2 * 8 * 4 * 2
    assert measure_flops(net, lambda: net(x)) == forward
    assert measure_flops(net, lambda: net(x), torch.sum) == 2 * forward  # the input needs no gradient
