"""`trainkit env`: versions, hardware and environment variables for a bug report, without secrets."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit._version import __version__
from trainkit.console import quantity
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import read_ranks
from trainkit.masking import is_secret_name, mask_value
from trainkit.registry import strategy_infos

__all__ = ["add_arguments", "run"]

_PACKAGES = (
    "torch", "numpy", "safetensors", "tqdm", "PyYAML", "tensorboard", "wandb", "mlflow", "mlflow-skinny", "comet_ml",
    "torchmetrics",
)  # fmt: skip
_OTHERS = ("lightning", "pytorch-lightning", "accelerate", "transformers", "peft", "matplotlib")
_REQUIRED = {"torch", "numpy", "safetensors", "tqdm", "PyYAML"}

# Variables to print with their values.
_SHOWN = (
    "CUDA_", "CUBLAS_", "GLOO_", "KMP_", "MASTER_", "MKL_", "NCCL_", "NVIDIA_VISIBLE", "OMP_", "PET_",
    "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_", "TORCH", "TRAINKIT_",
)  # fmt: skip
# Ranks and sizes under the names of the launchers, also printed with their values.
_PLACES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "CROSS_RANK", "CROSS_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES",
    "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE",
    "SLURM_PTY_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
}  # fmt: skip

# Variables to print by name only: their values may be private.
_NAMED = (
    "COMET_", "JSM_", "KUBERNETES_", "LSB_", "LSF_", "MLFLOW_", "MPI_", "MV2_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "WANDB_",
)  # fmt: skip

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    rows = [("trainkit", __version__), ("python", f"{platform.python_version()} ({platform.python_implementation()})")]
    rows += [("platform", platform.platform()), ("cpu", _cpu()), ("memory", _memory())]
    rows += _torch()
    names = (*_PACKAGES, *(package for info in strategy_infos() for package in info.packages), *_OTHERS)
    rows += [(name, version) for name in names if (version := _version(name)) is not None and name != "torch"]
    rows += [("started by", _launcher(os.environ))]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print("\nvariables")
    for line in _variables(os.environ):
        print(f"  {line}")
    return 0


def _version(name: str) -> str | None:
    """The version of a package; `None` for an optional one that is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed" if name in _REQUIRED else None


def _cpu() -> str:
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name or 'unknown'}, {platform.machine()}, {usable} of {os.cpu_count()} cores"


def _memory() -> str:
    try:
        page, all_pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{page * all_pages / _GIB:.1f} GiB"


def _torch() -> list[tuple[str, str]]:
    try:
        import torch
    except Exception as error:  # the report must work for a broken installation
        return [("torch", f"{_version('torch')}, cannot be imported: {type(error).__name__}: {error}")]
    rows = [("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    built = torch.version.cuda or torch.version.hip
    rows.append(("cuda", f"{built}, cuDNN {torch.backends.cudnn.version()}" if built else "not in this build of torch"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / _GIB:.1f} GiB"
        rows.append((f"gpu {index}", f"{properties.name}, {size}, {properties.major}.{properties.minor}"))
    if not gpus:
        rows.append(("gpus", "MPS" if torch.backends.mps.is_available() else "none"))
    import torch.distributed as dist

    backends = [
        name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_available() and getattr(dist, f"is_{name}_available")()
    ]
    rows.append(("distributed", ", ".join(backends) or "not in this build of torch"))
    return rows


def _launcher(env: Mapping[str, str]) -> str:
    try:
        place = read_ranks(env)
    except ConfigurationError as error:
        return f"contradictory variables: {error}"
    if place is None:
        return f"no launcher: a single process{' (interactive)' if sys.flags.interactive else ''}"
    nodes = "" if place.nodes is None else f", {quantity(place.nodes, 'node')}"
    return f"{place.launcher}: rank {place.rank} of {place.size}{nodes} ({place.reason})"


def _variables(env: Mapping[str, str]) -> Iterator[str]:
    """The relevant variables; values only if they are not secret."""
    prefixes = (*_SHOWN, *(prefix for info in strategy_infos() for prefix in info.variables))
    for name in sorted(env):
        shown = name in _PLACES or name.startswith(prefixes)
        if not shown and not name.startswith(_NAMED):
            continue
        yield f"{name}={mask_value('', env[name])!r}" if shown and not is_secret_name(name) else f"{name} is set"
