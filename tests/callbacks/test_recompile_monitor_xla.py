"""`RecompileMonitor` in runs with real graphs of XLA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.xla.xla_runs import run_xla
from torch import Tensor, nn

from trainkit import Trainer, TrainModule
from trainkit.callbacks import RecompileMonitor
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.registry import load_strategy

pytestmark = pytest.mark.xla


class Reading(TrainModule):
    """Reads its loss in a step: "never", in the "fifth" step, or in "each". "masked": the fifth step indexes by a mask."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.steps = reads, 0
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.layer(batch["x"]).square().mean()
        if self.reads == "each" or (self.reads == "fifth" and self.steps == 5):
            loss.item()
        if self.reads == "masked" and self.steps == 5:
            loss = loss + batch["x"][batch["x"] > 0].mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch["x"]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """`samples` sequences; those from index `change` on are longer."""

    def __init__(self, samples: int, change: int) -> None:
        self.samples, self.change = samples, change

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(16 if index < self.change else 24, 4)}


def fit(reads: str = "never", samples: int = 44, change: int = 44, devices: int = 1, **arguments: Any) -> dict[str, Any]:
    """Fit two epochs in batches of eight; returns the warnings, the counts and the logged values."""
    monitor = RecompileMonitor()
    trainer = Trainer(
        strategy="xla",
        devices=devices,
        callbacks=[monitor],
        max_epochs=2,
        log_every_n_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    loaders = [torch.utils.data.DataLoader(Sequences(samples, change), batch_size=8 // devices) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Reading(reads), *loaders)
    return {
        "warnings": [str(warning.message) for warning in caught if "RecompileMonitor" in str(warning.message)],
        "counts": dict(monitor.counts),
        "total": trainer.strategy.compilations,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items() if "compilations" in name},
    }


@pytest.mark.parametrize("devices", [1, 4])
def test_a_clean_run(devices: int) -> None:
    """A run with a short last batch, evaluations and log boundaries has no warnings."""
    found = run_xla(fit, devices=devices) if devices == 1 else run_xla(fit, "never", 44, 44, devices, devices=devices)
    assert found["warnings"] == []
    assert found["counts"] == {"evaluation": 2, "warm-up": 2, "expected": 1}
    assert found["logged"] == {"compilations/total": found["total"], "compilations/unexpected": 0.0}
    assert found["total"] == 5


def accumulating() -> dict[str, Any]:
    return fit(accumulate_grad_batches=4, gradient_clip_val=1.0)


def test_a_clean_run_that_accumulates() -> None:
    found = run_xla(accumulating)
    assert found["warnings"] == []
    assert not found["counts"].keys() - {"evaluation", "warm-up", "expected"}


def test_a_change_of_length_is_warned_of() -> None:
    found = run_xla(fit, "never", 48, 32)
    [text] = found["warnings"]
    assert "1 graph was compiled after warm-up in step 5 (epoch 0, batch_idx 4)" in text
    assert "batch['x']: [8, 16, 4] → [8, 24, 4]" in text
    assert found["logged"]["compilations/unexpected"] == 1.0


def test_a_value_that_is_read_in_a_step_is_named() -> None:
    [text] = run_xla(fit, "fifth")["warnings"]
    assert "in step 5 (epoch 0, batch_idx 4). A value was read before the step was complete, by .item()" in text


def test_an_operation_that_is_left_to_the_host_is_named() -> None:
    [text] = run_xla(fit, "masked")["warnings"]
    assert "in step 5" in text
    assert "aten::nonzero" in text


def with_its_notices() -> tuple[dict[str, Any], list[str]]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    return fit("each"), records


def test_a_value_that_is_read_in_each_step_is_named() -> None:
    """Nothing is compiled for it after warm-up, so there is a notice and no warning."""
    found, records = run_xla(with_its_notices)
    assert found["warnings"] == []
    [text] = [record for record in records if "a step runs in 2 graphs" in record]
    assert "by .item()" in text


def hints() -> list[dict[str, int]]:
    """The hints of a step in one graph, of one that is read, of one that is printed, and of an operation on the host."""
    strategy = load_strategy("xla")()
    strategy.join(RequestedDevices())
    tensor = torch.ones(4).to(strategy.device)

    def of(work: Callable[[Tensor], Any]) -> dict[str, int]:
        strategy.sync()
        before = strategy.compilation_hints()
        kept = work(tensor)
        after = kept + 1 if isinstance(kept, Tensor) else tensor + 2
        strategy.sync()
        assert after.shape
        return {name: n - before.get(name, 0) for name, n in strategy.compilation_hints().items() if n != before.get(name, 0)}

    return [of(work) for work in (torch.exp, lambda x: x.sum().item(), lambda x: str(x.cos()), lambda x: x[x > 0])]


def test_what_the_strategy_counts() -> None:
    one, read, printed, left = run_xla(hints)
    assert one == {"graphs": 1}
    assert read == {"graphs": 2, "reads": 1}
    assert printed == {"graphs": 2}
    assert left == {"graphs": 2, "aten::nonzero": 1}
