"""`trainkit report`: one page about real runs, which needs no network and shows the numbers of the logs."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.support import run_python
from torch import nn

pytest.importorskip("bokeh")

from trainkit import Trainer, TrainModule
from trainkit.callbacks import LearningRateMonitor, MemoryMonitor, ModelCheckpoint, ThroughputMonitor
from trainkit.checkpoint import list_checkpoints
from trainkit.cli.logged_runs import not_drawn
from trainkit.cli.main import main
from trainkit.cli.report.charts import thin
from trainkit.cli.report.html import duration, number
from trainkit.cli.report.run_data import kind_of
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger

KINDS: list[type[Logger]] = [CSVLogger, JSONLLogger, TensorBoardLogger]


class Module(TrainModule):
    def __init__(self, lr: float = 0.1, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(logger: Any, epochs: int = 2, ckpt_path: str | None = None, **hparams: Any) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 4) for _ in range(6)]
    callbacks = [ThroughputMonitor(), LearningRateMonitor("step"), MemoryMonitor("step", verbose=False), ModelCheckpoint()]
    trainer = Trainer(
        max_epochs=epochs, log_every_n_steps=1, logger=logger, callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(**hparams), batches, batches, ckpt_path=ckpt_path)


class Page(HTMLParser):
    """The contents of a page; fails if an element is not closed."""

    VOID = ("meta", "link", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, list[list[str]]] = {}  # heading → rows of its tables
        self.text: list[str] = []
        self.values: list[float] = []  # of <data>
        self.links: list[str] = []
        self.tags: list[str] = []
        self.heading = ""
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "data":
            self.values.append(float(dict(attrs)["value"] or ""))
        elif tag == "tr":
            self.sections.setdefault(self.heading, []).append([])
        elif tag in ("td", "th"):
            self.sections[self.heading][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text.append(data)
        if self.open[-1:] == ["h2"]:
            self.heading = data
            self.sections.setdefault(data, [])
        elif "td" in self.open or "th" in self.open:
            self.sections[self.heading][-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def report(*arguments: str | Path) -> Page:
    assert main(["report", *map(str, arguments), "--out", "page.html"]) == 0
    return Page(Path("page.html"))


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name → (step, value), read without trainkit."""
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open() as file:
            rows: list[dict[str, Any]] = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    else:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        step = int(row.pop("step"))
        for name, value in row.items():
            found.setdefault(name, []).append((step, float(value)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_of_a_real_run(kind: type[Logger], capsys: pytest.CaptureFixture[str]) -> None:
    fit(kind(), lr=0.25)
    folder = Path("trainkit_runs/logs/default/version_0")
    capsys.readouterr()
    assert main(["report", "trainkit_runs"]) == 0
    assert capsys.readouterr().out == f"Reading {folder}\nWrote {folder / 'report.html'}\n"
    page = Page(folder / "report.html")

    assert list(page.sections) == [
        "Metrics", "Learning rates", "Throughput", "Memory", "Results", "Time", "Checkpoints", "Hyper-parameters",
        "Environment", "Continue",
    ]  # fmt: skip
    assert page.links == ["data:,"]  # nothing is loaded
    assert page.sections["Hyper-parameters"][1:] == [["lr", "0.25"], ["note", ""]]
    results = {row[0]: row for row in page.sections["Results"]}
    assert {"train_loss", "val_loss", "lr-SGD", "throughput/samples_per_sec", "memory/host"} <= set(results)
    assert results["train_loss"][2] == "12"  # the step of the last value
    assert results["train_loss"][-1] == "12"  # number of values
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert [row[:3] for row in page.sections["Checkpoints"][1:]] == [
        [one.path.name, str(one.manifest.step), str(one.manifest.epoch)] for one in checkpoints if one.manifest
    ]
    environment = dict(page.sections["Environment"][1:])
    manifest = checkpoints[0].manifest
    assert manifest is not None
    assert environment["run id"] == manifest.run_id
    assert (environment["seed"], environment["precision"]) == (str(manifest.seed), "32-true")
    assert f"ckpt_path={str(checkpoints[0].path.resolve())!r}" in page.words
    assert "samples/s" in page.words


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_numbers_are_those_of_the_log(kind: type[Logger]) -> None:
    fit(kind())
    folder = Path("trainkit_runs/logs/default/version_0")
    page = report(folder)
    expected = logged(folder)
    rows = page.sections["Results"][1:]
    assert {row[0] for row in rows} == expected.keys() - {"epoch"}
    values = iter(page.values)
    for name, *cells in rows:
        points = expected[name]
        lowest, highest = min(points, key=lambda one: one[1]), max(points, key=lambda one: one[1])
        for (step, value), text, at in zip((points[-1], lowest, highest), cells[0::2], cells[1::2], strict=False):
            assert next(values) == value
            assert math.isclose(float(text.replace(",", "")), value, rel_tol=1e-5)
            assert at == str(step)
        assert cells[-1] == str(len(points))
    kept = [one.manifest.metrics for one in list_checkpoints(folder / "checkpoints") if one.manifest]
    assert list(values) == [value for one in kept for name, value in one.items() if kind_of(name) == "Metrics"]


def test_several_runs_are_compared() -> None:
    for index, kind in enumerate(KINDS):
        fit(kind(version=index), lr=0.1 * (index + 1))
    root = Path("trainkit_runs/logs/default")
    page = report(*(root / f"version_{index}" for index in range(3)), root / "version_0")
    assert page.sections["Hyper-parameters"][:2] == [
        ["hyper-parameter", "default/version_0", "default/version_1", "default/version_2"],
        ["lr", "0.1", "0.2", repr(0.1 * 3)],
    ]
    assert [row[0] for row in page.sections["Runs"][1:]] == [f"default/version_{index}" for index in range(3)]
    loss = page.sections["Results"].index(["train_loss"])
    assert [row[0] for row in page.sections["Results"][loss + 1 : loss + 4]] == [f"default/version_{n}" for n in range(3)]
    assert page.html.count("class='differs'") == 1  # lr
    assert page.words.count("trainer.fit(") == 3


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from cli.test_report import Module
import torch
from trainkit import Trainer
from trainkit.callbacks import LambdaCallback, ModelCheckpoint
from trainkit.loggers import TensorBoardLogger

def kill(trainer, *_):
    if trainer.global_step == 9:
        os.kill(os.getpid(), signal.SIGKILL)

batches = [torch.randn(8, 4) for _ in range(6)]
callbacks = [ModelCheckpoint(every_n_train_steps=4), LambdaCallback(on_train_batch_end=kill)]
trainer = Trainer(max_epochs=2, log_every_n_steps=1, logger=TensorBoardLogger(), callbacks=callbacks, enable_progress_bar=False)
trainer.fit(Module(), batches)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_killed_run_that_was_resumed() -> None:
    killed = run_python(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    assert killed.returncode == -9, killed.stderr
    page = report("trainkit_runs")
    assert "resumed" not in page.words
    fit(TensorBoardLogger(), epochs=3, ckpt_path="auto")
    page = report("trainkit_runs")
    assert "resumed once" in page.words
    first, second = page.sections["Time"][1:]
    (_, resumed_at), last = first[2].split(" to at least "), "18"  # step 4 or 8; later steps were logged again after the resume
    assert resumed_at in ("4", "8")
    assert second[2] == f"{resumed_at} to {last}"
    assert first[3] == ""
    assert re.fullmatch(r"\d+\.\d s|\d+ min \d\d s", second[3])
    assert "gray: no record" in page.words
    [row] = [row for row in page.sections["Results"] if row[0] == "train_loss"]
    assert row[-1] == "18"  # no step twice


NASTY = "</script><script>alert(1)</script><b>&'\"${x}@y\\"


def test_user_text_is_escaped() -> None:
    logger = CSVLogger("logs", name="a<b>&'c")
    logger.log_hyperparams({NASTY: NASTY, "line": "a\x1b[31m\x00\n"})
    for step in range(3):
        logger.log_metrics({NASTY: float(step), f"train_{NASTY}": 1.0, f"memory/{NASTY}": 1.0}, step)
    logger.finalize()
    other = CSVLogger("logs", name="other")
    other.log_metrics({NASTY: 1.0, f"train_{NASTY}": 1.0}, 1)
    other.finalize()
    for arguments in (["logs/a<b>&'c"], ["logs/a<b>&'c", "logs/other"]):
        page = report(*arguments)
        assert NASTY in "".join(page.text)
        assert page.tags.count("script") == report("logs/other").tags.count("script")
        assert "b" not in [tag for tag in page.tags if len(arguments) == 1]
        assert "\x1b" not in page.html
        assert "alert(1)</script>" not in page.html


def test_missing_data_is_omitted() -> None:
    logger = CSVLogger("logs")
    logger.log_metrics({"loss": 0.5}, 1)
    logger.finalize()
    page = report("logs")
    assert list(page.sections) == ["Metrics", "Results", "Notes"]
    assert page.sections["Results"][1] == ["loss", "0.5", "1", "0.5", "1", "0.5", "1", "1"]


def test_a_run_with_checkpoints_only() -> None:
    trainer = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), [torch.randn(8, 4) for _ in range(3)])
    page = report("trainkit_runs")
    assert "Checkpoints" in page.sections
    assert "Results" not in page.sections
    assert "No metrics in" in page.words
    Path("trainkit_runs/logs/wandb/offline-run-20261125_101112-ab12cd34").mkdir(parents=True)
    assert "wandb sync trainkit_runs/logs/wandb/offline-run-20261125_101112-ab12cd34" in report("trainkit_runs").words


def test_secrets_among_hyper_parameters_are_hidden() -> None:
    fit(CSVLogger())
    folder = Path("trainkit_runs/logs/default/version_0")
    secrets = "api_key: hush\nlogger: {token: hush, n: 1}\ndata: ftp://me:hush@host/x\n"
    (folder / "hparams.yaml").write_text(f"{secrets}tokenizer: gpt2\n")
    words = report(folder).words
    assert "hush" not in words
    assert "gpt2" in words
    assert "ftp://***@host/x" in words


def test_a_damaged_checkpoint_and_unreadable_hyper_parameters() -> None:
    fit(CSVLogger())
    folder = Path("trainkit_runs/logs/default/version_0")
    (folder / "hparams.yaml").write_text("a: [1\n")
    first, *_ = list_checkpoints(folder / "checkpoints")
    (first.path / "model.safetensors").write_bytes(b"")
    page = report(folder)
    assert "hparams.yaml could not be read" in page.words
    assert "Hyper-parameters" not in page.sections
    rows = page.sections["Checkpoints"]
    assert rows[0][-1] == "problem"
    [damaged] = [row for row in rows if row[0] == first.path.name]
    assert "model.safetensors" in damaged[-1]


def test_values_that_are_not_finite_and_long_series() -> None:
    Path("run").mkdir()
    lines = "".join(f"{step},{'nan' if step == 500 else float(step % 1000)}\n" for step in range(10_000))
    Path("run/metrics.csv").write_text(f"step,loss\n{lines}9999.5,inf\n")
    page = report("run")
    assert "loss: 2 of 10,001 values are not finite." in page.words
    assert "1 metric with up to 10,001 points show at most 2,000 of them" in page.words
    [row] = page.sections["Results"][1:]
    assert row == ["loss", "inf", "9,999", "0", "0", "999", "999", "10,001"]
    assert len(page.html) < 2_000_000


def test_thinned_series_keep_extremes_ends_and_gaps() -> None:
    points = [(step, math.sin(step / 50)) for step in range(100_000)]
    points[31_234], points[77_777], points[50_000] = (31_234, 9.0), (77_777, -9.0), (50_000, math.nan)
    x, y = thin(points, 2000)
    assert len(x) <= 2002
    assert (np.nanmax(y), np.nanmin(y)) == (9.0, -9.0)
    assert (x[0], x[-1]) == (0, 99_999)
    assert x[np.isnan(y)].tolist() == [50_000]
    assert (np.diff(x) > 0).all()
    assert all(points[int(step)][1] == value for step, value in zip(x, y, strict=True) if not math.isnan(value))


@pytest.mark.parametrize("arguments, words", [
    (["nowhere"], "Expected the folder of a run, got 'nowhere', which does not exist. Fix: trainkit report trainkit_runs"),
    (["file"], "which is a file"),
    (["empty"], "expected metrics.csv, metrics.jsonl, events.out.tfevents.*"),
    (["run", "--out", "x.png"], "Expected a file ending in .html, got 'x.png'. Fix: --out x.html"),
    (["run", "--out", "file/x.html"], "cannot be written"),
    ([f"runs/{n}" for n in range(11)], "Expected at most 10 runs, got 11. Fix:"),
    (["broken"], "expected numbers"),
])  # fmt: skip
def test_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    Path("empty").mkdir()
    for name in ("run", *(f"runs/{n}" for n in range(11))):
        Path(name).mkdir(parents=True)
        Path(name, "metrics.csv").write_text("step,loss\n1,0.5\n")
    Path("broken").mkdir()
    Path("broken/metrics.csv").write_text("step,loss\n1,many\n")
    assert main(["report", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plot", "report"])
@pytest.mark.parametrize("made, words", [
    ("wandb/offline-run-20261125_101112-ab12cd34/x", "wandb sync {root}/wandb/offline-run-20261125_101112-ab12cd34 "),
    ("wandb/run-20261125_101112-ab12cd34/x", "Fix: open the page of the run ab12cd34 on Weights & Biases."),
    ("mlflow.db", "mlflow ui --backend-store-uri sqlite:///"),
    (f"{'a1' * 16}.zip", f"comet upload {{root}}/{'a1' * 16}.zip"),
])  # fmt: skip
def test_a_run_logged_to_a_service(command: str, made: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("logs", made).parent.mkdir(parents=True)
    Path("logs", made).touch()
    assert main([command, "logs"]) == 2
    printed = capsys.readouterr().err
    assert words.format(root="logs") in printed
    assert "has no metrics that trainkit can read" in printed


def test_without_bokeh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["report", "."]) == 2
    assert "trainkit-torch[report]" in capsys.readouterr().err


def test_formatted_numbers() -> None:
    assert [number(one) for one in (0.123456789, 1234567, 3.0, 1e-9, math.nan, -math.inf, 1e300)] == [
        "0.123457", "1,234,567", "3", "1e-09", "nan", "-inf", "1e+300",
    ]  # fmt: skip
    assert [duration(one) for one in (0.04, 59.4, 61, 3725, 200_000)] == [
        "0.0 s",
        "59.4 s",
        "1 min 01 s",
        "1 h 02 min",
        "2 d 7 h",
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_draws_it_without_an_error() -> None:
    fit(TensorBoardLogger())
    report("trainkit_runs")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=4000",
         "--user-data-dir=browser", "--dump-dom", Path("page.html").absolute().as_uri()],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    logged = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line and "setting log level" not in line]
    assert logged == []
    assert "bk-Figure" in done.stdout


def _with(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _bomb() -> bytes:
    levels = [f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(12)]
    return "\n".join(["a: &a [1, 2]", *levels]).encode()


def _merges() -> bytes:
    levels = [f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join([f'*{chr(97 + n)}'] * 9)}]}}" for n in range(12)]
    return "\n".join(["a: &a {x: 1}", *levels]).encode()


