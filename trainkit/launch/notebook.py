"""``notebook_launcher``: runs a function of a notebook, or of a script, in several fresh processes."""

from __future__ import annotations

import importlib.util
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainkit.config.carried import VARIABLE, Settings, carried, carry
from trainkit.config.keys import KEYS, checked
from trainkit.distributed.failure import summary
from trainkit.errors import ConfigurationError, Preempted, ProcessFailedError, UnsupportedArgumentError
from trainkit.launch.cuda_watch import tell_of_cuda
from trainkit.launch.environment import read_place
from trainkit.launch.nodes import grace, join_timeout
from trainkit.launch.tpu import tpu_is_chosen
from trainkit.launch.verdict import INTERRUPTED, PREEMPTED, Verdict

if TYPE_CHECKING:
    from trainkit.launch.delivery import Failed

__all__ = ["notebook_launcher"]

_NAME = "notebook_launcher"
_PORT = "29500"
_HERE = "127.0.0.1"
_PROGRAM = "from trainkit.launch.notebook_child import main; main()"


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _PORT,
    master_addr: str = _HERE,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Run ``function(*args)`` in several fresh processes, for a notebook, which cannot be started several times.

    The function, what it uses and its arguments are sent to them; they may be defined in a cell. What it prints on the main
    process, and its progress bar, appear in the cell as they come. The parameters are those of Accelerate's function of this
    name. Several processes are always fresh ones, so it does not matter what this process has done with torch or a GPU; a
    single one is this process.

    Args:
        function: what each process runs. Accelerator or Trainer are made inside of it.
        args: its arguments, the same for all. Tensors on a GPU arrive on the CPU.
        num_processes: processes of this machine. Default: one for each GPU or TPU core, else one.
        mixed_precision: "no", "fp16" or "bf16", for an ``Accelerator`` or ``Trainer`` that says nothing else.
        use_port: of several machines: a free port of the first. With one machine any free port is taken, unless another one
            than the default is given.
        master_addr: of several machines: the first, as the others can reach it.
        node_rank: the number of this machine, from 0.
        num_nodes: machines; the function is called by this on each of them.
        rdzv_backend: "static" or "c10d", which are the same here.
        rdzv_endpoint: ``"HOST:PORT"``, instead of ``master_addr`` and ``use_port``.
        rdzv_conf: ``{"timeout": seconds}`` or ``{"join_timeout": seconds}``: how long machines wait for each other.
        rdzv_id: no effect: jobs are told apart by their port.
        max_restarts: how often all processes are started anew when one has failed.
        monitor_interval: no effect: processes are looked at ten times a second.
        log_line_prefix_template: what each line of each process begins with, such as ``"[rank ${rank}] "``; ``${local_rank}``
            and ``${role_name}`` are replaced too.

    Returns:
        What the function returned on the main process; ``None`` on another machine than the first.

    Raises:
        ConfigurationError: an argument that is wrong; something that cannot be sent to other processes, or back.
        ProcessFailedError: the function has raised, or a process has died; names it. Its traceback is in the output.
        KeyboardInterrupt: it was interrupted, and so were the processes.
    """
    _check_call(function, args)
    mixed_precision = checked("mixed_precision", mixed_precision, KEYS, "mixed_precision")
    _check_number("num_processes", num_processes, 1, optional=True)
    _check_number("max_restarts", max_restarts, 0)
    machines = _machines(num_nodes, node_rank, master_addr, use_port, rdzv_backend, rdzv_endpoint, rdzv_conf)
    _refuse_worker(num_nodes)
    settings = Settings({"mixed_precision": mixed_precision}, source=_NAME)
    if VARIABLE in os.environ:  # what has started this process says more
        settings = settings.over(carried())
    replicas = None
    if _on_xla(os.environ):
        _check_xla(num_nodes, max_restarts)
        count, replicas = 1, num_processes or 0
        where = f"{num_processes or 'all'} {_cores()}"
    else:
        count = num_processes or max(1, _gpus())
        where = f"{_devices(count)}{f' of each of {num_nodes} machines' if num_nodes > 1 else ''}"
    if count == 1 and num_nodes == 1 and replicas is None:
        print(f"Launching training on {where}.", flush=True)
        with _environment(carry(settings)):
            return function(*args)
    tell_of_cuda(_NAME)
    job = {**machines, "per_node": count, "max_restarts": max_restarts}
    return _launch(function, tuple(args), where, carry(settings), job, log_line_prefix_template, replicas)


def _launch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    where: str,
    variables: Mapping[str, str],
    options: Mapping[str, Any],
    template: str | None,
    replicas: int | None,
) -> Any:
    """Run the function in processes of a job with these options; returns what it returned on rank 0, if that is here."""
    from trainkit.launch.agent import Job, conduct
    from trainkit.launch.by_value import pack_call, unpack
    from trainkit.launch.delivery import Delivery
    from trainkit.launch.streams import Streams

    work, seen, patience = pack_call(function, args), Streams.seen(), grace(os.environ)
    command = _command(seen["stdout"])
    print(f"Launching training on {where}.", flush=True)
    streams = Streams(template) if template is not None or Streams.needed() else None
    copies = options["per_node"] if replicas is None and not options["max_restarts"] else None
    delivery = Delivery(work, _home({} if streams is None else seen), replicas=replicas, copies=copies)
    del work
    job = Job(
        command,
        {**os.environ, **variables, **delivery.variables()},
        launcher=_NAME,
        grace=patience,
        output=None if streams is None else streams.take,
        **options,
    )
    try:
        verdict = conduct(job)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (In {_NAME}: master_addr, use_port and node_rank.)") from error
    finally:
        delivery.close()
        if streams is not None:
            streams.close()
    _check_end(verdict, delivery.failures)
    if delivery.result is None:
        return None
    try:
        return unpack(delivery.result)
    except Exception as error:
        raise ConfigurationError(
            f"{_NAME}: the function has returned, but its result cannot be read here: {summary(error)}. Return numbers, "
            "tensors and a state_dict, or save it to a file."
        ) from error


def _command(live: bool) -> tuple[str, ...]:
    """The command line of the processes. Modules are found where this process finds them."""
    if not sys.executable:
        raise ConfigurationError(f"{_NAME} starts Python, and here it is part of another program: sys.executable is empty.")
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    unbuffered = () if live else ("-u",)  # what is not yet written is lost when a process is killed
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; {_PROGRAM}"
    return (sys.executable, *flags, *unbuffered, "-c", code)


def _home(seen: Mapping[str, bool]) -> dict[str, Any]:
    """What the processes are to have as it is here, as JSON.

    Args:
        seen: as of :meth:`Streams.seen`; empty: they write where this process does.
    """
    # cells and what else is in no file: for tracebacks, and for what reads the source of a function
    sources = {name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None}
    return {"argv": list(sys.argv), "sources": sources, "seen": dict(seen)}


def _check_end(verdict: Verdict, failures: Sequence[Failed]) -> None:
    """Raise what has ended the processes, if it was not the end of the function."""
    code, returning = verdict.code, [failure for failure in failures if failure.where == "returning"]
    if code == 0 and not returning:
        return
    if code == 0:
        raise ConfigurationError(returning[0].summary)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == PREEMPTED:
        raise Preempted(verdict.first or "the processes were told to end by a signal")
    loading = next((failure for failure in failures if failure.where == "loading"), None)
    if loading is not None:
        raise ConfigurationError(
            f"{_NAME}: the function or its arguments cannot be had in another process: {loading.summary}. What is in a module "
            "is imported there, from a file that sys.path leads to. Define it in a cell or in the script itself, save the "
            "module to such a file, or say that it is to be sent: cloudpickle.register_pickle_by_value(module)"
        )
    first = next((failure for failure in failures if not failure.follows), None)
    if first is not None:
        raise ProcessFailedError(f"rank {first.rank} failed: {first.summary}. Its traceback is in the output.")
    why = verdict.last_words or next((failure.summary for failure in failures), None) or verdict.first
    raise ProcessFailedError(f"{why or 'the processes have failed'}.")


# ------------------------------------------------------------------------------------------------------ the arguments


def _check_call(function: Any, args: Any) -> None:
    if not callable(function):
        raise ConfigurationError(f"{_NAME}: the first argument must be the function itself, not {function!r}: {_NAME}(train)")
    if not isinstance(args, tuple | list):
        raise ConfigurationError(f"{_NAME}: args must be a tuple of the function's arguments, as args=(model,), not {args!r}.")


def _check_number(name: str, value: Any, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{_NAME}: {name} must be an integer ≥ {least}, not {value!r}.")


def _machines(
    num_nodes: int,
    node_rank: int,
    master_addr: str,
    use_port: str | int,
    rdzv_backend: str,
    rdzv_endpoint: str,
    rdzv_conf: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The machines of the job, as arguments of :class:`Job`."""
    _check_number("num_nodes", num_nodes, 1)
    _check_number("node_rank", node_rank, 0)
    if node_rank >= num_nodes:
        raise ConfigurationError(f"{_NAME}: node_rank={node_rank}, but of {num_nodes} machines the numbers go from 0 on.")
    if rdzv_backend not in ("static", "c10d"):
        raise UnsupportedArgumentError(f"{_NAME}: rdzv_backend={rdzv_backend!r} is not offered. Leave it out.")
    patience = _patience(dict(rdzv_conf or {}), node_rank)
    host, between, port = str(rdzv_endpoint).rpartition(":")
    if rdzv_endpoint:
        master_addr, use_port = (host, port) if between else (rdzv_endpoint, use_port)
    text = str(use_port)
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ConfigurationError(f"{_NAME}: use_port must be a port from 0 to 65535, not {use_port!r}.")
    if num_nodes == 1:
        return {"master_port": None if text == _PORT else int(text), "join_timeout": patience}
    if master_addr == _HERE and not rdzv_endpoint:
        raise ConfigurationError(
            f"{_NAME}: num_nodes={num_nodes} machines need a place to meet. Name the first one, on all of them, as the others "
            "can reach it: master_addr='host0'"
        )
    return {
        "least": num_nodes,
        "most": num_nodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": int(text),
        "join_timeout": patience,
    }


