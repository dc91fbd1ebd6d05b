"""`MetricResults`: the values of metrics for `trainer.callback_metrics` and similar attributes."""

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
    """The values of all stores of a run.

    Attributes:
        callback: values for monitors.
        progress_bar: values in the progress bar.
        logged: the latest values passed to the loggers.
        evaluated: names in `callback` that an evaluation has computed. Training does not replace their values.
    """

    callback: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    evaluated: set[str] = field(default_factory=set)

    def add(self, values: Mapping[str, Any], *, evaluation: bool = False) -> None:
        """Add values for monitors. If training and validation log the same name, the value of the validation is kept."""
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
        """Restore `state_dict` in place, as other objects refer to this one; tensors of a device go to `device`."""
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
    """The values as tensors: numbers as float64 tensors on the CPU, tensors on their device."""
    with torch.inference_mode(False):  # so that a copy of an inference tensor is an ordinary tensor
        tensors = {n: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for n, v in values.items()}
        return {name: v.clone() if v.is_inference() else v for name, v in tensors.items()}
