"""`JSONLLogger`: strict JSON, one object per line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.console import TrainkitWarning
from trainkit.loggers import CSVLogger, JSONLLogger, log_folder
from trainkit.loggers.log_folder import AppendFile
from trainkit.loggers.logger_setup import attach
from trainkit.loggers.run_files import read_metrics


def strict(text: str) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_file_as_a_whole(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path, prefix="p")
    logger.log_metrics({"loss": 0.1, "epoch": 0}, 10)
    logger.log_metrics({"loss": math.nan, "zähler\n": math.inf, "epoch": 1}, 20)
    logger.log_metrics({"loss": -math.inf}, 30)
    path = tmp_path / "default" / "version_0" / "metrics.jsonl"
    assert path.read_text("utf-8") == (
        '{"step": 10, "epoch": 0, "p-loss": 0.1}\n'
        '{"step": 20, "epoch": 1, "p-loss": "nan", "p-zähler\\n": "inf"}\n'
        '{"step": 30, "p-loss": "-inf"}\n'
    )
    assert [strict(line) for line in path.read_text("utf-8").splitlines()]
    logger.finalize()
    read = read_metrics(tmp_path)
    assert list(read) == ["epoch", "p-loss", "p-zähler\n"]
    assert str(read["p-loss"]) == "[(10, 0.1), (20, nan), (30, -inf)]"
    assert read["p-zähler\n"] == [(20, math.inf)]


def test_text_has_a_file_of_its_own(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log_metrics({"loss": 1}, 4)
    logger.log_text("sample", "two\nlines, “quoted”")
    logger.log_text("sample", "nan", 5)
    logger.finalize()
    lines = (tmp_path / "default" / "version_0" / "text.jsonl").read_text("utf-8").splitlines()
    assert [strict(line) for line in lines] == [
        {"step": 4, "key": "sample", "text": "two\nlines, “quoted”"},
        {"step": 5, "key": "sample", "text": "nan"},
    ]
    assert read_metrics(tmp_path) == {"loss": [(4, 1.0)]}


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log_metrics({"loss": 1}, 1)
    logger.finalize()
    path = tmp_path / "default" / "version_0" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "loss": 0.')
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0)]}
    logger.log_metrics({"loss": 2}, 2)
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0), (2, 2.0)]}


# --------------------------------------------------------------------------------------- on a disk that is full, see test_disk


class Disk:
    """Whether files can be written now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        append = AppendFile.append

        def limited(file: AppendFile, lines: str) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            append(file, lines)

        monkeypatch.setattr(AppendFile, "append", limited)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_texts_and_metrics_wait_for_space(tmp_path: Path, disk: Disk) -> None:
    logger = JSONLLogger(tmp_path)
    attach([logger], tmp_path)
    logger.log_text("sample", "one", 1)
    disk.full = True
    with pytest.warns(TrainkitWarning, match="JSONLLogger could not write the text 'sample': .*No space") as warned:
        logger.log_text("sample", "two", 2)
    logger.log_metrics({"loss": 2.0}, 2)
    logger.log_text("sample", "three", 3)
    assert len(warned) == 1
    disk.full = False
    logger.save()
    folder = tmp_path / "default" / "version_0"
    assert [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()] == ["one", "two", "three"]
    assert read_metrics(tmp_path)["loss"] == [(2, 2.0)]
    logger.finalize()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_memory_is_bounded_and_what_is_dropped_is_said(
    kind: Any, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_folder, "_WAITING", 1000)
    logger = kind(tmp_path)
    attach([logger], tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    disk.full = True
    with pytest.warns(TrainkitWarning) as warned:
        log_steps(logger, range(1, 100))
    assert [("oldest" in str(one.message), "Training continues" in str(one.message)) for one in warned] in (
        [(False, True), (True, False)],
        [(True, False), (False, True)],
    )
    disk.full = False
    with pytest.warns(TrainkitWarning, match=r"is written again, without \d+ records that did not fit into memory"):
        logger.log_metrics({"loss": 0.0}, 100)
    logger.finalize()
    steps = [step for step, _ in read_metrics(tmp_path)["loss"]]
    assert 5 < len(steps) < 50
    assert steps == [0, *range(102 - len(steps), 101)]


def log_steps(logger: Any, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"loss": 0.0}, step)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_a_file_that_cannot_be_opened_loses_no_row(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = kind(tmp_path)
    attach([logger], tmp_path)

    def none_left(file: AppendFile, path: Path) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(AppendFile, "__init__", none_left)
        with pytest.warns(TrainkitWarning, match="Too many open files") as warned:
            log_steps(logger, range(3))
        assert len(warned) == 1
    log_steps(logger, range(3, 5))
    logger.finalize()
    assert [step for step, _ in read_metrics(tmp_path)["loss"]] == [0, 1, 2, 3, 4]


def test_part_of_a_line_that_could_not_be_removed_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(path := tmp_path / "lines")
    file.append("one\n")

    class Failing:
        """A disk that takes part of a line, and then fails altogether."""

        def __init__(self, raw: Any) -> None:
            self.raw, self.written = raw, False

        def write(self, data: Any) -> int:
            if self.written:
                raise OSError(5, "Input/output error")
            self.written = True
            return int(self.raw.write(data[:2]))

        def truncate(self, size: int) -> None:
            raise OSError(5, "Input/output error")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.raw, name)

    raw = file._file
    monkeypatch.setattr(file, "_file", Failing(raw))
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            file.append("two\n")
    assert os.path.getsize(path) == 6
    monkeypatch.setattr(file, "_file", raw)
    file.append("three\n")
    file.close()
    assert path.read_text() == "one\nthree\n"
