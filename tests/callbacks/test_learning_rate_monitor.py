from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import nn

from trainkit import Callback
from trainkit.callbacks import LearningRateMonitor
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def config(index: int, interval: str = "epoch", name: str | None = None) -> Any:
    return SimpleNamespace(optimizer_index=index, interval=interval, name=name)


def attached(trainer: Any, module: Any, optimizers: list[Any], configs: list[Any], **arguments: Any) -> Any:
    trainer.optimizers, trainer.lr_scheduler_configs = optimizers, configs
    callback = LearningRateMonitor(**arguments)
    callback._module = module
    callback.on_fit_start(trainer, module)
    return callback


def test_an_unknown_interval_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'epoch'"):
        LearningRateMonitor(logging_interval="epochs")


def test_a_trainer_without_a_logger_is_an_error(trainer, module) -> None:
    trainer.loggers = []
    with pytest.raises(ConfigurationError, match=r"Trainer\(logger=True\)"):
        LearningRateMonitor().on_fit_start(trainer, module)


def test_without_a_scheduler_it_warns_and_logs_every_step(trainer, module) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.25)
    with pytest.warns(TrainkitWarning, match="no learning rate scheduler"):
        callback = attached(trainer, module, [optimizer], [])
    callback.on_before_optimizer_step(trainer, module, optimizer)
    assert module.logged == {"lr-SGD": 0.25}


def test_names(trainer, module) -> None:
    groups = [{"params": [parameter()]}, {"params": [parameter()], "lr": 0.5}]
    named = [{"params": [parameter()], "name": "encoder"}, {"params": [parameter()], "name": "head"}]
    optimizers = [
        torch.optim.AdamW([parameter()]),
        torch.optim.AdamW(groups),
        torch.optim.SGD(named, lr=0.1),
        torch.optim.SGD([{"params": [parameter()], "name": "all"}], lr=0.1),
        torch.optim.Adam([parameter()]),
        torch.optim.AdamW([parameter()]),
    ]
    callback = attached(trainer, module, optimizers, [config(4, name="warm")])
    assert callback.lr_names == [
        "lr-AdamW",
        "lr-AdamW-1/pg1",
        "lr-AdamW-1/pg2",
        "lr-SGD/encoder",
        "lr-SGD/head",
        "lr-SGD-1/all",
        "warm",
        "lr-AdamW-2",
    ]


def test_a_second_fit_has_names_of_its_own(trainer, module) -> None:
    first = torch.optim.SGD([parameter()])
    callback = attached(trainer, module, [first], [config(0)])
    trainer.optimizers = [torch.optim.Adam([parameter()])]
    callback.on_fit_start(trainer, module)
    assert callback.lr_names == ["lr-Adam"]
    callback.on_before_optimizer_step(trainer, module, first)
    assert module.logged == {}


def test_two_schedulers_of_one_name_are_told_apart(trainer, module) -> None:
    optimizers = [torch.optim.SGD([parameter()]), torch.optim.Adam([parameter()])]
    callback = attached(trainer, module, optimizers, [config(0, name="lr"), config(1, name="lr")])
    assert callback.lr_names == ["lr", "lr-1"]


def test_parameter_groups_of_one_name_are_an_error(trainer, module) -> None:
    groups = [{"params": [parameter()], "name": "a"}, {"params": [parameter()], "name": "a"}]
    with pytest.raises(ConfigurationError, match="have the same name: lr-SGD/a"):
        attached(trainer, module, [torch.optim.SGD(groups)], [config(0)])


@pytest.mark.parametrize(
    "logging_interval, per_step, per_epoch",
    [
        (None, {"lr-SGD": 0.5}, {"lr-Adam": 0.25}),
        ("step", {"lr-SGD": 0.5, "lr-Adam": 0.25}, {}),
        ("epoch", {}, {"lr-SGD": 0.5, "lr-Adam": 0.25}),
    ],
)
def test_intervals(trainer, module, logging_interval: str | None, per_step: Any, per_epoch: Any) -> None:
    optimizers = [torch.optim.SGD([parameter()], lr=0.5), torch.optim.Adam([parameter()], lr=0.25)]
    configs = [config(0, "step"), config(1, "epoch")]
    callback = attached(trainer, module, optimizers, configs, logging_interval=logging_interval)
    trainer.log_every_n_steps = 0
    callback.on_train_epoch_start(trainer, module)
    assert module.logged == per_epoch
    assert not per_epoch or module.options == {"on_step": False, "on_epoch": True}
    module.logged.clear()
    for optimizer in optimizers:
        callback.on_before_optimizer_step(trainer, module, optimizer)
    assert module.logged == per_step
    assert not per_step or module.options == {"on_step": True, "on_epoch": False}


