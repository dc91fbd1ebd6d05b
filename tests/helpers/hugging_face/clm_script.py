"""A script in the shape of transformers' `run_clm.py`, whose Trainer is that of the package in `TRAINER_OF`.

It trains a tiny Llama on bytes of the standard library. The last line of the main process is what it has computed, as JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
from itertools import pairwise
from typing import Any

from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

if os.environ["TRAINER_OF"] == "transformers":
    from transformers import Trainer, TrainingArguments
else:
    from trainkit.integrations.transformers import Trainer, TrainingArguments

BLOCK = 32


def group_texts(text: bytes) -> list[dict[str, list[int]]]:
    cuts = range(0, len(text) + 1, BLOCK)
    return [{"input_ids": list(text[a:b]), "labels": list(text[a:b])} for a, b in pairwise(cuts)]


def compute_metrics(found: Any) -> dict[str, float]:
    labels, predictions = found.label_ids[:, 1:].reshape(-1), found.predictions[:, :-1].reshape(-1)
    return {"accuracy": float((labels == predictions).mean())}


def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def main() -> None:
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    text = inspect.getsource(argparse).encode("ascii", "ignore")
    train, val = group_texts(text[: BLOCK * 64]), group_texts(text[BLOCK * 64 : BLOCK * 81])
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes))
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=val,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-generation")
    if trainer.is_world_process_zero():
        print(json.dumps({"eval": metrics, "history": trainer.state.log_history, "epoch": trainer.state.epoch}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
