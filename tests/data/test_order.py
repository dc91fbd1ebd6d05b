"""The order of an epoch: a permutation for every length, uniform, independent between keys, frozen, and cheap in memory.

The statistical tests use fixed keys, so they give the same result on every run. They check about 180 p-values against p > 1e-4
on both sides: a perfect shuffle would fail one of these checks with a probability of about 1/30.
"""

from __future__ import annotations

import functools
import itertools
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from helpers.support import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from trainkit.data.order import HASH_SORT_LIMIT, ORDER_VERSION, Permutation, _Feistel, _hash_sort
from trainkit.errors import ConfigurationError

Order = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]

LAST_KEY = WORD = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15

# How the keys of successive epochs may be related. The orders must not show any of these relations.
KEY_FAMILIES: dict[str, Callable[[int], int]] = {
    "consecutive": lambda epoch: epoch,
    "upper half": lambda epoch: (epoch << 32) & WORD,
    "multiples of the hash's own increment": lambda epoch: (epoch * INCREMENT) & WORD,
}

BITS = ["all", "upper", "lower"]

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=examples(150))


def feistel(length: int, key: int) -> Order:
    return _Feistel(length, key).indices(0, length)


def whole(length: int, key: int) -> Order:
    return Permutation(length, key).block(0, length)


def is_bijection(order: Order) -> bool:
    return bool(np.array_equal(np.sort(order), np.arange(len(order))))


# --- reference implementation with Python integers, which depend neither on numpy's types nor on the byte order


def mix_by_the_book(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def subkeys_by_the_book(key: int, count: int) -> list[int]:
    state = mix_by_the_book((key + INCREMENT) & WORD)
    return [mix_by_the_book((state + (draw + 1) * INCREMENT) & WORD) for draw in range(count)]


def hash_sort_by_the_book(length: int, key: int) -> list[int]:
    first, second = subkeys_by_the_book(key, 2)
    inner = [mix_by_the_book((first + index * INCREMENT) & WORD) for index in range(length)]
    return sorted(range(length), key=lambda index: mix_by_the_book(second ^ inner[index]))


class FeistelByTheBook:
    def __init__(self, length: int, key: int) -> None:
        self.length = length
        self.half_bits = next(half for half in range(1, 32) if 4**half >= length)
        self.keys = subkeys_by_the_book(key, 6)

    def _round(self, half: int, key: int) -> int:
        return mix_by_the_book((half + key) & WORD) >> (64 - self.half_bits)

    def index_at(self, position: int) -> int:
        left, right = divmod(position, 1 << self.half_bits)
        for key in self.keys:
            left, right = right, left ^ self._round(right, key)
        index = (left << self.half_bits) | right
        return index if index < self.length else self.index_at(index)

    def position_of(self, index: int) -> int:
        left, right = divmod(index, 1 << self.half_bits)
        for key in reversed(self.keys):
            left, right = right ^ self._round(left, key), left
        position = (left << self.half_bits) | right
        return position if position < self.length else self.position_of(position)


# --- bijection


@pytest.mark.parametrize("algorithm", [_hash_sort, feistel])
def test_every_small_length_is_a_bijection(algorithm: Callable[[int, int], Order]) -> None:
    lengths = [*range(1, 131), *(4**power + step for power in range(4, 8) for step in (-1, 0, 1)), 5000, 12_345]
    for length, key in itertools.product(lengths, (0, 1, LAST_KEY)):
        assert is_bijection(algorithm(length, key)), (length, key)


@deterministic
@given(length=st.integers(1, 3000), key=st.integers(0, LAST_KEY))
def test_any_length_and_key_is_a_bijection(length: int, key: int) -> None:
    assert is_bijection(_hash_sort(length, key))
    assert is_bijection(feistel(length, key))
    assert np.array_equal(whole(length, key), _hash_sort(length, key))


@pytest.mark.parametrize("length", [HASH_SORT_LIMIT - 1, HASH_SORT_LIMIT, HASH_SORT_LIMIT + 1])
def test_both_sides_of_the_limit_are_bijections(length: int) -> None:
    order = whole(length, 7)
    assert order.dtype == np.int64
    assert order.shape == (length,)
    assert np.array_equal(np.bincount(order, minlength=length), np.ones(length))
    assert np.array_equal(order, (_hash_sort if length < HASH_SORT_LIMIT else feistel)(length, 7))


@deterministic
@given(data=st.data(), key=st.integers(0, LAST_KEY))
def test_any_huge_length_is_a_bijection_by_its_inverse(data: st.DataObject, key: int) -> None:
    length = data.draw(st.one_of(st.integers(1 << 20, 1 << 62), st.sampled_from([1 << 62, (1 << 60) + 1, 10**9])))
    position = data.draw(st.integers(0, length - 1))
    index = int(Permutation(length, key).block(position, position + 1)[0])
    book = FeistelByTheBook(length, key)
    assert index == book.index_at(position)
    assert book.position_of(index) == position


@pytest.mark.parametrize(("length", "key"), [(1, 0), (2, 5), (100, LAST_KEY), (3000, 12)])
def test_numpy_and_plain_integers_agree(length: int, key: int) -> None:
    assert _hash_sort(length, key).tolist() == hash_sort_by_the_book(length, key)
    book = FeistelByTheBook(length, key)
    assert feistel(length, key).tolist() == [book.index_at(position) for position in range(length)]


# --- uniformity


def p_of_even_spread(counts: Counts) -> float:
    expected = counts.sum() / counts.size
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1))


