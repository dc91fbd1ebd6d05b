"""Every public name of Lightning 2.6 can be imported, or an error says what to use."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
from helpers.lightning.listing import NAMES
from helpers.runs.trainers import make_trainer

import trainkit
from trainkit.errors import UnknownNameError, UnsupportedArgumentError
from trainkit.module.hook_checks import REMOVED
from trainkit.names import advice, advice_by_place, home_of, our_path, table, use_instead

ADVICE, LIGHTNING = advice_by_place(), table("lightning")
SAME, OTHER, ABSENT = LIGHTNING["same"], LIGHTNING["renamed"], LIGHTNING["absent"]
MEMBERS, MODULES = LIGHTNING["members"], {*LIGHTNING["modules"]}


def places() -> dict[str, list[str]]:
    """Place → names, from the list of Lightning's names."""
    found: dict[str, list[str]] = {}
    for line in NAMES.read_text("utf-8").splitlines():
        place, _, names = line.rpartition(": ")
        found.setdefault(place, []).extend(names.split())
    return found


PLACES = places()
IMPORTS = {place: names for place, names in PLACES.items() if place.startswith("lightning")}


def renamed(place: str) -> str:
    return "trainkit" + place.removeprefix("lightning").removeprefix(".pytorch")


def error_of(statement: str) -> str | None:
    try:
        exec(statement)
    except ImportError as error:
        return str(error)
    return None


@pytest.mark.parametrize("place", sorted(IMPORTS))
def test_every_import_works_or_says_what_to_use(place: str) -> None:
    """Only the name of the package changes in an import."""
    wrong = []
    module = import_module(renamed(place))
    for name in IMPORTS[place]:
        error = error_of(f"from {module.__name__} import {name}")
        if error is not None and not error.startswith(f"{module.__name__} has no {name}. Use: "):
            wrong.append(error)
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["trainkit", "trainkit.callbacks", "trainkit.loggers", "trainkit.strategies", "trainkit.utilities"]
)
def test_every_name_says_where_it_is(module: str) -> None:
    """Also a name that Lightning has in another module."""
    for name in {name for names in IMPORTS.values() for name in names}:
        error = error_of(f"from {module} import {name}")
        assert error is None or error.startswith(f"{module} has no {name}. Use: "), error


def test_each_name_is_in_one_table_and_is_one_of_lightnings() -> None:
    listed = {name for names in IMPORTS.values() for name in names}
    for group in SAME | OTHER | ABSENT:
        same = [name for names in SAME.get(group, {}).values() for name in names]
        names = [*same, *OTHER.get(group, {}), *ABSENT.get(group, {})]
        assert len(names) == len(set(names)), group
        if group != "metrics":  # Lightning 1 had them, and torchmetrics has them now.
            assert set(names) <= listed, set(names) - listed


def test_the_names_that_are_the_same_are_there() -> None:
    """Every name that a table calls the same can be imported from there; one that is there is not pending."""
    pending = set()
    for home, name in {(home, name) for group in SAME.values() for home, names in group.items() for name in names}:
        error = error_of(f"from {home} import {name}")
        pending |= {name} if error is not None else set()
    assert pending == set()


def test_what_is_called_absent_is_not_there() -> None:
    for group, names in ABSENT.items():
        module = import_module(f"trainkit.{group}" if group else "trainkit")
        assert [name for name in names if hasattr(module, name)] == []


def test_the_modules_are_lightnings() -> None:
    modules = {renamed(place).removeprefix("trainkit").removeprefix(".") for place in IMPORTS} - {""}
    private = {"trainer.connectors", "trainer.connectors.accelerator_connector"}  # scvi-tools imports a private class of it
    older = {"metrics.classification", "metrics.functional", "metrics.regression"}
    assert {name for name in MODULES - private - older if not name.startswith("fabric")} <= modules
    for name in modules - MODULES:
        spec = import_module(f"trainkit.{name}").__spec__  # of the module itself, where the name is another path to it
        assert spec is not None
        assert spec.has_location


def test_a_module_of_lightning_has_the_class_of_trainkit() -> None:
    from trainkit.callbacks.lr_monitor import LearningRateMonitor
    from trainkit.callbacks.progress.tqdm_progress import TQDMProgressBar

    assert LearningRateMonitor is trainkit.callbacks.LearningRateMonitor
    assert TQDMProgressBar is trainkit.callbacks.TQDMProgressBar
    with pytest.raises(ImportError, match=r"^cannot import name 'Nonsense' from 'trainkit\.callbacks\.lr_monitor'\.$"):
        from trainkit.callbacks.lr_monitor import Nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="No module named 'trainkit.callbacks.nonsense'"):
        import_module("trainkit.callbacks.nonsense")
    assert not hasattr(import_module("trainkit.plugins"), "CheckpointIO")


