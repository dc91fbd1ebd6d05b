"""`notebook_launcher`: run a function of a notebook or script in several new processes."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launch.agents import alive, wait_until
from helpers.launch.notebooks import run_cells
from helpers.support import run_python
from helpers.worlds.worlds import free_port

from trainkit import notebook_launcher, utils
from trainkit.config.settings import VARIABLE, read_process_settings
from trainkit.errors import ConfigurationError, Preempted, ProcessFailedError, UnsupportedArgumentError
from trainkit.launch import agent, notebook
from trainkit.launch.agent import Job
from trainkit.launch.notebook import CALL, FOLDER, TASK, dump_call, dump_result, read_reports
from trainkit.launch.private_folder import remove_leftovers
from trainkit.launch.workers import Outcome

Captured = Callable[..., Job]

# ------------------------------------------------------------------------------------------------------ the arguments


def nothing() -> None:
    raise AssertionError("called")


def test_the_parameters_are_those_of_accelerate() -> None:
    parameters = inspect.signature(notebook_launcher).parameters.values()
    assert [(one.name, one.default) for one in parameters] == [
        ("function", inspect.Parameter.empty),
        ("args", ()),
        ("num_processes", None),
        ("mixed_precision", "no"),
        ("use_port", "29500"),
        ("master_addr", "127.0.0.1"),
        ("node_rank", 0),
        ("num_nodes", 1),
        ("rdzv_backend", "static"),
        ("rdzv_endpoint", ""),
        ("rdzv_conf", None),
        ("rdzv_id", "none"),
        ("max_restarts", 0),
        ("monitor_interval", 0.1),
        ("log_line_prefix_template", None),
    ]


@pytest.mark.parametrize("options, error, message", [
    ({"function": 3}, ConfigurationError, r"must be the function itself, not 3: notebook_launcher\(train\)"),
    ({"args": 3}, ConfigurationError, r"args must be a tuple of arguments, such as args=\(model,\), not 3"),
    ({"args": "ab"}, ConfigurationError, "args must be a tuple"),
    ({"num_processes": 0}, ConfigurationError, r"\(num_processes=\) must be an integer ≥ 1 or None, not 0"),
    ({"num_processes": True}, ConfigurationError, r"\(num_processes=\) must be an integer ≥ 1 or None, not True"),
    ({"mixed_precision": "half"}, ConfigurationError, "mixed_precision must be one of no, fp16, bf16, fp8"),
    ({"max_restarts": -1}, ConfigurationError, r"\(max_restarts=\) must be an integer ≥ 0"),
    ({"num_nodes": 2}, ConfigurationError, r"num_nodes=2 needs an address of the first node.*master_addr='host0'"),
    ({"num_nodes": 2, "node_rank": 2}, ConfigurationError, "node_rank=2 must be less than num_nodes=2"),
    ({"use_port": "many"}, ConfigurationError, "use_port must be a port from 0 to 65535, not 'many'"),
    ({"use_port": 70000}, ConfigurationError, "use_port must be a port"),
    ({"rdzv_backend": "etcd"}, UnsupportedArgumentError, "rdzv_backend='etcd' is not supported"),
    ({"rdzv_conf": {"timeout": -1}}, ConfigurationError, "rdzv_conf: timeout must be a number of seconds, not -1"),
    ({"rdzv_conf": {"last_call": 1}}, UnsupportedArgumentError, "Use 'timeout' or 'join_timeout'"),
    ({"rdzv_conf": {"rank": 3}}, UnsupportedArgumentError, "rdzv_conf={'rank': 3} is not supported"),
])  # fmt: skip
def test_arguments_that_are_wrong(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        notebook_launcher(**{"function": nothing, "num_processes": 2, **options})


def test_a_process_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="this is one of 2 processes that a launcher .*Call the function itself"):
        notebook_launcher(nothing, num_processes=1)


@pytest.fixture
def tasks() -> list[dict[str, Any]]:
    """The content of the task file of each job that `captured` receives."""
    return []


@pytest.fixture
def captured(tasks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Captured:
    """`captured(num_processes=2)` returns the job that would run, and pretends that it succeeded."""
    jobs: list[Job] = []

    def run_to_end(job: Job) -> Outcome:
        jobs.append(job)
        tasks.append(json.loads(Path(job.environment[FOLDER], TASK).read_text()))
        return Outcome(0, True, None, None)

    monkeypatch.setattr(agent, "run_to_end", run_to_end)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(**options: Any) -> Job:
        assert notebook_launcher(nothing, **options) is None
        return jobs.pop()

    return run


def test_the_job(captured: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    job = captured(num_processes=2)
    assert capsys.readouterr().out == "Launching training on 2 CPUs.\n"
    assert (job.per_node, job.least, job.most, job.master_port, job.max_restarts) == (2, 1, 1, None, 0)
    assert (job.launcher, job.join_timeout) == ("notebook_launcher", 600.0)
    assert job.output is not None  # because pytest captures the output
    assert job.command[0] == sys.executable
    assert repr(sys.path) in job.command[-1]
    assert read_process_settings(job.environment).get("mixed_precision") == "no"
    assert FOLDER in job.environment
    assert {FOLDER, VARIABLE} & os.environ.keys() == set()
    job = captured(num_processes=3, use_port="29501", max_restarts=2, mixed_precision="BF16")
    assert (job.per_node, job.master_port, job.max_restarts) == (3, 29501, 2)
    assert read_process_settings(job.environment).get("mixed_precision") == "bf16"


def test_several_nodes(captured: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    job = captured(num_processes=1, num_nodes=2, node_rank=1, master_addr="host0", rdzv_conf={"timeout": 5, "rank": 1})
    assert capsys.readouterr().out == "Launching training on one CPU on each of 2 nodes.\n"
    assert (job.per_node, job.least, job.most, job.node_rank) == (1, 2, 2, 1)
    assert (job.master_addr, job.master_port, job.join_timeout) == ("host0", 29500, 5.0)
    job = captured(num_nodes=2, rdzv_backend="c10d", rdzv_endpoint="host1:4000", rdzv_id="x")
    assert (job.master_addr, job.master_port, job.per_node) == ("host1", 4000, 1)


def test_one_process_for_each_gpu(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert captured().per_node == 4
    assert captured(num_processes=6).per_node == 6
    assert capsys.readouterr().out == "Launching training on 4 GPUs.\nLaunching training on 6 processes.\n"


def test_on_a_tpu_the_runtime_starts_the_processes(
    captured: Captured,
    tasks: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("MASTER_ADDR", "host0")
    assert captured().per_node == 1
    assert tasks[-1]["environment"]["MASTER_ADDR"] == "host0"
    captured(num_processes=1)
    assert [task["replicas"] for task in tasks] == [0, 1]
    assert capsys.readouterr().out == "Launching training on all TPU cores.\nLaunching training on 1 TPU cores.\n"
    with pytest.raises(UnsupportedArgumentError, match="num_nodes=2 is not supported on XLA, whose runtime knows the hosts"):
        captured(num_nodes=2, master_addr="host0")
    with pytest.raises(UnsupportedArgumentError, match="max_restarts=1 is not supported on XLA"):
        captured(max_restarts=1)
    used: Any = type(sys)("torch_xla")
    used._XLAC = type("C", (), {"_xla_runtime_is_initialized": staticmethod(lambda: True)})
    monkeypatch.setitem(sys.modules, "torch_xla", used)
    with pytest.raises(ConfigurationError, match="this process has used the TPU.*Restart the kernel"):
        captured()


def test_the_cpu_runtime_of_xla(captured: Captured, tasks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    for found, replicas in ((object(), 2), (None, None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        captured(num_processes=2)
        assert tasks[-1]["replicas"] == replicas


# ---------------------------------------------------------------------------------------------------- a single process


def test_a_single_process_is_this_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen: list[Any] = []

    def train(value: int) -> str:
        seen.append((os.getpid(), value, read_process_settings().get("mixed_precision")))
        if value < 0:
            raise ValueError("no")
        return "done"

    assert utils.notebook_launcher is notebook_launcher
    assert notebook_launcher(train, [3], mixed_precision="bf16") == "done"  # type: ignore[arg-type]
    assert capsys.readouterr().out == "Launching training on one CPU.\n"
    monkeypatch.setenv(VARIABLE, '{"values": {"gradient_accumulation_steps": 2}}')
    with pytest.raises(ValueError, match="no"):
        notebook_launcher(train, (-1,), 1)
    assert seen == [(os.getpid(), 3, "bf16"), (os.getpid(), -1, "no")]
    assert read_process_settings().values == {"gradient_accumulation_steps": 2}  # restored


# --------------------------------------------------------------------------------------- results and errors of the job


def failure(rank: int, summary: str, refused: bool = False, follows: bool = False) -> dict[str, Any]:
    return {"rank": rank, "summary": summary, "refused": refused, "follows": follows}


FIRST = failure(1, "ValueError: no")
FOLLOWS = failure(0, "RuntimeError: Connection closed by peer", follows=True)
REFUSED = failure(0, "the result cannot be sent back", refused=True)


@pytest.mark.parametrize("outcome, failures, error, message", [
    (Outcome(1, False, "rank 0 ended with exit code 1", None), [FOLLOWS, FIRST], ProcessFailedError, "rank 1 failed: ValueE"),
    (Outcome(137, False, "x", "rank 1 was ended by SIGKILL"), [FOLLOWS], ProcessFailedError, "^rank 1 was ended by SIGKILL.$"),
    (Outcome(1, False, "rank 0 ended with exit code 1", None), [FOLLOWS], ProcessFailedError, "Connection closed by peer"),
    (Outcome(3, False, "rank 1 ended with exit code 3", None), [], ProcessFailedError, "^rank 1 ended with exit code 3.$"),
    (Outcome(1, False, None, None), [], ProcessFailedError, "the processes have failed"),
    (Outcome(1, False, "x", None), [FOLLOWS, REFUSED], ConfigurationError, "cannot be sent back"),
    (Outcome(1, False, "x", None), [REFUSED, FIRST], ProcessFailedError, "rank 1 failed: ValueError"),
    (Outcome(0, True, None, None), [REFUSED], ConfigurationError, "cannot be sent back"),
    (Outcome(130, True, None, None), [FOLLOWS], KeyboardInterrupt, "^$"),
    (Outcome(143, True, None, None), [], Preempted, "stopped by a signal"),
])  # fmt: skip
def test_failures(outcome: Outcome, failures: list[dict[str, Any]], error: type[BaseException], message: str) -> None:
    with pytest.raises(error, match=message):
        notebook._raise_failure(outcome, failures)


# ------------------------------------------------------------------------------------------ code of the worker process


Reports = tuple[list[dict[str, Any]], bytes | None]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reports]:
    """`run_here(call, rank)` runs a call in this process as a worker of this rank would, and returns its reports."""

    def run(call: bytes, rank: int = 0, start: int = 0) -> Reports:
        (tmp_path / CALL).write_bytes(call)
        (tmp_path / TASK).write_text(json.dumps({"argv": sys.argv, "sources": {}, "shows_progress": {}}))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        notebook._run(str(tmp_path), rank, rank)
        return read_reports(tmp_path)

    return run


def test_what_a_process_returns(run_here: Callable[..., Reports]) -> None:
    """Only the result of rank 0 is sent back. A result that cannot be sent is reported as a failure."""
    assert run_here(dump_call(lambda x: x + 1, (2,)), rank=1) == ([], None)
    assert run_here(dump_call(lambda x: x + 1, (2,))) == ([], dump_result(3))
    failures, result = run_here(dump_call(lambda: (i for i in range(3)), ()), start=1)
    assert [(failure["rank"], failure["refused"]) for failure in failures] == [(0, True)]
    assert "(of type generator) cannot be sent back" in failures[0]["summary"]
    assert result is None


def test_reports_are_of_the_last_start(run_here: Callable[..., Reports], tmp_path: Path) -> None:
    # Failures are reported in the order in which they happened. After a restart, only those of the last start count.

    def fails(follows: bool) -> None:
        raise ProcessFailedError("rank 1 failed") if follows else ValueError("no")

    for rank, follows in ((2, True), (0, False)):
        with pytest.raises((ProcessFailedError, ValueError)):
            run_here(dump_call(fails, (follows,)), rank)
    expected = [failure(2, "ProcessFailedError: rank 1 failed", follows=True), failure(0, "ValueError: no")]
    assert read_reports(tmp_path) == (expected, None)  # in the order in which they happened
    with open(tmp_path / "0" / "failures.jsonl", "ab") as file:
        file.write(b'{"rank": 1, "summ\xff')  # cut off by a full disk
    assert read_reports(tmp_path) == (expected, None)
    assert run_here(dump_call(lambda: "fine", ()), start=1) == ([], dump_result("fine"))


def test_what_cannot_be_loaded(run_here: Callable[..., Reports], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # If the function or its arguments cannot be loaded in the workers, rank 0 prints the traceback and all ranks report it.

    class Bad:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    for rank in (0, 1):
        with pytest.raises(SystemExit):
            run_here(dump_call(print, (Bad(),)), rank)
        assert ("ValueError: invalid literal" in capsys.readouterr().err) == (rank == 0)
    reports = read_reports(tmp_path)[0]
    assert [report["refused"] for report in reports] == [True, True]
    assert re.search("cannot be loaded.*: ValueError: invalid.*register_pickle_by_value", reports[0]["summary"])


def test_a_full_disk(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(ConfigurationError, match=r"cannot write \d+ bytes to .*: No space left on device.*export TMPDIR=/path"):
        captured(num_processes=2)


def test_only_this_user_can_read_what_is_sent(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder with the pickled function can be read by this user only and is removed at the end."""
    modes: list[tuple[Path, int]] = []

    def run_to_end(job: Job) -> Outcome:
        folder = Path(job.environment[FOLDER])
        modes.append((folder, folder.stat().st_mode & 0o777))
        return Outcome(0, True, None, None)

    monkeypatch.setattr(agent, "run_to_end", run_to_end)
    notebook_launcher(nothing, num_processes=2)
    ((folder, mode),) = modes
    assert mode == 0o700 or os.name != "posix"
    assert not folder.exists()


