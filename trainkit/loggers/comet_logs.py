"""``CometLogger``: experiments of Comet, online or offline."""

from __future__ import annotations

import inspect
import os
import sys
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, UnknownNameError, missing_package, nearest
from trainkit.loggers.base import Logger, is_installed
from trainkit.loggers.comet_archives import (
    archive_unfinished,
    claim,
    is_written,
    kept_in,
    media,
    steps_in_archives,
    tidy,
    unfinished,
)
from trainkit.loggers.folder import check_save_dir
from trainkit.loggers.repeats import Repeats
from trainkit.loggers.values import flatten

__all__ = ["CometLogger", "goes_online"]

_SAVES = "trainkit/saves"
_PATIENCE = 60.0  # seconds for what was logged to be written before a checkpoint
_MODES = (None, "get_or_create", "get", "create")
_FORMER = {  # of Lightning's older CometLogger
    "experiment_name": "name='…'",
    "offline": "online=False",
    "project_name": "project='…'",
    "rest_api_key": "api_key='…'",
}


@dataclass
class _Open:
    """The experiment that a logger of ours has started: comet_ml has one in a process."""

    experiment: Any
    owner: weakref.ref[CometLogger]


class CometLogger(Logger):
    """Logs to an experiment of Comet. Offline, its archives lie in ``save_dir``, to be sent by ``comet upload``.

    ``experiment`` is comet_ml's own. comet_ml's automatic logging is off, since every metric would come twice: what is logged
    is what you log. To have it, import comet_ml before torch. A process has one experiment at a time.

    Who ends it: as for ``WandbLogger``, it stays open after a ``fit`` that succeeded and ends with the program, or when another
    ``CometLogger`` starts one; after a fit that failed it ends at once. One that you started is used, and yours to end.

    After a resume from a checkpoint the experiment keeps its key. What it has got cannot be taken back, so records that it got
    after the checkpoint are not logged again; online, images, texts and histograms from between the checkpoint and the kill
    come twice. Offline, each process writes an archive of its own, all with the same key. What a killed process has logged
    stays in ``<save_dir>/<key>.unfinished``; the run that is resumed makes an archive of it.

    Args:
        api_key: None: as comet_ml is configured, by the environment variable ``COMET_API_KEY`` or by ``comet login``.
        workspace: None: your default one.
        project: None: as comet_ml is configured, else "trainkit".
        experiment_key: Go on with this experiment, or start one with this key. None: a new one.
        mode: "get_or_create" (the default), "get" or "create": whether ``experiment_key`` has to be there.
        online: Send what is logged. None: as comet_ml is configured (``COMET_START_ONLINE``), else True.
        prefix: As for every ``Logger``.
        save_dir: Where the archives are made. None: as for every ``Logger``.
        offline_directory: The same as ``save_dir``.
        **kwargs: Further arguments of ``comet_ml.ExperimentConfig``: ``name``, ``tags``, ``log_code``, …

    Raises:
        MissingPackageError: comet_ml is not installed.
        UnknownNameError: An argument that ``comet_ml.ExperimentConfig`` does not have.
        ConfigurationError: Arguments that cannot be used; no API key, and not ``online=False``.
    """

    _in_run_folder = False
    _open: ClassVar[_Open | None] = None

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
        folders = [check_save_dir(one) for one in (save_dir, offline_directory) if one is not None]
        if len(set(folders)) > 1:
            raise ConfigurationError(
                f"CometLogger: save_dir and offline_directory mean the same, got {str(folders[0])!r} and {str(folders[1])!r}. "
                f"Fix: give one of them, save_dir={str(folders[0])!r}"
            )
        super().__init__(folders[0] if folders else None, prefix=prefix or "")
        if not is_installed("comet_ml"):
            raise missing_package("comet_ml", "comet", "CometLogger")
        if mode not in _MODES:
            raise ConfigurationError(f"mode: expected 'get_or_create', 'get' or 'create', got {mode!r}. Fix: leave it out")
        self._options = _checked_options(kwargs)
        self._api_key, self._workspace, self._project, self._mode = api_key, workspace, project, mode
        self._online = goes_online(api_key, online)
        if self._online is None:
            raise ConfigurationError(
                "CometLogger: there is no API key. Fix: CometLogger(online=False) keeps the experiment here, for comet upload; "
                "comet login, or the environment variable COMET_API_KEY, to send it"
            )
        self._key = experiment_key
        self._begun = False  # the experiment is known, and where it stands
        self._repeats = Repeats()
        self._steps: dict[str, list[int]] | None = None  # of records that were there, once they are asked for
        self._idle = self._adopted = False
        self._checkpointing = 0

    # ------------------------------------------------------------------ where

    @property
    def name(self) -> str:
        """The project."""
        return self._project or os.environ.get("COMET_PROJECT_NAME") or "trainkit"

    @property
    def version(self) -> str | None:
        """The experiment's key; None as long as it is not started and none was given."""
        return self._key

    @property
    def root_dir(self) -> str:
        """The same as ``save_dir``."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """``save_dir`` where the archives of an offline experiment are made; None online."""
        return None if self._online else self.save_dir

    def __repr__(self) -> str:
        return f"CometLogger(project={self.name!r}, experiment_key={self.version!r}, online={self._online})"

    # ------------------------------------------------------------------ the experiment

    @property
    def experiment(self) -> Any:
        """The experiment, started now if it is not; on other processes an object that does nothing."""
        if getattr(self._experiment, "ended", False):
            self._experiment = None  # by the user, or by comet_ml: go on with it by its key
        return super().experiment

    def open_experiment(self) -> Any:
        """The experiment that the user has started if there is one, else one of our own."""
        comet_ml = _comet_ml()
        self._end_the_last()
        self._idle = False
        running = comet_ml.get_running_experiment()
        self._adopted = running is not None and not running.ended
        if self._adopted:
            return self._adopt(running)
        folder = Path(self.save_dir).absolute()
        if not self._online and self._key is not None:
            for archive in archive_unfinished(folder, self._key):
                notice(f"CometLogger: what a process that was killed has logged is in {archive}")
        if self._key is not None and not self._begun:  # the user's: what it has comes before
            self._steps = self._known_steps()
            self._repeats.go_on({name: len(steps) for name, steps in self._steps.items()})
        config = {"auto_metric_logging": False, "auto_param_logging": False, **self._options}
        given = {"workspace": self._workspace, "project_name": self.name, "mode": self._mode}
        if self._online:
            config = comet_ml.ExperimentConfig(**config)
            given.update(api_key=self._api_key, experiment_key=self._key)
            experiment = comet_ml.start(online=True, experiment_config=config, **given)
        else:
            experiment = self._start_offline(comet_ml, folder, config, given)
        self._key, self._begun = experiment.get_key(), True
        CometLogger._open = _Open(experiment, weakref.ref(self))
        return experiment

    def _start_offline(self, comet_ml: Any, folder: Path, config: dict[str, Any], given: dict[str, Any]) -> Any:
        key = self._key or uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        config = comet_ml.ExperimentConfig(offline_directory=str(folder), **config)
        with kept_in(unfinished(folder, key)):
            experiment = comet_ml.start(online=False, experiment_key=key, experiment_config=config, **given)
            claim(Path(experiment.tmpdir))
        describe = getattr(experiment, "_write_experiment_meta_file", None)
        if describe is None:
            warn("CometLogger: with this version of comet_ml, what a process logs that is killed cannot be uploaded")
        else:
            describe()  # comet_ml does it when it ends, and a process that is killed never does
        self._close_when_dropped(partial(tidy, folder, key))
        return experiment

    def _adopt(self, running: Any) -> Any:
        key = running.get_key()
        if self._key not in (None, key):
            raise ConfigurationError(
                f"CometLogger is to log to the experiment {self._key}, and comet_ml has {key} open; it has one at a time. "
                "Fix: call comet_ml.end() before"
            )
        self._key, self._begun = key, True
        return running

    def _end_the_last(self) -> None:
        last = CometLogger._open
        if last is None:
            return
        owner = last.owner()
        if last.experiment.ended:
            CometLogger._open = None
        elif owner is None or owner._idle or owner is self:
            CometLogger._open = None
            last.experiment.end()
        else:
            raise ConfigurationError(
                "Two CometLoggers at a time: comet_ml has one experiment in a process. Fix: give the Trainer one CometLogger"
            )

    def set_rank(self, rank: int) -> None:
        """The number of this process; called when a Trainer takes this logger up."""
        super().set_rank(rank)
        self._idle = False

    def save(self) -> None:
        """Wait until what was logged is sent, or offline written."""
        experiment = self._experiment
        if experiment is None or experiment.ended:
            return
        if self._online:
            done = experiment.flush()
        else:
            self._checkpointing += 1
            experiment.log_other(_SAVES, self._checkpointing)
            end = time.monotonic() + _PATIENCE
            while not (done := is_written(Path(experiment.tmpdir), _SAVES, self._checkpointing)) and time.monotonic() < end:
                time.sleep(0.001)
        if not done:
            warn("CometLogger: comet_ml has not written all that was logged; some of it may be missing after a kill")

    def finalize(self, status: str = "success") -> None:
        """End of a run: on success the experiment stays open and idle, else it is ended."""
        if status == "success":
            self.save()
            self._idle = True
        else:
            super().finalize(status)

    def close_experiment(self, experiment: Any, status: str) -> None:
        """End an experiment that this logger started."""
        if self._adopted:
            return
        if CometLogger._open is not None and CometLogger._open.experiment is experiment:
            CometLogger._open = None
        experiment.end()
        if not self._online and self._key is not None:
            tidy(Path(self.save_dir).absolute(), self._key)

    # ------------------------------------------------------------------ what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """The experiment's key, and how many records it has of each metric; starts none."""
        state: dict[str, Any] = {"last_step": self._last_step}
        if self.is_main_process and self._begun:
            self.save()
            state.update(key=self._key, counts=dict(self._repeats.counts))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the experiment of ``state``. Nothing can be removed from it: what it has is not logged again."""
        if self._experiment is not None and not self._adopted:
            super().finalize("success")
        self._last_step = int(state.get("last_step", -1))
        if "key" not in state or not self.is_main_process:
            return
        if self._key not in (None, state["key"]):
            notice(f"CometLogger logs to the experiment {self._key}, not to {state['key']}, to which the resumed run logged.")
            return
        self._key, self._begun, self._steps = str(state["key"]), True, None
        self._repeats.go_on(state["counts"])

    def _known_steps(self) -> dict[str, list[int]]:
        assert self._key is not None
        if self._online:
            return _steps_online(self._api_key, self._key)
        return steps_in_archives(Path(self.save_dir).absolute(), self._key)

    def _steps_of(self, name: str) -> list[int]:
        if self._steps is None:
            self._steps = self._known_steps()
        return self._steps.get(name, [])

    def _is_new(self, name: str, step: int) -> bool:
        """Whether this record is not there from before a resume; it is counted."""
        self._idle = False
        _ = self.experiment  # which makes archives of what was left, before they are read
        if self._repeats.has(name, step, self._steps_of):
            return False
        self._repeats.note(name)
        return True

    # ------------------------------------------------------------------ what is logged

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Log the metrics; "epoch" is Comet's own."""
        epoch = metrics.get("epoch")
        new = {key: value for key, value in metrics.items() if key != "epoch" and self._is_new(key, step)}
        if new:
            self.experiment.log_metrics(new, step=step, epoch=None if epoch is None else int(epoch))

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log parameters; nested ones are named by their path, ``model/width``."""
        self._idle = False
        self.experiment.log_parameters(flatten(params), nested_support=False)

    def write_image(self, key: str, images: Sequence[Any], step: int) -> None:
        """Log images under one name."""
        if not is_installed("PIL"):
            raise missing_package("pillow", "comet", "CometLogger.log_image")
        from PIL import Image

        for image in images:
            if self._is_new(media("image", key), step):
                picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
                self.experiment.log_image(picture, name=key, step=step)

    def write_text(self, key: str, text: str, step: int) -> None:
        """Log a text; its name is in the metadata."""
        if self._is_new(media("text", key), step):
            self.experiment.log_text(text, step=step, metadata={"key": key})

    def write_histogram(self, key: str, values: Any, step: int) -> None:
        """Log a histogram of Comet's own bins."""
        if self._is_new(media("histogram", key), step):
            self.experiment.log_histogram_3d(values, name=key, step=step)


