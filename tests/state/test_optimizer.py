"""Every optimizer of torch: the state is restored bit for bit, and the following steps are identical."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import differences, frozen_copy, restore_model, restore_optimizer, through_json, unchanged
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import StateMismatchError, UnsavableError
from trainkit.optim.parameter_names import parameter_names
from trainkit.state.model import capture_model
from trainkit.state.optimizer import capture_optimizer, plan_optimizer

WHAT = "the checkpoint step-4"


class Net(nn.Module):
    """A bag of embeddings and two layers; `idle` never gets a gradient."""

    def __init__(self, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=sparse, dtype=dtype)
        self.first = nn.Linear(4, 5, dtype=dtype)
        self.last = nn.Linear(5, 3, bias=False, dtype=dtype)
        self.idle = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.nothing = nn.Parameter(torch.ones(0, 3, dtype=dtype))

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.words(words).mean(1)))) * self.scale + self.nothing.sum()


def matrices(net: Net) -> list[nn.Parameter]:
    return [net.first.weight, net.last.weight, net.idle.weight]


def everything(net: Net) -> list[nn.Parameter]:
    return list(net.parameters())


def two_groups(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [net.first.weight, net.last.weight], "lr": 0.01},
        {"params": [net.first.bias, net.scale, net.idle.weight], "lr": 0.003, "weight_decay": 0.1},
    ]


Make = Callable[[Net], Optimizer]
optim = torch.optim
CASES: dict[str, Make] = {
    "SGD": lambda net: optim.SGD(everything(net), 0.1),
    "SGD momentum": lambda net: optim.SGD(everything(net), 0.1, momentum=0.9),
    "SGD nesterov, groups": lambda net: optim.SGD(two_groups(net), 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda net: optim.Adam(everything(net), 0.01),
    "Adam, groups": lambda net: optim.Adam(two_groups(net), 0.01, betas=(0.8, 0.95)),
    "Adam, tensor lr": lambda net: optim.Adam(everything(net), torch.tensor(0.01)),
    "Adam amsgrad": lambda net: optim.Adam(everything(net), 0.01, amsgrad=True),
    "AdamW": lambda net: optim.AdamW(everything(net), 0.01),
    "AdamW foreach": lambda net: optim.AdamW(everything(net), 0.01, foreach=True),
    "AdamW fused": lambda net: optim.AdamW(everything(net), 0.01, fused=True),
    "AdamW named": lambda net: optim.AdamW(list(net.named_parameters()), 0.01),
    "Adagrad": lambda net: optim.Adagrad(everything(net), 0.1, lr_decay=0.1),
    "Adadelta": lambda net: optim.Adadelta(everything(net), 1.0),
    "Adamax": lambda net: optim.Adamax(everything(net), 0.01),
    "RMSprop": lambda net: optim.RMSprop(everything(net), 0.01, momentum=0.9, centered=True),
    "Rprop": lambda net: optim.Rprop(everything(net), 0.01),
    "ASGD": lambda net: optim.ASGD(everything(net), 0.01, t0=2),
    "NAdam": lambda net: optim.NAdam(everything(net), 0.01),
    "RAdam": lambda net: optim.RAdam(everything(net), 0.01),
    "Adafactor": lambda net: optim.Adafactor(two_groups(net), 0.01),
    "Muon": lambda net: optim.Muon(matrices(net), 0.01),
    "SparseAdam": lambda net: optim.SparseAdam([net.words.weight], 0.01),
    "LBFGS": lambda net: optim.LBFGS(everything(net), 0.1, max_iter=3, history_size=4),
    "LBFGS wolfe": lambda net: optim.LBFGS(everything(net), max_iter=2, line_search_fn="strong_wolfe"),
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    net = Net(sparse=name == "SparseAdam", dtype=dtype)
    return net, CASES[name](net)


def train(net: Net, optimizer: Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(7, (6, 3), generator=generator)
        targets = torch.randint(3, (6,), generator=generator)

        def closure(words: Tensor = words, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(words).float(), targets)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())  # type: ignore[union-attr]
    return losses


def saved(net: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, torch.dtype], Any]:
    """Tensors and description of the optimizer's state, dtypes, and state of the module, as read from a checkpoint."""
    state = capture_optimizer(optimizer, 0, parameter_names([net]))
    model = frozen_copy(vars(capture_model(net)))
    dtypes = {name: tensor.dtype for name, tensor in model["tensors"].items()}
    return frozen_copy(state.tensors), through_json(state.described), dtypes, model


