"""The exceptions of trainkit. Every message says what is wrong, what was expected, and the fix.

```text
TrainkitError
├── ConfigurationError (ValueError)      an argument is wrong, or contradicts another
│   ├── UnknownNameError                 an unknown name; the message has the nearest known one
│   └── UnsupportedArgumentError         an argument of Lightning's or Accelerate's; names the replacement
├── ModuleError                          the user's TrainModule, DataModule or Callback
│   ├── NotAvailableError (AttributeError)   a property that has no value yet
│   ├── MissingMethodError               a method that the run needs is missing
│   ├── HookError                        a hook that is misspelled, removed, or cannot be called
│   ├── LossError                        what training_step returned cannot be trained on
│   └── OptimizerError                   what configure_optimizers returned cannot be used
├── DataError                            a loader or a batch
│   └── EmptyLoaderError
├── MetricError (ValueError)             a value passed to `log` that is not a metric
│   └── MissingMetricError               a monitored metric that was never logged
├── NonFiniteError (ArithmeticError)     a loss or gradient that is not finite
├── OutOfMemoryError (RuntimeError)      a micro-batch that cannot be split further
├── TrainingSpikeException (RuntimeError)   the loss has jumped far above its recent mean
├── CheckpointError                      a checkpoint that cannot be written, read or used
│   ├── CheckpointNotFoundError          a checkpoint that does not exist
│   ├── CorruptCheckpointError           its bytes were changed, or are malformed
│   ├── StateMismatchError               it does not fit the model, optimizer or data
│   ├── UnsavableError                   a value that cannot be stored; names the path to it
│   ├── CheckpointWriteError             a full disk, a folder that cannot be written
│   └── CheckpointLockedError            another live run writes to the same folder
├── OffloadError (OSError)               the disk for offloaded tensors is full, or fails
├── CollectiveError (RuntimeError)       ranks made different calls, and would wait for each other
├── ProcessFailedError (RuntimeError)    another process failed, died, or cannot be reached
└── MissingPackageError (ImportError)    an optional package is not installed
Preempted (SystemExit)                   not one of them: a signal stopped the run, which saved; exit code 143
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainkit.masking import escape_controls, mask_text

__all__ = [
    "CheckpointError",
    "CheckpointLockedError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "CollectiveError",
    "ConfigurationError",
    "CorruptCheckpointError",
    "DataError",
    "EmptyLoaderError",
    "HookError",
    "LossError",
    "MetricError",
    "MissingMethodError",
    "MissingMetricError",
    "MissingPackageError",
    "ModuleError",
    "NonFiniteError",
    "NotAvailableError",
    "OffloadError",
    "OptimizerError",
    "OutOfMemoryError",
    "Preempted",
    "ProcessFailedError",
    "StateMismatchError",
    "TrainingSpikeException",
    "TrainkitError",
    "UnknownNameError",
    "UnsavableError",
    "UnsupportedArgumentError",
]


class TrainkitError(Exception):
    """The base class of all errors of trainkit, except `Preempted`. Catch it to catch them all."""

    def __str__(self) -> str:
        # An argument, such as the URL of a folder, may have a password. Names may be those of a file from a stranger.
        return escape_controls(mask_text(super().__str__()))


class ConfigurationError(TrainkitError, ValueError):
    """An argument is wrong, or contradicts another. Change it as the message says."""


class UnknownNameError(ConfigurationError):
    """There is no strategy, precision, hook, callback or argument of this name. The message has the nearest known name."""


class UnsupportedArgumentError(ConfigurationError):
    """trainkit does not have this argument of Lightning's or Accelerate's. The message says what to use."""


class ModuleError(TrainkitError):
    """The `TrainModule`, `DataModule` or `Callback` of the user cannot work. Change it as the message says."""


class NotAvailableError(ModuleError, AttributeError):
    """A property has no value yet, such as `module.trainer` before a run. Read it where the message says.

    It is an `AttributeError` too, so that tools that look at all attributes (`inspect`, `torch.jit`) pass it by.
    """


class MissingMethodError(ModuleError):
    """A method that the run needs is not defined. Define it in your module."""


class HookError(ModuleError):
    """A hook is misspelled, was removed from Lightning, or cannot be called with its arguments. The message has the right
    form.
    """


class LossError(ModuleError):
    """`training_step` returned something that cannot be trained on. Return a scalar tensor that depends on the parameters."""


class OptimizerError(ModuleError):
    """`configure_optimizers` returned something that cannot be used. The message lists the accepted forms."""


class DataError(TrainkitError):
    """A loader or a batch cannot be used. The message names the loader."""


class EmptyLoaderError(DataError):
    """A loader has no batches. Check the length of the dataset, `drop_last`, and the number of processes."""


class MetricError(TrainkitError, ValueError):
    """A value passed to `log` is not a metric, or the hook that called `log` cannot log."""


class MissingMetricError(MetricError):
    """A metric that a callback monitors was never logged. Log it, or correct the name that the callback monitors."""


class OutOfMemoryError(TrainkitError, RuntimeError):
    """Memory is exhausted, and `auto_micro_batch` cannot split the micro-batch further. The message says what needs less."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or a gradient is infinite or NaN. Find the operation with `Trainer(detect_anomaly=True)`."""