def _patience(conf: dict[str, Any], node_rank: int) -> float:
    """The seconds that machines wait for each other; the number of this machine may be said there again."""
    patience = join_timeout(os.environ)
    for name, value in conf.items():
        if name in ("timeout", "join_timeout"):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{_NAME}: rdzv_conf: {name} must be a number of seconds, not {value!r}.")
            patience = float(value)
        elif name != "rank" or value != node_rank:
            raise UnsupportedArgumentError(
                f"{_NAME}: rdzv_conf={{{name!r}: {value!r}}} is not offered. It takes 'timeout' and 'join_timeout', in seconds."
            )
    return patience


def _refuse_worker(num_nodes: int) -> None:
    """Refuse in a process that is one of several, which would each start others."""
    try:
        place = read_place(os.environ)
    except ConfigurationError:  # the processes that are started have variables of their own
        return
    if place is not None and place.size not in (1, num_nodes):
        raise ConfigurationError(
            f"{_NAME} starts the processes itself, and this is one of {place.size} that {place.launcher} has started "
            f"({place.reason}). Call the function itself, or start the script alone: python script.py"
        )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices(count: int) -> str:
    """What so many processes run on, in words."""
    import torch

    gpus = _gpus()
    if count == 1:
        return "one GPU" if gpus else "MPS" if torch.backends.mps.is_available() else "one CPU"
    return f"{count} {'CPUs' if gpus == 0 else 'GPUs' if gpus >= count else 'processes'}"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within it these variables are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --------------------------------------------------------------------------------------------------------------- XLA


