"""Parameters of stage 3: divided over the processes, made whole for a moment, and given back as they came."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.strategies._aio import checked
from trainkit.strategies._deepspeed import Session, quiet
from trainkit.strategies._zero_swap import swapper

__all__ = ["Sharding", "is_sharded", "numel"]

# What DeepSpeed puts into a module.
_LEFT_IN_MODULES = (
    "_external_params",
    "_original_parameters",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "post_bwd_fn",
    "pre_bwd_fn",
)


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is one of stage 3's."""
    return hasattr(parameter, "ds_id")


def numel(parameter: Any) -> int:
    """The elements of a parameter, divided or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class Sharding:
    """Divides parameters, and gives those back whole that came whole.

    Args:
        session: DeepSpeed.
        config: DeepSpeed's, for these parameters and a folder on the disk that some may be offloaded to.
        device: where parameters are used.
    """

    def __init__(
        self, session: Session, config: Callable[[Iterable[Tensor]], dict[str, Any]], device: torch.device
    ) -> None:
        self._session, self._config, self._device = session, config, device
        self._swappers: list[Any] = []
        self._whole: dict[int, tuple[Any, dict[str, Any], torch.device]] = {}  # that came whole, as they were
        self._modules: list[nn.Module] = []

    def divide(self, module: nn.Module) -> None:
        """Divide the parameters of a module, each with rank 0's values; one at a time is on the device."""
        self._modules.append(module)
        for parameter in module.parameters():
            if not is_sharded(parameter):
                self._whole[id(parameter)] = parameter, dict(vars(parameter)), parameter.device
        config, reader = self._config(module.parameters()), None
        offload = config["zero_optimization"].get("offload_param", {})
        with quiet(), checked():
            if offload.get("device") == "nvme":  # each reader empties its folder when it is made
                offload["nvme_path"] = str(Path(offload["nvme_path"]) / f"parameters-{len(self._swappers)}")
                reader = swapper(config, next(module.parameters()).dtype)
                self._swappers.append(reader)
            self._session.package.zero.Init(module=module, config_dict_or_path=config, param_swapper=reader)

    @contextmanager
    def gathered(self, parameters: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
        """Within it these parameters are whole on every process; collective.

        Args:
            parameters: divided ones; others are left as they are.
            changed: what rank 0 makes of them is kept.
        """
        chosen = [parameter for parameter in parameters if is_sharded(parameter)]
        with self._session.package.zero.GatheredParameters(chosen, modifier_rank=0 if changed else None):
            yield

    def give_back(self, collective: bool) -> None:
        """Leave the modules as they were: what came whole is whole again, on the device that it was on.

        Args:
            collective: the other processes do so too; else nothing is gathered, and parameters stay divided.
        """
        if collective:
            for parameter, before, device in self._whole.values():
                _make_whole(parameter, before, device)
        for module in self._modules:
            for part in module.modules():
                _clean(part)
        stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        own = {id(part) for module in self._modules for part in module.modules()}
        stack[:] = [module for module in stack if id(module) not in own]
        _restore_linear()
        for reader in self._swappers:
            reader.close()
        self._whole, self._modules, self._swappers = {}, [], []


def _make_whole(parameter: Any, before: dict[str, Any], device: torch.device) -> None:
    parameter.all_gather()
    data = parameter.data.detach().to(device, copy=True)
    parameter.partition()  # which frees the buffer of one that came from a disk
    for name in [name for name in vars(parameter) if name not in before]:
        delattr(parameter, name)
    parameter.data = data


def _clean(module: nn.Module) -> None:
    module._parameters = dict(dict.items(module._parameters))
    for name in [name for name in vars(module) if name in _LEFT_IN_MODULES or name.startswith("ds_")]:
        delattr(module, name)


def _restore_linear() -> None:
    """Put ``torch.nn.functional.linear`` back, which DeepSpeed replaces by one that does not keep whole weights."""
    room = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    kept = getattr(room.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if kept is not None and torch.nn.functional.linear is room.zero3_linear_wrap:
        torch.nn.functional.linear = kept
