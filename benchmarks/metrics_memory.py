"""The memory of `compute_metrics`: does it grow with the number of rows?

    python benchmarks/metrics_memory.py [--rows 200 800] [--json FILE]

A small causal model is evaluated with a metric over all logits: 64 tokens of 8,000 numbers, 2 MB a row. Each run has a
process of its own, and the figure is the peak of its private memory (RssAnon) above that before the evaluation, in MB. What is
read from files through memory maps is the kernel's to drop, and not in it. Nor is what the C library keeps of freed blocks,
0 to 160 MB by chance: large ones are returned at once (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from typing import Any

from report import Column, Report, json_option, progress, version
from resident import Peak, resident

TOKENS, VOCABULARY, BATCH = 64, 8000, 8
GROWTH = 30.0  # MB that trainkit may need more for the largest number of rows than for the smallest.


def make_rows(count: int) -> list[dict[str, list[int]]]:
    ids = [[(row * 31 + place * 7) % VOCABULARY for place in range(TOKENS)] for row in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def make_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=TOKENS))


def accuracy(prediction: Any) -> dict[str, float]:
    """Row by row, as the logits of all rows may not fit."""
    right = sum(
        int((logits[:-1].argmax(-1) == labels[1:]).sum())
        for logits, labels in zip(prediction.predictions, prediction.label_ids, strict=True)
    )
    return {"accuracy": right / prediction.label_ids[:, 1:].size}


def hugging_face(rows: list[Any]) -> float:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("out", per_device_eval_batch_size=BATCH, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(make_model(), arguments, compute_metrics=accuracy)
    return peak(lambda: trainer.evaluate(rows))


def with_trainkit(rows: list[Any]) -> float:
    from trainkit import Trainer
    from trainkit.integrations.transformers import TransformersData, TransformersModule

    module = TransformersModule(make_model(), compute_metrics=accuracy)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    return peak(lambda: trainer.validate(module, TransformersData(val=rows, eval_batch_size=BATCH)))


def peak(evaluate: Any) -> float:
    before = resident("RssAnon")
    with Peak() as most:
        evaluate()
    return most.found - before


CONTENDERS = {"Hugging Face": hugging_face, "trainkit": with_trainkit}


def main() -> int:
    """Measure each contender with each number of rows, and return 1 if trainkit exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[200, 800], help="numbers of rows, the smallest first")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    json_option(parser)
    arguments = parser.parse_args()
    if arguments.child:
        warnings.simplefilter("ignore")
        print(json.dumps(CONTENDERS[arguments.child](make_rows(arguments.rows[0]))))
        return 0
    report = Report(transformers=version("transformers"))
    columns = [Column(f"{rows} rows, MB", 0) for rows in arguments.rows]
    table = report.table("peak of private memory above that before the evaluation", *columns, Column("growth, MB", 0))
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    for name in CONTENDERS:
        found = []
        for rows in arguments.rows:
            progress(f"{name}, {rows} rows")
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, os.path.abspath(__file__), "--child", name, "--rows", str(rows)]
                printed = subprocess.check_output(command, text=True, cwd=folder, env=environment)
                found.append(float(printed.splitlines()[-1]))
        growth = found[-1] - found[0]
        table.add(name, *found, growth, judged=growth, most=GROWTH if name == "trainkit" else None)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
