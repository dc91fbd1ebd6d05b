"""`notebook_launcher`: run a function of a notebook or script in several fresh processes.

`trainkit.launch.agent` starts the processes, or on XLA its runtime; the pickled call and its result go through a folder.
cloudpickle sends what is defined in a cell or a script by value, and what is in a module by name. This is the only module of
trainkit that unpickles: only bytes that its own processes exchange during one call, never a file of the user.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import functools
import importlib.util
import inspect
import io
import json
import linecache
import os
import re
import signal
import string
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any

import cloudpickle  # noqa: TID251
from torch import Tensor

from trainkit.checks import is_number, whole_number
from trainkit.config.keys import KEYS, convert_value
from trainkit.config.settings import VARIABLE, Settings, carry, read_process_settings
from trainkit.console import echo
from trainkit.distributed.failure import is_communication, summary
from trainkit.distributed.failure_handling import end_process
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, Preempted, ProcessFailedError, UnsupportedArgumentError
from trainkit.launch.environment import grace, join_timeout, read_ranks, tpu_is_chosen
from trainkit.launch.private_folder import private_folder
from trainkit.launch.starting import warn_if_cuda_initialized
from trainkit.launch.workers import INTERRUPTED, PREEMPTED, Outcome
from trainkit.registry import load_strategy

__all__ = [
    "CALL",
    "FOLDER",
    "TASK",
    "WorkerOutput",
    "dump_call",
    "dump_result",
    "is_redirected",
    "load",
    "notebook_launcher",
    "read_reports",
    "shows_progress",
]

_NAME = "notebook_launcher"
_PORT, _LOCAL = "29500", "127.0.0.1"

FOLDER = "TRAINKIT_NOTEBOOK_FOLDER"  # the environment variable with the folder of the call
CALL, TASK = "call", "task.json"  # files for all processes
_RESULT, _FAILURES = "result", "failures.jsonl"  # files from them, in a folder for each start

_MAX_DEPTH = 8  # how deep to search an object for the part that cannot be pickled
_NOT_SENT = "cannot be sent to other processes: {}. Create it inside the function, or pass the values that it is built from."
_NOT_RETURNED = (
    "cannot be sent back: {}. Return numbers, tensors, a state_dict or accelerator.unwrap_model(model), or save the result to "
    "a file."
)

_CLOSE_TIMEOUT_S = 10.0  # seconds for the last output to arrive after the workers have ended
_NAMES = ("stdout", "stderr")
_REDRAWN = re.compile(r"^.*\r(?=[^\r\n])", re.MULTILINE)  # the earlier states of a line


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
        settings = settings.over(read_process_settings())
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
    with private_folder() as name, closing(output) if output else nullcontext():
        folder = Path(name)
        try:
            (folder / CALL).write_bytes(call)
            (folder / TASK).write_text(json.dumps(task))
        except OSError as error:
            raise ConfigurationError(
                f"{_NAME}: cannot write {len(call)} bytes to {folder}: {error.strerror}. Before Python starts, set a folder "
                "with more space: export TMPDIR=/path"
            ) from error
        del call
        take = None if output is None else output.take
        variables = {**environment, FOLDER: name}
        job = Job(_command(progress["stdout"]), variables, launcher=_NAME, grace=grace(os.environ), output=take, **options)
        try:
            outcome = run_to_end(job)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error} (In {_NAME} these are the arguments master_addr, use_port and node_rank.)"
            ) from error
        failures, result = read_reports(folder)
    _raise_failure(outcome, failures)
    try:
        return None if result is None else load(result)
    except Exception as error:
        raise ConfigurationError(
            f"{_NAME}: the function has returned, but its result cannot be loaded in this process: {summary(error)}. Return "
            "numbers, tensors and a state_dict, or save the result to a file."
        ) from error


def _command(shows_progress: bool) -> tuple[str, ...]:
    """The command of a process, with the module search path of this one."""
    if not sys.executable:
        raise ConfigurationError(
            f"{_NAME} needs a Python executable, but sys.executable is empty, because Python is embedded in another program. "
            "Start the script with: python script.py"
        )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    unbuffered = () if shows_progress else ("-u",)  # Otherwise the output of a killed process would be lost.
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from trainkit.launch.notebook import main; main()"
    return (sys.executable, *flags, *unbuffered, "-c", code)


def _raise_failure(outcome: Outcome, failures: list[dict[str, Any]]) -> None:
    """Raise the error of the run: an error of the function first, then an object that cannot be sent, then consequences."""
    first = min(failures, key=lambda failure: (failure["follows"], failure["refused"]), default=None)
    if outcome.code == INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.code == PREEMPTED:
        raise Preempted(outcome.first or "the processes were stopped by a signal")
    if first is not None and first["refused"]:
        raise ConfigurationError(first["summary"])
    if outcome.code == 0:
        return
    if first is not None and not first["follows"]:
        raise ProcessFailedError(f"rank {first['rank']} failed: {first['summary']}. Its traceback is in the output.")
    why = outcome.message or (first and first["summary"]) or outcome.first or "the processes have failed"
    raise ProcessFailedError(f"{why}.")


def _nodes(num_nodes: int, node_rank: int, master_addr: str, port: str, endpoint: str) -> dict[str, Any]:
    """The nodes, as arguments of `trainkit.launch.agent.Job`."""
    whole_number(num_nodes, f"{_NAME}(num_nodes=)", 1)
    if whole_number(node_rank, f"{_NAME}(node_rank=)") >= num_nodes:
        raise ConfigurationError(f"{_NAME}: node_rank={node_rank} must be less than num_nodes={num_nodes}.")
    if endpoint:
        host, colon, endpoint_port = endpoint.rpartition(":")
        master_addr, port = (host, endpoint_port) if colon else (endpoint, port)
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
        place = read_ranks(os.environ)
    except ConfigurationError:  # the new processes have their own variables
        return
    if place is not None and place.size not in (1, num_nodes):
        raise ConfigurationError(
            f"{_NAME} starts processes, but this is one of {place.size} processes that {place.launcher} has started "
            f"({place.reason}). Call the function itself, or start the script without a launcher: python script.py"
        )


def _processes(num_processes: int | None, num_nodes: int, max_restarts: int) -> tuple[int, int | None, str]:
    """Number of processes; number of XLA replicas (0: all, `None`: not XLA); the devices in words."""
    import torch

    on_cpu = os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
    if importlib.util.find_spec("torch_xla") is not None if on_cpu else tpu_is_chosen(os.environ):
        _check_xla(num_nodes, max_restarts)
        return 1, num_processes or 0, f"{num_processes or 'all'} {'devices of the XLA CPU runtime' if on_cpu else 'TPU cores'}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = num_processes or max(1, gpus)
    one = "one GPU" if gpus else "MPS" if torch.backends.mps.is_available() else "one CPU"
    devices = f"{count} {'CPUs' if gpus == 0 else 'GPUs' if gpus >= count else 'processes'}"
    return count, None, (one if count == 1 else devices) + (f" on each of {num_nodes} nodes" if num_nodes > 1 else "")


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


# ------------------------------------------------------------------------------------------------------------- the processes


def main() -> None:
    """Run one of the processes of a call."""
    sys.excepthook = _print_error
    folder = os.environ.pop(FOLDER)
    task = json.loads(Path(folder, TASK).read_text())
    if task["replicas"] is None:
        _run(folder, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    else:
        _launch_replicas(folder, task)


def read_reports(folder: Path) -> tuple[list[dict[str, Any]], bytes | None]:
    """The failures of the last start, in the order in which they happened, and the pickled result of rank 0."""
    last = folder / str(max((int(path.name) for path in folder.iterdir() if path.is_dir()), default=0))
    failures, result = last / _FAILURES, last / _RESULT
    reports = []
    for line in failures.read_text("utf-8", errors="replace").splitlines() if failures.exists() else []:
        with contextlib.suppress(ValueError):  # a full disk has cut it off
            reports.append(json.loads(line))
    return reports, result.read_bytes() if result.exists() else None


def _launch_replicas(folder: str, task: dict[str, Any]) -> None:
    """Let XLA's runtime start its processes or threads, each of which calls `run_replica`."""
    os.environ.clear()  # the agent's variables, which XLA's runtime would mistake for those of a launcher
    os.environ.update(task["environment"])
    # the runtime would wait for its processes, which do not get the signals that this one gets
    signal.signal(signal.SIGINT, lambda *_: end_process(130))
    try:
        load_strategy("xla").launch(run_replica, (folder,), devices=task["replicas"] or None)
    except Exception as error:  # an error of the runtime, if no replica has reported one
        _report(_start_folder(folder), 0, summary(error), follows=True)
        raise


