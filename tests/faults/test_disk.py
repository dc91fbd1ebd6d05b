"""A disk that fills up or becomes read-only in the middle of a run: training continues, and a warning says so."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.faulting import Child, checkpoints, left_over, tell, told
from helpers.resume.saving import saving
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Callback, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import CheckpointWriteError
from trainkit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger, tensorboard
from trainkit.loggers.run_files import read_metrics

MOUNT = Path("disk")
MIB = 2**20
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
READ_ONLY, REMOUNT, RECURSIVE, PRIVATE = 1, 32, 0x4000, 1 << 18  # MS_…


class Steady(TrainModule):
    """A module with 10 MiB of parameters, whose values do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10 * MIB // 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight[:1].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Events(Callback):
    """Calls functions after given optimizer steps. After each step, records the folder's content, once its save has ended."""

    def __init__(self, folder: Path, acts: dict[int, Callable[[], Any]]) -> None:
        self.folder, self.acts = folder, acts

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer._save_policy.wait()
        tell({"step": trainer.global_step, "names": sorted(checkpoints(self.folder)), "left": left_over(self.folder)})
        self.acts.get(trainer.global_step, lambda: None)()


def train(
    acts: dict[int, Callable[[], Any]], *more: Callback, folder: Path = MOUNT / "saves", steps: int = 6
) -> dict[str, Any]:
    """Fit with a save after each optimizer step, keeping the two newest. Returns the error, or the checkpoints at the end."""
    callbacks = [Events(folder, acts), ModelCheckpoint(folder, every_n_train_steps=1, keep_last=2), *more]
    trainer = saving(*callbacks, max_steps=steps, max_epochs=None)
    try:
        trainer.fit(Steady(), DataLoader(list(range(100))), ckpt_path="auto")
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "step": trainer.global_step}
    return {"error": None, "step": trainer.global_step, "names": sorted(checkpoints(folder)), "left": left_over(folder)}


def mount(size: str | None, flags: int = 0) -> None:
    """Mount a tmpfs at `disk`, or remount it with other flags; it disappears when this process exits."""
    options = b"" if size is None else f"size={size}".encode()
    source = None if flags & REMOUNT else b"tmpfs"
    if ctypes.CDLL(None, use_errno=True).mount(source, bytes(MOUNT.absolute()), source, flags, options):
        raise OSError(ctypes.get_errno(), "mount")


