"""`PartialState` and `AcceleratorState`: views of the Accelerator, which is created where there is none."""

from __future__ import annotations

import gc
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn

import trainkit
import trainkit.state
from trainkit import Accelerator, AcceleratorState, PartialState
from trainkit.accelerator import processes
from trainkit.config.kwargs_handlers import DistributedType
from trainkit.errors import ConfigurationError
from trainkit.strategies import ZeROStrategy


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_of_thread", processes._OfThread())
    monkeypatch.setattr(processes, "_of_process", WeakValueDictionary())


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_a_state_without_an_accelerator_creates_one(kind: type[PartialState]) -> None:
    assert not trainkit.state.is_initialized()
    state = kind(cpu=True, timeout=trainkit.utils.InitProcessGroupKwargs().timeout)
    assert trainkit.state.is_initialized()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.device, state.default_device, state.backend) == (torch.device("cpu"), torch.device("cpu"), None)
    assert (state.distributed_type, state.use_distributed, state.debug) == (DistributedType.NO, False, False)
    assert (state.initialized, state.fork_launched, state.is_last_process) == (True, False, True)
    state.set_device()
    state.destroy_process_group()
    with state.main_process_first(), state.split_between_processes(["A", "B"]) as mine:
        assert mine == ["A", "B"]
    assert state.on_main_process(lambda: 3)() == state.on_process(lambda: 3, process_index=1)() == 3
    state.wait_for_everyone()
    del state
    gc.collect()
    assert not trainkit.state.is_initialized()


def test_a_state_is_a_view_of_the_accelerator() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = AcceleratorState()
    assert (state.mixed_precision, accelerator.state.mixed_precision) == ("bf16", "bf16")
    assert AcceleratorState(mixed_precision="bf16").device == accelerator.device
    assert (state.deepspeed_plugin, state.deepspeed_plugins, state.fsdp_plugin, state.torch_tp_plugin) == (None,) * 4
    assert isinstance(accelerator.state, PartialState)
    assert "num_processes=1" in repr(state)
    assert "mixed_precision=bf16" in repr(state)
    assert state == accelerator.state != PartialState()
    assert hash(state) == hash(accelerator.state)
    assert {"mixed_precision", "wait_for_everyone", "backend"} <= set(dir(state))
    with pytest.raises(ConfigurationError, match=r"the run has 'bf16'\. Choose it once: Accelerator\(mixed_precision='fp16'\)"):
        AcceleratorState(mixed_precision="fp16")


def test_the_plugin_of_zero_has_a_name() -> None:
    state = Accelerator(strategy=ZeROStrategy(stage=2, device="cpu")).state
    assert state.deepspeed_plugins == {"default": state.deepspeed_plugin}
    assert state.get_deepspeed_plugin("default").zero_stage == 2
    state.select_deepspeed_plugin("default")
    with pytest.raises(ConfigurationError, match="no DeepSpeedPlugin 'teacher': an accelerator has one set of options"):
        state.select_deepspeed_plugin("teacher")


def test_a_name_that_it_does_not_have() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"^AcceleratorState has no 'num_proceses'\. Did you mean 'num_processes'\?$"):
        _ = accelerator.state.num_proceses
    with pytest.raises(AttributeError, match=r"AcceleratorState has it: accelerator\.state\.mixed_precision\.$"):
        _ = PartialState().mixed_precision
    assert not hasattr(PartialState(), "deepspeed_plugins")


@pytest.mark.world_size(2)
def test_a_script_asks_for_its_rank_before_it_creates_its_accelerator() -> None:
    state = PartialState()
    assert (state.num_processes, state.backend, state.distributed_type) == (2, "gloo", DistributedType.MULTI_CPU)
    order: list[int] = []
    with state.main_process_first():
        order.append(state.process_index)
    with state.split_between_processes(["A", "B", "C"]) as mine:
        assert mine == [["A", "B"], ["C"]][state.process_index]
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert AcceleratorState().process_index == accelerator.process_index == state.process_index
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for value in (1.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), value + state.process_index)).sum())
            optimizer.step()
    gathered = accelerator.gather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    assert torch.equal(gathered[0], gathered[1])
    state.wait_for_everyone()
