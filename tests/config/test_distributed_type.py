"""`DistributedType`."""

from __future__ import annotations

import json

import pytest

from trainkit.utils import DistributedType

ACCELERATES = {
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
    "MULTI_HPU",
    "MULTI_NEURON",
}


def test_members() -> None:
    """All members of Accelerate's `DistributedType` exist."""
    assert {kind.name for kind in DistributedType} == ACCELERATES
    assert all(kind.value == kind.name for kind in DistributedType)
    assert DistributedType.TPU is DistributedType.XLA
    assert DistributedType["TPU"] is DistributedType.XLA


def test_a_member_is_its_text() -> None:
    kind = DistributedType("MULTI_GPU")
    assert kind == "MULTI_GPU"
    assert kind in (DistributedType.MULTI_GPU, DistributedType.FSDP)
    assert kind != DistributedType.FSDP
    assert f"{kind} {kind!s}" == "MULTI_GPU MULTI_GPU"
    assert json.dumps({"type": kind}) == '{"type": "MULTI_GPU"}'
    with pytest.raises(ValueError, match="MULTI_GPUS"):
        DistributedType("MULTI_GPUS")
