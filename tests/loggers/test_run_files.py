"""`find_run` finds the run in a folder, and `read_metrics` reads the same numbers from every kind of file."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigurationError, MissingPackageError, TrainkitError
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger
from trainkit.loggers.log_folder import AppendFile
from trainkit.loggers.logger_setup import attach
from trainkit.loggers.run_files import STARTS, append_record, find_run, read_metrics, read_starts, utc_now

VALUES: dict[str, list[tuple[int, float]]] = {
    "train_loss": [(1, 0.5), (2, math.inf), (3, 0.25)],
    "epoch": [(1, 0), (2, 0), (3, 1)],
    "val_loss": [(3, math.nan)],
}


def write(logger: Logger) -> None:
    logger.log_metrics({"train_loss": 0.5, "epoch": 0}, 1)
    logger.log_metrics({"train_loss": math.inf, "epoch": 0}, 2)
    logger.log_metrics({"train_loss": 0.25, "epoch": 1, "val_loss": math.nan}, 3)
    logger.finalize()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_every_kind_of_file_reads_alike(kind: type[Logger], tmp_path: Path) -> None:
    logger = kind(tmp_path)
    write(logger)
    read = read_metrics(str(logger.log_dir))
    assert str(dict(sorted(read.items()))) == str(
        {key: [(step, float(value)) for step, value in VALUES[key]] for key in sorted(VALUES)}
    )
    assert {type(value) for series in read.values() for _, value in series} == {float}


def test_all_steps_of_a_long_run_are_read(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in range(12_000):  # by default, tensorboard's reader keeps a sample of 10,000
        logger.log_metrics({"loss": step % 7}, step)
    logger.finalize()
    assert read_metrics(tmp_path)["loss"] == [(step, float(step % 7)) for step in range(12_000)]


def test_scalars_stored_as_tensors_are_read_and_other_tensors_are_not(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.experiment.add_scalar("new", 0.5, 1, new_style=True)
    logger.experiment.add_scalar("double", 1e-300, 1, new_style=True, double_precision=True)
    logger.log_text("text", "x", 1)
    logger.finalize()
    assert read_metrics(tmp_path) == {"new": [(1, 0.5)], "double": [(1, 1e-300)]}


def test_a_metric_in_several_files_is_read_once_and_in_full_precision(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(), JSONLLogger(), CSVLogger()]
    attach(loggers, tmp_path)
    for logger in loggers:
        logger.log_metrics({"loss": 0.1, type(logger).__name__: 1}, 1)
        logger.finalize()
    read = read_metrics(tmp_path)
    assert read.pop("loss") == [(1, 0.1)]
    assert read == {"CSVLogger": [(1, 1)], "JSONLLogger": [(1, 1)], "TensorBoardLogger": [(1, 1)]}


def test_event_files_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(TensorBoardLogger(tmp_path, version=0))
    for name in [name for name in sys.modules if name.startswith("tensorboard.backend")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard.backend", None)
    with pytest.raises(MissingPackageError, match="Reading the event files in .*version_0 needs the package"):
        read_metrics(tmp_path)
    write(CSVLogger(tmp_path, version=0))
    assert set(read_metrics(tmp_path)) == set(VALUES)


def at(path: Path, seconds: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("step,loss\n1,1\n")
    os.utime(path, (seconds, seconds))
    return path.parent


def test_find_run(tmp_path: Path) -> None:
    logs = tmp_path / "root" / "logs"
    second = at(logs / "a" / "version_2" / "metrics.csv", 1000)
    tenth = at(logs / "a" / "version_10" / "metrics.csv", 900)  # the highest number, although its file is older
    other = at(logs / "b" / "version_0" / "sub" / "metrics.jsonl", 800)
    assert find_run(second).folder == second
    assert find_run(tenth.parent).folder == tenth
    assert find_run(logs).folder == find_run(tmp_path).folder == tenth
    assert find_run(logs / "b").folder == find_run(str(other)).folder == other
    newer = at(logs / "c" / "final" / "metrics.csv", 2000)
    assert find_run(logs).folder == newer
    (logs / "b" / "version_7").mkdir()  # a run that has logged nothing
    assert find_run(logs / "b").folder == other


TESTED, TRAINED = {"test_loss": 0.5, "epoch": 0}, {"loss": 0.5, "epoch": 0}


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_the_newest_run_that_trained_is_meant(kind: type[Logger], tmp_path: Path) -> None:
    def log(metrics: dict[str, float], name: str = "default", written: int = 0) -> Path:
        logger = kind(tmp_path, name=name)
        logger.log_metrics(metrics, 1)
        logger.finalize()
        folder = Path(str(logger.log_dir))
        for file in folder.iterdir():
            os.utime(file, (written, written))
        return folder

    tested = log(TESTED, written=1000)
    assert find_run(tmp_path) == (tested, None)  # there is no other
    trained = log(TRAINED, written=2000)
    assert find_run(tmp_path) == (trained, None)
    again = log({"val/loss": 0.5, "test": 0.5}, written=3000)
    assert find_run(tmp_path) == (trained, again)
    assert find_run(again) == (again, None)
    other = log(TRAINED, "other", written=2500)  # of another experiment, written later
    assert find_run(tmp_path) == (other, again)
    (again / "starts.jsonl").write_text("")  # a fit without a training metric
    assert find_run(tmp_path) == (again, None)


def test_a_run_that_saved_checkpoints_has_trained(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics(TESTED, 1)
    (tmp_path / "default/version_0/checkpoints").mkdir()
    CSVLogger(tmp_path).log_metrics(TESTED, 1)
    assert find_run(tmp_path).folder == tmp_path / "default/version_0"
    Path(tmp_path, "default/version_0/checkpoints").rmdir()
    assert find_run(tmp_path).folder == tmp_path / "default/version_1"


def test_no_metrics_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected metrics\.csv, metrics\.jsonl, events\.out\.tfevents\.\*"):
        read_metrics(tmp_path)
    with pytest.raises(ConfigurationError, match="nowhere', which does not exist"):
        find_run(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file', which is a file"):
        find_run(tmp_path / "file")


@pytest.mark.parametrize("name, text, words", [
    ("metrics.csv", "time,loss\n1,2\n", "expected a column 'step', got time, loss"),
    ("metrics.csv", "step,loss\n1,2\nx,3\n", "line 3: expected numbers, got .*'x', '3'"),
    ("metrics.csv", "step,loss\n1,abc\n", "line 2: expected numbers"),
    ("metrics.jsonl", '{"step": 1, "loss": 2}\n{"loss": 2}\n', "line 2: expected an object such as"),
    ("metrics.jsonl", "[1, 2]\n", "line 1: expected an object such as"),
    ("metrics.jsonl", '{"step": 1, "loss": [2]}\n', "line 1: expected an object such as"),
    ("metrics.jsonl", "not json\n", "line 1: expected an object such as"),
])  # fmt: skip
def test_files_that_are_something_else(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TrainkitError, match=words):
        read_metrics(tmp_path)


@pytest.mark.parametrize("name, text, expected", [
    ("metrics.csv", "", {}),
    ("metrics.csv", "step,loss\n", {}),
    ("metrics.csv", "epoch,loss,step\r\n0,,1\r\n0,2,2\r\n", {"epoch": [(1, 0), (2, 0)], "loss": [(2, 2)]}),
    ("metrics.jsonl", "", {}),
])  # fmt: skip
def test_files_of_a_run_that_has_just_begun_or_of_others(
    tmp_path: Path, name: str, text: str, expected: dict[str, Any]
) -> None:
    (tmp_path / name).write_text(text, newline="")
    assert read_metrics(tmp_path) == expected


# ---------------------------------------------------------------------------------------------------------- starts file


TIMES = [f"2026-11-20T15:0{minute}:00.000000Z" for minute in range(4)]


def start(number: int, **facts: Any) -> dict[str, Any]:
    return {"kind": "start", "time": TIMES[number], "step": 10 * number, **facts}


def end(number: int, of: int, **facts: Any) -> dict[str, Any]:
    return {"kind": "end", "time": TIMES[number], "started": TIMES[of], "step": 10 * number, **facts}


def test_each_end_belongs_to_its_start(tmp_path: Path) -> None:
    for record in (start(0), start(1, resumed_saved_at=TIMES[0]), end(2, 1, reason="SIGTERM"), start(3)):
        append_record(tmp_path, record)
    killed, stopped, running = read_starts(tmp_path)
    assert (killed.step, killed.end, killed.end_time, killed.end_step, killed.resumed_saved_at) == (0, {}, None, None, None)
    assert stopped.end["reason"] == "SIGTERM"
    assert stopped.end_time is not None
    assert (stopped.end_time - stopped.time, stopped.end_step) == (60, 20)
    assert stopped.resumed_saved_at == killed.time
    assert running.end == {}
    assert running.time - killed.time == 180


def test_secrets_that_an_earlier_version_has_recorded_are_hidden(tmp_path: Path) -> None:
    command = ["train.py", "--wandb_key", "hush", "--lr", "1"]
    append_record(tmp_path, start(0, command=command, argv=command, ckpt_path="ftp://me:hush@host/run", processes=2))
    [found] = read_starts(tmp_path)
    assert found.start["command"] == found.start["argv"] == ["train.py", "--wandb_key", "***", "--lr", "1"]
    assert (found.start["ckpt_path"], found.start["processes"]) == ("ftp://***@host/run", 2)


def test_times_are_read_back(tmp_path: Path) -> None:
    append_record(tmp_path, {"kind": "start", "time": utc_now(), "step": 0})
    append_record(tmp_path, {"kind": "start", "time": utc_now(), "step": 0})
    first, second = read_starts(tmp_path)
    assert 1.7e9 < first.time <= second.time


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two writes would leave a part of a line."""
    written: list[str] = []
    append = AppendFile.append
    monkeypatch.setattr(AppendFile, "append", lambda file, lines: written.append(lines) or append(file, lines))
    append_record(tmp_path, start(0, note="a\nb", argv=["\udcff"]))
    assert [(line[-1], line.count("\n")) for line in written] == [("\n", 1)]
    assert read_starts(tmp_path)[0].start["argv"] == ["\udcff"]  # an argument that is not UTF-8