# ------------------------------------------------------------------------------------------------------ real processes

HELPER = """
offset = 100
def add(x): return x + offset
"""

SCRIPT = """
import json, os, sys, types
import torch
from trainkit import notebook_launcher

print("the script runs")

class Thing:
    def __init__(self, value): self.value = value

def train(model, thing):
    import helper
    print(json.dumps([os.environ["RANK"], os.getcwd(), sys.argv, os.getpid()]))
    return Thing(helper.add(thing.value)), model

def fails_once(value):
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restarts == "0" and os.environ["RANK"] == "1":
        sys.exit(3)
    print(f"start {restarts}")
    return [value, restarts]

if __name__ == "__main__":
    sys.path.append(os.path.join(os.getcwd(), "lib"))
    port = sys.argv[1]
    model = torch.nn.Linear(1, 1)
    thing, sent = notebook_launcher(train, (model, Thing(5)), num_processes=2, use_port=port)
    assert type(thing) is Thing, type(thing)
    assert torch.equal(sent.weight, model.weight)
    again = notebook_launcher(fails_once, (7,), 2, use_port=port, max_restarts=1, log_line_prefix_template="<${rank}> ")
    module = sys.modules["not_a_file"] = types.ModuleType("not_a_file")
    exec("def train(): ...", vars(module))
    try:
        notebook_launcher(module.train, (), 2)
    except ValueError as error:
        print(json.dumps([thing.value, again, str(error)]))
"""


