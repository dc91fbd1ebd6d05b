"""`BaseFinetuning` and `BackboneFinetuning`: what is frozen, learning rates, exact resume, several processes, refusals."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Watching, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import nn
from torch.optim import lr_scheduler

from trainkit import Callback
from trainkit.callbacks import BackboneFinetuning, BaseFinetuning
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MissingMethodError, ModuleError, OptimizerError


class Pretrained(TinyModule):
    """A backbone of two linear layers and BatchNorm, and a head. The optimizer gets what is trainable."""

    scheduler: Any = None
    everything = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 1)
        del self.layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))

    def configure_optimizers(self) -> Any:
        own = [p for p in self.parameters() if p.requires_grad or self.everything]
        optimizer = torch.optim.AdamW(own, lr=0.02)
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])


def fit(*callbacks: Callback, module: Any = None, epochs: int = 5, trainer: Any = None, **arguments: Any) -> Any:
    module = Pretrained() if module is None else module
    made = make_trainer(*callbacks, max_epochs=epochs, **(trainer or {}))
    made.fit(module, tiny_loader(24, batch_size=8, shuffle=True), **arguments)
    return module


def rates(*callbacks: Callback, **options: Any) -> list[list[float]]:
    """The learning rates of the groups in each epoch."""
    seen: list[list[float]] = []

    class Reads(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    fit(*callbacks, Reads(), **options)
    return seen


def halved(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


# ------------------------------------------------------------------------------------------------- static methods


def test_flatten_modules() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)

    scaled, relu = Scaled(), nn.ReLU()
    assert BaseFinetuning.flatten_modules(nn.Sequential(scaled, relu)) == [scaled, scaled.layer, relu]
    assert BaseFinetuning.flatten_modules([[scaled], nn.ModuleDict({"a": relu})]) == [scaled, scaled.layer, relu]
    assert list(BaseFinetuning.filter_params([scaled, scaled.layer])) == [scaled.scale, *scaled.layer.parameters()]


def test_freezing_with_and_without_batch_norms() -> None:
    norm, linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
    both = nn.Sequential(norm, linear)
    BaseFinetuning.freeze(both)
    assert [p.requires_grad for p in both.parameters()] == [True, True, False, False]
    assert norm.track_running_stats
    BaseFinetuning.freeze(both, train_bn=False)
    assert list(BaseFinetuning.filter_params(both)) == []
    assert not norm.track_running_stats
    assert list(BaseFinetuning.filter_params(both, train_bn=False, requires_grad=False)) == list(linear.parameters())
    BaseFinetuning.make_trainable(both)
    assert norm.track_running_stats
    assert len(list(BaseFinetuning.filter_params(both))) == 4


def test_the_group_that_unfreezing_adds() -> None:
    def added(**options: Any) -> Any:
        head, body = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        body[0].weight = nn.Parameter(head.weight.detach().clone())  # equal, but another parameter
        BaseFinetuning.freeze(body, train_bn=False)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
        BaseFinetuning.unfreeze_and_add_param_group(body, optimizer, **options)
        assert all(p.requires_grad for p in body.parameters())
        return optimizer.param_groups[1]["lr"], len(optimizer.param_groups[1]["params"])

    assert added() == (0.05, 4)
    assert added(initial_denom_lr=5.0) == (0.1, 4)
    assert added(lr=0.3, train_bn=False) == (0.3, 2)


def test_parameters_that_the_optimizer_has() -> None:
    """A callback that adds a group itself gets the warning of one that calls `unfreeze_and_add_param_group`."""
    head, body = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    assert BaseFinetuning.filter_on_optimizer(optimizer, body.parameters()) == [*body.parameters()]
    with pytest.warns(TrainkitWarning, match=r"SGD already has parameters of those that are added now\..*SGD\(filter\("):
        assert BaseFinetuning.filter_on_optimizer(optimizer, [head.weight, body.weight]) == [body.weight]


# ---------------------------------------------------------------------------------------------- learning rates of a run


def test_the_backbone_is_frozen_until_its_epoch() -> None:
    watching, before = Watching(), parameters_of(Pretrained())
    fit(BackboneFinetuning(2), watching, epochs=3)
    frozen = [after["backbone.0.weight"].equal(before["backbone.0.weight"]) for _, _, after in watching.after]
    assert frozen == [True] * 6 + [False] * 3
    assert not watching.after[0][2]["backbone.1.weight"].equal(before["backbone.1.weight"])  # BatchNorm is trained


@pytest.mark.parametrize("everything", [False, True])  # whether the optimizer has all parameters from the start
@pytest.mark.parametrize("resumes", [False, True])
def test_batch_norms_that_are_not_trained(everything: bool, resumes: bool) -> None:
    """Their parameters and statistics stay as they are, before and after the backbone is unfrozen, in train mode."""

    class Modes(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.train()
            seen.append([module.backbone[1].training, *(p.requires_grad for p in module.backbone.parameters())])

    def module() -> Pretrained:
        made = Pretrained()
        made.everything = everything
        made.backbone[1].running_mean += 1.0  # of the data that it was pretrained on
        return made

    seen: list[list[bool]] = []
    start, callback = parameters_of(module()), BackboneFinetuning(2, train_bn=False)
    told = pytest.warns(TrainkitWarning, match="already has parameters") if everything else nullcontext()
    with told:
        if resumes:
            fit(callback, SaveIn("on_train_batch_end", 8), Modes(), module=module(), epochs=4)
            seen.clear()
            callback = BackboneFinetuning(2, train_bn=False)
        trained = fit(callback, Modes(), module=module(), epochs=4, **({"ckpt_path": "there"} if resumes else {}))
    # the parameters are those of a linear layer, of the norm, and of a linear layer
    frozen, unfrozen = [True] + [False] * 6, [True] + [True] * 2 + [False] * 2 + [True] * 2
    assert seen[0] == (unfrozen if resumes else frozen)
    assert seen[-1] == unfrozen
    after = parameters_of(trained)
    assert not after["backbone.0.weight"].equal(start["backbone.0.weight"])
    assert same(
        {name: value for name, value in after.items() if name.startswith("backbone.1.")},
        {name: value for name, value in start.items() if name.startswith("backbone.1.")},
    )


def test_learning_rates() -> None:
    assert rates(BackboneFinetuning(1)) == [[0.02], [0.02, 0.002], [0.02, 0.004], [0.02, 0.008], [0.02, 0.016]]
    assert rates(BackboneFinetuning(1, lambda epoch: float(epoch), backbone_initial_lr=0.001), epochs=4) == [
        [0.02],
        [0.02, 0.001],
        [0.02, 0.003],
        [0.02, 0.012],
    ]
    half = BackboneFinetuning(0, backbone_initial_ratio_lr=0.5)
    assert rates(half, epochs=3) == [[0.02, 0.01], [0.02, 0.02], [0.02, 0.02]]
    above = BackboneFinetuning(0, backbone_initial_ratio_lr=0.5, should_align=False)
    assert rates(above, epochs=3) == [[0.02, 0.01], [0.02, 0.02], [0.02, 0.04]]


def test_batch_norms_outside_of_the_new_group() -> None:
    class HeadOnly(Pretrained):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    sizes = {}
    for train_bn in (True, False):
        watching, module = Watching(), HeadOnly()
        fit(BackboneFinetuning(0, train_bn=train_bn), watching, module=module, epochs=1)
        sizes[train_bn] = watching.after[0][2]["backbone.1.weight"].equal(watching.after[-1][2]["backbone.1.weight"])
    assert sizes == {True: False, False: True}


def test_verbose(caplog: Any) -> None:
    fit(BackboneFinetuning(1, backbone_initial_lr=0.00123, verbose=True, rounding=4), epochs=2)
    assert "epoch 1: learning rate 0.02, of the backbone 0.0012." in caplog.text


def test_an_optimizer_that_has_the_backbone_already() -> None:
    """The backbone stays in its group, whose learning rate is not changed."""
    module = Pretrained()
    module.everything = True
    with pytest.warns(TrainkitWarning, match="AdamW already has parameters that are unfrozen now"):
        seen = rates(BackboneFinetuning(1), module=module, epochs=3)
    assert seen == [[0.02], [0.02], [0.02]]
    assert not same(parameters_of(module.backbone), parameters_of(Pretrained().backbone))


# --------------------------------------------------------------------------------------------------------------- resume


class Stepwise(BaseFinetuning):
    """Unfreezes the last layer of the backbone in epoch 1 and the others in epoch 3; counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.epochs.append(epoch)
        optimizer.param_groups[0]["lr"] *= 0.9
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[3], optimizer)
        if epoch == 3:
            self.unfreeze_and_add_param_group(pl_module.backbone[:3], optimizer, lr=0.001)


