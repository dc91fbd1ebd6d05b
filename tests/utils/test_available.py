"""`is_wandb_available`, and the same for other packages and for devices."""

from __future__ import annotations

import pickle
from importlib.util import find_spec

import pytest
import torch

from trainkit.compat.accelerate_names import this_machine as available


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ["comet_ml", "datasets", "deepspeed", "mlflow", "peft", "tensorboard", "torch_xla", "transformers", "wandb"]
    for package in packages:
        asked = getattr(available, f"is_{package}_available")
        assert asked() is (find_spec(package) is not None)
        assert pickle.loads(pickle.dumps(asked)) is asked
        with monkeypatch.context() as patch:
            for there in (True, False):
                patch.setattr(available, "is_installed", {package: there}.__getitem__)
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


def test_others_that_accelerate_has(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"rich": "rich", "bnb": "bitsandbytes", "torchdata_stateful_dataloader": "torchdata", "fp8": "torchao"}
    for word, package in packages.items():
        asked = getattr(available, f"is_{word}_available")
        assert asked() is (find_spec(package) is not None)
        assert pickle.loads(pickle.dumps(asked)) is asked
        with monkeypatch.context() as patch:
            for there in (True, False):
                patch.setattr(available, "is_installed", {package: there}.__getitem__)
                assert asked() is there
    assert (available.is_hpu_available(init_hccl=True), available.is_mlu_available(check_device=True)) == (False, False)
    assert available.is_weights_only_available()
    assert available.is_rocm_available() is (torch.version.hip is not None and torch.cuda.is_available())
