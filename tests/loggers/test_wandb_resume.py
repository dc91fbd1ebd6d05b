"""`WandbLogger` after a resume: it continues the same run and its count of rows, and logs no row twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")


from trainkit.loggers import WandbLogger

STEP = "trainer/global_step"

pytestmark = pytest.mark.usefixtures("wandb_service", "no_open_wandb_runs")


class Online:
    """A fake of a run on wandb's server: it has a number of rows, and a summary with the last value of each metric."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.id = "abc"
        self.rows = list(rows)

    @property
    def step(self) -> int:
        return len(self.rows)

    @property
    def summary(self) -> dict[str, Any]:
        return {key: value for row in self.rows for key, value in row.items()}

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def train(logger: WandbLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.log_metrics({"loss": step / 8}, step)
        if step % 2 == 0:
            logger.log_metrics({"val": step * 2.0}, step)


def whole(last: int) -> list[dict[str, Any]]:
    run = Online([])
    train(WandbLogger(experiment=run), 1, last)
    return run.rows


def test_a_state_starts_no_run(tmp_path: Path) -> None:
    import wandb

    assert WandbLogger(save_dir=tmp_path).state_dict() == {"last_step": -1}
    assert WandbLogger(save_dir=tmp_path, id="x").state_dict() == {"last_step": -1, "id": "x", "rows": 0}
    logger = WandbLogger(save_dir=tmp_path)
    logger.load_state_dict({"last_step": 3})
    logger.load_state_dict({"last_step": 3, "id": "y", "rows": 4})
    assert logger.state_dict() == {"last_step": 3, "id": "y", "rows": 4}
    assert wandb.run is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_the_server_keeps_its_id_and_counts_its_rows_on(tmp_path: Path) -> None:
    first = WandbLogger(save_dir=tmp_path)
    train(first, 1, 4)
    state = first.state_dict()
    assert state == {"last_step": 4, "id": first.version, "rows": 6}
    first.experiment.finish()
    second = WandbLogger(save_dir=tmp_path)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.log_metrics({"loss": 5 / 8}, 5)
    assert second.experiment.id == state["id"]
    assert second.state_dict() == {"last_step": 5, "id": state["id"], "rows": 7}
    second.log_metrics({"loss": 6 / 8})
    assert second.state_dict() == {"last_step": 6, "id": state["id"], "rows": 8}
    second.finalize("failed")
    assert second.state_dict()["rows"] == 8  # also after the run is finished


@pytest.mark.parametrize("killed", [4, 5, 6, 9])
@pytest.mark.parametrize("lost", [0, 1])
def test_rows_that_the_run_has_already_are_not_logged_again(killed: int, lost: int) -> None:
    """`lost`: number of rows that the killed process had not sent yet."""
    run = Online(whole(4))
    before = WandbLogger(experiment=run)
    before.log_metrics({}, 4)
    assert before.experiment is run
    state = before.state_dict()
    assert state == {"last_step": 4, "id": "abc", "rows": 6}

    rows = whole(killed)
    resumed = Online(rows[: max(6, len(rows) - lost)])
    second = WandbLogger(experiment=resumed)
    second.load_state_dict(state)
    for step in range(5, 13):
        train(second, step, step)
        assert second.state_dict()["rows"] == len(whole(step))
    assert resumed.rows == whole(12)


def test_a_state_from_while_rows_are_skipped_leads_to_the_same(tmp_path: Path) -> None:
    resumed = Online(whole(8))
    second = WandbLogger(experiment=resumed)
    second.load_state_dict({"last_step": 4, "id": "abc", "rows": 6})
    train(second, 5, 6)
    state = second.state_dict()
    assert state == {"last_step": 6, "id": "abc", "rows": 9}
    third = WandbLogger(experiment=resumed)
    third.load_state_dict(state)
    train(third, 7, 10)
    assert resumed.rows == whole(10)


def test_a_run_that_continues_with_other_steps_loses_none() -> None:
    """The run logged every step, and now logs every tenth: rows are skipped only up to the last step that the run has."""
    resumed = Online(whole(8))
    second = WandbLogger(experiment=resumed)
    second.load_state_dict({"last_step": 4, "id": "abc", "rows": 6})
    for step in (10, 20, 30):
        second.log_metrics({"loss": 0.0}, step)
    assert [row[STEP] for row in resumed.rows[12:]] == [10, 20, 30]


def test_a_run_that_is_still_open_continues(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    train(logger, 1, 4)
    state = logger.state_dict()
    train(logger, 5, 6)
    logger.finalize("success")
    logger.load_state_dict(state)
    train(logger, 5, 7)
    assert logger.experiment.step == len(whole(7))
    logger.experiment.finish()


@pytest.mark.parametrize("how", ["id", "experiment", "wandb.init"])
def test_a_run_that_the_user_chose_goes_before(how: str, tmp_path: Path, caplog: Any) -> None:
    import wandb

    caplog.set_level("INFO", "trainkit")
    if how == "id":
        logger = WandbLogger(save_dir=tmp_path, id="mine")
    elif how == "experiment":
        logger = WandbLogger(experiment=Online([]))
        logger.experiment.id = "mine"
    else:
        wandb.init(project="x", dir=tmp_path, id="mine")
        logger = WandbLogger(save_dir=tmp_path)
    logger.load_state_dict({"last_step": 4, "id": "other", "rows": 6})
    assert caplog.messages[-1] == "WandbLogger logs to the run mine, not to other, the run of the checkpoint."
    logger.log_metrics({"loss": 1.0})
    assert logger.version == "mine"
    assert logger.state_dict() == {"last_step": 5, "id": "mine", "rows": 1}


def test_a_run_of_the_user_that_is_the_same_continues(tmp_path: Path) -> None:
    import wandb

    mine = wandb.init(project="x", dir=tmp_path, id="mine")
    logger = WandbLogger(save_dir=tmp_path)
    logger.load_state_dict({"last_step": 4, "id": "mine", "rows": 6})
    logger.log_metrics({"loss": 1.0}, 5)
    assert logger.experiment is mine
    assert mine.step == 7


def test_other_processes_do_nothing() -> None:
    logger = WandbLogger(id="x")
    logger.set_rank(1)
    assert logger.state_dict() == {"last_step": -1}
    logger.load_state_dict({"last_step": 4, "id": "y", "rows": 6})
    assert logger.version == "x"
