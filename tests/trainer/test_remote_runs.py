"""Runs that save to a URL: a resume on another machine is exact, and its folder has the logs of the whole run."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers.resume.saving import Adam
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same

from trainkit import Accelerator, Trainer, paths
from trainkit.callbacks import ModelCheckpoint
from trainkit.cli.main import main
from trainkit.errors import ConfigurationError
from trainkit.loggers import CSVLogger, MLFlowLogger
from trainkit.paths import local_path, url_of

ROOT = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """An empty bucket, staged in the test's folder."""
    monkeypatch.setattr(paths, "_schemes", {})
    bucket = MemoryFileSystem()
    bucket.store.clear()
    bucket.pseudo_dirs[:] = [""]
    yield bucket
    bucket.store.clear()


def forget() -> None:
    """Another machine begins without the staging folder."""
    shutil.rmtree("trainkit_remote")


def fitted(root: str, steps: int, *, dirpath: str | None = None, **fit: Any) -> tuple[Trainer, dict[str, Any]]:
    checkpoint = ModelCheckpoint(dirpath, every_n_train_steps=2)
    trainer = make_trainer(
        checkpoint,
        default_root_dir=root,
        enable_checkpointing=True,
        max_steps=steps,
        max_epochs=-1,
        logger=CSVLogger(),
        log_every_n_steps=1,
    )
    module = Adam()
    trainer.fit(module, tiny_loader(16, shuffle=True), **fit)
    return trainer, parameters_of(module)


def checkpoints(bucket: MemoryFileSystem) -> list[str]:
    """The paths of the complete checkpoints."""
    return sorted(path.rpartition("/")[0] for path in bucket.glob("/bucket/**/manifest.sha256"))


RUN = "/bucket/runs/logs/default/version_0"


def test_a_run_continues_on_another_machine(bucket: MemoryFileSystem) -> None:
    _, whole = fitted("local", 8)
    fitted(ROOT, 4)
    assert checkpoints(bucket) == [f"{RUN}/checkpoints/step-0000000{step}" for step in (2, 4)]
    forget()
    trainer, resumed = fitted(ROOT, 8, ckpt_path="auto")
    assert same(resumed, whole)
    # the same are kept as in a local folder
    assert checkpoints(bucket) == [f"{RUN}/checkpoints/step-0000000{step}" for step in (6, 8)]
    rows = list(csv.DictReader(bucket.cat_file(f"{RUN}/metrics.csv").decode().splitlines()))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(1, 9))
    assert url_of(trainer.default_root_dir) == ROOT


class Scored(Adam):
    """Step 2 has the best value."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", abs(self.trainer.global_step - 2.0))


def test_the_best_weights_of_a_run_that_another_machine_began(bucket: MemoryFileSystem) -> None:
    def fit(steps: int, **more: Any) -> dict[str, Any]:
        module = Scored()
        arguments = {"default_root_dir": ROOT, "enable_checkpointing": True, "max_epochs": -1, "max_steps": steps}
        trainer = make_trainer(restore_best="val_loss", save_total_limit=2, val_every_n_steps=2, **arguments)
        trainer.fit(module, tiny_loader(16, shuffle=True), tiny_loader(4), **more)
        return parameters_of(module)

    first = fit(4)
    forget()
    assert same(fit(8, ckpt_path="auto"), first)
    assert [path[-1] for path in checkpoints(bucket)] == ["2", "8"]


def test_what_is_damaged_there_is_passed_for_an_older_one(bucket: MemoryFileSystem, recwarn: pytest.WarningsRecorder) -> None:
    fitted(ROOT, 4)
    bucket.pipe_file(f"{RUN}/checkpoints/step-00000004/model.safetensors", b"x" * 100)
    forget()
    trainer, _ = fitted(ROOT, 6, ckpt_path="auto")
    assert [str(one.message) for one in recwarn if "step-00000004/model.safetensors" in str(one.message)]
    assert trainer._save_policy.resumed_from == local_path(f"memory:/{RUN}/checkpoints/step-00000002", "path")


def test_a_new_run_gets_a_new_folder(bucket: MemoryFileSystem) -> None:
    fitted(ROOT, 2)
    forget()
    fitted(ROOT, 2)
    assert {path.split("/")[5] for path in bucket.find("/bucket/runs/logs/default")} == {"version_0", "version_1"}


def test_a_folder_of_a_callback_and_paths(bucket: MemoryFileSystem, capsys: pytest.CaptureFixture[str]) -> None:
    """`dirpath`, `save_checkpoint`, `ckpt_path` and the command line."""
    trainer, whole = fitted("local", 4, dirpath="memory://bucket/mine")
    assert checkpoints(bucket) == [f"/bucket/mine/step-0000000{step}" for step in (2, 4)]
    trainer.save_checkpoint("memory://bucket/by-hand")
    assert "/bucket/by-hand" in checkpoints(bucket)
    forget()
    _, again = fitted("local", 4, dirpath="memory://bucket/mine", ckpt_path="memory://bucket/mine/step-00000002")
    assert same(again, whole)
    assert f"step-{2:08}-v1" not in "".join(checkpoints(bucket))
    forget()
    trainer.validate(Adam(), tiny_loader(8), ckpt_path="memory://bucket/by-hand", verbose=False)
    forget()
    assert main(["checkpoint", "ls", "memory://bucket/mine"]) == 0
    assert "step-00000004" in capsys.readouterr().out
    assert main(["checkpoint", "verify", "memory://bucket/mine/step-00000004"]) == 0


def test_the_verbs_of_an_accelerator(bucket: MemoryFileSystem) -> None:
    accelerator = Accelerator()
    module = accelerator.prepare(Adam())
    accelerator.save_state("memory://bucket/state")
    accelerator.save_model(module, "memory://bucket/model")
    assert bucket.isfile("/bucket/model/model.safetensors")
    forget()
    before = parameters_of(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    accelerator.load_state("memory://bucket/state")
    assert same(parameters_of(module), before)


@pytest.mark.world_size(2)
def test_the_main_process_uploads() -> None:
    trainer, _ = fitted(ROOT, 4)
    found = checkpoints(MemoryFileSystem())
    assert len(found) == (2 if trainer.is_global_zero else 0)


@pytest.mark.parametrize("path, words", [
    ("nothing://bucket/run", ["default_root_dir", "whose scheme 'nothing' it does not know", "s3://bucket/run"]),
    ("memory://", ["expected a URL with a folder"]),
    ("memory://bucket/../run", ["without '..'"]),
])  # fmt: skip
def test_a_url_that_cannot_be_used(path: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(default_root_dir=path)
    assert all(word in str(caught.value) for word in words)
    assert not list(Path.cwd().iterdir())


def test_a_logger_with_a_layout_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match=r"MLFlowLogger\(save_dir='memory://bucket/logs'\): expected a local folder"):
        MLFlowLogger(save_dir="memory://bucket/logs")
