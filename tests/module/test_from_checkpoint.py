"""`load_from_checkpoint`: hyper-parameters, weights, arguments that were not saved, values of other types, and `trust=`."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.resume.checkpoints import seal
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer, parameters_of, same
from torch import nn

from trainkit import DataModule, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.ckpt_file import write_ckpt
from trainkit.cli.main import main
from trainkit.console import TrainkitWarning
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    StateMismatchError,
    UnknownNameError,
    UnsupportedArgumentError,
)
from trainkit.loggers import CSVLogger
from trainkit.module.from_checkpoint import Trust, with_attributes, with_members
from trainkit.module.hparams import HyperParameters


class Sized(TinyModule):
    """A `TinyModule` with two hyper-parameters."""

    def __init__(self, learning_rate: float = 0.1, width: int = 4) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)


def saved(module: Any) -> Trainer:
    """A Trainer after a fit that has saved."""
    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(module, tiny_loader())
    return trainer


def test_load_from_checkpoint() -> None:
    trainer = saved(Sized(learning_rate=0.02))
    path = trainer.checkpoint_callback.last_model_path
    module = Sized.load_from_checkpoint(path)
    assert isinstance(module, Sized)
    assert module.hparams == {"learning_rate": 0.02, "width": 4}
    assert same(parameters_of(module), parameters_of(trainer.model))
    assert Sized.load_from_checkpoint(path, learning_rate=0.5).learning_rate == 0.5
    with pytest.raises(UnknownNameError, match="no argument 'learning_rat'.*'learning_rate'"):
        Sized.load_from_checkpoint(path, learning_rat=0.5)
    with pytest.raises(StateMismatchError, match="layer.weight"):
        Sized.load_from_checkpoint(path, width=3)


@pytest.mark.parametrize("name", ["best.ckpt", "last", "last.ckpt"])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_the_paths_that_fit_accepts(name: str, save_last: Any) -> None:
    """Lightning's `.ckpt` may follow, and `last` is what `save_last` writes."""
    trainer = make_trainer(ModelCheckpoint("mine", "best", save_last=save_last), enable_checkpointing=True)
    trainer.fit(Sized(learning_rate=0.02), tiny_loader())
    module = Sized.load_from_checkpoint(f"mine/{name}")
    assert module.hparams.learning_rate == 0.02
    assert same(parameters_of(module), parameters_of(trainer.model))
    with pytest.raises(CheckpointNotFoundError, match="other.ckpt"):
        Sized.load_from_checkpoint("mine/other.ckpt")


@pytest.mark.parametrize(
    "map_location, device",
    [
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
        ({"cuda:1": "meta"}, "cpu"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: torch.UntypedStorage(0, device="meta") if location == "cpu" else None, "meta"),
        (lambda storage, location: None, "cpu"),
    ],
)
def test_map_location_is_that_of_torch_load(map_location: Any, device: str) -> None:
    path = saved(Sized()).checkpoint_callback.last_model_path
    assert Sized.load_from_checkpoint(path, map_location).layer.weight.device.type == device


def test_arguments_that_were_not_saved() -> None:
    class Needs(TinyModule):
        def __init__(self, backbone: nn.Module, rate: float) -> None:
            super().__init__()
            self.backbone = backbone

    trainer = saved(Needs(nn.Identity(), 0.5))
    path = trainer.checkpoint_callback.last_model_path
    with pytest.raises(CheckpointError, match=r"does not contain the arguments backbone, rate of Needs\. Pass them"):
        Needs.load_from_checkpoint(path)
    assert same(parameters_of(Needs.load_from_checkpoint(path, backbone=nn.Identity(), rate=1.0)), parameters_of(trainer.model))