def test_a_script(run_dir: Path) -> None:
    """`notebook_launcher` in a script does not run the script again.

    The workers have its definitions, arguments, working directory and `sys.path`.
    """
    (run_dir / "lib").mkdir()
    (run_dir / "lib" / "helper.py").write_text(HELPER)
    (run_dir / "script.py").write_text(SCRIPT)
    port = str(free_port())
    done = run_python("script.py", port, "--x", cwd=run_dir)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    value, again, refused = json.loads(lines.pop())
    assert value == 105
    assert again == [7, "1"]
    assert "No module named 'not_a_file'. Modules are imported there from sys.path" in refused
    said = sorted(json.loads(line) for line in lines if line.startswith("["))
    assert [one[:3] for one in said] == [[rank, str(run_dir), ["script.py", port, "--x"]] for rank in ("0", "1")]
    assert not any(alive(one[3]) for one in said)
    assert {"<0> start 1", "<1> start 1"} <= set(lines)
    assert "<1> start 0" not in lines
    assert (lines.count("the script runs"), lines.count("Launching training on 2 CPUs.")) == (1, 3)
    assert "rank 1 ended with exit code 3; restarting all processes (restart 1 of 1)" in done.stderr
    assert "Traceback" not in done.stderr


CELLS = [
    """
import os, signal, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from trainkit import Accelerator, Trainer, notebook_launcher, set_seed

torch.set_num_threads(2)                            # what makes a forked process hang
weight = torch.randn(300, 300, requires_grad=True)
(weight @ weight).sum().backward()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
kernel = os.getpid()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))

model = Net()
before = model.first.weight.clone()
""",
    """
def train(model, epochs):
    set_seed(1)
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    bar = tqdm(total=epochs * len(loader), disable=not accelerator.is_main_process)
    losses = []
    for _ in range(epochs):
        for (x,) in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.update()
    bar.close()
    accelerator.print(f"on {accelerator.num_processes}: épôque █")
    return losses, accelerator.unwrap_model(model)
""",
    run := "losses, trained = notebook_launcher(train, args=(model, 2), num_processes=2)\nlosses",
    run,
    """
same = torch.equal(model.first.weight, before) and trained.first.weight is trained.second.weight
isinstance(trained, Net), same, torch.equal(trained.first.weight, before)
""",
    """
def fails():
    accelerator = Accelerator()
    if not accelerator.is_main_process:
        raise KeyError("an unlikely thing")          # shown with this line
    accelerator.strategy.world.barrier()

notebook_launcher(fails, num_processes=2)
""",
    """
def goes_on():
    rank = os.environ["RANK"]
    with open(f"pid-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"pid-{rank}", f"ready-{rank}")
    while rank == "0" and not os.path.exists("ready-1"):
        time.sleep(0.01)
    if rank == "0":
        os.kill(kernel, signal.SIGINT)               # what the button does that stops a cell
    time.sleep(1000)

notebook_launcher(goes_on, num_processes=2)
""",
    "Trainer(devices=2)",
    "import signal; signal.getsignal(signal.SIGINT) is signal.default_int_handler, threading.active_count() < 20",
]


