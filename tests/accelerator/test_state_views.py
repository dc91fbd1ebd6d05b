"""`PartialState` and `AcceleratorState`: views of the Accelerator, which is created where there is none."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainkit
import trainkit.state
from trainkit import Accelerator, AcceleratorState, PartialState
from trainkit.accelerator import processes
from trainkit.config.kwargs_handlers import DistributedType, DynamoBackend
from trainkit.errors import ConfigurationError, DataError, UnsupportedArgumentError
from trainkit.state import GradientState
from trainkit.strategies import ZeROStrategy
from trainkit.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
)


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


def test_what_accelerate_keeps_in_its_state_and_has_off() -> None:
    state = Accelerator(cpu=True).state
    assert (state.device_mesh, state.parallelism_config, state.dynamo_plugin.backend) == (None, None, DynamoBackend.NO)
    plugin = TorchDynamoPlugin(backend="eager", dynamic=True, use_regional_compilation=False)
    state = Accelerator(cpu=True, dynamo_plugin=plugin).state
    assert (state.dynamo_plugin.backend, state.dynamo_plugin.dynamic) == (DynamoBackend.EAGER, True)
    assert state.dynamo_plugin.use_regional_compilation is False
    assert Accelerator(cpu=True, dynamo_backend="eager").state.dynamo_plugin == TorchDynamoPlugin(backend=DynamoBackend.EAGER)


@pytest.mark.world_size(2)
def test_the_state_of_fsdp() -> None:
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(), parallelism_config=ParallelismConfig(dp_shard_size=2)
    )
    assert accelerator.state.parallelism_config is accelerator.parallelism_config
    assert accelerator.state.parallelism_config.dp_shard_size == 2
    assert accelerator.state.device_mesh.size() == 2


def members(state: GradientState) -> tuple[Any, ...]:
    return state.in_dataloader, state.end_of_dataloader, state.remainder, state.sync_gradients


def test_the_state_of_the_accumulation_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state = accelerator.gradient_state
    model = nn.Linear(1, 1)
    loaders: Any = (DataLoader(torch.ones(10, 1), batch_size=4), DataLoader(torch.ones(4, 1), batch_size=2))
    model, loader, inner = accelerator.prepare(model, *loaders)
    assert (state.num_steps, state.plugin_kwargs, members(state)) == (2, {"num_steps": 2}, (False, False, -1, True))
    assert (state.initialized, state.adjust_scheduler, state.sync_with_dataloader) == (True, False, True)
    assert (state.active_dataloader, state.dataloader_references) == (None, [None])
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            seen.append(members(GradientState()))
        assert state.active_dataloader is loader
    assert seen == [(True, False, 2, False), (True, False, 2, True), (True, True, 2, True)]
    for _ in loader:
        for _ in inner:
            assert state.dataloader_references == [None, loader, inner]
            assert state.remainder == 0
        break
    assert "num_steps=2, sync_gradients=True" in repr(state)


def test_a_state_of_a_window_that_is_unknown() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare([torch.ones(1)] * 2 for _ in range(2))
    assert GradientState().remainder == -1
    for _ in loader:
        with pytest.raises(DataError, match="the loader has no certain length, so its last batch is not known before"):
            _ = accelerator.gradient_state.end_of_dataloader
        assert accelerator.gradient_state.remainder == -1
    accelerator.gradient_state._set_sync_gradients(True)
    with pytest.raises(ConfigurationError, match=r"\(False\): this batch is the last one of its .* step is due\. .*Remove the"):
        accelerator.gradient_state._set_sync_gradients(False)
    with pytest.raises(AttributeError, match=r"no 'num_step'\. Did you mean 'num_steps'\?"):
        _ = accelerator.gradient_state.num_step
    with pytest.raises(UnsupportedArgumentError, match=r"Accelerator\(gradient_accumulation_plugin=\.\.\.\), and read"):
        GradientState(GradientAccumulationPlugin(2))  # type: ignore[arg-type]


def test_the_plugin_of_zero_has_a_name() -> None:
    state = Accelerator(strategy=ZeROStrategy(stage=2, device="cpu")).state
    assert state.deepspeed_plugins == {"default": state.deepspeed_plugin}
    assert state.get_deepspeed_plugin("default").zero_stage == 2
    state.select_deepspeed_plugin("default")
    with pytest.raises(ConfigurationError, match="no DeepSpeedPlugin 'teacher': an accelerator has one set of options"):
        state.select_deepspeed_plugin("teacher")


def test_training_arguments_of_transformers_reset_a_state() -> None:
    """It is a view of the accelerator, so there is nothing to forget."""
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert AcceleratorState() == accelerator.state


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
