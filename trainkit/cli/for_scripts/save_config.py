"""`SaveConfigCallback`: writes the configuration of a command line into the folder of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import Namespace

from trainkit.callback import Callback
from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.cli.for_scripts.argument_parser import TrainkitArgumentParser
from trainkit.cli.for_scripts.masked_config import mask_config
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.loggers.run_files import regular_size, yaml_in
from trainkit.module.overridable_hooks import is_overridden
from trainkit.trainer.run_folder import folder_of_fit

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["SaveConfigCallback"]


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
        self.parser, self.config = parser, config
        self.config_filename = config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
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
            saved, own = yaml_in(path), yaml.safe_load(self._dump())
        except (TrainkitError, ValueError, yaml.YAMLError):
            return False
        return isinstance(saved, dict) and {**saved, "ckpt_path": None} == {**own, "ckpt_path": None}

    def _dump(self) -> str:
        return str(self.parser.dump(mask_config(self.config), skip_unset=False, skip_validation=True))


def _folder_of_loggers(trainer: Trainer) -> Path | None:
    """The first folder that a logger has for the run."""
    folders: list[Any] = [logger.log_dir for logger in trainer.loggers]
    return next((Path(folder) for folder in folders if folder is not None), None)