def run_replica(index: int, folder: str) -> None:
    """Run the function as one XLA replica with this rank."""
    try:
        _run(folder, index, index)
    except Exception as error:
        if not isinstance(error, ProcessFailedError):  # the failure of another replica, which prints it
            _print_error(type(error), error, error.__traceback__)  # The frames of the runtime are not printed.
        raise SystemExit(1) from None


def _run(folder: str, rank: int, local_rank: int) -> None:
    reports = _start_folder(folder)
    _restore(json.loads(Path(folder, TASK).read_text()), local_rank)
    try:
        function, args = load(Path(folder, CALL).read_bytes())
    except Exception as error:
        why = (
            f"{_NAME}: the function or its arguments cannot be loaded in another process: {summary(error)}. Modules are "
            "imported there from sys.path. Define the function in a cell or in the script, save the module to a file, or send "
            "it by value: cloudpickle.register_pickle_by_value(module)"
        )
        _report(reports, rank, why, refused=True)
        if rank == 0 and not isinstance(error, ImportError | AttributeError):  # The message of these errors is enough.
            traceback.print_exception(error)
        raise SystemExit(1) from None
    try:
        result = function(*args)
    except Exception as error:
        _report(reports, rank, summary(error), follows=isinstance(error, ProcessFailedError) or is_communication(error))
        raise
    if rank == 0:
        try:
            (reports / _RESULT).write_bytes(dump_result(result))
        except ConfigurationError as error:  # no reason to stop the other ranks
            _report(reports, rank, str(error), refused=True)


