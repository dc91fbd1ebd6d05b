"""The watchdog ends processes that wait for a failed rank, and no others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.launch.members import GRACE, LIMIT, Ended, Member, as_script, end_of, now
from helpers.patience import VAIN, within

from trainkit.errors import Preempted

pytestmark = pytest.mark.prompt

TIMEOUT = 2.0  # seconds, of a collective in which a rank hangs
LONG = 2.5  # seconds, much more than the grace period


def script(name: str, *given: Any) -> None:
    """Run one of the functions below in one process."""
    as_script(globals()[name], *given)


def end(size: int, name: str, *given: Any) -> Ended:
    return end_of(size, script, name, *given)


def one_fails(member: Member, error: BaseException | None = None) -> Callable[[], None]:
    """A run in which rank 1 fails, with `ValueError("boom")` by default, and the other ranks wait for it."""

    def work() -> None:
        member.step()
        if member.rank == 1:
            now()
            raise error or ValueError("boom")
        member.step()

    return work


def stacks_of(rank: int, folder: str = "out") -> str:
    [path] = Path(folder, "stacks").glob(f"*/rank-{rank}.txt")
    return path.read_text()


# ---------------------------------------------------------------------------------------- which ranks are ended, and how


def other_ranks_wait(failing: int, grace: float) -> None:
    member = Member(grace=grace)

    def work() -> None:
        member.step()
        if member.rank == failing:
            now()
            raise ValueError("boom")
        sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]  # as for a file or a pipe
        print(f"rank {member.rank} has written this")
        member.step()

    member.run(work)


@pytest.mark.parametrize("size, failing, grace", [(2, 1, 3.0), (4, 0, GRACE), (4, 2, GRACE)])
def test_ranks_that_wait_for_a_failed_rank_are_ended(size: int, failing: int, grace: float) -> None:
    ended = end(size, "other_ranks_wait", failing, grace)
    assert ended.codes == [1] * size
    assert max(ended.seconds) < LIMIT
    for rank in set(range(size)) - {failing}:
        assert ended.seconds[rank] > grace
        [path] = Path("out/stacks").absolute().glob(f"*/rank-{rank}.txt")
        assert (
            f"trainkit: rank {rank} was ended because rank {failing} failed: ValueError: boom. "
            f"The stacks of rank {rank} are in {path}\n"
        ) in ended.output
        assert f"rank {rank} has written this" in ended.output
        text = stacks_of(rank)
        assert text.startswith(f"rank {rank}, process ")
        assert "MainThread:\n" in text
        assert "    member.step()\n" in text
    assert not list(Path("out/stacks").glob(f"*/rank-{failing}.txt"))


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds. A zombie has ended: its parent has not waited for it yet."""
    path = Path(f"/proc/{pid}/stat")
    for _ in range(int(50 * within(2.0))):
        try:
            if path.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def it_has_children() -> None:
    member = Member(grace=GRACE)

    def work() -> None:
        if member.rank == 0:
            for daemon in (True, False):
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(VAIN,), daemon=daemon)
                child.start()
                Path(f"child {daemon}").write_text(str(child.pid))
        member.step()
        if member.rank == 1:
            now()
            raise ValueError("boom")
        member.step()

    member.run(work)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc whether a process is alive")
def test_its_loader_workers_are_ended_too() -> None:
    """The watchdog also ends the daemon children of a rank, such as DataLoader workers, but no other children."""
    assert end(2, "it_has_children").codes == [1, 1]
    worker, other = (int(Path(f"child {daemon}").read_text()) for daemon in (True, False))
    assert gone(worker)
    os.kill(other, signal.SIGKILL)  # it was still alive
    assert gone(other)


def the_folder_is_a_file() -> None:
    Path("file").write_text("")
    member = Member(folder="file/there", grace=GRACE)
    work = one_fails(member)
    member.run(work)


def test_a_folder_that_cannot_be_written() -> None:
    ended = end(2, "the_folder_is_a_file")
    assert ended.codes == [1, 1]
    assert "    member.step()\n" in ended.output
    assert "/rank-0.txt cannot be written: " in ended.output
    assert "are in the lines above\n" in ended.output


def an_error_that_cannot_be_encoded() -> None:
    member = Member(grace=GRACE)
    work = one_fails(member, ValueError("cannot read file\udcff.jpg"))  # like a file name from os.listdir that is not UTF-8
    member.run(work)


