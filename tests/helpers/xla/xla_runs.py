"""Run functions in processes with torch_xla: `from helpers.xla.xla_runs import run_xla`.

torch_xla creates its runtime once in a process, with the devices that the environment variables name then, and its threads do
not survive a fork. So code that uses it runs in a new process. It is forked from the fork server of `worlds.py`, which has
imported torch_xla without creating a runtime; this takes a few hundredths of a second. The process of the tests never imports
torch_xla, so that pytest can collect these tests where it is not installed.

Tests state the number of `devices` that they need. On the CPU, XLA creates as many. On a TPU, tests that need a different
number than it has are skipped. Only one process can use a TPU at a time: run `PJRT_DEVICE=TPU make test-xla JOBS=0`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from helpers.patience import PATIENCE
from helpers.worlds.worlds import World, WorldError, where_is

__all__ = ["XLARun", "run_xla", "start_xla"]

_FLAGS = "--xla_cpu_enable_fast_math=false"  # torch_xla sets it when it is imported


class XLARun:
    """A process with torch_xla that runs one function: `with start_xla(function) as run`. At the end, it is killed.

    Args:
        function: A function of a module.
        args: Its arguments. They and the result must be picklable without torch_xla: no tensors on an XLA device.
        env: Environment variables in addition to those of the process of the tests.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> None:
        if importlib.util.find_spec("torch_xla") is None:
            raise ModuleNotFoundError("expected torch_xla in this environment, found none: run these tests by `make test-xla`")
        self._log = tempfile.NamedTemporaryFile(prefix="xla-run-")  # noqa: SIM115
        self._world = World(1, where_is(function), args, env, launched=False, log=self._log.name)
        self._end: tuple[bool, Any] | None = None
        self._printed = ""

    def __enter__(self) -> XLARun:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """The output of the process so far: standard output and standard error, in the order in which it was printed."""
        return self._printed if self._log.closed else Path(self._log.name).read_text()

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self._end is not None or not self._world.processes[0].is_alive()

    def end(self, patience: float = PATIENCE) -> tuple[bool, Any]:
        """Wait until the process exits; returns (True, result), or (False, traceback or exit code as `"ended with -9"`)."""
        if self._end is None:
            try:
                [self._end] = self._world.ends(patience)
            except WorldError as error:  # it was hanging, and `ends` has killed it
                self._end = False, str(error)
            self._printed = self.output
            self._log.close()
        return self._end

    def result(self, patience: float = PATIENCE) -> Any:
        """Wait until the process exits; returns the result of the function.

        Raises:
            WorldError: The function raised, was killed, or hangs; the message has the traceback and the output.
        """
        fine, value = self.end(patience)
        if not fine:
            raise WorldError(f"{value}\nIt had printed:\n{self.output}")
        return value

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds; returns what it returned.

        Raises:
            WorldError: The process has exited, or the time is over; the message has the output.
        """
        over = monotonic() + PATIENCE
        while True:
            ended = self.ended  # checked before the condition, which may become true right before the exit
            if result := condition():
                return result
            if ended:
                raise WorldError(f"it ended before {what}: {self.end()[1]}\nIt had printed:\n{self.output}")
            if monotonic() > over:
                raise WorldError(
                    f"{PATIENCE:g} s have passed before {what}: {self.end(0.0)[1]}\nIt had printed:\n{self.output}"
                )
            sleep(0.001)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._world.signal(0, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has exited; wait until it has ended."""
        if self._end is None:
            if not self.ended:
                self.signal(signal.SIGKILL)
            self.end()


def start_xla(function: Callable[..., Any], *args: Any, devices: int = 1, env: dict[str, str] | None = None) -> XLARun:
    """Start `function(*args)` in a new process with torch_xla and `devices` devices, like a script without a launcher.

    Args:
        function: A function of a module; see `XLARun`.
        args: Its arguments.
        devices: Number of devices of the runtime.
        env: More environment variables; `XLA_FLAGS` are added after those that torch_xla sets itself.
    """
    variables = {"PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU"), "TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})}
    kind = variables["PJRT_DEVICE"]
    if kind == "CPU":
        variables.setdefault("CPU_NUM_DEVICES", str(devices))
    elif (there := _devices_of(kind)) != devices:
        pytest.skip(f"needs {devices} devices, and this {kind} has {there}")
    if "XLA_FLAGS" in variables:
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS} {variables['XLA_FLAGS']}"
    return XLARun(function, args, variables)


def run_xla(function: Callable[..., Any], *args: Any, devices: int = 1, env: dict[str, str] | None = None) -> Any:
    """Run `function(*args)` in a new process with torch_xla; returns the result. See `start_xla`.

    Raises:
        WorldError: The function raised; the message has the traceback and the output.
    """
    with start_xla(function, *args, devices=devices, env=env) as run:
        return run.result()


@functools.cache
def _devices_of(kind: str) -> int:
    """Number of devices that the runtime finds, counted in a new process: a process that counts them also occupies them."""
    with XLARun(_count, (), {"PJRT_DEVICE": kind}) as run:
        count: int = run.result()
    return count


def _count() -> int:
    import torch_xla.runtime

    count: int = torch_xla.runtime.global_runtime_device_count()
    return count
