"""`TrainkitCLI`: arguments, files and links become a module, data and a Trainer, and a subcommand runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.runs.command_lines import QUIET, Configured, Wider, command_line, config_files
from torch import nn

from trainkit import Trainer, TrainModule, seed_everything
from trainkit.callbacks import EarlyStopping, ModelCheckpoint, Timer
from trainkit.cli import (
    LightningArgumentParser,
    LightningCLI,
    OptimizerCallable,
    ReduceLROnPlateau,
    SaveConfigCallback,
    TrainkitArgumentParser,
    TrainkitCLI,
)
from trainkit.cli.for_scripts.argument_parser import with_our_paths
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError
from trainkit.loggers import CSVLogger

SHORT = ("fit", "--trainer.max_steps=2", "--trainer.logger=false", "--trainer.enable_checkpointing=false")
NOTHING = {"save_config_callback": None}


def built(*arguments: str, **options: Any) -> TrainkitCLI:
    """A command line that only creates its objects."""
    return command_line(*arguments, run=False, **options)


def test_the_names_of_lightning() -> None:
    assert LightningCLI is TrainkitCLI
    assert LightningArgumentParser is TrainkitArgumentParser


def test_arguments_and_types() -> None:
    cli = built(
        *("--trainer.max_epochs=3", "--trainer.devices=1", "--trainer.strategy=auto", "--trainer.max_time={hours: 1}"),
        *("--model.width=5", "--model.size=[3, 4]", "--data.batch_size=8"),
        *("--model.encoder=torch.nn.Linear", "--model.encoder.in_features=4", "--model.encoder.out_features=5"),
    )
    assert (cli.trainer.max_epochs, cli.datamodule.batch_size) == (3, 8)
    assert isinstance(cli.model.layer[0], nn.Linear)
    assert cli.model.layer[2].in_features == 5
    assert cli.config.model.size == (3, 4)
    assert cli.subcommand is None
    assert any(isinstance(callback, Timer) for callback in cli.trainer.callbacks)


BEST = """
trainer:
  restore_best: {class_path: ModelCheckpoint, init_args: {monitor: val_error, mode: min}}
  save_total_limit: 2
  validate_at_end: true
  max_epochs: 2.5
"""


def test_what_a_fit_keeps_and_restores() -> None:
    Path("best.yaml").write_text(BEST, "utf-8")
    trainer = built("--config=best.yaml").trainer
    [callback] = trainer.checkpoint_callbacks
    assert isinstance(callback, ModelCheckpoint)
    assert (callback.monitor, callback.mode) == ("val_error", "min")
    assert "the checkpoint with the smallest val_error" in trainer.explain()
    assert "max_epochs                        2.5" in trainer.explain()
    [callback] = built("--trainer.restore_best=val_accuracy", "--trainer.max_epochs=1.5").trainer.checkpoint_callbacks
    assert isinstance(callback, ModelCheckpoint)
    assert (callback.monitor, callback.mode) == ("val_accuracy", "max")


LIGHTNINGS = """
trainer:
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
  callbacks:
  - {class_path: lightning.pytorch.callbacks.early_stopping.EarlyStopping, init_args: {monitor: val_loss}}
  - pytorch_lightning.callbacks.Timer
