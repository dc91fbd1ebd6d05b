"""comet_ml for `CometLogger`: check options, start an experiment, read the records of an experiment from the server."""

from __future__ import annotations

import inspect
import os
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.loggers.known_loggers import NotLoggedInError

__all__ = ["check_online", "checked_options", "comet_ml", "recorded_steps", "start", "start_offline"]

_FORMER = {  # of Lightning's older CometLogger
    "experiment_name": "name='…'",
    "offline": "online=False",
    "project_name": "project='…'",
    "rest_api_key": "api_key='…'",
}


def check_online(api_key: str | None, online: bool | None) -> bool:
    """Whether experiments are sent, by default as comet_ml is configured. Raises `NotLoggedInError` without an API key."""
    config = comet_ml().get_config()
    if online is None:
        online = config.get_bool(None, "comet.start.online", default=True, not_set_value=None)
    if online is False:
        return False
    if not api_key and not comet_ml().get_api_key(None, config):
        raise NotLoggedInError(
            "CometLogger: there is no API key. Fix: run comet login or set COMET_API_KEY; or keep the experiment on this "
            "machine, for comet upload, with CometLogger(online=False)"
        )
    return True


def comet_ml() -> Any:
    """Import the package without its automatic logging, which patches other packages."""
    name = "COMET_DISABLE_AUTO_LOGGING"
    if "comet_ml" in sys.modules or name in os.environ:
        return import_module("comet_ml")
    os.environ[name] = "1"
    try:
        return import_module("comet_ml")
    finally:
        del os.environ[name]


def checked_options(kwargs: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """`kwargs`; raises `UnknownNameError` for one that `comet_ml.ExperimentConfig` does not have."""
    if mode not in (None, "get_or_create", "get", "create"):
        raise ConfigurationError(f"mode: expected 'get_or_create', 'get' or 'create', got {mode!r}. Fix: remove it")
    if kwargs:
        known = inspect.signature(comet_ml().ExperimentConfig.__init__).parameters
        for name in kwargs:
            if name in known and name not in ("self", "offline_directory"):
                continue
            fix = f"Fix: {_FORMER[name]}" if name in _FORMER else "Fix: remove it; see help(comet_ml.ExperimentConfig)"
            similar = "" if name in _FORMER else nearest(name, known)
            raise UnknownNameError(
                f"CometLogger: expected its own arguments or those of comet_ml.ExperimentConfig, got {name!r}.{similar} {fix}"
            )
    return kwargs


def start(options: dict[str, Any], **given: Any) -> Any:
    """Start or continue an experiment, online by default; `options` are those of its configuration."""
    config = comet_ml().ExperimentConfig(**{"auto_metric_logging": False, "auto_param_logging": False, **options})
    return comet_ml().start(experiment_config=config, **{"online": True, **given})


def start_offline(folder: Path, options: dict[str, Any], **given: Any) -> Any:
    """Start an experiment whose archive will be in `folder`.

    comet_ml draws a part of the archive's name from Python's `random`: with a fixed seed it would replace an archive of the
    same key.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.getstate()
    random.seed()
    try:
        return start({**options, "offline_directory": str(folder)}, online=False, **given)
    finally:
        random.setstate(generator)


def recorded_steps(api_key: str | None, key: str) -> dict[str, list[int]]:
    """Metric → the steps of its records in an online experiment, in the order of logging."""
    experiment = comet_ml().API(api_key).get_experiment_by_key(key)
    records = [] if experiment is None else experiment.get_metrics() or []
    steps: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda one: (one["timestamp"], one.get("offset") or 0)):
        if record["step"] is not None:
            steps.setdefault(record["metricName"], []).append(int(record["step"]))
    return steps
