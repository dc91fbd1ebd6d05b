"""Global switches of torch that a run sets and restores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["torch_flags"]


@contextmanager
def torch_flags(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> Iterator[None]:
    """Within it torch's switches have the values of the Trainer's arguments; afterwards their earlier ones.

    Args:
        deterministic: `True` makes torch raise on nondeterministic kernels, `"warn"` warn; `None` does not change it.
        benchmark: cuDNN chooses kernels by benchmarking; `None` does not change it, but deterministic turns it off.
        detect_anomaly: autograd names the forward operation of a NaN gradient (slow).
    """
    before = _deterministic()
    benchmark_before = torch.backends.cudnn.benchmark
    workspace_before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    anomaly_before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    try:
        if deterministic is not None:
            torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
            if deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS raises without it
        if benchmark is not None or deterministic:
            torch.backends.cudnn.benchmark = bool(benchmark)
        if detect_anomaly:
            torch.autograd.set_detect_anomaly(True)
        yield
    finally:
        if _deterministic() != before:  # this call imports modules, which fails if a signal came during an import
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark_before
        torch.autograd.set_detect_anomaly(anomaly_before[0], check_nan=anomaly_before[1])
        if workspace_before is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
