"""The part of ``trainkit launch --hostfile`` on a machine: it begins when it is told to, and says how its job has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.patience import PATIENCE
from helpers.support import run_python

from trainkit.cli.launch_child import main
from trainkit.launch.lifeline import GO, MARK, versions

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
PART = ["-m", "trainkit.cli.launch_child"]


def test_a_part(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:]); sys.exit(3)")
    pipe = subprocess.PIPE
    command = [sys.executable, *PART, "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "1", "script.py", "--x"]
    part = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert part.stdin is not None
    assert part.stdout is not None
    assert part.stdout.readline() == f"{MARK}{json.dumps(versions())}\n"
    part.stdin.write(f"{GO}\n")
    part.stdin.flush()
    assert part.stdout.read() == f"rank 0 ['--x']\n{MARK}{json.dumps({'code': 3})}\n"
    assert part.communicate(timeout=PATIENCE)[1] == ""
    assert part.returncode == 3


def test_a_place_to_meet_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that ssh alone has, in its own configuration."""
    assert main(["--nnodes", "2", "--master-addr", "no.such.host.invalid", "script.py"]) == 2
    said = capsys.readouterr().err
    assert "does not know 'no.such.host.invalid', where the machines are to meet: " in said
    assert said.endswith("Name the first one as the others know it: --master-addr HOST\n")


def test_a_part_without_a_starter() -> None:
    """Its input, which is at its end, says that there is nobody."""
    done = run_python(*PART, "--nnodes", "1", "script.py", "--master-addr")
    assert done.returncode in (2, -15)
    assert "launch" not in done.stderr
