"""Functions that act on the main process only, under Lightning's names."""

from __future__ import annotations

from trainkit.compat.lightning_names.main_process import *
from trainkit.compat.lightning_names.main_process import __all__, __getattr__
