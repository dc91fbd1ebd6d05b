"""The names and arguments of all hooks, and of the methods that users override beside them."""

from __future__ import annotations

__all__ = ["DATA_METHODS", "HOOKS", "MODULE_METHODS", "REMOVED", "STATE_METHODS", "STEPS", "WARNED"]

# Hook → names of the arguments after (trainer, module). The module's own hooks take the same without these two.
HOOKS: dict[str, tuple[str, ...]] = {
    "setup": ("stage",),
    "teardown": ("stage",),
    "on_fit_start": (),
    "on_fit_end": (),
    "on_sanity_check_start": (),
    "on_sanity_check_end": (),
    "on_train_start": (),
    "on_train_end": (),
    "on_train_epoch_start": (),
    "on_train_epoch_end": (),
    "on_train_batch_start": ("batch", "batch_idx"),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    "on_before_backward": ("loss",),
    "on_after_backward": (),
    "on_before_optimizer_step": ("optimizer",),
    "on_before_zero_grad": ("optimizer",),
    **{f"on_{stage}_{when}": () for stage in ("validation", "test", "predict") for when in ("start", "end")},
    **{f"on_{stage}_epoch_{when}": () for stage in ("validation", "test", "predict") for when in ("start", "end")},
    **{f"on_{stage}_batch_start": ("batch", "batch_idx", "dataloader_idx") for stage in ("validation", "test", "predict")},
    **{
        f"on_{stage}_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx")
        for stage in ("validation", "test", "predict")
    },
    "on_exception": ("exception",),
    "on_save_checkpoint": ("checkpoint",),
    "on_load_checkpoint": ("checkpoint",),
}

# Method → names of its arguments, of callbacks, of data modules and modules, and of modules only.
STATE_METHODS: dict[str, tuple[str, ...]] = {"state_dict": (), "load_state_dict": ("state_dict",)}
DATA_METHODS: dict[str, tuple[str, ...]] = {
    "prepare_data": (),
    "train_dataloader": (),
    "val_dataloader": (),
    "test_dataloader": (),
    "predict_dataloader": (),
    "transfer_batch_to_device": ("batch", "device", "dataloader_idx"),
    "on_before_batch_transfer": ("batch", "dataloader_idx"),
    "on_after_batch_transfer": ("batch", "dataloader_idx"),
}
MODULE_METHODS: dict[str, tuple[str, ...]] = {
    **DATA_METHODS,
    "configure_optimizers": (),
    "configure_model": (),
    "configure_callbacks": (),
    "configure_gradient_clipping": ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
    "batch_weight": ("batch",),
    "lr_scheduler_step": ("scheduler", "metric"),
    "optimizer_zero_grad": ("epoch", "batch_idx", "optimizer"),
    **{f"on_{stage}_model_{mode}": () for stage in ("validation", "test", "predict") for mode in ("eval", "train")},
}
# Steps may leave out arguments from the right.
STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("batch", "batch_idx"),
    **{f"{stage}_step": ("batch", "batch_idx", "dataloader_idx") for stage in ("validation", "test", "predict")},
}

# Overridable names of Lightning's, of this and earlier versions, that would never be called here → what to use.
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
    "on_validation_model_zero_grad": "on_validation_start: a validation leaves the gradients as they are",
    "optimizer_step": (
        "on_before_optimizer_step, or manual optimization (automatic_optimization = False) with self.optimizers().step()"
    ),
    "backward": "on_before_backward and on_after_backward, or manual optimization with self.manual_backward(loss)",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True)",
    "tbptt_split_batch": "a loop over the parts of the sequence under manual optimization",
}

# Of these, the hooks whose names users also give to methods that they call themselves: a warning. The others are errors:
# without them a run would train or restore something else than the user means.
_ERRORS_AMONG_HOOKS = ("on_configure_sharded_model", "on_hpc_load", "on_hpc_save", "on_post_move_to_device")
WARNED: frozenset[str] = frozenset(name for name in REMOVED if name.startswith("on_") and name not in _ERRORS_AMONG_HOOKS)
