"""`summarize`: the layers of a model with their types, parameters, modes, FLOPs and sizes."""

from __future__ import annotations

from trainkit.callbacks._summary import *
from trainkit.callbacks._summary import __all__
