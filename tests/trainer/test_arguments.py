"""The arguments of `Trainer` and its methods: valid values, contradictions, and arguments that only Lightning has."""

from __future__ import annotations

import inspect
import itertools
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Callback, DataModule, Float8Precision, Trainer
from trainkit.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DataError,
    TrainkitError,
    UnknownNameError,
    UnsupportedArgumentError,
)
from trainkit.loggers import CSVLogger
from trainkit.names import advice_by_place, table
from trainkit.profilers import SimpleProfiler
from trainkit.trainer.loaders import limit_batches

ADVICE = advice_by_place()
OF_LIGHTNING = table("lightning")["arguments"]["Trainer"]

# Every argument of Lightning's Trainer, in version 2 and in earlier versions.
LIGHTNING_2 = """
    accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps
    min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
    overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
    enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val
    gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler profiler detect_anomaly
    barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams
    model_registry
""".split()  # noqa: SIM905 - shorter than a list
# Its defaults, in the order of its signature.
DEFAULTS_OF_LIGHTNING_2: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    **dict.fromkeys(["precision", "logger", "callbacks"]),
    "fast_dev_run": False,
    **dict.fromkeys(["max_epochs", "min_epochs"]),
    "max_steps": -1,
    **dict.fromkeys(["min_steps", "max_time"]),
    **dict.fromkeys(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")),
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    **dict.fromkeys(["num_sanity_val_steps", "log_every_n_steps"]),
    **dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"]),
    "accumulate_grad_batches": 1,
    **dict.fromkeys(["gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark"]),
    "inference_mode": True,
    "use_distributed_sampler": True,
    "profiler": None,
    "detect_anomaly": False,
    "barebones": False,
    "plugins": None,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "default_root_dir": None,
    "enable_autolog_hparams": True,
    "model_registry": None,
}
OURS = [name for name in inspect.signature(Trainer.__init__).parameters if name not in ("self", "unknown")]


def refused(**arguments: Any) -> str:
    """Check that a Trainer rejects these arguments and writes no file. Returns the message."""
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(**arguments)
    assert not list(Path.cwd().iterdir())
    return str(caught.value)


# Lightning's arguments


def test_every_argument_of_lightning_is_taken_or_refused_with_its_replacement() -> None:
    assert {*LIGHTNING_2} <= {*OURS, *ADVICE["Trainer"]}
    assert not set(OURS) & set(ADVICE["Trainer"])


@pytest.mark.parametrize("name", sorted(OF_LIGHTNING))
@pytest.mark.parametrize("value", ["x", 7, 0.5, object()])
def test_an_argument_of_lightning_that_is_not_offered(name: str, value: Any) -> None:
    """It is rejected with any value but Lightning's default: an argument that is accepted must have an effect."""
    with pytest.raises(UnsupportedArgumentError) as caught:
        make_trainer(**{name: value})
    before, dots, after = ADVICE["Trainer"][name].partition("...")
    assert str(caught.value).startswith(f"Trainer({name}=...): {before}")
    assert str(caught.value).endswith(f"{after}.")
    if type(value) is object:
        assert str(caught.value) == f"Trainer({name}=...): {before}{dots}{after}."
    assert len(ADVICE["Trainer"][name]) > 15


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("gradient_checkpointing", True, "use activation_checkpointing=True"),
    ],
)
def test_the_replacement_has_the_value(name: str, value: Any, fix: str) -> None:
    """The advice for an argument of Lightning contains the value that the user passed, if it can be used as it is."""
    assert refused(**{name: value}) == f"Trainer({name}=...): {fix}."


def test_lightnings_defaults_are_accepted() -> None:
    """A script may pass all arguments of Lightning 2.6 with their default values."""
    assert list(DEFAULTS_OF_LIGHTNING_2) == LIGHTNING_2
    trainer = Trainer(**DEFAULTS_OF_LIGHTNING_2 | {"accelerator": "cpu", "devices": 1})
    assert (trainer.max_epochs, trainer.accumulate_grad_batches) == (1000, 1)
    kinds = {type(callback).__name__ for callback in trainer.callbacks}
    assert kinds == {"TQDMProgressBar", "ModelSummary", "ModelCheckpoint"}  # as in Lightning, enable_...=None means True


