"""Several ranks and one checkpoint: work that succeeds on all or on none, shared out by bytes, and gathers in one order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from trainkit.distributed.failure import error_of_rank
from trainkit.distributed.world import World
from trainkit.errors import CheckpointError, TrainkitError
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["SHARED_FOLDER_ADVICE", "GatherOrder", "Group", "assign_to_ranks", "run_on_all_ranks", "wait_for_path"]


SHARED_FOLDER_ADVICE = (
    "All processes of a run must see the same checkpoint folder. Fix: use a folder on a file system that all nodes share: "
    "ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
)
"""The fix for a rank that does not see what another rank has written."""

_VISIBLE_WITHIN_SECONDS = 5.0  # seconds until one node must see what another has written


class Group(Protocol):
    """Ranks that can exchange values: a `World` or a `ThreadExchange`."""

    rank: int
    size: int

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; JSON."""

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """The reply of the main process to the values of all ranks; JSON."""


def run_on_all_ranks(
    group: Group,
    work: Callable[[], Any],
    otherwise: type[CheckpointError] = CheckpointError,
    answer: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Call `work` on every rank of a group. Collective, one round: what every rank receives does not grow with their number.

    Args:
        group: The ranks.
        work: Returns JSON.
        otherwise: The class of the error to raise if the error is not one of trainkit's.
        answer: Called on the main process, with the results of all ranks, once all have succeeded; returns JSON.

    Returns:
        What `answer` returned or, without it, the result of the main process.

    Raises:
        TrainkitError: It failed on a rank. All ranks raise an error of the same class that names the rank, unless all failed
            with the same error. An interrupt is raised unchanged on the rank where it occurred.
    """
    if group.size == 1:
        return work() if answer is None else answer([work()])
    errors_here: list[BaseException] = []
    result = _try(work, errors_here)
    if answer is None and isinstance(group, World) and not any(group.largest([bool(errors_here)])):
        return group.from_main(result)  # two collectives that grow with log N, instead of a gather

    sent = result if answer is not None or group.rank == 0 else None
    report = [sent, _describe(errors_here[0]) if errors_here else None]
    value, failure = group.collect(report, lambda reports: _reply(reports, answer, errors_here))
    error = errors_here[0] if errors_here else None
    if error is not None and not isinstance(error, Exception):
        raise error
    if failure is None:
        return value
    first_failure = _FailureReply(*failure)
    if first_failure.everywhere and error is not None:
        raise error
    raise first_failure.error(otherwise) from error


def _reply(reports: list[Any], answer: Callable[[list[Any]], Any] | None, errors_here: list[BaseException]) -> list[Any]:
    """What the main process replies to the results and errors of all ranks: a value, and the failure if there is one."""
    failures = {rank: failure for rank, (_, failure) in enumerate(reports) if failure is not None}
    if failures:
        rank, first = next(iter(failures.items()))
        everywhere = len(failures) == len(reports) and all(failure == first for failure in failures.values())
        return [None, _FailureReply(rank, len(failures), everywhere, *first)]
    if answer is None:
        return [reports[0][0], None]
    answered = _try(lambda: answer([value for value, _ in reports]), errors_here)
    return [answered, _FailureReply(0, 1, False, *_describe(errors_here[0])) if errors_here else None]


class _FailureReply(NamedTuple):
    """What the main process replies if a rank has failed; JSON.

    Attributes:
        rank: The first rank that failed.
        failed: Number of ranks that failed.
        everywhere: All failed, with the same error.
        name: The class of its error.
        text: Its message.
    """

    rank: int
    failed: int
    everywhere: bool
    name: str
    text: str

    def error(self, otherwise: type[CheckpointError]) -> TrainkitError:
        """The error to raise; of class `otherwise` if it is not one of trainkit's."""
        where = f"rank {self.rank}" + (f" (and {self.failed - 1} more)" if self.failed > 1 else "")
        return error_of_rank(where, self.name, self.text, otherwise)


def _try(work: Callable[[], Any], errors_here: list[BaseException]) -> Any:
    """The result of `work`; `None` if it has raised an error, which is appended."""
    try:
        return work()
    except BaseException as error:
        errors_here.append(error)
        return None


def _describe(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error) or type(error).__name__]


def wait_for_path(path: Path) -> bool:
    """Whether `path`, created by another process, is visible within a few seconds, which NFS may need."""
    end = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while not os.path.lexists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh its cache
    return True


def assign_to_ranks(sizes: Mapping[str, int], loads: list[int], whole_up_to: int = 0) -> dict[int, list[str]]:
    """Assign each item to a rank, the largest first, always to the rank with the least bytes so far.

    Args:
        sizes: Name of the item → bytes.
        loads: Bytes that each rank has already; updated in place.
        whole_up_to: Items with no more bytes in total are all assigned to one rank.

    Returns:
        rank → names, in the order of `sizes`, for ranks with items. The assignment does not depend on the order of
        `sizes`, so that all ranks compute the same one.
    """
    if sum(sizes.values()) <= whole_up_to or len(loads) == 1:
        rank = loads.index(min(loads))
        loads[rank] += sum(sizes.values())
        return {rank: list(sizes)}
    owner: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += size
    ranks = sorted(set(owner.values()))
    return {rank: [name for name in sizes if owner[name] == rank] for rank in ranks}


class GatherOrder:
    """The gathers of one save, in an order that is the same on all ranks.

    Each rank writes its own tensors in its own order, and participates in the gathers for the other ranks in between. The
    ranks alternate, so that each waits as little as possible for the others.

    Args:
        rank: The rank of this process.
        owned: For each rank, the tensors that it writes, in the order in which it writes them.
    """

    def __init__(self, rank: int, owned: Sequence[Sequence[Tensor]]) -> None:
        self._rank = rank
        by_rank = [
            [(owner, tensor) for tensor in tensors if isinstance(tensor, ShardedTensor)] for owner, tensors in enumerate(owned)
        ]
        self._remaining = iter([entry for entry in chain(*zip_longest(*by_rank)) if entry is not None])

    def values_of(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank with its values. For a sharded one, the gathers that come before it are done first."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        for owner, current in self._remaining:
            values = current.collect(owner)
            if current is tensor and owner == self._rank:
                assert values is not None
                return values
        raise ValueError("a tensor was requested twice, or not in the order of `owned`")

    def finish(self) -> None:
        """Run the remaining gathers, even if this rank failed to write its files: the other ranks wait for it."""
        for owner, current in self._remaining:
            current.collect(owner)
