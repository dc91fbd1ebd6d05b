"""Which modules count as the repeated blocks of a model, and how users name modules."""

from __future__ import annotations

import pytest
from torch import nn

from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.module.blocks import find_repeated_blocks, select_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(2, 3)


def test_members_of_a_list_that_have_the_same_class() -> None:
    assert list(find_repeated_blocks(Model(Block(), Other(), Block()))) == ["layers.0", "layers.2"]


def test_a_single_block_and_layers_without_submodules_are_none() -> None:
    assert find_repeated_blocks(Model(Block(), nn.Linear(2, 2), nn.Linear(2, 2))) == {}


def test_the_outermost_block_counts() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

    assert list(find_repeated_blocks(Model(Outer(), Outer()))) == ["layers.0", "layers.1"]


def test_containers_are_searched_and_are_no_blocks() -> None:
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert list(find_repeated_blocks(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    assert list(find_repeated_blocks(nn.ModuleDict({"a": Block(), "b": Block()}))) == ["a", "b"]


def test_a_block_that_is_used_twice_counts_once() -> None:
    block = Block()
    assert list(find_repeated_blocks(Model(block, Block(), block))) == ["layers.0", "layers.1"]


def test_a_model_of_transformers_names_the_classes_of_its_blocks() -> None:
    model = Model(Block(), Block(), Other())
    model._no_split_modules = ["Other"]  # type: ignore[assignment]
    assert list(find_repeated_blocks(nn.ModuleDict({"model": model}))) == ["model.layers.2"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (Block, ["layers.0", "layers.1"]),
        (Other, ["layers.1"]),
        ("Block", ["layers.0", "layers.1"]),
        ("layers.*.inner", ["layers.0.inner", "layers.1.inner"]),
        ("head", ["head"]),
        ([nn.Embedding, "head"], ["embedding", "head"]),
        (lambda name, module: name.endswith(".0"), ["layers.0", "layers.0.inner.0", "layers.1.inner.0"]),
    ],
    ids=["class", "subclass", "class-name", "pattern", "name", "several", "function"],
)
def test_choices(choice: object, names: list[str]) -> None:
    assert list(select_modules(Model(Block(), Other()), choice, "wrap")) == names  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "kind", "text"),
    [
        ("Blok", UnknownNameError, "Did you mean 'Block'"),
        (nn.LSTM, UnknownNameError, "wrap=LSTM matches no module of Model"),
        (lambda name, module: False, ConfigurationError, "returned False for all"),
        (3, ConfigurationError, "wrap=3: expected a class of nn.Module"),
        (int, ConfigurationError, "expected a class of nn.Module"),
    ],
    ids=["typo", "absent-class", "empty-function", "number", "other-class"],
)
def test_choices_that_name_nothing(choice: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        select_modules(Model(Block()), choice, "wrap")  # type: ignore[arg-type]
