"""A script that is started once and requests several processes: its exact command line is run again for each of them."""

from __future__ import annotations

import json
import os
import sys
import types
import zipapp
from pathlib import Path

import pytest
from helpers.support import run_python, without_gloo

from trainkit.errors import ConfigurationError
from trainkit.launch import starting
from trainkit.launch.starting import folder_at_start, start_command

pytestmark = pytest.mark.skipif(os.name != "posix", reason="exec is not the same elsewhere")

# Becomes the agent without importing torch, which is then imported only once, by the agent.
SCRIPT = """\
import atexit, json, os, sys
rank = os.environ.get("RANK")
if rank is None:
    from trainkit.launch.starting import become_agent
    atexit.register(lambda: print("at exit", flush=True))
    sys.stdout.write("not flushed, ")
    os.chdir("/")
    try:
        become_agent(2)
    finally:
        print("never", flush=True)
said = [sys.orig_argv[1:], sys.argv, os.getcwd(), sys.warnoptions, sys.flags.optimize, os.environ["TRAINKIT_LAUNCHER"]]
with open(f"{os.environ['FOLDER']}/rank-{rank}", "w") as file:
    json.dump(said, file)
sys.exit(int(sys.argv[1]) if rank == "1" else 0)
"""


def ranks(folder: Path) -> list[list[object]]:
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("arguments", [
    ["sub/script.py", "3", "--x", "a b"],
    ["-u", "-W", "ignore::FutureWarning", "-Xdev", "-O", "sub/script.py", "3"],
    ["-m", "sub.script", "3"],
], ids=["script", "options", "module"])  # fmt: skip
def test_the_same_command_line_is_run(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SCRIPT)
    (tmp_path / "sub" / "__init__.py").touch()
    done = run_python(*arguments, bare=True, cwd=tmp_path, env={"FOLDER": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (3, "not flushed, at exit\n", "")
    first, second = ranks(tmp_path)
    assert first == second
    assert first[0] == arguments
    assert (first[1][1:], first[2]) == (arguments[arguments.index("3") :], str(tmp_path))  # type: ignore[index]
    assert first[4:] == [1 if "-O" in arguments else 0, "this script"]
    assert ("ignore::FutureWarning" in first[3]) == ("-W" in arguments)  # type: ignore[operator]


@pytest.mark.parametrize("arguments", [["script.py", "0"], ["-m", "script", "0"]], ids=["script", "module"])
def test_a_script_that_goes_elsewhere_before_it_uses_trainkit(arguments: list[str], tmp_path: Path) -> None:
    """The script creates a folder and changes into it between `import trainkit` and its first use.

    The workers start in the original directory, find the folder, and do not create another one inside it.
    """
    head = 'import os, trainkit\nos.makedirs("run", exist_ok=True)\nos.chdir("run")\n'
    (tmp_path / "script.py").write_text(head + SCRIPT)
    done = run_python(*arguments, bare=True, cwd=tmp_path, env={"FOLDER": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert [(rank[0], rank[2]) for rank in ranks(tmp_path)] == [(arguments, str(tmp_path / "run"))] * 2
    assert list((tmp_path / "run").iterdir()) == []


def test_a_zipped_program(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(SCRIPT)
    zipapp.create_archive(tmp_path / "program", tmp_path / "program.pyz")
    done = run_python("program.pyz", "0", bare=True, cwd=tmp_path, env={"FOLDER": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert [rank[0] for rank in ranks(tmp_path)] == [["program.pyz", "0"]] * 2


def test_a_program_that_was_installed(tmp_path: Path) -> None:
    """A console script, which is a file without a suffix in another folder."""
    program = tmp_path / "bin" / "program"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{SCRIPT}")
    done = run_python(str(program), "0", bare=True, cwd=tmp_path, env={"FOLDER": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert [rank[0] for rank in ranks(tmp_path)] == [[str(program), "0"]] * 2


def test_a_script_that_joins(tmp_path: Path) -> None:
    """Joining from a script, as the Trainer does, with a real process group. A worker's error is printed once, at the end."""
    (tmp_path / "script.py").write_text("""\
import sys
from datetime import timedelta
from trainkit.launch.joining import join
from trainkit.distributed.requested_devices import RequestedDevices

world = join(RequestedDevices("cpu", 2), timeout=timedelta(seconds=60))
print(world.sums([world.rank, 1]), world.launcher, flush=True)
world.barrier()
if world.rank == 1:
    sys.exit("rank 1 ends it")
""")
    done = run_python("-u", "script.py", bare=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert without_gloo(done.stdout) == "[1.0, 2.0] this script\n" * 2, done.stderr
    assert done.stderr.splitlines() == ["trainkit: 2 processes, started by this script (it requests them).", "rank 1 ends it"]


TWICE = """\
from trainkit import Trainer

for options in ({first}, {{"devices": 2}}):
    trainer = Trainer(accelerator="cpu", logger=False, seed=1, **options)
    print(options, trainer.world_size, flush=True)
"""
AGAIN = "trainkit: devices=2 needs 2 processes, and each of them runs this script from its first line"


def test_one_process_and_then_two(tmp_path: Path) -> None:
    """A second Trainer, with `devices=2`, runs the whole script again with a notice, if the first did not set `devices`."""
    (tmp_path / "script.py").write_text(TWICE.format(first={}))
    done = run_python("-u", "script.py", bare=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *others = without_gloo(done.stdout).splitlines()
    assert first == "{} 1"
    assert sorted(others) == ["{'devices': 2} 2"] * 2 + ["{} 2"] * 2
    told, started = done.stderr.splitlines()
    assert told.startswith(f"{AGAIN}: the runs that it has finished with one process are repeated with 2. ")
    assert started == "trainkit: 2 processes, started by this script (it requests them)."


@pytest.mark.parametrize("option", [{"devices": 1}, {"strategy": "single"}])
def test_devices_1_and_then_2(option: dict[str, object], tmp_path: Path) -> None:
    """If the first Trainer has `devices=1`, a second one with `devices=2` raises an error once, before anything runs again."""
    (tmp_path / "script.py").write_text(TWICE.format(first=option))
    done = run_python("-u", "script.py", bare=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, f"{option} 1\n"), done.stderr
    *_, last = done.stderr.splitlines()
    assert last == (
        "trainkit.errors.ConfigurationError: devices=2 needs 2 processes, and each of them runs this script from its first "
        "line. An earlier Trainer in the script has devices=1 or strategy='single', which is for one process. Use devices=2 "
        "for all Trainers of the script, or move the part for one process to a separate script and load its checkpoint here."
    )
    assert done.stderr.count("trainkit.errors.ConfigurationError") == 1


# --------------------------------------------------------------------------------------- command lines that can be run again


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """This process as if it had been started by `python script.py`."""
    monkeypatch.setattr(starting, "START_FOLDER", str(tmp_path))
    start(monkeypatch, ["python", "script.py"], file=str(tmp_path / "script.py"))
    (tmp_path / "script.py").touch()
    (tmp_path / "a folder").mkdir()
    return monkeypatch


def start(
    monkeypatch: pytest.MonkeyPatch,
    original: list[str],
    file: str | None = None,
    spec: str | None = None,
    argv: str = "script.py",
) -> None:
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    main.__spec__ = None if spec is None else types.SimpleNamespace(name=spec)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", original)
    monkeypatch.setattr(sys, "argv", [argv])


@pytest.mark.parametrize("arguments, script", [
    (["script.py", "-c", "x"], 0),
    (["-u", "-X", "dev", "-Wignore", "script.py", "-m"], 4),
    (["-bXutf8", "-W", "error", "--check-hash-based-pycs", "always", "script.py"], 5),
    (["-IS", "-uXimporttime", "script.py"], 2),
])  # fmt: skip
def test_options_of_the_interpreter(started: pytest.MonkeyPatch, arguments: list[str], script: int, tmp_path: Path) -> None:
    start(started, ["python3", *arguments], file=str(tmp_path / "script.py"))
    assert start_command(2) == [sys.executable, *arguments]
    assert folder_at_start() == f"{tmp_path}/"
    start(started, ["python3", *arguments], file="/elsewhere/script.py")  # it changed the directory before it used trainkit
    assert start_command(2) == [sys.executable, *arguments]
    assert folder_at_start() == "/elsewhere/"
    full = [*arguments[:script], "/elsewhere/script.py", *arguments[script + 1 :]]
    start(started, ["python3", *full], file="/elsewhere/script.py")
    assert start_command(2) == [sys.executable, *full]
    assert folder_at_start() == str(tmp_path)


def test_modules_and_folders(started: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(started, ["python", "-um", "package.module", "x"], file="/x/package/module.py", spec="package.module")
    assert start_command(2) == [sys.executable, "-um", "package.module", "x"]
    folder = str(tmp_path / "a folder")
    start(started, ["python", folder, "x"], file=f"{folder}/__main__.py", spec="__main__")
    assert start_command(2) == [sys.executable, folder, "x"]
    start(started, ["python", "a/app.pyz"], file="/x/a/app.pyz/__main__.py", spec="__main__")
    assert start_command(2) == [sys.executable, "a/app.pyz"]
    assert folder_at_start() == "/x/"


def test_a_program_that_runs_the_script_of_another(started: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With `coverage run script.py`, the command line of coverage is run again, although `__main__` is the script."""
    for program in ("/bin/coverage", "bin/coverage"):
        start(started, ["python", program, "run", "script.py", "x"], file=str(tmp_path / "script.py"))
        assert start_command(2) == [sys.executable, program, "run", "script.py", "x"]
        assert folder_at_start() == str(tmp_path)


REFUSED = {
    "python -c": lambda m: start(m, ["python", "-Wignore", "-c", "x"], argv="-c"),
    "standard input": lambda m: start(m, ["python", "-u"], argv=""),
    "pytest": lambda m: start(m, ["python", "-m", "pytest", "x"], file="/p/pytest/__main__.py", spec="pytest.__main__"),
    "pytest as a program": lambda m: start(m, ["python", "/bin/pytest"], file="/bin/pytest", argv="/bin/pytest"),
    "unittest": lambda m: start(m, ["python", "-m", "unittest"], file="/p/unittest/__main__.py", spec="unittest.__main__"),
    "a notebook": lambda m: m.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object())),
    "a frozen program": lambda m: m.setattr(sys, "frozen", True, raising=False),
    "an interactive Python": lambda m: m.setattr(sys, "ps1", ">>> ", raising=False),
    "a multiprocessing child": lambda m: m.setattr("multiprocessing.parent_process", lambda: object()),
    "a program that Python is embedded in": lambda m: m.setattr(sys, "executable", ""),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_run_again(started: pytest.MonkeyPatch, reason: str) -> None:
    REFUSED[reason](started)
    with pytest.raises(ConfigurationError) as caught:
        start_command(4)
    text = str(caught.value)
    assert f"cannot be started from {reason.removesuffix(' as a program')}: " in text
    assert "notebook_launcher(function, num_processes=4)" in text
    assert "trainkit launch --nproc-per-node 4 script.py" in text
    assert "devices=1" in text


def test_standard_input_with_arguments(started: pytest.MonkeyPatch) -> None:
    start(started, ["python", "-", "x"], argv="-")
    with pytest.raises(ConfigurationError, match="from standard input"):
        start_command(2)


def test_the_shell_of_ipython_is_a_notebook(started: pytest.MonkeyPatch) -> None:
    assert not starting.in_notebook()
    started.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not starting.in_notebook()  # a program that only uses IPython
    started.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object()))
    assert starting.in_notebook()