def scheduled() -> Any:
    module = Pretrained()
    module.scheduler = halved
    return module


PLACES = [("on_train_batch_end", 2), ("on_train_batch_end", 5), ("on_train_batch_end", 9), ("on_train_batch_end", 11)]
PLACES += [("on_train_epoch_end", 1), ("on_train_epoch_end", 3), ("on_train_epoch_start", 4), ("on_train_end", 1)]


@pytest.mark.parametrize("kind", [BackboneFinetuning, Stepwise])
def test_a_resumed_run_is_bit_identical(kind: Any) -> None:
    def make() -> Any:
        return kind() if kind is Stepwise else kind(1, lambda epoch: 1.5)

    expected = parameters_of(fit(make(), module=scheduled()))
    for hook, number in PLACES:
        fit(make(), SaveIn(hook, number), module=scheduled())
        module = fit(make(), module=scheduled(), ckpt_path="there")
        assert same(parameters_of(module), expected), (hook, number)
        assert all(p.requires_grad for p in module.parameters())
        assert module.backbone[1].track_running_stats


def test_an_epoch_is_not_finetuned_twice() -> None:
    fit(Stepwise(), SaveIn("on_train_batch_end", 5))
    again = Stepwise()
    fit(again, ckpt_path="there")
    assert again.epochs == [2, 3, 4]


