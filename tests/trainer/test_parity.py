"""`Trainer` and `Accelerator` give the same results as a loop written in plain torch, bit for bit.

That loop uses trainkit only for the order of the samples and the random seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset

from trainkit import Accelerator, Strategy, TrainModule
from trainkit.data.order import Permutation
from trainkit.rng import Purpose, Stage, mix, seed_generators

SEED = 7
EPOCHS = 3


class Noisy(Dataset):
    """Points with class labels. Noise is added each time a sample is fetched."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(samples, 6, generator=generator)
        self.targets = (self.inputs[:, 0] > 0).long() + (self.inputs[:, 1] > 0.5).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


def build_network() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return network


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=1e-2)


def groups(network: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in network.parameters() if p.ndim > 1]
    biases = [p for p in network.parameters() if p.ndim == 1]
    return torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}], lr=0.05, momentum=0.9, nesterov=True
    )


def warmup_cosine(optimizer: torch.optim.Optimizer) -> Any:
    def factor(step: int) -> float:
        return (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 5) / 20)))

    return LambdaLR(optimizer, factor)


def two_phases(optimizer: torch.optim.Optimizer) -> Any:
    phases = [LinearLR(optimizer, start_factor=0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=20)]
    return SequentialLR(optimizer, phases, milestones=[4])


def by_epoch(optimizer: torch.optim.Optimizer) -> Any:
    return StepLR(optimizer, step_size=1, gamma=0.5)


@dataclass(frozen=True)
class Case:
    samples: int = 32
    batch_size: int = 4
    shuffle: bool = True
    drop_last: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    per_step: Callable[[Any], Any] | None = None
    per_epoch: Callable[[Any], Any] | None = None
    precision: str = "32-true"


CASES = {
    "plain": Case(),
    "unshuffled": Case(shuffle=False),
    "accumulation": Case(accumulate=4),
    "clipping by norm": Case(clip_norm=0.05),
    "clipping by value": Case(clip_value=0.005),
    "clipping and accumulation": Case(clip_norm=0.05, accumulate=2),
    "scheduler by epoch": Case(per_epoch=by_epoch),
    "warm-up and cosine by step": Case(per_step=warmup_cosine),
    "two phases by step, accumulation": Case(per_step=two_phases, accumulate=2),
    "schedulers of both kinds": Case(per_step=warmup_cosine, per_epoch=by_epoch),
    "short last batch": Case(samples=35),
    "short last batch of one sample, accumulation": Case(samples=37, accumulate=4),
    "short last window of full batches": Case(samples=40, accumulate=4),
    "drop_last, accumulation": Case(samples=39, accumulate=4, drop_last=True),
    "window longer than the epoch": Case(samples=10, accumulate=8),
    "parameter groups": Case(optimizer=groups),
    "everything": Case(samples=37, accumulate=4, clip_norm=0.05, optimizer=groups, per_step=warmup_cosine, per_epoch=by_epoch),
    "bf16-mixed": Case(precision="bf16-mixed", accumulate=2, clip_norm=0.05),
    "16-mixed": Case(precision="16-mixed", accumulate=2, clip_norm=0.05),
    "64-true": Case(precision="64-true", accumulate=4, samples=37),
}
each_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@dataclass
class Result:
    losses: list[float]
    parameters: dict[str, Tensor]
    state: list[Tensor]
    rates: list[float]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    slots = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [value for slot in slots for value in slot.values() if isinstance(value, Tensor)]


def assert_same(first: Result, second: Result) -> None:
    assert first.losses == second.losses
    assert same(first.parameters, second.parameters)
    assert first.rates == second.rates
    assert len(first.state) == len(second.state) > 0
    assert all(a.equal(b) for a, b in zip(first.state, second.state, strict=True))


def loader_of(case: Case) -> DataLoader:
    return DataLoader(Noisy(case.samples), batch_size=case.batch_size, shuffle=case.shuffle, drop_last=case.drop_last)


def micro_batches(case: Case, epoch: int) -> list[list[int]]:
    order = list(range(case.samples))
    if case.shuffle:
        order = Permutation(case.samples, mix(SEED, Stage.TRAIN, Purpose.ORDER, epoch)).block(0, case.samples).tolist()
    batches = [order[start : start + case.batch_size] for start in range(0, case.samples, case.batch_size)]
    return [batch for batch in batches if len(batch) == case.batch_size] if case.drop_last else batches


def by_hand(case: Case, device: str = "cpu") -> Result:
    generators = (torch.cuda.default_generators[0],) if device == "cuda" else ()
    network, data, losses = build_network(), Noisy(case.samples), []
    dtype = torch.float64 if case.precision == "64-true" else torch.float32
    network.to(device, dtype)
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(case.precision)
    scaler = torch.amp.GradScaler(device, enabled=case.precision == "16-mixed")
    optimizer = case.optimizer(network)
    per_step = case.per_step(optimizer) if case.per_step else None
    per_epoch = case.per_epoch(optimizer) if case.per_epoch else None
    for epoch in range(EPOCHS):
        batches = micro_batches(case, epoch)
        for begin in range(0, len(batches), case.accumulate):
            window = batches[begin : begin + case.accumulate]
            optimizer.zero_grad()
            for m, indices in enumerate(window, begin):
                seed_generators(mix(SEED, Stage.TRAIN, Purpose.FETCH, epoch, m))
                inputs, targets = torch.utils.data.default_collate([data[index] for index in indices])
                inputs, targets = inputs.to(device, dtype), targets.to(device)
                seed_generators(mix(SEED, Stage.TRAIN, Purpose.FORWARD, epoch, m), generators)
                with torch.autocast(device, dtype=half, enabled=half is not None):
                    loss = F.cross_entropy(network(inputs), targets)
                losses.append(float(loss.detach()))
                scaler.scale(loss * (len(indices) / sum(map(len, window)))).backward()
            scaler.unscale_(optimizer)
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(network.parameters(), case.clip_norm)
            if case.clip_value is not None:
                nn.utils.clip_grad_value_(network.parameters(), case.clip_value)
            scaler.step(optimizer)
            scaler.update()
            if per_step is not None:
                per_step.step()
        if per_epoch is not None:
            per_epoch.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    return Result(losses, parameters_of(network), state_tensors(optimizer), rates)


