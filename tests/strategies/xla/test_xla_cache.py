"""`XLAStrategy(compilation_cache=)`: compiled graphs are stored, and later runs reuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.xla.xla_runs import run_xla
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer, TrainModule

pytestmark = pytest.mark.xla


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: str | None) -> str:
    """Train for two optimizer steps; returns the error message, or an empty string."""
    from trainkit.errors import ConfigurationError
    from trainkit.strategies import XLAStrategy

    try:
        trainer = Trainer(
            strategy=XLAStrategy(compilation_cache=folder),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except ConfigurationError as error:
        return str(error)
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)), batch_size=4))
    return "" if trainer.global_step == 2 else "not trained"


def several_times(*folders: str | None) -> list[str]:
    return [fit(folder) for folder in folders]


def test_compiled_graphs_are_kept(tmp_path: Path) -> None:
    kept = tmp_path / "new" / "graphs"
    assert run_xla(several_times, str(kept), str(kept), None) == ["", "", ""], "of runs in one process each may name it"
    found = sorted(kept.iterdir())
    assert found
    assert run_xla(several_times, str(kept)) == [""]
    assert sorted(kept.iterdir()) == found, "the same graphs in another process"


def test_a_late_or_unusable_cache_folder(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    said = run_xla(several_times, first, second)
    assert said[0] == ""
    assert "XLA's runtime has already started. Create the Trainer or Accelerator before the first tensor" in said[1]
    (tmp_path / "file").touch()
    [said] = run_xla(several_times, str(tmp_path / "file" / "graphs"))
    assert "graphs' cannot be used, " in said