@pytest.mark.parametrize(
    "name, value",
    [
        ("plugins", None),
        ("plugins", []),
        ("use_distributed_sampler", True),
        ("barebones", False),
        ("enable_autolog_hparams", True),
        ("model_registry", None),
    ],
)
def test_a_default_of_lightning_asks_for_nothing(name: str, value: Any) -> None:
    make_trainer(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("plugins", [object()]),
        ("use_distributed_sampler", False),
        ("use_distributed_sampler", 1),
        ("barebones", True),
        ("barebones", 0),
        ("enable_autolog_hparams", False),
    ],
)
def test_values_like_a_default_are_rejected(name: str, value: Any) -> None:
    """A value that only resembles Lightning's default is rejected."""
    assert refused(**{name: value}) == f"Trainer({name}=...): {ADVICE['Trainer'][name]}."


@pytest.mark.parametrize("name", sorted(OF_LIGHTNING))
def test_a_replacement_that_is_named_exists(name: str) -> None:
    """The advice for an argument of Lightning names only arguments that exist."""
    words = ADVICE["Trainer"][name].replace("fit(module, ckpt_path=", "").replace("=", " = ").replace("(", " ").split()
    for word, following in itertools.pairwise(words):
        known = ("save_dir", "process_position", "refresh_rate", "max_depth", "mode", "logger", "batch_size", "action")
        known += ("dirpath", "flush_logs_every_n_steps", "swa_lrs")
        if following == "=" and word.isidentifier():
            assert word in (*OURS, *known), f"{word} in: {ADVICE['Trainer'][name]}"


def test_an_unknown_argument() -> None:
    with pytest.raises(UnknownNameError, match=r"Trainer has no argument 'max_epoch'\. Did you mean 'max_epochs'\?"):
        make_trainer(max_epoch=3)
    with pytest.raises(
        UnknownNameError, match=r"Trainer has no argument 'enable_checkpoint'\. Did you mean 'enable_checkpointing'"
    ):
        make_trainer(enable_checkpoint=True)
    with pytest.raises(UnknownNameError, match=r"Trainer has no argument 'zzz'\.$"):
        make_trainer(zzz=1)


def test_all_arguments_are_keywords() -> None:
    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:-1]
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_the_verbs_take_lightnings_keywords(verb: str) -> None:
    loaders = {"train_dataloaders": tiny_loader()} if verb == "fit" else {"dataloaders": tiny_loader()}
    run = getattr(make_trainer(), verb)
    for weights_only in (None, True, False):  # how torch.load reads a file
        run(model=TinyModule(), ckpt_path=None, weights_only=weights_only, **loaders)
    with pytest.raises(CheckpointNotFoundError, match="ckpt_path='last': there is no checkpoint in .*trainkit_runs"):
        run(model=TinyModule(), ckpt_path="last", **loaders)
    with pytest.raises(UnknownNameError, match=rf"Trainer\.{verb} has no argument 'datamodul'. Did you mean 'datamodule'"):
        run(TinyModule(), datamodul=None)