@pytest.mark.slow
def test_in_a_kernel(run_dir: Path) -> None:
    setup, define, first, second, compared, failed, stopped, trainer, after = run_cells(run_dir, CELLS)
    assert (setup.error, define.error) == ("", "")
    for shown in (first, second):
        assert (shown.error, shown.stdout) == ("", "Launching training on 2 CPUs.\non 2: épôque █\n")
        assert "\r" in shown.stderr
        assert "100%|██████████| 8/8 [" in shown.stderr
        assert len(json.loads(shown.value)) == 8
    assert first.value == second.value  # both calls train copies of the same initial model
    assert compared.value == "(True, True, False)"
    assert failed.error == ("ProcessFailedError: rank 1 failed: KeyError: 'an unlikely thing'. Its traceback is in the output.")
    assert 'raise KeyError("an unlikely thing")          # shown with this line' in failed.stderr
    assert "launch/notebook.py" not in failed.stderr
    assert stopped.error.startswith("KeyboardInterrupt")
    assert not any(alive(int((run_dir / f"ready-{rank}").read_text())) for rank in (0, 1))
    assert "Traceback" not in stopped.stderr
    assert trainer.error.startswith(
        "ConfigurationError: devices=2 needs 2 processes, but they cannot be started from a notebook"
    )
    assert "notebook_launcher(function, num_processes=2)" in trainer.error
    assert after.value == "(True, True)"


