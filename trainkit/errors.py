"""The errors that trainkit raises.

:

```python
TrainkitError
├── ConfigurationError (ValueError)      an argument is wrong, or contradicts another
│   ├── UnknownNameError                 an unknown name; the message has the nearest known one
│   └── UnsupportedArgumentError         an argument of Lightning's or Accelerate's; names the replacement
├── ModuleError                          the user's TrainModule, DataModule or Callback
│   ├── MissingMethodError               a method that the run needs is missing
│   ├── HookError                        a hook that is misspelled, removed, or cannot be called
│   ├── LossError                        what training_step returned cannot be trained on
│   └── OptimizerError                   what configure_optimizers returned cannot be used
├── DataError                            a loader or a batch
│   └── EmptyLoaderError
├── MetricError (ValueError)             a value passed to `log` that is not a metric
│   └── MissingMetricError               a monitored metric that was never logged
├── NonFiniteError (ArithmeticError)     a loss or gradient that is not finite
├── CheckpointError                      a checkpoint that cannot be written, read or used
│   ├── CheckpointNotFoundError          a checkpoint that does not exist
│   ├── CorruptCheckpointError           its bytes were changed, or are malformed
│   ├── StateMismatchError               it does not fit the model, optimizer or data
│   ├── UnsavableError                   a value that cannot be stored; names the path to it
│   ├── CheckpointWriteError             a full disk, a folder that cannot be written
│   └── CheckpointLockedError            another live run writes to the same folder
├── OffloadError (OSError)                the disk for offloaded tensors is full, or fails
├── CollectiveError (RuntimeError)       ranks made different calls, and would wait for each other
├── ProcessFailedError (RuntimeError)    another process failed, died, or cannot be reached
└── MissingPackageError (ImportError)    an optional package is not installed
Preempted (SystemExit)                   not one of them: a signal stopped the run, which saved; exit code 143
```

Every message says what is wrong, what was expected, and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
    "OffloadError",
    "OptimizerError",
    "Preempted",
    "ProcessFailedError",
    "StateMismatchError",
    "TrainkitError",
    "UnknownNameError",
    "UnsavableError",
    "UnsupportedArgumentError",
]


class TrainkitError(Exception):
    """The base class of all errors of trainkit."""


class ConfigurationError(TrainkitError, ValueError):
    """A wrong argument, or one that contradicts another."""


class UnknownNameError(ConfigurationError):
    """An unknown name of a strategy, precision, hook or argument."""


class UnsupportedArgumentError(ConfigurationError):
    """An argument of Lightning's or Accelerate's that trainkit does not have; the message says what to use."""


class ModuleError(TrainkitError):
    """The user's `TrainModule`, `DataModule` or `Callback` cannot work."""


class MissingMethodError(ModuleError):
    """A method that the run needs is not defined."""


class HookError(ModuleError):
    """A hook that is misspelled, that Lightning removed, or that cannot be called with its arguments."""


class LossError(ModuleError):
    """`training_step` returned something that cannot be trained on."""


class OptimizerError(ModuleError):
    """`configure_optimizers` returned something that cannot be used."""


class DataError(TrainkitError):
    """A loader or a batch cannot be used."""


class EmptyLoaderError(DataError):
    """A loader without batches."""


class MetricError(TrainkitError, ValueError):
    """A value passed to `log` is not a metric, or is logged in a wrong place."""


class MissingMetricError(MetricError):
    """A monitored metric was never logged."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class OffloadError(TrainkitError, OSError):
    """The disk for offloaded tensors is full, or fails."""


class CollectiveError(TrainkitError, RuntimeError):
    """Ranks made different collective calls; the message names the rank, the call and the place."""


class ProcessFailedError(TrainkitError, RuntimeError):
    """Another process of the run failed, died, or cannot be reached; the message names it and the reason."""


class MissingPackageError(TrainkitError, ImportError):
    """An optional package that is needed now is not installed."""


class CheckpointError(TrainkitError):
    """A checkpoint cannot be written, read or used."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint does not exist."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint were changed or are malformed; the message names the file."""


class StateMismatchError(CheckpointError):
    """A checkpoint does not fit the model, optimizer or data; the message lists every difference."""


class UnsavableError(CheckpointError):
    """A value cannot be stored in a checkpoint; the message names the path to it."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written: a full disk, a read-only or missing folder."""


class CheckpointLockedError(CheckpointError):
    """Another live run writes its checkpoints to the same folder."""


class Preempted(SystemExit):
    """A signal stopped the run, which saved a checkpoint; the process exits with code 143.

    A `SystemExit`, so that a script needs no code for it, and not a `TrainkitError`, which a handler might catch.
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


def missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    """The error for a missing optional package; `extra` is the extra of `trainkit-torch` that installs it."""
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        f"   (or the extra: pip install 'trainkit-torch[{extra}]')"
    )
