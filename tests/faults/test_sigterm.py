"""Stop signals and Ctrl-C at any moment: the step is finished and saved, and the resumed run equals an undisturbed one."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import termios
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.faulting import At, Child, Watched, checkpoints, left_over, rows, saved_in, send, tell, told
from helpers.resume.resuming import Run, read_trace
from helpers.support import ROOT, run_python

from trainkit import Callback
from trainkit.checkpoint.folder import candidates, folders_below
from trainkit.checkpoint.reader import Checkpoint, open_checkpoint

WINDOW = Run().accumulate


class Clock(Callback):
    """Records the time after each micro-batch, and at the end of the fit."""

    def on_train_batch_end(self, *_: Any) -> None:
        tell(time.monotonic(), "clock")

    def teardown(self, *_: Any) -> None:
        tell(time.monotonic(), "clock")


def lines(trace: str) -> int:
    """Number of micro-batches in a trace."""
    path = Path(trace)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest(folder: str) -> Checkpoint:
    """The newest checkpoint of a run."""
    return open_checkpoint(candidates(*folders_below(folder))[0].path)


def reached(trace: str, number: int, child: Child) -> bool:
    """Whether a trace has at least `number` micro-batches, or the process has ended."""
    return lines(trace) >= number or child.ended


def plain(**options: Any) -> Any:
    """Run without a signal; returns the result. The trace is plain.jsonl, the folder plain."""
    with Child(Watched(trace="plain.jsonl", folder="plain", **options).go, "plain") as child:
        return child.answer


def assert_nothing_lost(expected: Any, run: Run, name: str = "last") -> None:
    """Let the run continue to its end: the result is that of the undisturbed run, and no micro-batch was done twice."""
    with Child(run.go, name, group=run.workers > 0) as child:
        assert child.answer == expected
    assert read_trace(run.trace) == read_trace("plain.jsonl")
    assert lines(run.trace) == lines("plain.jsonl"), "nothing is done twice"
    assert rows(run.folder) == rows("plain")
    assert left_over(saved_in(run.folder)) == []


# ----------------------------------------------------------------------------------------------------- at random moments


def moments(draw: random.Random, number: int) -> list[tuple[int, float]]:
    """Random moments from the first optimizer step of the undisturbed run to its end: (micro-batches done, seconds since)."""
    clock = told("clock")
    drawn = sorted(draw.uniform(clock[WINDOW - 1], clock[-1]) for _ in range(number))
    done = [sum(then <= moment for then in clock) for moment in drawn]
    return [(batches, moment - clock[batches - 1]) for batches, moment in zip(done, drawn, strict=True)]


def chain(run: Run, drawn: list[tuple[int, float]], signals: list[int]) -> int:
    """Signal a run at each given moment and resume it; returns how many signals arrived before its end."""
    hits = 0
    for number, (batches, delay) in enumerate(drawn):
        until = max(batches, lines(run.trace) + WINDOW)
        with Child(run.go, f"{run.folder}-{number}", group=run.workers > 0) as child:
            child.until(partial(reached, run.trace, until, child), f"micro-batch {until}")
            time.sleep(delay)
            if not child.ended:
                child.signal(signals[number % len(signals)])
            if (
                child.code in (0, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGHUP)
                and newest(run.folder).manifest.epoch == run.epochs
            ):
                break  # the signal arrived after the end of the fit
            assert child.code == 143, child.output
        hits += 1
    return hits


def signalled(number: int, in_a_chain: int, seed: int, signals: list[int], workers: int = 0) -> None:
    draw = random.Random(seed)
    expected = plain(more=[Clock()], workers=workers)
    hits = chains = 0
    while hits < number:
        chains += 1
        assert chains <= 3 * number, "the signals come too late"
        run = Watched(trace=f"trace{chains}.jsonl", folder=f"runs{chains}", workers=workers)
        hits += chain(run, moments(draw, min(in_a_chain, number - hits)), signals)
        assert_nothing_lost(expected, run)


def test_sigterm_at_random_moments() -> None:
    signalled(8, 4, 1, [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])


@pytest.mark.slow
def test_sigterm_at_fifty_random_moments() -> None:
    signalled(50, 5, 2, [signal.SIGTERM])


@pytest.mark.slow
def test_sigusr1_at_random_moments() -> None:
    signalled(10, 5, 3, [signal.SIGUSR1])


def test_sigterm_to_the_whole_process_group() -> None:
    """The DataLoader workers get the signal too; they continue until the training process has finished its step."""
    signalled(3, 3, 4, [signal.SIGHUP, signal.SIGTERM], workers=2)


@pytest.mark.slow
def test_sigterm_to_the_whole_process_group_at_random_moments() -> None:
    signalled(20, 4, 5, [signal.SIGTERM], workers=2)


@dataclass
class Counted(Watched):
    """Counts Python function calls in the main thread from the first optimizer step on; sends itself SIGTERM at call `at`."""

    at: int = 0

    def callbacks(self) -> list[Callback]:
        return [*super().callbacks(), At("on_train_batch_end", self._arm, 1), At("teardown", self._end)]

    def _arm(self) -> None:
        self.calls = 0
        sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.calls += 1
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGTERM)

    def _end(self) -> None:
        sys.setprofile(None)
        tell(self.calls, "calls")


def signalled_at_calls(number: int, seed: int) -> None:
    draw = random.Random(seed)
    with Child(Counted(trace="plain.jsonl", folder="plain").go, "plain") as child:
        expected = child.answer
    [calls] = told("calls")
    for at in (draw.randrange(1, calls) for _ in range(number)):
        name = f"at-{at}"
        with Child(Counted(trace=f"{name}.jsonl", folder=name, at=at).go, name) as child:
            assert child.code == 143, f"{at}: {child.output}"
        assert_nothing_lost(expected, Watched(trace=f"{name}.jsonl", folder=name))


def test_sigterm_in_any_function() -> None:
    signalled_at_calls(3, 6)


@pytest.mark.slow
def test_sigterm_in_many_functions() -> None:
    signalled_at_calls(40, 7)


# ------------------------------------------------------------------------------------------------- at certain moments


def test_sigterm_in_a_validation() -> None:
    """The checkpoint records that the validation is pending; the resumed run repeats all of it and logs no row twice."""
    expected = plain()
    stop = At("on_validation_batch_end", send(signal.SIGTERM), 8, batch_idx=1)
    with Child(Watched(more=[stop]).go) as child:
        assert child.code == 143, child.output
    assert newest("runs").read().state["loop"]["validation_pending"] is True
    assert newest("runs").manifest.position["phase"] == "validating"
    seen = At("on_train_batch_start", lambda: tell("training", "order"))
    repeated = [At("on_validation_batch_end", lambda: tell("validation", "order"), 0, batch_idx=number) for number in range(3)]
    assert_nothing_lost(expected, Watched(more=[seen, *repeated]))
    assert told("order")[:4] == ["validation"] * 3 + ["training"]


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_sanity_check_start", "on_train_start"])
def test_sigterm_before_the_first_step(hook: str) -> None:
    """The process exits with code 143 and saves no checkpoint."""
    stop = At(hook, lambda: None)
    setattr(stop, hook, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with Child(Watched(more=[stop]).go) as child:
        assert child.code == 143, child.output
    assert checkpoints("runs/logs/default/version_0/checkpoints") == []
    assert lines("trace.jsonl") == 0


def test_sigterm_before_the_first_step_of_a_resumed_run() -> None:
    expected = plain()
    with Child(Watched(more=[At("on_train_batch_end", send(signal.SIGTERM), 4)]).go) as child:
        assert child.code == 143
    before = checkpoints("runs/logs/default/version_0/checkpoints")
    with Child(Watched(more=[At("on_train_start", send(signal.SIGTERM))]).go) as child:
        assert child.code == 143
    assert checkpoints("runs/logs/default/version_0/checkpoints") == before
    assert_nothing_lost(expected, Watched())


def test_sigterm_when_the_last_step_is_done() -> None:
    """Everything is saved, and the process still exits with code 143."""
    expected = plain()
    with Child(Watched(more=[At("on_train_end", send(signal.SIGTERM))]).go) as child:
        assert child.code == 143, child.output
    assert_nothing_lost(expected, Watched())


def wait_forever(name: str) -> None:
    tell("waiting", name)
    while True:
        time.sleep(0.01)


def test_a_second_sigterm_ends_immediately() -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, lambda *_: tell("noted"))
        Watched(more=[At("on_before_backward", lambda: wait_forever("steps"), 5)]).go()

    with Child(work) as child:
        child.until(lambda: told("steps") and checkpoints("runs/logs/default/version_0/checkpoints"), "the step")
        child.signal(signal.SIGTERM)
        child.until(lambda: told(), "the first signal's handler")
        assert not child.ended
        child.signal(signal.SIGTERM)
        assert child.code == -signal.SIGTERM
    assert checkpoints("runs/logs/default/version_0/checkpoints")[0] == "step-00000003"
    assert told() == ["noted"]


def test_ctrl_c() -> None:
    # the step is finished and saved, and the output names the checkpoint from which to resume
    expected = plain()
    with Child(Watched(more=[At("on_before_backward", send(signal.SIGINT), 4)]).go) as child:
        assert child.code == 130, child.output
    path = Path("runs/logs/default/version_0/checkpoints/step-00000005").absolute()
    assert child.output.count("Ctrl-C") == 1
    assert "finishing the step" in child.output
    assert newest("runs").path.absolute() == path, "the step in which it came was finished"
    assert f"the newest checkpoint is {path}" in child.output
    assert f"trainer.fit(..., ckpt_path='{path}')" in child.output
    assert_nothing_lost(expected, Watched())


SCRIPT = """
import os, signal
from helpers.runs.tiny import TinyModule, tiny_loader
from trainkit import Trainer

