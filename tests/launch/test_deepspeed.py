"""Scripts started by DeepSpeed's own launcher: the ranks of their processes, and their exit codes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers.support import run_python
from helpers.worlds.worlds import free_port

pytestmark = pytest.mark.skipif(os.name != "posix", reason="DeepSpeed is for Linux")

# A user's script. `parse` is the code that reads its arguments.
TRAIN = """\
import argparse, sys
from helpers.runs.tiny import TinyModule, tiny_loader
from trainkit import Trainer
{parse}
trainer = Trainer(strategy="zero2", accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False)
trainer.fit(TinyModule(), tiny_loader(batch_size=2))
world = trainer.strategy.world
facts = (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes, trainer.global_step)
print(f"facts {{facts}}\\n", end="", flush=True)
"""
PARSERS = {
    "none": "assert any(argument.startswith('--local_rank=') for argument in sys.argv)",
    "argparse": (
        "import deepspeed\n"
        "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\n"
        "parser.add_argument('--local_rank', type=int, default=-1)\n"
        "args = parser.parse_args()\n"
        "assert args.local_rank in (0, 1) and args.deepspeed and args.deepspeed_config == 'ds.json'"
    ),
}
JOIN = """\
import sys, time
from datetime import timedelta
from trainkit.launch.joining import join
from trainkit.distributed.requested_devices import RequestedDevices
world = join(RequestedDevices("cpu"), timeout=timedelta(seconds=60))
sys.exit(7 if world.rank == 1 else time.sleep(60))
"""


def deepspeed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `deepspeed --num_gpus 2` with these arguments."""
    port = f"--master_port={free_port()}"
    tests = Path(__file__).parents[1]
    env = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]])}
    return run_python("-m", "deepspeed.launcher.runner", "-q", "--num_gpus=2", port, *arguments, env=env)


@pytest.mark.parametrize(
    "parse",
    [pytest.param(PARSERS["argparse"], marks=pytest.mark.slow), pytest.param(PARSERS["none"], marks=pytest.mark.zero)],
    ids=["argparse", "none"],
)
def test_a_script_trains(parse: str, tmp_path: Path) -> None:
    """Started by `deepspeed`, a script trains on two processes without any code for this launcher."""
    (tmp_path / "script.py").write_text(TRAIN.format(parse=parse))
    done = deepspeed("script.py", "--deepspeed", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr
    facts = sorted(line for line in done.stdout.splitlines() if line.startswith("facts"))
    assert facts == ["facts (0, 2, 0, 2, 0, 1, 2)", "facts (1, 2, 1, 2, 0, 1, 2)"]
    assert done.stderr.count("2 processes, started by deepspeed (LOCAL_SIZE, CROSS_RANK and CROSS_SIZE are set).") == 1


@pytest.mark.zero
def test_the_exit_code_is_that_of_the_script(tmp_path: Path) -> None:
    """`deepspeed --no_local_rank`, which passes no `--local_rank` to the script, exits with the exit code of the script."""
    (tmp_path / "script.py").write_text(JOIN)
    done = deepspeed("--no_local_rank", "script.py")
    assert done.returncode == 7, done.stderr
    assert "trainkit: 2 processes, started by deepspeed" in done.stderr


@pytest.mark.zero
def test_an_argument_that_is_wrong(tmp_path: Path) -> None:
    """A `--local_rank` in the user's command line overrides the launcher's and is an error if it contradicts the variables."""
    (tmp_path / "script.py").write_text(JOIN)
    done = deepspeed("script.py", "--local_rank=0")
    assert done.returncode == 1
    assert "--local_rank=0, but the local rank of this process is 1 according to deepspeed" in done.stderr


def test_the_argument_alone(tmp_path: Path) -> None:
    """`--local_rank=1` without a launcher's variables is an error that shows the command to use."""
    (tmp_path / "script.py").write_text(JOIN)
    done = run_python("script.py", "--local_rank=1", cwd=tmp_path)
    assert done.returncode == 1
    assert "trainkit launch --nproc-per-node N script.py" in done.stderr.splitlines()[-1]