def test_an_error_that_cannot_be_encoded() -> None:
    ended = end(3, "an_error_that_cannot_be_encoded")
    assert ended.codes == [1, 1, 1]
    for rank in (0, 2):
        assert "rank 1 failed: ValueError: cannot read file\\udcff.jpg" in stacks_of(rank)
        assert f"rank {rank} was ended because rank 1 failed: ValueError: cannot read file?.jpg" in ended.output
    assert ended.output.rstrip().endswith("ValueError: cannot read file\\udcff.jpg")


def a_rank_is_ended_while_it_appends_its_error() -> None:
    member = Member()
    plain = Path.open

    def ends_when_written(path: Path, *given: Any, **more: Any) -> Any:
        file = plain(path, *given, **more)
        file.write = lambda text: os._exit(1)  # type: ignore[method-assign]
        return file

    def work() -> None:
        member.step()
        if member.rank == 1:
            now()
            raise ValueError("boom")
        member.channel.wait(lambda: member.channel.failure is not None)
        assert member.channel.failure is not None
        member.watchdog._write(member.channel.failure)
        Path.open = ends_when_written  # type: ignore[method-assign]
        raise KeyError("later")

    member.run(work)


def test_written_stacks_are_kept() -> None:
    """A rank that exits while it adds its error to its file of stacks does not lose the stacks in that file."""
    assert end(2, "a_rank_is_ended_while_it_appends_its_error").codes == [1, 1]
    text = stacks_of(0)
    assert text.startswith("rank 0, process ")
    assert "    member.watchdog._write(member.channel.failure)\n" in text


def it_hangs(size: int) -> None:
    member = Member(grace=GRACE)
    # a short timeout for this collective only: some processes start slowly
    member.world.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))

    def work() -> None:
        member.channel.exchange("all are in the run", None)
        if member.rank == 1:
            now()
            threading.Thread(target=asleep_too, name="beside", daemon=True).start()
            asleep()
        member.step()

    member.run(work)


def asleep() -> None:
    time.sleep(VAIN)  # here it hangs


def asleep_too() -> None:
    time.sleep(VAIN)  # and here another thread


@pytest.mark.parametrize("size", [2, 3])
def test_one_hangs(size: int) -> None:
    """If one rank hangs, all ranks write their stacks and exit within the timeout plus the grace period."""
    ended = end(size, "it_hangs", size)
    assert ended.codes == [1] * size
    assert max(ended.seconds) < within(TIMEOUT + GRACE + 2.0)
    assert "here it hangs" in stacks_of(1)
    assert "beside:\n" in stacks_of(1)
    assert "and here another thread" in stacks_of(1)
    for rank in range(size):
        assert ("member.step()" in stacks_of(rank)) == (rank != 1)
        assert "waited too long for another rank: RuntimeError: Timed out waiting 2000ms" in stacks_of(rank)
        assert "trainkit-watchdog" not in stacks_of(rank)
    assert re.search(r"waited too long for another rank; the stacks of all ranks are in \S+stacks/[\dT-]+\n", ended.output)
    assert "rank 1 was ended because rank " in ended.output
    assert ended.output.count("Traceback") == 1
    error, advice = ended.output.rstrip().split("\n")[-2:]
    assert "Timed out waiting 2000ms" in error
    assert re.match(r"trainkit: rank \d waited too long in a collective\. Expected: all ranks .* raise timeout=", advice)


def one_rank_is_preempted() -> None:
    member = Member()
    work = one_fails(member, Preempted("SIGTERM before the first step"))
    member.run(work)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_waits_for_a_preempted_rank(size: int) -> None:
    ended = end(size, "one_rank_is_preempted")
    assert ended.codes == [143] * size
    assert ended.output == ""
    assert not Path("out").exists()


# -------------------------------------------------------------------------------------------- which ranks are not ended


def all_fail_alike(late: float) -> None:
    member = Member()
    for turn in range(3):

        def work(turn: int = turn) -> float:
            member.step()
            if turn == 1:
                if member.rank == 1:
                    time.sleep(late)
                raise ValueError("boom")
            assert member.channel.exchange("the same in each run", member.rank) == [0, 1, 2]
            return member.step()

        try:
            print(f"turn {turn}: {member.run(work)}")
        except ValueError as error:
            print(f"turn {turn}: {error}")


def all_fail_and_end(tear_down: float) -> None:
    member = Member()

    def work() -> None:
        member.step()
        raise ValueError("boom")

    with contextlib.suppress(ValueError):
        member.run(work, lambda: time.sleep(tear_down * member.rank))


