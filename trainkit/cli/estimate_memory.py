"""`trainkit estimate-memory MODEL`: the memory of a model of transformers or timm, with the options of Accelerate's command."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.loggers.base import is_installed
from trainkit.memory.inventory import contents_of
from trainkit.memory.report import size_text
from trainkit.strategy import footprint_on_one_device

__all__ = ["add_arguments", "run"]

_BITS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit estimate-memory`, which are Accelerate's."""
    parser.epilog = (
        "The model is created without values of its parameters. Training is that of one process, without activations; float16 "
        "is mixed precision, which keeps parameters, gradients and Adam's state in float32. trainkit plan SCRIPT estimates "
        "your own training under each strategy, with activations."
    )
    parser.add_argument("model_name", metavar="MODEL", help="a name on the Hugging Face Hub, or a folder with a config.json")
    parser.add_argument(
        "--library_name", choices=("timm", "transformers"), default="transformers", help="default: transformers"
    )
    parser.add_argument("--dtypes", nargs="+", choices=tuple(_BITS), default=tuple(_BITS), help="default: all of them")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code of the model from the Hub; trust it first")


def run(args: argparse.Namespace) -> int:
    """Print the estimate."""
    model = _model_without_values(args.model_name, args.library_name, args.trust_remote_code).float()
    whole = set(getattr(model, "_no_split_modules", None) or ())
    contents = contents_of([model], [torch.optim.Adam(model.parameters())], window=1)
    training = footprint_on_one_device("single", contents).device.total
    print(f"{args.model_name}, {sum(weight.numel for weight in contents.weights):,} parameters:")
    print(f"  {'dtype':<9}{'largest layer':>15}{'weights':>12}{'training with Adam':>20}")
    for dtype in args.dtypes:
        bits = _BITS[dtype]
        trained = size_text(training) if bits >= 16 else "-"
        print(f"  {dtype:<9}{size_text(_largest(model, bits, whole)):>15}{size_text(_size(model, bits)):>12}{trained:>20}")
    return 0


def _model_without_values(name: str, library: str, trust_remote_code: bool) -> nn.Module:
    """A model on the meta device.

    Raises:
        MissingPackageError: The library is not installed.
        ConfigurationError: The library does not know the model.
    """
    if not is_installed(library):
        raise MissingPackageError(f"estimate-memory needs the package {library}. Install it with: pip install {library}")
    create = _of_transformers if library == "transformers" else _of_timm
    try:
        return create(name, trust_remote_code)
    except Exception as error:  # of the other package, whose errors for an unknown model have many classes
        raise ConfigurationError(
            f"{library} cannot create {name!r}: {error}\nFix: check the name or the folder, or pass another --library_name; "
            "for a model of your own, trainkit plan SCRIPT"
        ) from error


def _of_transformers(name: str, trust_remote_code: bool) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    remote = getattr(config, "auto_map", None) or {}
    kind = next((key for key in remote if key.startswith("AutoModelFor")), "AutoModel")
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, kind).from_config(config, trust_remote_code=trust_remote_code)
    return model


def _of_timm(name: str, trust_remote_code: bool) -> nn.Module:
    import timm

    with torch.device("meta"):
        model: nn.Module = timm.create_model(name, pretrained=False)
    return model


def _size(module: nn.Module, bits: int) -> int:
    """Bytes of the parameters and buffers; floating-point numbers have this number of bits."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(one.numel() * bits // 8 if one.is_floating_point() else one.nbytes for one in tensors)


def _largest(module: nn.Module, bits: int, whole: set[str]) -> int:
    """Bytes of the largest layer: a module without children, or of a class that is never split."""
    parts: list[Any] = [] if type(module).__name__ in whole else list(module.children())
    return max((_largest(part, bits, whole) for part in parts), default=_size(module, bits))
