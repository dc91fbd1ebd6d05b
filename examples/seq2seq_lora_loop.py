"""The training of `seq2seq_lora.py` with your own training loop, configured by a file.

    trainkit launch --config_file examples/zero3_offload.yaml examples/seq2seq_lora_loop.py
    python examples/seq2seq_lora_loop.py                     # one process, the whole model in memory

The script does not mention ZeRO. The file says that parameters and optimizer state are sharded over the processes and
offloaded to host memory, and at which norm gradients are clipped. A script for Hugging Face Accelerate looks the same, except
for its imports.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from seq2seq_lora import END, FIRST, LONGEST, PAD, Pair, collate, decode, pairs  # type: ignore[import-not-found]
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, T5Config, get_linear_schedule_with_warmup

from trainkit import Accelerator, set_seed

Loader = DataLoader[Pair]


def train(
    accelerator: Accelerator, model: Any, loaders: tuple[Loader, Loader], epochs: int, learning_rate: float
) -> tuple[Any, Any, list[float]]:
    """Train a model, and evaluate it before and after each epoch.

    Returns:
        The prepared model and validation loader, and the perplexities.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    steps = len(loaders[0]) * epochs  # the length before `prepare`: a prepared scheduler takes one step per process
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)
    model, train_loader, val_loader, optimizer, scheduler = accelerator.prepare(
        model, *loaders, optimizer, scheduler, batch_weight=lambda batch: float((batch["labels"] != -100).sum())
    )
    perplexities = [evaluate(accelerator, model, val_loader)]
    for epoch in range(epochs):
        model.train()
        for batch in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=not accelerator.is_local_main_process):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        perplexities.append(evaluate(accelerator, model, val_loader))
        accelerator.print(f"epoch {epoch}: perplexity {perplexities[-1]:.2f}")
    return model, val_loader, perplexities


def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> float:
    """The perplexity of the names over all processes, counting each token once."""
    model.eval()
    losses, tokens = 0.0, 0.0
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        count = (batch["labels"] != -100).sum()
        gathered = accelerator.gather_for_metrics(torch.stack([loss * count, count])[None])
        losses, tokens = losses + float(gathered[:, 0].sum()), tokens + float(gathered[:, 1].sum())
    return math.exp(losses / tokens)


def generate(accelerator: Accelerator, model: Any, loader: Any) -> list[str]:
    """The names that the model generates, in the order of the pairs."""
    model.eval()
    bare: Any = accelerator.unwrap_model(model)
    said: list[str] = []
    plugin = accelerator.state.deepspeed_plugin
    divided = plugin is not None and plugin.zero_stage == 3
    for batch in loader:
        with torch.no_grad():
            tokens = bare.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=LONGEST,
                do_sample=False,
                synced_gpus=divided,  # all processes call the model until the last one has finished
            )
        tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=PAD)
        said += decode(accelerator.gather_for_metrics(tokens).cpu())
    return said


def main(argv: Sequence[str] | None = None) -> tuple[float, float, list[str]]:
    """Train a base model, adapt it with LoRA, and generate names.

    Returns:
        The perplexity of the validation set before and after training the adapter, and the names generated for it.
    """
    parser = argparse.ArgumentParser(description="LoRA in a loop of its own: name a function by its docstring.")
    parser.add_argument("--max-epochs", type=int, default=4, help="epochs for the adapter")
    parser.add_argument("--base-epochs", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=1000, help="maximum number for training; a quarter as many for validation")
    parser.add_argument("--batch-size", type=int, default=16, help="batch size of each process")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/seq2seq_lora_loop", help="where the models go")
    args = parser.parse_args(argv)

    set_seed(args.seed)
    accelerator = Accelerator(project_dir=args.root)
    accelerator.print(f"processes: {accelerator.num_processes}, {accelerator.strategy!r}")
    base_folder, adapter_folder = f"{args.root}/base", f"{args.root}/adapter"

    def load(pattern: str) -> tuple[Loader, Loader]:
        train_pairs, val_pairs = pairs(pattern, args.pairs)
        return (
            DataLoader(train_pairs, args.batch_size, shuffle=True, collate_fn=collate),
            DataLoader(val_pairs, 4 * args.batch_size, collate_fn=collate),
        )

    sizes = {"d_model": args.width, "d_kv": args.width // 4, "d_ff": 2 * args.width, "num_heads": 4, "num_layers": 2}
    tokens = {"vocab_size": FIRST + 256, "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, **tokens, dropout_rate=0.0))
    model, *_ = train(accelerator, model, load("*.py"), args.base_epochs, args.learning_rate)
    accelerator.save_model(model, base_folder)
    accelerator.wait_for_everyone()  # all processes read what the main process writes
    model = accelerator.free_memory(model)

    base = AutoModelForSeq2SeqLM.from_pretrained(base_folder)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_2_SEQ_LM", r=args.rank, target_modules=["q", "k", "v", "o"]))
    model, val_loader, found = train(accelerator, model, load("*/**/*.py"), args.max_epochs, args.learning_rate)
    said = generate(accelerator, model, val_loader)
    accelerator.wait_for_everyone()
    accelerator.save_model(model, adapter_folder)
    accelerator.print(
        f"perplexity {found[0]:.2f} before, {found[-1]:.2f} after; the base is in {base_folder}, the adapter in "
        f"{adapter_folder}"
    )
    return found[0], found[-1], said


if __name__ == "__main__":
    main()
