"""`CollectiveChecks`: an error names a collective method that not all processes of your own training loop call.

Such methods are, for example, `gather` and `wait_for_everyone`. Tests in which a rank waits in a gradient reduction or an
optimizer step, or exits, use real processes. Tests of messages use threads.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.launch.members import as_script, end_of
from helpers.patience import PATIENCE
from helpers.worlds.threaded import run_threads
from helpers.worlds.worlds import run_world, start_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainkit.distributed.channel
from trainkit import Accelerator, set_seed
from trainkit.distributed.collective_checks import CollectiveChecks, describe
from trainkit.distributed.failure import Failure
from trainkit.distributed.world import CollectiveTracker, World
from trainkit.errors import CollectiveError, ProcessFailedError

DEBUG = {"TRAINKIT_DEBUG_MODE": "1"}
HERE = r"test_collective_checks\.py:\d+"
ALONE = "inside 'if accelerator.is_main_process:' or a similar condition"


# ---------------------------------------------------------------------------------------------------- what is compared


def test_verbs_give_their_values() -> None:
    """`exchange` returns the values of all ranks, in the order of the ranks."""

    def work(world: World) -> Any:
        collective_checks = CollectiveChecks.of(world)
        assert CollectiveChecks.of(world) is collective_checks or world.size == 1
        collective_checks.wait("wait_for_everyone")
        return collective_checks.exchange("gather", [world.rank, None])

    assert run_threads(3, work) == [[[0, None], [1, None], [2, None]]] * 3
    assert run_threads(1, work) == [[[0, None]]]


def test_different_verbs() -> None:
    """If the ranks call different methods, all raise the same error, and can continue after they catch it."""

    def work(world: World) -> Any:
        collective_checks = CollectiveChecks.of(world)
        with pytest.raises(CollectiveError) as caught:
            collective_checks.exchange("gather" if world.rank == 0 else "wait_for_everyone")
        return str(caught.value), collective_checks.exchange("gather", world.rank)

    ends = run_threads(3, work)
    assert [found for _, found in ends] == [[0, 1, 2]] * 3
    assert {text for text, _ in ends} == {ends[0][0]}
    assert re.fullmatch(
        rf"the processes have made different calls: rank 0: gather \({HERE}\); rank 1: wait_for_everyone \({HERE}\); "
        rf"rank 2: wait_for_everyone \({HERE}\)\. All processes must call each: do not call any {ALONE}\.",
        ends[0][0],
    )


def test_a_process_that_fails_is_named() -> None:
    """The error names the method and the failed rank, which the error of the connection does not know."""

    def work(world: World) -> str:
        collective_checks = CollectiveChecks.of(world)
        collective_checks.wait("wait_for_everyone")
        assert world.channel is not None

        def fail(*_: Any) -> Any:
            raise ProcessFailedError("exchange 'own loop/2' cannot be completed")

        vars(world.channel).update(exchange=fail, cause=Failure(1, "error", "ValueError: boom"))
        with pytest.raises(ProcessFailedError) as caught:
            collective_checks.wait("check_trigger")
        return str(caught.value)

    for text in run_threads(2, work):
        assert re.fullmatch(rf"check_trigger \({HERE}\) needs all 2 processes, but rank 1 failed: ValueError: boom\.", text)


def test_one_more_collective_on_one_process() -> None:
    """If one rank has taken part in more collectives, the next check raises, and gives the number on each rank."""

    def work(world: World) -> str:
        collective_checks = CollectiveChecks.of(world)
        for _ in range(3 + (world.rank == 1)):
            with world.collectives:
                pass
        with pytest.raises(CollectiveError) as caught:
            collective_checks.wait("wait_for_everyone")
        return str(caught.value)

    for text in run_threads(2, work):
        assert re.match(rf"before wait_for_everyone \({HERE}\) .* different numbers of .* \(3 on rank 0, 4 on rank 1\): ", text)


@pytest.mark.parametrize("debug", [False, True])
def test_call_sites_and_tensors_are_compared_in_debug_mode(debug: bool) -> None:
    def work(world: World) -> list[str]:
        collective_checks = CollectiveChecks.of(world)
        collective_checks.debug = debug
        texts = []
        calls: list[Callable[[], None]] = [
            lambda: collective_checks.wait("wait_for_everyone"),
            lambda: collective_checks.wait("wait_for_everyone"),
            lambda: collective_checks.compare(
                "backward", None if world.rank == 0 else "float64[2]"
            ),  # rank 0 passes no tensors
            lambda: collective_checks.compare("backward", f"float{32 * (1 + world.rank)}[2]"),
        ]
        for call in (calls[world.rank], *calls[2:]):
            try:
                call()
            except CollectiveError as error:
                texts.append(str(error))
        assert collective_checks.exchange("gather", 1) == [1, 1]
        return texts

    for texts in run_threads(2, work):
        if not debug:
            assert texts == []
            continue
        place, tensors = texts
        assert re.match(rf"wait_for_everyone was called in different places \(rank 0: {HERE}; rank 1: {HERE}\): .*DEBUG", place)
        assert re.match(
            rf"backward \({HERE}\) was called with different tensors: rank 0: float32\[2\]; rank 1: float64\[2\]\. ", tensors
        )


def test_tensors_in_a_few_words() -> None:
    assert describe([torch.zeros(2, 3)]) == "float32[2, 3]"
    assert describe([torch.zeros(())]) == "float32[]"
    several = describe([torch.zeros(2), torch.zeros(3, 2).bfloat16()])
    assert re.fullmatch(r"2 tensors of 8 elements \(bfloat16, float32; shapes [0-9a-f]{8}\)", several)
    assert describe([torch.zeros(2), torch.zeros(2, 3).bfloat16()]) != several


# --------------------------------------------------------------------------------------------- ranks in different calls


class Net(nn.Module):
    """A model with buffers, which rank 0 broadcasts at the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


