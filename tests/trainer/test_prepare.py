"""What `Accelerator.prepare` accepts and returns, and how `free_memory` releases it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, CombinedLoader, Precision, Strategy, skip_first_batches
from trainkit.data import PreparedLoader
from trainkit.errors import ConfigurationError, DataError, UnsupportedArgumentError
from trainkit.optim.prepared import PreparedOptimizer, PreparedScheduler

HALF = ("bf16-mixed", "16-mixed", "bf16-true", "16-true")


def accelerator(**arguments: Any) -> Accelerator:
    return Accelerator(**{"strategy": Strategy("cpu"), **arguments})


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)


# What prepare accepts


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_is_returned(order: tuple[int, ...]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    objects = [model, optimizer, loader(), torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    kinds = [nn.Linear, PreparedOptimizer, PreparedLoader, PreparedScheduler]
    prepared = accelerator().prepare(*(objects[i] for i in order))
    assert [type(item) for item in prepared] == [kinds[i] for i in order]
    assert prepared[order.index(0)] is model
    assert prepared[order.index(1)].optimizer is optimizer


def test_one_object_is_returned_as_it_is_and_none_as_none() -> None:
    """One object is returned without a tuple. No object gives an empty tuple."""
    engine = accelerator()
    assert isinstance(engine.prepare(loader()), PreparedLoader)
    assert engine.prepare() == ()


def test_calls_for_one_object_each() -> None:
    """Each object may be prepared in its own call, in any order."""
    engine, model = accelerator(), nn.Linear(2, 1)
    optimizer = engine.prepare(torch.optim.SGD(model.parameters(), lr=1.0))  # before its model
    model = engine.prepare(model)
    engine.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert engine.optimizers == [optimizer.optimizer]


@pytest.mark.parametrize("precision", ["32-true", "64-true", *HALF])
def test_an_optimizer_made_before_stays_valid(precision: str) -> None:
    """An optimizer created before `prepare` still updates the parameters of the prepared model."""
    engine, model = accelerator(precision=Precision(precision, init_scale=8.0)), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared, ready = engine.prepare(model, optimizer)
    before = model.weight.detach().clone()
    engine.backward(prepared(torch.ones(1, 2)).sum())
    assert ready.step()
    assert torch.allclose(model.weight, before - 1.0, atol=0.02)
    assert model.weight is optimizer.param_groups[0]["params"][0]


def test_what_is_prepared_is_returned() -> None:
    engine, model = accelerator(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = engine.prepare(model, optimizer, loader(), scheduler)
    assert all(one is two for one, two in zip(engine.prepare(*prepared), prepared, strict=True))
    again = engine.prepare(optimizer, scheduler, model)
    assert all(one is prepared[place] for one, place in zip(again, (1, 3, 0), strict=True))
    assert (len(engine.optimizers), len(engine.schedulers), len(engine.loaders)) == (1, 1, 1)
    skipping = skip_first_batches(prepared[2], 1)
    assert engine.prepare(skipping) is skipping
    with pytest.raises(ConfigurationError, match=r"batch_weight=\) needs a loader that is not prepared yet"):
        engine.prepare(prepared[2], batch_weight=len)
    engine.free_memory()
    with pytest.raises(ConfigurationError, match=r"argument 1 \(PreparedOptimizer\) has been prepared by another Accelerator"):
        accelerator().prepare(model, prepared[1])
    again = accelerator().prepare(model, model, optimizer, optimizer)
    assert (again[0], again[2]) == (again[1], again[3])
    engine = accelerator(precision="bf16-mixed")
    wrapped = engine.prepare(model)
    assert wrapped is not model
    assert all(engine.prepare(item) is wrapped for item in (wrapped, model))


def test_a_model_for_evaluation_is_not_trained() -> None:
    engine, model = accelerator(precision="bf16-mixed"), nn.Linear(2, 1)
    wrapped = engine.prepare_model(model, evaluation_mode=True)
    assert engine.prepare_model(wrapped, evaluation_mode=True) is wrapped
    with pytest.raises(ConfigurationError, match=r"the Linear was prepared with evaluation_mode=True.*prepare_model\(model\)"):
        engine.prepare(model)


def test_a_loader_that_is_given_twice_is_two_loaders() -> None:
    source = DataLoader(range(8), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    engine = accelerator()
    first, second = engine.prepare(source, source)
    assert first is not second
    pairs = [(one.tolist(), two.tolist()) for one, two in zip(first, second, strict=True)]
    orders = [[number for batch in order for number in batch] for order in zip(*pairs, strict=True)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8))
    assert orders[0] != orders[1]
    engine.free_memory()


@pytest.mark.parametrize(
    "verb",
    [
        lambda engine: engine.backward(torch.ones((), requires_grad=True)),
        lambda engine: engine.clip_grad_norm_([torch.ones(1)], 1.0),
        lambda engine: engine.clip_grad_value_([torch.ones(1)], 1.0),
        lambda engine: engine.unscale_gradients(),
        lambda engine: engine.save_state("folder"),
    ],
)
def test_verbs_before_prepare(verb: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"accelerator\.prepare\(model, optimizer"):
        verb(accelerator())


def test_accumulating_what_was_not_prepared() -> None:
    engine, model = accelerator(), nn.Linear(2, 1)
    with pytest.raises(
        ConfigurationError, match=r"accumulate: Linear has not been prepared.*model = accelerator\.prepare\(model"
    ):
        engine.accumulate(model)
    prepared = accelerator(precision="bf16-mixed")
    with prepared.accumulate(prepared.prepare(model)):
        pass
    with prepared.accumulate():  # without a model there is nothing to check
        pass


def test_where_objects_are_put() -> None:
    """`device_placement` decides whether objects are moved to the device."""
    engine = Accelerator(strategy=Strategy("cpu"), device_placement=False)
    assert engine.prepare(nn.Linear(2, 1)).weight.device == engine.device
    with pytest.raises(ConfigurationError, match=r"device_placement=False, but the model has parameters on meta"):
        engine.prepare(nn.Linear(2, 1, device="meta"))
    with pytest.raises(ConfigurationError, match="device_placement must have one value per object, but has 2 for 1 object"):
        engine.prepare(nn.Linear(2, 1), device_placement=[True, False])
    (batch,) = engine.prepare([{"x": torch.ones(2)}], device_placement=[False])
    assert batch["x"].tolist() == [1.0, 1.0]


def test_one_kind_at_a_time() -> None:
    """`prepare_model`, `prepare_optimizer`, `prepare_data_loader` and `prepare_scheduler` each prepare one kind of object."""
    engine, model = accelerator(), nn.Linear(2, 1)
    prepared = engine.prepare_model(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    assert len(engine.prepare_data_loader(loader())) == 2
    assert isinstance(engine.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1)), PreparedScheduler)
    assert prepared is model
    with pytest.raises(ConfigurationError, match="expected a Module, received an SGD"):
        engine.prepare_model(optimizer.optimizer)
    with pytest.raises(UnsupportedArgumentError, match="is not supported: each process reads its own batches"):
        engine.prepare_data_loader([1, 2], slice_fn_for_dispatch=len)  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [3, nn.Linear, object(), TensorDataset(torch.zeros(2))])
def test_what_cannot_be_prepared(thing: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"prepare: argument 1 is an? \w+; expected a model, an optimizer, a loader or a"
    ):
        accelerator().prepare(loader(), thing)


@pytest.mark.parametrize(
    "make", [lambda m: [m], lambda m: (m, loader()), lambda m: {"model": m}, lambda m: "model", lambda m: [loader()]]
)
def test_objects_are_given_one_by_one(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Pass the objects one by one: prepare\(model, optimizer, loader\)"):
        accelerator().prepare(make(nn.Linear(2, 1)))


def test_what_failed_can_be_tried_again_without_what_was_wrong() -> None:
    """After `prepare` has failed, its valid objects can be prepared in another call."""
    engine, model = accelerator(split_batches=True), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for wrong in ({"model": model}, 3, iter([1])):  # the last one cannot be split
        with pytest.raises(ConfigurationError):
            engine.prepare(model, optimizer, wrong)
    with pytest.raises(ConfigurationError, match=r"prepare\(batch_weight=\)"):
        engine.prepare(model, optimizer, batch_weight=lambda batch: 1.0)
    prepared, ready, nothing, batches = engine.prepare(model, optimizer, None, loader())
    assert prepared is model
    assert ready.optimizer is optimizer
    assert nothing is None
    assert len(batches) == 2


def test_the_rest_of_an_epoch_can_be_prepared() -> None:
    engine = accelerator()
    batches = engine.prepare(engine.skip_first_batches(DataLoader(torch.arange(8), batch_size=2), 3))
    assert isinstance(batches, PreparedLoader)
    assert [x.tolist() for x in batches] == [[6, 7]]
    assert len(list(batches)) == 4


def test_batches_in_a_list_and_several_loaders_in_one_are_loaders() -> None:
    engine = accelerator()
    assert [x.item() for x in engine.prepare([torch.tensor(1.0), torch.tensor(2.0)])] == [1.0, 2.0]
    assert [sorted(batch) for batch in engine.prepare(CombinedLoader({"a": loader(), "b": loader()}))] == [["a", "b"]] * 2


def test_a_list_of_batches_with_its_own_iteration_is_not_read_to_see_what_it_is() -> None:
    class Read(list[Any]):
        most = 0

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__(), 1):
                self.most = max(self.most, number)
                yield batch

    batches = Read(torch.arange(1000.0))
    prepared = accelerator().prepare(batches)
    assert batches.most == 0
    assert len(list(prepared)) == batches.most == 1000


def test_a_prepared_loader_has_what_the_users_has() -> None:
    mine = loader()
    prepared = accelerator().prepare(mine)
    assert prepared.dataset is mine.dataset
    assert (len(prepared), prepared.batch_size) == (2, 2)
    with pytest.raises(AttributeError):
        prepared.no_such_thing


def test_an_iterable_without_a_length() -> None:
    with pytest.raises((TypeError, DataError)):
        len(accelerator().prepare(x for x in [torch.zeros(1)]))


# The optimizer and the scheduler


def stepped(engine: Accelerator) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1)
    prepared, optimizer = engine.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    engine.backward(prepared(torch.ones(1, 2)).sum())
    optimizer.step()
    return model, optimizer


def test_a_prepared_optimizer_is_the_users_in_everything_else() -> None:
    """A prepared optimizer shares the groups, the state and the hooks of the user's optimizer."""
    model, optimizer = stepped(accelerator())
    own = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is own.param_groups
    assert optimizer.state is own.state
    assert optimizer.defaults is own.defaults
    assert repr(optimizer) == f"PreparedOptimizer({own!r})"
    optimizer.param_groups[0]["lr"] = 0.5
    assert own.param_groups[0]["lr"] == 0.5
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra], "lr": 0.3})
    assert own.param_groups[1]["lr"] == 0.3
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]
    assert model.weight in own.state


