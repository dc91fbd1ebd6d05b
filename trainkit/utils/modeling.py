"""``load_checkpoint_in_model``: weights from a folder or file into a model."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.manifest import DIGEST, MANIFEST
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.console import counted, notice, warn
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
from trainkit.optim.parameter_names import cleaned, wrapped_attribute
from trainkit.registry import strategy_infos
from trainkit.state.model import ModelState, clean_names, plan_model
from trainkit.state.parts import model_stems
from trainkit.state.single_file import read_tensors
from trainkit.tagged_json.strict_json import MAX_JSON_BYTES, strict_json
from trainkit.utils.placing import DeviceMap, Placing, entries

__all__ = ["load_checkpoint_in_model"]

_WEIGHTS = "model.safetensors"
_INDEX = ".safetensors.index.json"
_PICKLES = (".bin", ".bin.index.json", ".ckpt", ".pkl", ".pt", ".pth")
_SHOWN = 5


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
    """Load weights into a model, in place: all of them fit, or nothing is changed.

    What ``Accelerator.save_model``, ``save_pretrained`` and ``safetensors`` write is read, in one file or in several with an
    index, and the model of a checkpoint of ``save_state`` or a ``Trainer``. Nothing is ever unpickled. Values are read as they
    are needed, so that the host needs no memory for a second model. Each process calls it for itself, before ``prepare``; a
    model that is prepared under DDP can be loaded too.

    Args:
        model: on the meta device (``with torch.device("meta"): …``) or with values. Parameters with values stay the same
            objects.
        checkpoint: a folder, a ``.safetensors`` file or the ``.index.json`` of several.
        device_map: name of a module → device, such as ``{"": "cuda:0"}`` for the whole model; the longest name counts. Default:
            each tensor stays where it is, and those on the meta device come to the CPU. Who divides a model over devices moves
            its activations himself.
        offload_folder: no effect: nothing is offloaded.
        dtype: what floating-point tensors of the checkpoint become, such as ``torch.bfloat16``; default: the model's dtypes.
        offload_state_dict: no effect: values stay on the disk until they are used.
        offload_buffers: no effect: nothing is offloaded.
        keep_in_fp32_modules: names of modules that ``dtype`` does not touch; they become float32.
        offload_8bit_bnb: only ``False``.
        strict: names that are missing in the checkpoint or unknown to the model are an error; else a notice names them.
        full_state_dict: only ``True``: weights are whole.
        broadcast_from_rank0: only ``False``: each process reads the files.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: it is damaged, or a pickle.
        StateMismatchError: it does not fit the model; the message lists all that does not.
        ConfigurationError: an argument that is wrong, or a model that is prepared under ZeRO.
        UnsupportedArgumentError: An unsupported argument; the message says what to use instead.
    """
    _refuse_what_is_not_offered(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    target, inner = _dtype(dtype), _unwrapped(model)
    if any(hasattr(p, mark) for p in inner.parameters() for info in strategy_infos() for mark in info.parameter_marks):
        raise ConfigurationError(
            "load_checkpoint_in_model: the model is prepared under ZeRO, whose divided parameters and masters would not "
            "follow. Load the weights before prepare, or into another model; or, from a checkpoint, by "
            "accelerator.load_state(folder, restore={'model'})"
        )
    devices = DeviceMap(device_map, inner)
    what = str(checkpoint)
    state = _read(Path(checkpoint))
    sources = state.tensors.keys() | state.aliases.keys()
    if sources and sources.isdisjoint(clean_names(inner).values()):
        raise StateMismatchError(
            f"{what} has no tensor with a name of {type(inner).__name__}'s: it has {_some(sources)}, and the model "
            f"{_some(clean_names(inner).values())}. Nothing was changed. Load it into the model that it is of."
        )
    names = _clean_entries(inner)

    def dtype_of(name: str) -> torch.dtype | None:
        kept = any(key == names[name] or f"{key}." in names[name] for key in keep_in_fp32_modules or ())
        return torch.float32 if target is not None and kept else target

    with Placing(inner, devices, dtype_of, {name for name, clean in names.items() if clean in sources}):
        said = plan_model(inner, state, strict=strict, what=what)()
    for text in said:
        notice(text)
    left = [name for _, _, name, tensor in entries(inner) if tensor.is_meta]
    if left:
        warn(
            f"{what}: {counted(len(left), 'tensor of the model still has', 'tensors of the model still have')} no "
            f"values, as on the meta device: {_some(left)}. "
            "Give them some before the model is used."
        )


def _refuse_what_is_not_offered(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise UnsupportedArgumentError(
            "load_checkpoint_in_model(offload_8bit_bnb=True): quantised models are not offloaded. Load them by transformers: "
            "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_8bit=True))"
        )
    if not full_state_dict:
        raise UnsupportedArgumentError(
            "load_checkpoint_in_model(full_state_dict=False): weights are whole tensors. Leave it out; a checkpoint of ZeRO-3 "
            "goes back into its parts by accelerator.load_state(folder, restore={'model'})"
        )
    if broadcast_from_rank0:
        raise UnsupportedArgumentError(
            "load_checkpoint_in_model(broadcast_from_rank0=True): each process reads the files. Leave it out, and let the "
            "folder be on a disk that all machines see; prepare then gives all processes the weights of the first under DDP"
        )


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None or (isinstance(given, torch.dtype) and given.is_floating_point):
        return given
    known = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    found = known.get(str(given).removeprefix("torch."))
    if found is None or not found.is_floating_point:
        floats = [name for name, value in known.items() if value.is_floating_point]
        raise UnknownNameError(f"dtype must be one of floating-point numbers, not {given!r}.{nearest(str(given), floats)}")
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's model, without what ``prepare`` or torch has put around it."""
    while True:
        attribute = wrapped_attribute(model)
        ours = type(model).__module__.startswith("trainkit.") and "module" in model._modules
        if attribute is None and not ours:
            return model
        model = getattr(model, attribute or "module")


