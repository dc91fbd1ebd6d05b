"""`Strategy`: its device, its precision, and the operations of the base class."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import nn

from trainkit import Accelerator, Precision, Strategy, Trainer
from trainkit.errors import ConfigurationError, ModuleError, TrainkitError
from trainkit.strategies import DDPStrategy, ZeROStrategy

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


# The device


@no_cuda
def test_auto_is_what_there_is() -> None:
    expected = "mps" if torch.backends.mps.is_available() else "cpu"
    assert Strategy().device == torch.device(expected)
    assert Trainer(logger=False, max_epochs=1).device == torch.device(expected)


def test_cpu() -> None:
    strategy = Strategy("cpu")
    assert (strategy.device, strategy.rank, strategy.local_rank, strategy.world_size) == (torch.device("cpu"), 0, 0, 1)
    assert strategy.is_main_process
    assert repr(strategy) == "Strategy(device='cpu', precision='32-true')"
    assert strategy.generators() == ()


@pytest.mark.parametrize("device", ["gpuu", "cpu:x", 3.5, None, "cuda:-7"])
def test_an_unknown_device(device: Any) -> None:
    with pytest.raises(ConfigurationError, match="unknown device .* Use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'"):
        Strategy(device)


def test_a_device_that_is_not_supported() -> None:
    with pytest.raises(ConfigurationError, match="device 'meta' is not supported. Use 'cpu', 'cuda' or 'mps'"):
        Strategy("meta")


@no_cuda
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="torch sees no CUDA device. Use accelerator='cpu', or install a CUDA build"):
        Strategy("cuda")


# The precision


def test_the_precision_may_be_given_to_either() -> None:
    assert make_trainer(strategy=Strategy("cpu", precision="bf16-mixed"), accelerator="auto").precision == "bf16-mixed"
    assert make_trainer(strategy=Strategy("cpu"), accelerator="auto", precision="bf16-mixed").precision == "bf16-mixed"
    both = make_trainer(strategy=Strategy("cpu", precision=64), accelerator="auto", precision="64-true")
    assert both.precision == "64-true"


@pytest.mark.parametrize("make", [Accelerator, lambda **kw: make_trainer(accelerator="auto", **kw)])
def test_two_precisions_contradict_each_other(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"two precisions: Strategy\(precision='64-true'\) and precision='32-true'"):
        make(strategy=Strategy("cpu", precision="64-true"), precision="32-true")


def test_a_strategy_does_not_change_under_the_trainer_that_has_it() -> None:
    """A strategy object of one Trainer cannot be used by another Trainer with another precision."""
    shared = Strategy("cpu")
    first = make_trainer(strategy=shared, accelerator="auto", precision="bf16-mixed")
    with pytest.raises(ConfigurationError, match="two precisions"):
        make_trainer(strategy=shared, accelerator="auto", precision="32-true")
    assert first.precision == "bf16-mixed"


def test_a_precision_object_keeps_its_options() -> None:
    chosen = Precision("16-mixed", init_scale=4.0)
    trainer = make_trainer(precision=chosen)
    assert trainer.precision_plugin is chosen
    assert chosen.scaler is not None
    assert chosen.scaler.get_scale() == 4.0


class OnlyDouble(Strategy):
    """A strategy that supports few precisions."""

    name = "double"
    supported_precisions = ("64-true", "32-true")


def test_a_precision_that_the_strategy_does_not_offer() -> None:
    with pytest.raises(
        ConfigurationError, match="precision='bf16-true' does not work with OnlyDouble, which supports 64-true, 32-true"
    ):
        OnlyDouble("cpu", precision="bf16-true")
    with pytest.raises(ConfigurationError, match="which supports"):
        make_trainer(strategy=OnlyDouble("cpu"), accelerator="auto", precision="16-mixed")


# As an argument of Trainer and Accelerator


def test_a_strategy_object_runs_a_fit() -> None:
    class Counting(Strategy):
        steps = 0

        def optimizer_step(self, optimizer: Any, closure: Any = None) -> bool:
            self.steps += 1
            return super().optimizer_step(optimizer, closure)

    strategy = Counting("cpu")
    torch.manual_seed(3)
    one = TinyModule()
    make_trainer(strategy=strategy, accelerator="auto").fit(one, tiny_loader())
    torch.manual_seed(3)
    other = TinyModule()
    make_trainer().fit(other, tiny_loader())
    assert strategy.steps == 4
    assert same(parameters_of(one), parameters_of(other))


@pytest.mark.parametrize("make", [Accelerator, make_trainer])
@pytest.mark.parametrize("thing", [None, 1, Strategy, object()])
def test_what_is_no_strategy(make: Any, thing: Any) -> None:
    if make is Accelerator and thing is None:
        assert type(Accelerator(strategy=None, cpu=True).strategy) is Strategy  # None is the default
        return
    with pytest.raises(ConfigurationError, match="strategy must be a name .*or a Strategy object, not"):
        make(strategy=thing)


@no_cuda
def test_the_device_of_strategy_and_accelerator_must_agree() -> None:
    with pytest.raises(TrainkitError):
        make_trainer(strategy=Strategy("cpu"), accelerator="gpu")
    assert make_trainer(strategy=Strategy("cpu"), accelerator="cpu").device.type == "cpu"


# Operations


def test_a_module_is_prepared_in_place() -> None:
    module = TinyModule()
    weight = module.layer.weight
    assert Strategy("cpu", precision="64-true").prepare_module(module) is module
    assert module.layer.weight is weight
    assert weight.dtype is torch.float64


def test_parameters_of_another_dtype_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainkit"):
        Strategy("cpu").prepare_module(TinyModule())
        assert not caplog.messages
        Strategy("cpu").prepare_module(TinyModule().bfloat16())
    assert "does not convert parameters, and some are torch.bfloat16" in caplog.text


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_in_full_precision_a_step_is_the_users_own_method(name: str) -> None:
    """In 32-true, a step calls the user's method directly, also one that was assigned later."""
    module = TinyModule()
    strategy = Strategy("cpu")
    step = strategy.step_function(strategy.prepare_module(module), module, name)
    given = object()
    for answer in ("first", "second"):
        setattr(module, name, lambda *arguments, answer=answer: (*arguments, answer))
        assert step(given, 3) == (given, 3, answer)


