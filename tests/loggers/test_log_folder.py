"""Loggers that resume after a kill: each step is logged once, none is lost, and files of other runs do not change."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.support import run_python
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer import event_file_writer

from trainkit.console import TrainkitWarning
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger
from trainkit.loggers.log_folder import Repeats, digest, folder_id
from trainkit.loggers.logger_setup import attach
from trainkit.loggers.run_files import read_metrics
from trainkit.tagged_json.codec import dumps, loads

KINDS = [CSVLogger, JSONLLogger, TensorBoardLogger]
FILES = [(CSVLogger, "metrics.csv"), (JSONLLogger, "metrics.jsonl")]


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads the files of a second by name, which ends in a counter of the process: its 10 comes before its 9."""
    monkeypatch.setattr(event_file_writer._global_uid, "_value", 100)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """The state after a checkpoint has stored and loaded it as JSON, without tensors."""
    tensors: dict[str, Any] = {}
    back = loads(dumps(state, tensors), {}, "state.json")
    assert not tensors
    assert back == state
    return back


def train(logger: Logger, steps: range) -> None:
    """Log a row per step, a validation row after every third step, and one more column from step 6 on."""
    for step in steps:
        late = {"late": 0.5} if step >= 6 else {}
        logger.log_metrics({"loss": step / 8, **late, "epoch": 0}, step)
        if step % 3 == 0:
            logger.log_metrics({"val": step * 2.0, "epoch": 0}, step)


def stopped(logger: Logger, step: int, last: int = 0) -> dict[str, Any]:
    """Train to `step`, take the state, train to `last`, and close the logger; returns the state."""
    train(logger, range(1, step + 1))
    state = logger.state_dict()
    train(logger, range(step + 1, last + 1))
    logger.finalize()
    return state


def expected(last: int) -> dict[str, list[tuple[int, float]]]:
    return {
        "loss": [(step, step / 8) for step in range(1, last + 1)],
        "val": [(step, step * 2.0) for step in range(3, last + 1, 3)],
        "late": [(step, 0.5) for step in range(6, last + 1)],
    }


def without_epoch(folder: Path) -> dict[str, Any]:
    return {name: series for name, series in read_metrics(folder).items() if name != "epoch"}


