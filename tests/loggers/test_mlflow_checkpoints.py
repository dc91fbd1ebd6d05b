"""`MLFlowLogger(log_model=)`: checkpoints as artifacts of real runs, in a database and folders."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trackers import needs

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.console import TrainkitWarning
from trainkit.loggers import MLFlowLogger
from trainkit.trainer.save_policy import SavePolicy

pytestmark = [needs("mlflow"), pytest.mark.usefixtures("local_mlflow")]


class Losses(TinyModule):
    """Logs a given value in each epoch as the validation loss."""

    values = (3.0, 1.0, 2.0, 4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.values[self.trainer.current_epoch])


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database for all tests, since creating its tables takes a second."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow').as_posix()}/runs.db"


@pytest.fixture
def in_database(database: str, run_dir: Path) -> dict[str, Any]:
    """Arguments of a logger: an experiment of this test, whose artifacts are in its folder."""
    artifacts = (run_dir / "artifacts").as_posix()
    return {"experiment_name": run_dir.as_posix(), "tracking_uri": database, "artifact_location": artifacts}


def artifacts(logger: MLFlowLogger) -> Path:
    """The folder of the run's artifacts."""
    return Path(logger.experiment.get_run(logger.run_id).info.artifact_uri)


def aliases(folder: Path) -> dict[str, list[str]]:
    return {path.parent.name: ast.literal_eval(path.read_text()) for path in sorted(folder.rglob("aliases.txt"))}


def fit(logger: MLFlowLogger, *callbacks: Callback, max_epochs: int = 4, **options: Any) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=max_epochs, logger=logger, callbacks=[*callbacks], seed=0, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Losses(), tiny_loader(8), tiny_loader(4), **options)
    return trainer


class Counts(MLFlowLogger):
    """Counts the checkpoints that are stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[str] = []

    def open_experiment(self) -> Any:
        client = super().open_experiment()
        send = client.log_artifacts

        def log_artifacts(run_id: str, local_dir: str, artifact_path: str) -> None:
            self.sent.append(Path(local_dir).name)
            send(run_id, local_dir, artifact_path)

        client.log_artifacts = log_artifacts
        return client


class StoredSoFar(Callback):
    """Records the number of stored checkpoints when each epoch begins."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(len(trainer.logger.sent))


def test_the_best_and_the_newest_are_stored_at_the_end(in_database: dict[str, Any]) -> None:
    logger, stored = Counts(**in_database, log_model=True, checkpoint_path_prefix="a/b"), StoredSoFar()
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss}", keep_last=1)
    trainer = fit(logger, best, stored)
    assert stored.seen == [0, 0, 0, 0]
    folder = artifacts(logger) / "a" / "b"
    assert aliases(folder) == {
        "epoch=1-val_loss=1.0": ["best"],
        "epoch=2-val_loss=2.0": [],
        Path(best.last_model_path).name: ["latest"],
    }
    assert Path(best.best_model_path).name == "epoch=1-val_loss=1.0"
    assert yaml.safe_load((folder / "epoch=1-val_loss=1.0" / "metadata.yaml").read_text()) == {
        "score": 1.0,
        "original_filename": "epoch=1-val_loss=1.0",
        "Checkpoint": {
            "monitor": "val_loss", "mode": "min", "save_last": None, "save_top_k": 2, "save_weights_only": False,
            "every_n_train_steps": 0, "every_n_epochs": 1,
        },
    }  # fmt: skip
    trainer.test(Losses(), tiny_loader(4))
    assert len(logger.sent) == 3  # nothing is stored again

    stored_best = folder / "epoch=1-val_loss=1.0"
    assert open_checkpoint(stored_best).manifest.epoch == 2
    assert fit(MLFlowLogger(**in_database), max_epochs=3, ckpt_path=stored_best).global_step == 6