class Classifier(TrainModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.network = build_network()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.network(inputs), targets)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.randn(3)
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        self.optimizer = self.case.optimizer(self.network)
        schedulers = []
        if self.case.per_step:
            schedulers.append({"scheduler": self.case.per_step(self.optimizer), "interval": "step"})
        if self.case.per_epoch:
            schedulers.append(self.case.per_epoch(self.optimizer))
        return [self.optimizer], schedulers

    def result(self) -> Result:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return Result(self.losses, parameters_of(self.network), state_tensors(self.optimizer), rates)


def by_trainer(case: Case, *validation: DataLoader, **arguments: Any) -> Result:
    module = Classifier(case)
    options: dict[str, Any] = {"accumulate_grad_batches": case.accumulate, "precision": case.precision}
    if case.clip_norm is not None:
        options["gradient_clip_val"] = case.clip_norm
    if case.clip_value is not None:
        options |= {"gradient_clip_val": case.clip_value, "gradient_clip_algorithm": "value"}
    make_trainer(**{"seed": SEED, "max_epochs": EPOCHS, **options, **arguments}).fit(module, loader_of(case), *validation)
    return module.result()


def by_accelerator(case: Case, device: str = "cpu") -> Result:
    """Your own training loop with the methods of the `Accelerator`."""
    accelerator = Accelerator(strategy=Strategy(device), precision=case.precision, gradient_accumulation_steps=case.accumulate)
    accelerator.seed = SEED
    bare, losses = build_network(), []
    model = accelerator.prepare(bare)
    own = case.optimizer(bare)
    optimizer, loader = accelerator.prepare(own, loader_of(case))
    per_step = accelerator.prepare(case.per_step(own)) if case.per_step else None
    per_epoch = accelerator.prepare(case.per_epoch(own)) if case.per_epoch else None
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.cross_entropy(model(inputs), targets)
                losses.append(float(loss.detach()))
                accelerator.backward(loss)
                if case.clip_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip_norm)
                if case.clip_value is not None:
                    accelerator.clip_grad_value_(model.parameters(), case.clip_value)
                optimizer.step()
                if per_step is not None:
                    per_step.step()
                optimizer.zero_grad()
        if per_epoch is not None:
            per_epoch.step()
    return Result(losses, parameters_of(bare), state_tensors(own), [group["lr"] for group in own.param_groups])


@each_case
def test_trainer_equals_plain_torch_loop(case: Case) -> None:
    assert_same(by_trainer(case), by_hand(case))


@each_case
def test_accelerator_is_a_loop_by_hand(case: Case) -> None:
    assert_same(by_accelerator(case), by_hand(case))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_case
def test_all_three_agree_on_cuda(case: Case) -> None:
    by_hand(case, "cuda")  # the first run of a process may use other kernels than later runs
    expected = by_hand(case, "cuda")
    assert_same(by_trainer(case, accelerator="gpu"), expected)
    assert_same(by_accelerator(case, "cuda"), expected)


def test_the_loop_by_hand_depends_on_what_it_should() -> None:
    """Each part of a case changes the result, so the tests above can fail."""
    plain = by_hand(CASES["plain"])
    changes = {"accumulate": 2, "clip_norm": 0.05, "clip_value": 0.005, "optimizer": groups, "shuffle": False}
    changes |= {"per_step": warmup_cosine, "per_epoch": by_epoch, "precision": "bf16-mixed"}
    for name, value in changes.items():
        assert not same(plain.parameters, by_hand(replace(CASES["plain"], **{name: value})).parameters), name


@pytest.mark.parametrize("arguments", [{"num_sanity_val_steps": 2}, {"val_check_interval": 0.25}, {"val_every_n_steps": 3}])
def test_validation_does_not_disturb_training(arguments: dict[str, Any]) -> None:
    case = replace(CASES["everything"], samples=64)
    validation = DataLoader(Noisy(12), batch_size=5, shuffle=True)
    assert_same(by_trainer(case, validation, **arguments), by_trainer(case))


def test_what_the_user_draws_before_does_not_matter() -> None:
    first = by_trainer(CASES["plain"])
    torch.randn(100)
    assert_same(first, by_trainer(CASES["plain"]))


def test_another_seed_is_another_run() -> None:
    assert by_trainer(CASES["plain"]).losses != by_trainer(CASES["plain"], seed=SEED + 1).losses


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_matter(workers: int) -> None:
    case = CASES["short last batch of one sample, accumulation"]
    module = Classifier(case)
    loader = DataLoader(
        Noisy(case.samples), batch_size=case.batch_size, shuffle=True, num_workers=workers, persistent_workers=True
    )
    make_trainer(seed=SEED, max_epochs=EPOCHS, accumulate_grad_batches=case.accumulate).fit(module, loader)
    assert_same(module.result(), by_hand(case))
