"""A misspelt argument of a callback or logger is an error that names the nearest one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch import nn

import trainkit.callbacks
import trainkit.loggers
from trainkit import Callback
from trainkit.callbacks import EarlyStopping, LambdaCallback
from trainkit.errors import UnknownNameError
from trainkit.loggers import Logger


@pytest.mark.parametrize(
    "name, wrong, meant",
    [
        ("EarlyStopping", "patiance", "patience"),
        ("GradientClipping", "gradient_clip_value", "gradient_clip_val"),
        ("LearningRateMonitor", "log_momentums", "log_momentum"),
        ("MemoryMonitor", "verbos", "verbose"),
        ("ModelCheckpoint", "save_topk", "save_top_k"),
        ("ModelSummary", "maxdepth", "max_depth"),
        ("NonFiniteGuard", "actions", "action"),
        ("PredictionWriter", "outputdir", "output_dir"),
        ("RecompileMonitor", "warm_up_steps", "warmup_steps"),
        ("TQDMProgressBar", "refreshrate", "refresh_rate"),
        ("ThroughputMonitor", "windowsize", "window_size"),
        ("Timer", "durations", "duration"),
    ],
)
def test_a_misspelt_argument_of_a_callback(name: str, wrong: str, meant: str) -> None:
    kind = getattr(trainkit.callbacks, name)
    with pytest.raises(
        UnknownNameError, match=rf"{name} has no argument '{wrong}'\. Did you mean '{meant}'\? Known: .*{meant}"
    ):
        kind(**{wrong: 1})


@pytest.mark.parametrize("name", ["CSVLogger", "JSONLLogger", "TensorBoardLogger", "MLFlowLogger"])
def test_a_misspelt_argument_of_a_logger(name: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"{name} has no argument 'savedir'\. Did you mean 'save_dir'\?"):
        getattr(trainkit.loggers, name)(savedir="logs")


def test_an_argument_that_is_like_none() -> None:
    """An argument that is not similar to any other: the error lists the known ones."""
    with pytest.raises(UnknownNameError, match=r"EarlyStopping has no argument 'zzz'\. Known: monitor, min_delta"):
        EarlyStopping("val_loss", zzz=1)


def test_hooks_of_a_lambda_callback_are_no_arguments_of_its_own() -> None:
    LambdaCallback(on_train_end=lambda trainer, module: None)


def test_a_subclass_without_an_init_of_its_own() -> None:
    class Mine(EarlyStopping): ...

    assert Mine("val_loss", patience=5).patience == 5
    with pytest.raises(UnknownNameError, match="Mine has no argument 'patiance'. Did you mean 'patience'"):
        Mine("val_loss", patiance=5)


class Own(Callback):
    def __init__(self, value: Any, **more: Any) -> None:
        self.value = value


class OwnLogger(Logger):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def test_user_init_raises_type_error() -> None:
    """A user's subclass with its own `__init__` raises Python's TypeError."""
    assert Own(1, other=2).value == 1
    for kind in (Own, OwnLogger):
        assert kind(value=3).value == 3
        with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'value'"):
            kind()


@pytest.mark.parametrize("arguments", [((1,), {}), ((), {"x": 1})])
def test_a_callback_without_arguments_takes_none(arguments: Any) -> None:
    class Plain(Callback): ...

    Plain()
    given, named = arguments
    with pytest.raises(TypeError, match=r"Plain\(\) takes no arguments"):
        Plain(*given, **named)


def test_a_callback_that_is_a_module_too() -> None:
    class Both(Callback, nn.Linear): ...

    assert Both(4, out_features=2).weight.shape == (2, 4)


def test_copies() -> None:
    for made in (copy.copy(Own(1)), copy.deepcopy(Own(1)), pickle.loads(pickle.dumps(Own(1)))):
        assert (type(made), made.value) == (Own, 1)