def test_prepared_optimizer_state_dict_round_trip() -> None:
    """The state of a prepared optimizer loads into torch's optimizer and into another prepared one."""
    _, optimizer = stepped(accelerator())
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    other = torch.optim.Adam(nn.Linear(2, 1).parameters())
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    _, second = stepped(accelerator())
    second.load_state_dict(state)
    (first_average, _), (second_average, _) = ([s["exp_avg"] for s in opt.state.values()] for opt in (optimizer, second))
    assert torch.equal(first_average, second_average)


def test_a_copy_has_its_own_parameters_and_the_same_accelerator() -> None:
    engine = accelerator()
    model, optimizer = stepped(engine)
    scheduler = engine.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    both = copy.deepcopy({"model": model, "optimizer": optimizer})
    twin: Any = both["optimizer"]
    assert isinstance(twin, PreparedOptimizer)
    assert twin.param_groups[0]["params"][0] is both["model"].weight
    assert twin._accelerator is engine
    twin.param_groups[0]["lr"] = 7.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    before = model.weight.detach().clone()
    both["model"].weight.grad = torch.ones(1, 2)
    assert twin.step()
    assert torch.equal(model.weight, before)
    assert isinstance(copy.deepcopy(scheduler), PreparedScheduler)


def test_gradients_may_flow_into_one_optimizers_parameters_only() -> None:
    # toggle_model turns off gradients for the parameters of the other optimizer, and restores them even after an error.
    engine = accelerator()
    models = nn.Linear(2, 1), nn.Linear(2, 1)
    models[1].bias.requires_grad_(False)
    optimizer, _ = engine.prepare(*(torch.optim.SGD(model.parameters(), lr=1.0) for model in models))
    try:
        with optimizer.toggle_model():
            assert [p.requires_grad for m in models for p in m.parameters()] == [True, True, False, False]
            raise KeyError
    except KeyError:
        pass
    assert [p.requires_grad for m in models for p in m.parameters()] == [True, True, True, False]


