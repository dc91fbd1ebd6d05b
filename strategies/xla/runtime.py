"""torch_xla as the strategy uses it: imported when it is needed, on the runtime and the devices that were asked for."""

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
    "keep_compilations",
    "read_on_all_ranks",
    "refuse_late_runtime",
    "require",
]

_INSTALL = "pip install 'trainkit-torch[xla]'"


def imported() -> Any:
    """The package ``torch_xla``, without what its runtime prints of itself.

    Raises:
        MissingPackageError: it is not installed, or does not load with this torch; with the versions and the command.
    """
    require()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when it is loaded; 1 tells of every choice it makes
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        return importlib.import_module("torch_xla")
    except (ImportError, OSError) as error:
        raise MissingPackageError(
            f"torch_xla {importlib.metadata.version('torch_xla')} cannot be loaded with torch {torch.__version__}: {error}. "
            f"Install both anew: {_INSTALL}"
        ) from error
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)  # its import calls logging.basicConfig(), and how a program logs is the user's business


def require() -> None:
    """Refuse at once where torch_xla cannot be loaded; it is not imported, which takes seconds.

    Raises:
        MissingPackageError: it is not installed, or does not load with this torch; with the versions and the command.
    """
    try:
        theirs = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(
            "strategy='xla' runs on torch_xla, which is not installed. Install it, in an environment of its own, as it needs a "
            f"torch of its own (here is {torch.__version__}): {_INSTALL}"
        ) from None
    wanted = ".".join(theirs.split(".")[:2])
    here = ".".join(torch.__version__.split(".")[:2])
    if wanted != here:
        raise MissingPackageError(
            f"torch_xla {theirs} loads with torch {wanted} only, and here is torch {torch.__version__}. Install the two that "
            f"belong together, in an environment of their own: {_INSTALL}"
        )


def choose_runtime(wanted: RequestedDevices, env: MutableMapping[str, str] = os.environ) -> None:
    """Say, before the runtime begins, which one is to be used, and on how many devices of a CPU.

    Args:
        wanted: what the user asked for.
        env: of the process; ``PJRT_DEVICE`` and ``CPU_NUM_DEVICES`` are set in it where they are not.

    Raises:
        ConfigurationError: there is no TPU, or the variables contradict the arguments.
    """
    if wanted.indices is not None:
        raise ConfigurationError(
            f"devices={list(wanted.indices)}: XLA takes its devices from the runtime. Give their number, and choose the chips "
            "by the environment: export TPU_VISIBLE_CHIPS=0,2"
        )
    runtime = env.get("PJRT_DEVICE", "").upper()
    if wanted.accelerator == "cpu":
        if runtime not in ("", "CPU"):
            raise ConfigurationError(
                f"accelerator='cpu' contradicts PJRT_DEVICE={runtime} in the environment. Leave one of them out."
            )
        runtime = "CPU"
    elif not runtime:
        if not tpu_is_here():
            raise ConfigurationError(
                "strategy='xla': this machine has no TPU. To run on XLA's CPU runtime, as a trial: accelerator='cpu', or "
                "export PJRT_DEVICE=CPU"
            )
        runtime = "TPU"
    elif runtime == "CPU" and wanted.accelerator == "xla":
        notice("accelerator='tpu', and PJRT_DEVICE=CPU in the environment: XLA's CPU runtime stands in for the TPU.")
    env["PJRT_DEVICE"] = runtime
    if runtime == "CPU" and wanted.per_node is not None and wanted.per_node > 0:
        env.setdefault("CPU_NUM_DEVICES", str(wanted.per_node))


