"""After the launcher has restarted the processes, a fit resumes from the newest checkpoint of its run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.saving import Adam, saving
from helpers.runs.tiny import tiny_loader

from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.folder import list_checkpoints
from trainkit.console import TrainkitWarning
from trainkit.distributed.world import World
from trainkit.errors import CorruptCheckpointError
from trainkit.trainer import resume

FOLDER = Path("runs/version_0/checkpoints")


class Memory:
    """A placeholder for the store that the launcher keeps across restarts."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def set(self, key: str, text: str) -> None:
        self.texts[key] = text


class Job:
    """A script that the launcher starts several times. `start` simulates a new process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.restarts, self._patch = Memory(), -1, monkeypatch

    def start(self) -> None:
        self.restarts += 1
        self._patch.setattr(resume, "_FITS", itertools.count(1))

    def fit(self, steps: int, ckpt_path: Any = None, folder: str = "runs", **options: Any) -> Any:
        arguments = {name: options.pop(name) for name in ("fast_dev_run",) if name in options}
        callback = ModelCheckpoint(every_n_train_steps=1, keep_last=-1)
        trainer = saving(callback, max_epochs=-1, max_steps=steps, default_root_dir=folder, **arguments)
        trainer.strategy.world = World(restarts=self.restarts, memory=self.memory)  # type: ignore[arg-type]
        seen: list[int] = []
        module = Adam()
        module.on_train_start = lambda: seen.append(trainer.global_step)
        trainer.fit(module, tiny_loader(shuffle=True), ckpt_path=ckpt_path, **options)
        [trainer.began] = seen
        return trainer


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(monkeypatch)
    made.start()
    return made


def runs() -> dict[str, list[int]]:
    """The steps of each run's checkpoints."""
    found: dict[str, list[int]] = {}
    for one in list_checkpoints(FOLDER):
        assert one.manifest is not None
        found.setdefault(one.manifest.run_id, []).append(one.manifest.step)
    return {run: sorted(steps) for run, steps in found.items()}


