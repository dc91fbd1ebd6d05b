"""One process of `trainkit test`: `python -m trainkit.cli.setup_child FOLDER STRATEGY BACKEND`, started by its agent."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from trainkit.cli.setup_checks import CHECKS, SETTINGS, CheckContext
from trainkit.cli.test import print_line
from trainkit.config.inherited import VARIABLE
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.registry import make_strategy

__all__ = ["main"]

_TIMEOUT = timedelta(seconds=60)


def main(arguments: Sequence[str]) -> int:
    """Run the checks until one fails; 0 if all pass."""
    folder, name, backend = Path(arguments[0]), arguments[1], arguments[2]
    logging.getLogger("trainkit").setLevel(logging.WARNING)  # no notices of the runs in the checks
    device = "cuda" if backend == "nccl" else "cpu"
    make = partial(make_strategy, name, device=device, process_group_backend=backend, timeout=_TIMEOUT)
    strategy = make()
    strategy.join(RequestedDevices(accelerator=device))
    world = strategy.world
    context = CheckContext(strategy, make, folder)
    settings = os.environ.pop(VARIABLE, None)  # only for the check of settings
    for check in CHECKS if settings is None else (*CHECKS, SETTINGS):
        if check is SETTINGS and settings is not None:
            os.environ[VARIABLE] = settings
        error: Exception | None = None
        result = ""
        try:
            result = check.run(context)
        except Exception as caught:
            error = caught
            text = f"{type(caught).__name__}: {caught}"
            if os.environ.get("TRAINKIT_TRACEBACK") == "1":
                text = "".join(traceback.format_exception(caught)).rstrip()
            # before the collective call below, which may hang
            (folder / f"error-{world.rank}.txt").write_text(f"rank {world.rank}: {text}", "utf-8")
        if world.agree(error) is not None:
            return 1
        if world.is_main:
            print_line(check.name, True, result)
            with (folder / "ended").open("a") as file:
                file.write(f"{check.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