def test_an_error_that_all_ranks_catch_before_they_exit() -> None:
    """The main process ends first, but only after it has notified the other ranks that the error is over."""
    ended = end(3, "all_fail_and_end", 0.7)
    assert ended.codes == [0, 0, 0]
    assert ended.output == ""


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_an_error_that_all_ranks_catch_ends_no_process(late: float) -> None:
    ended = end(3, "all_fail_alike", late)
    assert ended.codes == [0, 0, 0]
    assert sorted(ended.output.splitlines()) == ["turn 0: 3.0"] * 3 + ["turn 1: boom"] * 3 + ["turn 2: 3.0"] * 3


def one_fails_and_catches(then: str) -> None:
    member = Member(grace=VAIN if then == "what the others wait for" else GRACE)
    work = one_fails(member)
    try:
        member.run(work)
    except ValueError as error:
        print(f"caught: {error}")
        if then == "next run":
            member.run(member.step)
        if then == "what the others wait for":
            member.step()


@pytest.mark.parametrize("then", ["nothing", "next run"])
def test_an_error_that_only_one_rank_catches_ends_all_ranks(then: str) -> None:
    """Whatever that rank does next, all ranks end soon, and none reports success."""
    ended = end(3, "one_fails_and_catches", then)
    assert ended.codes == [1, 1, 1]
    assert max(ended.seconds) < LIMIT
    assert ended.output.startswith("caught: boom\n")
    for rank in (0, 2):
        assert f"rank {rank} was ended because rank 1 failed: ValueError: boom" in ended.output
    if then == "nothing":
        assert "ValueError: boom\ntrainkit: this error was caught on rank 1, but the other ranks were still" in ended.output


def test_a_caught_error_is_over_if_the_other_ranks_leave_the_run() -> None:
    ended = end(3, "one_fails_and_catches", "what the others wait for")
    assert ended.codes == [0, 0, 0]
    assert ended.output == "caught: boom\n"


def the_last_steps_take_long(how: str) -> None:
    member = Member(grace=GRACE)

    def work() -> None:
        member.step()
        if member.rank == 0:
            now()
            if how != "fails":
                assert member.channel.wait(lambda: 1 in member.channel.exited, LIMIT)  # rank 1 does not wait for this rank
            time.sleep(LONG)  # the rest of its work needs no other rank
            print("done")

    member.run(work)
    if how == "dies":
        os._exit(0)
    if how == "fails":
        raise ValueError("boom")


@pytest.mark.parametrize("how", ["ends", "dies"])
def test_a_rank_that_is_no_longer_needed_may_exit(how: str) -> None:
    ended = end(2, "the_last_steps_take_long", how)
    assert ended.codes == [0, 0]
    assert max(ended.seconds[1], LONG) < ended.seconds[0]
    assert ended.output == "done\n"


def test_a_second_failure_of_a_run() -> None:
    """Rank 1 fails after it has left the run. Rank 0 is still in the run, and is ended."""
    ended = end(2, "the_last_steps_take_long", "fails")
    assert ended.codes == [1, 1]
    assert "rank 0 was ended because rank 1 failed: ValueError: boom" in ended.output
    assert ended.output.rstrip().endswith("ValueError: boom")


def it_cleans_up_for_long() -> None:
    member = Member(grace=GRACE)
    work = one_fails(member)

    def tear_down() -> None:
        if member.rank == 1:
            assert member.channel.wait(lambda: 0 in member.channel.exited, LIMIT)  # the watchdog ends rank 0
            time.sleep(LONG)
            print("torn down")

    member.run(work, tear_down)


def test_a_failed_rank_may_clean_up() -> None:
    ended = end(2, "it_cleans_up_for_long")
    assert ended.codes == [1, 1]
    assert max(ended.seconds[0], LONG) < ended.seconds[1]
    assert ended.output.index("torn down") < ended.output.index("Traceback")


def all_ranks_are_preempted() -> None:
    member = Member(grace=GRACE)

    def work() -> None:
        member.step()
        now()
        raise Preempted("SIGTERM at step 1")

    def tear_down() -> None:
        if member.rank == 0:
            assert member.channel.wait(lambda: len(member.channel.exited) == 2, LIMIT)
            time.sleep(LONG)  # it has more to clean up than the other ranks
            print("tidy")

    member.run(work, tear_down)


def test_a_preempted_rank_has_time_to_clean_up() -> None:
    ended = end(3, "all_ranks_are_preempted")
    assert ended.codes == [143, 143, 143]
    assert ended.output == "tidy\n"
    assert ended.seconds[0] > max(LONG, *ended.seconds[1:])
