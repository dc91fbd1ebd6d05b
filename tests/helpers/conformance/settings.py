"""The strategies that the conformance suite tests, and the processes and devices on which each of them runs.

The suite tests every strategy in `trainkit.registry`. A strategy needs an entry here only if its tests need a pytest mark, or
if it needs options for a model as small as that of the suite.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.conformance import toy
from helpers.worlds.worlds import run_world
from helpers.xla.xla_cases import QUICK
from helpers.xla.xla_runs import run_xla

from trainkit.registry import StrategyInfo, find_info, load, make_strategy, register_strategy, strategy_infos

__all__ = ["LIMITS", "ONE_DEVICE", "VARIABLE", "Setting", "register", "settings"]

VARIABLE = "TRAINKIT_CONFORMANCE"
"""Names of modules, separated by commas, that register strategies of other packages when they are imported."""


# Maximum relative difference of losses and parameters to a loop on one device. Each strategy adds the gradients of the
# micro-batches in a different order: in float64 that changes a step by about 1e-15, in float32 by about 1e-7. Over the few
# dozen steps of the suite, the difference grows less than a hundredfold. float16 has three digits.
LIMITS = {"64-true": 1e-11, "32-true": 5e-6, "16-mixed": 5e-3}


@dataclass(frozen=True)
class Setting:
    """A strategy, and the processes and devices on which it runs.

    Attributes:
        name: Short name of the strategy, or an alias.
        processes: Number of processes.
        devices: Number of devices of each process.
        options: Arguments of the strategy's class.
        marks: Names of the pytest marks of its tests.
        needs_loss: A training step without a loss is an error.
        label: Name of the setting, if a strategy has several.
    """

    name: str
    processes: int = 2
    devices: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    needs_loss: bool = False
    label: str = ""

    @property
    def info(self) -> StrategyInfo:
        """The `StrategyInfo` of the strategy."""
        found = toy.INFO if self.name in toy.INFO.names else find_info(self.name)
        assert found is not None
        return found

    @property
    def kind(self) -> Any:
        """The class of the strategy."""
        return load(self.info.path)

    @property
    def precision(self) -> str:
        """The widest precision that the strategy supports."""
        return "64-true" if "64-true" in self.kind.supported_precisions else "32-true"

    @property
    def shards_parameters(self) -> bool:
        """Whether a forward is a collective. This makes an object of the class, because it may depend on an option."""
        if self.info.one_process:
            return False
        made = self.kind(**{**self.info.names.get(self.name, {}), **self.options, "device": "cpu"})
        return bool(made.shards_parameters)

    def strategy(self) -> Any:
        """The value for `strategy=`, in a process of the run: a name, or an object if there are options."""
        register()
        return make_strategy(self.name, **self.options) if self.options else self.name

    def launch(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(setting, *args)` in each process of the strategy, in new processes; returns the results by rank."""
        named = {VARIABLE: os.environ.get(VARIABLE, "")}
        if self.info.one_process:
            return [run_xla(function, self, *args, devices=self.devices, env={**QUICK, **named})]
        return run_world(self.processes, function, self, *args, env=named)


ONE_DEVICE = Setting("single", processes=1)

_SETTINGS = (
    ONE_DEVICE,
    *(Setting(name, marks=("zero",)) for name in ("zero1", "zero2")),
    # with the default threshold, no parameter of a model as small as that of the suite is sharded
    *(
        Setting(name, options={"param_persistence_threshold": 0}, marks=("zero",), needs_loss=True)
        for name in ("zero3", "zero3_offload")
    ),
    Setting("fsdp", options={"wrap": "Linear"}),
    *(Setting("fsdp", size, options={"wrap": "Linear"}, marks=("fsdp",), label=f"fsdp-{size}") for size in (1, 3, 4)),
    Setting("fsdp", 4, options={"wrap": "Linear", "replicas": 2}, marks=("fsdp",), label="fsdp-replicas"),
    Setting("fsdp", options={"accumulate": "reshard"}, marks=("fsdp",), label="fsdp-reshard"),
    Setting("fsdp", options={"offload_params": "cpu"}, marks=("fsdp",), label="fsdp-offload"),
    *(Setting(name, processes=1, devices=4, marks=("xla",)) for name in ("xla", "xla_fsdp")),
)


def register() -> None:
    """Register the strategies that are not part of trainkit in this process."""
    if find_info(*toy.INFO.names) is None:
        register_strategy(toy.INFO)
    _import_named()


def _import_named() -> None:
    for module in filter(None, os.environ.get(VARIABLE, "").split(",")):
        importlib.import_module(module)


def settings() -> list[Any]:
    """The settings of all short names in the registry and of `_SETTINGS`, as parameters of a test.

    `AllReduceStrategy` of `toy.py` is registered only in the processes of its runs. Registered here, all tests would see it.
    """
    _import_named()
    names = [name for info in (*strategy_infos(), toy.INFO) for name in info.names]
    known = {setting.label or setting.name: setting for setting in _SETTINGS}
    chosen = [known.pop(name, Setting(name)) for name in names] + list(known.values())
    return [pytest.param(setting, id=setting.label or setting.name, marks=_marks(setting)) for setting in chosen]


def _marks(setting: Setting) -> list[Any]:
    missing = [package for package in setting.info.packages if importlib.util.find_spec(package) is None]
    marks = [getattr(pytest.mark, name) for name in setting.marks]
    return [*marks, pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]
