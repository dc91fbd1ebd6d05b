"""`run_hosts` with a local shell instead of ssh, and scripts instead of agents: output, signals, exit codes and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.launch.agents import alive, wait_until
from helpers.launch.terminals import write_ssh
from helpers.patience import PATIENCE, VAIN
from helpers.support import run_python

from trainkit.cli.launch_child import versions
from trainkit.errors import ConfigurationError
from trainkit.launch import remote
from trainkit.launch.remote import START, host_script, run_hosts

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bash and signals of POSIX")

# Start of a host's script. `told` waits for a line from the launcher and exits when its input ends.
HEAD = f"""\
told() {{ while read -r line; do [[ $line = $1* ]] && return; done; exit 99; }}
err() {{ printf '\\0362%s\\n' "$1"; }}
printf '\\036v%s\\n' '{{versions}}'
told {START.decode()}
"""


def part(does: str, **other: str) -> str:
    """The script of a host."""
    return HEAD.replace("{versions}", json.dumps({**versions(), **other})) + does + "\nexit\n"


# SECOND waits until the ssh of FIRST has ended and the launcher has read its exit code.
FIRST = "echo $PPID > new-pid; mv new-pid pid; "
SECOND = 'until [ -e pid ] && ! kill -0 "$(cat pid)" 2> /dev/null; do sleep 0.01; done; '


def ends(code: int) -> str:
    return f"printf '\\036c{code}\\n'; exit"


@pytest.fixture
def ssh(tmp_path: Path) -> list[str]:
    return [write_ssh(tmp_path)]


Run = Callable[..., int]


@pytest.fixture
def run(ssh: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(a="…", b="…")` runs these scripts and returns the exit code; after a failure, other hosts have half a second."""

    def start(grace: float = PATIENCE, patience: float = 0.5, join: float = PATIENCE, **parts: str) -> int:
        monkeypatch.setattr(remote, "_FAILURE_TIMEOUT_S", patience)
        monkeypatch.setattr(remote, "_AGENT_TIMEOUT_S", 0.5)
        return run_hosts(parts, ssh, grace, join)

    return start


