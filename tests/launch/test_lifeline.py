"""The agent of a machine on the lifeline of its starter: what it hears, and that it ends when there is nobody any more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers.launch.agents import alive
from helpers.patience import PATIENCE, VAIN, within

from trainkit.launch.lifeline import ALIVE, GO, MARK, SIGNAL, versions

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")

# ``work`` is what the agent does within; how long a silence may be counts from the first word after "at work".
AGENT = """\
import os, signal, subprocess, sys, time
from trainkit.launch.lifeline import Lifeline
with Lifeline({vain}) as lifeline:
    if not lifeline.begin():
        sys.exit(2)
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    lifeline._silence = {silence}
    print("at work", flush=True)
{work}
    lifeline.end(7)
"""
WAIT = """\
    while not told:
        time.sleep(0.01)
    for _ in range(3):  # more than one write, as a connection that is gone fails the second, and more than a pipe takes
        print("saving" * 20000, flush=True)
        time.sleep(0.05)
    open("saved", "w").write(str(told))
"""
CHILD = """\
    child = "import sys; print(repr(sys.stdin.read()), flush=True); sys.stderr.write('to stderr\\\\n')"
    subprocess.run([sys.executable, "-c", child])
    print("over", end="", flush=True)
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(work, silence=…)``: an agent, from here on at work."""
    started: list[subprocess.Popen[bytes]] = []

    def run(work: str, silence: float = VAIN, begin: bool = True) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", AGENT.format(work=work, silence=silence, vain=VAIN)]
        agent = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        started.append(agent)
        assert agent.stdout is not None
        assert agent.stdout.readline().decode() == f"{MARK}{json.dumps(versions())}\n"
        if begin:
            tell(agent, GO)
            assert agent.stdout.readline() == b"at work\n"
        return agent

    yield run
    for agent in started:
        agent.kill()
        agent.communicate()


def tell(agent: subprocess.Popen[bytes], text: str) -> None:
    assert agent.stdin is not None
    agent.stdin.write(f"{text}\n".encode())
    agent.stdin.flush()


def test_what_its_children_read_and_write(start: Start) -> None:
    """They read nothing of what is for the agent, and all that they write comes, before the word of the end."""
    agent = start(CHILD)
    assert agent.stdout is not None
    assert agent.stderr is not None
    assert agent.stdout.read().decode() == f"''\nover{MARK}{json.dumps({'code': 7})}\n"
    assert agent.stderr.read() == b"to stderr\n"
    assert agent.wait(PATIENCE) == 0


def test_signals(start: Start) -> None:
    agent = start(WAIT)
    tell(agent, ALIVE)
    tell(agent, f"{SIGNAL}{int(signal.SIGUSR1)}")
    assert agent.stdout is not None
    assert agent.stdout.read().count(b"saving") == 60000
    assert agent.wait(PATIENCE) == 0
    with open("saved") as file:
        assert file.read() == str([int(signal.SIGUSR1)])


@pytest.mark.parametrize("how", ["the starter has gone", "the connection has gone", "nothing comes any more"])
def test_an_end(start: Start, how: str) -> None:
    """It has time to save, and what it prints then to nobody does not keep it from that."""
    agent = start(WAIT, **({"silence": 0.5} if how.startswith("nothing") else {}))
    assert agent.stdin is not None
    assert agent.stdout is not None
    if how == "the connection has gone":
        agent.stdout.close()
    if how.startswith("nothing"):
        tell(agent, ALIVE)
    else:
        agent.stdin.close()
        agent.stdin = None
    assert agent.wait(PATIENCE) == 0
    with open("saved") as file:
        assert file.read() == str([int(signal.SIGTERM)])


@pytest.mark.prompt
def test_a_word_now_and_then(start: Start) -> None:
    """Silence is counted anew after each."""
    agent = start(WAIT, silence=within(2.0))
    for _ in range(25):
        tell(agent, ALIVE)
        with pytest.raises(subprocess.TimeoutExpired):
            agent.wait(0.1)
    assert not os.path.exists("saved")


def test_an_end_before_the_beginning(start: Start) -> None:
    agent = start(WAIT, begin=False)
    assert agent.stdin is not None
    agent.stdin.close()
    agent.stdin = None
    assert agent.wait(PATIENCE) in (2, -signal.SIGTERM)
    assert not alive(agent.pid)
    assert not os.path.exists("saved")
