"""`CombinedLoader`: which batches an epoch has in each mode, and how an epoch starts at any micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.data.samples import CPU, Drawing, DrawingStream, SizedDrawingStream, draw, ids, same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit import CombinedLoader
from trainkit.data.combined import MODES
from trainkit.data.order import CYCLE
from trainkit.data.stream import CombinedStream, open_stream
from trainkit.errors import DataError, EmptyLoaderError, UnknownNameError
from trainkit.rng import Stage

SEED = 7


def shuffled(length: int, **options: Any) -> DataLoader:
    return DataLoader(Drawing(length), **{"batch_size": 2, "shuffle": True, **options})


def stream_of(loaders: Any, mode: str = "max_size_cycle", index: int = 0, sequential: bool = False) -> CombinedStream:
    return CombinedStream(CombinedLoader(loaders, mode), SEED, Stage.TRAIN, index, CPU, sequential)


def read(stream: CombinedStream, epoch: int = 0, start: int = 0, limit: int | None = None) -> list[Any]:
    return list(stream.batches(epoch, start, limit))


def alone(loader: Any, epoch: int = 0, number: int = 0, index: int = 0) -> list[Any]:
    """Batches of loader `number` of a combination, read without the other loaders."""
    return list(open_stream(loader, SEED, Stage.TRAIN.of_loader(index + (number << 20)), CPU).batches(epoch, 0, None))


# --------------------------------------------------------------------------------------------------- form of a batch


def test_a_batch_has_the_form_of_the_loaders() -> None:
    a, b = shuffled(4), shuffled(6)
    as_dict, as_list, as_tuple = (read(stream_of(form, "min_size")) for form in ({"x": a, "y": b}, [a, b], (a, b)))
    assert [list(batch) for batch in as_dict] == [["x", "y"]] * 2
    assert [type(batch) for batch in as_list] == [list] * 2
    assert [type(batch) for batch in as_tuple] == [tuple] * 2
    assert same([[batch["x"], batch["y"]] for batch in as_dict], as_list)
    assert same([list(batch) for batch in as_tuple], as_list)


def test_the_loaders_can_be_asked_for() -> None:
    a, b = shuffled(4), shuffled(6)
    nested = {"x": a, "y": [b, (a,)], "z": {"u": b}}
    combined = CombinedLoader(nested)
    assert combined.iterables is nested
    assert combined.flattened == [a, b, a, b]
    assert CombinedLoader((a, b)).flattened == [a, b]
    assert CombinedLoader([a]).mode == "min_size"
    combined.flattened = [b, a, b, a]
    assert combined.iterables == {"x": b, "y": [a, (b,)], "z": {"u": a}}
    with pytest.raises(DataError, match="as many loaders as before, 4, not 1"):
        combined.flattened = [a]


def test_a_batch_has_the_form_of_nested_collections() -> None:
    a, b, c = shuffled(4), shuffled(6), shuffled(4)
    flat = read(stream_of([a, b, c], "min_size"))
    nested = read(stream_of({"x": a, "y": [b, (c,)]}, "min_size"))
    assert [type(batch["y"][1]) for batch in nested] == [tuple] * 2
    assert same([[batch["x"], batch["y"][0], batch["y"][1][0]] for batch in nested], flat)
    assert CombinedLoader({"x": a, "y": [b, (c,)]}).count(nested[0]) == 6


@pytest.mark.parametrize("mode", MODES)
def test_reading_it_in_ones_own_code(mode: str) -> None:
    """Each item is a batch, its index and the index of its loader, as in Lightning."""
    expected: dict[str, list[Any]] = {
        "min_size": [({"a": 1, "b": 4}, 0, 0)],
        "max_size_cycle": [({"a": 1, "b": 4}, 0, 0), ({"a": 2, "b": 4}, 1, 0), ({"a": 3, "b": 4}, 2, 0)],
        "max_size": [({"a": 1, "b": 4}, 0, 0), ({"a": 2, "b": None}, 1, 0), ({"a": 3, "b": None}, 2, 0)],
        "sequential": [(1, 0, 0), (2, 1, 0), (3, 2, 0), (4, 0, 1)],
    }
    loader = CombinedLoader({"a": [1, 2, 3], "b": [4]}, mode)
    assert list(loader) == list(loader) == expected[mode]
    assert len(loader) == len(expected[mode])


def test_an_empty_loader_cannot_restart_in_ones_own_code() -> None:
    with pytest.raises(EmptyLoaderError, match="has no batch"):
        list(CombinedLoader([[1], []], "max_size_cycle"))


def test_a_loader_that_has_ended_yields_none() -> None:
    """With `max_size`, an epoch ends with the longest loader, and batches of the others are None, which have no samples."""
    a, b = shuffled(9), shuffled(4)
    stream = stream_of([b, a], "max_size")
    batches = read(stream, 3)
    assert (stream.length, stream.sizes) == (5, None)
    assert same([batch[1] for batch in batches], alone(a, 3, 1))
    assert [batch[0] is None for batch in batches] == [False, False, True, True, True]
    assert [CombinedLoader([b, a], "max_size").count(batch) for batch in batches] == [4, 4, 2, 2, 1]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_a_batch_counts_by_all_its_samples(mode: str) -> None:
    assert CombinedLoader([[1], [2]], mode).count([torch.zeros(3), torch.zeros(4, 2)]) == 7
    assert CombinedLoader({"x": [1], "y": [2]}, mode).count({"x": torch.zeros(3), "y": torch.zeros(4)}) == 7


def test_a_batch_of_one_of_them_counts_by_its_own() -> None:
    """In the mode sequential, a batch that is a list is the batch of one loader: it has 3 samples, not 6."""
    assert CombinedLoader([[1], [2]], "sequential").count([torch.zeros(3), torch.zeros(3)]) == 3


@pytest.mark.parametrize("mode", MODES)
def test_one_loader_without_a_collection(mode: str) -> None:
    a = shuffled(5)
    combined = CombinedLoader(a, mode)
    assert combined.iterables is a
    assert (combined.flattened, len(combined)) == ([a], 3)
    assert [index for _, index, _ in combined] == [0, 1, 2]
    stream = stream_of(a, mode)
    batches = read(stream, 1)
    assert same(batches, alone(a, 1))
    assert stream.length == 3
    assert [combined.count(batch) for batch in batches] == [2, 2, 1]
    combined.flattened = [b := shuffled(4)]
    assert combined.iterables is b


@pytest.mark.parametrize("loaders", [[], {}, (), None, 5, "text"], ids=lambda value: type(value).__name__)
def test_what_is_no_collection_of_loaders(loaders: Any) -> None:
    with pytest.raises(DataError, match=r"a loader, or a dict or list with at least one.*CombinedLoader\(\{"):
        CombinedLoader(loaders)


def test_a_combination_inside_is_refused() -> None:
    with pytest.raises(DataError, match=r"a CombinedLoader inside it is not supported.*CombinedLoader\(\[a, \[b, c\]\]\)"):
        CombinedLoader([shuffled(4), [CombinedLoader([shuffled(4)])]])


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'max_siz'; known: min_size, max_size_cycle, max_size, sequential"):
        CombinedLoader([[1]], "max_siz")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'sequential'\?"):
        CombinedLoader([[1]], "sequental")


# --------------------------------------------------------------------------------------------------------- the modes


def test_the_shortest_ends_an_epoch() -> None:
    """With `min_size`, an epoch ends with the shortest loader."""
    a, b = shuffled(9), shuffled(4)
    stream = stream_of([a, b], "min_size")
    batches = read(stream, 3)
    assert (stream.length, len(batches)) == (2, 2)
    assert same(batches, [list(pair) for pair in zip(alone(a, 3, 0)[:2], alone(b, 3, 1), strict=True)])


def test_the_longest_ends_an_epoch_and_others_start_again() -> None:
    a, b = shuffled(9), shuffled(4)
    stream = stream_of([b, a])
    batches = read(stream, 3)
    assert (stream.length, len(batches)) == (5, 5)
    assert same([batch[1] for batch in batches], alone(a, 3, 1))
    cycles = [alone(b, 3 + cycle * CYCLE, 0) for cycle in range(3)]
    assert same([batch[0] for batch in batches], [*cycles[0], *cycles[1], cycles[2][0]])
    assert ids(cycles[0]) != ids(cycles[1]), "reshuffled"


def test_one_comes_after_the_other() -> None:
    """With `sequential`, the loaders are read one after the other."""
    a, b = shuffled(5), shuffled(4)
    stream = stream_of([a, b], "sequential")
    assert (stream.length, stream.sizes) == (5, None)
    assert same(read(stream, 2), [*alone(a, 2, 0), *alone(b, 2, 1)])


def test_one_loader_alone_is_that_loader() -> None:
    for mode in MODES:
        batches = read(stream_of([shuffled(5)], mode), 1)
        assert same(batches if mode == "sequential" else [batch[0] for batch in batches], alone(shuffled(5), 1))


def test_loaders_of_a_combination_are_not_alike() -> None:
    """Two equal loaders in a combination have different orders and draw different random numbers."""
    batches = read(stream_of([shuffled(20), shuffled(20)]))
    assert ids([batch[0] for batch in batches]) != ids([batch[1] for batch in batches])
    assert not any(same(batch[0][:, 1:], batch[1][:, 1:]) for batch in batches)
    plain = [ids(alone(shuffled(20), index=index)) for index in range(4)]
    assert ids([batch[1] for batch in batches]) not in plain, "nor like a loader outside of the combination"


def test_the_loaders_of_two_combinations_are_not_alike() -> None:
    """Loaders of two combinations in one stage have different orders too."""
    orders = []
    for index in (0, 1):
        batches = read(stream_of([shuffled(20), shuffled(20)], index=index))
        orders += [ids([batch[part] for batch in batches]) for part in (0, 1)]
    assert all(orders.count(order) == 1 for order in orders)


@pytest.mark.parametrize("mode", MODES)
def test_shuffling_can_be_turned_off(mode: str) -> None:
    stream = stream_of([shuffled(4), shuffled(4)], mode, sequential=True)
    first = read(stream, 5)[0]
    assert ids([first] if mode == "sequential" else first)[0] == [0, 1]


# -------------------------------------------------------------------------------------------- any start and any limit


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(["map", "stream", "sized", "list"]), min_size=3, max_size=3),
    mode=st.sampled_from(MODES),
    epoch=st.integers(0, 2),
)
def test_an_epoch_can_be_started_anywhere(lengths: list[int], kinds: list[str], mode: str, epoch: int) -> None:
    stream = stream_of([source(kind, length) for kind, length in zip(kinds, lengths, strict=False)], mode)
    whole = read(stream, epoch)
    batches = [(length + 1) // 2 for length in lengths]
    expected = {"min_size": min(batches), "max_size_cycle": max(batches), "max_size": max(batches), "sequential": sum(batches)}[
        mode
    ]
    assert len(whole) == expected
    assert stream.length in (expected, None)
    for start in range(expected + 2):
        draw()
        assert same(read(stream, epoch, start), whole[start:])
    for limit in (0, 1, expected - 1, expected, expected + 5):
        assert same(read(stream, epoch, 0, limit), whole[:limit])
    assert same(read(stream, epoch, 1, 2), whole[1:2])


def source(kind: str, length: int) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "map": lambda: shuffled(length),
        "stream": lambda: DataLoader(DrawingStream(length), batch_size=2),
        "sized": lambda: DataLoader(SizedDrawingStream(length), batch_size=2),
        "list": lambda: [torch.full((2, 1), n) for n in range((length + 1) // 2)],
    }
    return makers[kind]()


@pytest.mark.parametrize(
    "mode, start, calls", [("min_size", 1, (2, 2)), ("max_size_cycle", 3, (3, 4)), ("sequential", 4, (1, 4))]
)
def test_what_is_skipped_is_not_fetched(mode: str, start: int, calls: tuple[int, int]) -> None:
    a, b = shuffled(9), shuffled(4)
    read(stream_of([a, b], mode), 0, start)
    assert (len(a.dataset.calls), len(b.dataset.calls)) == calls


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_fetched_for_a_batch_that_does_not_come(mode: str) -> None:
    """Only samples that become part of a yielded batch are fetched."""
    a, b = shuffled(4), shuffled(6)
    batches = read(stream_of([b, a], mode))
    parts = [part for batch in batches for part in ([batch] if mode == "sequential" else batch)]
    given = sum(len(part) for part in parts if part is not None)
    assert len(a.dataset.calls) + len(b.dataset.calls) == given


class Restarts:
    """An iterable that counts how often it is started."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.starts = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.starts += 1
        return iter([torch.zeros(1)] * self.length)


