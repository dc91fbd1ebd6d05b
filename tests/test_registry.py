"""Short names → classes, and what is said of names that are not ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.support import run_python

from trainkit import Callback, Strategy
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError
from trainkit.registry import CALLBACKS, load_callback, load_strategy, make_strategy, strategies
from trainkit.strategies import ZeROStrategy


@pytest.mark.parametrize("name", list(CALLBACKS))
def test_every_callback_can_be_loaded(name: str) -> None:
    kind = load_callback(name)
    assert issubclass(kind, Callback)
    assert CALLBACKS[name] == f"{kind.__module__}:{kind.__name__}"


@pytest.mark.parametrize("name", list(strategies()))
def test_every_strategy_can_be_loaded(name: str) -> None:
    kind = load_strategy(name)
    assert issubclass(kind, Strategy)
    assert make_strategy(name).name == name.removesuffix("_offload")


@pytest.mark.parametrize(
    "name, stage, optimizer, params",
    [
        ("zero3_offload", 3, "cpu", "cpu"),
        ("deepspeed", 2, None, None),
        ("deepspeed_stage_1", 1, None, None),
        ("deepspeed_stage_1_offload", 1, "cpu", None),
        ("deepspeed_stage_2", 2, None, None),
        ("deepspeed_stage_2_offload", 2, "cpu", None),
        ("deepspeed_stage_3", 3, None, None),
        ("deepspeed_stage_3_offload", 3, "cpu", "cpu"),
    ],
)
def test_lightnings_names_of_zero(name: str, stage: int, optimizer: str | None, params: str | None) -> None:
    made = make_strategy(name)
    assert isinstance(made, ZeROStrategy)
    assert (made.stage, made.config.offload_optimizer, made.config.offload_params) == (stage, optimizer, params)


def test_the_configuration_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``deepspeed script.py --deepspeed_config FILE``; a strategy that is named otherwise does not look at it."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    monkeypatch.setattr(sys, "argv", ["script.py", "--deepspeed_config", "ds.json"])
    made = make_strategy("deepspeed", device="cpu")
    assert isinstance(made, ZeROStrategy)
    assert (made.stage, made.config.offload_optimizer) == (3, "cpu")
    assert make_strategy("zero1", device="cpu").name == "zero1"


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown strategy 'sngle'; known: auto, ddp, .*Did you mean 'single'\?"):
        load_strategy("sngle")
    with pytest.raises(UnknownNameError, match=r"unknown callback 'early_stoping'; known: .*Did you mean 'early_stopping'\?"):
        load_callback("early_stoping")


@pytest.mark.parametrize(
    "name",
    [
        "bagua",
        "horovod",
    ],
)
def test_strategies_that_are_not_there_yet(name: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=rf"strategy='{name}' is not in this version: .*strategy='auto'"):
        load_strategy(name)


@pytest.mark.parametrize(
    "name, fix",
    [
        ("dp", "Use strategy='ddp', with the same devices"),
        ("ddp_spawn", "Write strategy='ddp'"),
        ("ddp_spawn_find_unused_parameters_false", "Write strategy='ddp'"),
        ("ddp_fork", "Write strategy='ddp'"),
        ("ddp_notebook", r"start it from the notebook with: notebook_launcher\(function, num_processes=2\)"),
        ("fsdp", "Use strategy='zero3'"),
        ("deepspeed_stage_3_offload_nvme", "nvme_path="),
        ("single_device", "write strategy='auto'"),
    ],
)
def test_strategies_that_are_called_otherwise(name: str, fix: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=rf"strategy='{name}': .*{fix}"):
        load_strategy(name)


@pytest.mark.parametrize("name", [None, 3, Strategy, ["ddp"]])
def test_what_is_no_name(name: Any) -> None:
    known = ", ".join(map(repr, ("auto", *strategies())))
    with pytest.raises(ConfigurationError, match=rf"must be a name \({known}\) or a Strategy object, not"):
        load_strategy(name)


def test_the_case_of_a_name_counts() -> None:
    with pytest.raises(UnknownNameError, match="unknown strategy 'DDP'; .*Did you mean 'ddp'"):
        load_strategy("DDP")


def test_names_that_stand_for_options() -> None:
    options = {name: make_strategy(name, device="cpu") for name in ("ddp", "ddp_find_unused_parameters_true")}
    assert {name: made.name for name, made in options.items()} == dict.fromkeys(options, "ddp")
    assert [made.find_unused_parameters for made in options.values()] == [False, True]  # type: ignore[attr-defined]
    assert not make_strategy("ddp_find_unused_parameters_false", device="cpu").find_unused_parameters  # type: ignore[attr-defined]


def test_a_strategy_is_made_of_its_name_or_is_the_object() -> None:
    strategy = Strategy("cpu")
    assert make_strategy(strategy) is strategy
    assert make_strategy("single", device="cpu").device == make_strategy("auto", device="cpu").device == strategy.device
    for thing in (None, 3, Strategy):
        with pytest.raises(ConfigurationError, match="must be a name or a Strategy object, not .*Use strategy='auto'"):
            make_strategy(thing)


def test_nothing_is_imported_before_it_is_used() -> None:
    program = (
        "import sys, trainkit.registry\n"
        "assert 'trainkit.callbacks' not in sys.modules and 'trainkit.strategy' not in sys.modules\n"
        "trainkit.registry.load_strategy('single')\n"
        "assert 'trainkit.strategy' in sys.modules and 'trainkit.callbacks' not in sys.modules\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
