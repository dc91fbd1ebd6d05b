"""Warnings about eval mode, shuffled evaluation loaders and loaders without workers: where they are right, and only there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.data.samples import Drawing
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader

from trainkit import CombinedLoader
from trainkit.console import TrainkitWarning
from trainkit.trainer.notices import notice_few_workers, warn_eval_mode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.head = nn.Linear(2, 1)


def warned(module: nn.Module) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_eval_mode(module)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


def test_modules_that_are_trained_in_eval_mode() -> None:
    net = Net()
    assert warned(net) == ""
    net.backbone.eval()
    text = warned(net)
    assert "at the start of training: backbone. " in text
    assert "module.backbone.train()" in text
    net.head.eval()
    assert "training: backbone, head." in warned(net)
    net.eval()
    assert "training: Net." in warned(net)
    assert "Call module.train()" in warned(net)


def test_modules_that_are_in_eval_mode_on_purpose() -> None:
    frozen, norms = Net(), Net()
    frozen.backbone.requires_grad_(False).eval()
    norms.backbone[1].eval()
    norms.backbone[2].eval()
    assert warned(frozen) == warned(norms) == ""


def test_a_fit_in_eval_mode() -> None:
    module = TinyModule()
    module.layer.eval()
    with pytest.warns(TrainkitWarning, match="in eval mode at the start of training: layer"):
        make_trainer().fit(module, tiny_loader())
    make_trainer().validate(module, tiny_loader())


def test_an_evaluation_loader_that_shuffles() -> None:
    module, trainer = TinyModule(), make_trainer()
    trainer.validate(module, tiny_loader(shuffle=True))
    trainer.test(module, tiny_loader(shuffle=True))
    with pytest.warns(TrainkitWarning, match=r"the loader of predict shuffles.*shuffle=False"):
        trainer.predict(module, tiny_loader(shuffle=True))
    trainer.predict(module, tiny_loader(sampler=torch.utils.data.SubsetRandomSampler(range(4))))


@pytest.mark.parametrize("limit, warns", [(2, True), (0.5, True), (4, False), (9, False), (1.0, False), (0, False)])
def test_a_part_of_a_shuffled_validation_loader(limit: Any, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(limit_val_batches=limit).fit(TinyModule(), tiny_loader(), tiny_loader(shuffle=True))
    assert ["the validation loader shuffles and a limit" in str(one.message) for one in caught] == [True] * warns


def test_overfitting_turns_shuffling_off(caplog: pytest.LogCaptureFixture) -> None:
    for shuffle in (True, False):
        caplog.clear()
        make_trainer(overfit_batches=2).fit(TinyModule(), tiny_loader(shuffle=shuffle), tiny_loader(shuffle=True))
        assert ("read without shuffling" in caplog.text) == shuffle


def test_a_gpu_that_waits_for_its_data(caplog: pytest.LogCaptureFixture) -> None:
    def told(source: Any, device: str = "cuda", cores: int = 8) -> bool:
        caplog.clear()
        notice_few_workers(source, device, cores)
        return "num_workers=0" in caplog.text

    slow = DataLoader(Drawing(4))
    assert told(slow)
    assert told(CombinedLoader([tiny_loader(), slow]))
    assert not told(slow, device="cpu")
    assert not told(slow, cores=2)
    assert not told(tiny_loader()), "tensors in memory"
    assert not told(DataLoader(Drawing(4), num_workers=1))
    assert not told([1, 2])


@pytest.mark.parametrize("accumulation", [1, 2, {0: 1, 1: 4}])
@pytest.mark.parametrize("hooks", ["", "optimizer_step", "optimizer_zero_grad", "optimizer_step optimizer_zero_grad"])
def test_hooks_that_accumulation_calls_less_often(hooks: str, accumulation: Any, caplog: pytest.LogCaptureFixture) -> None:
    def call(name: str) -> Any:
        return lambda self, *args: getattr(TinyModule, name)(self, *args)

    module = type("Mine", (TinyModule,), {name: call(name) for name in hooks.split()})()
    with caplog.at_level("INFO", "trainkit"):
        make_trainer(accumulate_grad_batches=accumulation).fit(module, tiny_loader())
    what = f"Mine.{' and '.join(hooks.split())} {'are' if ' ' in hooks else 'is'} called once for each accumulation window"
    assert caplog.text.count("called once for each accumulation window") == (accumulation != 1 and hooks != "")
    assert what in caplog.text or accumulation == 1 or not hooks
