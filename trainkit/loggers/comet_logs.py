"""`CometLogger`: experiments of Comet, online or offline."""

from __future__ import annotations

import inspect
import os
import random
import sys
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, UnknownNameError, missing_package, nearest
from trainkit.loggers.base import Logger, is_installed
from trainkit.loggers.log_folder import Repeats, check_save_dir, one_of
from trainkit.loggers.logged_values import flatten
from trainkit.loggers.logger_setup import NotLoggedInError

__all__ = ["CometLogger", "comet_ml", "start"]


class CometLogger(Logger):
    """Logs to a Comet experiment. An offline one becomes an archive in `save_dir`, for `comet upload`.

    `experiment` is comet_ml's object; its automatic logging is off, because it would log each metric twice. A process has
    one experiment at a time. If you started one, it is used, and you end it. Otherwise it stays open after a `fit` that
    succeeded, until the program ends or another `CometLogger` starts one; after a `fit` that failed it ends.

    After a resume an online experiment keeps its key. Metrics that it received after the checkpoint are not logged again;
    images, texts and histograms appear twice. An offline experiment does not continue: the resumed run starts a new one,
    and a notice says so. comet_ml writes the archive when the experiment ends: that of a killed process stays empty.

    Args:
        api_key: The API key. Default: as configured by the environment variable `COMET_API_KEY` or `comet login`.
        workspace: The workspace. Default: your default one.
        project: The project. Default: as comet_ml is configured, otherwise "trainkit".
        experiment_key: Continue this experiment, or start one with this key. Default: a new one.
        mode: `"get_or_create"` (the default), `"get"` or `"create"`: whether `experiment_key` has to exist.
        online: Send what is logged. Default: as comet_ml is configured (`COMET_START_ONLINE`), otherwise `True`.
        prefix: As in `Logger`.
        save_dir: Folder of the archives. Default: as in `Logger`.
        offline_directory: The same as `save_dir`.
        **kwargs: Further arguments of `comet_ml.ExperimentConfig`: `name`, `tags`, `log_code`, …

    Raises:
        MissingPackageError: The package comet_ml is not installed.
        UnknownNameError: `comet_ml.ExperimentConfig` does not have this argument.
        ConfigurationError: An argument is wrong; or there is no API key, and `online=False` was not given.

    Example:
        ```python
        trainer = Trainer(logger=CometLogger(project="digits", online=False, save_dir="comet"))
        ```
    """

    _in_run_folder = False
    _open: ClassVar[tuple[Any, weakref.ref[CometLogger]] | None] = None  # the open experiment of a logger

    def __init__(
        self,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        prefix: str = "",
        save_dir: str | os.PathLike[str] | None = None,
        offline_directory: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        folders = {"save_dir": check_save_dir(save_dir), "offline_directory": check_save_dir(offline_directory)}
        super().__init__(one_of("CometLogger", **folders), name="", prefix=prefix or "")
        if not is_installed("comet_ml"):
            raise missing_package("comet_ml", "comet", "CometLogger")
        self._options = check_options(kwargs, mode)
        self._api_key = api_key
        self._workspace = workspace
        self._project = project
        self._mode = mode
        self._online = check_online(api_key, online)
        self._given_key = self._key = experiment_key
        self._begun = self._idle = self._adopted = False  # begun: _repeats knows how many records the experiment has
        self._repeats = Repeats()
        self._recorded: dict[str, list[int]] = {}  # steps by metric, on the server when it was opened

    @property
    def name(self) -> str:
        """The project."""
        return self._project or os.environ.get("COMET_PROJECT_NAME") or "trainkit"

    @property
    def version(self) -> str | None:
        """The experiment's key; None until it starts, if none was given."""
        return self._key

    @property
    def log_dir(self) -> str | None:
        """`save_dir`, the folder of the archives of offline experiments; None online."""
        return None if self._online else self.save_dir

    def __repr__(self) -> str:
        return f"CometLogger(project={self.name!r}, experiment_key={self.version!r}, online={self._online})"

    @property
    def experiment(self) -> Any:
        """The experiment, started now if needed; on other processes a `NullExperiment`."""
        if getattr(self._experiment, "ended", False):  # The user or comet_ml may have ended it.
            self._experiment = None
        return super().experiment

    def open_experiment(self) -> Any:
        """The user's experiment, or a new one."""
        self._end_last()
        self._idle, running = False, comet_ml().get_running_experiment()
        self._adopted = running is not None and not running.ended
        if self._adopted and self._key not in (None, running.get_key()):
            raise ConfigurationError(
                f"CometLogger: expected the experiment {self._key}, but comet_ml has {running.get_key()} open, and it can have "
                "only one open experiment. Fix: call comet_ml.end() first"
            )
        if self._online and self._key is not None:
            self._recorded = read_steps(self._api_key, self._key)
            if not self._begun:  # the user's experiment, with earlier records
                self._repeats.resume({name: len(steps) for name, steps in self._recorded.items()})
        if not self._adopted:
            settings: dict[str, Any] = {"workspace": self._workspace, "project_name": self.name, "mode": self._mode}
            if self._online:
                settings.update(api_key=self._api_key, experiment_key=self._key)
                running = start(self._options, **settings)
            else:
                running = start_offline(Path(self.save_dir), self._options, experiment_key=self._given_key, **settings)
            CometLogger._open = running, weakref.ref(self)
        self._key = running.get_key()
        self._begun = True
        return running

    def _end_last(self) -> None:
        if CometLogger._open is None:
            return
        experiment, owner = CometLogger._open[0], CometLogger._open[1]()
        if not (experiment.ended or owner is None or owner._idle or owner is self):
            raise ConfigurationError(
                "Two CometLoggers at a time: comet_ml supports one experiment per process. Fix: pass only one to the Trainer"
            )
        CometLogger._open = None
        if not experiment.ended:
            experiment.end()

    def save(self) -> None:
        """Online, wait until everything is sent. Offline, comet_ml writes the archive when the experiment ends."""
        if self._online and self._experiment is not None and not self._experiment.ended and not self._experiment.flush():
            warn("CometLogger: comet_ml has not sent all logged data yet; if the process is killed now, some may be lost")

    def finalize(self, status: str = "success") -> None:
        """After success, keep the experiment open until another starts; after a failure, end it."""
        if status == "success":
            self.save()
            self._idle = True
        else:
            super().finalize(status)

    def close_experiment(self, experiment: Any, status: str) -> None:
        if not self._adopted:
            experiment.end()

    def state_dict(self) -> dict[str, Any]:
        """The experiment's key and its number of records of each metric; starts no experiment."""
        state: dict[str, Any] = {"last_step": self._last_step}
        if self.is_main_process and self._begun:
            self.save()
            state.update(key=self._key, counts=dict(self._repeats.counts), online=self._online)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the online experiment of `state`; its metrics are not logged again. Offline, start a new one."""
        super().finalize("success")  # the next use opens it with the records that it has then
        self._last_step = int(state.get("last_step", -1))
        if "key" not in state or not self.is_main_process:
            pass
        elif not self._online or not state.get("online", True):
            self._key = self._given_key
            self._begun = False
            self._repeats = Repeats()
            notice("CometLogger: an offline experiment is not continued. The resumed run logs to a new one.")
        elif self._key not in (None, state["key"]):
            notice(f"CometLogger logs to the experiment {self._key}, not to {state['key']}, the experiment of the checkpoint.")
        else:
            self._key = str(state["key"])
            self._begun = True
            self._repeats.resume(state["counts"])

    def _active(self) -> Any:
        """The experiment, marked as in use, so that no other logger ends it."""
        self._idle = False
        return self.experiment

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Log the metrics, except those from before a resume; "epoch" is an argument of Comet's."""
        experiment, epoch, new = self._active(), metrics.get("epoch"), {}
        for name, value in metrics.items():
            if name != "epoch" and not self._repeats.has(name, step, lambda key: self._recorded.get(key, [])):
                self._repeats.note(name)
                new[name] = value
        if new:
            experiment.log_metrics(new, step=step, epoch=None if epoch is None else int(epoch))

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log parameters; the names of nested ones are paths, `model/width`."""
        self._active().log_parameters(flatten(params), nested_support=False)

    def write_image(self, key: str, images: Sequence[Any], step: int) -> None:
        if not is_installed("PIL"):
            raise missing_package("pillow", "comet", "CometLogger.log_image")
        from PIL import Image

        for image in images:
            picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
            self._active().log_image(picture, name=key, step=step)

    def write_text(self, key: str, text: str, step: int) -> None:
        """Log a text, with its name in the metadata."""
        self._active().log_text(text, step=step, metadata={"key": key})

    def write_histogram(self, key: str, values: Any, step: int) -> None:
        self._active().log_histogram_3d(values, name=key, step=step)


# ------------------------------------------------------------------------------------------------------------- comet_ml


_FORMER = {  # Arguments of Lightning's older CometLogger.
    "experiment_name": "name='…'",
    "offline": "online=False",
    "project_name": "project='…'",
    "rest_api_key": "api_key='…'",
}


def check_online(api_key: str | None, online: bool | None) -> bool:
    """Whether experiments are sent, by default as comet_ml is configured. Raises `NotLoggedInError` without an API key."""
    config = comet_ml().get_config()
    if online is None:
        online = config.get_bool(None, "comet.start.online", default=True, not_set_value=None)
    if online is False:
        return False
    if not api_key and not comet_ml().get_api_key(None, config):
        raise NotLoggedInError(
            "CometLogger: there is no API key. Fix: run comet login or set COMET_API_KEY; or keep the experiment on this "
            "machine, for comet upload, with CometLogger(online=False)"
        )
    return True


def comet_ml() -> Any:
    """Import the package without its automatic logging, which patches other packages."""
    name = "COMET_DISABLE_AUTO_LOGGING"
    if "comet_ml" in sys.modules or name in os.environ:
        return import_module("comet_ml")
    os.environ[name] = "1"
    try:
        return import_module("comet_ml")
    finally:
        del os.environ[name]


def check_options(kwargs: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """`kwargs`; raises `UnknownNameError` for one that `comet_ml.ExperimentConfig` does not have."""
    if mode not in (None, "get_or_create", "get", "create"):
        raise ConfigurationError(f"mode: expected 'get_or_create', 'get' or 'create', got {mode!r}. Fix: remove it")
    if kwargs:
        known = inspect.signature(comet_ml().ExperimentConfig.__init__).parameters
        for name in kwargs:
            if name in known and name not in ("self", "offline_directory"):
                continue
            fix = f"Fix: {_FORMER[name]}" if name in _FORMER else "Fix: remove it; see help(comet_ml.ExperimentConfig)"
            similar = "" if name in _FORMER else nearest(name, known)
            raise UnknownNameError(
                f"CometLogger: expected its own arguments or those of comet_ml.ExperimentConfig, got {name!r}.{similar} {fix}"
            )
    return kwargs


def start(options: dict[str, Any], **settings: Any) -> Any:
    """Start or continue an experiment, online by default; `options` are those of its configuration."""
    config = comet_ml().ExperimentConfig(**{"auto_metric_logging": False, "auto_param_logging": False, **options})
    return comet_ml().start(experiment_config=config, **{"online": True, **settings})


def start_offline(folder: Path, options: dict[str, Any], **settings: Any) -> Any:
    """Start an experiment whose archive will be in `folder`.

    comet_ml draws a part of the archive's name from Python's `random`: with a fixed seed it would replace an archive of the
    same key.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.getstate()
    random.seed()
    try:
        return start({**options, "offline_directory": str(folder)}, online=False, **settings)
    finally:
        random.setstate(generator)


def read_steps(api_key: str | None, key: str) -> dict[str, list[int]]:
    """Metric → the steps of its records in an online experiment, in the order of logging."""
    experiment = comet_ml().API(api_key).get_experiment_by_key(key)
    records = [] if experiment is None else experiment.get_metrics() or []
    steps: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda one: (one["timestamp"], one.get("offset") or 0)):
        if record["step"] is not None:
            steps.setdefault(record["metricName"], []).append(int(record["step"]))
    return steps
