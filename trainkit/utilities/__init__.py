"""What scripts written for Lightning import from its `utilities`, under the same names.

`trainkit.utils` has the names of Hugging Face Accelerate's `utils`.
"""

from __future__ import annotations

from trainkit.compat.lightning_names import (
    grad_norm,
    isolate_rng,
    measure_flops,
    move_data_to_device,
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from trainkit.data.combined import CombinedLoader
from trainkit.module.hparams import AttributeDict, HyperparametersMixin
from trainkit.names import lazily
from trainkit.rng import seed_everything

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "HyperparametersMixin",
    "grad_norm",
    "isolate_rng",
    "measure_flops",
    "move_data_to_device",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
]

__getattr__, __dir__ = lazily(globals(), dict.fromkeys(__all__, ""))