def test_nothing_is_done_between_log_boundaries(trainer, module) -> None:
    optimizer = torch.optim.SGD([parameter()])
    callback = attached(trainer, module, [optimizer], [config(0, "step")])
    trainer.should_log = False
    callback.on_before_optimizer_step(trainer, module, optimizer)
    assert module.logged == {}


def test_momentum_and_weight_decay(trainer, module) -> None:
    optimizers = [
        torch.optim.SGD([parameter()], lr=0.5, momentum=0.875, weight_decay=0.125),
        torch.optim.AdamW([parameter()], lr=0.25, betas=(0.75, 0.5), weight_decay=0.0),
        torch.optim.Adagrad([parameter()], lr=1.0),
    ]
    with pytest.warns(TrainkitWarning, match="Adagrad has no momentum, so 0 is logged"):
        callback = attached(trainer, module, optimizers, [config(0)], logging_interval="step", log_momentum=True)
    callback.log_weight_decay = True
    for optimizer in optimizers:
        callback.on_before_optimizer_step(trainer, module, optimizer)
    assert module.logged == {
        "lr-SGD": 0.5,
        "lr-SGD-momentum": 0.875,
        "lr-SGD-weight_decay": 0.125,
        "lr-AdamW": 0.25,
        "lr-AdamW-momentum": 0.75,
        "lr-AdamW-weight_decay": 0.0,
        "lr-Adagrad": 1.0,
        "lr-Adagrad-momentum": 0.0,
        "lr-Adagrad-weight_decay": 0.0,
    }
    assert callback.lrs == {"lr-SGD": [0.5], "lr-AdamW": [0.25], "lr-Adagrad": [1.0]}
    assert callback.last_momentum_values == {"lr-SGD-momentum": 0.875, "lr-AdamW-momentum": 0.75, "lr-Adagrad-momentum": 0.0}
    assert callback.last_weight_decay_values == {name: value for name, value in module.logged.items() if "decay" in name}


def test_a_prefix_of_all_names(trainer, module) -> None:
    optimizers = [
        torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.5, momentum=0.875, weight_decay=0.125),
        torch.optim.SGD([parameter()], lr=0.25),
        torch.optim.AdamW([parameter()], lr=0.125),
    ]
    options = {"log_momentum": True, "log_weight_decay": True, "logging_interval": "step", "log_key_prefix": "optim/"}
    callback = attached(trainer, module, optimizers, [config(2, name="rate")], **options)
    for optimizer in optimizers:
        callback.on_before_optimizer_step(trainer, module, optimizer)
    names = ["optim/lr-SGD/pg1", "optim/lr-SGD/pg2", "optim/lr-SGD-1", "optim/rate"]
    assert callback.lr_names == list(callback.lrs) == names
    assert {*module.logged} == {f"{name}{end}" for name in names for end in ("", "-momentum", "-weight_decay")}
    with pytest.raises(ConfigurationError, match=r"log_key_prefix=\) must be a text, not 3"):
        LearningRateMonitor(log_key_prefix=3)


