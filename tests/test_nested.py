"""Batches of any structure are rebuilt, moved and searched, and never changed in place."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainkit.nested import batch_size, copy_containers, first_tensor, leaves, map_tensors, move, rebuild

META = torch.device("meta")


class Pair(NamedTuple):
    left: Any
    right: Any


class Edge(NamedTuple):
    """A tuple with a field named `to`, which is not a method."""

    src: Tensor
    to: Tensor


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0
    made: int = dataclasses.field(default=0, init=False)
    late: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: dataclasses.InitVar[int]
    scaled: Any = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        object.__setattr__(self, "scaled", self.x * scale)


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: Any
    y: Any


class Words(list):
    pass


class Shape(tuple):
    __slots__ = ()


class Encoding(UserDict):
    """Like the output of a tokenizer: a mapping with other attributes and a `.to` that moves it in place."""

    def __init__(self, data: dict[str, Tensor], lengths: list[int]) -> None:
        super().__init__(data)
        self.lengths = lengths

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Row(Mapping):
    """An immutable mapping."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Keyword(Row):
    """An immutable mapping whose constructor takes keyword arguments instead of a dict."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)


class Graph:
    """Not a container. Its `.to` stores the device in `moved_to` and returns None."""

    def __init__(self) -> None:
        self.nodes = torch.ones(3)
        self.moved_to: Any = None

    def to(self, device: Any) -> None:
        self.moved_to = device


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def items_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return [value.x, value.y] if isinstance(value, Slots) else list(value)


def doubled(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor * 2)


# ------------------------------------------------------------------------------------------------------------ rebuild


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1, 2),
        {"a": 1, "b": 2},
        Pair(1, 2),
        Words([1, 2]),
        Shape((1, 2)),
        OrderedDict(b=1, a=2),
        Row({"a": 1}),
        MappingProxyType({"a": 1}),
        Slots(1, 2),
        [],
        (),
        {},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_is_rebuilt_as_what_it_was(value: Any) -> None:
    twin = rebuild(value, lambda item: item * 10)
    assert type(twin) is type(value)
    assert twin is not value or value == ()
    assert items_of(twin) == [item * 10 for item in items_of(value)]


def test_the_order_of_keys_is_kept() -> None:
    assert list(doubled(OrderedDict(b=ones(1), a=ones(1)))) == ["b", "a"]


def test_a_defaultdict_keeps_its_factory() -> None:
    twin = doubled(defaultdict(list, a=ones(1)))
    assert twin["a"].item() == 2
    assert twin["new"] == []


def test_a_mapping_keeps_what_is_not_an_item() -> None:
    value = Encoding({"input_ids": ones(2, 3)}, lengths=[3, 1])
    twin = doubled(value)
    assert type(twin) is Encoding
    assert twin.lengths == [3, 1]
    assert twin["input_ids"].sum() == 12
    assert value["input_ids"].sum() == 6, "the user's own batch must not change"


def test_a_mapping_that_cannot_be_built_becomes_a_dict() -> None:
    twin = doubled(Keyword(a=ones(1)))
    assert type(twin) is dict
    assert twin["a"].item() == 2


def test_a_dataclass_is_copied_with_all_its_fields() -> None:
    value = Point(ones(2), "name")
    value.late = ones(1)
    twin = doubled(value)
    assert type(twin) is Point
    assert twin.x.tolist() == [2, 2]
    assert twin.y == "name"
    assert twin.late.item() == 2, "a field that is no argument of the constructor, set later"
    assert twin.made == 1, "__post_init__ must not run again"
    assert value.x.tolist() == [1, 1]
    assert value.late.item() == 1


def test_a_field_that_was_never_set_is_omitted() -> None:
    assert not hasattr(doubled(Point(ones(1))), "late")


def test_a_frozen_dataclass_with_an_argument_that_is_no_field() -> None:
    value = Frozen(ones(1), scale=3)
    twin = doubled(value)
    assert twin.x.item() == 2
    assert twin.scaled.item() == 6
    assert value.x.item() == 1


def test_a_dataclass_with_slots() -> None:
    assert doubled(Slots(ones(1), [ones(1)])).y[0].item() == 2


@pytest.mark.parametrize("value", [None, 1, 2.5, "text", b"bytes", {1, 2}, range(3), Point, Pair, object])
def test_what_is_no_container_is_itself(value: Any) -> None:
    assert rebuild(value, lambda item: 1 / 0) is value
    assert map_tensors(value, lambda tensor: 1 / 0) is value
    assert move(value, META) is value


def test_result_tuples_of_torch_are_containers() -> None:
    result = torch.max(torch.arange(4.0).view(2, 2), dim=0)
    twin = map_tensors(result, lambda tensor: tensor.to(torch.float64))
    assert type(twin) is type(result)
    assert twin.values.dtype is torch.float64


# -------------------------------------------------------------------------------------------------------- map_tensors


def test_tensors_are_mapped_at_any_depth() -> None:
    value = {"a": [ones(1), (Pair(ones(1), "text"), {"b": Point(ones(1))})], 3: None, "n": 7}
    twin = doubled(value)
    assert [leaf.item() for leaf in leaves(twin) if isinstance(leaf, Tensor)] == [2, 2, 2]
    assert twin["a"][1][0].right == "text"
    assert (twin[3], twin["n"]) == (None, 7)
    assert [leaf.item() for leaf in leaves(value) if isinstance(leaf, Tensor)] == [1, 1, 1]


@pytest.mark.parametrize(
    "value",
    [
        [ones(1), ones(2)],
        {"a": ones(1), "b": ones(2)},
        (ones(1), {"a": ones(2)}),
        [[ones(1)], 7],
        {"a": [ones(1)], "b": "text"},
        OrderedDict(b=ones(1), a=ones(2)),
        Encoding({"input_ids": ones(2, 3)}, lengths=[3, 1]),
    ],
    ids=["list", "dict", "nested tuple", "nested list", "nested dict", "another kind of dict", "a mapping with attributes"],
)
def test_a_copy_has_containers_of_its_own_and_the_same_tensors(value: Any) -> None:
    twin = copy_containers(value)
    assert type(twin) is type(value)
    before = list(leaves(value))
    assert all(one is other for one, other in zip(before, leaves(twin), strict=True))
    take_apart(value)
    assert all(one is other for one, other in zip(before, leaves(twin), strict=True))


def take_apart(value: Any) -> None:
    """Remove the items of a batch, as a training loop may do with parts that it does not need."""
    for item in list(value.values()) if isinstance(value, Mapping) else list(value):
        if not isinstance(item, Tensor | str | int):
            take_apart(item)
    if not isinstance(value, tuple):
        value.clear()


@pytest.mark.parametrize("value", [ones(1), (ones(1), ones(2)), None, "text"], ids=["tensor", "tuple", "None", "text"])
def test_what_cannot_be_taken_apart_needs_no_copy(value: Any) -> None:
    """Batches that cannot be changed in place are not copied."""
    assert copy_containers(value) is value


def test_a_parameter_is_a_tensor() -> None:
    assert doubled([nn.Parameter(ones(1))])[0].item() == 2


# --------------------------------------------------------------------------------------------------------------- move


def test_tensors_are_moved_at_any_depth() -> None:
    value = {"a": [ones(1), (Pair(ones(1), "text"), Point(ones(2)))], "e": Edge(ones(1), ones(1))}
    twin = move(value, META)
    tensors = [leaf for leaf in leaves(twin) if isinstance(leaf, Tensor)]
    assert len(tensors) == 5
    assert all(tensor.device == META for tensor in tensors)
    assert twin["a"][1][0].right == "text"
    assert all(leaf.device.type == "cpu" for leaf in leaves(value) if isinstance(leaf, Tensor))


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    value = ones(1)
    assert move([value], torch.device("cpu"))[0] is value


def test_an_object_moves_itself() -> None:
    graph = Graph()
    moved = move([graph, "text"], META)
    assert moved[0] is graph, "its .to returns nothing, as it moves in place"
    assert graph.moved_to == META


def test_an_object_may_return_another() -> None:
    moved = move({"encoding": Encoding({"ids": ones(2)}, [2])}, META)
    assert moved["encoding"]["ids"].device == META
    assert moved["encoding"].lengths == [2]


def test_a_class_is_not_moved() -> None:
    assert move([Graph], META) == [Graph]


def test_a_packed_sequence_moves_as_torch_says() -> None:
    packed = pack_sequence([ones(3, 2), ones(1, 2)])
    moved = move({"packed": packed}, META)["packed"]
    assert type(moved) is PackedSequence
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu", "torch wants these on the CPU"
    doubled_too = map_tensors(packed, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert type(doubled_too) is PackedSequence
    assert doubled_too.data.dtype is torch.float64


@pytest.mark.parametrize("non_blocking", [True, False])
def test_whether_copies_are_waited_for_is_passed_on(non_blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`non_blocking` is passed to `Tensor.to`."""
    seen = []
    monkeypatch.setattr(Tensor, "to", lambda self, device, non_blocking: seen.append((device, non_blocking)) or self)
    move([ones(1), {"a": ones(1)}], META, non_blocking)
    assert seen == [(META, non_blocking)] * 2


