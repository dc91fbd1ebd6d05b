"""Parameters of stage 3: divided over the processes, made whole for a moment, and given back as they came."""

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
from trainkit.strategies.zero.swap import partition, swapper
from trainkit.strategies.zero.transformers_models import divided_by, told_transformers
from trainkit.strategies.zero.whole_init import WholeInit

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
        dtype: of parameters.
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
        self._whole: dict[int, tuple[Any, dict[str, Any], torch.device]] = {}  # that came whole, as they were
        self._modules: list[nn.Module] = []

    def divide(self, module: nn.Module) -> None:
        """Divide the parameters of a module, each with rank 0's values; one at a time is on the device."""
        self._modules.append(module)
        for parameter in module.parameters():
            if not is_sharded(parameter):
                self._whole[id(parameter)] = parameter, dict(vars(parameter)), parameter.device
        divided: list[Any] = [parameter for parameter in module.parameters() if is_sharded(parameter)]
        made = self._init(module.parameters(), self._session.package.zero.Init, module=module)
        for parameter in divided:
            if parameter.nvme_swapper is None:  # it comes from an earlier run, or goes to no disk
                self._place(parameter, made)

    def _place(self, parameter: Any, made: Any) -> None:
        """Put a partition where those are that are made now."""
        held, reader = parameter.ds_tensor, made.param_swapper
        parameter.nvme_swapper = reader
        if reader is not None and reader.swappable_tensor(numel=held.ds_numel):
            buffer = reader.get_buffer(parameter, held.ds_numel)
            held.data, held.final_location = buffer.copy_(held.data).data, "nvme"
            reader.swap_out_and_release([parameter])
        elif not parameter.ds_persist:
            held.data = held.data.to("cpu" if reader is not None else made.remote_device)

    def _init(self, parameters: Iterable[Tensor], make: Callable[..., Any], **options: Any) -> Any:
        """What divides parameters, with a reader of its own where they go to a disk."""
        config, reader = self._config(parameters), None
        offload = config["zero_optimization"].get("offload_param", {})
        with quiet(), checked():
            if offload.get("device") == "nvme":  # each reader empties its folder when it is made
                offload["nvme_path"] = str(Path(offload["nvme_path"]) / f"parameters-{len(self._swappers)}")
                reader = swapper(config, self._dtype)
                self._swappers.append(reader)
            return make(config_dict_or_path=config, param_swapper=reader, **options)

    def building(self, pretrained: bool = False) -> AbstractContextManager[None]:
        """Within it each layer is divided as soon as it is made, with rank 0's values.

        Args:
            pretrained: only layers of models that ``transformers`` makes.

        Raises:
            ModuleError: a parameter was changed after that, which is lost.
        """
        return divided_by(self._session.package.zero, self._building) if pretrained else self._building()

    @contextmanager
    def _building(self) -> Iterator[None]:
        kind: Any = self._session.package.zero.Init

        class Watching(kind):  # type: ignore[misc]
            divided: ClassVar[dict[int, tuple[Any, int]]] = {}

            def _partition(self, param_list: list[Any], *args: Any, **kwargs: Any) -> None:
                super()._partition(param_list, *args, **kwargs)
                self.divided.update({id(p): (p, p._version) for p in param_list})

        with quiet(), told_transformers(first=True), self._init([], Watching, tensor_overrides=set()), WholeInit(self.gathered):
            yield
        changed = sum(parameter._version != version for parameter, version in Watching.divided.values())
        if changed:
            raise ModuleError(
                f"configure_model has changed {changed} parameters after their layers were made, and not through the "
                "parameters themselves, but through detach() or a view. In stage 3 a layer is divided as soon as it is made, "
                "and that is lost. Write into the parameter, torch.nn.init.normal_(layer.weight), or use self.apply(function), "
                "which gets each layer whole."
            )

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

        What was divided when it was made stays divided over several processes.
        """
        for parameter, before, device in self._whole.values() if collective else ():
            _make_whole(parameter, before, device)
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
        self._whole, self._modules, self._swappers = {}, [], []

    def _keep(self, parameter: Any) -> None:
        """A parameter that no process has had whole: it stays divided, in memory, where there are several processes."""
        if parameter.ds_zero_partition_world_size == 1:
            _make_whole(parameter, {}, self._device)
        elif parameter.ds_tensor.final_location == "nvme":
            held = parameter.ds_tensor
            held.data = partition(parameter, held.ds_numel).read()
            held.final_location, held.status = None, type(held.status).AVAILABLE
        parameter.nvme_swapper = None


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
