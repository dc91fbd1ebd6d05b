"""A small GPT over bytes, as a `TrainModule`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.errors import ConfigurationError
from trainkit.module.train_module import TrainModule

__all__ = ["ByteGPT"]

BYTES = 256


class ByteGPT(TrainModule):
    """Predicts the next byte of a text: a decoder-only transformer without a tokenizer.

    Pre-norm blocks with RMSNorm, rotary positions (Su et al., "RoFormer", 2021), squared ReLU (So et al., "Primer",
    2021), and one matrix for embedding and output. The default has about a million parameters.

    A batch is an integer tensor of shape (B, T + 1): T bytes and, for each, the one that follows. Logs `train_loss` and
    `val_loss`, both in bits per byte.

    Args:
        width: The size of the residual stream.
        depth: The number of blocks.
        heads: The number of attention heads; `width / heads` must be an even number.
        context: The maximum number of bytes that it attends to.
        learning_rate: The peak of the learning rate, after the warm-up.
        weight_decay: The weight decay of matrices; norms have none.
        warmup: Optimizer steps of the warm-up, after which the learning rate falls along a cosine to a twentieth.

    Raises:
        ConfigurationError: `width` is not divisible by `2 * heads`.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        width: int = 160,
        depth: int = 3,
        heads: int = 5,
        context: int = 64,
        learning_rate: float = 2.5e-3,
        weight_decay: float = 0.1,
        warmup: int = 60,
    ) -> None:
        super().__init__()
        if heads < 1 or width % (2 * heads):
            raise ConfigurationError(
                f"expected a width that is a multiple of 2 × heads, got width={width} and heads={heads}. "
                f"Fix: width={2 * max(heads, 1) * max(round(width / (2 * max(heads, 1))), 1)}"
            )
        self.save_hyperparameters()
        self.context = context
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.RMSNorm(width)
        angles = torch.outer(torch.arange(context), 10_000.0 ** -torch.linspace(0, 1, width // heads // 2))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                # Additions to the residual stream are scaled by the number of blocks (GPT-2).
                blocks = len(self.blocks) if name.endswith(("attention_out.weight", "mlp_out.weight")) else 0.5
                nn.init.normal_(parameter, std=(2 * blocks * parameter.shape[1]) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next byte after each byte.

        Args:
            tokens: Bytes as integers, shape (B, T) with T ≤ `context`.

        Returns:
            Shape (B, T, 256).
        """
        T = tokens.shape[1]
        rotation = self.cosine[:T], self.sine[:T]
        x = self.embedding(tokens.long())
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean cross-entropy of a batch, in nats per byte."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of one batch of windows."""
        loss = self.loss(batch)
        self.log("train_loss", loss.detach() / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss on windows that are not trained on."""
        self.log("val_loss", self.loss(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW; the learning rate rises, then falls along a cosine until the last optimizer step of the run."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        gains = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.hparams.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        total = self.trainer.estimated_stepping_batches
        warmup = min(int(self.hparams.warmup), max(int(total // 5), 1))

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min((step - warmup) / max(total - warmup, 1), 1.0)
            return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int = 400, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continue a text by sampling one byte after the other.

        Args:
            prompt: At least one byte.
            length: The number of bytes to add.
            temperature: Below 1 for likelier text, above for more varied text.
            seed: The seed of the sampling.

        Returns:
            The prompt and the generated bytes.

        Raises:
            ConfigurationError: The prompt is empty, or the temperature is not above 0.
        """
        if not prompt or temperature <= 0:
            raise ConfigurationError(f"expected a prompt and a temperature > 0, got {prompt!r} and {temperature}.")
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = bytearray(prompt)
        for _ in range(length):
            tokens = torch.tensor([list(text[-self.context :])], device=self.device)
            # sampled on the CPU in float64, for the same bytes on every device with equal logits
            logits = self(tokens)[0, -1].double().cpu()
            text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)))
        self.train(was_training)
        return bytes(text)


class Block(nn.Module):
    """Attention, then a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after this block; `x` is (B, T, width)."""
        x = x + self.attention_out(self._attention(self.attention_norm(x), rotation))
        x = x + self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))).square())
        return x

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        B, T, C = x.shape
        heads = self.query_key_value(x).view(B, T, 3, self.heads, C // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, C / heads)
        y = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return y.transpose(1, 2).reshape(B, T, C)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of features by angles that grow with the position (RoPE)."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
