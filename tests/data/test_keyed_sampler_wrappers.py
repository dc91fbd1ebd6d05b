"""Wrappers that seed the generators in the process that fetches, and otherwise behave like the user's objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers.data.samples import Drawing, draw, same
from torch.utils.data import Subset

from trainkit.data.keyed_sampler import KeyedDataset, KeyedSlots, UserWorkerInit
from trainkit.rng import seed_generators


def test_a_keyed_dataset_seeds_before_it_fetches() -> None:
    dataset = KeyedDataset(Drawing(5))
    first = dataset[99, 3]
    seed_generators(99)
    assert same(first.tolist(), [3.0, *draw()])
    many = dataset.__getitems__((99, [3, 1]))
    assert same(many[0], first)
    assert many[1][0] == 1
    assert not same(many[1][1:], many[0][1:]), "the key is the micro-batch's, not the sample's"
    assert len(dataset) == 5


class Bulk(Drawing):
    """A dataset that fetches several samples in one call (`__getitems__`)."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_a_dataset_that_fetches_many_at_once_still_does() -> None:
    bulk = Bulk(5)
    wrapped = KeyedDataset(bulk).__getitems__((4, [2, 0]))
    assert bulk.asked == [[2, 0]]
    assert same(wrapped, KeyedDataset(Drawing(5)).__getitems__((4, [2, 0])))
    KeyedDataset(Subset(bulk, [4, 3])).__getitems__((4, [1, 0]))
    assert bulk.asked[1:] == [[3, 4]]


def test_a_sequence_can_be_a_dataset() -> None:
    assert KeyedDataset([5, 6, 7]).__getitems__((0, [2, 0])) == [7, 5]


def test_a_keyed_dataset_has_the_attributes_of_the_users() -> None:
    dataset = KeyedDataset(Drawing(5))
    assert dataset.calls == []
    with pytest.raises(AttributeError, match="classes"):
        dataset.classes


class Stateful(Drawing):
    """A dataset with its own `__getstate__` and `__setstate__`."""

    def __getstate__(self) -> dict[str, Any]:
        return {"length": self.length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["length"] + 1)


def test_a_keyed_dataset_is_copied_as_what_it_is() -> None:
    twin = copy.deepcopy(KeyedDataset(Stateful(5)))
    assert type(twin) is KeyedDataset
    assert type(twin.dataset) is Stateful
    assert twin.dataset.length == 6


def test_keyed_slots_seed_when_they_are_gone_through() -> None:
    """Iterating `KeyedSlots`, which stand for the samples of a stream's batch, seeds the generators."""
    slots = KeyedSlots(55, 3)
    assert len(slots) == 3
    assert list(slots) == [None] * 3
    first = draw()
    seed_generators(55)
    assert draw() == first


def test_keyed_slots_seed_after_pickling() -> None:
    """`KeyedSlots` also seed after they were pickled and sent to a worker."""
    maker, arguments = KeyedSlots(55, 3).__reduce__()
    there = maker(*arguments)
    draw()
    list(there)
    first = draw()
    list(KeyedSlots(55, 1))
    assert draw() == first


def test_outside_a_worker_only_the_users_function_runs() -> None:
    """Outside a worker, `UserWorkerInit` only calls the user's `worker_init_fn`, if there is one."""
    seen: list[int] = []
    UserWorkerInit(seen.append)(3)
    UserWorkerInit(None)(4)
    assert seen == [3]
