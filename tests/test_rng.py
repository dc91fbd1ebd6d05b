"""Keyed random numbers: keys are frozen and statistically independent, and seeding and restoring cover all generators.

The statistical tests use fixed keys, so they give the same result on every run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.data.samples import draw
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from trainkit import rng
from trainkit.errors import ConfigurationError
from trainkit.rng import (
    KEY_VERSION,
    KeyStream,
    Purpose,
    RandomState,
    Stage,
    mix,
    resolve_seed,
    seed_everything,
    seed_generators,
)

LAST = (1 << 64) - 1

# (seed, stage, purpose, epoch, micro-batch) → key. Frozen: resumed runs depend on them.
GOLDEN = {
    (0, 1, 1, 0, 0): 0xDF4FE57CF2AEB6B8,
    (0, 1, 2, 0, 0): 0xDD8BF1FFC491FACD,
    (42, 1, 2, 0, 0): 0x2D8E656377D94956,
    (42, 1, 2, 1, 0): 0x6413192ADDB9A665,
    (42, 1, 3, 0, 5): 0x265811A1F1AB4857,
    (42, 17, 4, 3, 1_000_000): 0xCA513C5A771F7C7E,
    (LAST, 5, 4, (1 << 33) + 7, 1 << 40): 0xE61A7787CBB222E4,
}

# The first outputs of SplitMix64 for the seed 1234567, as published with its reference implementation.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]

seeds = st.integers(0, LAST)
counts = st.integers(0, 1 << 40)


@pytest.fixture(autouse=True)
def _no_seed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the seed of `seed_everything`, which is stored for the whole process."""
    monkeypatch.setattr(rng, "_process_seed", None)


# ------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("parts", GOLDEN)
def test_keys_are_frozen(parts: tuple[int, int, int, int, int]) -> None:
    assert KEY_VERSION == 1, "another version needs golden values of its own"
    assert mix(*parts) == GOLDEN[parts]


def test_each_step_of_the_mix_is_splitmix64() -> None:
    assert [rng._advance(1234567, part) for part in range(5)] == PUBLISHED


@given(seed=seeds, stage=st.integers(1, 500), purpose=st.sampled_from(Purpose), epoch=counts, m=counts)
def test_a_key_stream_gives_the_keys_of_an_epoch(seed: int, stage: int, purpose: Purpose, epoch: int, m: int) -> None:
    key = mix(seed, stage, purpose, epoch, m)
    assert KeyStream(seed, stage, purpose, epoch)(m) == key
    assert 0 <= key <= LAST


def test_the_first_micro_batch_of_the_first_epoch_is_the_default() -> None:
    assert mix(3, Stage.TRAIN, Purpose.INIT) == mix(3, Stage.TRAIN, Purpose.INIT, 0, 0)


def test_a_seed_is_taken_modulo_2_to_the_64() -> None:
    """Any integer can be a seed, such as the seed of a `DistributedSampler`."""
    assert mix(-1, 1, 1) == mix(LAST, 1, 1)
    assert KeyStream(1 << 64, 1, 1, 0)(0) == mix(0, 1, 1)


def test_stages_and_loaders_never_share_a_number() -> None:
    numbers = [stage.of_loader(index) for stage in Stage for index in range(200)]
    assert len(set(numbers)) == len(numbers)
    assert all(stage.of_loader(0) == stage for stage in Stage)


def test_no_two_keys_are_equal() -> None:
    stages = [stage.of_loader(index) for stage in Stage for index in range(3)]
    keys = [
        mix(seed, stage, purpose, epoch, m)
        for seed, stage, purpose, epoch, m in itertools.product((0, 1, 42), stages, Purpose, range(10), range(20))
    ]
    assert len(keys) == 45_000
    assert len(set(keys)) == len(keys)
    # Each generator is seeded with half of a key. Among n random halves, about n²/2³³ pairs are equal.
    for half in ({key >> 32 for key in keys}, {key & 0xFFFF_FFFF for key in keys}):
        assert len(keys) - len(half) < 5


NEIGHBOURS: dict[str, Callable[[int], int]] = {
    "seed": lambda n: mix(n, 1, 3, 0, 0),
    "stage": lambda n: mix(0, n, 3, 0, 0),
    "purpose": lambda n: mix(0, 1, n, 0, 0),
    "epoch": lambda n: mix(0, 1, 3, n, 0),
    "micro-batch": lambda n: mix(0, 1, 3, 0, n),
}