# ------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 2, 3, 5, 7])
def test_the_log_of_a_resumed_run_is_that_of_one_that_was_never_killed(kind: Any, at: int, tmp_path: Path) -> None:
    first = kind(tmp_path / "logs")
    assert first.log_dir
    train(first, range(1, at + 1))
    state = through_json(first.state_dict())
    train(first, range(at + 1, 8))  # logged after the checkpoint, before the kill
    first.save()

    second = kind(tmp_path / "logs")
    second.load_state_dict(state)
    assert second.log_dir == first.log_dir
    train(second, range(at + 1, 10))
    second.finalize()
    assert without_epoch(tmp_path / "logs") == expected(9)
    first.finalize()
    if kind is not TensorBoardLogger:
        whole = kind(tmp_path / "whole")
        train(whole, range(1, 10))
        whole.finalize()
        [one], [other] = (list(Path(str(log.log_dir)).glob("metrics.*")) for log in (second, whole))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_many_resumes_from_the_same_and_from_older_states(kind: Any, tmp_path: Path) -> None:
    states: dict[int, Any] = {}
    logger: Logger = kind(tmp_path)
    for start, end in [(0, 5), (3, 8), (3, 6), (6, 9), (2, 4), (4, 10)]:
        if start:
            logger = kind(tmp_path)
            logger.load_state_dict(states[start])
        for step in range(start + 1, end + 1):
            train(logger, range(step, step + 1))
            states[step] = through_json(logger.state_dict())
        logger.save()
    logger.finalize()
    assert without_epoch(tmp_path) == expected(10)
    assert len(list((tmp_path / "default").iterdir())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_logger_that_is_still_open_goes_back_too(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    train(logger, range(1, 4))
    state = logger.state_dict()
    train(logger, range(4, 7))
    logger.load_state_dict(state)
    logger.log_metrics({"loss": 0.5})  # the step after the last step of the state
    logger.finalize()
    assert without_epoch(tmp_path)["loss"] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]


def test_text_continues_too(tmp_path: Path) -> None:
    first = JSONLLogger(tmp_path)
    first.log_text("note", "a", 1)
    state = through_json(first.state_dict())
    assert set(state["files"]) == {"text.jsonl"}
    first.log_text("note", "b", 2)
    first.log_metrics({"loss": 1.0}, 2)
    second = JSONLLogger(tmp_path)
    second.load_state_dict(state)
    second.log_text("note", "c", 2)
    folder = Path(str(second.log_dir))
    assert [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()] == ["a", "c"]
    assert not (folder / "metrics.jsonl").exists()  # the file did not exist at the checkpoint
    first.finalize()


@pytest.mark.parametrize("kind, name", FILES)
def test_a_line_that_the_kill_tore_is_gone(kind: Any, name: str, tmp_path: Path) -> None:
    first = kind(tmp_path)
    state = stopped(first, 3)
    path = Path(str(first.log_dir), name)
    with path.open("a") as file:
        file.write('{"step": 4, "lo' if kind is JSONLLogger else "4,0,0.")
    second = kind(tmp_path)
    second.load_state_dict(state)
    train(second, range(4, 7))
    second.finalize()
    assert without_epoch(tmp_path) == expected(6)


def test_rows_that_wait_are_written_before_a_state_is_given(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=100)
    train(logger, range(1, 3))
    state = logger.state_dict()
    assert state["files"]["metrics.csv"]["rows"] == 2
    train(logger, range(3, 5))
    assert logger.state_dict()["files"]["metrics.csv"]["rows"] == 5
    logger.finalize()


def test_the_rows_are_counted_by_reading_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkit.loggers import csv_logs

    reads = []
    read = csv_logs._mark
    monkeypatch.setattr(csv_logs, "_mark", lambda *arguments: (reads.append(1), read(*arguments))[1])
    logger = CSVLogger(tmp_path)
    for step in range(1, 8):
        train(logger, range(step, step + 1))
        state = logger.state_dict()
        assert state["files"] == {"metrics.csv": read(Path(str(logger.log_dir), "metrics.csv"))}
    assert len(reads) == 1
    logger.finalize()


def test_a_state_where_rows_cannot_be_written_says_what_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path)
    train(logger, range(1, 3))

    def full(lines: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(logger.experiment._file, "append", full)
        with pytest.raises(OSError, match="No space"):
            logger.log_metrics({"loss": 0.375}, 3)
        with pytest.warns(TrainkitWarning, match="CSVLogger could not flush to .*No space"):
            state = logger.state_dict()
    assert state["files"]["metrics.csv"]["rows"] == 2
    assert logger.state_dict()["files"]["metrics.csv"]["rows"] == 3  # there is space again
    logger.finalize()


# -------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_makes_nothing(kind: Any, tmp_path: Path) -> None:
    for logger in (kind(tmp_path / "a"), kind(tmp_path / "b", version=3)):
        assert logger.state_dict() == {"last_step": -1}
        attach([logger], tmp_path)
        state = through_json(logger.state_dict())
        assert not state.get("files")
        fresh = kind(tmp_path / "a")
        fresh.load_state_dict(state)
        logger.finalize()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("default_root", ["a", ".", "b"])
def test_a_log_continues_only_inside_the_default_folder(kind: Any, default_root: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    first = kind()
    first.set_default_root(tmp_path / "a")
    state = stopped(first, 3, 5)
    before = contents(tmp_path / "a")
    second = kind()
    second.set_default_root(tmp_path / default_root)
    second.load_state_dict(state)
    train(second, range(4, 7))
    second.finalize()
    if default_root == "b":
        assert "The checkpoint names a log in another place" in caplog.messages[-1]
        assert contents(tmp_path / "a") == before
        assert without_epoch(tmp_path / "b")["loss"] == expected(6)["loss"][3:]
    else:
        assert second.log_dir == first.log_dir
        assert without_epoch(tmp_path / "a") == expected(6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [False, True])
def test_a_run_that_was_moved_continues_where_it_is_now(kind: Any, copied: bool, tmp_path: Path) -> None:
    first = kind()
    first.set_default_root(tmp_path / "a")
    state = stopped(first, 3, 5)
    (shutil.copytree if copied else shutil.move)(tmp_path / "a", tmp_path / "b")
    second = kind()
    second.set_default_root(tmp_path / "b")
    second.load_state_dict(state)
    train(second, range(4, 7))
    second.finalize()
    assert without_epoch(tmp_path / "b") == expected(6)
    if copied:
        assert without_epoch(tmp_path / "a") == {name: s for name, s in expected(5).items() if s}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_gone_is_a_warning(kind: Any, tmp_path: Path) -> None:
    first = kind(tmp_path)
    state = stopped(first, 3)
    shutil.rmtree(tmp_path / "default")
    second = kind(tmp_path)
    with pytest.warns(TrainkitWarning, match="version_0 of the resumed run does not exist. It starts a new log"):
        second.load_state_dict(state)
    train(second, range(4, 7))
    second.finalize()
    assert without_epoch(tmp_path)["loss"] == expected(6)["loss"][3:]
    assert second.version == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 9])
