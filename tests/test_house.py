"""The rules for the code of this repository, checked on the syntax trees of all files.

Each rule is applied to the repository, and to small examples that break it, so that the tests of the rules can fail.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
from pathlib import Path

import pytest
from helpers import house
from helpers.support import run_python

from trainkit import Strategy
from trainkit.registry import StrategyInfo, strategy_infos

TABLES = json.loads(Path(__file__).with_name("house.json").read_text("utf-8"))
# The public names. A new name is a decision: add it there and to the changelog.
PUBLIC: dict[str, list[str]] = TABLES["public"]
# Names for authors of strategies and precisions. Other names in these modules are for trainkit itself.
FOR_PLUG_INS: dict[str, list[str]] = TABLES["public_for_plug_ins"]
# A program imports them for what they do, which no test may do in its own process.
DOORS: dict[str, list[str]] = {"trainkit.compat.accelerate": [], "trainkit.compat.lightning": []}
# Room of the core → why → the names of strategies that it may have. Other code uses StrategyInfo or a capability.
NAMED: dict[str, dict[str, list[str]]] = TABLES["names_of_strategies_in_the_core"]

# Files ("trainkit/x.py") and functions ("trainkit/x.py:name") that may be longer than the limits, with the reason.
LONG: dict[str, str] = {
    "trainkit/accelerator/accelerator.py": "one class: the verbs of a loop, documented where users look for them",
}

SOURCES = house.package_sources()
MODULES = {source.module for source in SOURCES}
PUBLIC_SOURCES = [s for s in SOURCES if house.is_public(s.module) and not s.path.endswith("__main__.py")]


def example(text: str, module: str = "trainkit.example") -> house.Source:
    return house.Source("example.py", module, text)


def report(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_three_folders_are_read_once() -> None:
    """The rules are applied to trainkit, callbacks and strategies, and to each module once."""
    names = [source.module for source in SOURCES]
    assert len(names) == len(set(names))
    assert {"trainkit", "trainkit.errors", "trainkit.callbacks", "trainkit.strategies"} <= MODULES


# ---------------------------------------------------------------------- imports: what pyproject.toml cannot express


def test_plug_ins_and_lower_rooms_name_the_trainer_in_annotations_only() -> None:
    """pyproject.toml lets them import `Trainer`; it cannot tell an annotation from code."""
    rooms = ("callback", "callbacks", "module", "tuner")
    report(
        [
            source.at(item.line, f"imports {item.full} when it runs")
            for source in SOURCES
            if house.room_of(source.module) in rooms
            for item in house.imports(source.tree)
            if house.under(item.full, "trainkit.trainer") and item.place != "typing"
        ]
    )


def test_third_party_packages_are_those_of_setup_py() -> None:
    """What is imported at the top of a module is installed with trainkit; what an extra brings is imported inside functions."""
    core = [s for s in SOURCES if house.room_of(s.module) != "integrations"]  # these import the package that they are for
    roots = {item.full.split(".")[0] for s in core for item in house.imports(s.tree) if item.place == "module"}
    of_the_command_line = {"docstring_parser", "jsonargparse"}
    required = {"cloudpickle", "fsspec", "numpy", "safetensors", "torch", "tqdm", "xxhash", "yaml"}
    assert roots - sys.stdlib_module_names - {"trainkit"} <= required | of_the_command_line


# ------------------------------------------------------------------------- examples and documentation use public names


def test_examples_and_documents_use_public_names() -> None:
    """Examples and documentation, which users copy, import only the names in the tables above."""
    sources = house.user_sources("examples", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    assert {"README.md", "examples"} <= {source.path.partition("/")[0] for source in sources}
    report([c for source in sources for c in house.private_imports(source, {**PUBLIC, **FOR_PLUG_INS, **DOORS})])


def test_benchmarks_use_public_names() -> None:
    """Benchmarks may import any name in the `__all__` of a module, because they also measure parts that users do not call."""
    public = {source.module: house.exported(source.tree) or [] for source in PUBLIC_SOURCES}
    report([c for source in house.user_sources("benchmarks") for c in house.private_imports(source, public)])


@pytest.mark.parametrize(
    "text",
    [
        "from trainkit.trainer.train_loop import train_epoch",
        "from trainkit import nonsense",
        "from trainkit.callbacks.timer import Timer",
        "import trainkit.trainer.trainer",
        "import trainkit\ntrainkit.loop.train_epoch()",
        "import trainkit\ntrainkit.errors.nearest('x', [])",
        "import trainkit.callbacks\ntrainkit.callbacks.nonsense",
        "from trainkit import (",
    ],
)
def test_private_names_are_found(text: str) -> None:
    assert house.private_imports(example(text), PUBLIC)


def test_public_names_pass() -> None:
    text = """
        from trainkit import Trainer, errors
        from trainkit.callbacks import Timer
        import trainkit
        import trainkit.callbacks
        trainkit.Trainer(callbacks=[trainkit.callbacks.Timer("1h")]).fit
        trainkit.errors.TrainkitError.__doc__
    """
    assert not house.private_imports(example("if True:" + text), PUBLIC)


def test_blocks_of_a_document_keep_their_lines() -> None:
    text = "Text\n\n```python\nimport trainkit.rng\n```\n\n* item\n\n  ```python\n  x = (\n  ```\n\n```bash\nexit\n```\n"
    blocks = house.python_blocks("docs/x.md", text)
    assert [c for block in blocks for c in house.private_imports(block, PUBLIC)] == [
        "docs/x.md:4 imports trainkit.rng, which is not public",
        "docs/x.md:10 does not parse: '(' was never closed",
    ]


# -------------------------------------------------------------------------- no code for single strategies in the core


def test_no_code_asks_for_the_class_of_a_strategy() -> None:
    report([c for s in SOURCES if not s.path.startswith("strategies/") for c in house.branches_on_strategy(s)])


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(x, DDPStrategy)",
        "isinstance(x, (str, trainkit.strategy.Strategy))",
        "isinstance(x, DDPStrategy | ZeROStrategy)",
        "issubclass(x, Strategy)",
        "isinstance(self.strategy, Sharded)",
        "type(x) is DDPStrategy",
        "DDPStrategy == x.__class__",
        "match x:\n    case DDPStrategy():\n        pass",
    ],
)
def test_a_question_for_the_class_is_found(text: str) -> None:
    assert house.branches_on_strategy(example(text))


@pytest.mark.parametrize("text", ["isinstance(strategy, str)", "isinstance(x, Callback)", "type(x) is int", "DDPStrategy()"])
def test_other_questions_pass(text: str) -> None:
    assert not house.branches_on_strategy(example(text))


def test_the_core_names_no_strategy() -> None:
    names = house.strategy_names(strategy_infos()[1:])  # without the first one, which is in the core: a single device
    complaints: dict[str, dict[str, str]] = {}
    for source in SOURCES:
        if source.path.startswith("trainkit/"):
            tokens = house.names_of_strategies(source, names)
            complaints.setdefault(house.room_of(source.module) or "trainkit", {}).update(tokens)
    allowed = {room: {token for tokens in reasons.values() for token in tokens} for room, reasons in NAMED.items()}
    report(
        [text for room, tokens in complaints.items() for token, text in tokens.items() if token not in allowed.get(room, ())]
    )
    assert {room: set(tokens) for room, tokens in complaints.items() if tokens} == allowed, (
        "an exception that is not needed any more"
    )


@pytest.mark.parametrize(
    "text",
    [
        "x = 'ddp'",
        "x = strategy.name == 'zero3'",
        "x = 'zero3_offload'",
        "def f(deepspeed_config): ...",
        "f(use_deepspeed=True)",
        "from trainkit.x import XLAStrategy",
        "import torch_xla",
        "x.ds_shape",
        "hasattr(x, 'ds_numel')",
        "config['zero_optimization']",
        "DistributedType.DEEPSPEED",
        "class DDPThing: ...",
        "f'{x:>10}' + f(strategy='zero1')",
    ],
)
def test_the_name_of_a_strategy_is_found(text: str) -> None:
    assert house.names_of_strategies(example(text), house.strategy_names(strategy_infos()[1:]))


def test_the_names_of_a_new_strategy_are_found_too() -> None:
    info = StrategyInfo(path="other.package:Pipeline", names={"pipes": {}}, packages=("piper",))
    names = house.strategy_names([info])
    assert [bool(house.names_of_strategies(example(f"x = {n!r}"), names)) for n in ("pipes", "piper", "Pipeline")] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        '"""Under ddp."""',
        "raise ValueError('Use ddp.')",
        "raise ValueError(f'{x}ddp')",
        "plot.set_xlabel('loss')",
        "strategy.shards_parameters",
        "optimizer.zero_grad()",
    ],
)
def test_texts_and_other_names_pass(text: str) -> None:
    assert not house.names_of_strategies(example(text), house.strategy_names(strategy_infos()[1:]))


def test_what_is_asked_of_a_strategy_is_declared() -> None:
    declared = {*dir(Strategy), *vars(Strategy("cpu"))}
    report([c for s in SOURCES if not s.path.startswith("strategies/") for c in house.undeclared_attributes(s, declared)])


@pytest.mark.parametrize(
    "text",
    [
        "strategy.stage",
        "trainer.strategy.claims.lead(x)",
        "self._strategy.stage",
        "getattr(trainer.strategy, 'stage', None)",
        "hasattr(strategy, 'stage')",
        "strategy.stage = 3",
        "config: Any = self.strategy",
    ],
)
def test_an_undeclared_attribute_is_found(text: str) -> None:
    assert house.undeclared_attributes(example(text), dir(Strategy))


@pytest.mark.parametrize("text", ["strategy.world.rank", "module.stage", "hasattr(strategy, 'optimizer_step')", "x: Any = y"])
def test_declared_attributes_pass(text: str) -> None:
    assert not house.undeclared_attributes(example(text), dir(Strategy))


def test_capabilities_are_documented_and_read() -> None:
    flags = [name for name, kind in vars(Strategy)["__annotations__"].items() if kind == "ClassVar[bool]"]
    undocumented = [name for name in flags if f"        {name}: " not in (Strategy.__doc__ or "")]
    elsewhere = [s for s in SOURCES if not s.path.startswith("strategies/") and s.path != "trainkit/strategy.py"]
    read = {node.attr for source in elsewhere for node in house.all_of(source.tree, ast.Attribute)}
    assert len(flags) > 5
    assert (undocumented, [name for name in flags if name not in read]) == ([], [])


# ---------------------------------------------------------------------------------------------- names and docstrings


@pytest.mark.parametrize("module", FOR_PLUG_INS)
def test_the_names_for_plug_ins_are_there(module: str) -> None:
    assert module not in PUBLIC
    assert set(FOR_PLUG_INS[module]) <= set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_public_names_are_frozen(package: str) -> None:
    assert importlib.import_module(package).__all__ == PUBLIC[package]


def test_exported_names_exist() -> None:
    report(
        [
            f"{source.path} exports {name}, which it does not have"
            for source in PUBLIC_SOURCES
            for name in house.exported(source.tree) or []
            if not hasattr(importlib.import_module(source.module), name)
        ]
    )


def test_everything_public_is_documented() -> None:
    doors = ("trainkit.compat.lightning", "trainkit.compat.accelerate")  # They have no names, and stay open in this process.
    sources = [s for s in PUBLIC_SOURCES if s.module not in doors]
    report([c for s in sources for c in house.undocumented(s, importlib.import_module(s.module))])


def test_missing_documentation_is_found() -> None:
    text = """
