"""Output that cannot be written, in whole programs: a full disk, a pipe without a reader, a closed terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import pytest
from helpers.patience import PATIENCE
from helpers.support import ROOT, STARTUP, TESTS

# Real programs, because this is about the exit of the interpreter, which flushes what is left.
PROGRAM = """
import os, sys, time
from helpers.runs.tiny import TinyModule, tiny_loader
from trainkit import Trainer
from trainkit.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from trainkit.loggers import CSVLogger

class Module(TinyModule):
    def on_train_start(self):
        self.print("training begins", flush=True)
        while not os.path.exists("closed"):
            time.sleep(0.01)

    def on_train_epoch_end(self):
        self.print("the user's line")

bar = RichProgressBar() if sys.argv[1] == "rich" else TQDMProgressBar()
callbacks = [bar, ModelCheckpoint("saves"), EarlyStopping("val_loss", patience=9, verbose=True)]
trainer = Trainer(accelerator="cpu", max_epochs=3, callbacks=callbacks, logger=CSVLogger("logs"))
trainer.fit(Module(), tiny_loader(), tiny_loader())
trainer.validate(dataloaders=tiny_loader())
open("done", "w").close()
"""


def start(bar: str, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> subprocess.Popen[bytes]:
    Path("train.py").write_text(PROGRAM)
    path = os.pathsep.join(map(str, (ROOT, TESTS, STARTUP)))
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm"}
    return subprocess.Popen([sys.executable, "train.py", bar], stdout=stdout, stderr=stderr, env=environment)


def check_end(child: subprocess.Popen[bytes], printed: str, streams: int = 1) -> None:
    """The training was completed, which the exit code says, and the user was told once."""
    assert child.returncode == 0, printed
    assert Path("done").exists()
    assert printed.count("standard output cannot be written: ") == streams
    assert "Traceback" not in printed
    assert "Exception ignored" not in printed


def test_standard_output_on_a_full_disk(run_dir: Path) -> None:
    Path("closed").touch()
    with open("/dev/full", "wb") as full, start("tqdm", full, subprocess.PIPE) as child:
        printed = child.communicate(timeout=PATIENCE)[1].decode()
    check_end(child, printed)
    assert "[Errno 28] No space left on device" in printed


def test_standard_output_and_error_on_a_full_disk(run_dir: Path) -> None:
    Path("closed").touch()
    with open("/dev/full", "wb") as full, start("tqdm", full, full) as child:
        child.wait(timeout=PATIENCE)
    check_end(child, "", streams=0)


def test_a_pipe_whose_reader_has_ended(run_dir: Path) -> None:
    """As `python train.py | head -1`."""
    read, write = os.pipe()
    with start("tqdm", write, subprocess.PIPE) as child:
        os.close(write)
        with os.fdopen(read, "rb") as lines:
            while b"training begins" not in lines.readline():
                pass
        Path("closed").touch()
        printed = child.communicate(timeout=PATIENCE)[1].decode()
    check_end(child, printed)
    assert "[Errno 32] Broken pipe" in printed


@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_a_terminal_that_was_closed(run_dir: Path, bar: str) -> None:
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))  # otherwise there are no bars
    with start(bar, terminal, subprocess.PIPE) as child:
        os.close(terminal)
        shown = b""
        while b"training begins" not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        Path("closed").touch()
        printed = child.communicate(timeout=PATIENCE)[1].decode()
    check_end(child, printed)
    assert "[Errno 5] Input/output error" in printed
