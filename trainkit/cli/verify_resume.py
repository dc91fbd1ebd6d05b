"""`trainkit verify-resume SCRIPT`: train, kill, resume, and compare with a run that was not interrupted."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainkit.checkpoint.folder import list_checkpoints
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.cli.checkpoint.compare import compare_checkpoints
from trainkit.cli.resume_child import END, FAILURE, OUTCOME, RECORDS, SAVES, Task, first_difference, read_records
from trainkit.cli.user_script import existing_script
from trainkit.console import quantity
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.launch.private_folder import private_folder

__all__ = ["add_arguments", "run"]

_KILLED_LATER = 2  # optimizer steps between the save and the kill
_TAIL = 40  # lines to show of a script's output if it left no traceback

_HIDDEN = (
    "The {what} depends on something that is not in the checkpoint.\n"
    "Look for numbers, lists and generators that are plain attributes of the module, a callback or the dataset.\n"
    "Fix: register_buffer(), or on_save_checkpoint and on_load_checkpoint."
)
_ADVICE = {
    "batch": "The dataset returned something that depends on more than the sample.\n"
    "Fix: draw random numbers with torch, numpy.random or random, which are seeded for each micro-batch,\n"
    "and not from your own generator, such as numpy.random.default_rng().",
    "order": "The position in the data was not restored.\nFix: add state_dict() and load_state_dict() to your own loader.",
    "rate": "Fix: return your own learning-rate schedule from configure_optimizers, so that it is saved.",
    "loss": "The batch and the learning rates are the same.\n" + _HIDDEN.format(what="loss"),
    "length": "The end of the run depends on the time or on something that is not in the checkpoint.",
}
_SEED = {
    False: "Set a seed before data is created or split: trainkit.seed_everything(1).",
    True: "The script sets a seed. If data is created or split at random, the seed must come first, and be for all\n"
    "generators: trainkit.seed_everything(1).",
}
"""By whether the script sets a seed of torch; for a batch that differs after the resume only."""
_NOT_REPRODUCIBLE = (
    "This is before the kill: two runs of the script differ even without a resume, so no resume can be exact.\n"
    "On a GPU, try Trainer(deterministic=True)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit verify-resume`."""
    parser.usage = "trainkit verify-resume SCRIPT [--steps K] [--more M] [-- ARGS …]"
    parser.epilog = (
        "Runs the script three times, unchanged, until its first fit() ends: for K+M optimizer steps; again, killed with "
        "SIGKILL after the checkpoint of step K; resumed up to step K+M. Compares the batches, losses and learning rates of "
        "each step and the final state bit for bit. Checkpoints and logs go to a temporary folder. Exit code: 0 if all are "
        "equal, else 1."
    )
    _add_options(parser, steps=10, more=10)
    purpose = "a Python file that calls Trainer.fit; its own arguments come after --"
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, action=_Command, help=purpose)


def _add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    parser.add_argument("--steps", metavar="K", type=int, help="optimizer steps before the checkpoint (default: 10)")
    parser.add_argument("--more", metavar="M", type=int, help="optimizer steps after it (default: 10)")
    parser.set_defaults(**defaults)


class _Command(argparse.Action):
    """SCRIPT and what follows: our options, and after `--` the arguments of the script, even if they look like ours.

    argparse itself would consume a `--` after SCRIPT.
    """

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        if not values or values[0] == "--":
            parser.error("the following arguments are required: SCRIPT")
        namespace.script, *rest = values
        at = rest.index("--") if "--" in rest else len(rest)
        ours = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, allow_abbrev=False)
        _add_options(ours, steps=argparse.SUPPRESS, more=argparse.SUPPRESS)
        unknown = ours.parse_known_args(rest[:at], namespace)[1]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}; write the script's arguments after --")
        namespace.args = rest[at + 1 :]


def run(args: argparse.Namespace) -> int:
    """Run the script three times; 0 if the resumed run equals the uninterrupted one bit for bit."""
    if args.steps < 1 or args.more < 1:
        raise ConfigurationError(
            f"--steps and --more must be at least 1, not {args.steps} and {args.more}. For example: --steps 10"
        )
    script = existing_script(args.script, "trainkit verify-resume train.py -- --its-own-arguments")
    with private_folder("verify-resume-") as folder:
        return _Verification(Path(folder), [script, *args.args], args.steps, args.more).run()


