"""`extract_model_from_parallel` and `is_compiled_module`. `Accelerator.unwrap_model` does the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainkit import Accelerator
from trainkit.errors import UnsupportedArgumentError
from trainkit.utils import extract_model_from_parallel, is_compiled_module


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
