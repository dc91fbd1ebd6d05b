"""Options of ZeRO that change how it computes: what they change, and what stays the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, Record, RegressionModule, train
from helpers.runs.replicas import together
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import Calm, strategy
from helpers.zero.zero_parity import assert_same, expected, run
from safetensors.torch import load_file
from torch import Tensor

from trainkit import Accelerator, Precision
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero.optimizer_adapter import warn_slow_on_cpu

pytestmark = pytest.mark.zero  # they take long


def test_a_secondary_copy_of_the_parameters_per_node() -> None:
    record = run("zero3", 2, 4, 1.0, "32-true", hpz_partition_size=2)
    assert_same(record, expected(2, 4, 1.0, "32-true"), 2e-6)


def test_processes_that_cannot_be_grouped() -> None:
    with pytest.raises(ConfigurationError, match="hpz_partition_size=2 does not divide the 1 processes of the run"):
        run("zero3", 1, 1, None, "32-true", hpz_partition_size=2)


@pytest.mark.parametrize("kind, precision", [("zero2", "32-true"), ("zero3", "32-true"), ("zero3", "bf16-mixed")])
def test_gradients_reduced_in_16_bits(kind: str, precision: str) -> None:
    """The results are close to the exact ones, but not equal."""
    record, other = run(kind, 2, 4, 1.0, precision, communication_dtype="bf16"), expected(2, 4, 1.0, precision)
    assert_same(record, other, 5e-3)
    assert record.losses != pytest.approx(other.losses, rel=2e-6)


def test_a_communication_dtype_that_contradicts_the_precision() -> None:
    with pytest.raises(ConfigurationError, match="'fp16' does not work with precision='bf16-mixed', which .* float32 or bfl"):
        run("zero2", 1, 1, None, "bf16-mixed", communication_dtype="fp16")


class Checkpointed(RegressionModule):
    """Recomputes a part of its activations in the backward pass with DeepSpeed."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        import deepspeed

        mask, x = batch["mask"].to(self.dtype), batch["x"].to(self.dtype).requires_grad_()
        out = self.net[3:](deepspeed.checkpointing.checkpoint(self.net[:3], x)) - batch["y"].to(self.dtype)
        return (out.square() * mask).sum() / mask.sum()


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_activation_checkpointing(kind: str) -> None:
    told = {"cpu_checkpointing": True, "number_checkpoints": 1, "profile": False}
    record = run(kind, 2, 4, 1.0, "32-true", Checkpointed, activation_checkpointing=told)
    assert_same(record, expected(2, 4, 1.0, "32-true"), 2e-6)


def test_checkpointing_settings_end_with_the_run() -> None:
    import deepspeed.runtime.activation_checkpointing.checkpointing as room

    case = Case(samples=8, batch_size=2, window=1, arguments={"precision": "32-true", "max_epochs": 1})
    before = {name: value for name, value in vars(room).items() if name.isupper()}
    train(case, strategy=ZeROStrategy(2, device="cpu", activation_checkpointing={"synchronize_checkpoint_boundary": True}))
    assert {name: getattr(room, name) for name in before} == before


def in_float16(kind: str, scale: float, enabled: bool = True) -> tuple[Record, float]:
    """Train on a CPU, with DeepSpeed patched to support float16 there, as torch does on every CPU."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)
        precision = Precision("16-true", init_scale=scale, enabled=enabled)
        arguments = {"max_epochs": 2, "precision": precision, "gradient_clip_val": 1.0, "log_every_n_steps": 1}
        record = train(Case(samples=40, batch_size=2, window=8, make=Calm, arguments=arguments), strategy=strategy(kind))
        assert (precision.scaler is not None) is enabled
        return record, 1.0 if precision.scaler is None else precision.scaler.get_scale()


@cache
def in_float32() -> Record:
    return run("auto", 1, 8, 1.0, "32-true", Calm)


@pytest.mark.parametrize("kind", ["zero1", "zero2-cpu", "zero3", "zero3-both-cpu"])
def test_16_true(kind: str) -> None:
    """Float32 master weights and a loss scale, which is halved if gradients overflow."""
    for record, scale in run_world(2, in_float16, kind, 1024.0):
        assert scale == 1024.0
        assert record.losses == pytest.approx({key: in_float32().losses[key] for key in record.losses}, rel=5e-3)
        assert record.metrics["grad_norm"] == pytest.approx(in_float32().metrics["grad_norm"], rel=5e-3)
    for record, scale in run_world(2, in_float16, kind, 2.0**24):
        assert scale < 2.0**24
        assert max(update for update, _ in record.losses) < max(update for update, _ in in_float32().losses)


def test_16_true_without_a_loss_scale() -> None:
    """As with `GradScalerKwargs(enabled=False)`: no loss scale is used, not even one that would overflow."""
    (scaled, _), (plain, scale) = in_float16("zero2", 1024.0), in_float16("zero2", 2.0**24, enabled=False)
    assert scale == 1.0
    assert plain.losses == pytest.approx(scaled.losses, rel=5e-3)


def test_16_true_without_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a CPU without float16, which the CPU of this machine may have."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)
    with pytest.raises(ConfigurationError, match="needs a device on which DeepSpeed supports float16, and 'cpu' is not one"):
        ZeROStrategy(3, device="cpu", precision="16-true")


def save_model(short: bool, folder: str) -> None:
    accelerator = Accelerator(strategy=strategy("zero3", zero3_save_16bit_model=short), precision="bf16-true")
    net = RegressionModule().net
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    accelerator.save_model(model, folder)


def test_save_model_in_16_bits(run_dir: Path) -> None:
    """By default the master weights are saved; with the option the 16-bit parameters."""
    for short in (False, True):
        together(2, {"save": (save_model, short, str(run_dir / str(short)))})
    masters, used = (load_file(run_dir / str(short) / "model.safetensors") for short in (False, True))
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())
    assert used.keys() == masters.keys()
    assert all(torch.equal(tensor, masters[name].bfloat16()) for name, tensor in used.items())


def test_16_bit_weights_of_a_float32_model() -> None:
    with pytest.raises(ConfigurationError, match="zero3_save_16bit_model=True, but precision='32-true' has float32 parameters"):
        run("zero3", 1, 1, None, "32-true", zero3_save_16bit_model=True)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("AdamW", "AdamW runs its steps on the CPU, .* deepspeed.ops.adam.DeepSpeedCPUAdam, which does the same faster"),
        ("RMSprop", "RMSprop runs its steps on the CPU, .* Keep the optimizer on the device if it fits"),
    ],
)
def test_a_warning_about_slow_optimizer_steps(kind: str, said: str) -> None:
    optimizer: Any = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(2))])
    warn_slow_on_cpu(optimizer, torch.device("cpu"))  # the forward also runs there, so there is no warning
    with pytest.warns(TrainkitWarning, match=said):
        warn_slow_on_cpu(optimizer, torch.device("cuda"))