class _Verification:
    """The three runs, and their comparison."""

    def __init__(self, folder: Path, command: Sequence[str], steps: int, more: int) -> None:
        self._folder = folder
        self._command = command
        self._steps = steps
        self._total = steps + more
        self._kill_at = steps + min(_KILLED_LATER, more)
        self._sets_seed = False

    def run(self) -> int:
        """Train, kill, resume, compare."""
        whole, killed = self._whole(), self._run_killed()
        difference = first_difference(whole, killed, name="the second run", killed=True)
        if difference is not None:
            return _different(difference.text, _NOT_REPRODUCIBLE, _ADVICE[difference.kind])
        try:
            resumed = self._run_resumed()
        except ConfigurationError as error:
            return _different(f"step {self._steps}, where it should resume: {error}")
        after = [record for record in whole if record["step"] > self._steps]
        difference = first_difference(after, resumed, name="the resumed run", killed=False)
        if difference is not None:
            seed = [_SEED[self._sets_seed]] if difference.kind == "batch" else []
            return _different(difference.text, _ADVICE[difference.kind], *seed)
        if differing := list(
            compare_checkpoints(*(open_checkpoint(self._folder / name / END) for name in ("whole", "resumed")))
        ):
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            return _different(f"the end, step {self._total}: {differing[0]}{more}", _HIDDEN.format(what="state"))
        missing = {path for record in whole for path, digests in record["leaves"].items() if ":" in digests[0]}
        if missing:
            print(f"Not compared, because the type is unknown: {', '.join(sorted(missing))} of the batches.")
        print(
            f"All bit-identical: the batches, losses and learning rates of the "
            f"{quantity(self._total - self._steps, 'optimizer step')} after the resume,\n"
            "and all parameters, buffers and optimizer state at the end."
        )
        return 0

    def _whole(self) -> list[dict[str, Any]]:
        text = f"{quantity(self._total, 'optimizer step')} without interruption"
        outcome, _ = self._start(text, self._task("whole", seed=1))
        step, self._sets_seed = outcome.get("step", 0), outcome.get("sets_seed", False)
        if step < self._total:
            raise ConfigurationError(
                f"The script's fit ends after {quantity(step, 'optimizer step')} ({outcome.get('limits')}), but "
                f"{self._total} are needed. Fix: use --steps and --more with a sum of at most {step}, or let the script train "
                "longer."
            )
        return read_records(self._folder / "whole" / RECORDS)

    def _run_killed(self) -> list[dict[str, Any]]:
        text = f"again, saved at step {self._steps}, killed with SIGKILL at step {self._kill_at}"
        outcome, code = self._start(text, self._task("killed", seed=1, save_at=self._steps, kill_at=self._kill_at))
        if outcome:
            raise TrainkitError(f"The second run was not killed: its fit ended after {outcome.get('step')} optimizer steps.")
        if code not in (-getattr(signal, "SIGKILL", 9), signal.SIGTERM):
            raise TrainkitError(f"The second run ended before step {self._kill_at}, with exit code {code}.")
        return read_records(self._folder / "killed" / RECORDS)

    def _run_resumed(self) -> list[dict[str, Any]]:
        checkpoints = [one for one in list_checkpoints(self._folder / "root-killed" / SAVES) if one.problem is None]
        if len(checkpoints) != 1:
            raise TrainkitError(f"The checkpoint of step {self._steps} was not written; see the script's warnings above.")
        task = self._task("resumed", root="killed", seed=2, resume_from=str(checkpoints[0].path))
        self._start(f"resumed at step {self._steps}, to step {self._total}", task)
        return read_records(self._folder / "resumed" / RECORDS)

    def _task(self, name: str, root: str = "", **options: Any) -> Task:
        return Task(str(self._folder / name), str(self._folder / f"root-{root or name}"), self._total, **options)

    def _start(self, text: str, task: Task) -> tuple[dict[str, Any], int]:
        """Run a task; its outcome (empty if it was killed) and exit code.

        Raises:
            ConfigurationError: The script failed, or cannot be verified.
        """
        folder = Path(task.folder)
        folder.mkdir()
        (folder / "task.json").write_text(json.dumps(asdict(task)), "utf-8")
        print(f"{text} …", end=" ", flush=True)
        began = time.monotonic()
        code = _run_child([str(folder / "task.json"), *self._command], folder / "output.txt")
        print(f"{time.monotonic() - began:.1f} s", flush=True)
        script = self._command[0]
        if (folder / FAILURE).exists():
            print((folder / FAILURE).read_text("utf-8"), end="", file=sys.stderr, flush=True)
            raise ConfigurationError(f"The script raised an error, see above. First make this command work: python {script} …")
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text("utf-8")) if (folder / OUTCOME).exists() else {}
        if "refused" in outcome:
            raise ConfigurationError(f"{script} cannot be verified: {outcome['refused']}")
        if not outcome and not (task.kill_at and code):
            lines = (folder / "output.txt").read_text("utf-8", "replace").splitlines(keepends=True)[-_TAIL:]
            print("".join(lines), end="", file=sys.stderr, flush=True)
            if code:
                raise ConfigurationError(f"The script failed with exit code {code}; its last output is above.")
            raise ConfigurationError(
                "The script ended without a complete Trainer.fit. Fix: pass a script that trains with a Trainer when it is "
                "run. A training loop with Accelerator cannot be verified."
            )
        return outcome, code


def _different(text: str, *advice: str) -> int:
    print(f"DIFFERENT at {text}", *advice, sep="\n")
    return 1


def _run_child(arguments: Sequence[str], output: Path) -> int:
    """Run a task in its own process, and kill the processes that it leaves; its exit code, negative for a signal."""
    # temporary runs do not belong in the user's project
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
            if hasattr(os, "waitid"):  # do not reap it yet: its process id must not be reused before its group is killed
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            else:
                process.wait()
        return process.wait()


@contextlib.contextmanager
def _no_orphans(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the loader workers of a killed process; and the process itself if this one is interrupted."""
    try:
        yield
    finally:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
