"""The arguments of callbacks and their defaults. Those that Lightning has too are the same as Lightning's."""

from __future__ import annotations

import inspect
import re

import pytest

from trainkit import callbacks

SIGNATURES = {
    "BatchSizeFinder": (
        "mode='power', steps_per_trial=3, init_val=2, max_trials=25, batch_arg_name='batch_size', margin=0.05, max_val=8192"
    ),
    "DeviceStatsMonitor": "cpu_stats=None",
    "BackboneFinetuning": (
        "unfreeze_backbone_at_epoch=10, lambda_func=multiplicative, backbone_initial_ratio_lr=0.1, backbone_initial_lr=None, "
        "should_align=True, initial_denom_lr=10.0, train_bn=True, verbose=False, rounding=12"
    ),
    "BaseFinetuning": "",
    "EMAWeightAveraging": (
        "device=None, use_buffers=True, decay=0.999, update_every_n_steps=1, update_starting_at_step=None, "
        "update_starting_at_epoch=None, warmup=False"
    ),
    "BasePredictionWriter": "write_interval='batch'",
    "Checkpoint": "*args, **kwargs",
    "EarlyStopping": (
        "monitor, min_delta=0.0, patience=3, verbose=False, mode='min', strict=True, check_finite=True, "
        "stopping_threshold=None, divergence_threshold=None, check_on_train_epoch_end=None, log_rank_zero_only=False"
    ),
    "GradientAccumulationScheduler": "scheduling",
    "ExponentialMovingAverage": (
        "device=None, use_buffers=True, decay=0.999, update_every_n_steps=1, update_starting_at_step=None, "
        "update_starting_at_epoch=None, warmup=False"
    ),
    "GradientClipping": "gradient_clip_val, gradient_clip_algorithm=None, norm_type=2.0, log_norm=True",
    "LambdaCallback": "**hooks",
    "LearningRateFinder": (
        "min_lr=1e-08, max_lr=1, num_training_steps=100, mode='exponential', early_stop_threshold=4.0, update_attr=True, "
        "attr_name=''"
    ),
    "LayerFreezing": "schedule, interval='epoch'",
    "LearningRateMonitor": "logging_interval=None, log_momentum=False, log_weight_decay=False, log_key_prefix=None",
    "MemoryMonitor": "logging_interval=None, verbose=True",
    "ModelCheckpoint": (
        "dirpath=None, filename=None, monitor=None, verbose=False, save_last=None, save_top_k=1, save_on_exception=True, "
        "save_weights_only=False, mode='min', auto_insert_metric_name=True, every_n_train_steps=None, "
        "train_time_interval=None, every_n_epochs=None, save_on_train_epoch_end=None, enable_version_counter=True, "
        "keep_last=2, save=None, checksum=None, also=None"
    ),
    "ModelPruning": (
        "pruning_fn, parameters_to_prune=(), parameter_names=None, use_global_unstructured=True, amount=0.5, "
        "apply_pruning=True, make_pruning_permanent=True, use_lottery_ticket_hypothesis=True, resample_parameters=False, "
        "pruning_dim=None, pruning_norm=None, verbose=0, prune_on_train_epoch_end=True"
    ),
    "ModelSummary": "max_depth=1, **summarize_kwargs",
    "NonFiniteGuard": "action='raise', check=('loss', 'grad'), warn_after=3, max_consecutive=50",
    "OnExceptionCheckpoint": "dirpath, filename='on_exception'",
    "PredictionWriter": "write_interval=None, output_dir=None, once=False",
    "ProgressBar": "",
    "RecompileMonitor": "warmup_steps=2, max_warnings=5",
    "SpikeDetection": ("mode='min', window=10, warmup=1, atol=None, rtol=2.0, exclude_batches_path=None, finite_only=True"),
    "StochasticWeightAveraging": (
        "swa_lrs, swa_epoch_start=0.8, annealing_epochs=10, annealing_strategy='cos', avg_fn=None, device='cpu'"
    ),
    "RichModelSummary": "max_depth=1, header_style='bold magenta'",
    "RichProgressBar": "refresh_rate=10, leave=False, theme=None, console_kwargs=None",
    "TQDMProgressBar": "refresh_rate=1, process_position=0, leave=False",
    "ThroughputMonitor": (
        "batch_size_fn=None, length_fn=None, window_size=100, flops_per_batch=None, available_flops=None, measure_flops=False"
    ),
    "Timer": "duration=None, interval='step', verbose=True",
    "WeightAveraging": "device=None, use_buffers=True, avg_fn=None, multi_avg_fn=None",
}


def test_every_callback_is_here() -> None:
    assert {"Callback", *SIGNATURES} == set(callbacks.__all__)


@pytest.mark.parametrize("name, expected", SIGNATURES.items())
def test_arguments(name: str, expected: str) -> None:
    signature = inspect.signature(getattr(callbacks, name))
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    shown = re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.Signature(plain)))
    assert shown == f"({expected})"