def test_another_runs_files_are_not_touched(kind: Any, rows: int, tmp_path: Path) -> None:
    """The folder of the run was removed, and a new run has the same version number."""
    first = kind(tmp_path)
    state = stopped(first, 3)
    shutil.rmtree(tmp_path / "default")
    other = kind(tmp_path)
    for step in range(rows):
        other.log_metrics({"loss": -1.0, "epoch": 0}, step)
    other.finalize()
    before = {path: path.read_bytes() for path in (tmp_path / "default" / "version_0").iterdir()}
    second = kind(tmp_path)
    with pytest.warns(TrainkitWarning, match="version_0 of the resumed run contains the log of another run"):
        second.load_state_dict(state)
    train(second, range(4, 7))
    second.finalize()
    assert second.version == 1
    assert {path: path.read_bytes() for path in (tmp_path / "default" / "version_0").iterdir()} == before


@pytest.mark.parametrize("kind, name", FILES)
@pytest.mark.parametrize("cut", ["short", "gone", "torn"])
def test_a_file_that_lacks_something_is_a_warning(kind: Any, name: str, cut: str, tmp_path: Path) -> None:
    first = kind(tmp_path)
    state = stopped(first, 4)
    path = Path(str(first.log_dir), name)
    if cut == "gone":
        path.unlink()
    else:
        lines = path.read_text().splitlines(keepends=True)
        kept = 2 if kind is CSVLogger else 1
        path.write_text("".join(lines[:kept]) + (lines[kept][:4] if cut == "torn" else ""))
    second = kind(tmp_path)
    found = "does not exist" if cut == "gone" else "has 1 rows" if kind is CSVLogger else "has [0-9]+ bytes"
    with pytest.warns(TrainkitWarning, match=f"the log continues, but .*{name} {found}; when the checkpoint was saved, it had"):
        second.load_state_dict(state)
    train(second, range(5, 7))
    second.finalize()
    assert second.log_dir == first.log_dir
    assert [step for step, _ in without_epoch(tmp_path)["loss"]] == ([] if cut == "gone" else [1]) + [5, 6]


def test_event_files_that_lack_something_are_a_warning(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path)
    train(first, range(1, 3))
    first.finalize()
    train(first, range(3, 5))
    state = first.state_dict()
    first.finalize()
    one, other = sorted(state["files"]["sizes"])
    folder = Path(str(first.log_dir))
    (folder / one).unlink()
    with (folder / other).open("r+b") as file:
        file.truncate(state["files"]["sizes"][other] - 3)
    second = TensorBoardLogger(tmp_path)
    with pytest.warns(TrainkitWarning, match=f"{one} does not exist; .*; .*{other} has [0-9]+ bytes; when"):
        second.load_state_dict(state)
    train(second, range(5, 7))
    second.finalize()
    assert [step for step, _ in without_epoch(tmp_path)["loss"]][-2:] == [5, 6]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [{"name": "other"}, {"version": 7}, {"save_dir": "elsewhere"}])
