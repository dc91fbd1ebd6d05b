"""``ZeROStrategy``: ZeRO-1/2/3 with CPU and NVMe offload, through DeepSpeed."""

from __future__ import annotations
