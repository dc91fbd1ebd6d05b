"""The values that metrics have come to, as ``trainer.callback_metrics`` and the like show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.metrics.saved_metrics import stored, unstored

__all__ = ["MetricResults", "as_tensors"]


@dataclass
class MetricResults:
    """Values of all stores of a run; ``trainer.callback_metrics`` and the like are made from it.

    Attributes:
        callback: what monitors read.
        progress_bar: what the progress bar shows.
        logged: what the loggers got last.
        evaluated: names in ``callback`` that an evaluation has computed. Training logs of the same name do not replace them.
    """

    callback: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    evaluated: set[str] = field(default_factory=set)

    def add(self, values: Mapping[str, Any], *, evaluation: bool = False) -> None:
        """Add values for monitors: a metric that training and validation log under one name is the validation's."""
        if evaluation:
            self.evaluated.update(values)
            self.callback.update(values)
        else:
            self.callback.update((name, value) for name, value in values.items() if name not in self.evaluated)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors by name, for a checkpoint."""
        return {
            "callback": {name: stored(value) for name, value in self.callback.items()},
            "progress_bar": dict(self.progress_bar),
            "logged": dict(self.logged),
            "evaluated": sorted(self.evaluated),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Take back what :meth:`state_dict` gave, onto ``device`` what was on one; in place, as many hold this object."""
        callback = {name: unstored(value, device) for name, value in state["callback"].items()}
        for mine, others in (
            (self.callback, callback),
            (self.progress_bar, state["progress_bar"]),
            (self.logged, state["logged"]),
        ):
            mine.clear()
            mine.update(others)
        self.evaluated = set(state.get("evaluated", ()))  # absent from checkpoints of earlier versions


def as_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values as tensors: a number as a float64 tensor on the CPU, a tensor where it is."""
    with torch.inference_mode(False):  # copied in it, what a validation computed becomes an ordinary tensor
        tensors = {n: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for n, v in values.items()}
        return {name: v.clone() if v.is_inference() else v for name, v in tensors.items()}
