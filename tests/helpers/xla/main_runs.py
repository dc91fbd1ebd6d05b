"""Let tests of XLA run a function in the main environment, with its torch: `from helpers.xla.main_runs import run_main`.

This shows that a checkpoint of an XLA run resumes without XLA, on any number of processes, and the reverse. One server in the
main environment works for all tests of this process. The first test starts it, and it starts processes (`worlds.py`) for jobs.
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
    """Run `function(*args)` with the Python of the main environment, in the working directory of this process.

    Args:
        function: A function of a module that does not need torch_xla.
        args: Its arguments. They and the result are pickled between different versions of torch: use plain values and paths.
        size: Number of processes, with the environment variables of torchrun; None: one process without them.
        env: More environment variables.

    Returns:
        The list of the results of all processes; if `size` is None, the one result.

    Raises:
        WorldError: The function raised; the message has the traceback and the output.
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
        # do not run this file as `__main__`: each process of a `World` would import it again
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
        except subprocess.TimeoutExpired:  # the tests were interrupted while it had a job
            process.kill()
            process.wait()
        said.close()

    def ask(job: Any) -> tuple[bool, Any]:
        try:
            connection.send(job)
            if not connection.poll(PATIENCE + 60.0):  # a hanging job ends before this
                process.kill()  # a late answer would count as the answer to the next job
                return False, f"{python} has not answered"
            answer: tuple[bool, Any] = connection.recv()
            return answer
        except (EOFError, OSError):
            said.seek(0)
            return False, f"{python} has ended with {process.wait()}:\n{said.read()}"

    return ask


def serve(descriptor: int) -> None:
    """In the main environment: run one job after another until the connection closes."""
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
    os.chdir(folder)  # the processes of the job start here
    with tempfile.NamedTemporaryFile(prefix="main-run-") as log:
        try:
            world = World(size, where_is(_work), (where, blob), env, launched=launched, log=log.name)
            return True, world.results()
        except WorldError as error:
            return False, f"under {sys.executable}: {error}\nIt had printed:\n{Path(log.name).read_text()}"
        finally:
            os.chdir(ROOT)  # the folder of the test may be removed


def _work(where: tuple[str, str, str], blob: bytes) -> bytes:
    """In a process of a `World`: import the function's module, then unpickle the arguments, which may use its classes."""
    function = find(*where)
    return pickle.dumps(function(*pickle.loads(blob)))
