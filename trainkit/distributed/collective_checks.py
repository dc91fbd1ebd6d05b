"""Compares the verbs that users call on every rank: all ranks must call the same ones in the same order.

These are the verbs of your own training loop and those of the `Trainer`: `fit`, `validate`, `test`, `predict`,
`save_checkpoint`, `all_gather`, `strategy.barrier`, and the end of an epoch by -1 from `on_train_batch_start`. What a
`Trainer` exchanges by itself is only counted (`CollectiveTracker`): ranks that wait in a verb find out that another rank has
continued without it, before different collectives can be combined.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from trainkit.distributed.failure import error_of_rank
from trainkit.distributed.world import CollectiveTracker, ThreadExchange, World, find_call
from trainkit.errors import CheckpointWriteError, CollectiveError, ProcessFailedError

__all__ = ["CollectiveChecks", "Values", "describe"]

_SUBJECT = "verbs"
_CLEARED = 60.0  # seconds that the other ranks have to leave a run that has failed
_ALONE = "inside 'if accelerator.is_main_process:' or a similar condition"
_WAIT = "wait_for_everyone"  # the one verb that exchanges nothing
_TRAINERS = ("trainer.", "all_gather", "strategy.")  # prefixes of the verbs that are called in a run of a Trainer
_ENDING = "the end of the epoch that on_train_batch_start asked for by returning -1"
_FORWARD = "the forward of a model whose parameters are sharded"
_NAMES = {
    "forward": "the forward of a model",
    "__iter__": "reading a loader",
    "__next__": "reading a loader",
    **{verb: f"trainer.{verb}" for verb in ("fit", "validate", "test", "predict", "save_checkpoint")},
}


class CollectiveChecks:
    """Compares the calls of verbs that all processes must call in the same order, before they are carried out.

    The comparison uses the connection between the processes and no collective, so it has no timeout. A process that waits for
    one that will never come finds out: it regularly asks the others what they are doing. Each method that waits raises a
    `CollectiveError` if another process has called another verb, waits for this one, or has ended, and a `ProcessFailedError`
    if another process has failed.

    Attributes:
        debug: Compare also the places of the calls, and the tensors of `compare`.
        alone: Failures of what the main process writes without the others.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._collectives = world.collectives
        self._thread_exchange: ThreadExchange | None = None
        self._mine = ("", "")
        self._ahead: dict[int, int] = {}  # rank → collectives begun, if more than by this one at the last check
        self.debug = False
        self.alone = FailuresOfMain(world.collectives)

    @classmethod
    def of(cls, world: World) -> CollectiveChecks:
        """The one object of these processes."""
        if world.collective_checks is None:
            world.collective_checks = cls(world)
        checks: CollectiveChecks = world.collective_checks
        return checks

    def wait(self, verb: str) -> None:
        """Wait until all processes have called a verb."""
        self.exchange(verb)

    def enter_run(self, stage: str, enter: Callable[[], None]) -> None:
        """Enter a run of a `Trainer` by `enter`, which raises a `ProcessFailedError` if another rank has exited."""
        self._mine = f"trainer.{stage}", find_call(sys._getframe())[1]
        try:
            enter()
        except ProcessFailedError as error:
            self._refuse(error)

    def begin_run(self, stage: str) -> None:
        """Wait until all ranks begin the same run of a `Trainer`.

        No rank is in a collective here, so all continue to count from the same number: after an earlier run that failed, the
        numbers may differ.
        """
        if self._world.size > 1:
            calls = self._exchange_calls(f"trainer.{stage}", None)
            self._check_same([[verb, place, 0, None] for verb, place, *_ in calls])
            self._collectives.begun = self._world.reductions = max(begun for _, _, begun, _ in calls)

    def end_epoch(self, hook: Callable[..., Any]) -> None:
        """Wait until all ranks end the training epoch because `hook`, `on_train_batch_start`, has returned -1."""
        if self._world.size > 1:
            self._check_same(self._exchange_calls(_ENDING, None, _definition_of(hook)))

    def exchange(self, verb: str, value: Any = None) -> list[Any]:
        """The values (JSON) that the processes pass with a verb, in the order of their ranks."""
        if self._world.size == 1:
            return [value]
        calls = self._exchange_calls(verb, value)
        self._check_same(calls)
        return [its for *_, its in calls]

    def _exchange_calls(self, verb: str, value: Any, place: str | None = None, again: bool = False) -> list[Any]:
        """The verb, its place, the number of collectives and the value of each process.

        Args:
            verb: The verb.
            value: The value of this process.
            place: The place of its call; `None`: as the stack frames show it.
            again: On the main process: it has met the others here already, where they have raised its failure. It waits for
                them once more, since they come here too if the script has caught the failure around both places. If they
                come to another verb instead, nothing is left to wait for.

        Raises:
            TrainkitError: What the main process has written without the others has failed since the last verb.
        """
        if self._thread_exchange is None:
            self._thread_exchange = self._world.thread_exchange(_SUBJECT)
        self._mine = verb, place or find_call(sys._getframe())[1]
        self._ahead = {}
        self._wait_for_failed_run()
        failures = self.alone.all()  # of the main process; the others have none
        values, self.alone.values = self.alone.values, None
        noted = None if values is None else [values.updates, values.checksum]
        waits_again = again and verb == _WAIT
        mine = [*self._mine, self._collectives.begun, value, failures, noted, waits_again, self.alone.known]
        check = self._check_of_wait(waits_again)
        try:
            calls = self._thread_exchange.exchange(mine, check)
        except _OthersAreElsewhereError:
            return [mine[:4]]
        except ProcessFailedError as error:
            self._refuse(error)
        finally:
            self._collectives.checks = self._thread_exchange.completed
        if values is not None and differ([call[5] for call in calls]):
            values.compare(self._thread_exchange)
        return self._after_failures(calls) or self._exchange_calls(verb, value, place, again=self._world.is_main)

    def _after_failures(self, calls: list[Any]) -> list[Any] | None:
        """Raise what the main process has reported; returns what `_exchange_calls` returns, or `None`: it must be repeated."""
        main, *others = calls
        if main[6] and any(call[:2] != main[:2] for call in others):
            return [main[:4]] if self._world.is_main else None
        if self.alone.raise_news(main[4], [call[7] for call in others]):
            return None  # the main process has raised it before, where it has written, and has come here
        return [call[:4] for call in calls]

    def _check_of_wait(self, again: bool) -> Callable[[], None] | None:
        """What looks at the other processes during a wait."""
        if self._world.channel is None:
            return None
        return self._look_for_others if again else self._check_others

    def compare(self, verb: str, what: str | None = None) -> None:
        """In debug mode, check that all processes call a collective in the same place with the same tensors.

        `what` describes the tensors that go into it; `None`: this process has none.
        """
        self._collectives.in_forward()  # forgets a forward that Ctrl-C has interrupted
        if not self.debug or self._collectives.depth:  # inside a collective, only the outer call is compared
            return
        by_rank = self.exchange(verb, what)
        if len({text for text in by_rank if text is not None}) > 1:
            shown = "; ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in enumerate(by_rank))
            raise CollectiveError(f"{verb} ({self._mine[1]}) was called with different tensors: {shown}. {_debug_note()}")

    def watch(self, module: nn.Module) -> Callable[[], None]:
        """Before each forward of a model with sharded parameters, which gathers them, wait until all processes run it.

        A forward that records gradients is a part of a step, and is only noted. A submodule that is called by itself, such as
        the encoder in a generation, is such a forward too. Returns a function that ends it.
        """
        collectives = self._collectives

        # functions and not methods: a copy of the model shares them, and this object cannot be copied
        def begin(part: nn.Module, args: Any) -> None:
            if collectives.in_forward():
                return
            if not torch.is_grad_enabled() and not collectives.depth:
                self.exchange(_FORWARD)
            else:
                self.compare(_FORWARD)
            here = sys._getframe()
            assert here.f_back is not None
            collectives.enter_forward(
                part, here.f_back, (_FORWARD, find_call(here)[1])
            )  # torch calls it where it runs the forward

        def end(part: nn.Module, args: Any, output: Any) -> None:
            collectives.leave_forward(part)

        if self._world.size == 1:
            return lambda: None
        handles = [part.register_forward_pre_hook(begin) for part in module.modules()]
        handles += [part.register_forward_hook(end, always_call=True) for part in module.modules()]

        def close() -> None:
            for handle in handles:
                handle.remove()

        return close

    def _check_others(self) -> None:
        """Check that no other process waits for this one.

        One does if it is in a collective; or if it has begun more collectives at two checks in a row, as a rank does that
        waits for its device.
        """
        channel, collectives = self._world.channel, self._collectives
        assert channel is not None
        before, self._ahead = self._ahead, {}
        records = channel.ask() or [None]
        for other, its in enumerate(records):
            if its is None or its["checks"] != collectives.checks or its["begun"] <= collectives.begun:
                continue
            self._ahead[other] = its["begun"]
            if its["where"] is None and before.get(other) != its["begun"]:
                continue
            if records[0] is not None and not self._world.is_main:
                self.alone.raise_unknown(records[0]["failed"])
            rank, (mine, where) = self._world.rank, self._mine
            passed = f"rank {other} has continued without it"
            if its["where"] is not None:
                verb, place = its["where"]
                passed = f"rank {other} waits for rank {rank} in {_NAMES.get(verb, verb)} ({place})"
            raise CollectiveError(
                f"rank {rank} waits for all processes in {mine} ({where}), but {passed}. {_advice(mine, both=True)}"
            )

    def _look_for_others(self) -> None:
        """Check that no other process waits for this one, which they have met already."""
        try:
            self._check_others()
        except CollectiveError:
            raise _OthersAreElsewhereError from None

    def _wait_for_failed_run(self) -> None:
        """After a run that has failed on all ranks, and whose error the scripts have caught: wait until all have left it."""
        channel = self._world.channel
        if channel is not None and not channel.runs.open:
            channel.wait(
                lambda: getattr(channel.failure, "run", None) is None or channel.closed or bool(channel.exited), _CLEARED
            )

    def _refuse(self, error: ProcessFailedError) -> NoReturn:
        """Raise an error that names the verb and its place, instead of one about a missing process."""
        named = self._add_call_site(error)
        raise named from (None if isinstance(named, CollectiveError) else error)

    def _add_call_site(self, error: ProcessFailedError) -> Exception:
        """The error with the verb and its place. If the script of another process has just ended, that is not a failure."""
        channel, (verb, place) = self._world.channel, self._mine
        cause = None if channel is None else channel.cause
        if cause is None:
            return error
        if cause.kind != "left":
            known = cause.collective_error  # The error of another rank that waits for the same collective.
            return known or ProcessFailedError(f"{verb} ({place}) needs all {self._world.size} processes, but {cause}.")
        return CollectiveError(
            f"rank {self._world.rank} waits for all processes in {verb} ({place}), but the script of rank {cause.rank} has "
            f"ended. {_advice(verb)}"
        )

    def _check_same(self, calls: Sequence[Any]) -> None:
        """Compare the calls of all processes; raises the same error on all if they differ."""
        verbs = [verb for verb, *_ in calls]
        if len(set(verbs)) > 1:
            shown = "; ".join(f"rank {rank}: {verb} ({place})" for rank, (verb, place, *_) in enumerate(calls))
            of_trainer = next((verb for verb in verbs if verb.startswith(_TRAINERS)), None)
            advice = f"All processes must call each: do not call any {_ALONE}." if of_trainer is None else _advice(of_trainer)
            raise CollectiveError(f"the processes have made different calls: {shown}. {advice}")
        begun = [count for _, _, count, _ in calls]
        if len(set(begun)) > 1:
            shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(begun))
            advice = f"All processes must call them: do not call any {_ALONE}. TRAINKIT_DEBUG_MODE=1 finds the place."
            if verbs[0].startswith(_TRAINERS):
                advice = "Every rank must call them the same number of times, in the same order."
            raise CollectiveError(
                f"before {verbs[0]} ({self._mine[1]}) the processes took part in different numbers of collectives ({shown}): "
                "one has called backward, step or another collective more often, and the values exchanged since then are mixed "
                f"up. {advice}"
            )
        places = [place for _, place, *_ in calls]
        if self.debug and len(set(places)) > 1:
            shown = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise CollectiveError(
                f"{verbs[0]} was called in different places ({shown}): the processes took different branches. {_debug_note()}"
            )


