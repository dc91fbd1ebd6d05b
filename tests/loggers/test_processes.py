"""Loggers on several processes: only the main process writes, and all processes know the folder."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.worlds.worlds import run_world

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import join
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger
from trainkit.loggers.logger_setup import attach, share_folders, states_of


def joined() -> World:
    return join(RequestedDevices(), timeout=timedelta(seconds=30))


class Lines(Logger):
    """A user's logger."""

    def write_metrics(self, metrics: Any, step: int) -> None:
        pass


def attached(world: World, *loggers: Logger) -> list[Logger]:
    attach(loggers, "root", world.rank)
    return list(loggers)


def where(logger: Logger) -> Any:
    return logger.version, logger.log_dir


def first_run() -> Any:
    world = joined()
    loggers = attached(world, CSVLogger(), JSONLLogger(), TensorBoardLogger(sub_dir="events"), CSVLogger("mine", "x", "fixed"))
    loggers.append(attached(world, Lines())[0])
    before = [logger.version for logger in loggers[:3]] if world.rank else None
    share_folders(loggers, world)
    for logger in loggers:
        logger.log_hyperparams({"rank": world.rank})
        logger.log_metrics({"rank": world.rank}, 1)
    if world.rank:
        loggers[0].experiment.anything["goes"].here()  # does nothing
    states = [{"kind": type(logger).__name__, "state": logger.state_dict()} for logger in loggers]
    for logger in loggers:
        logger.finalize("success")
    return before, [where(logger) for logger in loggers], states


def second_run(saved: list[dict[str, Any]]) -> Any:
    """Resume `first_run` with two of its loggers and a new one."""
    world = joined()
    loggers = attached(world, CSVLogger(), JSONLLogger(), JSONLLogger(name="new"))
    share_folders(loggers, world, saved)
    early = [where(logger) for logger in loggers]  # before load_state_dict
    for logger, state in zip(loggers, states_of(loggers, saved), strict=True):
        if state is not None:
            logger.load_state_dict(state)
    late = [where(logger) for logger in loggers]
    loggers[0].log_metrics({"rank": 10 + world.rank}, 2)
    return early, late


def test_all_processes_know_where_the_main_one_logs(run_dir: Path) -> None:
    (run_dir / "root" / "logs" / "default" / "version_0").mkdir(parents=True)
    ends = run_world(3, first_run)
    assert [before for before, _, _ in ends] == [None, [None] * 3, [None] * 3]
    folder = "root/logs/default/version_1"
    expected = [(1, folder), (1, folder), (1, f"{folder}/events"), ("fixed", "mine/x/fixed")]
    for _, places, _ in ends:
        assert places[:4] == expected
        assert places[4] == ends[0][1][4]
    assert (run_dir / folder / "metrics.csv").read_text() == "step,rank\n1,0\n"
    assert (run_dir / folder / "hparams.yaml").read_text() == "rank: 0\n"
    assert (run_dir / folder / "metrics.jsonl").read_text() == '{"step": 1, "rank": 0}\n'
    assert len(list((run_dir / folder / "events").glob("events.*"))) == 1

    (run_dir / folder / "metrics.csv").write_text("step,rank\n1,0\n2,99\n")  # the run logged step 2 after its checkpoint
    resumed = run_world(2, second_run, ends[0][2])
    assert resumed[0] == resumed[1]
    early, late = resumed[0]
    assert early == late == [(1, folder), (1, folder), (0, "root/logs/new/version_0")]
    assert (run_dir / folder / "metrics.csv").read_text() == "step,rank\n1,0\n2,10\n"


def another_runs_log(saved: list[dict[str, Any]]) -> Any:
    world = joined()
    loggers = attached(world, CSVLogger())
    share_folders(loggers, world, saved)
    loggers[0].load_state_dict(saved[0]["state"])
    return where(loggers[0])


def test_what_the_main_process_finds_counts(run_dir: Path) -> None:
    """Another process sees a folder of the right name; only the main process sees that it belongs to another run."""
    state = {"last_step": 1, "folder": "logs/default/version_0", "version": 0, "name": "default"}
    mark = {"rows": 1, "columns": 2, "first": "x", "last": "x"}
    (run_dir / "root/logs/default/version_0").mkdir(parents=True)
    (run_dir / "root/logs/default/version_0/metrics.csv").write_text("step,a\n1,1\n")
    saved = [{"kind": "CSVLogger", "state": {**state, "files": {"metrics.csv": mark}}}]
    assert run_world(2, another_runs_log, saved) == [(1, "root/logs/default/version_1")] * 2
    assert (run_dir / "root/logs/default/version_0/metrics.csv").read_text() == "step,a\n1,1\n"


def blocked() -> str:
    world = joined()
    Path("root").touch(exist_ok=True)  # a file where a folder is needed
    with pytest.raises(ConfigurationError, match=r"log folder .*cannot be created.*default_root_dir='runs'") as caught:
        share_folders(attached(world, CSVLogger()), world)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_an_error_on_all_processes() -> None:
    first, second = run_world(2, blocked)
    assert first == second


def test_a_single_process_chooses_nothing_before_it_is_needed(run_dir: Path) -> None:
    logger = CSVLogger()
    attach([logger], "root")
    share_folders([logger], World())
    assert logger._folder is None or logger._folder.version is None
    assert not (run_dir / "root").exists()
