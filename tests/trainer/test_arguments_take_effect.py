"""No public argument is accepted and ignored.

`argument_effects.yaml` has an entry for each optional argument of each public function, method and constructor: the test that
shows its effect, or `no effect` if the docstring says so and why. A required argument needs no entry. Another test reads the
syntax trees to check that every argument is used.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import house
from helpers.runs.signatures import Call, documented, public_calls, unread
from test_house import PUBLIC

CALLS = {call.name: call for call in public_calls(PUBLIC)}
TABLE: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "argument_effects.yaml").read_text("utf-8"))
ENTRIES = [(name, argument, entry) for name, entries in TABLE.items() for argument, entry in entries.items()]

# Methods that users override and trainkit calls: only the overrides read the arguments.
OVERRIDDEN = {
    "configure_columns", "configure_optimizers", "get_metrics", "on_after_batch_transfer", "on_before_batch_transfer",
    "optimizer_step", "optimizer_zero_grad", "predict_step", "transfer_batch_to_device", "write_on_batch_end",
    "write_on_epoch_end",
}  # fmt: skip


def test_every_optional_argument_has_an_entry() -> None:
    """A new argument needs a test that shows its effect, and an entry with that test's name in argument_effects.yaml."""
    accepted = {(name, argument) for name, call in CALLS.items() for argument in call.options}
    entries = {(name, argument) for name, argument, _ in ENTRIES}
    assert sorted(accepted - entries) == [], "arguments without an entry in tests/argument_effects.yaml"
    assert sorted(entries - accepted) == [], "entries of arguments that are not there any more"


def test_entries_lead_to_tests() -> None:
    """Each entry names a test that exists, in a file that mentions the argument or the function."""
    found: dict[str, dict[str, str]] = {}
    wrong = []
    for name, argument, entry in ENTRIES:
        if entry == "no effect" or entry.startswith("options of "):
            continue
        path, _, function = entry.partition("::")
        if path not in found:
            found[path] = functions_of(house.ROOT / path) if (house.ROOT / path).is_file() else {}
        if function not in found[path]:
            wrong.append(f"{name}({argument}): there is no test {entry}")
        elif not {argument, name.rpartition(".")[2]} & set(re.findall(r"\w+", found[path][""])):
            wrong.append(f"{name}({argument}): {path} does not know it")
    assert wrong == []


def functions_of(path: Path) -> dict[str, str]:
    """The source of each test in a file, and that of the file under `""`."""
    text = path.read_text("utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {"": text, **{node.name: ast.get_source_segment(text, node) or "" for node in functions}}


def test_arguments_without_effect_are_documented_as_such() -> None:
    wrong = [
        f"{name}: the docstring must have the line `{argument}: no effect: why`, and has {documented(CALLS[name], argument)!r}"
        for name, argument, entry in ENTRIES
        if entry == "no effect" and not documented(CALLS[name], argument).lower().startswith(f"{argument}: no effect")
    ]
    assert wrong == []


def test_arguments_that_are_passed_on_lead_to_entries() -> None:
    """If a function passes its `**options` to another function, the entries of the other function count."""
    assert [entry for *_, entry in ENTRIES if entry.startswith("options of ") and entry[11:] not in TABLE] == []


def test_every_argument_is_read() -> None:
    """The function or an override in a subclass reads it, or the docstring says `no effect`."""
    ignored = [
        f"{name}({argument})"
        for name, call in CALLS.items()
        if name.rpartition(".")[2] not in OVERRIDDEN
        for argument in unread(call)
        if not documented(call, argument).lower().startswith(f"{argument}: no effect")
    ]
    assert ignored == []


# --------------------------------------------------------------------------------------------- tests of these checks


class Example:
    """An example for the tests below.

    Args:
        used: is stored.
        idle: no effect: it is only here
            for an example.
    """

    def __init__(self, used: int = 0, idle: int = 0) -> None:
        self.used = used

    def ignores(self, one: int, *, two: int = 0, **more: Any) -> int:
        return one

    def reads(self, one: int, *two: int, **more: int) -> Any:
        return lambda: (one, two, more)

    def takes_all(self, one: int = 0) -> Any:
        return locals()

    def refuses(self, one: int = 0) -> None:
        raise NotImplementedError


def call_of(name: str) -> Call:
    return Call(f"Example.{name}", getattr(Example, name), Example)


@pytest.mark.parametrize(
    "name, found",
    [("__init__", ["idle"]), ("ignores", ["two", "more"]), ("reads", []), ("takes_all", []), ("refuses", [])],
)
def test_what_is_not_read_is_found(name: str, found: list[str]) -> None:
    assert unread(call_of(name)) == found


def test_optional_arguments() -> None:
    assert call_of("ignores").options == ["two", "more"]
    assert call_of("reads").options == ["two", "more"]


def test_what_a_docstring_says() -> None:
    assert documented(call_of("__init__"), "used") == "used: is stored."
    assert documented(call_of("__init__"), "idle") == "idle: no effect: it is only here for an example."
    assert documented(call_of("ignores"), "one") == ""


def test_public_callables_are_found_once_and_where_they_are_defined() -> None:
    assert {"Trainer", "Trainer.fit", "Accelerator.load_state", "TrainModule.log", "set_seed", "ModelCheckpoint"} <= {*CALLS}
    assert "ModelCheckpoint.on_train_end" not in CALLS, "a hook"
    assert "DDPStrategy.all_gather" not in CALLS, "Strategy.all_gather is the one that is documented"
    assert "TrainModule.cuda" not in CALLS, "torch's"