"""


def test_the_class_paths_of_lightning_are_those_of_trainkit() -> None:
    Path("lightning.yaml").write_text(LIGHTNINGS, "utf-8")
    Path("part.yaml").write_text("class_path: lightning.pytorch.loggers.CSVLogger\n", "utf-8")
    in_python = {"trainer": {"callbacks": {"class_path": "lightning.pytorch.callbacks.Timer"}}}
    by_file = built("--config=lightning.yaml")
    assert isinstance(by_file.trainer.logger, CSVLogger)
    assert by_file.trainer.logger.save_dir == "logs"
    assert {EarlyStopping, Timer} <= {type(callback) for callback in by_file.trainer.callbacks}
    other = ["--note=see lightning.pytorch.callbacks.Timer", 3, None]
    assert with_our_paths(other) == other
    assert by_file.config.trainer.logger.class_path == "trainkit.loggers.CSVLogger"
    for arguments in (
        ["--trainer.callbacks+=lightning.pytorch.callbacks.Timer"],
        ["--trainer.callbacks", "lightning.pytorch.callbacks.timer.Timer"],
        ['--trainer.callbacks=[{"class_path": "lightning.pytorch.callbacks.Timer"}]'],
    ):
        assert any(isinstance(callback, Timer) for callback in built(*arguments).trainer.callbacks)
    assert isinstance(built("--trainer.logger=part.yaml").trainer.logger, CSVLogger)
    assert any(isinstance(callback, Timer) for callback in built(args=in_python, quiet=False).trainer.callbacks)


def test_a_class_of_lightning_that_trainkit_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    path = "lightning.pytorch.callbacks.RichProgressBarTheme"
    Path("lightning.yaml").write_text(f"trainer: {{callbacks: [{{class_path: {path}}}]}}", "utf-8")
    said = f"{path}: trainkit has no class of this path. Use: RichProgressBar"
    for argument in ("--config=lightning.yaml", f"--trainer.callbacks={path}"):
        with pytest.raises(SystemExit):
            built(argument)
        assert said in capsys.readouterr().err


def test_classes_by_name() -> None:
    cli = built(
        *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=7"),
        *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k=2", "--trainer.callbacks.monitor=val_loss"),
        *("--trainer.logger=CSVLogger", "--trainer.logger.name=mine"),
    )
    stopping, saving = (
        next(c for c in cli.trainer.callbacks if isinstance(c, kind)) for kind in (EarlyStopping, ModelCheckpoint)
    )
    assert (stopping.monitor, stopping.patience, saving.save_top_k) == ("val_loss", 7, 2)
    assert isinstance(cli.trainer.logger, CSVLogger)
    assert cli.trainer.logger.name == "mine"


def test_later_values_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults, then files in order, then environment variables of the default configuration, then the command line."""
    Path("one.yaml").write_text(yaml.dump({"model": {"width": 5, "dropout": 0.3}, "data": {"samples": 8}}))
    Path("two.yaml").write_text(yaml.dump({"model": {"width": 6}}))
    cli = built("--config=one.yaml", "--config=two.yaml", "--data.samples=12")
    assert (cli.config.model.width, cli.config.model.dropout, cli.config.data.samples) == (6, 0.3, 12)
    monkeypatch.setenv("TRAINKIT_MODEL__WIDTH", "7")
    assert built().config.model.width == 4, "not read by default"
    assert built(parser_kwargs={"default_env": True}).config.model.width == 7
    monkeypatch.setenv("PL_MODEL__WIDTH", "8")
    assert built(parser_kwargs={"default_env": True, "env_prefix": "PL"}).config.model.width == 8


def test_a_subcommand_runs_with_its_hooks() -> None:
    called: list[str] = []

    class Hooked(TrainkitCLI):
        def before_instantiate_classes(self) -> None:
            called.append(f"before_instantiate_classes {hasattr(self, 'model')}")

        def after_instantiate_classes(self) -> None:
            called.append(f"after_instantiate_classes {hasattr(self, 'trainer')}")

        def before_fit(self) -> None:
            called.append(f"before_fit {self.trainer.global_step}")

        def after_fit(self) -> None:
            called.append(f"after_fit {self.trainer.global_step}")

    cli = command_line(*SHORT, kind=Hooked, **NOTHING)
    assert called == ["before_instantiate_classes False", "after_instantiate_classes True", "before_fit 0", "after_fit 2"]
    assert cli.subcommand == "fit"


@pytest.mark.slow
def test_every_subcommand(capfd: pytest.CaptureFixture[str]) -> None:
    kept = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=kept")
    command_line("fit", "--trainer.max_epochs=1", *kept)
    best = ("--ckpt_path=best", "--trainer.logger=false", *kept)
    command_line("validate", *best)
    command_line("test", *best, "--verbose=false")
    printed = capfd.readouterr().out
    assert "val_loss" in printed
    assert "test_loss" not in printed
    command_line("predict", *best)


