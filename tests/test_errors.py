"""The exception tree and its two helpers."""

from __future__ import annotations

import pytest

from trainkit import errors

# Class → its base classes. Users may rely on this tree.
TREE = {
    "TrainkitError": (Exception,),
    "ConfigurationError": (errors.TrainkitError, ValueError),
    "UnknownNameError": (errors.ConfigurationError,),
    "UnsupportedArgumentError": (errors.ConfigurationError,),
    "ModuleError": (errors.TrainkitError,),
    "MissingMethodError": (errors.ModuleError,),
    "HookError": (errors.ModuleError,),
    "LossError": (errors.ModuleError,),
    "OptimizerError": (errors.ModuleError,),
    "DataError": (errors.TrainkitError,),
    "EmptyLoaderError": (errors.DataError,),
    "MetricError": (errors.TrainkitError, ValueError),
    "MissingMetricError": (errors.MetricError,),
    "NonFiniteError": (errors.TrainkitError, ArithmeticError),
    "NotAvailableError": (errors.ModuleError, AttributeError),
    "OutOfMemoryError": (errors.TrainkitError, RuntimeError),
    "TrainingSpikeException": (errors.TrainkitError, RuntimeError),
    "CheckpointError": (errors.TrainkitError,),
    "CheckpointNotFoundError": (errors.CheckpointError,),
    "CorruptCheckpointError": (errors.CheckpointError,),
    "StateMismatchError": (errors.CheckpointError,),
    "UnsavableError": (errors.CheckpointError,),
    "CheckpointWriteError": (errors.CheckpointError,),
    "CheckpointLockedError": (errors.CheckpointError,),
    "MissingPackageError": (errors.TrainkitError, ImportError),
    "OffloadError": (errors.TrainkitError, OSError),
    "CollectiveError": (errors.TrainkitError, RuntimeError),
    "ProcessFailedError": (errors.TrainkitError, RuntimeError),
}


def test_the_tree() -> None:
    assert set(errors.__all__) == {*TREE, "Preempted"}
    for name, bases in TREE.items():
        assert getattr(errors, name).__bases__ == bases


def test_the_tree_is_drawn_in_the_docstring() -> None:
    drawing = [line for line in (errors.__doc__ or "").splitlines() if "Error" in line]
    names = [line.strip(" │├└─").split()[0] for line in drawing]
    assert sorted(names) == sorted(TREE)
    depth = {name: line.index(name) // 4 for name, line in zip(names, drawing, strict=True)}
    for name, (parent, *_) in TREE.items():
        if parent is not Exception:
            assert depth[name] == depth[parent.__name__] + 1


def test_preempted_is_no_error() -> None:
    """`except Exception` and `except TrainkitError` do not catch `Preempted`, so that the process exits with code 143."""
    assert not issubclass(errors.Preempted, Exception)
    preempted = errors.Preempted("SIGTERM at step 5")
    assert preempted.code == 143
    assert str(preempted) == "SIGTERM at step 5"
    assert str(errors.Preempted()) == "preempted"


@pytest.mark.parametrize("name", list(TREE))
def test_each_says_what_it_is_for(name: str) -> None:
    """Each error class has a docstring, and its text is the message."""
    assert (getattr(errors, name).__doc__ or "").strip()
    assert str(getattr(errors, name)("text")) == "text"


@pytest.mark.parametrize(
    "name, known, expected",
    [
        ("val_los", ["train_loss", "val_loss"], " Did you mean 'val_loss'?"),
        ("bf16-mixd", ("bf16-mixed", "bf16-true"), " Did you mean 'bf16-mixed'?"),
        ("accuracy", ["val_loss"], ""),
        ("", ["val_loss"], ""),
        ("x", [], ""),
        ("a", {"a": 1}, " Did you mean 'a'?"),
    ],
)
def test_nearest(name: str, known: object, expected: str) -> None:
    assert errors.nearest(name, known) == expected


def test_missing_package() -> None:
    error = errors.missing_package("wandb", "wandb", "WandbLogger")
    assert isinstance(error, ImportError)
    assert str(error) == (
        "WandbLogger needs the package 'wandb', which is not installed. Install it with: pip install wandb"
        "   (or the extra: pip install 'trainkit-torch[wandb]')"
    )
