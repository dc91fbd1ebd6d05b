"""Loggers as trackers: what ``Accelerator.trackers`` and ``get_tracker`` give, with the methods that Accelerate's have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainkit.errors import ConfigurationError, MetricError, UnsupportedArgumentError
from trainkit.loggers.base import Logger
from trainkit.loggers.mlflow_logs import MLFlowLogger
from trainkit.loggers.names import LOGGERS
from trainkit.loggers.values import as_step, number
from trainkit.loggers.wandb_logs import WandbLogger
from trainkit.tracking import GeneralTracker

__all__ = ["LoggerTracker", "MLflowTracker", "WandBTracker", "WriterTracker", "name_of", "tracker_of"]

_STEP_COLUMN = ("csv", "jsonl")  # have a column called "step" themselves


def name_of(logger: Logger) -> str:
    """The name of a logger among trackers; of a class that has none, that of the class."""
    own = type(logger).__name__
    return next((name for name, kind in LOGGERS.items() if kind.path.endswith(f":{own}")), own)


def tracker_of(logger: Logger) -> LoggerTracker:
    """A logger as a tracker."""
    kinds = {"wandb": WandBTracker, "mlflow": MLflowTracker, "tensorboard": WriterTracker, "comet_ml": WriterTracker}
    return kinds.get(name_of(logger), LoggerTracker)(logger)


class LoggerTracker(GeneralTracker):
    """A logger as a tracker.

    Attributes:
        name: as in ``log_with``.
        logger: the logger.
    """

    requires_logging_directory = False

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.name = name_of(logger)

    @property
    def tracker(self) -> Any:
        """What is behind it: a ``SummaryWriter``, a run of wandb, an experiment of Comet, …"""
        return self.logger.experiment

    def start(self) -> None:
        """Open it now: what cannot be opened ends a script here, not where it first logs."""
        _ = self.logger.experiment

    def store_init_configuration(self, values: Any) -> None:
        """Log hyper-parameters."""
        self.logger.log_hyperparams(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step: numbers, tensors of one element, texts, or dicts of these, named by their path.

        A value that is ``None`` is skipped.

        Raises:
            MetricError: a value that is none of these.
            ConfigurationError: a text, and this kind of logger cannot hold any.
            UnsupportedArgumentError: an argument of the backend's own.
        """
        self.refuse(kwargs)
        numbers, texts = _sorted(values)
        if texts:
            self.logger._require("text", Logger.write_text, self.logger.write_text)
        beside = self._beside(numbers, step)
        if numbers:
            self.logger.log_metrics(numbers, step)
        if beside:  # not log_metrics: there a metric "step" takes the place of the step, as in Lightning
            self.logger.write_metrics(beside, as_step(step))
        for key, text in texts.items():
            self.logger.log_text(key, text, step)

    def _beside(self, numbers: dict[str, int | float], step: int | None) -> dict[str, int | float]:
        """A metric called "step" that is not the step: taken out of ``numbers``, where it would take the step's place."""
        if step is None or "step" not in numbers or numbers["step"] == as_step(step):
            return {}
        if self.name in _STEP_COLUMN:
            raise ConfigurationError(
                f"log: {self.name} has a column 'step' already, with step={step}, and the value of 'step' is "
                f"{numbers['step']}. Fix: give the value another name"
            )
        return {"step": numbers.pop("step")}

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: name → a list of arrays, tensors or PIL images, or an array of shape (N, H, W, C) or (N, C, H, W)."""
        self.refuse(kwargs)
        for key, images in values.items():
            self.logger.log_image(key, list(images), step)

    def finish(self) -> None:
        """End the run, also of those that stay open after a ``fit``."""
        self.logger.finalize("success")
        if self.logger._experiment is not None:
            Logger.finalize(self.logger, "success")

    def refuse(self, kwargs: Mapping[str, Any]) -> None:
        """Raise for arguments of the backend's own, which a logger has no place for."""
        if kwargs:
            raise UnsupportedArgumentError(
                f"log: {self.name} does not take {', '.join(f'{name}=' for name in kwargs)} here. Fix: call the method of "
                f"accelerator.get_tracker({self.name!r}, unwrap=True)"
            )


class WriterTracker(LoggerTracker):
    """TensorBoard's or Comet's, with its ``writer``."""

    @property
    def writer(self) -> Any:
        """A ``SummaryWriter``, or the experiment."""
        return self.logger.experiment


class WandBTracker(LoggerTracker):
    """wandb's, with its ``run``; it logs in one row whatever wandb can hold."""

    @property
    def run(self) -> Any:
        """The run."""
        return self.logger.experiment

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row: numbers, texts, dicts, ``wandb.Image``, ``wandb.Table`` and lists of such; not what is ``None``.

        Raises:
            UnsupportedArgumentError: ``commit=False``, or another argument.
        """
        if kwargs.get("commit") is False:
            raise UnsupportedArgumentError(
                "log: commit=False is not supported for wandb: each call is a row. Fix: give all that belongs to a step in one "
                "call, accelerator.log({...}, step=step)"
            )
        self.refuse({name: value for name, value in kwargs.items() if name != "commit"})
        row = {key: _plain(key, value) for key, value in values.items() if value is not None}
        if not row:
            return
        prefix = self.logger._prefix
        named = {f"{prefix}-{key}" if prefix and key != "epoch" else key: value for key, value in row.items()}
        cast(WandbLogger, self.logger).log_row(named, step)

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
    """MLflow's, with the methods for artifacts."""

    @property
    def tracker(self) -> Any:
        """The ``mlflow.entities.Run``."""
        return self.logger.experiment.get_run(self._run)

    @property
    def _run(self) -> str | None:
        return cast(MLFlowLogger, self.logger).run_id

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure of matplotlib or plotly as an artifact."""
        self.logger.experiment.log_figure(self._run, figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file as an artifact."""
        self.logger.experiment.log_artifact(self._run, local_path, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep what is in a folder as artifacts."""
        self.logger.experiment.log_artifacts(self._run, local_dir, artifact_path)


def _plain(key: str, value: Any) -> Any:
    """Tensors and numpy's scalars as numbers; the rest as it is."""
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}/{name}", one) for name, one in value.items() if one is not None}
    return number(key, value) if hasattr(value, "item") and hasattr(value, "shape") else value


def _sorted(values: Mapping[str, Any]) -> tuple[dict[str, int | float], dict[str, str]]:
    """Numbers and texts, of nested dicts named by their path."""
    numbers: dict[str, int | float] = {}
    texts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = _sorted({f"{key}/{name}": one for name, one in value.items()})
            numbers.update(inner[0])
            texts.update(inner[1])
        elif isinstance(value, str):
            if not isinstance(key, str):
                raise MetricError(f"log: expected a name, got {key!r}. Fix: accelerator.log({{'note': {value!r}}})")
            texts[key] = value
        elif value is not None:
            numbers[key] = number(key, value)
    return numbers, texts