def test_own_subcommand_methods() -> None:
    """A subclass replaces a method, or adds a subcommand for a method of its Trainer."""
    seen: list[Any] = []

    class Finding(Trainer):
        def find(self, model: TrainModule, datamodule: Any = None, times: int = 1) -> None:
            """Find something."""
            seen.append((model, datamodule, times))

    class Finder(TrainkitCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": TrainkitCLI.subcommands()["fit"], "find": {"model", "datamodule"}}

        def fit(self, model: TrainModule, **arguments: Any) -> None:
            seen.append(sorted(arguments))

    cli = command_line("find", "--times=3", kind=Finder, trainer_class=Finding)
    assert seen == [(cli.model, cli.datamodule, 3)]
    command_line("fit", kind=Finder, trainer_class=Finding)
    assert seen[1] == ["ckpt_path", "datamodule", "overrides", "restore", "strict"]


class Interrupted(Trainer):
    """A Trainer that Ctrl-C interrupts."""

    said = ""

    def fit(self, model: Any, datamodule: Any = None) -> None:  # type: ignore[override]
        """Train."""
        raise KeyboardInterrupt(self.said)


def test_ctrl_c_says_how_to_continue_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"to continue: ckpt_path='auto'": "On the command line: --ckpt_path=auto$", "no checkpoint": "^no checkpoint$"}
    for said, expected in ends.items():
        monkeypatch.setattr(Interrupted, "said", said)
        with pytest.raises(KeyboardInterrupt, match=expected):
            command_line("fit", trainer_class=Interrupted, **NOTHING)


def test_links_and_defaults() -> None:
    class Linked(TrainkitCLI):
        def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
            parser.add_argument("--notes", default="none")
            parser.add_lightning_class_args(EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "val_loss", "data.samples": 24})
            parser.link_arguments("data.batch_size", "model.rate", compute_fn=lambda size: size / 100)
            parser.link_arguments("data.width", "model.width", apply_on="instantiate")

    cli = built("--data.batch_size=2", "--notes=some", kind=Linked)
    stopping = next(callback for callback in cli.trainer.callbacks if isinstance(callback, EarlyStopping))
    assert (stopping.monitor, cli.datamodule.samples, cli.config.notes) == ("val_loss", 24, "some")
    assert (cli.model.learning_rate, cli.model.layer[2].in_features) == (0.02, 4)
    assert cli.model.hparams["rate"] == 0.02, "what a link has set is a hyper-parameter"
    assert cli.model.hparams["width"] == 4


def test_subclass_mode(capsys: pytest.CaptureFixture[str]) -> None:
    wider = ("--model=helpers.runs.command_lines.Wider", "--model.width=4")
    cli = built(*wider, "--data=Numbers", "--data.samples=8", model_class=None, datamodule_class=None)
    assert (type(cli.model), cli.datamodule.samples) == (Wider, 8)
    assert built(*wider, model_class=None, datamodule_class=None).datamodule is None, "the module may have the loaders"
    assert type(built("--model=Wider", "--data=Numbers", subclass_mode_model=True, subclass_mode_data=True).model) is Wider
    with pytest.raises(SystemExit):
        built(model_class=None)
    assert "arguments are required: model" in capsys.readouterr().err


def test_functions_instead_of_classes() -> None:
    def make_model(width: int = 4) -> Configured:
        return Configured(width=width, rate=0.3)

    def make_trainer(max_epochs: int = 5, callbacks: Any = None) -> Trainer:
        return Trainer(max_epochs=max_epochs, callbacks=callbacks, accelerator="cpu", enable_progress_bar=False)

    cli = built("--model.width=5", model_class=make_model, trainer_class=make_trainer, quiet=False)
    assert (cli.model.learning_rate, cli.model.layer[2].in_features, cli.trainer.max_epochs) == (0.3, 5, 5)
    assert any(isinstance(callback, SaveConfigCallback) for callback in cli.trainer.callbacks)


