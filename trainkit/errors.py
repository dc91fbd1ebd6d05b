"""Everything that trainkit raises on purpose.

::

    TrainkitError
    ├── ConfigurationError (ValueError)      an argument is wrong, or contradicts another
    │   ├── UnknownNameError                 a name nobody knows; the message has the nearest known one
    │   └── UnsupportedArgumentError         an argument of Lightning's that we do not have; names the replacement
    ├── ModuleError                          the user's TrainModule, DataModule or Callback
    │   ├── MissingMethodError               a method that the run needs is not there
    │   ├── HookError                        a hook that is misspelt, removed, or cannot be called
    │   ├── LossError                        what training_step returned cannot be trained on
    │   └── OptimizerError                   what configure_optimizers returned cannot be used
    ├── DataError                            a loader or a batch
    │   └── EmptyLoaderError
    ├── MetricError (ValueError)             a value given to ``log`` that is no metric
    │   └── MissingMetricError               a monitored metric that was never logged
    ├── NonFiniteError (ArithmeticError)     a loss or gradient that is not finite
    ├── CheckpointError                      a checkpoint that cannot be written, read or used
    │   ├── CheckpointNotFoundError          there is none where one was asked for
    │   ├── CorruptCheckpointError           its bytes are not those that were written, or are malformed
    │   ├── StateMismatchError               it is sound, but does not fit the model, optimizer or data
    │   ├── UnsavableError                   a value that cannot be stored; names the path to it
    │   ├── CheckpointWriteError             a full disk, a folder that cannot be written
    │   └── CheckpointLockedError            another live run writes to the same folder
    ├── OffloadError (OSError)                the disk that tensors are offloaded to is full, or fails
    ├── CollectiveError (RuntimeError)       the processes have not done the same, so that they would wait for each other
    ├── ProcessFailedError (RuntimeError)    another process of the run has failed, has died, or cannot be reached
    └── MissingPackageError (ImportError)    an optional package is not installed
    Preempted (SystemExit)                   not one of them: the run was told to end by a signal and has saved; exit code 143

Every message says what was expected, what came, and the fix.
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
    """The root: ``except TrainkitError`` catches whatever trainkit raises on purpose."""


class ConfigurationError(TrainkitError, ValueError):
    """An argument is wrong by itself or contradicts another one."""


class UnknownNameError(ConfigurationError):
    """A strategy, precision, hook or argument of a name that nobody knows."""


class UnsupportedArgumentError(ConfigurationError):
    """An argument of Lightning's that trainkit does not have; the message names what to use."""


class ModuleError(TrainkitError):
    """Something in the user's ``TrainModule``, ``DataModule`` or ``Callback`` cannot work."""


class MissingMethodError(ModuleError):
    """A method that this run needs is not defined."""


class HookError(ModuleError):
    """A hook that is misspelt, that Lightning removed, or that cannot be called with its arguments."""


class LossError(ModuleError):
    """``training_step`` returned something that cannot be trained on."""


class OptimizerError(ModuleError):
    """``configure_optimizers`` returned something that cannot be used."""


class DataError(TrainkitError):
    """A loader or a batch cannot be used."""


class EmptyLoaderError(DataError):
    """A loader that gives no batch."""


class MetricError(TrainkitError, ValueError):
    """A value given to ``log`` is not a metric, or is logged where that is not possible."""


class MissingMetricError(MetricError):
    """A metric that something monitors was never logged."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class OffloadError(TrainkitError, OSError):
    """The disk that tensors are offloaded to during a run is full, or fails."""


class CollectiveError(TrainkitError, RuntimeError):
    """The processes have not done the same where all are needed; the message names who has done what, and where."""


class ProcessFailedError(TrainkitError, RuntimeError):
    """Another process of the run has failed, has died, or cannot be reached; the message names it and says why."""


class MissingPackageError(TrainkitError, ImportError):
    """A package that is optional for trainkit, but needed for what was asked, is not installed."""


class CheckpointError(TrainkitError):
    """A checkpoint cannot be written, read or used."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint where one was asked for."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written, or make no sense; the message names the file."""


class StateMismatchError(CheckpointError):
    """A sound checkpoint does not fit what it is to be loaded into; the message lists every difference."""


class UnsavableError(CheckpointError):
    """A value cannot be stored in a checkpoint; the message names the path to it."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written: a full disk, a folder that is read-only or gone."""


class CheckpointLockedError(CheckpointError):
    """Another live run writes its checkpoints to the same folder."""


class Preempted(SystemExit):
    """The run was told to end by a signal, and has saved what there was to save; the process leaves with code 143.

    It is a ``SystemExit`` so that a script needs no code for it, and no ``TrainkitError``, so that no handler of errors
    takes it for one.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(143)
        self.reason = " ".join(map(str, args))

    def __str__(self) -> str:
        return self.reason or "preempted"


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known name nearest to ``name``, or an empty string if none is near."""
    names = {one.lower(): one for one in known}
    match = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean {names[match[0]]!r}?" if match else ""


def missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    """The error for an optional package that is needed now; ``extra`` is the one of ``trainkit-torch`` that brings it."""
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        f"   (or the extra: pip install 'trainkit-torch[{extra}]')"
    )
