"""A module returned by `torch.compile` is trained like the original module, with compiled steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.checkpoint import open_checkpoint

# torch's tracer reads .grad of the loss that a compiled step passes to self.log
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _no_graphs_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_steps_are_compiled_and_results_are_the_same() -> None:
    torch.manual_seed(3)
    plain = TinyModule()
    compiled, backend = TinyModule(), Counting()
    compiled.load_state_dict(plain.state_dict())
    results = []
    for given in (plain, torch.compile(compiled, backend=backend)):
        trainer = make_trainer(max_epochs=2)
        trainer.fit(given, tiny_loader(), tiny_loader())
        results.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        assert trainer.lightning_module in (plain, compiled)
    assert backend.graphs >= 2  # of training and of validation
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert set(results[0]) == {"train_loss", "val_loss"}


def test_a_later_fit_of_the_module_itself_is_not_compiled() -> None:
    module, backend = TinyModule(), Counting()
    trainer = make_trainer()
    trainer.fit(torch.compile(module, backend=backend), tiny_loader())
    graphs = backend.graphs
    trainer.fit(module, tiny_loader())
    assert backend.graphs == graphs > 0


def test_compiling_leaves_no_trace_in_a_checkpoint() -> None:
    trainer = make_trainer()
    trainer.fit(torch.compile(TinyModule(), backend="eager"), tiny_loader())
    trainer.save_checkpoint("there")
    assert set(open_checkpoint("there").read().tensors["model"]) == {"layer.weight", "layer.bias"}
