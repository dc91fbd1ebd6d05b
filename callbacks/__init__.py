"""Callbacks for `Trainer(callbacks=[EarlyStopping("val_loss")])`. Each file is loaded on first use.

They import no strategy. All of them work with every strategy, except where a docstring says so.
"""

from __future__ import annotations

if __name__ != "trainkit.callbacks":
    raise ImportError(
        f"expected this folder to be imported as the package 'trainkit.callbacks', got the name {__name__!r}. "
        "Fix: from trainkit.callbacks import EarlyStopping"
    )

from typing import TYPE_CHECKING

from trainkit.lazy import lazily

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.callbacks.early_stopping import EarlyStopping
    from trainkit.callbacks.exponential_moving_average import EMAWeightAveraging, ExponentialMovingAverage
    from trainkit.callbacks.gradient_clipping import GradientClipping
    from trainkit.callbacks.lambda_callback import LambdaCallback
    from trainkit.callbacks.learning_rate_monitor import LearningRateMonitor
    from trainkit.callbacks.memory_monitor import MemoryMonitor
    from trainkit.callbacks.model_checkpoint import ModelCheckpoint
    from trainkit.callbacks.model_summary import ModelSummary
    from trainkit.callbacks.nonfinite_guard import NonFiniteGuard
    from trainkit.callbacks.prediction_writer import PredictionWriter
    from trainkit.callbacks.progress_bar import TQDMProgressBar
    from trainkit.callbacks.recompile_monitor import RecompileMonitor
    from trainkit.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from trainkit.callbacks.throughput_monitor import ThroughputMonitor
    from trainkit.callbacks.timer import Timer
    from trainkit.callbacks.weight_averaging import WeightAveraging

__all__ = [
    "Callback",
    "EMAWeightAveraging",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "GradientClipping",
    "LambdaCallback",
    "LearningRateMonitor",
    "MemoryMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "NonFiniteGuard",
    "PredictionWriter",
    "RecompileMonitor",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

_FILES = {
    "Callback": ".callback",
    "EMAWeightAveraging": "exponential_moving_average",
    "EarlyStopping": "early_stopping",
    "ExponentialMovingAverage": "exponential_moving_average",
    "GradientClipping": "gradient_clipping",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "learning_rate_monitor",
    "MemoryMonitor": "memory_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "NonFiniteGuard": "nonfinite_guard",
    "PredictionWriter": "prediction_writer",
    "RecompileMonitor": "recompile_monitor",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "TQDMProgressBar": "progress_bar",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