class _OthersAreElsewhereError(Exception):
    """The other processes do not come to a verb again in which they have raised a failure."""


class Values(NamedTuple):
    """What a process has when the main process saves without the others.

    Attributes:
        updates: Number of optimizer steps.
        checksum: Of its parameters and optimizer state.
        compare: Raises an error that names what differs; a collective in the group that it is given.
    """

    updates: int
    checksum: int
    compare: Callable[[ThreadExchange], NoReturn]


def differ(noted: Sequence[list[int] | None]) -> bool:
    """Whether all processes have noted their `Values` in the same step, and these are not the same."""
    known = [one for one in noted if one is not None]
    return len(known) == len(noted) and len({updates for updates, _ in known}) == 1 < len({value for _, value in known})


class WriteFailure(NamedTuple):
    """A failure of what the main process has written without the others.

    Attributes:
        error: What it was.
        raised: The main process has raised the error.
        report: What the others receive, as JSON: the number of the failure, the number of optimizer steps before it, and the
            class and the text of the error.
    """

    error: Exception
    raised: bool
    report: list[Any]


class FailuresOfMain:
    """Failures of what the main process writes without the others. It passes each to them with its next verb.

    Each process raises each failure once: the main process where it writes, and the others in their next verb. If a script
    catches it on all processes, the main process comes to a later call than the one in which the others raise it, and waits
    there for them. If that is a collective, they see in its record why it has continued without them.

    Args:
        collectives: The record of this process.

    Attributes:
        updates: Number of optimizer steps at the last save.
        writers: What writes in other threads. Their `note_failures` is called before each verb, and calls `note`.
        values: What this process had at the last save since the last verb. If all have called it, the next verb compares.
        known: On other processes, what `is_news` needs: the number of the last failure that it has received, and `updates` of
            the saves that have failed on this process too.
    """

    def __init__(self, collectives: CollectiveTracker) -> None:
        self.updates = 0
        self.values: Values | None = None
        self.writers: WeakSet[Any] = WeakSet()
        self.known: tuple[int, list[int]] = (0, [])
        self._collectives = collectives
        self._failures = 0
        self._noted: deque[WriteFailure] = deque()

    def note(self, error: Exception, raised: bool = False) -> None:
        """Note a failure, on the main process; `raised`: it has raised the error, and the others have not."""
        self._failures += 1
        report = [self._failures, self.updates, type(error).__name__, str(error) or type(error).__name__]
        self._noted.append(WriteFailure(error, raised, report))
        self._record()

    def note_own(self) -> None:
        """On another process, note that the save has failed here too, and that this has been raised."""
        self.known[1].append(self.updates)

    def all(self) -> list[list[Any]]:
        """The reports that the others receive, of the failures that they may not know; JSON."""
        for writer in list(self.writers):
            writer.note_failures()
        return [failure.report for failure in self._noted]

    def raise_here(self) -> None:
        """Raise the first failure that this process has not raised."""
        for place, failure in enumerate(self._noted):
            if not failure.raised:
                self._noted[place] = failure._replace(raised=True)
                self._record()
                raise failure.error

    def raise_news(self, failures: Sequence[list[Any]], known: Sequence[Any]) -> bool:
        """All processes have received the failures of the main process: raise the first that not all of the others know.

        Args:
            failures: What `all` has returned there.
            known: `known` of the other processes.

        Returns:
            Whether another process raises one, and this one has done that before.
        """
        if not failures:
            return False
        news = next((report for report in failures if any(is_news(report, one) for one in known)), None)
        last, *_ = failures[-1] if news is None else news
        if not self._noted:
            self.raise_unknown(failures if news is None else [news])
        while self._noted and self._noted[0].report[0] <= last:
            failure = self._noted.popleft()
            self._record()
            if not failure.raised:
                raise failure.error
        return news is not None

    def raise_unknown(self, failures: Sequence[list[Any]]) -> None:
        """On another process, raise the first failure of the main process that it has not raised."""
        for report in failures:
            number, updates, name, text = report
            last, own = self.known
            if number <= last:
                continue
            news = is_news(report, self.known)
            self.known = number, own if news else [other for other in own if other != updates]
            if news:
                raise error_of_rank("rank 0", name, text, CheckpointWriteError)

    def _record(self) -> None:
        """Let processes that wait find the failures that this one has raised."""
        self._collectives.failed = [failure.report for failure in self._noted if failure.raised]


