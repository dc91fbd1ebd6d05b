"""The registered strategies, and on what each of them runs in the conformance suite.

The suite takes what `trainkit.registry` knows. Nothing here needs an entry but a strategy whose cases need a mark, or options
for a model as small as the suite's.
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


# The largest relative difference to a loop on one device, of losses and parameters. A strategy adds the gradients of the
# micro-batches in an order of its own: in float64 that changes a step by about 1e-15, in float32 by about 1e-7, which the few
# dozen steps of the suite multiply by less than a hundred. float16 has three digits.
LIMITS = {"64-true": 1e-11, "32-true": 5e-6, "16-mixed": 5e-3}


@dataclass(frozen=True)
class Setting:
    """A strategy, and what it runs on.

    Attributes:
        name: short name of the strategy, or an alias.
        processes: number of processes.
        devices: number of devices that each process drives.
        options: arguments of the strategy's class.
        marks: names of the marks of its cases.
    """

    name: str
    processes: int = 2
    devices: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()

    @property
    def info(self) -> StrategyInfo:
        """The declaration of the strategy."""
        found = toy.INFO if self.name in toy.INFO.names else find_info(self.name)
        assert found is not None
        return found

    @property
    def kind(self) -> Any:
        """The class of the strategy, to ask for what it declares."""
        return load(self.info.path)

    @property
    def precision(self) -> str:
        """The widest precision that the strategy supports."""
        return "64-true" if "64-true" in self.kind.supported_precisions else "32-true"

    @property
    def shards_parameters(self) -> bool:
        """Whether a forward is a collective; of an object, since a class may leave it to an option."""
        if self.info.one_process:
            return False
        made = self.kind(**{**self.info.names.get(self.name, {}), **self.options, "device": "cpu"})
        return bool(made.shards_parameters)

    def strategy(self) -> Any:
        """A name or an object for `strategy=`, in a process of the run."""
        register()
        return make_strategy(self.name, **self.options) if self.options else self.name

    def launch(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(setting, *args)` returned in each of the strategy's processes, which are fresh ones."""
        named = {VARIABLE: os.environ.get(VARIABLE, "")}
        if self.info.one_process:
            return [run_xla(function, self, *args, devices=self.devices, env={**QUICK, **named})]
        return run_world(self.processes, function, self, *args, env=named)


ONE_DEVICE = Setting("single", processes=1)

_SETTINGS = (
    ONE_DEVICE,
    *(Setting(name, marks=("zero",)) for name in ("zero1", "zero2")),
    # in a model as small as the suite's nothing is sharded, unless the smallest parameters are
    *(Setting(name, options={"param_persistence_threshold": 0}, marks=("zero",)) for name in ("zero3", "zero3_offload")),
    *(Setting(name, processes=1, devices=4, marks=("xla",)) for name in ("xla", "xla_fsdp")),
)


def register() -> None:
    """Make the strategies of other packages known in this process."""
    if find_info(*toy.INFO.names) is None:
        register_strategy(toy.INFO)
    _import_named()


def _import_named() -> None:
    for module in filter(None, os.environ.get(VARIABLE, "").split(",")):
        importlib.import_module(module)


def settings() -> list[Any]:
    """A setting for each short name in the registry, and those of the table, as parameters of a test.

    The toy is registered in the processes of its runs only: what is registered here would be known to all tests.
    """
    _import_named()
    names = [name for info in (*strategy_infos(), toy.INFO) for name in info.names]
    known = {setting.name: setting for setting in _SETTINGS}
    chosen = [known.get(name, Setting(name)) for name in names] + [s for s in _SETTINGS if s.name not in names]
    return [pytest.param(setting, id=setting.name, marks=_marks(setting)) for setting in chosen]


def _marks(setting: Setting) -> list[Any]:
    missing = [package for package in setting.info.packages if importlib.util.find_spec(package) is None]
    marks = [getattr(pytest.mark, name) for name in setting.marks]
    return [*marks, pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]