@pytest.mark.parametrize("part", NEIGHBOURS)
def test_keys_of_neighbours_differ_in_half_their_bits(part: str) -> None:
    key = NEIGHBOURS[part]
    keys = [key(n) for n in range(4001)]
    flipped = np.array([[(a ^ b) >> bit & 1 for bit in range(64)] for a, b in itertools.pairwise(keys)])
    per_bit = flipped.sum(axis=0)  # 64 binomial variables with mean 2000 and standard deviation 32
    assert np.abs(per_bit - 2000).max() < 5 * 32
    assert abs(flipped.sum(axis=1).mean() - 32.0) < 0.3


# -------------------------------------------------------------------------------------------------------- generators


def test_every_generator_is_seeded() -> None:
    extra = torch.Generator()
    drawn = []
    for m in (5, 6, 5):
        seed_generators(mix(0, 1, 3, 0, m), [extra])
        drawn.append([*draw(), torch.randn(3).tolist(), torch.rand(2, generator=extra).tolist()])
    assert drawn[0] == drawn[2]
    assert all(first != second for first, second in zip(drawn[0], drawn[1], strict=True))


@pytest.mark.parametrize("key", [0, 1 << 63, LAST])
def test_every_key_can_be_a_seed(key: int) -> None:
    seed_generators(key)
    assert torch.initial_seed() == key
    first = draw()
    seed_generators(key)
    assert draw() == first


def test_seeding_a_generator_directly_is_what_torch_does() -> None:
    seed_generators(1234)
    ours = torch.rand(4)
    torch.manual_seed(1234)
    assert torch.equal(ours, torch.rand(4))


def first_draws(number: int) -> np.ndarray:
    """The first random numbers under the keys of successive micro-batches, with shape (number, 3)."""
    keys = KeyStream(0, Stage.TRAIN, Purpose.FETCH, 0)
    rows = []
    for m in range(number):
        seed_generators(keys(m))
        rows.append(draw())
    return np.array(rows)


def test_successive_micro_batches_draw_evenly_and_without_a_relation() -> None:
    number = 4000
    draws = first_draws(number)
    for column in draws.T:
        counts = np.histogram(column, bins=50, range=(0.0, 1.0))[0]
        statistic = ((counts - number / 50) ** 2 / (number / 50)).sum()
        assert 1e-4 < chi2.sf(statistic, 49) < 1 - 1e-4
        for lag in (1, 2, 8):
            assert abs(np.corrcoef(column[:-lag], column[lag:])[0, 1]) < 4 / number**0.5
    for a, b in itertools.combinations(draws.T, 2):  # torch and numpy use the same algorithm: seeds must differ
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / number**0.5


# ------------------------------------------------------------------------------------------------------------- state


def everything_drawn(extra: torch.Generator) -> list[object]:
    return [
        draw(),
        torch.randn(5).tolist(),
        torch.rand(2, generator=extra).tolist(),
        np.random.standard_normal(3).tolist(),
        random.gauss(0, 1),
        torch.initial_seed(),
    ]


def test_a_random_state_puts_everything_back() -> None:
    extra = torch.Generator().manual_seed(3)
    seed_everything(11)
    # generators make normals in pairs: after one draw, each holds a second number
    torch.randn(1)
    np.random.standard_normal()
    random.gauss(0, 1)
    state = RandomState([extra])
    first = everything_drawn(extra)
    seed_generators(99, [extra])
    torch.randn(3)
    state.restore()
    assert everything_drawn(extra) == first
    state.restore()
    assert everything_drawn(extra) == first, "a state can be restored more than once"


def test_drawing_under_a_key_leaves_no_trace() -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    under_key = RandomState.draw_with_key(77, draw)
    assert draw() == expected
    seed_generators(77)
    assert draw() == under_key


def test_drawing_under_a_key_leaves_no_trace_after_an_error() -> None:
    def fail() -> None:
        draw()
        raise KeyError("lost")

    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with pytest.raises(KeyError, match="lost"):
        RandomState.draw_with_key(77, fail)
    assert draw() == expected


def test_keyed_draws_can_be_nested() -> None:
    seed_generators(5)
    outer = draw()

    def nested() -> list[float]:
        RandomState.draw_with_key(6, draw)
        return draw()

    assert RandomState.draw_with_key(5, nested) == outer