class TrainingSpikeException(TrainkitError, RuntimeError):  # noqa: N818 - Lightning's name
    """The loss has jumped far above its recent mean: `SpikeDetection` stopped training. Skip the batches that it names.

    Args:
        message: The text.
        batch_idx: Index of the micro-batch in its epoch; `None` if it is not known.

    Attributes:
        batch_idx: Index of the micro-batch in its epoch; `None` if it is not known.
    """

    def __init__(self, message: str, batch_idx: int | None = None) -> None:
        super().__init__(message)
        self.batch_idx = batch_idx


class OffloadError(TrainkitError, OSError):
    """The disk for offloaded tensors is full, or fails. Free space, or set `nvme_path` to another disk."""


class CollectiveError(TrainkitError, RuntimeError):
    """Ranks made different collective calls, and would wait for each other. The message names the ranks, calls and lines."""


class ProcessFailedError(TrainkitError, RuntimeError):
    """Another process of the run failed, died, or cannot be reached. The message names it and its reason: look there."""


class MissingPackageError(TrainkitError, ImportError):
    """An optional package that is needed now is not installed. The message has the command that installs it."""


class CheckpointError(TrainkitError):
    """A checkpoint cannot be written, read or used. Its subclasses say why."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint does not exist. The message names similar paths, if there are any."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint were changed or are malformed. The message names the file; use an older checkpoint."""


class StateMismatchError(CheckpointError):
    """A checkpoint does not fit the model, optimizer or data. The message lists every difference."""


class UnsavableError(CheckpointError):
    """A value cannot be stored in a checkpoint. The message names the path to it; `trainkit.checkpoint.register` adds types."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written: the disk is full, or the folder is read-only or missing."""


class CheckpointLockedError(CheckpointError):
    """Another live run writes its checkpoints to the same folder. Give each run its own folder."""


class Preempted(SystemExit):
    """A signal stopped the run, which saved a checkpoint. The process exits with code 143.

    It is a `SystemExit`, so that a script needs no code for it, and not a `TrainkitError`, which a handler might catch.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(143)
        self.reason = " ".join(map(str, args))

    def __str__(self) -> str:
        return self.reason or "preempted"


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known name nearest to `name`, or an empty string if none is near."""
    names = {one.lower(): one for one in known}
    match = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean {names[match[0]]!r}?" if match else ""


def make_instance(value: object, kind: type = object) -> str:
    """` Did you forget to make an instance: X()?` for a class that is a subclass of `kind`, or an empty string."""
    if isinstance(value, type) and issubclass(value, kind):
        return f" Did you forget to make an instance: {value.__name__}()?"
    return ""


def missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    """The error for a missing optional package; `extra` is the extra of `trainkit-torch` that installs it."""
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        f"   (or the extra: pip install 'trainkit-torch[{extra}]')"
    )
