"""`CSVLogger`: a killed process loses no row, and columns can be added later."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigurationError
from trainkit.loggers import CSVLogger
from trainkit.loggers.csv_logs import CSVWriter
from trainkit.loggers.run_files import read_metrics


def table(folder: Path) -> str:
    return (folder / "default" / "version_0" / "metrics.csv").read_text("utf-8")


def test_the_file_as_a_whole(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"train_loss": 0.1, "epoch": 0}, 10)
    logger.log_metrics({"epoch": 0, "train_loss": float("nan")}, 20)
    logger.log_metrics({"val_loss": float("inf"), "val,acc": 1e-300, "epoch": 0}, 20)
    logger.log_metrics({"train_loss": float("-inf"), "epoch": 1}, 30)
    assert table(tmp_path) == (
        'step,epoch,train_loss,val_loss,"val,acc"\n'
        "10,0,0.1,,\n"
        "20,0,nan,,\n"
        "20,0,,inf,1e-300\n"
        "30,1,-inf,,\n"
    )  # fmt: skip
    assert logger.experiment.columns == ("step", "epoch", "train_loss", "val_loss", "val,acc")
    logger.finalize()
    assert sorted(path.name for path in (tmp_path / "default" / "version_0").iterdir()) == ["metrics.csv"]


def test_where_the_file_is_and_what_its_columns_are_called(tmp_path: Path) -> None:
    logger = CSVLogger(save_dir=tmp_path / "logs", name="mine", version="first", prefix="p")
    logger.log_metrics({"loss": 1.0, "epoch": 0}, 1)
    logger.finalize()
    assert (tmp_path / "logs" / "mine" / "first" / "metrics.csv").read_text("utf-8") == "step,epoch,p-loss\n1,0,1.0\n"


def test_every_row_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": step}, step)
        assert table(tmp_path).count("\n") == step + 2


def test_rows_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("trainkit.loggers.csv_logs.time.monotonic", lambda: now)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=3)
    written = []
    for step in range(7):
        now += 1.5 if step == 5 else 0.1
        logger.log_metrics({"loss": step}, step)
        written.append(table(tmp_path).count("\n") - 1)
    assert written == [0, 0, 3, 3, 3, 6, 6]
    logger.save()
    assert table(tmp_path).count("\n") == 8
    logger.log_metrics({"loss": 7}, 7)
    logger.log_metrics({"new": 8}, 8)  # a new column flushes waiting rows
    logger.finalize()
    assert [step for step, _ in read_metrics(tmp_path)["loss"]] == list(range(8))


def test_a_new_process_continues_in_the_same_file(tmp_path: Path) -> None:
    for start in (0, 2):
        logger = CSVLogger(tmp_path, version=0)
        logger.log_metrics({"loss": 1.5}, start)
        logger.log_metrics({"loss": 2.5, f"from_{start}": 1}, start + 1)
        logger.finalize()
    assert table(tmp_path) == "step,loss,from_0,from_2\n0,1.5,,\n1,2.5,1,\n2,1.5,,\n3,2.5,,1\n"


def test_a_row_that_was_torn_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "default" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("step,loss\n1,0.5\n2,0.2")  # a part of 0.25: a truncated number is a number, too
    assert read_metrics(tmp_path) == {"loss": [(1, 0.5)]}
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"loss": 0.25}, 2)
    logger.finalize()
    assert path.read_text() == "step,loss\n1,0.5\n2,0.25\n"
    path.write_text("step,lo")
    logger.log_metrics({"loss": 0.125}, 3)
    logger.finalize()
    assert path.read_text() == "step,loss\n3,0.125\n"


def test_torn_rows_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n" + "9" * 200_000)
    CSVWriter(path).close()
    assert path.read_text() == "step,loss\n"


def test_a_file_written_by_lightning_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss,step\n0,0.5,1\n")
    logger = CSVLogger(tmp_path.parent, name=None, version=tmp_path.name)
    logger.log_metrics({"loss": 0.25, "epoch": 1}, 2)
    logger.finalize()
    assert path.read_text() == "epoch,loss,step\n0,0.5,1\n1,0.25,2\n"


@pytest.mark.parametrize("moment", ["trainkit.loggers.log_folder.os.fsync", "trainkit.loggers.log_folder.os.replace"])
def test_a_failure_while_a_column_is_added_keeps_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1}, 1)
    before = table(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(moment, full)
        with pytest.raises(OSError, match="No space"):
            logger.log_metrics({"loss": 2, "new": 2}, 2)
    assert table(tmp_path) == before
    assert [path.name for path in (tmp_path / "default" / "version_0").iterdir()] == ["metrics.csv"]
    logger.log_metrics({"loss": 3, "new": 3}, 3)
    logger.finalize()
    assert table(tmp_path) == "step,loss,new\n1,1,\n2,2,2\n3,3,3\n"


KILLED = """
import os, sys
from trainkit.loggers import CSVLogger
logger = CSVLogger(sys.argv[1], version=0)
step = 0
while True:
    logger.log_metrics({"loss": step, f"column_{step % 40}": step}, step)
    os.write(1, b"%d\\n" % step)
    step += 1
