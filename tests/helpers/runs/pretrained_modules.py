"""Modules that train a small model of `transformers`, whose checkpoints `from_pretrained` opens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from helpers.zero.zero_cases import strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Callback, Trainer, TrainModule

__all__ = ["Adapted", "Classifier", "Headed", "Language", "SaveAtEnd", "Undeclared", "batches", "bert", "fit", "gpt2", "lora"]

TOKENS, CLASSES = 50, 3


def bert() -> Any:
    """A BERT for classification."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=16, num_labels=CLASSES))


def gpt2(**options: Any) -> Any:
    """A GPT-2, whose output layer is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": TOKENS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, **options))


def lora(base: Any, **options: Any) -> Any:
    """A model with LoRA adapters, and its other parameters frozen."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
        torch.manual_seed(3)
        return get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["query", "value"], **options}))


class Classifier(TrainModule):
    """Trains a BERT."""

    pretrained_attribute: str | None = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = bert()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Undeclared(Classifier):
    """Does not say that `self.model` is to be opened by `from_pretrained`."""

    pretrained_attribute = None


class Headed(Classifier):
    """Has a parameter and a buffer next to the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.head = nn.Linear(CLASSES, 1)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        result = self.model(**batch)
        loss: Tensor = result.loss + self.head(result.logits).square().mean()
        return loss


class Language(Classifier):
    """Trains a GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        return loss


class Adapted(Classifier):
    """Trains adapters of a BERT that is in a folder, and a classifier."""

    def __init__(self, base: str = "base") -> None:
        super().__init__()
        from transformers import BertForSequenceClassification

        self.model = lora(BertForSequenceClassification.from_pretrained(base), modules_to_save=["classifier"]).train()


class SaveAtEnd(Callback):
    """Saves a checkpoint before ZeRO frees the state of the optimizer."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder)


def batches() -> DataLoader[Any]:
    """Twelve batches of two samples."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TOKENS, (24, 6), generator=generator)
    labels = torch.randint(CLASSES, (24,), generator=generator)
    return DataLoader([{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)], batch_size=2)  # type: ignore[arg-type]


def fit(
    make: type[Classifier], kind: str, steps: int, folder: str | Path, ckpt_path: str | Path | None = None, **options: Any
) -> dict[str, Tensor]:
    """Train up to a number of optimizer steps, and save a checkpoint; returns the weights of the module on one process."""
    module = make()
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    chosen = strategy(kind, wrap=None) if kind == "fsdp" else strategy(kind)
    trainer = Trainer(
        strategy=chosen,
        max_steps=steps,
        max_epochs=-1,
        seed=1,
        accelerator="cpu",
        callbacks=[SaveAtEnd(folder)],
        **quiet,
        **options,
    )
    trainer.fit(module, batches(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    if kind != "auto":
        return {}
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