def test_arguments_override_the_checkpoint(kind: Any, arguments: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    first = kind(tmp_path)
    state = stopped(first, 3, 5)
    second = kind(**{"save_dir": tmp_path, **arguments})
    second.load_state_dict(state)
    assert "starts a new log" in caplog.messages[-1]
    train(second, range(4, 7))
    second.finalize()
    assert without_epoch(Path(str(first.log_dir))) == {name: s for name, s in expected(5).items() if s}
    assert [step for step, _ in without_epoch(Path(str(second.log_dir)))["loss"]] == [4, 5, 6]


def test_loggers_that_share_a_folder_continue_to_share_it(tmp_path: Path) -> None:
    first = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path), JSONLLogger(tmp_path)]
    attach(first, tmp_path)
    for logger in first:
        train(logger, range(1, 4))
    states = [logger.state_dict() for logger in first]
    for logger in first:
        train(logger, range(4, 6))
        logger.finalize()
    second = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path), JSONLLogger(tmp_path)]
    attach(second, tmp_path)
    for logger, state in zip(second, states, strict=True):
        logger.load_state_dict(state)
        train(logger, range(4, 7))
        logger.finalize()
    assert {logger.log_dir for logger in second} == {first[0].log_dir}
    assert without_epoch(tmp_path) == expected(6)
    for name in ("metrics.csv", "metrics.jsonl"):
        Path(str(first[0].log_dir), name).unlink()
        assert without_epoch(tmp_path) == expected(6)


def test_loggers_whose_folder_is_gone_start_one_together(tmp_path: Path) -> None:
    first, second = ([CSVLogger(tmp_path), JSONLLogger(tmp_path)] for _ in range(2))
    attach(first, tmp_path)
    for logger in first:
        train(logger, range(1, 4))
    states = [logger.state_dict() for logger in first]
    for path in Path(str(first[0].log_dir)).iterdir():
        path.write_text(path.read_text().replace("0.125", "0.5"))  # looks like the log of another run
    attach(second, tmp_path)
    for logger, state in zip(second, states, strict=True):
        with pytest.warns(TrainkitWarning, match="another run"):
            logger.load_state_dict(state)
    for logger in second:
        train(logger, range(4, 7))
        logger.finalize()
    assert {logger.version for logger in second} == {1}
    for logger in first:
        logger.finalize()


@pytest.mark.parametrize("kind", KINDS)
def test_other_processes_touch_nothing(kind: Any, tmp_path: Path) -> None:
    first = kind(tmp_path)
    state = stopped(first, 3, 5)
    before = {path: path.read_bytes() for path in Path(str(first.log_dir)).iterdir()}
    other = kind(tmp_path)
    other.set_rank(1)
    assert other.state_dict() == {"last_step": -1}
    other.load_state_dict(state)
    assert other.log_dir == first.log_dir
    assert {path: path.read_bytes() for path in Path(str(first.log_dir)).iterdir()} == before