def _start_folder(folder: str) -> Path:
    path = Path(folder, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    path.mkdir(exist_ok=True)
    return path


def _report(folder: Path, rank: int, summary: str, refused: bool = False, follows: bool = False) -> None:
    """Report a failure: `refused` if something cannot be sent, `follows` if it follows from that of another rank."""
    with open(folder / _FAILURES, "a", encoding="utf-8") as file:  # A single write is not mixed with those of other ranks.
        file.write(json.dumps({"rank": rank, "summary": summary, "refused": refused, "follows": follows}) + "\n")


def _restore(task: dict[str, Any], local_rank: int) -> None:
    """Set the arguments, the source of cells and the kind of output as in the notebook's process."""
    sys.argv[:] = task["argv"]
    linecache.cache.update((name, tuple(entry)) for name, entry in task["sources"].items())
    for name, shows_progress in task["shows_progress"].items():
        stream = getattr(sys, name)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True)
        if shows_progress and local_rank == 0:
            stream.isatty = lambda: True  # a notebook redraws a line like a terminal


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback, starting at the user's function; nothing for Ctrl-C, which the notebook shows."""
    if kind is KeyboardInterrupt:
        return
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<string>"):
        inner = inner.tb_next
    traceback.print_exception(kind, error, inner or trace)  # Unlike sys.__excepthook__, this finds the source of cells.


# --------------------------------------------------------------------------------------------------- the call and its result