@pytest.mark.parametrize("before, now, groups", [(4, 1, [1, 2, 2]), (1, 4, [2, 2, 2])])
def test_another_epoch_after_a_resume(before: int, now: int, groups: list[int]) -> None:
    """A backbone whose epoch is over by the new argument is unfrozen in the next one; one that is unfrozen stays so."""
    fit(BackboneFinetuning(before), SaveIn("on_train_batch_end", 7))
    assert [len(found) for found in rates(BackboneFinetuning(now), ckpt_path="there")] == groups[1:]


def test_frozen_batch_norms_after_a_resume() -> None:
    """While they are frozen, their running statistics stay as they are, before and after the resume."""
    start = parameters_of(Pretrained())["backbone.1.running_mean"]
    fit(Stepwise(), SaveIn("on_train_batch_end", 2))
    module = fit(Stepwise(), epochs=3, ckpt_path="there")
    assert module.backbone[1].running_mean.equal(start)
    assert not module.backbone[1].track_running_stats


def test_a_second_fit_begins_frozen() -> None:
    callback, module = BackboneFinetuning(1), Pretrained()
    trainer = make_trainer(callback, max_epochs=2)
    trainer.fit(module, tiny_loader(8))
    assert callback.state_dict()["previous_backbone_lr"] == 0.002
    watching = Watching()
    trainer.callbacks.append(watching)
    trainer.fit(module, tiny_loader(8))
    assert watching.after[0][2]["backbone.0.weight"].equal(watching.after[1][2]["backbone.0.weight"])
    trainer.validate(module, tiny_loader(8), verbose=False)
    assert all(p.requires_grad for p in module.parameters())


# ---------------------------------------------------------------------------------------------------- several processes