def is_news(report: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether a process raises a failure that it receives, given its `FailuresOfMain.known`."""
    (number, updates, *_), (last, own) = report, known
    return number > last and updates not in own


def _advice(verb: str, *, both: bool = False) -> str:
    """What to do about a verb that not all processes call; `both`: also about what the others have called."""
    if verb == _ENDING:
        return (
            "Return -1 on every rank or on none: decide by batch_idx, or by a value that is the same on all ranks "
            "(self.all_gather)."
        )
    if verb.startswith(_TRAINERS):
        return f"Every rank must call {verb}: do not call it inside 'if trainer.is_global_zero:' or a similar condition."
    which = "both: do not call either" if both else "it: do not call it"
    return f"All processes must call {which} {_ALONE}."


def _definition_of(hook: Callable[..., Any]) -> str:
    """Where a hook is defined, which may be wrapped in calls that give it more arguments."""
    function: Any = hook
    while (inner := getattr(function, "func", None) or getattr(function, "__wrapped__", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    return "an unknown line" if code is None else f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def describe(tensors: Iterable[Tensor]) -> str:
    """Tensors in a few words: their number, size and dtypes, and a checksum of their shapes."""
    listed = list(tensors)
    if len(listed) == 1:
        return f"{_dtype(listed[0])}{list(listed[0].shape)}"
    dtypes = ", ".join(sorted({_dtype(tensor) for tensor in listed}))
    forms = zlib.crc32(repr([(_dtype(tensor), *tensor.shape) for tensor in listed]).encode())
    return f"{len(listed)} tensors of {sum(tensor.numel() for tensor in listed)} elements ({dtypes}; shapes {forms:08x})"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _debug_note() -> str:
    return "This is checked because TRAINKIT_DEBUG_MODE is set."
