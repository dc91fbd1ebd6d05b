"""A checkpoint that `from_pretrained` opens: the files, and the names in them, that `transformers` and PEFT expect.

The module that trains a model names its tensors `model.…`. In `model.safetensors` they have the model's own names, and all
other tensors of the module are in `module.safetensors`. Adapters are in `adapter_model.safetensors`, by the names of PEFT.

Without `model.safetensors`, `from_pretrained` raises an error; with one that has other names it would initialize the weights at
random. So that file is written only if it has all weights of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from trainkit.checkpoint.model_files import ADAPTER, MODEL, MODULE, ModelFiles
from trainkit.errors import ConfigurationError, nearest
from trainkit.state.pretrained import adapter_config, adapter_names, adapters_of

__all__ = ["config_files", "for_from_pretrained", "name_tied"]

_IN_MODULE: ModelFiles = {MODULE: {"prefix": ""}}


def name_tied(
    module: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str], configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Of the names of a tied tensor, store it by those that `from_pretrained` needs; changes `tensors` and `aliases`.

    A tensor of the model in `pretrained_attribute` is stored by the name from which `from_pretrained` ties the others, and once
    more by each name that it does not tie.

    Args:
        module: The module.
        tensors: Its tensors.
        aliases: Name of a tied tensor → the name in `tensors`.
        configs: The configurations of the models in it, see `trainkit.state.pretrained.model_configs`.

    Raises:
        ConfigurationError: `pretrained_attribute` names no model of `transformers` or PEFT.
    """
    attribute = _attribute_of(module, configs)
    if not attribute or not aliases:
        return
    prefix, inside = f"{attribute}.", _configs_inside(configs, attribute)
    if adapters_of(inside)[0]:
        own = _adapter(_names_inside(prefix, {**tensors, **aliases}), inside)
        _store_again(tensors, aliases, [prefix + name for name in own.values() if prefix + name in aliases])
    else:
        _untie(tensors, aliases, prefix, _ties(module.get_submodule(attribute)))


def for_from_pretrained(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    trained: Iterable[str],
    configs: Mapping[str, Mapping[str, Any]],
) -> tuple[ModelFiles, dict[str, bytes]]:
    """Choose the files of a checkpoint of one module, so that `from_pretrained` opens the folder, or raises an error.

    It opens the folder if the module is a `transformers` model, or if `pretrained_attribute` names one or a PEFT model.

    Args:
        module: The module.
        tensors: Its tensors.
        aliases: Name of a tied tensor → the name in `tensors`; after `name_tied`.
        trained: The names of all parameters, stored or not.
        configs: The configurations of the models in it, see `trainkit.state.pretrained.model_configs`.

    Returns:
        The files for its tensors, and the content of further files by name.

    Raises:
        ConfigurationError: `pretrained_attribute` names no model of `transformers` or PEFT.
    """
    attribute = _attribute_of(module, configs)
    if attribute is None and configs and "" not in configs:
        return _IN_MODULE, {}
    if not attribute:
        return {}, config_files(configs, tensors)
    prefix, inside = f"{attribute}.", _configs_inside(configs, attribute)
    names = _names_inside(prefix, {**tensors, **aliases})
    # ModelPruning saves `weight` instead of `weight_orig`
    missing = [name for name in _names_inside(prefix, trained) if not {name, name.removesuffix("_orig")} & names.keys()]
    files: ModelFiles
    if adapters_of(inside)[0]:
        files, attachments = _adapter_files(prefix, [*names, *missing], missing, inside)
    elif missing:  # save="trainable", or a hook has removed them
        return _IN_MODULE, {}
    else:
        files = {MODEL: {"prefix": prefix}, **_IN_MODULE}
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        attachments = config_files(inside, own)
    return files, {**_processing_files(getattr(module, "processing_class", None)), **attachments} if attachments else {}


def _attribute_of(module: nn.Module, configs: Mapping[str, Any]) -> str | None:
    """`pretrained_attribute` of a `TrainModule`; "" for another module, which has no such attribute."""
    attribute: str | None = getattr(module, "pretrained_attribute", "")
    if attribute and attribute not in configs:
        raise ConfigurationError(
            f"{type(module).__name__}.pretrained_attribute = {attribute!r}: expected an attribute that is a model of "
            f"transformers or PEFT; there are {', '.join(map(repr, configs)) or 'none'}.{nearest(attribute, list(configs))} "
            "Fix: pretrained_attribute = 'model', if __init__ sets self.model"
        )
    return attribute


def _names_inside(prefix: str, names: Iterable[str]) -> dict[str, None]:
    return {name.removeprefix(prefix): None for name in names if name.startswith(prefix)}