def test_the_class_of_the_accelerator_of_a_trainer() -> None:
    """In Lightning it is the device; here `trainer.accelerator` has the verbs of the loop."""
    from trainkit.accelerators import Accelerator
    from trainkit.accelerators.accelerator import Accelerator as Same

    assert Same is Accelerator
    assert isinstance(make_trainer().accelerator, Accelerator)
    with pytest.raises(UnknownNameError, match=r"unknown accelerator <class .*Accelerator'>; known: auto, cpu"):
        make_trainer(accelerator=Accelerator)


def test_modules_are_attributes_of_their_packages() -> None:
    """As in Lightning, where importing the package imports them."""
    assert trainkit.utilities.rank_zero.rank_zero_only is trainkit.utilities.rank_zero_only
    assert trainkit.core.module.LightningModule is trainkit.LightningModule
    assert not hasattr(trainkit, "nonsense")
    assert not hasattr(trainkit.callbacks, "_freezing_of_nothing")


def test_what_projects_import_from_fabric() -> None:
    from trainkit.core.saving import get_filesystem
    from trainkit.fabric.utilities.rank_zero import rank_zero_only
    from trainkit.fabric.utilities.seed import seed_everything
    from trainkit.fabric.utilities.types import _PATH

    assert (rank_zero_only, seed_everything) == (trainkit.utilities.rank_zero_only, trainkit.seed_everything)
    from trainkit.fabric.loggers import CSVLogger
    from trainkit.fabric.utilities.throughput import ThroughputMonitor

    assert issubclass(CSVLogger, trainkit.loggers.CSVLogger)
    assert ThroughputMonitor.__module__ == "trainkit.compat.fabric_throughput"
    assert _PATH is trainkit.utilities.types._PATH
    assert get_filesystem("memory://runs").protocol == "memory"
    assert trainkit.fabric.Fabric.__name__ == "Fabric"
    with pytest.raises(ImportError, match="has no ModelParallelStrategy. Use: from trainkit.strategies import FSDPStrategy"):
        from trainkit.fabric import ModelParallelStrategy  # noqa: F401
    with pytest.raises(ImportError, match="has no Fabric. Use: from trainkit.fabric import Fabric"):
        from trainkit import Fabric  # noqa: F401


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("trainkit", "EarlyStopping", "from trainkit.callbacks import EarlyStopping"),
        (
            "trainkit.callbacks",
            "ModelParallelStrategy",
            "from trainkit.strategies import FSDPStrategy; FSDPStrategy(tensor_parallel=2)",
        ),
        ("trainkit.utilities", "ModelSummary", "from trainkit.utilities.summary import ModelSummary"),
        ("trainkit.utils", "gather", None),
        ("trainkit.utils", "HfDeepSpeedConfig", ADVICE["trainkit"]["HfDeepSpeedConfig"]),
        ("trainkit", "merge_dicts", "{**first, **second}"),
        ("trainkit", "nonsense", None),
        ("trainkit.callbacks", "EarlyStopping", None),
    ],
)
def test_what_to_use(module: str, name: str, use: str | None) -> None:
    assert use_instead(module, name) == use


@pytest.mark.parametrize("module", ["trainkit.metrics", "trainkit.metrics.functional", "trainkit.metrics.classification"])
def test_metrics_of_lightning_1_are_in_torchmetrics(module: str) -> None:
    pytest.importorskip("torchmetrics")
    for name, use in OTHER["metrics"].items():
        assert error_of(f"from {module} import {name}") == f"{module} has no {name}. Use: {use}"
        exec(use)


CLASSES = {
    "LightningModule": trainkit.TrainModule,
    "LightningDataModule": trainkit.DataModule,
    "Callback": trainkit.Callback,
    "Strategy": trainkit.Strategy,
}


@pytest.mark.parametrize("name", [*CLASSES, "Trainer"])
def test_members_are_there_or_say_what_to_use(name: str) -> None:
    cls: Any = CLASSES.get(name, trainkit.Trainer)
    absent = {member for member in PLACES[f"{name}."] if not hasattr(cls, member)}
    advised = {*MEMBERS.get(name, {}), *(REMOVED if name == "LightningModule" else ())}
    if name in ("Trainer", "Strategy"):
        absent -= {*vars(make_trainer() if name == "Trainer" else trainkit.Strategy("cpu"))}
    assert absent - advised == set()
    assert not [member for member in MEMBERS.get(name, {}) if hasattr(cls, member)]
    assert {*MEMBERS.get(name, {})} <= {*PLACES[f"{name}."]}


