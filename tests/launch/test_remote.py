"""Parts of a job on several machines, with a shell in the place of ssh and of the agents: what is shown, and who hears what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.launch.agents import wait_until
from helpers.patience import PATIENCE, VAIN
from helpers.support import run_python

from trainkit.errors import ConfigurationError
from trainkit.launch import remote
from trainkit.launch.lifeline import MARK, versions
from trainkit.launch.remote import run_nodes

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bash and signals of POSIX")

SSH = """\
#!/bin/bash
while [ "$1" = -T -o "$1" = -o ]; do [ "$1" = -o ] && shift; shift; done
[ "$1" != away ] || { echo "ssh: connect to host away port 22: Connection refused" >&2; exit 255; }
exec bash -c "$2"
"""
# What an agent says and hears. ``told`` waits for a line, and fails at the end of the input.
HELLO = f"{{ told() {{ while read -r line; do [[ $line = $1* ]] && return; done; exit 99; }}; echo '{MARK}'"
HEAD = HELLO + "'{versions}'\ntold go\n"


def part(does: str, **other: str) -> str:
    """The script of a machine."""
    return HEAD.replace("{versions}", json.dumps({**versions(), **other})) + does + "\nexit\n}\n"


# One ends when it is known that the other has: a process that has ended is there until somebody has asked how.
FIRST = "echo $$ > new-pid; mv new-pid pid; "
SECOND = 'until [ -e pid ] && ! kill -0 "$(cat pid)" 2> /dev/null; do sleep 0.01; done; '


def ends(code: int) -> str:
    return f"echo '{MARK}{{\"code\": {code}}}'; exit"


@pytest.fixture
def ssh(tmp_path: Path) -> list[str]:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    return [str(tmp_path / "ssh")]


Run = Callable[..., int]


@pytest.fixture
def run(ssh: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(a="…", b="…")``: the exit code of these parts, with a patience of half a second where one has failed."""

    def start(grace: float = PATIENCE, patience: float = 0.5, join: float = PATIENCE, **parts: str) -> int:
        monkeypatch.setattr(remote, "_PATIENCE", patience)
        monkeypatch.setattr(remote, "_AGENT", 0.5)
        return run_nodes(parts, ssh, grace, join)

    return start