_GOOD = b"step,loss\n1,0.5\n2,0.25\n"
NOTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a YAML bomb": (_with("hparams.yaml", _bomb()), "values, each as often as it is used"),
    "a bomb of merge keys": (_with("hparams.yaml", _merges()), "expected no merge key"),
    "deep YAML": (_with("hparams.yaml", b"[" * 20_000 + b"]" * 20_000), "expected at most 100 levels"),
    "YAML that refers to itself": (_with("hparams.yaml", b"a: &a [*a]"), "expected at most 100 levels"),
    "YAML that is no UTF-8": (_with("hparams.yaml", b"a: \xff"), "hparams.yaml could not be read"),
    "a large number in YAML": (_with("hparams.yaml", b"a: 0x" + b"f" * 5000), "whole numbers of at most"),
    "a date that is none": (_with("hparams.yaml", b"a: 2026-13-45"), "hparams.yaml could not be read"),
    "a large YAML file": (_with("hparams.yaml", b"#" * (5 * 2**20)), "expected at most 4,194,304 bytes"),
    "a pipe as hparams.yaml": (lambda folder: os.mkfifo(folder / "hparams.yaml"), "expected a regular file, found a pipe"),
    "a link as hparams.yaml": (lambda folder: (folder / "hparams.yaml").symlink_to("secret"), "found a link"),
    "a pipe as starts.jsonl": (lambda folder: os.mkfifo(folder / "starts.jsonl"), "expected a regular file, found a pipe"),
    "a link as starts.jsonl": (lambda folder: (folder / "starts.jsonl").symlink_to("secret"), "found a link"),
    "starts of no time": (
        _with("starts.jsonl", b'{"kind": "start", "time": "9999-12-31T23:59:59-23:59", "step": 1}\n'),
        "The starts of this run were not recorded",
    ),
    "a start of a large step": (
        _with("starts.jsonl", b'{"kind": "start", "time": "2026-11-20", "step": ' + b"9" * 400 + b"}\n"),
        "The starts of this run were not recorded",
    ),
    "many starts": (
        _with("starts.jsonl", b"".join(b'{"kind": "start", "time": "2026-11-20", "step": %d}\n' % n for n in range(9000))),
        "The last 100 of 9,000 starts are shown.",
    ),
    "a pipe as events": (lambda folder: os.mkfifo(folder / "old" / "events.out.tfevents.1.h.1.0"), ""),
}