def test_a_file_that_cannot_be_cut_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CSVLogger(tmp_path)
    state = stopped(first, 3, 5)

    def read_only(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    second = CSVLogger(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.loggers.log_folder.os.replace", read_only)
        with pytest.warns(TrainkitWarning, match="could not be removed and appears twice.*Permission denied"):
            second.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------ forged states


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def log_of_another_run(kind: Any, save_dir: Path) -> Logger:
    other: Logger = kind(save_dir)
    train(other, range(1, 8))
    other.finalize()
    return other


def weak_marks(folder: Path) -> list[dict[str, Any]]:
    """Marks that can be forged without knowing the contents of the log."""
    nothing, brace = digest(b""), digest(b"{")
    names = [path.name for path in folder.glob("events*")]
    return [
        {},
        {"metrics.csv": {"rows": 0, "columns": 1, "first": "", "last": ""}},
        {"metrics.csv": {"rows": 0, "columns": 0, "first": "", "last": ""}},
        {"metrics.csv": {"rows": 1000, "columns": 1, "first": "", "last": ""}},
        {"metrics.jsonl": {"bytes": 0, "first": nothing, "last": nothing}},
        {"metrics.jsonl": {"bytes": 1, "first": brace, "last": brace}},
        {"metrics.jsonl": {"bytes": -1, "first": nothing, "last": nothing}},
        {"text.jsonl": {"bytes": 1000, "first": "", "last": ""}},
        {"sizes": {}},
        {"sizes": {"events.out.tfevents.1.forged.1.0": 1}},
        {"sizes": dict.fromkeys(names, 0)},
    ]


@pytest.mark.parametrize("what", ["link", "pipe", "no UTF-8", "long field"])
@pytest.mark.parametrize("kind, name", FILES)
@pytest.mark.parametrize("resumes", [True, False], ids=["resumed", "version=0"])
def test_a_file_that_is_no_log_is_not_written_to(kind: Any, name: str, what: str, resumes: bool, tmp_path: Path) -> None:
    """The folder of a run may be from elsewhere; the marks of a hostile checkpoint are right."""
    first = kind(tmp_path)
    state = through_json(stopped(first, 3, 6))
    path, target = Path(str(first.log_dir)) / name, tmp_path / "mine"
    content = path.read_bytes()
    target.write_bytes(content)
    path.unlink()
    if what == "link":
        path.symlink_to(target)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        damage = {"no UTF-8": b"\xff", "long field": b"x" * 200_000}[what]
        path.write_bytes(damage + content)
    second = kind(tmp_path) if resumes else kind(tmp_path, version=0)
    second._attached = True  # by a Trainer, which a logger never ends
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if resumes:
            second.load_state_dict(state)
        train(second, range(4, 6))
        assert isinstance(second.state_dict(), dict)
        second.finalize()
    assert target.read_bytes() == content
    damaged = what in ("no UTF-8", "long field") and kind is CSVLogger
    if resumes:
        assert second.log_dir != first.log_dir
        assert "It starts a new log" in str(caught[0].message)
    elif damaged or what in ("link", "pipe"):
        assert re.search(r"could not write.*(expected a regular file|expected UTF-8|larger than)", str(caught[0].message))


@pytest.mark.parametrize("content", [b"\xff", b"x" * 2000, None], ids=["no ASCII", "too long", "pipe"])
def test_an_id_that_is_none(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / ".log_id"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    assert folder_id(tmp_path) is folder_id(tmp_path, create=True) is None


def test_event_files_may_be_large(tmp_path: Path) -> None:
    """A command reads files of 1 GB at most; a run continues with its own, whatever their size."""
    first = TensorBoardLogger(tmp_path)
    state = through_json(stopped(first, 3))
    [file] = Path(str(first.log_dir)).glob("events*")
    os.truncate(file, 2**31)  # takes no space
    state["files"]["sizes"] = dict.fromkeys(state["files"]["sizes"], 2**31)
    second = TensorBoardLogger(tmp_path)
    second.load_state_dict(state)
    assert second.log_dir == first.log_dir
    assert second._purge_step == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["outside", "inside", "linked"])
@pytest.mark.parametrize("folder_id", [None, "", "forged"])
def test_a_forged_state_changes_no_log(kind: Any, place: str, folder_id: str | None, tmp_path: Path) -> None:
    """The state names the log of another run: outside of the run's folder, inside it, or behind a symbolic link in it."""
    root = tmp_path / "run" / "logs"
    other = log_of_another_run(kind, root if place == "inside" else tmp_path / "outside")
    folder = Path(str(other.log_dir))
    if place == "linked":
        root.mkdir(parents=True)
        (root / "default").mkdir()
        (root / "default" / "version_0").symlink_to(folder)
    before = contents(folder)
    assert before
    for files in weak_marks(folder):
        state = {"last_step": 1, "folder": str(folder), "version": 0, "name": "default", "files": files, "folder_id": folder_id}
        logger = kind()
        logger.set_default_root(tmp_path / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainkitWarning)
            logger.load_state_dict(state)
        logger.log_metrics({"loss": 1.0}, 2)
        logger.finalize()
        assert contents(folder) == before, files
        shutil.rmtree(str(logger.log_dir))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_the_right_marks_names_no_folder_outside(kind: Any, tmp_path: Path) -> None:
    first = kind(tmp_path / "outside")
    state = stopped(first, 3, 7)
    before = contents(tmp_path / "outside")
    logger = kind()
    logger.set_default_root(tmp_path / "run")
    logger.load_state_dict(state)
    assert str(logger.log_dir).startswith(str(tmp_path / "run"))
    assert contents(tmp_path / "outside") == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["../../outside", "..", "/outside", "", -1, True, None, 1.5])
def test_a_forged_version_names_no_folder_outside(kind: Any, version: Any, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    root = tmp_path / "run" / "logs" / "default"
    logger = kind()
    logger.set_default_root(tmp_path / "run")
    logger.load_state_dict({"last_step": 1, "folder": f"{root}/{version}", "version": version, "name": "default", "files": {}})
    assert "starts a new log" in caplog.messages[-1]
    assert logger.log_dir == str(root / "version_0")


def test_forged_names_of_event_files_are_ignored(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path / "logs")
    state = stopped(first, 3, 5)
    private = tmp_path / "events.out.tfevents.1.private.1.0"
    private.write_bytes(b"x" * 100)
    (tmp_path / "notes.txt").write_bytes(b"x" * 100)
    for name in (f"../../../{private.name}", str(private), "../../../notes.txt", str(tmp_path / "notes.txt")):
        for size in (0, 10):
            state["files"]["sizes"][name] = size
    second = TensorBoardLogger(tmp_path / "logs")
    second.load_state_dict(state)
    assert second.log_dir == first.log_dir
    assert private.stat().st_size == (tmp_path / "notes.txt").stat().st_size == 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_before_the_log_without_an_id_starts_a_new_log(kind: Any, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    first = kind(tmp_path)
    assert first.log_dir
    state = first.state_dict()
    assert state["files"] == {}
    assert state["folder_id"] == first.state_dict()["folder_id"]
    del state["folder_id"]  # as in checkpoints of earlier versions
    empty = kind(tmp_path)
    empty.load_state_dict(state)
    assert empty.log_dir == first.log_dir  # the folder has no rows to remove
    train(first, range(1, 4))
    first.finalize()
    before = contents(Path(first.log_dir))
    second = kind(tmp_path)
    second.load_state_dict(state)
    assert "shows that it is the log of the resumed run. It starts a new log" in caplog.messages[-1]
    assert second.version == 1
    assert contents(Path(first.log_dir)) == before


class Printer(Logger):
    """A user's logger without files. Like loggers written for Lightning, it does not call super().__init__()."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        self.rows.append(step)


def test_a_users_logger_keeps_its_step(tmp_path: Path) -> None:
    first, second = Printer(), Printer()
    first.log_metrics({"loss": 1}, 4)
    state = through_json(first.state_dict())
    assert state == {"last_step": 4}
    second.load_state_dict(state)
    second.log_metrics({"loss": 1})
    assert second.rows == [5]
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- TensorBoard


def test_a_running_tensorboard_forgets_the_later_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardLogger(tmp_path)
    train(first, range(1, 4))
    state = first.state_dict()
    train(first, range(4, 7))
    first.save()
    running = EventAccumulator(str(first.log_dir), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    assert [event.step for event in running.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    second = TensorBoardLogger(tmp_path)
    second.load_state_dict(state)
    train(second, range(4, 6))
    second.finalize()
    running.Reload()
    assert [event.step for event in running.Scalars("loss")] == [1, 2, 3, 4, 5]
    first.finalize()


def test_steps_that_count_something_else_are_not_hidden(tmp_path: Path) -> None:
    """The step of validation values is the number of the batch, which can be far above the training step."""
    first = TensorBoardLogger(tmp_path)
    for batch in (0, 1, 500, 10**7):
        first.log_metrics({"val_step": 0.5}, batch)
    first.log_metrics({"loss": 1.0}, 3)
    first.experiment.add_scalar("negative", 1.0, -2)
    state = first.state_dict()
    second = TensorBoardLogger(tmp_path)
    second.load_state_dict(state)
    second.log_metrics({"loss": 0.5}, 4)
    second.finalize()
    found = read_metrics(tmp_path)
    assert [step for step, _ in found["val_step"]] == [0, 1, 500, 10**7]
    assert found["loss"] == [(3, 1.0), (4, 0.5)]
    assert found["negative"] == [(-2, 1.0)]
    first.finalize()


def test_files_of_add_scalars_are_cut_and_those_of_other_processes_stay(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path, sub_dir="events")
    first.experiment.add_scalars("both", {"a": 1.0}, 1)
    state = through_json(first.state_dict())
    assert len(state["files"]["sizes"]) == 2
    first.experiment.add_scalars("both", {"a": 2.0, "b": 2.0}, 2)
    first.save()
    strange = Path(str(first.log_dir), "test", "events.out.tfevents.1700000000.elsewhere.77.0")
    strange.parent.mkdir()
    strange.write_bytes(b"of an evaluation in another process")
    second = TensorBoardLogger(tmp_path, sub_dir="events")
    second.load_state_dict(state)
    second.experiment.add_scalars("both", {"a": 3.0, "b": 3.0}, 2)
    second.finalize()
    top = Path(str(second.log_dir))
    assert read_metrics(top / "both_a") == {"both": [(1, 1.0), (2, 3.0)]}
    assert read_metrics(top / "both_b") == {"both": [(2, 3.0)]}
    assert strange.exists()
    first.finalize()


def test_hyperparameters_are_not_written_a_second_time(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardLogger(tmp_path)
    first.log_hyperparams({"lr": 0.5, "model": {"width": 8}})
    state = through_json(first.state_dict())
    for rate in (0.5, 0.25):
        second = TensorBoardLogger(tmp_path)
        second.load_state_dict(state)
        second.log_hyperparams({"lr": rate, "model": {"width": 8}})
        second.log_metrics({"loss": 1.0}, 1)
        second.finalize()
        read = EventAccumulator(str(second.log_dir)).Reload()
        assert [event.step for event in read.Scalars("hp_metric")] == [0]
    first.finalize()


# --------------------------------------------------------------------------------------------------------- real kills

KILLED = """
import json, os, random, signal, sys
from pathlib import Path
from trainkit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger
import tensorboard.summary.writer.event_file_writer, torch.utils.tensorboard

LAST = 60
BLOCK = 8192  # bytes for each call: a pipe holds a few of them, so that a run is never far ahead of who kills it

def save(step, loggers):
    assert all(logger.log_dir for logger in loggers)
    Path("state.tmp").write_text(json.dumps([step, [logger.state_dict() for logger in loggers]]))
    os.replace("state.tmp", "state.json")

def work(pipe):
    loggers = [CSVLogger("csv"), JSONLLogger("jsonl"), TensorBoardLogger("tensorboard")]
    start = 0
    if Path("state.json").exists():
        start, states = json.loads(Path("state.json").read_text())
        for logger, state in zip(loggers, states):
            logger.load_state_dict(state)
    else:
        save(0, loggers)
    for step in range(start + 1, LAST + 1):
        for logger in loggers:
            late = {f"late_{step // 20}": 1.0} if step > 10 else {}
            logger.log_metrics({"loss": step / 8, **late}, step)
            if step % 7 == 0:
                logger.log_metrics({"val": step / 4}, step)
            os.write(pipe, bytes(BLOCK))
        if step % 5 == 0:
            save(step, loggers)
    for logger in loggers:
        logger.finalize()

draw = random.Random(int(sys.argv[1]))
kills = ends = 0
while not ends:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            work(write)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    left = draw.randrange(1, 50) * BLOCK
    while left and (got := os.read(read, left)):
        left -= len(got)
    if kills < 12:
        os.kill(child, signal.SIGKILL)
    while os.read(read, 65536):
        pass
    os.close(read)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kills += 1
    else:
        assert status == 0, status
        ends += 1
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its runs by fork")
@pytest.mark.parametrize("seed", [1, 2])
def test_read_back_after_real_kills_each_step_is_there_once(seed: int, tmp_path: Path) -> None:
    Path("killed.py").write_text(KILLED)
    done = run_python("killed.py", str(seed), timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3, "the runs ended before they could be killed"
    wanted = {
        "loss": [(step, step / 8) for step in range(1, 61)],
        "val": [(step, step / 4) for step in range(7, 61, 7)],
        "late_0": [(step, 1.0) for step in range(11, 20)],
        "late_1": [(step, 1.0) for step in range(20, 40)],
        "late_2": [(step, 1.0) for step in range(40, 60)],
        "late_3": [(60, 1.0)],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("csv", "jsonl", "tensorboard"):
            assert read_metrics(name) == wanted, name
            assert [path.name for path in Path(name, "default").iterdir()] == ["version_0"]


# -------------------------------------------------------------------------------------------------------------- repeats


class Store:
    """A tracker that cannot delete records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int]] = []

    def steps_of(self, key: str) -> list[int]:
        return [step for name, step in self.records if name == key]

    def log(self, repeats: Repeats, key: str, step: int) -> None:
        if not repeats.has(key, step, self.steps_of):
            self.records.append((key, step))
            repeats.note(key)


def script(first: int, last: int) -> list[tuple[str, int]]:
    """The records of a run: a loss per step; after every third step, an evaluation, which counts its batches from 0."""
    found = []
    for step in range(first, last + 1):
        found.append(("loss", step))
        if step % 3 == 0:
            found += [("batch", 0), ("batch", 1), ("val", step)]
    return found


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 3)), max_size=5))
def test_a_run_killed_anywhere_and_often_is_that_of_one_that_was_not(kills: list[tuple[int, int, int]]) -> None:
    """Each kill: the step to resume from next, the number of records until the kill, and how many of the last ones are lost."""
    store, states = Store(), {0: dict[str, int]()}
    at = 0
    for start, length, lost in [*kills, (12, 0, 0)]:
        repeats = Repeats()
        if len(states) > 1:
            repeats.resume(states[at])
        written = script(at + 1, 12)
        stop = len(written) if (start, length, lost) == (12, 0, 0) else length
        before = len(store.records)
        for done, (key, step) in enumerate(written[:stop], start=1):
            store.log(repeats, key, step)
            if written[done : done + 1] == [] or written[done][0] == "loss":  # the end of a step
                states[step] = dict(repeats.counts)
        kept = max(before, len(store.records) - lost)
        newest = [step for step, counts in states.items() if sum(counts.values()) <= kept]
        del store.records[kept:]  # records arrive in order, so those before a checkpoint are complete
        at = min(start, max(newest))
        at = max(step for step in newest if step <= at)
    assert store.records == script(1, 12)


def test_a_new_run_asks_for_nothing() -> None:
    repeats = Repeats()
    assert not repeats.has("a", 0, lambda key: 1 / 0)  # type: ignore[arg-type, return-value]
    repeats.resume({"a": 1})
    repeats.new_run()
    assert not repeats.has("a", 0, lambda key: 1 / 0)  # type: ignore[arg-type, return-value]
    assert repeats.counts == {}


def test_another_logging_interval_loses_nothing() -> None:
    store = Store()
    store.records = [("a", step) for step in (1, 2, 3, 4, 5, 6, 7, 8)]
    repeats = Repeats()
    repeats.resume({"a": 4})
    for step in (6, 8, 10, 12):
        store.log(repeats, "a", step)
    assert [step for _, step in store.records] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert repeats.counts == {"a": 10}


def test_a_tracker_that_has_less_than_the_checkpoint_says() -> None:
    store = Store()
    repeats = Repeats()
    repeats.resume({"a": 4})
    for step in (5, 6):
        store.log(repeats, "a", step)
    assert store.records == [("a", 5), ("a", 6)]
    assert repeats.counts == {"a": 2}
