"""Where the processes of own loops meet: each verb that all of them call comes through here, and must be the same for all."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.distributed import Team, World
from trainkit.errors import CollectiveError, ProcessFailedError
from trainkit.launch.waits import called

__all__ = ["Meeting", "described"]

_SUBJECT = "own loop"
_ALONE = "within 'if accelerator.is_main_process:' or the like"
_FORWARD = "the forward of a model whose parameters are divided"
_NAMES = {"forward": "the forward of a model", "__iter__": "reading a loader", "__next__": "reading a loader"}


class Meeting:
    """The verbs of own loops that all processes call, in one order: what they have called is compared first.

    It goes over the connection beside the collectives, so that a wait may be as long as it likes, and a process that waits for
    one that will never come finds that out: it asks the others now and then what they are doing.

    Args:
        world: the processes.

    Attributes:
        debug: also the places of the calls must be the same, and what :meth:`compare` is told.
    """

    def __init__(self, world: World) -> None:
        self._world, self._waits = world, world.waits
        self._team: Team | None = None
        self._mine = ("", "")
        self.debug = False

    @classmethod
    def of(cls, world: World) -> Meeting:
        """That of these processes; there is one."""
        if world.meeting is None:
            world.meeting = cls(world)
        found: Meeting = world.meeting
        return found

    def wait(self, verb: str) -> None:
        """Wait until all processes have called a verb.

        Raises:
            CollectiveError: another one has called another, cannot come because it waits for this one, or has ended.
            ProcessFailedError: another one has failed.
        """
        self.exchange(verb)

    def exchange(self, verb: str, value: Any = None) -> list[Any]:
        """What each process gives with a verb, in the order of their ranks.

        Args:
            verb: what the user has called.
            value: JSON.

        Raises:
            CollectiveError: as of :meth:`wait`.
            ProcessFailedError: as of :meth:`wait`.
        """
        if self._world.size == 1:
            return [value]
        if self._team is None:
            self._team = self._world.team(_SUBJECT)
        _, place = called(sys._getframe())
        self._mine = verb, place
        looking = None if self._world.channel is None else self._look
        try:
            said = self._team.exchange([verb, place, self._waits.begun, value], looking)
        except ProcessFailedError as error:
            raise self._without(error) from error
        finally:
            self._waits.turn = self._team.turn
        self._agree(said)
        return [its for *_, its in said]

    def compare(self, verb: str, what: str | None = None) -> None:
        """In debug mode: that all processes have come to a collective in the same place, with the same.

        Args:
            verb: what the user has called.
            what: the tensors that go into it, described; ``None``: this process has none.

        Raises:
            CollectiveError: they have not.
            ProcessFailedError: as of :meth:`wait`.
        """
        self._waits.in_forward()  # one that Ctrl-C has ended is none
        if not self.debug or self._waits.depth:  # a part of a collective is compared with the whole
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
        waits = self._waits

        # functions of their own, which a copy of the model shares: what they hold cannot be copied
        def begin(part: nn.Module, args: Any) -> None:
            if waits.in_forward():
                return
            if not torch.is_grad_enabled() and not waits.depth:
                self.exchange(_FORWARD)
            else:
                self.compare(_FORWARD)
            here = sys._getframe()
            assert here.f_back is not None
            waits.enter_forward(part, here.f_back, (_FORWARD, called(here)[1]))  # torch calls it where it runs the forward

        def end(part: nn.Module, args: Any, output: Any) -> None:
            waits.leave_forward(part)

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
            CollectiveError: one waits in a collective for this process, which is to come to something else first.
        """
        channel, waits = self._world.channel, self._waits
        assert channel is not None
        for other, its in enumerate(channel.ask() or ()):
            if its is None or its["where"] is None or its["turn"] != waits.turn or its["begun"] <= waits.begun:
                continue
            verb, place = its["where"]
            mine, where = self._mine
            raise CollectiveError(
                f"rank {self._world.rank} waits for all processes in {mine} ({where}), and rank {other} waits for rank "
                f"{self._world.rank} in {_NAMES.get(verb, verb)} ({place}). Both are for all processes: call neither {_ALONE}."
            )

    def _without(self, error: ProcessFailedError) -> Exception:
        """What to raise instead of an error because a process is missing: one that has just ended has done nothing wrong."""
        channel, (verb, place) = self._world.channel, self._mine
        cause = None if channel is None else channel.cause
        if cause is None:
            return error
        if cause.kind != "left":
            return ProcessFailedError(f"{verb} ({place}) needs all {self._world.size} processes, but {cause}.")
        return CollectiveError(
            f"rank {self._world.rank} waits for all processes in {verb} ({place}), and the script of rank {cause.rank} has "
            f"ended. It is for all processes: do not call it {_ALONE}."
        )

    def _agree(self, said: Sequence[Any]) -> None:
        """Raise what is wrong with what all have said; the same on all of them."""
        verbs = [verb for verb, *_ in said]
        if len(set(verbs)) > 1:
            shown = "; ".join(f"rank {rank}: {verb} ({place})" for rank, (verb, place, *_) in enumerate(said))
            raise CollectiveError(
                f"the processes have come to different verbs: {shown}. Each is for all processes: call none {_ALONE}."
            )
        begun = [count for _, _, count, _ in said]
        if len(set(begun)) > 1:
            shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(begun))
            raise CollectiveError(
                f"before {verbs[0]} ({self._mine[1]}) the processes have not taken part in as many collectives ({shown}): one "
                "has called backward, step or the like more often, and what was exchanged since then is mixed up. They are for "
                f"all processes: call none {_ALONE}. TRAINKIT_DEBUG_MODE=1 finds the place."
            )
        places = [place for _, place, *_ in said]
        if self.debug and len(set(places)) > 1:
            shown = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise CollectiveError(
                f"{verbs[0]} was called in different places ({shown}): the processes have gone different ways. {_debugged()}"
            )


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
