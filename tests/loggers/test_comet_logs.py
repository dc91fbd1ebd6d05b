"""``CometLogger`` against real offline experiments, whose archives are read back; its server is played where one is needed."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from helpers.patience import PATIENCE
from helpers.runs.trackers import PLAIN, comet_records, needs

from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MissingPackageError, UnknownNameError
from trainkit.loggers import CometLogger, CSVLogger
from trainkit.loggers.attach import attach
from trainkit.loggers.comet_archives import archive_unfinished, is_written, steps_in_archives

pytestmark = [needs("comet_ml"), pytest.mark.usefixtures("comet_offline")]


def offline(folder: Path, **options: Any) -> CometLogger:
    return CometLogger(online=False, save_dir=folder, **PLAIN, **options)


def train(logger: CometLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.log_metrics({"loss": step / 8, "epoch": 0}, step)
        if step % 2 == 0:
            logger.log_metrics({"val": step * 2.0, "epoch": 0}, step)


def whole(last: int) -> dict[str, list[tuple[int, float]]]:
    return {
        "loss": [(step, step / 8) for step in range(1, last + 1)],
        "val": [(step, step * 2.0) for step in range(2, last + 1, 2)],
    }


def killed(logger: CometLogger) -> None:
    """What a SIGKILL leaves: the folder as it is, and nothing done about it."""
    folder, archives = Path(logger.experiment.tmpdir), Path(logger.save_dir)
    kept = [{path: path.read_bytes() for path in paths} for paths in (folder.iterdir(), archives.glob("*.zip"))]
    logger.experiment.end()
    for path in archives.glob("*.zip"):
        path.unlink()
    folder.mkdir(parents=True)
    for path, content in {**kept[0], **kept[1]}.items():
        path.write_bytes(content)


def test_metrics_hyperparams_and_media_reach_the_archive(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    logger = offline(tmp_path / "a" / "b", project="demo", name="first", tags=["x"], prefix="p")
    assert (logger.name, logger.version, logger.log_dir) == ("demo", None, str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}})
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.log_metrics({"val": float("nan"), "epoch": 1}, step=10)
    logger.log_image("sample", [np.zeros((1, 3, 4)), np.ones((3, 4, 4))])
    logger.log_text("note", "to be or not", 11)
    logger.log_histogram("weights", np.arange(10.0), 12)
    key, folder = logger.version, Path(logger.save_dir)
    assert key == logger.experiment.get_key()
    assert logger.experiment.get_name() == "first"
    logger.finalize("failed")
    [archive] = folder.iterdir()  # and no folder of what is unfinished
    assert archive.name.startswith(f"{key}-")
    assert comet_records(folder) == {"p-loss": [(10, 0.5)], "p-val": [(10, "NaN")]}
    media = {"<image> sample": [10, 10], "<text> note": [11], "<histogram> weights": [12]}
    assert steps_in_archives(folder, str(key)) == {"p-loss": [10], "p-val": [10], **media}
    with ZipFile(archive) as file:
        messages = file.read("messages.json").decode()
        assert b"to be or not" in [file.read(name) for name in file.namelist()]
    assert '"paramName":"model/width","paramValue":8' in messages
    assert '"epoch":1,"metricName":"p-val"' in messages


def test_one_experiment_for_all_fits_of_a_logger(tmp_path: Path) -> None:
    import comet_ml

    logger = offline(tmp_path)
    for fit in range(3):
        attach([logger], tmp_path)
        logger.log_metrics({"loss": fit}, fit)
        logger.finalize("success")
    assert comet_ml.get_running_experiment() is logger.experiment  # still open: your own calls after fit go to it
    comet_ml.end()
    logger.log_metrics({"loss": 3}, 3)  # ended: a second part of the same experiment
    logger.finalize("failed")
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {logger.version}
    assert comet_records(tmp_path) == {"loss": [(step, step) for step in range(4)]}


def test_the_next_logger_ends_the_idle_experiment_of_the_last_one(tmp_path: Path) -> None:
    keys: list[Any] = []
    for fold in range(2):
        logger = offline(tmp_path / str(fold))
        logger.log_metrics({"loss": fold}, 0)
        keys.append(logger.version)
        if fold == 0:
            logger.finalize("success")
            del logger
            gc.collect()
    with pytest.raises(ConfigurationError, match="Two CometLoggers at a time"):
        offline(tmp_path).log_metrics({"loss": 2}, 0)
    logger.finalize("failed")
    assert len(set(keys)) == 2
    assert [comet_records(tmp_path / str(fold)) for fold in range(2)] == [{"loss": [(0, 0)]}, {"loss": [(0, 1)]}]


def test_an_experiment_of_the_user_is_used_and_never_ended(tmp_path: Path) -> None:
    import comet_ml

    config = comet_ml.ExperimentConfig(offline_directory=str(tmp_path), **PLAIN)
    mine = comet_ml.start(online=False, experiment_config=config)
    logger = offline(tmp_path / "elsewhere")
    logger.log_metrics({"a": 1}, 0)
    assert logger.experiment is mine
    assert logger.version == mine.get_key()
    logger.state_dict()
    logger.finalize("failed")
    assert not mine.ended
    with pytest.raises(ConfigurationError, match=r"has .* open; it has one at a time. Fix: call comet_ml.end\(\) before"):
        offline(tmp_path, experiment_key="k" * 32).log_metrics({"a": 1}, 0)
    mine.end()
    assert comet_records(tmp_path) == {"a": [(0, 1)]}


@pytest.mark.parametrize("at, last", [(0, 3), (4, 4), (4, 9)])
def test_a_killed_process_loses_nothing_and_nothing_comes_twice(at: int, last: int, tmp_path: Path) -> None:
    first = offline(tmp_path)
    assert first.experiment is not None
    train(first, 1, at)
    state = first.state_dict()
    assert state["counts"] == ({"loss": 4, "val": 2} if at else {})
    train(first, at + 1, last)
    first.log_text("note", "once", last)
    first.save()
    with (Path(first.experiment.tmpdir) / "messages.json").open("a") as file:
        file.write('{"payload":{"torn')
    key = str(first.version)
    killed(first)
    assert len([path for path in (tmp_path / f"{key}.unfinished").iterdir() if path.is_dir()]) == 1

    second = offline(tmp_path)
    second.load_state_dict(copy.deepcopy(state))
    assert second.version == key
    for step in range(at + 1, 11):
        train(second, step, step)
        if step == last:
            second.log_text("note", "once", last)
    if last == at:
        second.log_text("note", "once", last)
    middle = second.state_dict()
    train(second, 11, 12)
    second.load_state_dict(middle)  # in the same process
    train(second, 11, 13)
    second.finalize("failed")
    assert comet_records(tmp_path) == whole(13)
    assert steps_in_archives(tmp_path, key)["<text> note"] == [last]
    parts = sorted(path.name.removeprefix(f"{key}-") for path in tmp_path.iterdir())
    assert len(parts) == 3
    assert {"part0.zip", "part1.zip"} < set(parts)


def test_an_experiment_that_the_user_names_goes_on_behind_what_it_has(tmp_path: Path) -> None:
    first = offline(tmp_path)
    train(first, 1, 4)
    first.finalize("failed")
    second = offline(tmp_path, experiment_key=first.version)
    assert second.state_dict() == {"last_step": -1}  # it is not known yet what it has
    train(second, 1, 2)  # another training: nothing of it is left out
    assert second.state_dict()["counts"] == {"loss": 6, "val": 3}
    second.finalize("failed")
    assert comet_records(tmp_path) == {name: whole(4)[name] + whole(2)[name] for name in ("loss", "val")}


def test_parts_with_the_same_seed_do_not_replace_each_other(tmp_path: Path) -> None:
    """comet_ml names an archive by letters that the seeded generator gives."""
    key = None
    for part in range(3):
        random.seed(1)
        logger = offline(tmp_path, experiment_key=key)
        logger.log_metrics({"loss": part}, part)
        logger.finalize("failed")
        key = logger.version
    assert comet_records(tmp_path) == {"loss": [(part, part) for part in range(3)]}


def test_what_is_left_of_other_experiments_stays(tmp_path: Path) -> None:
    for name in ("a.unfinished/tmp1/messages.json", "b.unfinished/tmp1/messages.json", "b.unfinished/tmp2/experiment.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "b-half.zip").write_bytes(b"no archive")
    for name, content in {"b-users.zip": "x", "b-empty.zip": ""}.items():
        with ZipFile(tmp_path / name, "w") as file:
            if content:
                file.writestr(content, content)
    before = sorted(path for path in tmp_path.rglob("*") if path.name != "b-empty.zip")
    assert archive_unfinished(tmp_path, "b") == []  # killed before it could log
    assert sorted(tmp_path.rglob("*")) == before
    assert steps_in_archives(tmp_path, "b") == {}


def test_two_processes_that_go_on_at_the_same_time(tmp_path: Path) -> None:
    """Each part that was left is in one archive, but for one that a third process still logs to, and neither stumbles over
    what the other does.
    """
    for part in range(40):
        left = tmp_path / "k.unfinished" / f"tmp{part}"
        left.mkdir(parents=True)
        (left / "experiment.json").write_text("{}")
        (left / "messages.json").write_text(f'{{"part": {part}}}\n')
    text = (
        "import sys; from pathlib import Path; from trainkit.loggers.comet_archives import archive_unfinished, kept_in, tidy\n"
        "from trainkit.loggers.comet_archives import claim\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "if len(sys.argv) > 1:\n"
        "    claim(folder / 'k.unfinished' / 'tmp0')\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "made = archive_unfinished(folder, 'k')\n"
        "for _ in range(50):\n"
        "    with kept_in(folder / 'k.unfinished'):\n"
        "        import tempfile; Path(tempfile.mkdtemp()).rmdir()\n"
        "    tidy(folder, 'k')\n"
        "print(*(path.name for path in made))\n"
    )
    command, pipe = [sys.executable, "-c", text], subprocess.PIPE
    owner = subprocess.Popen([*command, "claims"], stdin=pipe, stdout=pipe, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for one in both:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    made = [name for one in both for name in one.communicate(timeout=PATIENCE)[0].split()]
    assert [one.returncode for one in both] == [0, 0]
    with pytest.warns(TrainkitWarning, match=f"process {owner.pid} logs to the experiment k too"):
        assert archive_unfinished(tmp_path, "k") == []
    owner.kill()
    owner.communicate()
    made += [path.name for path in archive_unfinished(tmp_path, "k")]
    assert sorted(made) == sorted(path.name for path in tmp_path.iterdir()) == sorted(f"k-part{part}.zip" for part in range(40))
    assert {ZipFile(tmp_path / name).read("messages.json") for name in made} == {b'{"part": %d}\n' % part for part in range(40)}


def test_when_all_is_written(tmp_path: Path) -> None:
    assert not is_written(tmp_path, "saves", 1)
    lines = ['{"payload":{"key":"saves","value":1},"type":"log_other"}\n', '{"payload":{"key":"saves","value":2},"type":"log']
    (tmp_path / "messages.json").write_text("{}\n" * 4000 + "".join(lines))
    assert is_written(tmp_path, "saves", 1)
    assert not is_written(tmp_path, "other", 1)
    assert not is_written(tmp_path, "saves", 2)  # not whole yet


def test_the_key_of_another_experiment_goes_before_that_of_a_checkpoint(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    logger = offline(tmp_path, experiment_key="k" * 32)
    logger.load_state_dict({"last_step": 4, "key": "other", "counts": {}})
    assert caplog.messages[-1] == (
        f"CometLogger logs to the experiment {'k' * 32}, not to other, to which the resumed run logged."
    )
    logger.log_metrics({"a": 1})
    logger.finalize("failed")
    assert comet_records(tmp_path) == {"a": [(5, 1)]}


def test_nothing_happens_on_other_processes(tmp_path: Path) -> None:
    logger = offline(tmp_path)
    logger.set_rank(1)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.log_asset("x")
    logger.load_state_dict({"last_step": 4, "key": "x", "counts": {}})
    assert (logger.version, logger.state_dict()) == (None, {"last_step": 4})
    logger.finalize("failed")
    assert list(tmp_path.iterdir()) == []


class Server:
    """Comet's server, as far as a logger asks it: it has records, and gives them back in no order."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.flushed = 0
        self.ended = False
        self.calls: list[dict[str, Any]] = []

    def start(self, **given: Any) -> Server:
        self.calls.append(given)
        self.ended = False
        return self

    def get_key(self) -> str:
        return "key"

    def log_metrics(self, values: dict[str, Any], step: int, epoch: int | None) -> None:
        for name, value in values.items():
            at = {"timestamp": 1000 + len(self.records) // 2, "offset": len(self.records)}
            self.records.append({"metricName": name, "metricValue": str(value), "step": step, **at})

    def flush(self) -> bool:
        self.flushed += 1
        return True

    def end(self) -> None:
        self.ended = True

    def of_key(self, api_key: str | None) -> Server:
        return self

    def get_experiment_by_key(self, key: str) -> Server:
        return self

    def get_metrics(self) -> list[dict[str, Any]]:
        return self.records[::-1]


def test_online_what_was_sent_before_the_kill_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import comet_ml

    server = Server()
    monkeypatch.setattr(comet_ml, "start", server.start)
    monkeypatch.setattr(comet_ml, "API", server.of_key)
    first = CometLogger(api_key="secret", workspace="me")
    assert first.log_dir is None
    train(first, 1, 4)
    state = first.state_dict()
    assert server.flushed == 1  # a checkpoint's records have arrived
    train(first, 5, 8)
    server.records = server.records[:-2]  # which were still to be sent
    server.ended = True
    second = CometLogger(api_key="secret")
    second.load_state_dict(state)
    train(second, 5, 10)
    found = {name: [r["step"] for r in server.records if r["metricName"] == name] for name in ("loss", "val")}
    assert found == {name: [step for step, _ in rows] for name, rows in whole(10).items()}
    second.finalize("failed")
    assert server.ended
    [start, again] = server.calls
    assert {k: v for k, v in start.items() if k != "experiment_config"} == dict(
        api_key="secret", online=True, workspace="me", project_name="trainkit", experiment_key=None, mode=None
    )
    assert again["experiment_key"] == "key"
    assert not start["experiment_config"].auto_metric_logging


def test_what_is_said_to_comet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import comet_ml

    server = Server()
    monkeypatch.setattr(comet_ml, "start", server.start)
    monkeypatch.setattr(comet_ml, "API", server.of_key)
    where: dict[str, Any] = {
        "api_key": "secret",
        "workspace": "me",
        "experiment_key": "k" * 32,
        "mode": "create",
        "online": True,
    }
    logger = CometLogger(project="mine", offline_directory=tmp_path / "there", auto_metric_logging=True, prefix="p", **where)
    logger.log_metrics({"loss": 1.0}, 3)
    (given,) = server.calls
    config = given.pop("experiment_config")
    assert given == {**where, "project_name": "mine"}
    assert config.auto_metric_logging
    assert str(logger.save_dir) == str(tmp_path / "there")
    assert [(record["metricName"], record["step"]) for record in server.records] == [("p-loss", 3)]


@pytest.mark.parametrize("arguments, error, words", [
    (dict(), ConfigurationError, r"no API key. Fix: CometLogger\(online=False\) keeps the experiment here"),
    (dict(online=True), ConfigurationError, "no API key"),
    (dict(online=False, nam="x"), UnknownNameError, "Did you mean 'name'"),
    (dict(online=False, project_name="x"), UnknownNameError, "Fix: project='…'"),
    (dict(mode="new"), ConfigurationError, "mode: expected 'get_or_create'"),
    (dict(save_dir="a", offline_directory="b"), ConfigurationError, "mean the same"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CometLogger(**arguments)


def test_what_comet_is_configured_to_do_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMET_PROJECT_NAME", "from_environment")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    logger = CometLogger()
    assert repr(logger) == "CometLogger(project='from_environment', experiment_key=None, online=False)"
    monkeypatch.delenv("COMET_START_ONLINE")
    monkeypatch.setenv("COMET_API_KEY", "secret")
    assert repr(CometLogger(project="x")) == "CometLogger(project='x', experiment_key=None, online=True)"
    beside = CSVLogger()
    attach([logger, beside], tmp_path)
    assert (logger.root_dir, logger.log_dir) == (str(tmp_path / "logs"), str(tmp_path / "logs"))
    assert beside.log_dir == str(tmp_path / "logs" / "default" / "version_0")
    assert "COMET_DISABLE_AUTO_LOGGING" not in os.environ


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install comet_ml.*trainkit-torch\[comet\]"):
        CometLogger(online=False)