def p_of_independence(table: Counts, population: int) -> float:
    """p-value of the independence of rows and columns of a contingency table.

    The table is a sum of tables of permutations of `population` elements, which is why the statistic has an exact correction.
    """
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum() * (population - 1) / population
    return float(chi2.sf(statistic, (table.shape[0] - 1) * (table.shape[1] - 1)))


def cross(rows: Order, columns: Order, bins: int) -> Counts:
    return np.bincount(rows * bins + columns, minlength=bins * bins).reshape(bins, bins)


def total(tables: Iterable[Counts]) -> Counts:
    return functools.reduce(np.add, tables)


def plausible(p: float) -> bool:
    return 1e-4 < p < 1 - 1e-4


def suspicions(orders: list[Order], lags: tuple[int, ...]) -> list[str]:
    """Return the tests that tell these orders, which have successive keys, from independent shuffles.

    Compares each position with its value, values that are some positions apart, and values at the same position under the next
    key. It compares their upper bits, their lower bits, and their difference.
    """
    length, bins, difference_bins = len(orders[0]), 64, 1024

    def high_and_low(values: Order) -> list[Order]:
        return [values, values * bins // length, values % bins]

    positions = high_and_low(np.arange(length))
    views = [high_and_low(order) for order in orders]
    compared = {"position, value": [(positions, view) for view in views], "this key, the next": [*pairwise(views)]}
    for lag in lags:
        compared[f"lag {lag}"] = [([way[:-lag] for way in view], [way[lag:] for way in view]) for view in views]

    p_values = {}
    for what, pairs in compared.items():
        steps = ((b[0] - a[0]) % length * difference_bins // length for a, b in pairs)
        spread = total(np.bincount(step, minlength=difference_bins) for step in steps)
        p_values[f"{what}: difference"] = p_of_even_spread(spread)
        for i, j in itertools.product((1, 2), repeat=2):
            table = total(cross(a[i], b[j], bins) for a, b in pairs)
            p_values[f"{what}: {BITS[i]} bits, {BITS[j]} bits"] = p_of_independence(table, length)
    return [f"{what}: p = {p:.2g}" for what, p in p_values.items() if not plausible(p)]


@pytest.mark.parametrize("family", KEY_FAMILIES)
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(length: int, family: str) -> None:
    number = {order: rank for rank, order in enumerate(itertools.permutations(range(length)))}
    keys = (KEY_FAMILIES[family](epoch) for epoch in range(max(2000, 25 * len(number))))
    counts = np.bincount([number[tuple(whole(length, key).tolist())] for key in keys], minlength=len(number))
    assert counts.min() > 0
    assert plausible(p_of_even_spread(counts))


@pytest.mark.parametrize("family", KEY_FAMILIES)
@pytest.mark.parametrize("length", [3, 4])
def test_orders_of_successive_keys_are_independent(length: int, family: str) -> None:
    number = {order: rank for rank, order in enumerate(itertools.permutations(range(length)))}
    keys = (KEY_FAMILIES[family](epoch) for epoch in range(16_001))
    drawn = np.array([number[tuple(whole(length, key).tolist())] for key in keys])
    assert plausible(p_of_even_spread(cross(drawn[:-1], drawn[1:], len(number))))


@pytest.mark.parametrize(("length", "keys"), [(7, 3000), (10, 3000), (31, 3000), (100, 2000), (257, 2000)])
def test_every_sample_is_equally_likely_everywhere(length: int, keys: int) -> None:
    table = total(cross(np.arange(length), whole(length, key), length) for key in range(keys))
    assert plausible(p_of_independence(table, length))


# A network with too few rounds shows at lags that are powers of two, because such positions share half of their bits.
@pytest.mark.parametrize(
    ("length", "keys", "lags"),
    [
        (4096, 64, (1, 2, 64)),
        (65_537, 8, (1, 2, 256)),
        (HASH_SORT_LIMIT - 1, 3, (1, 1024)),
        (HASH_SORT_LIMIT, 3, (1, 2, 3, 1024, 2048)),
        (HASH_SORT_LIMIT + 1, 2, (1, 1024, 2048)),
        (1 << 22, 2, (1, 2048)),
    ],
)
def test_large_orders_look_like_independent_shuffles(length: int, keys: int, lags: tuple[int, ...]) -> None:
    assert suspicions([whole(length, key) for key in range(keys)], lags) == []


FLAWED: dict[str, Callable[[int, int], Order]] = {
    "four rounds": lambda length, key: _Feistel(length, key, rounds=4).indices(0, length),
    "the same order for every key": lambda length, key: whole(length, 0),
    "rotations": lambda length, key: (np.arange(length) + 97 * key) % length,
    "low bits in place": lambda length, key: whole(length // 64, key).repeat(64) * 64 + np.arange(length) % 64,
}


@pytest.mark.parametrize("flaw", FLAWED)
def test_the_statistics_notice_a_flaw(flaw: str) -> None:
    """The statistical tests can fail: they find flaws of weaker shuffles."""
    assert suspicions([FLAWED[flaw](HASH_SORT_LIMIT, key) for key in range(2)], (1, 1024))


# --- frozen: a change here changes what resumed runs train on, and needs a new ORDER_VERSION


def test_the_version_and_the_limit_are_frozen() -> None:
    assert (ORDER_VERSION, HASH_SORT_LIMIT) == (1, 1 << 20)


@pytest.mark.parametrize(
    ("length", "key", "start", "expected"),
    [
        (0, 3, 0, []),
        (1, 3, 0, [0]),
        (2, 0, 0, [1, 0]),
        (10, 0, 0, [6, 1, 8, 5, 4, 2, 3, 0, 7, 9]),
        (10, 1, 0, [8, 0, 9, 7, 5, 6, 3, 4, 2, 1]),
        (10, LAST_KEY, 0, [6, 8, 4, 9, 5, 1, 7, 3, 2, 0]),
        (1000, 42, 0, [365, 217, 202, 374, 608, 245, 297, 939, 440, 988]),
        (10**6, 42, 0, [702770, 523684, 699752, 103502, 369663, 745997]),
        (1 << 20, 1, 0, [790829, 128811, 616329, 506419, 812340, 233708]),
        (10**7, 42, 4093, [2473603, 4813485, 2180352, 8318535, 2892117, 7158838]),
        (10**9, 0, 9 * 10**8, [628732716, 707023696, 95120457, 728788846, 873731694, 507526012]),
        (10**9, LAST_KEY, 9 * 10**8, [809788017, 886183885, 53813042, 825205408, 8000200, 681715884]),
        (10**12, 7, 10**12 - 4, [427819476796, 826363755698, 634849772814, 22824493385]),
        (1 << 62, 3, 1 << 61, [674751810446376447, 2270205824007630563, 2349962576214648549]),
    ],
)
def test_the_order_is_frozen(length: int, key: int, start: int, expected: list[int]) -> None:
    assert Permutation(length, key).block(start, start + len(expected)).tolist() == expected


@pytest.mark.parametrize(
    ("length", "key", "checksum"),
    [(1000, 42, 0x39B25415), ((1 << 20) - 1, 0, 0x0E0AB967), (1 << 20, 0, 0x71CEA763), ((1 << 20) + 1, 0, 0x0F3D1EDE)],
)
def test_whole_orders_are_frozen(length: int, key: int, checksum: int) -> None:
    assert zlib.crc32(whole(length, key).astype("<i8").tobytes()) == checksum


# --- blocks


@deterministic
@given(length=st.sampled_from([1, 33, 4096, 9000]), cuts=st.lists(st.integers(0, 9000), max_size=12))
def test_blocks_are_slices_of_the_order(length: int, cuts: list[int]) -> None:
    order, expected = Permutation(length, 9), whole(length, 9)
    cuts = [0, *(min(cut, length) for cut in cuts), length]
    assert np.array_equal(np.concatenate([order.block(*ends) for ends in pairwise(sorted(cuts))]), expected)
    for start, stop in map(sorted, pairwise(cuts)):
        assert np.array_equal(order.block(start, stop), expected[start:stop])


@pytest.mark.parametrize("length", [5 * 4096, 5 * 4096 + 1, HASH_SORT_LIMIT + 17])
def test_blocks_without_a_list_of_indices_are_slices_too(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of orders that are too long for a list of all indices are slices of the order too."""
    monkeypatch.setattr("trainkit.data.order.HASH_SORT_LIMIT", 4096)
    order = Permutation(length, 11)
    expected = feistel(length, 11)
    asked = [(0, 32), (4090, 4100), (4096, 8192), (100, 100), (3, 17_000), (length - 1, length), (length, length)]
    for start, stop in [*asked, *reversed(asked), (0, length)]:
        assert np.array_equal(order.block(start, stop), expected[start:stop]), (start, stop)


def test_micro_batches_in_sequence_work_each_position_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Successive micro-batches compute each position once, 4,096 at a time."""
    worked_out: list[tuple[int, int]] = []
    indices = _Feistel.indices

    def counting(self: _Feistel, start: int, stop: int) -> Order:
        worked_out.append((start, stop))
        return indices(self, start, stop)

    monkeypatch.setattr(_Feistel, "indices", counting)
    order = Permutation(10**9, 5)
    for start in range(8192, 16_384, 24):
        order.block(start, start + 24)
    assert worked_out == [(8192, 12_288), (12_288, 16_384), (16_384, 20_480)]


@pytest.mark.parametrize("length", [100, 10**9])
def test_a_block_belongs_to_its_caller(length: int) -> None:
    """Writing into a returned block does not change later blocks."""
    order = Permutation(length, 1)
    for _ in range(3):
        mine = order.block(0, 32)
        assert np.array_equal(mine, Permutation(length, 1).block(0, 32))
        mine[:] = -1


def test_numpy_integers_are_integers() -> None:
    order = Permutation(np.int32(100), np.uint64(LAST_KEY))
    assert np.array_equal(order.block(np.uint64(90), np.int64(95)), whole(100, LAST_KEY)[90:95])


# --- memory


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [10**9, 10**12, (1 << 60) + 1, 1 << 62])
@pytest.mark.parametrize("tenths", [0, 5, 9])
def test_the_first_index_at_any_position_takes_bounded_memory(length: int, tenths: int) -> None:
    start = length // 10 * tenths
    assert peak_bytes(lambda: Permutation(length, 0).block(start, start + 1)) < 1_000_000


def test_a_long_block_takes_little_more_than_its_indices() -> None:
    assert peak_bytes(lambda: Permutation(10**9, 0).block(0, 200_000)) < 200_000 * 8 + 1_000_000


@pytest.mark.parametrize("length", [HASH_SORT_LIMIT - 1, 10**12])
def test_construction_does_no_work(length: int) -> None:
    assert peak_bytes(lambda: Permutation(length, 0)) < 100_000


# --- errors


@pytest.mark.parametrize(
    ("length", "key", "message"),
    [
        (-1, 0, r"length from 0 to 2\*\*62 .* got -1"),
        ((1 << 62) + 1, 0, r"length from 0 to 2\*\*62 .* got 4611686018427387905"),
        (10, -1, r"unsigned 64-bit key, .* got -1"),
        (10, 1 << 64, r"unsigned 64-bit key, .* got 18446744073709551616"),
        (10.0, 0, r"length expects an integer, got 10\.0 of type float"),
        (10, "0", r"key expects an integer, got '0' of type str"),
    ],
)
def test_wrong_arguments_are_refused(length: int, key: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Permutation(length, key)


@pytest.mark.parametrize("length", [0, 100, 10**9])
def test_positions_outside_the_order_are_refused(length: int) -> None:
    order = Permutation(length, 0)
    order.block(max(0, length - 1), length)  # caches indices up to the end of the order
    for start, stop in [(-1, 0), (1, 0), (length, length + 1), (length + 1, length + 1), (0, 1 << 64)]:
        with pytest.raises(ConfigurationError, match=rf"stop <= {length} .* got block\({start}, {stop}\)"):
            order.block(start, stop)
    with pytest.raises(ConfigurationError, match=r"start expects an integer, got 0\.5 of type float"):
        order.block(0.5, 1)  # type: ignore[arg-type]
