"""Lightning's names: types for annotations, functions of the main process, helpers, and hyper-parameters in a YAML file."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.accelerator.processes import rank_and_size
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import tell_rank
from trainkit.nested import move
from trainkit.rng import RandomState
from trainkit.tagged_json.codec import is_omegaconf, plain_container

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningDeprecationWarning",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
    "PossibleUserWarning",
    "get_filesystem",
    "get_init_args",
    "grad_norm",
    "isolate_rng",
    "load_hparams_from_yaml",
    "measure_flops",
    "move_data_to_device",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "save_hparams_to_yaml",
]

# ---------------------------------------------------------------------- annotations of steps, loaders and configure_optimizers

STEP_OUTPUT: TypeAlias = Tensor | Mapping[str, Any] | None
"""What `training_step` returns."""

TRAIN_DATALOADERS: TypeAlias = Any
"""What `train_dataloader` returns."""

EVAL_DATALOADERS: TypeAlias = Any
"""What `val_dataloader`, `test_dataloader` and `predict_dataloader` return."""

OptimizerLRScheduler: TypeAlias = Any
"""What `configure_optimizers` returns."""

OptimizerConfig: TypeAlias = dict[str, Any]
"""A dict with an optimizer, which `configure_optimizers` may return."""

OptimizerLRSchedulerConfig: TypeAlias = dict[str, Any]
"""A dict with an optimizer and a scheduler, which `configure_optimizers` may return."""

LRSchedulerConfigType: TypeAlias = dict[str, Any]
"""A dict with a scheduler and its options: `scheduler`, `interval`, `frequency`, `monitor`, `strict`, `name`."""

LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
"""A scheduler of torch."""

LRSchedulerPLType: TypeAlias = LRScheduler | ReduceLROnPlateau
"""A scheduler of torch."""

LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]
"""A class of schedulers of torch."""

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
"""The base classes of torch's schedulers, for `isinstance`."""

# Private in Lightning, and imported by projects all the same.
_DEVICE: TypeAlias = torch.device | str | int
_MAP_LOCATION_TYPE: TypeAlias = Any
_PATH: TypeAlias = str | os.PathLike[str]
_EVALUATE_OUTPUT: TypeAlias = list[Mapping[str, float]]
_PREDICT_OUTPUT: TypeAlias = list[Any] | list[list[Any]]


# ----------------------------------------------------------------------------------------------- functions of the main process

P = ParamSpec("P")
T = TypeVar("T")


class _RankZeroOnly:
    """A decorator: the function runs on the main process only; on the other processes it returns `default`.

    `rank_zero_only.rank` is the rank of this process, as the launcher has set it before the processes are connected. Do not
    decorate a function that communicates with the other processes: they would not take part.

    Example:
        ```python
        @rank_zero_only
        def report(metrics):
            print(metrics)
        ```
    """

    __name__ = "rank_zero_only"
    _rank: int | None = None

    def __call__(self, fn: Callable[P, T], default: T | None = None) -> Callable[P, T | None]:
        """Decorate a function.

        Args:
            fn: The function.
            default: What it returns on the other processes.
        """

        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero

    @property
    def rank(self) -> int:
        """The rank of this process; assign it to set it yourself."""
        return rank_and_size()[0] if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank


rank_zero_only = _RankZeroOnly()
"""A decorator: the function runs on the main process only, and returns `default` on the other processes.

`rank_zero_only(function, default=None)` is the decorated function, and `rank_zero_only.rank` the rank of this process, as the
launcher has set it before the processes are connected. Do not decorate a function that communicates with the other processes.
"""
with suppress(ConfigurationError):  # Creating a Trainer raises it, if the variables of a launcher contradict each other.
    tell_rank(rank_zero_only.rank, overwrite=False)  # as Lightning does when it is imported


def rank_zero_info(message: object, *args: Any, stacklevel: int = 1) -> None:
    """Print a notice on the main process, through the logger `trainkit` at level INFO.

    Args:
        message: The text, with `%` placeholders for `args` as in `logging`.
        *args: Values for the placeholders.
        stacklevel: No effect: the line that prints is not shown.
    """
    if rank_zero_only.rank == 0:
        notice(str(message) % args if args else str(message))