class Base:
    "Documented."

    def inherited(self):
        "Documented."

class Thing(Base):
    def inherited(self): ...
    def own(self): ...
    def _private(self): ...
    @property
    def size(self): ...
    @size.setter
    def size(self, value): ...

class _Private:
    def method(self): ...

if True:
    def function(): ...
"""
    module = types.ModuleType("example")
    exec(compile(text, "example.py", "exec"), vars(module))
    assert house.undocumented(example(text), module) == [
        "example.py:8 Thing has no docstring",
        "example.py:10 Thing.own has no docstring",
        "example.py:13 Thing.size has no docstring",
        "example.py:21 function has no docstring",
    ]


def test_files_and_classes_have_names_of_their_own() -> None:
    report(house.repeated_names(SOURCES))


def test_a_repeated_name_is_found() -> None:
    paths = ("data/plan.py", "trainer/plan.py")
    sources = [house.Source(path, "", "class Plan: ...") for path in paths]
    assert house.repeated_names(sources) == [f"{name}: {', '.join(paths)}" for name in ("Plan", "plan.py")]


# -------------------------------------------------------------------------------------------------------------- size


def test_nothing_is_too_long() -> None:
    found: dict[str, str] = {}
    for source in SOURCES:
        found |= house.too_long(source)
    report([complaint for key, complaint in found.items() if key not in LONG])
    assert set(LONG) <= set(found), "an exception that is not needed any more"


def test_no_module_is_a_fragment_of_another() -> None:
    report(house.fragments(SOURCES))


def test_a_fragment_is_found() -> None:
    small = house.Source("trainkit/data/small.py", "trainkit.data.small", "x = 1\n")
    user = house.Source("trainkit/data/user.py", "trainkit.data.user", "from trainkit.data.small import x\n")
    other = house.Source("trainkit/loop.py", "trainkit.loop", "import trainkit.data.small\n")
    assert len(house.fragments([small, user])) == 1
    assert not house.fragments([small, user, other]), "it has two importers"
    assert not house.fragments([small, other]), "its importer is in another room"
    assert not house.fragments([small._replace(text=f'"""X.\n\n{house.OWN_FILE} it is read first."""\nx = 1\n'), user])
    assert not house.fragments([small._replace(text="x = 1\n" * 60), user])


def test_length_is_found() -> None:
    doc = '    """' + "\n" * 30 + '"""\n'
    fits = "def f():\n" + doc + "    x = 1\n" * 59
    assert not house.too_long(example(fits))
    assert list(house.too_long(example(fits + "    x = 1\n"))) == ["example.py:f"]
    assert not house.too_long(example('"""One.\n\nTwo.\n"""\n\n# Why.\n' + "x = 1\n" * 700))
    assert list(house.too_long(example("x = 1\n" * 701))) == ["example.py"]


def test_only_its_own_room_writes_to_a_trainer() -> None:
    """Only modules in trainkit.trainer assign to attributes of a Trainer."""
    report([c for s in SOURCES if not s.module.startswith("trainkit.trainer.") for c in house.writes_to_trainer(s)])


@pytest.mark.parametrize(
    "text",
    ["trainer.x = 1", "trainer._run.x += 1", "self._trainer.x: int = 1", "self.trainer.x, y = 1, 2", "y = trainer.x = 1"],
)
def test_a_write_to_a_trainer_is_found(text: str) -> None:
    assert len(house.writes_to_trainer(example(text))) == 1


@pytest.mark.parametrize("text", ["trainer.should_stop = True", "trainer = 1", "self.trainer = trainer", "x = trainer.y"])
def test_what_is_no_write_to_a_trainer(text: str) -> None:
    assert house.writes_to_trainer(example(text)) == []


def test_nothing_is_too_complex() -> None:
    report([complaint for source in SOURCES for complaint in house.too_complex(source)])


def test_complexity_is_counted() -> None:
    def counted(body: str) -> int:
        function = ast.parse(f"def f(x):\n    {body}").body[0]
        assert isinstance(function, ast.FunctionDef)
        return house.complexity(function)

    assert counted("return x") == 1
    assert counted("return 1 if x else 2") == 2
    assert counted("return x and x and x or x") == 4
    assert counted("return [y for y in x if y]") == 3
    assert counted("while x:\n        with x:\n            assert x") == 4
    assert counted("try:\n        x()\n    except A: ...\n    except B: ...") == 3
    assert counted("def g():\n        if x: ...") == 1, "the function inside counts by itself"
    branches = "    if x: ...\n"
    assert not house.too_complex(example("def f(x):\n" + branches * 14))
    assert len(house.too_complex(example("def f(x):\n" + branches * 15))) == 1


# --------------------------------------------------------------------------------------------- the two mapped folders


@pytest.mark.parametrize("folder", ["callbacks", "strategies"])
def test_a_mapped_folder_refuses_its_bare_name(folder: str) -> None:
    done = run_python(f"import {folder}", cwd=house.ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert f"trainkit.{folder}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("folder", ["callbacks", "strategies"])
def test_a_mapped_folder_is_what_is_imported(folder: str) -> None:
    package = importlib.import_module(f"trainkit.{folder}")
    assert os.path.samefile(package.__path__[0], house.ROOT / folder)


def test_a_misspelt_callback_names_the_nearest() -> None:
    import trainkit.callbacks

    with pytest.raises(AttributeError, match=r"'EarlyStoping'\. Did you mean 'EarlyStopping'\?"):
        trainkit.callbacks.EarlyStoping


def test_callbacks_are_read_when_used() -> None:
    done = run_python(
        "import sys, trainkit.callbacks as c; print([m for m in sys.modules if m.startswith('trainkit.callbacks.')], "
        "'Timer' in dir(c), c.Timer.__module__)",
        bare=True,
    )
    assert done.stdout.strip() == "[] True trainkit.callbacks.timer", done.stderr


def test_lazy_names_lead_to_their_files() -> None:
    """The imports that type checkers see in trainkit.callbacks are those that `__getattr__` does."""
    source = next(s for s in SOURCES if s.module == "trainkit.callbacks")
    typed = {item.name: item.module for item in house.imports(source.tree) if item.place == "typing"}
    package = importlib.import_module("trainkit.callbacks")
    assert typed == {name: getattr(package, name).__module__ for name in package.__all__}


def test_each_callback_has_a_file_of_its_own() -> None:
    package = importlib.import_module("trainkit.callbacks")
    classes = {getattr(package, name) for name in PUBLIC["trainkit.callbacks"]}  # one may have two names
    homes = [kind.__module__ for kind in classes]
    assert len(homes) == len(set(homes))
