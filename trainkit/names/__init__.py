"""Names of packages: imported on first use, and what to use instead of a name of another framework that is not here.

The names of Lightning, Accelerate and the Hugging Face Trainer are data: one JSON file for each, read when it is needed. A
group is a module below `lightning.pytorch` ("" is that itself) and holds the names of all its files. The keys of
`lightning.json`:

- `same`: group → module of trainkit → the names that it has.
- `fabric`: group of `lightning.fabric` ("" is any, also of `lightning.pytorch`) → name → the module of trainkit that has it.
- `renamed`: group → name → the same thing under another name.
- `absent`: group → what to use → names that trainkit does not have.
- `members`: class → attribute or method that ours does not have → what to use.
- `modules`: modules of Lightning that are no modules of trainkit.
- `vendors`: module of Lightning → names of `trainkit.compat.lightning_vendors` that it has behind the door.
- `placeholders`: module of Lightning → names that it has behind the door because projects import them; to call one is an error.
- `arguments`: function → argument that it does not have → what to use.
- `carried`: argument → types of the values that replace the first "..." of its advice.
- `defaults`: argument → its default values in Lightning; those of all others are `None`.

`accelerate.json` has `arguments` too, the `attributes` of an Accelerator, and what to use → names for `trackers` and `imports`.
For `trainkit.names.doors` both have the `version` of the framework that trainkit follows, and `accelerate.json` also its
`modules`, the `homes` of their names in trainkit, `unavailable`: functions whose answer is no, and `placeholders`: names that
other libraries import and we do not have.

`hugging_face.json` has the `version` of transformers, and what to use → names: `arguments` of `TrainingArguments`, arguments of
the `constructor` of its Trainer, `imports` ("import ..." stands for the name), `attributes` of a Trainer and of its `state`.
`same`: arguments that our Trainer has with the same meaning. `hooks`: hook → ours. `unwarned_hooks`: the same, for names that
users give to their own methods. `carried`: as above. `training_arguments`: argument of `TrainingArguments` → the answer of
`TransformersModule.from_arguments`, and what it becomes or what to do. The answers: "here": it is read; "no effect": every
value gives the same run; "script": only scripts read it; "refused": another value than the default is an error.
"""

from __future__ import annotations

import dis
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit.errors import UnknownNameError, UnsupportedArgumentError, nearest

__all__ = [
    "PACKAGES",
    "absent",
    "absent_attribute",
    "advice",
    "advice_by_place",
    "behind_door",
    "home_of",
    "lazily",
    "our_path",
    "refuse_unknown",
    "submodule",
    "table",
    "use_instead",
]


# ------------------------------------------------------------------------------------------- names of packages of trainkit


