"""The state of the process that a test must not change: settings, signal handlers, threads and child processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch

# Threads that packages start once and never end: the monitor of tqdm's bars, threads for wandb's service process, and threads
# of autograd, which Python shows as dummy threads.
LASTING_THREADS = {"TMonitor", "_DummyThread", "wandb-AsyncioManager-main", "wandb-ServiceFinalizer"}

# Environment variables that pytest, scikit-learn, torch, torch_xla and wandb set by themselves.
NOT_OURS = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by DeepSpeed, which accelerate imports where it is installed
    "TORCHINDUCTOR_CACHE_DIR",
    "WANDB_SERVICE",
    # set by torch_xla, which accelerate imports where it is installed
    "GRPC_VERBOSITY",
    "PJRT_DEVICE",
    "PJRT_DYNAMIC_PLUGINS",
    "TF_CPP_MIN_LOG_LEVEL",
    "XLA_FLAGS",
}

# Signals whose handlers Python can read and set.
SIGNALS = sorted(signal.valid_signals() - {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")})


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(value: torch.device) -> None:
    # set_default_device("cpu") leaves a torch function mode behind, in which modules use other code paths: the evaluation of a
    # transformer then differs in the last bit.
    if value == torch.device("cpu"):
        _set_no_default_device()
    else:
        torch.set_default_device(value)


def _set_no_default_device(_: object = None) -> None:
    torch.set_default_device(None)
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", "not there") is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # torch 2.9 cannot read the None


def _set_environment(value: dict[str, str]) -> None:
    for name in set(os.environ) - set(value) - NOT_OURS:
        del os.environ[name]
    os.environ.update(value)


def _set_signals(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
            signal.signal(number, handler)


# Name → the functions that read and restore the setting.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": (torch.get_default_device, _set_default_device),
    "torch function modes": (torch._C._len_torch_function_stack, _set_no_default_device),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms (on, only warning)": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "torch.utils.deterministic.fill_uninitialized_memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "numpy.geterr()": (numpy.geterr, lambda value: numpy.seterr(**value)),
    "signal handlers": (lambda: {number: signal.getsignal(number) for number in SIGNALS}, _set_signals),
    "os.environ": (
        lambda: {name: value for name, value in os.environ.items() if name not in NOT_OURS},
        _set_environment,
    ),
}


class ProcessState:
    """The state of the process when the object was created.

    Args:
        patience: Seconds to wait for new threads and child processes that are about to end.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self.patience = patience
        self.settings = {name: read() for name, (read, _) in SETTINGS.items()}
        self.threads = set(threading.enumerate())
        self.children = set(multiprocessing.active_children())

    def restore(self) -> list[str]:
        """Restore every setting; returns a line for each setting that had changed and each thread or child that still runs."""
        left = []
        for name, (read, write) in SETTINGS.items():
            before, after = self.settings[name], read()
            if after != before:
                write(before)
                left.append(f"{name}: {_difference(before, after)}")
        left += [f"a thread is still alive: {thread!r}" for thread in self._still_alive(self._new_threads)]
        left += [f"a child process is still alive: {child!r}" for child in self._still_alive(self._new_children)]
        return left

    def _new_threads(self) -> list[threading.Thread]:
        threads = set(threading.enumerate()) - self.threads
        return [t for t in threads if not {t.name, type(t).__name__} & LASTING_THREADS]

    def _new_children(self) -> list[Any]:
        return list(set(multiprocessing.active_children()) - self.children)

    def _still_alive(self, new: Callable[[], list[Any]]) -> list[Any]:
        end = time.monotonic() + self.patience
        while (alive := new()) and time.monotonic() < end:
            time.sleep(0.01)
        return alive


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return "; ".join(f"{name}: {before.get(name)!r} → {after.get(name)!r}" for name in sorted(names))
    return f"{before!r} → {after!r}"
