"""A run whose loss becomes NaN keeps its newest checkpoint with finite parameters, says so once, and is resumed from there."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit import Accelerator, Trainer
from trainkit.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, NonFiniteGuard
from trainkit.checkpoint.folder import list_checkpoints
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.console import TrainkitWarning
from trainkit.distributed.world import World
from trainkit.errors import NonFiniteError
from trainkit.trainer import resume

FOLDER = Path("runs/version_0/checkpoints")
STEPS = 4  # optimizer steps in an epoch on one process


class Breaking(TinyModule):
    """Its loss is NaN in the second epoch. A buffer is infinite, and so is a parameter that is not trained."""

    def __init__(self, broken: tuple[int, ...] = (1,), value: float = math.nan, rank: int | None = None) -> None:
        super().__init__()
        self.broken, self.value, self.rank = broken, value, rank
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.bias_mask = torch.nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        breaks = self.trainer.current_epoch in self.broken and self.rank in (None, self.trainer.global_rank)
        return loss * self.value if breaks else loss


def fit(module: TinyModule, *callbacks: Any, ckpt_path: Any = None, **arguments: Any) -> tuple[Trainer, list[str]]:
    """Train; returns the trainer and the warnings."""
    options = {"default_root_dir": "runs", "enable_checkpointing": True, "max_epochs": 4, **arguments}
    trainer = make_trainer(*callbacks, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", TrainkitWarning)
        trainer.fit(module, tiny_loader(), tiny_loader(), ckpt_path=ckpt_path)
    return trainer, [str(one.message) for one in seen]


def steps() -> dict[int, bool | None]:
    """The steps of the checkpoints in the run's folder, and whether each is finite."""
    return {one.manifest.step: one.manifest.finite for one in list_checkpoints(FOLDER) if one.manifest is not None}


def test_the_newest_finite_checkpoint_stays(caplog: pytest.LogCaptureFixture) -> None:
    trainer, [warning] = fit(Breaking(), log_every_n_steps=1000)
    assert steps() == {STEPS: True, 4 * STEPS: False}
    assert f"step {2 * STEPS}: parameters in {FOLDER.absolute() / f'step-{2 * STEPS:08d}'} are not finite" in warning
    assert f"The checkpoint to go back to: {FOLDER.absolute() / f'step-{STEPS:08d}'}." in warning
    assert "NonFiniteGuard" in warning
    assert "mask" not in warning
    assert trainer.checkpoint_callback.best_model_path.endswith(f"step-{STEPS:08d}")  # type: ignore[union-attr]
    caplog.clear()
    trainer, seen = fit(Breaking(broken=()), ckpt_path="auto")
    assert (trainer.global_step, seen) == (4 * STEPS, [])
    assert f"skipped newer checkpoints whose parameters are not finite (step-{4 * STEPS:08d})" in caplog.text
    assert f"resuming from {FOLDER.absolute() / f'step-{STEPS:08d}'} (step {STEPS}" in caplog.text
    assert all(torch.isfinite(value).all() for value in trainer.lightning_module.layer.parameters())
    assert steps() == {3 * STEPS: True, 4 * STEPS: True}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_log_boundary_tells(value: float, accumulate: int) -> None:
    """Also where the module logs nothing, and where only the first micro-batch of a window is broken."""

    class Silent(Breaking):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            return loss * self.value if self.trainer.current_epoch == 1 and batch_idx == 0 else loss

    _, [warning] = fit(Silent(value=value), log_every_n_steps=1, accumulate_grad_batches=accumulate)
    first = STEPS // accumulate
    assert f"the loss is {value} in optimizer step {first + 1}. Training continues." in warning
    assert f"The checkpoint to go back to: {FOLDER.absolute() / f'step-{first:08d}'}." in warning


def test_without_a_checkpoint_to_go_back_to() -> None:
    _, [warning] = fit(Breaking(broken=(0, 1, 2, 3)), log_every_n_steps=1)
    assert "the loss is nan in optimizer step 1." in warning
    assert "There is no checkpoint of this run with finite parameters." in warning
    assert steps() == {3 * STEPS: False, 4 * STEPS: False}
    _, [warning, _] = fit(Breaking(broken=()), ckpt_path="last", max_epochs=5, log_every_n_steps=1000)
    assert "are not finite, and its run has no checkpoint with finite ones" in warning


def test_manual_optimization_tells() -> None:
    class Manual(ManualModule):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) * (math.nan if self.trainer.current_epoch else 1.0)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            """Logs nothing."""

    _, [warning] = fit(Manual(), log_every_n_steps=1)
    assert f"the loss is nan in optimizer step {STEPS + 1}." in warning


def test_a_guard_tells_itself() -> None:
    """No second warning of the loss; what it skips is not a warning, either."""
    with pytest.raises(NonFiniteError, match="Not finite in optimizer step 5"):
        fit(Breaking(), NonFiniteGuard(), log_every_n_steps=1)
    _, [warning] = fit(Breaking(), NonFiniteGuard("skip", max_consecutive=None), log_every_n_steps=1)
    assert "NonFiniteGuard skipped 3 optimizer steps" in warning
    assert set(steps().values()) == {True}


