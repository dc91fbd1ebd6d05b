"""`register_save_state_pre_hook` and `register_load_state_pre_hook`: models saved and loaded in the user's own way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import same
from helpers.worlds.worlds import run_world, start_world
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Accelerator, Trainer, load_checkpoint_in_model
from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.folder import remove_leftovers
from trainkit.checkpoint.hook_files import HookFiles
from trainkit.errors import (
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
    HookError,
    StateMismatchError,
    TrainkitError,
)
from trainkit.strategies import FSDPStrategy
from trainkit.utils import ProjectConfiguration, set_seed


class Loop:
    """A model that was trained for one step, and hooks that save and load it in a folder of its own."""

    def __init__(self, models: int = 1, **options: Any) -> None:
        torch.manual_seed(models)
        self.accelerator = Accelerator(cpu=True, **options)
        plain = [nn.Linear(2, 1) for _ in range(models)]
        optimizer = torch.optim.AdamW([p for one in plain for p in one.parameters()], lr=0.1)
        *self.models, self.optimizer = self.accelerator.prepare(*plain, optimizer)
        self.plain, self.seen = plain, []

    def step(self) -> None:
        self.accelerator.backward(sum((model(torch.ones(1, 2)).sum() for model in self.models), torch.zeros(())))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def register(self) -> Loop:
        self.accelerator.register_save_state_pre_hook(self.save_hook)
        self.accelerator.register_load_state_pre_hook(self.load_hook)
        return self

    def save_hook(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        self.seen = [list(models), [sorted(one) for one in weights], output_dir]
        if self.accelerator.is_main_process:
            os.makedirs(os.path.join(output_dir, "net"))
            save_file(models[-1].state_dict(), os.path.join(output_dir, "net", "weights.safetensors"))
            Path(output_dir, "pytorch_lora_weights.safetensors").write_bytes(b"not a file of tensors")
            weights.pop()

    def load_hook(self, models: list[nn.Module], input_dir: str) -> None:
        models.pop().load_state_dict(load_file(os.path.join(input_dir, "net", "weights.safetensors")))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in nn.ModuleList(self.plain).state_dict().items()}


def entries(folder: str = ".") -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if not path.is_dir())


# ------------------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("blocking", [True, False])
def test_what_hooks_write_is_part_of_the_checkpoint(blocking: bool, run_dir: Path) -> None:
    loop = Loop(models=2).register()
    loop.step()
    before = loop.weights()
    loop.accelerator.save_state("there", blocking=blocking)
    loop.accelerator.release_save_buffers()
    assert loop.seen[:2] == [loop.plain, [["bias", "weight"]] * 2]
    assert Path(loop.seen[2]).parent == run_dir
    manifest = open_checkpoint("there").manifest
    assert sorted(manifest.files) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(manifest.hook_files) == ["net/weights.safetensors", "pytorch_lora_weights.safetensors"]
    assert (manifest.format_version, manifest.by_hook) == (3, ["model_1"])
    open_checkpoint("there").verify()
    assert open_checkpoint("there").attachment("pytorch_lora_weights.safetensors") == b"not a file of tensors"
    loop.step()
    after = loop.weights()
    assert not same(before, after)
    loop.accelerator.load_state("there")
    assert same(loop.weights(), before)
    loop.step()
    assert same(loop.weights(), after), "the optimizer state is there"
    assert sorted(os.listdir()) == ["there"]


def test_without_the_hook_that_loads_them_the_error_names_it(run_dir: Path) -> None:
    loop = Loop().register()
    loop.step()
    loop.accelerator.save_state("there")
    other = Loop()
    before = other.weights()
    with pytest.raises(StateMismatchError, match=r"no weights of 'model'.*register_load_state_pre_hook\(load_model_hook\)"):
        other.accelerator.load_state("there")
    with pytest.raises(StateMismatchError, match="no weights of 'model': a hook of save_state"):
        open_checkpoint("there").read({"model"})
    with pytest.raises(StateMismatchError, match="no weights of 'model': a hook of save_state"):
        load_checkpoint_in_model(nn.Linear(2, 1), "there")
    trainer = Trainer(max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    with pytest.raises(StateMismatchError, match="no weights of 'model': a hook of save_state"):
        trainer.fit(TinyModule(), tiny_loader(4), ckpt_path="there", restore={"model"})
    assert same(other.weights(), before)
    other.accelerator.register_load_state_pre_hook(lambda models, input_dir: None)
    with pytest.raises(StateMismatchError, match="no weights of 'model'"):
        other.accelerator.load_state("there")
    other.accelerator.load_state("there", restore={"optimizer", "scheduler", "scaler"})


def test_a_model_that_no_hook_loads_is_loaded(run_dir: Path) -> None:
    """A hook that only adds a file; the load hook sees it, and does not run without the models."""
    loop, read = Loop(), []
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, folder: Path(folder, "note.txt").write_text("hello"))
    loop.accelerator.register_load_state_pre_hook(lambda models, folder: read.append(Path(folder, "note.txt").read_text()))
    loop.accelerator.save_state("there")
    saved = loop.weights()
    loop.step()
    loop.accelerator.load_state("there", restore={"optimizer"})
    assert not read
    loop.accelerator.load_state("there")
    assert read == ["hello"]
    assert same(loop.weights(), saved)


def test_a_handle_removes_its_hook(run_dir: Path) -> None:
    loop, calls = Loop(), []
    handles = [loop.accelerator.register_save_state_pre_hook(lambda *_, name=name: calls.append(name)) for name in "ab"]
    loop.accelerator.save_state("there")
    handles[0].remove()
    loop.accelerator.save_state("there")
    handles[1].remove()
    loop.accelerator.save_state("there")
    assert calls == ["a", "b", "b"]
    assert open_checkpoint("there").manifest.format_version == 2


@pytest.mark.parametrize("hook", [7, lambda models: None])
def test_what_cannot_be_a_hook(hook: Any) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(HookError, match=r"register_save_state_pre_hook needs .* def hook\(models, weights, output_dir\): "):
        accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(HookError, match=r"register_load_state_pre_hook needs .* def hook\(models, input_dir\): "):
        accelerator.register_load_state_pre_hook(hook)


@pytest.mark.parametrize("numbered", [False, True])
def test_an_error_in_a_hook_leaves_what_was_there(numbered: bool, run_dir: Path) -> None:
    loop = Loop(project_config=ProjectConfiguration(".", automatic_checkpoint_naming=numbered)).register()
    loop.accelerator.save_state("there")
    was = entries()

    def broken(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, "half").write_text("")
        raise OSError("no space")

    loop.accelerator.register_save_state_pre_hook(broken)
    place = r"the hook test_an_error_.*broken \(test_state_hooks\.py:\d+\)"
    with pytest.raises(
        CheckpointWriteError, match=rf"save_state: {place} raised OSError: no space\. No checkpoint was written"
    ):
        loop.accelerator.save_state("there")
    assert entries() == was
    assert not list(run_dir.rglob(".*"))
    loop.accelerator.register_load_state_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(CheckpointError, match=r"load_state: the hook .* raised ZeroDivisionError"):
        loop.accelerator.load_state(None if numbered else "there")


def deep(output_dir: str) -> None:
    os.makedirs(os.path.join(output_dir, "a/b"))


def link(output_dir: str) -> None:
    os.symlink(os.path.abspath("outside"), os.path.join(output_dir, "link"))


@pytest.mark.parametrize(
    "write, error",
    [
        (deep, r"'a/b': expected a regular file, found a folder\. Files may be in output_dir, or in a folder in it"),
        (link, r"'link': expected a regular file, found a link"),
        ("état", "'état', which cannot be the name of a file in a checkpoint"),
        (".hidden", "'.hidden', which cannot be"),
        ("manifest.json", "'manifest.json', which cannot be"),
        ("State.json", "'State.json', the name of another file"),
        ("model.safetensors", r"'model.safetensors', the name of another file .*: weights\.pop\(\)"),
    ],
)
def test_what_a_hook_must_not_write(write: str | Callable[[str], None], error: str, run_dir: Path) -> None:
    loop = Loop()

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, write).write_text("") if isinstance(write, str) else write(output_dir)

    loop.accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(CheckpointError, match=f"a hook of save_state has written {error}"):
        loop.accelerator.save_state("there")
    assert not os.listdir()


def test_a_hook_may_write_the_file_of_a_model_that_it_saves(run_dir: Path) -> None:
    """As `model.save_pretrained(output_dir)` of `transformers` does."""
    loop = Loop()

    def hook(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        save_file(models[0].state_dict(), os.path.join(output_dir, "model.safetensors"))
        weights.clear()

    loop.accelerator.register_save_state_pre_hook(hook)
    loop.accelerator.save_state("there")
    assert list(open_checkpoint("there").manifest.hook_files) == ["model.safetensors"]
    assert same(load_file("there/model.safetensors"), loop.plain[0].state_dict())
    with pytest.raises(StateMismatchError, match="no weights of 'model'"):
        loop.accelerator.load_state("there")


def emptied(weights: list[dict[str, Any]]) -> None:
    weights[0].clear()


def replaced(weights: list[dict[str, Any]]) -> None:
    weights[0] = {name: value.half() for name, value in weights[0].items()}


def halved(weights: list[dict[str, Any]]) -> None:
    weights[0]["bias"] = weights[0]["bias"].half()


@pytest.mark.parametrize("change", [emptied, replaced, halved])
def test_a_hook_must_not_change_weights(change: Callable[[list[Any]], None], run_dir: Path) -> None:
    loop = Loop()
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: change(weights))
    with pytest.raises(ConfigurationError, match="a hook has changed the weights that it got"):
        loop.accelerator.save_state("there")
    assert not os.listdir()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_file_that_changes_after_its_hook(blocking: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop().register()
    move = HookFiles.move

    def late(self: HookFiles, *args: Any) -> Any:
        with (self.folder / "pytorch_lora_weights.safetensors").open("ab") as file:
            file.write(b"late")
        return move(self, *args)

    def save() -> None:
        loop.accelerator.save_state("there", blocking=blocking)
        loop.accelerator.release_save_buffers()

    monkeypatch.setattr(HookFiles, "move", late)
    with pytest.raises(CheckpointWriteError, match=r"lora_weights\.safetensors: expected 21 bytes, found 25\."):
        save()
    assert not os.listdir()


def test_a_checkpoint_that_is_replaced(run_dir: Path) -> None:
    """Files of earlier hooks go, others in the same folder stay."""
    loop = Loop().register()
    names = ["first"]

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        for name in names:
            Path(output_dir, "more").mkdir(exist_ok=True)
            Path(output_dir, "more", name).write_text(name)

    loop.accelerator.register_save_state_pre_hook(hook)
    loop.accelerator.save_state("there")
    Path("there/net/mine.txt").write_text("mine")
    names[:] = []
    loop.accelerator.save_state("there")
    listed = ["net/weights.safetensors", "pytorch_lora_weights.safetensors"]
    assert sorted(open_checkpoint("there").manifest.hook_files) == listed
    ours = ["manifest.json", "manifest.sha256", "net/mine.txt", "optimizer.safetensors", "state.json"]
    assert entries("there") == sorted([*listed, *ours])
    assert not Path("there/more").exists()
    assert Path("there/net/mine.txt").read_text() == "mine"
    Path("there/more").write_text("in the way of a folder")
    names[:] = ["second"]
    loop.accelerator.save_state("there")
    assert "more/second" in open_checkpoint("there").manifest.hook_files


def test_a_model_that_is_not_finite_is_noticed(run_dir: Path, recwarn: pytest.WarningsRecorder) -> None:
    loop = Loop().register()
    loop.accelerator.save_state("there")
    loop.plain[0].weight.data[0, 0] = torch.nan
    loop.accelerator.save_state("there")
    assert open_checkpoint("there").manifest.finite
    assert open_checkpoint("there-nonfinite").manifest.finite is False
    assert entries("there") == entries("there-nonfinite")
    assert "parameters in there-nonfinite are not finite: weight" in str(recwarn.pop().message).replace(f"{run_dir}/", "")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def through_a_link(path: Path) -> None:
    os.rename(path.parent, "elsewhere")
    os.symlink(os.path.abspath("elsewhere"), path.parent)


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (damage, r"net/weights\.safetensors: its XXH3-128 is [0-9a-f]+, expected"),
        (Path.unlink, r"net/weights\.safetensors: missing"),
        (lambda path: path.write_bytes(b""), r"net/weights\.safetensors: expected \d+ bytes, found 0"),
        (through_a_link, r"net/weights\.safetensors: .*net is not a folder"),
    ],
    ids=["changed", "missing", "cut", "link"],
)
def test_damage_is_found_before_a_hook_reads_it(spoil: Callable[[Path], None], problem: str, run_dir: Path) -> None:
    loop = Loop().register()
    loop.accelerator.save_state("there")
    spoil(Path("there/net/weights.safetensors"))
    with pytest.raises(CorruptCheckpointError, match=problem):
        open_checkpoint("there").verify()
    with pytest.raises(CorruptCheckpointError, match=problem):
        loop.accelerator.load_state("there")


def killed_at(at: str) -> None:
    """Save twice to one folder; the second save is killed."""
    loop = Loop().register()
    loop.accelerator.save_state("there")
    loop.step()

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, "half").write_bytes(b"1" * 1000)
        kill()

    if at == "hook":
        loop.accelerator.register_save_state_pre_hook(half)
    elif at == "before":
        HookFiles.move = kill  # type: ignore[method-assign, assignment]
    else:
        move = HookFiles.move
        HookFiles.move = lambda self, *args: (move(self, *args), kill())[0]  # type: ignore[method-assign]
    loop.accelerator.save_state("there")


@pytest.mark.parametrize("at", ["hook", "before", "after"])
def test_a_kill_leaves_the_older_checkpoint(at: str, run_dir: Path) -> None:
    """While a hook writes, before and after its files are moved; the resumed run removes what is left."""
    assert start_world(1, killed_at, at).ends() == [(False, "ended with -9")]
    open_checkpoint("there").verify()
    assert "half" not in entries("there")
    assert [name for name in os.listdir() if name != "there"], "something is left"
    loop = Loop().register()
    loop.accelerator.load_state("there")
    loop.accelerator.save_state("there")
    assert os.listdir() == ["there"]


def test_a_new_run_removes_what_a_killed_hook_has_left(run_dir: Path) -> None:
    for name in (".a.tmp-0123456789abcdef-files", ".b.tmp-0123456789abcdef"):
        Path("runs", name, "unet").mkdir(parents=True)
        Path("runs", name, "unet", "config.json").write_text("")
    assert [path.name for path in remove_leftovers(Path("runs"))] == [".a.tmp-0123456789abcdef-files"]


# ---------------------------------------------------------------------------------------------------------- two processes


def alone(who: str) -> Any:
    """Under DDP the main process saves alone; hooks run on all processes that call."""
    loop = Loop().register()
    loop.step()
    saved = loop.weights()
    if who == "all":
        loop.accelerator.register_save_state_pre_hook(lambda *_: loop.accelerator.wait_for_everyone())
    if who == "all" or loop.accelerator.is_main_process:
        loop.accelerator.save_state("there", blocking=who == "all")
    loop.accelerator.wait_for_everyone()
    loop.step()
    loop.accelerator.load_state("there")
    return bool(loop.seen), same(loop.weights(), saved)


@pytest.mark.parametrize("who", ["main", "all"])
def test_the_main_process_saves_alone(who: str, run_dir: Path) -> None:
    assert run_world(2, alone, who) == [(True, True), (who == "all", True)]
    assert open_checkpoint("there").manifest.world_size == 2


class Stream(IterableDataset[Any]):
    """With it, all processes save together."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.ones(4, 2)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def together(kind: str) -> Any:
    """What each process raises, if something fails on rank 1 alone."""
    loop = Loop(strategy=FSDPStrategy() if kind == "fsdp" else "auto").register()
    accelerator = loop.accelerator
    if kind != "alone":
        accelerator.prepare(DataLoader(Stream(), batch_size=2))
    loop.step()
    saved, raised = loop.weights(), []

    def on_rank_1(models: Any, weights: Any, output_dir: str) -> None:
        if kind == "lost":
            accelerator.wait_for_everyone() if accelerator.is_main_process else time_out()
        if not accelerator.is_main_process and kind != "good":
            Path(output_dir, "rank_1.txt").write_text("")
            if kind == "fails":
                time_out()

    def time_out() -> None:
        raise TimeoutError("on rank 1")

    accelerator.register_save_state_pre_hook(on_rank_1)
    for verb in (lambda: accelerator.save_state("there"), lambda: accelerator.load_state("there")):
        try:
            verb()
        except TrainkitError as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised, [len(part) for part in loop.seen[:2]], same(loop.weights(), saved)


