"""Parameter sharding in stage 3: shards parameters across the processes, gathers them, and restores them after the run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainkit.errors import ModuleError
from trainkit.strategies.zero.aio import checked
from trainkit.strategies.zero.deepspeed_api import Session, quiet
from trainkit.strategies.zero.gathered_init import GatheredInit
from trainkit.strategies.zero.swap import partition, swapper
from trainkit.strategies.zero.transformers_models import announce_zero3, shard_transformers_models

__all__ = ["Sharding", "is_sharded", "numel"]

# Attributes that DeepSpeed adds to a module.
_LEFT_IN_MODULES = (
    "_external_params",
    "_original_parameters",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "post_bwd_fn",
    "pre_bwd_fn",
)


def is_sharded(parameter: Tensor) -> bool:
    """Whether stage 3 has sharded the parameter."""
    return hasattr(parameter, "ds_id")


def numel(parameter: Any) -> int:
    """The number of elements of the full parameter, even if it is sharded."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class Sharding:
    """Shards parameters, and at the end of the run restores those that were full before.

    Args:
        session: the DeepSpeed session.
        config: returns the DeepSpeed configuration for some parameters, with the folder for offload to NVMe.
        device: the device on which parameters are used.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        session: Session,
        config: Callable[[Iterable[Tensor]], dict[str, Any]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._session, self._config, self._device, self._dtype = session, config, device, dtype
        self._swappers: list[Any] = []
        self._full: dict[int, tuple[Any, dict[str, Any], torch.device]] = {}  # full before the run
        self._modules: list[nn.Module] = []

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of a module, with rank 0's values; only one full parameter is on the device at a time."""
        self._modules.append(module)
        for parameter in module.parameters():
            if not is_sharded(parameter):
                self._full[id(parameter)] = parameter, dict(vars(parameter)), parameter.device
        sharded: list[Any] = [parameter for parameter in module.parameters() if is_sharded(parameter)]
        made = self._init(module.parameters(), self._session.package.zero.Init, module=module)
        for parameter in sharded:
            if parameter.nvme_swapper is None:  # sharded by an earlier run, or not offloaded to NVMe
                self._place(parameter, made)

    def _place(self, parameter: Any, made: Any) -> None:
        """Move the shard of a parameter that is already sharded to where this run keeps its shards."""
        held, reader = parameter.ds_tensor, made.param_swapper
        parameter.nvme_swapper = reader
        if reader is not None and reader.swappable_tensor(numel=held.ds_numel):
            buffer = reader.get_buffer(parameter, held.ds_numel)
            held.data, held.final_location = buffer.copy_(held.data).data, "nvme"
            reader.swap_out_and_release([parameter])
        elif not parameter.ds_persist:
            held.data = held.data.to("cpu" if reader is not None else made.remote_device)

    def _init(self, parameters: Iterable[Tensor], make: Callable[..., Any], **options: Any) -> Any:
        """Call `make`, DeepSpeed's `Init`, which shards parameters; with its own disk reader for offload to NVMe."""
        config, reader = self._config(parameters), None
        offload = config["zero_optimization"].get("offload_param", {})
        with quiet(), checked():
            if offload.get("device") == "nvme":  # each new reader deletes the files in its folder
                offload["nvme_path"] = str(Path(offload["nvme_path"]) / f"parameters-{len(self._swappers)}")
                reader = swapper(config, self._dtype)
                self._swappers.append(reader)
            return make(config_dict_or_path=config, param_swapper=reader, **options)

    def building(self, pretrained: bool = False) -> AbstractContextManager[None]:
        """Context manager that shards each layer as soon as it is created, with rank 0's values.

        Args:
            pretrained: shard only the layers of models that `transformers` creates.

        Raises:
            ModuleError: a parameter was changed after it was sharded; the change is lost.
        """
        return shard_transformers_models(self._session.package.zero, self._building) if pretrained else self._building()

    @contextmanager
    def _building(self) -> Iterator[None]:
        kind: Any = self._session.package.zero.Init

        class Watching(kind):  # type: ignore[misc]
            versions: ClassVar[dict[int, tuple[Any, int]]] = {}

            def _partition(self, param_list: list[Any], *args: Any, **kwargs: Any) -> None:
                super()._partition(param_list, *args, **kwargs)
                self.versions.update({id(p): (p, p._version) for p in param_list})

        with quiet(), announce_zero3(first=True), self._init([], Watching, tensor_overrides=set()), GatheredInit(self.gathered):
            yield
        changed = sum(parameter._version != version for parameter, version in Watching.versions.values())
        if changed:
            raise ModuleError(
                f"configure_model changed {changed} parameters through detach() or a view after their layers were created. "
                "Stage 3 shards a layer as soon as it is created, so the change is lost. Change the parameter itself: "
                "torch.nn.init.normal_(layer.weight), or self.apply(function), which passes full layers to the function."
            )

    @contextmanager
    def gathered(self, parameters: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
        """Context manager in which these parameters are full on every process. Collective.

        Args:
            parameters: the parameters; those that are not sharded are not affected.
            changed: keep the changes that rank 0 makes to them.
        """
        chosen = [parameter for parameter in parameters if is_sharded(parameter)]
        with self._session.package.zero.GatheredParameters(chosen, modifier_rank=0 if changed else None):
            yield

    def release(self, collective: bool) -> None:
        """Restore the modules: parameters that were full before the run are full again, on their former device.

        Parameters that were sharded when they were created stay sharded, unless there is only one process.

        Args:
            collective: whether all processes call this; if not, nothing is gathered and all parameters stay sharded.
        """
        for parameter, before, device in self._full.values() if collective else ():
            _unshard(parameter, before, device)
        for parameter in {id(p): p for module in self._modules for p in module.parameters()}.values():
            if is_sharded(parameter):
                self._keep(parameter)
        for module in self._modules:
            for part in module.modules():
                _clean(part)
        stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        own = {id(part) for module in self._modules for part in module.modules()}
        stack[:] = [module for module in stack if id(module) not in own]
        _restore_linear()
        for reader in self._swappers:
            reader.close()
        self._full, self._modules, self._swappers = {}, [], []

    def _keep(self, parameter: Any) -> None:
        """Keep a parameter sharded and in memory after the run; with one process, make it full."""
        if parameter.ds_zero_partition_world_size == 1:
            _unshard(parameter, {}, self._device)
        elif parameter.ds_tensor.final_location == "nvme":
            held = parameter.ds_tensor
            held.data = partition(parameter, held.ds_numel).read()
            held.final_location, held.status = None, type(held.status).AVAILABLE
        parameter.nvme_swapper = None


def _unshard(parameter: Any, before: dict[str, Any], device: torch.device) -> None:
    parameter.all_gather()
    data = parameter.data.detach().to(device, copy=True)
    parameter.partition()  # frees its buffer, if it was read from NVMe
    for name in [name for name in vars(parameter) if name not in before]:
        delattr(parameter, name)
    parameter.data = data


def _clean(module: nn.Module) -> None:
    module._parameters = dict(dict.items(module._parameters))
    for name in [name for name in vars(module) if name in _LEFT_IN_MODULES or name.startswith("ds_")]:
        delattr(module, name)


def _restore_linear() -> None:
    """Restore `torch.nn.functional.linear`, which DeepSpeed replaces by a version that does not keep full weights."""
    module = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    kept = getattr(module.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if kept is not None and torch.nn.functional.linear is module.zero3_linear_wrap:
        torch.nn.functional.linear = kept