def test_a_loader_is_restarted_only_when_it_is_needed() -> None:
    """A loader is iterated again only when its next batch is needed, because this may start worker processes."""
    short, long, equal = Restarts(2), Restarts(4), Restarts(4)
    assert len(read(stream_of([short, long, equal]))) == 4
    assert (short.starts, long.starts, equal.starts) == (2, 1, 1)


# ------------------------------------------------------------------------------------------ lengths and what is known


@pytest.mark.parametrize(
    "loaders, mode, length, sizes",
    [
        ([8, 4], "min_size", 2, (4, 4)),
        ([8, 4], "max_size_cycle", 4, (4, 4)),
        ([8, 4], "sequential", 6, (2, 2)),
        ([8, 5], "min_size", 3, None),
        ([8, 5], "max_size_cycle", 4, None),
        ([8, 5], "sequential", 7, None),
    ],
)
def test_what_is_known_of_map_style_loaders(loaders: list[int], mode: str, length: int, sizes: Any) -> None:
    stream = stream_of([shuffled(samples) for samples in loaders], mode)
    assert (stream.length, stream.sizes, stream.exact) == (length, sizes, True)


def test_batches_of_different_sizes_one_after_the_other() -> None:
    assert stream_of([shuffled(8), shuffled(8, batch_size=4)], "sequential").sizes is None
    assert stream_of([shuffled(8), shuffled(8, batch_size=4)], "min_size").sizes == (6, 6)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_makes_the_length_unknown(mode: str) -> None:
    stream = stream_of([shuffled(8), DataLoader(DrawingStream(5), batch_size=2)], mode)
    assert (stream.length, stream.sizes, stream.exact) == (None, None, False)


