"""The version, in a file that `setup.py` can read without importing torch."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
