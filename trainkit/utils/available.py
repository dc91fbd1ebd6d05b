"""``is_wandb_available`` and its kin: whether a package is installed, or a device can be used."""

from __future__ import annotations

import os

import torch

from trainkit.launch.tpu import tpu_is_chosen
from trainkit.loggers.base import is_installed

__all__ = [
    "is_bf16_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_fp16_available",
    "is_mlflow_available",
    "is_mps_available",
    "is_npu_available",
    "is_peft_available",
    "is_tensorboard_available",
    "is_torch_xla_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
]


def is_comet_ml_available() -> bool:
    """Whether comet_ml is installed, for ``log_with="comet_ml"``."""
    return is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return is_installed("datasets")


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed is installed, for ``strategy="zero1"`` to ``"zero3"``."""
    return is_installed("deepspeed")


def is_mlflow_available() -> bool:
    """Whether MLflow is installed, for ``log_with="mlflow"``."""
    return is_installed("mlflow")


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return is_installed("peft")


def is_tensorboard_available() -> bool:
    """Whether TensorBoard is installed, for ``log_with="tensorboard"``."""
    return is_installed("tensorboard")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return is_installed("transformers")


def is_wandb_available() -> bool:
    """Whether W&B is installed, for ``log_with="wandb"``."""
    return is_installed("wandb")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed.

    Args:
        check_is_tpu: and there is a TPU, which the variables do not keep it from.
        check_is_gpu: and runs on a GPU, which it does not under trainkit: ``False``.
    """
    if check_is_gpu or not is_installed("torch_xla"):
        return False
    return tpu_is_chosen(os.environ) if check_is_tpu else True


def is_cuda_available() -> bool:
    """``torch.cuda.is_available()``."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch can use Apple's GPU.

    Args:
        min_version: no effect: every version of torch that trainkit works with can.
    """
    return torch.backends.mps.is_available()


def is_npu_available(check_device: bool = False) -> bool:
    """``False``: trainkit does not run on Ascend's devices.

    Args:
        check_device: no effect: the answer is ``False`` either way.
    """
    return False


def is_xpu_available(check_device: bool = False) -> bool:
    """``False``: trainkit does not run on Intel's GPUs.

    Args:
        check_device: no effect: the answer is ``False`` either way.
    """
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether ``mixed_precision="bf16"`` works on the device that is used without further words.

    Args:
        ignore_tpu: ``False`` on a TPU.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Whether ``mixed_precision="fp16"`` works: on every device but those of XLA."""
    return not is_torch_xla_available(check_is_tpu=True)
