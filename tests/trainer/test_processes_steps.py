"""Training steps on several processes: several optimizers, stop requests of one rank, streams, and gathering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.parity import Noisy, RegressionModule
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, TrainModule
from trainkit.callbacks import EarlyStopping, Timer
from trainkit.errors import ConfigurationError, ProcessFailedError

# ------------------------------------------------------------------------------------------------------ several optimizers


class Gan(TrainModule):
    """A generator and a discriminator, each with an optimizer."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        self.trace: list[list[Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        g, d = self.optimizers()
        real = batch["x"]
        fake = self.generator(real[:, :3])
        self.toggle_optimizer(d)
        d.zero_grad()
        self.manual_backward(self.discriminator(fake.detach()).square().mean() + (self.discriminator(real) - 1).square().mean())
        self.clip_gradients(d, 0.5)
        d.step()
        self.untoggle_optimizer(d)
        self.toggle_optimizer(g)
        g.zero_grad()
        loss = (self.discriminator(fake) - 1).square().mean()
        self.manual_backward(loss)
        g.step()
        self.untoggle_optimizer(g)
        self.log("g_loss", loss, on_epoch=True)
        self.trace.append([p.detach().clone() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]


def gan(samples: int, batch_size: int) -> tuple[list[list[Tensor]], int]:
    module = Gan()
    trainer = make_trainer(accelerator="cpu", precision="64-true", max_epochs=2, seed=1)
    trainer.fit(module, DataLoader(Plain(samples), batch_size, shuffle=True))
    return module.trace, trainer.global_step


class Plain(Noisy):
    """`Noisy` without augmentation, which would differ between one batch of 8 and two batches of 4."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


@pytest.mark.parametrize("samples", [48, 42, 34])  # 34: rank 1 has no micro-batch in the last step
def test_a_gan(samples: int) -> None:
    """After every step the parameters are equal on both ranks, and close to those of one process with twice the batch size."""
    ranks = run_world(2, gan, samples, 4)
    alone, steps = gan(samples, 8)
    assert ranks[0][1] == ranks[1][1] == steps
    for first, second, single in zip(ranks[0][0], ranks[1][0], alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(first, single, strict=True))


# ------------------------------------------------------------------------------------------------ ranks that stop together


class Stopper(Callback):
    """Requests a stop on one rank."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            trainer.should_stop = True


def stopped(rank: int, accumulate: int = 1) -> tuple[int, int, bool]:
    trainer = make_trainer(Stopper(rank, 3), accelerator="cpu", max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(RegressionModule(), DataLoader(Noisy(32), 1))
    return trainer.global_step, trainer.current_epoch, trainer.should_stop


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_that_one_process_asks_for(rank: int) -> None:
    """It ends training after the next step, as on one process."""
    assert run_world(2, stopped, rank) == [(4, 0, True)] * 2
    assert stopped(0) == (4, 0, True)


class BeforeTraining(Callback):
    """Requests a stop on rank 1 in one hook."""

    def __init__(self, hook: str) -> None:
        def ask(trainer: Any, *_: Any) -> None:
            trainer.should_stop |= trainer.global_rank == 1

        setattr(self, hook, ask)


def stopped_before(hook: str) -> tuple[int, int, bool]:
    trainer = make_trainer(BeforeTraining(hook), accelerator="cpu", max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(Val(), DataLoader(Noisy(8), 1), DataLoader(Noisy(4), 2))
    return trainer.global_step, trainer.current_epoch, trainer.should_stop


@pytest.mark.parametrize("hook", ["on_fit_start", "on_sanity_check_end", "on_validation_end", "on_train_start"])
def test_a_stop_that_one_process_asks_for_before_the_first_epoch(hook: str) -> None:
    """No rank trains: otherwise rank 0 would wait in the first step for rank 1, which has stopped."""
    assert run_world(2, stopped_before, hook) == [(0, 0, True)] * 2


class Val(RegressionModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch > 1) + batch["id"].double().mean() * 0)


def early(size: int) -> tuple[int, int, float]:
    stopper = EarlyStopping("val_loss", patience=2)
    trainer = make_trainer(stopper, accelerator="cpu", max_epochs=10)
    trainer.fit(Val(), DataLoader(Noisy(12), 2), DataLoader(Noisy(5), 2))
    return trainer.current_epoch, stopper.wait_count, float(stopper.best_score)


def test_early_stopping() -> None:
    alone = early(1)
    assert run_world(2, early, 2) == [alone, alone]
    assert alone[0] < 10


def timed() -> tuple[int, bool]:
    timer = Timer({"seconds": 1000})
    trainer = make_trainer(timer, accelerator="cpu", max_epochs=2)

    class Late(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_rank == 0 and trainer.global_step == 2:
                timer.duration = 1e-9

    trainer.callbacks.append(Late())
    trainer.fit(RegressionModule(), DataLoader(Noisy(64), 1))
    return trainer.global_step, trainer.should_stop


def test_the_time_of_the_main_process_is_up() -> None:
    """The Timer of the main process ends training on both ranks after the same step."""
    assert run_world(2, timed) == [(4, True)] * 2


# ------------------------------------------------------------------------------------------------------------- iterables


class Streams(IterableDataset[Any]):
    """A stream that is the same on all ranks, or with `split` another one on each rank."""

    def __init__(self, lengths: list[int], split: bool) -> None:
        self.lengths, self.split = lengths, split

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank() if self.split else 0
        for i in range(self.lengths[rank]):
            yield {"id": 1000 * rank + i, "x": torch.full((6,), float(i)).double(), "y": torch.ones(1).double(), "mask": ONES}


ONES = torch.ones(6).double()


class Counting(RegressionModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.seen += batch["id"].tolist()
        return self.loss(batch)


def streamed(lengths: list[int], split: bool, accumulate: int) -> tuple[int, list[int], list[Tensor]]:
    module = Counting()
    trainer = make_trainer(accelerator="cpu", precision="64-true", max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(Streams(lengths, split), 2))
    return trainer.global_step, module.seen, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("lengths", [[9, 4], [0, 5], [3, 12]])
def test_streams_of_unequal_length_end_together(lengths: list[int], accumulate: int) -> None:
    first, second = run_world(2, streamed, lengths, True, accumulate)
    rows = max(-(-length // 2) for length in lengths)
    assert first[0] == second[0] == -(-rows // accumulate)
    assert first[1] == list(range(lengths[0]))
    assert second[1] == [1000 + i for i in range(lengths[1])]
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_a_stream_that_does_not_split_itself_is_sharded(size: int) -> None:
    ranks = run_world(size, streamed, [17], False, 1)
    assert sorted(i for rank in ranks for i in rank[1]) == list(range(17))
    assert {rank[0] for rank in ranks} == {-(-9 // size)}


# -------------------------------------------------------------------------------------------------- gathering in a step


class Gathering(RegressionModule):
    """Its loss includes the losses of all ranks."""

    def __init__(self, manual: bool, sync_grads: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.sync_grads = not manual, sync_grads

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss = loss + self.all_gather(loss, sync_grads=self.sync_grads).mean()
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.all_gather(self.loss(batch), sync_grads=True)


def gathering(samples: int, manual: bool, sync_grads: bool, limit: int | None = None) -> tuple[str, int]:
    trainer = make_trainer(accelerator="cpu", precision="64-true", max_epochs=1, limit_train_batches=limit)
    try:
        trainer.fit(Gathering(manual, sync_grads), DataLoader(Noisy(samples), 2), DataLoader(Noisy(8), 2))
    except (ConfigurationError, ProcessFailedError) as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.parametrize("manual, sync_grads", [(False, False), (False, True), (True, True)])
def test_gathering_where_not_all_take_part(manual: bool, sync_grads: bool) -> None:
    """In the last step rank 1 has no micro-batch, and rank 0 would wait for it in all_gather."""
    for said, steps in run_world(2, gathering, 10, manual, sync_grads):
        assert "all_gather was called in an accumulation window in which some ranks have fewer micro-batches" in said
        assert steps == 2
    assert run_world(2, gathering, 10, manual, sync_grads, 2) == [("", 2)] * 2


def test_gathering_of_all() -> None:
    assert run_world(2, gathering, 10, True, False) == [("", 3)] * 2  # rank 1 repeats a micro-batch
    assert run_world(2, gathering, 12, False, True) == [("", 3)] * 2


class GathersInValidation(RegressionModule):
    """Calls all_gather in the validation, as is common with Lightning."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.where == "step":
            self.all_gather(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.all_gather(torch.ones(1))


def gathered_in_validation(samples: int, where: str) -> str:
    trainer = make_trainer(accelerator="cpu", precision="64-true")
    try:
        trainer.validate(GathersInValidation(where), DataLoader(Noisy(samples), 2))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_gathering_in_an_evaluation() -> None:
    """If ranks have different numbers of batches, the first call is an error, because the last call would wait forever."""
    for said in run_world(2, gathered_in_validation, 10, "step"):
        assert "all_gather in a batch of validation: ranks may have different numbers of batches" in said
    assert run_world(2, gathered_in_validation, 12, "step") == ["", ""]
    assert run_world(2, gathered_in_validation, 10, "end") == ["", ""]


# --------------------------------------------------------------------------------------- optimizer steps of one rank only


class SkipsOnOne(Callback):
    """Skips one optimizer step on rank 1 only."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1 and trainer.batch_idx == 2:
            trainer.accelerator.skip_update()


def skipping() -> tuple[str, int]:
    trainer = make_trainer(SkipsOnOne(), accelerator="cpu", max_epochs=1)
    try:
        trainer.fit(RegressionModule(), DataLoader(Noisy(40), 2))
    except ConfigurationError as error:
        return str(error), trainer.batch_idx
    return "", trainer.batch_idx


def test_an_update_that_one_skips_is_found_in_the_next_step() -> None:
    for said, batch_idx in run_world(2, skipping):
        assert "one process has made 3 optimizer steps, and another one 2" in said
        assert "skip_update() on all processes or on none" in said
        assert batch_idx == 3


class Bare(Gan):
    """Uses torch's own optimizers instead of the prepared ones."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.optimizers(use_pl_optimizer=False)


def bare() -> str:
    try:
        make_trainer(accelerator="cpu", precision="64-true").fit(Bare(), DataLoader(Plain(8), 2))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_torchs_own_optimizers_would_not_average() -> None:
    for said in run_world(2, bare):
        assert "would not average the gradients over the processes. Use self.optimizers()." in said


# ----------------------------------------------------------------------------------------------------------- few samples


def few(samples: int) -> tuple[int, int]:
    module = Counting()
    trainer = make_trainer(accelerator="cpu", max_epochs=3)
    trainer.fit(module, DataLoader(Noisy(samples), 2, shuffle=True))
    return trainer.global_step, len(module.seen)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_fewer_samples_than_processes(samples: int) -> None:
    ranks = run_world(4, few, samples)
    assert {steps for steps, _ in ranks} == {3}
    assert sum(seen for _, seen in ranks) == 3 * samples


def validated(samples: int, accumulate: int) -> tuple[int, int, list[float]]:
    values: list[float] = []

    class Val(RegressionModule):
        def on_validation_epoch_end(self) -> None:
            values.append(self.global_step)

    trainer = make_trainer(accelerator="cpu", max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(Val(), DataLoader(Noisy(samples), 2), DataLoader(Noisy(5), 2))
    return trainer.global_step, trainer.current_epoch, values


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("samples", [14, 13, 26])
def test_validation_after_a_window_in_which_one_has_less(samples: int, size: int) -> None:
    """All ranks validate after the same step, even if a rank had fewer micro-batches in the window before."""
    ranks = run_world(size, validated, samples, 2)
    rows = -(-samples // 2)
    steps = -(-rows // (2 * size))
    assert ranks == [(2 * steps, 2, [steps, 2 * steps])] * size
