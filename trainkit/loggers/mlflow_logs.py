"""`MLFlowLogger`: runs of MLflow, in a local database or on a server."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trainkit.checkpoint.manifest import checkpoint_identity
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, MetricError, MissingPackageError, UnsupportedArgumentError, missing_package
from trainkit.loggers.base import Logger, is_installed
from trainkit.loggers.log_folder import Repeats, check_name
from trainkit.loggers.logged_values import flatten

__all__ = ["MLFlowLogger"]

_NOT_IN_NAMES = re.compile(r"[^/\w.\- ]")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_OF_CALLBACK = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "every_n_train_steps", "every_n_epochs")


class MLFlowLogger(Logger):
    """Logs to a run of MLflow: on a server, or without one in the database `<save_dir>/mlflow.db`.

    `experiment` is an `mlflow.MlflowClient`, for which `run_id` names the run. `mlflow ui --backend-store-uri
    sqlite:///<save_dir>/mlflow.db` shows the runs of the database. Nested hyper-parameters are named by their path,
    `model/width`. Images and texts become artifacts, `images/<key>/step_00000010.png` and `text/<key>/step_00000010.txt`.
    MLflow has each row when `log_metrics` returns, so that a kill loses none.

    After a resume from a checkpoint the run keeps its id. Records from after the checkpoint cannot be removed and are not
    logged again.

    Args:
        experiment_name: The experiment, created if needed. Default: the environment variable `MLFLOW_EXPERIMENT_NAME`,
            otherwise "trainkit".
        run_name: The name of the run. Default: MLflow chooses.
        tracking_uri: The server, or the database. Default: the environment variable `MLFLOW_TRACKING_URI` (which
            `mlflow.set_tracking_uri` sets), otherwise `sqlite:///<save_dir>/mlflow.db`.
        tags: Name → value, of the run.
        save_dir: The folder of `mlflow.db` and of `mlruns`, its artifacts. Default: as in `Logger`.
        log_model: Store checkpoints of `ModelCheckpoint` as artifacts, each as the folder `<its name>`. True: at the end of a
            run, the best ones and the newest; with `save_top_k=-1` each when it is saved. `"all"`: each when it is saved.
            Training waits while one is stored. Where `import lightning` gives trainkit, it is the file `<name>/<name>.ckpt`.
        checkpoint_path_prefix: The artifact folder that contains those of the checkpoints; default: the root.
        prefix: As in `Logger`.
        artifact_location: The place of the artifacts of a new experiment. Default: `<save_dir>/mlruns` for the database in
            `save_dir`, otherwise the server chooses.
        run_id: Continue this run. Default: the environment variable `MLFLOW_RUN_ID`, otherwise a new one.
        synchronous: Only `True`.

    Raises:
        MissingPackageError: The package mlflow, or one that it needs for a database, is not installed.
        ConfigurationError: An argument is wrong; when the run is opened, the server or database does not work.
        UnsupportedArgumentError: `synchronous=False` is given.

    Example:
        ```python
        trainer = Trainer(logger=MLFlowLogger("digits", tags={"model": "mlp"}))
        ```
    """

    _in_run_folder = False

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        log_model: bool | str = False,
        checkpoint_path_prefix: str = "",
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = True,
    ) -> None:
        super().__init__(save_dir, prefix=prefix)
        if not is_installed("mlflow"):
            raise missing_package("mlflow", "mlflow", "MLFlowLogger")
        if log_model not in (False, True, "all"):
            raise ConfigurationError(f"log_model: expected False, True or 'all', got {log_model!r}. Fix: log_model=True")
        if synchronous is False:
            raise UnsupportedArgumentError(
                "MLFlowLogger(synchronous=False) is not supported: a kill would lose pending rows. Fix: remove it, and log "
                "less often with Trainer(log_every_n_steps=50)"
            )
        if tags is not None and not isinstance(tags, Mapping):
            raise ConfigurationError(f"tags: expected a mapping, got {tags!r}. Fix: tags={{'stage': 'try'}}")
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        uri = self.tracking_uri
        if uri.split(":")[0].split("+")[0] in _DATABASES and not (is_installed("sqlalchemy") and is_installed("alembic")):
            raise MissingPackageError(
                f"MLFlowLogger: mlflow needs sqlalchemy and alembic for {uri}, and they are not installed. Install them with: "
                "pip install 'trainkit-torch[mlflow]'   (or log to a server: MLFlowLogger(tracking_uri='http://host:5000'))"
            )
        self._artifact_location = artifact_location
        self._id = run_id
        self._begun = False  # the run and its records are known
        self._resumed = False  # the run is that of a checkpoint, and may no longer exist
        self._repeats = Repeats()
        self._log_model = log_model
        self._checkpoints_in = check_name(checkpoint_path_prefix, "checkpoint_path_prefix")
        self._saving: list[Any] = []  # The callbacks whose checkpoints are stored at the end of the run.
        self._stored: dict[str, dict[str, Any]] = {}  # artifact folder → the checkpoint in it, its aliases and its callback
        self._names: dict[tuple[str, str], str] = {}  # (what it names, name in MLflow) → the user's name
        self._timestamp = 0  # milliseconds, different for each row: MLflow keeps one of several equal records

    # ------------------------------------------------------------------ where

    @property
    def name(self) -> str:
        """The experiment."""
        return self._experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "trainkit"

    @property
    def version(self) -> str | None:
        """The run's id; None until the run starts, if none was given."""
        return self._id or os.environ.get("MLFLOW_RUN_ID") or None

    @property
    def run_id(self) -> str | None:
        """The run's id; starts the run if needed. None on other processes than the main process."""
        if self.is_main_process:
            _ = self.experiment
        return self.version

    @property
    def tracking_uri(self) -> str:
        """The server or database of the run."""
        return self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self._database.as_posix()}"

    @property
    def _database(self) -> Path:
        return Path(self.save_dir).absolute() / "mlflow.db"

    @property
    def _is_own_database(self) -> bool:
        return not (self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"))

    @property
    def root_dir(self) -> str:
        """The same as `save_dir`: MLflow has its own layout."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """`save_dir` if the run is in a database there, else None."""
        return self.save_dir if self._is_own_database else None

    def __repr__(self) -> str:
        return f"MLFlowLogger(experiment_name={self.name!r}, tracking_uri={self.tracking_uri!r}, run_id={self.version!r})"

    # ------------------------------------------------------------------ the run

    def open_experiment(self) -> Any:
        """Start the run, and return a client of its server or database."""
        uri = self.tracking_uri
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        if self._is_own_database:
            Path(self.save_dir).mkdir(parents=True, exist_ok=True)
        try:
            client = MlflowClient(uri)
            self._id = self._running(client)
        except MlflowException as error:
            raise ConfigurationError(
                f"MLFlowLogger cannot open a run of the experiment {self.name!r} in {uri}: {error}\n"
                "Fix: pass the tracking_uri of a running server, or remove tracking_uri to use a database in save_dir"
            ) from error
        self._close_when_dropped(partial(_end, client, self._id))
        return client

    def _running(self, client: Any) -> str:
        """The id of the run, which is new or continues."""
        known = self.version
        if known is not None and self._resumed and not _exists(client, known):
            warn(
                f"MLFlowLogger: the run {known} of the resumed run is not in {self.tracking_uri}. A new one begins, without "
                "the earlier metrics. Fix: pass the same tracking_uri or save_dir and resume again"
            )
            known = None
        if known is None:
            known = self._new_run(client)
            self._repeats.new_run()
            self._stored = {}
        else:
            client.update_run(known, status="RUNNING")
            if not self._begun:  # the user's run, with earlier records
                self._repeats.resume({key: len(self._steps(client, known, key)) for key in client.get_run(known).data.metrics})
        self._begun = True
        self._resumed = False
        return known

    def _new_run(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.context.registry import resolve_tags

        experiment = client.get_experiment_by_name(self.name)
        if experiment is None:
            where = self._artifact_location
            if where is None and self._is_own_database:
                where = (Path(self.save_dir).absolute() / "mlruns").as_posix()
            try:
                experiment_id = client.create_experiment(self.name, artifact_location=where)
            except MlflowException:
                experiment = client.get_experiment_by_name(self.name)  # another process may just have created it
                if experiment is None:
                    raise
        if experiment is not None:
            experiment_id = experiment.experiment_id
        tags = {key: str(value) for key, value in self._tags.items()}
        run = client.create_run(experiment_id, tags=resolve_tags(tags), run_name=self._run_name)  # who, from which script
        return str(run.info.run_id)

    def finalize(self, status: str = "success") -> None:
        """Store the checkpoints that `log_model=True` stores at the end, and close the run, which is used again if needed."""
        callbacks, self._saving = self._saving, []
        for callback in callbacks:
            with self._surviving("store the checkpoints"):
                self._store_checkpoints(callback)
        super().finalize(status)

    def close_experiment(self, experiment: Any, status: str) -> None:
        """Mark the run as finished or failed; it runs again if the logger is used again."""
        _end(experiment, str(self._id), "FINISHED" if status == "success" else "FAILED")

    # ------------------------------------------------------------------ what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """The run's id and its number of records of each metric; starts no run."""
        state: dict[str, Any] = {"last_step": self._last_step}
        if self.is_main_process and self._begun:
            state.update(run_id=self.version, counts=dict(self._repeats.counts), stored=dict(self._stored))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of `state`; records that it already has are not logged again."""
        if self._experiment is not None:
            self.finalize("success")
        self._last_step = int(state.get("last_step", -1))
        if "run_id" not in state or not self.is_main_process:
            return
        if self.version not in (None, state["run_id"]):
            notice(f"MLFlowLogger logs to the run {self.version}, not to {state['run_id']}, the run of the checkpoint.")
            return
        self._id = str(state["run_id"])
        self._begun = self._resumed = True
        self._repeats.resume(state["counts"])
        self._stored = dict(state.get("stored", {}))

    # ------------------------------------------------------------------ what is logged

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Write a record of each metric, unless the run has it from before a resume.

        Raises:
            OSError: The server or database fails.
        """
        from mlflow.entities import Metric

        client = self.experiment
        named = {self._check_name(key, "metric"): float(value) for key, value in metrics.items()}
        new = {key: value for key, value in named.items() if not self._repeats.has(key, step, self._steps_of)}
        self._timestamp = max(time.time_ns() // 1_000_000, self._timestamp + 1)
        for part in _parts([Metric(key, value, self._timestamp, step) for key, value in new.items()], 1000):
            with _as_os_error():
                client.log_batch(self._id, metrics=part, synchronous=True)
            for record in part:
                self._repeats.note(record.key)

    def _steps_of(self, key: str) -> list[int]:
        with _as_os_error():
            return self._steps(self.experiment, str(self._id), key)

    def _steps(self, client: Any, run_id: str, key: str) -> list[int]:
        history = sorted(client.get_metric_history(run_id, key), key=lambda record: record.timestamp)
        if history:
            self._timestamp = max(self._timestamp, history[-1].timestamp)  # another node's clock may be ahead
        return [record.step for record in history]

    def _check_name(self, name: str, what: str) -> str:
        """A name that MLflow accepts; raises if two names are the same there."""
        allowed = "/".join(part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part not in ("", ".", ".."))[:250]
        if not allowed:
            raise MetricError(f"MLFlowLogger: expected a name with letters in it, got {name!r}. Fix: log it under another name")
        first = self._names.setdefault((what, allowed), name)
        if first != name:
            raise MetricError(f"MLFlowLogger: {first!r} and {name!r} are both {allowed!r} in MLflow. Fix: rename one of them")
        return allowed

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write parameters; raises like `write_metrics`.

        MLflow keeps the first value of a parameter; a changed value is written to a tag of that name.
        """
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        client = self.experiment
        values = {self._check_name(key, "parameter"): str(value) for key, value in flatten(params).items()}
        long = [key for key, value in values.items() if len(value) > MAX_PARAM_VAL_LENGTH]
        with _as_os_error():
            known = client.get_run(self._id).data.params
            for key in long:
                client.log_text(self._id, values.pop(key), f"hparams/{key}.txt")
            for part in _parts([Param(key, value) for key, value in values.items() if key not in known], 100):
                client.log_batch(self._id, params=part, synchronous=True)
            changed = [key for key, value in values.items() if known.get(key, value) != value]
            for key in changed:
                client.set_tag(self._id, key, values[key], synchronous=True)
        if long:
            warn(f"MLFlowLogger: too long for a parameter, so written to the artifacts hparams/<name>.txt: {', '.join(long)}")
        if changed:
            warn(
                f"MLFlowLogger: MLflow keeps the first value of a parameter. Tags have the new values of: {', '.join(changed)}"
            )

    def write_image(self, key: str, images: Sequence[Any], step: int) -> None:
        """Write images as artifacts; several are numbered."""
        if not is_installed("PIL"):
            raise missing_package("pillow", "mlflow", "MLFlowLogger.log_image")
        client, folder = self.experiment, f"images/{self._check_name(key, 'image')}"
        for index, image in enumerate(images):
            number = "" if len(images) == 1 else f"_{index}"
            with _as_os_error():
                client.log_image(self._id, image, f"{folder}/step_{step:08d}{number}.png")

    def write_text(self, key: str, text: str, step: int) -> None:
        client, path = self.experiment, f"text/{self._check_name(key, 'text')}/step_{step:08d}.txt"
        with _as_os_error():
            client.log_text(self._id, text, path)

    # ------------------------------------------------------------------ checkpoints

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Store the new checkpoint, or remember to store those that are kept at the end, as `log_model` says.

        Raises:
            OSError: The server fails, or the files cannot be copied.
        """
        if self._log_model == "all" or (self._log_model and checkpoint_callback.save_top_k == -1):
            self._store_checkpoints(checkpoint_callback)
        elif self._log_model and all(one is not checkpoint_callback for one in self._saving):
            self._saving.append(checkpoint_callback)

    def _store_checkpoints(self, callback: Any) -> None:
        """Store the checkpoints that the callback keeps and that are not stored, and update the aliases of the others."""
        kept = _complete_checkpoints(callback)
        names = {path: self._artifact_folder(path, callback) for path in kept}
        for path, (identity, score) in kept.items():
            if self._stored.get(names[path], {}).get("checkpoint") == identity:
                continue
            about = {
                "score": score,
                "original_filename": path.name,
                "Checkpoint": {name: getattr(callback, name) for name in _OF_CALLBACK if hasattr(callback, name)},
            }
            store = self.experiment.log_artifacts if path.is_dir() else self.experiment.log_artifact
            with _as_os_error():
                store(self._id, str(path), names[path])
                self.experiment.log_dict(self._id, about, f"{names[path]}/metadata.yaml")
            self._stored[names[path]] = {"checkpoint": identity, "aliases": None, "of": callback.state_key}
        marks = {"latest": callback.last_model_path, "best": callback.best_model_path}
        for folder, stored in list(self._stored.items()):
            aliases = [alias for alias, path in marks.items() if path and names.get(Path(path)) == folder]
            if stored["of"] == callback.state_key and stored["aliases"] != aliases:
                with _as_os_error():
                    self.experiment.log_text(self._id, str(aliases), f"{folder}/aliases.txt")
                self._stored[folder] = {**stored, "aliases": aliases}

    def _artifact_folder(self, path: Path, callback: Any) -> str:
        """The artifact folder of a checkpoint; another one if a checkpoint of another callback has this name."""
        name = PurePosixPath(self._checkpoints_in, path.name if path.is_dir() else path.stem).as_posix()
        names = (f"{name}-v{number}" if number else name for number in itertools.count())
        return next(one for one in names if self._stored.get(one, {"of": callback.state_key})["of"] == callback.state_key)


def _complete_checkpoints(callback: Any) -> dict[Path, tuple[str, float | None]]:
    """The best checkpoints of a `ModelCheckpoint` and its newest, the oldest first: what identifies its content, its score."""
    scores = {callback.last_model_path: callback.current_score, callback.best_model_path: callback.best_model_score}
    found: dict[Path, tuple[str, float | None]] = {}
    for name, score in {**scores, **callback.best_k_models}.items():
        path = Path(name)
        digest = checkpoint_identity(path) if name else None  # none before it is complete
        if name and path.is_file():
            digest = str(path.stat().st_mtime_ns).encode()
        if digest:
            found[path] = digest.decode(errors="replace"), None if score is None else float(score)
    return dict(sorted(found.items(), key=lambda item: item[0].stat().st_mtime))


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def _end(client: Any, run_id: str, status: str = "") -> None:
    """Mark a run as ended; without a status, by whether an exception ended the program."""
    from mlflow.exceptions import MlflowException

    if not status:
        status = "FAILED" if getattr(sys, "last_value", None) is not None else "FINISHED"
    try:
        client.set_terminated(run_id, status)
    except MlflowException as error:
        warn(f"MLFlowLogger could not mark the run {run_id} as {status}: {error}")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert MLflow's errors, for example of a server that does not answer: an `OSError` does not end training."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(f"MLflow: {error}") from error


def _parts(records: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(records), size):
        yield records[start : start + size]
