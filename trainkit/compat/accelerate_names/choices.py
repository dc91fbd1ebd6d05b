"""`LoggerType`, `PrecisionType`, `DynamoBackend`: Accelerate's enums for values of arguments."""

from __future__ import annotations

import enum

__all__ = ["DynamoBackend", "LoggerType", "PrecisionType"]


class _Choice(str, enum.Enum):
    """An enum whose members are strings."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)  # for messages

    __hash__ = str.__hash__

    @classmethod
    def list(cls) -> list[str]:
        """All values."""
        return [str(one) for one in cls]


class DynamoBackend(_Choice):
    """Names for `Accelerator(dynamo_backend=)`, which accepts every backend of `torch.compile`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class LoggerType(_Choice):
    """Names for `Accelerator(log_with=)`: `ALL`, `TENSORBOARD`, `WANDB`, `MLFLOW`, `COMETML`. The others are not supported."""

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
    """Names for `Accelerator(mixed_precision=)`: `NO`, `FP16`, `BF16`, `FP8`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
