"""torch_xla and its runtime: imports the package when it is needed, and selects the requested devices."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch

from trainkit.console import notice
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.launch.tpu import tpu_is_here

__all__ = [
    "XLAGenerator",
    "choose_runtime",
    "compilation_hints",
    "compilations",
    "count_devices",
    "imported",
    "read_on_all_ranks",
    "refuse_late_runtime",
    "require",
    "set_compilation_cache",
]

_INSTALL = "pip install 'trainkit-torch[xla]'"


def imported() -> Any:
    """Import `torch_xla`, without the startup output of its runtime.

    Raises:
        MissingPackageError: it is not installed, or does not work with this torch; names the versions and the command.
    """
    require()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read at import; level 1 logs many details
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        return importlib.import_module("torch_xla")
    except (ImportError, OSError) as error:
        raise MissingPackageError(
            f"torch_xla {importlib.metadata.version('torch_xla')} cannot be imported with torch {torch.__version__}: {error}. "
            f"Reinstall both: {_INSTALL}"
        ) from error
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)  # the import calls logging.basicConfig(), but logging is for the user to configure


def require() -> None:
    """Raise an error if torch_xla cannot be imported. Does not import it, which takes seconds.

    Raises:
        MissingPackageError: it is not installed, or does not work with this torch; names the versions and the command.
    """
    try:
        theirs = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(
            "strategy='xla' needs torch_xla, which is not installed. Install it in a separate environment, because it needs "
            f"its own version of torch (this one has torch {torch.__version__}): {_INSTALL}"
        ) from None
    wanted = ".".join(theirs.split(".")[:2])
    here = ".".join(torch.__version__.split(".")[:2])
    if wanted != here:
        raise MissingPackageError(
            f"torch_xla {theirs} needs torch {wanted}, but torch {torch.__version__} is installed. Install matching versions "
            f"in a separate environment: {_INSTALL}"
        )


def choose_runtime(wanted: RequestedDevices, env: MutableMapping[str, str] = os.environ) -> None:
    """Select the runtime, and the number of its devices on a CPU, by environment variables. Call it before the runtime starts.

    Args:
        wanted: the devices that the user asked for.
        env: the environment of the process. Sets `PJRT_DEVICE` and, if it is not set, `CPU_NUM_DEVICES`.

    Raises:
        ConfigurationError: there is no TPU, or the variables contradict the arguments.
    """
    if wanted.indices is not None:
        raise ConfigurationError(
            f"devices={list(wanted.indices)} does not work with XLA, which needs a number of devices. Select the chips in the "
            "environment: export TPU_VISIBLE_CHIPS=0,2"
        )
    runtime = env.get("PJRT_DEVICE", "").upper()
    if wanted.accelerator == "cpu":
        if runtime not in ("", "CPU"):
            raise ConfigurationError(
                f"accelerator='cpu' contradicts PJRT_DEVICE={runtime} in the environment. Remove one of them: unset PJRT_DEVICE"
            )
        runtime = "CPU"
    elif not runtime:
        if not tpu_is_here():
            raise ConfigurationError(
                "strategy='xla' needs a TPU, but this host has none. To test on XLA's CPU runtime, use accelerator='cpu', or "
                "export PJRT_DEVICE=CPU"
            )
        runtime = "TPU"
    elif runtime == "CPU" and wanted.accelerator == "xla":
        notice("accelerator='tpu', but PJRT_DEVICE=CPU in the environment: the run uses XLA's CPU runtime instead of a TPU.")
    env["PJRT_DEVICE"] = runtime
    if runtime == "CPU" and wanted.per_node is not None and wanted.per_node > 0:
        env.setdefault("CPU_NUM_DEVICES", str(wanted.per_node))


def count_devices(wanted: RequestedDevices, xr: Any) -> int:
    """Return the number of devices of an SPMD run, on all hosts together.

    Args:
        wanted: the devices that the user asked for.
        xr: `torch_xla.runtime`.

    Raises:
        ConfigurationError: the runtime has a different number of devices or hosts.
    """
    here, hosts = int(xr.addressable_runtime_device_count()), int(xr.process_count())
    if wanted.nodes is not None and wanted.nodes != hosts:
        raise ConfigurationError(
            f"num_nodes={wanted.nodes}, but XLA's runtime has {hosts}. Start the script on every host of the TPU slice, or use "
            f"num_nodes={hosts}."
        )
    each = wanted.per_node
    if each is not None and each > 0 and each != here and not (each == 1 and hosts == 1):
        more = "CPU_NUM_DEVICES" if xr.device_type() == "CPU" else "TPU_VISIBLE_CHIPS"
        raise ConfigurationError(
            f"devices={each}, but XLA's runtime has {here} on this host. Use devices={here}, or set {more} in the environment "
            "before the runtime starts, which is at the first tensor on an XLA device."
        )
    return 1 if each == 1 else int(xr.global_runtime_device_count())


def set_compilation_cache(folder: Any, xr: Any) -> None:
    """Make the runtime cache compiled programs in a folder.

    Raises:
        ConfigurationError: the runtime has already started without a cache, or cannot write to the folder.
    """
    path = Path(folder).absolute()
    if os.environ.get("XLA_PERSISTENT_CACHE_PATH") == str(path):
        return  # set by an earlier run in this process
    try:
        path.mkdir(parents=True, exist_ok=True)
        # only the first process of a host writes
        xr.initialize_cache(str(path), readonly=os.environ.get("PJRT_LOCAL_PROCESS_RANK", "0") != "0")
    except OSError as error:
        raise ConfigurationError(
            f"compilation_cache={str(folder)!r} cannot be used, but must be a folder that can be written: {error}"
        ) from error
    except (AssertionError, RuntimeError) as error:
        raise ConfigurationError(
            f"compilation_cache={str(folder)!r} has no effect, because XLA's runtime has already started. Create the Trainer "
            f"or Accelerator before the first tensor on an XLA device. ({error})"
        ) from error


def refuse_late_runtime(error: RuntimeError) -> None:
    """Explain torch's error about device queues. Autograd creates one queue for each device, at its first backward pass.

    Args:
        error: the error of a backward pass.

    Raises:
        ConfigurationError: the first backward pass of the process ran before XLA's runtime started.
    """
    if "device_ready_queues_" in str(error):
        raise ConfigurationError(
            "a backward pass ran in this process before XLA's runtime started, but torch's autograd finds devices only at its "
            "first backward pass. Create Trainer(strategy='xla') or Accelerator(strategy='xla') before you train on another "
            "device, or use a new process."
        ) from error


def compilations() -> int:
    """The number of graphs that the runtime has compiled in this process."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    return int(metrics.counter_value("UncachedCompile") or 0)


