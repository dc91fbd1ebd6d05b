from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import nn

from trainkit.callbacks import ModelSummary
from trainkit.callbacks.model_summary import readable_count, summarize
from trainkit.errors import ConfigurationError
from trainkit.precision import Precision


class Net(nn.Module):
    """A body of two layers, a head, and a parameter outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, extra: Any = None) -> dict[str, Any]:
        hidden = self.body(x)
        return {"out": self.head(hidden), "hidden": [hidden]}


@pytest.mark.parametrize("depth", [-2, 1.5, True, "all"])
def test_a_wrong_depth_is_an_error(depth: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_depth"):
        ModelSummary(max_depth=depth)
    with pytest.raises(ConfigurationError, match="max_depth"):
        summarize(Net(), depth)


def test_numbers() -> None:
    net = Net()
    net.head.requires_grad_(False)
    net.body[1].eval()
    summary = summarize(net)
    assert [(line.name, line.kind, line.parameters, line.training) for line in summary.layers] == [
        ("body", "Sequential", 40, True),
        ("head", "Linear", 27, True),
        ("(no layer)", "parameters", 5, None),
    ]
    assert (summary.trainable, summary.non_trainable, summary.total) == (45, 27, 72)
    assert (summary.size_bytes, summary.size_mb) == (288, 0.000288)
    assert (summary.modules_in_train_mode, summary.modules_in_eval_mode) == (3, 1)
    assert not summary.has_sizes


@pytest.mark.parametrize(
    "depth, names",
    [
        (0, []),
        (1, ["body", "head", "(no layer)"]),
        (2, ["body", "body.0", "body.1", "head", "(no layer)"]),
        (-1, ["body", "body.0", "body.1", "head", "(no layer)"]),
    ],
)
def test_depth(depth: int, names: list[str]) -> None:
    summary = summarize(Net(), depth)
    assert [line.name for line in summary.layers] == names
    assert summary.total == 72


def test_the_table() -> None:
    net = Net()
    net.head.requires_grad_(False)
    assert str(summarize(net)) == "\n".join(
        [
            "  | Name       | Type       | Params | Mode",
            "--------------------------------------------",
            "0 | body       | Sequential | 40     | train",
            "1 | head       | Linear     | 27     | train",
            "2 | (no layer) | parameters | 5      |",
            "--------------------------------------------",
            "45        Trainable params",
            "27        Non-trainable params",
            "72        Total params",
            "0.000     Total size of the parameters (MB)",
            "4         Modules in train mode",
            "0         Modules in eval mode",
        ]
    )


@pytest.mark.parametrize(
    "number, text",
    [(0, "0"), (999, "999"), (1000, "1.0 K"), (1234, "1.2 K"), (999_949, "999.9 K"), (999_950, "1.0 M"),
     (1_500_000, "1.5 M"), (7_000_000_000, "7.0 B"), (1_000_000_000_000, "1.0 T"), (10**16, "10000.0 T")],
)  # fmt: skip
def test_readable_counts(number: int, text: str) -> None:
    assert readable_count(number) == text


def test_shared_parameters_count_once() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    net["head"].weight = net["embedding"].weight
    summary = summarize(net)
    assert [line.parameters for line in summary.layers] == [40, 40]
    assert (summary.total, summary.size_bytes, summary.shared) == (40, 160, 1)
    assert "1         Shared parameters, counted once" in str(summary)


def test_sizes_are_those_of_the_real_dtypes() -> None:
    net = nn.ModuleList([nn.Linear(10, 10, bias=False).bfloat16(), nn.Linear(10, 10, bias=False).double()])
    assert summarize(net).size_bytes == 100 * 2 + 100 * 8


def test_lazy_parameters_are_said_to_be_unknown() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    summary = summarize(net)
    assert [line.parameters for line in summary.layers] == [0, 4]
    assert (summary.total, summary.uninitialized) == (4, 2)
    assert "2         Parameters of unknown size" in str(summary)


def test_no_forward_without_an_example() -> None:
    class NoForward(Net):
        def forward(self, *args: Any) -> Any:
            raise AssertionError

    summarize(NoForward(), -1)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_sizes_of_inputs_and_outputs(form: str) -> None:
    net = Net()
    example: Any = torch.zeros(2, 4)
    net.example_input_array = {"tensor": example, "tuple": (example, "text"), "dict": {"x": example}}[form]
    summary = summarize(net, -1)
    sizes = {line.name: (line.in_size, line.out_size) for line in summary.layers}
    assert sizes == {
        "body": ([2, 4], [2, 8]),
        "body.0": ([2, 4], [2, 8]),
        "body.1": ([2, 8], [2, 8]),
        "head": ([2, 8], [2, 3]),
        "(no layer)": (None, None),
    }
    lines = str(summary).splitlines()
    assert lines[0].split(" | ")[5:] == ["In sizes", "Out sizes"]
    assert lines[2].split(" | ")[5:] == ["[2, 4]  ", "[2, 8]"]
    assert lines[6].split(" | ")[5:] == ["?       ", "?"]


def test_sizes_of_nested_inputs_and_outputs_and_of_layers_that_do_not_run() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.idle = nn.Linear(1, 1)
            self.example_input_array = torch.zeros(2, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x, extra=("text", [x]))

    layers = summarize(Outer()).layers
    assert layers[0].in_size == [[2, 4], ["?", [[2, 4]]]]
    assert layers[0].out_size == {"out": [2, 3], "hidden": [[2, 8]]}
    assert (layers[1].in_size, layers[1].out_size) == (None, None)


def test_the_example_leaves_modes_randomness_gradients_and_hooks_as_they_were() -> None:
    class Random(Net):
        def forward(self, x: torch.Tensor) -> Any:
            assert not torch.is_grad_enabled()
            assert not any(layer.training for layer in self.modules())
            torch.rand(1), numpy.random.rand(), random.random()
            return super().forward(x)

    net = Random()
    net.body.eval()
    net.body[1].train()
    net.norm = nn.BatchNorm1d(2)
    net.example_input_array = torch.zeros(2, 4)
    modes = [layer.training for layer in net.modules()]
    before = (torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate())
    summarize(net)
    after = (torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert [layer.training for layer in net.modules()] == modes
    assert not any(layer._forward_hooks for layer in net.modules())


def test_an_example_that_does_not_fit_raises_and_cleans_up() -> None:
    net = Net()
    net.example_input_array = torch.zeros(2, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        summarize(net)
    assert net.training
    assert not any(layer._forward_hooks for layer in net.modules())


def test_the_example_runs_in_the_precision_of_the_run() -> None:
    net = Net()
    seen: list[torch.dtype] = []
    net.head.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    net.example_input_array = torch.zeros(2, 4)
    for name, dtype in [("bf16-mixed", torch.bfloat16), ("64-true", torch.float64)]:
        precision = Precision(name)
        precision.convert_module(net)
        summarize(net, precision=precision)
        assert seen.pop() is dtype


def test_the_callback_prints_on_the_main_process_only(trainer, capsys) -> None:
    net = Net()
    ModelSummary().on_fit_start(trainer, net)
    assert capsys.readouterr().out == f"{summarize(net)}\n"
    ModelSummary(max_depth=0).on_fit_start(trainer, net)
    trainer.is_global_zero = False
    ModelSummary().on_fit_start(trainer, net)
    assert capsys.readouterr().out == ""


def test_a_fit_prints_it_unless_told(make_trainer, capsys) -> None:
    make_trainer(enable_model_summary=True).fit(TinyModule(), tiny_loader())
    assert str(summarize(TinyModule())) in capsys.readouterr().out
    make_trainer().fit(TinyModule(), tiny_loader())
    assert "params" not in capsys.readouterr().out


def test_a_fit_with_a_summary_of_its_own_prints_one(make_trainer, capsys) -> None:
    make_trainer(ModelSummary(max_depth=-1), enable_model_summary=True).fit(TinyModule(), tiny_loader())
    assert capsys.readouterr().out.count("Trainable params") == 1


def test_a_fit_is_the_same_with_an_example(make_trainer, capsys) -> None:
    weights = []
    for example in (None, torch.zeros(2, 4)):
        torch.manual_seed(0)
        module = TinyModule()
        module.example_input_array = example
        make_trainer(enable_model_summary=True).fit(module, tiny_loader(shuffle=True))
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)
    assert "[2, 4]   | [2, 1]" in capsys.readouterr().out


def test_parameters_of_which_no_process_has_the_whole() -> None:
    """Sharded parameters are counted by the shapes of their placeholders, and no forward is run."""
    module = nn.Sequential(nn.Linear(3, 4))
    module.example_input_array = torch.ones(1, 3)
    whole = {id(p): torch.empty(p.shape, device="meta") for p in module.parameters()}
    expected = str(summarize(nn.Sequential(nn.Linear(3, 4))))
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    assert str(summarize(module, placeholders=whole)) == expected
