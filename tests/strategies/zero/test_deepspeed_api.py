"""DeepSpeed under trainkit: its output, the exit code of the process, and saving after the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.support import run_python, without_gloo

SCRIPT = """
import ctypes, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Trainer, TrainModule

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)  # as C++ clean-up at exit may do
trainer = Trainer(
    strategy="zero3", accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    enable_model_summary=False, seed=1,
)
trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(4, 2)), 2))
libc.printf(b"written by C\\n")
print("written by Python")
sys.exit(7)
"""


def test_the_exit_code_of_the_script(run_dir: Path) -> None:
    """It is kept even if something aborts at exit. The script's output is complete, without output of DeepSpeed."""
    done = run_python("-c", SCRIPT)
    assert done.returncode == 7, done.stderr
    assert sorted(without_gloo(done.stdout).splitlines()) == ["written by C", "written by Python"]
    assert all(line.startswith("trainkit: ") for line in done.stderr.splitlines()), done.stderr


@pytest.mark.zero
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_saving_after_the_run(stage: str, run_dir: Path) -> None:
    """Saving all is an error, which says that the optimizer state is freed. The weights can be saved."""
    script = SCRIPT.replace('"zero3"', repr(stage)).split("libc.printf")[0].replace("libc.abort", "libc.fflush")
    done = run_python("-c", script + 'trainer.save_checkpoint("weights", weights_only=True)\ntrainer.save_checkpoint("all")\n')
    assert done.returncode == 1
    assert "the run is over, and ZeRO has freed the optimizer state. Save a checkpoint during the run" in done.stderr
    assert (run_dir / "weights" / "model.safetensors").exists()
    assert not (run_dir / "all").exists()
