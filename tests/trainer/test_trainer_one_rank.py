"""Only one rank makes a call that all ranks must make: all ranks end within seconds, and the error names the lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launch.members import GRACE, as_script, end_of, now
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainkit.distributed.channel
from trainkit import Callback, Trainer
from trainkit.errors import CollectiveError, MetricError

HERE = r"test_trainer_one_rank\.py:\d+"


class OneRank(Callback):
    """Calls a function in one hook of epoch 1, only on some ranks.

    Args:
        hook: the name of the hook. For `training_step` this callback does nothing: `Module` makes the call.
        verb: the function, called with the trainer and the module. The hook returns its result.
        ranks: the ranks that call the function.
    """

    def __init__(self, hook: str, verb: Callable[[Any, Any], Any], *ranks: int) -> None:
        def call(trainer: Any, module: Any, *arguments: Any) -> Any:
            batch_idx = arguments[-1] if hook.startswith("on_train_batch") else 1
            if trainer.strategy.rank in ranks and trainer.current_epoch == 1 and batch_idx == 1:
                now()
                return verb(trainer, module)
            return None

        if hook != "training_step":
            setattr(self, hook, call)


class Module(TinyModule):
    """Calls `all_gather` in `training_step`, only on rank 0, if `gathers` is set."""

    gathers = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.gathers and self.global_rank == 0 and self.current_epoch == 1:
            now()
            self.all_gather(loss.detach())
        return loss


def _save(trainer: Any, module: Any) -> None:
    trainer.save_checkpoint("mine")


def _gather(trainer: Any, module: Any) -> None:
    module.all_gather({"a": torch.ones(2)})


def _wait(trainer: Any, module: Any) -> None:
    trainer.strategy.barrier()


def _end(trainer: Any, module: Any) -> int:
    return -1


VERBS = {"save": _save, "gather": _gather, "wait": _wait, "end": _end}
NAMES = {
    "save": "trainer.save_checkpoint",
    "gather": "all_gather",
    "wait": "strategy.barrier",
    "end": "the end of the epoch that on_train_batch_start asked for by returning -1",
}


def hasten(trainer: Trainer) -> None:
    """Shorten the interval of the checks for missing ranks, and the grace period."""
    trainkit.distributed.channel._LOOK_S = 0.05
    watchdog = trainer.strategy.world.watchdog
    assert watchdog is not None
    watchdog._grace = GRACE


def one_rank(hook: str, verb: str, rank: int, strategy: str) -> None:
    as_it_is = (hook, strategy) == ("on_train_epoch_end", "ddp")  # the other cases shorten the intervals
    module = Module()
    module.gathers = hook == "training_step"
    trainer = make_trainer(OneRank(hook, VERBS[verb], rank), max_epochs=3, strategy=strategy, devices=2)
    if not as_it_is:
        hasten(trainer)
    trainer.fit(module, tiny_loader(32), tiny_loader(16))


def script(*given: Any) -> None:
    as_script(one_rank, *given)


@pytest.mark.parametrize(
    "hook, verb, rank, strategy",
    [
        ("on_train_epoch_end", "save", 0, "ddp"),
        ("on_train_epoch_end", "save", 1, "ddp"),
        ("on_train_batch_end", "save", 0, "ddp"),
        ("on_validation_epoch_end", "gather", 0, "ddp"),
        ("training_step", "gather", 0, "ddp"),
        ("on_train_batch_start", "end", 0, "ddp"),
        ("on_train_epoch_end", "wait", 0, "ddp"),
        ("on_train_batch_end", "save", 0, "zero2"),
        ("on_train_batch_start", "end", 0, "zero3"),
    ],
)
def test_one_rank_alone(hook: str, verb: str, rank: int, strategy: str, run_dir: Path) -> None:
    """The rank that makes the call raises the error. The other rank waits in fit, and is ended with the same error."""
    ended = end_of(2, script, hook, verb, rank, strategy)
    other = 1 - rank
    error = (
        rf"CollectiveError: rank {rank} waits for all processes in {NAMES[verb]} \({HERE}\), but rank {other} waits for rank "
        rf"{rank} in trainer\.fit \({HERE}\)\. "
    )
    assert ended.codes == [1, 1], ended.output
    assert re.search(rf"trainkit: rank {other} was ended because rank {rank} failed: {error}", ended.output), ended.output
    last = ended.output[ended.output.rindex("Traceback (most recent call last)") :]
    assert re.search(rf"^\[rank{rank}\]: trainkit\.errors\.{error}", last, re.MULTILINE), ended.output
    advice = "Return -1 on every rank or on none" if verb == "end" else f"Every rank must call {NAMES[verb]}: do not call it"
    assert advice in last
    assert "nforce" not in Path("terminal.txt").read_text()  # gloo's message when two ranks run different collectives


def after_fit(verb: str) -> None:
    module = TinyModule()
    trainer = make_trainer(devices=2)
    trainer.fit(module, tiny_loader())
    channel = trainer.strategy.world.channel
    assert channel is not None
    now()
    if trainer.is_global_zero:
        channel.wait(lambda: 1 in channel.exited)
        if verb == "save_checkpoint":
            trainer.save_checkpoint("mine")
        else:
            trainer.validate(module, tiny_loader())


def script_after_fit(*given: Any) -> None:
    as_script(after_fit, *given)


@pytest.mark.parametrize("verb", ["save_checkpoint", "validate"])
def test_after_fit(verb: str, run_dir: Path) -> None:
    """Rank 0 makes a call after the script of rank 1 has ended normally."""
    ended = end_of(2, script_after_fit, verb)
    assert ended.codes == [1, 0], ended.output
    assert re.search(
        rf"CollectiveError: rank 0 waits for all processes in trainer\.{verb} \({HERE}\), but the script of rank 1 has ended\. "
        rf"Every rank must call trainer\.{verb}: do not call it inside 'if trainer\.is_global_zero:' or a similar condition\.",
        ended.output,
    ), ended.output
    assert "exchange '" not in ended.output


class Late(Callback):
    """Rank 1 leaves a run after rank 0."""

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if not trainer.is_global_zero:
            time.sleep(0.3)


def caught(kind: str) -> list[str]:
    """Cause an error on all ranks, catch it and train again. Returns the error message and the sum of the weights."""
    trainkit.distributed.channel._LOOK_S = 0.05
    texts = []
    log = OneRank("on_train_batch_end", lambda trainer, module: module.log("mine", 1.0), 0)
    callbacks = {
        "verbs": [OneRank("on_train_epoch_end", _save, 0), OneRank("on_train_epoch_end", _gather, 1)],
        "log": [log],
    }
    trainer = make_trainer(*callbacks[kind], Late(), max_epochs=3, devices=2, log_every_n_steps=100)
    try:
        trainer.fit(TinyModule(), tiny_loader(32))
    except (CollectiveError, MetricError) as error:
        texts.append(str(error))
    trainer.save_checkpoint("at once", weights_only=True)  # while the other rank is still leaving the run
    again = make_trainer(max_epochs=2, devices=2)
    again.fit(module := TinyModule(), tiny_loader(32))
    again.save_checkpoint("whole")
    return [*texts, str(float(module.layer.weight.detach().sum()))]


def test_different_verbs_on_each_rank(run_dir: Path) -> None:
    """All ranks get the error before they exchange any data, and a later run works as usual."""
    (first, value), (second, other) = run_world(2, caught, "verbs")
    assert first == second
    assert value == other
    assert re.fullmatch(
        rf"the processes have made different calls: rank 0: trainer\.save_checkpoint \({HERE}\); rank 1: all_gather "
        rf"\({HERE}\)\. Every rank must call trainer\.save_checkpoint: do not call it inside .*",
        first,
    )


def test_a_metric_logged_on_one_rank(run_dir: Path) -> None:
    """The check after the next step finds it, long before the values would be reduced."""
    (first, value), (second, other) = run_world(2, caught, "log")
    assert first == second
    assert value == other
    assert "log('mine'): logged on rank 0, not on rank 1" in first


class Asking(Callback):
    """Fails on rank 0, and saves a checkpoint in `on_exception`, which needs all ranks."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            raise KeyError("mine")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint("mine")


