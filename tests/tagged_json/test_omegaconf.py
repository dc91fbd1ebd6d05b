"""OmegaConf's containers become plain dicts and lists, without importing omegaconf."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import pytest
from helpers.resume.saved_state import through_json
from helpers.support import run_python

from trainkit.loggers.logged_values import plain
from trainkit.tagged_json.codec import is_omegaconf


class Color(enum.Enum):
    RED = 1


@dataclass
class Schema:
    color: Color = Color.RED
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def test_it_is_not_loaded() -> None:
    done = run_python(
        "import sys; from trainkit.tagged_json.codec import dumps; from trainkit.loggers.logged_values import plain; "
        "dumps({'a': [1]}, {}); plain({'a': [1]}); print('omegaconf' in sys.modules)"
    )
    assert done.stdout.strip() == "False", done.stderr
    assert not is_omegaconf({})


def test_plain_dicts_and_lists() -> None:
    create = pytest.importorskip("omegaconf").OmegaConf.create
    config = create({"a": [{"b": 1}], "same": "${a}", "missing": "???", 3: "three"})
    expected = {"a": [{"b": 1}], "same": [{"b": 1}], "missing": "???", 3: "three"}
    assert through_json({"config": config, "list": config.a}) == {"config": expected, "list": [{"b": 1}]}
    assert type(through_json(config.a)) is list
    assert plain(config)[0] == {**{key: value for key, value in expected.items() if key != 3}, "3": "three"}
    assert plain({"list": config.a}) == ({"list": [{"b": 1}]}, [])


def test_unresolvable_interpolations_are_kept() -> None:
    create = pytest.importorskip("omegaconf").OmegaConf.create
    assert through_json(create({"a": 1, "b": "${a}", "wrong": "${nowhere}"})) == {"a": 1, "b": "${a}", "wrong": "${nowhere}"}


def test_structured_configurations() -> None:
    structured = pytest.importorskip("omegaconf").OmegaConf.structured
    assert through_json(structured(Schema)) == {"color": "RED", "sizes": [1, 2]}
