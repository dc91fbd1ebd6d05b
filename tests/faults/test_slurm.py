"""`slurm_requeue=True`: when SLURM stops a job, the run saves and then asks SLURM to requeue the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.faulting import At, Child, Watched, send

from trainkit import Callback, Trainer


def slurm(variables: dict[str, str], number: int = signal.SIGTERM, script: str = "", code: int = 143) -> tuple[str, str]:
    """Signal a run with slurm_requeue; returns what scontrol was called with, and what the run printed."""
    Path("bin").mkdir()
    scontrol = Path("bin/scontrol")
    if script:
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> called\nls runs/logs/default/version_0/checkpoints >> called\n{script}\n')
        scontrol.chmod(0o755)

    def work() -> None:
        os.environ["PATH"] = f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}"
        os.environ.update(variables)
        Requeued(more=[At("on_train_batch_end", send(number), 5)] if number else []).go()

    with Child(work) as child:
        assert child.code == code, child.output
    called = Path("called")
    return called.read_text() if called.exists() else "", child.output


class Requeued(Watched):
    """A run with `slurm_requeue=True`."""

    def trainer(self, *callbacks: Callback) -> Any:
        trainer = super().trainer(*callbacks)
        trainer._arguments.slurm_requeue = True
        return trainer


def test_it_is_off_by_default() -> None:
    assert not Trainer(accelerator="cpu")._arguments.slurm_requeue
    assert Trainer(accelerator="cpu", slurm_requeue=True)._arguments.slurm_requeue, "what the tests below set"


def test_slurm_runs_the_job_again() -> None:
    called, output = slurm({"SLURM_JOB_ID": "77"}, script="true")
    assert called.splitlines()[0] == "requeue 77"
    assert "step-00000005" in called, "it is saved by then"
    assert "77" in output


def test_slurm_runs_a_task_of_an_array_again() -> None:
    variables = {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}
    called, _ = slurm(variables, signal.SIGUSR1, script="true")
    assert called.splitlines()[0] == "requeue 77_2"


@pytest.mark.parametrize("script", ["", "echo no such job >&2; exit 1"])
def test_slurm_refuses(script: str) -> None:
    """If scontrol is missing or fails, a warning names the job, and the run exits as without slurm_requeue."""
    _, output = slurm({"SLURM_JOB_ID": "77"}, script=script)
    assert "TrainkitWarning" in output
    assert "requeue job 77" in output
    assert not script or "no such job" in output


def test_no_job_of_slurm() -> None:
    # outside of a SLURM job, scontrol is not called, and the output names the missing variable SLURM_JOB_ID
    called, output = slurm({}, script="true")
    assert (called, "SLURM_JOB_ID" in output) == ("", True)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (0, 0)])
def test_slurm_is_asked_after_a_preemption_only(number: int, code: int) -> None:
    # no requeue after Ctrl-C, and none after a run that has finished
    assert slurm({"SLURM_JOB_ID": "77"}, number, "true", code)[0] == ""
