"""Export of a module: `to_onnx` without the packages that it needs, and the refusal of `to_torchscript`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule
from torch import nn

from trainkit.errors import ConfigurationError, MissingPackageError, UnsupportedArgumentError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `torch.onnx.export` was called with."""
    made: list[tuple[Any, ...]] = []

    def export(module: nn.Module, args: Any, file: Any, **options: Any) -> str:
        made.append((args, file, options, module.training, torch.is_grad_enabled()))
        return "program"

    monkeypatch.setattr(torch.onnx, "export", export)
    return made


def test_what_torch_gets(calls: list[tuple[Any, ...]], run_dir: Path) -> None:
    module, x = TinyModule(), torch.zeros(1, 4)
    module.layer.eval()
    assert module.to_onnx(run_dir / "model.onnx", x, verbose=False) == "program"
    assert calls == [((x,), run_dir / "model.onnx", {"verbose": False}, False, False)]
    assert (module.training, module.layer.training) == (True, False)
    module.example_input_array = (x,)
    module.to_onnx()
    assert calls[1][:3] == ((x,), None, {})


def test_without_an_input() -> None:
    with pytest.raises(ConfigurationError, match=r"TinyModule.to_onnx needs an input of forward. Pass it: module.to_onnx"):
        TinyModule().to_onnx("model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*args: Any, **options: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(torch.onnx, "export", export)
    module = TinyModule()
    with pytest.raises(MissingPackageError, match=f"needs the package '{package}'.* pip install onnx onnxscript"):
        module.to_onnx("model.onnx", torch.zeros(1, 4))
    assert module.training


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*args: Any, **options: Any) -> None:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    monkeypatch.setattr(torch.onnx, "export", export)
    with pytest.raises(ModuleNotFoundError, match="mine"):
        TinyModule().to_onnx("model.onnx", torch.zeros(1, 4))


def test_tensorrt_is_refused() -> None:
    with pytest.raises(
        UnsupportedArgumentError, match=r"to_tensorrt is not supported. Use the package torch_tensorrt: torch_te"
    ):
        TinyModule().to_tensorrt("model.pt", input_sample=torch.zeros(1, 4))


def test_torchscript_is_refused_and_the_advice_works(run_dir: Path) -> None:
    module, x = TinyModule(), torch.randn(3, 4)
    with pytest.raises(UnsupportedArgumentError, match=r"to_torchscript is not supported.* Use torch.export:") as error:
        module.to_torchscript("model.pt", method="trace")
    exec(str(error.value).partition("torch.export: ")[2], {"torch": torch, "module": module, "x": x})
    assert torch.equal(torch.export.load("model.pt2").module()(x), module(x))