def test_a_trainer_without_callbacks_is_said() -> None:
    def bare() -> Trainer:
        return Trainer(accelerator="cpu", enable_progress_bar=False)

    with pytest.warns(TrainkitWarning, match="bare has no argument callbacks"):
        built(trainer_class=bare, quiet=False)


def test_trainer_defaults() -> None:
    class Other(TrainkitCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            return super().instantiate_trainer(min_epochs=1, **kwargs)

    timer = Timer({"hours": 1})
    cli = built("--trainer.callbacks=LearningRateMonitor", kind=Other, trainer_defaults={"max_epochs": 9, "callbacks": timer})
    assert (cli.trainer.max_epochs, cli.trainer.min_epochs) == (9, 1)
    assert timer in cli.trainer.callbacks
    described = {"class_path": "trainkit.callbacks.EarlyStopping", "init_args": {"monitor": "a"}}
    callbacks = built(trainer_defaults={"callbacks": described}).trainer.callbacks
    assert [one.monitor for one in callbacks if isinstance(one, EarlyStopping)] == ["a"]
    assert built("--trainer.max_epochs=2", trainer_defaults={"max_epochs": 9}).trainer.max_epochs == 2


def test_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.rng._process_seed", None)

    def weight(*arguments: str, **options: Any) -> Any:
        return built(*arguments, **options).model.layer[2].weight.detach()

    assert torch.equal(weight(), weight()), "the default is the seed 0, in each process"
    assert torch.equal(weight(), weight("--seed_everything=0"))
    assert not torch.equal(weight(), weight("--seed_everything=1"))
    assert torch.equal(weight("--seed_everything=1"), weight(seed_everything_default=1))
    cli = built("--seed_everything=3")
    assert (cli.config.seed_everything, cli.trainer.seed) == (3, 3)
    torch.manual_seed(5)
    unseeded = weight("--seed_everything=false")
    torch.manual_seed(5)
    assert torch.equal(unseeded, weight(seed_everything_default=False))
    seed_everything(7)
    assert built().config.seed_everything == 7, "the script has chosen it"


def test_arguments_from_python() -> None:
    for args in (["--model.width=5", *QUIET], {"model": {"width": 5}, "trainer": {"accelerator": "cpu"}}):
        assert command_line(quiet=False, run=False, args=args).config.model.width == 5
    with pytest.warns(TrainkitWarning, match="and the command line .* is not"):
        built("--model.width=6", args=["--model.width=5"])


def test_parser_options(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TrainkitArgumentParser):
        """A parser of the user."""

    class Described(TrainkitCLI):
        def init_parser(self, **kwargs: Any) -> TrainkitArgumentParser:
            return super().init_parser(**{"epilog": "the end", **kwargs})

    Path("fit.yaml").write_text(yaml.dump({"model": {"width": 5}}))
    of_fit = {"default_config_files": ["fit.yaml"], "description": "Of fit."}
    options = {"parser_class": Own, "parser_kwargs": {"fit": of_fit, "description": "Of all."}, **NOTHING}
    cli = command_line(*SHORT, "--model.encoder=torch.nn.Linear", "--model.encoder.in_features=4",
                       "--model.encoder.out_features=5", kind=Described, **options)  # fmt: skip
    assert cli.config.fit.model.width == 5
    assert type(cli.parser) is Own
    for arguments, expected in ((["--help"], "Of all."), (["fit", "--help"], "Of fit.")):
        with pytest.raises(SystemExit):
            command_line(*arguments, kind=Described, quiet=False, **options)
        printed = capsys.readouterr().out
        assert expected in printed
        assert "the end" in printed


def test_print_config_is_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--print_config` prints starts the same run."""
    arguments = ("--model.width=5", "--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=a")
    with pytest.raises(SystemExit) as ended:
        built(*arguments, "--print_config")
    assert ended.value.code == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    direct, again = built(*arguments), built("--config=printed.yaml", quiet=False)
    again.config.pop("config"), direct.config.pop("config")
    assert again.config == direct.config


def test_help_is_that_of_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("fit", "--help", quiet=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "--trainer.max_epochs MAX_EPOCHS Maximum number of epochs; -1: no limit." in printed
    assert "--model.width WIDTH Number of inputs of the layer. (type: int, default: 4)" in printed
    assert "--ckpt_path CKPT_PATH Resume from this checkpoint." in printed
    assert "train.py [options] fit [options]" in printed


# ------------------------------------------------------------------------------------------------------- optimizers


class Bare(Configured):
    """A module whose `configure_optimizers` comes from the command line, as its layer from `configure_model`."""

    configure_optimizers = TrainModule.configure_optimizers

    def configure_model(self) -> None:
        self.layer = nn.Linear(4, 1)


def fitted(*arguments: str, model_class: Any = Bare, **options: Any) -> Trainer:
    return command_line(*SHORT, *arguments, model_class=model_class, **NOTHING, **options).trainer


def test_an_optimizer_and_a_schedule() -> None:
    trainer = fitted("--optimizer=Adam", "--optimizer.lr=0.5", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5")
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert [type(config.scheduler) for config in trainer.lr_scheduler_configs] == [torch.optim.lr_scheduler.ExponentialLR]
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in trainer.lightning_module.parameters()}


def test_reduce_on_plateau() -> None:
    plateau = ("--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss", "--lr_scheduler.patience=3")
    trainer = fitted("--optimizer=SGD", "--optimizer.lr=0.5", *plateau)
    (config,) = trainer.lr_scheduler_configs
    assert isinstance(config.scheduler, ReduceLROnPlateau)
    assert (config.monitor, config.scheduler.patience) == ("val_loss", 3)


def test_configure_optimizers_of_the_module() -> None:
    assert type(fitted(model_class=Configured).optimizers[0]) is torch.optim.SGD
    with pytest.warns(TrainkitWarning, match="Configured.configure_optimizers is not used, because --optimizer is given"):
        assert type(fitted("--optimizer=Adam", model_class=Configured).optimizers[0]) is torch.optim.Adam


def test_automatic_optimizers_can_be_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        built("--optimizer=Adam", auto_configure_optimizers=False)
    assert "unrecognized arguments: --optimizer" in capsys.readouterr().err


class OneClass(TrainkitCLI):
    """An optimizer and a scheduler of fixed classes, and an own `configure_optimizers`."""

    def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
        parser.add_optimizer_args(torch.optim.AdamW, nested_key="adam")
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR, nested_key="steps")
        parser.set_defaults({"steps.step_size": 1})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}


def test_fixed_classes_and_an_own_configure_optimizers() -> None:
    trainer = fitted("--adam.lr=0.5", "--steps.gamma=0.5", kind=OneClass)
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**2)


class TwoOptimizers(Bare):
    """A module that creates its optimizers from what the command line says."""

    def __init__(self, first_init: dict[str, Any], second: OptimizerCallable = torch.optim.SGD) -> None:
        super().__init__()
        self.first, self.second = first_init, second


def test_optimizers_that_are_arguments_of_the_module() -> None:
    class Linking(TrainkitCLI):
        def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
            parser.add_optimizer_args((torch.optim.Adam, torch.optim.SGD), "first", link_to="model.first_init")
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR, "unused", link_to="notes")
            parser.add_argument("--notes", type=dict)
            parser.set_defaults({"unused.step_size": 4})

    second = ("--model.second=torch.optim.Adam", "--model.second.lr=0.2")
    cli = built("--first=SGD", "--first.lr=0.1", *second, kind=Linking, model_class=TwoOptimizers)
    assert cli.model.first["class_path"] == "torch.optim.SGD"
    assert cli.model.first["init_args"]["lr"] == 0.1
    assert cli.model.second(cli.model.parameters()).param_groups[0]["lr"] == 0.2
    assert cli.config.notes["class_path"] == "torch.optim.lr_scheduler.StepLR"


def test_two_automatic_optimizers_are_refused() -> None:
    class Two(TrainkitCLI):
        def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam, "one")
            parser.add_optimizer_args(torch.optim.Adam, "two")

    with pytest.raises(ConfigurationError, match="at most one optimizer .*link_to='model.two_init'"):
        built(kind=Two)


class Forms(Bare):
    """A module whose `configure_optimizers` returns one of the supported forms."""

    def __init__(self, form: str = "bare") -> None:
        super().__init__()
        self.form = form

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer) if self.form == "scheduled" else None
        other = [torch.optim.SGD(self.parameters(), lr=1.0)] if self.form == "two" else []
        forms = {
            "bare": optimizer,
            "dict": {"optimizer": optimizer, "monitor": "train_loss"},
            "list": [optimizer],
            "pair": ([optimizer], []),
            "scheduled": {"optimizer": optimizer, "lr_scheduler": schedule},
            "two": [optimizer, *other],
        }
        return forms[self.form]


STEPS = ("--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5")


@pytest.mark.parametrize("form", ["bare", "dict", "list", "pair"])
def test_a_schedule_without_an_optimizer_is_for_the_modules_own(form: str) -> None:
    trainer = fitted(*STEPS, f"--model.form={form}", "--trainer.max_steps=-1", "--trainer.max_epochs=1", model_class=Forms)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert type(trainer.lr_scheduler_configs[0].scheduler) is torch.optim.lr_scheduler.StepLR


def test_a_schedule_that_cannot_act_is_refused() -> None:
    for form, got in (("scheduled", "SGD, ConstantLR"), ("two", "SGD, SGD")):
        with pytest.raises(ConfigurationError, match=f"--lr_scheduler is for the one optimizer of Forms.*it returned {got}"):
            fitted(*STEPS, f"--model.form={form}", model_class=Forms)
    with pytest.raises(ConfigurationError, match="--lr_scheduler needs an optimizer.*--optimizer=AdamW"):
        built(*STEPS, model_class=Bare)

    class Added(TrainkitCLI):
        def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam)

    with pytest.raises(ConfigurationError, match="=False, so optimizer would have no effect.*link_to="):
        built(kind=Added, auto_configure_optimizers=False)


def test_every_option_acts_or_is_refused() -> None:
    """Each option of each subcommand belongs to a group, of which this checks that its values arrive."""
    received: dict[str, Any] = {}

    class Receiving(Trainer):
        def fit(self, *args: Any, **kwargs: Any) -> None:
            received.update(kwargs)

    class Seen(TrainkitCLI):
        trainer_arguments: set[str]

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            self.trainer_arguments = set(vars(self._get(self.config_init, "trainer")))
            return super().instantiate_trainer(**kwargs)

    cli = command_line("fit", "--seed_everything=5", kind=Seen, trainer_class=Receiving, **NOTHING)
    assert cli.config.fit.seed_everything == 5
    for name, parser in cli._subcommand_parsers.items():
        options = {action.dest for action in parser._actions if action.default != "==SUPPRESS=="}
        groups = {"trainer": set(), "model": set(), "data": set()}  # type: dict[str, set[str]]
        for option in options:
            group, _, argument = option.partition(".")
            if group in groups and argument:
                groups[group].add(argument.partition(".")[0])
        assert groups["trainer"] == cli.trainer_arguments, "all are passed to the Trainer"
        assert groups["model"] == {"encoder", "width", "dropout", "size", "rate"} == set(cli.model.hparams)
        assert groups["data"] == {"batch_size", "samples"}
        others = {option for option in options if option.partition(".")[0] not in groups}
        of_method = set(cli._subcommand_method_arguments[name])
        # optimizers, schedules and trust have tests of their own
        assert others == {"config", "seed_everything", "optimizer", "lr_scheduler", "trust", *of_method}
    assert set(received) == {"model", "datamodule", *cli._subcommand_method_arguments["fit"]}


def test_no_configuration_is_saved_on_request() -> None:
    command_line("fit", "--trainer.max_steps=1", **NOTHING)
    command_line("fit", "--trainer.fast_dev_run=true")
    assert config_files() == []
