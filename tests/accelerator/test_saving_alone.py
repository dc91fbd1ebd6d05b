"""Saves inside `if accelerator.is_main_process:`, and the same saves called on all processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import same
from helpers.worlds.worlds import run_world, start_world
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Accelerator, set_seed
from trainkit.checkpoint import list_checkpoints, open_checkpoint
from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.errors import CheckpointError, ConfigurationError, UnsavableError
from trainkit.strategies import FSDPStrategy

HERE = r"test_saving_alone\.py:\d+"


class Loop:
    """A loop with dropout, accumulation, a schedule and a registered object."""

    def __init__(self, samples: int = 24, **options: Any) -> None:
        set_seed(3)
        self.accelerator = Accelerator(cpu=True, **options)
        self.accelerator.gradient_accumulation_steps = 4 // self.accelerator.num_processes
        torch.manual_seed(1)
        self.plain = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.plain, optimizer, tiny_loader(samples, shuffle=True, batch_size=2)
        )
        self.batches = 0
        self.accelerator.register_for_checkpointing(self, self.scheduler)

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]

    def steps(self, epochs: int = 2) -> Iterator[int]:
        """Train; yields the number of batches after each."""
        for _ in range(self.loader.epoch, epochs):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(nn.functional.mse_loss(self.model(inputs), targets))
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    if self.accelerator.sync_gradients:
                        self.scheduler.step()
                    self.optimizer.zero_grad()
                self.batches += 1
                yield self.batches

    def save(self, who: str, folder: str | None, **options: Any) -> None:
        if who == "all" or self.accelerator.is_main_process:
            self.accelerator.save_state(folder, **options)

    def weights(self) -> dict[str, list[Any]]:
        return {name: value.tolist() for name, value in self.plain.state_dict().items()}


def trained(who: str, at: int, blocking: bool) -> Any:
    loop = Loop()
    for batches in loop.steps():
        if batches == at:
            begun = loop.accelerator.world.collectives.begun
            loop.save(who, "there", blocking=blocking)
            assert loop.accelerator.world.collectives.begun == begun, "no collective"
    loop.accelerator.wait_for_everyone()
    loop.accelerator.save_model(loop.model, "model")
    loop.accelerator.wait_for_everyone()
    assert Path("model/model.safetensors").exists()
    return loop.weights()


def killed(who: str, at: int) -> None:
    loop = Loop()
    for batches in loop.steps():
        if batches == at:
            loop.save(who, "there")
        if batches == at + 2:
            loop.accelerator.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(processes: int) -> Any:
    loop = Loop()
    if loop.accelerator.num_processes != processes:
        raise AssertionError(loop.accelerator.num_processes)
    loop.accelerator.load_state("there", resume_loaders=True)
    for _ in loop.steps():
        pass
    return loop.batches, loop.weights()


@pytest.mark.parametrize("who", ["main", "all"])
@pytest.mark.parametrize("at", [4, 5])
def test_a_killed_run_resumes_exactly(who: str, at: int, run_dir: Path) -> None:
    """A loop that was saved at the end of a window, or inside one, resumes on two processes and on one."""
    whole = run_world(2, trained, who, at, at == 4)
    assert whole[0] == whole[1]
    assert open_checkpoint("there").manifest.world_size == 2
    assert same(load_file("model/model.safetensors"), {n: torch.tensor(v) for n, v in whole[0].items()})
    start_world(2, killed, who, at).ends()
    batches = 12 + at % 2  # the object was saved inside the window, and the loader begins with its first batch
    assert run_world(2, resumed, 2) == [(batches, weights) for weights in whole]
    ((_, one),) = run_world(1, resumed, 1)
    assert all(torch.allclose(torch.tensor(one[name]), torch.tensor(value), atol=1e-6) for name, value in whole[0].items())


class Stream(IterableDataset[Any]):
    """A stream with a position, of which each process reads its own part."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ["RANK"])
        while self.read < 8:
            self.read += 1
            yield torch.full((4,), float(self.read + 100 * rank))

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def on_the_main_process(kind: str, verb: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy() if kind == "fsdp" else "auto")
    model, _, loader = accelerator.prepare(
        inner := nn.Linear(4, 1), torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(Stream(), batch_size=2)
    )
    if kind == "stream":
        next(iter(loader))
    if accelerator.is_main_process:
        accelerator.save_model(model, "there") if verb == "save_model" else accelerator.save_state("there")
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("kind, verb", [("fsdp", "save_state"), ("fsdp", "save_model"), ("stream", "save_state")])
def test_where_all_processes_must_save(kind: str, verb: str, run_dir: Path) -> None:
    """The error names both lines."""
    ends = start_world(2, on_the_main_process, kind, verb).ends()
    named = rf"CollectiveError: the processes have made different calls: rank 0: {verb} \({HERE}\); rank 1: wait_for_everyone "
    assert all(not fine and re.search(named + rf"\({HERE}\)", text) for fine, text in ends), ends
    assert not Path("there").exists()


