"""`LayerFreezing`: which parameters are trained when, exact resume, several processes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import nn

from trainkit import Callback
from trainkit.callbacks import LayerFreezing
from trainkit.errors import ConfigurationError, ModuleError, OptimizerError


class Layers(TinyModule):
    """Two layers and a head; AdamW with weight decay over all parameters, and a schedule with a value for each group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)
        del self.layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)]


class Changed(Callback):
    """Records after each optimizer step the names of the parameters that it has changed."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.before: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.before = parameters_of(module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.accelerator.sync_gradients:
            now = parameters_of(module)
            self.steps.append([name for name in now if not now[name].equal(self.before[name])])
            self.before = now


def fit(*callbacks: Callback, module: Any = None, trainer: Any = None, **arguments: Any) -> Any:
    module = Layers() if module is None else module
    options = {"max_epochs": 3, "accumulate_grad_batches": 2, **(trainer or {})}
    make_trainer(*callbacks, **options).fit(module, tiny_loader(24, batch_size=4, shuffle=True), **arguments)
    return module


HEAD, LAST, ALL = ["head.weight", "head.bias"], ["body.2.weight", "body.2.bias"], list(parameters_of(Layers()))


def test_epochs_and_names() -> None:
    changed = Changed()
    fit(LayerFreezing({2: ["*"], 1: ["body.2", "head.bias"], 0: ["h*"]}), changed)
    assert changed.steps == [HEAD] * 3 + [[*LAST, "head.bias"]] * 3 + [ALL] * 3


def test_steps() -> None:
    """Counted in optimizer steps; before the first key the module's own flags count."""
    changed = Changed()
    module = Layers()
    module.body[0].requires_grad_(False)
    fit(LayerFreezing({1: ["head"], 4: ["body.2"], 5: ["head"]}, interval="step"), changed, module=module)
    assert changed.steps == [LAST + HEAD] + [HEAD] * 3 + [LAST] + [HEAD] * 4


SCHEDULES = [({0: ["head"], 1: ["body.2", "head"], 2: ["*"]}, "epoch"), ({0: ["head"], 2: ["*"], 6: ["body"]}, "step")]


def callback(number: int) -> LayerFreezing:
    return LayerFreezing(*SCHEDULES[number])


@pytest.mark.parametrize("number", [0, 1])
def test_a_resumed_run_is_bit_identical(number: int) -> None:
    expected = parameters_of(fit(callback(number)))
    for place in (1, 3, 7, 12, 17):
        fit(callback(number), SaveIn("on_train_batch_end", place))
        assert same(parameters_of(fit(callback(number), ckpt_path="there")), expected), place


def on_processes() -> list[dict[str, Any]]:
    ddp, found = {"strategy": "ddp", "accumulate_grad_batches": 1}, []
    for number in (0, 1):
        found.append(parameters_of(fit(callback(number), trainer=ddp)))
        fit(callback(number), SaveIn("on_train_epoch_end", 2), trainer=ddp)
        found.append(parameters_of(fit(callback(number), trainer=ddp, ckpt_path="there")))
    return found


def test_on_two_processes() -> None:
    """The ranks agree, a resumed run is bit-identical, and the run is that of one process."""
    first, second = run_world(2, on_processes)
    for number in (0, 1):
        whole, resumed = first[2 * number : 2 * number + 2]
        assert all(same(whole, other) for other in (resumed, *second[2 * number : 2 * number + 2]))
        alone = parameters_of(fit(callback(number)))
        assert all(torch.allclose(whole[name], alone[name], atol=1e-5) for name in alone)


def test_what_is_refused(trainer: Any, module: Any) -> None:
    for schedule in ({}, [0], {-1: ["head"]}, {0: "head"}, {0: []}, {0.5: ["head"]}):
        with pytest.raises(ConfigurationError, match="Fix: LayerFreezing"):
            LayerFreezing(schedule)
    with pytest.raises(ModuleError, match=r"'haed' matches no parameter of Layers. Did you mean 'head'\?"):
        fit(LayerFreezing({3: ["haed"]}))
    trainer.strategy.shards_optimizer_state = True
    with pytest.raises(ConfigurationError, match="LayerFreezing changes which .* Use strategy='ddp'"):
        LayerFreezing({0: ["head"]}).setup(trainer, module, "fit")

    class HeadOnly(Layers):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    with pytest.raises(OptimizerError, match=r"no optimizer has: body.2.weight, body.2.bias. Pass all parameters"):
        fit(LayerFreezing({0: ["head"], 5: ["body.2"]}), module=HeadOnly())
    manual = Layers()
    manual.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="needs automatic optimization"):
        fit(LayerFreezing({0: ["head"]}, "step"), module=manual, trainer={"accumulate_grad_batches": 1})
