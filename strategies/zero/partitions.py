"""Parameter sharding in stage 3: shards parameters across the processes, gathers them, and restores them after the run.

Also what other code must know of sharded parameters: `torch.nn.init` is applied to full ones, and `transformers` is notified,
so that its `generate` keeps the processes synchronized and its loading code fills the shards.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainkit.errors import ModuleError
from trainkit.strategies.zero.deepspeed_api import Session, quiet
from trainkit.strategies.zero.nvme import disk_checks, partition, swapper

__all__ = ["Sharding", "announce_zero3", "is_sharded", "numel", "shard_transformers_models"]


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
        config: Returns the DeepSpeed configuration for some parameters, with the folder for offload to NVMe.
        device: The device on which parameters are used.
    """

    def __init__(
        self,
        session: Session,
        config: Callable[[Iterable[Tensor]], dict[str, Any]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._session = session
        self._config = config
        self._device = device
        self._dtype = dtype
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
            held.data = buffer.copy_(held.data).data
            held.final_location = "nvme"
            reader.swap_out_and_release([parameter])
        elif not parameter.ds_persist:
            held.data = held.data.to("cpu" if reader is not None else made.remote_device)

    def _init(self, parameters: Iterable[Tensor], make: Callable[..., Any], **options: Any) -> Any:
        """Call `make`, DeepSpeed's `Init`, which shards parameters; with its own disk reader for offload to NVMe."""
        config, reader = self._config(parameters), None
        offload = config["zero_optimization"].get("offload_param", {})
        with quiet(), disk_checks():
            if offload.get("device") == "nvme":  # each new reader deletes the files in its folder
                offload["nvme_path"] = str(Path(offload["nvme_path"]) / f"parameters-{len(self._swappers)}")
                reader = swapper(config, self._dtype)
                self._swappers.append(reader)
            return make(config_dict_or_path=config, param_swapper=reader, **options)

    def building(self, pretrained: bool = False) -> AbstractContextManager[None]:
        """Context manager that shards each layer as soon as it is created, with rank 0's values.

        Args:
            pretrained: Shard only the layers of models that `transformers` creates.

        Raises:
            ModuleError: A parameter was changed after it was sharded; the change is lost.
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

        with quiet(), announce_zero3(first=True), self._init([], Watching, tensor_overrides=set()), GatheredInit(self.gather):
            yield
        changed = sum(parameter._version != version for parameter, version in Watching.versions.values())
        if changed:
            raise ModuleError(
                f"configure_model changed {changed} parameters through detach() or a view after their layers were created. "
                "Stage 3 shards a layer as soon as it is created, so the change is lost. Change the parameter itself: "
                "torch.nn.init.normal_(layer.weight), or self.apply(function), which passes full layers to the function."
            )

    @contextmanager
    def gather(self, parameters: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
        """Context manager in which these parameters are full on every process. Collective.

        Args:
            parameters: The parameters; those that are not sharded are not affected.
            changed: Keep the changes that rank 0 makes to them.
        """
        chosen = [parameter for parameter in parameters if is_sharded(parameter)]
        with self._session.package.zero.GatheredParameters(chosen, modifier_rank=0 if changed else None):
            yield

    def release(self, collective: bool) -> None:
        """Restore the modules: parameters that were full before the run are full again, on their former device.

        Parameters that were sharded when they were created stay sharded, unless there is only one process.

        Args:
            collective: Whether all processes call this; if not, nothing is gathered and all parameters stay sharded.
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
        parts = {id(part) for module in self._modules for part in module.modules()}
        stack[:] = [module for module in stack if id(module) not in parts]
        _restore_linear()
        for reader in self._swappers:
            reader.close()
        self._full = {}
        self._modules = []
        self._swappers = []

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


class GatheredInit(TorchFunctionMode):
    """Context manager that gathers a sharded parameter before an in-place operation, and keeps rank 0's result.

    It allows layers to be initialized after all of them are created, as in `transformers` and PEFT.

    Args:
        gathered: Context manager that gathers parameters; with `True` it keeps changes to them.
    """

    def __init__(self, gathered: Callable[[Iterable[Tensor], bool], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._gathered = gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if isinstance(target, nn.Parameter) and _in_place(func) and _has_shard(target):
            with self._gathered([target], True):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _in_place(func: Any) -> bool:
    name = str(getattr(func, "__name__", ""))
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _has_shard(parameter: Any) -> bool:
    return bool(parameter.numel() != getattr(parameter, "ds_numel", parameter.numel()))


# ----------------------------------------------------------------------------------------------- models of transformers


_MODULE = "transformers.integrations.deepspeed"


class _Stage3:
    """The part of a DeepSpeed configuration that `transformers` reads."""

    config: ClassVar[dict[str, Any]] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}

    def is_zero3(self) -> bool:
        """Always `True`."""
        return True


_STAGE3 = _Stage3()


class _Patch:
    """Patches an attribute of another package's module while it has users, which may end in any order.

    Attributes:
        users: The current users; the latest is last.
    """

    def __init__(self, name: str) -> None:
        self.users: list[tuple[object, Any]] = []
        self._name = name
        self._before = None

    @contextmanager
    def apply(self, module: Any, value: Any, user: Any = None) -> Iterator[None]:
        """Context manager in which the attribute is patched, with the value of its first user."""
        if not self.users:
            self._before = getattr(module, self._name)
            setattr(module, self._name, value)
        mine = object(), user
        self.users.append(mine)
        try:
            yield
        finally:
            self.users.remove(mine)
            if not self.users:
                setattr(module, self._name, self._before)


_config = _Patch("_hf_deepspeed_config_weak_ref")
_init = _Patch("Init")


@contextmanager
def announce_zero3(first: bool = False) -> Iterator[None]:
    """Context manager in which `transformers`, if it is imported, knows that ZeRO-3 is active.

    Args:
        first: Import `transformers` first, if it is installed, because the body may import it.
    """
    if first and importlib.util.find_spec("transformers") is not None:
        importlib.import_module(_MODULE)
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    with _config.apply(module, weakref.ref(_STAGE3)):
        yield


@contextmanager
def shard_transformers_models(zero: Any, building: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager in which `transformers` creates its models inside `building()`. Other modules are not affected.

    Args:
        zero: The module `deepspeed.zero`, whose `Init` `transformers` calls.
        building: Context manager that shards layers as they are created. If several are active, the latest is used.
    """
    kind: Any = zero.Init

    class Init(kind):  # type: ignore[misc]
        def __new__(cls, *args: Any, config_dict_or_path: Any = None, **kwargs: Any) -> Any:
            if config_dict_or_path is not _Stage3.config:
                return super().__new__(cls)
            _, latest = _init.users[-1]
            return latest()

    with announce_zero3(first=True), _init.apply(zero, Init, building):
        yield
