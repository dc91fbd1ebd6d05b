"""Arguments of Lightning's Trainer and strategies that trainkit does not have, and what to use instead."""

from __future__ import annotations

from typing import Any

__all__ = ["CARRIED", "DEFAULTS", "LOAD_FROM_CHECKPOINT", "PRECISION", "SHARDING", "TRAINER", "TRAINER_VERBS"]

# Arguments of Lightning's Trainer, in this and earlier versions, and what is called otherwise in Hugging Face's.
TRAINER: dict[str, str] = {
    "amp_backend": "use precision='16-mixed' or 'bf16-mixed'",
    "amp_level": "use precision='16-mixed' or 'bf16-mixed'",
    "auto_lr_find": "use callbacks=[LearningRateFinder()], or Tuner(trainer).lr_find(module)",
    "auto_scale_batch_size": "use callbacks=[BatchSizeFinder()], or Tuner(trainer).scale_batch_size(module)",
    "auto_select_gpus": "use devices=[index]",
    "automatic_optimization": "set self.automatic_optimization in __init__ of the TrainModule",
    "barebones": "remove it: features that you do not use cost nothing; turn off the others with logger=False, "
    "enable_progress_bar=False, enable_model_summary=False",
    "checkpoint_callback": "use enable_checkpointing=..., or callbacks=[ModelCheckpoint(...)]",
    "distributed_backend": "use strategy=..., which chooses it",
    "early_stop_callback": "use callbacks=[EarlyStopping('val_loss')]",
    "enable_autolog_hparams": "use save_hyperparameters(logger=False)",
    "flush_logs_every_n_steps": "use logger=CSVLogger(flush_logs_every_n_steps=...)",
    "gpus": "use accelerator='gpu', devices=...",
    "gradient_checkpointing": "use activation_checkpointing=...",
    "gradient_checkpointing_kwargs": "use activation_checkpointing=True: its checkpoints are never reentrant",
    "ipus": "IPUs are not supported",
    "log_gpu_memory": "use callbacks=[MemoryMonitor()]",
    "log_save_interval": "use log_every_n_steps, and an argument of the logger",
    "model_registry": "remove it: models are not uploaded",
    "move_metrics_to_cpu": "remove it: metrics are copied to the CPU only at log boundaries",
    "multiple_trainloader_mode": "use fit(module, CombinedLoader(loaders, mode=...))",
    "num_processes": "use accelerator='cpu', devices=...",
    "overfit_pct": "use overfit_batches=...",
    "plugins": "pass precision=Precision(...) or strategy=..., a Strategy object; clusters such as SLURM are recognized",
    "prepare_data_per_node": "set it in the DataModule or TrainModule: self.prepare_data_per_node = ...",
    "process_position": "use callbacks=[TQDMProgressBar(process_position=...)]",
    "progress_bar_refresh_rate": "use callbacks=[TQDMProgressBar(refresh_rate=...)]",
    "reload_dataloaders_every_epoch": "use reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "remove it: loaders are sharded by position, no sampler is replaced",
    "resume_from_checkpoint": "pass the path to trainer.fit: trainer.fit(module, ckpt_path=...)",
    "row_log_interval": "use log_every_n_steps=...",
    "stochastic_weight_avg": "use callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)]",
    "terminate_on_nan": "use callbacks=[NonFiniteGuard(action='raise')]",
    "test_percent_check": "use limit_test_batches=...",
    "tpu_cores": "use accelerator='tpu', devices=...",
    "track_grad_norm": "use log_grad_norm=True; gradient_clip_val also logs the norm",
    "train_percent_check": "use limit_train_batches=...",
    "truncated_bptt_steps": "loop over the parts of the sequence under manual optimization",
    "use_distributed_sampler": "remove it: loaders are sharded by position, no sampler is replaced",
    "val_percent_check": "use limit_val_batches=...",
    "weights_save_path": "use default_root_dir=...",
    "weights_summary": "use enable_model_summary, or callbacks=[ModelSummary(max_depth=...)]",
}

# Arguments whose value belongs in the place of the first "..." of their advice, and its types there.
CARRIED: dict[str, tuple[type, ...]] = {
    "checkpoint_callback": (bool,),
    "distributed_backend": (str,),
    "flush_logs_every_n_steps": (int,),
    "gpus": (int, str, list),
    "gradient_checkpointing": (bool,),
    "max_shard_size": (int, str),
    "min_num_params": (int,),
    "multiple_trainloader_mode": (str,),
    "num_processes": (int,),
    "overfit_pct": (float,),
    "prepare_data_per_node": (bool,),
    "process_position": (int,),
    "progress_bar_refresh_rate": (int,),
    "resume_from_checkpoint": (str,),
    "row_log_interval": (int,),
    "tensor_parallel_size": (int,),
    "test_percent_check": (float,),
    "tpu_cores": (int,),
    "train_percent_check": (float,),
    "val_percent_check": (float,),
    "weights_save_path": (str,),
}

