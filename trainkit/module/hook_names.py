"""The names and arguments of all hooks, and of the other methods that users override."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from trainkit.callback import Callback
from trainkit.module.overridable_hooks import DataHooks, ModuleHooks
from trainkit.module.train_module import TrainModule

__all__ = ["DATA_METHODS", "HOOKS", "MODULE_METHODS", "REMOVED", "STATE_METHODS", "STEPS", "WARNED"]


def _arguments(owner: type, names: Iterable[str], skipped: int = 1) -> dict[str, tuple[str, ...]]:
    """Method → names of its arguments, without the first ones."""
    fixed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    signatures = {name: inspect.signature(getattr(owner, name)).parameters.values() for name in names}
    return {name: tuple(one.name for one in found if one.kind in fixed)[skipped:] for name, found in signatures.items()}


def _methods(owner: type) -> list[str]:
    """The public methods that a class itself defines."""
    return [name for name, member in vars(owner).items() if inspect.isfunction(member) and not name.startswith("_")]


_SETUP = ("setup", "teardown")

# Hook → names of the arguments after (trainer, module). The module's own hooks take the same without these two.
HOOKS = _arguments(Callback, [name for name in _methods(Callback) if name.startswith("on_") or name in _SETUP], skipped=3)

# Method → names of its arguments, of callbacks, of data modules and modules, and of modules only.
STATE_METHODS = _arguments(Callback, ["state_dict", "load_state_dict"])
DATA_METHODS = _arguments(DataHooks, [name for name in _methods(DataHooks) if name not in _SETUP])
MODULE_METHODS = {
    **DATA_METHODS,
    **_arguments(ModuleHooks, [name for name in _methods(ModuleHooks) if name not in HOOKS]),
    **_arguments(TrainModule, ["configure_optimizers", "configure_gradient_clipping"]),
}
# A step may omit arguments from the right.
STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("batch", "batch_idx"),
    **{f"{stage}_step": ("batch", "batch_idx", "dataloader_idx") for stage in ("validation", "test", "predict")},
}

# Methods that Lightning (in this or earlier versions), Keras or the Hugging Face Trainer calls and trainkit does not → what to
# use instead.
REMOVED: dict[str, str] = {
    "training_epoch_end": "on_train_epoch_end (keep what you need of the outputs in an attribute)",
    "validation_epoch_end": "on_validation_epoch_end (keep what you need of the outputs in an attribute)",
    "test_epoch_end": "on_test_epoch_end (keep what you need of the outputs in an attribute)",
    "training_step_end": "training_step: the gradient is already the mean over all processes",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "configure_model of the module",
    "configure_sharded_model": "configure_model",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
    "on_post_move_to_device": "on_fit_start: tied parameters stay tied",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "on_validation_model_zero_grad": "on_validation_start: validation does not change the gradients",
    "on_batch_begin": "on_train_batch_start",
    "on_epoch_begin": "on_train_epoch_start",
    "on_evaluate": "on_validation_end",
    "on_optimizer_step": "on_before_zero_grad",
    "on_predict": "on_predict_end",
    "on_predict_batch_begin": "on_predict_batch_start",
    "on_predict_begin": "on_predict_start",
    "on_pre_optimizer_step": "on_before_optimizer_step",
    "on_save": "on_save_checkpoint",
    "on_step_begin": "on_train_batch_start",
    "on_step_end": "on_train_batch_end",
    "on_test_batch_begin": "on_test_batch_start",
    "on_test_begin": "on_test_start",
    "on_train_batch_begin": "on_train_batch_start",
    "on_train_begin": "on_train_start",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True)",
    "tbptt_split_batch": "a loop over the parts of the sequence under manual optimization",
}

# Hooks in REMOVED with a name that users may also give to their own methods cause a warning. The others raise an error, because
# without them a run would train or restore something other than the user means.
_ERRORS_AMONG_HOOKS = ("on_configure_sharded_model", "on_hpc_load", "on_hpc_save", "on_post_move_to_device")
WARNED: frozenset[str] = frozenset(name for name in REMOVED if name.startswith("on_") and name not in _ERRORS_AMONG_HOOKS)