class Loop:
    """A training loop of two processes that has made its first optimizer step."""

    def __init__(self, **arguments: Any) -> None:
        trainkit.distributed.channel._LOOK_S = 0.05
        self.accelerator = Accelerator(**arguments)
        self.main = self.accelerator.is_main_process
        net = Net()
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        self.update()

    def forward(self) -> Tensor:
        return self.model(torch.randn(4, 4)).square().mean()

    def update(self) -> None:
        self.accelerator.backward(self.forward())
        self.optimizer.step()
        self.optimizer.zero_grad()


def _forward(loop: Loop) -> None:
    loop.forward()


def _backward(loop: Loop) -> None:
    loop.accelerator.backward(loop.forward())


def _step(loop: Loop) -> None:
    loop.optimizer.step()


def _wait(loop: Loop) -> None:
    loop.accelerator.wait_for_everyone()


def _trigger(loop: Loop) -> None:
    loop.accelerator.check_trigger()


def _first(loop: Loop) -> None:
    with loop.accelerator.main_process_first():
        pass


def one_does_what_the_others_do_not(main: str, others: str, strategy: str) -> None:
    loop = Loop(strategy=strategy)
    for verb in ("wait", "trigger", "first"):
        globals()[f"_{verb}"](loop)
    if "step" in (main, others):
        _backward(loop)
    globals()[f"_{main if loop.main else others}"](loop)


@pytest.mark.parametrize(
    "main, others, verb, named, strategy",
    [
        # DDP: only the main process calls the method
        ("trigger", "backward", "check_trigger", "backward", "ddp"),
        ("wait", "step", "wait_for_everyone", "step", "ddp"),
        # the main process trains while the other process waits for it, and the same cases under ZeRO
        ("backward", "wait", "wait_for_everyone", "backward", "ddp"),
        ("trigger", "backward", "check_trigger", "backward", "zero2"),
        ("forward", "wait", "wait_for_everyone", "the forward of a model whose parameters are sharded", "zero3"),
        ("trigger", "step", "check_trigger", "step", "zero3"),
    ],
)
def test_ranks_waiting_for_each_other(main: str, others: str, verb: str, named: str, strategy: str, run_dir: Path) -> None:
    """Two ranks wait for each other in different calls: an error names both calls and their lines."""
    ends = start_world(2, one_does_what_the_others_do_not, main, others, strategy).ends()
    assert not any(fine for fine, _ in ends)
    mine = rf"waits for all processes in {verb} \({HERE}\), but rank \d waits for rank \d in {named} \({HERE}\)"
    whole = rf"CollectiveError: rank (\d) {mine}\. All processes must call both: do not call either {ALONE}\."
    told = [re.search(whole, text) for _, text in ends]
    found = [match for match in told if match is not None]
    assert found, f"{ends[0][1]}\n{ends[1][1]}"
    # the rank in the collective method raises; the other rank is blocked and cannot raise, so it exits after that
    assert found[0][1] == ("0" if verb in ("check_trigger", "main_process_first") or others == "step" else "1")


