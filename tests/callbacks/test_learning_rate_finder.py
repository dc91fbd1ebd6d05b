"""`LearningRateFinder`: a range test at the beginning of a fit, and never again in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, parameters_of, same
from helpers.worlds.worlds import run_world

from trainkit import Trainer
from trainkit.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError
from trainkit.tuner import Tuner


class Scheduled(TinyModule):
    """A schedule begins at `learning_rate`; records the rates of the steps, and counts trials."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(folder: Path, max_steps: int, ckpt_path: str | None = None, strategy: str = "auto") -> tuple[Any, ...]:
    finder = LearningRateFinder(num_training_steps=30, min_lr=1e-4)
    saver, logger, module = ModelCheckpoint(save_last=True), Memory(), Scheduled()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[finder, saver],
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        logger=logger,
        max_steps=max_steps,
        seed=1,
        strategy=strategy,
    )
    trainer.fit(module, tiny_loader(64, shuffle=True), ckpt_path=ckpt_path)
    return module, finder, logger.rows


def test_optimizer_and_schedule_start_from_the_rate_found(make_trainer: Any) -> None:
    module, finder = Scheduled(), LearningRateFinder(num_training_steps=30, min_lr=1e-4)
    before = parameters_of(module)
    found = Tuner(make_trainer()).lr_find(module, tiny_loader(), num_training=30, min_lr=1e-4, update_attr=False)
    assert same(before, parameters_of(module))
    assert found is not None
    make_trainer(finder, max_steps=3).fit(module, tiny_loader())
    assert finder.optimal_lr is not None
    assert finder.optimal_lr.results == found.results
    assert module.learning_rate == found.suggestion()
    assert module.rates == pytest.approx([module.learning_rate / (1 + step) for step in range(3)])


def test_without_update_the_fit_is_the_same_bit_for_bit(make_trainer: Any) -> None:
    ended = []
    for callbacks in ([], [LearningRateFinder(num_training_steps=30, update_attr=False)]):
        torch.manual_seed(3)
        module = Scheduled()
        trainer = make_trainer(*callbacks, max_epochs=2)
        trainer.fit(module, tiny_loader(64, shuffle=True))
        ended.append((parameters_of(module), trainer.loggers[0].rows, module.learning_rate))
    assert same(ended[0][0], ended[1][0])
    assert ended[0][1:] == ended[1][1:]


def test_a_resumed_run_is_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole, first, rows = fit(tmp_path / "whole", 20)
    torch.manual_seed(3)
    fit(tmp_path / "parts", 7)
    rest, second, later = fit(tmp_path / "parts", 20, "last")
    assert same(parameters_of(whole), parameters_of(rest))
    assert whole.rates[7:] == rest.rates
    assert rows[7:] == later
    assert rest.learning_rate == whole.learning_rate
    assert second.optimal_lr.results == first.optimal_lr.results


def test_a_checkpoint_without_a_result_warns(make_trainer: Any) -> None:
    trainer, module = make_trainer(max_steps=2), Scheduled()
    trainer.fit(module, tiny_loader())
    trainer.save_checkpoint("saved")
    finder = LearningRateFinder()
    with pytest.warns(TrainkitWarning, match="load_from_checkpoint"):
        make_trainer(finder, max_steps=4).fit(module, tiny_loader(), ckpt_path="saved")
    assert finder.optimal_lr is None
    assert finder.state_dict() == {}


def test_the_arguments_are_those_of_the_tuner(make_trainer: Any) -> None:
    class Rated(TinyModule):
        rate = 1.0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    module = Rated()
    options: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 1e2, "mode": "linear", "early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=40, attr_name="rate", **options)
    make_trainer(finder).fit(module, tiny_loader())
    again = LearningRateFinder(num_training_steps=40, update_attr=False, attr_name="rate", **options)
    make_trainer(again).fit(module, tiny_loader())
    assert finder.optimal_lr is not None
    assert again.optimal_lr is not None
    assert finder.optimal_lr.results["lr"] == again.optimal_lr.results["lr"]
    assert (len(again.optimal_lr.results["lr"]), again.optimal_lr.results["lr"][0]) == (40, 1e-3)
    assert again.optimal_lr.results["lr"][-1] == pytest.approx(1e2)
    assert module.rate == finder.optimal_lr.suggestion()
    assert module.learning_rate == 0.1
    with pytest.raises(ConfigurationError, match=r"LearningRateFinder\(num_training_steps=100\)"):
        LearningRateFinder(num_training_steps=0)


def test_only_a_fit_searches(make_trainer: Any) -> None:
    finder = LearningRateFinder()
    make_trainer(finder).validate(TinyModule(), tiny_loader(), verbose=False)
    assert finder.optimal_lr is None


