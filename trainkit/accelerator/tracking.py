"""The verbs of an own loop that log: to TensorBoard, Weights & Biases, MLflow, Comet, or a tracker of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.config.configurations import ProjectConfiguration

__all__ = ["TrackerVerbs", "check_trackers"]

_ALL = ("comet_ml", "mlflow", "tensorboard", "wandb")  # those of packages, not the files that are always there
_IN_FILES = ("csv", "jsonl", "tensorboard")
_ACCELERATES = ("aim", "clearml", "dvclive", "swanlab", "trackio")


class TrackerVerbs:
    """The verbs of :class:`trainkit.Accelerator` that log."""

    strategy: Strategy
    project: ProjectConfiguration
    _log_with: list[Any]
    _trackers: list[Any] | None = None  # None: not started
    _tracker_names: tuple[str, ...] = ()

    @property
    def trackers(self) -> list[Any]:
        """Those that are logging, on the main process; none on others, before ``init_trackers`` and after ``end_training``."""
        return list(self._trackers or ())

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run with all trackers of ``log_with``. The main process logs; others may call it or not.

        Args:
            project_name: the project or experiment; for trackers that write files, a folder in ``logging_dir``, in which each
                run has a folder ``version_N``.
            config: hyper-parameters, logged at once: a dict, an ``argparse.Namespace`` or a dataclass.
            init_kwargs: by the tracker's name, arguments of its logger in ``trainkit.loggers``, such as
                ``{"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 60}}``. For trackers that are not used, no effect.

        Raises:
            MissingPackageError: a tracker's package is not installed.
            UnknownNameError: a tracker or an argument that nobody knows.
            ConfigurationError: trackers are running already; a folder is needed, and there is none.
        """
        if self._trackers is not None:
            raise ConfigurationError("init_trackers: trackers are running. Fix: call accelerator.end_training() before")
        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name: expected a name, got {project_name!r}. Fix: init_trackers('my_project')")
        folder, main = self.project.logging_dir, self.strategy.is_main_process
        wanted = _without_all(check_trackers(self._log_with, folder), init_kwargs or {}, main)
        own = [_name(item) for item in wanted if not isinstance(item, str)]
        options = _by_name("init_kwargs", init_kwargs, [_name(item) for item in wanted])
        for name in own:
            if name in options:
                raise ConfigurationError(f"init_kwargs: {name!r} was given as an object. Fix: give it its arguments there")
        trackers = [_make(item, project_name, folder, options) for item in wanted]
        self._attach(trackers, folder)
        self._tracker_names = tuple(_ALL if "all" in self._log_with else ()) + tuple(tracker.name for tracker in trackers)
        self._trackers = trackers if main else []
        try:
            for tracker in self._trackers:
                if hasattr(tracker, "start"):
                    tracker.start()
            if config is not None:
                for tracker in self._trackers:
                    tracker.store_init_configuration(config)
        except BaseException:
            with suppress(Exception):
                self.end_training()
            raise

    def _attach(self, trackers: list[Any], folder: Any) -> None:
        from trainkit.loggers.attach import attach
        from trainkit.loggers.trackers import LoggerTracker

        loggers = [tracker.logger for tracker in trackers if isinstance(tracker, LoggerTracker)]
        attach(loggers, "trainkit_runs" if folder is None else folder, self.strategy.rank)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log the values of a step with all trackers. The main process's count; the others do nothing.

        Args:
            values: name → number, tensor of one element, text, or a dict of such; for wandb, also pictures and tables. What is
                ``None`` is not logged.
            step: the number of updates so far, say. None: one more than the last one logged.
            log_kwargs: by the tracker's name, arguments of its ``log``.

        Raises:
            MetricError: a value that is none of these.
            ConfigurationError: ``init_trackers`` was not called.
            UnsupportedArgumentError: an argument that a tracker does not take; the message names what to call.
        """
        if self._trackers is None:
            self._not_started("log")
            return
        options = _by_name("log_kwargs", log_kwargs, self._tracker_names)
        for tracker in self._trackers:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def get_tracker(self, name: Any, unwrap: bool = False) -> Any:
        """A tracker by its name.

        Args:
            name: as in ``log_with``.
            unwrap: what is behind it: a ``SummaryWriter``, the run of wandb, of MLflow, the experiment of Comet.

        Returns:
            The tracker; on other processes than the main one, without ``log_with``, and for what ``"all"`` leaves out, an
            object of which every attribute and call does nothing.

        Raises:
            UnknownNameError: there is none of this name.
            ConfigurationError: ``init_trackers`` was not called.
        """
        from trainkit.loggers.base import NullExperiment

        if self._trackers is None:
            self._not_started("get_tracker")
        elif self._tracker_names:
            wanted = _text(name)
            if wanted not in self._tracker_names:
                raise UnknownNameError(
                    f"get_tracker: expected one of {', '.join(self._tracker_names)}, got {wanted!r}."
                    f"{nearest(wanted, self._tracker_names)} Fix: Accelerator(log_with=[{wanted!r}, ...])"
                )
            for tracker in self._trackers:
                if tracker.name == wanted:
                    return tracker.tracker if unwrap else tracker
        return NullExperiment()

    def end_training(self) -> None:
        """End the runs of all trackers; what was logged is kept. May be called again.

        Raises:
            Exception: what a tracker raised; the others are ended before.
        """
        trackers, self._trackers = self._trackers or [], None
        failed: BaseException | None = None
        for tracker in trackers:
            try:
                if hasattr(tracker, "finish"):
                    tracker.finish()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _not_started(self, verb: str) -> None:
        if self._log_with and self.strategy.is_main_process:  # scripts call init_trackers on the main process alone, too
            names = ", ".join(_name(item) for item in self._log_with)
            raise ConfigurationError(
                f"{verb}: the trackers ({names}) are not running. Fix: call accelerator.init_trackers('my_project') before"
            )


def check_trackers(log_with: Any, logging_dir: Any) -> list[Any]:
    """``log_with`` as a list of names, ``"all"`` among them, and objects; names that came twice are there once.

    Args:
        log_with: ``None``, a name, an enum whose value is one, a ``Logger``, a tracker, or a list of these.
        logging_dir: where trackers write that write files; ``None``: nothing was said.

    Raises:
        UnknownNameError: a name that no tracker has.
        UnsupportedArgumentError: a tracker of Accelerate's that trainkit does not have.
        MissingPackageError: a tracker's package is not installed.
        ConfigurationError: something else; or a tracker writes files, and ``logging_dir`` is ``None``.
    """
    from trainkit.loggers.base import is_installed
    from trainkit.loggers.names import LOGGERS, check_logger

    items = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]
    checked: list[Any] = []
    for item in items:
        text = _text(item)
        if not isinstance(text, str):
            _check_object(item, logging_dir)
            checked.append(item)
            continue
        if text in _ACCELERATES:
            raise UnsupportedArgumentError(
                f"log_with={text!r} is a tracker of Accelerate's that trainkit does not have. Fix: use one of "
                f"{', '.join(LOGGERS)}, or give an object of your own, trainkit.tracking.GeneralTracker"
            )
        if text not in LOGGERS and text != "all":
            raise UnknownNameError(
                f"log_with: expected 'all' or one of {', '.join(LOGGERS)}, got {text!r}.{nearest(text, [*LOGGERS, 'all'])} "
                "Fix: log_with='tensorboard'"
            )
        if text != "all":
            check_logger(text)
        if logging_dir is None and (text in _IN_FILES or (text == "all" and is_installed("tensorboard"))):
            raise _no_folder(text)
        if text not in checked:
            checked.append(text)
    return checked


def _check_object(item: Any, logging_dir: Any) -> None:
    from trainkit.loggers.base import Logger

    if isinstance(item, Logger):
        return
    if isinstance(item, type):
        raise ConfigurationError(
            f"log_with: expected an object, got the class {item.__name__}. Fix: log_with={item.__name__}()"
        )
    lacking = [name for name in ("name", "tracker", "store_init_configuration", "log") if name not in dir(item)]
    if lacking:
        raise ConfigurationError(
            f"log_with: expected a name, a trainkit.loggers.Logger or a tracker, got {item!r}, which has no "
            f"{', '.join(lacking)}. Fix: log_with='tensorboard'"
        )
    if logging_dir is None and getattr(item, "requires_logging_directory", False):
        raise _no_folder(item.name)


def _no_folder(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"log_with={name!r} writes files, and there is no folder for them. Fix: Accelerator(log_with={name!r}, "
        "project_dir='runs'), or project_config=ProjectConfiguration(project_dir='.', logging_dir='runs')"
    )


def _without_all(wanted: list[Any], init_kwargs: Mapping[str, Mapping[str, Any]], main: bool) -> list[Any]:
    """``"all"`` replaced by those that are installed and work here as it is; on the main process, where they log."""
    if "all" not in wanted or not main:
        return [item for item in wanted if item != "all"]
    from trainkit.loggers.accounts import reason_against
    from trainkit.loggers.base import is_installed
    from trainkit.loggers.names import LOGGERS

    chosen = [item for item in wanted if item != "all"]
    for name in _ALL:
        if name in chosen or not is_installed(LOGGERS[name].package):
            continue
        reason = reason_against(name, init_kwargs.get(name, {}))
        if reason is None:
            chosen.append(name)
        else:
            notice(f"log_with='all' leaves out {name}: {reason}")
    if not chosen:
        warn("log_with='all': there is no tracker, so nothing will be logged. Fix: pip install tensorboard")
    return chosen


def _make(item: Any, project_name: str, folder: Any, options: Mapping[str, Mapping[str, Any]]) -> Any:
    from trainkit.loggers.base import Logger
    from trainkit.loggers.names import make_logger
    from trainkit.loggers.trackers import tracker_of

    if not isinstance(item, str):
        return tracker_of(item) if isinstance(item, Logger) else item
    argument = {"wandb": "project", "mlflow": "experiment_name", "comet_ml": "project"}.get(item, "name")
    given = {argument: project_name, **options.get(item, {})}
    if folder is not None and not {"dir", "offline_directory"} & given.keys():
        given.setdefault("save_dir", folder)
    return tracker_of(make_logger(item, **given))


def _by_name(argument: str, given: Mapping[str, Mapping[str, Any]] | None, names: Any) -> dict[str, dict[str, Any]]:
    """Arguments by the name of the tracker they are for; a name that no tracker has is an error."""
    from trainkit.loggers.names import LOGGERS

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
    value = item if isinstance(item, str) else getattr(item, "value", item)
    return value if isinstance(value, str) else item


def _name(item: Any) -> str:
    from trainkit.loggers.base import Logger
    from trainkit.loggers.trackers import name_of

    if isinstance(item, str):
        return item
    return name_of(item) if isinstance(item, Logger) else str(item.name)
