"""What `configure_optimizers` may return, when schedulers are stepped, and which return values are errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from trainkit import Callback, TrainModule
from trainkit.console import TrainkitWarning
from trainkit.errors import MissingMethodError, MissingMetricError, OptimizerError


class Returning(TinyModule):
    """Has two layers; `configure_optimizers` returns `configure(self)`."""

    def __init__(self, configure: Callable[[Any], Any], automatic: bool = True) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)
        self.configure = configure
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        return None

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def step_lr(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.0)


def with_scheduler(returned: Callable[[Any, Any], Any], kind: Callable[[Any], Any] = step_lr) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        return returned(optimizer, kind(optimizer))

    return configure


# ---------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    "configure, schedulers",
    [
        (sgd, []),
        (lambda m: [sgd(m)], []),
        (lambda m: (sgd(m),), []),
        (lambda m: ([sgd(m)], []), []),
        (lambda m: {"optimizer": sgd(m)}, []),
        (lambda m: {"optimizer": sgd(m), "lr_scheduler": None}, []),
        (lambda m: [{"optimizer": sgd(m)}], []),
        (with_scheduler(lambda o, s: ([o], [s])), [("epoch", 1)]),
        (with_scheduler(lambda o, s: [[o], [s]]), [("epoch", 1)]),
        (with_scheduler(lambda o, s: ((o,), (s,))), [("epoch", 1)]),
        (with_scheduler(lambda o, s: ([o], [{"scheduler": s, "interval": "step"}])), [("step", 1)]),
        (with_scheduler(lambda o, s: ([o], {"scheduler": s, "interval": "step"})), [("step", 1)]),
        (with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": s}), [("epoch", 1)]),
        (with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": [s]}), [("epoch", 1)]),
        (with_scheduler(lambda o, s: ({"optimizer": o, "lr_scheduler": s},)), [("epoch", 1)]),
        (
            with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step", "frequency": 3}}),
            [("step", 3)],
        ),
        (
            with_scheduler(lambda o, s: ([o], [s, {"scheduler": LambdaLR(o, lambda n: 1.0), "interval": "step"}])),
            [("epoch", 1), ("step", 1)],
        ),
    ],
)
def test_forms(configure: Callable[[Any], Any], schedulers: list[tuple[str, int]]) -> None:
    trainer = make_trainer()
    trainer.fit(Returning(configure), tiny_loader(8))
    assert [type(optimizer) for optimizer in trainer.optimizers] == [SGD]
    assert [(config.interval, config.frequency) for config in trainer.lr_scheduler_configs] == schedulers
    assert all(config.optimizer_index == 0 for config in trainer.lr_scheduler_configs)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    "returned, owners",
    [
        (lambda a, b: [a, b], []),
        (lambda a, b: (a, b), []),
        (lambda a, b: ([a, b], []), []),
        (lambda a, b: ([a, b], [step_lr(b), step_lr(a)]), [1, 0]),
        (lambda a, b: [{"optimizer": a}, {"optimizer": b, "lr_scheduler": step_lr(b)}], [1]),
        (lambda a, b: ({"optimizer": a, "lr_scheduler": {"scheduler": step_lr(a), "name": "first"}}, {"optimizer": b}), [0]),
    ],
)
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_forms_with_several_optimizers(returned: Callable[[Any, Any], Any], owners: list[int], automatic: bool) -> None:
    trainer = make_trainer()
    configure = lambda m: returned(SGD([m.layer.weight], 0.1), Adam([m.layer.bias, m.other.weight]))  # noqa: E731
    trainer.fit(Returning(configure, automatic), tiny_loader(8))
    assert [type(optimizer) for optimizer in trainer.optimizers] == [SGD, Adam]
    assert [config.optimizer_index for config in trainer.lr_scheduler_configs] == owners


def test_everything_that_a_scheduler_may_say() -> None:
    # all keys of a scheduler dict are in trainer.lr_scheduler_configs
    described = {"interval": "step", "frequency": 2, "monitor": "val_loss", "strict": False, "name": "mine"}
    trainer = make_trainer()
    configure = with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, **described}})
    trainer.fit(Returning(configure), tiny_loader(8))
    (config,) = trainer.lr_scheduler_configs
    assert {name: getattr(config, name) for name in described} == described
    assert config.reduce_on_plateau is False


def test_a_plateau_scheduler_needs_no_monitor_under_manual_optimization() -> None:
    """Users step the scheduler themselves, with any value."""

    class Manual(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, loss = self.optimizers(), self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step(1.0)

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.layer)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    trainer = make_trainer()
    trainer.fit(Manual(), tiny_loader(12))
    assert trainer.lr_scheduler_configs[0].monitor is None
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)  # after two steps without an improvement


def test_the_monitor_next_to_the_scheduler() -> None:
    # 'monitor' may also be a key next to 'lr_scheduler'
    configure = with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": s, "monitor": "val_loss"}, plateau)
    trainer = make_trainer()
    trainer.fit(Returning(configure), tiny_loader(8), tiny_loader(4))
    assert trainer.lr_scheduler_configs[0].monitor == "val_loss"
    assert trainer.lr_scheduler_configs[0].reduce_on_plateau


# -------------------------------------------------------------------------------------------------------------- refused


def made_elsewhere(module: Any) -> Any:
    optimizer = sgd(module)
    return [optimizer], [step_lr(sgd(module))]


@pytest.mark.parametrize(
    "configure, words",
    [
        (lambda m: "adam", ["must return an optimizer", "'adam'"]),
        (lambda m: [], ["must return an optimizer", "a list of ()"]),
        (lambda m: SGD, ["must return an optimizer", "SGD"]),
        (lambda m: [sgd(m), "x"], ["a list of (SGD, str)"]),
        (with_scheduler(lambda o, s: (o, s)), ["a tuple of (SGD, StepLR)", "([optimizers], [schedulers])"]),
        (with_scheduler(lambda o, s: [o, {"scheduler": s}]), ["a list of (SGD, dict)"]),
        (with_scheduler(lambda o, s: ([o], [s], [])), ["a tuple of (list, list, list)"]),
        (with_scheduler(lambda o, s: ([s], [o])), ["a tuple of (list, list)"]),
        (lambda m: {"lr_scheduler": None}, ["'optimizer' must be a torch optimizer, not None"]),
        (lambda m: {"optimizer": "adam"}, ["'optimizer' must be a torch optimizer", "'adam'"]),
        (
            lambda m: {"optimizer": sgd(m), "lr_schedulers": None},
            ["unknown key 'lr_schedulers'", "Did you mean 'lr_scheduler'"],
        ),
        (lambda m: [{"optimizer": sgd(m), "frequency": 2}], ["'frequency' of an optimizer", "automatic_optimization = False"]),
        (
            with_scheduler(lambda o, s: ([o], [{"scheduler": s, "intervall": "step"}])),
            ["'intervall'", "Did you mean 'interval'"],
        ),
        (with_scheduler(lambda o, s: ([o], [{"interval": "step"}])), ["a dict needs 'scheduler'"]),
        (with_scheduler(lambda o, s: ([o], [{"scheduler": s, "interval": "batch"}])), ["'step' or 'epoch', not 'batch'"]),
        (with_scheduler(lambda o, s: ([o], [{"scheduler": s, "frequency": 0}])), ["frequency", "≥ 1, not 0"]),
        (with_scheduler(lambda o, s: ([o], [{"scheduler": s, "frequency": True}])), ["frequency", "not True"]),
        (with_scheduler(lambda o, s: ([o], [{"scheduler": s, "frequency": 1.5}])), ["frequency", "not 1.5"]),
        (with_scheduler(lambda o, s: ([o], [7])), ["expected an object with step(), got 7"]),
        (with_scheduler(lambda o, s: ([o], [s]), plateau), ["ReduceLROnPlateau needs the metric", "'monitor': 'val_loss'"]),
        (made_elsewhere, ["StepLR was created for an optimizer that configure_optimizers did not return"]),
        (
            lambda m: [sgd(m.other), Adam([m.layer.weight]), SGD([m.layer.bias, m.layer.weight], 0.1)],
            ["'layer.weight' belongs to Adam (optimizer 1) and to SGD (optimizer 2)", "automatic_optimization = False"],
        ),
        (
            lambda m: [sgd(m.layer), torch.optim.LBFGS(m.other.parameters())],
            ["LBFGS computes the loss again in its step", "Return LBFGS alone", "automatic_optimization = False"],
        ),
        (lambda m: SGD(nn.Linear(3, 7).parameters(), 0.1), ["SGD has 2 parameters that are not the module's", "(7, 3)"]),
        (lambda m: SGD([*m.parameters(), torch.zeros(5, requires_grad=True)], 0.1), ["has 1 parameter that", "(5,)"]),
    ],
)
def test_wrong_forms(configure: Callable[[Any], Any], words: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        make_trainer().fit(Returning(configure), tiny_loader(8))
    for word in words:
        assert word in str(caught.value)


def test_a_scheduler_without_step_under_manual_optimization() -> None:
    """Only the module's own code advances it; a checkpoint has its state."""

    class Own:
        state = 0

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]

    class Steps(Returning):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step()

    own = Own()
    configure = with_scheduler(lambda o, s: ([o], [own]))
    trainer = make_trainer()
    trainer.fit(Steps(configure, automatic=False), tiny_loader(8))
    own.state = 7
    trainer.save_checkpoint("saved")
    own.state = 0
    make_trainer(max_epochs=2).fit(Steps(configure, automatic=False), tiny_loader(8), ckpt_path="saved")
    assert own.state == 7
    with pytest.raises(OptimizerError, match=r"expected an object with step\(\)"):
        make_trainer().fit(Returning(configure), tiny_loader(8))


