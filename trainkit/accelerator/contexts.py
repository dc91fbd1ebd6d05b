"""Context managers for your own training loop: precision, no synchronization of gradients, profiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from trainkit.accelerator.preparing import PrepareVerbs
from trainkit.config.kwargs_handlers import AutocastKwargs, ProfileKwargs

__all__ = ["ContextVerbs"]


class ContextVerbs(PrepareVerbs):
    """The methods of `trainkit.Accelerator` for `with`."""

    _traces: list[str]

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context that computes in the accelerator's precision. A prepared model does so by itself.

        Args:
            autocast_handler: Replaces the one in `kwargs_handlers`; with `enabled=False` the context computes in float32.
        """
        handler = autocast_handler or self.options.autocast
        return self.strategy.forward_context() if handler is None else self.strategy.precision.forward_context(**vars(handler))

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which gradients accumulate and are not averaged over the processes; the next backward pass after it
        does.

        `accumulate` does this by itself, and scales the losses.

        Args:
            model: The model, as `prepare` returned it.
        """
        if model is not None:
            self._check_prepared("no_sync", model)
        with self.accumulation.held():
            yield

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """A context in which torch's profiler records; its value is a `torch.profiler.profile`.

        Args:
            profile_handler: Replaces the one in `kwargs_handlers`.
        """
        handler = profile_handler or self.options.profile or ProfileKwargs()
        folder = handler.output_trace_dir
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        with handler.build() as recording:
            yield recording
        if folder is not None:
            stem = os.path.join(folder, f"profile_{self.strategy.rank}")
            earlier = self._traces.count(stem)
            self._traces.append(stem)
            recording.export_chrome_trace(f"{stem}-v{earlier}.json" if earlier else f"{stem}.json")