def test_the_end_of_an_iterator_comes_through() -> None:
    """`RandomState.draw_with_key` passes on a StopIteration."""
    with pytest.raises(StopIteration):
        RandomState.draw_with_key(1, lambda: next(iter(())))


# -------------------------------------------------------------------------------------------------------------- seeds


def test_seed_everything_is_what_a_user_would_write() -> None:
    assert seed_everything(123) == 123
    ours = draw()
    torch.manual_seed(123)
    np.random.seed(123)
    random.seed(123)
    assert draw() == ours


def test_a_seed_above_32_bits_is_cut_for_numpy_only() -> None:
    seed_everything((1 << 40) + 9)
    ours = draw()
    torch.manual_seed((1 << 40) + 9)
    np.random.seed(9)
    random.seed((1 << 40) + 9)
    assert draw() == ours


def test_seed_everything_prints_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    seed_everything(4)
    assert capsys.readouterr().out == ""
    seed_everything(4, verbose=True)
    assert capsys.readouterr().out == "trainkit: seed 4\n"


def test_without_a_seed_one_is_drawn_and_kept() -> None:
    torch.manual_seed(0)
    random.seed(0)
    first = seed_everything()
    assert resolve_seed(None) == first
    assert torch.initial_seed() == first
    torch.manual_seed(0)
    random.seed(0)
    assert seed_everything() != first, "drawn from the system, not from a generator"


def test_workers_are_always_seeded() -> None:
    seed_everything(1, workers=True)
    with pytest.raises(ConfigurationError, match="workers=False.*Remove the argument"):
        seed_everything(1, workers=False)


@pytest.mark.parametrize("wrong", [-1, 1 << 64, 1.0, "1", True, np.float64(1.0), np.int64(-1)])
@pytest.mark.parametrize("function", [seed_everything, resolve_seed])
def test_a_wrong_seed_is_refused(function: Callable[[object], int], wrong: object) -> None:
    before = draw_and_put_back()
    with pytest.raises(ConfigurationError, match=r"an integer from 0 to 2\*\*64 - 1, not .*seed=42"):
        function(wrong)
    assert draw_and_put_back() == before
    assert rng._process_seed is None


def draw_and_put_back() -> list[float]:
    state = RandomState()
    drawn = draw()
    state.restore()
    return drawn


@pytest.mark.parametrize("seed", [0, 1, LAST])
def test_the_seeds_at_the_ends_are_taken(seed: int) -> None:
    assert seed_everything(seed) == seed
    assert resolve_seed(None) == seed


def test_an_integer_of_numpy_is_a_seed() -> None:
    assert resolve_seed(np.int64(7)) == 7
    assert type(resolve_seed(np.uint64(LAST))) is int


def test_which_seed_counts() -> None:
    torch.manual_seed(21)
    assert resolve_seed(None) == 21, "torch's, if the user seeded nothing else"
    seed_everything(22)
    torch.manual_seed(23)
    assert resolve_seed(None) == 22, "the one of seed_everything, if there is one"
    assert resolve_seed(24) == 24, "the argument, if there is one"
    assert resolve_seed(0) == 0
    assert resolve_seed(None) == 22, "an argument is not remembered"


def test_a_negative_seed_of_torch_is_one_of_64_bits() -> None:
    torch.manual_seed(-2)
    assert resolve_seed(None) == LAST - 1


def test_the_generators_are_seeded_as_their_own_functions_do_it() -> None:
    key = 0x0123_4567_89AB_CDEF
    random.gauss(0, 1)  # stores a second number for the next call, which seeding must discard
    np.random.standard_normal()
    seed_generators(key)
    drawn = torch.rand(3), np.random.rand(3), np.random.standard_normal(), random.random(), random.gauss(0, 1)
    torch.manual_seed(key)
    np.random.seed(key >> 32)
    random.seed(key)
    expected = torch.rand(3), np.random.rand(3), np.random.standard_normal(), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], expected[0])
    assert np.array_equal(drawn[1], expected[1])
    assert drawn[2:] == expected[2:]


def test_another_bit_generator_behind_numpy_random_is_seeded_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        drawn = []
        for key in (1 << 40, 1 << 40, 1 << 41):
            seed_generators(key)
            drawn.append(np.random.rand())
        assert drawn[0] == drawn[1] != drawn[2]
    finally:
        np.random.set_bit_generator(before)
