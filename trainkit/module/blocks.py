"""Choose modules inside a model: its repeated blocks, or those that a user names by class, name or function.

Sharding, compilation and activation checkpointing work on such modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainkit.errors import ConfigurationError, UnknownNameError, nearest

__all__ = ["Choice", "describe_modules", "find_repeated_blocks", "select_modules"]

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""One way to name modules: a class or its name, a dotted name or pattern such as `"layers.*"`, or a function."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of which a model has several, such as the layers of a transformer: dotted name → module.

    A model of `transformers` names the classes of its blocks in `_no_split_modules`. In other models, they are the modules
    with submodules of which an `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict` has two or more of the same class. Blocks
    inside of blocks do not count. A block that the model uses under several names has its first name.
    """
    declared = _block_classes(model)
    blocks: dict[str, nn.Module] = {}
    _collect(model, "", declared, blocks, set())
    return blocks


def _block_classes(model: nn.Module) -> set[str]:
    return {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}


def _collect(module: nn.Module, path: str, declared: set[str], blocks: dict[str, nn.Module], seen: set[nn.Module]) -> None:
    counts: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _CONTAINERS):
        counts.update(type(child) for child in module.children() if _is_composite(child))
    for name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        inside = f"{path}.{name}" if path else name
        if type(child).__name__ in declared or (counts[type(child)] > 1 and not declared):
            blocks[inside] = child
        else:
            _collect(child, inside, declared, blocks, seen)


def _is_composite(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None


def select_modules(model: nn.Module, choice: Choice | Sequence[Choice], argument: str) -> dict[str, nn.Module]:
    """The modules inside a model that a user has named: dotted name → module. The model itself is not among them.

    Args:
        model: The model.
        choice: One choice or a list of them, see `Choice`. Modules inside of chosen modules can be chosen too.
        argument: Name of the user's argument, for messages.

    Raises:
        UnknownNameError: A name or a class matches no module.
        ConfigurationError: A choice is none of these, or a function chooses no module.
    """
    choices = list(choice) if isinstance(choice, list | tuple | set | frozenset) else [choice]
    inside = {name: module for name, module in model.named_modules() if module is not model}
    chosen: set[str] = set()
    for one in choices:
        matching = set(_matching(inside, one, argument))
        if not matching:
            _refuse_empty(inside, one, model, argument)
        chosen |= matching
    return {name: module for name, module in inside.items() if name in chosen}


def _matching(inside: dict[str, nn.Module], choice: Any, argument: str) -> Iterator[str]:
    if isinstance(choice, type) and issubclass(choice, nn.Module):
        return (name for name, module in inside.items() if isinstance(module, choice))
    if isinstance(choice, str):
        return (n for n, module in inside.items() if fnmatchcase(n, choice) or choice in _class_names(module))
    if callable(choice) and not isinstance(choice, type):
        return (name for name, module in inside.items() if choice(name, module))
    raise ConfigurationError(
        f"{argument}={choice!r}: expected a class of nn.Module, the name of a class or of a module, or a function "
        f"(name, module) -> bool. For example: {argument}=nn.TransformerEncoderLayer"
    )


def _class_names(module: nn.Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]


def _refuse_empty(inside: dict[str, nn.Module], choice: Any, model: nn.Module, argument: str) -> None:
    classes = dict.fromkeys(type(module).__name__ for module in inside.values())
    if isinstance(choice, str):
        raise UnknownNameError(
            f"{argument}={choice!r} matches no module of {type(model).__name__}. Classes of its modules: "
            f"{', '.join(classes)}.{nearest(choice, [*classes, *inside])}"
        )
    if isinstance(choice, type):
        raise UnknownNameError(
            f"{argument}={choice.__name__} matches no module of {type(model).__name__}. Classes of its modules: "
            f"{', '.join(classes)}.{nearest(choice.__name__, classes)}"
        )
    raise ConfigurationError(
        f"{argument}: the function returned False for all {len(inside)} modules of {type(model).__name__}. Expected True for "
        f"at least one: {argument}=lambda name, module: isinstance(module, Block)"
    )


def describe_modules(classes: Mapping[str, str]) -> str:
    """Modules in words: "12 Block (layers.0, layers.1, ..., layers.11)".

    Args:
        classes: Dotted name of each module → the name of its class.
    """
    numbers, names = Counter(classes.values()), list(classes)
    shown = names if len(names) < 4 else [names[0], names[1], "...", names[-1]]
    return f"{', '.join(f'{number} {name}' for name, number in numbers.items())} ({', '.join(shown)})"
