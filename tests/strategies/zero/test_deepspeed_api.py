"""DeepSpeed under trainkit: its output, the exit code of the process, and saving after the run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from helpers.support import run_python, without_gloo

from trainkit.errors import MissingPackageError
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero import deepspeed_api as _deepspeed_api
from trainkit.strategies.zero.deepspeed_api import _MARK, _clear, require_async_io

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


@pytest.mark.slow
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


# ----------------------------------------------------------------------------------------------------------- extensions


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(
        MissingPackageError,
        match=r"needs a C\+\+ compiler, and 'no-such-compiler -O2' is not installed. Install one: apt install g\+\+",
    ):
        require_async_io()


def test_missing_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """libaio's headers are missing. Creating the strategy raises the error."""
    monkeypatch.setenv("CXX", "g++ -nostdinc")
    with pytest.raises(MissingPackageError, match="libaio with its headers, which is not installed.*apt install libaio-dev"):
        ZeROStrategy(stage=3, offload_optimizer="nvme", nvme_path=tmp_path)


def test_prebuilt_extensions_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_deepspeed_api, "_prebuilt", lambda name: name == "async_io")
    require_async_io()


def test_without_a_lock(tmp_path: Path) -> None:
    _clear(tmp_path)


def test_the_lock_of_a_killed_process_of_trainkit(tmp_path: Path) -> None:
    """It is removed immediately, since the caller holds the lock that excludes live processes."""
    (tmp_path / "lock").touch()
    (tmp_path / _MARK).touch()
    _clear(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_an_abandoned_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "half.o").touch()
    for name in ("lock", "half.o"):
        os.utime(tmp_path / name, (time.time() - 3600, time.time() - 3600))
    _clear(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_lock_of_a_process_that_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    waiting = threading.Thread(target=_clear, args=(tmp_path,))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert lock.exists()
    lock.unlink()
    waiting.join()
    assert f"waiting for another program that compiles in {tmp_path}" in caplog.text
