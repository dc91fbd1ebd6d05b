"""Numbers and names that must not change by accident: stack frames, calls per step, and the arguments of the Trainer."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.runs import trainers
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

import trainkit
from trainkit import Accelerator, Callback, Trainer
from trainkit.callbacks import LambdaCallback, NonFiniteGuard
from trainkit.errors import UnknownNameError, UnsupportedArgumentError
from trainkit.module.hook_table import HOOKS
from trainkit.names import advice_by_place, table

ADVICE = advice_by_place()

OURS = str(Path(trainkit.__file__).resolve().parents[1])
FOLDERS = tuple(str(Path(OURS, name)) for name in ("trainkit", "callbacks", "strategies"))
FRAMES, CALLS = 6, 25


def is_ours(filename: str) -> bool:
    return filename.startswith(FOLDERS)


# ---------------------------------------------------------------------------------------------------------------- frames


class Spying(TinyModule):
    """Stores the call stack inside of `optimizer.step`."""

    def configure_optimizers(self) -> Any:
        module = self

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                module.stack = traceback.extract_stack()
                return super().step(closure)

        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("arguments", [{}, {"gradient_clip_val": 1.0}])
def test_frames_from_fit_to_an_optimizers_step_under_autocast(arguments: dict[str, Any]) -> None:
    module = Spying()
    make_trainer(precision="bf16-mixed", **arguments).fit(module, tiny_loader())
    ours = [f"{Path(frame.filename).name}:{frame.name}" for frame in module.stack if is_ours(frame.filename)]
    assert len(ours) <= FRAMES, ours
    assert ours[-3:] == ["accelerator.py:step", "strategy.py:optimizer_step", "precision.py:optimizer_step"]


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_frames_from_fit_to_the_optimizers_step(arguments: dict[str, Any]) -> None:
    module = Spying()
    make_trainer(**arguments).fit(module, tiny_loader())
    ours = [f"{Path(frame.filename).name}:{frame.name}" for frame in module.stack if is_ours(frame.filename)]
    assert ours[0] == "trainer.py:fit"
    assert len(ours) <= FRAMES, ours
    assert ours == [
        "trainer.py:fit",
        "train_loop.py:train_epoch",
        "train_loop.py:close_window",
        "gradients.py:step",
    ]


# ----------------------------------------------------------------------------------------------------------------- calls


def calls_of_a_step(*callbacks: Callback, step: int = 5, **arguments: Any) -> Counter[str]:
    """Count the calls of trainkit's Python functions from one `training_step` to the next, by function."""
    counted: Counter[str] = Counter()
    counting = False

    class Module(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal counting
            counting = batch_idx == step
            return self.loss(batch)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        # TrainModule.__getattr__ replaces the call of nn.Module's, which finds the layers of a module
        replaces_torch = frame.f_code.co_name == "__getattr__"
        if counting and event == "call" and is_ours(frame.f_code.co_filename) and not replaces_torch:
            counted[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    trainer = make_trainer(*callbacks, **arguments)
    module, batches = Module(), list(tiny_loader(40))
    sys.setprofile(profile)
    try:
        trainer.fit(module, batches)
    finally:
        sys.setprofile(None)
    return counted


def test_calls_of_a_step() -> None:
    counted = calls_of_a_step()
    assert 10 < counted.total() <= CALLS, counted


def test_the_count_counts() -> None:
    """The count includes the calls of an active callback, so the limit on it can fail."""
    more = calls_of_a_step(NonFiniteGuard())
    assert more.total() > calls_of_a_step().total()
    assert any(name.startswith("nonfinite_guard.py") for name in more)


def test_idle_callbacks_cost_no_call() -> None:
    # Callbacks without hooks for training steps add no calls to a step.

    class Idle(Callback): ...

    class WithStart(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None: ...

    alone = calls_of_a_step()
    assert calls_of_a_step(*(Idle() for _ in range(10))) == alone
    assert calls_of_a_step(*(WithStart() for _ in range(10)), LambdaCallback(on_fit_start=lambda *_: None)) == alone


def test_every_step_has_the_same_number_of_calls() -> None:
    """The number of calls does not grow during a run."""
    counts = [calls_of_a_step(step=step).total() for step in (3, 5, 7)]
    assert len(set(counts)) == 1


def test_inactive_features_add_no_calls() -> None:
    """Limits, and validation and logging that are not due, add no calls to a step."""
    alone = calls_of_a_step()
    assert calls_of_a_step(max_steps=100, min_steps=1, log_every_n_steps=1000, val_check_interval=0.5) == alone


# ----------------------------------------------------------------------------------------------------------------- names

# Arguments that the Trainers of Lightning and of trainkit have.
SHARED = [
    "accelerator",
    "devices",
    "strategy",
    "precision",
    "logger",
    "callbacks",
    "default_root_dir",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "max_time",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "num_sanity_val_steps",
    "val_check_interval",
    "check_val_every_n_epoch",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "log_every_n_steps",
    "enable_progress_bar",
    "enable_model_summary",
    "deterministic",
    "benchmark",
    "inference_mode",
    "detect_anomaly",
    "reload_dataloaders_every_n_epochs",
    "profiler",
    "enable_checkpointing",
    "num_nodes",
    "sync_batchnorm",
]

TRAINER = [
    *SHARED,
    "val_every_n_steps",
    "global_batch_size",
    "auto_micro_batch",
    "seed",
    "slurm_requeue",
    "checksum",
    "omit_from_checkpoint",
    "log_grad_norm",
    "activation_checkpointing",
    "compile",
    "restore_best",
    "save_total_limit",
    "validate_at_end",
]

# Arguments of the Trainer of Lightning 2.6, from its reference.
LIGHTNING = {
    *SHARED,
    "use_distributed_sampler",
    "barebones",
    "plugins",
    "enable_autolog_hparams",
    "model_registry",
}


def arguments_of(function: Any) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD][1:]


def test_the_trainers_arguments_are_frozen() -> None:
    assert sorted(arguments_of(Trainer.__init__)) == sorted(TRAINER)
    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:]
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


ACCELERATOR = [  # in the order of Accelerate, then trainkit's own
    "device_placement",
    "split_batches",
    "mixed_precision",
    "gradient_accumulation_steps",
    "cpu",
    "dataloader_config",
    "deepspeed_plugin",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "rng_types",
    "log_with",
    "project_dir",
    "project_config",
    "gradient_accumulation_plugin",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "step_scheduler_with_optimizer",
    "kwargs_handlers",
    "dynamo_backend",
    "dynamo_plugin",
    "parallelism_config",
    "strategy",
    "precision",
    "activation_checkpointing",
]


def test_the_verbs_arguments_are_frozen() -> None:
    loaders = ["model", "train_dataloaders", "val_dataloaders", "datamodule"]
    assert arguments_of(Trainer.fit) == [*loaders, "ckpt_path", "restore", "overrides", "strict"]
    for verb in (Trainer.validate, Trainer.test):  # in Lightning's order
        assert arguments_of(verb) == ["model", "dataloaders", "ckpt_path", "verbose", "datamodule", "strict"]
    assert arguments_of(Trainer.predict) == ["model", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "strict"]
    assert arguments_of(Trainer.save_checkpoint) == ["filepath", "weights_only", "blocking"]
    # after the path, in Lightning's order
    assert arguments_of(TinyModule.load_from_checkpoint) == ["map_location", "hparams_file", "strict", "trust"]
    assert arguments_of(Accelerator.__init__) == ACCELERATOR
    # keyword-only from here: Accelerate has torch_tp_plugin next, so later positions would differ from trainkit's
    by_name = [p for p in inspect.signature(Accelerator).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in by_name] == ACCELERATOR[ACCELERATOR.index("fsdp_plugin") + 1 :]


def test_lightnings_arguments_are_ours_or_refused() -> None:
    assert len(LIGHTNING) == 41, "a name that our Trainer loses must not be lost for Lightning's"
    assert not set(ADVICE["Trainer"]) & set(TRAINER)
    assert set(TRAINER) | set(ADVICE["Trainer"]) >= LIGHTNING


@pytest.mark.parametrize("name", sorted(table("lightning")["arguments"]["Trainer"]))
def test_what_is_not_supported_is_refused_with_the_replacement(name: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=rf"Trainer\({name}=...\): {re.escape(ADVICE['Trainer'][name])}"):
        Trainer(**{name: object()})
    # the arguments that the message advises exist
    for replacement in re.findall(r"\b([a-z_]+)=", ADVICE["Trainer"][name]):
        known = {*TRAINER, "action", "mode", "max_depth", "process_position", "refresh_rate", "logger", "swa_lrs"}
        known |= {"flush_logs_every_n_steps", "ckpt_path", "dirpath"}
        assert replacement in known, f"{name}: {ADVICE['Trainer'][name]}"


@pytest.mark.parametrize(
    ("name", "meant"), [("max_epoch", "max_epochs"), ("gradient_clip", "gradient_clip_val"), ("callback", "callbacks")]
)
def test_an_unknown_argument_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"no argument '{name}'. Did you mean '{meant}'"):
        Trainer(**{name: 1})


