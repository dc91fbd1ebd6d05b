"""Trackers of an `Accelerator`: the base class of your own, loggers in Accelerate's form, and their runner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.console import notice, warn, with_article
from trainkit.errors import (
    ConfigurationError,
    MetricError,
    MissingMethodError,
    MissingPackageError,
    UnknownNameError,
    UnsupportedArgumentError,
    nearest,
)
from trainkit.loggers.base import Logger, NullExperiment, is_installed, is_main_here
from trainkit.loggers.logged_values import as_step, number, plain
from trainkit.loggers.logger_setup import LOGGERS, NotLoggedInError, attach, check_logger, make_logger
from trainkit.names import advice, advice_by_place
from trainkit.registry import adapt
from trainkit.strategy import Strategy

__all__ = [
    "AdaptedLoggerTracker",
    "ByTracker",
    "GeneralTracker",
    "LoggerTracker",
    "MLflowTracker",
    "Trackers",
    "TrackioTracker",
    "WandBTracker",
    "check_trackers",
    "on_main_process",
    "tracker_of",
]

ByTracker = Mapping[str, Mapping[str, Any]]
"""Arguments by the name of the tracker that they are for."""

_ALL = ("comet_ml", "mlflow", "tensorboard", "trackio", "wandb")
_NOTHING = NullExperiment()


def on_main_process(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for a method of a tracker with `main_process_only`: the method runs on the main process only."""

    @functools.wraps(method)
    def on_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if getattr(self, "main_process_only", False) and not is_main_here() else method(self, *args, **kwargs)

    return on_main


class GeneralTracker:
    """The base class of your own tracker for `Accelerator(log_with=MyTracker(...))`, as in Accelerate.

    A subclass has the attributes `name` and `requires_logging_directory`, the property `tracker` (the run or writer that it
    uses), and the methods `store_init_configuration` and `log`, called on the main process only. For a `Trainer` too, write
    a `Logger` instead.

    Raises:
        MissingMethodError: An attribute is missing.

    Example:
        ```python
        class PrintTracker(GeneralTracker):
            name = "print"
            requires_logging_directory = False
            tracker = None

            def store_init_configuration(self, values):
                print(values)

            def log(self, values, step=None, **kwargs):
                print(step, values)

        accelerator = Accelerator(log_with=PrintTracker())
        ```
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            kind = type(self).__name__
            raise MissingMethodError(
                f"{kind}: expected the attributes name, requires_logging_directory and tracker, found no {', '.join(missing)}. "
                f"Fix:\n    class {kind}(GeneralTracker):\n        name = 'mine'\n        requires_logging_directory = False\n"
                "        tracker = property(lambda self: self.run)"
            )

    def start(self) -> None:
        """Called first by `init_trackers`."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Log the hyper-parameters; called by `init_trackers` if it has any."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step; called by `Accelerator.log`, with the tracker's part of `log_kwargs`."""

    def finish(self) -> None:
        """End the run; called by `end_training`."""


def tracker_of(logger: Logger) -> LoggerTracker:
    """Wrap a logger; the tracker has its name in `log_with`, or that of its class if it has none."""
    class_name = type(logger).__name__
    if logger._takes_all_values:
        return AdaptedLoggerTracker(logger, class_name)
    name = next((name for name, kind in LOGGERS.items() if kind.path.endswith(f":{class_name}")), class_name)
    return {"wandb": WandBTracker, "mlflow": MLflowTracker}.get(name, LoggerTracker)(logger, name)


