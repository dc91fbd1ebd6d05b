"""`kwargs_handlers`: the options that each class sets, and values that are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.config.kwargs_handlers import sort_handlers
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.strategies import DDPStrategy, ZeROStrategy
from trainkit.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def test_what_differs_from_the_defaults() -> None:
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    assert GradScalerKwargs(init_scale=8.0, growth_interval=5).to_kwargs() == {"init_scale": 8.0, "growth_interval": 5}


def test_options_of_ddp_are_those_of_the_strategy() -> None:
    given = DistributedDataParallelKwargs(
        broadcast_buffers=False,
        bucket_cap_mb=3,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        static_graph=True,
        comm_hook=DDPCommunicationHookType.BF16,
    )
    assert given.strategy_options() == {
        "bucket_cap_mb": 3,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "comm_hook": "bf16",
    }
    strategy = DDPStrategy(**given.strategy_options())
    assert (strategy.bucket_cap_mb, strategy.static_graph, strategy._compression.wire) == (3, True, torch.bfloat16)
    assert DistributedDataParallelKwargs().strategy_options() == {}


def test_a_notice_says_that_buffers_are_the_same_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """With `broadcast_buffers=False`, BatchNorm statistics would differ between ranks in Accelerate; here they never do."""
    DistributedDataParallelKwargs()
    assert caplog.text == ""
    DistributedDataParallelKwargs(broadcast_buffers=False)
    assert "DistributedDataParallelKwargs(broadcast_buffers=False) has no effect: every optimizer step ends" in caplog.text


@pytest.mark.parametrize("hook", ["power_sgd", DDPCommunicationHookType.POWER_SGD])
def test_power_sgd(hook: Any) -> None:
    options = DistributedDataParallelKwargs(
        comm_hook=hook, comm_state_option={"matrix_approximation_rank": 3}
    ).strategy_options()
    state = DDPStrategy(**options)._compression._state_for_new_buckets()
    assert state.matrix_approximation_rank == 3


def test_options_of_the_process_group_are_those_of_the_strategies() -> None:
    options = InitProcessGroupKwargs(backend="gloo", init_method="env://", timeout=timedelta(seconds=90)).strategy_options()
    for strategy in (DDPStrategy(**options), ZeROStrategy(stage=1, **options)):
        assert (strategy.process_group_backend, strategy.timeout) == ("gloo", timedelta(seconds=90))
    assert InitProcessGroupKwargs().strategy_options() == {}


def test_a_profile_is_recorded() -> None:
    seen: list[int] = []
    given = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profile: seen.append(profile.step_num),
        record_shapes=True,
    )
    with given.build() as profile:
        for _ in range(5):
            torch.ones(3, 4) @ torch.ones(4, 2)
            profile.step()
    assert seen == [4]
    products = [event for event in profile.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    assert [(event.count, event.input_shapes[:2]) for event in products] == [(2, [[3, 4], [4, 2]])]


@pytest.mark.parametrize("name", ["record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"])
def test_what_a_profile_records(name: str) -> None:
    assert not getattr(ProfileKwargs().build(), name)
    assert getattr(ProfileKwargs(**{name: True}).build(), name) is True


def test_a_profile_without_a_schedule() -> None:
    with ProfileKwargs(output_trace_dir="traces").build() as profile:
        torch.ones(3).sum()
    assert any(event.key == "aten::sum" for event in profile.key_averages())
    assert not Path("traces").exists(), "the folder is for accelerator.profile"


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda: DistributedDataParallelKwargs(dim=1), UnsupportedArgumentError, "Put the samples first"),
        (lambda: DistributedDataParallelKwargs(comm_hook="power"), ConfigurationError, "Use one of no, fp16, bf16, power_sgd"),
        (
            lambda: DistributedDataParallelKwargs(comm_hook="batched_power_sgd"),
            UnsupportedArgumentError,
            "comm_hook='power_sgd'",
        ),
        (
            lambda: DistributedDataParallelKwargs(comm_hook="power_sgd", comm_wrapper=DDPCommunicationHookType.FP16),
            UnsupportedArgumentError,
            r"comm_wrapper='fp16'\) is not supported",
        ),
        (lambda: DistributedDataParallelKwargs(comm_state_option={"a": 1}), ConfigurationError, "not for 'no'. Remove it"),
        (lambda: GradScalerKwargs(growth_factor=1.0), ConfigurationError, r"growth_factor=1.0\): expected a number > 1"),
        (lambda: GradScalerKwargs(backoff_factor=1.5), ConfigurationError, "between 0 and 1"),
        (lambda: GradScalerKwargs(init_scale=0), ConfigurationError, "a number > 0"),
        (lambda: GradScalerKwargs(growth_interval=0), ConfigurationError, "≥ 1"),
        (lambda: InitProcessGroupKwargs(init_method="tcp://a:1"), UnsupportedArgumentError, "MASTER_ADDR and MASTER_PORT"),
        (lambda: ProfileKwargs(activities=["cup"]), ConfigurationError, "Use 'cpu' or 'cuda'. Did you mean 'cpu'?"),
        (lambda: ProfileKwargs(schedule_option={"wiat": 1}), ConfigurationError, "unknown option 'wiat'. Did you mean 'wait'?"),
        (lambda: ProfileKwargs(schedule_option={"wait": 1}), ConfigurationError, "warmup, active must be set"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_handlers_by_their_class() -> None:
    class Mine(AutocastKwargs):
        pass

    mine, scaler = Mine(), GradScalerKwargs()
    assert sort_handlers([mine, scaler]) == {AutocastKwargs: mine, GradScalerKwargs: scaler}
    assert sort_handlers(None) == {}
    with pytest.raises(ConfigurationError, match="contains two AutocastKwargs. Pass only one"):
        sort_handlers([mine, AutocastKwargs()])
    with pytest.raises(ConfigurationError, match="expected objects of .*DistributedDataParallelKwargs, .* from trainkit.utils"):
        sort_handlers([{"find_unused_parameters": True}])