def compilation_hints() -> dict[str, int]:
    """The number of graphs run, of single values read, and of each operation that ran on the host.

    torch_xla does not count a copy of a whole tensor to the host (`.cpu()`, `print`) as a read, but it runs a graph.
    """
    metrics = importlib.import_module("torch_xla.debug.metrics")
    value = metrics.counter_value
    hints = {name: int(value(name)) for name in metrics.counter_names() if name.startswith("aten::")}
    hints["reads"] = hints.pop("aten::_local_scalar_dense", 0)
    hints["graphs"] = int(value("UncachedCompile") or 0) + int(value("CachedCompile") or 0)
    return hints


def read_on_all_ranks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensors to the CPU in one transfer."""
    found: list[torch.Tensor] = importlib.import_module("torch_xla")._XLAC._xla_get_cpu_tensors(tensors)
    return found


class XLAGenerator:
    """XLA's random number generator of a device, with the methods of `torch.Generator` that seeding needs.

    Its state is one unsigned 64-bit number, which advances at every sync.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = str(device)
        self._xm = importlib.import_module("torch_xla.core.xla_model")

    def manual_seed(self, seed: int) -> None:
        """Seed the generator with a 64-bit number."""
        self._xm.set_rng_state(seed, self._device)

    def get_state(self) -> int:
        """Return the state."""
        return int(self._xm.get_rng_state(self._device))

    def set_state(self, state: int) -> None:
        """Set the state."""
        self._xm.set_rng_state(state, self._device)