# The model


class Outputs(nn.Module):
    """Returns its outputs in nested containers, and has a method and an attribute of its own."""

    note = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.layer(x) if scale is None else self.layer(x) * scale
        return {"y": y, "more": [y, (y, 3)], "index": torch.tensor(1)}

    def own(self) -> str:
        return f"{self.note} {self.layer.weight.dtype}"


@pytest.mark.parametrize("precision", HALF)
def test_a_prepared_model_computes_in_its_precision(precision: str) -> None:
    engine, model = accelerator(precision=precision), Outputs()
    prepared = engine.prepare(model)
    outputs = prepared(torch.ones(3, 2))
    half = engine.strategy.precision.autocast_dtype or engine.strategy.precision.parameter_dtype
    expected = torch.float32 if "mixed" in precision else half  # a loss outside autocast must not be computed in half precision
    assert {outputs["y"].dtype, outputs["more"][0].dtype, outputs["more"][1][0].dtype} == {expected}
    assert prepared(torch.ones(3, 2), scale=torch.ones(1))["y"].dtype is expected  # keywords are converted too
    assert outputs["index"].dtype is torch.int64
    assert outputs["more"][1][1] == 3
    exact = model.float()(torch.ones(3, 2))["y"]
    assert torch.allclose(outputs["y"].float(), exact, atol=0.02)
    if precision == "bf16-mixed":
        assert not torch.equal(outputs["y"], exact)  # otherwise nothing was computed in half precision


