"""What all loggers have in common: the folder, the process that writes, the accepted values, opening and closing."""

from __future__ import annotations

import copy
import math
import pickle
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.leaks import held
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

import trainkit.loggers
from trainkit import Accelerator
from trainkit.callbacks import ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MetricError, MissingMethodError
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger
from trainkit.loggers.base import DummyLogger, NullExperiment
from trainkit.loggers.logger_setup import attach, default_logger
from trainkit.loggers.run_files import read_metrics


class Memory(Logger):
    """A user's logger that keeps everything in a list."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


# ---------------------------------------------------------------------- the folder


def test_the_package_loads_its_classes_on_use() -> None:
    assert sorted(trainkit.loggers.__all__) == trainkit.loggers.__all__
    assert set(trainkit.loggers.__all__) <= set(dir(trainkit.loggers))
    with pytest.raises(AttributeError, match="NoLogger"):
        _ = trainkit.loggers.NoLogger


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger, Memory])
def test_nothing_is_made_before_the_first_use(kind: type[Logger], tmp_path: Path) -> None:
    logger = kind(save_dir=tmp_path / "a")
    logger.set_default_root(tmp_path / "b")
    attach([logger], tmp_path / "c")
    assert logger.root_dir == str(tmp_path / "a" / "default")
    assert repr(logger) == f"{kind.__name__}(save_dir='{tmp_path / 'a'}', name='default', version=None)"
    logger.save()
    logger.finalize()
    assert list(tmp_path.iterdir()) == []
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize()
    assert logger.log_dir == str(tmp_path / "a" / "default" / "version_0")
    assert repr(logger).endswith("version=0)")


def test_where_a_logger_without_save_dir_writes(tmp_path: Path) -> None:
    logger = CSVLogger()
    assert logger.save_dir == str(Path("trainkit_runs") / "logs")
    logger.set_default_root(tmp_path / "first")
    logger.set_default_root(tmp_path / "second")  # nothing is written yet, so the last call counts
    assert logger.log_dir == str(tmp_path / "second" / "logs" / "default" / "version_0")
    logger.set_default_root(tmp_path / "third")
    assert logger.log_dir == str(tmp_path / "second" / "logs" / "default" / "version_0")
    given = CSVLogger(tmp_path / "given", name="a/b", version="final")
    given.set_default_root(tmp_path / "second")
    assert given.log_dir == str(tmp_path / "given" / "a" / "b" / "final")


def test_versions_count_on_from_the_highest(tmp_path: Path) -> None:
    for entry in ("version_2", "version_10", "version_x", "version_30.bak", "other"):
        (tmp_path / "run" / entry).mkdir(parents=True)
    (tmp_path / "run" / "version_12").touch()  # a file with such a name counts too
    assert CSVLogger(tmp_path, "run").version == 13
    assert CSVLogger(tmp_path, "run").version == 14
    assert CSVLogger(tmp_path, "run", version=3).version == 3
    assert not (tmp_path / "run" / "version_3").exists()
    for nameless in ("", None):
        assert Path(str(CSVLogger(tmp_path / "x", nameless).log_dir)).parent == tmp_path / "x"


def test_no_two_loggers_take_the_same_version(tmp_path: Path) -> None:
    taken: list[Any] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        for _ in range(10):
            taken.append(CSVLogger(tmp_path).version)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(80))


@pytest.mark.parametrize("arguments", [
    {"name": "/absolute"}, {"name": "../out"}, {"name": "a/../../out"}, {"name": "a\nb"}, {"name": "\0"}, {"name": " "},
    {"name": 3}, {"name": "C:\\x"}, {"name": "a\\..\\b"}, {"name": "."},
    {"version": -1}, {"version": 1.5}, {"version": True}, {"version": ""}, {"version": "a/b"}, {"version": ".."},
    {"version": "a\\b"}, {"save_dir": ""}, {"save_dir": 3}, {"save_dir": "a\0"},
    {"prefix": None},
])  # fmt: skip
def test_bad_folders_are_refused_with_a_fix(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Fix: ") as error:
        CSVLogger(**{"save_dir": tmp_path, **arguments})
    assert next(iter(arguments)) in str(error.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=re.escape(str(tmp_path / "file"))):
        CSVLogger(tmp_path / "file").log_metrics({"a": 1}, 0)


# ---------------------------------------------------------------------- several loggers of one Trainer


def test_loggers_of_different_kinds_share_a_folder(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(), CSVLogger(), JSONLLogger(), CSVLogger(), CSVLogger(name="other")]
    for _ in range(2):  # a second fit attaches them again
        attach(loggers, tmp_path)
        assert [(logger.name, logger.version) for logger in loggers] == [
            ("default", 0), ("default", 0), ("default", 0), ("default", 1), ("other", 0),
        ]  # fmt: skip
    later = JSONLLogger()
    attach([loggers[0], later], tmp_path)
    assert later.version == 0
    used_elsewhere = CSVLogger(tmp_path / "logs")
    assert used_elsewhere.version == 2
    attach([loggers[0], used_elsewhere], tmp_path)
    assert used_elsewhere.version == 2
    beside_a_fixed_one = CSVLogger()
    attach([JSONLLogger(version="final"), beside_a_fixed_one], tmp_path)
    assert beside_a_fixed_one.version == "final"


def test_two_loggers_must_not_write_the_same_file(tmp_path: Path) -> None:
    for pair in ([CSVLogger(version=1), CSVLogger(version=1)], [one := CSVLogger(version=2), one]):
        with pytest.raises(ConfigurationError, match=r"two CSVLogger for .*version_\d.*name='other'"):
            attach(pair, tmp_path)
    attach([CSVLogger(version=1), CSVLogger(version=2), JSONLLogger(version=1)], tmp_path)
    attach([TensorBoardLogger(version=1, sub_dir="a"), TensorBoardLogger(version=1, sub_dir="b")], tmp_path)


def test_default_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(default_logger()) is TensorBoardLogger
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert type(default_logger()) is CSVLogger


# ---------------------------------------------------------------------- the process that writes


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_other_processes_write_nothing(kind: type[Logger], tmp_path: Path) -> None:
    logger = kind(tmp_path)
    logger.set_rank(1)
    logger.log_metrics({"loss": object()}, 0)
    logger.log_hyperparams({"lr": 1})
    if kind is TensorBoardLogger:
        logger.log_image("image", np.zeros((3, 2, 2)), 0)
        logger.log_histogram("histogram", [1.0], 0)
        logger.log_text("text", "x", 0)
    logger.save()
    logger.finalize("failed")
    assert (logger.version, logger.log_dir) == (None, None)
    assert list(tmp_path.iterdir()) == []
    fixed = kind(tmp_path, version=4)
    fixed.set_rank(3)
    assert fixed.log_dir == str(tmp_path / "default" / "version_4")


def test_the_null_experiment_takes_anything(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.set_rank(1)
    null = logger.experiment
    null.add_scalar("a", 1, global_step=2).deeper["x"] = 3
    null.config = {"a": 1}
    assert null.config["a"].get("b") is null
    assert list(null) == []
    with null.open("x") as inner:
        assert inner is null
    assert copy.deepcopy(null) is not None
    assert pickle.loads(pickle.dumps(null)).anything() is not None
    assert null is not logger


def test_the_environment_tells_the_rank_where_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = Memory()
    logger.log_metrics({"a": 1}, 0)
    assert not logger.is_main_process
    logger.set_rank(0)
    logger.log_metrics({"a": 2}, 0)
    assert logger.rows == [(0, {"a": 2})]


# ---------------------------------------------------------------------- accepted values


def test_an_experiment_of_the_main_process(tmp_path: Path) -> None:
    """Under Lightning's names, which are also found in Lightning's modules."""
    from trainkit.loggers.logger import rank_zero_experiment

    class Mine(Logger):
        @property
        @rank_zero_experiment
        def experiment(self) -> Any:
            """The run."""
            return self

    logger = Mine(tmp_path)
    assert logger.experiment is logger
    assert Mine.experiment.__doc__ == "The run."
    logger.set_rank(1)
    assert type(logger.experiment) is NullExperiment


@pytest.mark.parametrize("kind", [CSVLogger, DummyLogger])
def test_a_graph_and_groups(kind: Any, tmp_path: Path) -> None:
    """Callbacks and scripts written for Lightning use them with every logger."""
    logger = kind(tmp_path)
    logger.log_graph(torch.nn.Linear(1, 1), input_array=torch.zeros(1))
    assert (logger.group_separator, list(tmp_path.iterdir())) == ("/", [])


def test_steps() -> None:
    logger = Memory(prefix="run1")
    logger.log_metrics({"a": 1})
    logger.log_metrics({"a": 2, "epoch": 0}, 10)
    logger.log_metrics({"a": 3}, torch.tensor(12))  # type: ignore[arg-type]
    logger.log_metrics({"a": 4})
    logger.log_metrics({"a": 5, "step": torch.tensor(40.0)}, 14)  # as in Lightning, a metric "step" sets the step
    for step in (-2, True, 41.9):
        logger.log_metrics({"a": 6, "step": step}, 14)
    with pytest.warns(TrainkitWarning, match="the metric 'step' replaces the step"):
        logger.log_metrics({"a": 7, "step": math.nan})  # it is ignored
    with pytest.raises(MetricError, match="'step': expected one real number, got str '7'"):
        logger.log_metrics({"a": 8, "step": "7"})
    logger.log_metrics({}, 50)
    assert [step for step, _ in logger.rows] == [0, 10, 12, 13, 40, -2, 1, 41, 42]
    assert [dict(row) for _, row in logger.rows[:2]] == [{"run1-a": 1}, {"run1-a": 2, "epoch": 0}]
    with pytest.raises(ConfigurationError, match="step: expected a whole number, got 1.5"):
        logger.log_metrics({"a": 1}, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind, call, words", [
    (CSVLogger, "log_image", "cannot store images. Loggers that can: TensorBoardLogger, WandbLogger, MLFlowLogger, "),
    (CSVLogger, "log_text", "cannot store text. Loggers that can: JSONLLogger, TensorBoardLogger, WandbLogger, "),
    (CSVLogger, "log_histogram", "cannot store histograms. Loggers that can: TensorBoardLogger, WandbLogger, CometLogger"),
    (JSONLLogger, "log_image", "JSONLLogger cannot store images"),
    (JSONLLogger, "log_histogram", "JSONLLogger cannot store histograms"),
])  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_logger_cannot_hold(kind: type[Logger], call: str, words: str, rank: int) -> None:
    logger = kind()
    logger.set_rank(rank)  # the same error on all ranks: a script must not fail on one rank only
    with pytest.raises(ConfigurationError, match=words):
        getattr(logger, call)("key", "value", 0)


# ---------------------------------------------------------------------- opening and closing


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_a_logger_continues_after_its_end_and_leaks_nothing(kind: type[Logger], tmp_path: Path) -> None:
    logger = kind(tmp_path)
    logger.log_metrics({"warm": 0}, 0)  # libraries keep open what they open on first use
    logger.finalize()
    before = held()
    for fit in range(1, 51):
        logger.log_metrics({"loss": fit}, fit)
        logger.finalize("failed" if fit % 2 else "success")
    assert not held() - before
    assert logger.version == 0
    assert read_metrics(tmp_path)["loss"] == [(fit, float(fit)) for fit in range(1, 51)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_a_logger_that_is_dropped_gives_everything_back(kind: type[Logger], tmp_path: Path) -> None:
    before = held()
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=100) if kind is CSVLogger else kind(tmp_path)
    for step in range(5):
        logger.log_metrics({"loss": step}, step)
    del logger
    assert not held() - before
    assert read_metrics(tmp_path)["loss"] == [(step, float(step)) for step in range(5)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda logger: pickle.loads(pickle.dumps(logger))])
def test_a_copy_opens_its_own_files(kind: type[Logger], duplicate: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    logger.log_metrics({"loss": 1}, 1)
    other = duplicate(logger)
    assert other.log_dir == logger.log_dir
    other.log_metrics({"loss": 2}, 2)
    other.finalize()
    logger.log_metrics({"loss": 3}, 3)
    logger.finalize()
    assert sorted(read_metrics(tmp_path)["loss"]) == [(1, 1.0), (2, 2.0), (3, 3.0)]


# ---------------------------------------------------------------------- loggers of users


def test_a_logger_without_its_one_method() -> None:
    class Empty(Logger):
        pass

    with pytest.raises(MissingMethodError, match=r"Empty: expected a method write_metrics\(self, metrics, step\)"):
        Empty().log_metrics({"a": 1}, 0)


def test_a_logger_written_for_lightning(tmp_path: Path) -> None:
    class FromLightning(Logger):
        def __init__(self) -> None:  # does not call super().__init__()
            self.seen: list[Any] = []

        @property
        def name(self) -> str:
            return "mine"

        @property
        def version(self) -> str:
            return "0.1"

        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            self.seen.append((metrics, step))

        def log_hyperparams(self, params: Any) -> None:
            self.seen.append(params)

    logger = FromLightning()
    attach([logger, CSVLogger()], tmp_path)
    logger.log_metrics({"a": 1}, 2)
    logger.log_hyperparams({"b": 3})
    logger.save()
    logger.finalize("success")
    assert logger.seen == [({"a": 1}, 2), {"b": 3}]
    assert list(tmp_path.iterdir()) == []


class Unwritable(Logger):
    """A logger without a disk or a server."""

    def __init__(self) -> None:
        super().__init__()
        self.works = False

    def _fail(self, *_: Any) -> None:
        if not self.works:
            raise OSError(5, "Input/output error")

    write_metrics = write_hyperparams = write_image = write_text = write_histogram = close_experiment = save = _fail


class Overriding(Unwritable):
    """As loggers written for Lightning, which override what is called."""

    log_metrics = log_hyperparams = finalize = after_save_checkpoint = Unwritable._fail


def use(logger: Logger) -> list[Any]:
    return [
        lambda: logger.log_hyperparams({"lr": 0.1}),
        lambda: logger.log_metrics({"loss": 1.0}, 1),
        lambda: logger.log_image("image", torch.zeros(3, 2, 2)),
        lambda: logger.log_text("text", "a"),
        lambda: logger.log_histogram("weights", torch.zeros(3)),
        lambda: (logger.experiment, logger.finalize()),
    ]


def test_a_logger_of_a_run_that_cannot_write_is_one_warning(tmp_path: Path) -> None:
    """Used alone, it raises the error."""
    for call in use(Unwritable()):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    attach([logger := Unwritable()], tmp_path)
    first, *others = use(logger)
    with pytest.warns(TrainkitWarning, match="Unwritable could not write the hyper-parameters: .*Training continues") as warned:
        first()
    for call in others:  # another warning would be an error
        call()
    assert len(warned) == 1
    logger.works = True
    logger.log_metrics({"loss": 1.0}, 2)
    logger.works = False
    with pytest.warns(TrainkitWarning, match="could not write the metrics of step 3"):  # another outage
        logger.log_metrics({"loss": 1.0}, 3)


@pytest.mark.parametrize("kind", [Unwritable, Overriding])
def test_a_logger_that_cannot_write_ends_no_run(kind: type[Logger], run_dir: Path) -> None:
    callbacks = [ModelCheckpoint("saves", every_n_train_steps=2)]
    trainer = make_trainer(*callbacks, logger=kind(), max_epochs=2, log_every_n_steps=1, enable_checkpointing=True)
    with pytest.warns(TrainkitWarning, match=f"{kind.__name__} could not write the metrics of step 1") as warned:
        trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert len(warned) == 1
    assert trainer.global_step == 8
    accelerator = Accelerator(log_with=Unwritable())
    with pytest.warns(TrainkitWarning, match="Unwritable could not write the hyper-parameters"):
        accelerator.init_trackers("x", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()


# --------------------------------------------------------------------------------------------------------- dummy logger


def test_it_accepts_every_call_and_writes_nothing(run_dir: Path) -> None:
    logger = DummyLogger()
    logger.log_metrics({"x": 1.0}, step=3)
    logger.log_metrics({"not": "a number"})
    logger.log_hyperparams({"object": object()})
    logger.log_image(key="sample", images=[torch.rand(3, 4, 4)], caption=["one"])
    logger.log_text("note", "text")
    logger.log_histogram("weights", torch.ones(3))
    logger.watch(TinyModule(), log="all")  # a method of one logger only
    logger.experiment.add_image("sample", torch.rand(3, 4, 4), 0)
    logger.experiment.config["lr"] = 1.0
    logger.save()
    logger.finalize("success")
    assert (logger.save_dir, logger.log_dir, logger.version, list(run_dir.iterdir())) == (None, None, None, [])


def test_it_can_be_copied_and_has_no_special_methods_by_accident() -> None:
    assert isinstance(copy.deepcopy(DummyLogger()), DummyLogger)
    assert not hasattr(DummyLogger(), "__len__")


class Touches(TinyModule):
    """Uses its logger and its checkpoint callback as a script does."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.logger is not None
        self.logger.log_metrics({"mine": 1.0}, step=self.global_step)
        self.logger.experiment.add_image("sample", torch.rand(3, 4, 4), 0)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        callback = self.trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
        self.seen = callback.best_model_path, Path(str(callback.dirpath), "mine.txt")


@pytest.mark.parametrize("loggers", [None, True, "csv", [CSVLogger(), CSVLogger(name="other")]])
def test_a_module_finds_its_logger_in_a_fast_dev_run(run_dir: Path, loggers: Any) -> None:
    module = Touches()
    trainer = make_trainer(fast_dev_run=True, logger=loggers, enable_checkpointing=True)
    trainer.fit(module, tiny_loader())
    assert {type(logger) for logger in trainer.loggers} == {DummyLogger}
    assert len(trainer.loggers) == (2 if isinstance(loggers, list) else 1)
    assert module.seen == ("", Path(trainer.default_root_dir, "checkpoints", "mine.txt"))
    assert trainer.log_dir == trainer.default_root_dir
    assert not any(run_dir.rglob("*"))


def test_what_is_turned_off_stays_off_in_a_fast_dev_run() -> None:
    trainer = make_trainer(fast_dev_run=True, logger=False, enable_checkpointing=False)
    assert (trainer.logger, trainer.checkpoint_callback) == (None, None)
    trainer.logger = CSVLogger()
    assert isinstance(trainer.logger, DummyLogger)
    trainer.loggers = []
    assert trainer.logger is None
