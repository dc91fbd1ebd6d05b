"""`summarize`."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from trainkit.errors import ConfigurationError
from trainkit.precision import Precision
from trainkit.utilities.summary import (
    LayerSummary,
    ModelSummary,
    get_formatted_model_size,
    get_human_readable_count,
    summarize,
)


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
        summarize(Net(), depth)


def test_numbers() -> None:
    net = Net()
    net.head.requires_grad_(False)
    net.body[1].eval()
    summary = summarize(net)
    assert (summary.layer_names, summary.layer_types) == (["body", "head"], ["Sequential", "Linear"])
    assert (summary.param_nums, summary.training_modes) == ([40, 27], [True, True])
    assert (summary.trainable_parameters, summary.total_parameters, summary.total_layer_params) == (45, 72, 67)
    assert summary.model_size == 0.000288
    assert summary.total_training_modes == {"train": 3, "eval": 1}
    assert (summary.in_sizes, summary.out_sizes) == (["?", "?"], ["?", "?"])
    assert (summary.total_flops, summary.flop_counts) == (0, {"body": {}, "head": {}})


def test_numbers_and_modes_are_those_of_now() -> None:
    net = Net()
    summary = ModelSummary(net)
    net.head.requires_grad_(False)
    net.head.eval()
    assert (summary.trainable_parameters, summary.training_modes) == (45, [True, False])
    assert summary.total_training_modes == {"train": 3, "eval": 1}


@pytest.mark.parametrize(
    "depth, names",
    [
        (0, []),
        (1, ["body", "head"]),
        (2, ["body", "body.0", "body.1", "head"]),
        (-1, ["body", "body.0", "body.1", "head"]),
    ],
)
def test_depth(depth: int, names: list[str]) -> None:
    summary = summarize(Net(), depth)
    assert summary.layer_names == [name for name, _ in summary.named_modules] == names
    assert dict(summary.columns())["Name"] == names + (["other params"] if depth else [])
    assert summary.total_parameters == 72


def test_the_table() -> None:
    net = Net()
    net.head.requires_grad_(False)
    assert str(summarize(net)) == "\n".join(
        [
            "  | Name         | Type       | Params | Mode",
            "----------------------------------------------",
            "0 | body         | Sequential | 40     | train",
            "1 | head         | Linear     | 27     | train",
            "  | other params | n/a        | 5      | n/a",
            "----------------------------------------------",
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
    [(0, "0  "), (999, "999  "), (1000, "1.0 K"), (1234, "1.2 K"), (99_949, "99.9 K"), (99_950, "100 K"), (132_096, "132 K"),
     (999_499, "999 K"), (999_500, "1.0 M"), (1_500_000, "1.5 M"), (7_000_000_000, "7.0 B"), (4 * 10**14, "400 T"),
     (5 * 10**15, "5,000 T")],
)  # fmt: skip
def test_readable_counts(number: int, text: str) -> None:
    assert get_human_readable_count(number) == text


def test_readable_sizes() -> None:
    assert get_formatted_model_size(5500.0) == "5,500.000"


def test_shared_parameters_count_once() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    net["head"].weight = net["embedding"].weight
    summary = summarize(net)
    assert summary.param_nums == [40, 40]
    assert (summary.total_parameters, summary.model_size) == (40, 0.00016)
    assert str(summary).endswith("\n1 parameter has another name too and counts once.")


def test_sizes_are_those_of_the_real_dtypes() -> None:
    net = nn.ModuleList([nn.Linear(10, 10, bias=False).bfloat16(), nn.Linear(10, 10, bias=False).double()])
    assert summarize(net).model_size == (100 * 2 + 100 * 8) / 1e6


def test_lazy_parameters_are_said_to_be_unknown() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    summary = summarize(net)
    assert summary.param_nums == [0, 4]
    assert (summary.total_parameters, summary.model_size) == (4, 0.000016)
    assert "2 parameters of lazy modules have no size yet and count as 0." in str(summary)


def test_no_forward_without_an_example() -> None:
    class NoForward(Net):
        def forward(self, *args: Any) -> Any:
            raise AssertionError

    summarize(NoForward(), -1)


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict"])
def test_sizes_of_inputs_and_outputs(form: str) -> None:
    net = Net()
    example: Any = torch.zeros(2, 4)
    net.example_input_array = {"tensor": example, "tuple": (example, "text"), "list": [example], "dict": {"x": example}}[form]
    summary = summarize(net, -1)
    assert dict(zip(summary.layer_names, zip(summary.in_sizes, summary.out_sizes, strict=True), strict=True)) == {
        "body": ([2, 4], [2, 8]),
        "body.0": ([2, 4], [2, 8]),
        "body.1": ([2, 8], [2, 8]),
        "head": ([2, 8], [2, 3]),
    }
    lines = str(summary).splitlines()
    assert lines[0].split(" | ")[5:] == ["FLOPs", "In sizes", "Out sizes"]
    assert lines[2].split(" | ")[5:] == ["128  ", "[2, 4]  ", "[2, 8]"]
    assert lines[6].split(" | ")[5:] == ["n/a  ", "n/a     ", "n/a"]


def test_flops() -> None:
    net = Net()
    net.example_input_array = torch.zeros(2, 4)
    summary = summarize(net, -1)
    body, head = 2 * 2 * 4 * 8, 2 * 2 * 8 * 3
    assert {name: sum(counts.values()) for name, counts in summary.flop_counts.items()} == {
        "body": body,
        "body.0": body,
        "body.1": 0,
        "head": head,
    }
    assert summary.total_flops == body + head
    assert str(summary).splitlines()[-1] == "224       FLOPs of one forward"


def test_a_layer_by_itself() -> None:
    conv = nn.Conv2d(3, 8, 3)
    layer = LayerSummary(conv)
    assert (layer.layer_type, layer.num_parameters, layer.in_size, layer.out_size) == ("Conv2d", 224, "?", "?")
    conv(torch.rand(1, 3, 5, 5))
    assert (layer.in_size, layer.out_size) == ([1, 3, 5, 5], [1, 8, 3, 3])
    assert not conv._forward_hooks


def test_sizes_of_nested_inputs_and_outputs_and_of_layers_that_do_not_run() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.idle = nn.Linear(1, 1)
            self.example_input_array = torch.zeros(2, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x, extra=("text", [x]))

    summary = summarize(Outer())
    assert summary.in_sizes == [[[2, 4], ["?", [[2, 4]]]], "?"]
    assert summary.out_sizes == [{"out": [2, 3], "hidden": [[2, 8]]}, "?"]


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


def test_parameters_of_which_no_process_has_the_whole() -> None:
    """Sharded parameters are counted by the shapes of their placeholders, and no forward is run."""
    module = nn.Sequential(nn.Linear(3, 4))
    module.example_input_array = torch.ones(1, 3)
    whole = {id(p): torch.empty(p.shape, device="meta") for p in module.parameters()}
    expected = str(summarize(nn.Sequential(nn.Linear(3, 4))))
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    assert str(summarize(module, placeholders=whole)) == expected
