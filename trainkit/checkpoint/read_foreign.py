"""Reads checkpoints of Lightning, Accelerate, Hugging Face's Trainer and DeepSpeed, and files of weights."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint.manifest import is_file_name
from trainkit.checkpoint.plain_files import read_tensors
from trainkit.checkpoint.torch_file import read_torch_files
from trainkit.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, TrainkitError
from trainkit.tagged_json.codec import MAX_JSON_BYTES, strict_json

__all__ = ["MALFORMED", "Foreign", "format_error", "read_foreign"]

MALFORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, OSError)
"""What a file causes that does not have the form of its program; a `RecursionError` is a `RuntimeError`."""

_WEIGHT_KEYS = ("state_dict", "model_state_dict", "model")
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")
_SCALER_KEYS = ("MixedPrecision", "MixedPrecisionPlugin")
_OF_LIGHTNING = (
    *("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops", "callbacks", "hparams_name"),
    *("hyper_parameters", "hparams_type", "datamodule_hparams_name", "pytorch-lightning_version"),
)
_INDEX = ".index.json"
_UNIVERSAL = "DeepSpeed"


@dataclass
class Foreign:
    """What a checkpoint of another program holds.

    Attributes:
        program: The program that wrote it.
        models: For each model name → tensor. Tied names have the same tensor.
        ordered: The names are in the order of the model's `state_dict()`.
        optimizers: `state_dict()` of each optimizer, in torch's form.
        schedulers: `state_dict()` of each scheduler.
        splits_groups: Parameters without weight decay are in a group of their own.
        scaler: `state_dict()` of the loss scaler.
        step: Number of optimizer steps; `None`: unknown.
        epoch: Number of complete epochs; `None`: unknown.
        in_epoch: It was saved inside an epoch.
        hyper_parameters: The arguments of the module.
        hparams_name: The one argument that has all hyper-parameters, if there is one.
        added: What hooks of the program added, for `on_load_checkpoint`.
        omitted: What is not converted, with the reason.
        notes: What was assumed.
    """

    program: str
    models: list[dict[str, Tensor]] = field(default_factory=list)
    ordered: bool = False
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    splits_groups: bool = False
    scaler: dict[str, Any] | None = None
    step: int | None = None
    epoch: int | None = None
    in_epoch: bool = False
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    hparams_name: str | None = None
    added: dict[str, Any] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_foreign(path: Path, scratch: Path) -> Foreign:
    """Read a checkpoint of another program.

    Args:
        path: A file or a folder.
        scratch: An empty folder on a disk with room for the tensors. It must exist as long as they are used.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        ConfigurationError: The format is not known.
        CorruptCheckpointError: A file cannot be read.
    """
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} does not exist. Pass the path of a file or of a folder.")
    try:
        return _read(path, _Files(scratch))
    except TrainkitError:
        raise
    except MALFORMED as error:
        raise format_error(path, error) from error


def format_error(path: Path, error: Exception) -> CorruptCheckpointError:
    """The error for a file that does not have the form of its program."""
    return CorruptCheckpointError(
        f"{path} is malformed: {type(error).__name__}: {error!s:.200}. Expected what the program writes whose format it has. "
        "Fix: save it again, or pass a file with only the state dict of the model"
    )


def _read(path: Path, files: _Files) -> Foreign:
    if path.is_file():
        return _file(path, files)
    if (path / "trainer_state.json").is_file():
        return _of_trainer(path, files)
    if (path / "zero").is_dir():
        return _universal(path, files)
    if path.suffix != ".ckpt" and any(_stems(path)):
        return _accelerate(path, files)
    raise ConfigurationError(
        f"{path} is not a folder of a known format: expected one of Accelerate's save_state, a checkpoint-N of Hugging Face's "
        "Trainer or a universal checkpoint of DeepSpeed. Convert sharded checkpoints first: Lightning's with python -m "
        "lightning.pytorch.utilities.consolidate_checkpoint OLD, DeepSpeed's with ds_to_universal."
    )


class _Files:
    """Reads files of `torch.save` into one scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._count = 0

    def read(self, paths: list[Path], omitted: list[str]) -> list[Any]:
        """The value in each file; adds what is not read to `omitted`."""
        first, self._count = self._count, self._count + len(paths)
        return read_torch_files(paths, self._scratch, omitted, first)


# ----------------------------------------------------------------------------------------------------------------- files


