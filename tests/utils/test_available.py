"""`is_wandb_available`, and the same for other packages and for devices."""

from __future__ import annotations

import pickle
from importlib.util import find_spec

import pytest
import torch

from trainkit.compat.accelerate_names import this_machine as available

# Word of the function → package.
NAMED_ALIKE = (
    "comet_ml",
    "datasets",
    "deepspeed",
    "mlflow",
    "peft",
    "rich",
    "tensorboard",
    "torch_xla",
    "transformers",
    "wandb",
)
PACKAGES = {name: name for name in NAMED_ALIKE} | {
    "bnb": "bitsandbytes",
    "fp8": "torchao",
    "lomo": "lomo_optim",
    "torchdata_stateful_dataloader": "torchdata",
}


@pytest.mark.parametrize("word", PACKAGES)
def test_packages(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, package = getattr(available, f"is_{word}_available"), PACKAGES[word]
    assert asked() is (find_spec(package) is not None)
    assert pickle.loads(pickle.dumps(asked)) is asked
    for there in (True, False):
        monkeypatch.setattr(available, "is_installed", {package: there}.__getitem__)
        assert asked() is there


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available.is_cuda_available() is torch.cuda.is_available()
    assert available.is_mps_available() is torch.backends.mps.is_available()
    assert (available.is_npu_available(), available.is_xpu_available(check_device=True)) == (False, False)
    # simulates a TPU
    monkeypatch.setattr(available, "is_installed", lambda package: package == "torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert available.is_torch_xla_available()
    assert available.is_torch_xla_available(check_is_tpu=True)
    assert not available.is_torch_xla_available(check_is_gpu=True)
    assert available.is_bf16_available()
    assert not available.is_bf16_available(ignore_tpu=True)
    assert not available.is_fp16_available()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not available.is_torch_xla_available(check_is_tpu=True)
    assert available.is_fp16_available()
    assert available.is_bf16_available() is (not torch.cuda.is_available() or torch.cuda.is_bf16_supported())


def test_what_does_not_depend_on_a_package() -> None:
    assert (available.is_hpu_available(init_hccl=True), available.is_mlu_available(check_device=True)) == (False, False)
    assert available.is_weights_only_available()
    assert available.is_rocm_available() is (torch.version.hip is not None and torch.cuda.is_available())