def test_arguments_of_lightning_do_not_reach_an_init_that_takes_all() -> None:
    class Open(TinyModule):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    path = saved(Open(rate=0.5)).checkpoint_callback.last_model_path
    again = Open.load_from_checkpoint(path, extra=1, weights_only=True, hparams_file=None)
    assert again.hparams == {"rate": 0.5, "extra": 1}
    with pytest.raises(UnsupportedArgumentError, match=r"load_from_checkpoint\(hparams_file=...\): pass the arguments"):
        Open.load_from_checkpoint(path, hparams_file="hparams.yaml")


@pytest.mark.parametrize("kind", [dict, lambda **values: Namespace(**values)])
def test_hyper_parameters_in_one_argument(kind: Any) -> None:
    class Configured(TinyModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.layer = nn.Linear(4, config.width if hasattr(config, "width") else config["width"])

    module = Configured(kind(width=1, betas=(0.9, 0.95), layers=[1, 2]))
    trainer = saved(module)
    again = Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)
    assert again.hparams == {"width": 1, "betas": (0.9, 0.95), "layers": [1, 2]}
    assert type(again.hparams.betas) is tuple


def test_classes_among_the_hyper_parameters_are_omitted() -> None:
    class Activated(TinyModule):
        def __init__(self, activation: type = nn.ReLU, options: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(
        UserWarning, match="cannot store these hyper-parameters.*: activation, options.norm. Expected plain values"
    ):
        trainer = saved(Activated(nn.Tanh, {"norm": nn.LayerNorm, "depth": 2}))
    path = trainer.checkpoint_callback.last_model_path
    with pytest.warns(TrainkitWarning, match=r"be stored: options\. .*Activated\.load_from_checkpoint\(path, options=\.\.\.\)"):
        again = Activated.load_from_checkpoint(path, activation=nn.Tanh)
    assert again.hparams == {"activation": nn.Tanh, "options": {"depth": 2}}
    with pytest.warns(
        TrainkitWarning, match=r"lacks hyper-parameters of Activated.*be stored: activation, options\. __init__ uses"
    ):
        assert Activated.load_from_checkpoint(path).hparams.activation is nn.ReLU
    again = Activated.load_from_checkpoint(path, activation=nn.Tanh, options=None)  # warns of nothing
    assert again.hparams == {"activation": nn.Tanh, "options": None}


def test_hyper_parameters_that_a_run_did_not_want_to_store_are_named() -> None:
    class Adding(TinyModule):
        def __init__(self, activation: type = nn.ReLU, **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="activation")
            self.activation = activation

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["hyper_parameters"]["activation"] = self.activation

    trainer = make_trainer(enable_checkpointing=True, omit_from_checkpoint="hyper_parameters.activation")
    trainer.fit(Adding(nn.Tanh), tiny_loader())
    path = trainer.checkpoint_callback.last_model_path
    with pytest.warns(TrainkitWarning, match="be stored: activation"):
        Adding.load_from_checkpoint(path)
    assert Adding.load_from_checkpoint(path, activation=nn.Tanh).activation is nn.Tanh


def test_an_open_file_and_the_order_of_lightning() -> None:
    """A project reads a file with `torch.load`, changes it, saves it to a buffer, and passes all arguments by position."""
    module = Sized(learning_rate=0.02, width=4)
    path = saved(module).checkpoint_callback.last_model_path
    write_ckpt(open_checkpoint(path), Path("net.ckpt"))
    content = torch.load("net.ckpt", weights_only=True)
    content["state_dict"]["more"] = torch.ones(2)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    again = Sized.load_from_checkpoint(buffer, None, None, False, learning_rate=0.5)
    assert again.hparams == {"learning_rate": 0.5, "width": 4}
    assert same(parameters_of(again), parameters_of(module))
    with pytest.raises(UnsupportedArgumentError, match="hparams_file"):
        Sized.load_from_checkpoint(path, None, "hparams.yaml")  # type: ignore[arg-type]


class Backbone(TinyModule):
    """Has arguments that a checkpoint cannot store: a module, a function and an optimizer class."""

    def __init__(self, net: nn.Module, act: Any, optimizer: Any, rate: float = 0.1, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = net

    def configure_optimizers(self) -> Any:
        return self.hparams.optimizer(self.parameters(), lr=self.hparams.rate)


def test_what_cannot_be_stored_is_there_in_the_run_and_given_again_afterwards() -> None:
    given = {"net": nn.Linear(4, 1), "act": nn.functional.relu, "optimizer": partial(torch.optim.SGD, momentum=0.9)}
    config = {"nested": {"norm": nn.Identity(), "depth": 2}, "layers": [nn.Identity(), 3], "object": object(), 5: "five"}
    module, memory = Backbone(**given, rate=0.25, config=config), Memory()
    trainer = make_trainer(enable_checkpointing=True, logger=memory)
    said = (
        "cannot store these hyper-parameters.*: net, act, optimizer, config.nested.norm, config.layers, config.object. Expected"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        trainer.fit(module, tiny_loader())
    assert len(caught) == 1
    again = "Backbone.load_from_checkpoint(path, net=..., act=..., optimizer=..., config=...)"
    ignored = "self.save_hyperparameters(ignore=['net', 'act', 'optimizer', 'config'])"
    assert str(caught[0].message).endswith(f"Pass them again when you load a checkpoint: {again}. To not save them: {ignored}")
    assert trainer.optimizers[0].param_groups[0]["momentum"] == 0.9
    assert module.hparams.net is module.layer
    path = trainer.checkpoint_callback.last_model_path
    assert open_checkpoint(path).read().state["hyper_parameters"] == {
        "rate": 0.25,
        "config": {"nested": {"depth": 2}, 5: "five"},
    }
    assert memory.hyperparameters == {
        "act": "torch.nn.functional.relu",
        "optimizer": "partial(torch.optim.sgd.SGD, momentum=0.9)",
        "rate": 0.25,
        "config": {"nested": {"depth": 2}, "5": "five"},
    }
    with pytest.raises(
        CheckpointError, match=r"Backbone\.load_from_checkpoint\(path, net=\.\.\., act=\.\.\., optimizer=\.\.\.\)"
    ):
        Backbone.load_from_checkpoint(path)
    again = Backbone.load_from_checkpoint(path, **given, config=config)
    assert again.hparams.rate == 0.25
    assert same(parameters_of(again), parameters_of(module))
    with warnings.catch_warnings():  # the warning comes only once
        warnings.simplefilter("error")
        trainer.save_checkpoint("again")


def test_nothing_is_said_where_nothing_is_stored() -> None:
    # a run without checkpoints does not warn of arguments that a checkpoint cannot store
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer().fit(Backbone(nn.Linear(4, 1), nn.functional.relu, torch.optim.SGD), tiny_loader())


def test_keys_that_are_no_strings() -> None:
    class Configured(TinyModule):
        def __init__(self, config: Any = None, rate: float = 0.1, **rest: Any) -> None:
            super().__init__()
            self.save_hyperparameters({"rate": rate, 1: "one", "sizes": {2: "two"}, (3, 4): nn.Identity()})

    trainer = make_trainer(enable_checkpointing=True, logger=CSVLogger("logs"))
    with pytest.warns(UserWarning, match=r"cannot store these hyper-parameters.*: \(3, 4\)\. Expected"):
        trainer.fit(Configured(rate=0.5), tiny_loader())
    again = Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)
    assert again.hparams == {"rate": 0.5, 1: "one", "sizes": {2: "two"}, (3, 4): again.hparams[3, 4]}
    assert main(["checkpoint", "show", str(trainer.checkpoint_callback.last_model_path)]) == 0


def test_more_arguments_beside_a_saved_configuration() -> None:
    """Arguments that are not saved reach `**kwargs`, as in Lightning."""

    class Inferred(TinyModule):
        def __init__(self, config: Any, **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.more = more

    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(Inferred({"width": 4}, inferred=1), tiny_loader())
    again = Inferred.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, inferred=2)
    assert (again.more, again.hparams["width"]) == ({"inferred": 2}, 4)


def test_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    create = omegaconf.OmegaConf.create

    class Hydra(TinyModule):
        def __init__(self, config: Any, extra: Any = None) -> None:
            super().__init__()
            assert all(map(omegaconf.OmegaConf.is_config, (config, extra)))
            self.save_hyperparameters()
            self.layer = nn.Linear(4, config.net.width)
            self.learning_rate = config.lr

    config = create({"net": {"width": 1, "layers": [1, {"a": 2}]}, "lr": "${base}", "base": 0.125})
    memory = Memory()
    trainer = make_trainer(enable_checkpointing=True, logger=memory)
    trainer.fit(Hydra(config, create([1, 2])), tiny_loader())
    path = trainer.checkpoint_callback.last_model_path
    plain = {"config": {"net": {"width": 1, "layers": [1, {"a": 2}]}, "lr": 0.125, "base": 0.125}, "extra": [1, 2]}
    held = open_checkpoint(path).read().state["hyper_parameters"]
    assert held == plain
    assert [type(held["config"]), type(held["config"]["net"]["layers"]), type(held["extra"])] == [dict, list, list]
    assert memory.hyperparameters == plain
    again = Hydra.load_from_checkpoint(path)
    assert again.learning_rate == 0.125
    assert same(parameters_of(again), parameters_of(trainer.model))


def test_an_omegaconf_of_all_hyper_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf = pytest.importorskip("omegaconf")

    class Hydra(TinyModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.optim = config.optim

    class Data(DataModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

        def train_dataloader(self) -> Any:
            return tiny_loader()

    config = omegaconf.OmegaConf.create({"optim": {"lr": 0.5}, "sizes": [1, {"a": 2}], "later": "???"})
    memory = Memory()
    trainer = make_trainer(enable_checkpointing=True, logger=memory)
    trainer.fit(Hydra(config), datamodule=Data(config))
    path = trainer.checkpoint_callback.last_model_path
    held = open_checkpoint(path).read().state
    assert held["hyper_parameters"] == held["datamodule_hyper_parameters"] == memory.hyperparameters
    assert type(held["hyper_parameters"]["sizes"][1]) is dict
    module = Hydra.load_from_checkpoint(path, later=3)
    assert isinstance(module.hparams, omegaconf.DictConfig)
    assert (module.optim.lr, module.hparams.sizes[1].a, module.hparams.later) == (0.5, 2, 3)
    assert Data.load_from_checkpoint(path).hparams == config
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # as if it was not installed
    assert type(Data.load_from_checkpoint(path).hparams) is HyperParameters


def test_a_model_built_late() -> None:
    class Late(TinyModule):
        built = 0

        def __init__(self) -> None:
            super().__init__()
            del self.layer

        def configure_model(self) -> None:
            self.layer = nn.Linear(4, 1)
            self.built += 1

    trainer = saved(Late())
    module = Late.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)
    assert same(parameters_of(module), parameters_of(trainer.model))
    make_trainer().validate(module, tiny_loader(8), verbose=False)
    assert module.built == 1, "what was loaded is not built again"
    assert same(parameters_of(module), parameters_of(trainer.model))


class Wider(Sized):
    """Has a layer that is not in the checkpoint."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.more = nn.Linear(1, 1)


def test_names_that_are_missing_and_where_the_module_is_put() -> None:
    trainer = saved(Sized())
    path = trainer.checkpoint_callback.last_model_path
    with pytest.raises(StateMismatchError, match="more"):
        Wider.load_from_checkpoint(path)
    module = Wider.load_from_checkpoint(path, strict=False)
    assert torch.equal(module.layer.weight, trainer.model.layer.weight)
    assert Sized.load_from_checkpoint(path, map_location="meta").layer.weight.device.type == "meta"


def test_a_module_that_is_loaded_without_all_names() -> None:
    """`strict_loading = False` of the module acts in every place that loads weights; `strict=` of a call is stronger."""
    path = saved(Sized()).checkpoint_callback.last_model_path

    class Larger(Sized):
        def __init__(self, learning_rate: float = 0.1, width: int = 4, strict: bool = False) -> None:
            super().__init__(learning_rate, width)
            self.head = nn.Linear(2, 2)
            self.strict_loading = strict

    loaded = Larger.load_from_checkpoint(path)
    assert same({"layer": loaded.layer.weight}, {"layer": Sized.load_from_checkpoint(path).layer.weight})
    with pytest.raises(StateMismatchError, match="head"):
        Larger.load_from_checkpoint(path, strict=True)
    make_trainer().validate(Larger(), tiny_loader(), ckpt_path=path)
    make_trainer(max_epochs=3).fit(Larger(), tiny_loader(), ckpt_path=path)
    for use in (make_trainer().validate, make_trainer(max_epochs=3).fit):
        with pytest.raises(StateMismatchError, match="head"):
            use(Larger(strict=True), tiny_loader(), ckpt_path=path)


def test_resolvers_of_omegaconf_get_nothing_from_a_checkpoint() -> None:
    """A resolver is a function of the program, which text in a checkpoint must not call."""
    omegaconf = pytest.importorskip("omegaconf")
    called: list[Any] = []
    omegaconf.OmegaConf.register_resolver("planted", called.append)

    class Hydra(TinyModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.read = omegaconf.OmegaConf.to_container(config, resolve=True)

    texts = ["${planted:1}", r"\${planted:1}", r"\\${planted:1}", "${planted:${width}}", "a ${oc.env:HOME} b", "${planted:"]
    saved_texts = {f"text{index}": text for index, text in enumerate(texts)}
    try:
        config = omegaconf.OmegaConf.create({"width": 4, "again": "${width}", "list": []})
        path = saved(Hydra(config)).checkpoint_callback.last_model_path
        edit_state(path, lambda state: state["hyper_parameters"]["config"].update(saved_texts, again="${width}", list=texts))
        read = Hydra.load_from_checkpoint(path).read
    finally:
        omegaconf.OmegaConf.clear_resolver("planted")
    assert read == {"width": 4, "again": 4, "list": texts, **saved_texts}
    assert called == []


def edit_state(path: Any, change: Any) -> None:
    file = Path(path) / "state.json"
    state = json.loads(file.read_bytes())
    change(state)
    file.write_text(json.dumps(state))
    seal(Path(path))


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Word(str, Enum):
    YES = "yes"


@dataclass
class Inner:
    width: int = 4
    color: Color = Color.RED


@dataclass
class Settings:
    inner: Inner = field(default_factory=Inner)
    tint: Color | None = None
    parts: Any = None


class Pair(NamedTuple):
    first: int
    color: Color


class Net(TinyModule):
    """A module with hyper-parameters of every kind, among others."""

    def __init__(
        self,
        settings: Settings,
        space: Any,
        pair: Pair,
        colors: list[Color],
        table: dict[str, Color | int] | None = None,
        level: Level = Level.LOW,
        free: Any = None,
        default=Color.RED,  # type: ignore[no-untyped-def]
        text: str | Color = "red",
        word: str | Word = "no",
        plain: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = {
            "settings": (settings.inner.width, settings.inner.color, settings.tint, settings.parts[0].deep.x),
            "space": (space.x, space.inside.y, space.pair.first),
            "pair": (pair.first, pair.color, *pair),
            "enumerations": (colors, table, level, free, default, text, word),
        }
        self.plain = plain


class Data(DataModule):
    def __init__(self, options: Settings, color: Color = Color.RED) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = (options.inner.width, options.tint, color)

    def train_dataloader(self) -> Iterable[Any]:
        return tiny_loader(4)


def test_after_loading_it_is_as_before() -> None:
    settings = Settings(Inner(8, Color.BLUE), Color.RED, [SimpleNamespace(deep=HyperParameters(x=1))])
    space = Namespace(x=1, inside=Namespace(y=2), pair=Pair(3, Color.RED))
    table = {"a": Color.RED, "b": 1}
    module = Net(settings, space, Pair(5, Color.BLUE), [Color.BLUE, Color.RED], table, Level.HIGH, Color.RED, Color.BLUE,
                 "blue", Word.YES, {"a": {"b": Color.RED}})  # fmt: skip
    data = Data(Settings(tint=Color.BLUE), Color.BLUE)
    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(module, datamodule=data)
    path = trainer.checkpoint_callback.last_model_path
    again = Net.load_from_checkpoint(path)
    assert again.seen.pop("enumerations") == ([Color.BLUE, Color.RED], table, Level.HIGH, "red", Color.BLUE, "blue", Word.YES)
    expected = dict(module.seen)
    del expected["enumerations"]
    assert again.seen == expected
    assert type(again.hparams.level) is Level
    assert again.hparams.settings.inner.color is Color.BLUE
    assert again.plain == {"a": {"b": "red"}}, "what nothing names the class of is a value"
    assert [type(again.plain), type(again.plain["a"])] == [dict, dict], "a dict stays one"
    assert Data.load_from_checkpoint(path).seen == data.seen
    later = make_trainer(enable_checkpointing=True, default_root_dir="later")
    later.fit(again, datamodule=Data.load_from_checkpoint(path))
    third = Net.load_from_checkpoint(later.checkpoint_callback.last_model_path)
    assert third.seen == {**expected, "enumerations": third.seen["enumerations"]}, "and so a second time"


def test_one_argument_that_holds_all_of_them() -> None:
    class Whole(TinyModule):
        def __init__(self, config: Settings) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.seen = (config.inner.width, config.inner.color, config.tint)

    module = Whole(Settings(Inner(8, Color.BLUE), Color.RED))
    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(module, tiny_loader())
    assert Whole.load_from_checkpoint(trainer.checkpoint_callback.last_model_path).seen == module.seen


def test_loggers_get_the_values() -> None:
    class Colored(TinyModule):
        def __init__(self, color: Color, pair: Pair) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer = make_trainer(enable_checkpointing=True)
    trainer.fit(Colored(Color.BLUE, Pair(1, Color.RED)), tiny_loader())
    state = open_checkpoint(trainer.checkpoint_callback.last_model_path).read({"state"}).state
    assert state["hyper_parameters"] == {"color": "blue", "pair": (1, "red")}
    assert state["hyper_parameters_attributes"] == [[["pair"], ["first", "color"]]]


@pytest.mark.parametrize(
    "value, annotation, expected",
    [
        ("red", Color, Color.RED),
        ("green", Color, "green"),
        (5, Color, 5),
        (["red"], Color, ["red"]),
        (2, Level | None, Level.HIGH),
        (None, Color | None, None),
        ({"red", "blue"}, set[Color], {Color.RED, Color.BLUE}),
        (("red", 1), tuple[Color, int], (Color.RED, 1)),
        (("red", "blue"), tuple[Color, ...], (Color.RED, Color.BLUE)),
        ({"red": 1}, dict[Color, int], {Color.RED: 1}),
        ({"inner": {"color": "blue"}, "other": "red"}, Settings, {"inner": {"color": Color.BLUE}, "other": "red"}),
        ([{"color": "blue"}], list[Inner], [{"color": Color.BLUE}]),
        ("red", "Color", "red"),
        ("red", None, "red"),
    ],
)
def test_members(value: Any, annotation: Any, expected: Any) -> None:
    assert with_members(value, annotation) == expected


@pytest.mark.parametrize("keys", [["a"], ["b", "c"], ["b", 5], ["d"], ["x"], ["a", "b"]])
@pytest.mark.parametrize("names", [None, ["x"]])
def test_paths_that_lead_nowhere_change_nothing(keys: list[Any], names: Any) -> None:
    values = {"a": 1, "b": [1, 2], "d": (1, 2)}
    assert with_attributes(values, [[keys, names]]) == values


def test_values_with_names_are_copied() -> None:
    pair = with_attributes({"pair": (1, [2])}, [[["pair"], ["first", "second"]]])["pair"]
    for one in (pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert (one.first, one.second, tuple(one)) == (1, [2], (1, [2]))
    with pytest.raises(AttributeError, match="no value 'third'; known:"):
        pair.third


FILES = {
    "mypackage/__init__.py": "import os\nfrom json import loads\nfrom .layers import Layer\nclass layers2: pass",
    "mypackage/layers.py": """
import functools, os, torch
class Layer(torch.nn.Module):
    class Inner: pass
    other = os
    def forward(self): pass
def make(): pass
system = os.system
partial = functools.partial(os.system, "true")
instance = Layer()
class Borrowed(Layer): pass
Borrowed.__module__ = "os"
faked = type("system", (), {"__module__": "mypackage.layers"})
""",
    "mypackage/broken.py": "import a_package_that_is_missing",
    "mypackage_evil.py": "open('ran', 'w')\ndef run(): pass",
}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package in the directory of the test."""
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(".")
    yield
    for name in [name for name in sys.modules if name.startswith("mypackage")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["layers.Layer", "Layer", "layers.Layer.Inner", "layers.make", "layers2"])
def test_classes_and_functions_of_the_package(name: str) -> None:
    path = f"mypackage.{name}"
    found = Trust(["mypackage."]).find(path)
    assert found.__qualname__.rpartition(".")[2] == path.rpartition(".")[2]
    assert Trust().find(path) is None
    assert Trust(["mypackage.other.", "torch."]).find(path) is None


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "path",
    [
        *("mypackage.os.system", "mypackage.layers.os.system", "mypackage.layers.torch.load", "mypackage.layers.os"),
        *("mypackage.layers", "mypackage", "mypackage.layers.Layer.other.system", "mypackage.layers.Layer.Inner.missing"),
        *("mypackage.loads", "mypackage.layers.system", "mypackage.layers.partial", "mypackage.layers.instance"),
        *("mypackage.layers.Borrowed", "mypackage.layers.faked", "mypackage.layers.instance.forward"),
        *(
            "mypackage.layers.Layer.load_state_dict",
            "mypackage.layers.Layer.__init__.__globals__",
            "mypackage.layers.Layer.__class__",
        ),
        *(
            "mypackage_evil.run",
            "os.system",
            "mypackage.",
            "mypackage..layers",
            "",
            ".",
            "mypackage.layers.Layer()",
            "mypackage.a b",
        ),
        *("mypackage.missing.Layer", "mypackage.layers.Layer.__subclasses__", 5, None, ["mypackage.layers.Layer"]),
    ],
)
def test_what_is_not_found(path: Any) -> None:
    """Another package, what a package has imported, objects, and what is defined elsewhere."""
    assert Trust(["mypackage."]).find(path) is None
    assert "mypackage_evil" not in sys.modules
    assert not Path("ran").exists()


@pytest.mark.usefixtures("package")
def test_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(CheckpointError, match=r"names mypackage.broken.Net, which trust= covers.*a_package_that_is_missing"):
        Trust(["mypackage."]).find("mypackage.broken.Net")


@pytest.mark.parametrize("prefixes", ["mypackage.", ["mypackage"], [""], ["."], ["..."], ["my-package."], [5], [None]])
def test_what_is_no_package(prefixes: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected prefixes of import paths, each with a dot.*trust=\['mypackage.'\]"):
        Trust(prefixes)
