"""The configurations of `FSDPStrategy` that tests run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FSDP"]

# Name → arguments. `helpers.zero.zero_cases.strategy` makes each linear layer a unit.
FSDP: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {},
    "fsdp-reshard": {"accumulate": "reshard"},
    "fsdp-cpu": {"offload_params": "cpu"},
    "fsdp-root": {"wrap": False, "reshard_after_forward": True},
    "fsdp-replicas": {"replicas": 2},
    "fsdp-tensor": {"tensor_parallel": 2, "wrap": False},
}
