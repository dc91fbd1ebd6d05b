"""ExponentialMovingAverage: its formula, exact resume from every hook, several processes, ZeRO."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_cases import FSDP
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Watching, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, Precision
from trainkit.callbacks import EMAWeightAveraging, ExponentialMovingAverage, ModelCheckpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.errors import ConfigurationError, Preempted
from trainkit.strategies import FSDPStrategy

HOOKS = [
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


class Dropping(TinyModule):
    """With BatchNorm, dropout and Adam."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Sequential(  # type: ignore[assignment]
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def loaders() -> tuple[Any, Any]:
    return tiny_loader(24, shuffle=True), tiny_loader(8)


def by_hand(weights: list[Tensor], decay: float, warmup: bool = False) -> Tensor:
    average = weights[0].clone()
    for number, value in enumerate(weights[1:], start=1):
        now = min(decay, (1 + number) / (10 + number)) if warmup else decay
        average = now * average + (1 - now) * value
    return average


class Skip(Callback):
    """Skips the third step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.batch_idx == 5:
            trainer.accelerator.skip_update()


@pytest.mark.parametrize("warmup", [False, True])
def test_the_formula(warmup: bool) -> None:
    """Steps count, not micro-batches, and a skipped step does not."""
    watching, module = Watching(), TinyModule()
    callbacks = Skip(), watching, ExponentialMovingAverage(decay=0.6, warmup=warmup)
    make_trainer(*callbacks, accumulate_grad_batches=2).fit(module, tiny_loader(32))
    steps = {step: state["layer.weight"] for step, _, state in watching.after if step}
    assert len(steps) == 3
    torch.testing.assert_close(module.layer.weight.detach(), by_hand(list(steps.values()), 0.6, warmup))


@pytest.mark.parametrize(
    ("arguments", "steps", "epochs"),
    [
        ({}, range(8), ()),
        ({"update_every_n_steps": 3}, (0, 3, 6), ()),
        ({"update_every_n_steps": 3, "update_starting_at_step": 1}, (3, 6), ()),
        ({"update_starting_at_step": 5}, (5, 6, 7), ()),
        ({"update_every_n_steps": 0, "update_starting_at_epoch": 1}, (), (1, 2)),
        ({"update_starting_at_epoch": 2}, range(8), (2,)),
    ],
)
def test_when_it_averages(arguments: dict[str, int], steps: Any, epochs: Any) -> None:
    """Which indices, as in Lightning."""
    average = EMAWeightAveraging(**arguments)  # type: ignore[arg-type]
    assert [step for step in range(8) if average.should_update(step_idx=step)] == list(steps)
    assert [epoch for epoch in range(3) if average.should_update(epoch_idx=epoch)] == list(epochs)


def test_arguments_out_of_range() -> None:
    for wrong in ({"decay": 1.5}, {"decay": -0.1}, {"update_every_n_steps": -1}, {"update_starting_at_epoch": 0.5}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            ExponentialMovingAverage(**wrong)  # type: ignore[arg-type]


def test_a_decay_in_the_place_of_the_device() -> None:
    with pytest.raises(ConfigurationError, match=r"Average\(device=0.9\): expected a device.*such as decay=0.99"):
        ExponentialMovingAverage(0.9)  # type: ignore[arg-type]


def test_arguments_of_the_base() -> None:
    average = ExponentialMovingAverage(device="meta", use_buffers=False)
    assert average.device == torch.device("meta")
    assert not average.use_buffers


class SaveIn(Callback):
    """Saves once in a hook, from an optimizer step on."""

    def __init__(self, hook: str, step: int, path: str = "saved") -> None:
        self.step, self.saved, self.path = step, False, path
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)


class Losses(Callback):
    """Records the loss of each validation by optimizer step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.by_step[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


def fit(*callbacks: Callback, ckpt_path: str | None = None, **options: Any) -> tuple[Any, ...]:
    """Everything that must be the same after a resumed run: weights, average, trained weights, metrics, optimizer."""
    average, losses = ExponentialMovingAverage(decay=0.8), Losses()
    placed = [losses, *(average if one is None else one for one in callbacks)]
    module = Dropping()
    arguments = {"max_epochs": 3, "val_every_n_steps": 2, "accumulate_grad_batches": 2, **options}
    trainer = make_trainer(*placed, **arguments)
    trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
    trainer.save_checkpoint("end")
    tensors = open_checkpoint("end").read({"model", "optimizer", "state"})
    trained = tensors.state["user"]["current_model_state"]
    return parameters_of(module), trained, tensors.tensors["optimizer"], average.state_dict(), losses.by_step


@pytest.mark.parametrize("value", [1e308, "x", {"layer.0.weight": "x"}, {"layer.0.weight": []}, {}], ids=repr)
def test_trained_weights_that_are_none(value: Any) -> None:
    """A hook of the user's, or someone else, may have added anything under their name: the model continues with its own."""

    class Adding(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["current_model_state"] = value

    module = Dropping()
    saving = make_trainer(Adding(), max_steps=2, enable_checkpointing=True)
    saving.fit(module, *loaders())
    saving.save_checkpoint("odd")
    assert open_checkpoint("odd").read({"state"}).state["user"]["current_model_state"] == value
    again = make_trainer(ExponentialMovingAverage(), max_steps=3)
    again.fit(Dropping(), *loaders(), ckpt_path="odd", restore={"model"})
    assert again.global_step == 3


def equal(resumed: tuple[Any, ...], reference: tuple[Any, ...]) -> bool:
    """Whether all is the same, and so are the losses of the validations since the resume."""
    *ours, state, losses = resumed
    *theirs, whole_state, whole_losses = reference
    since = {step: loss for step, loss in whole_losses.items() if step >= min(losses)}
    return all(same(a, b) for a, b in zip(ours, theirs, strict=True)) and state == whole_state and losses == since


def test_resume_from_every_hook(run_dir: Path) -> None:
    """Bit for bit, whether the hook that saves runs before or after the average's own."""
    reference = fit(None)  # type: ignore[arg-type]
    assert not same(reference[0], {**reference[0], **reference[1]})
    for hook in HOOKS:
        for first in (True, False) if hook in ("on_train_batch_end", "on_validation_start", "on_validation_end") else (True,):
            save = SaveIn(hook, 4 if hook != "on_train_epoch_end" else 1)
            order: list[Any] = [save, None] if first else [None, save]
            assert equal(fit(*order), reference)
            assert save.saved
            assert equal(fit(None, ckpt_path="saved"), reference), (hook, first)  # type: ignore[arg-type]


class Interrupt(Callback):
    """Something happens in the second batch of the second validation."""

    def __init__(self, act: Any) -> None:
        self.act, self.validations = act, 0

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validations += 1

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if self.validations == 2 and batch_idx == 1:
            self.act()


def test_a_signal_in_the_middle_of_a_validation(run_dir: Path) -> None:
    """The checkpoint has the trained weights, and the resumed run repeats the validation with the average."""
    reference = fit(None)  # type: ignore[arg-type]
    for first in (True, False):
        ending = Interrupt(lambda: signal.raise_signal(signal.SIGTERM))
        folder = f"checkpoints-{first}"
        order: list[Any] = [ModelCheckpoint(dirpath=folder, save_last=True), ending]
        order.insert(0 if first else 2, None)
        with pytest.raises(Preempted):
            fit(*order, enable_checkpointing=True)
        newest = Path(folder, (Path(folder) / "last").read_text().strip())
        assert open_checkpoint(newest).read({"state"}).state["loop"]["validation_pending"]
        assert equal(fit(None, ckpt_path=str(newest)), reference)  # type: ignore[arg-type]


def test_an_error_in_validation_leaves_the_trained_weights() -> None:
    def fail() -> None:
        raise ValueError("mine")

    watching, module = Watching(), Dropping()
    trainer = make_trainer(watching, ExponentialMovingAverage(decay=0.5), Interrupt(fail), max_epochs=3)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(module, *loaders())
    assert same(parameters_of(module), watching.after[-1][2])


# ----------------------------------------------------------------------------------------------------- several processes


def _train(kind: str, precision: str, resume: bool) -> tuple[Any, ...]:
    """A fit of one rank; ranks have different numbers of batches at the end of an epoch."""
    average, watching, losses, module = ExponentialMovingAverage(decay=0.7), Watching(), Losses(), Dropping()
    strategy = FSDPStrategy(**FSDP[kind]) if kind in FSDP else kind
    options = {"strategy": strategy, "precision": precision, "max_epochs": 2, "val_every_n_steps": 2, "devices": 2}
    end = SaveIn("on_train_end", 0, f"end-{resume}")  # after it, ZeRO releases the optimizer state
    saves = [end] if resume else [end, SaveIn("on_validation_batch_end", 3)]
    trainer = make_trainer(*saves[1:], average, watching, losses, saves[0], **options)
    trainer.fit(module, tiny_loader(20, shuffle=True), tiny_loader(12), ckpt_path="saved" if resume else None)
    assert average._updates == trainer.global_step == 3 * 2
    assert resume or len(watching.after) == (6, 4)[trainer.strategy.rank]
    saved = open_checkpoint(f"end-{resume}").read({"model", "state"})
    averaged = {name: value for name, value in saved.tensors["model"].items() if value.is_floating_point()}
    trainer.save_checkpoint(f"weights-{resume}", weights_only=True)
    weights = open_checkpoint(f"weights-{resume}").read({"model"}).tensors["model"]
    assert all(torch.equal(weights[name], value.to(weights[name].dtype)) for name, value in averaged.items())
    return parameters_of(module), averaged, saved.state["user"]["current_model_state"], losses.by_step


def _check(kind: str, precision: str) -> tuple[Any, ...]:
    """Returns what `_train` has returned on rank 0."""
    ranks = run_world(2, _train, kind, precision, False)
    resumed = run_world(2, _train, kind, precision, True)
    for weights, average, trained, losses in [*ranks, *resumed]:
        assert same(weights, ranks[0][0])
        assert same(average, ranks[0][1])
        assert same(trained, ranks[0][2])
        assert losses.items() <= ranks[0][3].items()
        assert not torch.equal(average["layer.0.weight"], trained["layer.0.weight"].float())
    alone = ExponentialMovingAverage(decay=0.7)
    make_trainer(alone, precision=precision).fit(Dropping(), tiny_loader(20, shuffle=True), ckpt_path="end-True")
    assert alone._updates == 6
    assert same(alone._average, ranks[0][1])  # nothing was left to train: as it was saved
    return tuple(ranks[0])


def test_two_processes_with_different_numbers_of_batches(run_dir: Path) -> None:
    """A rank without a batch in a step averages too; a run resumed in a validation is the same bit for bit."""
    _check("ddp", "32-true")


class OfEachRank(IterableDataset):
    """The second process has fewer batches, by several steps."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        for batch in list(tiny_loader(20))[: (5, 2)[self.rank]]:
            yield [batch[0] + self.rank, batch[1]]


def _stream() -> tuple[dict[str, Tensor], int]:
    average, module = ExponentialMovingAverage(decay=0.7), Dropping()
    trainer = make_trainer(average, strategy="ddp", devices=2)
    trainer.fit(module, DataLoader(OfEachRank(trainer.strategy.rank), batch_size=None))
    return parameters_of(module), average._updates


def test_a_process_that_has_no_batch_for_several_steps(run_dir: Path) -> None:
    first, second = run_world(2, _stream)
    assert same(first[0], second[0])
    assert first[1] == second[1] == 5


class Counts(Precision):
    """Counts how often weights change outside of optimizer steps."""

    changes = 0

    def weights_changed(self, module: Any) -> None:
        self.changes += 1


def test_the_precision_is_told_of_changed_weights(run_dir: Path) -> None:
    """Float8 keeps scales of the weights: a validation needs those of the average."""
    precision = Counts("32-true")
    make_trainer(ExponentialMovingAverage(decay=0.7), precision=precision, max_epochs=2).fit(Dropping(), *loaders())
    assert precision.changes == 4


@pytest.mark.zero
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_zero_with_whole_parameters(kind: str, precision: str, run_dir: Path) -> None:
    """Also where the trained weights in a checkpoint are masters that each rank has a part of."""
    _check(kind, precision)


def test_fsdp(run_dir: Path) -> None:
    """Each rank averages its shards. Averages, trained weights and the losses of validations are those of DDP."""
    found, expected = _check("fsdp", "64-true"), _check("ddp", "64-true")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.fsdp
@pytest.mark.parametrize(
    ("kind", "precision"), [("fsdp", "bf16-true"), ("fsdp-cpu", "bf16-mixed"), ("fsdp-reshard", "32-true")]
)
def test_fsdp_with_options(kind: str, precision: str, run_dir: Path) -> None:
    _check(kind, precision)


def _refused() -> str:
    module = Dropping()
    with pytest.raises(ConfigurationError) as error:
        make_trainer(ExponentialMovingAverage(), strategy="zero3", precision="32-true").fit(module, *loaders())
    return str(error.value)


def test_zero_that_shards_parameters_is_refused(run_dir: Path) -> None:
    assert "averages whole parameters" in run_world(1, _refused)[0]
