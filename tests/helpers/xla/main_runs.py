"""What tests of XLA have done in the main environment, with its torch: `from helpers.xla.main_runs import run_main`.

A checkpoint that was written under XLA resumes there, on any number of processes, and the other way round. One process of the
other environment serves all tests of this one; it is started by the first, and starts worlds (`worlds.py`) when asked.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from helpers.patience import PATIENCE
from helpers.support import ROOT, TESTS
from helpers.worlds.worlds import World, WorldError, find, where_is

__all__ = ["VARIABLE", "run_main"]

VARIABLE = "TRAINKIT_MAIN_PYTHON"


def run_main(function: Callable[..., Any], *args: Any, size: int | None = None, env: dict[str, str] | None = None) -> Any:
    """What `function(*args)` returned under the Python of the main environment, in the working directory of this process.

    Args:
        function: one of a module's, which imports without torch_xla.
        args: of it; they and what it returns are pickled from one torch to another: plain values and paths.
        size: run it in `size` processes, with the variables that torchrun sets; None: in one that was not launched.
        env: more variables.

    Returns:
        With a `size` the list of what each process returned, else the one value.

    Raises:
        WorldError: it raised; with the traceback and what it has printed.
    """
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"needs the Python of the main environment in {VARIABLE}, which `make test-xla` sets")
    blob = pickle.dumps(args)
    fine, answer = _server(python)((size or 1, size is not None, where_is(function), blob, env or {}, os.getcwd()))
    if not fine:
        raise WorldError(answer)
    values = [pickle.loads(value) for value in answer]
    return values[0] if size is None else values


@functools.cache
def _server(python: str) -> Callable[[Any], tuple[bool, Any]]:
    ours, theirs = socket.socketpair()
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115
    variables = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS)])
    process = subprocess.Popen(
        # not this file as the main module, which each process of a world would run again
        [python, "-c", f"from helpers.xla import main_runs; main_runs.serve({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
    )
    theirs.close()
    connection = Connection(ours.detach())

    @atexit.register
    def end() -> None:
        connection.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # the tests were interrupted while it had something to do
            process.kill()
            process.wait()
        said.close()

    def ask(job: Any) -> tuple[bool, Any]:
        try:
            connection.send(job)
            if not connection.poll(PATIENCE + 60.0):  # it gives up before this
                process.kill()  # what it answers later would be taken for the answer to the next job
                return False, f"{python} has not answered"
            answer: tuple[bool, Any] = connection.recv()
            return answer
        except (EOFError, OSError):
            said.seek(0)
            return False, f"{python} has ended with {process.wait()}:\n{said.read()}"

    return ask


def serve(descriptor: int) -> None:
    """In the main environment: do one job after the other, until the other end has gone."""
    connection = Connection(descriptor)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_done(*job))


def _done(
    size: int, launched: bool, where: tuple[str, str, str], blob: bytes, env: dict[str, str], folder: str
) -> tuple[bool, Any]:
    os.chdir(folder)  # its processes start there
    with tempfile.NamedTemporaryFile(prefix="main-run-") as log:
        try:
            world = World(size, where_is(_work), (where, blob), env, launched=launched, log=log.name)
            return True, world.results()
        except WorldError as error:
            return False, f"under {sys.executable}: {error}\nIt had printed:\n{Path(log.name).read_text()}"
        finally:
            os.chdir(ROOT)  # a test's folder may go away


def _work(where: tuple[str, str, str], blob: bytes) -> bytes:
    """In a process of a world. The arguments may be of classes of the function's module, so that is found first."""
    function = find(*where)
    return pickle.dumps(function(*pickle.loads(blob)))