def test_hosts_start_when_all_are_ready(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = '{ [ -e ready ] || echo too early; }; err "of $line"; '
    late = part("echo b; " + ends(0)).replace("printf '\\036v", "sleep 0.5; touch ready; printf '\\036v", 1)
    assert run(a=part(begun + ends(0)), b=late) == 0
    assert capfd.readouterr() == ("b: b\n", "a: of start\n")


def test_nothing_is_sent_before_a_host_is_ready(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats are sent only after a host is ready. Earlier, the set-up commands of the host would read them."""
    monkeypatch.setattr(remote, "_HEARTBEAT_S", 0.01)
    late = part(f"told heartbeat; echo heartbeat; {ends(0)}").replace(
        "printf '\\036v", "read -r -t 0.3 line && echo early; printf '\\036v", 1
    )
    assert run(a=late) == 0
    assert capfd.readouterr().out == "heartbeat\n"


@pytest.mark.parametrize("line", [
    *("v[1]", "v{", "v" + "[" * 2000, 'v{"torch": [1]}', "v", "vvv"),
    *("c", "cx", "c-1", "c1e3", "c" + "1" * 5000, "x", "xyz"),
], ids=lambda line: line[:10])  # fmt: skip
def test_a_line_with_the_mark_that_is_no_message_is_output(run: Run, capfd: pytest.CaptureFixture[str], line: str) -> None:
    """A set-up script or a program may print the mark, and must not end the launcher."""
    odd = f"printf '\\036%s\\n' '{line}'\n"
    assert run(a=odd + part(odd + ends(3))) == 3
    assert capfd.readouterr().err.count(line[1:]) >= 2


def test_output_of_a_single_host_has_no_prefix(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(a=part("echo output; err errors; " + ends(3))) == 3
    assert capfd.readouterr() == ("output\n", "errors\n")


def test_other_hosts_are_stopped_after_a_failure(run: Run, tmp_path: Path) -> None:
    waits = f"told 'signal {int(signal.SIGTERM)}'; touch told-$$; {ends(143)}"
    assert run(a=part(waits), b=part(ends(7)), c=part(waits)) == 7
    assert len(list(tmp_path.glob("told-*"))) == 2


def test_the_terminal_of_a_host_that_does_not_end_hangs_up(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A host that does not end in time after a failure loses its connection: its processes get SIGHUP."""
    deaf = "trap 'touch left' HUP; while read -r line; do :; done"
    assert run(grace=0.1, a=part(deaf), b=part(ends(5))) == 5
    assert "trainkit: hosts that did not end in time: a. Closing the connections to end them." in capfd.readouterr().err
    wait_until((tmp_path / "left").exists)


# Scripts of hosts a and b, and the exit code. The first host that ends need not be the one that caused the failure.
CAUSES = {
    "the first": (FIRST + ends(7), SECOND + ends(8), 7),
    "a code other than 1": (FIRST + ends(1), SECOND + ends(7), 7),
    "a failure that follows, by our message": (
        f"{FIRST}err 'trainkit: rank 0 ended because rank 3 failed: ValueError: x'; {ends(1)}",
        f"{SECOND}err 'ValueError: x'; {ends(1)}",
        1,
    ),
    "a failure that follows, by torch's message": (
        f"{FIRST}err 'RuntimeError: Connection closed by peer [10.0.0.1]:2'; {ends(134)}",
        f"{SECOND}err 'ValueError: x'; {ends(9)}",
        9,
    ),
    "a lost agent": (SECOND + ends(7), f"{FIRST}exit 255", 1),
    "only a lost agent": (f"told signal; {ends(143)}", "exit 255", 1),
    "a host that was stopped": (f"told signal; {ends(143)}", ends(143), 143),
}


@pytest.mark.parametrize("first, second, code", CAUSES.values(), ids=CAUSES.keys())
def test_exit_codes(run: Run, first: str, second: str, code: int) -> None:
    patience = 0.5 if "told" in first else PATIENCE
    assert run(grace=0.1, patience=patience, a=part(first), b=part(second)) == code


def test_the_traceback_of_the_first_failure_is_last(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    trace = "err 'Traceback (most recent call last):'; err '{}'; "
    cause = "err before; " + trace.format("ValueError: x") + ends(1)
    effect = part(SECOND + trace.format("RuntimeError: Connection closed by peer") + ends(1))
    assert run(patience=PATIENCE, a=part(FIRST + cause), b=effect) == 1
    shown = capfd.readouterr().err.splitlines()
    first = ["a: Traceback (most recent call last):", "a: ValueError: x"]
    assert shown[-3:] == ["trainkit: a failed first, with:", *first]
    Path("pid").unlink()
    assert run(patience=PATIENCE, a=part(SECOND + cause), b=part(FIRST + ends(1))) == 1
    assert capfd.readouterr().err.splitlines() == ["a: before", *first]  # it is the last output anyway, so it is not repeated


def test_a_lost_connection(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(a=part("err 'Connection to a closed by remote host.'; exit 255"), b=part(f"told signal; {ends(143)}")) == 1
    line = "trainkit: a ended without an exit code: connection lost, or agent killed; error of ssh: Connection to"
    assert line in capfd.readouterr().err.splitlines()[-1]


# Scripts of the hosts, and words of the error.
NOT_READY = {
    "away": (
        {"a": part(ends(0)), "away": ""},
        "away cannot be reached: ssh: connect to host away port 22: Connection refused. ",
    ),
    "silent": (
        {"a": "exit 255\n"},
        "a cannot be reached: ssh printed no error. This command must work without a prompt: .*/ssh -o Batch",
    ),
    "failed": (
        {"a": part(ends(0)), "b": "echo no such thing >&2; exit 3\n"},
        "the set-up of b ended with exit code 3: no such",
    ),
    "nothing there": (
        {"a": "echo python: No module named trainkit >&2; exit 1\n"},
        "must exist there, under the same paths as on this host",
    ),
    "no python": (
        {"a": "exec /nowhere/python\n"},
        "exit code 127: .* To use another Python: --setup 'TRAINKIT_PYTHON=/path/to/python'",
    ),
    "slow": (
        {"a": part(ends(0)), "b": "while read -r line; do :; done\n"},
        r"hosts that are not ready after 1 s: (a, )?b\. If the set-up",
    ),
    "torch": ({"a": part(ends(0)), "b": part(ends(0), torch="1.0")}, "b has torch 1.0, but a has "),
    "Python": (
        {"a": part(ends(0), Python="2.7"), "b": part(ends(0))},
        "b has Python .*, but a has 2.7. All hosts need the same version",
    ),
    "trainkit": ({"a": part(ends(0), trainkit="9")}, "a has trainkit 9, but this host has "),
}


@pytest.mark.parametrize("scripts, words", NOT_READY.values(), ids=NOT_READY.keys())
def test_hosts_that_are_not_ready(run: Run, tmp_path: Path, scripts: dict[str, str], words: str) -> None:
    """If one host does not become ready, no host starts its workers."""
    patience = 1.0 if "not ready" in words else PATIENCE
    scripts = {name: text.replace("told start\n", "told start\ntouch started\n") for name, text in scripts.items()}
    with pytest.raises(ConfigurationError, match=words):
        run(join=patience, **scripts)
    assert not (tmp_path / "started").exists()


def test_no_ssh(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="the program 'nossh' was not found.*apt install openssh-client.*or set its path: --ssh"
    ):
        run_hosts({"a": ""}, ["nossh"], 1.0, 1.0)


# ------------------------------------------------------------------------------------------------------------- signals

STARTER = """\
import json, sys
from trainkit.launch.remote import run_hosts
print(run_hosts(json.loads(sys.argv[2]), [sys.argv[1]], 30.0, 600.0), flush=True)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(ssh: list[str], tmp_path: Path) -> Iterator[Start]:
    """`start(a="…")` starts a launcher as a new process, and waits for the file `begun-NAME` of each script."""
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
    """Create a process group in this session, which Ctrl-Z can stop."""
    os.setpgrp()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def waits(name: str, then: str) -> str:
    return part(f"touch begun-{name}; {then}")


@pytest.mark.parametrize("sent, received, code", [
    (signal.SIGINT, signal.SIGINT, 130),
    (signal.SIGTERM, signal.SIGTERM, 143),
    (signal.SIGHUP, signal.SIGTERM, 143),
    (signal.SIGUSR1, signal.SIGUSR1, 143),
])  # fmt: skip
def test_signals_go_to_all_hosts(start: Start, sent: signal.Signals, received: signal.Signals, code: int) -> None:
    """The launcher forwards signals to all hosts. ssh itself does not get them, not even those of the terminal."""
    parts = {name: waits(name, f"told 'signal {int(received)}'; {ends(code)}") for name in "ab"}
    process = start(**parts)
    os.killpg(process.pid, sent)
    assert process.communicate(timeout=PATIENCE)[0] == f"{code}\n"


def test_a_terminal_that_closes_is_one_stop_request(start: Start) -> None:
    """SIGHUP may come more than once, and SIGTERM after it; the hosts get one signal. Another SIGTERM is a second request."""
    process = start(a=waits("a", f"told signal; touch once; told signal; touch twice; {ends(143)}"))
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        os.killpg(process.pid, number)
        time.sleep(0.1)  # signals of one number that come at once are delivered once
    wait_until(Path("once").exists)
    assert not Path("twice").exists()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE)[0] == "143\n"
    assert Path("twice").exists()


def test_ctrl_c_twice(start: Start) -> None:
    process = start(a=waits("a", f"told signal; touch once; told signal; {ends(130)}"))
    os.killpg(process.pid, signal.SIGINT)
    wait_until(Path("once").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0] == "130\n"


def test_ctrl_z_has_no_effect(start: Start) -> None:
    """The launcher ignores Ctrl-Z, because a stopped launcher would send no heartbeats."""
    process = start(a=waits("a", f"told signal; {ends(143)}"))
    os.killpg(process.pid, signal.SIGTSTP)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE)[0] == "143\n"


def test_a_signal_before_all_are_ready(start: Start) -> None:
    process = start(a=f"touch begun-a; exec sleep {VAIN}\n")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=VAIN / 2)[0] == "143\n"


def test_a_signal_while_ssh_is_started(ssh: list[str]) -> None:
    program = """
        import asyncio, os, signal, sys
        from trainkit.launch import remote

        async def call(*arguments, **options):
            process = await create(*arguments, **options)
            os.kill(os.getpid(), signal.SIGTERM)
            return process

        create, asyncio.create_subprocess_exec = asyncio.create_subprocess_exec, call
        print(remote.run_hosts({"a": sys.argv[2], "b": sys.argv[2]}, [sys.argv[1]], 30.0, 600.0))
    """
    done = run_python("-c", dedent(program), *ssh, f"exec sleep {VAIN}\n", timeout=VAIN / 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "143\n", "")


def test_hosts_end_when_the_launcher_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(a=part("trap 'touch left' HUP; touch begun-a; while read -r line; do :; done"))
    process.kill()
    wait_until((tmp_path / "left").exists)


# --------------------------------------------------------------------------------------------------- the script for a host

ODD = ["a b", "it's", '"$HOME"', "`date`", "back\\slash", "new\nline", "*", "--x=é", "", "!"]

# A program in place of Python that prints a line of its input, its directory, variables and arguments. Of each variable it
# prints what comes before its many x, and the length: a terminal can lose what has not been read when its session ends.
PYTHON = """\
#!/bin/bash
printf '\\036v%s\\n' "$VERSIONS"
read -r line
printf '<%s>' "$line" "$PWD" "${A%%xx*}" "${#A}" "${B%%xx*}" "${#B}" "$@" | tr '\\n' '~'
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Path of a program that is used as Python; the path has special characters."""
    (tmp_path / "my $py").write_text(PYTHON)
    (tmp_path / "my $py").chmod(0o755)
    return str(tmp_path / "my $py")


def test_the_script_passes_odd_characters_on(run: Run, python: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "the folder").mkdir()
    exports = {"A": ODD[2] + ODD[5] + "x" * 100_000, "VERSIONS": json.dumps(versions())}
    setup = "B=$A; export B\ncat; echo $((6 * 7))"
    assert run(a=host_script(python, str(tmp_path / "the folder"), setup, exports, ODD)) == 1  # it sent no exit code
    twice = [ODD[2] + ODD[5], str(len(exports["A"]))] * 2
    words = [START.decode(), str(tmp_path / "the folder"), *twice, "-u", "-m", "trainkit.cli.launch_child", *ODD]
    assert capfd.readouterr().out == "42\n" + "".join(f"<{word}>" for word in words).replace("\n", "~") + "\n"


def test_no_list_of_processes_shows_values(run: Run, tmp_path: Path) -> None:
    """Values of exported variables do not appear in the command line of any process."""
    exports = {"SECRET": "hidden" * 3}
    lists = "grep -l -r hiddenhidden /proc/[0-9]*/cmdline 2> /dev/null; ! grep -q -r hiddenhidden /proc/$$/cmdline && exit 5"
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("there is no /proc")
    with pytest.raises(ConfigurationError, match="ended with exit code 5: it printed no error"):
        run(a=host_script("python", str(tmp_path), lists, exports, []))


def test_another_python(run: Run, python: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The set-up commands can choose another Python with TRAINKIT_PYTHON."""
    exports = {"VERSIONS": json.dumps(versions())}
    assert run(a=host_script("/nowhere/python", str(tmp_path), f"TRAINKIT_PYTHON='{python}'", exports, [])) == 1
    assert capfd.readouterr().out.startswith("<start><")


@pytest.mark.parametrize("setup, words", [
    ("exit 3", "exit code 3: it printed no error"),
    ("false", "exit code 1: it printed no error"),
    ("source nowhere.sh", "exit code 1: .*nowhere.sh: No such file or directory"),
    ("if [", "exit code [12]: .*syntax error"),
    ("}", "exit code [12]: "),
    ("", "exit code 1: .*cd: .*must exist there, under the same paths"),
    ("TRAINKIT_PYTHON=/nowhere/python", "exit code 127: .*/nowhere/python: No such file or directory"),
])  # fmt: skip
def test_a_setup_that_fails(run: Run, python: str, tmp_path: Path, setup: str, words: str) -> None:
    folder = "/nowhere" if "cd: " in words else str(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        run(a=host_script(python, folder, setup, {}, []))


def test_a_setup_ends_with_the_launcher(start: Start, tmp_path: Path) -> None:
    process = start(a=host_script("python", str(tmp_path), f"touch begun-a; echo $$ > pid; sleep {VAIN}; touch over", {}, []))
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    process.kill()
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))
    assert not (tmp_path / "over").exists()


def test_output_of_a_terminal(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """Lines end with a newline, or with a carriage return that redraws them. Invalid UTF-8 is replaced."""
    shown = r"printf '\0361one\n\0362two\r\nraw 1%%\rraw 2%%\n\0361b\377d\nlast'; "
    assert run(a=part(shown + "exit 255")) == 1
    out, err = capfd.readouterr()
    assert out.splitlines() == ["one", "raw 1%", "raw 2%", "b\ufffdd", "last"]
    assert err.splitlines()[0] == "two"
