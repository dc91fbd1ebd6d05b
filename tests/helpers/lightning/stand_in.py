"""The base classes of Lightning under its names, for tests without the package: `lightning = stand_in(monkeypatch)`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.module.hook_table import HOOKS, STATE_METHODS

__all__ = ["stand_in"]


def _nothing(self: Any, *arguments: Any, **named: Any) -> Any:
    return {} if not arguments else None


_HOOKS = dict.fromkeys([*HOOKS, *STATE_METHODS], _nothing) | {"state_key": property(lambda self: type(self).__qualname__)}
_METHODS = dict.fromkeys(["log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint"], _nothing)
_STEP = {"optimizer_step": _nothing}
_PLACES = dict.fromkeys(("save_dir", "root_dir", "log_dir"), property(lambda self: None))


def stand_in(monkeypatch: pytest.MonkeyPatch, package: str = "lightning.pytorch") -> SimpleNamespace:
    """Put the modules into `sys.modules`; returns the classes.

    Args:
        monkeypatch: Removes them at the end of the test.
        package: "lightning.pytorch" or "pytorch_lightning".
    """

    def add(module: str, name: str, base: type, members: dict[str, Any]) -> Any:
        where = f"{package}.{module}"
        kind = type(name, (base,), {**members, "__module__": where})
        monkeypatch.setitem(sys.modules, where, ModuleType(where))
        setattr(sys.modules[where], name, kind)
        return kind

    callback = add("callbacks.callback", "Callback", object, _HOOKS)
    logger = add("loggers.logger", "Logger", object, _METHODS | _PLACES)
    return SimpleNamespace(
        Callback=callback,
        Checkpoint=add("callbacks.checkpoint", "Checkpoint", callback, {}),
        EarlyStopping=add("callbacks.early_stopping", "EarlyStopping", callback, {}),
        Logger=logger,
        CSVLogger=add("loggers.csv_logs", "CSVLogger", logger, {"name": "digits", "version": 0}),
        WandbLogger=add("loggers.wandb", "WandbLogger", logger, {"_log_model": True}),
        DDPStrategy=add("strategies.ddp", "DDPStrategy", add("strategies.strategy", "Strategy", object, _STEP), {}),
        Profiler=add("profilers.profiler", "Profiler", object, {}),
        LightningModule=add("core.module", "LightningModule", torch.nn.Module, {}),
        LightningDataModule=add("core.datamodule", "LightningDataModule", object, {}),
    )
