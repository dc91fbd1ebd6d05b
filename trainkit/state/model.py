"""Captures the weights of a module as tensors by name, and restores them: all of them, or nothing is changed."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.checkpoint.tensor_file import memory_key, split_tied
from trainkit.console import join_names, quantity
from trainkit.errors import ConfigurationError, CorruptCheckpointError, StateMismatchError
from trainkit.optim.parameter_names import clean_paths, without_checkpoint_wrapper
from trainkit.state.pretrained import embedding_names, model_configs
from trainkit.state.saved_values import castable, copy_value, same_bits
from trainkit.tagged_json.tensors import ShardedTensor, is_sharded_tensor

__all__ = ["ModelState", "capture_model", "fingerprint_frozen", "plan_model"]


_EXTRA = "_extra_state"
# A parameter is copied to the host in chunks of this size.
_CHUNK_BYTES = 64 * 2**20


@dataclass
class ModelState:
    """The state of a module in a checkpoint, with clean names.

    Attributes:
        tensors: Parameters and persistent buffers; after a capture they share the memory of the module.
        aliases: Name of a tied tensor → the name in `tensors`.
        extra: The results of `get_extra_state`, and anything else in the state dict that is not a tensor.
        trained: `requires_grad` of every parameter, stored or not. A restore does not change it for other parameters.
        fingerprint: The fingerprint of the frozen parameters if they are not stored; `None` if all are stored.
        configs: The configurations of `transformers` and PEFT models inside, see
            `trainkit.state.pretrained.model_configs`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    trained: dict[str, bool] = field(default_factory=dict)
    fingerprint: str | None = None
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)


def capture_model(
    module: nn.Module,
    save: Literal["all", "trainable"] = "all",
    fingerprint: str | None = None,
    placeholders: Mapping[int, Tensor] | None = None,
) -> ModelState:
    """Capture the state of a module; nothing is copied.

    Tied tensors (the same memory, shape and strides) are stored once, under the first name; overlapping views are stored
    separately. A lazy parameter without a shape is not stored.

    Args:
        module: The module; may be compiled or wrapped.
        save: `"trainable"`: only the parameters that require a gradient, and the buffers.
        fingerprint: For `"trainable"`, the result of `fingerprint_frozen` for the parameters that are frozen now;
            `None`: compute it.
        placeholders: `id(parameter)` → the tensor to store instead: a master copy, or a sharded tensor.

    Raises:
        ConfigurationError: Unknown `save`.
        UnsavableError: Two names differ only by the name of a wrapper, or a configuration is not JSON.
    """
    if save not in ("all", "trainable"):
        raise ConfigurationError(f"save must be 'all' or 'trainable', not {save!r}.")
    raw = _with_placeholders(module, placeholders)
    names = clean_paths(module, raw)
    state = ModelState(trained={n: p.requires_grad for n, p in _parameters(module).items()}, configs=model_configs(module))
    frozen: set[str] = set()
    if save == "trainable":
        state.fingerprint = fingerprint_frozen(module, placeholders) if fingerprint is None else fingerprint
        frozen = _find_frozen(state) - embedding_names(state.configs)
    tensors: dict[str, Tensor] = {}
    for raw_name, value in raw.items():
        name = names[raw_name]
        if frozen and _belongs_to(name, frozen):
            continue
        if _is_extra(name, value):
            state.extra[name] = value
        elif not is_lazy(value):
            tensors[name] = value.detach().resolve_conj().resolve_neg()
    state.tensors, state.aliases = split_tied(tensors)
    return state