def test_a_length_that_is_wrong_cuts_nothing_off() -> None:
    """If a loader yields more batches than its `len`, all of them are read."""
    stream = stream_of([DataLoader(SizedDrawingStream(6), batch_size=4, num_workers=2), [torch.zeros(1, 1)]], "sequential")
    assert (stream.length, stream.exact) == (3, False)
    assert ids(read(stream)) == [[0, 2, 4], [1, 3, 5], [0]]


def test_an_empty_loader_cannot_be_cycled() -> None:
    with pytest.raises(EmptyLoaderError, match="has no batch. Remove it"):
        stream_of([[], [torch.zeros(1)]])
    with pytest.raises(DataError, match="yielded no batch. Remove it"):
        read(stream_of([DataLoader(DrawingStream(0)), [torch.zeros(1)]]))


def test_an_iterator_can_be_the_longest_and_not_a_shorter_one() -> None:
    """With `max_size_cycle`, an iterator can only be the longest loader: shorter ones are iterated again."""
    assert len(read(stream_of([(torch.zeros(1) for _ in range(5)), shuffled(4)]))) == 5
    with pytest.raises(EmptyLoaderError, match="only once, but is needed again in epoch 0"):
        read(stream_of([(torch.zeros(1) for _ in range(5)), shuffled(20)]))


def test_closing_reaches_every_loader() -> None:
    stream = stream_of([shuffled(4), shuffled(4)])
    stream.close()
    with pytest.raises(DataError, match="has been closed"):
        read(stream)