def test_hooks_have_lightnings_names() -> None:
    """All hooks have names of Lightning's hooks, so that callbacks written for Lightning are called."""
    pattern = r"on_(train|validation|test|predict)(_epoch|_batch)?_(start|end)|on_(fit|sanity_check)_(start|end)"
    pattern += r"|on_(before|after)_backward|on_before_(optimizer_step|zero_grad)|on_(save|load)_checkpoint|on_exception"
    pattern += r"|setup|teardown"
    assert all(re.fullmatch(pattern, name) for name in HOOKS)


def test_the_helper_of_these_tests_turns_off_what_costs() -> None:
    assert make_trainer().callbacks == []
    assert set(trainers.__all__) <= set(dir(trainers))


SURFACE = """
    accelerator accumulate_grad_batches batch_idx callback_metrics callbacks check_val_every_n_epoch checkpoint_callback
    checkpoint_callbacks ckpt_path current_epoch datamodule default_root_dir device device_ids distributed_sampler_kwargs
    early_stopping_callback early_stopping_callbacks enable_validation estimated_stepping_batches evaluating explain
    fast_dev_run fit fit_loop global_rank global_step gradient_clip_algorithm gradient_clip_val inference_mode init_module
    interrupted is_global_zero is_last_batch lightning_module limit_predict_batches limit_test_batches limit_train_batches
    limit_val_batches local_rank log_dir log_every_n_steps logged_metrics logger loggers lr_scheduler_configs max_epochs
    max_steps min_epochs min_steps model node_rank num_devices num_nodes num_predict_batches num_sanity_val_batches
    num_sanity_val_steps num_test_batches num_training_batches num_val_batches optimizers overfit_batches plan precision
    precision_plugin predict predict_dataloaders predicting print profiler progress_bar_callback progress_bar_metrics
    received_sigterm release_save_buffers reload_dataloaders_every_n_epochs sample_mask sanity_checking save_checkpoint scaler
    seed should_log
    should_stop stage state strategy test test_dataloaders testing train_dataloader training val_check_interval
    val_dataloaders validate validating world_size
"""


def test_what_help_and_completion_show_of_a_trainer_is_frozen() -> None:
    """`dir` and `help` of a Trainer show only its public attributes, before, during and after a run."""
    module, trainer = TinyModule(), make_trainer(max_epochs=1)
    seen = {*dir(trainer)}
    module.on_train_batch_end = lambda *_: seen.update(dir(trainer))
    trainer.fit(module, tiny_loader())
    seen |= {*dir(trainer)}
    assert sorted(name for name in seen if not name.startswith("_")) == sorted(SURFACE.split())
    pages = [line.strip(" |") for line in pydoc.render_doc(Trainer, renderer=pydoc.plaintext).splitlines()]
    assert "validate(" in "".join(pages)
    assert not [line for line in pages if line.startswith("_") and not line.startswith("__")]
