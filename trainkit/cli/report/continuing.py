"""The section of a report that says how to continue a run: its recorded command line, and the call of `fit`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.cli.report.html import card, element, safe
from trainkit.cli.report.run_data import RunData
from trainkit.launch.environment import SCRIPT

__all__ = ["continue_blocks"]

_DIRECT = ("one process", SCRIPT)  # launchers of runs whose command line starts all processes


def continue_blocks(runs: Sequence[RunData]) -> str:
    """How each run continues from its newest checkpoint; empty if no run can."""
    blocks = []
    for run in runs:
        if run.resumable is not None:
            heading = element("h3", safe(run.label)) if len(runs) > 1 else ""
            blocks.append(card(heading + "".join(_block(run, str(run.resumable.path.resolve())))))
    return "".join(blocks)


def _block(run: RunData, newest: str) -> list[str]:
    call = _code(f"trainer.fit(module, train_dataloaders, ckpt_path={newest!r})")
    if not run.recorded:
        return [_text("In the script of the run, with the same module and data:"), call]
    start = run.recorded[-1]
    parts = []
    if run.starts[-1].finished:
        parts.append(_text(f"The run is finished: {run.starts[-1].ending}. To train for longer, change that."))
    command, given = _command(start), start.get("ckpt_path")
    if command is None:
        parts.append(_text("The run was not started by a command line that can be run again (a notebook, python -c, a test)."))
    elif given in ("auto", "last"):
        what = f"The last start passed ckpt_path={given!r} to fit, so the same command continues from the newest checkpoint"
        return [*parts, _text(f"{what}{_launched(start)}:"), command, _text("Or from this checkpoint:"), call]
    else:
        passed = "passed no ckpt_path" if given is None else f"passed ckpt_path={str(given)!r}"
        does = "begins a new run" if given is None else "resumes from there, not from the newest checkpoint"
        what = f"The last start {passed} to fit, so this command {does}, unless you change the script as below"
        parts += [_text(f"{what}{_launched(start)}:"), command]
    script = "In the script, with the same module and data, pass ckpt_path='auto' for the newest checkpoint, or this one:"
    return [*parts, _text(script), call]


def _command(start: Mapping[str, Any]) -> str | None:
    command = start.get("command")
    if not isinstance(command, list) or not command:
        return None
    lines = ["cd", str(start.get("folder", "."))], [str(argument) for argument in command]
    return element("pre", element("code", "\n".join(map(_shell, lines))))


def _shell(arguments: Sequence[str]) -> str:
    """A command for a shell, as `shlex.join` writes it; a narrow page breaks it between arguments."""
    return " ".join(element("span", safe(shlex.quote(argument)), css="argument") for argument in arguments)


def _launched(start: Mapping[str, Any]) -> str:
    """How to start the processes, if the command line is that of one of several."""
    launcher, count = str(start.get("launcher", "")), start.get("processes")
    if launcher in _DIRECT:
        return ""
    return f". Start it with {launcher} on {count} processes, as before; the command is that of each process"


def _text(text: str) -> str:
    return element("p", safe(text), css="soft")


def _code(line: str) -> str:
    return element("pre", element("code", safe(line)))