def reading_on() -> list[int]:
    """The other rank calls `gather` late: the main process asks several times what it is doing, and then continues."""
    loop = Loop()
    asked: list[float] = []
    channel = loop.accelerator.world.channel
    assert channel is not None
    record = channel.collectives.record
    CollectiveTracker.record = lambda self: (asked.append(time.monotonic()), record())[1]  # type: ignore[method-assign]
    if not loop.main:
        end = time.monotonic() + PATIENCE
        while len(asked) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(asked) >= 3
    found: list[int] = loop.accelerator.collective_checks.exchange("gather", loop.accelerator.process_index)
    loop.update()
    loop.accelerator.wait_for_everyone()
    return found


def test_a_late_rank_is_no_error() -> None:
    """A rank that is only late causes no error."""
    assert run_world(2, reading_on) == [[0, 1]] * 2


# ----------------------------------------------------------------------------------------- a process that has exited


def ends_before_the_main_process(last: str) -> None:
    loop = Loop()
    world = loop.accelerator.world
    assert world.channel is not None
    world.watchdog._grace = 0.05  # type: ignore[union-attr]
    loop.accelerator.wait_for_everyone()
    if not loop.main:
        if last == "dies":
            os._exit(0)
        return
    world.channel.wait(lambda: 1 in world.channel.exited, PATIENCE)  # type: ignore[union-attr]
    if last == "evaluate":
        with torch.no_grad():
            loop.model.eval()
            for _ in range(20):  # takes much longer than the grace period
                loop.forward()
                time.sleep(0.05)
        print("evaluated")
    elif last == "dies":
        loop.accelerator.wait_for_everyone()
    elif last == "nccl":  # like NCCL, which does not notice that the other process has exited
        with world.collectives:
            time.sleep(PATIENCE)
    else:
        globals()[f"_{last}"](loop)


def script(last: str) -> None:
    as_script(ends_before_the_main_process, last)


@pytest.mark.parametrize("last", ["evaluate", "wait", "backward", "nccl", "dies"])
def test_a_script_that_ends_before_that_of_the_main_process(last: str, run_dir: Path) -> None:
    """If the script of rank 1 ends, rank 0 continues as long as it needs no collective; otherwise it exits with the reason."""
    ended = end_of(2, script, last)
    if last == "evaluate":
        assert ended.codes == [0, 0], ended.output
        assert "evaluated" in ended.output
        return
    assert ended.codes == [1, 0], ended.output
    if last == "wait":
        assert re.search(
            rf"CollectiveError: rank 0 waits for all processes in wait_for_everyone \({HERE}\), but the script of rank 1 has "
            rf"ended\. All processes must call it: do not call it {ALONE}\.",
            ended.output,
        )
    else:
        why = r"has died \(no traceback" if last == "dies" else "has exited: its script ended"
        assert re.search(rf"rank 0 (was )?ended because rank 1 {why}", ended.output)


# -------------------------------------------------------------------------- evaluation on the main process alone, ZeRO-3


def evaluated_longer_than_any_limit() -> list[float]:
    """The main process evaluates for longer than the timeout of collectives, while the other process waits."""
    loop = Loop()
    world, limit = loop.accelerator.world, 0.2
    groups = [dist.group.WORLD, world.control]
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit), group)
    world.watchdog._grace = limit  # type: ignore[union-attr]
    if loop.main:
        loop.model.eval()
        with torch.no_grad():
            end = time.monotonic() + 4 * limit
            while time.monotonic() < end:
                loop.forward()
        loop.model.train()
    loop.accelerator.wait_for_everyone()
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE), group)
    loop.update()
    loop.accelerator.wait_for_everyone()
    return [float(p.detach().sum()) for p in loop.model.parameters()]


def test_evaluation_on_the_main_process_alone() -> None:
    """A process may wait in `wait_for_everyone` for longer than the timeout of collectives; training then continues."""
    first, second = run_world(2, evaluated_longer_than_any_limit)
    assert first == second


