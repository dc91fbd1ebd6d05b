"""`DDPStrategy`: one process per device, gradients averaged by all-reduce.

`INFO` declares it to the registry. Importing this package imports neither the class nor its backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily
from trainkit.registry import StrategyInfo

if TYPE_CHECKING:
    from trainkit.strategies.ddp.ddp_strategy import DDPStrategy

__all__ = ["INFO", "DDPStrategy"]

_PATH = "trainkit.strategies.ddp.ddp_strategy:DDPStrategy"
_STARTED = "a strategy does not start processes. Write strategy='ddp', which runs the script once for each device"

INFO = StrategyInfo(
    path=_PATH,
    names={"ddp": {}},
    aliases={
        "ddp_find_unused_parameters_false": ("ddp", {}),
        "ddp_find_unused_parameters_true": ("ddp", {"find_unused_parameters": True}),
    },
    refused={
        "ddp_fork": _STARTED,
        "ddp_notebook": "a strategy does not start processes. Put the training in a function, remove the strategy, and start "
        "it from the notebook with: notebook_launcher(function, num_processes=2)",
        "ddp_spawn": _STARTED,
        "dp": "DataParallel is not supported: it is slower than DDP. Use strategy='ddp', with the same devices",
    },
    auto=dict.fromkeys(("cpu", "cuda", "mps"), "ddp"),
    splits_micro_batches=True,
    handlers=("DistributedDataParallelKwargs",),
    file_types={"MULTI_CPU": "ddp", "MULTI_GPU": "ddp"},
    footprints=((_PATH, {"device": "cpu"}),),
)

__getattr__, __dir__ = lazily(globals(), {"DDPStrategy": "ddp_strategy"})