def fill(folder: str) -> None:
    """Make a folder that is no checkpoint, so that no checkpoint can be written there."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "notes.txt").write_text("")


def failing(what: str) -> Any:
    """What each process raises, and where."""
    loop = Loop(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=what == "numbered"))
    accelerator, raised = loop.accelerator, []
    fill("full")
    folder: Any = "full"
    if what == "unsavable":
        loop.batches, folder = object(), "there"  # type: ignore[assignment]
    if what == "numbered":
        Path("project/checkpoints/checkpoint_5").mkdir(parents=True, exist_ok=True)
    for verb in (
        lambda: loop.save("main", None if what == "numbered" else folder, blocking=what != "thread"),
        accelerator.wait_for_everyone,
        accelerator.check_trigger,
    ):
        try:
            verb()
        except Exception as error:
            raised.append([verb.__name__, type(error).__name__, "rank 0: " in str(error)])
    loop.batches = 1
    accelerator.project_configuration.iteration = 6
    accelerator.save_state("good")
    accelerator.wait_for_everyone()
    accelerator.load_state() if what == "numbered" else accelerator.load_state("good")
    return raised, accelerator.save_iteration


@pytest.mark.parametrize(
    "what, error",
    [
        ("folder", CheckpointError),
        ("thread", CheckpointError),
        ("unsavable", UnsavableError),
        ("numbered", ConfigurationError),
    ],
)
def test_a_failure_is_raised_by_the_next_verb_of_all(what: str, error: type[Exception], run_dir: Path) -> None:
    first, second = run_world(2, failing, what)
    where = "wait_for_everyone" if what == "thread" else "<lambda>"
    assert first[0] == [[where, error.__name__, False]]
    assert second[0] == [["wait_for_everyone", error.__name__, True]]
    assert first[1] == second[1]


def caught() -> list[str]:
    """All processes catch the error of a save that they have waited for, and continue."""
    loop, raised = Loop(), []
    fill("full")
    try:
        loop.accelerator.save_state("full")
        loop.accelerator.wait_for_everyone()
    except CheckpointError as error:
        raised.append(type(error).__name__)
    loop.accelerator.save_state("there")
    loop.accelerator.load_state("there")
    return raised


def test_a_failure_that_all_catch(run_dir: Path) -> None:
    assert run_world(2, caught) == [["CheckpointError"]] * 2


def caught_in_a_loop(body: str, who: str) -> Any:
    """A loop that catches the errors of a whole iteration, of which some cannot save. Returns where it has caught which."""
    loop, raised = Loop(samples=48), []
    accelerator = loop.accelerator
    fill("full")
    fails = {2, 3, 6}

    def hook(models: Any, weights: Any, folder: str) -> None:
        raise OSError(f"no space in {folder}")

    if who == "hook":
        accelerator.register_save_state_pre_hook(hook)
        fails.discard(3)
    for number, (inputs, targets) in enumerate(loop.loader):
        try:
            if body == "train":
                with accelerator.accumulate(loop.model):
                    accelerator.backward(nn.functional.mse_loss(loop.model(inputs), targets))
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
            if number in fails:
                loop.save("main" if who == "main" else "all", "hooked" if who == "hook" else "full")
            elif number in (5, 8) and who != "hook":
                loop.save("main", f"good_{number}")
            accelerator.wait_for_everyone()
            if body == "gather":
                assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
        except CheckpointError as error:
            raised.append((number, type(error).__name__))
    accelerator.wait_for_everyone()
    return raised, number, loop.weights(), sorted(fails)


@pytest.mark.parametrize("who", ["main", "all", "hook"])
@pytest.mark.parametrize("body", ["wait", "gather", "train"])
def test_each_process_raises_a_failure_once_and_a_loop_that_catches_it_continues(body: str, who: str, run_dir: Path) -> None:
    """The main process raises where it saves, and the others where they wait for it: no iteration of theirs is lost."""
    first, second = run_world(2, caught_in_a_loop, body, who)
    assert first == second
    error = "CheckpointWriteError" if who == "hook" else "CheckpointError"
    assert first[0] == [(number, error) for number in first[3]]
    assert first[1] == 11
    if who != "hook":
        assert open_checkpoint("good_8").manifest.step == (4 if body == "train" else 0)


def numbered() -> Any:
    """The main process saves alone, then all do; a save in a thread is complete when `load_state` reads it."""
    set_seed(3)
    project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(2, 1))  # no loader, so nothing has asked for the seed
    for _ in range(3):
        if accelerator.is_main_process:
            accelerator.save_state(blocking=False)
    accelerator.load_state()
    found = [accelerator.save_iteration, accelerator.save_state().name]
    accelerator.wait_for_everyone()
    return [*found, accelerator.run_id, sorted(one.path.name for one in list_checkpoints("project/checkpoints"))]


def test_numbered_checkpoints(run_dir: Path) -> None:
    first, second = run_world(2, numbered)
    assert first == second
    assert first[:2] == [3, "checkpoint_3"]
    assert first[-1] == ["checkpoint_2", "checkpoint_3"]
    assert open_checkpoint("project/checkpoints/checkpoint_3").manifest.run_id == first[2]
    assert open_checkpoint("project/checkpoints/checkpoint_3").manifest.seed == 3
