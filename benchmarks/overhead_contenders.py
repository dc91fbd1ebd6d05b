"""One contender of overhead.py, in its own process: it trains, and reports the time of each chunk of steps.

To profile a contender, run it directly:

    python benchmarks/overhead_contenders.py trainer --steps 500 --chunks 10

The clock is in the data: every contender iterates over the same object, which reads the clock between two chunks. So the
measurement adds nothing to a loop, and the time before the first step is not counted. Only what a contender needs is imported:
the other frameworks may be in an environment without trainkit.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL, WIDTH = (32, 64, 10), 256  # the widths of the small network; the width of all layers of the others
BATCH, DIFFERENT = 32, 50  # samples per batch; number of different batches
WARM_UP = 300  # steps before the first chunk: allocations, AdamW's state, byte code specialization
QUIET: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
AFTER = 5  # steps after the last chunk, since some loops do not request a batch after the last one


class Clock:
    """Waits for a signal before each chunk of steps, and afterwards reports wall-clock and processor time in seconds.

    Args:
        turns: file descriptor from which a byte is read before each chunk; `None` never waits.
        reports: file descriptor to which a line is written after each chunk.
    """

    def __init__(self, turns: int | None, reports: int) -> None:
        self._turns, self._reports = turns, reports
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        if self._turns is not None:
            os.read(self._turns, 1)
        self._began = (time.perf_counter(), time.process_time())

    def end(self) -> None:
        wall, process = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        os.write(self._reports, f"{wall} {process}\n".encode())


class Batches(list[Any]):
    """A list of ready batches, repeated: first those of the warm-up, then chunks of `steps` batches each."""

    def __init__(self, batches: list[Any], clock: Clock, steps: int, chunks: int) -> None:
        super().__init__(islice(cycle(batches), WARM_UP + chunks * steps + AFTER))
        self._clock, self._steps, self._chunks = clock, steps, chunks

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        yield from islice(batches, WARM_UP)
        for _ in range(self._chunks):
            self._clock.begin()
            yield from islice(batches, self._steps)
            self._clock.end()
        yield from batches

    def of(self, batches: list[Any]) -> Batches:
        """The same with other batches, in the format that a framework needs."""
        return Batches(batches, self._clock, self._steps, self._chunks)


def network(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that changes the learning rate in each step; `lr_scheduler` patches `step` of the optimizer."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 1e-4 * step))


def module_of(base: Any, model: nn.Module, log: bool, scheduled: bool = False) -> Any:
    """The module of trainkit and of Lightning, which differ only in their base class."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if log:
                self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", F.cross_entropy(self.net(x), y), batch_size=len(x))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            out: Tensor = self.net(batch[0])
            return out

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self)
            if not scheduled:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"}}

    return Module()


# ------------------------------------------------------------------------------------------------ the loop by hand


def raw(model: nn.Module, batches: Batches, *, scheduled: bool = False) -> None:
    optimizer = adamw(model)
    schedule = schedule_of(optimizer) if scheduled else None
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def seeding(model: nn.Module, batches: Batches) -> None:
    """The loop by hand, with trainkit's seeding of torch, numpy and `random` before each step."""
    from trainkit.rng import KeyStream, Purpose, Stage, seed_generators

    optimizer = adamw(model)
    keys = KeyStream(1, Stage.TRAIN, Purpose.FORWARD, 0)
    for m, (x, y) in enumerate(batches):
        seed_generators(keys(m))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def raw_validate(model: nn.Module, batches: Batches) -> float:
    """The mean of the loss over all samples."""
    model.eval()
    total, samples = torch.zeros(()), 0
    with torch.inference_mode():
        for x, y in batches:
            total += F.cross_entropy(model(x), y) * len(x)
            samples += len(x)
    return float(total) / samples


def raw_predict(model: nn.Module, batches: Batches) -> list[Tensor]:
    model.eval()
    with torch.inference_mode():
        return [model(x) for x, _ in batches]


# ------------------------------------------------------------------------------------------------ trainkit


def trainer(model: nn.Module, batches: Batches, *, idle: int = 0, full: bool = False, scheduled: bool = False) -> None:
    """A bare Trainer; with idle callbacks, a schedule; or (`full`) with bar, CSV logger and the loss logged at every step."""
    from trainkit import Callback, Trainer, TrainModule
    from trainkit.loggers import CSVLogger

    class Idle(Callback):
        pass

    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger("logs") if full else False,
        callbacks=[Idle() for _ in range(idle)],
        enable_progress_bar=full,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(module_of(TrainModule, model, full, scheduled), batches)


