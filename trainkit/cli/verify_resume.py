"""``trainkit verify-resume SCRIPT``: train, kill, resume, and compare with a run that nobody killed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.console import counted
from trainkit.errors import ConfigurationError, TrainkitError

__all__ = ["add_arguments", "run"]

_KILLED_LATER = 2  # updates between the save and the kill
_TAIL = 40  # lines of a script's output that are shown if it left no traceback

_HIDDEN = (
    "Something that the {what} depends on is not in the checkpoint. Look for numbers, lists and generators that are plain "
    "attributes of the module, a callback or the dataset. Fix: register_buffer(), or on_save_checkpoint and on_load_checkpoint."
)
_ADVICE = {
    "batch": "What the dataset returned depends on more than the sample. Draw with torch's, numpy.random's or random's own "
    "functions, which are seeded for each micro-batch, and not from a generator of your own, such as "
    "numpy.random.default_rng(); set a seed before data is made or divided: trainkit.seed_everything(1).",
    "order": "The position in the data was not restored. A loader of your own needs state_dict() and load_state_dict().",
    "rate": "A schedule of your own has to be in what configure_optimizers returns, so that it is saved.",
    "loss": "The batch and the learning rates are the same. " + _HIDDEN.format(what="loss"),
    "length": "An end that depends on the clock or on something that is not in the checkpoint.",
}
_NOT_REPRODUCIBLE = (
    "This was before the kill: two runs of the script differ by themselves, and no resume can be exact then. On a GPU try "
    "Trainer(deterministic=True)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``trainkit verify-resume``."""
    parser.usage = "trainkit verify-resume SCRIPT [--steps K] [--more M] [-- ARGS …]"
    parser.epilog = (
        "The script runs three times, unchanged, until its first fit() has ended: K+M updates; again, killed with SIGKILL "
        "after the checkpoint of update K; resumed to K+M. Batches, losses and learning rates of each step and the final "
        "state are compared bit for bit. Checkpoints and logs go to a temporary folder. Exit code 0: all the same, 1: not."
    )
    _add_options(parser, steps=10, more=10)
    purpose = "a Python file that calls Trainer.fit; its own arguments come after --"
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, action=_Command, help=purpose)


def _add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    parser.add_argument("--steps", metavar="K", type=int, help="updates before the checkpoint (default: 10)")
    parser.add_argument("--more", metavar="M", type=int, help="updates after it (default: 10)")
    parser.set_defaults(**defaults)


class _Command(argparse.Action):
    """SCRIPT and what comes after it: our options, and after ``--`` the arguments of the script, whatever they look like.

    argparse would take a ``--`` that follows SCRIPT for its own.
    """

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        if not values or values[0] == "--":
            parser.error("the following arguments are required: SCRIPT")
        namespace.script, *rest = values
        at = rest.index("--") if "--" in rest else len(rest)
        ours = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, allow_abbrev=False)
        _add_options(ours)
        given, unknown = ours.parse_known_args(rest[:at])
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}; the script's own come after --")
        for name, value in vars(given).items():
            if value is not None:
                setattr(namespace, name, value)
        namespace.args = rest[at + 1 :]


def run(args: argparse.Namespace) -> int:
    """Run the script three times; 0 if what was resumed is what was not, to the last bit."""
    if args.steps < 1 or args.more < 1:
        raise ConfigurationError(f"--steps and --more must be at least 1, not {args.steps} and {args.more}.")
    script = Path(args.script)
    if not script.is_file():
        raise ConfigurationError(
            f"Expected a Python file, got {args.script!r}, which is {'a folder' if script.is_dir() else 'not there'}. "
            "Fix: trainkit verify-resume train.py -- --its-own-arguments"
        )
    with tempfile.TemporaryDirectory(prefix="trainkit-verify-resume-", ignore_cleanup_errors=True) as folder:
        return _Verification(Path(folder), [str(script), *args.args], args.steps, args.more).run()


