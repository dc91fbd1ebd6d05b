"""`clear_gradients` does what `zero_grad` of torch does, but faster. `toggle` freezes what other optimizers train."""

from __future__ import annotations

import pytest
import torch

from trainkit import Accelerator
from trainkit.optim.prepared_optimizer import clear_gradients, toggle, untoggle


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