def sharded() -> list[str]:
    """Under ZeRO-3 a forward is collective: it raises if only the main process runs it, and works if all processes do."""
    loop = Loop(strategy="zero3")
    accelerator, texts = loop.accelerator, []
    inner = accelerator.unwrap_model(loop.model)
    calls: list[Callable[[], Any]] = [
        loop.forward,
        lambda: inner(torch.ones(4, 4)),
        lambda: inner.first(torch.ones(1, 4)),  # a submodule that is called by itself, such as the encoder in `generate`
    ]
    loop.model.eval()
    for call in calls:
        with torch.no_grad(), pytest.raises(CollectiveError) as caught:
            (call if accelerator.is_main_process else accelerator.wait_for_everyone)()
        texts.append(str(caught.value))
    with torch.no_grad():
        for call in calls:
            call()
    loop.model.train()
    loop.update()
    assert any(hook.__module__ == CollectiveChecks.__module__ for hook in inner._forward_hooks.values())
    copied = copy.deepcopy(inner.norm)
    assert copied is not inner.norm
    accelerator.free_memory()
    hooks = [hook for part in inner.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    assert not [hook for hook in hooks if hook.__module__ == CollectiveChecks.__module__]
    return texts


def test_evaluation_on_the_main_process_alone_under_zero3() -> None:
    for texts in run_world(2, sharded):
        for text in texts:
            assert re.match(
                rf"the processes have made different calls: rank 0: the forward of a model whose parameters are sharded "
                rf"\({HERE}\); rank 1: wait_for_everyone \({HERE}\)\. All processes must call each",
                text,
            )


def test_a_forward_that_breaks_off_is_over() -> None:
    """After a forward that was interrupted by an exception, the next forward is checked again.

    The exception may be Ctrl-C, or come from another hook before the forward.
    """

    class Part(nn.Module):
        fails: BaseException | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.fails is not None:
                raise self.fails
            return x + 1

    def refuse(part: nn.Module, args: Any) -> None:
        raise ValueError("another hook")

    def work(world: World) -> list[Any]:
        collective_checks, collectives, seen = CollectiveChecks.of(world), world.collectives, []
        model = nn.Sequential(nn.Identity(), part := Part())
        close = collective_checks.watch(model)
        for error in (KeyboardInterrupt(), ValueError("of the forward"), None):
            part.fails = error
            hook = model.register_forward_pre_hook(refuse) if error is None else None
            with torch.no_grad(), pytest.raises((KeyboardInterrupt, ValueError)):
                model(torch.ones(2))
            where = collectives.record()["where"]  # what another rank would be told now
            part.fails = None
            if hook is not None:
                hook.remove()
            with torch.no_grad():
                part(model(torch.ones(2)))
            seen.append([where, collectives.checks, collectives.begun, collectives.depth, collectives.location])
        part.fails = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt), collectives:  # as in activation checkpointing
            model(torch.ones(2, requires_grad=True))
        with collectives:
            seen.append(collectives.depth)
        close()
        return seen

    expected = [[None, 3 * count, 3 * count, 0, None] for count in (1, 2, 3)]
    assert run_threads(2, work) == [[*expected, 1]] * 2


# --------------------------------------------------------------------------------------------------------- debug mode


def debugged(strategy: str) -> list[str]:
    """A correct loop with windows in which one rank has fewer micro-batches, followed by two calls that do not match."""
    set_seed(1)
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=2)
    assert accelerator.collective_checks.debug
    net = Net()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(torch.randn(22, 4), 4)
    )
    for _ in range(2):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with accelerator.main_process_first():
            accelerator.print("an epoch")
        accelerator.check_trigger()
    texts = []
    loss = model(torch.ones(4, 4)).square().mean()
    for case in range(2):
        try:
            if case == 0:
                accelerator.backward(loss.double() if accelerator.is_main_process else loss)
            elif accelerator.is_main_process:
                accelerator.backward(loss)
            else:
                accelerator.backward(loss)
        except CollectiveError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_debug_mode(strategy: str) -> None:
    """Debug mode reports different tensors and different call sites of `backward`, and nothing in a correct loop."""
    for tensors, place in run_world(2, debugged, strategy, env=DEBUG):
        assert re.match(
            rf"backward \({HERE}\) was called with different tensors: rank 0: float64\[\]; rank 1: float32\[\]", tensors
        )
        assert re.match(rf"backward was called in different places \(rank 0: {HERE}; rank 1: {HERE}\)", place)