class Interrupting(TinyModule):
    def {hook}:
        if self.trainer.global_step == 2 or "{hook}".startswith("setup"):
            os.kill(os.getpid(), signal.SIGINT)

def main():
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Interrupting(), tiny_loader())

main()
"""


def interrupted(run_dir: Path, hook: str) -> list[str]:
    """Run a script that gets SIGINT in a hook and does not catch KeyboardInterrupt; returns the lines of its standard error."""
    (run_dir / "train.py").write_text(SCRIPT.format(hook=hook))
    done = run_python("-u", "train.py", cwd=run_dir, env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])})
    assert done.returncode == -signal.SIGINT, done.stderr
    return done.stderr.splitlines()


def test_the_last_line_after_ctrl_c_says_how_to_continue(run_dir: Path) -> None:
    """Users read the last line; the traceback above it has no frames of the training loop, which do not help them."""
    lines = interrupted(run_dir, "on_train_batch_end(self, *_)")
    path = run_dir.resolve() / "trainkit_runs/version_0/checkpoints/step-00000002"
    assert lines[-1] == (
        f"KeyboardInterrupt: stopped after 2 optimizer steps; to continue: trainer.fit(..., ckpt_path='{path}'), or "
        "ckpt_path='auto' for the newest."
    )
    assert lines.count("Traceback (most recent call last):") == 1
    frames = [line.strip().split(", ")[-1] for line in lines if line.startswith("  File ")]
    assert frames[:2] == ["in <module>", "in main"]
    assert len(frames) == 2 or (sys.version_info < (3, 11) and len(frames) == 4), lines


def test_ctrl_c_in_a_hook_before_the_first_step_names_the_users_line(run_dir: Path) -> None:
    # the traceback ends at the line of the user's hook that was interrupted
    lines = interrupted(run_dir, "setup(self, stage)")
    assert lines[-1] == "KeyboardInterrupt: stopped after 0 optimizer steps; no checkpoint was saved."
    frames = [line.strip().split(", ")[-1] for line in lines if line.startswith("  File ")]
    assert (frames[:2], frames[-1]) == (["in <module>", "in main"], "in setup")
    assert len(frames) == 3 or sys.version_info < (3, 11), lines


def test_ctrl_c_to_the_whole_process_group() -> None:
    """Like Ctrl-C in a terminal: the DataLoader workers continue until the step is finished, and print nothing."""
    expected = plain(workers=2)
    stop = At("on_before_backward", lambda: os.killpg(0, signal.SIGINT), 4)
    with Child(Watched(more=[stop], workers=2).go, group=True) as child:
        assert child.code == 130, child.output
    assert child.output.count("Ctrl-C") == 1
    assert checkpoints("runs/logs/default/version_0/checkpoints")[0] == "step-00000005"
    assert_nothing_lost(expected, Watched(workers=2))


def test_a_second_ctrl_c_ends_immediately() -> None:
    with Child(Watched(more=[At("on_before_backward", lambda: wait_forever("steps"), 5)]).go) as child:
        child.until(lambda: told("steps") and checkpoints("runs/logs/default/version_0/checkpoints"), "the step")
        child.signal(signal.SIGINT)
        child.until(lambda: "finishing the step" in child.output, "its answer")
        child.signal(signal.SIGINT)
        assert child.code == 130, child.output
    assert checkpoints("runs/logs/default/version_0/checkpoints")[0] == "step-00000003", "nothing was saved any more"


def test_the_users_own_handler() -> None:
    """The user's SIGTERM handler is called too. After the fit, all signals have the handlers from before."""

    def work() -> Any:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
        signal.signal(signal.SIGTERM, lambda number, frame: tell(number))
        before = [signal.getsignal(number) for number in numbers]
        try:
            Watched(more=[At("on_train_batch_end", send(signal.SIGTERM), 4)]).go()
        except SystemExit as ended:
            return [ended.code, before == [signal.getsignal(number) for number in numbers]]

    with Child(work) as child:
        assert child.answer == [143, True]
    assert told() == [signal.SIGTERM]