class Scheduled(TinyModule):
    """Halves its learning rate, at first 0.5, after each step or after each epoch."""

    def __init__(self, interval: str) -> None:
        super().__init__(learning_rate=0.5)
        self.interval = interval
        self.used: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        optimizer.register_step_pre_hook(lambda own, *_: self.used.append(own.param_groups[0]["lr"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.mark.parametrize("logging_interval", [None, "step"])
def test_a_fit_logs_the_rate_that_each_update_used(make_trainer, logging_interval: str | None) -> None:
    module, trainer = Scheduled("step"), make_trainer(LearningRateMonitor(logging_interval))
    trainer.fit(module, tiny_loader())
    assert module.used == [0.5, 0.25, 0.125, 0.0625]
    assert list(trainer.logger.of("lr-SGD").items()) == list(enumerate(module.used, start=1))
    monitor = trainer.callbacks[0]
    assert (monitor.lrs, monitor.last_momentum_values) == ({"lr-SGD": module.used}, {"lr-SGD-momentum": None})
    trainer.fit(Scheduled("step"), tiny_loader())
    assert monitor.lrs == {"lr-SGD": module.used}  # each fit starts again


def test_a_fit_logs_every_n_steps(make_trainer) -> None:
    module, trainer = Scheduled("step"), make_trainer(LearningRateMonitor(), log_every_n_steps=2)
    trainer.fit(module, tiny_loader())
    assert trainer.logger.of("lr-SGD") == {2: 0.25, 4: 0.0625}


def test_a_fit_logs_the_rate_of_each_window(make_trainer) -> None:
    module, trainer = Scheduled("step"), make_trainer(LearningRateMonitor(), accumulate_grad_batches=2)
    trainer.fit(module, tiny_loader())
    assert trainer.logger.of("lr-SGD") == {1: 0.5, 2: 0.25}


def test_short_epochs_are_logged_at_their_first_step(make_trainer) -> None:
    """Epochs of four steps: 1, 5, 9 and 13 begin one, and 6 and 12 are log boundaries; each step has one row."""
    module, trainer = Scheduled("step"), make_trainer(LearningRateMonitor(), log_every_n_steps=6, max_epochs=4)
    trainer.fit(module, tiny_loader())
    assert trainer.logger.of("lr-SGD") == {step: 0.5**step for step in (1, 5, 6, 9, 12, 13)}
    assert trainer.callbacks[0].lrs["lr-SGD"] == [0.5**step for step in (1, 5, 6, 9, 12, 13)]
    steps = [step for step, row in trainer.logger.rows if "lr-SGD" in row]
    assert steps == [1, 5, 6, 9, 12, 13]


def test_a_short_epoch_that_is_resumed_is_not_logged_again(make_trainer) -> None:
    class Saving(Scheduled):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            if (self.current_epoch, batch_idx) == (1, 1):
                self.trainer.save_checkpoint("middle")

    make_trainer(LearningRateMonitor(), log_every_n_steps=50, max_epochs=2).fit(Saving("step"), tiny_loader())
    trainer = make_trainer(LearningRateMonitor(), log_every_n_steps=50, max_epochs=3)
    trainer.fit(Scheduled("step"), tiny_loader(), ckpt_path="middle")
    assert list(trainer.logger.of("lr-SGD")) == [9]


@pytest.mark.parametrize("logging_interval", [None, "epoch"])
def test_a_fit_logs_the_rate_of_each_epoch(make_trainer, logging_interval: str | None) -> None:
    module, trainer = Scheduled("epoch"), make_trainer(LearningRateMonitor(logging_interval), max_epochs=3)
    trainer.fit(module, tiny_loader())
    assert module.used == [0.5] * 4 + [0.25] * 4 + [0.125] * 4
    assert list(trainer.logger.of("lr-SGD").values()) == [0.5, 0.25, 0.125]


def test_a_fit_without_a_logger_is_refused(make_trainer) -> None:
    with pytest.raises(ConfigurationError, match="needs a logger, but the Trainer has none"):
        make_trainer(LearningRateMonitor(), logger=False).fit(TinyModule(), tiny_loader())


def test_a_trial_run_has_no_logger_and_continues(make_trainer) -> None:
    make_trainer(LearningRateMonitor(), fast_dev_run=True).fit(Scheduled("step"), tiny_loader())


class Adversaries(TinyModule):
    """Two SGD optimizers with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(layer(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> list[Any]:
        return [torch.optim.SGD(layer.parameters(), lr=lr) for layer, lr in ((self.layer, 0.5), (self.other, 0.25))]


def test_a_fit_with_manual_optimization(make_trainer) -> None:
    trainer = make_trainer(LearningRateMonitor(), limit_train_batches=2)
    with pytest.warns(TrainkitWarning, match="no learning rate scheduler"):
        trainer.fit(Adversaries(), tiny_loader())
    assert trainer.logger.of("lr-SGD") == {1: 0.5, 2: 0.5}
    assert trainer.logger.of("lr-SGD-1") == {1: 0.25, 2: 0.25}


def test_a_parameter_group_that_is_added_during_training(make_trainer) -> None:
    """From then on the names are those of a run that begins with two groups, so a resumed run has the same."""

    class Unfreezes(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                module.more = parameter()
                trainer.optimizers[0].add_param_group({"params": [module.more], "lr": 0.125})

    trainer = make_trainer(Unfreezes(), LearningRateMonitor("epoch"), max_epochs=2)
    trainer.fit(Scheduled("epoch"), tiny_loader())
    assert list(trainer.logger.of("lr-SGD").values()) == [0.5]
    assert list(trainer.logger.of("lr-SGD/pg1").values()) == [0.25]
    assert list(trainer.logger.of("lr-SGD/pg2").values()) == [0.125]
