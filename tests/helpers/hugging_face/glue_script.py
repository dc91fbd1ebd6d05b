"""A script in the shape of transformers' `run_glue.py`, whose Trainer is that of the package in `TRAINER_OF`.

The data is made here. The last line of the main process is what it has computed, as JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

if os.environ["TRAINER_OF"] == "transformers":
    from transformers import Trainer, TrainingArguments
else:
    from trainkit.integrations.transformers import Trainer, TrainingArguments


@dataclass
class DataTrainingArguments:
    """The arguments of the script."""

    max_seq_length: int = field(default=12, metadata={"help": "Length of a row, padded."})
    max_train_samples: int = field(default=70, metadata={"help": "Number of training rows."})
    patience: int | None = field(default=None, metadata={"help": "Stop after this number of evaluations."})


def make_rows(count: int, length: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        size = int(torch.randint(4, length, (), generator=generator))
        tokens = torch.randint(1, 50, (size,), generator=generator).tolist()
        padding = [0] * (length - size)
        rows.append({"input_ids": tokens + padding, "attention_mask": [1] * size + padding, "label": sum(tokens) % 3})
    return rows


def compute_metrics(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main() -> None:
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    train = make_rows(data_args.max_train_samples, data_args.max_seq_length, seed=0)
    val = make_rows(30, data_args.max_seq_length, seed=1)
    test = [{key: value for key, value in row.items() if key != "label"} for row in make_rows(11, data_args.max_seq_length, 2)]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **rates))
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=val if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        data_collator=default_data_collator,
        callbacks=None if data_args.patience is None else [EarlyStoppingCallback(data_args.patience)],
    )
    found: dict[str, Any] = {"resumed": last_checkpoint}
    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        found["train"] = [train_result.global_step, train_result.training_loss]
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=val)
        metrics["eval_samples"] = len(val)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        found["eval"] = metrics
    if training_args.do_predict:
        predictions = trainer.predict(test, metric_key_prefix="predict").predictions
        found["predictions"] = predictions.tolist()
    if training_args.push_to_hub:
        trainer.push_to_hub(finetuned_from="a tiny model", tasks="text-classification")
    else:
        trainer.create_model_card(finetuned_from="a tiny model", tasks="text-classification")
    state = trainer.state
    found["history"] = state.log_history
    found["best"] = [state.best_metric, state.best_global_step, state.best_model_checkpoint]
    found["files"] = sorted(os.listdir(training_args.output_dir)) if trainer.is_world_process_zero() else []
    with torch.no_grad():
        reloaded = BertForSequenceClassification.from_pretrained(training_args.output_dir)
        found["reloaded"] = float(sum(p.double().sum() for p in reloaded.parameters()))
    if trainer.is_world_process_zero():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
