"""The hyper-parameters of a checkpoint as defaults of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser

from trainkit.checkpoint.identify import is_checkpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.console import notice
from trainkit.launch.script_options import option
from trainkit.paths import local_path
from trainkit.trainer.find_checkpoint import WORDS

__all__ = ["checkpoint_defaults"]


def checkpoint_defaults(parser: ArgumentParser, arguments: Sequence[str], subclass_mode: bool) -> None:
    """Set the defaults of the module's arguments to those that the checkpoint of `--ckpt_path` was saved with.

    Args:
        parser: The parser of the subcommand.
        arguments: The command line.
        subclass_mode: The module's class is an argument too.
    """
    given = option(arguments, "ckpt_path")
    if not given or given in WORDS or not is_checkpoint(local_path(given, "ckpt_path")):
        return  # the Trainer finds it, or says what is wrong
    state = open_checkpoint(given).read({"state"}).state
    values: dict[str, Any] = dict(state.get("hyper_parameters", {}))
    if not values:
        return
    if subclass_mode:
        class_path = state.get("hyper_parameters_class") or state["module"]
        parser.set_defaults({"model": {"class_path": class_path, "init_args": values}})
        return
    unused = []
    for name, value in values.items():
        try:
            parser.set_defaults({f"model.{name}": value})
        except KeyError:  # the module has no such argument now, or a link sets it
            unused.append(str(name))
    if unused:
        notice(f"the command line sets these hyper-parameters of {given} itself: {', '.join(unused)}.")