def test_all_begin_when_all_are_ready(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = "{ [ -e ready ] || echo too early; }; echo of $line >&2; "
    late = part("echo b; " + ends(0)).replace("echo 'train", "sleep 0.5; touch ready; echo 'train", 1)
    assert run(a=part(begun + ends(0)), b=late) == 0
    assert capfd.readouterr() == ("b: b\n", "a: of go\n")


def test_nothing_comes_before_a_machine_is_ready(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its set-up would take it for the end of the starter. Then there is a word now and then."""
    monkeypatch.setattr(remote, "_ALIVE", 0.01)
    late = part(f"told alive; echo alive; {ends(0)}").replace(
        "echo 'train", "read -r -t 0.3 line && echo early; echo 'train", 1
    )
    assert run(a=late) == 0
    assert capfd.readouterr().out == "alive\n"


def test_one_machine_needs_no_name(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(a=part("echo output; printf errors >&2; " + ends(3))) == 3
    assert capfd.readouterr() == ("output\n", "errors\n")


def test_the_others_are_told_when_one_fails(run: Run, tmp_path: Path) -> None:
    waits = f"told 'signal {int(signal.SIGTERM)}'; touch told-$$; {ends(143)}"
    assert run(a=part(waits), b=part(ends(7)), c=part(waits)) == 7
    assert len(list(tmp_path.glob("told-*"))) == 2


def test_those_that_do_not_listen_are_left(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The end of their input is the last that they hear."""
    deaf = "while read -r line; do :; done; touch left"
    assert run(grace=0.1, a=part(deaf), b=part(ends(5))) == 5
    assert "trainkit: not ended in time: a. What runs there is told to end" in capfd.readouterr().err
    wait_until((tmp_path / "left").exists)


# What a and b do, and the code that comes of it: the first that ends need not be the first that has failed.
CAUSES = {
    "the first": (FIRST + ends(7), SECOND + ends(8), 7),
    "what says more than 1": (FIRST + ends(1), SECOND + ends(7), 7),
    "what follows from it, in our words": (
        f"{FIRST}echo 'trainkit: rank 0 ended because rank 3 failed: ValueError: x' >&2; {ends(1)}",
        f"{SECOND}echo 'ValueError: x' >&2; {ends(1)}",
        1,
    ),
    "what follows from it, in torch's": (
        f"{FIRST}echo 'RuntimeError: Connection closed by peer [10.0.0.1]:2' >&2; {ends(134)}",
        f"{SECOND}echo 'ValueError: x' >&2; {ends(9)}",
        9,
    ),
    "a lost agent": (SECOND + ends(7), f"{FIRST}exit 255", 1),
    "nothing but a lost agent": (f"told signal; {ends(143)}", "exit 255", 1),
    "one that was told to end": (f"told signal; {ends(143)}", ends(143), 143),
}


@pytest.mark.parametrize("first, second, code", CAUSES.values(), ids=CAUSES.keys())
def test_exit_codes(run: Run, first: str, second: str, code: int) -> None:
    patience = 0.5 if "told" in first else PATIENCE
    assert run(grace=0.1, patience=patience, a=part(first), b=part(second)) == code


def test_what_failed_first_is_read_last(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    trace = "echo 'Traceback (most recent call last):' >&2; echo '{}' >&2; "
    cause = "echo before >&2; " + trace.format("ValueError: x") + ends(1)
    effect = part(SECOND + trace.format("RuntimeError: Connection closed by peer") + ends(1))
    assert run(patience=PATIENCE, a=part(FIRST + cause), b=effect) == 1
    shown = capfd.readouterr().err.splitlines()
    first = ["a: Traceback (most recent call last):", "a: ValueError: x"]
    assert shown[-3:] == ["trainkit: a failed first, with:", *first]
    Path("pid").unlink()
    assert run(patience=PATIENCE, a=part(SECOND + cause), b=part(FIRST + ends(1))) == 1
    assert capfd.readouterr().err.splitlines() == ["a: before", *first]  # it is last: nothing is said again


def test_a_lost_connection_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(a=part("echo 'Connection to a closed by remote host.' >&2; exit 255"), b=part(f"told signal; {ends(143)}")) == 1
    said = (
        "trainkit: a has ended without an exit code: the connection is lost, or its agent was killed; ssh says: Connection to"
    )
    assert said in capfd.readouterr().err.splitlines()[-1]


# Scripts of two machines, and words of the error.
NOT_READY = {
    "away": (
        {"a": part(ends(0)), "away": ""},
        "away cannot be reached: ssh: connect to host away port 22: Connection refused. ",
    ),
    "silent": (
        {"a": "exit 255\n"},
        "a cannot be reached: ssh says nothing of why. This must work without a question: .*/ssh -o Batch",
    ),
    "failed": (
        {"a": part(ends(0)), "b": "echo no such thing >&2; exit 3\n"},
        "the set-up of b has ended with exit code 3: no such",
    ),
    "nothing there": (
        {"a": "echo python: No module named trainkit >&2; exit 1\n"},
        "must be there under the same paths as here",
    ),
    "no python": (
        {"a": "exec /nowhere/python\n"},
        "exit code 127: .* for another Python: --setup 'TRAINKIT_PYTHON=/path/to/python'",
    ),
    "slow": (
        {"a": part(ends(0)), "b": "while read -r line; do :; done\n"},
        r"not ready within 1 s: (a, )?b\. Is it the set-up",
    ),
    "torch": ({"a": part(ends(0)), "b": part(ends(0), torch="1.0")}, "b has torch 1.0, but a has "),
    "Python": (
        {"a": part(ends(0), Python="2.7"), "b": part(ends(0))},
        "b has Python .*, but a has 2.7. All must have the same",
    ),
    "trainkit": ({"a": part(ends(0), trainkit="9")}, "a has trainkit 9, but this machine has "),
}


@pytest.mark.parametrize("scripts, words", NOT_READY.values(), ids=NOT_READY.keys())
def test_machines_that_are_not_ready(run: Run, tmp_path: Path, scripts: dict[str, str], words: str) -> None:
    """Nothing is started then."""
    patience = 1.0 if "not ready" in words else PATIENCE
    scripts = {name: text.replace("told go\n", "told go\ntouch started\n") for name, text in scripts.items()}
    with pytest.raises(ConfigurationError, match=words):
        run(join=patience, **scripts)
    assert not (tmp_path / "started").exists()


def test_no_ssh(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="no program 'nossh' here.*apt install openssh-client.*or name another one: --ssh"
    ):
        run_nodes({"a": ""}, ["nossh"], 1.0, 1.0)


# ------------------------------------------------------------------------------------------------------------- signals

STARTER = """\
import json, sys
from trainkit.launch.remote import run_nodes
print(run_nodes(json.loads(sys.argv[2]), [sys.argv[1]], 30.0, 600.0), flush=True)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(ssh: list[str], tmp_path: Path) -> Iterator[Start]:
    """``start(a="…")``: a starter in a process of its own, when its parts have made the file ``begun-NAME``."""
    started: list[subprocess.Popen[str]] = []

    def run(**scripts: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *ssh, json.dumps(scripts)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=as_a_shell,
        )
        started.append(process)
        wait_until(lambda: all((tmp_path / f"begun-{name}").exists() for name in scripts))
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def as_a_shell() -> None:
    """A group of its own in this session, which Ctrl-Z stops: in a session of its own nothing could."""
    os.setpgrp()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def waits(name: str, then: str) -> str:
    return part(f"touch begun-{name}; {then}")


@pytest.mark.parametrize("sent, heard, code", [
    (signal.SIGINT, signal.SIGINT, 130),
    (signal.SIGTERM, signal.SIGTERM, 143),
    (signal.SIGHUP, signal.SIGTERM, 143),
    (signal.SIGUSR1, signal.SIGUSR1, 143),
])  # fmt: skip
def test_signals_go_to_all(start: Start, sent: signal.Signals, heard: signal.Signals, code: int) -> None:
    """From a terminal, too: ssh itself hears nothing of it."""
    parts = {name: waits(name, f"told 'signal {int(heard)}'; {ends(code)}") for name in "ab"}
    process = start(**parts)
    os.killpg(process.pid, sent)
    assert process.communicate(timeout=PATIENCE)[0] == f"{code}\n"


def test_ctrl_c_twice(start: Start) -> None:
    process = start(a=waits("a", f"told signal; touch once; told signal; {ends(130)}"))
    os.killpg(process.pid, signal.SIGINT)
    wait_until(Path("once").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0] == "130\n"


def test_ctrl_z_is_not_heard(start: Start) -> None:
    """A starter that stands still would be taken to be gone."""
    process = start(a=waits("a", f"told signal; {ends(143)}"))
    os.killpg(process.pid, signal.SIGTSTP)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE)[0] == "143\n"


def test_a_signal_before_all_are_ready(start: Start) -> None:
    process = start(a=f"touch begun-a; exec sleep {VAIN}\n")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=VAIN / 2)[0] == "143\n"


def test_a_signal_while_machines_are_called(ssh: list[str]) -> None:
    """It is not lost on those that come after it."""
    program = """
        import os, signal, sys
        from trainkit.launch import remote

        class Called(remote.Connection):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                os.kill(os.getpid(), signal.SIGTERM)

        remote.Connection = Called
        print(remote.run_nodes({"a": sys.argv[2], "b": sys.argv[2]}, [sys.argv[1]], 30.0, 600.0))
    """
    done = run_python("-c", dedent(program), *ssh, f"exec sleep {VAIN}\n", timeout=VAIN / 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "143\n", "")


def test_the_end_of_a_starter_that_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(a=waits("a", "while read -r line; do :; done; touch left"))
    process.kill()
    wait_until((tmp_path / "left").exists)
