"""`Trackers`: the loggers and trackers of an `Accelerator`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, MissingPackageError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.loggers.base import Logger, NullExperiment, is_installed
from trainkit.loggers.logger_setup import LOGGERS, NotLoggedInError, attach, check_logger, make_logger
from trainkit.loggers.trackers import LoggerTracker, tracker_of
from trainkit.names import advice, advice_by_place
from trainkit.strategy import Strategy

__all__ = ["ByTracker", "Trackers", "check_trackers"]

ByTracker = Mapping[str, Mapping[str, Any]]
"""Arguments by the name of the tracker that they are for."""

_ALL = ("comet_ml", "mlflow", "tensorboard", "wandb")
_NOTHING = NullExperiment()


class Trackers:
    """Runs the trackers of `log_with`, the result of `check_trackers`. Only the main process logs.

    On other processes the methods do nothing and need not be called. `project.logging_dir` is the folder of trackers that
    write files.
    """

    def __init__(self, log_with: list[Any], project: ProjectConfiguration, strategy: Strategy) -> None:
        self._log_with, self._project, self._strategy = log_with, project, strategy
        self._names = [name for item in log_with for name in (_ALL if item == "all" else [_name(item)])]
        self._started = False
        self.running: list[Any] = []  # on the main process, once started

    def start(self, project_name: str, config: Any, init_kwargs: ByTracker | None) -> None:
        """Start a run with each tracker; see `Accelerator.init_trackers`."""
        if self._started:
            raise ConfigurationError("init_trackers: trackers are running already. Fix: call accelerator.end_training() first")
        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name: expected a name, got {project_name!r}. Fix: init_trackers('my_project')")
        trackers = self._make(project_name, self._by_name("init_kwargs", init_kwargs))
        loggers = [tracker.logger for tracker in trackers if isinstance(tracker, LoggerTracker)]
        attach(loggers, self._project.logging_dir or "trainkit_runs", self._strategy.rank)
        self._started, self.running = True, trackers if self._strategy.is_main_process else []
        try:
            for tracker in self.running:
                getattr(tracker, "start", _NOTHING)()
                if config is not None:
                    tracker.store_init_configuration(config)
        except BaseException:
            with suppress(Exception):
                self.end()
            raise

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: ByTracker | None) -> None:
        """Log the values of a step; see `Accelerator.log`."""
        options = self._by_name("log_kwargs", log_kwargs) if self._is_started("log") else {}
        for tracker in self.running:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def get(self, name: Any, unwrap: bool) -> Any:
        """A tracker by its name, or with `unwrap` its `tracker`; an object that does nothing if it does not log here."""
        wanted = _text(name)
        if self._is_started("get_tracker") and self._names and wanted not in self._names:
            raise UnknownNameError(
                f"get_tracker: expected one of {', '.join(self._names)}, got {wanted!r}.{nearest(str(wanted), self._names)} "
                f"Fix: Accelerator(log_with=[{wanted!r}, ...])"
            )
        found = next((tracker for tracker in self.running if tracker.name == wanted), _NOTHING)
        return found.tracker if unwrap else found

    def end(self) -> None:
        """End all runs, even if one of them raises; see `Accelerator.end_training`."""
        with ExitStack() as stack:  # which calls the last one first
            for tracker in reversed(self.running):
                stack.callback(getattr(tracker, "finish", _NOTHING))
            self._started, self.running = False, []

    def _is_started(self, verb: str) -> bool:
        if self._names and not self._started and self._strategy.is_main_process:  # init_trackers may run there alone
            raise ConfigurationError(
                f"{verb}: the trackers ({', '.join(self._names)}) are not running. "
                "Fix: call accelerator.init_trackers('my_project') first"
            )
        return self._started

    def _by_name(self, argument: str, given: ByTracker | None) -> ByTracker:
        """Arguments by the name of the tracker; raises for a name that no tracker has."""
        found = {_text(key): value for key, value in (given or {}).items()}
        known = {*self._names, *LOGGERS, *advice_by_place()["log_with"]}
        for name, value in found.items():
            if name not in known:
                raise UnknownNameError(
                    f"{argument}: expected names of trackers, {', '.join(sorted(known))}, got {name!r}."
                    f"{nearest(str(name), known)} Fix: {argument}={{'wandb': {{...}}}}"
                )
            if not isinstance(value, Mapping):
                raise ConfigurationError(
                    f"{argument}[{name!r}]: expected a dict of arguments, got {value!r}. Fix: {{'tags': ['a']}}"
                )
        return found

    def _make(self, project_name: str, init_kwargs: ByTracker) -> list[Any]:
        def create(item: Any) -> Any:
            options, folder = init_kwargs.get(_name(item), {}), self._project.logging_dir
            if isinstance(item, str):
                given = {LOGGERS[item].project or "name": project_name, **options}
                if folder is not None and not {"dir", "offline_directory"} & given.keys():
                    given.setdefault("save_dir", folder)
                return tracker_of(make_logger(item, **given))
            if options:
                raise ConfigurationError(
                    f"init_kwargs: {item.name!r} was given as an object. Fix: pass these arguments to its class"
                )
            return item

        trackers = [create(item) for item in self._log_with if item != "all"]
        if "all" not in self._log_with or not self._strategy.is_main_process:
            return trackers
        for name in _ALL:
            if name not in self._log_with and is_installed(LOGGERS[name].package):
                try:
                    tracker = create(name)
                    getattr(tracker.logger, "check_login", _NOTHING)()
                    trackers.append(tracker)
                except (MissingPackageError, NotLoggedInError) as error:
                    notice(f"log_with='all' skips {name}: {error}")
        if not trackers:
            warn("log_with='all': no tracker is available, so nothing will be logged. Fix: pip install tensorboard")
        return trackers


def check_trackers(log_with: Any, logging_dir: Any) -> list[Any]:
    """Check `log_with`: a name, an object, or a list of these. Returns a list of names, `"all"` included, and trackers."""
    checked: list[Any] = []
    for given in map(_text, log_with if isinstance(log_with, list | tuple | set) else [log_with]):
        item = tracker_of(given) if isinstance(given, Logger) else given
        if _writes_files(item) and logging_dir is None:
            name = _name(item)
            raise ConfigurationError(
                f"log_with={name!r} writes files, but there is no folder for them. Fix: Accelerator(log_with={name!r}, "
                "project_dir='runs'), or project_config=ProjectConfiguration(project_dir='.', logging_dir='runs')"
            )
        if item not in checked:
            checked.append(item)
    return checked


def _writes_files(item: Any) -> bool:
    """Whether this tracker needs a folder; raises if it is not a tracker."""
    if item == "all":
        return is_installed("tensorboard")
    if isinstance(item, str):
        if fix := advice("log_with", item):
            raise UnsupportedArgumentError(f"log_with={item!r} {fix}")
        check_logger(item, "log_with", ("all",))
        return not LOGGERS[item].project
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
    return bool(getattr(item, "requires_logging_directory", False))


def _text(item: Any) -> Any:
    """The name that an item stands for: a string, or an enum of strings such as Accelerate's `LoggerType`."""
    value = getattr(item, "value", item)
    return value if isinstance(value, str) else item


def _name(item: Any) -> str:
    return str(getattr(item, "name", item))