@pytest.mark.parametrize(
    "verb, order",
    [
        ("fit", "model train_dataloaders val_dataloaders datamodule ckpt_path"),
        ("validate", "model dataloaders ckpt_path verbose datamodule"),
        ("test", "model dataloaders ckpt_path verbose datamodule"),
        ("predict", "model dataloaders datamodule return_predictions ckpt_path"),
    ],
)
def test_the_verbs_take_lightnings_positions(verb: str, order: str) -> None:
    parameters = inspect.signature(getattr(Trainer, verb)).parameters.values()
    assert " ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == f"self {order}"


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def test_true_instead_of_a_checkpoint() -> None:
    """As in `train(resume_from_checkpoint=True)` of the Hugging Face Trainer."""
    with pytest.raises(ConfigurationError, match=r"not True\. For the newest checkpoint: ckpt_path='auto'$"):
        make_trainer().fit(TinyModule(), tiny_loader(), ckpt_path=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_arguments_in_the_wrong_position(verb: str) -> None:
    """A positional argument in the wrong position is an error. If the value is recognized, the error names its keyword."""
    run = getattr(make_trainer(), verb)
    assert run(TinyModule(), None, None, False, Data())
    with pytest.raises(
        ConfigurationError, match=r"ckpt_path must be a path, .*, not <.*Pass a Data by name: datamodule=\.\.\."
    ):
        run(TinyModule(), None, Data())
    with pytest.raises(
        ConfigurationError, match=r"ckpt_path must be a path, .* not False\. Pass a bool by name: verbose=\.\.\."
    ):
        run(TinyModule(), tiny_loader(), False)
    with pytest.raises(
        ConfigurationError, match="verbose must be True or False, not 'last'. .*by name, such as ckpt_path='last'"
    ):
        run(TinyModule(), tiny_loader(), None, "last")
    with pytest.raises(DataError, match="datamodule must be a DataModule, not str"):
        run(TinyModule(), None, None, True, "last")


def test_positions_of_predict_that_are_meant_otherwise() -> None:
    predict = make_trainer().predict
    assert len(predict(TinyModule(), None, Data())) == 4
    with pytest.raises(ConfigurationError, match="return_predictions must be True or False, not 'last'"):
        predict(TinyModule(), tiny_loader(), None, "last")
    with pytest.raises(ConfigurationError, match="ckpt_path must be a path, .* not True"):
        predict(TinyModule(), tiny_loader(), None, True, True)
    with pytest.raises(DataError, match="datamodule must be a DataModule, not str"):
        predict(TinyModule(), None, "last")


# Values


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("max_epochs", [-2, -0.5, -2.0, float("nan"), float("inf"), "3", True]),
        ("min_epochs", [-1, 1.5, True]),
        ("max_steps", [-2, None, 1e3, "5"]),
        ("min_steps", [-1, 0.5]),
        ("num_sanity_val_steps", [-2, 1.5]),
        ("val_every_n_steps", [0, -1, 0.5]),
        ("check_val_every_n_epoch", [0, 1.0]),
        ("accumulate_grad_batches", [0, [2], 2.0, True]),
        ("global_batch_size", [0, 8.0]),
        ("log_every_n_steps", [-1, 0.5]),
        ("reload_dataloaders_every_n_epochs", [-1, True, None]),
    ],
)
def test_counts(name: str, wrong: list[Any]) -> None:
    for value in wrong:
        assert refused(**{name: value}).startswith(f"{name} must be an integer ≥ ")
        assert repr(value) in refused(**{name: value})


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"])
def test_limits(name: str) -> None:
    for value in (0, 5, 0.0, 0.5, 1.0, None):
        make_trainer(**{name: value})
    for value in (-1, 1.5, -0.1, "1", True, math.nan):
        assert f"{name} must be a number of batches (an integer ≥ 0) or a fraction" in refused(**{name: value})


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_test_batches", "overfit_batches", "val_check_interval"])
def test_a_whole_float_is_a_number_of_batches(name: str) -> None:
    trainer = make_trainer(**{name: 10.0})
    assert (getattr(trainer, name), type(getattr(trainer, name))) == (10, int)
    assert getattr(make_trainer(**{name: 1.0}), name) == 1.0


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_gradients_are_not_clipped_to_zero(value: float | None) -> None:
    """As in Lightning, 0 turns clipping off."""
    trainer = make_trainer(gradient_clip_val=value)
    assert (trainer.callbacks, trainer.gradient_clip_val) == ([], None)


@pytest.mark.parametrize("value, kept", [(0, False), (1, True), (True, True), (2, 2)])
def test_one_batch_of_each_stage(value: int, kept: int) -> None:
    assert make_trainer(fast_dev_run=value).fast_dev_run is kept


@pytest.mark.parametrize("value", [0, 0.0, 1.5, -1, True, "1", math.nan, timedelta(0), {"weks": 1}, "00:00:00:00"])
def test_val_check_interval(value: Any) -> None:
    message = refused(val_check_interval=value)
    assert "To validate every N optimizer steps: val_every_n_steps=N" in message
    assert f"not {value!r}" in message


