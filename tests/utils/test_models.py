"""What is around a model, and models without memory. `Accelerator.unwrap_model` is `extract_model_from_parallel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit import Accelerator
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.utils import (
    extract_model_from_parallel,
    init_empty_weights,
    is_compiled_module,
    is_peft_model,
    load_checkpoint_in_model,
    set_module_tensor_to_device,
)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_around_a_model(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    prepared = accelerator.prepare(compiled)
    for given in (prepared, compiled, model, nn.DataParallel(model)):
        assert extract_model_from_parallel(given) is model
        assert accelerator.unwrap_model(given) is model or isinstance(given, nn.DataParallel)
    for given in (prepared, compiled):
        assert extract_model_from_parallel(given, keep_torch_compile=True) is compiled
        assert accelerator.unwrap_model(given, keep_torch_compile=True) is compiled
    assert accelerator.unwrap_model(model, keep_torch_compile=True) is model
    # torch.compile around a prepared model is removed together with the wrapper of prepare
    plain = nn.Linear(2, 1)
    around = torch.compile(Accelerator(cpu=True, mixed_precision="bf16").prepare(plain), backend="eager")
    assert extract_model_from_parallel(around, keep_torch_compile=True) is plain
    assert [is_compiled_module(one) for one in (compiled, model)] == [True, False]
    with pytest.raises(UnsupportedArgumentError, match="recursive=True"):
        extract_model_from_parallel(model, recursive=True)


def test_a_model_that_is_only_evaluated() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    teacher = nn.Linear(2, 1)
    prepared = accelerator.prepare_model(teacher, evaluation_mode=True)
    seen: list[torch.dtype] = []
    teacher.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert prepared(torch.ones(1, 2)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    assert accelerator.unwrap_model(prepared) is teacher
    with pytest.raises(UnsupportedArgumentError, match=r"which shards the models.*accelerator\.device\)\.eval\(\)"):
        Accelerator(cpu=True, strategy="zero1").prepare_model(nn.Linear(2, 1), evaluation_mode=True)


def test_a_model_of_peft() -> None:
    peft = pytest.importorskip("peft")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 1)), peft.LoraConfig(target_modules=["0"]))
    assert [is_peft_model(one) for one in (model, accelerator.prepare(model), model.base_model, nn.Linear(2, 1))] == [
        True,
        True,
        False,
        False,
    ]


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.inner.weight.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_a_model_without_memory(include_buffers: bool, tmp_path: Path) -> None:
    saved = _WithBuffer()
    Accelerator(cpu=True).save_model(saved, tmp_path)
    with init_empty_weights(include_buffers):
        model = _WithBuffer()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [p.requires_grad for p in (model.inner.weight, model.inner.bias)] == [False, True]
    assert model.table.device.type == ("meta" if include_buffers else "cpu")
    if not include_buffers:
        load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
        for (name, one), other in zip(model.named_parameters(), saved.parameters(), strict=True):
            assert torch.equal(one, other), name
        assert torch.equal(model.table, saved.table)
    assert nn.Linear(2, 1).weight.device.type == "cpu"


def test_one_tensor_of_a_model_gets_a_value() -> None:
    """As `diffusers` loads a model: tensor by tensor, into one on the meta device."""
    saved = _WithBuffer()
    with init_empty_weights():
        model = _WithBuffer()
    for name, value in saved.state_dict().items():
        set_module_tensor_to_device(model, name, "cpu", value=value.double())
    for (name, one), other in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert (one.dtype, one.requires_grad) == (torch.float32, other.requires_grad)
    set_module_tensor_to_device(model, "table", "cpu", value=torch.tensor([5, 6, 7]), dtype="float64")
    assert model.table.tolist() == [5.0, 6.0, 7.0]
    assert dict(model.named_buffers())["table"].dtype is torch.float64
    weight = model.inner.weight
    set_module_tensor_to_device(model, "inner.weight", torch.device("cpu"))
    assert model.inner.weight is weight, "an optimizer may have it"
    set_module_tensor_to_device(model, "inner.bias", "meta")
    assert model.inner.bias.is_meta
    assert isinstance(model.inner.bias, nn.Parameter)
    with pytest.raises(ConfigurationError, match=r"'inner\.bias' is on the meta device and has no value"):
        set_module_tensor_to_device(model, "inner.bias", "cpu")
    with pytest.raises(ConfigurationError, match=r"'inner\.weight' has shape \(3, 2\), but the value has shape \(2,\)"):
        set_module_tensor_to_device(model, "inner.weight", "cpu", value=torch.ones(2))
    with pytest.raises(ConfigurationError, match=r"no parameter or buffer 'inner\.wait'.*inner\.weight"):
        set_module_tensor_to_device(model, "inner.wait", "cpu", value=torch.ones(2))
    for refused in ({"fp16_statistics": weight}, {"tied_params_map": {}}):
        with pytest.raises(UnsupportedArgumentError, match="is not supported"):
            set_module_tensor_to_device(model, "inner.weight", "cpu", **refused)


def test_whether_a_tensor_is_moved_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here it is shown that torch gets the argument."""
    to, told = torch.Tensor.to, []

    def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        told.append(kwargs.get("non_blocking"))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noting)
    model = nn.Linear(2, 1)
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(1, 2), non_blocking=True)
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(1, 2))
    assert told == [True, False]
