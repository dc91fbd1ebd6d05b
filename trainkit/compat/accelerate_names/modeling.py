"""`load_checkpoint_in_model`: load weights from a folder or file into a model; and its model without wrappers."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.accelerator.prepared_models import Wrapped, unwrap
from trainkit.accelerator.processes import strategy_of
from trainkit.checkpoint.manifest import DIGEST, MANIFEST
from trainkit.checkpoint.plain_files import read_tensors
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checks import is_whole
from trainkit.console import notice, quantity, warn
from trainkit.distributed.parameter_placement import is_dtensor
from trainkit.distributed.requested_devices import find_device
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
    UnknownNameError,
    UnsupportedArgumentError,
    nearest,
)
from trainkit.optim.parameter_names import clean_names, clean_paths
from trainkit.registry import strategy_infos
from trainkit.state.model import ModelState, plan_model
from trainkit.state.training_objects import model_stems
from trainkit.tagged_json.codec import MAX_JSON_BYTES, strict_json

__all__ = [
    "extract_model_from_parallel",
    "init_empty_weights",
    "is_compiled_module",
    "is_peft_model",
    "load_checkpoint_in_model",
    "set_module_tensor_to_device",
]

_WEIGHTS = "model.safetensors"
_INDEX = ".safetensors.index.json"
_PICKLES = (".bin", ".bin.index.json", ".ckpt", ".pkl", ".pt", ".pth")
_SHOWN = 5
_DEVICES = "'cpu', 'cuda:0' or the number of a GPU"
_AROUND = (Wrapped, nn.parallel.DistributedDataParallel, nn.DataParallel)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, int | str | torch.device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model, in place. If they do not fit, nothing is changed.

    It reads the files of `Accelerator.save_model`, `save_pretrained` and `safetensors` (one file, or several with an
    index), and the model of a checkpoint of `save_state` or a `Trainer`. It never unpickles. Values are read when they are
    needed, so the host needs no memory for a second model. Each process calls it before `prepare`; a model that is prepared
    under DDP or FSDP can also be loaded. Under FSDP each process reads its shards only, so a model that is larger than the
    memory of a process is created on the meta device, prepared, and loaded.

    Args:
        model: A model on the meta device (`with torch.device("meta"): …`) or with values. Parameters with values stay the
            same objects.
        checkpoint: A folder, a `.safetensors` file or the `.index.json` of several.
        device_map: Name of a module → device, such as `{"": "cuda:0"}` for the whole model; the longest name counts.
            Default:
            each tensor stays where it is, and those on the meta device are allocated on the CPU. With several devices the
            model itself must move its activations. Not for a model that is prepared under FSDP.
        offload_folder: No effect: nothing is offloaded.
        dtype: The dtype of floating-point tensors, such as `torch.bfloat16`. Default: the model's dtypes. Not
            for a model that is prepared under FSDP.
        offload_state_dict: No effect: values stay on the disk until they are used.
        offload_buffers: No effect: nothing is offloaded.
        keep_in_fp32_modules: Names of modules that become float32 instead of `dtype`.
        offload_8bit_bnb: Only `False`.
        strict: Names that are missing in the checkpoint or in the model are an error; otherwise a notice names them.
        full_state_dict: Only `True`: the files contain whole tensors.
        broadcast_from_rank0: Only `False`: each process reads the files.

    Raises:
        CheckpointNotFoundError: There are no weights.
        CorruptCheckpointError: A file is damaged, or a pickle.
        StateMismatchError: The weights do not fit the model; the message lists all differences.
        ConfigurationError: An argument is wrong, or the model is sharded, and not by `Accelerator.prepare` under FSDP.
        UnsupportedArgumentError: An argument is not supported; the message says what to use instead.

    Example:
        ```python
        load_checkpoint_in_model(model, "exported/model.safetensors", dtype=torch.bfloat16)
        ```
    """
    _refuse_unsupported(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    target, inner = _dtype(dtype), extract_model_from_parallel(model)
    if any(hasattr(p, mark) for p in inner.parameters() for info in strategy_infos() for mark in info.parameter_marks):
        raise ConfigurationError(
            "load_checkpoint_in_model: the model is prepared under ZeRO, whose sharded parameters and master weights "
            "would not change. Load the weights before prepare, or from a checkpoint with "
            "accelerator.load_state(folder, restore={'model'})"
        )
    sharded, load_sharded = _sharded(inner, {"device_map": device_map, "dtype": dtype})
    devices = _tensor_devices(device_map, inner)
    what = str(checkpoint)
    state = _read(Path(checkpoint))
    sources = state.tensors.keys() | state.aliases.keys()
    if sources and sources.isdisjoint(clean_names(inner).values()):
        raise StateMismatchError(
            f"{what} has no tensor with a name of {type(inner).__name__}: the file has {_some(sources)}, and the model has "
            f"{_some(clean_names(inner).values())}. Nothing was changed. Load it into a model of the same class."
        )
    names = clean_paths(inner, [name for _, _, name, _ in _entries(inner)])

    def dtype_of(name: str) -> torch.dtype | None:
        kept = any(key == names[name] or f"{key}." in names[name] for key in keep_in_fp32_modules or ())
        return torch.float32 if target is not None and kept else target

    with _restored_on_error(inner):
        _place(inner, devices, dtype_of, {name for name, clean in names.items() if clean in sources})
        said = plan_model(inner, state, strict=strict, what=what, placeholders=sharded, load_placeholders=load_sharded)()
    for text in said:
        notice(text)
    left = [name for _, _, name, tensor in _entries(inner) if tensor.is_meta]
    if left:
        warn(
            f"{what}: {quantity(len(left), 'tensor of the model is', 'tensors of the model are')} still on the meta device, "
            f"without values: {_some(left)}. "
            "Initialize them before you use the model."
        )


def _sharded(
    model: nn.Module, placing: Mapping[str, Any]
) -> tuple[Mapping[int, Tensor], Callable[[dict[nn.Parameter, Tensor]], None]]:
    """`Strategy.stored_weights` and `Strategy.load_weights` of a prepared model.

    Raises:
        ConfigurationError: Parameters are sharded, and no strategy can load them, or they should be placed elsewhere.
    """
    strategy = strategy_of(model)
    stored = {} if strategy is None else strategy.stored_weights(model)
    if any(is_dtensor(parameter) and id(parameter) not in stored for parameter in model.parameters()):
        raise ConfigurationError(
            "load_checkpoint_in_model: the parameters are sharded, and not by Accelerator.prepare. Load the weights before "
            "they are sharded; under a Trainer: trainer.fit(module, loader, ckpt_path=..., restore=['model'])"
        )
    placed = [name for name, value in placing.items() if value is not None]
    if strategy is not None and stored and placed:
        raise ConfigurationError(
            f"load_checkpoint_in_model({placed[0]}=...): the model is prepared with strategy={strategy.name!r}, which has "
            f"placed its shards. Remove {' and '.join(placed)}, or load the weights before prepare"
        )
    return stored, (lambda values: None) if strategy is None else strategy.load_weights


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    before = [(module, name, tensor, tensor.data) for module, name, _, tensor in _entries(model) if not is_lazy(tensor)]
    try:
        yield
    except BaseException:
        for module, name, tensor, data in before:
            tensor.data = data
            setattr(module, name, tensor)
        raise


def _refuse_unsupported(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise UnsupportedArgumentError(
            "load_checkpoint_in_model(offload_8bit_bnb=True): quantized models are not offloaded. Load them with transformers: "
            "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_8bit=True))"
        )
    if not full_state_dict:
        raise UnsupportedArgumentError(
            "load_checkpoint_in_model(full_state_dict=False): tensors are not sharded. Remove it; load a checkpoint of "
            "ZeRO-3 with accelerator.load_state(folder, restore={'model'})"
        )
    if broadcast_from_rank0:
        raise UnsupportedArgumentError(
            "load_checkpoint_in_model(broadcast_from_rank0=True): each process reads the files. Remove it, and put the "
            "folder on a disk that all nodes can access"
        )


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    known = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    named = known.get(str(dtype).removeprefix("torch."))
    if named is None or not named.is_floating_point:
        floats = [name for name, value in known.items() if value.is_floating_point]
        raise UnknownNameError(f"dtype must be a floating-point dtype, not {dtype!r}.{nearest(str(dtype), floats)}")
    return named


# ------------------------------------------------------------------------------------------------------------- reading


def _read(path: Path) -> ModelState:
    """The weights at a path; a `CheckpointError` if there are none, or if they cannot be read."""
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith(_PICKLES):
        raise _pickled(path)
    return _read_index(path) if path.name.endswith(".json") else _read_file(path)


def _read_folder(path: Path) -> ModelState:
    names = sorted(os.listdir(path))
    if {MANIFEST, DIGEST} & {*names}:
        return _read_checkpoint(path)
    indices = [name for name in names if name.endswith(_INDEX)]
    if _WEIGHTS in names:
        return _read_file(path / _WEIGHTS)
    if len(indices) == 1:
        return _read_index(path / indices[0])
    if indices:
        raise CheckpointError(f"{path} has several indices: {', '.join(indices)}. Name one: {str(path / indices[0])!r}")
    raise _nothing(path, names)


def _nothing(path: Path, names: list[str]) -> CheckpointError:
    if "adapter_model.safetensors" in names:
        return CheckpointNotFoundError(
            f"{path} contains PEFT adapters, not a whole model. Open it with: PeftModel.from_pretrained(base, {str(path)!r})"
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return _pickled(path / pickles[0])
    single = [name for name in names if name.endswith(".safetensors")]
    fix = f" Name the file: {str(path / single[0])!r}" if single else ""
    return CheckpointNotFoundError(
        f"{path}: expected {_WEIGHTS}, or several files with a model{_INDEX}; it contains {_some(names) or 'nothing'}.{fix}"
    )


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which can run code and is not read. If you trust it, convert it to a safetensors file: "
        "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
    )


def _read_index(path: Path) -> ModelState:
    what = str(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"{what} cannot be read: there is no such file.")
    index = strict_json(read_small_file(Path(os.path.realpath(path)), MAX_JSON_BYTES), what)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CorruptCheckpointError(f"{what}: not an index: it has no weight_map of names to files")
    state = ModelState()
    for file in sorted({*places.values()}):
        if file != os.path.basename(file) or file in (".", ".."):
            raise CorruptCheckpointError(f"{what}: {file!r:.200} is not the name of a file in the folder")
        if file.endswith(_PICKLES):
            raise _pickled(path.parent / file)
        part = _read_file(path.parent / file)
        for name, its in places.items():
            if its == file and name not in part.tensors and name not in part.aliases:
                raise CorruptCheckpointError(f"{path.parent / file}: {name!r:.200} is in the index, but not in the file")
        state.tensors |= part.tensors
        state.aliases |= part.aliases
    return state


def _read_file(path: Path) -> ModelState:
    tensors, aliases = read_tensors(path)
    return ModelState(tensors=tensors, aliases=aliases)


def _read_checkpoint(path: Path) -> ModelState:
    """The verified model of a trainkit checkpoint."""
    checkpoint = open_checkpoint(path)
    stems = model_stems(checkpoint.manifest) or set(checkpoint.manifest.by_hook)
    if len(stems) != 1:
        raise CheckpointError(
            f"{path} contains {len(stems)} models ({', '.join(sorted(stems))}). Prepare all of them, and use "
            f"accelerator.load_state({str(path)!r}, restore={{'model'}}); or name the file of one model."
        )
    (stem,) = stems
    loaded = checkpoint.read({stem, "state"}, mapped=hasattr(mmap, "MAP_PRIVATE"))  # Windows does not have it
    fields: dict[str, Any] = dict(loaded.state["models"][0])
    if fields["fingerprint"] is None:
        fields["trained"] = {}  # part of a run, not of weights
    return ModelState(tensors=dict(loaded.tensors[stem]), aliases=dict(loaded.manifest.aliases.get(stem, {})), **fields)


def _some(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


# ------------------------------------------------------------------------------------------------ devices and dtypes


def _tensor_devices(device_map: Any, model: nn.Module) -> dict[str, torch.device]:
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
    known = {name for name, _ in model.named_modules()} | {name for _, _, name, _ in _entries(model)}
    for name in device_map:
        if name not in known:
            raise UnknownNameError(f"device_map: {type(model).__name__} has no {name!r}.{nearest(str(name), known)}")
    devices = {name: _device(name, device) for name, device in device_map.items()}
    placed: dict[str, torch.device] = {}
    first: dict[int, tuple[str, torch.device]] = {}
    for _, _, name, tensor in _entries(model):
        part = name
        while part and part not in devices:
            part = part.rpartition(".")[0]
        if part not in devices:
            raise ConfigurationError(f"device_map has no device for {name!r}. Name a module that contains it, or '' for all.")
        placed[name] = devices[part]
        other, device = first.setdefault(id(tensor), (name, placed[name]))
        if device != placed[name]:
            raise ConfigurationError(
                f"device_map: {other!r} and {name!r} are one tensor, but are assigned to {device} and {placed[name]}. Assign "
                "both to the same device."
            )
    return placed


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


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Every parameter and buffer: its module, its name there, its name in the model, the tensor. Tied ones occur repeatedly."""
    for path, module in model.named_modules(remove_duplicate=False):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)):
            yield module, name, f"{path}.{name}" if path else name, tensor


def _place(
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
    for module, own_name, name, tensor in _entries(model):
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
        dtype = next((chosen for name in names if (chosen := dtype_of(name)) is not None), dtype)
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


# ------------------------------------------------------------------------------------------------ wrappers


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False, recursive: bool = False
) -> nn.Module:
    """Return a user's model, without the wrappers of `Accelerator.prepare`, DDP and `torch.compile`.

    Args:
        model: A model, wrapped or not.
        keep_fp32_wrapper: No effect: the user's own model is not changed.
        keep_torch_compile: As in `Accelerator.unwrap_model`.
        recursive: Only `False`.

    Raises:
        UnsupportedArgumentError: `recursive=True`.
    """
    if recursive:
        raise UnsupportedArgumentError(
            "extract_model_from_parallel(recursive=True) is not supported: prepare wraps whole models. Remove it."
        )
    return unwrap(model, _inside, keep_torch_compile)


def _inside(model: nn.Module) -> nn.Module:
    inner: Any = model.module if isinstance(model, _AROUND) else getattr(model, "_orig_mod", model)
    return cast(nn.Module, inner)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile` returned this module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a `peft.PeftModel`, inside the wrappers of `prepare`, DDP and `torch.compile`.

    Args:
        model: A model, wrapped or not.
    """
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)  # Who has such a model has imported peft.
    return kind is not None and isinstance(extract_model_from_parallel(model), kind)


# ------------------------------------------------------------------------------------------------ models without memory


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """A context in which the parameters of new models are on the meta device: they have shapes, and take no memory.

    `load_checkpoint_in_model(model, folder, device_map={"": "cuda:0"})` then loads values into such a model. Where buffers are
    to be on the meta device too, this is `torch.device("meta")`.

    Args:
        include_buffers: Also create buffers there. By default they get their values, which a checkpoint may not have.

    Example:
        ```python
        with init_empty_weights():
            model = Net()
        load_checkpoint_in_model(model, "checkpoint", device_map={"": "cuda:0"})
        ```
    """
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not is_lazy(param):
            meta = param.detach().to("meta")
            self._parameters[name] = type(param)(meta, requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer of a module to a device, with another value if one is given. `diffusers` loads models with it.

    Args:
        module: The module.
        tensor_name: The name of the tensor, as in `named_parameters()`: `encoder.weight`.
        device: The device; a number is that of a GPU.
        value: Its new value, of the same shape; needed for a tensor on the meta device.
        dtype: The dtype of a floating-point tensor. Default: that of the present tensor.
        fp16_statistics: Only `None`: int8 weights of bitsandbytes are not supported.
        tied_params_map: Only `None`: tied parameters are not shared between devices.
        non_blocking: Copy from pinned memory without waiting.
        clear_cache: No effect: the memory of the old tensor is used again.

    Raises:
        ConfigurationError: There is no such tensor, or the value does not have its shape or is missing.
        UnsupportedArgumentError: `fp16_statistics` or `tied_params_map` is given.
    """
    for argument, given in (("fp16_statistics", fp16_statistics), ("tied_params_map", tied_params_map)):
        if given is not None:
            raise UnsupportedArgumentError(f"set_module_tensor_to_device({argument}=) is not supported. Remove it.")
    owner, name, present = _find_tensor(module, tensor_name)
    if value is not None and value.shape != present.shape:
        raise ConfigurationError(
            f"set_module_tensor_to_device: {tensor_name!r} has shape {tuple(present.shape)}, but the value has shape "
            f"{tuple(value.shape)}. Expected a value of the same shape."
        )
    target = torch.device("meta") if str(device) == "meta" else _device(tensor_name, device)
    if value is None and present.device.type == "meta" and target.type != "meta":
        raise ConfigurationError(
            f"set_module_tensor_to_device: {tensor_name!r} is on the meta device and has no value. Pass one: value=tensor"
        )
    kept = present.dtype if dtype is None or not present.is_floating_point() else _dtype(dtype)
    moved = (present if value is None else value).detach().to(target, kept, non_blocking=non_blocking)
    if name in owner._buffers:
        owner._buffers[name] = moved
    elif value is not None or (moved.device, moved.dtype) != (present.device, present.dtype):
        kind = type(cast(nn.Parameter, present))
        owner._parameters[name] = kind(moved, requires_grad=present.requires_grad)


def _find_tensor(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str, Tensor]:
    """The module that has a parameter or buffer, its name there, and the tensor."""
    path, _, name = tensor_name.rpartition(".")
    try:
        owner: nn.Module | None = module.get_submodule(path)
    except AttributeError:
        owner = None
    tensor = None if owner is None else owner._parameters.get(name, owner._buffers.get(name))
    if owner is None or tensor is None:
        known = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        raise ConfigurationError(
            f"set_module_tensor_to_device: {type(module).__name__} has no parameter or buffer {tensor_name!r}. Expected one of "
            f"its names: {_some(known)}"
        )
    return owner, name, tensor
