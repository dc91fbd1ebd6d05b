"""Models and data of `transformers` in trainkit's `Trainer`. Needs `pip install "trainkit-torch[transformers]"`."""

from __future__ import annotations

__all__: list[str] = []