def goes_online(api_key: str | None = None, online: bool | None = None) -> bool | None:
    """Whether an experiment is sent, as comet_ml is configured; ``None``: it would be, and there is no API key."""
    if online is False:
        return False
    config = _comet_ml().get_config()
    if online is None:
        online = config.get_bool(None, "comet.start.online", default=True, not_set_value=None)
    if online is False:
        return False
    return True if api_key or _comet_ml().get_api_key(None, config) else None


def _comet_ml() -> Any:
    """comet_ml, imported without its automatic logging, which changes packages as they are imported."""
    name = "COMET_DISABLE_AUTO_LOGGING"
    if "comet_ml" not in sys.modules and name not in os.environ:
        os.environ[name] = "1"
        try:
            import comet_ml
        finally:
            del os.environ[name]
    import comet_ml

    return comet_ml


def _checked_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs:
        known = inspect.signature(_comet_ml().ExperimentConfig.__init__).parameters
        for name in kwargs:
            if name in known and name not in ("self", "offline_directory"):
                continue
            fix = f"Fix: {_FORMER[name]}" if name in _FORMER else "Fix: remove it; see help(comet_ml.ExperimentConfig)"
            similar = "" if name in _FORMER else nearest(name, known)
            raise UnknownNameError(
                f"CometLogger: expected arguments of its own or of comet_ml.ExperimentConfig, got {name!r}.{similar} {fix}"
            )
    return kwargs


def _steps_online(api_key: str | None, key: str) -> dict[str, list[int]]:
    found = _comet_ml().API(api_key).get_experiment_by_key(key)
    records = [] if found is None else found.get_metrics() or []
    steps: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda one: (one["timestamp"], one.get("offset") or 0)):
        if record["step"] is not None:
            steps.setdefault(record["metricName"], []).append(int(record["step"]))
    return steps