def config_files(configs: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The files with which `transformers` opens the folder, if the model itself is one of its models.

    Args:
        configs: The configurations of the models in it.
        tensors: The tensors in the folder, whose dtype `from_pretrained` gives to the model.
    """
    of_model = configs.get("")
    if of_model is None or of_model["kind"] != "transformers":
        return {}
    dtype = next((str(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()), None)
    stored = {} if dtype is None else {"dtype": dtype.removeprefix("torch.")}
    files = {"config.json": of_model["config"] | stored, "generation_config.json": of_model.get("generation_config")}
    return {name: json.dumps(value, indent=2).encode() for name, value in files.items() if value is not None}


def _configs_inside(configs: Mapping[str, Mapping[str, Any]], path: str) -> dict[str, Mapping[str, Any]]:
    inside = {name: config for name, config in configs.items() if f"{name}.".startswith(f"{path}.")}
    return {name.removeprefix(path).removeprefix("."): config for name, config in inside.items()}


def _adapter(names: Collection[str], configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Of the adapter that PEFT finds in the folder itself: name in PEFT's file → name in the model."""
    adapters, start = adapters_of(configs)
    try:
        saved_names = adapter_names(names, _first(adapters), configs)
    except ConfigurationError:  # another method; PEFT raises an error, since there is no adapter_config.json
        return {}
    return {start + saved: name for name, saved in saved_names.items()}


def _first(adapters: Mapping[str, Any]) -> str:
    return "default" if "default" in adapters else next(iter(adapters))


def _adapter_files(
    prefix: str, names: Collection[str], missing: Collection[str], configs: Mapping[str, Mapping[str, Any]]
) -> tuple[ModelFiles, dict[str, bytes]]:
    """The files of that adapter; other adapters are with the rest of the module."""
    own, (adapters, _) = _adapter(names, configs), adapters_of(configs)
    if not own or set(missing).intersection(own.values()):
        return _IN_MODULE, {}
    files = {ADAPTER: {"prefix": prefix, "names": own}, **_IN_MODULE}
    return files, {"adapter_config.json": adapter_config(adapters[_first(adapters)], configs)}


def _ties(model: nn.Module) -> dict[str, str]:
    """The parameters that `from_pretrained` ties: name → the name of the one whose value both get."""
    ties: Any = getattr(model, "all_tied_weights_keys", None)
    return dict(ties) if isinstance(ties, Mapping) else {}


def _untie(tensors: dict[str, Tensor], aliases: dict[str, str], prefix: str, ties: Mapping[str, str]) -> None:
    """Store tied tensors of the model by the names that it needs: each by itself, unless `from_pretrained` ties them."""

    def source(name: str) -> str:
        own = name.removeprefix(prefix)
        return prefix + ties[own] if own in ties else name

    for alias in [alias for alias in aliases if alias.startswith(prefix)]:
        if alias not in aliases:
            continue
        stored = aliases[alias]
        if not stored.startswith(prefix) or source(stored) == alias:
            others = [name for name, one in aliases.items() if one == stored and name != alias]
            tensors[alias] = tensors.pop(stored)
            del aliases[alias]
            aliases.update(dict.fromkeys([stored, *others], alias))
        elif source(alias) != source(stored):
            _store_again(tensors, aliases, [alias])


def _store_again(tensors: dict[str, Tensor], aliases: dict[str, str], names: Iterable[str]) -> None:
    for name in names:
        tensors[name] = tensors[aliases.pop(name)]


_written: WeakKeyDictionary[Any, tuple[str, dict[str, bytes]]] = WeakKeyDictionary()


def _processing_files(processing: Any) -> dict[str, bytes]:
    """The files of a tokenizer or processor; written once as long as what describes it stays the same."""
    if processing is None:
        return {}
    if not callable(getattr(processing, "save_pretrained", None)):
        raise ConfigurationError(
            f"processing_class: expected a tokenizer, an image processor or another object with save_pretrained, got "
            f"{type(processing).__name__}. Fix: processing_class=AutoTokenizer.from_pretrained(name)"
        )
    described = f"{processing!r} {getattr(processing, 'chat_template', None)!r}"
    known = _written.get(processing)
    if known is None or known[0] != described:
        known = _written[processing] = described, _written_by(processing.save_pretrained)
    return dict(known[1])


def _written_by(save_pretrained: Callable[..., Any]) -> dict[str, bytes]:
    options: dict[str, Any] = {}
    while True:
        with TemporaryDirectory(prefix="trainkit-") as folder:
            save_pretrained(folder, **options)
            paths = sorted(Path(folder).iterdir())
            if options or not any(path.is_dir() for path in paths):
                return {path.name: path.read_bytes() for path in paths if path.is_file()}
        options = {"save_jinja_files": False}  # several chat templates: in tokenizer_config.json instead of a folder
