"""Progress bars: `ProgressBar` is the base class; `TQDMProgressBar` is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.callbacks.progress.progress_bar import ProgressBar
    from trainkit.callbacks.progress.rich_progress import RichProgressBar, RichProgressBarTheme
    from trainkit.callbacks.progress.tqdm_progress import TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "RichProgressBarTheme", "TQDMProgressBar"]

_FILES = {
    "ProgressBar": "progress_bar",
    "RichProgressBar": "rich_progress",
    "RichProgressBarTheme": "rich_progress",
    "TQDMProgressBar": "tqdm_progress",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
