"""``TrainModule.load_from_checkpoint``: the hyper-parameters, the weights, and what was not saved."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn
from trainers import make_trainer, parameters_of, same

from trainkit import Trainer
from trainkit.errors import CheckpointError, StateMismatchError, UnknownNameError


class Sized(TinyModule):
    """With two hyper-parameters."""

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


def test_arguments_that_were_not_saved() -> None:
    class Needs(TinyModule):
        def __init__(self, backbone: nn.Module, rate: float) -> None:
            super().__init__()
            self.backbone = backbone

    trainer = saved(Needs(nn.Identity(), 0.5))
    path = trainer.checkpoint_callback.last_model_path
    with pytest.raises(CheckpointError, match=r"does not hold the arguments backbone, rate of Needs\. Give them"):
        Needs.load_from_checkpoint(path)
    assert same(parameters_of(Needs.load_from_checkpoint(path, backbone=nn.Identity(), rate=1.0)), parameters_of(trainer.model))


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


def test_classes_among_the_hyper_parameters_are_left_out() -> None:
    class Activated(TinyModule):
        def __init__(self, activation: type = nn.ReLU, options: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(UserWarning, match="activation, options.norm are classes"):
        trainer = saved(Activated(nn.Tanh, {"norm": nn.LayerNorm, "depth": 2}))
    again = Activated.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, activation=nn.Tanh)
    assert again.hparams == {"activation": nn.Tanh, "options": {"depth": 2}}


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
    """Has a layer that the checkpoint has not."""

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
