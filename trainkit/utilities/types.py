"""Types for annotations of steps, loaders and `configure_optimizers`, under Lightning's names."""

from __future__ import annotations

from trainkit.compat.lightning_names.annotations import *
from trainkit.compat.lightning_names.annotations import (
    _DEVICE,
    _EVALUATE_OUTPUT,
    _MAP_LOCATION_TYPE,
    _PATH,
    _PREDICT_OUTPUT,
    __all__,
    __getattr__,
)
