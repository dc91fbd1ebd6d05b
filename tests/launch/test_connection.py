"""What a machine is told to do, as bash does it, and what is heard of it."""

from __future__ import annotations

import os
import queue
import subprocess
import time
from pathlib import Path

import pytest
from helpers.launch.agents import wait_until
from helpers.patience import PATIENCE, VAIN

from trainkit.launch.connection import Connection, Line, node_script
from trainkit.launch.lifeline import MARK

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bash and signals of POSIX")

ODD = ["a b", "it's", '"$HOME"', "`date`", "back\\slash", "new\nline", "*", "--x=é", "", "!"]

# In the place of Python: it says what it was given, and reads what is left of the input.
PYTHON = """\
#!/bin/bash
printf '<%s>' "$PWD" "$A" "$B" "$@"
cat
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The path of a program."""
    (tmp_path / "my $py").write_text(PYTHON)
    (tmp_path / "my $py").chmod(0o755)
    return str(tmp_path / "my $py")


def told(python: str, tmp_path: Path, setup: str = "", exports: dict[str, str] | None = None) -> str:
    return node_script(python, str(tmp_path / "the folder"), setup, exports or {}, ODD)


def test_all_comes_as_it_was(python: str, tmp_path: Path) -> None:
    (tmp_path / "the folder").mkdir()
    # what comes after the script is sent later, when Python is there: else it is taken for the end of the starter
    script = told(python, tmp_path, "B=$A; export B\necho $((6 * 7))", {"A": ODD[2] + ODD[5]})
    process = subprocess.Popen(["bash", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(script.encode())
    process.stdin.flush()
    expected = [str(tmp_path / "the folder"), *[ODD[2] + ODD[5]] * 2, "-u", "-m", "trainkit.cli.launch_child", *ODD]
    shown = "42\n" + "".join(f"<{word}>" for word in expected)
    assert process.stdout.read(len(shown.encode())).decode() == shown
    output, errors = process.communicate(b"later", timeout=PATIENCE)
    assert (output, errors, process.returncode) == (b"later", b"", 0)


def test_another_python(python: str, tmp_path: Path) -> None:
    (tmp_path / "the folder").mkdir()
    script = told("/nowhere/python", tmp_path, f"TRAINKIT_PYTHON='{python}'; sleep 0.1")
    assert run_held(script) == (0, "")


@pytest.mark.parametrize("setup, code, words", [
    ("exit 3", 3, ""),
    ("false", 1, ""),
    ("source nowhere.sh", 1, "nowhere.sh: No such file or directory"),
    ("if [", 2, "syntax error"),
    ("}", 2, "syntax error"),
    ("TRAINKIT_PYTHON=/nowhere/python", 127, "/nowhere/python: No such file or directory"),
])  # fmt: skip
def test_a_setup_that_fails(python: str, tmp_path: Path, setup: str, code: int, words: str) -> None:
    (tmp_path / "the folder").mkdir()
    found = run_held(told(python, tmp_path, setup))
    assert found[0] == code
    assert words in found[1]
    assert words or not found[1]


def test_a_folder_that_is_not_there(python: str, tmp_path: Path) -> None:
    code, errors = run_held(told(python, tmp_path))
    assert code == 1
    assert "cd: " in errors


def run_held(script: str) -> tuple[int, str]:
    """The exit code and the errors of bash, whose input stays open until it has ended, or its Python is there."""
    process = subprocess.Popen(["bash", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(script.encode())
    process.stdin.flush()
    process.stdout.read(1)  # "": it has ended
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors.decode()


def test_a_setup_ends_with_the_starter(tmp_path: Path) -> None:
    """Before there is a Python that could hear of it."""
    script = node_script("/nowhere/python", str(tmp_path), f"touch begun; sleep {VAIN}; touch over", {}, [])
    pipe = subprocess.PIPE
    process = subprocess.Popen(["bash", "-s"], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(script.encode())
    process.stdin.flush()
    wait_until((tmp_path / "begun").exists)
    process.communicate(timeout=VAIN / 2)  # sleep has the pipes too: it is gone when they end
    assert process.returncode != 0
    assert not (tmp_path / "over").exists()


def test_what_is_heard(tmp_path: Path) -> None:
    """Lines, also those that a progress bar ends by going back, and the words of the agent among them."""
    (tmp_path / "ssh").write_text('#!/bin/sh\necho "$*" >&2\nexec bash -c "exec bash -s"\n')
    (tmp_path / "ssh").chmod(0o755)
    lines: queue.Queue[Line] = queue.Queue()
    script = f"""{{ printf '1%%\\r2%%\\nnoise'; echo '{MARK}{{"a": "b"}}'; read -r line; echo "$line" >&2
    echo '{MARK}{{"code": 7}}'; printf last; exit; }}
    """
    node = Connection("host", [str(tmp_path / "ssh"), "-p", "22"], script, lines)
    node.tell("go\n")
    shown: dict[int, list[bytes]] = {1: [], 2: []}

    def over() -> bool:
        while not lines.empty():
            hear(lines.get())
        return node.ended()

    def hear(line: Line) -> None:
        text = line.connection.heard(line.stream, line.text)
        if text is not None:
            shown[line.stream].append(text)
        if line.text is not None and b"noise" in line.text:
            assert node.versions == {"a": "b"}

    wait_until(over)
    options = b"-p 22 -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 host "
    options += b"exec bash -s"
    assert shown == {1: [b"1%", b"2%", b"noise", b"last"], 2: [options, b"go"]}
    assert (node.code, node.lost, node.last_words) == (7, False, "go")
    node.hang_up()
    node.close(time.monotonic() + PATIENCE)