NODE = """
import os, sys
import torch.distributed as dist
from trainkit import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    world = accelerator.strategy.world
    return world.exchange([world.rank, world.node, world.nodes])

print(notebook_launcher(train, (), 1, num_nodes=2, node_rank=int(sys.argv[1]), master_addr="localhost", use_port=sys.argv[2]))
"""


@pytest.mark.slow
def test_two_nodes(run_dir: Path) -> None:
    (run_dir / "script.py").write_text(NODE)
    port = str(free_port())
    command = [sys.executable, "script.py"]
    other = subprocess.Popen([*command, "1", port], stdout=subprocess.PIPE, text=True)
    done = run_python("script.py", "0", port, cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[0, 0, 2], [1, 1, 2]]"
    assert other.communicate()[0].splitlines()[-1] == "None"
    assert other.returncode == 0


ORPHANS = """
import os, signal, time
from trainkit import notebook_launcher

parent = os.getpid()

def train():
    open(f"pid-{os.getpid()}", "w").close()
    while len([name for name in os.listdir() if name.startswith("pid-")]) < 2:
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    time.sleep(1000)

notebook_launcher(train, num_processes=2)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.slow
def test_workers_end_with_their_launcher(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "script.py").write_text(ORPHANS)
    temporary = run_dir / "temporary"
    temporary.mkdir()
    done = run_python("-u", "script.py", cwd=run_dir, env={"TMPDIR": str(temporary)})
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(path.name.partition("-")[2]) for path in run_dir.glob("pid-*")]
    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids))
    [folder] = temporary.glob("trainkit-*")
    assert (folder / CALL).exists()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    remove_leftovers()  # by the next start
    assert not folder.exists()
