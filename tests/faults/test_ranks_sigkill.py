"""SIGKILL to one of several processes under `trainkit launch`: all restart, and the run ends like an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.launched import Launched
from helpers.resume.disturbed import MICRO_BATCHES, Training, drawn_moments, end_of, logged, newest, started
from helpers.resume.elastic import journal
from helpers.support import run_python

ROWS = -(-MICRO_BATCHES // 2)  # micro-batches of the main process in an epoch, on two processes
LAUNCH = ("-m", "trainkit", "launch", "--nproc-per-node", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
EARLY = 0.2  # fraction of the kills that happen while the processes start


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("sigkill") / "plain"
    with started(Training(str(folder), keep=100)) as running:
        assert running.codes() == [0, 0], running.output
    return folder


def entries(path: Path) -> list[dict[str, Any]]:
    """The micro-batches that a process recorded after one start."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(folder: Path, attempt: int) -> int:
    """Number of micro-batches that the main process has done since the beginning of the run, as recorded after one start."""
    path = folder / f"journal-{attempt}-0.jsonl"
    written = path.read_text().splitlines() if path.exists() else []
    if not written:
        return 0
    epoch, m = divmod(json.loads(written[-1])["m"], 10**6)
    return int(epoch * ROWS + m // 2 + 1)


def kill(running: Launched, attempt: int, moment: tuple[int, float], draw: random.Random) -> bool:
    """Kill a random process at a given moment after a start; returns whether the job was still running."""
    until, delay = moment
    if not running.until(lambda: len(running.pids(attempt)) == 2, f"start {attempt}"):
        return False
    if draw.random() < EARLY:
        delay = draw.uniform(0.0, 3.0)
    elif not running.until(lambda: rows(running.folder, attempt) >= until, f"row {until} in start {attempt}"):
        return False
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):  # it has exited
        os.kill(running.pids(attempt)[draw.randrange(2)], signal.SIGKILL)
    return running.process.poll() is None


def assert_equal(folder: Path, plain: Path, since: int = 0) -> None:
    """The run did the same as the undisturbed run, also in the steps that were repeated.

    Args:
        folder: Folder of the run that was killed.
        plain: Folder of the undisturbed run.
        since: Number of optimizer steps in the checkpoint that the killed run first resumed from.
    """
    expected = {key: entry for key, entry in journal(plain).items() if key[0] >= since}
    assert journal(folder) == expected
    for path in folder.glob("journal-*"):
        for entry in entries(path):
            place = {"step": entry["step"], "m": entry["m"]}
            assert entry == {**place, **expected[entry["step"], entry["m"]]}, path.name
    assert end_of(folder) == end_of(plain)
    rows_since = [[row for row in logged(one) if not since or "train_loss_step" in row] for one in (folder, plain)]
    assert rows_since[0] == rows_since[1][since:]
    newest(folder)


def assert_little_lost(folder: Path) -> None:
    """After a kill at most two optimizer steps are repeated: the one in progress, and the one whose save was in progress."""
    starts = sorted(int(path.stem.split("-")[1]) for path in folder.glob("journal-*-0.jsonl"))
    done = [found for start in starts if (found := entries(folder / f"journal-{start}-0.jsonl"))]
    for before, after in pairwise(done):
        assert 0 <= before[-1]["step"] + 1 - after[0]["step"] <= 2


def killed(
    plain: Path,
    kills: int,
    seed: int,
    launcher: tuple[str, ...] = LAUNCH,
    ckpt_path: str | None = None,
    since: int = 0,
    workers: int = 0,
) -> None:
    """Kill processes of jobs that restart, until there were `kills` restarts; each job must end like the undisturbed run."""
    draw = random.Random(seed)
    hits = jobs = 0
    while hits < kills:
        jobs += 1
        assert jobs <= 3 * kills, "the kills come too late"
        training = Training(f"runs{jobs}", ckpt_path=ckpt_path, workers=workers)
        with Launched(training, *launcher, "--max-restarts", "30") as running:
            for attempt, moment in enumerate(drawn_moments(draw, plain, kills - hits, 2 * max(1, since))):
                if not kill(running, attempt, moment, draw):
                    break
            assert running.code() == 0, running.output
        hits += len(list(running.folder.glob("pid-*-0"))) - 1
        assert_little_lost(running.folder)
        assert_equal(running.folder, plain, since)


def test_killed_at_random_moments(plain: Path) -> None:
    killed(plain, 1, 1)


SINGLE = """
import os, pathlib, signal, time, torch
from trainkit import Callback, Trainer, TrainModule

class Kill(Callback):
    def on_train_start(self, trainer, module):
        with open("starts", "a") as file:
            print(trainer.global_step, file=file)

    def on_train_batch_end(self, trainer, module, *given):
        if trainer.global_step == 6 and len(pathlib.Path("starts").read_text().split()) == 1:
            while not list(pathlib.Path("trainkit_runs").rglob("[!.]*/manifest.sha256")):  # until the save is complete
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

Trainer(max_epochs=3, callbacks=Kill(), logger=False, enable_progress_bar=False).fit(Module(), [torch.ones(1, 2)] * 4)
"""


@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN], ids=["trainkit", "torchrun"])
def test_a_single_process_resumes_after_a_restart(launcher: tuple[str, ...], run_dir: Path) -> None:
    (run_dir / "script.py").write_text(SINGLE)
    one = tuple("1" if argument == "2" else argument for argument in launcher)
    done = run_python(*one, "--max-restarts", "1", "script.py", cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert (run_dir / "starts").read_text().split() == ["0", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_twenty_random_moments(plain: Path, seed: int) -> None:
    killed(plain, 5, 10 + seed, workers=2 * (seed % 2))


@pytest.mark.slow
def test_killed_under_torchrun(plain: Path) -> None:
    killed(plain, 5, 20, TORCHRUN)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 5])
def test_the_newest_counts_and_not_the_one_that_was_named(plain: Path, kills: int) -> None:
    """The script names an older checkpoint: the first start resumes from it, each restart from the newest of the run."""
    older = newest(plain).path.with_name("step-00000004")
    killed(plain, kills, 2, ckpt_path=str(older), since=4)


def test_killed_and_resumed_on_another_number_of_processes(run_dir: Path) -> None:
    """Without restarts, the job exits when a process is killed. Three processes then resume with the same global batches."""
    draw = random.Random(3)
    whole, broken = Training("whole", window=12), Training("broken", window=12)
    with started(whole) as running:
        assert running.codes() == [0, 0], running.output
    with Launched(broken, *LAUNCH) as job:
        assert kill(job, 0, drawn_moments(draw, "whole", 1, 6)[0], draw)
        assert job.code() == 137, job.output
        assert "restarting" not in job.output
    with started(broken, attempt=1, size=3) as running:
        assert running.codes() == [0, 0, 0], running.output
        assert "resuming from" in running.output
    expected, lines = journal(run_dir / "whole"), journal(run_dir / "broken")
    assert lines.keys() == expected.keys()
    for key, entry in expected.items():
        assert (lines[key]["ids"], lines[key]["seen"]) == (entry["ids"], entry["seen"])
        assert float.fromhex(lines[key]["loss"]) == pytest.approx(float.fromhex(entry["loss"]), rel=1e-11)
    end_of("broken", 3)
