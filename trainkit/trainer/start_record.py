"""`StartRecord`: writes into the folder of a run that a fit starts, how it was started, and how it ended.

`trainkit report` shows from it when a run was interrupted and resumed, where it ran, and the command to continue. A fit without
a folder of its own (no logger that writes files, no checkpoints in the default folder, `fast_dev_run`) writes nothing.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit._version import __version__
from trainkit.console import warn
from trainkit.errors import ConfigurationError, Preempted
from trainkit.launch.starting import folder_at_start, start_command
from trainkit.loggers.run_files import STARTS, append_record, utc_now
from trainkit.masking import mask_arguments, mask_text
from trainkit.trainer.explain import end_reason
from trainkit.trainer.run_folder import folder_of_fit

if TYPE_CHECKING:
    from trainkit.trainer.run import Run
    from trainkit.trainer.trainer import Trainer

__all__ = ["StartRecord"]


class StartRecord:
    """The record of one fit, written by the main process. A failed write is a warning, and the fit continues.

    Args:
        run: the fit, restored and with its folders.
        ckpt_path: what `fit` was passed.
        began: when `fit` was called.
    """

    def __init__(self, run: Run, ckpt_path: str | os.PathLike[str] | None, began: str) -> None:
        self._folder = folder_of_fit(run) if run.strategy.world.is_main else None
        self._began = began
        if self._folder is not None:
            self._write(self._folder, {"kind": "start", "time": began, **_position(run), **_facts(run, ckpt_path)})

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Record how the fit ended; may be called again, and then does nothing."""
        folder, self._folder = self._folder, None
        if folder is None or not (folder / STARTS).exists():  # the user has removed the folder
            return
        reason = end_reason(trainer) if error is None else _name(error)
        about = {"reason": reason, "finished": error is None}
        self._write(folder, {"kind": "end", "time": utc_now(), "started": self._began, **_position(trainer._run), **about})

    def _write(self, folder: Path, record: dict[str, Any]) -> None:
        try:
            append_record(folder, record)
        except OSError as error:
            self._folder = None
            warn(
                f"The {record['kind']} of the fit could not be recorded in {folder / STARTS}: {error}. Training is not "
                "affected, but trainkit report will not show it. Fix: free some space, or make the folder writable"
            )


def _position(run: Run) -> dict[str, int]:
    return {"step": run.progress.global_step, "epoch": run.progress.current_epoch}


def _facts(run: Run, ckpt_path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """How and where the fit was started. Nothing of the environment variables."""
    strategy, saves = run.strategy, run.save_policy
    assert saves is not None  # each fit has them
    try:
        command = mask_arguments(start_command(strategy.world.size))
    except ConfigurationError:  # a notebook, python -c, a test: no command line that can be run again
        command = None
    return {
        "run_id": saves.run_id,
        "ckpt_path": None if ckpt_path is None else mask_text(os.fspath(ckpt_path)),
        "resumed_from": None if saves.resumed_from is None else str(saves.resumed_from),
        "resumed_saved_at": saves.resumed_saved_at,
        "argv": mask_arguments(sys.argv),
        "command": command,
        "folder": os.path.abspath(folder_at_start() or ""),
        "launcher": strategy.world.launcher,
        "host": socket.gethostname(),
        "processes": strategy.world.size,
        "device": _device(strategy.where, strategy.device),
        "strategy": strategy.name,
        "precision": strategy.precision.name,
        "trainkit": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _device(where: str, device: torch.device) -> str:
    return f"{where} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else where


def _name(error: BaseException) -> str:
    """What ended a fit, without the message, which may contain data: SIGTERM, KeyboardInterrupt, ValueError."""
    signal = re.search(r"\bSIG[A-Z0-9]+\b", str(error)) if isinstance(error, Preempted) else None
    return type(error).__name__ if signal is None else signal[0]
