"""Install a wheel in a new virtual environment and use it there: `python tests/helpers/try_wheel.py dist/*.whl`.

Nothing is downloaded: the new environment uses the dependencies (torch, numpy, …) of the environment of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

FIT = """
import sys
import torch
import trainkit.callbacks, trainkit.checkpoint, trainkit.loggers, trainkit.strategies, trainkit.utils
from trainkit import Trainer, TrainModule

class Linear(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for module in (trainkit, trainkit.callbacks, trainkit.checkpoint, trainkit.loggers, trainkit.strategies, trainkit.utils):
    assert module.__file__.startswith(sys.prefix), module.__file__
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False)
trainer.fit(Linear(), [torch.randn(8, 4) for _ in range(3)])
assert trainer.global_step == 6
"""


def try_wheel(wheel: Path, folder: Path) -> str:
    """Install the wheel in a new environment in `folder` and use it; returns what the programs printed.

    Raises:
        RuntimeError: A command failed; the message has its output.
    """
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    bin = environment / ("Scripts" if os.name == "nt" else "bin")
    python = str(bin / "python")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--no-warn-script-location"]
    printed = _run([sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel.resolve())], folder)
    # The .pth file puts these folders after the folder of the wheel. It has no effect on editable installs in them: Python
    # does not read the .pth files there.
    (site,) = environment.rglob("site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in others))
    printed += _run([str(bin / "trainkit"), "--version"], folder)
    return printed + _run([python, "-c", FIT], folder)


def _run(command: list[str], folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:6])} … ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(try_wheel(Path(sys.argv[1]), Path(scratch)), end="")
