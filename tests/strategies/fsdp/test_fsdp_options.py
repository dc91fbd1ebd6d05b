"""The arguments of `FSDPStrategy` that are refused, and what they become for torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import joined_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError
from trainkit.precision import Precision
from trainkit.strategies import FSDPStrategy
from trainkit.strategies.fsdp.sharded_models import FSDPOptions

CPU = torch.device("cpu")

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"accumulate": "twice"}, "accumulate='twice': expected 'once' or 'reshard'"),
    ({"offload_params": "nvme"}, "offload_params='nvme': expected None or 'cpu'"),
    ({"replicas": 0}, "replicas=0: expected a whole number ≥ 1"),
    ({"tensor_parallel": True}, "tensor_parallel=True: expected a whole number ≥ 1"),
    ({"mixed_precision": "bf16"}, "mixed_precision='bf16': expected torch.distributed.fsdp.MixedPrecisionPolicy"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FSDPStrategy(**options)


def test_master_weights() -> None:
    """With 16-bit parameters torch gathers in 16 bits, reduces in float32, and does not convert the inputs of each unit."""
    policy = FSDPOptions().arguments(Precision("bf16-true"), CPU)["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (torch.bfloat16, torch.float32, False)
    assert FSDPOptions().arguments(Precision("bf16-mixed"), CPU)["mp_policy"] == MixedPrecisionPolicy()
    own = MixedPrecisionPolicy(torch.float16)
    assert FSDPOptions(mixed_precision=own).arguments(Precision("bf16-true"), CPU)["mp_policy"] is own


def test_offloading_on_a_cpu_pins_nothing() -> None:
    """torch fails to pin host memory without an accelerator."""
    policy = FSDPOptions(offload_params="cpu").arguments(Precision("32-true"), CPU)["offload_policy"]
    assert isinstance(policy, CPUOffloadPolicy)
    assert not policy.pin_memory


@pytest.mark.world_size(4)
def test_the_mesh() -> None:
    for options, sizes in (
        ({}, {"data": 4}),
        ({"replicas": 2}, {"replicas": 2, "data": 2}),
        ({"tensor_parallel": 2}, {"data": 2, "tensor": 2}),
        ({"tensor_parallel": 4}, {"data": 1, "tensor": 4}),
        ({"replicas": 2, "tensor_parallel": 2}, {"replicas": 2, "data": 1, "tensor": 2}),
    ):
        strategy = joined_fsdp(**options)
        assert dict(zip(strategy.mesh.mesh_dim_names, strategy.mesh.shape, strict=True)) == sizes
        share, data = options.get("tensor_parallel", 1), strategy.data_world
        assert (data.rank, data.size) == (strategy.rank // share, 4 // share)
        assert data.exchange(strategy.rank) == [*range(strategy.rank % share, 4, share)]
    for options in ({"replicas": 3}, {"tensor_parallel": 3}, {"replicas": 4, "tensor_parallel": 2}):
        with pytest.raises(ConfigurationError, match="needs a multiple of . processes, but this run has 4"):
            joined_fsdp(**options)


def test_a_single_process() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a multiple of 4 processes, but this run has 1. Use devices=4"):
        FSDPStrategy(replicas=2, tensor_parallel=2, device="cpu").join(RequestedDevices("cpu"))