def lazily(package: dict[str, Any], files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: The `globals()` of the package.
        files: Public name → its module in the package; a module that begins with a dot is in the parent package.
    """

    def get(name: str) -> Any:
        if name not in files:
            if (module := submodule(package, name)) is not None:
                return module
            raise absent(package["__name__"], name, files)
        value = getattr(import_module(f".{files[name]}", package["__name__"]), name)
        package[name] = value  # __getattr__ is not called again
        return value

    def names() -> list[str]:
        return sorted({*package, *files})

    return get, names


def submodule(package: Mapping[str, Any], name: str) -> ModuleType | None:
    """The module of this name in a package, for `package.module.name` without an import of the module, as in Lightning.

    Args:
        package: The `globals()` of the package.
        name: The attribute that it does not have.
    """
    full = f"{package['__name__']}.{name}"
    return import_module(full) if "__path__" in package and name[0] != "_" and find_spec(full) is not None else None


PACKAGES = {"lightning": ("lightning", "pytorch_lightning", "lightning_fabric"), "accelerate": ("accelerate",)}
"""Framework → the packages by which scripts import it."""

behind_door: dict[str, str] = {}
"""Module of trainkit → the name under which a script has imported it through a door of `trainkit.names.doors`."""


def absent(module: str, name: str, known: Iterable[str], written: str | None = None) -> AttributeError | ImportError:
    """The error for a missing name of a module, for the module's `__getattr__`.

    It says what to use instead of a name of Lightning or Accelerate, and otherwise the nearest name. For
    `from module import name` it is an `ImportError`, because Python would replace an `AttributeError` by an `ImportError`
    without that text. Otherwise it is an `AttributeError`, which `hasattr` and `getattr` need.

    Args:
        module: The full name of the module.
        name: The missing name.
        known: The names that exist.
        written: The name of the module in the user's script; by default that in `behind_door`, else `module`.
    """
    use = use_instead(module, name)
    importing = _is_import_from(2)
    written = written or behind_door.get(module, module)
    framework = next((each for each, packages in PACKAGES.items() if written.partition(".")[0] in packages), None)
    if use is not None:
        text = f"{written} has no {name}. Use: {use}"
    else:
        text = (
            f"cannot import name {name!r} from {written!r}." if importing else f"module {written!r} has no attribute {name!r}."
        )
        text += nearest(name, known)
    if framework is not None:
        text += f" (trainkit takes the place of {framework} in this process: see docs/moving-over/{framework}.md)"
    # without a name Python would add a "Did you mean" of its own
    return ImportError(text, name=module) if importing else AttributeError(text, name=name, obj=None)


def _is_import_from(depth: int) -> bool:
    """Whether `from module import name` asks for a name.

    Args:
        depth: How many functions there are between the caller of this one and that line; the caller itself is 1.
    """
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = None if frame is None else frame.f_back
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


# ------------------------------------------------------------------------------------------- names of Lightning and Accelerate


@cache
def table(framework: str) -> dict[str, Any]:
    """The names of a framework, "lightning", "accelerate" or "hugging_face"; see the top of this file."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name(f"{framework}.json").read_text("utf-8"))
    if framework == "lightning":
        content["absent"] = {group: _by_name(uses) for group, uses in content["absent"].items()}
    content |= {key: _by_name(content[key]) for key in _BY_USE.get(framework, ())}
    if framework == "hugging_face":
        content["imports"] = {n: use.replace("import ...", f"import {n}") for n, use in content["imports"].items()}
    return content


_IN_INTEGRATIONS = {
    name: f"from trainkit.integrations.transformers import {name}" for name in ("TransformersData", "TransformersModule")
}
_BY_USE = {
    "accelerate": ("imports", "trackers"),
    "hugging_face": ("arguments", "attributes", "constructor", "imports", "state"),
}  # groups in which a file has what to use → names


def _by_name(uses: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: use for use, names in uses.items() for name in names}


@cache
def advice_by_place() -> dict[str, dict[str, str]]:
    """Place → name → what to use.

    A class or function means its arguments, "accelerator", "strategy" and "trainer" the attributes of an object,
    "trainer.state" those of the state of a trainer, "precision" and "log_with" names of precisions and trackers,
    "log_kwargs" arguments of a tracker's `log`, "trainkit" imports of names of Accelerate and the Hugging Face Trainer.
    """
    lightning, accelerate, hugging_face = table("lightning"), table("accelerate"), table("hugging_face")
    places = {**lightning["arguments"], **accelerate["arguments"]}
    places["Trainer"] = hugging_face["arguments"] | hugging_face["constructor"] | places["Trainer"]
    places |= dict.fromkeys(("Trainer.predict", "Trainer.test", "Trainer.validate"), places["Trainer.fit"])
    places["Trainer.fit"] = {
        "resume_from_checkpoint": hugging_face["arguments"]["resume_from_checkpoint"],
        **places["Trainer.fit"],
    }
    # The parts of their Trainer: an argument that one of these two does not have is one of the other, or of our Trainer.
    parts = hugging_face["arguments"] | hugging_face["constructor"]
    parts = {name: f"{use} (an argument of Trainer, if no class is named)" for name, use in parts.items()}
    parts |= {name: f"use Trainer({name}=...)" for name in hugging_face["same"]}
    places |= {"TransformersData": parts, "TransformersModule": parts}
    return places | {
        "Accelerator.load_state": places["Accelerator.save_state"],
        "accelerator": accelerate["attributes"],
        "log_with": accelerate["trackers"],
        "strategy": lightning["members"]["Strategy"],
        "trainer": hugging_face["attributes"] | lightning["members"]["Trainer"],
        "trainer.state": hugging_face["state"],
        "trainkit": hugging_face["imports"] | accelerate["imports"] | _IN_INTEGRATIONS,
    }


def advice(where: str, name: str) -> str | None:
    """What to use instead of a name in a place of `advice_by_place`; `None` if no framework has it."""
    return advice_by_place().get(where, {}).get(name)


def absent_attribute(owner: object, place: str, what: str, name: str) -> AttributeError:
    """The error for an attribute that an object does not have, for its `__getattr__`.

    Args:
        owner: The object.
        place: Its place in `advice_by_place`.
        what: What the message calls it, with an article: "a Trainer".
        name: The attribute.
    """
    fix = advice(place, name)
    text = f" Use {fix}." if fix else nearest(name, [one for one in dir(type(owner)) if not one.startswith("_")])
    # With obj=owner Python would add another "Did you mean".
    return AttributeError(f"{what} has no {name!r}.{text}", name=name, obj=None)


def refuse_unknown(where: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse unknown arguments of a function.

    A Trainer, its methods and `load_from_checkpoint` accept an unsupported argument with Lightning's default value, which has
    no effect.

    Args:
        where: "Trainer", "Accelerator", one of their methods ("Trainer.fit"), "FSDPStrategy", or "load_from_checkpoint".
        unknown: The unknown arguments.
        known: The names of the known arguments.

    Raises:
        UnsupportedArgumentError: Another framework has it; the message names the replacement.
        UnknownNameError: Another name; the message has the nearest one.
    """
    for name, value in unknown.items():
        fix = advice(where, name)
        if fix is None:
            names = [*known, *advice_by_place().get(where, {})]
            raise UnknownNameError(f"{where} has no argument {name!r}.{nearest(name, names)}")
        if not (where.startswith(("Trainer", "load_from_checkpoint")) and _is_default(name, value)):
            raise UnsupportedArgumentError(f"{where}({name}=...): {_with_value(fix, name, value)}.")


def _with_value(fix: str, name: str, value: Any) -> str:
    """The advice with the user's value in it, if the value means the same there."""
    kinds = table("lightning")["carried"].get(name) or table("hugging_face")["carried"].get(name, [])
    return fix.replace("...", repr(value), 1) if type(value).__name__ in kinds else fix


def _is_default(name: str, value: Any) -> bool:
    """Whether a value is Lightning's default of an unsupported argument; 0 is not False."""
    defaults = table("lightning")["defaults"].get(name, [None])
    return any(type(value) is type(default) and value == default for default in defaults)


def use_instead(module: str, name: str) -> str | None:
    """What to use instead of a name that a module does not have; `None` if no other framework has it.

    Args:
        module: The full name of the module that was asked for it.
        name: The name.
    """
    group, lightning, hugging_face = _group(module), table("lightning"), table("hugging_face")["imports"]
    if module == "trainkit.integrations.transformers" and name in hugging_face:  # next to a Trainer that takes their objects
        return f"from transformers import {name}: it works unchanged"
    groups = [group, *(other for other in lightning["same"] | lightning["absent"] if other != group)]
    use = next((use for each in groups if (use := _use_of_lightning(each, name)) is not None), None)
    if use == f"from {module} import {name}":  # it is not there yet
        use = None
    if module in ("trainkit.utils", "trainkit.state") or use is None:
        use = advice("trainkit", name) or use
    elif name in hugging_face:  # a name of both
        use = f"{use} (Lightning's). For that of transformers: {hugging_face[name]}"
    return use


def home_of(module: str, name: str) -> str | None:
    """The module of ours with a name that Lightning has in this module; `None` if it is elsewhere, or not here.

    Args:
        module: A module of Lightning, with `trainkit` instead of `lightning.pytorch`.
        name: The name.
    """
    group, fabric = _group(module), table("lightning")["fabric"]
    if module.startswith("trainkit.fabric.") and name in fabric.get(group, {}):
        return str(fabric[group][name])
    homes = table("lightning")["same"].get(group, {})
    home: str | None = fabric[""].get(name)
    return next((home for home, names in homes.items() if name in names), home)


def _group(module: str) -> str:
    return module.removeprefix("trainkit").removeprefix(".").removeprefix("fabric.").partition(".")[0]


def _use_of_lightning(group: str, name: str) -> str | None:
    home = home_of(f"trainkit.{group}", name)
    if home is not None:
        return f"from {home} import {name}"
    lightning = table("lightning")
    use: str | None = {**lightning["absent"].get(group, {}), **lightning["renamed"].get(group, {})}.get(name)
    return use


_PATH_OF_LIGHTNING = re.compile(r"(?:lightning(?:\.pytorch)?|pytorch_lightning)((?:\.[a-z_]\w*)*)\.([A-Z]\w*)")


def our_path(text: str) -> str:
    """The path of our class for that of a class of Lightning, such as a `class_path`; any other text as it is.

    Raises:
        UnknownNameError: trainkit has no such class; the message says what to use.
    """
    found = _PATH_OF_LIGHTNING.fullmatch(text)
    if found is None:
        return text
    module, name = f"trainkit{found[1]}", found[2]
    home = home_of(module, name)
    if home is None:
        use = use_instead(module, name)
        known = [each for names in table("lightning")["same"].get(_group(module), {}).values() for each in names]
        raise UnknownNameError(
            f"{text}: trainkit has no class of this path. "
            + (f"Use: {use}" if use is not None else f"Expected that of a class of trainkit or your own.{nearest(name, known)}")
        )
    return f"{home}.{name}"