def ended(folder: Path) -> Any:
    torch.manual_seed(3)
    fit(folder, 3, strategy="ddp")
    module, finder, _ = fit(folder, 6, "last", strategy="ddp")
    return module.learning_rate, finder.optimal_lr.results, [p.tolist() for p in module.parameters()]


def test_two_processes_find_the_same(tmp_path: Path) -> None:
    first, second = run_world(2, ended, tmp_path)
    assert first == second
    assert first[0] in first[1]["lr"]


class FindInEpochs(LearningRateFinder):
    """The pattern of Lightning's documentation."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, module)
        if self._options.update_attr:
            assert self.optimal_lr is not None
            assert trainer.optimizers[0].param_groups[0]["lr"] == module.learning_rate == self.optimal_lr.suggestion()


class SetUpTwice(Scheduled):
    """Fails if a trial during training sets the module up again; has no schedule."""

    layers = 0

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()

    def setup(self, stage: str) -> None:
        assert not self.layers
        self.layers += 1

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[0][0]


def test_a_subclass_that_searches_in_epochs(make_trainer: Any) -> None:
    """The rates change at the epochs, and nothing else; a run that resumes in such an epoch does not search again."""

    def run(*callbacks: Any, update: bool = True, **arguments: Any) -> tuple[Any, ...]:
        module, finder = SetUpTwice(), FindInEpochs(num_training_steps=20, min_lr=1e-4, update_attr=update)
        make_trainer(finder, *callbacks, max_epochs=4).fit(module, tiny_loader(24, batch_size=8, shuffle=True), **arguments)
        return module, finder

    module, finder = run()
    assert len(module.rates) == 12
    assert len(set(module.rates[:6])) == len(set(module.rates[6:])) == 1
    assert module.rates[0] != module.rates[6]
    for number in (1, 5, 7, 10):
        run(SaveIn("on_train_batch_end", number))
        resumed, again = run(ckpt_path="there")
        assert resumed.rates == module.rates[number:]
        assert same(parameters_of(resumed), parameters_of(module))
        assert again.optimal_lr.results == finder.optimal_lr.results
    plain = SetUpTwice()
    make_trainer(max_epochs=4).fit(plain, tiny_loader(24, batch_size=8, shuffle=True))
    assert same(parameters_of(run(update=False)[0]), parameters_of(plain))


def test_a_subclass_that_searches_before_training(make_trainer: Any) -> None:
    class Twice(LearningRateFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            super().on_fit_start(trainer, module)

    module, finder = SetUpTwice(), Twice(num_training_steps=20, min_lr=1e-4)
    make_trainer(finder, max_epochs=1).fit(module, tiny_loader())
    assert finder.optimal_lr is not None
    assert module.rates[0] == finder.optimal_lr.suggestion()


class Scaled(SetUpTwice):
    """Has a group with a tenth of the learning rate, and may change what it computes from after the search."""

    batch_size, changes = 4, False

    def setup(self, stage: str) -> None:
        if self.changes:
            self.learning_rate *= 2

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.layer.weight], "lr": self.learning_rate / 10}, {"params": [self.layer.bias]}]
        return torch.optim.SGD(groups, lr=self.learning_rate * 4 / self.batch_size)

    def train_dataloader(self) -> Any:
        return tiny_loader(64, self.batch_size)


def test_groups_with_other_rates(make_trainer: Any, recwarn: Any) -> None:
    finder, module = LearningRateFinder(num_training_steps=20, min_lr=1e-4), Scaled()
    trainer = make_trainer(finder, max_epochs=1)
    trainer.fit(module, tiny_loader())
    rate = module.learning_rate
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([rate / 10, rate])

    class InEpochs(LearningRateFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            return

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.lr_find(trainer, module)

    module = Scaled()
    trainer = make_trainer(InEpochs(num_training_steps=20, min_lr=1e-4), max_epochs=1)
    trainer.fit(module, tiny_loader())
    rate = module.learning_rate
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([rate / 10, rate])
    assert not [one for one in recwarn if "LearningRateFinder" in str(one.message)]


@pytest.mark.parametrize("order", ["setup", "batch size later", "batch size first"])
def test_a_run_with_other_rates_than_the_search_warns(make_trainer: Any, order: str, recwarn: Any) -> None:
    finders = [LearningRateFinder(num_training_steps=20, min_lr=1e-4), BatchSizeFinder(max_val=8)]
    module = Scaled()
    module.changes = order == "setup"
    given = {"setup": finders[:1], "batch size later": finders, "batch size first": finders[::-1]}[order]
    make_trainer(*given, max_steps=1).fit(module)
    found = [str(one.message) for one in recwarn if "Expected the rates that were tested" in str(one.message)]
    assert len(found) == (order != "batch size first")
    assert not found or "Fix: put BatchSizeFinder before LearningRateFinder" in found[0]
