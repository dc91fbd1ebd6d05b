"""`trainkit.data.batches`: micro-batches are joined into one batch, and short ones are filled up."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trainkit.data.batches import concatenate, concatenate_each, concatenate_groups, pad
from trainkit.errors import DataError

Pair = namedtuple("Pair", "x y")


@dataclass
class Graph:
    nodes: torch.Tensor
    names: list[str]


def test_tensors_and_lists_follow_one_another_wherever_they_stand() -> None:
    """Tensors and lists of samples are concatenated at any depth of the batch; other values are kept."""
    first = {"x": torch.arange(4.0).reshape(2, 2), "deep": [torch.tensor([1, 2]), ("a", "b")], "scale": 3}
    second = {"x": torch.full((1, 2), 9.0), "deep": [torch.tensor([7]), ("c",)], "scale": 3}
    found = concatenate([first, second])
    assert found["x"].tolist() == [[0.0, 1.0], [2.0, 3.0], [9.0, 9.0]]
    assert found["deep"][0].tolist() == [1, 2, 7]
    assert found["deep"][1] == ("a", "b", "c")
    assert found["scale"] == 3


def test_containers_keep_their_types() -> None:
    one = torch.tensor([1.0])
    assert type(concatenate([Pair(one, one), Pair(one, one)])) is Pair
    assert type(concatenate([OrderedDict(a=one), OrderedDict(a=one)])) is OrderedDict
    graph = concatenate([Graph(one, ["a"]), Graph(one, ["b"])])
    assert (type(graph), graph.nodes.tolist(), graph.names) == (Graph, [1.0, 1.0], ["a", "b"])


def test_rows_are_as_wide_as_there_are_devices_and_the_last_has_what_is_left() -> None:
    """Groups of 3 micro-batches are joined, one for each device; the last group has the rest."""
    batches = [torch.tensor([n]) for n in range(7)]
    rows = list(concatenate_groups(iter(batches), 3, concatenate))
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5], [6]]
    assert rows[2] is batches[6]


def test_batches_of_several_loaders_have_sizes_of_their_own() -> None:
    """`concatenate_each` joins the parts of a combined batch separately, so they may differ in size."""
    part = {"a": torch.zeros(3), "b": torch.zeros(2)}
    assert {name: len(value) for name, value in concatenate_each([part, part]).items()} == {"a": 6, "b": 4}
    with pytest.raises(DataError, match="a batch of 3 samples contains a tensor of shape"):
        concatenate([part, part])


@pytest.mark.parametrize(
    "parts, message",
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "shapes \\(2, 3\\), \\(2, 4\\).*Pad all samples to one length"),
        ([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}], "only some have the keys x, y"),
        ([(torch.zeros(2), 1), (torch.zeros(2), 2)], "each has its own int \\(1\\)"),
        ([(torch.zeros(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(2))], "each has its own Tensor"),
        ([(torch.zeros(2), None), (torch.zeros(2), "a")], "different types: NoneType, str"),
        ([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]], "a list of 1 items, another of 2"),
        (
            [(torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(3))],
            "whose first dimension is not the batch dimension",
        ),
    ],
)
def test_what_cannot_be_put_together_is_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        concatenate(parts)


def test_what_is_the_same_in_all_is_kept() -> None:
    """Values without a batch dimension are kept if they are the same in all micro-batches."""
    found = concatenate([(torch.zeros(2), None, torch.tensor(0.5), "train")] * 2)
    assert found[1:] == (None, torch.tensor(0.5), "train")


def test_a_short_batch_is_filled_up_with_its_last_sample() -> None:
    batch = {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "name": ["a", "b"], "scale": 2.0, "norm": torch.tensor(5.0)}
    found = pad(batch, 2, 4)
    assert found["x"].tolist() == [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0]]
    assert found["name"] == ["a", "b", "b", "b"]
    assert (found["scale"], found["norm"].item()) == (2.0, 5.0)
    assert len(batch["x"]) == 2, "the user's batch is as it was"
    with pytest.raises(DataError, match="first dimension is not the batch dimension"):
        pad((torch.zeros(2), torch.zeros(3)), 2, 4)