def test_missing_configure_optimizers() -> None:
    # fit needs configure_optimizers
    class Without(TrainModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(MissingMethodError, match=r"Without has no configure_optimizers.*torch.optim.AdamW"):
        make_trainer().fit(Without(), tiny_loader())


def test_an_optimizer_of_layers_that_were_replaced() -> None:
    class Replaced(TinyModule):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.layer = nn.Linear(4, 1)
            return optimizer

    with pytest.raises(OptimizerError, match="created before layers were replaced has the old parameters"):
        make_trainer().fit(Replaced(), tiny_loader())


# --------------------------------------------------------------------------------------------------- when they advance


class Rates(Callback):
    """Records the learning rate at each micro-batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates(configure: Callable[[Any], Any], batches: int = 4, **arguments: Any) -> list[float]:
    noted = Rates()
    make_trainer(noted, **arguments).fit(Returning(configure), tiny_loader(4 * batches), tiny_loader(4))
    return noted.rates


def described(**options: Any) -> Callable[[Any], Any]:
    return with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, **options}})


def test_by_epoch() -> None:
    assert rates(described(), max_epochs=3) == [0.1] * 4 + [0.05] * 4 + [0.025] * 4
    assert rates(described(frequency=2), max_epochs=4) == [0.1] * 8 + [0.05] * 8


def test_by_step() -> None:
    assert rates(described(interval="step")) == [0.1, 0.05, 0.025, 0.0125]
    assert rates(described(interval="step", frequency=3), max_epochs=2) == [0.1] * 3 + [0.05] * 3 + [0.025] * 2


def test_by_step_counts_optimizer_steps() -> None:
    # interval="step" counts optimizer steps, not micro-batches
    assert rates(described(interval="step"), accumulate_grad_batches=2, batches=5) == [0.1, 0.1, 0.05, 0.05, 0.025]


def test_an_epoch_that_is_cut_off_does_not_count() -> None:
    # max_steps ends the second epoch early, so a scheduler by epoch is not stepped for it
    module = Returning(described())
    make_trainer(max_epochs=-1, max_steps=6).fit(module, tiny_loader(16))
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.05


def test_as_many_steps_as_estimated() -> None:
    """A schedule over `estimated_stepping_batches` is long enough: OneCycleLR would raise an error if stepped too often."""

    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        total = module.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=total), "interval": "step"}]

    seen = rates(configure, batches=5, max_epochs=3, accumulate_grad_batches=2)
    assert max(seen) == pytest.approx(0.1, rel=0.1)
    assert len(set(seen)) == 9


def test_a_schedulers_own_step_can_be_replaced() -> None:
    calls = []

    class Own(Returning):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            calls.append((type(scheduler).__name__, metric))

    make_trainer(max_epochs=2).fit(Own(described()), tiny_loader(8))
    assert calls == [("StepLR", None)] * 2


def test_a_scheduler_that_is_not_torchs() -> None:
    class Custom:
        def __init__(self) -> None:
            self.steps = 0

        def step(self) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {}

    custom = Custom()
    make_trainer(max_epochs=2).fit(Returning(lambda m: ([sgd(m)], [{"scheduler": custom, "interval": "step"}])), tiny_loader(8))
    assert custom.steps == 4


# -------------------------------------------------------------------------------------------------------------- plateau


class Scripted(Returning):
    """Logs the values in `script`, one in each validation."""

    def __init__(self, configure: Callable[[Any], Any], script: list[float]) -> None:
        super().__init__(configure)
        self.script = list(script)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("by_step", float(self.global_step))
        self.log("of_epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_metric", self.script[0] if self.trainer.sanity_checking else self.script.pop(0))


def following(monitor: str, **options: Any) -> Callable[[Any], Any]:
    return with_scheduler(
        lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "monitor": monitor, **options}}, plateau
    )


def plateau_rates(module: Scripted, validation: bool = True, **arguments: Any) -> list[float]:
    noted = Rates()
    loaders = [tiny_loader(16)] + [tiny_loader(4)] * validation
    make_trainer(noted, **arguments).fit(module, *loaders)
    return noted.rates


def test_a_plateau_by_epoch() -> None:
    module = Scripted(following("val_metric"), [3.0, 2.0, 5.0, 5.0])
    assert plateau_rates(module, max_epochs=4)[::4] == [0.1, 0.1, 0.1, 0.05]
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.025


def test_a_plateau_by_epoch_follows_a_metric_of_training() -> None:
    module = Scripted(following("of_epoch"), [])
    assert plateau_rates(module, validation=False, max_epochs=4)[::4] == [0.1, 0.1, 0.05, 0.025]


def test_a_plateau_every_other_epoch() -> None:
    module = Scripted(following("val_metric", frequency=2), [3.0, 4.0, 5.0])
    assert plateau_rates(module, max_epochs=6, check_val_every_n_epoch=2)[::4] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


def test_a_plateau_by_step_follows_each_validation() -> None:
    module = Scripted(following("val_metric", interval="step"), [3.0, 4.0])
    assert plateau_rates(module, val_check_interval=2) == [0.1, 0.1, 0.1, 0.1]
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.05


def test_a_plateau_by_step_without_validation_follows_each_update() -> None:
    """The metric never falls, so the learning rate is halved at every optimizer step after the first."""
    module = Scripted(following("by_step", interval="step"), [])
    assert plateau_rates(module, validation=False) == [0.1, 0.1, 0.05, 0.025]
    module = Scripted(following("by_step", interval="step", frequency=2), [])
    assert plateau_rates(module, validation=False, max_epochs=2) == [0.1] * 4 + [0.05] * 2 + [0.025] * 2


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_plateau_uses_each_value_once(interval: str) -> None:
    """A metric that always improves never lowers the rate, though only every second epoch has a validation."""

    class Saving(Scripted):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.trainer.save_checkpoint("middle")

    options = {"monitor": "val_metric", "interval": interval, "strict": False}
    without = pytest.warns(TrainkitWarning, match=r"No validation was due yet: check_val_every_n_epoch=2\. Logged so far")
    with without if interval == "epoch" else nullcontext():
        improves = Saving(following(**options), [4.0, 3.0, 2.0, 1.0])
        assert plateau_rates(improves, max_epochs=8, check_val_every_n_epoch=2) == [0.1] * 32
    # the checkpoint knows that its last value has been used: only that of epoch 3, which is worse, lowers the rate
    noted, module = Rates(), Scripted(following(**options), [5.0, 1.0, 0.5])
    trainer = make_trainer(noted, max_epochs=8, check_val_every_n_epoch=2)
    trainer.fit(module, tiny_loader(16), tiny_loader(4), ckpt_path="middle")
    assert noted.rates == [0.1] * 8 + [0.05] * 16


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_plateau_follows_a_metric_of_training_that_is_logged_rarely(interval: str) -> None:
    """Once an epoch, in its first step: by epoch it counts in each epoch, by step in these steps only."""

    class Rare(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.log("rare", float(self.current_epoch))
            return self.loss(batch)

    module = Rare(following("rare", interval=interval), [])
    seen = plateau_rates(module, validation=False, max_epochs=4)
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert seen[-1] == 0.1 * 0.5 ** (2 if interval == "epoch" else 3)  # the last epoch ends after its last step


def test_a_plateau_that_waits_for_a_validation() -> None:
    module = Scripted(following("val_metric"), [3.0])
    words = (
        r"the scheduler ReduceLROnPlateau monitors 'val_metric', which was not logged. No validation was due yet: "
        r'check_val_every_n_epoch=2. .* To advance .* after each validation, .*"interval": "step".*"frequency": 2, to'
    )
    with pytest.raises(MissingMetricError, match=words):
        plateau_rates(module, max_epochs=4, check_val_every_n_epoch=2)
    for fix in ({"interval": "step"}, {"frequency": 2}):  # both work
        module = Scripted(following("val_metric", **fix), [3.0, 2.0])
        assert plateau_rates(module, max_epochs=4, check_val_every_n_epoch=2) == [0.1] * 16


def test_the_sanity_check_moves_no_plateau() -> None:
    # the metric of the sanity check is not passed to ReduceLROnPlateau
    module = Scripted(following("val_metric", interval="step"), [3.0])
    plateau_rates(module, num_sanity_val_steps=1)
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_reduce_on_plateau_for_a_scheduler_of_ones_own() -> None:
    seen = []

    class Custom:
        def step(self, metric: Any) -> None:
            seen.append(float(metric))

        def state_dict(self) -> dict[str, Any]:
            return {}

    configure = lambda m: ([sgd(m)], [{"scheduler": Custom(), "reduce_on_plateau": True, "monitor": "val_metric"}])  # noqa: E731
    plateau_rates(Scripted(configure, [3.0, 4.0]), max_epochs=2)
    assert seen == [3.0, 4.0]


def test_a_monitor_that_was_never_logged() -> None:
    module = Scripted(following("val_metrik"), [3.0])
    with pytest.raises(MissingMetricError) as caught:
        plateau_rates(module)
    for word in ("ReduceLROnPlateau monitors 'val_metrik'", "by_step", "val_metric", "Did you mean 'val_metric'"):
        assert word in str(caught.value)


def test_a_monitor_that_may_be_missing() -> None:
    module = Scripted(following("nothing", strict=False), [3.0])
    with pytest.warns(TrainkitWarning, match="'nothing', which was not logged.*The scheduler is not advanced"):
        assert plateau_rates(module) == [0.1] * 4
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0


def test_cosine_by_epoch_reaches_its_end() -> None:
    configure = with_scheduler(lambda o, s: ([o], [s]), lambda o: CosineAnnealingLR(o, T_max=4))
    seen = rates(configure, max_epochs=4)[::4]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor([0.1, 0.0853553, 0.05, 0.0146447]))