def test_hooks_on_all_processes(run_dir: Path) -> None:
    """What the main process removes from the list counts, and what any process writes is in the checkpoint."""
    assert run_world(2, together, "writes") == [([], [1, 1], True)] * 2
    assert "rank_1.txt" in open_checkpoint("there").manifest.hook_files
    assert open_checkpoint("there").manifest.by_hook == ["model"]


def damaged() -> list[str]:
    """What each process raises for each damaged file, of which one process reads each."""
    loop, texts = Loop().register(), []
    loop.accelerator.save_state("there")
    loop.accelerator.wait_for_everyone()
    for name in ("net/weights.safetensors", "pytorch_lora_weights.safetensors"):
        content = Path("there", name).read_bytes()
        loop.accelerator.wait_for_everyone()
        if loop.accelerator.is_main_process:
            damage(Path("there", name))
        loop.accelerator.wait_for_everyone()
        with pytest.raises(CorruptCheckpointError) as raised:
            loop.accelerator.load_state("there")
        texts.append(str(raised.value))
        if loop.accelerator.is_main_process:
            Path("there", name).write_bytes(content)
    loop.accelerator.wait_for_everyone()
    loop.accelerator.load_state("there")
    return texts


def test_damage_is_found_on_all_processes(run_dir: Path) -> None:
    for first, second in run_world(2, damaged):
        assert "net/weights.safetensors: its XXH3-128 is" in first
        assert "pytorch_lora_weights.safetensors: its XXH3-128 is" in second


