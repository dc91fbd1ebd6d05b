"""What Accelerate has and we have not, by name, with what to use: for who imports it."""

from __future__ import annotations

__all__ = ["INSTEAD"]

_ZERO = "parameters are divided by ZeRO: Accelerator(strategy='zero3')"
_FP8 = "FP8 is not offered: Accelerator(mixed_precision='bf16')"
_STATE = "an Accelerator has num_processes, process_index, device, is_main_process, wait_for_everyone, print"
_EMPTY = "with torch.device('meta'): model = Net(); then load_checkpoint_in_model(model, folder, device_map={'': 'cuda:0'})"
_DIVIDE = "a model that is larger than one device is divided by ZeRO: Accelerator(strategy='zero3')"

INSTEAD = {
    "AORecipeKwargs": _FP8,
    "AcceleratorState": _STATE,
    "DummyOptim": "make the optimizer itself; Trainer(strategy=ZeROStrategy(config=...)) makes that of a configuration",
    "DummyScheduler": "make the scheduler itself; Trainer(strategy=ZeROStrategy(config=...)) makes that of a configuration",
    "FP8RecipeKwargs": _FP8,
    "FullyShardedDataParallelPlugin": _ZERO,
    "MSAMPRecipeKwargs": _FP8,
    "MegatronLMPlugin": _ZERO,
    "ParallelismConfig": _ZERO,
    "PartialState": _STATE,
    "TERecipeKwargs": _FP8,
    "TorchDynamoPlugin": "Accelerator(dynamo_backend='inductor'), or torch.compile(model) before prepare",
    "TorchTensorParallelPlugin": _ZERO,
    "cpu_offload": "ZeROStrategy(stage=3, offload_params='cpu')",
    "disk_offload": "ZeROStrategy(stage=3, offload_params='nvme', nvme_path=...)",
    "dispatch_model": _DIVIDE,
    "infer_auto_device_map": _DIVIDE,
    "init_empty_weights": _EMPTY,
    "load_checkpoint_and_dispatch": "load_checkpoint_in_model(model, folder, device_map={'': 'cuda:0'})",
    "save": "accelerator.save(obj, file)",
}
"""Name → what to write."""
