"""Tests on several real processes.

`@pytest.mark.world_size(n)` runs the body of a test in `n` new processes with the variables that torchrun sets, so that
`Trainer(strategy="ddp")` in it is one of `n`. `run_world` does the same for a function, and returns the result of
each process. The processes are forked from a server that has only imported torch and trainkit: about 30 ms each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from helpers.patience import PATIENCE

__all__ = ["World", "WorldError", "find", "free_port", "run_world", "start_world", "where_is"]

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "numpy",
    "trainkit",
    "trainkit.trainer.trainer",
    "trainkit.strategies.ddp.ddp_strategy",
    "trainkit.strategies.fsdp.fsdp_strategy",
    "trainkit.strategies.zero.zero_strategy",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # its import takes over a second
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "helpers.worlds.processor",
    "trainkit.callbacks.model_checkpoint",
    "helpers.runs.trainers",
    "pytest",
    "hypothesis",
    "helpers.runs.tiny",
]
if importlib.util.find_spec("torch_xla") is not None:  # in the environment of `make test-xla`; see xla_runs.py
    _PRELOAD += ["torch_xla", "torch_xla.core.xla_model", "torch_xla.distributed.spmd"]
_PRELOAD += ["torchmetrics"] if importlib.util.find_spec("torchmetrics") else []  # its import takes seconds
_PRELOAD += ["helpers.worlds.freeze"]
_SHOW = getattr(signal, "SIGRTMIN", signal.SIGUSR2)  # a process that gets this signal writes its stacks


class WorldError(AssertionError):
    """A process of a `World` has failed, exited or hangs."""


class World:
    """Processes that run one function.

    Args:
        size: Number of processes.
        where: The function, as returned by `where_is`.
        args: Arguments of the function.
        env: Environment variables of the processes.
        launched: Whether to set the environment variables of torchrun too.
        log: File for the output; default: where the output of the tests went when the first `World` was created.

    Attributes:
        processes: The processes, in rank order.
    """

    def __init__(
        self,
        size: int,
        where: tuple[str, str, str],
        args: Sequence[Any],
        env: dict[str, str],
        *,
        launched: bool = True,
        log: str | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        port = free_port()
        self.processes, self._pipes = [], []
        self._stacks = tempfile.NamedTemporaryFile(prefix="stacks-")  # noqa: SIM115
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            torchrun = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            variables = {**(torchrun if launched else {}), "OMP_NUM_THREADS": "1", **env}
            given = (theirs, (self._stacks.name, log), where, tuple(args), variables, os.getcwd(), sys.path)
            process = context.Process(target=_work, args=given)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def results(self, patience: float = PATIENCE) -> list[Any]:
        """Wait until all processes end; returns the result of the function in each of them.

        Raises:
            WorldError: The function raised in a process (the message has all tracebacks), a process exited, or it hangs.
        """
        ends = self.ends(patience)
        bad = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(ends) if not fine]
        if bad:
            raise WorldError("\n".join(bad))
        return [value for _, value in ends]

    def ends(self, patience: float = PATIENCE) -> list[tuple[bool, Any]]:
        """Wait until all processes end; returns for each (True, result), or (False, traceback or `"ended with -9"`)."""
        deadline = monotonic() + patience
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < len(self._pipes):
            open_ones: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(open_ones), max(0.0, deadline - monotonic()))
            if not ready:
                left = sorted(open_ones.values())
                stacks = self._ask_for_stacks(left)
                self.kill()
                raise WorldError(f"ranks {left} have not ended within {patience} s; the others: {found}\n{stacks}")
            for pipe in ready:
                rank = open_ones[pipe]
                found[rank] = self._read(rank, pipe)  # type: ignore[arg-type]
        for process in self.processes:
            process.join(max(1.0, deadline - monotonic()))
        self.kill()
        return [found[rank] for rank in range(len(self._pipes))]

    def _read(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            end: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
            return end
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(PATIENCE)
            return False, f"ended with {self.processes[rank].exitcode}"

    def _ask_for_stacks(self, ranks: list[int]) -> str:
        """Make these processes and their DataLoader workers write their stacks; returns the stacks."""
        for rank in ranks:
            pid = self.processes[rank].pid
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                for each in (pid, *map(int, children)):
                    with open(self._stacks.name, "a") as file:
                        file.write(f"\nrank {rank}, process {each}{' (a child)' if each != pid else ''}:\n")
                    os.kill(each, _SHOW)  # type: ignore[arg-type]
                    sleep(0.5)
        return Path(self._stacks.name).read_text()

    def kill(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._stacks.close()

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to the process of a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


def start_world(size: int, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> World:
    """Start `function(*args)` in `size` processes. It must be defined in a module; arguments and results are pickled."""
    return World(size, where_is(function), args, env or {})


def run_world(size: int, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """Run `function(*args)` in `size` processes; returns the results in rank order. See `World`."""
    return start_world(size, function, *args, env=env).results()


def free_port() -> int:
    """A free port that no other test on this machine is given before this one uses it."""
    ports = _claim_ports()
    while True:
        port = ports.start + next(_next_port) % len(ports)
        with contextlib.suppress(OSError), socket.socket() as taken:
            taken.bind(("", port))
            return port


@cache
def _claim_ports() -> range:
    """A range of ports, below those that the kernel uses for connections, which is locked as long as this process lives."""
    for start in range(11_000, 31_000, 200):
        lock = open(Path(tempfile.gettempdir()) / f"trainkit-tests-{os.getuid()}-ports-{start}", "w")  # noqa: SIM115
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks.append(lock)
            return range(start, start + 200)
        lock.close()
    raise RuntimeError("a hundred processes of tests hold all ports from 11000 to 31000")


_locks: list[IO[str]] = []
_next_port = itertools.count(random.SystemRandom().randrange(200))


def where_is(function: Callable[..., Any]) -> tuple[str, str, str]:
    """What another process needs to find a function: the file and name of its module, and its qualified name."""
    file = sys.modules[function.__module__].__file__
    assert file is not None
    return file, function.__module__, function.__qualname__


def _work(
    pipe: Connection,
    files: tuple[str, str | None],
    where: tuple[str, str, str],
    args: tuple[Any, ...],
    env: dict[str, str],
    folder: str,
    path: list[str],
) -> None:
    stacks, log = files
    faulthandler.register(_SHOW, file=open(stacks, "a"), all_threads=True)  # noqa: SIM115
    if log is not None:
        _speak_to(log)
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = path
    multiprocessing.set_start_method("fork", force=True)  # DataLoader workers: with forkserver, each takes seconds
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        result = find(*where)(*args)
        end: tuple[bool, Any] = True, result
    except BaseException as error:
        end = False, "".join(traceback.format_exception(error))
        pipe.send_bytes(pickle.dumps(end))
        if log is not None:
            raise SystemExit(1) from None  # the log is for what the function prints
        raise
    # not pipe.send, which shares the memory of tensors with this process, and it exits now
    pipe.send_bytes(pickle.dumps(end))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _speak_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def find(file: str, module: str, name: str) -> Any:
    """Find the function that `where_is` describes. Its module is loaded from its file, under the name that pytest gives it."""
    loaded: Any = importlib.import_module(module) if module.startswith("helpers.") else sys.modules.get(module)
    if loaded is None:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        if "." in module and module.rpartition(".")[0] not in sys.modules:
            sys.modules.setdefault(module.rpartition(".")[0], type(sys)(module.rpartition(".")[0]))
        spec.loader.exec_module(loaded)
    for part in name.split("."):
        loaded = getattr(loaded, part)
    return getattr(loaded, "__wrapped__", loaded)


def run_test(function: Callable[..., Any], size: int, arguments: dict[str, Any]) -> None:
    """Run the body of a test in `size` processes. Its fixtures are created in this process and must be picklable."""
    start_world(size, _call, where_is(function), arguments).results()


def _call(where: tuple[str, str, str], arguments: dict[str, Any]) -> None:
    find(*where)(**{k: Path(v) if isinstance(v, Path) else v for k, v in arguments.items()})
