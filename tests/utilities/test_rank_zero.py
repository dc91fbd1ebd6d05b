"""Functions that act on the main process only."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import lightning_utilities.core.rank_zero as lightning_utilities_rank_zero
import pytest
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit import Trainer
from trainkit.launch.joining import tell_rank
from trainkit.utilities import (
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)

of_lightning_utilities: Any = lightning_utilities_rank_zero.rank_zero_only


@rank_zero_only
def doubled(number: int) -> int:
    """Twice the number."""
    return 2 * number


def test_the_decorator() -> None:
    assert doubled(2) == 4
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice the number.")
    assert rank_zero_only.rank == 0


def before_the_processes_are_connected() -> tuple[int, int, int | None, int | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_zero_warn("not here") if rank_zero_only.rank else None
    return rank_zero_only.rank, of_lightning_utilities.rank, doubled(2), rank_zero_only(len, default=-1)([1])


def test_the_rank_is_that_of_the_launcher() -> None:
    assert run_world(2, before_the_processes_are_connected) == [(0, 0, 4, 1), (1, 1, None, -1)]


def test_the_rank_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "_rank", None)
    rank_zero_only.rank = 3
    assert rank_zero_only.rank == 3
    assert doubled(2) is None


def test_the_rank_of_lightning_utilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer sets it; importing trainkit.utilities sets it once. Without the package nothing happens."""
    monkeypatch.setattr(of_lightning_utilities, "rank", 7)
    tell_rank(3, overwrite=False)
    assert of_lightning_utilities.rank == 7
    make_trainer()
    assert of_lightning_utilities.rank == 0
    for module in ("lightning_utilities", "lightning_utilities.core", "lightning_utilities.core.rank_zero"):
        monkeypatch.setitem(sys.modules, module, None)
    tell_rank(5)
    assert of_lightning_utilities.rank == 0


def test_messages(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "trainkit"):
        rank_zero_info("loss %.1f of %s", 0.25, "val")
        rank_zero_info("100 %", stacklevel=2)
        rank_zero_debug("step %d", 3, stacklevel=1, extra={"phase": "fit"})
    assert [record.getMessage() for record in caplog.records] == ["loss 0.2 of val", "100 %", "step 3"]
    assert caplog.records[2].phase == "fit"
    assert caplog.records[2].filename == os.path.basename(__file__)


def test_warnings_name_the_line_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="careful") as caught:
        rank_zero_warn("careful")
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="careful") as caught:
        rank_zero_warn("careful", category=RuntimeWarning, stacklevel=1, source=None)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="old") as caught:
        rank_zero_deprecation("old", stacklevel=1, source=None)
    assert caught[0].filename == __file__


def test_a_prefix() -> None:
    assert (rank_prefixed_message("saved", 2), rank_prefixed_message("saved", None)) == ("[rank: 2] saved", "saved")


@pytest.mark.world_size(2)
def test_several_processes() -> None:
    rank = int(os.environ["RANK"])
    assert doubled(1) == (2 if rank == 0 else None)
    of_lightning_utilities.rank = 7
    Trainer(accelerator="cpu", strategy="ddp", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    assert rank_zero_only.rank == of_lightning_utilities.rank == rank
    assert doubled(1) == (2 if rank == 0 else None)
