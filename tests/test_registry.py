"""Short names of callbacks and strategies, and the errors for unknown names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import run_python

from trainkit import Accelerator, Callback, Strategy, Trainer, registry
from trainkit.config.settings import Settings
from trainkit.distributed.parameter_placement import whole_shape
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError
from trainkit.launch.strategy_choice import choose_strategy, read_devices
from trainkit.registry import (
    CALLBACKS,
    SINGLE,
    StrategyInfo,
    automatic_info,
    automatic_strategy,
    find_info,
    find_info_by_type,
    load_callback,
    load_footprints,
    load_strategy,
    make_strategy,
    register_strategy,
    strategies,
    strategy_infos,
)
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


@pytest.mark.parametrize("name, options", [("fsdp", {}), ("fsdp2", {}), ("fsdp_cpu_offload", {"offload_params": "cpu"})])
def test_names_of_fsdp(name: str, options: dict[str, Any]) -> None:
    info = find_info(name)
    assert info is not None
    assert info.aliases.get(name, ("fsdp", {})) == ("fsdp", options)
    assert make_strategy(name, device="cpu").name == "fsdp"


def test_the_configuration_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`strategy="deepspeed"` reads the file in `deepspeed script.py --deepspeed_config FILE`; other names of ZeRO do not."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    monkeypatch.setattr(sys, "argv", ["script.py", "--deepspeed_config", "ds.json"])
    made = make_strategy("deepspeed", device="cpu")
    assert isinstance(made, ZeROStrategy)
    assert (made.stage, made.config.offload_optimizer) == (3, "cpu")
    assert make_strategy("zero1", device="cpu").name == "zero1"


def test_an_unknown_name() -> None:
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
    with pytest.raises(UnsupportedArgumentError, match=rf"strategy='{name}' is not supported: .*strategy='auto'"):
        load_strategy(name)


@pytest.mark.parametrize(
    "name, fix",
    [
        ("dp", "Use strategy='ddp', with the same devices"),
        ("ddp_spawn", "Write strategy='ddp'"),
        ("ddp_spawn_find_unused_parameters_false", "Write strategy='ddp'"),
        ("ddp_fork", "Write strategy='ddp'"),
        ("ddp_notebook", r"start it from the notebook with: notebook_launcher\(function, num_processes=2\)"),
        ("deepspeed_stage_3_offload_nvme", "nvme_path="),
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


@pytest.mark.parametrize("name, used", [("DDP", "ddp"), ("Single_Device", "single"), ("AUTO", "single"), ("ddp", "ddp")])
def test_the_case_of_a_name_does_not_count(name: str, used: str) -> None:
    assert Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy.name == used


def test_a_refused_name_in_upper_case() -> None:
    with pytest.raises(UnsupportedArgumentError, match="strategy='ddp_spawn': .*Write strategy='ddp'"):
        Trainer(strategy="DDP_SPAWN", accelerator="cpu", devices=1)


def test_names_that_stand_for_options() -> None:
    options = {name: make_strategy(name, device="cpu") for name in ("ddp", "ddp_find_unused_parameters_true")}
    assert {name: made.name for name, made in options.items()} == dict.fromkeys(options, "ddp")
    assert [made.find_unused_parameters for made in options.values()] == [False, True]  # type: ignore[attr-defined]
    assert not make_strategy("ddp_find_unused_parameters_false", device="cpu").find_unused_parameters  # type: ignore[attr-defined]


def test_a_strategy_is_made_of_its_name_or_is_the_object() -> None:
    strategy = Strategy("cpu")
    assert make_strategy(strategy) is strategy
    assert make_strategy("single", device="cpu").device == make_strategy("auto", device="cpu").device == strategy.device
    for thing in (None, 3, [strategy]):
        with pytest.raises(ConfigurationError, match="must be a name or a Strategy object, not .*Use strategy='auto'"):
            make_strategy(thing)
    with pytest.raises(ConfigurationError, match=r"must be a name or a Strategy .*make an instance: Strategy\(\)\?$"):
        make_strategy(Strategy)


def test_nothing_is_imported_before_it_is_used() -> None:
    program = (
        "import sys, trainkit.registry\n"
        "assert 'trainkit.callbacks' not in sys.modules and 'trainkit.strategy' not in sys.modules\n"
        "trainkit.registry.load_strategy('single')\n"
        "assert 'trainkit.strategy' in sys.modules and 'trainkit.callbacks' not in sys.modules\n"
    )
    done = run_python(program, bare=True)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------- declarations of strategies


class Mine(Strategy):
    """A strategy that another package defines."""

    name = "mine"

    def __init__(self, level: int = 0, *, device: Any = "auto", precision: Any = None) -> None:
        super().__init__(device, precision)
        self.level = level


MINE = StrategyInfo(
    path=f"{__name__}:Mine",
    names={"mine": {}, "mine_high": {"level": 9}},
    aliases={"theirs": ("mine_high", {})},
    refused={"mine_old": "write strategy='mine'"},
    command_line={"theirs": f"{__name__}:of_command_line"},
    devices=("cpu",),
    distributed_type="MULTI_XPU",
    file_types={"MULTI_XPU": "mine"},
    footprints=((f"{__name__}:Mine", {"device": "cpu"}),),
    shape_attribute="whole_of_mine",
)
Mine.info = MINE


def of_command_line(argv: list[str]) -> dict[str, Any] | None:
    """Read options of the strategy from the command line of a script."""
    return {"level": int(argv[1])} if argv[:1] == ["--level"] else None


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the strategy for one test."""
    monkeypatch.setattr(registry, "_registered", [])
    register_strategy(MINE)