@pytest.mark.parametrize("value", ["00:00:30:00", {"minutes": 30}, timedelta(minutes=30)])
@pytest.mark.parametrize("every", [1, 2, None])
def test_a_time_between_validations(value: Any, every: int | None) -> None:
    trainer = make_trainer(val_check_interval=value, check_val_every_n_epoch=every)
    assert trainer.val_check_interval == timedelta(minutes=30)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"gradient_clip_algorithm": "nrom"}, "Did you mean 'norm'?"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val must be a number ≥ 0, not -1.0"),
        ({"gradient_clip_val": math.nan}, "not nan"),
        ({"gradient_clip_val": "1"}, "not '1'"),
        ({"gradient_clip_val": True}, "not True"),
        ({"deterministic": "wran"}, "deterministic must be True, False or 'warn', not 'wran'"),
        ({"fast_dev_run": -1}, "fast_dev_run must be True, False or a number of batches, not -1"),
        ({"fast_dev_run": 1.5}, "not 1.5"),
        ({"overfit_batches": 1.5}, "overfit_batches must be"),
        ({"default_root_dir": 5}, "default_root_dir must be a path, not 5"),
        ({"max_time": "1 hour"}, "or Trainer(max_time=...), expected 'DD:HH:MM:SS', got '1 hour'. Fix: Timer('00:12:00:00')"),
        ({"seed": -1}, "seed must be an integer from 0 to 2**64 - 1, not -1"),
        ({"seed": "1"}, "not '1'"),
        ({"profiler": "simpel"}, "Did you mean 'simple'?"),
        ({"profiler": 3}, "profiler must be a name"),
        ({"precision": "bf16-mixd"}, "Did you mean 'bf16-mixed'?"),
        ({"accelerator": "gup"}, "Did you mean 'gpu'?"),
        ({"accelerator": None}, "unknown accelerator None"),
        ({"accelerator": "hpu"}, "is not supported. Use 'auto', 'cpu', 'gpu', 'mps' or 'tpu'"),
        ({"accelerator": "tpu", "strategy": "ddp"}, "accelerator='tpu' works with strategy='xla', not with 'ddp'"),
        ({"strategy": "sngle"}, "Did you mean 'single'?"),
        ({"strategy": "horovod"}, "strategy='auto'"),
        ({"logger": "tensorbord"}, "got 'tensorbord'. Did you mean 'tensorboard'?"),
        ({"logger": [True]}, "logger must be True, False, a Logger, its name or a list of them, not True"),
        ({"logger": 5}, "not 5"),
        ({"logger": [None]}, "not None. For example: CSVLogger()"),
        ({"logger": [CSVLogger]}, "Did you forget to make an instance: CSVLogger()?"),
        ({"logger": Callback}, "Callback'>. For example: CSVLogger()"),
        ({"plugins": [None]}, "Trainer(plugins=...): pass precision=Precision(...)"),
        ({"precision": Float8Precision}, "Did you forget to make an instance: Float8Precision()?"),
        ({"profiler": SimpleProfiler}, "Did you forget to make an instance: SimpleProfiler()?"),
        ({"profiler": Callback}, "Callback'>."),
    ],
)
def test_other_values(arguments: dict[str, Any], words: str) -> None:
    assert words in refused(**arguments)


@pytest.mark.parametrize(
    "name", ["enable_progress_bar", "enable_model_summary", "inference_mode", "detect_anomaly", "benchmark"]
)
def test_a_switch_is_on_or_off(name: str) -> None:
    make_trainer(**{name: np.bool_(True)})
    for value in ("no", "False", 2, [], *([None] if name in ("inference_mode", "detect_anomaly") else [])):
        assert refused(**{name: value}) == f"{name} must be True or False, not {value!r}."


def test_numpys_integers_are_integers() -> None:
    trainer = make_trainer(max_epochs=np.int64(3), accumulate_grad_batches=np.int32(2))
    assert (trainer.max_epochs, trainer.accumulate_grad_batches) == (3, 2)
    assert type(trainer.accumulate_grad_batches) is int


@pytest.mark.parametrize("callbacks", ["early_stopping", 5, object(), [None], ["x"], [CSVLogger], CSVLogger])
def test_what_is_no_callback(callbacks: Any) -> None:
    with pytest.raises(
        TrainkitError, match=r"callbacks must contain Callback objects, not .*callbacks=\[EarlyStopping\('val_loss'\)\]"
    ):
        Trainer(callbacks=callbacks, max_epochs=1)


