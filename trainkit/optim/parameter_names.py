"""Names of parameters as users know them, without the parts that `torch.compile` and wrappers add."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainkit.console import join_names, notice, quantity
from trainkit.errors import UnsavableError

__all__ = [
    "KnownParameters",
    "ParameterNames",
    "clean_names",
    "clean_paths",
    "find_wrapped_attribute",
    "foreign_parameters",
    "parameter_names",
    "shape_of",
    "without_checkpoint_wrapper",
    "without_pruning",
]

_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"


class ParameterNames(dict[int, str]):
    """What `parameter_names` returns: a dict from `id(parameter)` to its name.

    Attributes:
        parameters: The parameters by name. It also keeps them alive, so that their ids stay valid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[str, nn.Parameter] = {}


class KnownParameters:
    """The names that the optimizers' parameters had when training began, to recognize a frozen copy that was replaced.

    A module may replace a copy of itself that only gives targets, and an optimizer of all parameters then still has those of
    the old copy. As long as nothing has trained either of them, the old ones take no part in training, and a checkpoint
    stores them under their names, without state. A layer that is trained must not be replaced like that.

    Args:
        sharded: The strategy keeps the optimizer state itself, so that it is unknown what has been trained.
    """

    def __init__(self, sharded: bool = False) -> None:
        self._sharded = sharded
        self._names: dict[int, str] = {}
        self._versions: dict[int, int] = {}  # of what has not been trained; torch counts the changes of a tensor
        self._reported: set[str] = set()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._names

    def note(self, optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> None:
        """Training begins, or continues after a load: remember the parameters of these optimizers.

        Args:
            optimizers: The optimizers.
            names: `parameter_names` of the modules.
        """
        for parameter in (p for one in optimizers for group in one.param_groups for p in group["params"]):
            if id(parameter) in names:
                self._names[id(parameter)] = names[id(parameter)]
                if not parameter.is_inference():
                    self._versions[id(parameter)] = parameter._version

    def note_trained(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: what has a gradient is trained. A fused step of SGD leaves no other trace."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            self._versions.pop(id(parameter), None)

    def replaced(self, optimizer: Optimizer, names: ParameterNames) -> dict[int, str]:
        """`id(parameter)` → name, for the parameters that were replaced in the modules without having been trained.

        Neither the old nor the new parameter has a gradient; the old one has no state and the value that it had, and the new
        one is not in the optimizer. A notice names them once.

        Args:
            optimizer: The optimizer.
            names: `parameter_names` of the modules.
        """
        if self._sharded:
            return {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        ids = set(map(id, parameters))
        result: dict[int, str] = {}
        for old in parameters:
            name = self._names.get(id(old), "")
            new = names.parameters.get(name)
            if id(old) in names or new is None or id(new) in ids or new.shape != old.shape:
                continue
            if new.grad is None and not optimizer.state.get(old) and self._is_untouched(old):
                result[id(old)] = name
        self._report(optimizer, [name for name in result.values() if name not in self._reported])
        return result

    def _is_untouched(self, parameter: Tensor) -> bool:
        return (
            parameter.grad is None and id(parameter) in self._versions and self._versions[id(parameter)] == parameter._version
        )

    def _report(self, optimizer: Optimizer, names: list[str]) -> None:
        if names:
            self._reported.update(names)
            replaced = quantity(len(names), "untrained parameter was", "untrained parameters were")
            notice(
                f"{replaced} replaced in the module ({join_names(names)}), and {type(optimizer).__name__} does not train the "
                "new ones. If it should, copy into them: module.layer.load_state_dict(new.state_dict())"
            )

    def clear(self) -> None:
        """Forget all parameters."""
        self._names.clear()
        self._versions.clear()
        self._reported.clear()


def clean_names(module: nn.Module) -> dict[str, str]:
    """The names in `module.state_dict()`, each with the name that users know.

    The parts that `torch.compile` (`_orig_mod`), `DataParallel` or `DistributedDataParallel` (`module`) and torch's
    `checkpoint_wrapper` (`_checkpoint_wrapped_module`) add are removed, at any depth. Wrappers are recognized by their class,
    so an attribute of the user's module that is called `module` stays.

    Raises:
        UnsavableError: Two names are the same without these parts.
    """
    return clean_paths(module, module.state_dict())


def parameter_names(modules: Sequence[nn.Module]) -> ParameterNames:
    """`id(parameter)` → clean name, for the parameters of all modules.

    Names of the second module begin with `model_1/`, of the third with `model_2/`, … A parameter with several names has its
    first one. A parameter that `torch.nn.utils.prune` prunes is still the same one, and has the name that it had before.
    """
    names = ParameterNames()
    for index, module in enumerate(modules):
        prefix = f"model_{index}/" if index else ""
        parameters = dict(module.named_parameters())
        clean = clean_paths(module, parameters)
        buffers = clean_paths(module, (name for name, _ in module.named_buffers(remove_duplicate=False)))
        here = {*clean.values(), *buffers.values()}
        for raw, name in clean.items():
            if id(parameters[raw]) not in names:
                name = prefix + without_pruning(name, here)
                names[id(parameters[raw])] = name
                names.parameters[name] = parameters[raw]
    return names


def foreign_parameters(optimizer: Optimizer, modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters of an optimizer that none of the modules has, such as those of a layer that was replaced."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]


def shape_of(parameter: Tensor) -> str:
    """The shape of a parameter, for messages; a lazy one has none yet."""
    return "not known yet" if is_lazy(parameter) else str(tuple(parameter.shape))


def clean_paths(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Dotted names in `module`, each with its clean name.

    Raises:
        UnsavableError: Two names are the same without the parts of wrappers.
    """
    inserted = _wrapper_paths(module)
    if not inserted:
        return {name: name for name in names}
    result: dict[str, str] = {}
    raw_names: dict[str, str] = {}
    for raw in names:
        name = _without(raw, inserted)
        if name in raw_names:
            raise UnsavableError(
                f"{type(module).__name__} has {raw_names[name]!r} and {raw!r}, which are both {name!r} without the parts that "
                "wrappers add. Rename one of the two attributes."
            )
        raw_names[name] = raw
        result[raw] = name
    return result


def without_checkpoint_wrapper(name: Any) -> Any:
    """A parameter's name without the part that torch's `checkpoint_wrapper` adds, as in a state dict.

    Checkpoints of earlier versions have the full name in the state of optimizers.
    """
    return name.replace(f"{_CHECKPOINT_WRAPPED}.", "") if isinstance(name, str) else name


def without_pruning(name: str, names: Container[str]) -> str:
    """The name of a parameter before `torch.nn.utils.prune` made `<name>_orig` and `<name>_mask` of it.

    Args:
        name: The name of the parameter.
        names: The names of the parameters and buffers of the model.
    """
    plain = name.removesuffix("_orig")
    return plain if plain != name and f"{plain}_mask" in names and plain not in names else name


def find_wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute of a wrapper that contains the user's module; None if `module` is not a wrapper."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module"
    # If these Python modules are not loaded, they have wrapped nothing; importing the compiler takes a second.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "_orig_mod"
    checkpointing = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if checkpointing is not None and isinstance(module, checkpointing.ActivationWrapper):
        return _CHECKPOINT_WRAPPED
    return None


def _wrapper_paths(module: nn.Module) -> set[str]:
    """The prefixes of dotted names whose last part was added by a wrapper, each with a dot at its end."""
    inserted = {
        f"{path}.{attribute}." if path else f"{attribute}."
        for path, part in module.named_modules(remove_duplicate=False)
        if (attribute := find_wrapped_attribute(part))
    }
    # torch removes this part in state dicts, but not in the names of parameters, so a wrapper inside has two paths
    hidden = {path for path in inserted if path.endswith(f"{_CHECKPOINT_WRAPPED}.")}
    return inserted | {_without(path, hidden) for path in inserted - hidden} if hidden else inserted


def _without(raw: str, inserted: set[str]) -> str:
    kept, path = [], ""
    for part in raw.split("."):
        path += f"{part}."
        if path not in inserted:
            kept.append(part)
    return ".".join(kept)