@pytest.mark.parametrize("name", NOTED)
def test_other_files_of_a_stranger_become_notes(name: str, run_dir: Path) -> None:
    (run_dir / "run" / "old").mkdir(parents=True)
    (run_dir / "secret").write_text("secret")
    (run_dir / "run" / "metrics.csv").write_bytes(_GOOD)
    make, words = NOTED[name]
    make(run_dir / "run")
    page = report("run")
    assert words in page.words
    assert "secret" not in page.words.replace("'secret'", "")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a long field": (_with("metrics.csv", b"step,a\n1," + b"9" * 200_000 + b"\n"), "field larger than field limit"),
    "a long line": (_with("metrics.csv", b"9" * (9 * 2**20) + b"\n"), "line 1: expected at most 8,388,608 bytes"),
    "no UTF-8": (_with("metrics.csv", b"step,a\n1,\xff\n"), "line 2: expected UTF-8"),
    "a step of 400 digits": (_with("metrics.csv", b"step,a\n" + b"9" * 400 + b",1\n"), "line 2: expected numbers"),
    "a large step": (_with("metrics.csv", b"step,a\n1e20,1\n"), "line 2: expected numbers"),
    "JSON of no UTF-8": (_with("metrics.jsonl", b'{"step": 1, "a": "\xff"}\n'), "line 1: expected UTF-8"),
    "a step of 400 digits in JSON": (_with("metrics.jsonl", b'{"step": ' + b"9" * 400 + b', "a": 1}\n'), "line 1: expected"),
    "deep JSON": (_with("metrics.jsonl", b"[" * 100_000 + b"\n"), "line 1: expected an object"),
    "a pipe": (lambda folder: os.mkfifo(folder / "metrics.csv"), "expected a regular file, found a pipe"),
    "a link": (lambda folder: (folder / "metrics.csv").symlink_to("/etc/passwd"), "expected a regular file, found a link"),
    "a folder": (lambda folder: (folder / "metrics.jsonl").mkdir(), "No metrics"),
    "a broken link": (lambda folder: (folder / "metrics.csv").symlink_to("nowhere"), "found a link"),
    "a large file": (lambda folder: os.truncate(_empty(folder / "metrics.csv"), 2**40), "expected at most 1,073,741,824 bytes"),
    "a pipe as events": (lambda folder: os.mkfifo(folder / "events.out.tfevents.1.h.1.0"), "found a pipe"),
    "events that lie": (_with("events.out.tfevents.1.h.1.0", b"\xff" * 100), ""),
}


