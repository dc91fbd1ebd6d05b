"""Resume through the command line, exactly; and `TrainkitCLI` in several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.resume.faulting import Child
from helpers.runs.command_lines import QUIET, Configured, command_line, config_files
from helpers.runs.trainers import parameters_of, same
from helpers.support import run_python, without_gloo

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import ConfigurationError

FIT = (
    *("fit", "--trainer.max_epochs=3", "--trainer.log_every_n_steps=1", "--model.dropout=0.5", "--seed_everything=7"),
    *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2", "--ckpt_path=auto"),
    *("--optimizer=Adam", "--optimizer.lr=0.05", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.9"),
)


class Kill(Callback):
    """Kills the process in the middle of the run."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def state_of(folder: str) -> dict[str, Any]:
    """The tensors of the newest checkpoint."""
    path = max(Path(folder).rglob("step-*"), key=lambda path: path.name)
    checkpoint = open_checkpoint(path)
    return dict(checkpoint.read({"model", "optimizer"}).tensors)


def fit(folder: str, **options: Any) -> None:
    command_line(*FIT, f"--trainer.default_root_dir={folder}", **options)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers is not used")
def test_killed_and_started_again() -> None:
    """The same command line after a SIGKILL: parameters and optimizer state are bit-identical to a run without it."""
    fit("whole")
    killed = Child(lambda: fit("parts", trainer_defaults={"callbacks": [Kill()]}))
    with killed:
        assert killed.code == -signal.SIGKILL, killed.output
    fit("parts")
    whole, parts = state_of("whole"), state_of("parts")
    assert whole.keys() == parts.keys()
    for stem in whole:
        assert whole[stem].keys() == parts[stem].keys()
        assert all(torch.equal(whole[stem][name], parts[stem][name]) for name in whole[stem])
    assert config_files("parts") == ["config.yaml"]


@pytest.mark.world_size(2)
def test_two_processes() -> None:
    """The main process writes the configuration, and an error of it is raised on both."""
    run = ("fit", "--trainer.max_steps=2", "--trainer.strategy=ddp", "--trainer.logger=false")
    cli = command_line(*run)
    world = cli.trainer.strategy.world
    assert world.exchange(config_files()) == [["config.yaml"]] * 2
    weights = world.exchange([cli.model.layer[2].weight.sum().item(), cli.trainer.seed])
    assert weights[0] == weights[1]
    alone = (*run, "--trainer.enable_checkpointing=false", "--trainer.default_root_dir=one")
    command_line(*alone)
    with pytest.raises(ConfigurationError, match="is the configuration of another run"):
        command_line(*alone, "--data.samples=8")


SCRIPT = """\
from helpers.runs.command_lines import Configured, Numbers
from trainkit.cli import TrainkitCLI
if __name__ == "__main__":
    TrainkitCLI(Configured, Numbers)
"""


@pytest.mark.slow
def test_processes_that_the_script_starts() -> None:
    """`--trainer.devices=2` runs the same command line in two processes; `trainkit launch` starts it too."""
    Path("train.py").write_text(SCRIPT)
    Path("fit.yaml").write_text(yaml.dump({"trainer": {"max_epochs": 1, "devices": 2}, "model": {"dropout": 0.3}}))
    command = ("train.py", "fit", "--config=fit.yaml", "--trainer.logger=false", *QUIET)
    started = run_python(*command)
    assert started.returncode == 0, started.stderr
    assert "2 processes, started by this script" in started.stderr
    launched = run_python("-m", "trainkit", "launch", "--nproc-per-node=2", *command, "--trainer.default_root_dir=launched")
    assert launched.returncode == 0, launched.stderr
    folders = [Path(name) for name in ("trainkit_runs", "launched")]
    one, two = (Configured.load_from_checkpoint(next(folder.rglob("step-*"))) for folder in folders)
    assert one.hparams == two.hparams
    assert same(parameters_of(one), parameters_of(two))
    assert [config_files(folder) for folder in folders] == [["config.yaml"]] * 2
    wrong = run_python(*command, "--model.widht=3")
    assert (wrong.returncode, without_gloo(wrong.stdout)) == (2, "")
    assert wrong.stderr.count("Did you mean '--model.width'?") == 1, "before other processes are started"
