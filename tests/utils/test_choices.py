"""Accelerate's enums as arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit import Accelerator
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.utils import DynamoBackend, LoggerType, PrecisionType


def test_they_are_their_values() -> None:
    assert str(LoggerType.COMETML) == f"{LoggerType.COMETML}" == "comet_ml"
    assert {"comet_ml": 1}[LoggerType.COMETML] == 1
    assert PrecisionType.list() == ["no", "fp16", "bf16", "fp8"]


def test_as_arguments(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=PrecisionType.BF16,
        log_with=[LoggerType.TENSORBOARD],
        project_dir=tmp_path,
        dynamo_backend=DynamoBackend.EAGER,
    )
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.options.log_with == ["tensorboard"]
    assert accelerator.options.compile is not None
    assert accelerator.options.compile.options == {"backend": "eager"}
    with pytest.raises(UnsupportedArgumentError, match="log_with='clearml'"):
        Accelerator(cpu=True, log_with=LoggerType.CLEARML)
    with pytest.raises(ConfigurationError, match="fp8"):  # on a CPU
        Accelerator(cpu=True, mixed_precision=PrecisionType.FP8)
