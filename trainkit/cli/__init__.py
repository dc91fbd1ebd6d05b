"""The command `trainkit` and its subcommands, one module each; and `TrainkitCLI`, a command line for the user's own module.

Each public name is loaded on first use, so that the command `trainkit` does not need jsonargparse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.lazy import lazily

if TYPE_CHECKING:
    from trainkit.cli.for_scripts.argument_parser import TrainkitArgumentParser
    from trainkit.cli.for_scripts.optimizer_arguments import (
        LRSchedulerCallable,
        LRSchedulerTypeUnion,
        OptimizerCallable,
        ReduceLROnPlateau,
        instantiate_class,
    )
    from trainkit.cli.for_scripts.save_config import SaveConfigCallback
    from trainkit.cli.for_scripts.trainkit_cli import ArgsType, TrainkitCLI

    LightningArgumentParser = TrainkitArgumentParser
    LightningCLI = TrainkitCLI

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "TrainkitArgumentParser",
    "TrainkitCLI",
    "instantiate_class",
]

_FILES = {
    "ArgsType": "for_scripts.trainkit_cli",
    "LRSchedulerCallable": "for_scripts.optimizer_arguments",
    "LRSchedulerTypeUnion": "for_scripts.optimizer_arguments",
    "LightningArgumentParser": "for_scripts.argument_parser",
    "LightningCLI": "for_scripts.trainkit_cli",
    "OptimizerCallable": "for_scripts.optimizer_arguments",
    "ReduceLROnPlateau": "for_scripts.optimizer_arguments",
    "SaveConfigCallback": "for_scripts.save_config",
    "TrainkitArgumentParser": "for_scripts.argument_parser",
    "TrainkitCLI": "for_scripts.trainkit_cli",
    "instantiate_class": "for_scripts.optimizer_arguments",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