class LoggerTracker(GeneralTracker):
    """A `logger` as a tracker called `name`."""

    requires_logging_directory = False

    def __init__(self, logger: Logger, name: str) -> None:
        self.logger: Any = logger
        self.name = name
        self._skipped: set[str] = set()  # the names of values that a notice has named

    @property
    def tracker(self) -> Any:
        """The run or writer of the logger's package: `SummaryWriter`, `wandb.Run`, Comet's experiment, …"""
        return self.logger.experiment

    writer = run = tracker  # Accelerate's names for it, of TensorBoard and Comet and of wandb

    def start(self) -> None:
        """Open the run now, so that an error occurs in `init_trackers`, not in the first `log`."""
        _ = self.logger.experiment

    def store_init_configuration(self, values: Any) -> None:
        """Log hyper-parameters."""
        self.logger.log_hyperparams(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step: numbers, tensors of one element, texts, or dicts of these, named by their path.

        Other values are skipped, with one notice for each name.

        Raises:
            MetricError: a name that is not a string.
            ConfigurationError: a text, which this logger cannot store.
            UnsupportedArgumentError: an argument of the backend.
        """
        self._refuse(kwargs)
        at = self.logger._last_step + 1 if step is None else as_step(step)
        texts, numbers = self._split_values(dict(_flat(values)))
        # log_metrics takes a metric "step" for the step, as in Lightning
        own_step = at if step is None else numbers.pop("step", at)
        if own_step != at and self.name in ("csv", "jsonl"):
            raise ConfigurationError(
                f"log: {self.name} already has a column 'step', expected the value step={step} for it, got {own_step}. "
                f"Fix: accelerator.log({{'my_step': {own_step}}}, step={step})"
            )
        for name in texts:  # before the numbers: a logger that cannot store text then logs nothing
            self.logger.log_text(name, texts[name], at)
        self.logger.log_metrics(numbers, at)
        if own_step != at:
            with self.logger._surviving("write the metric 'step'"):
                self.logger.write_metrics({"step": own_step}, at)

    def _split_values(self, values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, int | float]]:
        """The texts and the numbers that the logger can store."""
        texts: dict[str, str] = {}
        numbers: dict[str, int | float] = {}
        for name, value in values.items():
            if not isinstance(name, str) or not name:
                number(name, value)  # raises
            elif isinstance(value, str):
                texts[name] = value
            elif (plain_number := _number_in(name, value)) is not None:
                numbers[name] = plain_number
            else:
                shape = getattr(value, "shape", None)
                what = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
                if name not in self._skipped:
                    notice(
                        f"accelerator.log: {self.name} skips {name!r}, which is {with_article(what)}. Expected: a number, a "
                        f"text, or a dict of these. To log it: accelerator.log({{{name!r}: sum(values) / len(values)}})"
                    )
                self._skipped.add(name)
        return texts, numbers

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: name → a list of arrays, tensors or PIL images, or an array of shape (N, H, W, C) or (N, C, H, W)."""
        self._refuse(kwargs)
        for key, images in values.items():
            self.logger.log_image(key, list(images), step)

    def finish(self) -> None:
        """End the run, even if its logger keeps it open after a `fit`."""
        self.logger.finalize("success")
        Logger.finalize(self.logger, "success")

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        for name, value in kwargs.items():
            if (name, value) != ("commit", True):  # each call commits
                fix = advice("log_kwargs", name) or f"call the method of accelerator.get_tracker({self.name!r}, unwrap=True)"
                raise UnsupportedArgumentError(f"log: {self.name} has no argument {name}, got {name}={value!r}. Fix: {fix}")


class AdaptedLoggerTracker(LoggerTracker):
    """A logger of another framework as a tracker: it gets the values as they are."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step, tensors of one element as numbers."""
        self._refuse(kwargs)
        self.logger.log_metrics(_numeric("", values), step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Raise a `ConfigurationError`: each of these loggers has arguments of its own."""
        raise ConfigurationError(
            f"log_images: {self.name} is a logger of another framework. Fix: call the method of "
            f"accelerator.get_tracker({self.name!r}).logger"
        )


class WandBTracker(LoggerTracker):
    """A `WandbLogger` as a tracker: one call of `log` is one row, of any values that wandb can store."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row: numbers, texts, dicts, `wandb.Image`, `wandb.Table` and lists of these. Skips `None`."""
        self._refuse(kwargs)
        prefix = self.logger._prefix
        row = {f"{prefix}-{key}" if prefix and key != "epoch" else key: value for key, value in _numeric("", values).items()}
        if row:
            self.logger.log_row(row, step)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a `wandb.Table`, of columns and rows or of a data frame."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)


class MLflowTracker(LoggerTracker):
    """An `MLFlowLogger` as a tracker, with `log_figure`, `log_artifact` and `log_artifacts` of its client."""

    @property
    def tracker(self) -> Any:
        """The `mlflow.entities.Run`."""
        return self.logger.experiment.get_run(self.logger.run_id)

    def __getattr__(self, name: str) -> Any:
        if name not in ("log_artifact", "log_artifacts", "log_figure"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(getattr(self.logger.experiment, name), self.logger.run_id)


class TrackioTracker(GeneralTracker):
    """A run of the package trackio, in its database on this machine or on a server.

    Args:
        run_name: The project.
        **kwargs: Arguments of `trackio.init`: `name`, `group`, `space_id`, …
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The `trackio.Run`."""
        return self.run

    def start(self) -> None:
        """Start the run."""
        import trackio

        self.run = trackio.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Any) -> None:
        """Add hyper-parameters to the run's configuration."""
        self.run.config.update(plain(values)[0])

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row: numbers, texts, dicts, and trackio's own types. Skips `None`."""
        if row := _numeric("", values):
            self.run.log(row, step=None if step is None else as_step(step), **kwargs)

    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()


_TRACKERS = {"trackio": TrackioTracker}  # Names that stand for no logger.


def _numeric(key: str, value: Any) -> Any:
    """Tensors and NumPy scalars as numbers, dicts without `None`, other values unchanged."""
    if isinstance(value, Mapping):
        return {name: _numeric(f"{key}/{name}", one) for name, one in value.items() if one is not None}
    plain_number = _number_in(key, value) if hasattr(value, "item") and hasattr(value, "shape") else None
    return value if plain_number is None else plain_number  # wandb stores arrays, lists and its own types


def _number_in(name: str, value: Any) -> int | float | None:
    """A value as a number; `None` if it is not one real number."""
    try:
        return number(name, value)
    except MetricError:
        return None


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values that are not `None`, those of nested dicts named by their path."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif value is not None:
            yield f"{prefix}{key}" if prefix else key, value


class Trackers:
    """Runs the trackers of `log_with`, the result of `check_trackers`. Only the main process logs.

    On other processes the methods do nothing and need not be called. `project.logging_dir` is the folder of trackers that
    write files.
    """

    def __init__(self, log_with: list[Any], project: ProjectConfiguration, strategy: Strategy) -> None:
        self._log_with = log_with
        self._project = project
        self._strategy = strategy
        self._names = [name for item in log_with for name in (_ALL if item == "all" else [_name(item)])]
        self._started = False
        self.running: list[Any] = []  # Only the main process has trackers, once they have started.

    def start(self, project_name: str, config: Any, init_kwargs: ByTracker | None) -> None:
        """Start a run with each tracker; see `Accelerator.init_trackers`."""
        if self._started:
            raise ConfigurationError("init_trackers: trackers are running already. Fix: call accelerator.end_training() first")
        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name: expected a name, got {project_name!r}. Fix: init_trackers('my_project')")
        trackers = self._make(project_name, self._by_name("init_kwargs", init_kwargs))
        loggers = [tracker.logger for tracker in trackers if isinstance(tracker, LoggerTracker)]
        attach(loggers, self._project.logging_dir or "trainkit_runs", self._strategy.rank)
        self._started = True
        self.running = trackers if self._strategy.is_main_process else []
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
        name = _text(name)
        if self._is_started("get_tracker") and self._names and name not in self._names:
            raise UnknownNameError(
                f"get_tracker: expected one of {', '.join(self._names)}, got {name!r}.{nearest(str(name), self._names)} "
                f"Fix: Accelerator(log_with=[{name!r}, ...])"
            )
        tracker = next((tracker for tracker in self.running if tracker.name == name), _NOTHING)
        return tracker.tracker if unwrap else tracker

    def end(self) -> None:
        """End all runs, even if one of them raises; see `Accelerator.end_training`."""
        with ExitStack() as stack:  # The stack calls the last one first.
            for tracker in reversed(self.running):
                stack.callback(getattr(tracker, "finish", _NOTHING))
            self._started = False
            self.running = []

    def _is_started(self, verb: str) -> bool:
        if self._names and not self._started and self._strategy.is_main_process:  # init_trackers may run there alone
            raise ConfigurationError(
                f"{verb}: the trackers ({', '.join(self._names)}) are not running. "
                "Fix: call accelerator.init_trackers('my_project') first"
            )
        return self._started

    def _by_name(self, argument: str, arguments: ByTracker | None) -> ByTracker:
        """Arguments by the name of the tracker; raises for a name that no tracker has."""
        by_name = {_text(key): value for key, value in (arguments or {}).items()}
        known = {*self._names, *LOGGERS, *_TRACKERS, *advice_by_place()["log_with"]}
        for name, value in by_name.items():
            if name not in known:
                raise UnknownNameError(
                    f"{argument}: expected names of trackers, {', '.join(sorted(known))}, got {name!r}."
                    f"{nearest(str(name), known)} Fix: {argument}={{'wandb': {{...}}}}"
                )
            if not isinstance(value, Mapping):
                raise ConfigurationError(
                    f"{argument}[{name!r}]: expected a dict of arguments, got {value!r}. Fix: {{'tags': ['a']}}"
                )
        return by_name

    def _make(self, project_name: str, init_kwargs: ByTracker) -> list[Any]:
        def create(item: Any) -> Any:
            options, folder = init_kwargs.get(_name(item), {}), self._project.logging_dir
            if item in _TRACKERS:
                return _TRACKERS[item](project_name, **options)
            if isinstance(item, str):
                arguments = {LOGGERS[item].project or "name": project_name, **options}
                if folder is not None and not {"dir", "offline_directory"} & arguments.keys():
                    arguments.setdefault("save_dir", folder)
                return tracker_of(make_logger(item, **arguments))
            if options:
                raise ConfigurationError(
                    f"init_kwargs: {item.name!r} was given as an object. Fix: pass these arguments to its class"
                )
            return item

        trackers = [create(item) for item in self._log_with if item != "all"]
        if "all" not in self._log_with or not self._strategy.is_main_process:
            return trackers
        for name in _ALL:
            if name not in self._log_with and is_installed(name if name in _TRACKERS else LOGGERS[name].package):
                try:
                    tracker = create(name)
                    getattr(getattr(tracker, "logger", None), "check_login", _NOTHING)()
                    trackers.append(tracker)
                except (MissingPackageError, NotLoggedInError) as error:
                    notice(f"log_with='all' skips {name}: {error}")
        if not trackers:
            warn("log_with='all': no tracker is available, so nothing will be logged. Fix: pip install tensorboard")
        return trackers


def check_trackers(log_with: Any, logging_dir: Any) -> list[Any]:
    """Check `log_with`: a name, an object, or a list of these. Returns a list of names, `"all"` included, and trackers."""
    checked: list[Any] = []
    for item in map(_text, log_with if isinstance(log_with, list | tuple | set) else [log_with]):
        item = adapt(item)
        item = tracker_of(item) if isinstance(item, Logger) else item
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
        if item not in _TRACKERS:
            check_logger(item, "log_with", ("all", *_TRACKERS))
            return not LOGGERS[item].project
        if not is_installed(item):
            raise MissingPackageError(f"log_with={item!r} needs the package {item}. Install it with: pip install {item}")
        return False
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
