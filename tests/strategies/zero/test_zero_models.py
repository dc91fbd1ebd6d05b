"""Models of `transformers` under ZeRO: with tied weights, with frozen weights, with LoRA adapters."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, Noisy, RegressionModule, trained
from helpers.runs.replicas import together
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import strategy
from helpers.zero.zero_resume import assert_portable, case, save, tensors
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Trainer

pytestmark = pytest.mark.zero  # they take long


def tokens_of(batch: dict[str, Tensor]) -> Tensor:
    """Six tokens for each sample."""
    return (batch["x"] * 10).abs().long() % 50


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)


class Language(RegressionModule):
    """A GPT-2, whose output layer is its embedding."""

    rates = {"adamw": 1e-3, "sgd": 1e-2}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = self.make()

    def make(self) -> Any:
        from transformers import GPT2LMHeadModel

        with torch.random.fork_rng():
            torch.manual_seed(2)
            return GPT2LMHeadModel(gpt2())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = tokens_of(batch)
        return self.net(input_ids=tokens, labels=tokens).loss


class Translation(Language):
    """A T5, in which three modules share one embedding."""

    def make(self) -> Any:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))


class Adapted(Language):
    """The GPT-2, frozen, with LoRA adapters, all of which are used in each step."""

    def make(self) -> Any:
        from peft import LoraConfig, get_peft_model

        base = super().make()
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
            torch.manual_seed(3)
            adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:  # initially zeros, so other parameters of the adapters would have no gradient at first
                    nn.init.normal_(parameter, std=0.1)
        return adapted

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


SOME = [(Language, "zero3", 2), (Language, "zero1", 2), (Translation, "zero3", 2), (Translation, "zero2-cpu", 1)]
SOME += [(Adapted, "zero2", 2), (Adapted, "zero3-both-cpu", 2)]


@pytest.mark.parametrize("make, kind, size", SOME)
def test_the_same_training(make: type, kind: str, size: int) -> None:
    which = Case(
        samples=24, make=make, options={"optimizer": "adamw"}, arguments={"precision": "32-true", "gradient_clip_val": 1.0}
    )
    record, other = trained(which, size, strategy=strategy(kind)), trained(which, 1)
    assert record.losses.keys() == other.losses.keys()
    assert record.losses == pytest.approx(other.losses, rel=2e-5)
    assert len(record.parameters[-1]) == len(other.parameters[-1])
    for mine, theirs in zip(record.parameters[-1], other.parameters[-1], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "make, kind, other", [(Language, "zero3", "zero1"), (Translation, "zero2", "zero3"), (Adapted, "zero3", "ddp")]
)
def test_checkpoints(make: type, kind: str, other: str, run_dir: Path) -> None:
    together(2, {"save": (save, case(make=make), kind, run_dir / "saved")})
    tied = ("wte.weight", "shared.weight", "lm_head.weight")
    stored = [name for name in tensors(run_dir / "saved") if name.startswith("model/") and name.endswith(tied)]
    assert len(stored) == (0 if make is Adapted else 1)  # for adapters the base model is not saved
    assert_portable(run_dir / "saved", other, 2, make=make)


class BuiltLanguage(Language):
    """The GPT-2, created in `configure_model`, where `transformers` can create it layer by layer."""

    def make(self) -> Any:
        return None

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        self.net = self.net or AutoModelForCausalLM.from_config(gpt2())


class Late(BuiltLanguage):
    """The GPT-2, created from its class in `configure_model`. It is initialized after all its layers are created."""

    def configure_model(self) -> None:
        self.net = Language.make(self)


def test_configure_model() -> None:
    """The same losses on any number of processes. For stage 3, `transformers` draws initial values in another order."""
    which = Case(samples=24, make=BuiltLanguage, arguments={"precision": "32-true"})
    losses = trained(which, 2, strategy=strategy("zero3")).losses
    assert losses == pytest.approx(trained(which, 1, strategy=strategy("zero3-both-cpu")).losses, rel=2e-5)
    assert max(losses.values()) < 4.5  # an untrained model has log(50) = 3.9


def test_configure_model_with_a_class() -> None:
    """The initial values are the same as under other strategies."""
    which = Case(samples=24, make=Late, arguments={"precision": "32-true"})
    losses = trained(which, 2, strategy=strategy("zero3")).losses
    assert losses == pytest.approx(trained(replace(which, make=Language), 1).losses, rel=2e-5)


class LateAdapted(Adapted):
    """The GPT-2 and its adapters, created in `configure_model`."""

    def __init__(self, **options: Any) -> None:
        RegressionModule.__init__(self, **options)
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        self.net = self.net or Adapted.make(self)


def test_configure_model_with_adapters() -> None:
    which = Case(samples=24, make=LateAdapted, options={"optimizer": "adamw"}, arguments={"precision": "32-true"})
    losses = trained(which, 2, strategy=strategy("zero3")).losses
    assert losses == pytest.approx(trained(replace(which, make=Adapted), 1).losses, rel=2e-5)


class Speaking(Language):
    """Generates at the end of each epoch: outputs of different lengths on each process, and different numbers of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[list[int]] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tokens = tokens_of(batch)
        length = 2 + int(batch["id"][0]) % 5
        said = self.net.generate(tokens[:, :2], max_new_tokens=length, do_sample=False, pad_token_id=0)
        self.said += said.tolist()
        self.log("length", float(said.shape[1]))


def speak(kind: str) -> list[list[int]]:
    module = Speaking()
    Trainer(
        strategy=strategy(kind),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        seed=3,
        global_batch_size=4,
    ).fit(module, DataLoader(Noisy(8), 2), DataLoader(Noisy(5), 1))
    return module.said


@pytest.mark.parametrize("kind", ["zero2", "zero3", "zero3-both-cpu"])
def test_generation_stays_synchronized(kind: str) -> None:
    """Two processes generate from five samples, so the numbers of batches and the lengths of outputs differ."""
    expected = speak("auto")
    assert len({len(said) for said in expected}) > 2
    first, second = run_world(2, speak, kind)
    assert sorted(first[:3] + second[:2]) == sorted(expected)
