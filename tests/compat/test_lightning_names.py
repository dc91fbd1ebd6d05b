"""Hyper-parameters in a YAML file, under Lightning's names; the other names are tested in tests/utilities."""

from __future__ import annotations

import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from trainkit.console import TrainkitWarning
from trainkit.core.saving import load_hparams_from_yaml, save_hparams_to_yaml
from trainkit.errors import ConfigurationError
from trainkit.utilities import AttributeDict


class Activation(Enum):
    RELU = 1


VALUES: dict[str, Any] = {"lr": 1e-3, "name": "größe", "layers": [1, {"a": None}], "on": True, "betas": (0.9, 0.99)}


@pytest.mark.parametrize("kind", [dict, AttributeDict, lambda values: Namespace(**values)])
def test_values_come_back(kind: Any, tmp_path: Path) -> None:
    save_hparams_to_yaml(tmp_path / "hparams.yaml", kind(VALUES))
    loaded = load_hparams_from_yaml(tmp_path / "hparams.yaml", use_omegaconf=False)
    assert loaded == VALUES
    assert type(loaded["betas"]) is tuple
    again = load_hparams_from_yaml(tmp_path / "hparams.yaml")
    assert isinstance(again, DictConfig)
    assert again.layers[1].a is None


def test_without_omegaconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hparams_to_yaml(tmp_path / "hparams.yaml", {})
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert type(load_hparams_from_yaml(tmp_path / "hparams.yaml")) is dict


def test_a_configuration_of_omegaconf(tmp_path: Path) -> None:
    config = OmegaConf.create({"width": 8, "deep": {"twice": "${width}"}})
    file = f"file://{tmp_path}/hparams.yaml"
    save_hparams_to_yaml(file, config)
    assert load_hparams_from_yaml(file) == {"width": 8, "deep": {"twice": 8}}
    save_hparams_to_yaml(file, {"nested": [config], "activation": Activation.RELU})
    plain = load_hparams_from_yaml(file, use_omegaconf=False)
    assert plain == {"nested": [{"width": 8, "deep": {"twice": 8}}], "activation": "RELU"}


def test_what_has_no_plain_form_is_named(tmp_path: Path) -> None:
    with pytest.warns(TrainkitWarning, match="'net' is not written, because a Path|'net' is not written, because a PosixPath"):
        save_hparams_to_yaml(tmp_path / "hparams.yaml", {"net": tmp_path, "lr": 0.1})
    assert load_hparams_from_yaml(tmp_path / "hparams.yaml") == {"lr": 0.1}
    with pytest.warns(TrainkitWarning, match="there is no file"):
        assert load_hparams_from_yaml(tmp_path / "nothing.yaml") == {}


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no folder .*nothing\. Create it: os\.makedirs"):
        save_hparams_to_yaml(tmp_path / "nothing" / "hparams.yaml", {})
    with pytest.raises(ConfigurationError, match="hparams must be a dict or an argparse.Namespace, not list"):
        save_hparams_to_yaml(tmp_path / "hparams.yaml", [])  # type: ignore[arg-type]
    file = tmp_path / "hparams.yaml"
    file.write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigurationError, match="cannot be read as plain hyper-parameters: could not determine a constructor"):
        load_hparams_from_yaml(file)
    file.write_text("[1, 2]\n")
    with pytest.raises(ConfigurationError, match="must have a mapping from names to hyper-parameters, not a list"):
        load_hparams_from_yaml(file)
