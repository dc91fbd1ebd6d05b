"""``LoggerType``, ``PrecisionType``, ``DynamoBackend``: Accelerate's names for what arguments may be."""

from __future__ import annotations

import enum

__all__ = ["DynamoBackend", "LoggerType", "PrecisionType"]


class _Choice(str, enum.Enum):
    """Also a string, and as such its value."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)  # so messages show what could have been written

    __hash__ = str.__hash__

    @classmethod
    def list(cls) -> list[str]:
        """The values of all."""
        return [str(one) for one in cls]


class DynamoBackend(_Choice):
    """For ``Accelerator(dynamo_backend=)``, which takes any name in ``torch._dynamo.list_backends()``."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class LoggerType(_Choice):
    """For ``Accelerator(log_with=)``. Those after ``COMETML`` are there so that scripts can ask for them: they are refused."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    COMETML = "comet_ml"

    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"


class PrecisionType(_Choice):
    """For ``Accelerator(mixed_precision=)``. ``FP8`` is there so that scripts can ask for it: it is refused."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"

    FP8 = "fp8"
