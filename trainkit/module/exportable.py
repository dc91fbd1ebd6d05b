"""`ExportableModule`: the export of a module for inference."""

from __future__ import annotations

from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn

from trainkit.errors import ConfigurationError, MissingPackageError, UnsupportedArgumentError

__all__ = ["ExportableModule"]


class ExportableModule(nn.Module):
    """A `torch.nn.Module` that exports itself."""

    example_input_array: Any = None

    def to_onnx(
        self, file_path: str | PathLike[str] | None = None, input_sample: Any = None, **kwargs: Any
    ) -> torch.onnx.ONNXProgram | None:
        """Export `forward` to ONNX with `torch.onnx.export`, in eval mode.

        It needs the packages onnx and onnxscript. `torch.export.export(module.eval(), (x,))` needs none, and exports for
        other programs that use PyTorch.

        Args:
            file_path: The file to write. Default: write none.
            input_sample: An input of `forward`: a tensor, or a tuple of its arguments. Default: `example_input_array`.
            **kwargs: Arguments of `torch.onnx.export`, such as `dynamic_shapes`.

        Returns:
            The program; `None` with `dynamo=False`.

        Raises:
            ConfigurationError: There is no input.
            MissingPackageError: A package is missing.

        Example:
            ```python
            module.to_onnx("model.onnx", torch.randn(1, 64))
            ```
        """
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise ConfigurationError(
                f"{type(self).__name__}.to_onnx needs an input of forward. Pass it: module.to_onnx('model.onnx', "
                "torch.randn(1, 64)); or set self.example_input_array in __init__."
            )
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                return torch.onnx.export(self, sample if isinstance(sample, tuple) else (sample,), file_path, **kwargs)
        except ModuleNotFoundError as error:
            if error.name not in ("onnx", "onnxscript", "onnx_ir"):
                raise
            raise MissingPackageError(
                f"to_onnx needs the package {error.name!r}, which is not installed. Install what torch.onnx needs: "
                "pip install onnx onnxscript"
            ) from error
        finally:
            for module, mode in modes.items():
                module.training = mode

    def to_torchscript(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Lightning's name; PyTorch has deprecated TorchScript.

        Args:
            *args: No effect.
            **kwargs: No effect.

        Raises:
            UnsupportedArgumentError: Always; it names what to use.
        """
        raise UnsupportedArgumentError(
            "to_torchscript is not supported: PyTorch has deprecated TorchScript. Use torch.export: "
            "torch.export.save(torch.export.export(module.eval(), (x,)), 'model.pt2')"
        )

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Lightning's name; the package torch_tensorrt compiles a module itself.

        Args:
            *args: No effect.
            **kwargs: No effect.

        Raises:
            UnsupportedArgumentError: Always; it names what to use.
        """
        raise UnsupportedArgumentError(
            "to_tensorrt is not supported. Use the package torch_tensorrt: torch_tensorrt.compile(module.eval(), inputs=[x])"
        )
