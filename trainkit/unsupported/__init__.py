"""Names of Lightning and Accelerate that trainkit does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.errors import UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.unsupported.accelerate_names import (
    ACCELERATOR,
    ACCELERATOR_ATTRIBUTES,
    ACCELERATOR_STATE,
    IMPORTS,
    LOG_KWARGS,
    TRACKERS,
)
from trainkit.unsupported.lightning_arguments import (
    CARRIED,
    DEFAULTS,
    LOAD_FROM_CHECKPOINT,
    PRECISION,
    SHARDING,
    TRAINER,
    TRAINER_VERBS,
)
from trainkit.unsupported.lightning_names import ABSENT, FABRIC, MEMBERS, OTHER, SAME

__all__ = ["ADVICE", "advice", "home_of", "refuse_unknown", "use_instead"]

ADVICE: dict[str, dict[str, str]] = {
    "Accelerator": ACCELERATOR,
    "Accelerator.load_state": ACCELERATOR_STATE,
    "Accelerator.save_state": ACCELERATOR_STATE,
    "FSDPStrategy": SHARDING,
    "Trainer": TRAINER,
    **dict.fromkeys(("Trainer.fit", "Trainer.predict", "Trainer.test", "Trainer.validate"), TRAINER_VERBS),
    "accelerator": ACCELERATOR_ATTRIBUTES,
    "load_from_checkpoint": LOAD_FROM_CHECKPOINT,
    "log_kwargs": LOG_KWARGS,
    "log_with": TRACKERS,
    "precision": PRECISION,
    "trainer": MEMBERS["Trainer"],
    "trainkit": IMPORTS,
}
"""Place → name → what to use. A class or function means its arguments, "accelerator" and "trainer" the attributes of an
object, "precision" and "log_with" names of precisions and trackers, "log_kwargs" arguments of a tracker's `log`, "trainkit"
imports of Accelerate's names."""


def advice(where: str, name: str) -> str | None:
    """What to use instead of a name in a place of `ADVICE`; `None` if Lightning and Accelerate do not have it."""
    return ADVICE.get(where, {}).get(name)


def refuse_unknown(where: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse unknown arguments of a function.

    A Trainer, its methods and `load_from_checkpoint` accept an unsupported argument with Lightning's default value, which has
    no effect.

    Args:
        where: "Trainer", "Accelerator", one of their methods ("Trainer.fit"), "FSDPStrategy", or "load_from_checkpoint".
        given: The unknown arguments.
        known: The names of the known arguments.

    Raises:
        UnsupportedArgumentError: Lightning or Accelerate has it; the message names the replacement.
        UnknownNameError: Another name; the message has the nearest one.
    """
    for name, value in given.items():
        fix = advice(where, name)
        if fix is None:
            raise UnknownNameError(f"{where} has no argument {name!r}.{nearest(name, [*known, *ADVICE.get(where, {})])}")
        if not (where.startswith(("Trainer", "load_from_checkpoint")) and _is_default(name, value)):
            raise UnsupportedArgumentError(f"{where}({name}=...): {_with_value(fix, name, value)}.")


def _with_value(fix: str, name: str, value: Any) -> str:
    """The advice with the user's value in it, if the value means the same there."""
    if name == "gpus" and value == 0:
        return "use accelerator='cpu'"
    kinds = CARRIED.get(name, ())
    if type(value) is int and kinds == (float,):
        value = float(value)  # a fraction: as an integer it would be a number of batches
    if type(value) not in kinds or (isinstance(value, list) and not all(isinstance(item, int) for item in value)):
        return fix
    return fix.replace("...", repr(value), 1)


def _is_default(name: str, value: Any) -> bool:
    """Whether a value is Lightning's default of an unsupported argument; 0 is not False."""
    return any(type(value) is type(default) and value == default for default in DEFAULTS.get(name, (None,)))


def use_instead(module: str, name: str) -> str | None:
    """What to use instead of a name that a module does not have; `None` if neither Lightning nor Accelerate has it.

    Args:
        module: The full name of the module that was asked for it.
        name: The name.
    """
    own = _group(module)
    groups = [own, *(group for group in SAME | ABSENT if group != own)]
    found = next((use for group in groups if (use := _lightnings(group, name)) is not None), None)
    if found == f"from {module} import {name}":  # it is not there yet
        found = None
    of_accelerate = module in ("trainkit.utils", "trainkit.state") or found is None
    return IMPORTS.get(name, found) if of_accelerate else found


def home_of(module: str, name: str) -> str | None:
    """The module of ours with a name that Lightning has in this module; `None` if it is elsewhere, or not here.

    Args:
        module: A module of Lightning, with `trainkit` instead of `lightning.pytorch`.
        name: The name.
    """
    homes = SAME.get(_group(module), {})
    return next((home for home, names in homes.items() if name in names.split()), FABRIC.get(name))


def _group(module: str) -> str:
    return module.removeprefix("trainkit").removeprefix(".").removeprefix("fabric.").partition(".")[0]


def _lightnings(group: str, name: str) -> str | None:
    home = home_of(f"trainkit.{group}", name)
    if home is not None:
        return f"from {home} import {name}"
    return OTHER.get(group, {}).get(name) or ABSENT.get(group, {}).get(name)
