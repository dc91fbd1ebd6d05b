"""The guard around every test, which finds changed settings, threads and child processes, can itself fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grimp
import numpy
import pytest
import torch
from helpers.changed import paths_of_tests
from helpers.covering import covering
from helpers.process_state import ProcessState
from helpers.runs.tiny import TinyModule
from helpers.support import ROOT, run_python, without_gloo
from helpers.worlds.worlds import free_port
from torch.utils.data import DataLoader

from trainkit import Trainer


def _set_environment() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def _set_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda: torch.set_default_dtype(torch.float64), "torch.get_default_dtype()"),
        (lambda: torch.set_default_device("meta"), "torch.get_default_device()"),
        (lambda: torch.set_default_device("cpu"), "torch function modes"),
        (lambda: torch.set_num_threads(2), "torch.get_num_threads()"),
        (lambda: torch.set_grad_enabled(False), "torch.is_grad_enabled()"),
        (lambda: torch.set_float32_matmul_precision("high"), "torch.get_float32_matmul_precision()"),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms"),
        (lambda: setattr(torch.backends.cudnn, "benchmark", True), "torch.backends.cudnn.benchmark"),
        (lambda: setattr(torch.backends.cudnn, "deterministic", True), "torch.backends.cudnn.deterministic"),
        (lambda: numpy.seterr(divide="raise"), "numpy.geterr()"),
        (_set_handler, "signal handlers: 15"),
        (_set_environment, "os.environ: LEFT_BEHIND: None → '1'"),
    ],
)
def test_a_setting_left_behind_is_named_and_restored(change: Callable[[], object], name: str) -> None:
    state = ProcessState()
    change()
    left = state.restore()
    assert len(left) == 1
    assert left[0].startswith(name)
    assert state.restore() == []


def test_a_thread_left_behind_is_named() -> None:
    state, end = ProcessState(patience=0.0), threading.Event()
    thread = threading.Thread(target=end.wait, name="left-behind")
    thread.start()
    left = state.restore()
    end.set()
    thread.join()
    assert [("left-behind" in complaint) for complaint in left] == [True]
    assert state.restore() == []


def test_a_thread_that_is_ending_is_waited_for() -> None:
    state = ProcessState()
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    assert state.restore() == []


def test_a_child_left_behind_is_named() -> None:
    state = ProcessState(patience=0.0)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    left = state.restore()
    child.terminate()
    child.join()
    assert [("child process" in complaint) for complaint in left] == [True]


def test_generators_start_alike() -> None:
    """Every test starts with generators that are seeded with 0."""
    expected = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    assert numpy.random.rand() == numpy.random.RandomState(0).rand()


def test_a_test_runs_in_a_directory_of_its_own(run_dir: Path) -> None:
    assert Path.cwd() == run_dir.resolve()
    assert list(run_dir.iterdir()) == []
    assert not run_dir.is_relative_to(ROOT)


def test_a_process_finds_the_checkout_from_anywhere(run_dir: Path) -> None:
    done = run_python("import trainkit.errors as e, torch; print(e.__file__, torch.get_num_threads())", cwd=run_dir)
    assert done.stdout.split() == [str(ROOT / "trainkit" / "errors.py"), "1"], done.stderr


def test_the_tiny_module_learns(tiny_module: TinyModule, tiny_loader: DataLoader) -> None:
    trainer = Trainer(max_epochs=20, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(tiny_module, tiny_loader)
    assert trainer.callback_metrics["train_loss"] < 0.1


def test_lines_of_gloo_are_skipped() -> None:
    """Lines of gloo are removed, also two that were written at the same time and are mixed."""
    twice = "[Gloo] Rank [Gloo] Rank 01 is connected to  is connected to 22 peer ranks.  peer ranks. "
    twice += "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 22\n\n"
    once = "[Gloo] Rank 2 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2\n"
    assert without_gloo(twice + "rank 2\n" + once + "2 of 3\n") == "rank 2\n2 of 3\n"
    assert without_gloo("1\n\n2\n") == "1\n\n2\n"


@pytest.mark.parametrize("bare", [False, True])
def test_a_program_ends_as_in_a_new_interpreter(bare: bool, run_dir: Path) -> None:
    """Forked or not: the exit code, what is printed, also at the exit, and tracebacks are the same."""
    (run_dir / "script.py").write_text("import sys\ndef f():\n    raise ValueError(sys.argv, __name__)\nf()\n")
    trace = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
    done = run_python("import atexit, sys; atexit.register(print, 'bye'); print(__name__, sys.argv); sys.exit(7)", bare=bare)
    assert (done.returncode, done.stdout, done.stderr) == (7, "__main__ ['-c']\nbye\n", "")
    done = run_python("raise KeyError(3)", bare=bare)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{trace}KeyError: 3\n")
    done = run_python("raise KeyboardInterrupt", bare=bare)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, f"{trace}KeyboardInterrupt\n")
    done = run_python("import os; print(1, flush=True); os.kill(os.getpid(), 9)", bare=bare)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "1\n")
    done = run_python("-u", "script.py", "--x", bare=bare)
    assert done.returncode == 1
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "')
    assert 'script.py", line 4, in <module>' in done.stderr
    assert "ValueError: (['script.py', '--x'], '__main__')" in done.stderr


@pytest.mark.parametrize("bare", [False, True])
def test_a_program_has_an_environment_of_its_own(bare: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, sys; print(os.getcwd(), sys.path[0] == '', *map(os.environ.get, 'ABC'))"
    monkeypatch.setenv("A", "1")
    monkeypatch.setenv("C", "3")
    assert run_python("import os; os.environ['C'] = '4'", bare=bare).returncode == 0
    monkeypatch.delenv("C")
    assert run_python(program, env={"B": "2"}, bare=bare).stdout == f"{run_dir.resolve()} True 1 2 None\n"
    folders = (
        "import tempfile; from trainkit.launch.starting import folder_at_start; print(tempfile.gettempdir(), folder_at_start())"
    )
    assert run_python(folders, env={"TMPDIR": str(run_dir)}, bare=bare).stdout == f"{run_dir} {run_dir.resolve()}\n"
    drawn = {
        run_python("import random, numpy; print(random.random(), numpy.random.rand())", bare=bare).stdout for _ in range(2)
    }
    assert len(drawn) == 2


def test_a_forked_program_has_imported_torch_and_others_start_a_new_interpreter() -> None:
    program = "import sys; print('torch' in sys.modules)"
    assert run_python(program).stdout == "True\n"
    assert run_python(program, bare=True).stdout == "False\n"
    assert run_python(program, env={"PYTHONHASHSEED": "1"}).stdout == "False\n"
    assert run_python("-W", "error", "-c", program).stdout == "False\n"


def test_a_program_that_hangs_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run_python("import os, time; print(os.getpid(), flush=True); time.sleep(1000)", timeout=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(raised.value.stdout), 0)


def test_chosen_cases_cover_a_grid() -> None:
    grid = [(a, b, c) for a in "abcd" for b in "xyz" for c in "12"]
    chosen = [grid[place] for place in covering(grid)]
    assert sorted(row[0] for row in chosen) == [*"abcd"]
    assert {row[1] for row in chosen} == {*"xyz"}
    assert {row[2] for row in chosen} == {*"12"}


def test_ports_of_other_test_runs_are_others() -> None:
    """Two runs of the tests on one machine, whose workers have the same names, are never given one port."""
    program = "from helpers.worlds.worlds import free_port; print([free_port() for _ in range(50)])"
    ours = {free_port() for _ in range(50)}  # before the others, and locked as long as this process lives
    theirs = set(json.loads(run_python(program).stdout))
    assert len(theirs) == len(ours) == 50
    assert not theirs & ours


def test_a_change_reaches_the_tests_of_the_rooms_that_import_it() -> None:
    graph = grimp.build_graph("trainkit")
    paths = paths_of_tests(["trainkit/checkpoint/tensor_file.py"], graph)
    assert {"tests/checkpoint", "tests/state"} <= {*paths}
    assert "tests/launch" not in paths
    assert paths_of_tests(["callbacks/timer.py", "tests/optim/test_groups.py", "docs/index.md"], graph)[0] == "tests/callbacks"
    assert paths_of_tests(["callbacks/timer.py", "tests/helpers/support.py"], graph) == ["tests"]
    assert paths_of_tests(["examples/own_loop.py", "benchmarks/report.py"], graph) == ["tests/benchmarks", "tests/examples"]
    assert paths_of_tests(["LICENSE"], graph) == []
