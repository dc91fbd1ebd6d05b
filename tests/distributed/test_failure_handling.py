"""What the terminal shows after a failure, and that all processes exit, for every kind of exit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.members import GRACE, LIMIT, Ended, Member, as_script, end_of, now, terminal
from helpers.patience import PATIENCE, VAIN, within
from helpers.support import ROOT, run_python
from helpers.worlds.worlds import free_port

from trainkit.distributed import failure_handling as endings
from trainkit.errors import Preempted

pytestmark = pytest.mark.prompt

SOON = within(4.5)  # seconds; a process that waits forever for another one takes longer
CLOSED = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18343."


def script(name: str, *given: Any) -> None:
    """Run one of the functions below in one process."""
    as_script(globals()[name], *given)


def end(size: int, name: str, *given: Any) -> Ended:
    return end_of(size, script, name, *given)


def assert_last_traceback(ended: Ended, rank: int, error: str) -> None:
    """The output ends with a traceback of this error on this rank, without output of other processes inside it."""
    lines = [line.removeprefix(f"[rank{rank}]: ") for line in ended.output.rstrip().splitlines()]
    assert lines[-1] == error
    start = max(number for number, line in enumerate(lines) if line.startswith("Traceback"))
    assert all(line.startswith("  ") for line in lines[start + 1 : -1]), "another process has printed into it"


# ------------------------------------------------------------------------------------------------------ one rank fails


def one_ends(rank: int, how: str, where: str) -> None:
    member = Member(grace=GRACE)

    def work() -> None:
        for step in range(10):
            member.step()
            if step == 3 and member.rank == rank and where != "outside":
                trouble(how)
        if where == "outside":
            member.step()

    member.run(work)
    if where == "outside" and member.rank == rank:
        trouble(how)
    member.run(work)


def trouble(how: str) -> None:
    now()
    if how == "raise":
        raise ValueError("boom\nin two lines")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "_exit":
        os._exit(0)
    sys.exit(int(how))


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("size, rank", [(2, 0), (2, 1), (4, 2)])
def test_an_error(size: int, rank: int, where: str) -> None:
    """Only the failed rank prints a traceback, and it is the last output on the terminal."""
    ended = end(size, "one_ends", rank, "raise", where)
    assert ended.codes == [1] * size
    assert max(ended.seconds) < LIMIT
    assert ended.output.count("Traceback") == 1
    assert ended.output.rstrip().endswith("in two lines")
    for other in set(range(size)) - {rank}:
        assert re.search(rf"trainkit: rank {other} (was )?ended because rank {rank} failed: ValueError: boom", ended.output)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("size, rank", [(2, 0), (2, 1), (4, 2)])
def test_killed_rank(size: int, rank: int, where: str) -> None:
    ended = end(size, "one_ends", rank, "kill", where)
    assert ended.codes == [-9 if other == rank else 1 for other in range(size)]
    assert max(ended.seconds) < LIMIT
    assert "Traceback" not in ended.output
    lines = ended.output.splitlines()
    for other in set(range(size)) - {rank}:
        [line] = [line for line in lines if line.startswith(f"trainkit: rank {other} ")]
        assert f" ended because rank {rank} has died (no traceback: killed, out of memory?)" in line


@pytest.mark.parametrize(
    "how, code, text",
    [
        ("_exit", 0, "rank 1 has died (no traceback: killed, out of memory?)"),
        ("3", 3, "rank 1 has exited in the middle of a run, by sys.exit(3)"),
        ("0", 0, "rank 1 has exited in the middle of a run, by sys.exit(0)"),
    ],
)
def test_an_exit_in_a_run(how: str, code: int, text: str) -> None:
    ended = end(3, "one_ends", 1, how, "inside")
    assert ended.codes == [1, code, 1]
    assert max(ended.seconds) < LIMIT
    assert "Traceback" not in ended.output
    for other in (0, 2):
        assert re.search(rf"trainkit: rank {other} (was )?ended because {re.escape(text)}", ended.output)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exit_between_runs(rank: int) -> None:
    """That rank exits normally. The other rank ends, because its next run needs all ranks."""
    ended = end(2, "one_ends", rank, "0", "outside")
    assert ended.codes[rank] == 0
    assert ended.codes[1 - rank] == 1
    assert f"rank {rank} has exited: its script ended" in ended.output


# ------------------------------------------------------------------------------------------------------- all ranks exit


def all_end(how: str) -> None:
    member = Member()
    endings._LAST_S = VAIN

    def work() -> None:
        member.step()
        if how == "raise":
            raise ValueError("boom")
        if how == "preempted":
            raise Preempted("SIGTERM at step 1")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how != "nothing":
            sys.exit(int(how))

    now()
    member.run(work)


@pytest.mark.parametrize("how, code", [("nothing", 0), ("0", 0), ("3", 3), ("preempted", 143)])
def test_all_ranks_exit_the_same_way(how: str, code: int) -> None:
    ended = end(3, "all_end", how)
    assert ended.codes == [code] * 3
    assert ended.output == ""
    assert max(ended.seconds) < SOON


def test_ctrl_c() -> None:
    ended = end(2, "all_end", "interrupt")
    assert ended.codes == [1, 1]  # 130 for a script that a shell runs: the Python interpreter sets it
    assert ended.output.count("Traceback") == 1
    assert_last_traceback(ended, 0, "KeyboardInterrupt")


def test_the_same_error_on_all_ranks() -> None:
    ended = end(3, "all_end", "raise")
    assert ended.codes == [1, 1, 1]
    assert ended.output.count("Traceback") == 1
    assert ended.output.count("failed with the same error: ValueError: boom") == 2
    assert ended.output.rstrip().endswith("ValueError: boom")
    assert max(ended.seconds) < SOON


def first_in_the_run_last_at_its_end(catches: bool, leaves: bool) -> None:
    """Rank 1 fails first, and is the last one to leave the run.

    With `catches`, it catches its error. With `leaves`, it then ends without waiting for the other ranks to exit.
    """
    member = Member()
    endings._CAUSE_S = LIMIT if not catches or leaves else 1.0  # long enough for a slow machine

    def work() -> None:
        member.step()
        if member.rank != 1:
            assert member.channel.wait(lambda: member.channel.failure is not None, LIMIT)
        raise ValueError("boom")

    now()
    try:
        member.run(work)
    except ValueError:
        if member.rank != 1:
            raise
        if not leaves:
            assert member.channel.wait(lambda: member.channel.failed_ranks == {0, 2}, LIMIT)
        if not catches:
            raise
        if not leaves:
            assert member.channel.wait(lambda: len(member.channel.exited) == 2, LIMIT)


def test_the_same_error_on_all_ranks_when_the_first_is_the_slowest() -> None:
    ended = end(3, "first_in_the_run_last_at_its_end", False, False)
    assert ended.codes == [1, 1, 1]
    assert ended.output.count("Traceback") == 1
    assert_last_traceback(ended, 1, "ValueError: boom")
    assert set(re.findall(r"rank (\d) failed with the same", ended.output)) == {"0", "2"}


@pytest.mark.parametrize("leaves", [False, True])
def test_the_same_error_on_all_ranks_when_the_first_catches_it(leaves: bool) -> None:
    """The rank that fails first prints nothing, whether or not it has exited. So the other ranks must print the error."""
    ended = end(3, "first_in_the_run_last_at_its_end", True, leaves)
    assert ended.codes == [1, 0, 1]
    assert ended.output.count("Traceback") >= 1
    assert ended.output.rstrip().endswith("ValueError: boom")


def different_errors() -> None:
    member = Member()

    def work() -> None:
        member.step()
        if member.rank == 1:
            assert member.channel.wait(lambda: member.channel.failure is not None, LIMIT)
        raise ValueError(f"boom {member.rank}")

    now()
    member.run(work)


def test_different_errors() -> None:
    """Each rank prints its own error. The error that occurred first is printed last."""
    ended = end(2, "different_errors")
    assert ended.codes == [1, 1]
    assert ended.output.count("Traceback") == 2
    assert ended.output.index("ValueError: boom 1") < ended.output.index("ValueError: boom 0")
    assert_last_traceback(ended, 0, "ValueError: boom 0")


def the_launcher_sends_sigterm(early: bool) -> None:
    """Rank 1 fails. While it waits to print, rank 0 sends it SIGTERM, as a launcher does after a process has ended."""
    member = Member()
    other = member.channel.exchange("pids", os.getpid())[1]
    now()
    if member.rank == 1:
        posted = member.channel.post_failure

        def post(*given: Any, **named: Any) -> Any:
            failure = posted(*given, **named)
            if early:  # the other ranks know the failure, but this process is not scheduled yet
                time.sleep(0.5)
            else:
                Path("posted").touch()
            return failure

        member.channel.post_failure = post  # type: ignore[method-assign]
        raise ValueError("boom")
    member.channel.wait(lambda: member.channel.failure is not None)
    while not early and not Path("posted").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(other, signal.SIGTERM)
    time.sleep(0.3)
    sys.exit(1)


@pytest.mark.parametrize("early", [True, False])
def test_the_first_failed_rank_prints_its_traceback_in_spite_of_sigterm(early: bool) -> None:
    ended = end(2, "the_launcher_sends_sigterm", early)
    assert ended.codes == [1, 1]
    assert ended.seconds[0] > 0.4
    assert_last_traceback(ended, 1, "ValueError: boom")


# ----------------------------------------------------------------------------------------------------- real interpreters

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import torch.multiprocessing as mp
from helpers.launch.members import Member

def main(rank=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r})
    member = Member(grace=0.5)
    def work():
        member.step()
        if member.rank == 1 and {fail}:
            raise ValueError("boom")
        member.step()
    member.run(work)
    sys.stdout.write(f"rank {{member.rank}} is done\\n")  # in one piece, also where nothing is buffered

if __name__ == "__main__":
    {start}
"""


