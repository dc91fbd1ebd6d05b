"""A fit records its start and its end in the folder of its run, in `starts.jsonl`. A failed write does not stop the fit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers.resume.faulting import At, Child, send
from helpers.resume.saving import saving
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory
from helpers.support import run_python
from helpers.worlds.worlds import run_world

from trainkit import Callback, Trainer, __version__, paths
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger

DEFAULT = "runs/logs/default/version_0"


def fit(*callbacks: Callback, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    trainer = saving(*callbacks, **{"max_epochs": 1, "logger": CSVLogger(), **arguments})
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader(8), ckpt_path=ckpt_path)
    return trainer


def records(folder: str = DEFAULT) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "starts.jsonl").read_text().splitlines()]


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("starts.jsonl"))


def ended(error: type[BaseException] | None = None, *callbacks: Callback, **arguments: Any) -> list[Any]:
    """Run a fit, which may raise `error`. Returns the step, the epoch, the reason and `finished` of its last record."""
    if error is None:
        fit(*callbacks, **arguments)
    else:
        with pytest.raises(error):
            fit(*callbacks, **arguments)
    last = records()[-1]
    assert last["kind"] == "end"
    return [last["step"], last["epoch"], last["reason"], last["finished"]]


def raising(error: BaseException, hook: str = "on_train_batch_end", step: int = 2) -> At:
    def act() -> None:
        raise error

    return At(hook, act, step)


# ------------------------------------------------------------------------------------------------------- what is recorded


def test_a_start_and_its_end() -> None:
    trainer = fit()
    start, end = records()
    assert start.pop("time") == end.pop("started") < end.pop("time")
    assert end == {"kind": "end", "step": 4, "epoch": 1, "reason": "max_epochs=1 reached", "finished": True}
    assert start == {
        "kind": "start", "step": 0, "epoch": 0, "run_id": trainer._save_policy.run_id, "ckpt_path": None, "resumed_from": None,
        "resumed_saved_at": None, "argv": sys.argv, "command": None, "folder": start["folder"], "launcher": "one process",
        "host": socket.gethostname(), "processes": 1, "device": "cpu", "strategy": "single", "precision": "32-true",
        "trainkit": __version__, "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def test_a_resumed_run_appends() -> None:
    first = fit()
    fit(ckpt_path="auto", max_epochs=2)
    start, end, again, last = records()
    assert again["run_id"] == start["run_id"] == first._save_policy.run_id
    assert (again["step"], again["epoch"], again["ckpt_path"]) == (4, 1, "auto")
    assert Path(again["resumed_from"]).name == "step-00000004"
    assert start["time"] < again["resumed_saved_at"] <= end["time"] < again["time"]
    assert (last["started"], last["step"], last["reason"]) == (again["time"], 8, "max_epochs=2 reached")
    assert files() == [f"{DEFAULT}/starts.jsonl"]


def test_a_second_fit_is_recorded_in_its_own_folder() -> None:
    trainer = fit()
    trainer.fit(TinyModule(), tiny_loader())
    trainer.validate(TinyModule(), tiny_loader())
    folders = [f"runs/logs/default/version_{number}" for number in range(2)]
    assert files() == [f"{folder}/starts.jsonl" for folder in folders]
    assert [[record["kind"] for record in records(folder)] for folder in folders] == [["start", "end"]] * 2


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
os.environ["SECRET_OF_THE_ENVIRONMENT"] = "hush"
from pathlib import Path
from helpers.resume.saving import saving
from helpers.runs.tiny import TinyModule, tiny_loader
Path("elsewhere").mkdir(exist_ok=True)
os.chdir("elsewhere")
saving(max_epochs=1, default_root_dir="../runs").fit(TinyModule(), tiny_loader(), ckpt_path="auto")
"""


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"]])
def test_the_command_line_can_be_run_again(how: list[str]) -> None:
    Path("train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    given = [*how, "--lr=0.1", "--api-key", "hush", "a b"]
    done = run_python(*given)
    assert done.returncode == 0, done.stderr
    start, _ = records("runs/version_0")
    assert start["command"] == [sys.executable, *how, "--lr=0.1", "--api-key", "***", "a b"]
    assert start["argv"][1:] == ["--lr=0.1", "--api-key", "***", "a b"]
    assert start["folder"] == os.getcwd()  # where it was started, although the script has changed the directory
    assert start["ckpt_path"] == "auto"
    assert "hush" not in Path("runs/version_0/starts.jsonl").read_text()


def test_a_password_in_a_url_is_recorded_nowhere(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither in the output, nor in the name of a file, nor in a file, such as `state.json`."""
    monkeypatch.setattr(paths, "_schemes", {})
    monkeypatch.setattr(paths, "_passwords", {})
    url = "memory://me:hush@bucket/runs"
    fit(ModelCheckpoint(f"{url}/mine"), default_root_dir=url, logger=[CSVLogger(), JSONLLogger()], ckpt_path="auto")
    fit(default_root_dir=url, ckpt_path=f"{url}/mine/step-00000004", max_epochs=2)
    stored = MemoryFileSystem()
    assert stored.isfile("/me:hush@bucket/runs/mine/step-00000004/state.json")  # the URL is opened with the password
    found = [path for path in Path().rglob("*") if path.is_file()]
    assert [path for path in found if path.name == "state.json"]
    assert not [path for path in found if "hush" in str(path) or b"hush" in path.read_bytes()]
    assert not [path for path, file in stored.store.items() if b"hush" in file.getvalue()]
    assert "hush" not in "".join(capfd.readouterr())
    assert "memory://***@bucket/runs/mine/step-00000004" in "".join(path.read_text() for path in Path().rglob("starts.jsonl"))
    stored.store.clear()
    stored.pseudo_dirs[:] = [""]


# -------------------------------------------------------------------------------------------------------- how a fit ended


@pytest.mark.parametrize("error, reason", [
    (ValueError("the data says: secret"), "ValueError"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (SystemExit(3), "SystemExit"),
])  # fmt: skip
def test_an_exception(error: BaseException, reason: str) -> None:
    assert ended(type(error), raising(error)) == [2, 0, reason, False]
    assert "secret" not in Path(DEFAULT, "starts.jsonl").read_text()


@pytest.mark.parametrize("number, error, reason", [
    (signal.SIGTERM, SystemExit, "SIGTERM"),
    (signal.SIGUSR1, SystemExit, "SIGUSR1"),
    (signal.SIGHUP, SystemExit, "SIGHUP"),
    (signal.SIGINT, KeyboardInterrupt, "KeyboardInterrupt"),
])  # fmt: skip
def test_a_signal(number: int, error: type[BaseException], reason: str) -> None:
    assert ended(error, At("on_train_batch_end", send(number), 2)) == [2, 0, reason, False]


def test_a_callback_that_stops_the_fit() -> None:
    stopping = EarlyStopping("val_loss", stopping_threshold=1e9)
    step, epoch, reason, finished = ended(None, stopping, max_epochs=5)
    assert (step, epoch, finished) == (4, 1, True)
    assert reason.startswith("EarlyStopping: ")


def test_an_error_in_the_tear_down_is_the_end() -> None:
    """An error in `teardown` is recorded as the reason of the end, even if training was complete."""
    assert ended(ValueError, raising(ValueError(), "teardown", 4)) == [4, 1, "ValueError", False]


def test_a_killed_process_records_no_end() -> None:
    with Child(lambda: fit(At("on_train_batch_end", lambda: os.kill(os.getpid(), signal.SIGKILL), 3)), "killed") as child:
        assert child.code == -signal.SIGKILL
    assert [record["kind"] for record in records()] == ["start"]


# ------------------------------------------------------------------------------------------------------- where the file is


@pytest.mark.parametrize("loggers", [False, [Memory], [CSVLogger], [JSONLLogger], [Memory, TensorBoardLogger]])
@pytest.mark.parametrize("saves", [True, False])
def test_the_file_is_in_the_folder_of_the_run(loggers: Any, saves: bool) -> None:
    made = [kind() for kind in loggers] if loggers else False
    trainer = fit(logger=made, enable_checkpointing=saves)
    logs = loggers not in (False, [Memory])
    folder = DEFAULT if logs else "runs/version_0"
    assert files() == ([f"{folder}/starts.jsonl"] if saves or logs else [])
    if not saves and not logs:
        assert not Path("runs").exists()
    if saves:
        assert os.path.relpath(Path(trainer.checkpoint_callback.dirpath).parent) == folder  # type: ignore[union-attr,arg-type]


def test_nothing_is_recorded_without_a_folder_of_the_run() -> None:
    """A fit without a run folder, an evaluation, and a fit that fails in `setup` write no file."""
    fit(fast_dev_run=True)
    fit(ModelCheckpoint("mine"), logger=False)
    fit(logger=False, max_epochs=0)
    trainer = saving(logger=CSVLogger())
    for evaluate in (trainer.validate, trainer.test):
        evaluate(TinyModule(), tiny_loader())
    with pytest.raises(ValueError, match="early"):
        fit(raising(ValueError("early"), "setup", 0), logger=False)
    assert files() == []


def in_a_world(epochs: int) -> Any:
    trainer = fit(max_epochs=epochs, devices=2, ckpt_path="auto")
    return trainer._save_policy.run_id


def test_only_the_main_process_records() -> None:
    ids = [run_world(2, in_a_world, epochs) for epochs in (1, 2)]
    assert [(one["kind"], one["step"]) for one in records()] == [("start", 0), ("end", 2), ("start", 2), ("end", 4)]
    assert {one["run_id"] for one in records() if one["kind"] == "start"} == {one for each in ids for one in each}
    assert (records()[0]["processes"], records()[0]["strategy"]) == (2, "ddp")


# ------------------------------------------------------------------------------------------------------ a write that fails


@pytest.mark.parametrize("from_step", [0, 2])
def test_a_failed_write_is_one_warning(from_step: int) -> None:
    def block() -> None:
        Path(DEFAULT, "starts.jsonl").unlink(missing_ok=True)
        Path(DEFAULT, "starts.jsonl").mkdir(parents=True)

    blocking = [At("on_train_batch_end", block, from_step)] if from_step else []
    if not from_step:
        block()
    part = "end" if from_step else "start"
    with pytest.warns(TrainkitWarning, match=f"The {part} of the fit could not be recorded in .*starts.jsonl") as caught:
        trainer = fit(*blocking, logger=CSVLogger(version=0))
    assert len(caught) == 1
    assert trainer.global_step == 4


def test_a_folder_that_was_removed_is_not_created_again() -> None:
    fit(At("on_train_batch_end", lambda: shutil.rmtree(DEFAULT), 4), enable_checkpointing=False, max_steps=4, max_epochs=None)
    assert files() == []
