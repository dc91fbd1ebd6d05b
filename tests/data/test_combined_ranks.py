"""`CombinedLoader` on several ranks: combined micro-batch m is the same as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.data.dealt import Alike
from helpers.data.samples import CPU, Drawing, DrawingStream, SizedDrawingStream, same
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from trainkit import CombinedLoader
from trainkit.data.combined import MODES
from trainkit.data.stream import CombinedStream
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.rng import Stage


def source(kind: str, length: int) -> Any:
    batches = [list(range(n, min(n + 2, length))) for n in range(0, length, 2)]
    makers: dict[str, Callable[[], Any]] = {
        "map": lambda: DataLoader(Drawing(length), batch_size=2, shuffle=True),
        "drawn": lambda: DataLoader(Drawing(length), batch_sampler=batches),
        "stream": lambda: DataLoader(DrawingStream(length), batch_size=2),
        "sized": lambda: DataLoader(SizedDrawingStream(length), batch_size=2),
        "list": lambda: [torch.full((2, 1), n) for n in range((length + 1) // 2)],
    }
    return makers[kind]()


def stream_of(kinds: list[str], lengths: list[int], mode: str, world: World) -> CombinedStream:
    loaders = [source(kind, length) for kind, length in zip(kinds, lengths, strict=False)]
    return CombinedStream(CombinedLoader(loaders, mode), 7, Stage.TRAIN, 0, CPU, False, world)


@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(["map", "drawn", "stream", "sized", "list"]), min_size=3, max_size=3),
    mode=st.sampled_from(MODES),
    epoch=st.integers(0, 2),
    size=st.integers(2, 5),
)
def test_an_epoch_is_sharded_from_any_start(lengths: list[int], kinds: list[str], mode: str, epoch: int, size: int) -> None:
    alone = stream_of(kinds, lengths, mode, World())
    whole = list(alone.batches(epoch, 0, None))
    for rank in range(size):
        stream = stream_of(kinds, lengths, mode, Alike(rank, size))
        for start in range(len(whole) + 2):
            assert same(list(stream.batches(epoch, start, None, rank, size)), whole[start + rank :: size])
        for limit in (0, 1, len(whole) - 1, len(whole) + 5):
            assert same(list(stream.batches(epoch, 0, limit, rank, size)), whole[rank : max(limit, 0) : size])
        assert same(list(stream.batches(epoch, 1, 3, rank, size)), whole[1:3][rank::size])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_others_is_fetched(mode: str) -> None:
    """A rank fetches only the samples of its own micro-batches, and three to compare each dataset with those of others."""
    for rank in range(3):
        parts = [DataLoader(Drawing(9), batch_size=2), DataLoader(Drawing(4), batch_size=2)]
        stream = CombinedStream(CombinedLoader(parts, mode), 7, Stage.TRAIN, 0, CPU, False, Alike(rank, 3))
        given = list(stream.batches(0, 0, None, rank, 3))
        pieces = [piece for batch in given for piece in ([batch] if mode == "sequential" else batch)]
        assert sum(len(part.dataset.calls) - 3 for part in parts) == sum(len(piece) for piece in pieces if piece is not None)


def test_a_stream_without_a_batch_cannot_be_cycled() -> None:
    stream = stream_of(["stream", "map"], [0, 4], "max_size_cycle", Alike(0, 2))
    with pytest.raises(DataError, match="yielded no batch. Remove it"):
        list(stream.batches(0, 0, None, 0, 2))


def test_it_splits_if_one_of_them_does() -> None:
    """A combination counts as split if one of its loaders yields different batches on each rank."""
    stream = stream_of(["stream", "map"], [4, 4], "min_size", Alike(0, 2))
    assert not stream.splits
    stream._streams[0].resume(True, 0, False)
    assert stream.splits
