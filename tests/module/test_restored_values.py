"""Hyper-parameters with attributes, and members of enumerations, after `load_from_checkpoint`."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import DataModule
from trainkit.checkpoint import open_checkpoint
from trainkit.module.hparams import HyperParameters
from trainkit.module.restored_values import with_attributes, with_members


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Word(str, Enum):
    YES = "yes"


@dataclass
class Inner:
    width: int = 4
    color: Color = Color.RED


@dataclass
class Settings:
    inner: Inner = field(default_factory=Inner)
    tint: Color | None = None
    parts: Any = None


class Pair(NamedTuple):
    first: int
    color: Color


class Net(TinyModule):
    """A module with hyper-parameters of every kind, among others."""

    def __init__(
        self,
        settings: Settings,
        space: Any,
        pair: Pair,
        colors: list[Color],
        table: dict[str, Color | int] | None = None,
        level: Level = Level.LOW,
        free: Any = None,
        default=Color.RED,  # type: ignore[no-untyped-def]
        text: str | Color = "red",
        word: str | Word = "no",
        plain: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = {
            "settings": (settings.inner.width, settings.inner.color, settings.tint, settings.parts[0].deep.x),
            "space": (space.x, space.inside.y, space.pair.first),
            "pair": (pair.first, pair.color, *pair),
            "enumerations": (colors, table, level, free, default, text, word),
        }
        self.plain = plain


class Data(DataModule):
    def __init__(self, options: Settings, color: Color = Color.RED) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = (options.inner.width, options.tint, color)

    def train_dataloader(self) -> Iterable[Any]:
        return tiny_loader(4)


def test_after_loading_it_is_as_before() -> None:
    settings = Settings(Inner(8, Color.BLUE), Color.RED, [SimpleNamespace(deep=HyperParameters(x=1))])
    space = Namespace(x=1, inside=Namespace(y=2), pair=Pair(3, Color.RED))
    table = {"a": Color.RED, "b": 1}
    module = Net(settings, space, Pair(5, Color.BLUE), [Color.BLUE, Color.RED], table, Level.HIGH, Color.RED, Color.BLUE,
                 "blue", Word.YES, {"a": {"b": Color.RED}})  # fmt: skip
    data = Data(Settings(tint=Color.BLUE), Color.BLUE)
    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(module, datamodule=data)
    path = trainer.checkpoint_callback.last_model_path
    again = Net.load_from_checkpoint(path)
    assert again.seen.pop("enumerations") == ([Color.BLUE, Color.RED], table, Level.HIGH, "red", Color.BLUE, "blue", Word.YES)
    expected = dict(module.seen)
    del expected["enumerations"]
    assert again.seen == expected
    assert type(again.hparams.level) is Level
    assert again.hparams.settings.inner.color is Color.BLUE
    assert again.plain == {"a": {"b": "red"}}, "what nothing names the class of is a value"
    assert [type(again.plain), type(again.plain["a"])] == [dict, dict], "a dict stays one"
    assert Data.load_from_checkpoint(path).seen == data.seen
    later = make_trainer(enable_checkpointing=True, default_root_dir="later")
    later.fit(again, datamodule=Data.load_from_checkpoint(path))
    third = Net.load_from_checkpoint(later.checkpoint_callback.last_model_path)
    assert third.seen == {**expected, "enumerations": third.seen["enumerations"]}, "and so a second time"


def test_one_argument_that_holds_all_of_them() -> None:
    class Whole(TinyModule):
        def __init__(self, config: Settings) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.seen = (config.inner.width, config.inner.color, config.tint)

    module = Whole(Settings(Inner(8, Color.BLUE), Color.RED))
    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(module, tiny_loader())
    assert Whole.load_from_checkpoint(trainer.checkpoint_callback.last_model_path).seen == module.seen


def test_loggers_get_the_values() -> None:
    class Colored(TinyModule):
        def __init__(self, color: Color, pair: Pair) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(Colored(Color.BLUE, Pair(1, Color.RED)), tiny_loader())
    state = open_checkpoint(trainer.checkpoint_callback.last_model_path).read({"state"}).state
    assert state["hyper_parameters"] == {"color": "blue", "pair": (1, "red")}
    assert state["hyper_parameters_attributes"] == [[["pair"], ["first", "color"]]]


@pytest.mark.parametrize(
    "value, annotation, expected",
    [
        ("red", Color, Color.RED),
        ("green", Color, "green"),
        (5, Color, 5),
        (["red"], Color, ["red"]),
        (2, Level | None, Level.HIGH),
        (None, Color | None, None),
        ({"red", "blue"}, set[Color], {Color.RED, Color.BLUE}),
        (("red", 1), tuple[Color, int], (Color.RED, 1)),
        (("red", "blue"), tuple[Color, ...], (Color.RED, Color.BLUE)),
        ({"red": 1}, dict[Color, int], {Color.RED: 1}),
        ({"inner": {"color": "blue"}, "other": "red"}, Settings, {"inner": {"color": Color.BLUE}, "other": "red"}),
        ([{"color": "blue"}], list[Inner], [{"color": Color.BLUE}]),
        ("red", "Color", "red"),
        ("red", None, "red"),
    ],
)
def test_members(value: Any, annotation: Any, expected: Any) -> None:
    assert with_members(value, annotation) == expected


@pytest.mark.parametrize("keys", [["a"], ["b", "c"], ["b", 5], ["d"], ["x"], ["a", "b"]])
@pytest.mark.parametrize("names", [None, ["x"]])
def test_paths_that_lead_nowhere_change_nothing(keys: list[Any], names: Any) -> None:
    values = {"a": 1, "b": [1, 2], "d": (1, 2)}
    assert with_attributes(values, [[keys, names]]) == values


def test_values_with_names_are_copied() -> None:
    pair = with_attributes({"pair": (1, [2])}, [[["pair"], ["first", "second"]]])["pair"]
    for one in (pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert (one.first, one.second, tuple(one)) == (1, [2], (1, [2]))
    with pytest.raises(AttributeError, match="no value 'third'; known:"):
        pair.third
