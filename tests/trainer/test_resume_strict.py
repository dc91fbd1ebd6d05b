"""Runs that do not match a checkpoint: `strict=False`, and code in error messages that works as it is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saving import Adam, SaveIn, saved, saving
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import Tensor, nn

from trainkit import Accelerator, Trainer
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, StateMismatchError


class Net(TinyModule):
    """A trunk, a layer, and optional parts by which runs differ."""

    def __init__(self, *parts: str, groups: Any = None, schedule: Any = None, kind: Any = torch.optim.Adam) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 1)
        self.parts = nn.ModuleDict({name: nn.Linear(4, 1) for name in parts})
        self.groups, self.schedule, self.kind = groups, schedule, kind

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs)
        return self.layer(hidden) + sum(part(hidden) for part in self.parts.values())

    def configure_optimizers(self) -> Any:
        named = {name: getattr(self, name) for name in ("trunk", "layer", "parts")}
        groups = self.groups or [("trunk", "layer", "parts")]
        made = [
            {"params": [p for name in own for p in named[name].parameters()], "lr": 0.01 * (n + 1)}
            for n, own in enumerate(groups)
        ]
        optimizer = self.kind(made)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


def half(*parts: str, **options: Any) -> Net:
    """Train two optimizer steps, and save to `there`. Returns the module."""
    module = Net(*parts, **options)
    make_trainer(SaveIn("on_train_batch_end", 2), max_steps=2).fit(module, tiny_loader())
    return module


def moments(trainer: Trainer, path: str = "again") -> dict[str, Tensor]:
    """Save a checkpoint, and return the optimizer state in it by name."""
    trainer.save_checkpoint(path)
    return open_checkpoint(path).read().tensors["optimizer"]


def advised_restore(error: BaseException) -> set[str]:
    """The value of `restore=` that an error message advises."""
    found = re.search(r"restore=(\{[^}]*\})", str(error))
    assert found is not None, error
    value = ast.literal_eval(found[1])
    assert isinstance(value, set)
    return value


# --------------------------------------------------------------------------------------------------------- strict=False


def test_a_fit_with_other_parameters(caplog: pytest.LogCaptureFixture) -> None:
    before = half("old")
    there = open_checkpoint("there").read().tensors["optimizer"]
    module = Net("new")
    with pytest.raises(StateMismatchError) as caught:
        make_trainer(max_steps=2).fit(module, tiny_loader(), ckpt_path="there")
    text = str(caught.value)
    assert "missing in the checkpoint (2): parts.new.weight, parts.new.bias" in text
    assert "unexpected in the checkpoint (2): parts.old.weight, parts.old.bias" in text
    advised = re.search(r"strict=False", text)
    assert advised is not None
    caplog.clear()
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, tiny_loader(), ckpt_path="there", strict=False)
    assert trainer.global_step == 2, "the position is restored too"
    assert same(parameters_of(module.trunk), parameters_of(before.trunk))
    assert torch.equal(module.parts["new"].weight, Net("new").parts["new"].weight)
    for said in (
        "not in the checkpoint, so left unchanged: parts.new.weight, parts.new.bias",
        "not in the model, so not loaded: parts.old.weight, parts.old.bias",
        "the optimizer starts without state for these parameters: parts.new.weight, parts.new.bias",
        "optimizer state was not loaded for parameters that this optimizer does not have: parts.old.weight, parts.old.bias",
    ):
        assert said in caplog.text
    here = moments(trainer)
    kept = [key for key in here if "parts" not in key]
    assert len(kept) == 12
    assert all(torch.equal(here[key], there[key]) for key in kept)
    assert not [key for key in here if "parts" in key]

    trainer = make_trainer(max_steps=4)
    trainer.fit(module, tiny_loader(), ckpt_path="there", strict=False)
    steps = {key: int(value) for key, value in moments(trainer).items() if key.endswith("/step")}
    assert steps == {key: 2 if "parts" in key else 4 for key in steps}
    assert len(steps) == 6


def test_what_fits_is_loaded_all_the_same() -> None:
    """If everything matches, a resume with strict=False is exact."""
    expected = Net("old")
    make_trainer(max_steps=4).fit(expected, tiny_loader())
    half("old")
    module = Net("old")
    make_trainer(max_steps=4).fit(module, tiny_loader(), ckpt_path="there", strict=False)
    assert same(parameters_of(module), parameters_of(expected))


def test_other_shapes_are_an_error_always() -> None:
    half("old")
    module = Net("new")
    module.trunk = nn.Linear(4, 3)
    with pytest.raises(
        StateMismatchError, match=r"(?s)trunk\.weight: shape \(4, 4\) in the checkpoint.*or load another checkpoint"
    ):
        make_trainer(max_steps=2).fit(module, tiny_loader(), ckpt_path="there", strict=False)


@pytest.mark.parametrize(
    "before, after, rates",
    [
        ([("trunk", "layer")], [("layer", "trunk"), ("parts",)], [0.01, 0.02]),
        ([("trunk", "layer")], [("parts",), ("trunk", "layer")], [0.01, 0.01]),
        ([("trunk",), ("layer", "parts")], [("layer", "parts"), ("trunk",)], [0.02, 0.01]),
        ([("trunk",), ("layer",)], [("trunk", "layer", "parts")], [0.01]),
        ([("trunk", "layer"), ("parts",)], [("trunk", "layer"), ("parts",)], [0.01, 0.02]),
    ],
)
def test_other_groups(before: Any, after: Any, rates: list[float]) -> None:
    """A group gets the options of the saved group that has most of its parameters. State is matched by parameter name."""
    half(*(["old"] if "parts" in before[-1] else []), groups=before)
    there = open_checkpoint("there").read().tensors["optimizer"]
    trainer = make_trainer(max_steps=2)
    trainer.fit(Net("new", groups=after), tiny_loader(), ckpt_path="there", strict=False)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == rates
    here = moments(trainer)
    assert {key for key in here if "parts" not in key} == {key for key in there if "parts" not in key}
    assert all(torch.equal(value, there[key]) for key, value in here.items())


def test_a_schedule_of_other_groups_is_refused_and_the_advice_works() -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    half(schedule=schedule)
    module = Net("new", groups=[("trunk", "layer"), ("parts",)], schedule=schedule)
    before = parameters_of(module)
    with pytest.raises(StateMismatchError, match="the parameter groups of optimizer 0 differ from the saved ones") as caught:
        make_trainer(max_steps=2).fit(module, tiny_loader(), ckpt_path="there", strict=False)
    assert same(parameters_of(module), before)
    parts = advised_restore(caught.value)
    assert parts == {"model", "optimizer", "scaler", "loop", "callbacks", "loggers"}
    trainer = make_trainer(max_steps=4)
    trainer.fit(module, tiny_loader(), ckpt_path="there", strict=False, restore=parts)
    assert trainer.global_step == 4
    again = Net("new", groups=[("trunk", "layer", "parts")], schedule=schedule)
    make_trainer(max_steps=4).fit(again, tiny_loader(), ckpt_path="there", strict=False)  # one group, as in the checkpoint


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluations(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    before = half("old")
    module = Net("new")
    run: Callable[..., Any] = getattr(make_trainer(), verb)
    with pytest.raises(StateMismatchError, match="or load only the matching tensors with strict=False"):
        run(module, tiny_loader(), ckpt_path="there")
    run(module, tiny_loader(), ckpt_path="there", strict=False)
    assert same(parameters_of(module.trunk), parameters_of(before.trunk))
    assert "not in the model, so not loaded: parts.old.weight" in caplog.text


def test_strict_needs_a_checkpoint_and_a_boolean() -> None:
    with pytest.raises(ConfigurationError, match="strict=False need a checkpoint"):
        make_trainer().fit(Net(), tiny_loader(), strict=False)
    with pytest.raises(ConfigurationError, match="strict=False need a checkpoint"):
        make_trainer().validate(Net(), tiny_loader(), strict=False)
    with pytest.raises(ConfigurationError, match="strict must be True or False, not 'no'"):
        make_trainer().fit(Net(), tiny_loader(), ckpt_path="auto", strict="no")


def test_an_own_loop(caplog: pytest.LogCaptureFixture) -> None:
    def prepared(module: Net) -> Any:
        accelerator = Accelerator()
        return accelerator, *accelerator.prepare(module, torch.optim.Adam(module.parameters(), lr=0.1))

    accelerator, model, optimizer = prepared(Net("old"))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.save_state("state")
    accelerator, model, optimizer = prepared(Net("new"))
    with pytest.raises(StateMismatchError, match="strict=False"):
        accelerator.load_state("state")
    accelerator.load_state("state", strict=False)
    assert "the optimizer starts without state for these parameters: parts.new.weight" in caplog.text
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.save_state("after")
    held = open_checkpoint("after").read().tensors["optimizer"]
    assert int(held["0/trunk.weight/step"]) == 2
    assert int(held["0/parts.new.weight/step"]) == 1


# ---------------------------------------------------------------------------------------------- advice that can be pasted


def one(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def another(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


WITHOUT_OPTIMIZER = {"model", "scaler", "loop", "callbacks", "loggers"}
CHANGED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "another optimizer": ({"kind": torch.optim.SGD, "schedule": one}, WITHOUT_OPTIMIZER),
    "other groups": ({"groups": [("trunk",), ("layer",)], "schedule": one}, WITHOUT_OPTIMIZER),
    "another schedule": ({"schedule": another}, WITHOUT_OPTIMIZER | {"optimizer"}),
    "no schedule": ({}, WITHOUT_OPTIMIZER | {"optimizer"}),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_the_message_says_can_be_pasted(change: str) -> None:
    """The value of `restore=` in the error message works."""
    half(schedule=one)
    options, expected = CHANGED[change]
    module = Net(**options)
    before = parameters_of(module)
    with pytest.raises(StateMismatchError) as caught:
        make_trainer(max_steps=4).fit(module, tiny_loader(), ckpt_path="there")
    assert same(parameters_of(module), before)
    parts = advised_restore(caught.value)
    assert parts == expected
    trainer = make_trainer(max_steps=4)
    trainer.fit(module, tiny_loader(), ckpt_path="there", restore=parts)
    assert trainer.global_step == 4
    with pytest.raises(StateMismatchError) as caught:  # what the user has excluded already stays excluded
        make_trainer(max_steps=4).fit(
            Net(**options), tiny_loader(), ckpt_path="there", restore=expected | {"scheduler", "optimizer"} - {"scaler"}
        )
    assert advised_restore(caught.value) == expected


def test_parameters_in_another_order_go_by_name() -> None:
    class Reordered(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([*self.layer.parameters(), *self.trunk.parameters()], lr=0.01)

    half()
    there = open_checkpoint("there").read().tensors["optimizer"]
    said = "(?s)in a different order.*or load only the matching parameters with strict=False. Or restore everything except"
    with pytest.raises(StateMismatchError, match=said):
        make_trainer(max_steps=2).fit(Reordered(), tiny_loader(), ckpt_path="there")
    trainer = make_trainer(max_steps=2)
    trainer.fit(Reordered(), tiny_loader(), ckpt_path="there", strict=False)
    assert same(moments(trainer), there)


def test_two_optimizers_where_there_was_one() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=0.1) for part in (self.trunk, self.layer)]

    half()
    with pytest.raises(StateMismatchError, match="contains 1 optimizers, but this run has 2") as caught:
        make_trainer(max_steps=4).fit(Two(), tiny_loader(), ckpt_path="there")
    trainer = make_trainer(max_steps=4)
    trainer.fit(Two(), tiny_loader(), ckpt_path="there", restore=advised_restore(caught.value))
    assert trainer.global_step == 4


def test_state_that_an_optimizer_refuses() -> None:
    class Refusing(torch.optim.Adam):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not mine")

    Refusing.__name__ = "Adam"
    half()
    module = Net(kind=Refusing)
    with pytest.raises(StateMismatchError, match="load_state_dict failed: ValueError: not mine") as caught:
        make_trainer(max_steps=4).fit(module, tiny_loader(), ckpt_path="there")
    make_trainer(max_steps=4).fit(module, tiny_loader(), ckpt_path="there", restore=advised_restore(caught.value))


def test_a_malformed_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are intact, but the saved description of the optimizer is wrong."""
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.state.training_objects.capture_optimizer", _malformed)
        half()
    with pytest.raises(CorruptCheckpointError, match="the description of optimizer 0 is malformed") as caught:
        make_trainer(max_steps=4).fit(Net(), tiny_loader(), ckpt_path="there")
    make_trainer(max_steps=4).fit(Net(), tiny_loader(), ckpt_path="there", restore=advised_restore(caught.value))