def test_a_terminal_that_closes() -> None:
    """When an ssh connection is lost, the kernel sends SIGHUP to the run."""
    master, slave = os.openpty()

    def work() -> None:
        os.close(master)
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        Watched(workers=1, more=[At("on_before_backward", lambda: wait_for("closed"), 5)]).go()

    with Child(work) as child:
        os.close(slave)
        child.until(lambda: told("waiting") != [], "the step")
        os.close(master)
        tell(1, "closed")
        assert child.code == 143, child.output
    assert "fit ended by SIGHUP at step" in child.output


def wait_for(name: str) -> None:
    """Wait until there is a record of this name, which the test writes."""
    tell(1, "waiting")
    while not told(name):
        time.sleep(0.01)


def test_under_nohup_a_run_outlives_its_terminal() -> None:
    def work() -> Any:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return Watched(more=[At("on_train_batch_end", send(signal.SIGHUP), 4)]).go()

    expected = plain()
    with Child(work) as child:
        assert child.answer == expected


IN_ANOTHER_THREAD = """
import json, signal
from concurrent.futures import ThreadPoolExecutor
from helpers.resume.faulting import At, Watched, tell

seen = At("on_train_batch_start", lambda: tell(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL), 1)
with ThreadPoolExecutor(1) as pool:
    print(json.dumps(pool.submit(Watched(more=[seen], workers=1).go).result()))
"""


def test_a_fit_in_another_thread() -> None:
    """Python can set signal handlers only in the main thread, so this fit leaves them unchanged.

    Its process is not forked from that of the tests: a worker that is forked from another thread destroys what is local to the
    main thread, and objects that libraries of other tests keep there may crash in it.
    """
    expected = plain()
    done = run_python(IN_ANOTHER_THREAD)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert told() == [True]


STARTING = """
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Accelerator

ENDINGS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}

def held() -> int:
    return len(ENDINGS & signal.pthread_sigmask(signal.SIG_BLOCK, []))

os.register_at_fork(after_in_child=lambda: os.write(1, b"forked %d " % held()))
data = TensorDataset(torch.arange(4))
loader = Accelerator().prepare(DataLoader(data, num_workers=1, worker_init_fn=lambda _: os.write(1, b"working %d " % held())))
batches = list(loader)
os.write(1, b"main %d %d" % (held(), len(batches)))
"""


def test_a_worker_that_has_only_just_been_started_does_not_end() -> None:
    """Signals are blocked until a new DataLoader worker has its handlers; then both processes unblock them."""
    done = run_python(STARTING)
    assert done.stdout == "forked 4 working 0 main 0 4", done.stderr
