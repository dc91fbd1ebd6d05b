"""Adapt a sequence-to-sequence model with LoRA under ZeRO-3, with parameters and optimizer state in host memory.

    python examples/seq2seq_lora.py
    trainkit launch --nproc-per-node 2 examples/seq2seq_lora.py
    python examples/seq2seq_lora.py --base FOLDER            # a model of your own, with the tokens of ByT5

A small T5 learns to predict a function's name from the first line of its docstring, byte by byte. First, all parameters are
trained on the standard library's modules that are single files. Then they are frozen, and an adapter (PEFT) is trained on the
modules that are packages. The adapter is saved as a folder that `PeftModel.from_pretrained` opens. The perplexity falls;
correct names need a larger model.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, T5Config

from trainkit import Trainer, TrainModule, seed_everything
from trainkit.callbacks import MemoryMonitor

Pair = tuple[str, str]  # the first line of a docstring, the function's name
PAD, END, FIRST = 0, 1, 3  # the tokens of ByT5: a byte has the token of its value + 3
LONGEST = 24  # tokens of a name
ELSEWHERE = {"idlelib", "lib2to3", "site-packages", "test", "tests"}


def pairs(pattern: str, count: int) -> tuple[list[Pair], list[Pair]]:
    """Functions of the standard library with docstrings: `count` for training, and a quarter as many others for validation."""
    library, found = Path(sysconfig.get_path("stdlib")), set()
    for path in library.glob(pattern):
        if not ELSEWHERE.intersection(path.relative_to(library).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
                    found.add((text.splitlines()[0][:64], node.name))
    chosen = random.Random(0).sample(sorted(found), min(count + count // 4, len(found)))
    return chosen[len(chosen) // 5 :], chosen[: len(chosen) // 5]


def encode(texts: Sequence[str]) -> Tensor:
    rows = [torch.tensor([byte + FIRST for byte in text.encode()] + [END]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def decode(tokens: Tensor) -> list[str]:
    return [bytes(t - FIRST for t in row if FIRST <= t < FIRST + 256).decode("utf-8", "replace") for row in tokens.tolist()]


def collate(batch: list[Pair]) -> dict[str, Tensor]:
    texts, names = encode([text for text, _ in batch]), encode([name for _, name in batch])[:, :LONGEST]
    return {"input_ids": texts, "attention_mask": (texts != PAD).long(), "labels": names.masked_fill(names == PAD, -100)}


class Namer(TrainModule):
    """The model. It is created in `configure_model`, so that under ZeRO-3 no process ever holds all of it.

    Args:
        base: the folder of a model, which is frozen and gets an adapter; None for a new model, which is trained as a whole.
        args: the command-line arguments.
    """

    def __init__(self, base: str | None, args: argparse.Namespace) -> None:
        super().__init__()
        self.base, self.args = base, args
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:  # created by an earlier call
            return
        width = self.args.width
        if self.base is None:
            sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4, "num_layers": 2}
            tokens = {"vocab_size": FIRST + 256, "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
            self.model = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, **tokens, dropout_rate=0.0))
            return
        base = AutoModelForSeq2SeqLM.from_pretrained(self.base)
        config = LoraConfig(task_type="SEQ_2_SEQ_LM", r=self.args.rank, target_modules=["q", "k", "v", "o"])
        self.model = get_peft_model(base, config)

    def batch_weight(self, batch: dict[str, Tensor]) -> float:
        return float((batch["labels"] != -100).sum())  # the loss is the mean over these tokens

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=int(self.batch_weight(batch)))

    def on_validation_end(self) -> None:
        perplexity = math.exp(self.trainer.callback_metrics["val_loss"])
        self.print(f"epoch {self.current_epoch}: perplexity {perplexity:.2f}")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[str]:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        return decode(self.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.args.learning_rate)


def main(argv: Sequence[str] | None = None) -> tuple[float, float, list[str]]:
    """Train a base model unless one is given, adapt it, and generate names.

    Returns:
        The perplexity of the validation set before and after training the adapter, and the names generated for it.
    """
    parser = argparse.ArgumentParser(description="LoRA under ZeRO-3 with offload: name a function by its docstring.")
    parser.add_argument("--max-epochs", type=int, default=4, help="epochs for the adapter")
    parser.add_argument("--base-epochs", type=int, default=8)
    parser.add_argument("--base", help="a folder with a model to adapt, instead of one that is trained first")
    parser.add_argument("--pairs", type=int, default=1000, help="maximum number for training; a quarter as many for validation")
    parser.add_argument("--batch-size", type=int, default=16, help="batch size of each process")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="auto", help="cpu, gpu")
    parser.add_argument("--strategy", default="zero3_offload", help="or zero2, ddp, auto, ...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/seq2seq_lora", help="where the models, logs and checkpoints go")
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    options: dict[str, Any] = {
        "strategy": args.strategy,
        "accelerator": args.device,
        "callbacks": [MemoryMonitor()],
        "gradient_clip_val": 1.0,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": args.root,
    }

    def load(data: list[Pair], size: int = 4 * args.batch_size, **options: Any) -> DataLoader[Pair]:
        return DataLoader(data, size, collate_fn=collate, **options)  # type: ignore[arg-type]  # pairs are a dataset

    base, adapter = args.base or f"{args.root}/base", f"{args.root}/adapter"
    if args.base is None:
        model, trainer = Namer(None, args), Trainer(max_epochs=args.base_epochs, **options)
        train, val = pairs("*.py", args.pairs)
        trainer.fit(model, load(train, args.batch_size, shuffle=True), load(val))
        trainer.accelerator.save_model(model.model, base)

    model, trainer = Namer(base, args), Trainer(max_epochs=args.max_epochs, **options)
    train, val = pairs("*/**/*.py", args.pairs)
    [first] = trainer.validate(model, load(val), verbose=False)
    trainer.fit(model, load(train, args.batch_size, shuffle=True), load(val))
    before, after = (math.exp(loss) for loss in (first["val_loss"], trainer.callback_metrics["val_loss"]))
    trainer.accelerator.save_model(model.model, adapter)

    said = [name for batch in trainer.predict(model, load(val)) or [] for name in batch]
    right = sum(name == guess for (_, name), guess in zip(val, said, strict=True)) / len(val)
    # for each letter of all names: whether the generated name has it at the same position
    letters = [
        letter == guess[at : at + 1] for (_, name), guess in zip(val, said, strict=True) for at, letter in enumerate(name)
    ]
    trainer.print(
        *(f"{text!r}: {guess}, for {name}" for (text, name), guess in list(zip(val, said, strict=True))[:5]), sep="\n"
    )
    trainer.print(
        f"perplexity {before:.2f} before, {after:.2f} after; of {len(val)} generated names {right:.1%} are right, and of their "
        f"letters {sum(letters) / len(letters):.1%}. The base is in {base}, the adapter in {adapter}"
    )
    return before, after, said


if __name__ == "__main__":
    main()