def test_an_error_on_one_process_is_raised_on_all(run_dir: Path) -> None:
    for raised, *_ in run_world(2, together, "fails"):
        assert re.fullmatch(r"CheckpointWriteError: .*on_rank_1 .* raised TimeoutError: on rank 1\. .*", raised[0]), raised
        assert raised[1].startswith("CheckpointNotFoundError")
    assert not os.listdir()


def test_an_error_before_a_verb_of_all(run_dir: Path) -> None:
    """The main process waits in its hook, and the other one fails before it does: no process waits for ever."""
    first, second = run_world(2, together, "lost")
    assert first[0][0].startswith("CollectiveError: ")
    assert "raised TimeoutError: on rank 1" in second[0][0]
    assert not os.path.exists("there")


def test_under_ddp_only_the_main_process_writes(run_dir: Path) -> None:
    ends = start_world(2, together, "alone").ends()
    assert "a hook has written 'rank_1.txt' on a process that is not the main process" in str(ends[1])


def fails_alone() -> list[str]:
    """What each process raises if the hook of the main process fails, which saves alone."""
    loop, raised = Loop(), []
    accelerator = loop.accelerator
    handle = accelerator.register_save_state_pre_hook(lambda *_: 1 / 0)
    for verb in (
        lambda: accelerator.save_state("there") if accelerator.is_main_process else None,
        accelerator.wait_for_everyone,
    ):
        try:
            verb()
        except CheckpointWriteError as error:
            raised.append(str(error))
    handle.remove()
    accelerator.save_state("good")
    accelerator.wait_for_everyone()
    return raised