def count_devices(wanted: RequestedDevices, xr: Any) -> int:
    """The devices of an SPMD run, those of all hosts together.

    Args:
        wanted: what the user asked for.
        xr: ``torch_xla.runtime``.

    Raises:
        ConfigurationError: there are others than were asked for.
    """
    here, hosts = int(xr.addressable_runtime_device_count()), int(xr.process_count())
    if wanted.nodes is not None and wanted.nodes != hosts:
        raise ConfigurationError(
            f"num_nodes={wanted.nodes}, but XLA's runtime knows of {hosts}. Start the script on every host of the TPU slice, "
            "or leave num_nodes out."
        )
    each = wanted.per_node
    if each is not None and each > 0 and each != here and not (each == 1 and hosts == 1):
        more = "CPU_NUM_DEVICES" if xr.device_type() == "CPU" else "TPU_VISIBLE_CHIPS"
        raise ConfigurationError(
            f"devices={each}, but XLA's runtime has {here} on this host. Use devices={here}, or say before the runtime begins "
            f"which there are ({more} in the environment); it begins with the first tensor on an XLA device."
        )
    return 1 if each == 1 else int(xr.global_runtime_device_count())


def keep_compilations(folder: Any, xr: Any) -> None:
    """Let the runtime keep compiled programs in a folder.

    Raises:
        ConfigurationError: the runtime has begun without, or cannot write there.
    """
    path = Path(folder).absolute()
    if os.environ.get("XLA_PERSISTENT_CACHE_PATH") == str(path):
        return  # an earlier run of this process has seen to it
    try:
        path.mkdir(parents=True, exist_ok=True)
        # of several processes on a host the first one writes
        xr.initialize_cache(str(path), readonly=os.environ.get("PJRT_LOCAL_PROCESS_RANK", "0") != "0")
    except OSError as error:
        raise ConfigurationError(f"compilation_cache={str(folder)!r} cannot be used: {error}") from error
    except (AssertionError, RuntimeError) as error:
        raise ConfigurationError(
            f"compilation_cache={str(folder)!r}: XLA's runtime has begun without it. Make the Trainer or Accelerator before "
            f"the first tensor on an XLA device. ({error})"
        ) from error


def refuse_late_runtime(error: RuntimeError) -> None:
    """Say what is behind torch's error about queues: its autograd makes one for each device at its first backward pass.

    Args:
        error: of a backward pass.

    Raises:
        ConfigurationError: the first one was before XLA's runtime began.
    """
    if "device_ready_queues_" in str(error):
        raise ConfigurationError(
            "a backward pass has been run in this process before XLA's runtime began, and torch's autograd does not learn of "
            "devices after that. Make the Trainer or Accelerator with strategy='xla' before anything is trained on another "
            "device, or run it in another process."
        ) from error


def compilations() -> int:
    """How many graphs the runtime has compiled in this process."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    return int(metrics.counter_value("UncachedCompile") or 0)


def compilation_hints() -> dict[str, int]:
    """Graphs that have been run, values that have been read one by one, and operations that were left to the host.

    A tensor that is brought to the host whole (``.cpu()``, ``print``) is no read that torch_xla counts, but runs a graph.
    """
    metrics = importlib.import_module("torch_xla.debug.metrics")
    value = metrics.counter_value
    hints = {name: int(value(name)) for name in metrics.counter_names() if name.startswith("aten::")}
    hints["reads"] = hints.pop("aten::_local_scalar_dense", 0)
    hints["graphs"] = int(value("UncachedCompile") or 0) + int(value("CachedCompile") or 0)
    return hints


def read_on_all_ranks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU, by one request."""
    found: list[torch.Tensor] = importlib.import_module("torch_xla")._XLAC._xla_get_cpu_tensors(tensors)
    return found


class XLAGenerator:
    """XLA's random generator of a device, with the methods of ``torch.Generator`` that seeding needs.

    Its state is one unsigned number of 64 bits, which every sync advances.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = str(device)
        self._xm = importlib.import_module("torch_xla.core.xla_model")

    def manual_seed(self, seed: int) -> None:
        """Begin anew from a number of 64 bits."""
        self._xm.set_rng_state(seed, self._device)

    def get_state(self) -> int:
        """Where it is."""
        return int(self._xm.get_rng_state(self._device))

    def set_state(self, state: int) -> None:
        """Go on from where it was."""
        self._xm.set_rng_state(state, self._device)
