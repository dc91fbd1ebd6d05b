"""Resolve `accelerator`, `devices`, `num_nodes` and `strategy` to a strategy on this process's device.

It comes after `environment`, which has the ranks, and before `joining.join`, which the strategy calls in `join_strategy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainkit.checks import is_whole, whole_number
from trainkit.console import notice
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.launch.environment import DEVICE, tpu_is_chosen
from trainkit.launch.joining import note_single_process, processes, single_world, tell_rank
from trainkit.registry import automatic_strategy, find_info, make_strategy, normalize_name

if TYPE_CHECKING:
    from trainkit.precision import Precision
    from trainkit.strategy import StepArguments, Strategy

__all__ = ["choose_strategy", "join_strategy", "read_devices"]

_KINDS = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "tpu": DEVICE}


def read_devices(accelerator: Any, devices: Any, num_nodes: Any) -> RequestedDevices:
    """The devices that these arguments request, or a `ConfigurationError` or one of its subclasses."""
    if accelerator in ("hpu", "ipu"):
        raise UnsupportedArgumentError(
            f"accelerator={accelerator!r} is not supported. Use 'auto', 'cpu', 'gpu', 'mps' or 'tpu'."
        )
    if accelerator == DEVICE:
        raise UnknownNameError(
            f"accelerator={accelerator!r}: XLA is a strategy, not a device. Use accelerator='tpu', or strategy={accelerator!r}."
        )
    if not isinstance(accelerator, str) or accelerator not in _KINDS:
        raise UnknownNameError(
            f"unknown accelerator {accelerator!r}; known: {', '.join(_KINDS)}.{nearest(str(accelerator), _KINDS)}"
        )
    if num_nodes is not None:
        num_nodes = whole_number(num_nodes, "num_nodes", 1)
    kind = _KINDS[accelerator]
    if kind == "cuda" and not torch.cuda.is_available() and torch.backends.mps.is_available():
        kind = "mps"
    per_node, indices = _read_devices(devices)
    if kind == "mps" and per_node is not None and per_node > 1:
        raise ConfigurationError(f"devices={devices!r}: there is one MPS device. Use devices=1.")
    return RequestedDevices(kind, per_node, indices, num_nodes)


def _read_devices(devices: Any) -> tuple[int | None, tuple[int, ...] | None]:
    """Number of processes per node (-1: one for each GPU), and the indices of the GPUs if given."""
    if devices in ("auto", None):
        return None, None
    if (named := _named_gpus(devices)) is not None:
        if len(set(named)) < len(named):
            raise ConfigurationError(
                f"devices={list(named)!r} names a GPU twice. Name each once: devices={sorted(set(named))!r}"
            )
        return len(named), named
    if devices in (-1, "-1"):
        return -1, None
    if (is_whole(devices) or isinstance(devices, str)) and str(devices).isdigit() and int(devices) > 0:
        return int(devices), None
    raise ConfigurationError(f"devices must be 'auto', a number, or a list of GPUs such as [0, 1], not {devices!r}.")


def _named_gpus(devices: Any) -> tuple[int, ...] | None:
    """The indices in `[0, 1]` or `"0,1"`; `None` for other values."""
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.rstrip(", ").split(",")]
        return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
    if isinstance(devices, list | tuple) and devices and all(type(d) is int and d >= 0 for d in devices):
        return tuple(devices)
    return None


def choose_strategy(name: str, requested: RequestedDevices) -> str:
    """The name of the strategy to use; `"auto"` is replaced unless the run has one device that is not a TPU.

    Raises:
        ConfigurationError: the strategy does not support the device, or the variables of a launcher contradict each other.
    """
    name = normalize_name(name)
    info = find_info(name)
    if name == "auto":
        on_tpu = requested.accelerator == DEVICE or (requested.accelerator == "auto" and tpu_is_chosen())
        if not on_tpu and processes(requested) == 1:
            note_single_process(requested.per_node)
            return name
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return automatic_strategy(DEVICE if on_tpu else device if requested.accelerator == "auto" else requested.accelerator)
    if info is not None and info.one_device:
        note_single_process(1)
    if requested.accelerator == DEVICE and (info is None or DEVICE not in info.devices):
        raise ConfigurationError(
            f"accelerator='tpu' works with strategy='xla', not with {name!r}. Remove strategy, or set strategy='xla'."
        )
    return name


def join_strategy(
    strategy: str | Strategy,
    requested: RequestedDevices,
    sync_batchnorm: bool,
    precision: str | int | Precision | None = None,
    arguments: StepArguments | None = None,
    message: str = "",
) -> Strategy:
    """The strategy on its device, after this process has joined the other processes of the run.

    Args:
        strategy: a name or an object; "auto": one device, or DDP on several.
        requested: the requested devices.
        sync_batchnorm: compute BatchNorm statistics over all processes.
        precision: its precision.
        arguments: those of the `Trainer`; what the strategy does not support is refused.
        message: a notice to print after joining, when the main process is known.

    Raises:
        ConfigurationError: arguments that contradict each other or the devices of this process.
    """
    alone = False
    if isinstance(strategy, str):
        name = choose_strategy(strategy, requested)
        info = find_info(name)
        alone = info is not None and info.one_device
        made: Strategy = make_strategy(name, device=_single_device(requested) if alone else requested.accelerator)
    else:
        made = make_strategy(strategy)
        if not made.accepts(requested.accelerator):
            raise ConfigurationError(
                f"accelerator={requested.accelerator!r} and {made!r} name different devices. Pass only one."
            )
    if sync_batchnorm and not alone:
        if not made.can_sync_batchnorm:
            raise ConfigurationError(f"sync_batchnorm=True works with strategy='ddp' only, not with {made!r}. Remove it.")
        made.sync_batchnorm = True
    if arguments is not None:
        made.check_arguments(arguments)
    if precision is not None:
        made.check_precision(precision)  # before processes are started
    made.join(requested)
    if made.info.one_device:
        made.world = single_world()
    tell_rank(made.world.rank)
    if message:
        notice(message)
    if precision is not None:
        made.use_precision(precision)
    return made


def _single_device(requested: RequestedDevices) -> torch.device | str:
    """The device of a run on a single one."""
    if requested.indices is None or len(requested.indices) != 1:
        return requested.accelerator
    (index,) = requested.indices
    if requested.accelerator in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", index)
    if index:
        raise ConfigurationError(
            f"devices=[{index}]: GPU {index} does not exist for accelerator={requested.accelerator!r}. Remove devices."
        )
    return requested.accelerator