def test_an_error_of_the_main_process_alone_reaches_all(run_dir: Path) -> None:
    for (text,) in run_world(2, fails_alone):
        assert re.search(r"the hook fails_alone.* raised ZeroDivisionError: division by zero\. No checkpoint was written", text)
    assert os.listdir() == ["good"]


def test_under_fsdp_the_lists_are_empty_and_all_is_stored(run_dir: Path) -> None:
    """As in Accelerate: `weights.pop()` is an error that says so, and `if weights: weights.pop()` is none."""
    for raised, *_ in run_world(2, unguarded):
        assert "Fix: if weights: weights.pop(). Under FSDP and DeepSpeed the list of weights is empty" in raised
    assert run_world(2, guarded) == [([[1, 0], [0]], True)] * 2
    assert open_checkpoint("there").manifest.by_hook == []


def unguarded() -> Any:
    loop = Loop(strategy=FSDPStrategy())
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: weights.pop())
    try:
        loop.accelerator.save_state("there")
    except CheckpointWriteError as error:
        return [str(error)]


def guarded() -> Any:
    loop, seen = Loop(strategy=FSDPStrategy()), []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append([len(models), len(weights)])
        state = loop.accelerator.get_state_dict(models[0])
        if loop.accelerator.is_main_process:
            save_file(state, os.path.join(output_dir, "gathered.safetensors"))

    loop.accelerator.register_save_state_pre_hook(save)
    loop.accelerator.register_load_state_pre_hook(lambda models, input_dir: seen.append([len(models)]))
    loop.step()
    loop.accelerator.save_state("there")
    loop.step()
    loop.accelerator.load_state("there")
    now = loop.accelerator.get_state_dict(loop.models[0])
    gathered = load_file("there/gathered.safetensors")
    return seen, not loop.accelerator.is_main_process or same(now, gathered)


