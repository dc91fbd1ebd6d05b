"""`trainkit report` shows the recorded starts of a run: interruptions on the time axis, environment, command to continue."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.support import run_python

pytest.importorskip("bokeh")

from cli.test_report import Page, fit, report

from trainkit.checkpoint import list_checkpoints
from trainkit.cli.main import main
from trainkit.cli.report.charts import find_interrupted_starts
from trainkit.cli.report.run_data import read_run
from trainkit.loggers import CSVLogger

FOLDER = Path("trainkit_runs/logs/default/version_0")

SCRIPT = """
import os, signal, sys
import torch
from trainkit import Trainer, TrainModule
from trainkit.callbacks import LambdaCallback, ModelCheckpoint

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

kind, last, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3:] and sys.argv[3] or None

def kill(trainer, *_):
    if trainer.global_step == last:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
batches = [torch.randn(8, 4) for _ in range(6)]
callbacks = [ModelCheckpoint(every_n_train_steps=4, keep_last=1), LambdaCallback(on_train_batch_end=kill)]
trainer = Trainer(
    max_epochs=3, log_every_n_steps=1, logger=kind, callbacks=callbacks, enable_progress_bar=False, accelerator="cpu"
)
trainer.fit(Module(), batches, ckpt_path=resume)
"""


def start(*arguments: str) -> int:
    """Run the script in a process; its exit code, or the number of the signal that killed it."""
    Path("train.py").write_text(SCRIPT)
    done = run_python("train.py", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return abs(done.returncode)


def code_of(page: Page) -> list[str]:
    """The lines of code in the section Continue."""
    section = page.html.partition("<h2>Continue</h2>")[2].partition("</section>")[0]
    blocks = re.findall(r"<code>(.*?)</code>", section, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", block)) for block in blocks]


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_run_that_was_killed_twice() -> None:
    assert start("csv", "9") == 9
    assert "running or killed" in report(FOLDER).words
    assert start("csv", "14", "auto") == 9
    assert start("csv", "99", "auto") == 0
    page = report(FOLDER)
    assert "resumed 2 times" in page.words
    header, *rows = page.sections["Time"]
    assert header == ["started", "last record", "steps", "gap before", "how it ended"]
    first, second, third = rows
    resumed = [re.fullmatch(r"0 to at least (\d+)", first[2]), re.fullmatch(r"(\d+) to 18", third[2])]
    assert all(resumed)
    a, b = (int(match[1]) for match in resumed if match)
    assert 0 < a <= b < 14  # a kill may come before a checkpoint is complete
    assert second[2] == f"{a} to at least {b}"
    assert [row[4] for row in rows] == ["killed (no end was recorded)"] * 2 + ["max_epochs=3 reached"]
    assert first[3] == ""
    assert all(re.fullmatch(r"\d+\.\d s|\d+ min \d\d s", row[3]) for row in (second, third))
    assert "✕ interrupted; for a killed process, its last record gray: no record" in page.words

    run = read_run(FOLDER, "run")
    records = [json.loads(line) for line in (FOLDER / "starts.jsonl").read_text().splitlines()]
    assert [len(find_interrupted_starts(run)), find_interrupted_starts(run)[0]] == [2, run.starts[0]]
    for start_, following in zip(run.starts, run.starts[1:], strict=False):
        assert start_.opened <= start_.end < following.opened
        times, steps = zip(*start_.points, strict=True)
        assert list(times) == sorted(times)
        assert list(steps) == sorted(steps)
        assert steps[-1] == following.points[0][1]  # that of the checkpoint, although it was removed later
    assert run.starts[2].points[-1][1] == 18
    assert len(records) == 4
    assert not run.notes


def test_the_environment_and_the_command() -> None:
    assert start("csv", "99") == 0
    page = report(FOLDER)
    records = [json.loads(line) for line in (FOLDER / "starts.jsonl").read_text().splitlines()]
    environment = dict(page.sections["Environment"][1:])
    names = ("trainkit", "torch", "python", "host", "device", "strategy", "precision")
    assert {name: environment[name] for name in names} == {name: records[0][name] for name in names}
    assert (environment["processes"], environment["run id"]) == ("1", records[0]["run_id"])
    assert "passed no ckpt_path to fit, so this command begins a new run, unless you change the script" in page.words
    assert "The run is finished: max_epochs=3 reached." in page.words
    command, call = code_of(page)
    newest = list_checkpoints(FOLDER / "checkpoints")[0].path.resolve()
    assert call == f"trainer.fit(module, train_dataloaders, ckpt_path={str(newest)!r})"
    assert command == f"cd {shlex.quote(os.getcwd())}\n{shlex.join([sys.executable, 'train.py', 'csv', '99'])}"


@pytest.mark.slow
def test_the_command_of_the_page_continues_the_run() -> None:
    assert start("csv", "9", "auto") == 9
    lines = (FOLDER / "starts.jsonl").read_text()
    page = report(FOLDER)
    assert "passed ckpt_path='auto' to fit, so the same command continues from the newest checkpoint" in page.words
    command = code_of(page)[0].replace(" 9 auto", " 99 auto")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["sh", "-c", command], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = (FOLDER / "starts.jsonl").read_text()
    assert after.startswith(lines)
    assert [json.loads(line)["kind"] for line in after.splitlines()] == ["start", "start", "end"]


def changed(**facts: Any) -> Page:
    """The page of a run whose last start was recorded with other facts."""
    fit(CSVLogger())
    path = FOLDER / "starts.jsonl"
    first, *rest = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(one) + "\n" for one in ({**first, **facts}, *rest)))
    return report(FOLDER)


@pytest.mark.parametrize("facts, words", [
    ({}, "was not started by a command line that can be run again (a notebook, python -c, a test)"),
    ({"command": 7}, "was not started by a command line that can be run again"),
    ({"command": ["python", "a b.py"], "ckpt_path": "x/step-1"}, "passed ckpt_path='x/step-1' to fit, so this command resumes"),
    ({"command": ["python", "t.py"], "launcher": "torchrun", "processes": 8, "ckpt_path": "last"},
     "from the newest checkpoint. Start it with torchrun on 8 processes, as before; the command is that of each process:"),
    ({"command": ["<b>", "</script>"], "host": "<b>", "folder": None}, "<b>"),
])  # fmt: skip
def test_what_the_page_says_about_the_command(facts: dict[str, Any], words: str) -> None:
    page = changed(**facts)
    assert words in page.words
    assert "b" not in page.tags


def test_values_that_changed_between_starts() -> None:
    fit(CSVLogger())
    fit(CSVLogger(), epochs=3, ckpt_path="auto")
    path = FOLDER / "starts.jsonl"
    records = list(map(json.loads, path.read_text().splitlines()))
    records[2] |= {"torch": "9.9.9", "host": "other"}
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    environment = dict(report(FOLDER).sections["Environment"][1:])
    assert environment["torch"] == f"{records[0]['torch']}, then 9.9.9"
    assert environment["host"] == f"{records[0]['host']}, then other"
    assert ", then" not in environment["python"]


def test_starts_of_another_run_in_the_same_folder_do_not_count() -> None:
    fit(CSVLogger(version=0))
    fit(CSVLogger(version=0), epochs=1)
    run = read_run(FOLDER, "run")
    assert [start.reached for start in run.starts] == [6]
    assert "resumed" not in report(FOLDER).words


def test_a_run_without_recorded_starts() -> None:
    fit(CSVLogger())
    fit(CSVLogger(), epochs=3, ckpt_path="auto")
    (FOLDER / "starts.jsonl").unlink()
    page = report(FOLDER)
    assert "The starts of this run were not recorded" in page.words
    assert "resumed" not in page.words
    assert page.sections["Environment"][0] == ["newest checkpoint", "value"]
    assert "In the script of the run, with the same module and data:" in page.words


@pytest.mark.parametrize("command", ["plot", "report"])
def test_an_evaluation_is_skipped(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "plot":
        pytest.importorskip("matplotlib")
    fit(CSVLogger())
    evaluated = CSVLogger()
    evaluated.set_default_root("trainkit_runs")
    evaluated.log_metrics({"test_loss": 0.5, "epoch": 0}, 1)
    evaluated.finalize()
    capsys.readouterr()
    assert main([command, "trainkit_runs"]) == 0
    skipped, reading, _ = capsys.readouterr().out.splitlines()
    assert skipped == f"Skipping {FOLDER.with_name('version_1')}, which is newer but has no training metrics"
    assert reading == f"Reading {FOLDER}"