def _malformed(*args: Any) -> Any:
    from trainkit.state.optimizer import OptimizerState

    groups = [{"parameters": ["layer.weight", "layer.weight"], "options": {}}]
    return OptimizerState(described={"class": "Adam", "groups": groups})


def test_weights_only() -> None:
    trainer = saved()
    trainer.save_checkpoint("weights", weights_only=True)
    with pytest.raises(CheckpointError, match="is a weights-only checkpoint") as caught:
        saving().fit(Adam(), tiny_loader(), ckpt_path="weights")
    saving().fit(Adam(), tiny_loader(), ckpt_path="weights", restore=advised_restore(caught.value))
    with pytest.raises(CheckpointError, match="is a weights-only checkpoint") as caught:
        Accelerator().load_state("weights")
    accelerator = Accelerator()
    accelerator.prepare(Adam())
    accelerator.load_state("weights", restore=advised_restore(caught.value))

    saving(default_root_dir="only").fit(Adam(), tiny_loader())
    for path in Path("only/version_0/checkpoints").glob("step-*"):
        path.rename(path.with_name("." + path.name))
    trainer.save_checkpoint("only/version_0/checkpoints/weights", weights_only=True)
    with pytest.raises(CheckpointError, match="contains weights-only checkpoints") as caught:
        saving(default_root_dir="only").fit(Adam(), tiny_loader(), ckpt_path="last")
    named = re.search(r"ckpt_path='([^']+)', restore", str(caught.value))
    assert named is not None
    saving(default_root_dir="only").fit(Adam(), tiny_loader(), ckpt_path=named[1], restore=advised_restore(caught.value))


def test_a_checkpoint_of_an_own_loop_in_a_trainer_and_the_other_way() -> None:
    def prepared(*more: Any) -> Accelerator:
        accelerator, module = Accelerator(), Net()
        accelerator.prepare(module, module.configure_optimizers(), *more)
        return accelerator

    prepared(tiny_loader()).save_state("loop")
    with pytest.raises(CheckpointError, match="was saved by your own training loop") as caught:
        make_trainer(max_steps=4).fit(Net(), tiny_loader(), ckpt_path="loop")
    make_trainer(max_steps=4).fit(Net(), tiny_loader(), ckpt_path="loop", restore=advised_restore(caught.value))
    half()
    with pytest.raises(StateMismatchError, match="contains 0 loaders, but there are 1 here") as caught:
        prepared(tiny_loader()).load_state("there")
    prepared(tiny_loader()).load_state("there", restore=advised_restore(caught.value))
    other = Accelerator()
    module = Net()
    other.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), tiny_loader())
    with pytest.raises(StateMismatchError, match="it belongs to Adam, but this run has SGD") as caught:
        other.load_state("loop")
    assert advised_restore(caught.value) == {"model", "scaler", "loaders", "registered"}
    other.load_state("loop", restore=advised_restore(caught.value))
