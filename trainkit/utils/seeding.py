"""`set_seed`: Accelerate's name for seeding every generator."""

from __future__ import annotations

import torch

from trainkit.accelerator.current import place
from trainkit.rng import seed_everything, seed_process

__all__ = ["set_seed"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed every generator, as `seed_everything` does.

    Args:
        seed: An integer from 0 to 2**64 - 1, the same on all ranks.
        device_specific: Seed the global generators of rank r with `seed + r`, so that random numbers differ between ranks.
            Prepared loaders still use `seed`: each micro-batch has its own random numbers.
        deterministic: Also call `torch.use_deterministic_algorithms(True)`.
    """
    seed_everything(seed)
    if device_specific:
        seed_process(seed + place()[0])
    if deterministic:
        torch.use_deterministic_algorithms(True)
