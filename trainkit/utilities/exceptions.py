"""Exceptions of trainkit, under Lightning's names."""

from __future__ import annotations

from trainkit.errors import ConfigurationError as MisconfigurationException
from trainkit.errors import Preempted as SIGTERMException

__all__ = ["MisconfigurationException", "SIGTERMException"]
