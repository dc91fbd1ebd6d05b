"""``Trackers``: the loggers and trackers of an ``Accelerator``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from trainkit.config.configurations import ProjectConfiguration
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, MissingPackageError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.loggers.attach import attach
from trainkit.loggers.base import Logger, NullExperiment, is_installed
from trainkit.loggers.known_loggers import LOGGERS, NotLoggedInError, check_logger, make_logger
from trainkit.loggers.trackers import LoggerTracker, tracker_of
from trainkit.strategy import Strategy

__all__ = ["ByTracker", "Trackers", "check_trackers"]

ByTracker = Mapping[str, Mapping[str, Any]]
"""Arguments by the name of the tracker that they are for."""

_ALL = ("comet_ml", "mlflow", "tensorboard", "wandb")
_ONLY_ACCELERATE = ("aim", "clearml", "dvclive", "swanlab", "trackio")
_PROJECT = {"wandb": "project", "mlflow": "experiment_name", "comet_ml": "project"}  # the argument that names the project
_NOTHING = NullExperiment()


class Trackers:
    """Runs the trackers of ``log_with``, the result of :func:`check_trackers`. Only the main process logs.

    On other processes the methods do nothing and need not be called. ``project.logging_dir`` is the folder of trackers that
    write files.
    """

    def __init__(self, log_with: list[Any], project: ProjectConfiguration, strategy: Strategy) -> None:
        self._log_with, self._project, self._strategy = log_with, project, strategy
        self._running: list[Any] | None = None  # None: not started
        self._names: tuple[str, ...] = ()  # what get_tracker accepts, the same on all processes

    @property
    def running(self) -> list[Any]:
        """The trackers that log: on the main process, between :meth:`start` and :meth:`end`."""
        return list(self._running or ())

    def start(self, project_name: str, config: Any, init_kwargs: ByTracker | None) -> None:
        """Start a run with each tracker; see ``Accelerator.init_trackers``."""
        if self._running is not None:
            raise ConfigurationError("init_trackers: trackers are running. Fix: call accelerator.end_training() before")
        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name: expected a name, got {project_name!r}. Fix: init_trackers('my_project')")
        trackers = self._make(project_name, init_kwargs)
        loggers = [tracker.logger for tracker in trackers if isinstance(tracker, LoggerTracker)]
        attach(loggers, self._project.logging_dir or "trainkit_runs", self._strategy.rank)
        self._names = (*(_ALL if "all" in self._log_with else ()), *(tracker.name for tracker in trackers))
        self._running = trackers if self._strategy.is_main_process else []
        try:
            for tracker in self._running:
                getattr(tracker, "start", _NOTHING)()
                if config is not None:
                    tracker.store_init_configuration(config)
        except BaseException:
            with suppress(Exception):
                self.end()
            raise

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: ByTracker | None) -> None:
        """Log the values of a step; see ``Accelerator.log``."""
        options = _by_name("log_kwargs", log_kwargs, self._names) if self._started("log") else {}
        for tracker in self.running:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def get(self, name: Any, unwrap: bool) -> Any:
        """A tracker by its name, or with ``unwrap`` its ``tracker``; an object that does nothing if it does not log here."""
        wanted = _text(name)
        if self._started("get_tracker") and self._names and wanted not in self._names:
            raise UnknownNameError(
                f"get_tracker: expected one of {', '.join(self._names)}, got {wanted!r}.{nearest(str(wanted), self._names)} "
                f"Fix: Accelerator(log_with=[{wanted!r}, ...])"
            )
        found = next((tracker for tracker in self.running if tracker.name == wanted), _NOTHING)
        return found.tracker if unwrap else found

    def end(self) -> None:
        """End all runs, even if one of them raises; see ``Accelerator.end_training``."""
        running, self._running = self.running, None
        with ExitStack() as stack:  # which calls the last one first
            for tracker in reversed(running):
                stack.callback(getattr(tracker, "finish", _NOTHING))

    def _started(self, verb: str) -> bool:
        if self._running is None and self._log_with and self._strategy.is_main_process:  # init_trackers may run there alone
            names = ", ".join(map(_name, self._log_with))
            raise ConfigurationError(
                f"{verb}: the trackers ({names}) are not running. Fix: call accelerator.init_trackers('my_project') before"
            )
        return self._running is not None

    def _make(self, project_name: str, init_kwargs: ByTracker | None) -> list[Any]:
        options = _by_name("init_kwargs", init_kwargs, [_name(item) for item in self._log_with])

        def made(item: Any) -> Any:
            return _make_tracker(item, project_name, self._project.logging_dir, options.get(_name(item), {}))

        trackers = [made(item) for item in self._log_with if item != "all"]
        if "all" not in self._log_with or not self._strategy.is_main_process:
            return trackers
        for name in _ALL:
            if name not in self._log_with and is_installed(LOGGERS[name].package):
                try:
                    tracker = made(name)
                    tracker.check_login()
                    trackers.append(tracker)
                except (MissingPackageError, NotLoggedInError) as error:
                    notice(f"log_with='all' skips {name}: {error}")
        if not trackers:
            warn("log_with='all': there is no tracker, so nothing will be logged. Fix: pip install tensorboard")
        return trackers


def check_trackers(log_with: Any, logging_dir: Any) -> list[Any]:
    """Check ``log_with``: a name, an object, or a list of these. Returns a list of names, ``"all"`` included, and trackers.

    Raises:
        UnknownNameError: no tracker has this name.
        UnsupportedArgumentError: only Accelerate has this tracker.
        MissingPackageError: the package of a tracker is not installed.
        ConfigurationError: an object that is no tracker; or a tracker writes files, and ``logging_dir`` is ``None``.
    """
    checked: list[Any] = []
    for item in map(_text, log_with if isinstance(log_with, list | tuple | set) else [log_with]):
        if isinstance(item, str):
            _check_name(item)
            in_files = item in ("csv", "jsonl", "tensorboard") or (item == "all" and is_installed("tensorboard"))
        else:
            item = tracker_of(item) if isinstance(item, Logger) else item
            _check_object(item)
            in_files = getattr(item, "requires_logging_directory", False)
        if in_files and logging_dir is None:
            name = _name(item)
            raise ConfigurationError(
                f"log_with={name!r} writes files, and there is no folder for them. Fix: Accelerator(log_with={name!r}, "
                "project_dir='runs'), or project_config=ProjectConfiguration(project_dir='.', logging_dir='runs')"
            )
        if item not in checked:
            checked.append(item)
    return checked


def _check_name(name: str) -> None:
    if name in _ONLY_ACCELERATE:
        raise UnsupportedArgumentError(
            f"log_with={name!r} is a tracker of Accelerate's that trainkit does not have. Fix: use one of "
            f"{', '.join(LOGGERS)}, or pass an object of your own, trainkit.tracking.GeneralTracker"
        )
    if name != "all":
        check_logger(name, "log_with", ("all",))


def _check_object(item: Any) -> None:
    if isinstance(item, type):
        raise ConfigurationError(
            f"log_with: expected an object, got the class {item.__name__}. Fix: log_with={item.__name__}()"
        )
    missing = [name for name in ("name", "tracker", "store_init_configuration", "log") if name not in dir(item)]
    if missing:
        raise ConfigurationError(
            f"log_with: expected a name, a trainkit.loggers.Logger or a tracker, got {item!r}, which has no "
            f"{', '.join(missing)}. Fix: log_with='tensorboard'"
        )


def _make_tracker(item: Any, project_name: str, folder: Any, options: Mapping[str, Any]) -> Any:
    if not isinstance(item, str):
        if options:
            raise ConfigurationError(f"init_kwargs: {item.name!r} was given as an object. Fix: give it its arguments there")
        return item
    given = {_PROJECT.get(item, "name"): project_name, **options}
    if folder is not None and not {"dir", "offline_directory"} & given.keys():
        given.setdefault("save_dir", folder)
    return tracker_of(make_logger(item, **given))


def _by_name(argument: str, given: ByTracker | None, names: Iterable[str]) -> ByTracker:
    """Arguments by the name of the tracker; raises for a name that no tracker has."""
    found = {_text(key): value for key, value in (given or {}).items()}
    known = {*names, *LOGGERS, *_ONLY_ACCELERATE}
    for name, value in found.items():
        if name not in known:
            raise UnknownNameError(
                f"{argument}: expected names of trackers, {', '.join(sorted(known))}, got {name!r}.{nearest(str(name), known)} "
                f"Fix: {argument}={{'wandb': {{...}}}}"
            )
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"{argument}[{name!r}]: expected a dict of arguments, got {value!r}. Fix: {{'tags': ['a']}}"
            )
    return found


def _text(item: Any) -> Any:
    """The name that an item stands for: a string, or an enum of strings such as Accelerate's ``LoggerType``."""
    value = getattr(item, "value", item)
    return value if isinstance(value, str) else item


def _name(item: Any) -> str:
    return item if isinstance(item, str) else str(item.name)