def plan_model(
    module: nn.Module,
    state: ModelState,
    *,
    strict: bool = True,
    what: str,
    placeholders: Mapping[int, Tensor] | None = None,
    load_placeholders: Callable[[dict[nn.Parameter, Tensor]], None] = lambda values: None,
    fold_masks: bool = True,
) -> Callable[[], list[str]]:
    """Compare a captured state with a module. Returns a function that loads it in place.

    This allows comparing a whole checkpoint before anything is changed. Values are cast to the module's dtypes. A tensor that
    is tied only here or only in the checkpoint is loaded if every name gets its value. `requires_grad` is restored.

    Args:
        module: A module of the same structure; may be compiled or wrapped. Lazy parameters get their shapes.
        state: The state; its tensors may be on any device and are copied.
        strict: Missing and unexpected names raise an error; False: they are skipped, with a notice.
        what: What is loaded, for messages, such as `"the checkpoint step-00001200"`.
        placeholders: See `capture_model`; their dtypes and shapes are compared.
        load_placeholders: Called with the values of the parameters in `placeholders`.
        fold_masks: Load the product of `weight_orig` and `weight_mask` into a model that has only `weight`.

    Returns:
        A function that loads the state and returns what the user should know, one sentence each.

    Raises:
        StateMismatchError: The state does not fit; the message lists all mismatches, and nothing was changed.
        CorruptCheckpointError: The state contradicts itself.
    """
    _check_consistent(state, what)
    state = replace(state, trained={without_checkpoint_wrapper(name): trained for name, trained in state.trained.items()})
    raw = _with_placeholders(module, placeholders)
    names = clean_paths(module, raw)
    parameters = _parameters(module)
    sources = state.tensors | {alias: state.tensors[name] for alias, name in state.aliases.items()}
    notices: list[str] = []
    if fold_masks:
        sources, notices = _fold_masks(sources, set(names.values()))
    comparison = _Comparison(sources, state, strict)
    comparison.compare(module, raw, names)
    if state.fingerprint is not None and not comparison.complaints():
        _check_base(parameters, _find_not_stored(state), state.fingerprint, what, placeholders)
    if comparison.complaints():
        raise comparison.error(f"{what} does not fit {type(module).__name__}")

    def load() -> list[str]:
        values = _values_to_load(module, comparison.values, raw, names)
        stored_values: dict[nn.Parameter, Tensor] = {}
        for name, clean in names.items():
            if placeholders and name in values and clean in parameters and id(parameters[clean]) in placeholders:
                stored_values[parameters[clean]] = values.pop(name)
        _load(module, OrderedDict(values | comparison.extra), comparison.expanded, raw, what)
        load_placeholders(stored_values)
        return notices + comparison.notices() + _set_trained(parameters, state.trained)

    return load