class _Verification:
    """The three runs and what comes of them."""

    def __init__(self, folder: Path, command: Sequence[str], steps: int, more: int) -> None:
        self._folder, self._command = folder, command
        self._steps, self._total = steps, steps + more
        self._kill_at = steps + min(_KILLED_LATER, more)

    def run(self) -> int:
        """Train, kill, resume, compare."""
        from trainkit.cli.resume_records import first_difference

        whole = self._whole()
        killed = self._killed()
        difference = first_difference(whole, killed, name="the second time", killed=True)
        if difference is not None:
            return self._different(difference.text, _NOT_REPRODUCIBLE, _ADVICE[difference.kind])
        resumed = self._resumed()
        if resumed is None:
            return 1
        after = [record for record in whole if record["step"] > self._steps]
        difference = first_difference(after, resumed, name="resumed", killed=False)
        if difference is not None:
            return self._different(difference.text, _ADVICE[difference.kind])
        if (text := self._end_differs()) is not None:
            return self._different(text, _HIDDEN.format(what="state"))
        missing = {path for record in whole for path, digests in record["leaves"].items() if ":" in digests[0]}
        if missing:
            print(f"Not compared, as nothing is known of its type: {', '.join(sorted(missing))} of the batches.")
        print(
            f"All bit-identical: batches, losses and learning rates of the "
            f"{counted(self._total - self._steps, 'update')} after the "
            f"resume, and at the end every parameter, buffer and optimizer slot."
        )
        return 0

    def _whole(self) -> list[dict[str, Any]]:
        outcome, _ = self._start("whole", f"{counted(self._total, 'update')} without interruption", seed=1)
        step = outcome.get("step", 0)
        if step < self._total:
            raise ConfigurationError(
                f"The script's fit ends after {counted(step, 'update')} ({outcome.get('limits')}), and {self._total} "
                f"are needed. Fix: "
                f"--steps and --more of at most {step} together, or let the script train for longer."
            )
        return self._records("whole")

    def _killed(self) -> list[dict[str, Any]]:
        text = f"again, saved at step {self._steps}, killed with SIGKILL at step {self._kill_at}"
        outcome, code = self._start("killed", text, seed=1, save_at=self._steps, kill_at=self._kill_at)
        if outcome:
            raise TrainkitError(f"This time the script's fit ended by itself, after {outcome.get('step')} updates.")
        if code not in (-getattr(signal, "SIGKILL", 9), signal.SIGTERM):
            raise TrainkitError(f"This time the script ended before step {self._kill_at}, with exit code {code}.")
        return self._records("killed")

    def _resumed(self) -> list[dict[str, Any]] | None:
        from trainkit.checkpoint.folder import list_checkpoints
        from trainkit.cli.resume_child import SAVES

        found = [one for one in list_checkpoints(self._folder / "root-killed" / SAVES) if one.problem is None]
        if len(found) != 1:
            raise TrainkitError(f"The checkpoint of step {self._steps} was not written; see the script's warnings above.")
        text = f"resumed at step {self._steps}, to step {self._total}"
        try:
            self._start("resumed", text, seed=2, root="killed", resume_from=str(found[0].path))
        except ConfigurationError as error:
            self._different(f"step {self._steps}, where it was to go on: {error}")
            return None
        return self._records("resumed")

    def _end_differs(self) -> str | None:
        from trainkit.checkpoint.reader import open_checkpoint
        from trainkit.cli.checkpoint.compare import compare_checkpoints
        from trainkit.cli.resume_child import END

        ends = [open_checkpoint(self._folder / name / END) for name in ("whole", "resumed")]
        found = list(compare_checkpoints(*ends))
        if not found:
            return None
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"the end, step {self._total}: {found[0]}{more}"

    def _different(self, text: str, *advice: str) -> int:
        print(f"DIFFERENT at {text}")
        for part in advice:
            print(part)
        return 1

    def _records(self, name: str) -> list[dict[str, Any]]:
        from trainkit.cli.resume_child import RECORDS
        from trainkit.cli.resume_records import read_records

        return read_records(self._folder / name / RECORDS)

    def _start(
        self, name: str, text: str, *, seed: int, save_at: int = 0, kill_at: int = 0, root: str = "", resume_from: str = ""
    ) -> tuple[Mapping[str, Any], int]:
        """One run; how it says it ended (nothing if it was killed), and its exit code.

        Raises:
            ConfigurationError: the script failed by itself, or cannot be verified.
        """
        from trainkit.cli.resume_child import FAILURE, OUTCOME, Task

        folder = self._folder / name
        folder.mkdir()
        task = folder / "task.json"
        own_root = self._folder / f"root-{root or name}"
        Task(str(folder), str(own_root), self._total, save_at, kill_at, resume_from, seed).write(task)
        print(f"{text} …", end=" ", flush=True)
        began = time.monotonic()
        code = _run_child([str(task), *self._command], folder / "output.txt")
        print(f"{time.monotonic() - began:.1f} s", flush=True)
        if (folder / FAILURE).exists():
            print((folder / FAILURE).read_text("utf-8"), end="", file=sys.stderr, flush=True)
            raise ConfigurationError(f"The script failed by itself, see above. First let it run: python {self._command[0]} …")
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text("utf-8")) if (folder / OUTCOME).exists() else {}
        if "refused" in outcome:
            raise ConfigurationError(f"{self._command[0]} cannot be verified: {outcome['refused']}")
        if not outcome and not (kill_at and code):
            self._show_output(folder / "output.txt")
            if code:
                raise ConfigurationError(f"The script failed by itself, with exit code {code}; its last output is above.")
            raise ConfigurationError(
                "The script ended without a Trainer.fit that came to its end. Fix: name a script that trains with a Trainer "
                "when it is run; an own loop with Accelerator cannot be verified."
            )
        return outcome, code

    def _show_output(self, path: Path) -> None:
        lines = path.read_text("utf-8", "replace").splitlines()[-_TAIL:]
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)


def _run_child(arguments: Sequence[str], output: Path) -> int:
    """Run a task in a process of its own, and end what it leaves behind; its exit code, negative for a signal."""
    # runs that are thrown away have no place in anybody's project
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-m", "trainkit.cli.resume_child", *arguments]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=os.name == "posix",
        )
        with _no_orphans(process):
            if hasattr(os, "waitid"):  # not reaped yet: until its group is ended, nobody else can get its number
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            else:
                process.wait()
        return process.wait()


@contextlib.contextmanager
def _no_orphans(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Workers of a loader whose process was killed must not go on; nor the process when this one is interrupted."""
    try:
        yield
    finally:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing was left
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
