"""Loggers with the methods of Accelerate's trackers: what ``Accelerator.trackers`` and ``get_tracker`` return."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from trainkit.errors import ConfigurationError, MetricError, UnsupportedArgumentError
from trainkit.loggers.base import Logger, is_installed
from trainkit.loggers.comet_setup import goes_online
from trainkit.loggers.known_loggers import LOGGERS
from trainkit.loggers.logged_values import as_step, number
from trainkit.tracking import GeneralTracker

__all__ = ["LoggerTracker", "MLflowTracker", "WandBTracker", "name_of", "reason_against", "tracker_of"]


def name_of(logger: Logger) -> str:
    """The name of a logger in ``log_with``; that of its class if it has none."""
    own = type(logger).__name__
    return next((name for name, kind in LOGGERS.items() if kind.path.endswith(f":{own}")), own)


def tracker_of(logger: Logger) -> LoggerTracker:
    """A logger as a tracker."""
    return {"wandb": WandBTracker, "mlflow": MLflowTracker}.get(name_of(logger), LoggerTracker)(logger)


class LoggerTracker(GeneralTracker):
    """A logger as a tracker.

    Attributes:
        name: as in ``log_with``.
        logger: the logger.
    """

    requires_logging_directory = False

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger
        self.name = name_of(logger)

    @property
    def tracker(self) -> Any:
        """The run or writer of the logger's package: ``SummaryWriter``, ``wandb.Run``, Comet's experiment, …"""
        return self.logger.experiment

    writer = run = tracker  # Accelerate's names for it, of TensorBoard and Comet and of wandb

    def start(self) -> None:
        """Open it now, so that what cannot be opened is an error here and not in the first ``log``."""
        _ = self.logger.experiment

    def store_init_configuration(self, values: Any) -> None:
        """Log hyper-parameters."""
        self.logger.log_hyperparams(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step: numbers, tensors of one element, texts, or dicts of these, named by their path.

        Raises:
            MetricError: a value that is none of these.
            ConfigurationError: a text, and this kind of logger cannot hold any.
            UnsupportedArgumentError: an argument of the backend's own.
        """
        self.refuse(kwargs)
        found = dict(_flat(values))
        texts = {name: value for name, value in found.items() if isinstance(value, str)}
        numbers = {name: number(name, value) for name, value in found.items() if name not in texts}
        if texts:
            self.logger._require("text", Logger.write_text, self.logger.write_text)
        # log_metrics takes a metric "step" for the step, as in Lightning
        own_step = numbers.pop("step") if step is not None and numbers.get("step", as_step(step)) != as_step(step) else None
        if own_step is not None and self.name in ("csv", "jsonl"):
            raise ConfigurationError(
                f"log: {self.name} has a column 'step' already, with step={step}, and the value of 'step' is {own_step}. "
                "Fix: give the value another name"
            )
        if numbers:
            self.logger.log_metrics(numbers, step)
        if own_step is not None:
            self.logger.write_metrics({"step": own_step}, as_step(step))
        for key, text in texts.items():
            self.logger.log_text(key, text, step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: name → a list of arrays, tensors or PIL images, or an array of shape (N, H, W, C) or (N, C, H, W)."""
        self.refuse(kwargs)
        for key, images in values.items():
            self.logger.log_image(key, list(images), step)

    def finish(self) -> None:
        """End the run, also of loggers whose run stays open after a ``fit``."""
        self.logger.finalize("success")
        Logger.finalize(self.logger, "success")

    def refuse(self, kwargs: Mapping[str, Any]) -> None:
        """Raise for arguments of the backend's own, which a logger does not take."""
        if kwargs:
            raise UnsupportedArgumentError(
                f"log: {self.name} does not take {', '.join(f'{name}=' for name in kwargs)} here. Fix: call the method of "
                f"accelerator.get_tracker({self.name!r}, unwrap=True)"
            )


class WandBTracker(LoggerTracker):
    """wandb's; it logs in one row everything that wandb can hold."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row: numbers, texts, dicts, ``wandb.Image``, ``wandb.Table`` and lists of such, without what is ``None``.

        Raises:
            UnsupportedArgumentError: ``commit=False``, or another argument.
        """
        if kwargs.pop("commit", True) is False:
            raise UnsupportedArgumentError(
                "log: commit=False is not supported for wandb: each call is a row. Fix: give all that belongs to a step in one "
                "call, accelerator.log({...}, step=step)"
            )
        self.refuse(kwargs)
        prefix = self.logger._prefix
        row = {f"{prefix}-{key}" if prefix and key != "epoch" else key: value for key, value in _plain("", values).items()}
        if row:
            self.logger.log_row(row, step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a ``wandb.Table``, of columns and rows or of a data frame."""
        import wandb

        given: dict[str, Any] = {"columns": columns, "data": None if data is None else [list(row) for row in data]}
        self.log({table_name: wandb.Table(**given, dataframe=dataframe)}, step, **kwargs)


class MLflowTracker(LoggerTracker):
    """MLflow's, with ``log_figure``, ``log_artifact`` and ``log_artifacts`` of its client for this run."""

    @property
    def tracker(self) -> Any:
        """The ``mlflow.entities.Run``."""
        return self.logger.experiment.get_run(self.logger.run_id)

    def __getattr__(self, name: str) -> Any:
        if name not in ("log_artifact", "log_artifacts", "log_figure"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(getattr(self.logger.experiment, name), self.logger.run_id)


def reason_against(name: str, options: Mapping[str, Any]) -> str | None:
    """Why ``log_with="all"`` skips a tracker that is installed, with what to do; ``None``: it works with these options."""
    if name == "comet_ml" and goes_online(options.get("api_key"), options.get("online")) is None:
        return "it has no API key here. Run comet login, or set COMET_START_ONLINE=0 to log offline"
    if name == "mlflow" and not (options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")):
        missing = [package for package in ("sqlalchemy", "alembic") if not is_installed(package)]
        return f"it has no server, and for a database {' and '.join(missing)} would be needed" if missing else None
    if name == "wandb" and not options.get("offline") and options.get("experiment") is None:
        import wandb

        mode = options.get("mode") or wandb.setup().settings.mode
        if wandb.run is None and mode in ("online", "shared") and not wandb.login(prompt=False):
            return "nobody is logged in here. Run wandb login, or set WANDB_MODE=offline to log offline"
    return None


def _plain(key: str, value: Any) -> Any:
    """Tensors and numpy's scalars as numbers; dicts without what is ``None``; the rest as it is."""
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}/{name}", one) for name, one in value.items() if one is not None}
    return number(key, value) if hasattr(value, "item") and hasattr(value, "shape") else value


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values that are not ``None``, those of nested dicts named by their path."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, str) and not isinstance(key, str):
            raise MetricError(f"log: expected a name, got {key!r}. Fix: accelerator.log({{'note': {value!r}}})")
        elif value is not None:
            yield f"{prefix}{key}" if prefix else key, value
