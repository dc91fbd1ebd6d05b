"""Steps of a module that `FSDPStrategy` must run as the user wrote them."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Noisy
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import WorldError, run_world
from helpers.zero.zero_cases import Plain, strategy
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit import Callback
from trainkit.errors import Preempted
from trainkit.trainer.trainer import Trainer


class Counts(Plain):
    """Overrides `backward`. Its loss is a view, and so is another tensor that its step returns."""

    calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx).expand(2)
        return {"loss": loss[0], "both": loss}

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        super().backward(loss, *args, **kwargs)


def calls() -> tuple[int, list[float]]:
    """The number of backward passes in this process, and the parameters at the end."""
    module = Counts()
    trainer = Trainer(strategy=strategy("fsdp"), max_epochs=1, seed=0, logger=False, enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about views
        trainer.fit(module, DataLoader(Noisy(3), batch_size=1))
    return module.calls, torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def test_views_give_no_warning_and_a_rank_without_data_runs_the_backward_of_the_module() -> None:
    """3 samples on 2 ranks: rank 1 has no data in its second step. `backward` may open a context such as `loss_parallel`."""
    (first, parameters), (second, same) = run_world(2, calls)
    assert first == second == 2
    assert parameters == same


class Signaled(Callback):
    """Rank 1 gets SIGTERM in its fourth optimizer step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 4:
            signal.raise_signal(signal.SIGTERM)


def preempted(folder: Path) -> list[list[float]]:
    """The parameters after an undisturbed run, and after one that was stopped and resumed."""
    found = []
    for path, stops in (("whole", False), ("stopped", True)):
        loader = DataLoader(Noisy(24), batch_size=2, shuffle=True)
        options = {
            "strategy": strategy("fsdp"),
            "max_epochs": 2,
            "default_root_dir": folder / path,
            "enable_checkpointing": True,
        }
        if stops:
            with pytest.raises(Preempted):
                make_trainer(Signaled(), **options).fit(Plain(), loader)
        module = Plain()
        trainer = make_trainer(**options)
        trainer.fit(module, loader, ckpt_path="auto" if stops else None)
        assert trainer.global_step == 12
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]).tolist())
    return found


def test_sigterm_to_one_rank_stops_all_and_the_next_run_continues(run_dir: Path) -> None:
    for whole, resumed in run_world(2, preempted, run_dir):
        assert whole == resumed


class Silent(Plain):
    """Rank 1 has no loss in its second step, and does not call the model for it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if self.global_rank == 1 and batch_idx == 1:
            return None
        return super().training_step(batch, batch_idx)


class Empty(Plain):
    """Created without values."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = Plain().net
            self.register_buffer("positions", torch.arange(3), persistent=False)


def fit(make: type[Plain]) -> None:
    trainer = Trainer(strategy=strategy("fsdp"), max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(make(), DataLoader(Noisy(8), batch_size=1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Silent, "there is no loss, and the model was not called, but the other ranks wait for its forward"),
        (Empty, "net.0.weight, net.0.bias, net.3.weight, net.3.bias, positions: created on the meta device, and never filled"),
    ],
    ids=["no-forward", "no-values"],
)
def test_what_would_hang_or_train_on_garbage_is_an_error(make: type[Plain], text: str) -> None:
    with pytest.raises(WorldError, match=text):
        run_world(2, fit, make)
