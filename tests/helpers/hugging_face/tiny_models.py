"""Tiny models of transformers from a configuration, ragged batches for them, and the same training by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

__all__ = ["IGNORED", "KINDS", "Rows", "collate", "evaluate_by_hand", "loader", "make_model", "rows_for", "train_by_hand"]

KINDS = ("bert", "gpt2", "llama", "t5")
IGNORED = -100
VOCABULARY = 37
CLASSES = 3
Rows = list[dict[str, Tensor]]


def make_model(kind: str, dropout: float = 0.0, **options: Any) -> Any:
    """A model of one layer, in eval mode, as `from_pretrained` returns it."""
    import transformers as t

    torch.manual_seed(7)
    if kind == "bert":
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = t.BertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, **sizes, **rates, **options)
        return t.BertForSequenceClassification(config).eval()
    if kind == "gpt2":
        rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        return t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ends, **rates, **options)
        ).eval()
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = t.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, attention_dropout=dropout, **sizes, **options)
        return t.LlamaForCausalLM(config).eval()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return t.T5ForConditionalGeneration(t.T5Config(vocab_size=VOCABULARY, dropout_rate=dropout, **sizes, **options)).eval()


def rows_for(kind: str, count: int, seed: int = 0) -> Rows:
    """Rows of 3 to 9 tokens; of the labels of tokens some are not counted."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(3, 10, (), generator=generator))
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
        if kind == "bert":
            labels = tokens.sum() % CLASSES
        else:
            labels = tokens.clone() if kind != "t5" else torch.randint(3, VOCABULARY, (length // 2 + 1,), generator=generator)
            labels[: index % 3] = IGNORED
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def collate(rows: Rows) -> dict[str, Tensor]:
    """A batch, padded to its longest row."""
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    labels = [row["labels"] for row in rows]
    padded = torch.stack(labels) if labels[0].dim() == 0 else nn.utils.rnn.pad_sequence(labels, True, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": padded}


def loader(rows: Rows, size: int) -> DataLoader[Any]:
    """The rows in their order."""
    return DataLoader(rows, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]


def _loss(model: Any, batch: dict[str, Tensor], epsilon: float) -> tuple[Tensor, int]:
    """The sum of the losses of the predicted labels, and their number."""
    logits = model(**batch).logits
    logits = logits.float() if logits.dtype != torch.float64 else logits
    labels = batch["labels"]
    if not model.config.is_encoder_decoder and labels.dim() > 1:  # each token is predicted from those before it
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    counted = labels != IGNORED
    log_probabilities = F.log_softmax(logits[counted], dim=-1)
    likely = -log_probabilities.gather(1, labels[counted, None]).squeeze(1)
    return ((1 - epsilon) * likely - epsilon * log_probabilities.mean(-1)).sum(), int(counted.sum())


def train_by_hand(
    model: Any,
    batches: Sequence[dict[str, Tensor]],
    accumulate: int,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    epsilon: float = 0.0,
    clip: float = 1.0,
    after_window: Callable[[], None] = lambda: None,
) -> list[float]:
    """One epoch: in each window the mean over its predicted labels. Returns the losses of the windows."""
    model.train()
    losses = []
    for start in range(0, len(batches), accumulate):
        window = [_loss(model, batch, epsilon) for batch in batches[start : start + accumulate]]
        loss = torch.stack([total for total, _ in window]).sum() / sum(count for _, count in window)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after_window()
    return losses


def evaluate_by_hand(model: Any, batches: Sequence[dict[str, Tensor]], epsilon: float = 0.0) -> float:
    """The mean over the predicted labels of all batches."""
    model.eval()
    with torch.no_grad():
        sums = [_loss(model, batch, epsilon) for batch in batches]
    model.train()
    return sum(total.item() for total, _ in sums) / sum(count for _, count in sums)
