"""Models and data of `transformers` in trainkit's `Trainer`. Needs `pip install "trainkit-torch[transformers]"`."""

from __future__ import annotations

from trainkit.integrations.transformers.transformers_data import TransformersData
from trainkit.integrations.transformers.transformers_module import TransformersModule

__all__ = ["TransformersData", "TransformersModule"]
