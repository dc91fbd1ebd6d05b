"""Methods of a prepared model in your own training loop."""

from __future__ import annotations

from typing import Any

import torch
from helpers.fsdp.stack import Headed
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit import Accelerator
from trainkit.errors import ModuleError
from trainkit.strategies import FSDPStrategy


class Talkative(Headed):
    """Has methods that read, write, freeze and compute."""

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def freeze(self) -> None:
        self.head.requires_grad_(False)

    def clear(self) -> None:
        with torch.no_grad():
            self.head.bias.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def encode(self, x: Tensor) -> Tensor:
        return self.net(x)


def methods(*named: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy(forward_methods=named))
    whole = Talkative()
    model = accelerator.prepare(whole)
    optimizer = accelerator.prepare(model.configure_optimizers())
    before = whole.head.weight.full_tensor()
    x = torch.ones(2, 6)
    found: dict[str, Any] = {"count": model.count() if accelerator.is_main_process else None}
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    model.freeze()
    model.clear()
    model.eval()
    try:
        with torch.no_grad():
            found["encode"] = model.encode(x)
    except ModuleError as error:
        found["encode"] = str(error)
    accelerator.free_memory()
    found["expected"] = whole.net(x).detach()
    found["trained"] = not torch.equal(before, whole.head.weight)
    return found | {"trains": whole.head.weight.requires_grad, "bias": whole.head.bias.item()}


def test_what_methods_change_lasts() -> None:
    """Also a method that only one rank calls: it is no collective."""
    count = sum(p.numel() for p in Talkative().parameters())
    first, second = run_world(2, methods)
    assert torch.equal(first.pop("expected"), second.pop("expected"))
    assert first.pop("count") == count
    assert second.pop("count") is None
    assert first == second
    message = first.pop("encode")
    assert message.startswith("encode computes with parameters that are sharded")
    assert message.endswith("Use FSDPStrategy(forward_methods=['encode'])")
    assert first == {"trained": True, "trains": False, "bias": 0.0}


def parts_of_a_forward() -> str:
    """Train with a method that calls units, but not in a forward."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy())
    model = accelerator.prepare(Talkative())
    model(torch.ones(2, 6))
    try:
        model.module.net[1](torch.ones(2, 6))
    except ModuleError as error:
        accelerator.free_memory()
        return str(error)
    return "no error"


def test_units_are_called_in_a_forward() -> None:
    """Otherwise gradients of scalars and ignored modules would not be averaged."""
    for found in run_world(2, parts_of_a_forward):
        assert found.startswith("net.1, which FSDP shards by itself, was called outside of a forward of the model")


def test_methods_that_the_user_names_compute_with_whole_parameters() -> None:
    for found in run_world(2, methods, "encode"):
        assert torch.equal(found["encode"], found["expected"])
