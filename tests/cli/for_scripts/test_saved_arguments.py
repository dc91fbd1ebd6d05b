"""Which hyper-parameters of a checkpoint a parser may see."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import pytest
import torch
from jsonargparse.typing import Path_fr, PositiveInt
from torch import nn

import trainkit.cli.for_scripts.argument_parser  # noqa: F401 - registers what torch's functions are called
from trainkit.cli.for_scripts.saved_arguments import sort_for
from trainkit.module.from_checkpoint import Trust


class Color(Enum):
    RED = 1


@dataclass
class Settings:
    fn: Callable[..., Any] = json.loads
    names: list[str] | None = None


class Plain(TypedDict):
    a: int


class Code(NamedTuple):
    a: Callable[..., Any] = json.loads


class Typed(nn.Module):
    def __init__(
        self,
        text: str = "",
        number: PositiveInt | None = None,  # type: ignore[valid-type]
        names: list[str] | None = None,
        nested: dict[str, list[tuple[int, str]]] | None = None,
        color: Color = Color.RED,
        file: Path | None = None,
        opened: Path_fr | None = None,  # type: ignore[valid-type]
        choice: Literal["a", 2] = "a",
        plain: Plain | None = None,
        code: Code | None = None,
        reader: Callable[..., Any] = json.loads,
        either: str | Callable[..., Any] = "x",
        kind: type[nn.Module] = nn.ReLU,
        layers: list[nn.Module] | None = None,
        table: dict[str, Callable[..., Any]] | None = None,
        maybe: Settings | None = None,
        group: Settings = Settings(),  # noqa: B008
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        anything: Any = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()


SPEC = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 2}}
SEEN = [
    *(("text", "os.system"), ("text", "{class_path: a}"), ("number", 3), ("names", ["a.b", "c"]), ("names", None)),
    *(("nested", {"a": [(1, "x")]}), ("color", "RED"), ("file", "a/b"), ("opened", "setup.py"), ("choice", "a")),
    *(("plain", {"a": 1}), ("reader", None), ("maybe", {"names": ["a"]}), ("group", {"names": ["a"]}), ("anything", "a.b")),
    *(("options", {"a": ["b", 1]}), ("optimizer", {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5}})),
    *(("maybe", None), ("layers", None), ("either", 5)),
]
REFUSED = [
    *(("reader", "os.system"), ("kind", "torch.nn.GELU"), ("layers", [SPEC]), ("layers", ["torch.nn.Linear"]), ("layers", "a")),
    *(
        ("table", {"a": "os.system"}),
        ("maybe", {"fn": "os.system"}),
        ("maybe", "setup.py"),
        ("maybe", SPEC),
        ("code", {"a": "b.c"}),
    ),
    *(("optimizer", {"class_path": "torch.optim.SGD"}), ("optimizer", {"init_args": {"lr": 1}}), ("either", "os.system")),
    *(("optimizer", {"class_path": "torch.optim.AdamW", "init_args": {"lr": SPEC}}), ("text", {"__path__": "x"})),
    *(("optimizer", {"class_path": "torch.optim.AdamW", "dict_kwargs": {"lr": SPEC}}), ("dtype", "os.system")),
    *(("optimizer", {"class_path": "torch.optim.AdamW", "init_args": {"a.class_path": "x.y"}}), ("group", SPEC)),
]
DATA = [
    *(("anything", SPEC), ("anything", [SPEC]), ("anything", '{"class\\x5fpath": "a.b"}'), ("anything", "class_path: a.b")),
    *(("options", {"a": SPEC}), ("either", "no path")),
]


@pytest.mark.parametrize("name, value", SEEN)
def test_values_that_nothing_follows(name: str, value: Any) -> None:
    assert sort_for(Typed, {name: value}, Trust()) == ({name: value}, {}, {}, {})


@pytest.mark.parametrize("name, value", REFUSED)
def test_values_that_could_be_followed(name: str, value: Any) -> None:
    assert sort_for(Typed, {name: value}, Trust())[1:] == ({}, {name: value}, {})


@pytest.mark.parametrize("name, value", DATA)
def test_values_that_only_the_class_gets(name: str, value: Any) -> None:
    assert sort_for(Typed, {name: value}, Trust()) == ({}, {name: value}, {}, {})


def test_what_is_the_default_needs_nothing() -> None:
    defaults = {"reader": "json.loads", "kind": "torch.nn.ReLU", "optimizer": {"class_path": "torch.optim.AdamW"}}
    assert sort_for(Typed, {"reader": "json.loads", "kind": "torch.nn.ReLU"}, Trust()) == ({}, {}, {}, {})
    assert sort_for(Typed, defaults, Trust()).refused == {}


def test_other_conversions() -> None:
    assert sort_for(Typed, {"dtype": "torch.bfloat16", "color": 1}, Trust()).values == {"dtype": torch.bfloat16, "color": "RED"}
    sorted_group = sort_for(Typed, {"group": {"fn": "os.system", "names": ["a"]}}, Trust())
    assert (sorted_group.values, sorted_group.refused) == ({"group": {"names": ["a"]}}, {"group.fn": "os.system"})
    names = {"reader.x": 1, "reader+": ["a"], 5: 1, "missing": 1, "it": 2}
    assert sort_for(Typed, names, Trust()) == ({}, {}, {}, names)


def test_what_is_trusted() -> None:
    trust = Trust(["torch.nn."])
    passed = sort_for(Typed, {"layers": [SPEC], "kind": "torch.nn.GELU", "reader": "torch.nn.functional.relu"}, trust)
    assert passed.refused == {}
    assert passed.values["layers"] == [{**SPEC, "class_path": "torch.nn.modules.linear.Linear"}]
    assert (passed.values["kind"], passed.values["reader"]) == (nn.GELU, nn.functional.relu)
    for hostile in ("torch.nn.modules.linear.torch.load", "torch.load", "os.system"):
        assert sort_for(Typed, {"reader": hostile}, trust).refused == {"reader": hostile}