def on_processes() -> list[dict[str, Any]]:
    """The parameters after a run, and after runs that were interrupted in epochs 0, 2 and 3 and resumed."""
    ddp = {"strategy": "ddp"}
    found = [parameters_of(fit(Stepwise(), module=scheduled(), trainer=ddp))]
    for hook, number in (("on_before_zero_grad", 2), ("on_before_zero_grad", 6), ("on_train_epoch_end", 4)):
        fit(Stepwise(), SaveIn(hook, number), module=scheduled(), trainer=ddp)
        found.append(parameters_of(fit(Stepwise(), module=scheduled(), trainer=ddp, ckpt_path="there")))
    return found


def test_on_two_processes() -> None:
    """The ranks agree although one of them has fewer batches, and a resumed run is bit-identical."""
    first, second = run_world(2, on_processes)
    assert all(same(found, first[0]) for found in first)
    assert all(same(found, first[0]) for found in second)
    assert not same(first[0], parameters_of(fit(Stepwise(), module=scheduled(), epochs=1)))


# -------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused(trainer: Any, module: Any) -> None:
    class Empty(BaseFinetuning):
        pass

    class HalfEmpty(Empty):
        def freeze_before_training(self, pl_module: Any) -> None:
            pass

    with pytest.raises(MissingMethodError, match="Empty has no freeze_before_training. Define: def freeze_before"):
        fit(Empty())
    with pytest.raises(MissingMethodError, match="HalfEmpty has no finetune_function. Define: def finetune_function"):
        fit(HalfEmpty())
    with pytest.raises(ModuleError, match="TinyModule has no such layer"):
        fit(BackboneFinetuning(), module=TinyModule())
    with pytest.raises(ConfigurationError, match=r"unfreeze_backbone_at_epoch=\) must be an integer ≥ 0"):
        BackboneFinetuning(-1)
    trainer.strategy.shards_optimizer_state = True
    with pytest.raises(ConfigurationError, match="BackboneFinetuning changes which .* Use strategy='ddp'"):
        BackboneFinetuning().setup(trainer, module, "fit")


def warm_up_and_cosine(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


@pytest.mark.parametrize("scheduler", [lambda o: lr_scheduler.CosineAnnealingLR(o, 2), warm_up_and_cosine])
def test_schedulers_that_get_a_learning_rate_for_the_new_group(scheduler: Any) -> None:
    """Cosine schedules that restart, or begin, after the group was added; also in a run that is resumed."""

    def scheduled_so() -> Pretrained:
        module = Pretrained()
        module.scheduler = scheduler
        return module

    whole = fit(Stepwise(), module=scheduled_so(), epochs=6)
    assert [len(found) for found in rates(Stepwise(), module=scheduled_so(), epochs=6)] == [1, 2, 2, 3, 3, 3]
    for number in (5, 8):
        fit(Stepwise(), SaveIn("on_train_batch_end", number), module=scheduled_so(), epochs=6)
        assert same(parameters_of(whole), parameters_of(fit(Stepwise(), module=scheduled_so(), epochs=6, ckpt_path="there")))


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=99),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9)], []),
    ],
)
def test_schedulers_with_a_rule_for_each_group(scheduler: Any) -> None:
    """`BackboneFinetuning` refuses them before the first step, if it unfreezes the backbone at all."""
    module = Pretrained()
    module.scheduler = scheduler
    with pytest.raises(OptimizerError, match="has a rule for each group .* such as StepLR"):
        fit(BackboneFinetuning(4), module=module)
    assert module.trainer.global_step == 0
    fit(BackboneFinetuning(4), module=module, epochs=1)
    with pytest.raises(OptimizerError, match="UnfreezeSome adds a parameter group"):
        fit(type("UnfreezeSome", (Stepwise,), {})(), module=module)


def test_several_optimizers() -> None:
    class Two(Pretrained):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.head.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(ModuleError, match="there are 2 optimizers"):
        fit(BackboneFinetuning(1), module=Two())