def load(net: nn.Module, optimizer: Optimizer, stored: Any) -> list[str]:
    from trainkit.state.model import ModelState

    tensors, described, dtypes, model = stored
    notices = restore_optimizer(optimizer, 0, parameter_names([net]), tensors, described, dtypes, WHAT)
    return notices + restore_model(net, ModelState(**model), what=WHAT)


def whole(net: nn.Module, optimizer: Optimizer) -> Any:
    names = parameter_names([net])
    state = {names[id(k)] if isinstance(k, Tensor) else k: v for k, v in optimizer.state.items()}
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    return frozen_copy({"state": state, "groups": groups})


def test_every_optimizer_of_torch_has_a_case() -> None:
    found = {name for name, kind in vars(optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
    assert found - {"Optimizer"} == {name.split()[0].rstrip(",") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_state_and_further_steps_are_bit_identical(name: str) -> None:
    net, optimizer = build(name)
    train(net, optimizer, range(4))
    stored, before = saved(net, optimizer), whole(net, optimizer)
    other, resumed = build(name, seed=1)
    train(other, resumed, range(50, 52))  # the previous state must not matter
    assert load(other, resumed, stored) == []
    assert differences(before, whole(other, resumed)) == []
    losses = train(net, optimizer, range(4, 7))
    assert differences(losses, train(other, resumed, range(4, 7))) == []
    assert differences(whole(net, optimizer), whole(other, resumed)) == []
    assert differences(dict(net.state_dict()), dict(other.state_dict())) == []


@pytest.mark.parametrize("name", ["Adam", "LBFGS", "SGD momentum"])
def test_before_the_first_step(name: str) -> None:
    net, optimizer = build(name)
    stored = saved(net, optimizer)
    other, resumed = build(name, seed=1)
    train(other, resumed, range(2))
    load(other, resumed, stored)
    assert differences(train(net, optimizer, range(3)), train(other, resumed, range(3))) == []


def test_what_is_stored_is_copied_on_load_and_not_on_capture() -> None:
    net, optimizer = build("Adam")
    train(net, optimizer, range(1))
    state = capture_optimizer(optimizer, 0, parameter_names([net]))
    slot = optimizer.state[net.first.weight]["exp_avg"]
    assert state.tensors["0/first.weight/exp_avg"].data_ptr() == slot.data_ptr()
    stored = saved(net, optimizer)
    tensors = frozen_copy(stored[0])
    other, resumed = build("Adam", 1)
    load(other, resumed, stored)
    train(other, resumed, range(2))
    assert differences(tensors, stored[0]) == []


def test_keys_and_irregular_slots() -> None:
    net, optimizer = build("Adafactor")
    train(net, optimizer, range(1))
    state = capture_optimizer(optimizer, 3, parameter_names([nn.Linear(1, 1), net]))
    assert "3/model_1/first.weight/row_var" in state.tensors
    assert set(state.irregular) == {
        f"3/model_1/{name}.weight/{slot}" for name in ("first", "last") for slot in ("row_var", "col_var")
    }
    assert not any("idle" in key for key in state.tensors)


def test_types_of_options_are_restored() -> None:
    net, optimizer = build("Adam, tensor lr")
    other, resumed = build("Adam, tensor lr", 1)
    resumed.param_groups[0]["lr"] = torch.tensor(0.5)
    load(other, resumed, saved(net, optimizer))
    group = resumed.param_groups[0]
    assert isinstance(group["lr"], Tensor)
    assert torch.equal(group["lr"], torch.tensor(0.01))
    assert group["betas"] == (0.9, 0.999)
    assert isinstance(group["betas"], tuple)


def test_options_of_how_it_computes_are_those_of_this_run() -> None:
    # options of the implementation, such as fused, are not restored from the checkpoint
    net, optimizer = build("AdamW fused")
    train(net, optimizer, range(2))
    other, resumed = build("AdamW", 1)
    notices = load(other, resumed, saved(net, optimizer))
    assert notices == ["group 0 of the optimizer keeps fused=None (saved: True)"]
    assert resumed.param_groups[0]["fused"] is None
    train(other, resumed, range(1))


# ------------------------------------------------------------------------------------------------------------ dtypes


def test_slots_follow_their_parameter_and_others_keep_their_dtype() -> None:
    net, optimizer = build("NAdam")
    train(net, optimizer, range(2))
    optimizer.state[net.first.weight]["exp_avg_sq"] = optimizer.state[net.first.weight]["exp_avg_sq"].double()
    before = whole(net, optimizer)["state"]["first.weight"]
    other, resumed = build("NAdam", dtype=torch.bfloat16)
    notices = load(other, resumed, saved(net, optimizer))
    slots = resumed.state[other.first.weight]
    assert slots["exp_avg"].dtype == torch.bfloat16
    assert torch.equal(slots["exp_avg"], before["exp_avg"].bfloat16())
    for slot in ("exp_avg_sq", "step", "mu_product"):
        assert differences(slots[slot], before[slot]) == []
    assert any("tensors of optimizer state were cast from float32 to bfloat16" in text for text in notices)
    assert any("tensors were cast from float32 to bfloat16" in text for text in notices)


def test_state_of_another_dtype_than_its_parameter_keeps_it() -> None:
    """`load_state_dict` of torch would cast these tensors to the parameter's dtype."""
    net, optimizer = build("Adam", dtype=torch.bfloat16)
    train(net, optimizer, range(1))
    for slots in optimizer.state.values():
        slots["exp_avg"] = slots["exp_avg"].float() + 1e-5
        slots["codes"] = torch.arange(4, dtype=torch.uint8)
        slots["note"] = "plain"
        slots["nested"] = {"deep": torch.ones(2), "text": ["a", "bc"]}
    before = whole(net, optimizer)
    other, resumed = build("Adam", 1, dtype=torch.bfloat16)
    load(other, resumed, saved(net, optimizer))
    assert differences(before, whole(other, resumed)) == []


def test_a_complex_parameter() -> None:
    def make() -> tuple[nn.ParameterList, Optimizer]:
        net = nn.ParameterList([torch.tensor([1 + 2j, 3j])])
        return net, optim.Adam(net.parameters(), 0.1)

    def step(net: nn.ParameterList, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        net[0].abs().pow(2).sum().backward()
        optimizer.step()

    (net, optimizer), (other, resumed) = make(), make()
    step(net, optimizer)
    load(other, resumed, saved(net, optimizer))
    assert differences(whole(net, optimizer), whole(other, resumed)) == []
    step(net, optimizer)
    step(other, resumed)
    assert differences(whole(net, optimizer), whole(other, resumed)) == []


def test_channels_last_state_has_the_strides_of_its_parameter() -> None:
    net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = optim.Adam(net.parameters(), 0.1)
    net(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    other = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    resumed = optim.Adam(other.parameters(), 0.1)
    tensors, *rest = saved(net, optimizer)
    load(other, resumed, ({k: t.contiguous() for k, t in tensors.items()}, *rest))
    assert resumed.state[other.weight]["exp_avg"].stride() == other.weight.stride()
    assert differences(whole(net, optimizer), whole(other, resumed)) == []


# ------------------------------------------------------------------------------------------------------------ groups


def test_a_group_that_was_added_during_training() -> None:
    net = Net()
    optimizer = optim.AdamW([net.first.weight, net.first.bias], 0.01)
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": [net.last.weight, net.scale], "lr": 0.5, "betas": (0.7, 0.8)})
    train(net, optimizer, range(2, 4))
    other = Net()
    resumed = optim.AdamW([other.first.weight, other.first.bias], 0.01)
    notices = load(other, resumed, saved(net, optimizer))
    assert notices == ["parameter group 1 was added to the optimizer, as in the saved run: last.weight, scale"]
    assert resumed.param_groups[1]["betas"] == (0.7, 0.8)
    assert differences(whole(net, optimizer), whole(other, resumed)) == []
    assert differences(train(net, optimizer, range(4, 6)), train(other, resumed, range(4, 6))) == []


def test_a_group_added_to_an_optimizer_with_names() -> None:
    net, other = Net(), Net()
    optimizer, resumed = (optim.SGD(list(n.first.named_parameters()), 0.1, momentum=0.9) for n in (net, other))
    optimizer.add_param_group({"params": list(net.last.named_parameters())})
    train(net, optimizer, range(1))
    load(other, resumed, saved(net, optimizer))
    assert resumed.param_groups[1]["param_names"] == ["last.weight"]
    train(other, resumed, range(1))


@pytest.mark.parametrize(
    "groups, expected",
    [
        (
            lambda n: [{"params": [n.last.weight]}],
            ["in the checkpoint: first.weight, first.bias", "only in this run: last.weight"],
        ),
        (lambda n: [{"params": [n.first.bias, n.first.weight]}], ["in a different order: first.weight, first.bias in the"]),
        (
            lambda n: [{"params": [n.first.weight, n.first.bias]}, {"params": [n.last.weight]}, {"params": [n.scale]}],
            ["group 2 is not in the checkpoint: scale"],
        ),
        (lambda n: [{"params": [n.last.weight]}, {"params": [n.first.weight, n.first.bias]}], ["group 0: ", "group 1: "]),
        (
            lambda n: [{"params": [n.first.weight, n.first.bias, n.last.weight]}],
            ["only in this run", "last.weight (in another"],
        ),
    ],
)
def test_other_groups_are_all_listed_and_nothing_changes(groups: Callable[[Net], Any], expected: list[str]) -> None:
    net = Net()
    optimizer = optim.Adam([{"params": [net.first.weight, net.first.bias]}, {"params": [net.last.weight]}], 0.1)
    train(net, optimizer, range(1))
    stored = saved(net, optimizer)
    other = Net()
    resumed = optim.Adam(groups(other), 0.2)
    train(other, resumed, range(1))
    with unchanged(other, resumed), pytest.raises(StateMismatchError, match=WHAT) as caught:
        load(other, resumed, stored)
    for part in expected:
        assert part in str(caught.value)


def test_another_class_and_other_shapes() -> None:
    # an optimizer of another class, or parameters of other shapes, are an error, and nothing is changed
    net, optimizer = build("Adam")
    train(net, optimizer, range(1))
    stored = saved(net, optimizer)
    other, resumed = build("SGD momentum", 1)
    train(other, resumed, range(1))
    with unchanged(other, resumed), pytest.raises(StateMismatchError, match="it belongs to Adam, but this run has SGD"):
        load(other, resumed, stored)
    other, resumed = build("Adam", 1)
    other.first.weight.data = torch.ones(2, 2)
    other.last.weight.data = torch.ones(1)
    with unchanged(other, resumed), pytest.raises(StateMismatchError) as caught:
        load(other, resumed, stored)
    assert "first.weight: exp_avg has shape (5, 4), but the parameter has shape (2, 2)" in str(caught.value)
    assert "last.weight: exp_avg_sq has shape (3, 5), but the parameter has shape (1,)" in str(caught.value)


def test_a_plan_changes_nothing() -> None:
    net, optimizer = build("Adam")
    train(net, optimizer, range(2))
    tensors, described, dtypes, _ = saved(net, optimizer)
    other, resumed = build("Adam", 1)
    with unchanged(other, resumed):
        load_it = plan_optimizer(resumed, 0, parameter_names([other]), tensors, described, dtypes, WHAT)
    load_it()
    assert differences(whole(net, optimizer)["state"], whole(other, resumed)["state"]) == []


def test_an_unknown_parameter_and_one_twice_are_refused() -> None:
    net = Net()
    with pytest.raises(UnsavableError, match=r"optimizer 2 \(SGD\) contains a parameter of shape \(3,\)"):
        capture_optimizer(optim.SGD([nn.Parameter(torch.ones(3))], 0.1), 2, parameter_names([net]))
    optimizer = optim.SGD([net.scale], 0.1)
    optimizer.param_groups[0]["params"].append(net.scale)
    with pytest.raises(UnsavableError, match="contains scale more than once"):
        capture_optimizer(optimizer, 0, parameter_names([net]))
