"""Profilers count calls, do not change the results, and stop with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import Tensor

from trainkit import Callback
from trainkit.console import TrainkitWarning
from trainkit.errors import (
    ConfigurationError,
    MissingMethodError,
    UnknownNameError,
)
from trainkit.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler


def test_the_simple_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    class Hooked(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None: ...

    plain, profiled = TinyModule(), TinyModule()
    profiled.load_state_dict(plain.state_dict())
    make_trainer(max_epochs=2).fit(plain, tiny_loader(), tiny_loader(8))
    trainer = make_trainer(Hooked(), profiler="simple", max_epochs=2)
    trainer.fit(profiled, tiny_loader(), tiny_loader(8))
    assert same(parameters_of(plain), parameters_of(profiled))
    out = capsys.readouterr().out
    counts = {line.split()[0]: int(line.split()[-4]) for line in out.splitlines() if line.count(" ") > 10 and "%" in line}
    assert counts["training_step"] == counts["backward"] == counts["optimizer_step"] == 8
    assert counts["Hooked.on_train_batch_end"] == 8
    assert counts["validation_step"] == 4
    assert "next training batch" in out


def test_the_advanced_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(profiler="advanced").fit(TinyModule(), tiny_loader())
    out = capsys.readouterr().out
    assert "function calls" in out
    assert "tottime" in out


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_a_profiler_is_stopped_by_an_error(profiler: str) -> None:
    class Failing(TinyModule):
        armed = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.armed:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module, trainer = Failing(), make_trainer(profiler=profiler)
    with pytest.raises(KeyError):
        trainer.fit(module, tiny_loader())
    module.armed = False
    for _ in range(2):
        trainer.fit(module, tiny_loader())
        trainer.validate(module, tiny_loader())


def test_a_profiler_of_ones_own() -> None:
    profiler = SimpleProfiler()
    trainer = make_trainer(profiler=profiler)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.profiler is profiler


def test_a_profiler_without_its_methods() -> None:
    class Bare(Profiler): ...

    with (
        pytest.raises(MissingMethodError, match=r"Bare: expected methods start\(self, action_name\) and stop.*Fix:(.|\n)*"),
        Bare().profile("a"),
    ):
        pass
    assert Bare().summary() == ""


def test_a_profiler_with_lightnings_methods(capsys: pytest.CaptureFixture[str]) -> None:
    class Counting(Profiler):
        def __init__(self) -> None:  # without the one of the base class
            self.calls: dict[str, int] = {}
            self.open: list[str] = []

        def start(self, action_name: str) -> None:
            self.open.append(action_name)

        def stop(self, action_name: str) -> None:
            self.open.remove(action_name)
            self.calls[action_name] = self.calls.get(action_name, 0) + 1

        def summary(self) -> str:
            return "counted" if self.calls else ""

    class Profiled(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with self.trainer.profiler.profile("encode"):
                return super().training_step(batch, batch_idx)

    profiler = Counting()
    make_trainer(profiler=profiler).fit(Profiled(), tiny_loader())
    assert profiler.open == []
    assert (profiler.calls["training_step"], profiler.calls["encode"]) == (4, 4)
    assert "counted" in capsys.readouterr().out
    make_trainer().fit(Profiled(), tiny_loader())


def test_subclasses_of_the_profilers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their `start`, `stop` and `describe` are called, as in Lightning."""
    made = []

    class Noting(SimpleProfiler):
        def start(self, action_name: str) -> None:
            made.append(action_name)
            super().start(action_name)

        def describe(self) -> None:
            print("described")

    class OfTorch(PyTorchProfiler):
        def stop(self, action_name: str) -> None:
            super().stop(action_name)
            made.append(action_name)

    for profiler in (Noting(), OfTorch(tmp_path)):
        made.clear()
        make_trainer(profiler=profiler).fit(TinyModule(), tiny_loader())
        assert made.count("training_step") == 4
    assert "described" in capsys.readouterr().out


def test_the_folder_is_that_of_the_run(tmp_path: Path) -> None:
    profiler = SimpleProfiler(filename="perf")
    assert profiler.dirpath is None
    trainer = make_trainer(profiler=profiler, default_root_dir=tmp_path)
    trainer.fit(TinyModule(), tiny_loader())
    assert profiler.dirpath == trainer.log_dir
    profiler.dirpath = tmp_path / "mine"
    trainer.fit(TinyModule(), tiny_loader())
    assert (tmp_path / "mine" / "fit-perf.txt").is_file()


