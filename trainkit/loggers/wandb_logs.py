"""`WandbLogger`: Weights & Biases, online or offline."""

from __future__ import annotations

import inspect
import math
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainkit.console import notice, warn
from trainkit.errors import (
    ConfigurationError,
    UnknownNameError,
    UnsupportedArgumentError,
    missing_package,
    nearest,
)
from trainkit.loggers.base import Logger, is_installed, is_main_here
from trainkit.loggers.log_folder import check_save_dir, one_of
from trainkit.loggers.logged_values import as_images, as_step
from trainkit.loggers.logger_setup import NotLoggedInError

if TYPE_CHECKING:
    import torch

__all__ = ["WandbLogger"]

_STEP = "trainer/global_step"
_LATER = ("add_file_policy", "checkpoint_name")  # Arguments of Lightning's logger, for checkpoints as artifacts.
_ARRAYS = ("detach", "__array__", "__array_interface__")  # attributes of tensors and arrays
_SEND_FILE = "    logger.experiment.log_artifact(path, name='model', type='model')"


@dataclass
class _Started:
    """An open run that a logger has started."""

    run: Any
    owner: weakref.ref[WandbLogger]


class WandbLogger(Logger):
    """Logs to a run of Weights & Biases; its files are in `<save_dir>/wandb`.

    `experiment` is the `wandb` run. Steps are logged as the metric "trainer/global_step", the axis of all charts. If
    `wandb.init()` was called before, as sweeps do, that run is used, and you end it.

    After a `fit` that succeeded the run stays open, so that a `test` or your own `wandb.log` logs to the same run. It
    ends with the program, or when another `WandbLogger` starts a run. After a `fit` that failed it ends, marked as failed.
    If the logger is used after that, it resumes the run by its id.

    After a resume from a checkpoint the run keeps its id and continues to count its rows. Rows that were sent after the
    checkpoint cannot be removed and are not logged again. Offline, each process writes its own file, and such rows are
    in both files with the same number.

    Args:
        name: The name of the run.
        save_dir: The parent of the folder `wandb`. Default: as in `Logger`.
        version: The run's id; the same as `id`.
        offline: Keep the files on this machine, for `wandb sync`; the same as the environment variable
            `WANDB_MODE=offline`.
        dir: The same as `save_dir`.
        id: The id of a run to continue. Default: a new one.
        project: The project. Default: the environment variable `WANDB_PROJECT`, otherwise "trainkit".
        log_model: Not supported; the error names the call to use.
        experiment: A run of your own.
        prefix: As in `Logger`; also before the names of images, tables and other media.
        **kwargs: Further arguments of `wandb.init`: `entity`, `group`, `tags`, `notes`, …

    Raises:
        MissingPackageError: The package wandb is not installed.
        UnknownNameError: `wandb.init` does not have this argument.
        ConfigurationError: Arguments contradict each other.

    Example:
        ```python
        trainer = Trainer(logger=WandbLogger(project="digits", tags=["baseline"]))
        ```
    """

    _in_run_folder = False
    _started: ClassVar[list[_Started]] = []

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(one_of("WandbLogger", save_dir=check_save_dir(save_dir), dir=check_save_dir(dir)), prefix=prefix)
        if not is_installed("wandb"):
            raise missing_package("wandb", "wandb", "WandbLogger")
        if log_model:
            raise UnsupportedArgumentError(
                f"WandbLogger(log_model={log_model!r}) is not supported. Fix: send each file with\n{_SEND_FILE}"
            )
        self._run_name = name
        self._id = one_of("WandbLogger", version=version, id=id)
        self._project = project
        self._options = _check_options(kwargs, offline)
        self._given = experiment
        self._idle = False
        self._rows = 0  # Number of rows when the run was closed or the checkpoint was made.
        self._resumed_at: int | None = None  # the last step of the checkpoint, until something is logged
        self._repeats = 0  # Number of next rows that the run already has.
        self._until = math.inf  # The last step of these rows.

    # ------------------------------------------------------------------ where

    @property
    def name(self) -> str:
        """The project."""
        return self._project or os.environ.get("WANDB_PROJECT") or "trainkit"

    @property
    def version(self) -> str | None:
        """The run's id; None until the run starts, if none was given."""
        return self._id if self._given is None else str(self._given.id)

    @property
    def root_dir(self) -> str:
        """The same as `save_dir`: wandb creates the folders of runs."""
        return self.save_dir

    log_dir = root_dir

    def __repr__(self) -> str:
        return f"WandbLogger(save_dir={self.save_dir!r}, project={self.name!r}, id={self.version!r})"

    # ------------------------------------------------------------------ the run

    @property
    def experiment(self) -> Any:
        """The `wandb` run, started now if it is not; on other processes an object that does nothing."""
        if getattr(self._experiment, "_is_finished", False) and self._given is None:
            self._experiment = None  # the user called wandb.finish(): continue the run by its id
        return super().experiment

    def open_experiment(self) -> Any:
        """The user's run, or a new one."""
        import wandb

        if self._given is not None:
            return self._given
        self._end_idle_runs()
        self._idle = False
        active = wandb.run
        ours = any(started.run is active for started in self._started)
        if active is not None and not ours and self._id in (None, active.id):
            return self._adopt(active)
        run = self._start(other_is_open=active is not None)
        self._id = run.id
        self._started.append(_Started(run, weakref.ref(self)))
        return run

    def check_login(self) -> None:
        """Raise an error if the run would be online without an API key; starts no run."""
        import wandb

        mode = self._options.get("mode") or wandb.setup().settings.mode
        if self._given is None and not wandb.run and mode in ("online", "shared") and not wandb.login(prompt=False):
            raise NotLoggedInError("you are not logged in. Fix: run wandb login, or set WANDB_MODE=offline to log offline")

    def _adopt(self, run: Any) -> Any:
        unused = sorted(self._options)
        unused += ["name"] if self._run_name not in (None, run.name) else []
        unused += ["project"] if self._project not in (None, run.project) else []
        if unused:
            warn(
                f"WandbLogger uses the run {run.id} that wandb.init() has started, so its arguments "
                f"{', '.join(unused)} have no effect. Fix: pass them to wandb.init(), or call wandb.finish() first"
            )
        self._id = run.id
        return run

    def _start(self, other_is_open: bool) -> Any:
        import wandb

        folder = Path(self.save_dir).absolute()  # wandb's own process may run in another folder
        folder.mkdir(parents=True, exist_ok=True)
        options = dict(self._options)
        if self._id is not None:
            options.setdefault("resume", "allow")
        if other_is_open:
            options.setdefault("reinit", "create_new")
        run = wandb.init(name=self._run_name, dir=str(folder), id=self._id, project=self.name, **options)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        return run

    @classmethod
    def _end_idle_runs(cls) -> None:
        for started in list(cls._started):
            owner = started.owner()
            if owner is None or owner._idle or getattr(started.run, "_is_finished", False):
                cls._started.remove(started)
                started.run.finish()
                if owner is not None and owner._experiment is started.run:
                    owner._experiment = None

    def set_rank(self, rank: int) -> None:
        super().set_rank(rank)
        self._idle = False

    def finalize(self, status: str = "success") -> None:
        """After success, keep the run open until another starts; after a failure, end it, marked as failed."""
        if status == "success":
            self._idle = True
        else:
            super().finalize(status)

    def close_experiment(self, experiment: Any, status: str) -> None:
        ours = [started for started in self._started if started.run is experiment]
        for started in ours:
            self._started.remove(started)
            self._rows = int(experiment.step)
            experiment.finish(exit_code=0 if status == "success" else 1)

    # ------------------------------------------------------------------ what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """The run's id and its number of rows; starts no run."""
        state: dict[str, Any] = {"last_step": self._last_step}
        if self.is_main_process and self.version is not None:
            known = self._experiment is not None and self._resumed_at is None
            state.update(id=self.version, rows=int(self._experiment.step) - self._repeats if known else self._rows)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of `state`; rows that it already has are not logged again."""
        self._last_step = int(state.get("last_step", -1))
        if "id" not in state or not self.is_main_process:
            return
        wandb = sys.modules.get("wandb")
        active = None if wandb is None else wandb.run  # wandb.init() has started it, or a logger has left it open.
        users = active is not None and all(started.run is not active for started in self._started)
        known = self.version or (active.id if active is not None and users else None)
        if known not in (None, state["id"]):
            notice(f"WandbLogger logs to the run {known}, not to {state['id']}, the run of the checkpoint.")
            return
        self._rows = int(state["rows"])
        self._resumed_at = self._last_step
        self._repeats = 0
        if self._given is None:
            self._id = str(state["id"])

    # ------------------------------------------------------------------ what is logged

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        """Log a row with its step, unless the run has it from before a resume."""
        self._idle = False
        run = self.experiment
        position: dict[str, Any] = {}
        if self._resumed_at is not None:
            self._repeats = max(int(run.step) - self._rows, 0)
            last = run.summary.get(_STEP) if self._repeats else None
            self._until = last if isinstance(last, int | float) and last >= self._resumed_at else math.inf
            self._resumed_at = None
            # an offline run begins a new file, which continues the numbers of the rows
            position = {"step": self._rows, "commit": True} if run.step < self._rows else {}
        if self._repeats and step <= self._until:
            self._repeats -= 1
            return
        self._repeats = 0
        run.log({**row, _STEP: step}, **position)

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        self._log(metrics, step)

    def log_row(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row of any values that wandb accepts: numbers, strings, `wandb.Image`, `wandb.Table`, …

        Args:
            values: Name → value, passed to wandb unchanged.
            step: As in `log_metrics`.
        """
        if self.is_main_process:
            self._last_step = self._last_step + 1 if step is None else as_step(step)
            self._log(values, self._last_step)

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._idle = False
        self.experiment.config.update(dict(params), allow_val_change=True)

    def log_image(  # type: ignore[override]  # it takes the arguments of `Logger` too
        self, key: str, images: Any = None, step: int | None = None, *, image: Any = None, **kwargs: Any
    ) -> None:
        """Log an image, or a list of them, as in `Logger`; also PIL images, paths of files and `wandb.Image`.

        Args:
            key: Its name.
            images: The images.
            step: As in `Logger.log_image`.
            image: The same as `images`.
            **kwargs: Arguments of `wandb.Image`, each a list with one value per image: `caption`, `masks`, `boxes`, …

        Raises:
            ConfigurationError: A list of another length, or a path that does not exist.
            UnknownNameError: `wandb.Image` does not have this argument.
            MetricError: A value is not an image.
        """
        if not is_installed("PIL"):
            raise missing_package("pillow", "wandb", "WandbLogger.log_image")
        self._log_media("Image", key, image if images is None else images, step, kwargs)

    def log_audio(self, key: str, audios: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log a recording, or a list of them: paths of files, or arrays. wandb needs the package soundfile for it.

        Args:
            key: Its name.
            audios: The recordings.
            step: As in `Logger.log_image`.
            **kwargs: Arguments of `wandb.Audio`, each a list with one value per recording: `sample_rate`, `caption`.

        Raises:
            ConfigurationError: A list of another length, or a path that does not exist.
            UnknownNameError: `wandb.Audio` does not have this argument.
        """
        self._log_media("Audio", key, audios, step, kwargs)

    def log_video(self, key: str, videos: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log a video, or a list of them: paths, or arrays (time, channel, height, width), which need moviepy.

        Args:
            key: Its name.
            videos: The videos.
            step: As in `Logger.log_image`.
            **kwargs: Arguments of `wandb.Video`, each a list with one value per video: `caption`, `fps`, `format`.

        Raises:
            ConfigurationError: A list of another length, or a path that does not exist.
            UnknownNameError: `wandb.Video` does not have this argument.
        """
        self._log_media("Video", key, videos, step, kwargs)

    def _log_media(self, kind: str, key: str, items: Any, step: int | None, options: Mapping[str, Any]) -> None:
        """Log objects of the class `kind` of wandb, with the options of each."""
        if not self.is_main_process:
            return
        import wandb

        make = getattr(wandb, kind)
        items = list(items) if isinstance(items, list | tuple) else [items]
        _check_media(f"WandbLogger.log_{kind.lower()}", make, items, options)
        if kind == "Image":
            items = [_picture(key, item) for item in items]
        with self._surviving(f"write the {kind.lower()} {key!r}"):
            made = [
                item if isinstance(item, make) else make(item, **{name: values[index] for name, values in options.items()})
                for index, item in enumerate(items)
            ]
            self._log({self._named(key): made}, self._media_step(step))

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        """Log a `wandb.Table`, whose cells may be texts, numbers, `wandb.Image` and others.

        Args:
            key: Its name.
            columns: The names of the columns.
            data: The rows, a list of lists.
            dataframe: A data frame of pandas, instead of `columns` and `data`.
            step: As in `Logger.log_image`.
        """
        if not self.is_main_process:
            return
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        with self._surviving(f"write the table {key!r}"):
            self._log({self._named(key): table}, self._media_step(step))

    def log_text(  # type: ignore[override]  # it takes the arguments of `Logger` too
        self,
        key: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        text: Any = None,
    ) -> None:
        """Log a table of texts as `log_table` does, or a text as in `Logger`: `log_text(key, text, step)`.

        Args:
            key: Its name.
            columns: The names of the columns; or the text, which becomes a table of one row.
            data: The rows; or after a text, the step.
            dataframe: As in `log_table`.
            step: As in `Logger.log_image`.
            text: The text.
        """
        if text is None and columns is not None and not isinstance(columns, list | tuple):
            text = columns
            step = data if step is None else step
        if text is None:
            self.log_table(key, columns, data, dataframe, step)
        elif self.is_main_process:
            at = self._media_step(step)
            self.log_table(key, ["step", "text"], [[at, str(text)]], None, at)

    def _named(self, key: str) -> str:
        return f"{self._prefix}-{key}" if self._prefix else key

    def write_histogram(self, key: str, values: Any, step: int) -> None:
        import wandb

        self._log({self._named(key): wandb.Histogram(values)}, step)

    def watch(self, model: torch.nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Log gradients and parameters of `model` as histograms, as `wandb.watch` does.

        Args:
            model: The module to watch.
            log: "gradients", "parameters", "all" or None.
            log_freq: Number of backward passes between two logs.
            log_graph: Log the graph of the module.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def unwatch(self, model: torch.nn.Module | None = None) -> None:
        """Stop what `watch` has started for `model`; for all modules if it is `None`."""
        self.experiment.unwatch(model)

    # ------------------------------------------------------------------ artifacts

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Record that the run uses an artifact; needs a run that is online.

        Args:
            artifact: Its name: `"name:alias"`, `"project/name:alias"` or `"entity/project/name:alias"`.
            artifact_type: Its type.

        Returns:
            The `wandb.Artifact`; on other processes an object that does nothing.
        """
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str | None:
        """Download an artifact from the server.

        Args:
            artifact: Its name, as in `use_artifact`.
            save_dir: The folder to write to. Default: wandb chooses.
            artifact_type: Its type.
            use_artifact: Record that the run uses it, if a run is open.

        Returns:
            The folder; `None` on other processes than the main process, which do nothing.
        """
        if not is_main_here():
            return None
        import wandb

        open_run = wandb.run if use_artifact else None
        found = wandb.Api().artifact if open_run is None else open_run.use_artifact
        return str(found(artifact, type=artifact_type).download(root=None if save_dir is None else os.fspath(save_dir)))


def _check_options(kwargs: dict[str, Any], offline: bool) -> dict[str, Any]:
    for name in kwargs:
        if name in _LATER:
            raise UnsupportedArgumentError(f"WandbLogger({name}=…) is not supported. Fix: call\n{_SEND_FILE}")
    if kwargs:
        import wandb

        _check_known("WandbLogger", "its own arguments or those of wandb.init", wandb.init, kwargs)
    if offline and kwargs.get("mode", "offline") != "offline":
        raise ConfigurationError(
            f"WandbLogger: offline=True contradicts mode={kwargs['mode']!r}. Fix: pass only one of them, offline=True"
        )
    return {**kwargs, "mode": "offline"} if offline else kwargs


def _check_known(owner: str, what: str, function: Any, names: Iterable[str]) -> None:
    known = inspect.signature(function).parameters
    for name in names:
        if name not in known:
            raise UnknownNameError(
                f"{owner}: expected {what}, got {name!r}.{nearest(name, known)} "
                f"Fix: remove it; the arguments are listed by help(wandb.{function.__name__})"
            )


def _check_media(owner: str, kind: Any, items: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Check that each option has one value per item, and that files exist: a missing one is not a failure to write."""
    _check_known(owner, f"arguments of wandb.{kind.__name__}", kind, options)
    for name, values in options.items():
        if not isinstance(values, list | tuple) or len(values) != len(items):
            got = f"{len(values)} of them" if isinstance(values, list | tuple) else repr(values)
            raise ConfigurationError(
                f"{owner}: {name} must be a list with one value for each of {len(items)}, got {got}. Fix: {name}=[...]"
            )
    for item in items:
        path = os.fspath(item) if isinstance(item, str | os.PathLike) else None
        if path is not None and "://" not in path and not os.path.isfile(path):
            raise ConfigurationError(f"{owner}: expected the path of a file, got {path!r}. Fix: pass a file that exists")


def _picture(key: str, item: Any) -> Any:
    """A tensor or array as an array that wandb shows with the values that it has; other things as they are."""
    if isinstance(item, os.PathLike):
        return os.fspath(item)
    is_array = item is None or isinstance(item, list | tuple) or any(map(partial(hasattr, item), _ARRAYS))
    if not is_array or hasattr(item, "getbands"):  # an image of Pillow, which has palettes and modes, is one of wandb's inputs
        return item
    [array] = as_images(key, [item])
    return array[..., 0] if array.shape[-1] == 1 else array