def with_a_disk() -> None:
    """In a child process: mount a tmpfs of 50 MiB that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) and libc.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None)
    MOUNT.mkdir(exist_ok=True)
    mount("50m")


def on_a_disk(work: Callable[[], Any]) -> Any:
    """Run `work` in a process with its own disk of 50 MiB; returns its result and the output of the process."""

    def prepared() -> Any:
        try:
            with_a_disk()
        except (OSError, AttributeError):
            return "no mount"
        return work()

    with Child(prepared) as child:
        answer = child.answer
    if answer == "no mount":
        pytest.skip("a process may not mount a file system here")
    return answer, child.output


def fill(left: int) -> None:
    """Leave `left` bytes free on the disk."""
    room = os.statvfs(MOUNT)
    (MOUNT / "filler").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - left)))


def free() -> None:
    (MOUNT / "filler").unlink()


def warnings_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("TrainkitWarning")]


def test_too_little_space() -> None:
    """With too little free space, no save starts and a warning names the needed and the free bytes; later saves work again."""
    answer, output = on_a_disk(lambda: train({2: lambda: fill(5 * MIB), 4: free}))
    assert answer == {"error": None, "step": 6, "names": ["step-00000005", "step-00000006"], "left": []}
    after = {event["step"]: event["names"] for event in told()}
    assert after[2] == after[3] == after[4] == ["step-00000001", "step-00000002"]
    assert after[5] == ["step-00000002", "step-00000005"]
    assert all(event["left"] == [] for event in told())
    first, second = warnings_in(output)
    for text, step in ((first, 3), (second, 4)):
        assert f"step-{step:08d}" in text
        assert "bytes" in text
        needed, free_bytes = (int(number) for number in _numbers(text))
        assert 10 * MIB < needed < 11 * MIB
        assert 4 * MIB < free_bytes <= 5 * MIB
        assert "Training continues" in text
        assert "disk/saves/step-00000002" in text, "the last good one"


def _numbers(text: str) -> list[str]:
    """The words of a text that are numbers with more than six digits."""
    return [word.strip(",.;:") for word in text.split() if word.strip(",.;:").isdigit() and len(word.strip(",.;:")) > 6]


class FillingUp(Callback):
    """Fills the disk when the save of `step` opens its model file, like another program that writes at the same time."""

    def __init__(self, step: int) -> None:
        self.name = f".step-{step:08d}.tmp-"
        self.done = False
        sys.addaudithook(self._opened)

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not self.done and self.name in str(arguments[0]) and "model" in str(arguments[0]):
            self.done = True
            fill(4 * MIB)


def test_the_disk_fills_up_in_mid_save() -> None:
    """The unfinished files are removed, training continues, and the next save works once there is space."""
    answer, output = on_a_disk(lambda: train({3: free}, FillingUp(3)))
    assert answer == {"error": None, "step": 6, "names": ["step-00000005", "step-00000006"], "left": []}
    after = {event["step"]: event for event in told()}
    assert after[3] == {"step": 3, "names": ["step-00000001", "step-00000002"], "left": []}
    assert after[4]["names"] == ["step-00000002", "step-00000004"]
    [text] = warnings_in(output)
    assert "No space left on device" in text
    assert "step-00000003" in text
    [needed, *_] = _numbers(text)
    assert 10 * MIB < int(needed) < 11 * MIB


def test_three_failures_in_a_row_end_the_run() -> None:
    answer, output = on_a_disk(lambda: train({2: lambda: fill(MIB)}))
    assert answer["error"] == CheckpointWriteError.__name__
    assert answer["step"] == 5
    assert "3 saves in a row" in answer["text"]
    assert "disk/saves/step-00000002" in answer["text"], "the last good checkpoint"
    assert len(warnings_in(output)) == 2


def test_successful_save_resets_failure_count() -> None:
    # a save that works resets the count of failures, so two failures twice do not end the run
    acts = {1: lambda: fill(MIB), 3: free, 4: lambda: fill(MIB), 6: free}
    answer, output = on_a_disk(lambda: train(acts, steps=8))
    assert answer == {"error": None, "step": 8, "names": ["step-00000007", "step-00000008"], "left": []}
    assert len(warnings_in(output)) == 4


def test_error_names_checkpoint_of_earlier_run() -> None:
    # three saves fail in a resumed run: the error names the checkpoint that the earlier run has saved
    def work() -> Any:
        train({}, steps=2)
        fill(MIB)
        return train({})

    answer, _ = on_a_disk(work)
    assert answer["error"] == CheckpointWriteError.__name__
    assert "disk/saves/step-00000002" in answer["text"]


def test_a_folder_that_is_read_only_at_the_start() -> None:
    """`fit` raises CheckpointWriteError before the first training step."""

    def work() -> Any:
        mount(None, REMOUNT | READ_ONLY)
        return train({})

    answer, _ = on_a_disk(work)
    assert (answer["error"], answer["step"]) == (CheckpointWriteError.__name__, 0)
    assert "Read-only file system" in answer["text"]
    assert "disk/saves" in answer["text"]
    assert told() == []


def test_a_folder_that_becomes_read_only() -> None:
    """Treated like a full disk: a warning, and the next save tries again."""
    acts = {2: lambda: mount(None, REMOUNT | READ_ONLY), 4: lambda: mount(None, REMOUNT)}
    answer, output = on_a_disk(lambda: train(acts))
    assert answer == {"error": None, "step": 6, "names": ["step-00000005", "step-00000006"], "left": []}
    texts = warnings_in(output)
    assert len(texts) == 2
    assert all("Read-only file system" in text for text in texts)


def test_a_folder_that_becomes_and_stays_read_only() -> None:
    answer, _ = on_a_disk(lambda: train({2: lambda: mount(None, REMOUNT | READ_ONLY)}))
    assert (answer["error"], answer["step"]) == (CheckpointWriteError.__name__, 5)
    assert "disk/saves/step-00000002" in answer["text"]


def without_privileges() -> None:
    """In a child process: drop the capabilities of root, so that file permissions apply."""
    # capset(2): header (version 3, this thread), then effective, permitted, inheritable, for the two halves of the set
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def test_a_folder_without_permission() -> None:
    saves = Path("saves")

    def work() -> Any:
        without_privileges()
        return train({2: lambda: saves.chmod(0o555), 4: lambda: saves.chmod(0o755)}, folder=saves)

    with Child(work) as child:
        assert child.answer == {"error": None, "step": 6, "names": ["step-00000005", "step-00000006"], "left": []}
    assert len(warnings_in(child.output)) == 2
    assert child.output.count("Permission denied") == 2


def test_a_folder_without_permission_at_the_start() -> None:
    Path("saves").mkdir(mode=0o555)

    def work() -> Any:
        without_privileges()
        return train({}, folder=Path("saves"))

    with Child(work) as child:
        assert (child.answer["error"], child.answer["step"]) == (CheckpointWriteError.__name__, 0)
    assert "Permission denied" in child.answer["text"]


def test_a_limit_on_the_size_of_files() -> None:
    """Saves fail like on a full disk while file sizes are limited; this also runs where tests cannot mount a disk."""

    def work() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(size: int) -> Callable[[], None]:
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))

        return train({2: limit(6 * MIB), 4: limit(unlimited[0])}, folder=Path("saves"))

    with Child(work) as child:
        assert child.answer == {"error": None, "step": 6, "names": ["step-00000005", "step-00000006"], "left": []}
    assert {event["step"]: event["names"] for event in told()}[4] == ["step-00000001", "step-00000002"]
    texts = warnings_in(child.output)
    assert len(texts) == 2
    assert all("File too large" in text for text in texts)
    assert all(event["left"] == [] for event in told())


class Logged(Steady):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", float(batch_idx))
        for number in range(300):  # a row is larger than a page, so that the first one does not fit
            self.log(f"more_{number}", (batch_idx + 1) / 3.1)
        if batch_idx >= 8:  # a new column, while the disk is full
            self.log("late", float(batch_idx))
        return super().training_step(batch, batch_idx)


def logged_on(logger: Any, acts: dict[int, Callable[[], Any]], *more: Callback) -> list[int]:
    """Train 20 steps, each of them logged and most of them saved elsewhere; returns the number of steps."""
    events = Events(MOUNT / "logs", acts)
    trainer = saving(events, ModelCheckpoint("saves"), *more, logger=logger, max_steps=20, log_every_n_steps=1)
    trainer.fit(Logged(), DataLoader(list(range(100))))
    return trainer.global_step


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_rows_of_an_outage_are_written_when_there_is_space(kind: Any) -> None:
    """Training continues with one warning an outage, and not one a row; no row is lost, new columns included."""

    def work() -> Any:
        logger = kind(MOUNT / "logs")
        acts = {5: lambda: fill(0), 11: free, 14: lambda: fill(0), 17: free}
        return logged_on(logger, acts), read_metrics(str(logger.log_dir))

    (steps, metrics), output = on_a_disk(work)
    assert steps == 20
    assert [step for step, _ in metrics["loss"]] == list(range(1, 21))
    assert metrics["late"] == [[step, float(step - 1)] for step in range(9, 21)]
    texts = warnings_in(output)
    assert len(texts) == 2
    for text in texts:
        assert f"{kind.__name__} could not write the metrics of step" in text
        assert "No space left" in text
        assert "Training continues" in text


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_a_disk_that_stays_full_until_the_end_of_the_run(kind: Any) -> None:
    """`fit` returns, and a notice says how many rows are missing; the hyper-parameters do not fit on the disk either."""

    def work() -> Any:
        logger = kind(MOUNT / "logs")
        steps = logged_on(logger, {2: lambda: fill(0)})
        logger.log_hyperparams({"again": 1})
        return steps, sorted(read_metrics(str(logger.log_dir))["loss"])[0]

    (steps, first), output = on_a_disk(work)
    assert (steps, first[0]) == (20, 1)
    assert "Traceback" not in output
    told = warnings_in(output)
    assert 1 <= len(told) <= 2  # the second one is that of a run that has ended
    assert "Training continues" in told[0]
    if kind is not TensorBoardLogger:
        [first_lost] = re.findall(r"metrics of step (\d+)", told[0])
        number = 21 - int(first_lost)
        assert f"trainkit: {kind.__name__} could not write to its end: [Errno 28] " in output
        assert f"; {number} records are missing" in output


class ManyFiles(Callback):
    """In the saves of some steps, no file can be opened, as if a program had too many open files."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.unlimited = resource.getrlimit(resource.RLIMIT_NOFILE)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.unlimited)  # after the loggers

    def state_dict(self) -> dict[str, Any]:
        full = Path("/proc/self/fd").exists() and self.trainer_step in self.steps
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if full else self.unlimited[0], self.unlimited[1]))
        return {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer_step = trainer.global_step

    trainer_step = 0


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_too_many_open_files_at_a_save_are_a_failed_save(kind: Any) -> None:
    """As a full disk: a warning, and the next save tries again."""

    def work() -> Any:
        logger = kind("logs")
        files = ManyFiles(2, 4)
        callbacks = [Events(Path("saves"), {}), ModelCheckpoint("saves", every_n_train_steps=1, keep_last=-1), files]
        trainer = saving(*callbacks, logger=logger, max_steps=6, log_every_n_steps=1)
        trainer.fit(Logged(), DataLoader(list(range(100))))
        return trainer.global_step, sorted(checkpoints(Path("saves"))), read_metrics(str(logger.log_dir))["loss"]

    with Child(work) as child:
        steps, names, loss = child.answer
    assert (steps, [step for step, _ in loss]) == (6, [1, 2, 3, 4, 5, 6])
    failed = [2, 4] if kind is JSONLLogger else []  # the other one knows its position
    assert names == [f"step-{step:08d}" for step in range(1, 7) if step not in failed]
    texts = [text for text in warnings_in(child.output) if "could not be saved" in text]
    assert len(texts) == len(failed)
    assert all("JSONLLogger in its log cannot be read" in text and "Too many open files" in text for text in texts)


def test_tensorboard_on_a_full_disk() -> None:
    """Training continues with one warning and no traceback of a thread; the logger writes again once there is space."""

    def work() -> Any:
        tensorboard._RETRY = 0.0
        logger = TensorBoardLogger(MOUNT / "logs", flush_secs=0)
        acts = {5: lambda: fill(0), 15: free}
        trainer = saving(
            Events(MOUNT / "logs", acts), ModelCheckpoint("saves"), logger=logger, max_steps=20, log_every_n_steps=1
        )
        trainer.fit(Logged(), DataLoader(list(range(100))))
        steps = [step for step, _ in read_metrics(str(logger.log_dir))["loss"]]
        return [trainer.global_step, steps]

    (global_step, steps), output = on_a_disk(work)
    assert global_step == 20
    assert "Traceback" not in output
    [text] = warnings_in(output)
    assert "TensorBoardLogger could not write to disk/logs" in text
    assert "No space left" in text
    assert "Training continues" in text
    assert {1, 2, 3, 4} <= set(steps)
    assert {17, 18, 19, 20} <= set(steps), "it is written again when there is space"
    assert len(steps) < 20, "the disk was full"