def write_script(start: str = "main()", fail: bool = True) -> str:
    path = Path("script.py")
    path.write_text(SCRIPT.format(tests=str(ROOT / "tests"), port=str(free_port()), start=start, fail=fail))
    return str(path)


@pytest.mark.parametrize("fail", [True, False])
def test_bare_processes(fail: bool) -> None:
    script, port = write_script(fail=fail), str(free_port())
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with open("terminal.txt", "w") as file:
        ranks = [
            subprocess.Popen([sys.executable, script], stdout=file, stderr=file, env={**env, "RANK": str(rank)})
            for rank in (0, 1)
        ]
        codes = [process.wait(PATIENCE) for process in ranks]
    output = terminal()
    if fail:
        assert codes == [1, 1]
        assert_last_traceback(Ended(codes, [], output), 1, "ValueError: boom")
        assert output.count("Traceback") == 1
    else:
        assert codes == [0, 0], output
        assert sorted(output.splitlines()) == ["rank 0 is done", "rank 1 is done"]


def test_mp_spawn() -> None:
    """The wrapper of `mp.spawn` catches the error, and the parent process shows the error of the process that ends first."""
    done = run_python("-u", write_script("mp.spawn(main, nprocs=2)"))
    assert done.returncode == 1
    assert "-- Process 1 terminated with the following error:" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: boom")


def test_torchrun() -> None:
    """The report of torchrun is printed last. Its root cause names the rank that failed, and contains the traceback."""
    script = write_script()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", script]
    done = run_python(*command)
    assert done.returncode == 1
    before, _, root = done.stderr.rpartition("Root Cause")
    assert "rank 0 was ended because rank 1 failed: ValueError: boom" in before
    assert re.search(r"^(\[rank1\]: )?ValueError: boom$", before, re.MULTILINE)  # printed by the rank itself
    assert "rank 0 ended because rank 1 failed: ValueError: boom" in root
    assert 'raise ValueError("boom")' in root
