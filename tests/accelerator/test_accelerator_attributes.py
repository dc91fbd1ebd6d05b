"""The attributes of an `Accelerator` that describe the run, such as `state` and `deepspeed_plugin`."""

from __future__ import annotations

import pytest
import torch

from trainkit import Accelerator, Strategy
from trainkit.config.kwargs_handlers import DistributedType
from trainkit.strategies import ZeROStrategy


def test_one_process() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = accelerator.state
    assert (state.distributed_type, state.num_processes, state.process_index) == (DistributedType.NO, 1, 0)
    assert (state.device, state.mixed_precision, state.use_distributed) == (torch.device("cpu"), "bf16", False)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.deepspeed_plugin is None


def test_what_accelerate_has_and_we_have_not_is_named_with_what_to_use() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"no 'dispatch_batches'\. Use nothing: each process reads its own batches"):
        _ = accelerator.dispatch_batches
    assert accelerator.scaler is None
    assert isinstance(Accelerator(cpu=True, mixed_precision="fp16").scaler, torch.amp.GradScaler)
    with pytest.raises(AttributeError, match=r"no 'gather_for_metric'\. Did you mean 'gather_for_metrics'\?"):
        _ = accelerator.gather_for_metric
    assert accelerator.deepspeed_plugin is None
    assert accelerator.fsdp_plugin is None
    assert not accelerator.is_fsdp2
    assert accelerator.even_batches
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3


def test_native_amp_is_accepted_and_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Some scripts set `native_amp = False`: a notice says that this does not change the precision."""
    accelerator = Accelerator(cpu=True)
    caplog.clear()
    accelerator.native_amp = False
    assert not accelerator.native_amp
    assert not caplog.records, "it is off already"
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    caplog.clear()
    accelerator.native_amp = False
    assert accelerator.native_amp
    (record,) = caplog.records
    assert "native_amp = False has no effect: the precision is bf16-mixed" in record.getMessage()
    assert "Accelerator(mixed_precision='no')" in record.getMessage()


@pytest.mark.world_size(2)
def test_two_processes() -> None:
    accelerator = Accelerator()
    state = accelerator.state
    assert (state.distributed_type, state.num_processes) == (DistributedType.MULTI_CPU, 2)
    assert state.process_index == state.local_process_index == accelerator.process_index
    assert state.is_main_process is (accelerator.process_index == 0)


def test_zero_by_a_strategy_has_a_plugin_too() -> None:
    state = Accelerator(strategy=ZeROStrategy(stage=3, device="cpu")).state
    assert state.distributed_type == DistributedType.DEEPSPEED
    assert state.deepspeed_plugin is not None
    assert state.deepspeed_plugin.zero_stage == 3
    assert state.fsdp_plugin is None


def test_two_accelerators_of_one_strategy_have_the_same_state() -> None:
    strategy = Strategy("cpu")
    first, second = Accelerator(strategy=strategy), Accelerator(strategy=strategy)
    assert first.state == second.state
    assert first.deepspeed_plugin is None
    with pytest.raises(AttributeError, match=r"^an Accelerator has no 'non_blocking'\. Use "):
        _ = first.non_blocking
    with pytest.raises(AttributeError, match=r"Did you mean 'gather'\?$"):
        _ = first.gathr
