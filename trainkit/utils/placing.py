"""The devices of a model's tensors: reading `device_map`, and moving tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.checks import is_whole
from trainkit.distributed.requested_devices import find_device
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest

__all__ = ["entries", "place", "tensor_devices"]

_DEVICES = "'cpu', 'cuda:0' or the number of a GPU"


def tensor_devices(device_map: Any, model: nn.Module) -> dict[str, torch.device]:
    """The device of each tensor of a model, by name; empty if tensors stay where they are.

    Args:
        device_map: Name of a module, parameter or buffer → device; `""` is the whole model. The longest name counts.
        model: The model.

    Raises:
        UnknownNameError: A name that the model does not have.
        UnsupportedArgumentError: An automatic map, or a disk.
        ConfigurationError: An unknown device, a tensor without a device, or tied tensors with two.
    """
    if device_map is None:
        return {}
    if isinstance(device_map, str):
        raise UnsupportedArgumentError(
            f"load_checkpoint_in_model(device_map={device_map!r}): models are not split automatically. Name the device: "
            "device_map={'': 'cuda:0'}; to train a model that is larger than one device: Accelerator(strategy='zero3')"
        )
    if not isinstance(device_map, Mapping):
        raise ConfigurationError(f"device_map must be a dict of names to devices, such as {{'': 'cpu'}}, not {device_map!r}.")
    known = {name for name, _ in model.named_modules()} | {name for _, _, name, _ in entries(model)}
    for name in device_map:
        if name not in known:
            raise UnknownNameError(f"device_map: {type(model).__name__} has no {name!r}.{nearest(str(name), known)}")
    devices = {name: _device(name, device) for name, device in device_map.items()}
    found: dict[str, torch.device] = {}
    first: dict[int, tuple[str, torch.device]] = {}
    for _, _, name, tensor in entries(model):
        part = name
        while part and part not in devices:
            part = part.rpartition(".")[0]
        if part not in devices:
            raise ConfigurationError(f"device_map has no device for {name!r}. Name a module that contains it, or '' for all.")
        found[name] = devices[part]
        other, device = first.setdefault(id(tensor), (name, found[name]))
        if device != found[name]:
            raise ConfigurationError(
                f"device_map: {other!r} and {name!r} are one tensor, but are assigned to {device} and {found[name]}. Assign "
                "both to the same device."
            )
    return found


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
    """Every parameter and buffer: its module, its name there, its name in the model, the tensor. Tied ones occur repeatedly."""
    for path, module in model.named_modules(remove_duplicate=False):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)):
            yield module, name, f"{path}.{name}" if path else name, tensor


def place(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    dtype_of: Callable[[str], torch.dtype | None],
    filled: Collection[str],
) -> None:
    """Move tensors of a model to other devices and dtypes. Parameters with values stay the same objects.

    Args:
        model: The model.
        devices: Name → device; a tensor without a device stays where it is.
        dtype_of: Name → dtype; `None`: unchanged.
        filled: Names of the tensors that are loaded next: those on the meta device among them are allocated.
    """
    places: dict[int, tuple[Tensor, list[tuple[nn.Module, str, str]]]] = {}
    for module, own_name, name, tensor in entries(model):
        places.setdefault(id(tensor), (tensor, []))[1].append((module, own_name, name))
    for tensor, held in places.values():
        new = _moved(tensor, [name for _, _, name in held], devices, dtype_of, filled)
        if new is not None:
            _replace(tensor, new, held)


def _moved(
    tensor: Tensor,
    names: Sequence[str],
    devices: Mapping[str, torch.device],
    dtype_of: Callable[[str], torch.dtype | None],
    filled: Collection[str],
) -> Tensor | None:
    """A tensor on its new device and in its new dtype; `None` if neither changes."""
    is_filled = any(name in filled for name in names)
    here = torch.device("cpu") if tensor.is_meta else tensor.device
    device, dtype = devices.get(names[0], here), tensor.dtype
    if is_filled and (tensor.is_floating_point() or tensor.is_complex()):
        dtype = next((found for name in names if (found := dtype_of(name)) is not None), dtype)
    if is_lazy(tensor) or (tensor.is_meta and not is_filled) or (device, dtype) == (tensor.device, tensor.dtype):
        return None
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device, dtype=dtype)
    return tensor.detach().to(device, dtype)


def _replace(old: Tensor, new: Tensor, places: list[tuple[nn.Module, str, str]]) -> None:
    if isinstance(old, nn.Parameter) and not old.is_meta:
        old.data = new
        return
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        vars(new).update(vars(old))
    for module, name, _ in places:
        setattr(module, name, new)
