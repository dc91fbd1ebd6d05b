"""`Logger`: what every logger has in common; `DummyLogger` and `NullExperiment`, which do nothing."""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

from trainkit.checks import KnownKeywords
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, MetricError, MissingMethodError, TrainkitError
from trainkit.loggers.log_folder import (
    LogFolder,
    check_name,
    check_save_dir,
    check_version,
    claim_folder,
    folder_state,
    has_folder,
    replace_file,
    resume_log,
)
from trainkit.loggers.logged_values import as_array, as_images, as_step, number, plain, take_step
from trainkit.loggers.run_files import yaml_in

__all__ = ["DummyLogger", "Logger", "NullExperiment", "is_installed", "is_main_here", "rank_zero_experiment"]


_CAN_STORE = {
    "images": "TensorBoardLogger, WandbLogger, MLFlowLogger, CometLogger",
    "text": "JSONLLogger, TensorBoardLogger, WandbLogger, MLFlowLogger, CometLogger",
    "histograms": "TensorBoardLogger, WandbLogger, CometLogger",
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of logs that happens to have its name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def is_main_here() -> bool:
    """Whether this is the main process, for what has no logger: by the process group, else by the launcher's variables."""
    import torch.distributed

    from trainkit.launch.environment import read_ranks

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    place = read_ranks(os.environ)
    return place is None or place.rank == 0


class Logger(KnownKeywords):
    """Base class of all loggers: receives the metrics, hyper-parameters, images and texts of a run.

    A subclass defines `write_metrics(metrics, step)`, and as needed `write_hyperparams`, `write_image`, `write_text`,
    `write_histogram`, `open_experiment`, `close_experiment` and `save`; for files that continue after a resume,
    `mark_files`, `is_log_of` and `cut_files`. They are called on the main process only. It creates no files until something
    is logged or `version`, `log_dir` or `experiment` is read. After `finalize` it can be used again, and continues in the
    folder.

    Args:
        save_dir: The folder of all experiments. Default: `<default_root_dir>/logs` of the Trainer, or
            `./trainkit_runs/logs` without one.
        name: The experiment, a folder inside `save_dir`; `""` or `None` for `save_dir` itself.
        version: The run inside the experiment: N for `version_N`, or the name of its folder. Default: one more than the
            highest that exists.
        prefix: Put before the name of each metric except "epoch", with "-".

    Raises:
        ConfigurationError: A `save_dir`, `name` or `version` that cannot be a folder.

    Example:
        ```python
        logger = CSVLogger("runs", name="digits")  # or Trainer(logger=CSVLogger("runs"))
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.finalize("success")
        ```

    With a Trainer or an Accelerator, an `OSError` (a full disk, a server that does not answer) of the methods that write is one
    warning, until metrics are written again. A logger that is used alone raises it.
    """

    # Defaults of the class, for subclasses written for Lightning that do not call __init__.
    _save_dir: Path | None = None
    _default_root: Path | None = None
    _name: str = "default"
    _version: int | str | None = None
    _prefix: str = ""
    _folder: LogFolder | None = None
    _rank: int | None = None
    _experiment: Any = None
    _last_step: int = -1
    _guard: weakref.finalize[..., Any] | None = None
    _attached: bool = False  # Whether a Trainer or an Accelerator uses it; it must not end their training.
    _failing: bool = False  # Whether it cannot write at the moment.
    _found: tuple[Mapping[str, Any], Path | None] | None = None  # a state and its folder, if it was searched already
    _had_log: bool = False  # the folder contained a log already when the Trainer got this logger
    _in_run_folder: bool = True  # False: the backend has its own layout in save_dir
    _takes_all_values: bool = False  # Whether log_metrics accepts values that are not numbers, and a metric named "step".

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "default",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self._save_dir = check_save_dir(save_dir, None if self._in_run_folder else type(self).__name__)
        self._name = check_name(name)
        self._version = check_version(version)
        if not isinstance(prefix, str):
            raise ConfigurationError(f"prefix: expected a string, got {prefix!r}. Fix: prefix=''")
        self._prefix = prefix

    # ------------------------------------------------------------------ where

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The run; chosen when it is read. Other processes have that of the main process, and `None` before a run begins."""
        if self.save_dir is None:
            return self._version
        folder = self._run_folder()
        if self.is_main_process:
            claim_folder(folder)
        return folder.version

    @property
    def save_dir(self) -> str:
        """The folder of all experiments; `None` for a logger of your own that writes no files."""
        if self._save_dir is not None:
            return str(self._save_dir)
        return str((self._default_root or Path("trainkit_runs")) / "logs")

    @property
    def root_dir(self) -> str:
        """The folder of this experiment, `<save_dir>/<name>`; not created by reading it. `""` without a `save_dir`."""
        return "" if self.save_dir is None else str(Path(self.save_dir) / self._name)

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, `<save_dir>/<name>/version_N`; `None` without a `save_dir`."""
        if self.save_dir is None:
            return None
        folder = self._run_folder()
        if self.is_main_process:
            return str(claim_folder(folder))
        return None if folder.path is None else str(folder.path)

    def _new_version(self) -> None:
        """Let the next run have a new folder, unless the user gave a version."""
        if self._experiment is not None:
            self.finalize("success")
        self._folder = None
        self._last_step = -1

    def _run_folder(self) -> LogFolder:
        if self._folder is None:
            self._folder = LogFolder(Path(self.root_dir), self._version)
        return self._folder

    # ------------------------------------------------------------------ what a Trainer calls

    def set_default_root(self, path: str | os.PathLike[str]) -> None:
        """Log to `<path>/logs` if no `save_dir` was given and no version is chosen yet."""
        self._default_root = Path(path)
        if self._folder is not None and self._folder.version is None:
            self._folder = None

    def set_rank(self, rank: int) -> None:
        """Set the rank of this process. Default: the environment variable `RANK`, else 0."""
        self._rank = rank

    def _open_early(self) -> None:
        """Called before the first hook of a run. Loggers of trainkit open when they are used."""

    def _log_module(self, module: Any) -> None:
        """Called with the module of a run after its hyper-parameters, for loggers that draw it."""

    def _folder_values(self) -> list[Any] | None:
        """The folder on the main process in plain values, for the others; `None` if the backend has its own layout."""
        if not has_folder(self):
            return None
        folder = self._run_folder()
        claim_folder(folder)
        return [str(folder.root), folder.version]

    def _use_folder(self, values: list[Any]) -> None:
        """Take what `_folder_values` of the main process has returned."""
        self._folder = LogFolder(Path(values[0]), values[1])

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes."""
        rank = os.environ.get("RANK", "0") if self._rank is None else self._rank
        return int(rank) == 0

    # ------------------------------------------------------------------ what a user calls

    @property
    def experiment(self) -> Any:
        """The writer or run of the backend, opened when it is read; on other processes an object that does nothing."""
        if not self.is_main_process:
            return NullExperiment()
        if self._experiment is None:
            self._experiment = self.open_experiment()
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write the metrics of one step.

        Args:
            metrics: Name → real number, or tensor of one element. A metric called "step" replaces `step`, as in Lightning.
            step: Number of optimizer steps so far. None: the last one logged plus one.

        Raises:
            MetricError: A value that is not a real number, or a name that is not a string.
        """
        if not self.is_main_process:
            return
        values: dict[str, int | float] = {}
        for key, value in metrics.items():
            plain_key = key in ("epoch", "step") or not self._prefix
            values[key if plain_key else f"{self._prefix}-{key}"] = number(key, value)
        own_step = take_step(values)
        step = step if own_step is None else own_step
        self._last_step = self._last_step + 1 if step is None else as_step(step)
        if values:
            with self._surviving(f"write the metrics of step {self._last_step}"):
                self.write_metrics(values, self._last_step)
                self._failing = False

    def log_hyperparams(self, params: Any = None) -> None:
        """Write hyper-parameters: a dict, an `argparse.Namespace` or a dataclass, which may be nested; none if it is `None`.

        Other objects are written as text, with a warning. Later calls add to earlier ones. Texts that may be passwords or keys
        are written as `***`; a checkpoint has them as they are, since `load_from_checkpoint` needs them.
        """
        if not self.is_main_process or params is None:
            return
        values, as_text = plain(params)
        if as_text:
            warn(
                f"{type(self).__name__}: these hyper-parameters are not plain values and were written as text: "
                f"{', '.join(as_text)}"
            )
        with self._surviving("write the hyper-parameters"):
            self.write_hyperparams(values)

    def log_image(self, key: str, image: Any, step: int | None = None) -> None:
        """Write an image, or a list of them.

        Args:
            key: Its name.
            image: A tensor or array of shape (C, H, W), (H, W, C) or (H, W), C in 1, 3, 4; floating-point values in
                [0, 1], integers in [0, 255].
            step: As in `log_metrics`; None: the last one logged.

        Raises:
            ConfigurationError: This logger cannot store images; the message names those that can.
            MetricError: The value is not an image.
        """
        self._require("images", Logger.write_image, self.write_image)
        if self.is_main_process:
            images = as_images(key, image)
            with self._surviving(f"write the image {key!r}"):
                self.write_image(key, images, self._media_step(step))

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Write a text; raises like `log_image`."""
        self._require("text", Logger.write_text, self.write_text)
        if self.is_main_process:
            with self._surviving(f"write the text {key!r}"):
                self.write_text(key, str(text), self._media_step(step))

    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        """Write the distribution of `values`, a tensor or array of any shape; raises like `log_image`.

        Skips values that are not finite, with a warning.
        """
        self._require("histograms", Logger.write_histogram, self.write_histogram)
        if not self.is_main_process:
            return
        import numpy as np

        array = as_array(values).ravel()
        if array.dtype.kind not in "biuf":
            raise MetricError(f"Histogram {key!r}: expected real numbers, got dtype {array.dtype}. Fix: values.abs()")
        finite = array[np.isfinite(array)]
        if finite.size < array.size or not array.size:
            warn(f"Histogram {key!r}: {array.size - finite.size} of {array.size} values are not finite and were skipped")
        if finite.size:
            with self._surviving(f"write the histogram {key!r}"):
                self.write_histogram(key, finite, self._media_step(step))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the graph of a model, in a logger of your own that can; this one does nothing, as in Lightning.

        Args:
            model: The model.
            input_array: An input of its `forward`.
        """

    @property
    def group_separator(self) -> str:
        """What separates the name of a group and the name of a metric in it, `"/"`."""
        return "/"

    def save(self) -> None:
        """Flush what was logged so far; also called before each checkpoint."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A `ModelCheckpoint` has saved a checkpoint, which is complete. Called on the main process, between two steps.

        Args:
            checkpoint_callback: The callback; its `last_model_path` is the checkpoint, or a newer one that is being written.
        """

    def finalize(self, status: str = "success") -> None:
        """Close the experiment at the end of a run; the next use opens it again.

        Args:
            status: "success", or "failed" if an exception ended the run.
        """
        experiment, self._experiment = self._experiment, None
        if self._guard is not None:
            self._guard.detach()
            self._guard = None
        if experiment is not None:
            with self._surviving("write to its end"):
                self.close_experiment(experiment, status)
        self._failing = False

    # ------------------------------------------------------------------ what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """The position in the log, in plain values; creates no folder."""
        return {"last_step": self._last_step, **folder_state(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the log of `state` and remove what was written to it later. Call before anything is logged.

        If the log is not found, a warning says so and a new one begins.
        """
        if self._experiment is not None:
            self.finalize("success")
        self._last_step = int(state.get("last_step", -1))
        if "folder" in state:
            resume_log(self, state)

    # ------------------------------------------------------------------ what a subclass defines

    def mark_files(self, folder: Path) -> dict[str, Any]:
        """The position in the files in `folder`, in plain values; empty if there are none."""
        return {}

    def is_log_of(self, folder: Path, files: Mapping[str, Any]) -> bool:
        """Whether `folder` contains the log that `files` (of `mark_files`) describes, and not that of another run."""
        return True

    def cut_files(self, folder: Path, files: Mapping[str, Any]) -> list[str]:
        """Remove what was written after the position `files`; returns messages about what is missing before it."""
        return []

    def _log_files(self, folder: Path) -> list[str]:
        """The files of a log in `folder`, relative to it, without `hparams.yaml`."""
        return []

    def open_experiment(self) -> Any:
        """Open the writer of the backend; called on first use and again after `finalize`."""
        return self

    def close_experiment(self, experiment: Any, status: str) -> None:
        """Close what `open_experiment` returned."""

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Write the metrics of one step; the values are Python numbers and may be NaN or infinite."""
        raise MissingMethodError(
            f"{type(self).__name__}: expected a method write_metrics(self, metrics, step), found none. Fix:\n"
            "    def write_metrics(self, metrics, step): print(step, dict(metrics))"
        )

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write plain hyper-parameters. Default: add them to `hparams.yaml` in `log_dir`."""
        if self.save_dir is None:
            return
        import yaml

        path = Path(self.log_dir or self.root_dir) / "hparams.yaml"
        known: Any = None
        try:
            known = yaml_in(path)
        except TrainkitError:  # Lightning's file may contain tags of Python objects; ours replaces it
            known = None
        merged = {**known, **params} if isinstance(known, dict) else dict(params)
        if merged != known:
            replace_file(path, partial(yaml.safe_dump, merged, sort_keys=False, allow_unicode=True))

    def write_image(self, key: str, images: Sequence[Any], step: int) -> None:
        """Write images: uint8 arrays of shape (height, width, channels)."""
        raise NotImplementedError

    def write_text(self, key: str, text: str, step: int) -> None:
        """Write a text."""
        raise NotImplementedError

    def write_histogram(self, key: str, values: Any, step: int) -> None:
        """Write the distribution of `values`, a flat array of at least one finite number."""
        raise NotImplementedError

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """In this context a full disk or a lost server does not end training; used alone, the logger raises the error."""
        try:
            yield
        except OSError as error:
            if not self._attached:
                raise
            self._note_failure_to(what, error)

    def _note_failure_to(self, what: str, error: OSError) -> None:
        """Warn once, until it has written metrics again; what is reported after the warning is a notice."""
        has_warned, self._failing = self._failing, True
        text = f"{type(self).__name__} could not {what}: {error}. "
        if not has_warned:
            warn(f"{text}Training continues. The next failures are not reported. Fix: free some space")
        elif what.startswith("write to its end"):
            notice(text.strip())

    def _close_when_dropped(self, close: Callable[[], object]) -> None:
        """Call `close` when the program ends or this logger is garbage-collected before `finalize`."""
        self._guard = weakref.finalize(self, close)

    def _media_step(self, step: int | None) -> int:
        return max(self._last_step, 0) if step is None else as_step(step)

    def _require(self, what: str, default: Any, bound: Any) -> None:
        if getattr(bound, "__func__", None) is default:
            raise ConfigurationError(
                f"{type(self).__name__} cannot store {what}. Loggers that can: {_CAN_STORE[what]}. "
                f"Fix: Trainer(logger=[{type(self).__name__}(), TensorBoardLogger()])"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Open files and threads belong to the process that opened them; a copy opens its own in the same folder.
        return {key: value for key, value in vars(self).items() if key not in ("_experiment", "_guard", "_texts")}

    def __repr__(self) -> str:
        version = self._version if self._folder is None else self._folder.version
        return f"{type(self).__name__}(save_dir={self.save_dir!r}, name={self._name!r}, version={version!r})"


class NullExperiment:
    """Placeholder for `logger.experiment` on other processes than the main process: all attributes and calls do nothing.

    So `logger.experiment.add_figure(...)` needs no `if`.
    """

    def __getattr__(self, name: str) -> NullExperiment:
        if name.startswith("__"):  # pickle, copy and inspect must not find these
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> NullExperiment:
        return self

    def __getitem__(self, key: object) -> NullExperiment:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __iter__(self) -> NullExperiment:
        return self

    def __next__(self) -> NoReturn:
        raise StopIteration

    def __enter__(self) -> NullExperiment:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate the `experiment` of a logger of your own, so that only the main process opens it.

    `Logger.experiment` does so by itself: define `open_experiment` in a new logger.

    Args:
        fn: Returns the writer or run of the backend.

    Example:
        ```python
        class Mine(Logger):
            @property
            @rank_zero_experiment
            def experiment(self):
                return backend.current_run()
        ```
    """

    @wraps(fn)
    def experiment(self: Logger) -> Any:
        return fn(self) if self.is_main_process else NullExperiment()

    return experiment


class DummyLogger(Logger):
    """Stands for a logger in a `fast_dev_run` and in trials, such as those of `Tuner`.

    `logger.experiment` and all methods exist, and do nothing.

    So a module that calls `self.logger.experiment.add_image(...)` or `self.logger.watch(...)` needs no `if`.
    """

    @property
    def is_main_process(self) -> bool:
        """False: no process writes."""
        return False

    @property
    def save_dir(self) -> None:  # type: ignore[override]  # as of every logger without files
        """`None`: it writes no files."""
        return

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing; some loggers accept more arguments."""

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, with the arguments of any logger."""

    log_text = log_histogram = log_image

    def _require(self, what: str, default: Any, bound: Any) -> None:
        pass  # it stands for a logger that can store images

    def __getattr__(self, name: str) -> NullExperiment:
        if name.startswith("_"):  # pickle, copy and inspect must not find these
            raise AttributeError(name)
        return NullExperiment()
