"""The names of a package are imported when they are first used."""

from __future__ import annotations

import json.decoder
from typing import Any

import pytest

from trainkit.lazy import lazily


@pytest.fixture
def package() -> dict[str, Any]:
    return {"__name__": "json", "present": 1}


def test_a_name_is_looked_up_once(package: dict[str, Any]) -> None:
    get, _ = lazily(package, {"JSONDecoder": "decoder"})
    assert get("JSONDecoder") is json.decoder.JSONDecoder
    assert package["JSONDecoder"] is json.decoder.JSONDecoder


def test_all_names_are_listed(package: dict[str, Any]) -> None:
    _, names = lazily(package, {"JSONDecoder": "decoder"})
    assert names() == ["JSONDecoder", "__name__", "present"]


def test_a_typing_error(package: dict[str, Any]) -> None:
    get, _ = lazily(package, {"JSONDecoder": "decoder"})
    with pytest.raises(AttributeError, match=r"module 'json' has no attribute 'JSONDecodr'. Did you mean 'JSONDecoder'\?"):
        get("JSONDecodr")