@pytest.mark.parametrize("torn", ['{"kind": "sta', '{"kind": "start", "time": "2026', "\xff"])
def test_a_torn_last_line_is_skipped_and_removed_by_the_next_start(tmp_path: Path, torn: str) -> None:
    append_record(tmp_path, start(0))
    with (tmp_path / STARTS).open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert len(read_starts(tmp_path)) == 1
    append_record(tmp_path, start(1))
    assert [one.step for one in read_starts(tmp_path)] == [0, 10]
    assert [json.loads(line)["kind"] for line in (tmp_path / STARTS).read_text().splitlines()] == ["start", "start"]


@pytest.mark.parametrize("line", [
    "[]", "7", '"text"', "{", "[" * 100_000, "{}", '{"kind": "start"}', '{"kind": "start", "time": "soon", "step": 1}',
    '{"kind": "start", "time": 5, "step": 1}', '{"kind": "start", "time": "2026-11-20", "step": "1"}',
    '{"kind": "start", "time": "2026-11-20", "step": true}', '{"kind": "end", "started": "never"}', "",
])  # fmt: skip
def test_damaged_lines_are_skipped(tmp_path: Path, line: str) -> None:
    (tmp_path / STARTS).write_text(f"{line}\n{json.dumps(start(1))}\n{line}\n")
    [found] = read_starts(tmp_path)
    assert (found.step, found.end) == (10, {})


def test_damaged_values_of_an_end_are_unknown(tmp_path: Path) -> None:
    append_record(tmp_path, start(0))
    append_record(tmp_path, {"kind": "end", "started": TIMES[0], "time": None, "step": None})
    [found] = read_starts(tmp_path)
    assert (found.end_time, found.end_step) == (None, None)


def test_no_file(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    assert read_starts(tmp_path / "nowhere") == []
    (tmp_path / STARTS).mkdir()
    with pytest.raises(TrainkitError, match="expected a regular file, found a folder"):
        read_starts(tmp_path)
    with pytest.raises(IsADirectoryError):
        append_record(tmp_path, start(0))
