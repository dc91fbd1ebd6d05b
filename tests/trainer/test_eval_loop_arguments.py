"""Each argument of `validate`, `test` and `predict` has an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import DataModule, Trainer
from trainkit.errors import TrainkitError

VERBS = ["validate", "test", "predict"]


class Constant(TinyModule):
    """Predicts its bias, and records it with the size of each batch."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.bias.fill_(bias)
        self.seen: list[tuple[float, int]] = []

    def note(self, batch: Any) -> Any:
        self.seen.append((round(self.layer.bias.item(), 4), len(batch[0])))
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.note(batch).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.note(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.note(batch)


class Data(DataModule):
    """One batch of three samples for each stage."""

    def val_dataloader(self) -> Any:
        return tiny_loader(3, 3)

    test_dataloader = predict_dataloader = val_dataloader


def fitted(bias: float) -> tuple[Trainer, Constant]:
    """A trainer that has fitted a module without changing its weights, because the learning rate is 0."""
    trainer, module = make_trainer(max_epochs=1), Constant(bias)
    module.learning_rate = 0.0
    trainer.fit(module, tiny_loader())
    return trainer, module


@pytest.mark.parametrize("verb", VERBS)
def test_the_model_is_the_one_that_is_given(verb: str) -> None:
    trainer, module = fitted(1.0)
    getattr(trainer, verb)(dataloaders=tiny_loader(4, 4))
    other = Constant(2.0)
    getattr(trainer, verb)(model=other, dataloaders=tiny_loader(4, 4))
    assert (module.seen, other.seen) == ([(1.0, 4)], [(2.0, 4)])


@pytest.mark.parametrize("verb", VERBS)
def test_batches_are_those_of_the_loaders_or_of_the_data_module(verb: str) -> None:
    module = Constant(1.0)
    getattr(make_trainer(), verb)(module, dataloaders=tiny_loader(2, 2))
    getattr(make_trainer(), verb)(module, datamodule=Data())
    assert [samples for _, samples in module.seen] == [2, 3]


@pytest.mark.parametrize("verb", VERBS)
def test_weights_are_those_of_the_checkpoint(verb: str) -> None:
    trainer, _ = fitted(5.0)
    trainer.save_checkpoint("there")
    module = Constant(1.0)
    getattr(trainer, verb)(module, tiny_loader(2, 2))
    getattr(trainer, verb)(module, tiny_loader(2, 2), ckpt_path="there")
    assert [bias for bias, _ in module.seen] == [1.0, 5.0]
    with pytest.raises(TrainkitError, match="nowhere"):
        getattr(trainer, verb)(module, tiny_loader(2, 2), ckpt_path="nowhere")


@pytest.mark.parametrize("verb", VERBS[:2])
def test_results_are_printed_unless_told_otherwise(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(make_trainer(), verb)(Constant(1.0), tiny_loader(2, 2), verbose=False)
    assert "loss" not in capsys.readouterr().out
    getattr(make_trainer(), verb)(Constant(1.0), tiny_loader(2, 2))
    assert "loss" in capsys.readouterr().out


def test_predictions_are_returned_unless_told_otherwise() -> None:
    assert make_trainer().predict(Constant(1.0), tiny_loader(2, 2), return_predictions=False) is None
    (prediction,) = make_trainer().predict(Constant(1.0), tiny_loader(2, 2))
    assert prediction.tolist() == [[1.0], [1.0]]
