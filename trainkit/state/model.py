"""Captures the weights of a module as tensors by name, and restores them: all of them, or nothing is changed."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.checkpoint.tensor_file import memory_key
from trainkit.console import counted
from trainkit.errors import ConfigurationError, CorruptCheckpointError, StateMismatchError
from trainkit.optim.parameter_names import clean_names, clean_paths, parameter_names, without_checkpoint_wrapper
from trainkit.state.configs import has_adapters, model_configs
from trainkit.state.described import copied
from trainkit.state.fit import Fit
from trainkit.state.renamed import explain_names, folded
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = [
    "ModelState",
    "capture_model",
    "clean_names",
    "frozen_fingerprint",
    "has_adapters",
    "parameter_names",
    "plan_model",
]

_EXTRA = "_extra_state"
_CHUNK_BYTES = 64 * 2**20  # bytes of a parameter that are copied to the host at a time


@dataclass
class ModelState:
    """The state of a module in a checkpoint, with clean names.

    Attributes:
        tensors: parameters and persistent buffers; after a capture they share the memory of the module.
        aliases: name of a tied tensor → the name in `tensors`.
        extra: the results of `get_extra_state`, and anything else in the state dict that is not a tensor.
        trained: `requires_grad` of every parameter, stored or not. A restore does not change it for other parameters.
        fingerprint: the fingerprint of the frozen parameters if they are not stored; `None` if all are stored.
        configs: the configurations of `transformers` and PEFT models inside, see
            `trainkit.state.configs.model_configs`.
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
        module: the module; may be compiled or wrapped.
        save: `"trainable"`: only the parameters that require a gradient, and the buffers.
        fingerprint: for `"trainable"`, the result of `frozen_fingerprint` for the parameters that are frozen now;
            `None`: compute it.
        placeholders: `id(parameter)` → the tensor to store instead: a master copy, or a sharded tensor.

    Raises:
        ConfigurationError: unknown `save`.
        UnsavableError: two names differ only by the name of a wrapper, or a configuration is not JSON.
    """
    if save not in ("all", "trainable"):
        raise ConfigurationError(f"save must be 'all' or 'trainable', not {save!r}.")
    raw = _with_placeholders(module, placeholders)
    names = clean_paths(module, raw)
    state = ModelState(trained={n: p.requires_grad for n, p in _parameters(module).items()}, configs=model_configs(module))
    frozen: set[str] = set()
    if save == "trainable":
        state.fingerprint = frozen_fingerprint(module, placeholders) if fingerprint is None else fingerprint
        frozen = _frozen(state)
    first: dict[Any, str] = {}
    for raw_name, value in raw.items():
        name = names[raw_name]
        if frozen and _belongs_to(name, frozen):
            continue
        if _is_extra(name, value):
            state.extra[name] = value
        elif not is_lazy(value):
            tensor = value.detach().resolve_conj().resolve_neg()
            stored = first.setdefault(memory_key(tensor), name)
            if stored == name:
                state.tensors[name] = tensor
            else:
                state.aliases[name] = stored
    return state


def plan_model(
    module: nn.Module,
    state: ModelState,
    *,
    strict: bool = True,
    what: str,
    placeholders: Mapping[int, Tensor] | None = None,
    take: Callable[[dict[nn.Parameter, Tensor]], None] = lambda values: None,
    folds: bool = True,
) -> Callable[[], list[str]]:
    """Compare a captured state with a module. Returns a function that loads it in place.

    This allows comparing a whole checkpoint before anything is changed. Values are cast to the module's dtypes. A tensor that
    is tied only here or only in the checkpoint is loaded if every name gets its value. `requires_grad` is restored.

    Args:
        module: a module of the same structure; may be compiled or wrapped. Lazy parameters get their shapes.
        state: the state; its tensors may be on any device and are copied.
        strict: missing and unexpected names raise an error; False: they are skipped, with a notice.
        what: what is loaded, for messages, such as `"the checkpoint step-00001200"`.
        placeholders: see `capture_model`; their dtypes and shapes are compared.
        take: called with the values of the parameters in `placeholders`.
        folds: load the product of `weight_orig` and `weight_mask` into a model that has only `weight`.

    Returns:
        A function that loads the state and returns what the user should know, one sentence each.

    Raises:
        StateMismatchError: the state does not fit; the message lists all mismatches, and nothing was changed.
        CorruptCheckpointError: the state contradicts itself.
    """
    _check_consistent(state, what)
    state = replace(state, trained={without_checkpoint_wrapper(name): trained for name, trained in state.trained.items()})
    raw = _with_placeholders(module, placeholders)
    names = clean_paths(module, raw)
    parameters = _parameters(module)
    frozen = set() if state.fingerprint is None else _frozen(state)
    sources = state.tensors | {alias: state.tensors[name] for alias, name in state.aliases.items()}
    here, said = set(names.values()), list[str]()
    if folds:
        sources, said = folded(sources, here)
    fit = Fit(sources, state, frozen, strict)
    extra = {}
    owners = dict(module.named_modules(remove_duplicate=False))
    for raw_name, value in raw.items():
        name = names[raw_name]
        if _is_extra(name, value):
            if name in state.extra:
                extra[raw_name] = copied(state.extra[name])
            elif not _belongs_to(name, frozen):
                fit.missing.append(f"{name} (extra state)")
        else:
            fit.add(raw_name, name, _resized(owners.get(raw_name.rpartition(".")[0]), value, sources.get(name)))
    fit.unexpected += [name for name in [*sources, *state.extra] if name not in here]
    fit.check_shared_memory()
    if state.fingerprint is not None and not fit.complaints():
        _check_base(parameters, frozen, state.fingerprint, what, placeholders)
    if complaints := fit.complaints():
        raise _mismatch(fit, complaints, f"{what} does not fit {type(module).__name__}")

    def load() -> list[str]:
        values = OrderedDict(fit.whole | extra)
        buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        registered = {*parameters, *clean_paths(module, buffers).values()}
        for name in fit.whole:
            if names[name] not in registered:  # a module with its own load_state_dict may keep the tensor
                values[name] = values[name].to(raw[name].device, copy=True)
        taken: dict[nn.Parameter, Tensor] = {}
        for name, clean in names.items():
            if placeholders and name in values and clean in parameters and id(parameters[clean]) in placeholders:
                taken[parameters[clean]] = values.pop(name)
        _load(module, values, fit.narrow, raw, what)
        take(taken)
        return said + fit.notices() + _set_trained(parameters, state.trained)

    return load


def _mismatch(fit: Fit, complaints: list[str], text: str) -> StateMismatchError:
    complaints = [*complaints, *explain_names(fit.missing, fit.unexpected)]
    other = "only the matching tensors with strict=False" if fit.only_names() else "another checkpoint"
    return StateMismatchError(
        f"{text}:\n  " + "\n  ".join(complaints) + "\nNothing was changed. Fix: build the model with the same structure as the "
        f"saved one, or load {other}."
    )


def _resized(owner: nn.Module | None, value: Tensor, stored: Tensor | None) -> Tensor:
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


def frozen_fingerprint(module: nn.Module, placeholders: Mapping[int, Tensor] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the parameters that do not require a gradient, as 64 hex digits.

    Compute it again when other parameters are frozen. It reads all frozen parameters, at about a gigabyte per second.
    """
    parameters = _parameters(module)
    return _fingerprint({name: p for name, p in parameters.items() if not p.requires_grad}, placeholders)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by clean name, a tied one under each of its names."""
    found = dict(module.named_parameters(remove_duplicate=False))
    return {name: found[raw] for raw, name in clean_paths(module, found).items()}


def _frozen(state: ModelState) -> set[str]:
    return {name for name, trained in state.trained.items() if not trained}


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
    for piece in data.split(_CHUNK_BYTES):
        digest.update(piece.cpu().numpy())
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest.hexdigest()}"


def _check_base(
    parameters: Mapping[str, nn.Parameter],
    frozen: set[str],
    fingerprint: str,
    what: str,
    placeholders: Mapping[int, Tensor] | None = None,
) -> None:
    here = {name: parameters[name] for name in frozen if name in parameters}
    absent = sorted(frozen - set(here))
    found = _fingerprint(here, placeholders)
    if absent or found != fingerprint:
        lacks = f" This model does not have these frozen parameters: {', '.join(absent)}." if absent else ""
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in here.values()})) or "none"
        raise StateMismatchError(
            f"{what} contains only the trained parameters, of a model with another base: its {len(frozen)} frozen parameters "
            f"had the SHA-256 {fingerprint}, those of this model have {found} (dtype {dtypes}).{lacks} Nothing was changed. "
            "Fix: start from the same pretrained weights in the same dtype, or save with save='all'."
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
    module: nn.Module, values: OrderedDict[str, Any], narrow: list[tuple[Tensor, Tensor]], before: Mapping[str, Any], what: str
) -> None:
    """`module.load_state_dict`, which the user may override. If it fails, the state `before` is restored."""
    metadata = getattr(before, "_metadata", None)
    if metadata is not None:
        values._metadata = metadata  # type: ignore[attr-defined]
    backup = None
    if _can_fail(module):
        backup = {name: (value, None if is_lazy(value) else copied(value)) for name, value in before.items()}
    try:
        with torch.no_grad():
            module.load_state_dict(values, strict=False)
            for target, source in narrow:
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
        own = (kind.load_state_dict, kind._load_from_state_dict, kind.set_extra_state)
        hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
        for function in (*own, *(getattr(hook, "hook", hook) for hook in hooks)):
            if (getattr(function, "__module__", None) or "").partition(".")[0] != "torch":
                return True
    return False


def _restore_backup(module: nn.Module, backup: Mapping[str, tuple[Any, Any]]) -> None:
    with torch.no_grad():
        for value, copy in backup.values():
            if isinstance(value, Tensor) and copy is not None:
                value.copy_(copy)
    parts = dict(module.named_modules(remove_duplicate=False))
    for name, (_, copy) in backup.items():
        path, _, last = name.rpartition(".")
        if last == _EXTRA and path in parts:
            parts[path].set_extra_state(copy)


def _set_trained(parameters: Mapping[str, nn.Parameter], trained: Mapping[str, bool]) -> list[str]:
    changed: Counter[bool] = Counter()
    seen = set()
    for name, parameter in parameters.items():
        # pruning renames a parameter, here or before the checkpoint was saved
        wanted = next((trained[n] for n in (name, f"{name}_orig", name.removesuffix("_orig")) if n in trained), None)
        if wanted is not None and id(parameter) not in seen and parameter.requires_grad != wanted:
            parameter.requires_grad = wanted  # requires_grad_() does not work on a lazy parameter
            changed[wanted] += 1
            seen.add(id(parameter))
    return [
        f"requires_grad of {counted(count, 'parameter', 'parameters')} was set to {wanted}, as in the checkpoint"
        for wanted, count in changed.items()
    ]