@pytest.mark.usefixtures("mine")
def test_a_registered_strategy_is_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call of `register_strategy` makes a strategy known to all parts of trainkit."""
    assert strategy_infos()[-1] is MINE
    assert [type(make_strategy(name, device="cpu")).__name__ for name in ("mine", "mine_high")] == ["Mine", "Mine"]
    assert Trainer(strategy="mine_high", accelerator="cpu", logger=False).strategy.level == 9  # type: ignore[attr-defined]
    assert str(Accelerator(strategy="mine", cpu=True).distributed_type) == "MULTI_XPU"
    assert [one.name for one in load_footprints()][-1] == "mine"
    with pytest.raises(UnsupportedArgumentError, match="strategy='mine_old_too': write strategy='mine'"):
        make_strategy("mine_old_too")
    with pytest.raises(ConfigurationError, match="accelerator='tpu' works with strategy='xla', not with 'mine'"):
        choose_strategy("mine", read_devices("tpu", "auto", None))
    assert Settings({"distributed_type": "MULTI_XPU"}).strategy == "mine"
    monkeypatch.setattr(sys, "argv", ["script.py", "--level", "4"])
    assert [make_strategy(name, device="cpu").level for name in ("theirs", "mine")] == [4, 0]
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert make_strategy("theirs", device="cpu").level == 9


@pytest.mark.usefixtures("mine")
def test_the_whole_shape_of_a_sharded_parameter() -> None:
    """The full shape of a sharded parameter is read from the attribute that its strategy declares."""
    shard = torch.nn.Parameter(torch.zeros(2))
    assert whole_shape(shard) == (2,)
    shard.whole_of_mine = (4, 3)  # type: ignore[attr-defined]
    assert whole_shape(shard) == (4, 3)
    scalar = torch.nn.Parameter(torch.zeros(1))
    scalar.whole_of_mine = ()  # type: ignore[attr-defined]
    assert whole_shape(scalar) == ()


@pytest.mark.parametrize("name", ["ddp", "DDP", "deepspeed", "auto", "single"])
def test_a_name_that_is_taken(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the name '{name}' is taken, .*Choose another: StrategyInfo"):
        register_strategy(StrategyInfo("x:X", names={name: {}}))
    assert len(strategy_infos()) == 5


def test_every_strategy_declares_itself() -> None:
    """The class of each registered `StrategyInfo` has this object as its `info`."""
    for info in strategy_infos():
        kind = registry.load(info.path)
        assert kind.info is info
        assert all(short in info.names for short, _ in info.aliases.values())
        assert all(short in info.names for short in (*info.auto.values(), *info.file_types.values()))
        assert set(info.command_line) <= {*info.names, *info.aliases}
        for path in (*info.command_line.values(), *(path for path, _ in info.footprints), info.plugin):
            assert path is None or callable(registry.load(path))


def test_what_auto_is_on_devices() -> None:
    assert {kind: automatic_strategy(kind) for kind in ("cpu", "cuda", "mps", "xla", "other")} == {
        "cpu": "ddp",
        "cuda": "ddp",
        "mps": "ddp",
        "xla": "xla",
        "other": "single",
    }
    assert automatic_info("other") is SINGLE


def test_declarations_are_found_by_every_name() -> None:
    assert find_info("auto") is find_info("single") is find_info_by_type("NO") is SINGLE
    assert find_info("deepspeed_stage_1") is find_info("zero3") is find_info_by_type("DEEPSPEED")
    assert find_info("nonsense") is find_info_by_type("nonsense") is find_info_by_type(None) is None


def test_declarations_import_no_backend() -> None:
    program = (
        "import sys, trainkit.registry\n"
        "assert not any(name.startswith('trainkit.strategies') for name in sys.modules)\n"
        "infos = trainkit.registry.strategy_infos()\n"
        "packages = {package for info in infos for package in info.packages}\n"
        "print(len(infos), sorted(packages & set(sys.modules)), 'torch' in sys.modules)\n"
        "print(sorted(n for n in sys.modules if n.startswith('trainkit.strategies.')))\n"
    )
    done = run_python(program, bare=True)
    packages = [f"trainkit.strategies.{package}" for package in ("ddp", "fsdp", "xla", "zero")]
    assert done.stdout.splitlines() == ["5 [] False", str(packages)], done.stderr


class WithoutDevice(Strategy):
    def __init__(self, *, every: int = 1) -> None:
        super().__init__("cpu")
        self.every = every


def test_options_that_the_class_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.registry._registered", [])
    register_strategy(StrategyInfo(f"{__name__}:WithoutDevice", {"own": {}, "own_8": {"every": 8}, "own_x": {"evry": 8}}))
    assert make_strategy("own_8").every == 8
    for name, options, passed in (("own", {"device": "cpu"}, "device='cpu'"), ("own_x", {}, "evry=8")):
        with pytest.raises(ConfigurationError, match=f"strategy='{name}' passes {passed} to WithoutDevice, which has no such "):
            make_strategy(name, **options)
