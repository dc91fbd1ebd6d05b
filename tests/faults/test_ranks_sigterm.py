"""SIGTERM, SIGUSR1 or Ctrl-C to one or to all of several processes: all finish the step, save and exit."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.launched import Launched
from helpers.patience import within
from helpers.resume.disturbed import (
    EPOCHS,
    MICRO_BATCHES,
    Signal,
    Started,
    Training,
    drawn_moments,
    end_of,
    lines,
    logged,
    newest,
    started,
    wait_until,
)
from helpers.resume.elastic import journal

from trainkit import Callback
from trainkit.distributed.channel import Channel
from trainkit.trainer import lifecycle as running

pytestmark = pytest.mark.prompt

ROWS = 2  # micro-batches of a process in one optimizer step
LIMIT = within(30)  # seconds from the signal to the exit of the last process
APART = 0.2  # maximum seconds between the signals to the two processes, where they do not get them at the same time
SIGTERM, SIGINT, SIGUSR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("sigterm") / "plain"
    with started(Training(str(folder))) as running:
        assert running.codes() == [0, 0], running.output
    return folder


def assert_stopped_well(folder: str | Path, output: str) -> None:
    """The newest checkpoint is valid, and contains exactly the micro-batches that were done."""
    manifest = newest(folder).manifest
    done = manifest.epoch * MICRO_BATCHES + manifest.position["batches"]
    assert lines(folder, 0) + lines(folder, 1) == done, output
    assert not (Path(folder) / "stacks").exists(), output


def assert_nothing_lost(training: Training, plain: Path) -> None:
    """Let the run continue to its end: the result is that of the undisturbed run, and no micro-batch was done twice."""
    with started(training, attempt=99) as running:
        assert running.codes() == [0, 0], running.output
    folder = Path(training.folder)
    assert journal(folder) == journal(plain)
    assert [lines(folder, rank) for rank in (0, 1)] == [lines(plain, rank) for rank in (0, 1)], "nothing is done twice"
    assert end_of(folder) == end_of(plain)
    assert logged(folder) == logged(plain)
    assert len(list(folder.rglob("metrics.jsonl"))) == 1
    newest(folder)


def exit_code(number: int) -> int:
    return 130 if number == SIGINT else 143


# ----------------------------------------------------------------------------------------------------- at random moments


def send(running: Started, number: int, to: str, draw: random.Random) -> int:
    """Signal one process, or both and their DataLoader workers like a batch system; returns the rank signaled first."""
    first = draw.randrange(2)
    running.signal(first, number, group=to != "one")
    if to == "apart":
        time.sleep(draw.uniform(0.0, APART))
    if to != "one":
        running.signal(1 - first, number, group=True)
    return first


def chain(training: Training, drawn: list[tuple[int, float]], draw: random.Random, kinds: list[tuple[int, str]]) -> list[float]:
    """Signal a run at each given moment and resume it; returns for each signal the seconds until all processes had exited."""
    seconds = []
    for attempt, (rows, delay) in enumerate(drawn):
        number, to = kinds[attempt % len(kinds)]
        until = max(rows, lines(training.folder) + ROWS)
        with started(training, attempt) as running:
            wait_until(lambda: lines(training.folder) >= until or running.ended(), lambda: f"no row {until}:\n{running.output}")  # noqa: B023
            time.sleep(delay)
            then = time.monotonic()
            first = send(running, number, to, draw)
            done = lines(training.folder)
            codes = running.codes(LIMIT)
            took = time.monotonic() - then
            assert lines(training.folder) <= done + 2 * ROWS + 1, "what is asked for in one step happens after the next"
            if to == "apart" and codes[first] == exit_code(number) and codes[1 - first] == -number:
                codes[1 - first] = codes[first]  # it had already finished when it was signaled
            if codes != [exit_code(number)] * 2:
                assert newest(training.folder).manifest.epoch == EPOCHS, f"{codes}:\n{running.output}"
                break  # the signal arrived after the end of the fit
            assert_stopped_well(training.folder, running.output)
        seconds.append(took)
    return seconds


def signalled(plain: Path, number: int, in_a_chain: int, seed: int, kinds: list[tuple[int, str]], workers: int = 0) -> None:
    """Send `number` signals at random moments after the first optimizer step."""
    draw = random.Random(seed)
    seconds: list[float] = []
    chains = 0
    while len(seconds) < number:
        chains += 1
        assert chains <= 3 * number, "the signals come too late"
        training = Training(f"runs{chains}", workers=workers)
        seconds += chain(training, drawn_moments(draw, plain, min(in_a_chain, number - len(seconds)), ROWS), draw, kinds)
        assert_nothing_lost(training, plain)
    print(f"{number} signals: {statistics.median(seconds):.2f} s to the end of all (median), at most {max(seconds):.2f} s")


def test_sigterm_to_one_at_random_moments(plain: Path) -> None:
    signalled(plain, 6, 3, 1, [(SIGTERM, "one")])


def test_signals_to_one_and_to_all(plain: Path) -> None:
    signalled(plain, 4, 4, 2, [(SIGTERM, "apart"), (SIGINT, "all"), (SIGUSR1, "one"), (SIGTERM, "apart")], workers=1)


@SLOW
@pytest.mark.parametrize("seed", range(5))
def test_sigterm_to_one_at_fifty_random_moments(plain: Path, seed: int) -> None:
    signalled(plain, 10, 5, 10 + seed, [(SIGTERM, "one")])


@SLOW
@pytest.mark.parametrize("to", ["one", "all", "apart"])
@pytest.mark.parametrize("number", [SIGTERM, SIGINT, SIGUSR1])
def test_other_signals_at_random_moments(plain: Path, number: int, to: str) -> None:
    signalled(plain, 10, 5, 3, [(number, to)], workers=2)


# ------------------------------------------------------------------------------------------------- at certain moments


@pytest.mark.parametrize("hook, rank", [("setup", 1), ("on_sanity_check_start", 0), ("on_train_start", 1)])
def test_one_rank_gets_a_signal_before_the_first_step(hook: str, rank: int) -> None:
    """All processes exit without a checkpoint; none waits for the process that was signaled."""
    with started(Training("runs"), more=[Signal(hook, rank, SIGTERM)]) as running:
        assert running.codes(LIMIT) == [143, 143], running.output
        assert "Traceback" not in running.output
    assert list(Path("runs").rglob("step-*")) == []


class WhileChecked(Callback):
    """Sends SIGTERM to one process while it checks its module, before any callback hook is called.

    Args:
        rank: Rank of that process.
        late: The other ranks check their module only after that process has exited.
    """

    def __init__(self, rank: int, late: bool = False) -> None:
        self.rank, self.late = rank, late

    def __setstate__(self, state: dict[str, Any]) -> None:  # called in the training process, which unpickles this callback
        vars(self).update(state)
        plain = running.refuse_incomplete

        def refuse_incomplete(*given: Any) -> None:
            if os.environ["RANK"] == str(self.rank):
                os.kill(os.getpid(), SIGTERM)
            elif self.late:
                [channel] = entered
                assert channel.wait(lambda: self.rank in channel.exited, LIMIT)
            plain(*given)

        running.refuse_incomplete = refuse_incomplete
        enter_run, entered = Channel.enter_run, []

        def enter(channel: Channel) -> None:
            entered.append(channel)
            enter_run(channel)

        Channel.enter_run = enter  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_gets_a_signal_before_anything(rank: int, late: bool) -> None:
    # the signal comes before any callback hook: all processes exit with code 143, without a traceback
    with started(Training("runs"), more=[WhileChecked(rank, late)]) as world:
        assert world.codes(LIMIT) == [143, 143], world.output
        assert "Traceback" not in world.output
        assert "no attribute" not in world.output


@pytest.mark.parametrize("hook", ["on_train_end", pytest.param("on_fit_end", marks=SLOW)])
def test_one_rank_gets_a_signal_after_the_last_step(plain: Path, hook: str) -> None:
    """Everything is saved, and all processes exit with the code of the signal, although only one was signaled."""
    training = Training("runs")
    with started(training, more=[Signal(hook, 1, SIGTERM)]) as running:
        assert running.codes(LIMIT) == [143, 143], running.output
        assert "Traceback" not in running.output
    assert_nothing_lost(training, plain)


@pytest.mark.parametrize("late", ["on_exception", pytest.param("on_save_checkpoint", marks=SLOW)])
def test_one_rank_gets_a_signal_when_all_are_about_to_save(plain: Path, late: str) -> None:
    """A batch system signals the processes at different times: the signal to another rank does not count as a second one."""
    training = Training("runs")
    with started(training, more=[Signal("on_before_backward", 0, SIGTERM), Signal(late, 1, SIGTERM, received=True)]) as running:
        assert running.codes(LIMIT) == [143, 143], running.output
        assert_stopped_well("runs", running.output)
    assert_nothing_lost(training, plain)


# ------------------------------------------------------------------------------------------------------------- launched

LAUNCH = ("-m", "trainkit", "launch", "--nproc-per-node", "2", "--max-restarts", "3")


@pytest.mark.parametrize(
    "launcher, number, to",
    [
        (LAUNCH, SIGTERM, "everybody"),
        ((), SIGINT, "the group"),
        pytest.param(LAUNCH, SIGTERM, "the agent", marks=SLOW),
        pytest.param((), SIGTERM, "everybody", marks=SLOW),
        pytest.param((), SIGTERM, "the agent", marks=SLOW),
        pytest.param(LAUNCH, SIGINT, "the group", marks=SLOW),
        pytest.param(LAUNCH, SIGUSR1, "the agent", marks=SLOW),
        pytest.param(LAUNCH, SIGTERM, "one", marks=SLOW),
        pytest.param((), SIGTERM, "one", marks=SLOW),
        pytest.param(LAUNCH, SIGINT, "one", marks=SLOW),
    ],
)
def test_launched(plain: Path, launcher: tuple[str, ...], number: int, to: str) -> None:
    """Signal the agent (the first process), its process group like a terminal, all processes of the job, or one of them."""
    training = Training("runs", workers=1, devices="auto" if launcher else 2)
    with Launched(training, *launcher) as running:
        assert running.until(lambda: lines("runs") >= ROWS, "the first update"), running.output
        time.sleep(random.Random(f"{launcher} {to}").uniform(0.0, 0.3))
        agent, ranks = running.process.pid, list(running.pids(0).values())
        then = time.monotonic()
        if to in ("the agent", "everybody"):
            os.kill(agent, number)
        elif to == "the group":
            os.killpg(agent, number)
        for process in {"everybody": ranks, "one": ranks[1:]}.get(to, []):
            os.killpg(process, number)
        code = running.code(LIMIT)
        print(f"{signal.Signals(number).name} to {to}: {time.monotonic() - then:.2f} s to the end of all")
        output = running.output
    assert code == exit_code(number), output
    assert not running.pids(1), "a run that was asked to stop is not restarted"
    assert_stopped_well("runs", output)
    assert output.count("to continue: trainer.fit(") == 1, output
    assert f"to continue: trainer.fit(..., ckpt_path='{newest('runs').path.absolute()}')" in output
    assert output.count("Ctrl-C") == (number == SIGINT and to != "one"), output
    assert output.count("Traceback") == (number == SIGINT), output
    if number == SIGINT:  # the last line says where the run stopped; the traceback above it has no frames of the loop
        assert "KeyboardInterrupt: stopped after " in output.rstrip().splitlines()[-1]
        assert f"{os.sep}running.py" not in output
    assert_nothing_lost(training, plain)