def fails_and_asks() -> None:
    trainer = make_trainer(Asking(), devices=2)
    hasten(trainer)
    trainer.fit(TinyModule(), tiny_loader(32))


def script_that_fails() -> None:
    as_script(fails_and_asks)


def test_what_needs_all_ranks_after_an_error_of_one(run_dir: Path) -> None:
    """`on_exception` cannot make a call that needs all ranks. Each rank shows the first error once, rank 1 in one line."""
    ended = end_of(2, script_that_fails)
    assert ended.codes == [1, 1], ended.output
    assert "[rank 0] on_exception was not completed: it needs all ranks, and the run has failed." in ended.output
    assert "on_exception failed" not in ended.output
    assert ended.output.count("KeyError: 'mine'") == 2, ended.output


def of_three() -> str:
    """Ranks 0 and 2 save a checkpoint, rank 1 does not. Either of the waiting ranks may report it first."""
    trainer = make_trainer(OneRank("on_train_epoch_end", _save, 0, 2), max_epochs=3, devices=3)
    hasten(trainer)
    trainer.fit(TinyModule(), tiny_loader(48))
    return ""


def script_of_three() -> None:
    as_script(of_three)


def test_one_of_three_ranks_does_not_come(run_dir: Path) -> None:
    ended = end_of(3, script_of_three)
    assert ended.codes == [1, 1, 1], ended.output
    told = re.findall(
        r"^trainkit: rank (\d) (?:was ended because|ended because|failed with the same error).*CollectiveError: "
        rf"rank [02] waits for all processes in trainer\.save_checkpoint \({HERE}\)",
        ended.output,
        re.MULTILINE,
    )
    assert "1" in told, ended.output
    assert ended.output.count("trainkit.errors.CollectiveError: rank") + len(told) >= 3, ended.output
    assert "ProcessFailedError" not in ended.output