def test_durations_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = SimpleProfiler(extended=False)
    profiler.start("mine")
    with profiler.profile("mine"):
        assert list(profiler.current_actions) == ["mine"]
    profiler.stop("mine")
    inner, outer = profiler.recorded_durations["mine"]
    assert 0 <= inner <= outer
    assert not profiler.current_actions
    with pytest.raises(ConfigurationError, match="has not begun.*start"):
        profiler.stop("mine")
    profiler.start("mine")
    with pytest.raises(ConfigurationError, match="has begun already.*stop"):
        profiler.start("mine")
    profiler.describe()
    assert "share" not in (text := capsys.readouterr().out)
    assert "mine" in text
    profiler.setup("fit")
    assert not profiler.recorded_durations
    assert not profiler.current_actions


@pytest.mark.parametrize(
    ("kind", "word"), [(SimpleProfiler, "training_step"), (AdvancedProfiler, "function calls"), (PyTorchProfiler, "aten::")]
)
def test_the_summary_in_a_file(kind: type[Profiler], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = kind(dirpath=tmp_path / "profiles", filename="perf")
    make_trainer(profiler=profiler).fit(TinyModule(), tiny_loader(40))
    assert word in (tmp_path / "profiles" / "fit-perf.txt").read_text("utf-8")
    assert capsys.readouterr().out == ""
    profiler.setup("test", 1, str(tmp_path))
    profiler.teardown("test")
    profiler.describe()
    assert (tmp_path / "profiles" / "test-perf-1.txt").is_file()


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_a_file_that_cannot_be_written_ends_no_run(kind: type[Profiler], run_dir: Path) -> None:
    Path("taken").write_text("a file and no folder")
    options: dict[str, Any] = {"dump_stats": True} if kind is AdvancedProfiler else {}
    trainer = make_trainer(profiler=kind(dirpath="taken", filename="perf", **options))
    with pytest.warns(TrainkitWarning, match=f"{kind.__name__} could not write taken/fit-perf.*Training is not affected"):
        trainer.fit(TinyModule(), tiny_loader(40))
    assert trainer.state.finished


def test_the_advanced_profiler_outside_a_run(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "mine", line_count_restriction=1, dump_stats=True)
    assert profiler.summary() == "nothing was profiled"
    with profiler.profile("outer"), profiler.profile("inner"):
        sorted([2, 1])
    assert "due to restriction <1>" in profiler.summary()
    assert (tmp_path / "mine.prof").stat().st_size > 0
    with pytest.raises(ConfigurationError, match="has not begun"):
        profiler.stop("outer")


def test_an_unknown_profiler() -> None:
    with pytest.raises(UnknownNameError, match="unknown profiler 'simpel'.*Did you mean 'simple'"):
        make_trainer(profiler="simpel")
    with pytest.raises(ConfigurationError, match="profiler must be a name"):
        make_trainer(profiler=3)
    assert isinstance(make_trainer(profiler="Simple").profiler, SimpleProfiler)


def test_each_run_of_a_trainer_keeps_its_files(tmp_path: Path) -> None:
    for profiler in (SimpleProfiler(tmp_path / "simple", "perf"), AdvancedProfiler(tmp_path / "all", "perf", dump_stats=True)):
        trainer = make_trainer(profiler=profiler)
        trainer.fit(TinyModule(), tiny_loader())
        for _ in range(2):
            trainer.test(TinyModule(), tiny_loader(), verbose=False)
        trainer.fit(TinyModule(), tiny_loader())
        profiler.describe()  # of the same run
    names = ["fit-perf-v1", "fit-perf", "test-perf-v1", "test-perf"]
    assert sorted(path.name for path in (tmp_path / "simple").iterdir()) == [f"{name}.txt" for name in names]
    dumped = sorted(f"{name}{suffix}" for name in names for suffix in (".prof", ".txt"))
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == dumped
    text = {name: (tmp_path / "simple" / f"{name}.txt").read_text("utf-8") for name in names}
    assert all(("training_step" in text[name]) == name.startswith("fit") for name in names)


def test_the_rank_in_the_name_is_that_of_all_processes(tmp_path: Path) -> None:
    """Local ranks are the same on several nodes, which may share the folder."""
    profiler = SimpleProfiler(tmp_path, "perf")
    profiler._rank = 5
    profiler.setup("fit", 1)
    profiler.describe()
    assert [path.name for path in tmp_path.iterdir()] == ["fit-perf-5.txt"]