def _file(path: Path, files: _Files) -> Foreign:
    if path.suffix == ".safetensors":
        return Foreign("a file of weights", [_safetensors(path)])
    omitted: list[str] = []
    value = files.read([path], omitted)[0]
    value = value if isinstance(value, Mapping) else {}
    if "pytorch-lightning_version" in value:
        return _lightning(value, omitted)
    at = next((key for key in _WEIGHT_KEYS if isinstance(value.get(key), Mapping)), None)
    tensors = _tensors_in(value if at is None else value[at])
    if not tensors:
        raise ConfigurationError(
            f"{path} holds no tensors by name; expected the state dict of a model, alone or as one of "
            f"{', '.join(_WEIGHT_KEYS)}. Save it: torch.save(model.state_dict(), 'model.pt')"
        )
    foreign = Foreign("a file of weights", [tensors], ordered=True, omitted=omitted)
    if at is not None:
        optimizer_keys = [key for key in _OPTIMIZER_KEYS if _is_torch_form(value.get(key))][:1]
        foreign.optimizers = [value[key] for key in optimizer_keys]
        foreign.omitted += _unknown(value, {at, *optimizer_keys})
    return foreign


def _tensors_in(value: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}


def _unknown(value: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [f"{key}: its meaning is unknown" for key in value if key not in known]


def _is_torch_form(value: Any) -> bool:
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def _lightning(value: Mapping[str, Any], omitted: list[str]) -> Foreign:
    name, scaler = value.get("hparams_name"), [key for key in _SCALER_KEYS if value.get(key)]
    epoch, in_epoch = _epoch_of_lightning(value)
    foreign = Foreign(
        f"Lightning {value['pytorch-lightning_version']}",
        [_tensors_in(value["state_dict"])],
        ordered=True,
        optimizers=[state for state in value.get("optimizer_states", ()) if _is_torch_form(state)],
        schedulers=list(value.get("lr_schedulers", ())),
        scaler=value[scaler[0]] if scaler else None,
        step=int(value.get("global_step", 0)),
        epoch=epoch,
        in_epoch=in_epoch,
        hyper_parameters=dict(value.get("hyper_parameters") or {}),
        hparams_name=None if name in (None, "kwargs") else str(name),
        omitted=omitted,
    )
    foreign.omitted += [f"{key}: the state of a callback" for key in value.get("callbacks") or {}]
    foreign.added = {str(key): one for key, one in value.items() if key not in (*_OF_LIGHTNING, *_SCALER_KEYS)}
    return foreign


def _epoch_of_lightning(value: Mapping[str, Any]) -> tuple[int, bool]:
    """The number of complete epochs, and whether another one has begun."""
    fit = (value.get("loops") or {}).get("fit_loop") or {}
    epochs = (fit.get("epoch_progress") or {}).get("current")
    if epochs is None:
        return int(value.get("epoch", 0)), False
    running = epochs["ready"] > epochs["completed"]
    at_end = bool((fit.get("epoch_loop.batch_progress") or {}).get("is_last_batch"))
    return epochs["completed"] + int(running and at_end), running and not at_end


def _safetensors(path: Path) -> dict[str, Tensor]:
    tensors, aliases = read_tensors(path)
    return {**tensors, **{alias: tensors[stored] for alias, stored in aliases.items()}}


# --------------------------------------------------------------------------------------------------------------- folders


def _accelerate(path: Path, files: _Files) -> Foreign:
    foreign = Foreign("Accelerate")
    for stem in _stems(path):
        foreign.models.append(_weights(path, stem, files, foreign))
    states = [path / f"optimizer{suffix}.bin" for suffix in _suffixes(path, "optimizer")]
    schedules = [path / f"scheduler{suffix}.bin" for suffix in _suffixes(path, "scheduler")]
    scaler = [path / "scaler.pt"] if (path / "scaler.pt").is_file() else []
    values = files.read([*states, *schedules, *scaler], foreign.omitted)
    foreign.optimizers, rest = values[: len(states)], values[len(states) :]
    foreign.schedulers, foreign.scaler = rest[: len(schedules)], rest[len(schedules)] if scaler else None
    known = {one.name for one in (*states, *schedules, *scaler)}
    foreign.omitted += [
        f"{name}: {'random numbers' if name.startswith('random_states') else 'its format is not read'}"
        for name in sorted(os.listdir(path))
        if name not in known and not name.startswith(("model", "pytorch_model"))
    ]
    return foreign


def _of_trainer(path: Path, files: _Files) -> Foreign:
    progress = _json_in(path / "trainer_state.json")
    epoch = float(progress.get("epoch") or 0.0)
    complete = math.floor(epoch + 1e-9)
    foreign = Foreign("Hugging Face's Trainer", step=int(progress["global_step"]), epoch=complete)
    foreign.in_epoch = epoch - complete > 1e-9
    foreign.splits_groups = True
    stem = next(iter(_stems(path)), None)
    if stem is None:
        raise ConfigurationError(
            f"{path} has no model.safetensors and no pytorch_model.bin, so its weights cannot be imported. Of a PEFT "
            "model, merge the adapters first: model.merge_and_unload().save_pretrained('merged')"
        )
    foreign.models = [_weights(path, stem, files, foreign)]
    parts = [path / name for name in ("optimizer.pt", "scheduler.pt", "scaler.pt") if (path / name).is_file()]
    for part, value in zip(parts, files.read(parts, foreign.omitted), strict=True):
        if part.stem == "optimizer":
            foreign.optimizers = [value]
        elif part.stem == "scheduler":
            foreign.schedulers = [value]
        else:
            foreign.scaler = value
    for name in ("rng_state.pth", "training_args.bin"):
        if (path / name).is_file():
            foreign.omitted.append(f"{name}: {'random numbers' if name.startswith('rng') else 'the arguments of the Trainer'}")
    return foreign


def _universal(path: Path, files: _Files) -> Foreign:
    """A folder of DeepSpeed's `ds_to_universal`: for each parameter a folder with its master weight and its slots."""
    foreign = Foreign(_UNIVERSAL, ordered=True)
    shared = [path / "mp_rank_00_model_states.pt", path / "zero" / "optimizer_state.pt"]
    parts = sorted((path / "zero").glob("*/*.pt"))
    if not parts or not all(part.is_file() for part in shared) or (path / "mp_rank_01_model_states.pt").exists():
        raise ConfigurationError(
            f"{path} is not a universal checkpoint of DeepSpeed without tensor parallelism. Expected {shared[0].name} and "
            "a folder zero with a folder for each parameter. Run ds_to_universal again."
        )
    states, options, *values = files.read([*shared, *parts], foreign.omitted)
    slots = _slots_of(parts, values)
    groups = [list(shapes) for shapes in states["param_shapes"]]
    order = [name for names in groups for name in names]
    buffers = {name: states["module"][name] for name in states["buffer_names"] if name in states["module"]}
    foreign.models, foreign.step = (
        [{**{name: slots[name].pop("fp32") for name in order}, **buffers}],
        int(states["global_steps"]),
    )
    numbers, listed = iter(range(len(order))), []
    for names, saved in zip(groups, options["param_groups"], strict=True):
        listed.append({**saved, "params": [next(numbers) for _ in names], "param_names": names})
    foreign.optimizers = [{"state": {number: slots[name] for number, name in enumerate(order)}, "param_groups": listed}]
    foreign.schedulers = [states["lr_scheduler"]] if states.get("lr_scheduler") else []
    return foreign


def _slots_of(parts: list[Path], values: list[Any]) -> dict[str, dict[str, Any]]:
    """Parameter → slot → value; the file of each is `<parameter>/<slot>.pt`."""
    slots: dict[str, dict[str, Any]] = {}
    for part, value in zip(parts, values, strict=True):
        slots.setdefault(part.parent.name, {})[part.stem] = value["param"] if isinstance(value, Mapping) else value
    return slots


def _json_in(path: Path) -> Any:
    """The content of a JSON file, which may be a stranger's."""
    with open(path, "rb") as file:
        return strict_json(file.read(MAX_JSON_BYTES + 1), str(path))


def _stems(path: Path) -> Iterator[str]:
    """The files of weights of a folder, without their ends: model, model_1, …"""
    for number in range(len(os.listdir(path)) + 1):
        suffix = f"_{number}" if number else ""
        for stem, end in ((f"model{suffix}", ".safetensors"), (f"pytorch_model{suffix}", ".bin")):
            if any((path / f"{stem}{end}{more}").is_file() for more in ("", _INDEX)):
                yield stem + end
                break


def _suffixes(path: Path, stem: str) -> list[str]:
    suffixes = ["", *(f"_{number}" for number in range(1, len(os.listdir(path)) + 1))]
    return [suffix for suffix in suffixes if (path / f"{stem}{suffix}.bin").is_file()]


def _weights(path: Path, name: str, files: _Files, foreign: Foreign) -> dict[str, Tensor]:
    """The tensors of one file, or of several with an index."""
    parts = [path / name]
    if not parts[0].is_file():
        found_in = sorted(set(_json_in(path / f"{name}{_INDEX}")["weight_map"].values()))
        if odd := [part for part in found_in if not is_file_name(part)]:
            raise CorruptCheckpointError(
                f"{path / f'{name}{_INDEX}'}: expected the names of files in its own folder, got {odd[0]!r:.200}. Fix: write "
                "the names of the files next to it"
            )
        parts = [path / part for part in found_in]
    if name.endswith(".bin"):
        values = files.read(parts, foreign.omitted)
        foreign.ordered = len(parts) == 1
    else:
        values = [_safetensors(part) for part in parts]
    return {key: tensor for value in values for key, tensor in value.items() if isinstance(tensor, Tensor)}
