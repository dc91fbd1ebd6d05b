"""What scripts written for Lightning import from its `utilities`, under the same names.

`trainkit.utils` has the names of Hugging Face Accelerate's `utils`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.data.combined import CombinedLoader
    from trainkit.module.hparams import AttributeDict, HyperparametersMixin
    from trainkit.utilities.apply_func import move_data_to_device
    from trainkit.utilities.grads import grad_norm
    from trainkit.utilities.rank_zero import (
        rank_prefixed_message,
        rank_zero_debug,
        rank_zero_deprecation,
        rank_zero_info,
        rank_zero_only,
        rank_zero_warn,
    )
    from trainkit.utilities.seed import isolate_rng, seed_everything
    from trainkit.utilities.throughput import measure_flops

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

_FILES = {
    "AttributeDict": ".module.hparams",
    "CombinedLoader": ".data.combined",
    "HyperparametersMixin": ".module.hparams",
    "grad_norm": "grads",
    "isolate_rng": "seed",
    "measure_flops": "throughput",
    "move_data_to_device": "apply_func",
    "rank_prefixed_message": "rank_zero",
    "rank_zero_debug": "rank_zero",
    "rank_zero_deprecation": "rank_zero",
    "rank_zero_info": "rank_zero",
    "rank_zero_only": "rank_zero",
    "rank_zero_warn": "rank_zero",
    "seed_everything": "seed",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
