"""Tests of XLA: `from helpers.xla.xla_runs import run_xla`.

torch_xla makes its runtime once for a process, with the devices that the environment names at that moment, and its threads do
not survive a fork. So what uses it runs in a fresh process: forked from the server of `worlds.py`, which has imported
torch_xla in the environment of `make test-xla` and made no runtime, it takes a few hundredths of a second. The tests' own
process never makes a runtime: it imports torch_xla nowhere, so that these tests can be collected where there is none.

Wherever these tests run, `devices` is what they ask for: of the CPU it makes as many; of a TPU, whose number is given, a
test that asks for another number is skipped. A TPU belongs to one process at a time: `PJRT_DEVICE=TPU make test-xla JOBS=0`.
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
    """A process with torch_xla that runs one function: `with start_xla(function) as run`; at the end it is killed.

    Args:
        function: one of a module's.
        args: of it; they and what it returns must be picklable without torch_xla: no tensors on an XLA device.
        env: variables in addition to those of the tests' process.
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
        """What it has printed until now: standard output and error, together and in their order."""
        return self._printed if self._log.closed else Path(self._log.name).read_text()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._end is not None or not self._world.processes[0].is_alive()

    def end(self, patience: float = PATIENCE) -> tuple[bool, Any]:
        """Wait for its end: whether it returned, and what; else the traceback, or its exit code as `"ended with -9"`."""
        if self._end is None:
            try:
                [self._end] = self._world.ends(patience)
            except WorldError as error:  # it hangs, and has been killed
                self._end = False, str(error)
            self._printed = self.output
            self._log.close()
        return self._end

    def result(self, patience: float = PATIENCE) -> Any:
        """Wait for its end, and return what the function returned.

        Raises:
            WorldError: it raised, was killed, or hangs; with the traceback and what it has printed.
        """
        fine, value = self.end(patience)
        if not fine:
            raise WorldError(f"{value}\nIt had printed:\n{self.output}")
        return value

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds; returns what it returned.

        Raises:
            WorldError: the process has ended, or too much time has passed; with what it has printed.
        """
        over = monotonic() + PATIENCE
        while True:
            ended = self.ended  # before the condition: what it did last counts
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
        """Send it a signal."""
        self._world.signal(0, number)

    def kill(self) -> None:
        """SIGKILL, unless it has ended; returns when it is dead."""
        if self._end is None:
            if not self.ended:
                self.signal(signal.SIGKILL)
            self.end()


def start_xla(function: Callable[..., Any], *args: Any, devices: int = 1, env: dict[str, str] | None = None) -> XLARun:
    """Start `function(*args)` in a fresh process with torch_xla and `devices` devices, like a script started by hand.

    Args:
        function: one of a module's; see `XLARun`.
        args: of it.
        devices: of the runtime.
        env: more variables; `XLA_FLAGS` come behind those that torch_xla sets itself.
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
    """What `function(*args)` returned in a fresh process with torch_xla; see `start_xla`.

    Raises:
        WorldError: it raised; with the traceback and what it has printed.
    """
    with start_xla(function, *args, devices=devices, env=env) as run:
        return run.result()


@functools.cache
def _devices_of(kind: str) -> int:
    """How many devices the runtime finds; asked in a process of its own, since a process that asks takes hold of them."""
    with XLARun(_count, (), {"PJRT_DEVICE": kind}) as run:
        count: int = run.result()
    return count


def _count() -> int:
    import torch_xla.runtime

    count: int = torch_xla.runtime.global_runtime_device_count()
    return count
