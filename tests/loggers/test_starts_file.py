"""`starts.jsonl`: appended by whole lines, and read whatever a crash, a full disk or someone else has left in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import TrainkitError
from trainkit.loggers.files import AppendFile
from trainkit.loggers.starts_file import STARTS, append_record, read_starts, utc_now

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