@pytest.mark.parametrize("log_model, save_top_k", [("all", 1), (True, -1)])
def test_each_is_stored_when_it_is_saved(in_database: dict[str, Any], log_model: bool | str, save_top_k: int) -> None:
    logger, stored = Counts(**in_database, log_model=log_model), StoredSoFar()
    fit(logger, stored, ModelCheckpoint(monitor="val_loss", save_top_k=save_top_k, keep_last=1))
    assert stored.seen[2:] >= [1, 2]  # the first is stored at a step of the next epoch at the latest
    assert logger.sent == [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    found = aliases(artifacts(logger))
    assert found == {"step-00000002": [], "step-00000004": ["best"], "step-00000006": [], "step-00000008": ["latest"]}


def test_without_the_argument_nothing_is_stored(in_database: dict[str, Any]) -> None:
    logger = Counts(**in_database)
    fit(logger, max_epochs=1)
    assert logger.sent == []


def test_a_resumed_run_stores_none_again(in_database: dict[str, Any]) -> None:
    saving = dict(monitor="val_loss", save_top_k=3)
    first = Counts(**in_database, log_model="all")
    fit(first, ModelCheckpoint(**saving), max_epochs=2)  # type: ignore[arg-type]
    resumed = Counts(**in_database, log_model="all")
    fit(resumed, ModelCheckpoint(**saving), max_epochs=3, ckpt_path="auto")  # type: ignore[arg-type]
    assert resumed.run_id == first.run_id
    assert first.sent == ["step-00000002", "step-00000004"]
    # the state in a checkpoint is that before it was stored itself
    assert resumed.sent == ["step-00000004", "step-00000006"]
    assert aliases(artifacts(resumed)) == {"step-00000002": [], "step-00000004": ["best"], "step-00000006": ["latest"]}


def test_a_name_that_is_used_again(in_database: dict[str, Any]) -> None:
    """A checkpoint that replaces another is stored; one of another callback gets a name of its own."""
    logger = Counts(**in_database, log_model="all")
    one, other = ModelCheckpoint("one", "model"), ModelCheckpoint("other", "model", save_weights_only=True, every_n_epochs=2)
    fit(logger, one, other)
    assert logger.sent == ["model"] * 6
    found = aliases(artifacts(logger))
    assert found == {"model": ["latest", "best"], "model-v1": ["latest", "best"]}
    for folder, callback in (("model", one), ("model-v1", other)):
        stored = open_checkpoint(artifacts(logger) / folder)
        assert stored.manifest.step == 8
        assert stored.manifest.saved_by == callback.state_key


def test_where_paths_name_files_these_are_stored(in_database: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `import lightning` gives trainkit. The file is complete when the logger is called."""
    monkeypatch.setattr("trainkit.callbacks.model_checkpoint.is_open", lambda door: True)
    tell, complete = SavePolicy.tell_loggers, []

    def tell_loggers(policy: Any, callback: ModelCheckpoint) -> None:
        complete.append(Path(callback.last_model_path).is_file())
        tell(policy, callback)

    monkeypatch.setattr(SavePolicy, "tell_loggers", tell_loggers)
    logger = MLFlowLogger(**in_database, log_model="all")
    fit(logger, ModelCheckpoint(monitor="val_loss", keep_last=1))
    names = [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    assert complete == [True] * 4
    assert list(aliases(artifacts(logger))) == names
    for name in names:
        assert sorted(os.listdir(artifacts(logger) / name)) == ["aliases.txt", "metadata.yaml", f"{name}.ckpt"]
    loaded = torch.load(artifacts(logger) / names[1] / f"{names[1]}.ckpt", weights_only=True)
    assert loaded["global_step"] == 4


def test_a_store_that_fails_costs_a_warning(in_database: dict[str, Any]) -> None:
    from mlflow.exceptions import MlflowException

    class Full(MLFlowLogger):
        def open_experiment(self) -> Any:
            client = super().open_experiment()

            def log_artifacts(*_: Any) -> None:
                raise MlflowException("no space")

            client.log_artifacts = log_artifacts
            return client

    with pytest.warns(TrainkitWarning, match="Full could not store the checkpoint.*MLflow: no space. Training continues"):
        trainer = fit(Full(**in_database, log_model="all"), max_epochs=2)
    assert trainer.global_step == 4
    with pytest.warns(TrainkitWarning, match="Full could not store the checkpoints"):
        fit(Full(**in_database, log_model=True), max_epochs=1)
