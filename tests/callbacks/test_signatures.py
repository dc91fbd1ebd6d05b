"""The arguments of callbacks and their defaults. Those that Lightning has too are the same as Lightning's."""

from __future__ import annotations

import inspect

import pytest

from trainkit import callbacks

SIGNATURES = {
    "BasePredictionWriter": "write_interval='batch'",
    "Checkpoint": "*args, **kwargs",
    "EarlyStopping": (
        "monitor, min_delta=0.0, patience=3, verbose=False, mode='min', strict=True, check_finite=True, "
        "stopping_threshold=None, divergence_threshold=None, check_on_train_epoch_end=None, log_rank_zero_only=False"
    ),
    "GradientClipping": "gradient_clip_val, gradient_clip_algorithm='norm', norm_type=2.0, log_norm=True",
    "LambdaCallback": "**hooks",
    "LearningRateMonitor": "logging_interval=None, log_momentum=False, log_weight_decay=False",
    "MemoryMonitor": "logging_interval=None, verbose=True",
    "ModelCheckpoint": (
        "dirpath=None, filename=None, monitor=None, verbose=False, save_last=None, save_top_k=1, save_on_exception=True, "
        "save_weights_only=False, mode='min', auto_insert_metric_name=True, every_n_train_steps=None, "
        "train_time_interval=None, every_n_epochs=None, save_on_train_epoch_end=None, enable_version_counter=True, "
        "keep_last=2, save=None"
    ),
    "ModelSummary": "max_depth=1",
    "NonFiniteGuard": "action='raise', check=('loss', 'grad'), warn_after=3, max_consecutive=50",
    "OnExceptionCheckpoint": "dirpath, filename='on_exception'",
    "PredictionWriter": "write_interval=None, output_dir=None, once=False",
    "ProgressBar": "",
    "RecompileMonitor": "warmup_steps=2, max_warnings=5",
    "RichModelSummary": "max_depth=1, header_style='bold magenta'",
    "RichProgressBar": "refresh_rate=10, leave=False, theme=None, console_kwargs=None",
    "TQDMProgressBar": "refresh_rate=1, process_position=0, leave=False",
    "ThroughputMonitor": (
        "batch_size_fn=None, length_fn=None, window_size=100, flops_per_batch=None, available_flops=None, measure_flops=False"
    ),
    "Timer": "duration=None, interval='step', verbose=True",
}


def test_every_callback_is_here() -> None:
    assert {"Callback", *SIGNATURES} == set(callbacks.__all__)


@pytest.mark.parametrize("name, expected", SIGNATURES.items())
def test_arguments(name: str, expected: str) -> None:
    signature = inspect.signature(getattr(callbacks, name))
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({expected})"
