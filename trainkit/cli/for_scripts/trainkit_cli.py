"""`TrainkitCLI`: a command line for a module and its data.

`SaveConfigCallback` writes the configuration into the folder of the run.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer

from trainkit._version import __version__
from trainkit.callback import Callback
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.cli.for_scripts.argument_parser import (
    AUTOMATIC,
    ConfigContext,
    ReduceLROnPlateau,
    TrainkitArgumentParser,
    find_masked_keys,
    instantiate_class,
    mask_config,
    needs_secrets,
    report_errors,
    with_class_path,
    with_our_paths,
)
from trainkit.cli.for_scripts.saved_arguments import checkpoint_defaults
from trainkit.console import warn
from trainkit.errors import CheckpointNotFoundError, ConfigurationError, TrainkitError, UnknownNameError
from trainkit.launch.environment import options
from trainkit.loggers.run_files import regular_size, yaml_in
from trainkit.masking import mask_arguments
from trainkit.module.data_module import DataModule
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.nested import leaves
from trainkit.rng import resolve_seed, seed_everything, seed_was_given
from trainkit.trainer.run_folder import folder_of_fit
from trainkit.trainer.trainer import Trainer

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["ArgsType", "LightningCLI", "SaveConfigCallback", "TrainkitCLI"]


ArgsType = list[str] | dict[str, Any] | Namespace | None
"""What `TrainkitCLI(args=…)` accepts."""

_TRUST = (
    "A package whose classes and functions the checkpoint of --ckpt_path may name as arguments of the module, with a dot at "
    "its end: mypackage. (on the command line only; can be given several times)"
)
_USAGE = "%(prog)s [options]"  # instead of a page of options


class SaveConfigCallback(Callback):
    """Writes the complete configuration to `config.yaml` in the folder of the run, from which `--config` starts it again.

    `TrainkitCLI` adds it to the Trainer. A fit writes the file before training. An evaluation writes it if a logger has a
    folder for it. A run that is resumed continues in its folder: if its configuration has changed, it is written to
    `config-from-CHECKPOINT.yaml`. The main process writes; an error is raised on all ranks.

    What may be a password or a key is saved as `***masked***`. A command that reads the file needs the value again.

    Args:
        parser: The parser of the subcommand.
        config: What it parsed.
        config_filename: The name of the file.
        overwrite: Replace a file that another run wrote.
        multifile: Write the parts that were read from files of their own to files again.
        save_to_log_dir: Write the file. `False`: only call `save_config`, which a subclass must then define.

    Raises:
        ConfigurationError: `save_to_log_dir=False` without `save_config`; or, when a run starts, the file exists.

    Example:
        ```python
        class LogConfig(SaveConfigCallback):
            def save_config(self, trainer, module, stage):
                trainer.logger.log_hyperparams({"config": self.parser.dump(self.config)})

        TrainkitCLI(Classifier, Digits, save_config_callback=LogConfig)
        ```
    """

    def __init__(
        self,
        parser: TrainkitArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and not is_overridden(self, "save_config", SaveConfigCallback):
            raise ConfigurationError(
                f"{type(self).__name__}(save_to_log_dir=False) saves nothing: expected a subclass that defines save_config. "
                "To save no configuration: TrainkitCLI(save_config_callback=None)"
            )

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Save for an evaluation. A fit saves in `on_fit_start`, when it is known which run it continues."""
        if stage != "fit":
            self._save(trainer, module, stage, _folder_of_loggers(trainer))

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Save for a fit."""
        self._save(trainer, module, "fit", folder_of_fit(trainer._run) or Path(trainer.log_dir or trainer.default_root_dir))

    def save_config(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Save the configuration somewhere else too. Define it in a subclass.

        It is called once, on the main process only, so that it must not call a collective.

        Args:
            trainer: The Trainer.
            module: The module.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def _save(self, trainer: Trainer, module: TrainModule, stage: str, folder: Path | None) -> None:
        if self.already_saved:
            return

        def save() -> None:
            if trainer.is_global_zero:
                if folder is not None and self.save_to_log_dir:
                    self._write(trainer, folder / self.config_filename)
                self.save_config(trainer, module, stage)

        run_on_all_ranks(trainer.strategy.world, save)
        self.already_saved = True

    def _write(self, trainer: Trainer, path: Path) -> None:
        if os.path.lexists(path) and not self.overwrite:
            saves = trainer._run.save_policy
            resumed_from = None if saves is None else saves.resumed_from
            if self._is_saved_in(path):
                return
            if resumed_from is None:
                raise ConfigurationError(
                    f"{path} is the configuration of another run, and expected not to exist. Delete it, or choose another "
                    "folder: --trainer.default_root_dir=runs/2. To replace it: "
                    "TrainkitCLI(save_config_kwargs={'overwrite': True}). To save none: TrainkitCLI(save_config_callback=None)"
                )
            # a run that resumes from the same checkpoint again replaces it: it repeats the same work
            path = path.with_name(f"{path.stem}-from-{resumed_from.name}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            regular_size(path)  # a link is not followed, and a pipe would be waited for
        # not validated, since a masked value need not be valid; the parser has validated what was parsed
        saved = {"skip_unset": False, "skip_validation": True}
        self.parser.save(mask_config(self.config), path, overwrite=True, multifile=self.multifile, **saved)

    def _is_saved_in(self, path: Path) -> bool:
        """Whether a file has this configuration; which checkpoint a run starts from makes no difference."""
        try:
            saved, current = yaml_in(path), yaml.safe_load(self._dump())
        except (TrainkitError, ValueError, yaml.YAMLError):
            return False
        return isinstance(saved, dict) and {**saved, "ckpt_path": None} == {**current, "ckpt_path": None}

    def _dump(self) -> str:
        return str(self.parser.dump(mask_config(self.config), skip_unset=False, skip_validation=True))


def _folder_of_loggers(trainer: Trainer) -> Path | None:
    """The first folder that a logger has for the run."""
    folders: list[Any] = [logger.log_dir for logger in trainer.loggers]
    return next((Path(folder) for folder in folders if folder is not None), None)


class TrainkitCLI:
    """A command line for your module: the arguments of its `__init__`, of its data module and of `Trainer`, by their types.

    The subcommands `fit`, `validate`, `test` and `predict` create the data module, the module and the Trainer, and call its
    method. Values come from defaults, configuration files (`--config`), environment variables and the command line; the later
    ones win. The name and the arguments are those of Lightning's `LightningCLI`, which is the same class here.

    It needs the package jsonargparse: `pip install 'trainkit-torch[cli]'`.

    Args:
        model_class: The module's class, or a function whose return annotation is one. `None`: any subclass of `TrainModule`,
            which the command line names: `--model=mypackage.MyModule`.
        datamodule_class: The data module's class, or a function. `None`: optional, any subclass of `DataModule`:
            `--data=mypackage.MyData`.
        save_config_callback: Saves the configuration with the run; `None`: it is not saved.
        save_config_kwargs: More arguments for it, such as `{"overwrite": True}`.
        trainer_class: `Trainer`, a subclass, or a function.
        trainer_defaults: Other defaults of the Trainer's arguments. Callbacks given here, also as dicts, are always added.
        seed_everything_default: Default of `--seed_everything`: a seed; `True`: the seed of the process, else 0; `False`: none.
        parser_kwargs: Arguments of the parsers; under the name of a subcommand, of its parser:
            `{"fit": {"default_config_files": ["fit.yaml"]}}`.
        parser_class: The class of the parsers.
        subclass_mode_model: Accept any subclass of `model_class`.
        subclass_mode_data: Accept any subclass of `datamodule_class`.
        args: Use these arguments instead of `sys.argv`: a list as on the command line, or a dict or `Namespace` as in a file.
        run: `False`: there are no subcommands, and nothing runs. Use `cli.trainer`, `cli.model` and `cli.datamodule`.
        auto_configure_optimizers: Add `--optimizer` and `--lr_scheduler`, which define `configure_optimizers` of the module.
        load_from_checkpoint_support: `save_hyperparameters` saves what the configuration says, so that `load_from_checkpoint`
            also creates arguments that are objects.

    Attributes:
        config: What was parsed.
        config_init: The same, with objects created.
        parser: The main parser.
        subcommand: The name of the subcommand; `None` with `run=False`.
        model: The module.
        datamodule: The data module, or `None`.
        trainer: The Trainer.

    Raises:
        SystemExit: A wrong argument, with code 2; in one of several processes, a wrong value raises its error.
        ConfigurationError: A class or an argument of this constructor is wrong.
        MissingPackageError: jsonargparse is not installed.

    Example:
        ```python
        if __name__ == "__main__":
            TrainkitCLI(Classifier, Digits)
        ```

        ```bash
        python train.py fit --model.width=64 --trainer.max_epochs=10 --optimizer=AdamW --optimizer.lr=1e-3
        ```
    """

    def __init__(
        self,
        model_class: type[TrainModule] | Callable[..., TrainModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[TrainkitArgumentParser] = TrainkitArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class = model_class
        self.datamodule_class = datamodule_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support

        names = self.subcommands()
        of_subparsers = {name: value for name, value in self.parser_kwargs.items() if name in names}
        of_main = {name: value for name, value in self.parser_kwargs.items() if name not in names}
        self._subcommand_parsers: dict[str, TrainkitArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        self.setup_parser(run, of_main, of_subparsers)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # ---------------------------------------------------------------------------------------------------------- the parser

    def init_parser(self, **kwargs: Any) -> TrainkitArgumentParser:
        """Create a parser.

        Args:
            **kwargs: Arguments of the parser.
        """
        parser = self.parser_class(**{"dump_header": [f"trainkit=={__version__}"], **kwargs})
        parser.add_argument("-c", "--config", action="config", help="A configuration file, YAML or JSON.")
        return parser

    def setup_parser(self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]) -> None:
        """Create the parsers, and add all arguments.

        Args:
            add_subcommands: Add the subcommands, each with a parser of its own.
            main_kwargs: Arguments of the main parser.
            subparser_kwargs: Name of a subcommand → arguments of its parser.
        """
        self.parser = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self.parser.usage = self.parser.usage or _USAGE
            self._add_arguments(self.parser)
            return
        subparsers = self.parser.add_subcommands()
        kind: Any = self.trainer_class if isinstance(self.trainer_class, type) else class_from_function(self.trainer_class)
        for name, skip in self.subcommands().items():
            method = getattr(kind, name)
            purpose = (inspect.getdoc(method) or "").partition("\n")[0]
            parser = self.init_parser(**{"description": purpose, "usage": _USAGE, **subparser_kwargs.get(name, {})})
            self._add_arguments(parser)
            self._subcommand_method_arguments[name] = parser.add_method_arguments(kind, name, skip=set(skip))
            parser.add_argument("--trust", action="append", type=str, metavar="PREFIX", help=_TRUST)
            self._subcommand_parsers[name] = parser
            subparsers.add_subcommand(name, parser, help=purpose)

    def add_default_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
        """Add the arguments that belong to no class: `--seed_everything`.

        Args:
            parser: The parser of a subcommand.
        """
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="Seed for seed_everything, called before anything is created. true: 0; false: do not seed.",
        )

    def add_core_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
        """Add the arguments of the Trainer, the module and the data module.

        Args:
            parser: The parser of a subcommand.
        """
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"})
        parser.add_lightning_class_args(self.model_class or TrainModule, "model", subclass_mode=self.subclass_mode_model)
        required = self.datamodule_class is not None  # otherwise the module may have the loaders
        data = self.datamodule_class or DataModule
        parser.add_lightning_class_args(data, "data", subclass_mode=self.subclass_mode_data, required=required)

    def add_arguments_to_parser(self, parser: TrainkitArgumentParser) -> None:
        """Add arguments, link them, or set other defaults. Define it in a subclass.

        Args:
            parser: The parser of a subcommand.

        Example:
            ```python
            class MyCLI(TrainkitCLI):
                def add_arguments_to_parser(self, parser):
                    parser.add_lightning_class_args(EarlyStopping, "early_stopping")
                    parser.set_defaults({"early_stopping.monitor": "val_loss"})
                    parser.link_arguments("data.batch_size", "model.batch_size")
            ```
        """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommands: the name of a method of the Trainer → its arguments that are not on the command line."""
        evaluation = {"model", "dataloaders", "datamodule"}
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fit, "validate": set(evaluation), "test": set(evaluation), "predict": set(evaluation)}

    def _add_arguments(self, parser: TrainkitArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args()
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: TrainkitArgumentParser) -> None:
        """Link the optimizers and schedulers that were added with `link_to`.

        Args:
            parser: The parser of a subcommand.
        """
        for key, (kind, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if link_to != AUTOMATIC:
                of_one_class = None if isinstance(kind, tuple) else partial(with_class_path, kind)
                parser.link_arguments(key, link_to, compute_fn=of_one_class)

    # --------------------------------------------------------------------------------------------------------- the values

    def parse_arguments(self, parser: TrainkitArgumentParser, args: ArgsType) -> None:
        """Parse the arguments into `self.config`.

        If `ckpt_path` is the path of a checkpoint, its hyper-parameters are the defaults of the module's arguments, so that
        they need not be given again. Arguments that are given win, unlike in Lightning.

        Args:
            parser: The main parser.
            args: The argument of the constructor.
        """
        if args is not None and len(sys.argv) > 1:
            warn(
                f"args={args!r} is used, and the command line {mask_arguments(sys.argv[1:])} is not. Expected one of them: "
                f"call {type(self).__name__} without args in a script."
            )
        with report_errors(parser, ConfigurationError):
            arguments = with_our_paths(sys.argv[1:] if args is None else args)
        parse: Any = parser.parse_args if isinstance(arguments, Sequence) else parser.parse_object
        if isinstance(arguments, Sequence) and arguments and arguments[0] in self._subcommand_parsers:
            subparser = self._subcommand_parsers[arguments[0]]
            with report_errors(subparser, ConfigurationError):
                checkpoint_defaults(subparser, arguments, self.model_class or TrainModule, self.subclass_mode_model)
            parser.required_by_checkpoint = subparser.required_by_checkpoint
        with report_errors(parser, UnknownNameError):  # of a class in a file
            self.config = parse(arguments)
        self._drop_trust(arguments)
        name = self.config.get("subcommand")
        if masked := find_masked_keys(self.config if name is None else self.config[name]):
            parser.error(needs_secrets(masked))

    def _drop_trust(self, args: ArgsType) -> None:
        """Remove `--trust` from the configuration, which is saved with the run: a file never says what is trusted."""
        name = self.config.get("subcommand")
        trusted = self.config[name].pop("trust", None) if name in self._subcommand_parsers else None
        if (trusted or []) != (options(args, "trust") if isinstance(args, Sequence) else []):
            self.parser.error("trust is an option of the command line, and has no effect elsewhere: --trust mypackage.")

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything", default=False)
        if seed is False:
            return
        # It must be the same in each process, and when the program is run again.
        default = resolve_seed(None) if seed_was_given(None) else 0
        seed = seed_everything(default if seed is True else seed)
        (self.config[self.subcommand] if self.subcommand else self.config)["seed_everything"] = seed

    # -------------------------------------------------------------------------------------------------------- the objects

    def before_instantiate_classes(self) -> None:
        """Called before anything is created; `self.config` can be changed. Define it in a subclass."""

    def instantiate_classes(self) -> None:
        """Create the data module, the module and the Trainer."""
        of_model, of_data = (ConfigContext(self, key, self.load_from_checkpoint_support) for key in ("model", "data"))
        contexts = [
            of_model.as_instantiator(self.model_class or TrainModule, self.subclass_mode_model),
            of_data.as_instantiator(self.datamodule_class or DataModule, self.subclass_mode_data),
        ]
        with report_errors(self._parser(), ConfigurationError):
            self.config_init = self.parser.instantiate(self.config, instantiators=contexts)
        self.datamodule: DataModule | None = self._get(self.config_init, "data")
        self.model: TrainModule = self._get(self.config_init, "model")
        self._define_configure_optimizers()
        with report_errors(self._parser(), ConfigurationError):
            self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Called when everything is created. Define it in a subclass."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Create the Trainer.

        Args:
            **kwargs: Arguments that replace the parsed ones.
        """
        arguments = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        parser = self._parser()
        callbacks: list[Callback] = [self._get(self.config_init, key) for key in parser.callback_keys]
        callbacks += _as_list(self.trainer_defaults.get("callbacks"))
        if self.save_config_callback is not None and not arguments.get("fast_dev_run", False):
            config = self.config if self.subcommand is None else self.config[self.subcommand]
            callbacks.append(self.save_config_callback(parser, config, **self.save_config_kwargs))
        if "callbacks" in arguments:
            arguments["callbacks"] = [*_as_list(arguments["callbacks"]), *callbacks]
        elif callbacks:
            warn(f"{self.trainer_class.__qualname__} has no argument callbacks, so these are not used: {callbacks}.")
        return self.trainer_class(**arguments)

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """What `configure_optimizers` of the module returns, if `--optimizer` or `--lr_scheduler` is given.

        Override it to change it.

        Args:
            lightning_module: The module.
            optimizer: The optimizer; without `--optimizer` that of the module's own `configure_optimizers`.
            lr_scheduler: The scheduler, or `None`.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}}
        return [optimizer], [lr_scheduler]

    def _define_configure_optimizers(self) -> None:
        """Define `configure_optimizers` of the module from the `"AUTOMATIC"` optimizer and scheduler, if they are given."""
        parser = self._parser()
        optimizers = [key for key, (_, link) in parser._optimizers.items() if link == AUTOMATIC]
        schedulers = [key for key, (_, link) in parser._lr_schedulers.items() if link == AUTOMATIC]
        self._check_automatic(optimizers, schedulers)
        optimizer = self._class_and_args(parser._optimizers, optimizers[0]) if optimizers else None
        scheduler = self._class_and_args(parser._lr_schedulers, schedulers[0]) if schedulers else None
        if optimizer is None and scheduler is None:
            return
        create = self.model.configure_optimizers
        name, has_own = type(self.model).__name__, is_overridden(self.model, "configure_optimizers", TrainModule)
        if optimizer is None and not has_own:
            raise ConfigurationError(
                f"--{schedulers[0]} needs an optimizer, and {name} does not define configure_optimizers. Expected one of them. "
                "Fix: --optimizer=AdamW --optimizer.lr=1e-3"
            )
        if optimizer is not None and has_own:
            warn(f"{name}.configure_optimizers is not used, because --{optimizers[0]} is given.")
        configure = self.configure_optimizers

        def configure_optimizers(module: TrainModule) -> Any:
            # now that configure_model has run
            created = (
                _only_optimizer(create(), name) if optimizer is None else instantiate_class(module.parameters(), optimizer)
            )
            return configure(module, created, None if scheduler is None else instantiate_class(created, scheduler))

        object.__setattr__(self.model, "configure_optimizers", MethodType(configure_optimizers, self.model))

    def _check_automatic(self, optimizers: list[str], schedulers: list[str]) -> None:
        """Refuse optimizers and schedulers without `link_to` that would not be used."""
        if not self.auto_configure_optimizers and optimizers + schedulers:
            raise ConfigurationError(
                f"auto_configure_optimizers=False, so {', '.join(optimizers + schedulers)} would have no effect. Expected a "
                f"link to an argument of the module. Fix: link_to='model.{(optimizers + schedulers)[0]}_init'"
            )
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise ConfigurationError(
                f"expected at most one optimizer and one scheduler without link_to, got {', '.join(optimizers + schedulers)}. "
                "Link them to arguments of the module, and define its configure_optimizers: "
                f"parser.add_optimizer_args(Adam, {optimizers[-1]!r}, link_to='model.{optimizers[-1]}_init')"
            )

    def _class_and_args(self, added: dict[str, tuple[Any, str]], key: str) -> dict[str, Any] | None:
        """The class path and arguments of an optimizer or scheduler; `None` if it is not given."""
        kind, values = added[key][0], self._get(self.config_init, key)
        if not isinstance(kind, tuple):
            return with_class_path(kind, values)
        return None if values is None else dict(values.as_dict())

    # ------------------------------------------------------------------------------------------------------ the subcommand

    def _run_subcommand(self, name: str) -> None:
        """Call `before_fit`, the method of the Trainer (or `self.fit`), and `after_fit`, for the subcommand `fit`."""
        getattr(self, f"before_{name}", lambda: None)()
        names = self._subcommand_method_arguments[name]
        arguments = {key: value for key, value in self.config_init[name].items() if key in names}
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        try:
            with report_errors(self._parser(), CheckpointNotFoundError):  # --ckpt_path
                getattr(self, name, getattr(self.trainer, name))(model=self.model, **arguments)
        except KeyboardInterrupt as interrupt:
            if "ckpt_path='auto'" in str(interrupt):  # That message shows Python code: name the option, too.
                interrupt.args = (f"{interrupt} On the command line: --ckpt_path=auto",)
            raise
        getattr(self, f"after_{name}", lambda: None)()

    def _parser(self) -> TrainkitArgumentParser:
        """The parser of the subcommand."""
        return self.parser if self.subcommand is None else self._subcommand_parsers[self.subcommand]

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        """A value of the subcommand."""
        return (config if self.subcommand is None else config[self.subcommand]).get(key, default)


LightningCLI = TrainkitCLI


def _only_optimizer(configured: Any, name: str) -> Optimizer:
    """The optimizer that a module's own `configure_optimizers` returned, for the schedule of the command line."""
    returned = {**configured, "monitor": ()} if isinstance(configured, Mapping) else configured
    objects = list(leaves(returned))
    if len(objects) != 1 or not isinstance(objects[0], Optimizer):
        raise ConfigurationError(
            f"--lr_scheduler is for the one optimizer of {name}.configure_optimizers, and expects no other schedule: "
            f"it returned {', '.join(type(one).__name__ for one in objects) or 'none'}. Fix: create all schedules there, and "
            "remove --lr_scheduler; or give an optimizer too: --optimizer=AdamW --optimizer.lr=1e-3"
        )
    return objects[0]


def _as_list(callbacks: Any) -> list[Any]:
    listed = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    return [instantiate_class((), one) if isinstance(one, dict) else one for one in listed]