def _clean_entries(model: nn.Module) -> dict[str, str]:
    return cleaned(model, [name for _, _, name, _ in entries(model)])


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass
class _Files:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path, only: Collection[str] | None = None) -> None:
        tensors, aliases = read_tensors(path)
        for name in only or ():
            if name not in tensors and name not in aliases:
                raise CorruptCheckpointError(f"{path}: the index says that {name!r:.200} is in it, and it is not")
        self.tensors |= tensors
        self.aliases |= aliases


def _read(path: Path) -> ModelState:
    """The weights at a path.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith(_PICKLES):
        raise _pickled(path)
    files = _Files()
    if path.name.endswith(".json"):
        _read_index(path, files)
    else:
        files.add(path)
    return ModelState(tensors=files.tensors, aliases=files.aliases)


def _read_folder(path: Path) -> ModelState:
    names = sorted(os.listdir(path))
    if {MANIFEST, DIGEST} & {*names}:
        return _read_checkpoint(path)
    indices = [name for name in names if name.endswith(_INDEX)]
    files = _Files()
    if _WEIGHTS in names:
        files.add(path / _WEIGHTS)
    elif len(indices) == 1:
        _read_index(path / indices[0], files)
    elif indices:
        raise CheckpointError(f"{path} has several indices: {', '.join(indices)}. Name one: {str(path / indices[0])!r}")
    else:
        raise _nothing(path, names)
    return ModelState(tensors=files.tensors, aliases=files.aliases)


def _nothing(path: Path, names: list[str]) -> CheckpointError:
    if "adapter_model.safetensors" in names:
        return CheckpointNotFoundError(
            f"{path} holds adapters of PEFT, and no whole model. Open it by: PeftModel.from_pretrained(base, {str(path)!r})"
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return _pickled(path / pickles[0])
    single = [name for name in names if name.endswith(".safetensors")]
    fix = f" Name the file: {str(path / single[0])!r}" if single else ""
    return CheckpointNotFoundError(
        f"{path}: expected {_WEIGHTS}, or several files with a model{_INDEX}; it holds {_some(names) or 'nothing'}.{fix}"
    )


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which can run code and is not read. If you trust it, turn it into a safetensors file: "
        "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
    )


def _read_index(path: Path, files: _Files) -> None:
    what = str(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"{what} cannot be read: there is no such file.")
    index = strict_json(read_small_file(Path(os.path.realpath(path)), MAX_JSON_BYTES), what)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CorruptCheckpointError(f"{what}: no index: it has no weight_map of names to files")
    for file in sorted({*places.values()}):
        if file != os.path.basename(file) or file in (".", ".."):
            raise CorruptCheckpointError(f"{what}: {file!r:.200} is no name of a file in the folder")
        if file.endswith(_PICKLES):
            raise _pickled(path.parent / file)
        files.add(path.parent / file, [name for name, its in places.items() if its == file])


def _read_checkpoint(path: Path) -> ModelState:
    """The model of a checkpoint that trainkit has written, verified."""
    checkpoint = open_checkpoint(path)
    stems = model_stems(checkpoint.manifest.files)
    if len(stems) != 1:
        raise CheckpointError(
            f"{path} holds {len(stems)} models ({', '.join(sorted(stems))}). Prepare them as they were, and use "
            f"accelerator.load_state({str(path)!r}, restore={{'model'}}); or name the file of one."
        )
    (stem,) = stems
    loaded = checkpoint.read({stem, "state"}, mapped=hasattr(mmap, "MAP_PRIVATE"))  # which Windows has not
    own: dict[str, Any] = dict(loaded.state["models"][0])
    if own["fingerprint"] is None:
        own["trained"] = {}  # which goes with a run, and not with weights
    return ModelState(tensors=dict(loaded.tensors[stem]), aliases=dict(loaded.manifest.aliases.get(stem, {})), **own)


def _some(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
