"""Profilers count calls, do not change the results, and stop with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import Tensor

from trainkit import Callback
from trainkit.errors import (
    ConfigurationError,
    MissingMethodError,
    UnknownNameError,
)
from trainkit.trainer.profiler import Profiler, SimpleProfiler


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


def test_the_profiler_of_torch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_trainer(profiler="pytorch", default_root_dir=tmp_path).fit(TinyModule(), tiny_loader(40))
    out = capsys.readouterr().out
    assert "aten::" in out
    assert "training_step" in (trace := (tmp_path / "trace.json").read_text("utf-8"))
    assert "backward" in trace


def test_a_run_too_short_for_the_profiler_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(profiler="pytorch").fit(TinyModule(), tiny_loader(4))
    assert "no micro-batch was profiled" in capsys.readouterr().out


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

    with pytest.raises(
        MissingMethodError, match=r"Bare: expected a method profile\(self, action\), found none. Fix:(.|\n)*yield"
    ):
        Bare().profile("a")
    with pytest.raises(MissingMethodError, match=r"Bare: expected a method summary\(self\), found none. Fix:(.|\n)*return"):
        Bare().summary()


def test_an_unknown_profiler() -> None:
    with pytest.raises(UnknownNameError, match="unknown profiler 'simpel'.*Did you mean 'simple'"):
        make_trainer(profiler="simpel")
    with pytest.raises(ConfigurationError, match="profiler must be a name"):
        make_trainer(profiler=3)