# ------------------------------------------------------------------------------------ all ranks count the same collectives


class Rows(Dataset):  # type: ignore[type-arg]
    """Samples with four inputs; the target is their sum."""

    def __init__(self, samples: int) -> None:
        self.inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [self.inputs[index], self.inputs[index].sum(0, keepdim=True)]


class Lossless(TinyModule):
    """Rank 1 has no loss in the second batch of each epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and self.global_rank == 1 else loss


class Ending(Callback):
    """Ends the second epoch early on all ranks, and saves a checkpoint at the end of training."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if trainer.current_epoch == 1 and batch_idx == 1 else None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint("mine")


def counted(kinds: list[str], strategy: str) -> list[int]:
    begun = []
    for kind in kinds:
        module: TinyModule = {"manual": ManualModule, "no loss": Lossless}.get(kind, TinyModule)()
        arguments: dict[str, Any] = {"accumulate_grad_batches": 3} if kind == "windows" else {}
        trainer = make_trainer(Ending(), max_epochs=2, strategy=strategy, devices=2, log_every_n_steps=2, **arguments)
        loader = DataLoader(Rows(26), batch_size=4)
        trainer.fit(module, loader, DataLoader(TensorDataset(*[t[:9] for t in tiny_loader(12).dataset.tensors]), batch_size=2))
        begun.append(trainer.strategy.world.collectives.begun)
    return begun


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_all_ranks_count_the_same(strategy: str, run_dir: Path) -> None:
    """All ranks count the same number of collectives, even if a rank has fewer batches or a step without a loss."""
    kinds = ["plain", "windows", "manual", *(["no loss"] if strategy == "ddp" else [])]
    first, second = run_world(2, counted, kinds, strategy)
    assert first == second
    assert all(count > 0 for count in first)
