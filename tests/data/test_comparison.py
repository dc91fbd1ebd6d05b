"""The digest of a batch: equal batches have the same digest, and different batches have different ones."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import threading
import weakref
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit.data.comparison import BatchDigest, ReadRecord, comparable, digest


@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


def values() -> list[Any]:
    torch.manual_seed(0)
    return [
        torch.zeros(3),
        torch.zeros(3, 1),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.tensor(0.0),
        torch.zeros(0),
        torch.ones(3, requires_grad=True),
        torch.tensor([True]),
        torch.tensor([1j]).conj(),
        torch.eye(3).to_sparse(),
        2 * torch.eye(3).to_sparse(),
        torch.rand(4, 6)[:, ::2],
        torch.rand(3_000_000),
        torch.zeros(3, device="meta"),
        np.zeros(3),
        np.zeros((0, 3)),
        np.array(["a", "b"]),
        np.array([1, "x", None], dtype=object),
        np.array([1, "y", None], dtype=object),
        np.float32(2),
        {"a": torch.ones(2), "b": [1, "x", None, 2.5]},
        {"a": torch.ones(2), "b": [1, "x", None, 2.25]},
        {"b": torch.ones(2)},
        [torch.ones(2)],
        (torch.ones(2),),
        Record(1),
        Record(1, 2),
        Plain(torch.ones(1)),
        Plain(torch.zeros(1)),
        Slotted(1),
        Slotted(torch.ones(1)),
        PIL.Image.new("L", (2, 2), 1),
        {"image": PIL.Image.new("L", (2, 2), 2)},
        {"image": PIL.Image.new("L", (2, 2), 3)},
        datetime.date(2026, 1, 1),
        datetime.date(2026, 1, 2),
        Decimal("1.5"),
        Path("a"),
        Path("b"),
        array.array("i", [1]),
        array.array("i", [2]),
        collections.deque([1]),
        collections.deque([2]),
        int,
        str,
        {1, 2},
        {1, 3},
        frozenset({"a", "b", "c", "d"}),
        "text",
        b"text",
        "\ud800",
        1,
        1.0,
        True,
        None,
        float("nan"),
    ]


def test_others_have_others() -> None:
    """Different values have different digests."""
    found = [digest(value) for value in values()]
    assert len(set(found)) == len(found)


def test_equal_ones_have_the_same() -> None:
    """Equal values have the same digest, also with other strides."""
    assert [digest(value) for value in values()] == [digest(copy.deepcopy(value)) for value in values()]
    assert digest(torch.arange(6).reshape(2, 3).t()) == digest(torch.arange(6).reshape(2, 3).t().contiguous())


def all_digests() -> list[str]:
    return [digest(value) for value in values()]


def test_in_every_process() -> None:
    """A digest depends neither on the hash seed of the process nor on memory addresses."""
    (found,) = run_world(1, all_digests, env={"PYTHONHASHSEED": "12345"})
    assert found == all_digests()


@pytest.mark.parametrize("place", [0, -1])
def test_both_ends_of_a_large_one_count(place: int) -> None:
    """The digest of a large tensor depends on its first and last values."""
    large = torch.zeros(1_000_000)
    before = digest(large)
    large[place] = 1.0
    assert digest(large) != before


def test_what_holds_itself_has_one() -> None:
    """Objects that contain themselves have a digest."""
    ring = Plain(1)
    ring.x = ring
    listed: list[Any] = []
    listed.append(listed)
    assert digest(ring) == digest(ring)
    assert digest(listed) == digest(listed)


def test_what_cannot_be_pickled_counts_by_type() -> None:
    """An object that pickle refuses has a digest."""
    assert digest([threading.Lock()]) == digest([threading.Lock()]) != digest([threading.RLock()])


def test_a_small_tensor_has_the_digest_of_its_bytes() -> None:
    """The fast way of hashing common tensors and the general one agree, whatever view of memory the tensor is."""
    whole = torch.randn(6, 4, dtype=torch.complex64).conj()
    for tensor in (whole.imag, whole.real.t(), whole.imag[::2, 1:], torch.tensor(3.0), torch.zeros(0, 2), torch.arange(3) > 1):
        assert digest(tensor) == digest(tensor.clone(memory_format=torch.contiguous_format).resolve_neg())
        assert digest(tensor.requires_grad_() if tensor.is_floating_point() else tensor) == digest(tensor.detach().clone())
    assert digest(whole.imag) != digest(-whole.imag)


def test_a_digest_of_an_earlier_version_is_not_compared() -> None:
    """It was computed in another way, so that it would always differ."""
    assert comparable(None) is None
    assert comparable("3e3c0bd4f3a3a5d1c6d7a7d9e5b0f5a1") is None
    assert comparable(digest(torch.zeros(2))) == digest(torch.zeros(2))


# ----------------------------------------------------------------------------------------- digests that are computed later


@pytest.mark.parametrize("kind", [list, tuple, lambda values: dict(zip("ab", values, strict=True))])
def test_a_digest_that_is_computed_later_is_that_of_the_batch_when_it_was_read(kind: Any) -> None:
    batch = kind([torch.arange(6.0), torch.arange(3)])
    at_once, later = BatchDigest(batch, now=True), BatchDigest(batch)
    assert not later.changed
    if isinstance(batch, dict):
        batch["c"] = batch.pop("a")  # as a step may do with a batch that is not moved
    assert later.text() == at_once.text()
    value = next(iter(batch.values() if isinstance(batch, dict) else batch))
    value.add_(1)
    assert later.text() == at_once.text()  # kept
    assert not later.changed
    held = weakref.ref(value)
    del batch, value
    assert held() is None


def test_a_batch_that_was_changed_in_place_has_none_and_the_next_ones_are_computed_at_once() -> None:
    batches = [(torch.arange(6.0), torch.arange(3)) for _ in range(3)]
    expected = BatchDigest(batches[0], now=True).text()
    record = ReadRecord()
    record.add_own(batches[0])
    assert record.last is not None
    assert not record.last.changed
    batches[0][0].mul_(2)
    assert record.last.changed
    assert record.last.text() is None
    assert record.last.changed
    for batch in batches[1:]:
        record.add_own(batch)
        batch[0].mul_(2)
        assert record.last.text() == expected


@pytest.mark.parametrize(
    "batch",
    [(np.arange(3.0),), [torch.zeros(1 << 20)], {"x": torch.zeros(2), "n": 3}, torch.zeros(2), (), [(torch.zeros(2),)]],
    ids=["array", "large", "number", "tensor", "empty", "nested"],
)
def test_the_digest_of_a_batch_that_does_not_show_changes_or_is_large_is_computed_at_once(batch: Any) -> None:
    made = BatchDigest(batch)
    expected = BatchDigest(copy.deepcopy(batch), now=True).text()
    for value in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]:
        if isinstance(value, Tensor | np.ndarray):
            value += 1
    assert made.text() == expected


def test_the_digest_of_a_batch_of_inference_tensors_is_computed_at_once() -> None:
    with torch.inference_mode():
        batch = [torch.zeros(2)]
    assert not BatchDigest(batch).changed