def test_the_best_and_a_restored_best_are_finite() -> None:
    """The metric of the broken epochs is the best: it was logged, and is wrong."""

    class Wrong(Breaking):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            epoch = self.trainer.current_epoch
            self.log("val_loss", 2.0 - epoch if epoch < 3 else math.nan)

    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, keep_last=1, save_last=True)
    stop = EarlyStopping("val_loss", check_finite=False, patience=100)
    module = Wrong()
    trainer, [_] = fit(module, best, stop)
    first = str(FOLDER.absolute() / f"step-{STEPS:08d}")
    assert {path: float(score) for path, score in best.best_k_models.items()} == {first: 2.0}
    assert best.best_model_path == first
    assert (FOLDER / "last").read_text() == f"step-{STEPS:08d}\n"
    assert float(stop.best_score) == 0.0
    assert steps() == {STEPS: True, 4 * STEPS: False}
    trainer.validate(dataloaders=tiny_loader(), ckpt_path="best")
    assert torch.isfinite(module.layer.weight).all()
    other = make_trainer(ModelCheckpoint(str(FOLDER), monitor="val_loss"), enable_checkpointing=True)
    module = Breaking()
    other.validate(module, tiny_loader(), ckpt_path="best")
    assert torch.isfinite(module.layer.weight).all()


def test_an_explicit_path_is_used_and_named() -> None:
    fit(Breaking())
    path = FOLDER / f"step-{4 * STEPS:08d}"
    trainer, [warning, _] = fit(Breaking(broken=()), ckpt_path=path, max_epochs=5)
    assert f"the parameters in {path} are not finite. For the newest checkpoint with finite ones: ckpt_path='auto'" in warning
    assert trainer.global_step == 5 * STEPS
    assert trainer.checkpoint_callback.best_model_path.endswith(f"step-{STEPS:08d}")  # type: ignore[union-attr]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_path_of_the_user_keeps_what_is_finite(blocking: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Saving(Breaking):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint("mine", blocking=blocking, weights_only=self.trainer.current_epoch == 2)

    _, [warning] = fit(Saving(), enable_checkpointing=False, log_every_n_steps=1000)
    mine = Path("mine").absolute()
    assert f"{mine} is finite, so it was not replaced" in warning
    assert f"parameters in {mine}-nonfinite are not finite" in caplog.text  # of the next ones a notice
    assert [open_checkpoint(name).manifest.step for name in ("mine", "mine-nonfinite")] == [STEPS, 4 * STEPS]


def test_averaged_weights_do_not_hide_broken_ones() -> None:
    """A run resumes from the trained weights, so the checkpoint counts as not finite although the average is."""
    average = EMAWeightAveraging(update_every_n_steps=1000)
    trainer, [_] = fit(Breaking(), average, log_every_n_steps=1000, max_epochs=2)
    assert steps() == {STEPS: True, 2 * STEPS: False}
    path = trainer.checkpoint_callback.last_model_path  # type: ignore[union-attr]
    assert torch.isfinite(open_checkpoint(path).read().tensors["model"]["layer.weight"]).all()


def on_ranks(rank: int | None) -> Any:
    broken, seen = fit(Breaking(rank=rank), log_every_n_steps=1000)
    best = broken.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    found = steps()
    trainer, _ = fit(Breaking(broken=()), ckpt_path="auto")
    return best, found, trainer.global_step, bool(torch.isfinite(trainer.lightning_module.layer.weight).all()), seen


@pytest.mark.parametrize("rank", [None, 1])
def test_two_ranks_agree(rank: int | None) -> None:
    """The loss of one rank is enough: the gradient of all is NaN then."""
    first, second = run_world(2, on_ranks, rank)
    step = STEPS // 2
    assert first[:4] == second[:4]
    assert first[0] == str(FOLDER.absolute() / f"step-{step:08d}")
    assert first[1] == {step: True, 4 * step: False}
    assert first[2:4] == (4 * step, True)
    assert [len(one[4]) for one in (first, second)] == [1, 0]


class Memory(dict[str, str]):
    """A placeholder for the store that the launcher keeps across restarts."""

    def set(self, key: str, text: str) -> None:
        self[key] = text


def test_a_restarted_job_continues_from_the_newest_finite_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()

    def start(restarts: int, broken: tuple[int, ...], **options: Any) -> int:
        """One start of the script; returns the step that it began at."""
        monkeypatch.setattr(resume, "_FITS", itertools.count(1))
        module = Breaking(broken)
        began: list[int] = []
        module.on_train_start = lambda: began.append(module.trainer.global_step)
        trainer = make_trainer(max_epochs=3, default_root_dir="runs", enable_checkpointing=True, log_every_n_steps=1000)
        trainer.strategy.world = World(restarts=restarts, memory=memory)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainkitWarning)
            trainer.fit(module, tiny_loader(), **options)
        return began[0]

    assert start(0, (1, 2)) == 0
    assert start(1, (1, 2)) == STEPS
    memory.clear()
    assert start(0, (1, 2), ckpt_path="auto") == STEPS
    caplog.clear()
    assert start(1, (1, 2), ckpt_path="auto") == STEPS
    assert "no checkpoint with finite parameters was saved since the job began" in caplog.text


def test_weights_of_an_accelerator() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with torch.no_grad():
        model.weight[0, 1] = math.nan
    with pytest.warns(TrainkitWarning, match=r"save_model: parameters in .*weights are not finite: weight\."):
        accelerator.save_model(model, "weights")
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    del optimizer
    with pytest.warns(TrainkitWarning, match=r"save_state: parameters in .*state are not finite: weight\."):
        path = accelerator.save_state("state")
    assert open_checkpoint(path).manifest.finite is False
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert accelerator.save_state("state").name == "state"
    assert open_checkpoint("state").manifest.finite is True
    with torch.no_grad():
        model.weight.fill_(math.inf)
    assert Path(accelerator.save_state("state")).name == "state-nonfinite"
    accelerator.load_state("state")
    assert float(model.weight.detach().sum()) == 2.0
