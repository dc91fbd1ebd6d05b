"""A tiny classifier with rows of one length, and `TrainingArguments` of a short run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

__all__ = ["arguments", "model", "rows"]


def rows(count: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 30, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 2} for row in tokens]


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=8, **sizes, **rates))


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings = {"use_cpu": True, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": "none"}
    settings |= {"logging_steps": 1, "max_steps": 2, "train_sampling_strategy": "sequential"}
    return TrainingArguments(output_dir=str(folder), **{**settings, **options})
