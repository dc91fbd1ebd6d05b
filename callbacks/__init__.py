"""Callbacks for `Trainer(callbacks=[EarlyStopping("val_loss")])`. Each file is loaded on first use.

They import no strategy, so all of them work with every strategy.
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
    from trainkit.callbacks.base_prediction_writer import BasePredictionWriter
    from trainkit.callbacks.checkpoint import Checkpoint
    from trainkit.callbacks.early_stopping import EarlyStopping
    from trainkit.callbacks.gradient_clipping import GradientClipping
    from trainkit.callbacks.lambda_callback import LambdaCallback
    from trainkit.callbacks.learning_rate_monitor import LearningRateMonitor
    from trainkit.callbacks.memory_monitor import MemoryMonitor
    from trainkit.callbacks.model_checkpoint import ModelCheckpoint
    from trainkit.callbacks.model_summary import ModelSummary
    from trainkit.callbacks.nonfinite_guard import NonFiniteGuard
    from trainkit.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from trainkit.callbacks.prediction_writer import PredictionWriter
    from trainkit.callbacks.progress.progress_bar import ProgressBar
    from trainkit.callbacks.progress.rich_progress import RichProgressBar
    from trainkit.callbacks.progress.tqdm_progress import TQDMProgressBar
    from trainkit.callbacks.recompile_monitor import RecompileMonitor
    from trainkit.callbacks.rich_model_summary import RichModelSummary
    from trainkit.callbacks.throughput_monitor import ThroughputMonitor
    from trainkit.callbacks.timer import Timer

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "GradientClipping",
    "LambdaCallback",
    "LearningRateMonitor",
    "MemoryMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "NonFiniteGuard",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RecompileMonitor",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
]

_FILES = {
    "BasePredictionWriter": "base_prediction_writer",
    "Callback": ".callback",
    "Checkpoint": "checkpoint",
    "EarlyStopping": "early_stopping",
    "GradientClipping": "gradient_clipping",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "learning_rate_monitor",
    "MemoryMonitor": "memory_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "NonFiniteGuard": "nonfinite_guard",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PredictionWriter": "prediction_writer",
    "RecompileMonitor": "recompile_monitor",
    "ProgressBar": "progress.progress_bar",
    "RichModelSummary": "rich_model_summary",
    "RichProgressBar": "progress.rich_progress",
    "TQDMProgressBar": "progress.tqdm_progress",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
