"""Which loaders a run uses, and how a list of loaders is distinguished from a list of batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data.samples import Drawing, DrawingStream
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainkit import CombinedLoader
from trainkit.data.combined import batch_size_of, evaluation_sources, training_source
from trainkit.errors import DataError

A, B = DataLoader(Drawing(8), batch_size=2), DataLoader(Drawing(8), batch_size=3)


ZEROS = torch.zeros(2)


class Own:
    """A user's own loader."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Graph:
    """A batch that can be iterated and moved."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def to(self, device: Any) -> Graph:
        return self


# ----------------------------------------------------------------------------------------------------- training_source


@pytest.mark.parametrize("source", [A, CombinedLoader([A, B]), Own()], ids=lambda s: type(s).__name__)
def test_a_training_loader_is_used_as_it_is(source: Any) -> None:
    assert training_source(source) is source


@pytest.mark.parametrize("source", [{"a": A, "b": B}, [A, B], (A, B), [A, Own()], [Own(), iter(())], {"a": [torch.zeros(1)]}])
def test_several_training_loaders_are_combined(source: Any) -> None:
    combined = training_source(source)
    assert isinstance(combined, CombinedLoader)
    assert combined.mode == "max_size_cycle"
    assert combined.iterables is source


BATCHES = [
    torch.zeros(2),
    np.zeros(2),
    [torch.zeros(2)],
    (torch.zeros(2), torch.zeros(2)),
    {"x": torch.zeros(2)},
    UserDict(x=torch.zeros(2)),
    pack_sequence([torch.zeros(2)]),
    "text",
    b"bytes",
    3,
    Graph(),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_list_of_batches_is_one_loader(batch: Any) -> None:
    batches = [batch, batch]
    assert training_source(batches) is batches
    assert evaluation_sources(batches)[0] is batches
    assert len(evaluation_sources(batches)) == 1


def test_an_empty_list_is_a_loader_without_batches() -> None:
    assert training_source([]) == []


@pytest.mark.parametrize("source", [5, None, object()], ids=lambda s: type(s).__name__)
def test_what_is_no_training_loader_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match=rf"not {type(source).__name__}. .*DataLoader\(dataset"):
        training_source(source)


# -------------------------------------------------------------------------------------------------- evaluation_sources


@pytest.mark.parametrize(
    "source, loaders",
    [
        (None, []),
        ([], []),
        (A, [A]),
        ([A, B], [A, B]),
        ((A, B), [A, B]),
        ({"a": A, "b": B}, [A, B]),
        (CombinedLoader([A, B], "sequential"), [A, B]),
        ([A, CombinedLoader([B], "min_size")], None),
        ([[A, B], [A]], [A, B, A]),
        ([{"a": A, "b": [B]}, A], [A, B, A]),
        ({"a": [A, B], "b": A}, [A, B, A]),
        ([[0, 1], [2.0, "3"]], [[0, 1], [2.0, "3"]]),
        ([{"a": [0, 1]}, [2]], [[0, 1], [2]]),
        ({"a": ZEROS, "b": [ZEROS]}, [ZEROS, [ZEROS]]),
        ([0, 1], [[0, 1]]),
        ([[0, 1], [ZEROS]], [[[0, 1], [ZEROS]]]),
        ([(A, ZEROS)], [[(A, ZEROS)]]),
    ],
)
def test_an_evaluation_has_one_loader_or_several(source: Any, loaders: Any) -> None:
    assert evaluation_sources(source) == (list(source) if loaders is None else loaders)


def test_an_iterable_is_one_loader() -> None:
    own = Own()
    assert evaluation_sources(own) == [own]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_loaders_that_an_evaluation_reads_together(mode: str) -> None:
    combined = CombinedLoader([A, B], mode)
    assert evaluation_sources(combined) == [combined]


def test_training_loaders_in_nested_collections() -> None:
    source = training_source([A, {"x": B}])
    assert (source.flattened, source.mode) == ([A, B], "max_size_cycle")


# ------------------------------------------------------------------------------------------------------- batch_size_of


@pytest.mark.parametrize(
    "source, size",
    [
        (A, 2),
        (DataLoader(DrawingStream(8), batch_size=5), 5),
        (DataLoader(Drawing(8), batch_size=None), None),
        (DataLoader(Drawing(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 4, False)), 4),
        (DataLoader(Drawing(8), batch_sampler=[[0], [1]]), None),
        (CombinedLoader([A, B]), 5),
        (CombinedLoader({"a": A, "b": B}, "min_size"), 5),
        (CombinedLoader([A, [torch.zeros(1)]]), None),
        (CombinedLoader([A, B], "sequential"), None),
        (CombinedLoader([A, A], "sequential"), 2),
        (Own(batch_size=7), 7),
        (Own(batch_sampler=Own(batch_size=9)), 9),
        (Own(batch_size="many"), None),
        ([torch.zeros(3)], None),
    ],
)
def test_the_samples_of_a_micro_batch(source: Any, size: int | None) -> None:
    assert batch_size_of(source) == size


class Lazy(list):
    """A list-like that loads its items when they are needed, which is long after it was passed."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read too early")


def test_a_list_like_is_not_read() -> None:
    lazy = Lazy([A, B])
    assert evaluation_sources(lazy) == [lazy]
    assert training_source(lazy) is lazy
    assert evaluation_sources({"a": A, "b": lazy}) == [A, lazy]