# Lightning's defaults of these arguments; the default of all others is `None`.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "auto_lr_find": (False,),
    "auto_scale_batch_size": (False,),
    "auto_select_gpus": (False, None),
    "barebones": (False,),
    "checkpoint_callback": (True, None),
    "enable_autolog_hparams": (True,),
    "move_metrics_to_cpu": (False,),
    "multiple_trainloader_mode": ("max_size_cycle",),
    "num_processes": (1, None),
    "plugins": (None, []),
    "prepare_data_per_node": (True, None),
    "process_position": (0,),
    "reload_dataloaders_every_epoch": (False,),
    "replace_sampler_ddp": (True,),
    "stochastic_weight_avg": (False,),
    "terminate_on_nan": (False, None),
    "track_grad_norm": (-1,),
    "use_distributed_sampler": (True,),
    "weights_only": (None, True, False),
}

# Arguments of Lightning's fit, validate, test and predict.
TRAINER_VERBS: dict[str, str] = {
    "test_dataloaders": "use dataloaders=",
    "train_dataloader": "use train_dataloaders=",
    "weights_only": "remove it: a checkpoint contains no code. For weights only: fit(..., ckpt_path=..., restore={'model'})",
}

# Arguments of Lightning's load_from_checkpoint.
LOAD_FROM_CHECKPOINT: dict[str, str] = {
    "hparams_file": "pass the arguments themselves: Net.load_from_checkpoint(path, **yaml.safe_load(open(file)))",
    "weights_only": "remove it: a checkpoint contains no code",
}

_BLOCKS = "use wrap=...: a class, its name, a number of parameters, or a function (name, module) -> bool"
_CHECKPOINTING = "pass it to the Trainer: activation_checkpointing=..."
_IGNORED = "use ignored_modules=..."
_CONTEXT = (
    "it is not implemented: torch's context parallelism has no rule for the attention kernels of the CPU, only for those of a "
    "GPU. For long sequences use tensor_parallel=... with SequenceParallel, and Trainer(activation_checkpointing=True)"
)
_PIPELINE = (
    "it is not implemented: one call of torch's pipeline schedules runs the forward and the backward of a whole accumulation "
    "window, so that there would be no hooks, weights and missing losses of micro-batches. Use tensor_parallel=..., or shards"
)
_ONE_CHECKPOINT = "remove it: a checkpoint is the same for every strategy, and each rank writes a part of it"
_PREFETCHED = "remove it: FSDP2 gathers the next parameters while it computes"

# Arguments of Lightning's strategies FSDP and ModelParallel, of torch's FSDP, and of Accelerate's plugin for FSDP.
SHARDING: dict[str, str] = {
    "accelerator": "pass it to the Trainer: accelerator=...",
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_policy": _CHECKPOINTING,
    "auto_wrap_policy": _BLOCKS,
    "backward_prefetch": _PREFETCHED,
    "checkpoint_io": "remove it: ModelCheckpoint writes folders of safetensors",
    "cluster_environment": "remove it: the launcher is recognized",
    **dict.fromkeys(("context_parallel", "context_parallel_size", "cp_size"), _CONTEXT),
    "cpu_offload": "use offload_params='cpu'",
    "cpu_ram_efficient_loading": "remove it: each process loads the model that the script creates",
    "data_parallel_size": "remove it: all processes that replicas= and tensor_parallel= leave hold shards",
    "device_id": "use device=...",
    "device_mesh": "use replicas=..., the first of its two sizes",
    "dp_mesh_dims": "use replicas=... and tensor_parallel=...",
    "forward_prefetch": _PREFETCHED,
    "fsdp_version": "remove it: it is always FSDP2",
    "ignored_parameters": _IGNORED,
    "ignored_params": _IGNORED,
    "ignored_states": _IGNORED,
    "limit_all_gathers": "remove it: FSDP2 always limits them",
    "mesh": "use replicas=... and tensor_parallel=...",
    "min_num_params": "use wrap=...",
    "mixed_precision_policy": "use mixed_precision=...",
    "mp_policy": "use mixed_precision=...",
    "offload_policy": "use offload_params='cpu'",
    "parallel_devices": "pass them to the Trainer: devices=...",
    "parallelize_fn": "use tensor_parallel=...",
    "param_init_fn": "remove it, and initialize the module where it is created: each rank would initialize its own shard",
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_parallel_size", "pp_size"), _PIPELINE),
    "precision_plugin": "use precision=...",
    "process_group": "use replicas=...: the groups are made from it",
    "save_distributed_checkpoint": _ONE_CHECKPOINT,
    "shard_placement_fn": "remove it: parameters are sharded in their first dimension",
    "sharding_strategy": "use reshard_after_forward=False for 'SHARD_GRAD_OP', and replicas=..., the number of nodes, for "
    "'HYBRID_SHARD'; remove it for 'FULL_SHARD'; instead of 'NO_SHARD' use strategy='ddp'",
    "state_dict_type": _ONE_CHECKPOINT,
    "sync_module_states": "remove it: the values of rank 0 are always sent to all ranks",
    "tensor_parallel_size": "use tensor_parallel=...",
    "transformer_cls_names_to_wrap": _BLOCKS,
    "use_orig_params": "remove it: FSDP2 always keeps the parameters of the module",
}

# Names of Lightning's precisions.
PRECISION: dict[str, str] = dict.fromkeys(
    ("transformer-engine", "transformer-engine-float16"),
    "use precision='fp8-mixed', which computes large linear layers in float8 with torchao; or 'bf16-mixed'",
)
