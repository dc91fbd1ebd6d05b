"""Whether a tracker can be used here without anybody being asked: which of them ``log_with="all"`` stands for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainkit.loggers.base import is_installed

__all__ = ["reason_against"]


def reason_against(name: str, options: Mapping[str, Any]) -> str | None:
    """Why a tracker that is installed cannot be used, with what to do; ``None``: it can.

    Args:
        name: of :data:`trainkit.loggers.names.LOGGERS`.
        options: that its logger would be given.
    """
    if name == "wandb":
        return _wandb(options)
    if name == "comet_ml":
        from trainkit.loggers.comet_setup import goes_online

        if goes_online(options.get("api_key"), options.get("online")) is None:
            return "it has no API key here. Run comet login, or set COMET_START_ONLINE=0 to log offline"
    if name == "mlflow" and not (options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")):
        missing = [package for package in ("sqlalchemy", "alembic") if not is_installed(package)]
        if missing:
            return f"it has no server, and for a database {' and '.join(missing)} would be needed"
    return None


def _wandb(options: Mapping[str, Any]) -> str | None:
    import wandb

    if options.get("offline") or options.get("experiment") is not None or wandb.run is not None:
        return None
    mode = options.get("mode") or wandb.setup().settings.mode
    if mode not in ("online", "shared") or wandb.login(prompt=False):
        return None
    return "nobody is logged in here. Run wandb login, or set WANDB_MODE=offline to log offline"
