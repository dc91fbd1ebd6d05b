"""Loads the saved state of an optimizer into one that has other parameters (`strict=False`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.state.described import SavedOptimizer, name_here

__all__ = ["group_names", "same_groups", "with_parameters_of"]


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of the parameters, by group."""
    return [
        [names.get(id(p), "a parameter that belongs to no module") for p in group["params"]] for group in optimizer.param_groups
    ]


def with_parameters_of(
    optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer
) -> tuple[SavedOptimizer, list[str]]:
    """The saved state, changed to fit the parameters of this optimizer, and notices for the user.

    A group gets the options of the saved group that has most of its parameters. Parameters that were not saved have no state.
    The state of parameters that this optimizer does not have is dropped. State in another form than that of torch's optimizers
    is returned unchanged.
    """
    here = group_names(optimizer, names)
    theirs = [own for own, _ in saved.groups]
    if saved.opaque is not None or here == theirs:
        return saved, []
    matches = _matches(here, theirs)
    groups: list[tuple[list[str], dict[str, Any]]] = [
        (own, {} if match is None else saved.groups[match][1]) for own, match in zip(here, matches, strict=True)
    ]
    taken = set(chain.from_iterable(here))
    groups += [saved.groups[number] for number in _to_be_added(theirs, matches, taken, getattr(names, "parameters", {}))]
    kept = dict.fromkeys(chain.from_iterable(own for own, _ in groups))
    state = {name: own for name, own in saved.state.items() if name in kept}
    return replace(saved, groups=groups, state=state), _notices(kept, dict.fromkeys(chain.from_iterable(theirs)))


def _notices(kept: Collection[str], saved: Collection[str]) -> list[str]:
    """What the user should know of parameters that only the optimizer or only the checkpoint has."""
    notices = []
    if fresh := [name for name in kept if name not in saved]:
        notices.append(f"the optimizer starts without state for these parameters: {', '.join(fresh)}")
    if gone := [name for name in saved if name not in kept]:
        notices.append(f"optimizer state was not loaded for parameters that this optimizer does not have: {', '.join(gone)}")
    return notices


def same_groups(optimizer: Optimizer, names: Mapping[int, str], described: Any) -> bool:
    """Whether each group has the parameters of the saved group with the same index, so that a saved schedule fits."""
    if not isinstance(described, dict) or not isinstance(described.get("groups"), list):
        return True  # plan_optimizer raises an error for it
    known = set(names.values())
    theirs = [[name_here(name, known) for name in own["parameters"]] for own in described["groups"]]
    here = group_names(optimizer, names)
    matches = _matches(here, theirs)
    taken = set(chain.from_iterable(here))
    matches += _to_be_added(theirs, matches, taken, getattr(names, "parameters", {}))
    return matches == list(range(len(theirs)))


def _matches(here: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> list[int | None]:
    """For each group the index of the saved group that has most of its parameters.

    A group without saved parameters gets the saved group of the same index, if that is not assigned.
    """
    matches: list[int | None] = []
    for own in here:
        common = [len(set(own) & set(saved)) for saved in theirs]
        most = max(common, default=0)
        matches.append(common.index(most) if most else None)
    for number, match in enumerate(matches):
        if match is None and number < len(theirs) and number not in matches:
            matches[number] = number
    return matches


def _to_be_added(
    theirs: Sequence[Sequence[str]], matches: Sequence[int | None], taken: set[str], known: Mapping[str, Tensor]
) -> list[int]:
    """The saved groups that were added during training: their parameters belong to the modules, and to no group here."""
    return [
        number
        for number, own in enumerate(theirs)
        if number not in matches and all(name in known and name not in taken for name in own)
    ]