def test_a_prepared_model_is_the_users_in_everything_else() -> None:
    """A prepared model has the attributes, the methods and the state of the user's model."""
    model = Outputs()
    prepared = accelerator(precision="bf16-mixed").prepare(model)
    assert prepared.own() == "mine torch.float32"
    assert prepared.layer is model.layer
    assert prepared.state_dict().keys() == model.state_dict().keys()
    prepared.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert model.layer.weight.eq(1).all()
    prepared.eval()
    assert not model.layer.training
    assert list(map(id, prepared.parameters())) == list(map(id, model.parameters()))
    with pytest.raises(AttributeError, match="no_such_thing"):
        prepared.no_such_thing


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_unwrapping(precision: str) -> None:
    engine, model = accelerator(precision=precision), nn.Linear(2, 1)
    prepared = engine.prepare(model)
    assert engine.unwrap_model(prepared) is model
    assert engine.unwrap_model(model) is model
    assert engine.unwrap_model(torch.compile(prepared, backend="eager")) is model
    compiled = accelerator(precision=precision).prepare(torch.compile(nn.Linear(2, 1), backend="eager"))
    assert type(engine.unwrap_model(compiled)) is nn.Linear


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_compiled_model_is_trained(precision: str) -> None:
    engine, model = accelerator(precision=precision), nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    prepared, optimizer = engine.prepare(compiled, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    engine.backward(prepared(torch.ones(1, 2)).sum())
    optimizer.step()
    assert torch.equal(model.weight, before - 1.0)


def test_free_memory_forgets_what_was_prepared() -> None:
    engine, model = accelerator(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared, ready, batches = engine.prepare(model, optimizer, loader())
    assert engine.free_memory(prepared, ready, batches) == (None, None, None)
    assert engine.free_memory(prepared) is None
    assert engine.free_memory() == ()
    assert engine.optimizers == []
    assert engine.prepare(model) is model  # it may be prepared again
