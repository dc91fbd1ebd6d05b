"""What happens after a kill, a flipped bit, a signal or an exception: trainkit, and other frameworks where they are installed.

    python benchmarks/faults.py [--python OTHER/bin/python] [--contender trainkit] [--part resume save] [--kills 20]

It counts and measures no times, so the machine may have other work. Every contender trains the same small network, with
dropout and a shuffled `DataLoader` with two workers, and resumes in the way that its documentation recommends
(`faults_contenders.py`). The moments of the kills are drawn with a fixed seed. The parts:

- resume: SIGKILL after a drawn step, then a second start that trains to the end. Counted are the kills after which all
  losses of the second start and the final parameters are bit-equal to those of a run that was not killed.
- augment: the same, with samples that have noise, drawn in the workers.
- save: SIGKILL at a drawn moment of a save of 50 MB. Counted are the kills after which the next start resumes from a
  checkpoint, with the optimizer state of the same step. Kills before the first complete checkpoint do not occur.
- flip: one bit of a file of the newest checkpoint is flipped, in the middle half of the file, where the tensors are.
- evaluate: the mean of 101 values on two processes.
- sigterm: SIGTERM to one of two processes, to each in its turn, by default and with the option that is meant for it.
- raise, sigkill: rank 1 of two processes raises an exception, or is killed.

Linux only: processes are found in /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Column, Report, json_option

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("faults_contenders.py")

LIMIT = 60.0  # seconds until processes count as hanging
STEPS, SAVE_EVERY = 40, 5  # of a run of two epochs
NEVER = 10**9
LARGE = ("--width=100000",)  # 50 MB of parameters and optimizer state
SAVE_LARGE_EVERY = 6
TITLES = {"trainkit": "trainkit", "lightning": "Lightning", "accelerate": "Accelerate", "transformers": "HF Trainer"}
NEWEST = {  # the files of checkpoints, and in group 1 the number that orders them
    "trainkit": r"trainkit_runs/version_0/checkpoints/step-(\d+)/.*safetensors",
    "lightning": r"checkpoints/last(\d*)\.ckpt",
    "accelerate": r"checkpoints/checkpoint_(\d+)/(?:model|optimizer).*",
    "transformers": r"checkpoints/checkpoint-(\d+)/(?:model|optimizer).*",
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS = {
    "trainkit": ["-m", "trainkit", "launch", "--nproc-per-node=2"],
    "lightning": [],  # its launcher starts the second process itself
    "accelerate": TORCHRUN,  # on CPUs, `accelerate launch` starts several processes with MPI only
    "transformers": TORCHRUN,
}
OPTIONS = {"lightning": "save_on_exception", "transformers": "enable_jit_checkpoint"}


class Start:
    """One start of a contender in a folder. At the end of the with block none of its processes is left."""

    def __init__(
        self, contender: str, python: str, folder: Path, *options: str, task: str = "train", processes: int = 1
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._token = uuid.uuid4().hex
        self._events = folder / "events.jsonl"
        self._events.touch()
        self._began = len(self._events.read_text())
        self._log = folder / f"{self._token}.log"
        launcher = LAUNCHERS[contender] if processes > 1 else []
        command = [python, *launcher, str(SCRIPT), contender, task, f"--processes={processes}", *options]
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FAULTS_TOKEN": self._token}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **settings}
            )

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *_: object) -> None:
        while alive := self.alive():
            for pid in alive:
                self.send(pid, signal.SIGKILL)
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def send(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def alive(self) -> list[int]:
        """The processes of this start, those of loaders and launchers included."""
        found = [self.pid] if self._process.poll() is None else []  # its environment may not be there yet
        mark = f"FAULTS_TOKEN={self._token}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and int(entry.name) != self.pid and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is another user's
                pass
        return found

    def events(self, key: str) -> list[dict[str, Any]]:
        """What this start has recorded under a key."""
        lines = self._events.read_text()[self._began :].splitlines()
        return [event for event in map(json.loads, lines) if key in event]

    def until(self, reached: Callable[[], object]) -> bool:
        """Wait until something holds; False if the process ended before, or after two minutes."""
        end = time.monotonic() + 120
        while not reached():
            if self._process.poll() is not None or time.monotonic() > end:
                return bool(reached())
            time.sleep(0.002)
        return True

    def wait(self, limit: float = NEVER) -> bool:
        """Whether all processes end within a limit, in seconds."""
        end = time.monotonic() + limit
        while self.alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


class Contender:
    """A contender, its interpreter, and a new folder for each run."""

    def __init__(self, name: str, python: str, base: Path, kills: int | None) -> None:
        self.name, self.python, self.base, self.kills = name, python, base, kills
        self.draw = random.Random(1)
        self._folders = 0

    def folder(self) -> Path:
        self._folders += 1
        return self.base / f"{self.name}-{self._folders}"

    def start(self, folder: Path, *options: str, **more: Any) -> Start:
        return Start(self.name, self.python, folder, *options, **more)

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------------- one process

    def resume(self, *options: str) -> str:
        """Kill after a drawn step, and compare with the run that was not killed."""
        options = (f"--save-every={SAVE_EVERY}", *options)
        with self.start(self.folder(), *options) as whole:
            whole.wait()
            losses = {event["step"]: event["loss"] for event in whole.events("step")}
            final = whole.events("end")[0]["end"]
        kills, equal = self.kills or (12 if self.name == "trainkit" else 6), 0
        for _ in range(kills):
            folder, step = self.folder(), self.draw.randrange(2 * SAVE_EVERY, STEPS - 2)
            with self.start(folder, *options) as killed:
                killed.until(lambda: len(killed.events("step")) > step)  # noqa: B023
                time.sleep(self.draw.uniform(0, 0.02))
                killed.send(killed.pid, signal.SIGKILL)
            with self.start(folder, *options) as second:
                second.wait()
                if not second.events("end"):
                    self.say(f"killed after step {step}: the second start failed\n{second.output[-2000:]}")
                    continue
                begun = second.events("start")[0]["start"]
                found = {event["step"]: event["loss"] for event in second.events("step")}
                same = sum(losses.get(number) == loss for number, loss in found.items())
                ended = second.events("end")[0]["end"] == final
            right = begun > 0 and found.keys() == set(range(begun, STEPS)) and same == len(found) and ended
            equal += right
            self.say(f"killed after step {step}: resumed at {begun}, {same} of {len(found)} losses equal, parameters {ended}")
        return f"{equal} of {kills}"

    def save(self) -> str:
        """Kill during a save, and look whether the next start resumes; that one is killed in its turn."""
        options = (*LARGE, f"--save-every={SAVE_LARGE_EVERY}", "--epochs=1000")
        kills, window = self.kills or 20, self._save_window()
        found: Counter[str] = Counter()
        folder: Path | None = None
        save = early = 0
        while True:
            fresh, folder = folder is None, folder or self.folder()
            with self.start(folder, *options) as start:
                outcome, begun = self.first_step(start)
                if not fresh:
                    found[outcome] += 1
                    early += begun < save  # the save was not complete
                    self.say(f"{sum(found.values())} of {kills}: {outcome} at step {begun}")
                if sum(found.values()) == kills:
                    break
                if fresh or outcome == "resumes":  # in a fresh folder there are two complete checkpoints before
                    save = (begun // SAVE_LARGE_EVERY + self.draw.choice((3, 4) if fresh else (1, 2))) * SAVE_LARGE_EVERY
                    start.until(lambda: start.events("saving")[-1:] and start.events("saving")[-1]["saving"] == save)  # noqa: B023
                    began: float = start.events("saving")[-1]["time"]
                    time.sleep(max(0, began + self.draw.uniform(0, window) - time.time()))
                    start.send(start.pid, signal.SIGKILL)
                    self.say(f"killed in the save of step {save}")
                    continue
            shutil.rmtree(folder)
            folder = None
        shutil.rmtree(folder)
        others = "".join(f"; {n} × {outcome}" for outcome, n in found.items() if outcome != "resumes")
        return f"{found['resumes']} of {kills} ({early} before the save was complete){others}"

    def _save_window(self) -> float:
        """Seconds from the beginning of a save to the last change that it makes to the disk."""
        folder = self.folder()
        with self.start(folder, *LARGE, "--save-every=20", "--epochs=2") as only:
            only.until(lambda: len(only.events("step")) > 36)  # the save is complete, and the next one has not begun
            began = only.events("saving")[0]["time"]
        files = [path for path in folder.rglob("*") if "checkpoints" in path.parts and path.name != ".lock"]
        window: float = max(path.stat().st_mtime for path in files) - began
        shutil.rmtree(folder)
        self.say(f"a save takes {window:.2f} s")
        return window

    def first_step(self, start: Start) -> tuple[str, int]:
        """What a start does until its first step, and the step from which it resumes."""
        if not start.until(lambda: start.events("step")):
            self.say((start.output.strip().splitlines() or ["no output"])[-1])
            return "error", 0
        event = start.events("start")[0]
        if event["start"] == 0:
            return "starts from the beginning", 0
        return "resumes" if event["optimizer"] == event["start"] else "resumes without its optimizer state", event["start"]

    def flip(self) -> str:
        """Flip one bit of the newest checkpoint, and look what the next start does."""
        options = (*LARGE, f"--save-every={SAVE_LARGE_EVERY}", "--epochs=1")
        whole = self.folder()
        with self.start(whole, *options) as start:
            start.wait()
        with self.start(whole, *LARGE, f"--save-every={NEVER}") as start:
            _, newest_step = self.first_step(start)
        found: Counter[str] = Counter()
        for _ in range(self.kills or 4):
            folder = self.folder()
            shutil.copytree(whole, folder)
            (folder / "events.jsonl").unlink()
            names = [(str(path.relative_to(folder)), path) for path in folder.rglob("*")]
            files = [(int(match[1] or 0), path) for name, path in names if (match := re.fullmatch(NEWEST[self.name], name))]
            newest = max(number for number, _ in files)
            file = self.draw.choice(sorted(path for number, path in files if number == newest))
            size = file.stat().st_size
            with file.open("r+b") as opened:
                opened.seek(offset := self.draw.randrange(size // 4, 3 * size // 4))
                byte = opened.read(1)[0] ^ 1 << self.draw.randrange(8)
                opened.seek(offset)
                opened.write(bytes([byte]))
            with self.start(folder, *LARGE, f"--save-every={NEVER}") as start:
                outcome, begun = self.first_step(start)
                warned = "damaged" in start.output
            if outcome == "resumes":
                outcome = "loads silently" if begun == newest_step else "uses an older one" + " and says so" * warned
            self.say(f"flipped a bit of {file.name}: {outcome}, step {begun}")
            found[outcome] += 1
            shutil.rmtree(folder)
        shutil.rmtree(whole)
        return "; ".join(f"{number} × {outcome}" for outcome, number in found.items())

    # ------------------------------------------------------------------------------------- two processes

    def evaluate(self) -> str:
        """Compare the mean of 101 values on two processes with the exact one."""
        exact = sum(i * i for i in range(101)) / 101
        cells = []
        for options in ((), ("--with-option",)):
            if options and self.name == "trainkit":
                continue
            with self.start(self.folder(), *options, task="evaluate", processes=2) as start:
                start.wait(LIMIT)
                event = (start.events("mean") or [{"way": "error", "mean": float("nan")}])[0]
            once = abs(event["mean"] - exact) < 1e-4 * exact
            way = "one process" if options and self.name == "lightning" else event["way"]
            self.say(f"{way}: {event['mean']}, exactly {exact}")
            cells.append(f"{way}: {'yes' if once else 'no'}")
        return "; ".join(cells)

    def disturbed(self, rank: int, number: int, *options: str) -> tuple[str, str, Path, int]:
        """Send a signal to one of two processes; 0: rank 1 raises by itself. What happens, the output, where, and the step."""
        folder = self.folder()
        options = (f"--save-every={NEVER}", "--epochs=1000", *options)
        with self.start(folder, *options, processes=2) as start:
            pids: dict[int, int] = {}

            def training() -> bool:
                pids.update({event["rank"]: event["pid"] for event in start.events("step") if event["step"] >= 10})
                return len(pids) == 2

            if not start.until(training):
                raise RuntimeError(f"{self.name} did not train on two processes:\n{start.output[-2000:]}")
            step = max(event["step"] for event in start.events("step"))
            if number:
                start.send(pids[rank], number)
            ended = start.wait(LIMIT)
            mains = {event["pid"] for event in start.events("start")}
            left = len(mains.intersection(start.alive()))
        return "all end" if ended else f"hangs ({left} of 2 left)", start.output, folder, step

    def sigterm(self) -> str:
        """SIGTERM to each rank in its turn, then a start that shows what was saved."""
        cells = []
        for options in ((), ("--with-option",)) if self.name in OPTIONS else ((),):
            outcomes = []
            for rank in (0, 1):
                outcome, _, folder, step = self.disturbed(rank, signal.SIGTERM, *options)
                with self.start(folder, f"--save-every={NEVER}", "--epochs=1000", processes=2) as again:
                    begun = again.events("start")[0]["start"] if again.until(lambda: again.events("step")) else -1
                saved = "saved" if begun >= step else "not saved"
                self.say(f"SIGTERM to rank {rank} after step {step}{' '.join(options)}: {outcome}, next start at {begun}")
                outcomes.append(f"rank {rank}: {outcome}, {saved}")
            both = {outcome.partition(": ")[2] for outcome in outcomes}
            cells.append(
                (f"+ {OPTIONS[self.name]}: " if options else "") + (both.pop() if len(both) == 1 else ", ".join(outcomes))
            )
        return "; ".join(cells)

    def raises(self) -> str:
        outcome, output, _, _ = self.disturbed(1, 0, "--fail-at=30")
        shown = "RuntimeError: boom" in output
        errors = re.findall(r"^(?:\[?rank\d\]?: ?)?[\w.]*(?:Error|Exception)\b.*", output, re.MULTILINE)
        self.say(f"rank 1 raises: {outcome}; the errors in the output: {errors}")
        last = " last" if errors and "boom" in errors[-1] else ""
        return f"{outcome}, its traceback {'shown' if shown else 'not shown'}{last}"

    def sigkill(self) -> str:
        outcome, _, _, _ = self.disturbed(1, signal.SIGKILL)
        self.say(f"SIGKILL to rank 1: {outcome}")
        return outcome


PARTS: dict[str, tuple[str, Callable[[Contender], str]]] = {
    "resume": ("Killed, resumed bit for bit", Contender.resume),
    "augment": ("The same with augmentation in the workers", lambda contender: contender.resume("--augment")),
    "save": ("Killed while saving, the next start resumes", Contender.save),
    "flip": ("One flipped bit in the newest checkpoint", Contender.flip),
    "evaluate": ("Evaluation on two processes counts each sample once", Contender.evaluate),
    "sigterm": ("SIGTERM to one of two processes", Contender.sigterm),
    "raise": ("One of two processes raises an exception", Contender.raises),
    "sigkill": ("One of two processes is killed", Contender.sigkill),
}


def version(contender: str, python: str) -> str | None:
    """The version of a contender in an environment, None if it is not there."""
    name = "trainkit-torch" if contender == "trainkit" else contender
    program = f"import importlib.metadata as m, torch; print(m.version({name!r}) + ', torch ' + torch.__version__)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() or None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", nargs="+", choices=TITLES, default=list(TITLES), help="default: all")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--kills", type=int, help="kills or flipped bits of a part (default: 12 or 6, 20, 4)")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the other frameworks (default: this one)")
    json_option(parser)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no process behind
    other = os.path.abspath(shutil.which(arguments.python) or arguments.python)
    pythons = {name: sys.executable if name == "trainkit" else other for name in arguments.contender}
    versions = {name: version(name, python) for name, python in pythons.items()}
    report = Report(**{TITLES[name]: found or "not installed, skipped" for name, found in versions.items()})
    with tempfile.TemporaryDirectory() as base:
        contenders = [Contender(name, pythons[name], Path(base), arguments.kills) for name in pythons if versions[name]]
        table = report.table("after a fault", *(Column(TITLES[contender.name]) for contender in contenders))
        for part in arguments.part:
            title, measure = PARTS[part]
            table.add(title, *(measure(contender) for contender in contenders))
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
