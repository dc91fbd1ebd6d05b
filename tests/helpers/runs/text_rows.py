"""Rows of token ids, a tokenizer and small models of transformers: `from helpers.runs.text_rows import TextModule, …`.

The tokenizer is trained on source text of the standard library, and the models are made from a configuration.
"""

from __future__ import annotations

import ast
import inspect
import random
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from trainkit import TrainModule

__all__ = ["VOCABULARY", "TextModule", "causal_model", "classifier", "lines", "random_rows", "tokenizer", "tokens_loss"]

VOCABULARY = 300
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 64}
_CAUSAL: dict[str, Any] = {
    "gpt2": lambda: (GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**_SIZES, **_HEADS, num_key_value_heads=2)),
    "mistral": lambda: (MistralForCausalLM, MistralConfig(**_SIZES, **_HEADS, num_key_value_heads=1, sliding_window=4)),
}


@cache
def lines() -> list[str]:
    """Lines of source text, each with at least two words."""
    return [line.strip() for line in inspect.getsource(ast).splitlines() if len(line.split()) > 1]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a padding token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        lines(), trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", model_input_names=["input_ids", "attention_mask"]
    )


def random_rows(count: int, longest: int = 14, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of random token ids, of 2 to `longest` tokens."""
    drawn = random.Random(seed)
    return [
        {"input_ids": [drawn.randrange(2, VOCABULARY) for _ in range(drawn.randint(2, longest))], "number": number}
        for number in range(count)
    ]


def causal_model(kind: str = "llama", attention: str = "sdpa", seed: int = 0, **changes: Any) -> Any:
    """A causal model whose attention is not close to uniform, so that a wrong mask shows in the loss.

    It has no dropout unless `changes` set it.
    """
    torch.manual_seed(seed)
    model_class, config = _CAUSAL[kind]()
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    for name, value in {"initializer_range": 0.2, "attn_implementation": attention, **undropped, **changes}.items():
        setattr(config, name, value)
    return model_class(config)


def classifier(dropout: float = 0.1) -> Any:
    """A model that classifies sequences in three classes."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**_SIZES, **_HEADS, **rates, num_labels=3))


def tokens_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of the labels other than -100, each predicted at the token before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


class TextModule(TrainModule):
    """A model of transformers in a module, which records what it trains and evaluates on.

    Attributes:
        seen: The `input_ids` of each training batch, as lists.
        losses: Its loss.
        evaluated: The `input_ids` of each evaluation batch, with the index of the loader.
    """

    def __init__(self, model: Any, name: str = "model") -> None:
        super().__init__()
        setattr(self, name, model)
        self._name = name
        self.seen: list[Any] = []
        self.losses: list[float] = []
        self.evaluated: list[tuple[int, Any]] = []
        self.keys: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = getattr(self, self._name)(**batch).loss
        self.keys |= set(batch)
        self.seen.append(batch["input_ids"].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append((dataloader_idx, batch["input_ids"].tolist()))
        self.log(f"loss_{dataloader_idx}", getattr(self, self._name)(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
