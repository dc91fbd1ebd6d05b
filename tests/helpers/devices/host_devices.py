"""Two devices for tests of modules whose layers are on several devices: `from helpers.devices.host_devices import build, load`.

`host:0` and `host:1` use the device type that torch leaves to other packages. Their memory is the host's, and operations on
them run on the CPU. An operation on tensors of both is an error, as it is on GPUs. Load them in a process of their own: torch
cannot forget them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils import cpp_extension

__all__ = ["FIRST", "SECOND", "build", "load"]

FIRST, SECOND = "host:0", "host:1"


def build(folder: Path) -> str:
    """Compile the devices, which takes some seconds; returns the path of the library."""
    library = folder / "host_devices.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
    source = Path(__file__).with_suffix(".cpp")
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *includes, str(source), "-o", str(library), *linked]
    subprocess.run(command, check=True)
    return str(library)


def load(library: str) -> None:
    """Add the devices to this process."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("host")
    torch._register_device_module(
        "host",
        SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 2,
            current_device=lambda: 0,
            manual_seed_all=lambda seed: None,
            _is_in_bad_fork=lambda: False,
            get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        ),
    )
