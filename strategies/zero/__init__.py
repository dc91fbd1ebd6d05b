"""`ZeROStrategy`: ZeRO-1/2/3 with CPU and NVMe offload, on DeepSpeed.

`INFO` declares it to the registry. Importing this package imports neither the class nor its backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily
from trainkit.registry import StrategyInfo

if TYPE_CHECKING:
    from trainkit.strategies.zero.zero_strategy import ZeROStrategy

__all__ = ["INFO", "ZeROStrategy"]

_MEMORY = "trainkit.strategies.zero.zero_memory:ZeROMemory"

INFO = StrategyInfo(
    path="trainkit.strategies.zero.zero_strategy:ZeROStrategy",
    names={
        "zero1": {"stage": 1},
        "zero2": {"stage": 2},
        "zero3": {"stage": 3},
        "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    },
    aliases={
        "deepspeed": ("zero2", {}),
        "deepspeed_stage_1": ("zero1", {}),
        "deepspeed_stage_1_offload": ("zero1", {"offload_optimizer": "cpu"}),
        "deepspeed_stage_2": ("zero2", {}),
        "deepspeed_stage_2_offload": ("zero2", {"offload_optimizer": "cpu"}),
        "deepspeed_stage_3": ("zero3", {}),
        "deepspeed_stage_3_offload": ("zero3_offload", {}),
    },
    refused={
        "deepspeed_stage_3_offload_nvme": "set the folder on the NVMe disk: ZeROStrategy(stage=3, "
        "offload_optimizer='nvme', offload_params='nvme', nvme_path='/local_nvme')",
    },
    command_line={"deepspeed": "trainkit.strategies.zero.config_file:options"},
    distributed_type="DEEPSPEED",
    file_types={"DEEPSPEED": "zero2"},
    sections=("deepspeed_config",),
    plugin="trainkit.config.deepspeed_plugin:DeepSpeedPlugin",
    footprints=(
        *((_MEMORY, {"stage": stage}) for stage in (1, 2, 3)),
        *((_MEMORY, {"stage": stage, "offload_optimizer": "cpu"}) for stage in (1, 2, 3)),
        (_MEMORY, {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
        (_MEMORY, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
        (_MEMORY, {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": "."}),
    ),
    packages=("deepspeed",),
    parameter_marks=("ds_id", "_hp_mapping"),  # Stage 3 sets the first one, stages 1 and 2 the second.
    shape_attribute="ds_shape",
    adam_classes=dict.fromkeys(("DeepSpeedCPUAdam", "FusedAdam"), "adam_w_mode"),
    host_optimizers=("DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion"),
)

__getattr__, __dir__ = lazily(globals(), {"ZeROStrategy": "zero_strategy"})
