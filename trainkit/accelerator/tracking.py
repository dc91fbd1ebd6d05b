"""``Trackers``: the part of an ``Accelerator`` that logs, with loggers or trackers of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.loggers.attach import attach
from trainkit.loggers.base import Logger, NullExperiment, is_installed
from trainkit.loggers.known_loggers import LOGGERS, check_logger, make_logger
from trainkit.loggers.trackers import LoggerTracker, name_of, reason_against, tracker_of
from trainkit.strategy import Strategy

__all__ = ["ByTracker", "Trackers", "check_trackers"]

ByTracker = Mapping[str, Mapping[str, Any]]
"""Arguments by the name of the tracker that they are for."""

_ALL = ("comet_ml", "mlflow", "tensorboard", "wandb")  # those of packages, not the files that are always there
_ACCELERATES = ("aim", "clearml", "dvclive", "swanlab", "trackio")
_PROJECT = {"wandb": "project", "mlflow": "experiment_name", "comet_ml": "project"}  # the argument that names the project


class _Project(Protocol):
    logging_dir: Any


class Trackers:
    """The trackers of ``log_with``, and whether they run. The main process logs; others may call the same methods or not.

    Args:
        log_with: from :func:`check_trackers`.
        project: its ``logging_dir`` is the folder of trackers that write files.
        strategy: says which process is the main process.
    """

    def __init__(self, log_with: list[Any], project: _Project, strategy: Strategy) -> None:
        self._log_with, self._project, self._strategy = log_with, project, strategy
        self._running: list[Any] | None = None  # None: not started
        self._names: tuple[str, ...] = ()  # of all that get_tracker knows, on each process

    @property
    def running(self) -> list[Any]:
        """Those that log: on the main process, between :meth:`start` and :meth:`end`."""
        return list(self._running or ())

    def start(self, project_name: str, config: Any, init_kwargs: ByTracker | None) -> None:
        """Start a run with each tracker; as ``Accelerator.init_trackers``.

        Raises:
            MissingPackageError: a tracker's package is not installed.
            UnknownNameError: a tracker or an argument that does not exist.
            ConfigurationError: the trackers run already, or an argument is wrong.
        """
        if self._running is not None:
            raise ConfigurationError("init_trackers: trackers are running. Fix: call accelerator.end_training() before")
        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name: expected a name, got {project_name!r}. Fix: init_trackers('my_project')")
        folder, main = self._project.logging_dir, self._strategy.is_main_process
        wanted = _without_all(self._log_with, init_kwargs or {}, main)
        options = _by_name("init_kwargs", init_kwargs, [_name(item) for item in wanted])
        trackers = [_make(item, project_name, folder, options.get(_name(item), {})) for item in wanted]
        loggers = [tracker.logger for tracker in trackers if isinstance(tracker, LoggerTracker)]
        attach(loggers, folder or "trainkit_runs", self._strategy.rank)
        self._names = (*(_ALL if "all" in self._log_with else ()), *(tracker.name for tracker in trackers))
        self._running = trackers if main else []
        try:
            for tracker in self._running:
                if hasattr(tracker, "start"):
                    tracker.start()
            if config is not None:
                for tracker in self._running:
                    tracker.store_init_configuration(config)
        except BaseException:
            with suppress(Exception):
                self.end()
            raise

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: ByTracker | None) -> None:
        """Log the values of a step; as ``Accelerator.log``.

        Raises:
            MetricError: a value that cannot be logged.
            ConfigurationError: the trackers do not run.
            UnsupportedArgumentError: an argument that a tracker does not take; the message says what to call.
        """
        options = _by_name("log_kwargs", log_kwargs, self._names) if self._started("log") else {}
        for tracker in self.running:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def get(self, name: Any, unwrap: bool) -> Any:
        """A tracker by its name.

        Returns:
            The tracker, or with ``unwrap`` its ``tracker``; where none logs (other processes, without ``log_with``, what
            ``"all"`` skips), an object whose attributes and calls do nothing.

        Raises:
            UnknownNameError: no tracker has this name.
            ConfigurationError: the trackers do not run.
        """
        wanted = _text(name)
        if self._started("get_tracker") and self._names and wanted not in self._names:
            raise UnknownNameError(
                f"get_tracker: expected one of {', '.join(self._names)}, got {wanted!r}.{nearest(str(wanted), self._names)} "
                f"Fix: Accelerator(log_with=[{wanted!r}, ...])"
            )
        found = next((tracker for tracker in self.running if tracker.name == wanted), NullExperiment())
        return found.tracker if unwrap else found

    def end(self) -> None:
        """End all runs, also if one of them raises; as ``Accelerator.end_training``."""
        running, self._running = self.running, None
        with ExitStack() as stack:  # which calls the last one first
            for tracker in reversed(running):
                if hasattr(tracker, "finish"):
                    stack.callback(tracker.finish)

    def _started(self, verb: str) -> bool:
        # scripts call init_trackers on the main process alone, too
        if self._running is None and self._log_with and self._strategy.is_main_process:
            names = ", ".join(_name(item) for item in self._log_with)
            raise ConfigurationError(
                f"{verb}: the trackers ({names}) are not running. Fix: call accelerator.init_trackers('my_project') before"
            )
        return self._running is not None


def check_trackers(log_with: Any, logging_dir: Any) -> list[Any]:
    """``log_with``, a name, an object or a list of these, as a list of names, ``"all"`` among them, and objects.

    Raises:
        UnknownNameError: a name that no tracker has.
        UnsupportedArgumentError: a tracker of Accelerate's that trainkit does not have.
        MissingPackageError: a tracker's package is not installed.
        ConfigurationError: something else; or a tracker writes files, and ``logging_dir`` is ``None``.
    """
    items = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]
    checked: list[Any] = []
    for item in map(_text, items):
        in_files = _check_name(item) if isinstance(item, str) else _check_object(item)
        if in_files and logging_dir is None:
            name = _name(item)
            raise ConfigurationError(
                f"log_with={name!r} writes files, and there is no folder for them. Fix: Accelerator(log_with={name!r}, "
                "project_dir='runs'), or project_config=ProjectConfiguration(project_dir='.', logging_dir='runs')"
            )
        if not isinstance(item, str) or item not in checked:
            checked.append(item)
    return checked


def _check_name(name: str) -> bool:
    """Whether this tracker writes files; an error if it cannot be used."""
    if name in _ACCELERATES:
        raise UnsupportedArgumentError(
            f"log_with={name!r} is a tracker of Accelerate's that trainkit does not have. Fix: use one of "
            f"{', '.join(LOGGERS)}, or give an object of your own, trainkit.tracking.GeneralTracker"
        )
    if name != "all":
        check_logger(name, "log_with", ("all",))
    return name in ("csv", "jsonl", "tensorboard") or (name == "all" and is_installed("tensorboard"))


def _check_object(item: Any) -> bool:
    """Whether this tracker needs a folder for its files; an error if it is none."""
    if isinstance(item, type):
        raise ConfigurationError(
            f"log_with: expected an object, got the class {item.__name__}. Fix: log_with={item.__name__}()"
        )
    if isinstance(item, Logger):
        return False
    lacking = [name for name in ("name", "tracker", "store_init_configuration", "log") if name not in dir(item)]
    if lacking:
        raise ConfigurationError(
            f"log_with: expected a name, a trainkit.loggers.Logger or a tracker, got {item!r}, which has no "
            f"{', '.join(lacking)}. Fix: log_with='tensorboard'"
        )
    return bool(getattr(item, "requires_logging_directory", False))


def _without_all(wanted: list[Any], init_kwargs: ByTracker, main: bool) -> list[Any]:
    """``"all"`` replaced by the trackers that are installed and work here; none on other processes, where nothing is logged."""
    chosen = [item for item in wanted if item != "all"]
    if "all" not in wanted or not main:
        return chosen
    for name in _ALL:
        if name in chosen or not is_installed(LOGGERS[name].package):
            continue
        if (reason := reason_against(name, init_kwargs.get(name, {}))) is None:
            chosen.append(name)
        else:
            notice(f"log_with='all' leaves out {name}: {reason}")
    if not chosen:
        warn("log_with='all': there is no tracker, so nothing will be logged. Fix: pip install tensorboard")
    return chosen


def _make(item: Any, project_name: str, folder: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(item, str):
        given = {_PROJECT.get(item, "name"): project_name, **options}
        if folder is not None and not {"dir", "offline_directory"} & given.keys():
            given.setdefault("save_dir", folder)
        return tracker_of(make_logger(item, **given))
    if options:
        raise ConfigurationError(f"init_kwargs: {_name(item)!r} was given as an object. Fix: give it its arguments there")
    return tracker_of(item) if isinstance(item, Logger) else item


def _by_name(argument: str, given: ByTracker | None, names: Iterable[str]) -> ByTracker:
    """Arguments by the name of the tracker they are for; a name that no tracker has is an error."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in (given or {}).items():
        name, known = _text(key), {*names, *LOGGERS, *_ACCELERATES}
        if name not in known:
            raise UnknownNameError(
                f"{argument}: expected names of trackers, {', '.join(sorted(known))}, got {name!r}.{nearest(str(name), known)} "
                f"Fix: {argument}={{'wandb': {{...}}}}"
            )
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"{argument}[{name!r}]: expected a dict of arguments, got {value!r}. Fix: {{'tags': ['a']}}"
            )
        found[name] = dict(value)
    return found


def _text(item: Any) -> Any:
    """The name that an item stands for: a string, or an enum of strings such as Accelerate's ``LoggerType``."""
    value = getattr(item, "value", item)
    return value if isinstance(value, str) else item


def _name(item: Any) -> str:
    if isinstance(item, str):
        return item
    return name_of(item) if isinstance(item, Logger) else str(item.name)
