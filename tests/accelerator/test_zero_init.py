"""`zero3_init_flag`: models of `transformers` are sharded while they are created."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from trainkit import Accelerator
from trainkit.strategies.zero.partitions import shard_transformers_models
from trainkit.utils import DeepSpeedPlugin, set_seed

transformers = pytest.importorskip("transformers")
deepspeed = pytest.importorskip("deepspeed")


def tiny() -> Any:
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=1, eos_token_id=1
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def is_divided(model: nn.Module) -> bool:
    (found,) = {hasattr(parameter, "ds_id") for parameter in model.parameters()}
    return found


def check_initialised(model: Any) -> None:
    """Check that the parameters are initialized as in GPT-2, and not as in PyTorch's layers."""
    for name, parameter in model.named_parameters():
        if ".ln_" in name and name.endswith("weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            meant = 0.02 / 2**0.5 if "c_proj" in name else 0.02  # GPT-2 scales layers that add to the residual stream
            assert 0.65 < float(parameter.detach().std()) / meant < 1.35, name  # four standard errors of at least 64 values


def loss_after_a_step(accelerator: Accelerator, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.arange(8)[None] % 5
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[1] < losses[0]
    accelerator.free_memory()


@contextmanager
def building(made: list[int], number: int) -> Iterator[None]:
    made.append(number)
    yield


def test_two_trainings_that_divide_end_in_any_order() -> None:
    """Two trainings that shard models at creation may end in any order: `deepspeed.zero.Init` is restored."""
    kind, room = deepspeed.zero.Init, importlib.import_module("transformers.integrations.deepspeed")
    before = room._hf_deepspeed_config_weak_ref
    for first_ends_first in (True, False):
        made: list[int] = []
        stacks = [ExitStack(), ExitStack()]
        for number, stack in enumerate(stacks):
            stack.enter_context(shard_transformers_models(deepspeed.zero, partial(building, made, number)))
        for stack in stacks if first_ends_first else reversed(stacks):
            with deepspeed.zero.Init(config_dict_or_path=room.deepspeed_config()):
                assert room.is_deepspeed_zero3_enabled()
            stack.close()
        assert made == [1, 1 if first_ends_first else 0]
        assert deepspeed.zero.Init is kind
        assert room._hf_deepspeed_config_weak_ref is before


@pytest.mark.world_size(2)
def test_models_of_transformers_are_divided_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = deepspeed.zero.Init
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    set_seed(2)
    model = tiny()
    assert is_divided(model)
    assert not is_divided(nn.Linear(2, 2))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        check_initialised(model)
    loss_after_a_step(accelerator, model)
    assert is_divided(tiny())  # also for the next training

    del accelerator, model
    gc.collect()
    assert deepspeed.zero.Init is kind
    assert not is_divided(tiny())

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False))
    set_seed(2)
    model = tiny()
    assert not is_divided(model)
    check_initialised(model)
    loss_after_a_step(accelerator, model)
