"""Nothing that comes from a checkpoint is imported or called, at any entry point that reads one."""

from __future__ import annotations

import json

import pytest
from helpers.support import run_python

# New processes: an audit hook cannot be removed, and what is imported stays imported.
_LOADS = "from helpers.resume.hostile_loading import run; run({entries}, {each})"


def done(entries: list[str], each: bool = False, before: str = "") -> tuple[list[str], int]:
    """What hostile checkpoints made a process do, and how many were loaded."""
    child = run_python(before + _LOADS.format(entries=entries, each=each), env={"PYTHONWARNINGS": "ignore"}, timeout=900)
    assert child.returncode == 0, child.stderr[-3000:]
    *lines, last = child.stdout.splitlines()
    return lines, json.loads(last)["loads"]


ARMED = """
import helpers.resume.hostile_loading as hostile
import importlib, os, socket, subprocess
def reached(path):
    if os.path.exists(path + "/../1") and not os.path.exists("warm"):
        {}
hostile.ENTRIES["module"] = reached
"""


@pytest.mark.parametrize(
    "act, seen",
    [
        ("importlib.import_module('planted_new')", "planted_new"),
        ("importlib.import_module('planted_old').run()", "planted_old-called"),
        ("os.system('true')", "os.system"),
        ("subprocess.run(['true'])", "subprocess.Popen"),
        ("open('evil.yaml').close()", "evil.yaml"),
        ("open('../outside', 'w').close()", "outside"),
        ("hostile.Victim(encoder=hostile.nn.Identity())", "reached"),
    ],
)
@pytest.mark.slow
def test_what_is_done_is_seen(act: str, seen: str) -> None:
    """The test of the tests below: an entry point that follows a checkpoint is found."""
    lines, _ = done(["module"], before=ARMED.format(act))
    assert seen in "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries",
    [
        *(["module", "base", "data", "base data"], ["cli"], ["cli subclass", "cli class"], ["cli fit"]),
        *(["fit", "validate", "test", "predict"], ["accelerator", "reader", "weights"]),
        *(["ls", "show", "verify", "diff", "export"], ["import"]),
    ],
)
def test_nothing_is_done(entries: list[str]) -> None:
    lines, loads = done(entries)
    assert lines == []
    assert loads >= 18 * len(entries)


@pytest.mark.slow
def test_nothing_is_done_by_any_argument_alone() -> None:
    """A refused argument hides what others do, so each is tried alone too."""
    lines, loads = done(["module"], each=True)
    assert lines == []
    assert loads > 1500
