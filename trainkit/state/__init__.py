"""Captures the state of models, optimizers, schedulers and a run for a checkpoint, and restores it.

Only `single_file` accesses files here; `trainkit.checkpoint` reads and writes checkpoints. The names that Accelerate has in its
`state` can be imported from here, too.
"""

from __future__ import annotations

from trainkit.names import lazily

_OF_ACCELERATE = {
    "AcceleratorState": ".accelerator.state_views",
    "DistributedType": ".config.kwargs_handlers",
    "GradientState": ".accelerator.state_views",
    "PartialState": ".accelerator.state_views",
    "is_initialized": ".accelerator.state_views",
}

__all__ = sorted(_OF_ACCELERATE)

__getattr__, __dir__ = lazily(globals(), _OF_ACCELERATE)
