"""torch_xla and its runtime: imports it when it is needed, selects the devices, and moves batches to them."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
import os
import queue
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.console import notice
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.launch.environment import tpu_is_here
from trainkit.nested import leaves, map_tensors, move

__all__ = [
    "BatchSharding",
    "XLAGenerator",
    "choose_runtime",
    "compilation_hints",
    "compilations",
    "count_devices",
    "import_torch_xla",
    "load_ahead",
    "read_on_all_ranks",
    "refuse_late_runtime",
    "require",
    "set_compilation_cache",
    "to_xla",
]


_INSTALL = "pip install 'trainkit-torch[xla]'"


def import_torch_xla() -> Any:
    """Import `torch_xla`, without the startup output of its runtime."""
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
    """Raise an error if torch_xla cannot be imported. Does not import it, which takes seconds."""
    try:
        theirs = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(
            "strategy='xla' needs torch_xla, which is not installed. Install it in a separate environment, because it needs "
            f"its own version of torch (this one has torch {torch.__version__}): {_INSTALL}"
        ) from None
    version = ".".join(theirs.split(".")[:2])
    here = ".".join(torch.__version__.split(".")[:2])
    if version != here:
        raise MissingPackageError(
            f"torch_xla {theirs} needs torch {version}, but torch {torch.__version__} is installed. Install matching versions "
            f"in a separate environment: {_INSTALL}"
        )


def choose_runtime(requested: RequestedDevices, env: MutableMapping[str, str] = os.environ) -> None:
    """Select the runtime, and the number of its devices on a CPU, by environment variables. Call it before the runtime starts.

    Args:
        requested: The devices that the user asked for.
        env: The environment of the process. Sets `PJRT_DEVICE` and, if it is not set, `CPU_NUM_DEVICES`.
    """
    if requested.indices is not None:
        raise ConfigurationError(
            f"devices={list(requested.indices)} does not work with XLA, which needs a number of devices. Select the chips in "
            "the environment: export TPU_VISIBLE_CHIPS=0,2"
        )
    runtime = env.get("PJRT_DEVICE", "").upper()
    if requested.accelerator == "cpu":
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
    elif runtime == "CPU" and requested.accelerator == "xla":
        notice("accelerator='tpu', but PJRT_DEVICE=CPU in the environment: the run uses XLA's CPU runtime instead of a TPU.")
    env["PJRT_DEVICE"] = runtime
    if runtime == "CPU" and requested.per_node is not None and requested.per_node > 0:
        env.setdefault("CPU_NUM_DEVICES", str(requested.per_node))


def count_devices(requested: RequestedDevices, xr: Any) -> int:
    """Return the number of devices of an SPMD run, on all hosts together.

    Args:
        requested: The devices that the user asked for.
        xr: `torch_xla.runtime`.
    """
    here, hosts = int(xr.addressable_runtime_device_count()), int(xr.process_count())
    if requested.nodes is not None and requested.nodes != hosts:
        raise ConfigurationError(
            f"num_nodes={requested.nodes}, but XLA's runtime has {hosts}. Start the script on every host of the TPU slice, or "
            f"use num_nodes={hosts}."
        )
    each = requested.per_node
    if each is not None and each > 0 and each != here and not (each == 1 and hosts == 1):
        more = "CPU_NUM_DEVICES" if xr.device_type() == "CPU" else "TPU_VISIBLE_CHIPS"
        raise ConfigurationError(
            f"devices={each}, but XLA's runtime has {here} on this host. Use devices={here}, or set {more} in the environment "
            "before the runtime starts, which is at the first tensor on an XLA device."
        )
    return 1 if each == 1 else int(xr.global_runtime_device_count())


def set_compilation_cache(folder: Any, xr: Any) -> None:
    """Make the runtime cache compiled programs in a folder."""
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
        error: The error of a backward pass.
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
    values: list[torch.Tensor] = importlib.import_module("torch_xla")._XLAC._xla_get_cpu_tensors(tensors)
    return values


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


# ------------------------------------------------------------------------------------------------------------ transfers


_NEVER = 1 << 62  # number of batches after which MpDeviceLoader would sync by itself


class BatchSharding:
    """How the tensors of a batch are sharded over a mesh: along their first dimension. Scalars are not sharded.

    Use it like a `ShardingSpec`, which supports only a fixed number of dimensions.

    Args:
        axes: The axes of the mesh over which samples are sharded.

    Attributes:
        parts: Number of shards.
    """

    minibatch = False  # each host passes all samples, and the runtime uses those of its own devices

    def __init__(self, mesh: Any, axes: tuple[str, ...]) -> None:
        self._spmd = importlib.import_module("torch_xla.distributed.spmd")
        self.mesh = mesh
        self._axes = axes
        self.parts = math.prod(mesh.shape()[axis] for axis in axes)
        self._specs: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return True

    def can_apply(self, tensor: Tensor) -> bool:
        """Whether a tensor is sharded."""
        return tensor.ndim > 0

    def xla_spec(self, tensor: Tensor) -> Any:
        """The sharding of a tensor, as the runtime needs it."""
        spec = self._specs.get(tensor.ndim)
        if spec is None:
            spec = self._specs[tensor.ndim] = self._spmd.ShardingSpec(self.mesh, self.partition(tensor))
        return spec.xla_spec(tensor)

    def partition(self, tensor: Tensor) -> tuple[Any, ...]:
        """The mesh axes of each dimension of a tensor."""
        return (self._axes, *[None] * (tensor.ndim - 1)) if tensor.ndim else ()

    def mark(self, value: Any) -> Any:
        """Shard the tensors of a batch that is already on the device."""
        xla: Any = importlib.import_module("torch_xla")
        for leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.device.type == "xla" and not xla._XLAC._get_xla_sharding_spec(leaf):
                self._spmd.mark_sharding(leaf, self.mesh, self.partition(leaf))
        return value


def to_xla(batch: Any, device: torch.device, sharding: BatchSharding | None) -> Any:
    """Move a batch to the device, sharded over the mesh."""
    tensors = _tensors_on_cpu(batch)
    if tensors:
        xm: Any = importlib.import_module("torch_xla.core.xla_model")
        batch = _with_tensors(batch, xm.send_cpu_data_to_device(tensors, device, sharding))
    if _moves_itself(batch):
        batch = move(batch, device)
    return batch if sharding is None else sharding.mark(batch)


def load_ahead(
    items: Iterator[Any],
    load: Callable[[Any, int], Any] | None,
    start: int,
    *,
    device: torch.device,
    sharding: BatchSharding | None,
    before: Callable[[], None],
) -> Iterator[Any]:
    """Yield items on the device, and transfer each during the step of the previous one.

    Args:
        items: Batches, or tuples that contain a batch, on the CPU.
        load: `load(item, number)` moves an item to the device, if the user overrides a transfer hook. Items are then not
            transferred ahead.
        start: Number of the first item.
        device: The target device.
        sharding: How batches are sharded over several devices.
        before: Called before each item, when the step of the previous one is complete.
    """
    if load is not None:
        for number, item in enumerate(_each(items, before), start):
            loaded = load(item, number)
            yield loaded if sharding is None else sharding.mark(loaded)
        return
    feed = _Feed()
    parallel_loader: Any = importlib.import_module("torch_xla.distributed.parallel_loader")
    loader = parallel_loader.MpDeviceLoader(
        feed,
        device,
        batches_per_execution=_NEVER,  # the strategy syncs once per step
        loader_prefetch_size=2,
        device_prefetch_size=1,  # it waits for this number of batches, and then transfers them together
        input_sharding=sharding,
    )
    arrivals = iter(loader)
    waiting: deque[tuple[Any, bool]] = deque()

    def receive() -> Any:
        item, sent = waiting.popleft()
        item = _with_tensors(item, next(arrivals)) if sent else item
        return to_xla(item, device, sharding) if _moves_itself(item) else item

    try:
        for item in _each(items, before):
            tensors = _tensors_on_cpu(item)
            if tensors:
                feed.put(tensors)
            waiting.append((item, bool(tensors)))
            if len(waiting) > 1:
                yield receive()
        while waiting:
            yield receive()
            before()
    finally:
        feed.end()
        loader._parallel_loader.close()


def _each(items: Iterator[Any], before: Callable[[], None]) -> Iterator[Any]:
    while True:
        before()
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


class _Feed:
    """The loader that `MpDeviceLoader` reads: yields what `put` adds, until `end`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[list[Tensor] | None] = queue.SimpleQueue()

    def put(self, tensors: list[Tensor]) -> None:
        self._items.put(tensors)

    def end(self) -> None:
        self._items.put(None)

    def __iter__(self) -> Iterator[list[Tensor]]:
        while (tensors := self._items.get()) is not None:
            yield tensors


def _tensors_on_cpu(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor) if tensor.device.type == "cpu" else None)
    return tensors


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Replace the CPU tensors in a value by others, in order."""
    arrived = iter(tensors)
    return map_tensors(value, lambda tensor: next(arrived) if tensor.device.type == "cpu" else tensor)


def _moves_itself(value: Any) -> bool:
    """Whether a value contains an object that is not a tensor and has a method `to`."""
    return any(not isinstance(leaf, Tensor) and callable(getattr(leaf, "to", None)) for leaf in leaves(value))
