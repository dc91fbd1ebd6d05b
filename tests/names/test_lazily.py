"""Names of a package are imported on first use."""

from __future__ import annotations

import json.decoder
from typing import Any

import pytest

import trainkit
from trainkit.names import lazily


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


def test_a_name_next_to_the_package(package: dict[str, Any]) -> None:
    """A name can come from a module that is not in the package."""
    get, _ = lazily({"__name__": "json.decoder"}, {"JSONEncoder": ".encoder"})
    assert get("JSONEncoder") is json.JSONEncoder


@pytest.mark.parametrize(
    "module, name, meant",
    [
        ("trainkit", "TrainModul", "TrainModule"),
        ("trainkit.utilities", "rank_zero_onlyy", "rank_zero_only"),
        ("trainkit.callbacks", "EarlyStoping", "EarlyStopping"),
        ("trainkit.loggers", "TensorboardLogger", "TensorBoardLogger"),
        ("trainkit.strategies", "DDPStrateg", "DDPStrategy"),
        ("trainkit.utils", "gathr", "gather"),
    ],
)
def test_a_typing_error_in_an_import_statement(module: str, name: str, meant: str) -> None:
    """`from … import` raises an ImportError with a hint: Python would replace an AttributeError and lose the hint."""
    with pytest.raises(ImportError, match=rf"^cannot import name '{name}' from '{module}'\. Did you mean '{meant}'\?$"):
        exec(f"from {module} import {name}")


def test_an_import_statement_of_several_names() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'Trainr' from 'trainkit'\. Did you mean 'Trainer'\?$"):
        from trainkit import TrainModule, Trainr  # noqa: F401


def test_an_import_statement_of_a_name_that_is_like_none() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'zzz' from 'trainkit\.callbacks'\.$"):
        from trainkit.callbacks import zzz  # noqa: F401


def test_outside_an_import_statement_it_stays_an_attribute_error() -> None:
    """Attribute access raises AttributeError, on which hasattr, getattr with a default, inspect and unittest.mock rely."""
    assert not hasattr(trainkit, "Trainr")
    assert getattr(trainkit.callbacks, "EarlyStoping", None) is None
    with pytest.raises(AttributeError, match="module 'trainkit' has no attribute 'Trainr'. Did you mean 'Trainer'"):
        trainkit.Trainr


def test_submodules_are_imported_as_ever() -> None:
    from trainkit import callbacks, errors, loggers

    assert (callbacks.__name__, errors.__name__, loggers.__name__) == (
        "trainkit.callbacks",
        "trainkit.errors",
        "trainkit.loggers",
    )


def test_a_name_of_lightning_or_accelerate_says_what_to_use() -> None:
    """Also for attribute access, which stays an AttributeError."""
    with pytest.raises(ImportError, match=r"^trainkit\.strategies has no DeepSpeedStrategy\. Use: from trainkit"):
        from trainkit.strategies import DeepSpeedStrategy  # noqa: F401
    with pytest.raises(AttributeError, match=r"^trainkit has no cpu_offload\. Use: ZeROStrategy\(stage=3"):
        trainkit.cpu_offload
    assert not hasattr(trainkit, "cpu_offload")