def rank_zero_debug(message: object, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
    """Pass a message to the logger `trainkit` at level DEBUG, on the main process.

    Args:
        message: The text, with `%` placeholders for `args`.
        *args: Values for the placeholders.
        stacklevel: The frame that the record names, as in `logging`.
        **kwargs: Arguments of `logging.Logger.debug`.
    """
    if rank_zero_only.rank == 0:
        logging.getLogger("trainkit").debug(message, *args, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_warn(
    message: str | Warning, stacklevel: int = 1, *, category: type[Warning] = UserWarning, **kwargs: Any
) -> None:
    """Warn on the main process.

    Args:
        message: The text, or a warning.
        stacklevel: The frame that the warning names, as in `warnings.warn`; 1 is the caller.
        category: The class of the warning.
        **kwargs: Arguments of `warnings.warn`.
    """
    if rank_zero_only.rank == 0:
        warnings.warn(message, category, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 1, **kwargs: Any) -> None:
    """Warn with a `DeprecationWarning` on the main process; the arguments are those of `rank_zero_warn`."""
    rank_zero_warn(message, stacklevel + 1, category=DeprecationWarning, **kwargs)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """The message with the rank before it: `[rank: 1] message`; without a rank, the message."""
    return message if rank is None else f"[rank: {rank}] {message}"


# --------------------------------------------------------------------------------------------------------------------- helpers


class PossibleUserWarning(UserWarning):
    """Lightning's class of hints that may not apply. trainkit prints its hints once, and does not warn with this class."""


class LightningDeprecationWarning(DeprecationWarning):
    """Lightning's class for its own deprecated names. trainkit does not warn with it."""


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The batch with its tensors, and other objects with a `.to(device)`, on the device.

    Copies from pinned memory to a GPU do not block.

    Args:
        batch: A tensor, or tensors in dicts, lists, tuples, named tuples and dataclasses.
        device: The device; a number is the index of a GPU.
    """
    device = torch.device(device)
    return move(batch, device, non_blocking=device.type == "cuda")


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """A context after which the global generators of torch, numpy and `random` continue as if it had drawn nothing.

    Args:
        include_cuda: Restore the generators of the GPUs too.

    Example:
        ```python
        with isolate_rng():
            noise = torch.randn(4)
        ```
    """
    with_cuda = include_cuda and torch.cuda.is_available() and torch.cuda.is_initialized()
    state = RandomState(torch.cuda.default_generators if with_cuda else ())
    try:
        yield
    finally:
        state.restore()


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of the gradient of each parameter, and of all of them.

    It reads `parameter.grad`, so call it where gradients are complete, in `on_before_optimizer_step`. Under ZeRO the
    gradients are sharded and `parameter.grad` is not set: use `GradientClipping(float("inf"))`, which logs the norm.

    Args:
        module: The module.
        norm_type: The p of the p-norm, a positive number, or `"inf"`.
        group_separator: Separates the name of the group and the parameter's name.

    Returns:
        `grad_2.0_norm/weight` and so on → the norm, a scalar on the device of the gradient; `grad_2.0_norm_total` → the norm
        of these norms. Empty if no parameter has a gradient.

    Raises:
        ConfigurationError: `norm_type` is not positive.

    Example:
        ```python
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self.net, norm_type=2))
        ```
    """
    p = float(norm_type)
    if not p > 0:
        raise ConfigurationError(f"norm_type must be a positive number or 'inf', not {norm_type!r}. For example: norm_type=2")
    with torch.no_grad():
        norms = {
            f"grad_{p}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad, p)
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        if norms:
            device = next(iter(norms.values())).device
            norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack([one.to(device) for one in norms.values()]), p)
    return norms


def measure_flops(model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None) -> int:
    """Count the FLOPs of a forward pass, and with `loss_fn` of the backward pass too, with `torch.utils.flop_counter`.

    Build the model under `torch.device("meta")` to count without computing. `ThroughputMonitor(measure_flops=True)` counts
    those of the first training batch.

    Args:
        model: No effect: every operation of `forward_fn` counts.
        forward_fn: Returns the output of the model.
        loss_fn: Returns the loss of the output, a scalar. Default: no backward pass.

    Example:
        ```python
        with torch.device("meta"):
            model, x = nn.Linear(64, 10), torch.randn(32, 64)
        flops = measure_flops(model, lambda: model(x), torch.sum)
        ```
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The file system of a path or URL: an `fsspec.AbstractFileSystem`.

    Args:
        path: A path, or a URL such as `s3://bucket/runs`.
        **kwargs: Options of the file system.

    Example:
        ```python
        with get_filesystem("memory://notes.txt").open("memory://notes.txt", "w") as file:
            file.write("loss 0.1")
        ```
    """
    from fsspec.core import url_to_fs  # Few scripts need this import.

    return url_to_fs(os.fspath(path), **kwargs)[0]


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """The arguments that a running `__init__` got, by name, without `self` and with the content of its `**kwargs`.

    In a class of your own call `self.save_hyperparameters()`, which also stores them in checkpoints.

    Args:
        frame: The frame of `__init__`: in it, `inspect.currentframe()`.
    """
    arguments = inspect.getargvalues(frame)
    values = {name: arguments.locals[name] for name in arguments.args[1:]}
    return values | (arguments.locals[arguments.keywords] if arguments.keywords else {})


# ------------------------------------------------------------------------------------------------- hyper-parameters in a file


def save_hparams_to_yaml(
    config_yaml: str | os.PathLike[str], hparams: Mapping[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write hyper-parameters to a YAML file.

    It has plain values only: numbers, texts, lists, tuples and dicts of them; an `Enum` is its name, and interpolations of
    OmegaConf are resolved. A warning names the others, which are not written. Loggers write their `hparams.yaml` and
    checkpoints store `self.hparams` without this function.

    Args:
        config_yaml: A path or URL, in a folder that exists.
        hparams: The hyper-parameters.
        use_omegaconf: No effect: a `DictConfig` is written as plain values either way.

    Raises:
        ConfigurationError: There is no such folder, or `hparams` is something else.
    """
    import yaml

    path = os.fspath(config_yaml)
    files, folder = get_filesystem(path), os.path.dirname(path)
    if folder and not files.isdir(folder):
        raise ConfigurationError(f"there is no folder {folder}. Create it: os.makedirs({folder!r}, exist_ok=True)")
    values = vars(hparams) if isinstance(hparams, Namespace) else plain_container(hparams)
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"hparams must be a dict or an argparse.Namespace, not {type(hparams).__name__}.")
    dumper, texts = _yaml_classes()[0], []
    for name, value in values.items():
        try:
            texts.append(yaml.dump({name: value}, Dumper=dumper, allow_unicode=True))
        except yaml.representer.RepresenterError:
            warn(
                f"save_hparams_to_yaml: {name!r} is not written, because a {type(value).__name__} has no plain form in YAML. "
                "Pass a number, a text, or a list or dict of them."
            )
    with files.open(path, "w", encoding="utf-8") as file:
        file.write("".join(texts) or "{}\n")


def load_hparams_from_yaml(config_yaml: str | os.PathLike[str], use_omegaconf: bool = True) -> Any:
    """Read hyper-parameters from a YAML file, also one that Lightning has written. No code in it is run.

    Args:
        config_yaml: A path or URL.
        use_omegaconf: Return a `DictConfig` if omegaconf is installed and supports the values.

    Returns:
        The hyper-parameters, a dict or a `DictConfig`. If there is no file, a warning says so and the dict is empty.

    Raises:
        ConfigurationError: The file is no YAML, has objects of Python classes, or is no mapping.
    """
    import yaml

    path = os.fspath(config_yaml)
    files = get_filesystem(path)
    if not files.exists(path):
        warn(f"load_hparams_from_yaml: there is no file {path}, so there are no hyper-parameters.")
        return {}
    with files.open(path, "r", encoding="utf-8") as file:
        text = file.read()
    try:
        values = _yaml_classes()[1](text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"{path} cannot be read as plain hyper-parameters: {error}. It may have numbers, texts, lists and dicts."
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must have a mapping from names to hyper-parameters, not a {type(values).__name__}.")
    if use_omegaconf:
        with suppress(ImportError):
            from omegaconf import OmegaConf
            from omegaconf.errors import UnsupportedValueType, ValidationError

            with suppress(UnsupportedValueType, ValidationError):
                return OmegaConf.create(values)
    return values


@functools.cache
def _yaml_classes() -> tuple[Any, Any]:
    """A dumper and a loader of plain values and tuples; PyYAML is imported when they are used."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        def represent_data(self, data: Any) -> Any:
            if is_omegaconf(data):
                data = plain_container(data)
            elif isinstance(data, Enum):
                data = data.name
            elif isinstance(data, Mapping):
                data = dict(data)
            elif isinstance(data, tuple):
                return self.represent_sequence(_TUPLE, data)
            return super().represent_data(data)

    class PlainLoader(yaml.SafeLoader):
        def construct_tuple(self, node: Any) -> tuple[Any, ...]:
            return tuple(self.construct_sequence(node, deep=True))

    PlainLoader.add_constructor(_TUPLE, PlainLoader.construct_tuple)
    return PlainDumper, PlainLoader


_TUPLE = "tag:yaml.org,2002:python/tuple"  # as Lightning writes them