def removes_on_the_main_process() -> str:
    loop = Loop().register()
    loop.accelerator.save_state("there")
    loop.accelerator.wait_for_everyone()
    loop.accelerator.register_load_state_pre_hook(lambda models, input_dir: None)
    loop.load_hook = lambda *_: None  # type: ignore[method-assign]
    other = Loop()
    other.accelerator.register_load_state_pre_hook(
        lambda models, input_dir: models.clear() if other.accelerator.is_main_process else None
    )
    try:
        other.accelerator.load_state("there")
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_processes_load_the_same_models(run_dir: Path) -> None:
    for text in run_world(2, removes_on_the_main_process):
        assert "a hook has removed other models from its list on rank 1 than on rank 0" in text


# ------------------------------------------------------------------------------------------- a training script of diffusers


class UNet(nn.Module):
    """In the shape of `diffusers.UNet2DConditionModel`: built from a config, with `save_pretrained` and `from_pretrained`."""

    def __init__(self, channels: int = 2, width: int = 6) -> None:
        super().__init__()
        self.config = {"channels": channels, "width": width}
        self.time = nn.Embedding(10, width)
        self.down = nn.Conv2d(channels, width, 3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.up = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, sample: torch.Tensor, timesteps: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = self.down(sample) + self.time(timesteps)[:, :, None, None]
        return (self.up(self.dropout(nn.functional.silu(hidden))),)

    def register_to_config(self, **config: int) -> None:
        self.config |= config

    def save_pretrained(self, folder: str, **extra: Any) -> None:
        os.makedirs(folder, exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps(self.config | extra))
        save_file(self.state_dict(), os.path.join(folder, "diffusion_pytorch_model.safetensors"))

    @classmethod
    def from_pretrained(cls, folder: str, subfolder: str = "") -> UNet:
        config = json.loads(Path(folder, subfolder, "config.json").read_text())
        model = cls(config["channels"], config["width"])
        model.load_state_dict(load_file(os.path.join(folder, subfolder, "diffusion_pytorch_model.safetensors")))
        return model


class EMAModel:
    """In the shape of `diffusers.training_utils.EMAModel`."""

    def __init__(self, parameters: Any, model_cls: type[UNet] = UNet, model_config: Any = None) -> None:
        self.shadow_params = [parameter.detach().clone() for parameter in parameters]
        self.optimization_step = 0
        self.model_cls, self.model_config = model_cls, dict(model_config)

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        self.optimization_step += 1
        for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
            shadow.lerp_(parameter, 1 / (1 + self.optimization_step))

    def to(self, device: torch.device) -> None:
        self.shadow_params = [shadow.to(device) for shadow in self.shadow_params]

    def state_dict(self) -> dict[str, Any]:
        return {"optimization_step": self.optimization_step, "shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimization_step, self.shadow_params = state["optimization_step"], state["shadow_params"]

    def save_pretrained(self, folder: str) -> None:
        model = self.model_cls(**self.model_config)
        for parameter, shadow in zip(model.parameters(), self.shadow_params, strict=True):
            parameter.data.copy_(shadow)
        model.save_pretrained(folder, optimization_step=self.optimization_step)

    @classmethod
    def from_pretrained(cls, folder: str, model_cls: type[UNet]) -> EMAModel:
        model = model_cls.from_pretrained(folder)
        ema = cls(model.parameters(), model_cls, model.config)
        ema.optimization_step = json.loads(Path(folder, "config.json").read_text())["optimization_step"]
        return ema


def text_to_image(output_dir: str, resume: str | None, kill_at: int | None) -> Any:
    """As `train_text_to_image.py`: the lines of its hooks and of its loop."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]),
        project_config=ProjectConfiguration(project_dir=output_dir),
    )
    set_seed(11)
    torch.manual_seed(1)
    unet = UNet()
    ema_unet = EMAModel(unet.parameters(), model_cls=UNet, model_config=unet.config)

    def save_model_hook(models: Any, weights: Any, output_dir: str) -> None:
        if accelerator.is_main_process:
            ema_unet.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for model in models:
                model.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_model_hook(models: Any, input_dir: str) -> None:
        load_ema = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet)
        ema_unet.load_state_dict(load_ema.state_dict())
        ema_unet.to(accelerator.device)
        for _ in range(len(models)):
            model = models.pop()
            load_model = UNet.from_pretrained(input_dir, subfolder="unet")
            model.register_to_config(**load_model.config)
            model.load_state_dict(load_model.state_dict())
            del load_model

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    images = torch.randn(32, 2, 4, 4, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(images, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)
    ema_unet.to(accelerator.device)
    global_step, first_epoch, losses = 0, 0, []
    if resume:
        folders = sorted((d for d in os.listdir(output_dir) if d.startswith("checkpoint")), key=lambda d: int(d.split("-")[1]))
        accelerator.load_state(os.path.join(output_dir, folders[-1]), resume_loaders=True)
        global_step = int(folders[-1].split("-")[1])
        first_epoch = global_step // 4
    for _epoch in range(first_epoch, 3):
        for clean in loader:
            with accelerator.accumulate(unet):
                noise = torch.randn_like(clean)
                timesteps = torch.randint(0, 10, (len(clean),))
                prediction = unet(clean + noise * timesteps[:, None, None, None] / 10, timesteps)[0]
                loss = nn.functional.mse_loss(prediction, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_unet.step(unet.parameters())
                global_step += 1
                losses.append((global_step, loss.item()))
                if global_step % 3 == 0 and accelerator.is_main_process:
                    accelerator.save_state(os.path.join(output_dir, f"checkpoint-{global_step}"))
                if global_step == kill_at:
                    accelerator.wait_for_everyone()
                    os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
    trained = accelerator.unwrap_model(unet)
    return (
        losses,
        {name: value.tolist() for name, value in trained.state_dict().items()},
        [s.tolist() for s in ema_unet.shadow_params],
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_script_of_diffusers_resumes_exactly(processes: int, run_dir: Path) -> None:
    """Killed in the second epoch, after the second checkpoint; resumed on the same number of processes and on the other."""
    whole = run_world(processes, text_to_image, "whole", None, None)
    assert all(not fine for fine, _ in start_world(processes, text_to_image, "killed", None, 8).ends())
    folder = Path("killed/checkpoint-6")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"unet", "unet_ema"}
    open_checkpoint(folder).verify()
    shutil.copytree("killed", "other")
    resumed = run_world(processes, text_to_image, "killed", "latest", None)
    for (losses, *state), (losses_then, *state_then) in zip(whole, resumed, strict=True):
        assert losses_then == losses[6:]
        assert state_then == state, "bit for bit"
    (_, weights, _), *_ = run_world(3 - processes, text_to_image, "other", "latest", None)
    assert all(torch.allclose(torch.tensor(weights[name]), torch.tensor(v), atol=1e-5) for name, v in whole[0][1].items())