# ------------------------------------------------------------------------------------------------- leaves, batch_size


def test_leaves_are_what_is_no_container() -> None:
    tensor, graph = ones(2), Graph()
    value = {"a": [tensor, (1, Pair("text", None))], "b": Point(graph, {"c": 2.5})}
    assert list(leaves(value)) == [tensor, 1, "text", None, graph, 2.5, 1]
    assert list(leaves([[], {}, ()])) == []


def test_the_tensors_of_a_packed_sequence_are_leaves() -> None:
    packed = pack_sequence([ones(3, 2), ones(1, 2)])
    found = list(leaves(packed))
    assert found[0] is packed.data
    assert found[1] is packed.batch_sizes


@pytest.mark.parametrize(
    "batch, size",
    [
        (ones(5, 2), 5),
        (ones(0, 2), 0),
        ([ones(3), ones(4)], 3),
        ((ones(3, 1), ones(4)), 3),
        ({"b": ones(6), "a": ones(7)}, 6),
        (Encoding({"ids": ones(2, 9)}, []), 2),
        (Pair("text", ones(8)), 8),
        (Point("text", ones(9)), 9),
        (["text", {"deep": [ones(2)]}, ones(3)], 2),
        ([torch.tensor(1.0), ones(4)], 4),
        (torch.tensor(1.0), 1),
        ("text", 1),
        (["a", "b"], 1),
        ([], 1),
        (None, 1),
        (Graph(), 1),
        (pack_sequence([ones(3, 2), ones(1, 2)]), 4),
        (deque([ones(2)]), 1),
    ],
)
def test_the_size_of_a_batch(batch: Any, size: int) -> None:
    assert batch_size(batch) == size
    assert (first_tensor(batch) is None) == (size == 1)


def test_the_first_tensor_is_found_depth_first() -> None:
    first = ones(2)
    assert first_tensor([None, (torch.tensor(0), [[first]]), ones(3)]) is first