def _on_xla(env: Mapping[str, str]) -> bool:
    """Whether XLA's runtime starts the processes: there is a TPU, or its CPU runtime was asked for."""
    if env.get("PJRT_DEVICE", "").upper() == "CPU":
        return importlib.util.find_spec("torch_xla") is not None
    return tpu_is_chosen(env)


def _cores() -> str:
    return "devices of XLA's CPU runtime" if os.environ.get("PJRT_DEVICE", "").upper() == "CPU" else "TPU cores"


def _check_xla(num_nodes: int, max_restarts: int) -> None:
    if num_nodes > 1:
        raise UnsupportedArgumentError(
            f"{_NAME}: num_nodes={num_nodes} on XLA, whose runtime knows the hosts of a TPU slice. Leave it out, and call this "
            "on each of them."
        )
    if max_restarts:
        raise UnsupportedArgumentError(f"{_NAME}: max_restarts={max_restarts} is not offered on XLA. Leave it out.")
    runtime = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if runtime is not None and runtime._xla_runtime_is_initialized() and os.environ.get("PJRT_DEVICE", "").upper() == "TPU":
        raise ConfigurationError(
            f"{_NAME}: this process has used the TPU, which belongs to one process at a time. Restart the kernel, and use XLA "
            "devices inside of the function only."
        )