"""


def test_a_process_killed_at_any_moment_loses_no_row_it_had_written(tmp_path: Path) -> None:
    for kill_after in (5, 23, 38):  # in the first 40 steps, each of which adds a column
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / str(kill_after))], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            acknowledged = [int(process.stdout.readline()) for _ in range(kill_after)]
            process.kill()
            acknowledged += [int(line) for line in process.stdout.read().split()]
        rows = read_metrics(tmp_path / str(kill_after))["loss"]
        assert [step for step, _ in rows][: len(acknowledged)] == acknowledged
        assert len(rows) - len(acknowledged) in (0, 1)  # killed after writing the row and before reporting it
        logger = CSVLogger(tmp_path / str(kill_after), version=0)
        logger.log_metrics({"loss": -1, "last": -1}, len(rows))
        logger.finalize()
        with (tmp_path / str(kill_after) / "default/version_0/metrics.csv").open(newline="") as file:
            lengths = {len(row) for row in csv.reader(file)}
        assert len(lengths) == 1


def test_a_crash_right_before_the_new_file_takes_its_place(tmp_path: Path) -> None:
    program = """
import os, sys
from trainkit.loggers import CSVLogger
logger = CSVLogger(sys.argv[1], version=0)
logger.log_metrics({"loss": 1}, 1)
os.replace = lambda *_: os._exit(9)
logger.log_metrics({"new": 2}, 2)
"""
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 9
    assert table(tmp_path) == "step,loss\n1,1\n"
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"new": 2}, 2)
    logger.finalize()
    assert table(tmp_path) == "step,loss,new\n1,1,\n2,,2\n"
    assert os.listdir(tmp_path / "default" / "version_0") == ["metrics.csv"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_disk_that_is_full_leaves_no_half_row_and_the_row_comes_later(tmp_path: Path) -> None:
    program = """
import resource, sys
from trainkit.loggers import CSVLogger
logger = CSVLogger(sys.argv[1], version=0)
logger.log_metrics({"loss": 0}, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
for step in range(1, 9):
    try:
        logger.log_metrics({"loss": step / 8}, step)
    except OSError:
        break
print(step, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
text = open(logger.experiment.path).read()
assert text == "step,loss\\n0,0\\n1,0.125\\n2,0.25\\n", text
logger.log_metrics({"loss": 9}, 9)
"""
    arguments = [sys.executable, "-W", "error", "-c", program, str(tmp_path)]
    assert subprocess.run(arguments, check=True, capture_output=True, text=True).stdout == "3\n"
    assert table(tmp_path) == "step,loss\n0,0\n1,0.125\n2,0.25\n3,0.375\n9,9\n"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10", None])
def test_flush_interval_is_checked(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="flush_logs_every_n_steps: expected a whole number ≥ 1"):
        CSVLogger(flush_logs_every_n_steps=value)
