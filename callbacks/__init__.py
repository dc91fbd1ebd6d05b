"""Callbacks for `Trainer(callbacks=[EarlyStopping("val_loss")])`. Each file is loaded on first use.

They import no strategy. All of them work with every strategy, except where a docstring says so.
"""

from __future__ import annotations

if __name__ != "trainkit.callbacks":
    raise ImportError(
        f"expected this folder to be imported as the package 'trainkit.callbacks', got the name {__name__!r}. "
        "Fix: from trainkit.callbacks import EarlyStopping"
    )

import re
from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.callbacks.backbone_finetuning import BackboneFinetuning
    from trainkit.callbacks.base_finetuning import BaseFinetuning
    from trainkit.callbacks.base_prediction_writer import BasePredictionWriter
    from trainkit.callbacks.batch_size_finder import BatchSizeFinder
    from trainkit.callbacks.checkpoint import Checkpoint
    from trainkit.callbacks.device_stats_monitor import DeviceStatsMonitor
    from trainkit.callbacks.early_stopping import EarlyStopping
    from trainkit.callbacks.exponential_moving_average import EMAWeightAveraging, ExponentialMovingAverage
    from trainkit.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from trainkit.callbacks.gradient_clipping import GradientClipping
    from trainkit.callbacks.lambda_callback import LambdaCallback
    from trainkit.callbacks.layer_freezing import LayerFreezing
    from trainkit.callbacks.learning_rate_finder import LearningRateFinder
    from trainkit.callbacks.learning_rate_monitor import LearningRateMonitor
    from trainkit.callbacks.memory_monitor import MemoryMonitor
    from trainkit.callbacks.model_checkpoint import ModelCheckpoint
    from trainkit.callbacks.model_pruning import ModelPruning
    from trainkit.callbacks.model_summary import ModelSummary
    from trainkit.callbacks.nonfinite_guard import NonFiniteGuard
    from trainkit.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from trainkit.callbacks.prediction_writer import PredictionWriter
    from trainkit.callbacks.progress.progress_bar import ProgressBar
    from trainkit.callbacks.progress.rich_progress import RichProgressBar
    from trainkit.callbacks.progress.tqdm_progress import TQDMProgressBar
    from trainkit.callbacks.recompile_monitor import RecompileMonitor
    from trainkit.callbacks.rich_model_summary import RichModelSummary
    from trainkit.callbacks.spike_detection import SpikeDetection
    from trainkit.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from trainkit.callbacks.throughput_monitor import ThroughputMonitor
    from trainkit.callbacks.timer import Timer
    from trainkit.callbacks.weight_averaging import WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "GradientAccumulationScheduler",
    "GradientClipping",
    "LambdaCallback",
    "LayerFreezing",
    "LearningRateFinder",
    "LearningRateMonitor",
    "MemoryMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "NonFiniteGuard",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RecompileMonitor",
    "RichModelSummary",
    "RichProgressBar",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

_FILES = {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in __all__} | {
    "Callback": ".callback",
    "EMAWeightAveraging": "exponential_moving_average",
    "NonFiniteGuard": "nonfinite_guard",
    "ProgressBar": "progress.progress_bar",
    "RichProgressBar": "progress.rich_progress",
    "TQDMProgressBar": "progress.tqdm_progress",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