def _values_to_load(
    module: nn.Module, values: Mapping[str, Tensor], raw: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """The values for `load_state_dict`; copies of those that a module with its own `load_state_dict` may keep."""
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    registered = {*_parameters(module), *clean_paths(module, buffers).values()}
    return {
        name: value if names[name] in registered else value.to(raw[name].device, copy=True) for name, value in values.items()
    }


def _target(owner: nn.Module | None, value: Tensor, stored: Tensor | None) -> Tensor:
    """A buffer with the shape of the stored one, if its module gives it that when it is loaded: an observer of torch.ao."""
    if stored is None or not type(owner).__module__.startswith("torch.ao.quantization."):
        return value
    if getattr(type(owner), "_load_from_state_dict", None) is nn.Module._load_from_state_dict:
        return value
    return torch.empty_like(stored, dtype=value.dtype, device=value.device)


def _with_placeholders(module: nn.Module, placeholders: Mapping[int, Tensor] | None) -> Any:
    """The module's state dict, with some parameters replaced."""
    raw = module.state_dict()
    if placeholders:
        parameters = _parameters(module)
        for name, clean in clean_paths(module, raw).items():
            if clean in parameters and id(parameters[clean]) in placeholders:
                raw[name] = placeholders[id(parameters[clean])]
    return raw


def fingerprint_frozen(module: nn.Module, placeholders: Mapping[int, Tensor] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the parameters that do not require a gradient, as 64 hex digits.

    Compute it again when other parameters are frozen. It reads all frozen parameters, at about a gigabyte per second.
    """
    parameters, stored = _parameters(module), embedding_names(model_configs(module))
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad and name not in stored}
    return _fingerprint(frozen, placeholders)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by clean name, a tied one under each of its names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {name: parameters[raw] for raw, name in clean_paths(module, parameters).items()}


def _find_frozen(state: ModelState) -> set[str]:
    return {name for name, trained in state.trained.items() if not trained}


def _find_not_stored(state: ModelState) -> set[str]:
    """The frozen parameters that a state with a fingerprint does not have."""
    return _find_frozen(state) - state.tensors.keys() - state.aliases.keys()


def _is_extra(name: str, value: Any) -> bool:
    """Whether an entry of a state dict is extra state, which may be a tensor, too."""
    return not isinstance(value, Tensor) or name.rpartition(".")[2] == _EXTRA


def _belongs_to(name: str, parameters: set[str]) -> bool:
    """Whether a name is that of a parameter, or of data next to a quantized one (`weight.absmax`)."""
    return name in parameters or name.rpartition(".")[0] in parameters


def _fingerprint(parameters: Mapping[str, nn.Parameter], placeholders: Mapping[int, Tensor] | None = None) -> str:
    whole = hashlib.sha256()
    digests: dict[int, str] = {}  # a tied parameter is read once
    for name, parameter in sorted(parameters.items()):
        if id(parameter) not in digests:
            digests[id(parameter)] = _digest((placeholders or {}).get(id(parameter), parameter))
        whole.update(f"{name!r} {digests[id(parameter)]}\n".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _digest(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    digest = hashlib.sha256()
    if isinstance(tensor, ShardedTensor):
        values = tensor.collect(None)
        assert values is not None
        tensor = values
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for chunk in data.split(_CHUNK_BYTES):
        digest.update(chunk.cpu().numpy())
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest.hexdigest()}"


def _check_base(
    parameters: Mapping[str, nn.Parameter],
    frozen: set[str],
    fingerprint: str,
    what: str,
    placeholders: Mapping[int, Tensor] | None = None,
) -> None:
    present = {name: parameters[name] for name in frozen if name in parameters}
    absent = sorted(frozen - set(present))
    fingerprint_here = _fingerprint(present, placeholders)
    if absent or fingerprint_here != fingerprint:
        lacks = f" This model does not have these frozen parameters: {', '.join(absent)}." if absent else ""
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in present.values()})) or "none"
        raise StateMismatchError(
            f"{what} contains only the trained parameters, of a model with another base: its {len(frozen)} frozen parameters "
            f"had the SHA-256 {fingerprint}, those of this model have {fingerprint_here} (dtype {dtypes}).{lacks} "
            "Nothing was changed. Fix: start from the same pretrained weights in the same dtype, or save with save='all'."
        )


def _check_consistent(state: ModelState, what: str) -> None:
    def refuse(problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{what}: {problem}. The checkpoint contradicts itself. Fix: use another checkpoint.")

    if not isinstance(state.trained, dict) or not all(isinstance(t, bool) for t in state.trained.values()):
        raise refuse("the record of which parameters were trained is malformed")
    if not isinstance(state.extra, dict):
        raise refuse("the extra state is malformed")
    for alias, name in state.aliases.items():
        if name not in state.tensors:
            raise refuse(f"{alias!r} is another name of {name!r}, which is not stored")
        if alias in state.tensors:
            raise refuse(f"{alias!r} is stored, but is also another name of {name!r}")


# ----------------------------------------------------------------------------------------------------------- loading


def _load(
    module: nn.Module,
    values: OrderedDict[str, Any],
    expanded: list[tuple[Tensor, Tensor]],
    raw: Mapping[str, Any],
    what: str,
) -> None:
    """`module.load_state_dict`, which the user may override. If it fails, the state `raw` is restored."""
    metadata = getattr(raw, "_metadata", None)
    if metadata is not None:
        values._metadata = metadata  # type: ignore[attr-defined]
    backup = None
    if _can_fail(module):
        backup = {name: (value, None if is_lazy(value) else copy_value(value)) for name, value in raw.items()}
    try:
        with torch.no_grad():
            module.load_state_dict(values, strict=False)
            for target, source in expanded:
                target.copy_(source)
    except Exception as error:
        if backup is not None:
            _restore_backup(module, backup)
        raise StateMismatchError(
            f"{what}: {type(module).__name__}.load_state_dict failed: {error}\nThe model was restored."
        ) from error


def _can_fail(module: nn.Module) -> bool:
    """Whether `load_state_dict` calls code other than torch's, whose failures cannot be predicted."""
    for part in module.modules():
        kind = type(part)
        methods = (kind.load_state_dict, kind._load_from_state_dict, kind.set_extra_state)
        hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
        for function in (*methods, *(getattr(hook, "hook", hook) for hook in hooks)):
            if (getattr(function, "__module__", None) or "").partition(".")[0] != "torch":
                return True
    return False


def _restore_backup(module: nn.Module, backup: Mapping[str, tuple[Any, Any]]) -> None:
    with torch.no_grad():
        for value, copy in backup.values():
            if isinstance(value, Tensor) and copy is not None:
                value.copy_(copy)
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, (_, copy) in backup.items():
        path, _, last = name.rpartition(".")
        if last == _EXTRA and path in modules:
            modules[path].set_extra_state(copy)


def _set_trained(parameters: Mapping[str, nn.Parameter], trained: Mapping[str, bool]) -> list[str]:
    changed: Counter[bool] = Counter()
    seen = set()
    for name, parameter in parameters.items():
        # pruning renames a parameter, here or before the checkpoint was saved
        saved = next((trained[n] for n in (name, f"{name}_orig", name.removesuffix("_orig")) if n in trained), None)
        if saved is not None and id(parameter) not in seen and parameter.requires_grad != saved:
            parameter.requires_grad = saved  # requires_grad_() does not work on a lazy parameter
            changed[saved] += 1
            seen.add(id(parameter))
    return [
        f"requires_grad of {quantity(count, 'parameter', 'parameters')} was set to {saved}, as in the checkpoint"
        for saved, count in changed.items()
    ]


class _Comparison:
    """Compares stored tensors with those of a module, name by name, and collects the mismatches.

    Args:
        sources: The stored tensors by clean name; tied ones under each name.
        state: The state that they are of.
        strict: Whether missing and unexpected names are an error.

    Attributes:
        values: What to load, by name in the module's state dict.
        expanded: Pairs (target, source) to copy separately: expanded tensors, each element once.
        extra: Extra state to load, by name in the module's state dict.
    """

    def __init__(self, sources: Mapping[str, Tensor], state: ModelState, strict: bool) -> None:
        self.values: dict[str, Tensor] = {}
        self.expanded: list[tuple[Tensor, Tensor]] = []
        self.extra: dict[str, Any] = {}
        self._sources = sources
        self._state = state
        self._strict = strict
        self._not_stored = set() if state.fingerprint is None else _find_not_stored(state)
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._problems: list[str] = []
        self._notices: list[str] = []
        # Names without a source, until it is known whether they are tied to one that has a source.
        self._pending: list[tuple[str, Tensor]] = []
        # Name, target, source.
        self._pairs: list[tuple[str, Tensor, Tensor]] = []
        # The memory of a target, and the first name in it with a source.
        self._first: dict[Any, str] = {}

    def compare(self, module: nn.Module, raw: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Compare the module's state dict, whose clean names are `names`, with what is stored."""
        owners = dict(module.named_modules(remove_duplicate=False))
        for raw_name, value in raw.items():
            name = names[raw_name]
            if not _is_extra(name, value):
                owner = owners.get(raw_name.rpartition(".")[0])
                self._add(raw_name, name, _target(owner, value, self._sources.get(name)))
            elif name in self._state.extra:
                self.extra[raw_name] = copy_value(self._state.extra[name])
            elif not _belongs_to(name, self._not_stored):
                self._missing.append(f"{name} (extra state)")
        present = set(names.values())
        self._unexpected = [name for name in [*self._sources, *self._state.extra] if name not in present]
        self._check_shared_memory()

    def _add(self, raw_name: str, name: str, target: Tensor) -> None:
        """Compare one tensor of the module's state dict with the stored one; `name` is its clean name."""
        if is_lazy(target):
            if name in self._sources:
                self.values[raw_name] = self._sources[name]
            elif isinstance(target, torch.nn.Parameter) and name not in self._state.trained:
                self._missing.append(name)  # otherwise it had no shape either when it was saved
            return
        source = self._sources.get(name)
        if source is None:
            self._pending.append((name, target))
            return
        self._first.setdefault(memory_key(target), name)
        if not self._fits(name, target, source):
            return
        self._pairs.append((name, target, source))
        dense = _narrow(target)
        if dense is target:
            self.values[raw_name] = source
        else:
            self.expanded.append((dense, source.as_strided(dense.shape, source.stride())))

    def _check_shared_memory(self) -> None:
        """After the last tensor: check that names that share memory in the module have the same values in the checkpoint."""
        for name, target in self._pending:
            first = self._first.get(memory_key(target))
            if first is None and name not in self._not_stored:
                self._missing.append(name)
            elif first is not None:
                self._notices.append(f"{name} is tied to {first} in this model and gets its value")
        self._note_untied()
        if self._problems:
            return
        for group in _overlapping(self._pairs):
            self._check_group(group)

    def complaints(self) -> list[str]:
        """One line for each mismatch; empty if the state can be loaded."""
        lines = []
        if self._strict and self._missing:
            lines.append(f"missing in the checkpoint ({len(self._missing)}): " + ", ".join(self._missing))
        if self._strict and self._unexpected:
            lines.append(f"unexpected in the checkpoint ({len(self._unexpected)}): " + ", ".join(self._unexpected))
        return lines + self._problems

    def error(self, text: str) -> StateMismatchError:
        """The error that lists all mismatches."""
        lines = [text + ":", *self.complaints(), *_explain_names(self._missing, self._unexpected)]
        other = "another checkpoint" if self._problems else "only the matching tensors with strict=False"
        return StateMismatchError(
            "\n  ".join(lines)
            + "\nNothing was changed. Fix: build the model with the same structure as the saved one, or load "
            f"{other}."
        )

    def notices(self) -> list[str]:
        """What the user should know after the state is loaded."""
        notices = list(self._notices)
        casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        overflowed = []
        for name, target, source in self._pairs:
            if source.dtype != target.dtype:
                casts[source.dtype, target.dtype] += 1
                if target.is_floating_point() and not target.is_meta and not _all_finite(target) and _all_finite(source):
                    overflowed.append(name)
        for (before, after), count in casts.items():
            notices.append(f"{quantity(count, 'tensor was', 'tensors were')} cast from {_dtype(before)} to {_dtype(after)}")
        if overflowed:
            notices.append(f"values outside the range of the model's dtype became infinite or NaN in: {', '.join(overflowed)}")
        if self._missing:
            notices.append(f"not in the checkpoint, so left unchanged: {', '.join(self._missing)}")
        if self._unexpected:
            notices.append(f"not in the model, so not loaded: {', '.join(self._unexpected)}")
        return notices

    def _fits(self, name: str, target: Tensor, source: Tensor) -> bool:
        before = len(self._problems)
        if target.shape != source.shape:
            self._problems.append(f"{name}: shape {tuple(source.shape)} in the checkpoint, {tuple(target.shape)} in the model")
        elif target.is_meta and not is_sharded_tensor(target):
            self._problems.append(f"{name} is on the meta device and has no memory; call module.to_empty(device=...) first")
        elif target.is_inference():
            self._problems.append(
                f"{name} was created under torch.inference_mode() and cannot be changed; create the model outside it"
            )
        elif not castable(source, target.dtype):
            self._problems.append(f"{name}: {_dtype(source.dtype)} in the checkpoint cannot be cast to {_dtype(target.dtype)}")
        elif not _consistent(target, source):
            self._problems.append(f"{name} is expanded in the model, but the checkpoint has different values for one element")
        return len(self._problems) == before

    def _note_untied(self) -> None:
        places = {name: memory_key(target) for name, target, _ in self._pairs}
        for alias, stored in self._state.aliases.items():
            if alias in places and stored in places and places[alias] != places[stored]:
                self._notices.append(
                    f"{alias} was tied to {stored} when saved, but is not tied in this model: both got the same values"
                )

    def _check_group(self, group: list[tuple[str, Tensor, Tensor]]) -> None:
        """Load tensors that share memory into a copy of that memory, and check whether each has its value afterwards."""
        if len({id(source) for _, _, source in group}) == 1 and len({memory_key(target) for _, target, _ in group}) == 1:
            return  # tied in the model and in the checkpoint
        memory = group[0][1].untyped_storage().clone()
        with torch.no_grad():
            trial = [
                torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, t.storage_offset(), t.shape, t.stride())
                for t in (_narrow(target) for _, target, _ in group)
            ]
            sources = [source.as_strided(t.shape, source.stride()) for t, (_, _, source) in zip(trial, group, strict=True)]
            for target, source in zip(trial, sources, strict=True):
                target.copy_(source)
            agree = all(same_bits(t, s.to(t.device, t.dtype)) for t, s in zip(trial, sources, strict=True))
        names = ", ".join(name for name, _, _ in group)
        if agree:
            self._notices.append(f"{names} share memory in this model, but did not when saved; their values are equal")
        else:
            self._problems.append(f"{names} share memory in the model, but the checkpoint has different values for them")


def _narrow(tensor: Tensor) -> Tensor:
    """The tensor without the repetitions of expanded dimensions; the tensor itself if there are none."""
    shape, strides = list(tensor.shape), tensor.stride()
    narrow = [1 if step == 0 and size > 1 else size for size, step in zip(shape, strides, strict=True)]
    return tensor if narrow == shape else tensor.as_strided(narrow, strides)


def _consistent(target: Tensor, source: Tensor) -> bool:
    dense = _narrow(target)
    if dense is target:
        return True
    return same_bits(source, source.as_strided(dense.shape, source.stride()).expand(source.shape))


def _overlapping(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> list[list[tuple[str, Tensor, Tensor]]]:
    """Groups of two or more tensors with overlapping ranges of memory."""
    ranges: dict[tuple[torch.device, Any], list[tuple[int, int, tuple[str, Tensor, Tensor]]]] = defaultdict(list)
    for pair in pairs:
        target = pair[1]
        try:
            storage, start = target.untyped_storage()._cdata, int(target.storage_offset()) * target.element_size()
        except (NotImplementedError, RuntimeError):
            continue
        last = sum(int(size - 1) * int(step) for size, step in zip(target.shape, target.stride(), strict=True))
        ranges[target.device, storage].append((start, start + (last + 1) * target.element_size(), pair))
    groups: list[list[tuple[str, Tensor, Tensor]]] = []
    for items in ranges.values():
        end = -1
        for start, stop, pair in sorted((item for item in items if item[0] < item[1]), key=lambda item: item[:2]):
            if start < end:
                groups[-1].append(pair)
            else:
                groups.append([pair])
            end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def _all_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(wide).all())


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "module": "DataParallel or DistributedDataParallel",
}


@dataclass(frozen=True)
class _Renaming:
    """Something that renames parameters.

    Attributes:
        by: What it is, for messages.
        find: The original name of a parameter from one of its new names; `None`: it was not renamed by this. The second
            argument has all names.
        apply: How to do it to a layer before loading; empty for a wrapper.
    """

    by: str
    find: Callable[[str, Collection[str]], str | None]
    apply: str


def _with(suffix: str, other: str) -> Callable[[str, Collection[str]], str | None]:
    """Finds `X` from `X<suffix>` if there is also `X<other>`."""

    def find(name: str, names: Collection[str]) -> str | None:
        plain = name.removesuffix(suffix)
        return plain if plain != name and f"{plain}{other}" in names else None

    return find


def _strip_parametrization(name: str, _: Collection[str]) -> str | None:
    match = re.fullmatch(r"(.*\.|)parametrizations\.([^.]+)\.original\d*", name)
    return match and f"{match[1]}{match[2]}"


def _inside(part: str) -> Callable[[str, Collection[str]], str | None]:
    """Finds the name without a part that a wrapper has added."""

    def find(name: str, _: Collection[str]) -> str | None:
        plain = ".".join(one for one in name.split(".") if one != part)
        return plain if plain != name else None

    return find


_RENAMINGS = (
    _Renaming(
        "torch.nn.utils.prune",
        _with("_orig", "_mask"),
        "torch.nn.utils.prune.identity(layer, {attribute!r}); a callback does so in on_load_checkpoint. Or load only the "
        "pruned weights: restore={{'model'}}",
    ),
    _Renaming(
        "torch.nn.utils.parametrize (which torch.nn.utils.parametrizations uses)",
        _strip_parametrization,
        "for example torch.nn.utils.parametrizations.weight_norm(layer, {attribute!r})",
    ),
    _Renaming("torch.nn.utils.weight_norm", _with("_g", "_v"), "torch.nn.utils.weight_norm(layer, {attribute!r})"),
    _Renaming("torch.nn.utils.spectral_norm", _with("_orig", "_u"), "torch.nn.utils.spectral_norm(layer, {attribute!r})"),
    _Renaming(
        "an adapter of PEFT, such as LoRA", _inside("base_layer"), "for example peft.inject_adapter_in_model(config, model)"
    ),
    *(_Renaming(by, _inside(part), "") for part, by in _WRAPPERS.items()),
)

# Buffers next to the parameters of a layer.
_QUANTIZED = re.compile(r"fake_quant|activation_post_process")


def _fold_masks(sources: Mapping[str, Tensor], present: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The stored tensors, with the product for parameters that were pruned when they were saved, but are not in this model.

    Args:
        sources: The stored tensors by name.
        present: The names in the model.

    Returns:
        The tensors, and notices for the user.
    """
    folded = dict(sources)
    pruned = [
        plain
        for plain in (name.removesuffix("_mask") for name in sources if name.endswith("_mask"))
        if f"{plain}_orig" in sources and plain in present and plain not in sources and f"{plain}_mask" not in present
    ]
    for plain in pruned:
        folded[plain] = folded.pop(f"{plain}_orig") * folded.pop(f"{plain}_mask")
    if not pruned:
        return folded, []
    return folded, [f"loaded <name>_orig × <name>_mask of the checkpoint, without the mask, as: {join_names(pruned)}"]


def _explain_names(missing: Collection[str], unexpected: Collection[str]) -> Iterator[str]:
    """What names mean that only the model (`missing`) or only the checkpoint (`unexpected`) has, a paragraph each."""
    for names, others, saved in ((unexpected, missing, True), (missing, unexpected, False)):
        known, rest = set(names), set(others)
        for renaming in _RENAMINGS:
            originals = ((name, renaming.find(name, known)) for name in names)
            for name, plain in ((name, plain) for name, plain in originals if plain is not None and plain in rest):
                yield _explain_renaming(renaming, name, plain, saved)
                break
        added = next((name for name in names if _QUANTIZED.search(name)), None)
        if added is not None:
            fix = _fix(saved, "torch.ao.quantization.prepare_qat(model)")
            yield f"{added!r} is only in the {'checkpoint' if saved else 'model'}, added by torch.ao.quantization. {fix}"


def _explain_renaming(renaming: _Renaming, new: str, plain: str, saved: bool) -> str:
    where, other = ("checkpoint", "model") if saved else ("model", "checkpoint")
    text = f"{new!r} in the {where} is {plain!r} in the {other}, renamed by {renaming.by}."
    if not renaming.apply:
        return f"{text} Fix: remove the part from the names before you save or load them."
    return f"{text} {_fix(saved, renaming.apply.format(attribute=plain.rpartition('.')[2]))}"


def _fix(saved: bool, apply: str) -> str:
    """What to do if it was applied to the model that was saved, or to the one that is here."""
    if saved:
        return f"Fix: apply it to the same layers before loading, in __init__ or configure_model: {apply}"
    return "Fix: load the weights into the model before you apply it."
