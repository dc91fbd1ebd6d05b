"""What this machine has: `is_wandb_available` and others, and `write_basic_config`, which writes a file for its devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainkit.config.keys import KEYS, convert_value
from trainkit.config.settings import Settings
from trainkit.config.settings_file import default_file, write_settings
from trainkit.console import notice
from trainkit.launch.environment import DEVICE, tpu_is_chosen
from trainkit.loggers.base import is_installed
from trainkit.registry import automatic_info

__all__ = [
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_hpu_available",
    "is_import_timer_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "write_basic_config",
]


def _installed(word: str, package: str = "") -> Callable[[], bool]:
    package = package or word

    def check() -> bool:
        return is_installed(package)

    check.__name__ = check.__qualname__ = f"is_{word}_available"  # Pickle finds the function by this name.
    check.__doc__ = f"Whether {package} is installed."
    return check


is_4bit_bnb_available = _installed("4bit_bnb", "bitsandbytes")
"""Whether bitsandbytes is installed."""
is_8bit_bnb_available = _installed("8bit_bnb", "bitsandbytes")
"""Whether bitsandbytes is installed."""
is_aim_available = _installed("aim")
"""Whether aim is installed."""
is_amdsmi_available = _installed("amdsmi")
"""Whether amdsmi is installed."""
is_bitsandbytes_multi_backend_available = _installed("bitsandbytes_multi_backend", "bitsandbytes")
"""Whether bitsandbytes is installed."""
is_bnb_available = _installed("bnb", "bitsandbytes")
"""Whether bitsandbytes is installed."""
is_boto3_available = _installed("boto3")
"""Whether boto3 is installed."""
is_clearml_available = _installed("clearml")
"""Whether clearml is installed."""
is_comet_ml_available = _installed("comet_ml")
"""Whether comet_ml is installed."""
is_datasets_available = _installed("datasets")
"""Whether datasets is installed."""
is_deepspeed_available = _installed("deepspeed")
"""Whether deepspeed is installed."""
is_dvclive_available = _installed("dvclive")
"""Whether dvclive is installed."""
is_fp8_available = _installed("fp8", "torchao")
"""Whether torchao is installed."""
is_import_timer_available = _installed("import_timer")
"""Whether import_timer is installed."""
is_lomo_available = _installed("lomo", "lomo_optim")
"""Whether lomo_optim is installed."""
is_matplotlib_available = _installed("matplotlib")
"""Whether matplotlib is installed."""
is_mlflow_available = _installed("mlflow")
"""Whether mlflow is installed."""
is_pandas_available = _installed("pandas")
"""Whether pandas is installed."""
is_peft_available = _installed("peft")
"""Whether peft is installed."""
is_pynvml_available = _installed("pynvml")
"""Whether pynvml is installed."""
is_pytest_available = _installed("pytest")
"""Whether pytest is installed."""
is_rich_available = _installed("rich")
"""Whether rich is installed."""
is_sagemaker_available = _installed("sagemaker")
"""Whether sagemaker is installed."""
is_schedulefree_available = _installed("schedulefree")
"""Whether schedulefree is installed."""
is_swanlab_available = _installed("swanlab")
"""Whether swanlab is installed."""
is_tensorboard_available = _installed("tensorboard")
"""Whether tensorboard is installed."""
is_timm_available = _installed("timm")
"""Whether timm is installed."""
is_torchao_available = _installed("torchao")
"""Whether torchao is installed."""
is_torchdata_available = _installed("torchdata")
"""Whether torchdata is installed."""
is_torchdata_stateful_dataloader_available = _installed("torchdata_stateful_dataloader", "torchdata")
"""Whether torchdata is installed."""
is_torchvision_available = _installed("torchvision")
"""Whether torchvision is installed."""
is_trackio_available = _installed("trackio")
"""Whether trackio is installed."""
is_transformer_engine_available = _installed("transformer_engine")
"""Whether transformer_engine is installed."""
is_transformers_available = _installed("transformers")
"""Whether transformers is installed."""
is_triton_available = _installed("triton")
"""Whether triton is installed."""
is_wandb_available = _installed("wandb")
"""Whether wandb is installed."""


_IDLE = "Args:\n    check_device: No effect.\n    init_hccl: No effect."


def _unsupported(word: str) -> Callable[..., bool]:
    def check(check_device: bool = False, init_hccl: bool = False) -> bool:
        return False

    check.__name__ = check.__qualname__ = f"is_{word}_available"
    check.__doc__ = f"Always `False`: trainkit does not use {word}.\n\n{_IDLE}"
    return check


is_hpu_available = _unsupported("hpu")
"""Always `False`: trainkit does not use hpu."""
is_megatron_lm_available = _unsupported("megatron_lm")
"""Always `False`: trainkit does not use megatron_lm."""
is_mlu_available = _unsupported("mlu")
"""Always `False`: trainkit does not use mlu."""
is_msamp_available = _unsupported("msamp")
"""Always `False`: trainkit does not use msamp."""
is_musa_available = _unsupported("musa")
"""Always `False`: trainkit does not use musa."""
is_neuron_available = _unsupported("neuron")
"""Always `False`: trainkit does not use neuron."""
is_pippy_available = _unsupported("pippy")
"""Always `False`: trainkit does not use pippy."""
is_sdaa_available = _unsupported("sdaa")
"""Always `False`: trainkit does not use sdaa."""
is_transformer_engine_mxfp8_available = _unsupported("transformer_engine_mxfp8")
"""Always `False`: trainkit does not use transformer_engine_mxfp8."""
is_xccl_available = _unsupported("xccl")
"""Always `False`: trainkit does not use xccl."""


def is_rocm_available() -> bool:
    """Whether torch can use a GPU of AMD."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_weights_only_available() -> bool:
    """Always `True`: each supported version of torch has it."""
    return True


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed.

    Args:
        check_is_tpu: Also require a TPU that the environment has not disabled.
        check_is_gpu: Also require a GPU for XLA, which trainkit does not support: always `False`.
    """
    if check_is_gpu or not is_installed("torch_xla"):
        return False
    return tpu_is_chosen(os.environ) if check_is_tpu else True


def is_cuda_available() -> bool:
    """Whether torch can use a GPU of NVIDIA or AMD: `torch.cuda.is_available()`."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch can use Apple's GPU.

    Args:
        min_version: No effect: each supported version of torch is newer.
    """
    return torch.backends.mps.is_available()


def is_npu_available(check_device: bool = False) -> bool:
    """Always `False`: trainkit does not run on Ascend's devices.

    Args:
        check_device: No effect.
    """
    return False


def is_xpu_available(check_device: bool = False) -> bool:
    """Always `False`: trainkit does not run on Intel's GPUs.

    Args:
        check_device: No effect.
    """
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether `mixed_precision="bf16"` works on the default device.

    Args:
        ignore_tpu: Return `False` on a TPU.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Whether `mixed_precision="fp16"` works: on every device except those of XLA."""
    return not is_torch_xla_available(check_is_tpu=True)


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Write a configuration file of `trainkit launch` for the devices of this node. An existing file is not changed.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        save_location: The file: YAML, or JSON if its name ends with `.json`. Default: the default file of `trainkit
            launch` in the user's cache folder.

    Returns:
        The path of the file; `False` if it existed.

    Raises:
        ConfigurationError: The precision is another one, or the file cannot be written.
    """
    path = default_file() if save_location is None else Path(save_location)
    precision = convert_value("mixed_precision", mixed_precision, KEYS, "mixed_precision")
    if path.exists():
        notice(f"{path} exists and was not changed. Remove it, pass another save_location, or run: trainkit config")
        return False
    return write_settings(Settings({"mixed_precision": precision, **_devices()}), path)


def _devices() -> dict[str, Any]:
    """The settings for the devices of this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1:
        return {"distributed_type": "MULTI_GPU", "num_processes": gpus, "use_cpu": False}
    if gpus == 0 and tpu_is_chosen():
        return {"distributed_type": automatic_info(DEVICE).distributed_type, "use_cpu": False}
    return {"distributed_type": "NO", "num_processes": 1, "use_cpu": gpus == 0 and not torch.backends.mps.is_available()}
