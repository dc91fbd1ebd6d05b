"""A model's tensors on other devices and in other dtypes, or as they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.checks import is_whole
from trainkit.distributed.device import find_device
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest

__all__ = ["DeviceMap", "Placing"]

_DEVICES = "'cpu', 'cuda:0' or a number of a GPU"


class DeviceMap:
    """Which device each tensor of a model is to be on.

    Args:
        device_map: module, parameter or buffer by its name → device; ``""`` is the whole model. The longest name counts.
            ``None``: tensors stay where they are.
        model: the model.

    Raises:
        UnknownNameError: a name that the model has not.
        UnsupportedArgumentError: a map that is to be worked out, or a disk.
        ConfigurationError: a device that is not there, or tensors that have none, or tied ones that have two.
    """

    def __init__(self, device_map: Any, model: nn.Module) -> None:
        self._devices: dict[str, torch.device] | None = None
        if device_map is None:
            return
        if isinstance(device_map, str):
            raise UnsupportedArgumentError(
                f"load_checkpoint_in_model(device_map={device_map!r}): models are not divided by themselves. Name the device: "
                "device_map={'': 'cuda:0'}; to train what is larger than one device: Accelerator(strategy='zero3')"
            )
        if not isinstance(device_map, Mapping):
            raise ConfigurationError(
                f"device_map must be a dict of names to devices, such as {{'': 'cpu'}}, not {device_map!r}."
            )
        known = {name for name, _ in model.named_modules()} | {name for _, _, name, _ in entries(model)}
        for name in device_map:
            if name not in known:
                raise UnknownNameError(f"device_map: {type(model).__name__} has no {name!r}.{nearest(str(name), known)}")
        self._devices = {name: _device(name, device) for name, device in device_map.items()}
        self._check(model)

    def device_of(self, name: str) -> torch.device | None:
        """The device of a tensor; ``None``: where it is."""
        if self._devices is None:
            return None
        while name and name not in self._devices:
            name = name.rpartition(".")[0]
        return self._devices.get(name)

    def _check(self, model: nn.Module) -> None:
        first: dict[int, tuple[str, torch.device]] = {}
        for _, _, name, tensor in entries(model):
            device = self.device_of(name)
            if device is None:
                raise ConfigurationError(f"device_map says nothing of {name!r}. Name a module that it is in, or '' for all.")
            other, where = first.setdefault(id(tensor), (name, device))
            if where != device:
                raise ConfigurationError(
                    f"device_map: {other!r} and {name!r} are one tensor, and are to be on {where} and on {device}. Give both "
                    "the same device."
                )


def _device(name: str, device: Any) -> torch.device:
    if device == "disk":
        raise UnsupportedArgumentError(
            f"device_map={{{name!r}: 'disk'}}: weights are not offloaded here. Use a device, {_DEVICES}; to train with "
            "parameters on a disk: ZeROStrategy(stage=3, offload_params='nvme', nvme_path=...)"
        )
    if not (is_whole(device) or isinstance(device, str | torch.device)):
        raise ConfigurationError(f"device_map={{{name!r}: {device!r}}}: expected a device, {_DEVICES}.")
    if device == "auto":
        raise UnsupportedArgumentError(f"device_map={{{name!r}: 'auto'}}: name the device, {_DEVICES}.")
    return find_device(f"cuda:{device}" if isinstance(device, int) else device)


def entries(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Every parameter and buffer: its module, its name there, its name in the model, the tensor; tied ones several times."""
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    yield module, name, f"{path}.{name}" if path else name, tensor


class Placing:
    """Puts tensors of a model elsewhere, and back if what follows fails. Parameters that have values stay the same objects.

    Args:
        model: the model.
        devices: where.
        dtype_of: by name the dtype that a tensor is to have; ``None``: its own.
        filled: names of the tensors that will get values: those on the meta device among them get memory.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: DeviceMap,
        dtype_of: Callable[[str], torch.dtype | None],
        filled: Collection[str],
    ) -> None:
        self._model, self._devices, self._dtype_of = model, devices, dtype_of
        places: dict[int, list[tuple[nn.Module, str, str]]] = {}
        self._tensors: dict[int, Tensor] = {}
        for module, own_name, name, tensor in entries(model):
            places.setdefault(id(tensor), []).append((module, own_name, name))
            self._tensors[id(tensor)] = tensor
        self._places = places
        self._filled = {key for key, held in places.items() if any(name in filled for _, _, name in held)}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        try:
            for key, tensor in self._tensors.items():
                if not is_lazy(tensor):
                    self._place(key, tensor)
        except BaseException:
            self._back()
            raise

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._back()

    def _place(self, key: int, tensor: Tensor) -> None:
        places = self._places[key]
        device, dtype = self._devices.device_of(places[0][2]), tensor.dtype
        if key in self._filled and (tensor.is_floating_point() or tensor.is_complex()):
            dtype = next((d for _, _, name in places if (d := self._dtype_of(name)) is not None), dtype)
        if tensor.is_meta:
            if key in self._filled:
                made = torch.empty_like(tensor, device=device or "cpu", dtype=dtype)
                self._exchange(places, tensor, made)
        elif (device, dtype) not in ((tensor.device, tensor.dtype), (None, tensor.dtype)):
            self._exchange(places, tensor, tensor.detach().to(device or tensor.device, dtype))

    def _exchange(self, places: list[tuple[nn.Module, str, str]], old: Tensor, new: Tensor) -> None:
        if isinstance(old, nn.Parameter):
            if not old.is_meta:
                before = old.data
                old.data = new
                self._undo.append(lambda: setattr(old, "data", before))
                return
            made = nn.Parameter(new, requires_grad=old.requires_grad)
            made.__dict__.update(old.__dict__)
            new = made
        for module, name, _ in places:
            own: Any = module._parameters if isinstance(old, nn.Parameter) else module._buffers
            own[name] = new
            self._undo.append(lambda own=own, name=name: own.__setitem__(name, old))  # type: ignore[misc]

    def _back(self) -> None:
        for undo in reversed(self._undo):
            undo()