def _empty(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize("name", REFUSED)
def test_metrics_of_a_stranger_are_refused(name: str, command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "run").mkdir()
    make, words = REFUSED[name]
    make(run_dir / "run")
    code = main([command, "run"])
    assert code == (0 if command == "report" and not words else 2)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command, out", [("report", "report.html"), ("plot", "metrics.png")])
def test_a_link_is_not_followed_for_the_output(
    command: str, out: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "run").mkdir()
    (run_dir / "mine").write_text("mine")
    (run_dir / "run" / "metrics.csv").write_bytes(_GOOD)
    (run_dir / "run" / out).symlink_to(run_dir / "mine")
    (run_dir / "run" / f".{out}.tmp").symlink_to(run_dir / "mine")
    assert main([command, "run"]) == 2
    assert f"{out} cannot be written: expected a regular file, found a link. Fix: --out {out}" in capsys.readouterr().err
    (run_dir / "run" / out).unlink()
    assert main([command, "run"]) == 0
    assert (run_dir / "mine").read_text() == "mine"
    assert (run_dir / "run" / out).stat().st_size > 1000
    assert sorted(path.name for path in (run_dir / "run").iterdir()) == sorted(["metrics.csv", out])


@pytest.mark.parametrize("command", [pytest.param("report", marks=pytest.mark.slow), "plot"])
def test_many_metrics(command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first hundred are drawn, and those that are named; the tables of a report have all."""
    (run_dir / "run").mkdir()
    names = [f"m{number}" for number in range(1500)]
    rows = [["step", *names], *([str(step), *["0.5"] * 1500] for step in range(2))]
    (run_dir / "run" / "metrics.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    assert main([command, "run", "--metrics", "m7,m1400"]) == 0
    assert "of 1,500 metrics are drawn" not in capsys.readouterr().out
    if command == "plot":
        assert not_drawn(names, "plot")[0] == set(names[100:])
        return
    page = report("run")
    assert "The first 100 of 1,500 metrics are drawn. To draw others: trainkit report RUN_DIR --metrics m100" in page.words
    assert page.html.count("<figure>") == 100
    assert len(page.sections["Results"]) == 1501


def test_a_folder_of_many_levels(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's own walk is recursive in older versions. Links are not followed, so a loop of them ends."""
    deep = run_dir / "run"
    for _ in range(400):
        deep = deep / "d"
        deep.mkdir(parents=True)
    (run_dir / "run" / "again").symlink_to(run_dir / "run")
    assert main(["report", "run"]) == 2
    assert "No metrics in run or its subfolders" in capsys.readouterr().err