# Contradictions


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"val_check_interval": 5, "val_every_n_steps": 5}, "both set when to validate. Give one of them"),
        ({"val_check_interval": 0.5, "val_every_n_steps": 5}, "both set when to validate"),
        ({"accumulate_grad_batches": 2, "global_batch_size": 8}, "both set the accumulation. Give one of them"),
        ({"min_epochs": 3, "max_epochs": 2}, "min_epochs=3 is more than max_epochs=2"),
        ({"min_steps": 3, "max_steps": 2}, "min_steps=3 is more than max_steps=2"),
        ({"overfit_batches": 2, "limit_train_batches": 3}, "both limit the training batches"),
        ({"check_val_every_n_epoch": None}, "val_check_interval=1000"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, "val_check_interval=1000"),
        ({"check_val_every_n_epoch": 2, "val_every_n_steps": 5}, "check_val_every_n_epoch=2 cannot be used with it"),
        ({"gradient_clip_algorithm": "value"}, "Add it: gradient_clip_val=0.5"),
    ],
)
def test_contradictions(arguments: dict[str, Any], words: str) -> None:
    assert words in refused(**arguments)


def test_what_does_not_contradict() -> None:
    make_trainer(min_epochs=2, max_epochs=2, min_steps=5, max_steps=5)
    make_trainer(min_epochs=2, max_epochs=-1)
    make_trainer(val_every_n_steps=5, val_check_interval=1.0, check_val_every_n_epoch=None)
    make_trainer(gradient_clip_algorithm="norm")


@pytest.mark.parametrize("name, values", [("gradient_clip_val", (1.0,)), ("max_time", ("00:00:00:01", timedelta(hours=1)))])
def test_an_argument_and_its_callback_say_the_same(name: str, values: tuple[Any, ...]) -> None:
    from trainkit.callbacks import GradientClipping, Timer

    for value in values:
        callback = GradientClipping(1.0) if name == "gradient_clip_val" else Timer("00:00:00:01")
        with pytest.raises(ConfigurationError, match=rf"{name} and a \w+ in callbacks set the same thing. Give one of them"):
            make_trainer(callback, **{name: value})


# What depends on other arguments


def test_how_long_without_an_end() -> None:
    """The default of max_epochs depends on the other limits."""
    assert make_trainer(max_epochs=None).max_epochs == 1000
    assert make_trainer(max_epochs=None, min_epochs=2000).max_epochs == 2000
    assert make_trainer(max_epochs=None, max_steps=5).max_epochs == -1
    assert make_trainer(max_epochs=None, max_time={"hours": 1}).max_epochs == -1
    assert make_trainer(max_epochs=None, fast_dev_run=True).max_epochs == 1


def test_a_fit_without_an_end_says_how_long_it_continues(caplog: pytest.LogCaptureFixture) -> None:
    class OneStep(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    said = "neither max_epochs nor max_steps nor max_time was given: training for up to 1000 epochs"
    trainer = make_trainer(max_epochs=None)
    trainer.validate(TinyModule(), tiny_loader(), verbose=False)
    assert said not in caplog.text  # nothing is trained
    trainer.fit(OneStep(), tiny_loader())
    assert said in caplog.text


def test_overfitting_limits_validation_too_unless_told_otherwise() -> None:
    assert make_trainer(overfit_batches=3)._arguments.limit_val_batches == 3
    assert make_trainer(overfit_batches=3, limit_val_batches=0)._arguments.limit_val_batches == 0
    assert make_trainer(overfit_batches=0.5, limit_val_batches=2)._arguments.limit_val_batches == 2


@pytest.mark.parametrize(
    "length, limit, expected",
    [
        (10, 1.0, 10),
        (10, 0.25, 2),
        (10, 3, 3),
        (10, 30, 10),
        (10, 0, 0),
        (10, 0.0, 0),
        (None, 3, 3),
        (None, 1.0, None),
        (None, 0.0, 0),
    ],
)
def test_limited(length: int | None, limit: int | float, expected: int | None) -> None:
    assert limit_batches(length, limit, "limit") == expected


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="limit=0.5 is a fraction, but the loader's length is unknown.*limit=100"):
        limit_batches(None, 0.5, "limit")
    expected = "limit=0.05 of 10 batches leaves no batch. Use a fraction of at least 0.1, or a number of batches: limit=1"
    with pytest.raises(ConfigurationError, match=expected):
        limit_batches(10, 0.05, "limit")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there() -> None:
    assert "GPU 3 does not exist" in refused(devices=[3])
    assert "Use accelerator='cpu'" in refused(accelerator="cuda")


def test_log_grad_norm_logs_the_norm() -> None:
    trainer = make_trainer(log_grad_norm=True, log_every_n_steps=1)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.callback_metrics["grad_norm"].item() > 0
