"""`automatic_optimization = False`: several optimizers, loss scaling, and toggling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.trainers import Memory, make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Precision, TrainModule
from trainkit.data.order import Permutation
from trainkit.rng import Purpose, Stage, mix, seed_generators

SEED, EPOCHS, SAMPLES, BATCH = 3, 3, 22, 4


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    return generator, discriminator


def real_points() -> Tensor:
    return torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(4)) * 0.3 + 1.0


def optimizers_of(generator: nn.Module, discriminator: nn.Module) -> tuple[Any, Any]:
    return (
        torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        torch.optim.Adam(discriminator.parameters(), lr=0.02, betas=(0.5, 0.9)),
    )


def targets(like: Tensor, real: bool) -> Tensor:
    return torch.full_like(like, float(real))


def adversarial(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets(logits, real))


class GAN(TrainModule):
    """A GAN with toggling, clipping and schedulers. The discriminator makes its step first."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = networks()
        self.losses: list[tuple[float, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        noise = torch.randn(len(real), 3)
        self.toggle_optimizer(for_discriminator)
        fake = self.generator(noise)
        loss_d = adversarial(self.discriminator(real), True) + adversarial(self.discriminator(fake.detach()), False)
        for_discriminator.zero_grad()
        self.manual_backward(loss_d)
        self.clip_gradients(for_discriminator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.toggle_optimizer(for_generator)
        loss_g = adversarial(self.discriminator(self.generator(noise)), True)
        for_generator.zero_grad()
        self.manual_backward(loss_g)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.losses.append((float(loss_d.detach()), float(loss_g.detach())))
        self.log_dict({"loss_d": loss_d, "loss_g": loss_g}, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        both = optimizers_of(self.generator, self.discriminator)
        return list(both), [StepLR(optimizer, 1, 0.5) for optimizer in both]


class Unscheduled(GAN):
    def on_train_epoch_end(self) -> None: ...


def gan_by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[float, float]]]:
    generator, discriminator = networks()
    points, losses = real_points(), []
    for_generator, for_discriminator = optimizers_of(generator, discriminator)
    schedulers = [StepLR(for_generator, 1, 0.5), StepLR(for_discriminator, 1, 0.5)]
    for epoch in range(EPOCHS):
        order = Permutation(SAMPLES, mix(SEED, Stage.TRAIN, Purpose.ORDER, epoch)).block(0, SAMPLES)
        for m, start in enumerate(range(0, SAMPLES, BATCH)):
            real = points[order[start : start + BATCH]]
            seed_generators(mix(SEED, Stage.TRAIN, Purpose.FORWARD, epoch, m))
            noise = torch.randn(len(real), 3)
            with torch.no_grad():
                fake = generator(noise)
            loss_d = adversarial(discriminator(real), True) + adversarial(discriminator(fake), False)
            for_discriminator.zero_grad()
            loss_d.backward()
            nn.utils.clip_grad_norm_(discriminator.parameters(), 0.5)
            for_discriminator.step()
            loss_g = adversarial(discriminator(generator(noise)), True)
            for_generator.zero_grad()
            loss_g.backward()
            for_generator.step()
            losses.append((float(loss_d.detach()), float(loss_g.detach())))
        for scheduler in schedulers:
            scheduler.step()
    return parameters_of(generator), parameters_of(discriminator), losses


def gan_loader() -> DataLoader:
    return DataLoader(TensorDataset(real_points()), batch_size=BATCH, shuffle=True)


def test_gan_equals_plain_torch() -> None:
    """A GAN trained by the Trainer gives the same parameters as a loop in plain torch, bit for bit."""
    module = GAN()
    trainer = make_trainer(seed=SEED, max_epochs=EPOCHS)
    trainer.fit(module, gan_loader())
    generator, discriminator, losses = gan_by_hand()
    assert module.losses == losses
    assert same(parameters_of(module.generator), generator)
    assert same(parameters_of(module.discriminator), discriminator)
    assert trainer.global_step == len(losses) == 18  # one per training_step, although two optimizers make a step
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_gan_in_half_precision(precision: str) -> None:
    """Clipping the gradients of one optimizer does not change those of the other: both train as in full precision."""

    def fit(precision: str | Precision) -> GAN:
        module = GAN()
        trainer = make_trainer(seed=SEED, max_epochs=EPOCHS, precision=precision)
        trainer.fit(module, gan_loader())
        assert trainer.global_step == 18
        return module

    whole, half = fit("32-true"), fit(Precision(precision, init_scale=256.0))
    for (name, a), (_, b) in zip(whole.named_parameters(), half.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.1, msg=lambda text, name=name: f"{name}: {text}")


class TwoSteps(TrainModule):
    """Two optimizer steps in one training_step, with a forward after each."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).square().mean())
            optimizer.step()
            with torch.autocast("cpu", enabled=False):
                weight, bias = (parameter.to(torch.bfloat16) for parameter in self.layer.parameters())
                expected = F.linear(batch[0].to(torch.bfloat16), weight, bias)
            self.outputs.append((self.layer(batch[0]).detach(), expected.detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def test_a_forward_sees_the_update_before_it() -> None:
    """Autocast caches converted parameters until training_step ends, so an optimizer step must clear the cache."""
    module = TwoSteps()
    make_trainer(max_epochs=1, precision="bf16-mixed").fit(module, gan_loader())
    assert len(module.outputs) == 12
    assert all(torch.equal(mine, expected) for mine, expected in module.outputs)


def test_the_loss_scale_while_gradients_of_two_optimizers_wait() -> None:
    """Clipping unscales the gradients of both before either makes its step: each is unscaled once, with the right scale."""
    norms: dict[str, list[float]] = {}

    class Both(Unscheduled):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            (real,) = batch
            first, second = self.optimizers()
            fake = self.generator(torch.randn(len(real), 3))
            loss = adversarial(self.discriminator(fake), True)
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            for optimizer in (first, second):
                norm = self.clip_gradients(optimizer, gradient_clip_val=0.05)
                norms.setdefault(self.trainer.precision, []).append(float(norm))
            first.step()
            second.step()

    results = {}
    for precision in ("32-true", "16-mixed"):
        module = Both()
        trainer = make_trainer(seed=SEED, precision=Precision(precision, init_scale=256.0, growth_interval=1))
        trainer.fit(module, gan_loader())
        results[precision] = module
    torch.testing.assert_close(torch.tensor(norms["16-mixed"]), torch.tensor(norms["32-true"]), rtol=0.05, atol=1e-3)
    for a, b in zip(results["32-true"].parameters(), results["16-mixed"].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.1)


def test_an_overflow_of_one_optimizer_leaves_the_other_alone() -> None:
    class Module(Unscheduled):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            (real,) = batch
            first, second = self.optimizers()
            first.zero_grad()
            self.manual_backward(self.generator(torch.randn(len(real), 3)).pow(2).mean() * 1e38)
            self.steps = [first.step()]
            second.zero_grad()
            self.manual_backward(adversarial(self.discriminator(real), True))
            self.steps.append(second.step())

    module = Module()
    before = parameters_of(module.generator), parameters_of(module.discriminator)
    trainer = make_trainer(precision=Precision("16-mixed", init_scale=8.0), max_steps=1)
    trainer.fit(module, gan_loader())
    assert module.steps == [False, True]
    assert same(before[0], parameters_of(module.generator))
    assert not same(before[1], parameters_of(module.discriminator))
    assert trainer.global_step == 1


def test_max_steps_and_metrics() -> None:
    logger = Memory()
    trainer = make_trainer(seed=SEED, max_epochs=-1, max_steps=8, logger=logger, log_every_n_steps=2)
    trainer.fit(GAN(), gan_loader())
    assert trainer.global_step == 8
    assert sorted(logger.of("loss_d")) == sorted(logger.of("loss_g")) == [2, 4, 6, 8]
    assert set(trainer.progress_bar_metrics) == {"loss_d", "loss_g"}


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_the_optimizers_that_a_module_gets() -> None:
    seen: dict[str, Any] = {}

    class Looking(Unscheduled):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            seen["prepared"] = self.optimizers()
            seen["bare"] = self.optimizers(use_pl_optimizer=False)
            seen["schedulers"] = self.lr_schedulers()

    trainer = make_trainer(max_steps=1, limit_train_batches=1)
    trainer.fit(Looking(), gan_loader())
    assert seen["bare"] == trainer.optimizers
    assert all(type(optimizer) is torch.optim.Adam for optimizer in seen["bare"])
    assert [prepared.optimizer for prepared in seen["prepared"]] == seen["bare"]
    assert all(isinstance(prepared, torch.optim.Optimizer) for prepared in seen["prepared"])
    assert [type(scheduler) for scheduler in seen["schedulers"]] == [StepLR, StepLR]
    for prepared, bare in zip(seen["prepared"], seen["bare"], strict=True):
        assert prepared.param_groups is bare.param_groups
        assert prepared.state is bare.state
        assert prepared.defaults is bare.defaults


# -------------------------------------------------------------------------------------------------------------- toggling


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_toggling() -> None:
    states: list[list[bool]] = []

    class Toggling(Unscheduled):
        def note(self) -> None:
            states.append([next(part.parameters()).requires_grad for part in (self.generator, self.discriminator)])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            self.note()
            self.toggle_optimizer(second)  # without untoggling
            self.note()
            self.untoggle_optimizer(second)
            self.note()
            self.untoggle_optimizer(second)  # a second call does nothing
            with first.toggle_model():
                self.note()
            self.note()

    make_trainer(limit_train_batches=1).fit(Toggling(), gan_loader())
    assert states == [[True, False], [False, True], [True, True], [True, False], [True, True]]


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_toggling_leaves_frozen_parameters_frozen() -> None:
    class Frozen(Unscheduled):
        def __init__(self) -> None:
            super().__init__()
            self.discriminator[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                self.untoggle_optimizer(optimizer)
                with optimizer.toggle_model():
                    pass

    module = Frozen()
    make_trainer(limit_train_batches=1).fit(module, gan_loader())
    assert [p.requires_grad for p in module.discriminator.parameters()] == [False, False, True, True]
    assert all(p.requires_grad for p in module.generator.parameters())


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_a_parameter_of_both_optimizers_stays_on() -> None:
    # toggle_optimizer keeps gradients on for parameters that the toggled optimizer shares with another one.
    class Sharing(Unscheduled):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            self.toggle_optimizer(first)
            assert all(p.requires_grad for p in self.generator.parameters())
            assert not any(p.requires_grad for p in self.discriminator.parameters())
            self.untoggle_optimizer(first)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.generator.parameters(), 0.1),
                torch.optim.SGD([*self.generator.parameters(), *self.discriminator.parameters()], 0.1),
            ]

    make_trainer(limit_train_batches=1).fit(Sharing(), gan_loader())
