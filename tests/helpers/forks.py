"""Python processes that are forked from a server which has imported torch and trainkit, instead of importing both again.

A process of the server behaves as one that was started: it has its own `__main__`, arguments, environment and working
directory, runs at the top of its interpreter, and exits as Python does. Besides, it has the modules that the server imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["ForkedProcess", "can_fork"]

_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.run", "numpy", "tqdm", "trainkit", "trainkit.cli.main"]
_PRELOAD += ["trainkit.trainer.trainer", "trainkit.accelerator.accelerator", "trainkit.strategies.ddp.ddp_strategy"]

# Python and torch read these when they start or are imported. `_become` does what Python does for the others.
_READ_AT_IMPORT = ("PYTHON", "TORCH", "OMP_", "MKL_", "PJRT_", "XLA_", "CUDA_", "LD_", "TRAINKIT_DEBUG", "LC_", "LANG")
_READ_HERE = {"PYTHONIOENCODING", "PYTHONPATH"}


class ForkedProcess:
    """A process that runs a command of Python; waits for it, and sends it signals, as `subprocess.Popen` does.

    Args:
        command: What follows `python` on the command line; see `can_fork`.
        cwd: Working directory.
        env: All environment variables.
        stdin, stdout, stderr: File descriptors; this process may close its own afterwards.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: str, env: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> None:
        self._status, status = os.pipe()
        request = json.dumps({"command": list(command), "cwd": cwd, "env": dict(env)}).encode()
        server = _Server.running()
        socket.send_fds(server, [request], [stdin, stdout, stderr, status])
        os.close(status)
        self.pid = self._read(monotonic() + 60.0)
        self.returncode: int | None = None

    def _read(self, deadline: float) -> int:
        if not select.select([self._status], [], [], max(0.0, deadline - monotonic()))[0]:
            raise TimeoutError
        data = os.read(self._status, 8)
        if not data:
            raise RuntimeError("the server of tests/helpers/forks.py has ended")
        number: int = struct.unpack("q", data)[0]
        return number

    def wait(self, timeout: float) -> int:
        """Wait until the process ends; returns its exit code, or the negative number of a signal.

        Raises:
            TimeoutError: It still runs after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._read(monotonic() + timeout)
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def can_fork(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a command can run in a forked process: `-c program`, `-m module` or a file, perhaps after `-u`.

    Other options of Python, and variables that are read when Python starts or torch is imported, need a process of their own.
    """
    if any(name.startswith(_READ_AT_IMPORT) for name in env.keys() - _READ_HERE):
        return False
    first = next(each for each in command if each != "-u")
    return first in ("-c", "-m") or first.endswith(".py")


class _Server:
    """The server of this test process: started by the first process that it forks, ended with this one."""

    _connection: socket.socket | None = None

    @classmethod
    def running(cls) -> socket.socket:
        """The connection to the server."""
        if cls._connection is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-m", "helpers.forks", str(theirs.fileno())]
            server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            theirs.close()
            atexit.register(_end, ours, server)
            cls._connection = ours
        return cls._connection


def _end(connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
    connection.close()
    server.wait()
    assert server.stdout is not None
    server.stdout.close()


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Returns in that process, with its request; the server itself never returns."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    waiting: dict[int, int] = {}
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1024)
            _report_ends(waiting)
        if connection not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 4)
        if not message:
            os._exit(0)
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, woken, wakes, *waiting.values()):
                os.close(descriptor)
            connection.close()
            request: dict[str, Any] = json.loads(message)
            return request
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        waiting[process] = descriptors[3]
        os.write(descriptors[3], struct.pack("q", process))


def _report_ends(waiting: dict[int, int]) -> None:
    """Tell the test how each process that has ended did so."""
    while waiting:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        descriptor = waiting.pop(process)
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, struct.pack("q", os.waitstatus_to_exitcode(status)))
        os.close(descriptor)


def _become(request: dict[str, Any]) -> types.ModuleType:
    """Take over the environment of a request; returns a new `__main__`."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # where the program of a spawned process is looked for
    sys.modules["trainkit.launch.starting"].__dict__["START_FOLDER"] = request["cwd"]
    tempfile.tempdir = None  # Python looks for it again, in the variables of this process.
    sys.path[:] = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *_INSTALLED]
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    if encoding:
        sys.stdout.reconfigure(encoding=encoding, errors=errors or "strict")  # type: ignore[union-attr]
        sys.stderr.reconfigure(encoding=encoding)  # type: ignore[union-attr]
    numpy = sys.modules["numpy"]
    numpy.random.seed()  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _run(request: dict[str, Any], main: types.ModuleType) -> None:
    """Run the command of a request as Python would."""
    command = request["command"]
    sys.orig_argv[:] = [sys.executable, *command]
    if command[0] == "-u":
        command = command[1:]
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if command[0] == "-m":
        sys.argv[:] = ["-m", *command[2:]]
        sys.path.insert(0, request["cwd"])
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    if command[0] == "-c":
        sys.argv[:] = ["-c", *command[2:]]
        sys.path.insert(0, "")
        code = compile(command[1], "<string>", "exec")
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        main.__file__ = str(Path(command[0]).absolute())
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        code = compile(Path(command[0]).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)


def _report_error(error: BaseException) -> None:
    """Print an error that nothing has caught, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = lambda *_: None  # Python would report it once more, as it leaves the interpreter


if __name__ == "__main__":
    # What follows the folder of the program and PYTHONPATH: the standard library and the installed packages.
    _INSTALLED = [each for each in sys.path[1:] if each not in os.environ["PYTHONPATH"].split(os.pathsep)]
    for each in _PRELOAD:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()  # so that collections in a forked process do not copy the memory of the server
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _run(_request, _become(_request))
    except SystemExit:
        raise
    except BaseException as _error:
        _report_error(_error)
        raise
