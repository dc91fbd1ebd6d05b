"""`PyTorchProfiler`: what it keeps, its options and files, evaluations, and its use outside a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.profilers import PyTorchProfiler, SimpleProfiler


def test_the_profiler_of_torch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_trainer(profiler="pytorch", default_root_dir=tmp_path).fit(TinyModule(), tiny_loader(40))
    out = capsys.readouterr().out
    assert "aten::" in out
    assert "training_step" in (trace := (tmp_path / "fit-trace.json").read_text("utf-8"))
    assert "backward" in trace


def test_a_run_too_short_for_the_profiler_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(profiler="pytorch").fit(TinyModule(), tiny_loader(4))
    assert "no micro-batch was profiled" in capsys.readouterr().out


def test_options_of_the_profiler_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"export_to_chrome": False, "row_limit": 1, "sort_by_key": "cpu_time_total"}
    profiler = PyTorchProfiler(tmp_path, **options, wait=0, warmup=1, active=1, record_shapes=True)
    make_trainer(profiler=profiler).fit(TinyModule(), tiny_loader(8))
    assert not list(tmp_path.glob("**/*trace*.json"))
    assert "Self CPU" in (text := capsys.readouterr().out)
    assert text.count("aten::") <= 1


@pytest.mark.parametrize(
    ("stage", "action"), [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")]
)
def test_an_evaluation(stage: str, action: str, tmp_path: Path) -> None:
    """A schedule counts the batches of the evaluation; each stage has its own trace."""
    profiler = PyTorchProfiler(tmp_path, "perf", wait=1, warmup=1, active=2)
    getattr(make_trainer(profiler=profiler, enable_model_summary=False), stage)(TinyModule(), tiny_loader(40))
    assert sum(event.name == action for event in profiler.function_events) == 2
    assert action in (tmp_path / f"{stage}-perf-trace.json").read_text("utf-8")
    assert "aten::" in (tmp_path / f"{stage}-perf.txt").read_text("utf-8")


def test_the_whole_run_and_the_table() -> None:
    widths = []
    for options in ({"max_name_column_width": 5}, {"max_name_column_width": 60}):
        profiler = PyTorchProfiler(schedule=None, table_kwargs=options, export_to_chrome=False)
        make_trainer(profiler=profiler).fit(TinyModule(), tiny_loader())
        widths.append(len(profiler.summary().splitlines()[0]))
    assert widths[0] < widths[1]
    assert sum(event.name == "training_step" for event in profiler.function_events) == 4
    make_trainer(profiler=(profiler := PyTorchProfiler(schedule=None, record_shapes=True))).fit(TinyModule(), tiny_loader())
    assert any(event.input_shapes for event in profiler.function_events)
    grouped = PyTorchProfiler(group_by_input_shapes=True, export_to_chrome=False)
    make_trainer(profiler=grouped).fit(TinyModule(), tiny_loader())
    assert "Input Shapes" in grouped.summary()


def test_outside_a_run(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "mine")
    with profiler.profile("outer"):
        profiler.start("inner")
        torch.ones(3).add(1)
        profiler.stop("inner")
    with pytest.raises(ConfigurationError, match="has not begun.*start"):
        profiler.stop("inner")
    profiler.start("open")
    with pytest.raises(ConfigurationError, match="has begun already.*stop"):
        profiler.start("open")
    assert copy.deepcopy(profiler)._inner is None
    profiler.describe()
    assert "aten::add" in (tmp_path / "mine.txt").read_text("utf-8")
    assert {"outer", "inner", "aten::add"} <= {event.name for event in profiler.function_events}


def test_options_that_torch_does_not_have() -> None:
    with pytest.raises(UnknownNameError, match=r"profiler_kwargs\): there is no 'profile_memry'.*mean 'profile_memory'"):
        PyTorchProfiler(profile_memry=True)
    with pytest.raises(UnknownNameError, match="table_kwargs=.*there is no 'width'"):
        PyTorchProfiler(table_kwargs={"width": 3})
    with pytest.raises(ConfigurationError, match="contains row_limit. .*Fix: PyTorchProfiler"):
        PyTorchProfiler(table_kwargs={"row_limit": 3})


def actions_of(folder: Path) -> dict[str, set[str]]:
    """The steps in each trace."""
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    texts = {path.name: path.read_text("utf-8") for path in folder.glob("*.json")}
    return {name: {step for step in steps if f'"{step}"' in text} for name, text in texts.items()}


def all_stages(profiler: Any, **arguments: Any) -> Any:
    trainer = make_trainer(profiler=profiler, **arguments)
    for stage in ("fit", "validate", "test", "predict", "fit", "test", "fit"):
        getattr(trainer, stage)(TinyModule(), tiny_loader(80))
    return trainer


STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
RUNS = ("fit", "validate", "test", "predict", "fit-v1", "test-v1", "fit-v2")


def expected(pattern: str) -> dict[str, set[str]]:
    """The name of the file of each run, and its step; `pattern` with the stage and the version."""
    parts = [run.partition("-") for run in RUNS]
    return {pattern.format(stage, dash + version): {STEPS[stage]} for stage, dash, version in parts}


@pytest.mark.parametrize("filename, pattern", [(None, "{}-trace{}.json"), ("perf", "{}-perf{}-trace.json")])
def test_each_run_of_a_trainer_keeps_its_trace(filename: str | None, pattern: str, tmp_path: Path) -> None:
    all_stages(PyTorchProfiler(tmp_path, filename))
    assert actions_of(tmp_path) == expected(pattern)
    summaries = {path.name for path in tmp_path.glob("*.txt")}
    assert summaries == ({name.replace("-trace.json", ".txt") for name in expected(pattern)} if filename else set())


def test_a_second_fit_in_the_folder_of_its_run(tmp_path: Path) -> None:
    trainer = all_stages("pytorch", default_root_dir=tmp_path, logger=True)
    folders = sorted(path.parent for path in tmp_path.rglob("fit-trace*.json"))
    assert len(folders) == 3
    assert folders[-1] == Path(trainer.log_dir)


def on_two_ranks(folder: Path) -> None:
    all_stages(PyTorchProfiler(folder / "torch"), strategy="ddp")
    all_stages(SimpleProfiler(folder / "simple", "perf"), strategy="ddp")


def test_the_files_of_two_ranks(tmp_path: Path) -> None:
    run_world(2, on_two_ranks, tmp_path)
    assert actions_of(tmp_path / "torch") == expected("{}-trace-0{}.json") | expected("{}-trace-1{}.json")
    names = expected("{}-perf-0{}.txt") | expected("{}-perf-1{}.txt")
    assert {path.name for path in (tmp_path / "simple").iterdir()} == set(names)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")  # raised inside it, torch crashes
def test_each_cycle_of_a_schedule_has_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=3)
    make_trainer(profiler=PyTorchProfiler(tmp_path, schedule=schedule)).fit(TinyModule(), tiny_loader(64))
    names = ["fit-trace-cycle-2.json", "fit-trace-cycle-3.json", "fit-trace.json"]
    assert sorted(actions_of(tmp_path)) == names
    out = capsys.readouterr().out
    assert all(str(tmp_path / name) in out for name in names)


def test_a_short_run_does_not_show_the_profile_of_the_run_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = PyTorchProfiler(tmp_path)
    trainer = make_trainer(profiler=profiler)
    trainer.fit(TinyModule(), tiny_loader(40))
    capsys.readouterr()
    trainer.test(TinyModule(), tiny_loader(4), verbose=False)
    out = capsys.readouterr().out
    assert "no micro-batch was profiled" in out
    assert "trace" not in out
    assert profiler.function_events is None
