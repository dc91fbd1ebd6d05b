"""Each argument of `FSDPStrategy` has its effect, and wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from trainkit import Precision
from trainkit.checks import argument_texts, arguments_of
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError
from trainkit.strategies.fsdp.fsdp_strategy import FSDPStrategy
from trainkit.strategies.fsdp.sharded_models import FSDPOptions
from trainkit.strategies.fsdp.units import choose_units, find_ignored_parameters

CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def made(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(device="cpu", **options)


def arguments(strategy: FSDPStrategy) -> dict[str, Any]:
    return strategy.options.arguments(strategy.precision, CPU)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Block(), Block())


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("wrap", "Linear", lambda strategy: list(choose_units(net(), strategy.options.wrap)) == ["0", "1.inner", "2.inner"]),
        ("wrap", 72, lambda strategy: list(choose_units(net(), strategy.options.wrap)) == ["1.inner", "2.inner"]),
        ("wrap", False, lambda strategy: choose_units(net(), strategy.options.wrap) == {}),
        ("reshard_after_forward", False, lambda strategy: arguments(strategy)["reshard_after_forward"] is False),
        ("mixed_precision", BF16, lambda strategy: arguments(strategy)["mp_policy"] == BF16),
        ("offload_params", "cpu", lambda strategy: isinstance(arguments(strategy)["offload_policy"], CPUOffloadPolicy)),
    ],
    ids=["wrap-name", "wrap-size", "wrap-false", "reshard", "policy", "offload"],
)
def test_each_argument_has_its_effect(option: str, value: Any, shown: Callable[[FSDPStrategy], bool]) -> None:
    assert shown(made(**{option: value}))
    assert not shown(made())


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": 0},
        {"offload_params": "disk"},
        {"replicas": 0},
        {"tensor_parallel": 1.5},
        {"accumulate": "never"},
        {"mixed_precision": "bf16"},
    ],
    ids=str,
)
def test_wrong_values(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        choose_units(net(), made(**options).options.wrap)


def test_each_argument_has_a_text() -> None:
    assert sorted(argument_texts(FSDPOptions)) == sorted(arguments_of(FSDPOptions))


@pytest.mark.parametrize("name", ["replicas", "tensor_parallel"])
def test_sizes_that_one_process_does_not_have(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}=2.*needs a multiple of 2 processes"):
        made(**{name: 2}).join(RequestedDevices("cpu", 1, 1))


def test_ignored_modules() -> None:
    model = net()
    model.scale = nn.Parameter(torch.ones(()))
    assert find_ignored_parameters(model, made().options.ignored_modules) == {model.scale}
    assert find_ignored_parameters(model, made(ignored_modules="2").options.ignored_modules) == {
        model.scale,
        *model.get_submodule("2").parameters(),
    }


def test_when_gradients_are_reduced() -> None:
    assert made().options.accumulate == "once"
    assert "accumulate='reshard'" in repr(made(accumulate="reshard"))


def test_arguments_of_the_process_group() -> None:
    strategy = made(process_group_backend="gloo", timeout=60)
    assert (strategy.process_group_backend, strategy.timeout) == ("gloo", timedelta(seconds=60))


def test_a_precision_that_is_given() -> None:
    strategy = made(precision="bf16-true")
    policy = arguments(strategy)["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ConfigurationError, match="two precisions"):
        strategy.use_precision(Precision("32-true"))


def test_an_argument_of_another_framework() -> None:
    with pytest.raises(UnsupportedArgumentError, match=r"auto_wrap_policy.*wrap="):
        made(auto_wrap_policy={nn.Linear})
    with pytest.raises(UnsupportedArgumentError, match=r"context_parallel.*attention kernels of the CPU.*activation_check"):
        made(context_parallel=2)
    with pytest.raises(UnsupportedArgumentError, match=r"pipeline.*forward and the backward of a whole accumulation window"):
        made(pipeline=2)
    with pytest.raises(UnknownNameError, match="Did you mean 'replicas'"):
        made(replica=2)