def test_a_fresh_start_resumes(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """A script that starts from the beginning resumes after a restart."""
    first = job.fit(3)
    job.start()
    caplog.clear()
    again = job.fit(5)
    assert again.began == 3
    assert runs() == {first._save_policy.run_id: [1, 2, 3, 4, 5]}
    assert "the processes were restarted: the run continues from its newest checkpoint" in caplog.text


def test_without_a_restart_it_is_a_fresh_start(job: Job) -> None:
    job.fit(3)
    assert job.fit(3).began == 0


@pytest.mark.parametrize("ckpt_path", ["auto", "last", "runs/version_0/checkpoints/step-00000001"])
def test_whatever_ckpt_path_says(job: Job, ckpt_path: str) -> None:
    """After a restart the newest checkpoint of the run is used, whatever `ckpt_path` the script passes."""
    job.fit(3)
    job.restarts = -1
    job.memory.texts.clear()
    job.start()
    job.fit(4, ckpt_path=ckpt_path)
    job.start()
    assert job.fit(6, ckpt_path=ckpt_path).began == 4


def test_all_of_it_comes_back(job: Job) -> None:
    """After a restart the whole state of the run is restored: `ckpt_path` and `restore` apply to the first start only."""
    job.fit(3, folder="other")
    options = {"ckpt_path": "other/version_0/checkpoints/step-00000003", "restore": {"model"}, "overrides": None}
    first = job.fit(2, **options)
    assert first.began == 0
    job.start()
    job.fit(1)  # the script's first fit, which has nothing left to do
    again = job.fit(4, **options)
    assert again.began == 2
    assert again._save_policy.run_id == first._save_policy.run_id


def test_overrides_are_of_the_first_start(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.fit(2)
    job.start()
    job.memory.texts.clear()
    options = {"ckpt_path": "runs/version_0/checkpoints/step-00000002", "overrides": {"weight_decay": 0.3}}
    assert job.fit(4, **options).optimizers[0].param_groups[0]["weight_decay"] == 0.3
    assert "weight_decay is 0.3 from now on" in caplog.text
    job.start()
    caplog.clear()
    again = job.fit(5, **options)
    assert (again.began, again.optimizers[0].param_groups[0]["weight_decay"]) == (4, 0.3)
    assert "from now on" not in caplog.text


def test_restart_continues_a_resumed_run(job: Job) -> None:
    """A restart also resumes a run that the script itself had resumed from a checkpoint."""
    first = job.fit(2)
    job.start()
    second = job.fit(4, ckpt_path="auto")  # the same run
    job.start()
    third = job.fit(6)
    assert first._save_policy.run_id == second._save_policy.run_id == third._save_policy.run_id
    assert third.began == 4


def test_each_fit_of_a_script_resumes_by_itself(job: Job) -> None:
    job.fit(3)
    second = job.fit(2)
    job.start()
    assert job.fit(3).began == 3
    again = job.fit(4)
    assert (again.began, again._save_policy.run_id) == (2, second._save_policy.run_id)


def test_a_damaged_one_is_named_and_the_one_before_it_is_used(job: Job) -> None:
    job.fit(3)
    path = FOLDER / "step-00000003" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (FOLDER / "step-00000002" / "state.json").unlink()
    job.start()
    with pytest.warns(TrainkitWarning, match="damaged and skipped") as caught:
        again = job.fit(3)
    assert again.began == 1
    assert ["step-00000003" in str(one.message) for one in caught] == [True, False]


def test_all_of_the_run_being_damaged_is_an_error_and_no_fresh_start(job: Job) -> None:
    job.fit(2)
    for step in (1, 2):
        (FOLDER / f"step-0000000{step}" / "state.json").write_bytes(b"{}")
    job.start()
    with (
        pytest.warns(TrainkitWarning, match="damaged and skipped"),
        pytest.raises(CorruptCheckpointError, match=r"(?s)all checkpoints of this run.*step-00000002.*step-00000001"),
    ):
        job.fit(3)


def test_invalid_manifest_is_skipped_with_a_warning(job: Job) -> None:
    """A checkpoint with an invalid manifest is skipped with a warning."""
    job.fit(2)
    (FOLDER / "step-00000002" / "manifest.json").write_bytes(b"{}")
    job.start()
    with pytest.warns(TrainkitWarning, match=r"damaged and skipped: .*step-00000002"):
        assert job.fit(3).began == 1


@pytest.mark.parametrize("ckpt_path, began", [("runs/version_0/checkpoints/step-00000001", 1), ("auto", 3)])
def test_what_the_run_had_before_the_job_is_not_what_the_job_has_saved(job: Job, ckpt_path: str, began: int) -> None:
    """If a job resumes from an older checkpoint and is killed before its first save, it resumes from the same one again."""
    job.fit(3)
    job.memory.texts.clear()
    job.restarts = -1
    for _ in range(3):
        job.start()
        assert job.fit(began, ckpt_path=ckpt_path).began == began  # saves nothing
    job.start()
    job.fit(began + 1, ckpt_path=ckpt_path)
    job.start()
    assert job.fit(began + 2, ckpt_path=ckpt_path).began == began + 1


def test_a_restart_before_the_first_checkpoint(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.fit(2)
    job.start()
    job.memory.texts["run/1"] = "anotherrun"
    caplog.clear()
    assert job.fit(3).began == 0
    assert "no checkpoint was saved since the job began" in caplog.text
    job.start()
    job.memory.texts["run/1"] = "anotherrun"
    assert job.fit(4, ckpt_path="runs/version_0/checkpoints/step-00000002").began == 2


def test_a_trial_run_resumes_from_nothing(job: Job) -> None:
    job.fit(3)
    job.start()
    assert job.fit(3, fast_dev_run=True).began == 0
