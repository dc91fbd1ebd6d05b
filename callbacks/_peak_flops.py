"""Peak FLOP/s of known GPUs, for the model FLOPs utilization."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

__all__: list[str] = []


class _Peak(NamedTuple):
    """TFLOP/s of dense matrix products, from the vendor's data sheet; None: not in hardware."""

    half: float | None  # float16 with float32 accumulation, on tensor cores
    bfloat16: float | None
    tf32: float | None
    float32: float


# Words in a device's name, most specific first. Numbers with 2:4 sparsity, in data sheets since Ampere, are halved.
_PEAKS: list[tuple[tuple[str, ...], _Peak]] = [
    # NVIDIA HGX B200 data sheet, per GPU
    (("B200",), _Peak(2250.0, 2250.0, 1125.0, 75.0)),
    # NVIDIA H200 data sheet (SXM)
    (("H200",), _Peak(989.0, 989.0, 494.5, 67.0)),
    # NVIDIA H100 data sheet: NVL, PCIe, SXM
    (("H100", "NVL"), _Peak(835.0, 835.0, 417.5, 60.0)),
    (("H100", "PCIE"), _Peak(756.0, 756.0, 378.0, 51.0)),
    (("H100",), _Peak(989.0, 989.0, 494.5, 67.0)),
    # NVIDIA A100 data sheet (all forms)
    (("A100",), _Peak(312.0, 312.0, 156.0, 19.5)),
    # NVIDIA A40, A30 and A10 data sheets
    (("A40",), _Peak(149.7, 149.7, 74.8, 37.4)),
    (("A30",), _Peak(165.0, 165.0, 82.0, 10.3)),
    (("A10",), _Peak(125.0, 125.0, 62.5, 31.2)),
    # NVIDIA L40S, L40 and L4 data sheets
    (("L40S",), _Peak(362.0, 362.0, 183.0, 91.6)),
    (("L40",), _Peak(181.0, 181.0, 90.5, 90.5)),
    (("L4",), _Peak(121.0, 121.0, 60.0, 30.3)),
    # NVIDIA Ada and GA102 white papers (float32 accumulation)
    (("RTX", "4090"), _Peak(165.2, 165.2, 82.6, 82.6)),
    (("RTX", "3090"), _Peak(71.0, 71.0, 35.6, 35.6)),
    # NVIDIA V100 data sheet (SXM2, PCIe) and T4 data sheet: no bfloat16, no TF32
    (("V100", "SXM2"), _Peak(125.0, None, None, 15.7)),
    (("V100", "PCIE"), _Peak(112.0, None, None, 14.0)),
    (("T4",), _Peak(65.0, None, None, 8.1)),
    # AMD Instinct MI300X data sheet
    (("MI300X",), _Peak(1307.4, 1307.4, 653.7, 163.4)),
]

# Parts of a chip, and slower chips under the name of a faster one.
_NOT_THE_SAME = {"MIG", "LAPTOP", "MOBILE", "MAX", "D", "TI"}


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a device in matrix products of a dtype, or None if unknown.

    Args:
        device_name: of `torch.cuda.get_device_name`.
        dtype: bfloat16, float16 or float32.
        tf32: whether float32 products may use TF32.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _NOT_THE_SAME:
        return None
    for wanted, peak in _PEAKS:
        if words.issuperset(wanted):
            teraflops = {
                torch.float16: peak.half,
                torch.bfloat16: peak.bfloat16,
                torch.float32: (peak.tf32 or peak.float32) if tf32 else peak.float32,
            }.get(dtype)
            return None if teraflops is None else teraflops * 1e12
    return None