def evaluate(model: nn.Module, batches: Batches, *, verb: str) -> None:
    """`Trainer.validate`, with the loss logged, or `Trainer.predict`, with all outputs returned."""
    from trainkit import Trainer, TrainModule

    trainer = Trainer(accelerator="cpu", **QUIET)
    getattr(trainer, verb)(module_of(TrainModule, model, False), batches)


def own_loop(model: nn.Module, batches: Batches, *, scheduled: bool = False) -> None:
    """Your own training loop with the Accelerator, as in the README."""
    from trainkit import Accelerator

    accelerator, optimizer = Accelerator(cpu=True), adamw(model)
    schedule = schedule_of(optimizer) if scheduled else None
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------ the others


def ignite(model: nn.Module, batches: Batches) -> None:
    from ignite.engine import create_supervised_trainer

    create_supervised_trainer(model, adamw(model), F.cross_entropy).run(batches, max_epochs=1)


def accelerate(model: nn.Module, batches: Batches) -> None:
    """The loop of its quick tour. It does not change ready batches, so its loader would cost nothing here."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()


def lightning(model: nn.Module, batches: Batches, *, idle: int = 0, full: bool = False) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Idle(Callback):  # type: ignore[misc]
        pass

    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger("logs") if full else False,
        callbacks=[Idle() for _ in range(idle)],
        enable_progress_bar=full,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(module_of(LightningModule, model, full), batches)


def lightning_evaluate(model: nn.Module, batches: Batches, *, verb: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    trainer = Trainer(accelerator="cpu", **QUIET)
    getattr(trainer, verb)(module_of(LightningModule, model, False), batches)


def transformers(model: nn.Module, batches: Batches) -> None:
    """Without gradient clipping, logging and a learning-rate schedule, so that its step computes the same."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Ready(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return batches.of([{"x": x, "labels": labels} for x, labels in batches[:DIFFERENT]])

    arguments = TrainingArguments(
        output_dir="transformers",
        max_steps=len(batches),
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Ready(model=Model(), args=arguments, train_dataset=range(BATCH * len(batches))).train()


CONTENDERS: dict[str, Callable[[nn.Module, Batches], object]] = {
    "raw": raw,
    "raw_scheduled": lambda model, batches: raw(model, batches, scheduled=True),
    "raw_validate": raw_validate,
    "raw_predict": raw_predict,
    "seeding": seeding,
    "trainer": trainer,
    "idle_10": lambda model, batches: trainer(model, batches, idle=10),
    "idle_100": lambda model, batches: trainer(model, batches, idle=100),
    "full": lambda model, batches: trainer(model, batches, idle=10, full=True),
    "own_loop": own_loop,
    "trainer_scheduled": lambda model, batches: trainer(model, batches, scheduled=True),
    "full_scheduled": lambda model, batches: trainer(model, batches, idle=10, full=True, scheduled=True),
    "own_loop_scheduled": lambda model, batches: own_loop(model, batches, scheduled=True),
    "validate": lambda model, batches: evaluate(model, batches, verb="validate"),
    "predict": lambda model, batches: evaluate(model, batches, verb="predict"),
    "ignite": ignite,
    "accelerate": accelerate,
    "lightning": lightning,
    "lightning_idle_10": lambda model, batches: lightning(model, batches, idle=10),
    "lightning_full": lambda model, batches: lightning(model, batches, idle=10, full=True),
    "lightning_validate": lambda model, batches: lightning_evaluate(model, batches, verb="validate"),
    "lightning_predict": lambda model, batches: lightning_evaluate(model, batches, verb="predict"),
    "transformers": transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--layers", type=int, default=0, help=f"number of layers of {WIDTH} instead of {SMALL}")
    parser.add_argument("--steps", type=int, default=500, help="of a chunk (default: 500)")
    parser.add_argument("--chunks", type=int, default=10, help="chunks that are measured (default: 10)")
    parser.add_argument("--core", type=int, help="stay on this core, where the system can do that")
    parser.add_argument("--turns", type=int, help="file descriptor: wait for a byte before each chunk")
    parser.add_argument("--reports", type=int, default=1, help="file descriptor: seconds by the wall and of the process")
    arguments = parser.parse_args()

    warnings.simplefilter("ignore")  # frameworks warn about such a small model
    if arguments.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {arguments.core})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    widths = (*(WIDTH,) * arguments.layers, 10) if arguments.layers else SMALL
    ready = [(torch.randn(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))) for _ in range(DIFFERENT)]
    batches = Batches(ready, Clock(arguments.turns, arguments.reports), arguments.steps, arguments.chunks)
    CONTENDERS[arguments.contender](network(widths), batches)


if __name__ == "__main__":
    main()
