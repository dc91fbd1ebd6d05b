"""Models and data of `transformers` in trainkit's `Trainer`. Needs `pip install 'trainkit-torch[transformers]'`.

The `Trainer` and its arguments, which few programs need, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.integrations.transformers.transformers_data import TransformersData
from trainkit.integrations.transformers.transformers_module import TransformersModule
from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.integrations.transformers.hf_trainer import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainingArguments,
    )

__all__ = [
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "TransformersData",
    "TransformersModule",
]

_FILES = {
    "Seq2SeqTrainer": "hf_trainer",
    "Seq2SeqTrainingArguments": "hf_trainer",
    "Trainer": "hf_trainer",
    "TrainingArguments": "hf_trainer",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
