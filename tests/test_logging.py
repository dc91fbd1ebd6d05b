"""`get_logger` in one process. Tests on several processes are in `utils/test_operations.py`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from trainkit.logging import MultiProcessAdapter, get_logger


@pytest.fixture(autouse=True)
def the_root_logger_stays_as_it_was() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_messages(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("trainkit_test.messages", log_level="info")
    logger.debug("hidden")
    logger.info("%d of %s", 3, "all")
    logger.critical("everywhere", main_process_only=False)
    logger.log(logging.WARNING, "in order", in_order=True)
    for _ in range(2):
        logger.warning_once("once %d", 1)
        logger.warning_once("once %d", 2, in_order=True)
    try:
        raise ValueError("told")
    except ValueError:
        logger.exception("failed")
    assert caplog.messages == ["3 of all", "everywhere", "in order", "once 1", "once 2", "failed"]
    assert {record.funcName for record in caplog.records} == {"test_messages"}, "the caller's place, not ours"
    assert "ValueError: told" in caplog.text


def test_arguments_of_pythons_loggers(caplog: pytest.LogCaptureFixture) -> None:
    """`extra` of the adapter is in each record. `exc_info`, `stacklevel` and positional arguments work as in logging."""
    logger = MultiProcessAdapter(logging.getLogger("trainkit_test.arguments"), {"job": 7})
    logger.logger.setLevel(logging.DEBUG)
    error = ValueError("told")
    for method in (logger.debug, logger.info, logger.warning, logger.warning_once, logger.error, logger.critical):
        method("%s and %s", "a", "b", exc_info=error, main_process_only=False)
    logger.log(logging.INFO, "%s and %s", "a", "b", exc_info=error)
    logger.exception("%s and %s", "a", "b", exc_info=error)
    assert [record.job for record in caplog.records] == [7] * 8  # type: ignore[attr-defined]
    assert caplog.messages == ["a and b"] * 8
    assert all(record.exc_info and record.exc_info[1] is error for record in caplog.records)
    caplog.clear()
    logger.exception("no traceback", exc_info=None)
    assert [record.exc_info for record in caplog.records] == [None]


@pytest.mark.parametrize("variable", ["TRAINKIT_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"])
def test_levels(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level comes from the argument or the environment variable, and is also set for the root logger."""
    root = logging.getLogger()
    root.setLevel("ERROR")
    assert get_logger("trainkit_test.unset").logger.level == logging.NOTSET
    assert root.level == logging.ERROR
    monkeypatch.setenv(variable, "debug")
    assert get_logger("trainkit_test.of_the_variable").logger.level == root.level == logging.DEBUG
    assert get_logger("trainkit_test.of_the_argument", "WARNING").logger.level == root.level == logging.WARNING


def test_before_the_processes_are_joined_the_launcher_says_who_speaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a Trainer or Accelerator exists, the variables of the launcher determine the main process."""
    monkeypatch.setattr("trainkit.accelerator.processes.latest", lambda: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    logger = get_logger("trainkit_test.early", log_level="INFO")
    logger.info("of the main process")
    logger.info("of each", main_process_only=False)
    assert caplog.messages == ["[RANK 1] of each"]
