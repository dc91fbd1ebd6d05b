"""Ray Train and Ray Tune run the scripts of the how-to page, on two workers over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.docs.running import run_files_of
from helpers.support import run_python

pytestmark = pytest.mark.vendors

PAGE = "ray.md"

# The script of the page. Rank 1 dies once, in the second epoch.
DYING = """
import json, os
from pathlib import Path
import train_ray
from trainkit import seed_everything

def die_once(self, trainer, module, outputs, batch, batch_idx):
    died = Path(trainer.default_root_dir, "died")
    if trainer.global_step == 100 and trainer.global_rank == 1 and not died.exists():
        died.touch()
        os._exit(3)

def train(config):
    import train_ray
    seed_everything(0)
    train_ray.ReportToRay.on_train_batch_end = die_once
    train_ray.train(config)

if __name__ == "__main__":
    folder = Path("shared").absolute()
    result = train_ray.TorchTrainer(
        train,
        train_loop_config={"epochs": 3, "folder": str(folder / "digits")},
        scaling_config=train_ray.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=train_ray.RunConfig(
            name="digits", storage_path=str(folder / "ray"), failure_config=train_ray.FailureConfig(max_failures=1)
        ),
    ).fit()
    print("REPORTED", json.dumps([result.metrics, result.checkpoint.path]))
"""

# The same without Ray, and without a failure.
PLAIN = """
import json
import train_ray
from trainkit import seed_everything

def report(self, trainer, module):
    if trainer.is_global_zero:
        print("REPORTED", json.dumps({name: value.item() for name, value in trainer.callback_metrics.items()}))

seed_everything(0)
train_ray.ReportToRay.on_train_epoch_end = report
train_ray.train({"epochs": 3, "folder": "plain"})
"""

WITH_STRATEGY = """
import pathlib, runpy, sys
path = pathlib.Path("lightning_ray.py")
path.write_text(path.read_text().replace("RayDDPStrategy", sys.argv[1]))
runpy.run_path(str(path), run_name="__main__")
"""


def reported(printed: str) -> list[str]:
    return [line.partition("REPORTED ")[2] for line in printed.splitlines() if line.startswith("REPORTED ")]


def test_two_workers_of_which_one_dies(tmp_path: Path) -> None:
    """The metrics are those of a run without Ray and without a failure, bit for bit; the reported checkpoint is good."""
    (tmp_path / "dying.py").write_text(DYING, "utf-8")
    (tmp_path / "plain.py").write_text(PLAIN, "utf-8")
    (line,) = reported(run_files_of(PAGE, tmp_path, "dying.py"))
    metrics, path = json.loads(line)
    assert (tmp_path / "shared" / "digits" / "died").exists()
    launch = ("-m", "trainkit", "launch", "--cpu", "--nproc-per-node", "2")
    plain = reported(run_files_of(PAGE, tmp_path, *launch, "plain.py"))
    assert len(plain) == 3
    assert metrics == json.loads(plain[-1])
    verified = run_python("-m", "trainkit", "checkpoint", "verify", path)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize("strategy", ["RayDDPStrategy", "RayFSDPStrategy"])
def test_a_script_for_lightning_and_ray(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "with_strategy.py").write_text(WITH_STRATEGY, "utf-8")
    printed = run_files_of(PAGE, tmp_path, "with_strategy.py", strategy).splitlines()[-1]
    assert "'epoch': 1, 'step': 58" in printed
    assert printed.endswith("['checkpoint', 'checkpoint.ckpt']")


def test_trials_of_ray_tune(tmp_path: Path) -> None:
    printed = run_files_of(PAGE, tmp_path, "tune_ray.py")
    assert any(line.startswith("{'lr': 0.01}") and line.endswith("['checkpoint']") for line in printed.splitlines())
