"""`notebook_launcher`: run a function of a notebook or script in several fresh processes.

`trainkit.launch.agent` starts the processes; the pickled call and its result go through a folder. This module adds the checks
and output of Accelerate's function, errors that name what cannot be sent or which rank has failed, the source of cells in
tracebacks, and XLA, whose runtime starts the processes itself.
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from trainkit.checks import is_number, whole_number
from trainkit.config.keys import KEYS, convert_value
from trainkit.config.settings import VARIABLE, Settings, carry, inherited_settings
from trainkit.console import echo
from trainkit.distributed.failure import summary
from trainkit.errors import ConfigurationError, Preempted, ProcessFailedError, UnsupportedArgumentError
from trainkit.launch.cuda_watch import warn_if_cuda_initialized
from trainkit.launch.environment import read_place
from trainkit.launch.nodes import grace, join_timeout
from trainkit.launch.notebook_child import CALL, FOLDER, TASK, read_reports
from trainkit.launch.pickling import dump_call, load
from trainkit.launch.private_folder import private_folder
from trainkit.launch.tpu import tpu_is_chosen
from trainkit.launch.verdict import INTERRUPTED, PREEMPTED, Verdict

__all__ = ["notebook_launcher"]

_NAME = "notebook_launcher"
_PORT, _LOCAL = "29500", "127.0.0.1"


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _PORT,
    master_addr: str = _LOCAL,
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
    """Run `function(*args)` in several new processes and return what it returned on the main process.

    The arguments are those of Accelerate's function. The function and its arguments may be defined in a cell; each process
    gets a copy, so it does not matter whether the notebook has used torch or a GPU. A single process is the notebook's own.

    Args:
        function: The function that each process runs. Create the `Accelerator` or `Trainer` inside it.
        args: Its arguments, the same on all processes. Tensors on a GPU arrive on the CPU.
        num_processes: Number of processes of this node. Default: one for each GPU or TPU core, at least one.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`, for an `Accelerator` or `Trainer` that does not set it.
        use_port: With several nodes, a free port of the first one. With one node any free port is used unless you set this.
        master_addr: With several nodes, the address of the first one, as the others reach it.
        node_rank: Rank of this node.
        num_nodes: Number of nodes; call the function on each of them.
        rdzv_backend: `"static"` or `"c10d"`; both do the same.
        rdzv_endpoint: `"HOST:PORT"`, instead of `master_addr` and `use_port`.
        rdzv_conf: `{"timeout": seconds}` or `{"join_timeout": seconds}`: how long nodes wait for each other.
        rdzv_id: No effect.
        max_restarts: How many times to restart all processes after a failure.
        monitor_interval: No effect.
        log_line_prefix_template: Prefix of each output line, such as `"[rank ${rank}] "`; also `${local_rank}`.

    Returns:
        What the function returned on rank 0; `None` on the other nodes.

    Raises:
        ConfigurationError: An argument is wrong, or an object cannot be sent to the processes or back.
        ProcessFailedError: The function raised, or a process died. The traceback is in the output.
        KeyboardInterrupt: The cell was interrupted; the processes have ended.

    Example:
        ```python
        def train(lr):
            accelerator = Accelerator()
            ...

        notebook_launcher(train, args=(1e-3,), num_processes=2)
        ```
    """
    if not callable(function):
        raise ConfigurationError(f"{_NAME}: the first argument must be the function itself, not {function!r}: {_NAME}(train)")
    if not isinstance(args, tuple | list):
        raise ConfigurationError(f"{_NAME}: args must be a tuple of arguments, such as args=(model,), not {args!r}.")
    mixed_precision = convert_value("mixed_precision", mixed_precision, KEYS, "mixed_precision")
    num_processes = whole_number(num_processes, f"{_NAME}(num_processes=)", 1, optional=True)
    max_restarts = whole_number(max_restarts, f"{_NAME}(max_restarts=)")
    nodes = {
        **_nodes(num_nodes, node_rank, master_addr, str(use_port), str(rdzv_endpoint)),
        "join_timeout": _join_timeout(dict(rdzv_conf or {}), node_rank),
    }
    if rdzv_backend not in ("static", "c10d"):
        raise UnsupportedArgumentError(f"{_NAME}: rdzv_backend={rdzv_backend!r} is not supported. Remove it.")
    _refuse_worker(num_nodes)
    settings = Settings({"mixed_precision": mixed_precision}, source=_NAME)
    if VARIABLE in os.environ:  # set by the launcher of this process
        settings = settings.over(inherited_settings())
    count, replicas, devices = _processes(num_processes, num_nodes, max_restarts)
    echo(f"Launching training on {devices}.", flush=True)
    if count == 1 and num_nodes == 1 and replicas is None:
        return _run_here(function, args, carry(settings))
    warn_if_cuda_initialized(_NAME)
    job = {**nodes, "per_node": count, "max_restarts": max_restarts}
    return _launch(dump_call(function, tuple(args)), carry(settings), job, log_line_prefix_template, replicas)


def _launch(
    call: bytes, variables: Mapping[str, str], options: Mapping[str, Any], template: str | None, replicas: int | None
) -> Any:
    from trainkit.launch.agent import Job, run_to_end
    from trainkit.launch.worker_output import WorkerOutput, is_redirected, shows_progress

    progress, environment = shows_progress(), {**os.environ, **variables}
    output = WorkerOutput(template) if template is not None or is_redirected() else None
    task = {
        "argv": sys.argv,
        # the source of cells, which are not files, for tracebacks
        "sources": {name: entry for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None},
        "shows_progress": {} if output is None else progress,
        "replicas": replicas,
        "environment": {} if replicas is None else environment,
    }
    with private_folder() as folder, closing(output) if output else nullcontext():
        _write(Path(folder), call, task)
        del call
        job = Job(
            _command(progress["stdout"]),
            {**environment, FOLDER: folder},
            launcher=_NAME,
            grace=grace(os.environ),
            output=None if output is None else output.take,
            **options,
        )
        try:
            verdict = run_to_end(job)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error} (In {_NAME} these are the arguments master_addr, use_port and node_rank.)"
            ) from error
        failures, result = read_reports(Path(folder))
    _raise_failure(verdict, failures)
    try:
        return None if result is None else load(result)
    except Exception as error:
        raise ConfigurationError(
            f"{_NAME}: the function has returned, but its result cannot be loaded in this process: {summary(error)}. Return "
            "numbers, tensors and a state_dict, or save the result to a file."
        ) from error


def _write(folder: Path, call: bytes, task: Mapping[str, Any]) -> None:
    try:
        (folder / CALL).write_bytes(call)
        (folder / TASK).write_text(json.dumps(task))
    except OSError as error:
        raise ConfigurationError(
            f"{_NAME}: cannot write {len(call)} bytes to {folder}: {error.strerror}. Before Python starts, set a folder with "
            "more space: export TMPDIR=/path"
        ) from error


def _command(shows_progress: bool) -> tuple[str, ...]:
    """The command of a process, with the module search path of this one."""
    if not sys.executable:
        raise ConfigurationError(
            f"{_NAME} needs a Python executable, but sys.executable is empty, because Python is embedded in another program. "
            "Start the script with: python script.py"
        )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    unbuffered = () if shows_progress else ("-u",)  # so that the output of a killed process is not lost
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from trainkit.launch.notebook_child import main; main()"
    return (sys.executable, *flags, *unbuffered, "-c", code)


def _raise_failure(verdict: Verdict, failures: list[dict[str, Any]]) -> None:
    """Raise the error of the run: an error of the function first, then an object that cannot be sent, then consequences."""
    first = min(failures, key=lambda failure: (failure["follows"], failure["refused"]), default=None)
    if verdict.code == INTERRUPTED:
        raise KeyboardInterrupt
    if verdict.code == PREEMPTED:
        raise Preempted(verdict.first or "the processes were stopped by a signal")
    if first is not None and first["refused"]:
        raise ConfigurationError(first["summary"])
    if verdict.code == 0:
        return
    if first is not None and not first["follows"]:
        raise ProcessFailedError(f"rank {first['rank']} failed: {first['summary']}. Its traceback is in the output.")
    why = verdict.message or (first and first["summary"]) or verdict.first or "the processes have failed"
    raise ProcessFailedError(f"{why}.")


def _nodes(num_nodes: int, node_rank: int, master_addr: str, port: str, endpoint: str) -> dict[str, Any]:
    """The nodes, as arguments of `trainkit.launch.agent.Job`."""
    whole_number(num_nodes, f"{_NAME}(num_nodes=)", 1)
    if whole_number(node_rank, f"{_NAME}(node_rank=)") >= num_nodes:
        raise ConfigurationError(f"{_NAME}: node_rank={node_rank} must be less than num_nodes={num_nodes}.")
    if endpoint:
        host, colon, given = endpoint.rpartition(":")
        master_addr, port = (host, given) if colon else (endpoint, port)
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{_NAME}: use_port must be a port from 0 to 65535, not {port!r}.")
    if num_nodes == 1:
        return {"master_port": None if port == _PORT else int(port)}
    if master_addr == _LOCAL and not endpoint:
        raise ConfigurationError(
            f"{_NAME}: num_nodes={num_nodes} needs an address of the first node that the other nodes can reach. Set it on all "
            "nodes: master_addr='host0'"
        )
    place = {"node_rank": node_rank, "master_addr": master_addr, "master_port": int(port)}
    return {"least": num_nodes, "most": num_nodes, **place}


def _join_timeout(conf: dict[str, Any], node_rank: int) -> float:
    timeout = join_timeout(os.environ)
    for name, value in conf.items():
        if name in ("timeout", "join_timeout"):
            if not is_number(value) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{_NAME}: rdzv_conf: {name} must be a number of seconds, not {value!r}.")
            timeout = float(value)
        elif name != "rank" or value != node_rank:
            raise UnsupportedArgumentError(
                f"{_NAME}: rdzv_conf={{{name!r}: {value!r}}} is not supported. Use 'timeout' or 'join_timeout', in seconds."
            )
    return timeout


def _refuse_worker(num_nodes: int) -> None:
    """Refuse to run in a process that a launcher started: each of them would start its own processes."""
    try:
        place = read_place(os.environ)
    except ConfigurationError:  # the new processes have their own variables
        return
    if place is not None and place.size not in (1, num_nodes):
        raise ConfigurationError(
            f"{_NAME} starts processes, but this is one of {place.size} processes that {place.launcher} has started "
            f"({place.reason}). Call the function itself, or start the script without a launcher: python script.py"
        )


def _processes(wanted: int | None, num_nodes: int, max_restarts: int) -> tuple[int, int | None, str]:
    """Number of processes; number of XLA replicas (0: all, `None`: not XLA); the devices in words."""
    import torch

    on_cpu = os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
    if importlib.util.find_spec("torch_xla") is not None if on_cpu else tpu_is_chosen(os.environ):
        _check_xla(num_nodes, max_restarts)
        return 1, wanted or 0, f"{wanted or 'all'} {'devices of the XLA CPU runtime' if on_cpu else 'TPU cores'}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = wanted or max(1, gpus)
    one = "one GPU" if gpus else "MPS" if torch.backends.mps.is_available() else "one CPU"
    several = f"{count} {'CPUs' if gpus == 0 else 'GPUs' if gpus >= count else 'processes'}"
    return count, None, (one if count == 1 else several) + (f" on each of {num_nodes} nodes" if num_nodes > 1 else "")


def _run_here(function: Callable[..., Any], args: tuple[Any, ...], variables: Mapping[str, str]) -> Any:
    """Call the function in this process, with these environment variables set."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        return function(*args)
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def _check_xla(num_nodes: int, max_restarts: int) -> None:
    for name, value, default in (("num_nodes", num_nodes, 1), ("max_restarts", max_restarts, 0)):
        if value != default:
            raise UnsupportedArgumentError(
                f"{_NAME}: {name}={value} is not supported on XLA, whose runtime knows the hosts of a TPU slice and starts the "
                "processes. Remove it, and call this on each host."
            )
    runtime = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if runtime is not None and runtime._xla_runtime_is_initialized() and os.environ.get("PJRT_DEVICE", "").upper() == "TPU":
        raise ConfigurationError(
            f"{_NAME}: this process has used the TPU, which only one process can use. Restart the kernel, and use XLA devices "
            "inside the function only."
        )