@pytest.mark.parametrize("name", ["64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_in_other_precisions_a_step_gets_what_it_needs(name: str) -> None:
    """In other precisions, inputs are converted, and the default dtype is set during the step."""
    seen: list[tuple[Any, ...]] = []

    class Looking(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            inputs, label = batch
            seen.append((inputs.dtype, label.dtype, torch.get_default_dtype(), batch_idx, dataloader_idx))
            return self.layer(inputs)

    module = Looking()
    strategy = Strategy("cpu", precision=name)
    step = strategy.step_function(strategy.prepare_module(module), module, "validation_step")
    outputs = step((torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), 5, 1)
    parameters = strategy.precision.parameter_dtype
    assert seen == [(parameters, torch.int64, parameters, 5, 1)]
    assert outputs.dtype is (strategy.precision.autocast_dtype or parameters)
    assert torch.get_default_dtype() is torch.float32


def test_unwrapping() -> None:
    strategy, module = Strategy("cpu"), TinyModule()
    assert strategy.unwrap(strategy.prepare_module(module)) is module
    assert strategy.unwrap(torch.compile(module, backend="eager")) is module


def test_an_optimizers_state_stays_where_it_is_right() -> None:
    """The state of an optimizer that is on the device already is not copied."""
    module = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = {id(value) for state in optimizer.state.values() for value in state.values()}
    assert Strategy("cpu").prepare_optimizer(optimizer, module) is optimizer
    assert {id(value) for state in optimizer.state.values() for value in state.values()} == before


def test_clipping() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, -4.0])
    assert Strategy("cpu").clip_grad_norm_([parameter], 1.0).item() == 5.0
    assert parameter.grad.tolist() == pytest.approx([0.6, -0.8], rel=1e-5)
    Strategy("cpu").clip_grad_value_([parameter], 0.7)
    assert parameter.grad.tolist() == pytest.approx([0.6, -0.7], rel=1e-5)
    parameter.grad = torch.tensor([3.0, -4.0])
    assert Strategy("cpu").clip_grad_norm_([parameter], 1.0, norm_type=torch.inf).item() == 4.0


def sparse(parameter: nn.Parameter) -> nn.Parameter:
    """With the gradient [0, 3, -4]; the 3 is stored as 1 + 2, as an embedding leaves it for an index that comes twice."""
    parameter.grad = torch.sparse_coo_tensor([[1, 1, 2]], [1.0, 2.0, -4.0], (3,), check_invariants=False)
    return parameter


def test_clipping_of_sparse_gradients() -> None:
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.tensor([12.0])
    parameters = [sparse(nn.Parameter(torch.zeros(3))), other]
    assert Strategy("cpu").clip_grad_norm_(parameters, 1.3).item() == 13.0
    assert [one.grad.to_dense().tolist() for one in parameters] == [
        pytest.approx([0.0, 0.3, -0.4], rel=1e-5),
        pytest.approx([1.2], rel=1e-5),
    ]
    parameters = [sparse(nn.Parameter(torch.zeros(3))), other]
    Strategy("cpu").clip_grad_value_(parameters, 1.0)
    assert [one.grad.to_dense().tolist() for one in parameters] == [[0.0, 1.0, -1.0], [1.0]]


def test_complex_gradients_are_clipped_by_norm_only() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    parameter.grad = torch.tensor([3.0 + 4.0j])
    with pytest.raises(ModuleError, match="gradient_clip_algorithm='norm'"):
        Strategy("cpu").clip_grad_value_([parameter], 1.0)
    assert Strategy("cpu").clip_grad_norm_([parameter], 1.0).item() == 5.0


def test_one_process_is_all_processes() -> None:
    """In a single process, collectives return their input and have no other effect."""
    strategy, module = Strategy("cpu"), nn.BatchNorm1d(1)
    data = {"a": torch.ones(2)}
    assert strategy.all_gather(data) is data
    assert strategy.mean(data["a"]) is data["a"]
    assert strategy.wrap(module) is module
    assert strategy.any_loss(True)
    assert not strategy.any_loss(False)
    module(torch.ones(2, 1)).sum().backward()
    gradient, mean = module.weight.grad, module.running_mean
    strategy.skip_backward(torch.zeros(()))
    strategy.backward(None)
    strategy.reduce_gradients(module.parameters())
    strategy.sync_buffers()
    assert module.weight.grad is gradient
    assert module.running_mean is mean
    strategy.barrier()
    strategy.teardown()


def test_where_nothing_is_compiled_there_is_nothing_to_tell_of_it() -> None:
    """A strategy that compiles nothing has no count of compilations and no hints about them."""
    strategy = Strategy("cpu")
    assert strategy.compilations is None
    assert strategy.compilation_hints() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kind", [Strategy, DDPStrategy, partial(ZeROStrategy, stage=1)])
def test_the_device_is_the_one_that_is_given(kind: Any) -> None:
    assert kind(device="cpu").device == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="device 'cuda': torch sees no"):
        kind(device="cuda")
