"""Where processes meet: each verb that users call on every rank comes through here, and must be the same on all of them.

These are the verbs of own loops and those of the `Trainer`: `fit`, `validate`, `test`, `predict`,
`save_checkpoint`, `all_gather`, `strategy.barrier`, and the end of an epoch by -1 from `on_train_batch_start`. What a
`Trainer` exchanges by itself is only counted (`CollectiveTracker`): the ranks that have called a verb find
out that another one has continued without it, before a collective of theirs can meet a different one there.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainkit.distributed.collective_tracker import find_call
from trainkit.distributed.world import ThreadExchange, World
from trainkit.errors import CollectiveError, ProcessFailedError

__all__ = ["CollectiveChecks", "described"]

_SUBJECT = "verbs"
_CLEARED = 60.0  # seconds that the other ranks have to leave a run that has failed
_ALONE = "within 'if accelerator.is_main_process:' or the like"
_TRAINERS = ("trainer.", "all_gather", "strategy.barrier")  # how the verbs begin that are called in a run of a Trainer
_ENDING = "the end of the epoch that on_train_batch_start asked for by returning -1"
_FORWARD = "the forward of a model whose parameters are divided"
_NAMES = {
    "forward": "the forward of a model",
    "__iter__": "reading a loader",
    "__next__": "reading a loader",
    **{verb: f"trainer.{verb}" for verb in ("fit", "validate", "test", "predict", "save_checkpoint")},
}


class CollectiveChecks:
    """The verbs of your own training loop that all processes call in one order: their calls are compared first.

    The comparison uses the connection between the processes and no collective, so a wait may take any time. A process that
    waits for one that will never come finds out: it regularly asks the others what they are doing.

    Args:
        world: the processes.

    Attributes:
        debug: also the places of the calls must be the same, and the tensors of `compare`.
    """

    def __init__(self, world: World) -> None:
        self._world, self._collectives = world, world.collectives
        self._team: ThreadExchange | None = None
        self._mine = ("", "")
        self._ahead: dict[int, int] = {}  # collectives of ranks that have begun more than this one, at the last look
        self.debug = False

    @classmethod
    def of(cls, world: World) -> CollectiveChecks:
        """That of these processes; there is one."""
        if world.collective_checks is None:
            world.collective_checks = cls(world)
        found: CollectiveChecks = world.collective_checks
        return found

    def wait(self, verb: str) -> None:
        """Wait until all processes have called a verb.

        Raises:
            CollectiveError: another one has called another, cannot come because it waits for this one, or has ended.
            ProcessFailedError: another one has failed.
        """
        self.exchange(verb)

    def enter_run(self, stage: str, enter: Callable[[], None]) -> None:
        """Enter a run of a `Trainer`.

        Args:
            stage: the verb: "fit", say.
            enter: does it; raises a `ProcessFailedError` if another rank has exited.

        Raises:
            CollectiveError: the script of another rank has ended.
            ProcessFailedError: another one has failed.
        """
        self._mine = f"trainer.{stage}", find_call(sys._getframe())[1]
        try:
            enter()
        except ProcessFailedError as error:
            self._refuse(error)

    def begin_run(self, stage: str) -> None:
        """Wait until all ranks begin the same run of a `Trainer`.

        No rank is in a collective here, so all count from the same number on: an earlier run that failed may have left them
        with different ones.

        Raises:
            CollectiveError: as of `wait`.
            ProcessFailedError: as of `wait`.
        """
        if self._world.size > 1:
            said = self._said(f"trainer.{stage}", None)
            self._agree([[verb, place, 0, None] for verb, place, *_ in said])
            self._collectives.begun = max(begun for _, _, begun, _ in said)

    def end_epoch(self, hook: Callable[..., Any]) -> None:
        """Wait until all ranks end the training epoch because `on_train_batch_start` has returned -1.

        Args:
            hook: the one that has returned it here.

        Raises:
            CollectiveError: as of `wait`: not all of them do.
            ProcessFailedError: as of `wait`.
        """
        if self._world.size > 1:
            self._agree(self._said(_ENDING, None, _defined(hook)))

    def exchange(self, verb: str, value: Any = None) -> list[Any]:
        """What each process gives with a verb, in the order of their ranks.

        Args:
            verb: what the user has called.
            value: JSON.

        Raises:
            CollectiveError: as of `wait`.
            ProcessFailedError: as of `wait`.
        """
        if self._world.size == 1:
            return [value]
        said = self._said(verb, value)
        self._agree(said)
        return [its for *_, its in said]

    def _said(self, verb: str, value: Any, place: str | None = None) -> list[Any]:
        """The verb, its place, the number of collectives and the value of each process."""
        if self._team is None:
            self._team = self._world.thread_exchange(_SUBJECT)
        self._mine = verb, place or find_call(sys._getframe())[1]
        self._ahead = {}
        self._get_over()
        while_waiting = None if self._world.channel is None else self._look
        try:
            return self._team.exchange([*self._mine, self._collectives.begun, value], while_waiting)
        except ProcessFailedError as error:
            self._refuse(error)
        finally:
            self._collectives.checks = self._team.completed

    def compare(self, verb: str, what: str | None = None) -> None:
        """In debug mode: that all processes have come to a collective in the same place, with the same.

        Args:
            verb: what the user has called.
            what: the tensors that go into it, described; `None`: this process has none.

        Raises:
            CollectiveError: they have not.
            ProcessFailedError: as of `wait`.
        """
        self._collectives.in_forward()  # one that Ctrl-C has ended is none
        if not self.debug or self._collectives.depth:  # a part of a collective is compared with the whole
            return
        said = self.exchange(verb, what)
        if len({text for text in said if text is not None}) > 1:
            shown = "; ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in enumerate(said))
            raise CollectiveError(f"{verb} ({self._mine[1]}) was called with different tensors: {shown}. {_debugged()}")

    def watch(self, module: nn.Module) -> Callable[[], None]:
        """Let all processes meet before a forward of a model whose parameters are divided, and which gathers them from all.

        Where gradients are recorded the forward is a part of a step, and only noted. A part of the model that is called by
        itself, as the encoder is for a generation, is such a forward too.

        Returns:
            Ends it.
        """
        collectives = self._collectives

        # functions of their own, which a copy of the model shares: what they hold cannot be copied
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

    def _look(self) -> None:
        """Whether the others can come at all.

        Raises:
            CollectiveError: one waits in a collective for this process, which is to come to something else first; or it has
                begun one and stays where it is, as a rank does that waits for its device.
        """
        channel, collectives = self._world.channel, self._collectives
        assert channel is not None
        before, self._ahead = self._ahead, {}
        for other, its in enumerate(channel.ask() or ()):
            if its is None or its["checks"] != collectives.checks or its["begun"] <= collectives.begun:
                continue
            self._ahead[other] = its["begun"]
            if its["where"] is None and before.get(other) != its["begun"]:
                continue
            rank, (mine, where) = self._world.rank, self._mine
            passed = f"rank {other} has continued without it"
            if its["where"] is not None:
                verb, place = its["where"]
                passed = f"rank {other} waits for rank {rank} in {_NAMES.get(verb, verb)} ({place})"
            raise CollectiveError(
                f"rank {rank} waits for all processes in {mine} ({where}), and {passed}. {_advice(mine, both=True)}"
            )

    def _get_over(self) -> None:
        """After a run that has failed on all ranks, and that they got over: wait until all are out of it."""
        channel = self._world.channel
        if channel is not None and not channel.runs.open:
            channel.wait(
                lambda: getattr(channel.failure, "run", None) is None or channel.closed or bool(channel.exited), _CLEARED
            )

    def _refuse(self, error: ProcessFailedError) -> NoReturn:
        """Raise, instead of an error because a process is missing, one that names the verb and its place."""
        found = self._without(error)
        raise found from (None if isinstance(found, CollectiveError) else error)

    def _without(self, error: ProcessFailedError) -> Exception:
        """That one: a process that has just ended has done nothing wrong."""
        channel, (verb, place) = self._world.channel, self._mine
        cause = None if channel is None else channel.cause
        if cause is None:
            return error
        if cause.kind != "left":
            known = cause.collective_error  # of another rank that waits for the same
            return known or ProcessFailedError(f"{verb} ({place}) needs all {self._world.size} processes, but {cause}.")
        return CollectiveError(
            f"rank {self._world.rank} waits for all processes in {verb} ({place}), and the script of rank {cause.rank} has "
            f"ended. {_advice(verb)}"
        )

    def _agree(self, said: Sequence[Any]) -> None:
        """Raise what is wrong with what all have said; the same on all of them."""
        verbs = [verb for verb, *_ in said]
        if len(set(verbs)) > 1:
            shown = "; ".join(f"rank {rank}: {verb} ({place})" for rank, (verb, place, *_) in enumerate(said))
            of_trainer = next((verb for verb in verbs if verb.startswith(_TRAINERS)), None)
            advice = f"Each is for all processes: call none {_ALONE}." if of_trainer is None else _advice(of_trainer)
            raise CollectiveError(f"the processes have come to different verbs: {shown}. {advice}")
        begun = [count for _, _, count, _ in said]
        if len(set(begun)) > 1:
            shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(begun))
            advice = f"They are for all processes: call none {_ALONE}. TRAINKIT_DEBUG_MODE=1 finds the place."
            if verbs[0].startswith(_TRAINERS):
                advice = "Every rank must call them as often, in the same order."
            raise CollectiveError(
                f"before {verbs[0]} ({self._mine[1]}) the processes have not taken part in as many collectives ({shown}): one "
                f"has called backward, step or the like more often, and what was exchanged since then is mixed up. {advice}"
            )
        places = [place for _, place, *_ in said]
        if self.debug and len(set(places)) > 1:
            shown = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise CollectiveError(
                f"{verbs[0]} was called in different places ({shown}): the processes have gone different ways. {_debugged()}"
            )


def _advice(verb: str, *, both: bool = False) -> str:
    """What to do about a verb that not all processes call; `both`: about what the others have called, too."""
    if verb == _ENDING:
        return (
            "Return -1 on every rank or on none: decide by batch_idx, or by a value that is the same on all ranks "
            "(self.all_gather)."
        )
    if verb.startswith(_TRAINERS):
        return f"Every rank must call {verb}: do not call it inside 'if trainer.is_global_zero:' or the like."
    return (
        f"Both are for all processes: call neither {_ALONE}." if both else f"It is for all processes: do not call it {_ALONE}."
    )


def _defined(hook: Callable[..., Any]) -> str:
    """Where a hook is defined, which may be wrapped in calls that give it more arguments."""
    found: Any = hook
    while (inner := getattr(found, "func", None) or getattr(found, "__wrapped__", None)) is not None:
        found = inner
    code = getattr(found, "__code__", None)
    return "an unknown line" if code is None else f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def described(tensors: Iterable[Tensor]) -> str:
    """Tensors in a few words: how many, of which dtypes, how large, and a number that other shapes do not have."""
    listed = list(tensors)
    if len(listed) == 1:
        return f"{_dtype(listed[0])}{list(listed[0].shape)}"
    dtypes = ", ".join(sorted({_dtype(tensor) for tensor in listed}))
    forms = zlib.crc32(repr([(_dtype(tensor), *tensor.shape) for tensor in listed]).encode())
    return f"{len(listed)} tensors of {sum(tensor.numel() for tensor in listed)} elements ({dtypes}; shapes {forms:08x})"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _debugged() -> str:
    return "This is checked because TRAINKIT_DEBUG_MODE is set."