class _BoundError(Exception):
    """An object that belongs to a running process group."""


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        """Refuse objects of a process group. Move tensors to the CPU: otherwise every process would use the same device."""
        kind: Any = type(obj)
        is_strategy = any(base.__module__ == "trainkit.strategy" for base in kind.__mro__)
        if issubclass(kind, World) or (is_strategy and obj.joined):
            raise _BoundError
        if kind is Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def dump_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments; `load` returns them, with tensors on the CPU. An error names the part."""
    parts = {_name(function): function, **{f"argument {index}": value for index, value in enumerate(args)}}
    return _dump_or_explain((function, args), parts, "", _NOT_SENT)


def dump_result(result: Any) -> bytes:
    """Like `dump_call`, for what the function returned."""
    return _dump_or_explain(result, {"the result": result}, "the function has returned, but ", _NOT_RETURNED)


def load(data: bytes) -> Any:
    """Unpickle what a process of the same launch has pickled."""
    return cloudpickle.loads(data)


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _dump_or_explain(value: Any, parts: Mapping[str, Any], before: str, message: str) -> bytes:
    try:
        return _dump(value)
    except Exception as error:
        part, why = _first_unpicklable(parts) or (next(iter(parts)), error)
        reason = "it belongs to this process" if isinstance(why, _BoundError) else summary(why).rstrip(".")
        raise ConfigurationError(f"{_NAME}: {before}{part} {message.format(reason)}") from error


def _first_unpicklable(parts: Mapping[str, Any], depth: int = 0) -> tuple[str, Exception] | None:
    """Name and type of the innermost part that cannot be pickled, and the error."""
    for name, value in parts.items():
        try:
            _dump(value)
        except Exception as error:
            known = isinstance(error, _BoundError) and hasattr(value, "__dict__") and not inspect.isroutine(value)
            inner = {} if known or depth >= _MAX_DEPTH else _parts(name, value)  # users know an Accelerator, not its parts
            return _first_unpicklable(inner, depth + 1) or (f"{name} (of type {type(value).__name__})", error)
    return None


def _parts(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, functools.partial):
        value = [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return {f"the object of {name}": value.__self__}
    if inspect.isfunction(value):
        return {f"{key}, used by {_name(value)}": part for key, part in _outer_variables(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return {f"{name}[{index}]": part for index, part in enumerate(value)}
    if inspect.isclass(value) or inspect.ismodule(value):
        return {}
    return {f"{name}.{key}": part for key, part in getattr(value, "__dict__", {}).items()}


def _outer_variables(function: FunctionType) -> dict[str, Any]:
    """Variables that a function and the functions inside it use from outside, and its defaults."""
    variables: dict[str, Any] = dict(inspect.getclosurevars(function).nonlocals)
    codes = [function.__code__]
    for code in codes:
        variables |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    parameters = inspect.signature(function).parameters.values()
    return variables | {one.name: one.default for one in parameters if one.default is not one.empty}


def _name(function: Callable[..., Any]) -> str:
    return f"the function {getattr(function, '__name__', type(function).__name__)}"


# -------------------------------------------------------------------------------------------------------------------- output


def is_redirected() -> bool:
    """Whether `sys.stdout` or `sys.stderr` is not the file that workers inherit: in a notebook, under capture."""
    return sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__


def shows_progress() -> dict[str, bool]:
    """For each stream, whether it can redraw a line, as a terminal and a notebook can, but a file cannot."""
    streams = {name: getattr(sys, name) for name in _NAMES}
    return {name: _is_notebook(one) or (one is not None and bool(one.isatty())) for name, one in streams.items()}


class WorkerOutput:
    """Copy the output of workers to the streams of this process.

    Output of local rank 0 appears as it is printed, progress bars included. Other ranks, and all ranks with a `template`, whose
    `${role_name}`, `${rank}` and `${local_rank}` are replaced, appear line by line; a redrawn line in its last state.
    """

    def __init__(self, template: str | None = None) -> None:
        self._template = string.Template(template or "")
        self._streams = {name: _Stream(getattr(sys, name)) for name in _NAMES}
        self._threads: list[threading.Thread] = []

    def take(self, local_rank: int, rank: int, process: Any) -> None:
        """Copy the pipes `stdout` and `stderr` of a process until it, and everything it has started, has ended."""
        prefix = self._template.safe_substitute(role_name="trainkit", rank=rank, local_rank=local_rank)
        for name, stream in self._streams.items():
            read = contextvars.copy_context().run  # a notebook finds the cell of a thread by its context
            texts = _read(getattr(process, name))
            copy = (stream.copy, texts) if local_rank == 0 and not prefix else (stream.copy, _by_lines(texts, prefix), True)
            thread = threading.Thread(target=read, args=copy, name=f"trainkit-{name}-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait for the last output, but not long for processes that workers have left running."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Stream:
    """A stream that several threads write to."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._line_is_open = False

    def copy(self, texts: Iterable[str], whole_lines: bool = False) -> None:
        """Write texts; whole lines begin on a new line. Errors are ignored: workers must not fail because of the display."""
        for text in texts:
            with self._lock, contextlib.suppress(Exception):
                self._stream.write(f"\n{text}" if whole_lines and self._line_is_open else text)
                self._line_is_open = not text.endswith("\n")
                if not _is_notebook(self._stream):  # The stream of a notebook flushes by itself.
                    self._stream.flush()


def _read(pipe: io.BufferedReader) -> Iterator[str]:
    with pipe:
        yield from codecs.iterdecode(iter(lambda: pipe.read1(65536), b""), "utf-8", "replace")


def _by_lines(texts: Iterable[str], prefix: str) -> Iterator[str]:
    rest = ""
    for text in texts:
        *lines, rest = _REDRAWN.sub("", rest + text).split("\n")
        if lines:
            yield "".join(prefix + line.rstrip("\r") + "\n" for line in lines)
    if rest:
        yield prefix + rest.rstrip("\r") + "\n"


def _is_notebook(stream: Any) -> bool:
    return "ipykernel" in type(stream).__module__
