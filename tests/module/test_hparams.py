"""`save_hyperparameters` and `hparams`."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs.trainers import Memory, make_trainer
from torch import nn

from trainkit import DataModule, TrainModule
from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.module.hparams import HyperParameters


class Base(TrainModule):
    """Saves all arguments of `__init__`."""

    def __init__(self, lr: float = 0.1, width: int = 2, *rest: int, flag: bool = False, **others: Any) -> None:
        super().__init__()
        local = "not an argument"
        self.save_hyperparameters()
        del local


class Given(TrainModule):
    """Passes its positional arguments and options to `save_hyperparameters`."""

    def __init__(self, *args: Any, lr: float = 0.1, width: int = 2, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(*args, **options)


# What is saved


def test_all_arguments_of_init() -> None:
    assert Base().hparams == {"lr": 0.1, "width": 2, "flag": False}
    assert Base(1.0, 3, 4, 5, flag=True, extra="x").hparams == {"lr": 1.0, "width": 3, "flag": True, "extra": "x"}


def test_arguments_of_subclasses_too() -> None:
    class Child(Base):
        def __init__(self, lr: float, depth: int, **others: Any) -> None:
            super().__init__(lr * 10, **others)
            self.depth = depth

    class Grandchild(Child):
        def __init__(this, name: str) -> None:  # noqa: N805 - whatever self is called
            super().__init__(1.0, depth=4, width=7)
            this.name = name

    assert Child(1.0, 4, width=7).hparams == {"lr": 1.0, "width": 7, "flag": False, "depth": 4}  # lr as the user passed it
    assert Grandchild("n").hparams == {"lr": 1.0, "width": 7, "flag": False, "depth": 4, "name": "n"}


def test_a_module_that_makes_another_does_not_mix_them_up() -> None:
    class Outer(TrainModule):
        def __init__(self, outer: int, inner: int) -> None:
            super().__init__()
            self.part = Base(width=inner)
            self.save_hyperparameters()

    module = Outer(1, 2)
    assert module.hparams == {"outer": 1, "inner": 2}
    assert module.part.hparams == {"lr": 0.1, "width": 2, "flag": False}


def test_an_argument_used_in_a_closure_is_kept_too() -> None:
    class Closure(TrainModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.rate = [lambda: lr]
            self.save_hyperparameters()

    assert Closure(0.5).hparams == {"lr": 0.5}


def test_some_arguments_by_name() -> None:
    assert Given("lr").hparams == {"lr": 0.1}
    assert Given("lr", "width").hparams == {"lr": 0.1, "width": 2}


@dataclass
class Config:
    lr: float = 0.5
    nested: dict[str, int] = field(default_factory=lambda: {"a": 1})


@pytest.mark.parametrize(
    "holder, expected",
    [
        ({"lr": 0.5}, {"lr": 0.5}),
        (OrderedDict(lr=0.5), {"lr": 0.5}),
        (Namespace(lr=0.5), {"lr": 0.5}),
        (Config(), {"lr": 0.5, "nested": {"a": 1}}),
        (HyperParameters(lr=0.5), {"lr": 0.5}),
    ],
)
def test_one_object_that_holds_them(holder: Any, expected: dict[str, Any]) -> None:
    assert Given(holder).hparams == expected


@pytest.mark.parametrize("ignore", ["lr", ["lr"], ("lr", "no such"), {"lr"}])
def test_some_are_omitted(ignore: Any) -> None:
    assert Given({"lr": 1.0, "width": 2}, ignore=ignore).hparams == {"width": 2}


def test_calls_add_up() -> None:
    class Twice(TrainModule):
        def __init__(self, lr: float, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("lr")
            self.save_hyperparameters({"depth": 3})

    assert Twice(0.5, 2).hparams == {"lr": 0.5, "depth": 3}


def test_a_data_module_has_them_too() -> None:
    class Data(DataModule):
        def __init__(self, batch_size: int = 8) -> None:
            self.save_hyperparameters()

    assert Data(4).hparams.batch_size == 4


def test_the_fields_of_a_dataclass() -> None:
    @dataclass
    class Data(DataModule):
        batch_size: int = 8
        folder: str = "data"

        def __post_init__(self) -> None:
            self.save_hyperparameters(ignore="folder")

    assert Data(4).hparams == {"batch_size": 4}


def test_what_was_given_stays() -> None:
    # hparams has the same objects that were passed; hparams_initial has copies of containers
    net, act, make = nn.Linear(1, 1), torch.relu, partial(torch.optim.SGD, lr=0.5)
    given = {"net": net, "act": act, "make": make, "kind": nn.ReLU, "lr": 0.5, "sizes": [net], "stream": (n for n in [1])}
    module = Given(given)
    assert module.hparams == given
    assert all(module.hparams[name] is value for name, value in given.items())
    assert module.hparams_initial == given
    assert module.hparams_initial.sizes is not module.hparams.sizes
    assert module.hparams_initial.net is net, "no second copy in memory"
    assert not list(module.parameters()), "a hyper-parameter is no submodule"
    twin = copy.deepcopy(Base(lr=0.5, net=net))
    assert twin.hparams.net is not net


@dataclass
class Optim:
    lr: float = 0.5


def test_a_dataclass_inside_stays_one() -> None:
    module = Given({"optim": Optim(0.25)})
    module.hparams.optim.lr = 1.0
    assert module.hparams_initial.optim == Optim(0.25)


def test_ignore_in_a_subclass_removes_what_the_base_saved() -> None:
    class Child(Base):
        def __init__(self, lr: float, net: Any, **others: Any) -> None:
            super().__init__(lr, **others)
            self.save_hyperparameters(ignore=["net", "flag"])

    assert Child(1.0, nn.Identity(), extra=2).hparams == {"lr": 1.0, "width": 2, "extra": 2}
    assert Child(1.0, nn.Identity()).hparams_initial == {"lr": 1.0, "width": 2}


def test_fields_that_init_does_not_take() -> None:
    @dataclass
    class Data(DataModule):
        batch_size: int = 8
        seen: int = field(default=0, init=False)

        def __post_init__(self) -> None:
            self.seen = 3
            self.save_hyperparameters()

    assert Data(4).hparams == {"batch_size": 4}


def test_keys_that_are_no_strings() -> None:
    module = Given({1: "one", (2, 3): "two", "lr": 0.5})
    assert module.hparams == {1: "one", (2, 3): "two", "lr": 0.5}
    with pytest.raises(AttributeError, match=r"no hyper-parameter 'lrr'; known: \['\(2, 3\)', '1', 'lr'\]\. Did you mean 'lr'"):
        module.hparams.lrr


def test_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"optim": {"lr": 0.5, "betas": [0.9, 0.95]}, "lr": "${optim.lr}"})
    module = Given(config)
    assert module.hparams.optim.lr == module.hparams.lr == 0.5
    assert omegaconf.OmegaConf.is_config(module.hparams.optim)
    assert omegaconf.OmegaConf.to_container(module.hparams, resolve=True)["lr"] == 0.5
    config.optim.lr = 1.0
    assert module.hparams_initial.optim.lr == 0.5
    missing = omegaconf.OmegaConf.create({"lr": "???", "wrong": "${nowhere}"})
    assert Given(missing).hparams == Given(missing).hparams_initial == {"lr": "???", "wrong": "${nowhere}"}


def test_omegaconf_and_more_hyper_parameters() -> None:
    omegaconf = pytest.importorskip("omegaconf")

    class Twice(TrainModule):
        def __init__(self, config: Any, width: int, ignore: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.save_hyperparameters(config, ignore=ignore)
            if not ignore:
                assert self.hparams is config
                self.save_hyperparameters("width")

    config = omegaconf.OmegaConf.create({"lr": 0.5, "depth": 2})
    omegaconf.OmegaConf.set_struct(config, True)  # as Hydra's are
    assert Twice(config, 3).hparams == {"lr": 0.5, "depth": 2, "width": 3}
    assert Twice(config, 3, ignore="depth").hparams == {"lr": 0.5}
    assert config == {"lr": 0.5, "depth": 2}


# Errors


def test_a_name_that_is_no_argument() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Given("widht")
    assert "__init__ has no such argument; it has ['lr', 'width']. Did you mean 'width'?" in str(caught.value)


@pytest.mark.parametrize(
    "args", [(5,), (None,), (["lr"],), (Config,), ({"a": 1}, {"b": 1}), ("lr", {"b": 1}), (SimpleNamespace(),)]
)
def test_what_holds_no_hyper_parameters(args: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="accepts names of arguments, or one dict, Namespace or dataclass, not"):
        Given(*args)


def test_it_has_to_be_called_in_init() -> None:
    class Later(TrainModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.keep()

        def keep(self) -> None:
            self.save_hyperparameters()

    with pytest.raises(ConfigurationError, match=r"Call it there, or pass them: self\.save_hyperparameters\(\{'lr': lr\}\)"):
        Later(0.5)
    module = Base()
    with pytest.raises(ConfigurationError, match="Call it there"):
        module.save_hyperparameters()
    module.save_hyperparameters({"late": 1})
    assert module.hparams["late"] == 1


def test_from_another_frame() -> None:
    import inspect

    class Helped(TrainModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            keep(self)

    def keep(module: TrainModule) -> None:
        module.save_hyperparameters(frame=inspect.currentframe().f_back)

    assert Helped(0.5).hparams == {"lr": 0.5}


# hparams


def test_entries_are_attributes_too() -> None:
    hparams = Base().hparams
    assert hparams.lr == hparams["lr"] == 0.1
    hparams.lr = 1.0
    hparams["width"] = 5
    assert (hparams["lr"], hparams.width) == (1.0, 5)
    with pytest.raises(
        AttributeError, match=r"no hyper-parameter 'widht'; known: \['flag', 'lr', 'width'\]\. Did you mean 'width'"
    ):
        hparams.widht
    assert not hasattr(hparams, "depth")


def test_without_a_call_there_are_none() -> None:
    module = TrainModule()
    assert module.hparams == {}
    assert module.hparams_initial == {}
    module.hparams.lr = 0.5  # new ones can be set
    assert module.hparams == {"lr": 0.5}
    assert TrainModule().hparams == {}


def test_as_they_were_at_first() -> None:
    # hparams_initial does not change with hparams
    given = {"sizes": [1]}
    module = Given(given)
    module.hparams.sizes.append(2)
    module.hparams.more = 3
    assert module.hparams_initial == {"sizes": [1]}
    module.hparams_initial["sizes"].append(5)
    assert module.hparams_initial == {"sizes": [1]}
    assert "more" not in given


def test_a_copy_of_the_module_has_its_own() -> None:
    module = Base()
    twin = copy.deepcopy(module)
    twin.hparams.lr = 9.0
    assert isinstance(twin.hparams, HyperParameters)
    assert (module.hparams.lr, twin.hparams.lr) == (0.1, 9.0)


# Loggers


@pytest.mark.parametrize("wanted", [True, False])
def test_loggers_get_them_unless_told_otherwise(wanted: bool) -> None:
    class Model(TrainModule):
        def __init__(self, lr: float = 0.5) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.save_hyperparameters(logger=wanted)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    logger = Memory()
    make_trainer(logger=logger).fit(Model(), [torch.ones(2, 1)])
    assert logger.hyperparameters == ({"lr": 0.5} if wanted else {})
