"""DeepSpeed's own, compiled Adam trains like torch's Adam, and their states are interchangeable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, RegressionModule, train, trained
from helpers.runs.replicas import together
from helpers.zero.zero_cases import Wide, strategy
from helpers.zero.zero_resume import SaveAfterTen, SaveAtOnce, tensors
from torch import Tensor

from trainkit.checkpoint import open_checkpoint
from trainkit.optim.optimizer_copy import count_slots
from trainkit.strategies import ZeROStrategy

pytestmark = pytest.mark.zero


class Torchs(RegressionModule):
    kind = "AdamW"

    def configure_optimizers(self) -> Any:
        import deepspeed.ops.adam

        kind = torch.optim.AdamW if self.kind == "AdamW" else getattr(deepspeed.ops.adam, self.kind)
        return kind(self.parameters(), lr=min(1e-3, self.rates["adamw"]), betas=(0.9, 0.98), weight_decay=0.1)


class DeepSpeeds(Torchs):
    kind = "DeepSpeedCPUAdam"


class WideTorchs(Torchs, Wide): ...


class WideDeepSpeeds(DeepSpeeds, Wide): ...


def case(make: type) -> Case:
    return Case(samples=75, make=make, arguments={"precision": "32-true", "max_epochs": -1, "max_steps": 20})


@pytest.mark.parametrize("kind", ["zero1-cpu", "zero2-cpu", "zero3-cpu", "zero3-both-cpu", "zero3-both-nvme"])
@pytest.mark.parametrize("size", [1, 2])
def test_parity(kind: str, size: int) -> None:
    mine, theirs = (WideDeepSpeeds, WideTorchs) if "nvme" in kind else (DeepSpeeds, Torchs)
    losses = trained(case(mine), size, strategy=strategy(kind)).losses
    assert losses == pytest.approx(trained(case(theirs), size, strategy=strategy(kind)).losses, rel=2e-6)


def save(make: type, kind: str, folder: Path) -> None:
    train(case(make), SaveAfterTen(folder), strategy=strategy(kind))


def go_on(make: type, kind: str, source: Path, copy: Path) -> dict[Any, float]:
    return train(case(make), SaveAtOnce(copy), strategy=strategy(kind), ckpt_path=str(source)).losses


@pytest.mark.parametrize(
    "here, there", [("zero2-cpu", "auto"), ("zero3-cpu", "ddp"), ("auto", "zero3-cpu"), ("ddp", "zero2-cpu")]
)
def test_a_state_for_both(here: str, there: str, run_dir: Path) -> None:
    """Saved with one, resumed with the other, bit for bit, with the losses of an uninterrupted run."""
    own = {name: DeepSpeeds if name.startswith("zero") else Torchs for name in (here, there)}
    together(1 if here == "auto" else 2, {"save": (save, own[here], here, run_dir / "saved")})
    ends = together(1 if there == "auto" else 2, {"on": (go_on, own[there], there, run_dir / "saved", run_dir / "copy")})["on"]
    saved, again = tensors(run_dir / "saved"), tensors(run_dir / "copy")
    assert saved.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    expected = trained(case(Torchs), 1).losses
    losses: dict[Any, float] = {}
    for end in ends:
        losses |= end
    assert losses == pytest.approx({key: loss for key, loss in expected.items() if key[0] >= 10}, rel=2e-6)
    state = open_checkpoint(run_dir / "saved").read({"state"}).state
    assert state["optimizers"][0]["class"] == "AdamW"


def test_a_copy_does_not_affect_the_optimizer() -> None:
    """`count_slots` steps a copy and deletes it, which must not destroy the compiled part of DeepSpeed's optimizer."""
    module = DeepSpeeds()
    optimizer = module.configure_optimizers()
    assert count_slots(optimizer) == 2
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(isinstance(parameter, Tensor) and bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


def test_the_configuration_chooses_it() -> None:
    """With an offloaded optimizer, "Adam" is DeepSpeed's own Adam, as in DeepSpeed. "torch_adam" chooses torch's."""
    told = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }
    module = RegressionModule()
    made = ZeROStrategy(config=told).run_settings._optimizer_of(module, torch.device("cpu"))
    assert type(made).__name__ == "DeepSpeedCPUAdam"
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (1e-3, 0.0)
    told["optimizer"]["params"]["torch_adam"] = True
    assert type(ZeROStrategy(config=told).run_settings._optimizer_of(module, torch.device("cpu"))) is torch.optim.AdamW
    told["optimizer"]["params"]["adam_w_mode"] = False
    assert type(ZeROStrategy(config=told).run_settings._optimizer_of(module, torch.device("cpu"))) is torch.optim.Adam