def test_arguments_of_the_trainer_are_there_or_say_what_to_use() -> None:
    ours = inspect.signature(trainkit.Trainer).parameters
    assert [name for name in PLACES["Trainer("] if name not in ours and advice("Trainer", name) is None] == []


@pytest.mark.parametrize("argument, value, expected", [
    ("gpus", 2, r"Trainer\(gpus=...\): use accelerator='gpu', devices=2\.$"),
    ("resume_from_checkpoint", "a.ckpt", r": pass it to fit\(module, ckpt_path='a\.ckpt'\)\.$"),
    ("track_grad_norm", 2, r": use log_grad_norm=True\.$"),
])  # fmt: skip
def test_arguments_of_the_trainer_of_lightning_1(argument: str, value: object, expected: str) -> None:
    """Old scripts and answers on the web have them; the nearest name would be another thing."""
    with pytest.raises(UnsupportedArgumentError, match=expected):
        make_trainer(**{argument: value})


def test_a_search_and_replace_of_the_package() -> None:
    """`lightning.pytorch.callbacks` becomes `trainkit.pytorch.callbacks`."""
    from trainkit.pytorch import Trainer
    from trainkit.pytorch.callbacks import EarlyStopping
    from trainkit.pytorch.utilities.rank_zero import rank_zero_only

    assert (Trainer, EarlyStopping) == (trainkit.Trainer, trainkit.callbacks.EarlyStopping)
    assert rank_zero_only is trainkit.utilities.rank_zero_only
    assert trainkit.pytorch.loggers is trainkit.loggers
    assert trainkit.__spec__ is not None
    assert trainkit.__spec__.name == "trainkit"
    with pytest.raises(ImportError, match=r"cannot import name 'EarlyStopp'.*EarlyStopping"):
        from trainkit.pytorch.callbacks import EarlyStopp  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import_module("trainkit.pytorch.nothing")


@pytest.mark.parametrize(
    "path, expected",
    [
        ("lightning.Trainer", "trainkit.Trainer"),
        ("lightning.pytorch.trainer.trainer.Trainer", "trainkit.Trainer"),
        ("pytorch_lightning.callbacks.EarlyStopping", "trainkit.callbacks.EarlyStopping"),
        (
            "lightning.pytorch.callbacks.early_stopping.EarlyStoppingReason",
            "trainkit.callbacks.early_stopping.EarlyStoppingReason",
        ),
        ("torch.optim.Adam", "torch.optim.Adam"),
        ("lightning.pytorch.callbacks", "lightning.pytorch.callbacks"),
        ("my.lightning.pytorch.Trainer", "my.lightning.pytorch.Trainer"),
    ],
)
def test_a_path_of_a_class(path: str, expected: str) -> None:
    assert our_path(path) == expected


def test_a_path_without_a_class_of_ours() -> None:
    with pytest.raises(
        UnknownNameError, match=r"strategies.DeepSpeedStrategy: trainkit has no .*Use: from trainkit.strategies import ZeRO"
    ):
        our_path("lightning.pytorch.strategies.DeepSpeedStrategy")
    with pytest.raises(
        UnknownNameError, match="callbacks.Nonsense: trainkit has no .* Expected that of a class of trainkit or your own"
    ):
        our_path("lightning.pytorch.callbacks.Nonsense")


def test_every_class_of_lightning_has_a_path_or_advice() -> None:
    for place, names in IMPORTS.items():
        for name in names:
            if place.startswith("lightning.pytorch") and name[0].isupper() and not name.isupper():
                path = f"{place}.{name}"
                if use_instead(renamed(place), name) is None or home_of(renamed(place), name) is not None:
                    module, _, known = our_path(path).rpartition(".")
                    assert hasattr(import_module(module), known)
                else:
                    with pytest.raises(UnknownNameError, match=" Use: "):
                        our_path(path)


def test_a_path_with_a_typo_gets_the_nearest_class() -> None:
    with pytest.raises(UnknownNameError, match=r"EarlyStoping: trainkit has no class .* Did you mean 'EarlyStopping'\?"):
        our_path("lightning.pytorch.callbacks.EarlyStoping")
