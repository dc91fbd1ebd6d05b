"""The command `trainkit` and its subcommands, one module each; and `TrainkitCLI`, a command line for the user's own module.

Each public name is loaded on first use, so that the command `trainkit` does not need jsonargparse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.cli.for_scripts.argument_parser import (
        LRSchedulerCallable,
        LRSchedulerTypeUnion,
        OptimizerCallable,
        ReduceLROnPlateau,
        TrainkitArgumentParser,
        instantiate_class,
    )
    from trainkit.cli.for_scripts.trainkit_cli import ArgsType, SaveConfigCallback, TrainkitCLI

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
    "LRSchedulerCallable": "for_scripts.argument_parser",
    "LRSchedulerTypeUnion": "for_scripts.argument_parser",
    "LightningArgumentParser": "for_scripts.argument_parser",
    "LightningCLI": "for_scripts.trainkit_cli",
    "OptimizerCallable": "for_scripts.argument_parser",
    "ReduceLROnPlateau": "for_scripts.argument_parser",
    "SaveConfigCallback": "for_scripts.trainkit_cli",
    "TrainkitArgumentParser": "for_scripts.argument_parser",
    "TrainkitCLI": "for_scripts.trainkit_cli",
    "instantiate_class": "for_scripts.argument_parser",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
