"""``XLAStrategy``: TPUs and other XLA devices, through torch_xla."""

from __future__ import annotations
