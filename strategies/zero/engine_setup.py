"""Set-up and tear-down of a run under ZeRO: DeepSpeed, the folder for NVMe offload, and parameter sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checks import arguments_of
from trainkit.console import notice
from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.optim.optimizer_copy import count_slots
from trainkit.precision import Precision
from trainkit.strategies.zero.config_file import DeepSpeedConfig, read_config
from trainkit.strategies.zero.deepspeed_api import Session, load, require_async_io, supports_float16
from trainkit.strategies.zero.deepspeed_config import CHECKPOINTING, COMMUNICATION, ZeROConfig
from trainkit.strategies.zero.nvme import Folder, check_path, check_space
from trainkit.strategies.zero.partitions import Sharding, announce_zero3, numel

__all__ = ["Setup", "check_machine", "prepare_precision", "resolve_config"]


def resolve_config(stage: int | None, config: Any, options: Mapping[str, Any]) -> tuple[ZeROConfig, DeepSpeedConfig | None]:
    """Returns the options, and the DeepSpeed configuration that they come from; `None` if they come from arguments."""
    known = arguments_of(ZeROConfig)
    for name in options:
        if name not in known:
            raise UnknownNameError(f"ZeROStrategy has no argument {name!r}.{nearest(name, known)}")
    if config is None:
        return ZeROConfig(**{"stage": stage, **options}), None
    values = {**({} if stage is None else {"stage": stage}), **options}
    if options.keys() >= {name for name, argument in known.items() if argument.kept and name != "stage"}:
        # Only a parser passes all options: those with their default value are not the user's.
        values = {name: value for name, value in values.items() if value != getattr(ZeROConfig, name)}
    arguments = [f"{name}={value!r}" for name, value in values.items()]
    if arguments:
        raise ConfigurationError(
            f"ZeROStrategy got both config= and {', '.join(arguments)}. Write these into the configuration, or remove config=."
        )
    read = read_config(config)
    made, unused = ZeROConfig.from_options(read.options)
    read.without_effect += unused
    if read.without_effect:
        notice(f"these keys of {read.source} have no effect: {', '.join(dict.fromkeys(read.without_effect))}.")
    return made, read


def check_machine(config: ZeROConfig) -> None:
    """Refuse options that do not work on this machine.

    Raises:
        MissingPackageError: DeepSpeed's extension cannot be compiled.
    """
    for name in ("quantized_weights", "quantized_nontrainable_weights", "quantized_gradients"):
        if getattr(config, name) and not torch.cuda.is_available():
            raise ConfigurationError(f"{name}=True needs a GPU, but torch finds none. Remove {name}.")
    if config.nvme_path is not None:
        check_path(config.nvme_path)
        require_async_io()


def prepare_precision(precision: Precision, device: torch.device) -> None:
    """Enable loss scaling for `16-true`."""
    if precision.name == "16-true":
        if not supports_float16(device):
            raise ConfigurationError(
                f"precision='16-true' under ZeRO needs a device on which DeepSpeed supports float16, and {device.type!r} "
                "is not one. Use precision='bf16-true' or '16-mixed'."
            )
        precision.use_scaler()


def _dtypes(precision: Precision, config: ZeROConfig) -> dict[str, Any]:
    """Returns the sections of the DeepSpeed configuration for a precision."""
    name, autocast, communication = precision.name, precision.autocast_dtype, COMMUNICATION[config.communication_dtype]
    if config.zero3_save_16bit_model and precision.parameter_dtype is torch.float32:
        raise ConfigurationError(
            f"zero3_save_16bit_model=True, but precision={name!r} has float32 parameters. Use precision='bf16-true', or remove "
            "zero3_save_16bit_model and export the checkpoint: trainkit checkpoint export --dtype bf16"
        )
    if autocast is None:
        sections: dict[str, dict[str, Any]] = {
            "bf16-true": {"bf16": {"enabled": True}},
            "16-true": {"fp16": {"enabled": True, "loss_scale": 1.0}},  # trainkit scales the loss, not DeepSpeed
        }
        return sections.get(name, {})
    dtype = str(autocast).removeprefix("torch.")
    if communication not in ("", "float32", dtype):
        raise ConfigurationError(
            f"communication_dtype={config.communication_dtype!r} does not work with precision={name!r}, which reduces "
            f"gradients in float32 or {dtype}. Use communication_dtype=None."
        )
    section: dict[str, Any] = {"enabled": True, "dtype": dtype}
    if communication != dtype:  # By default DeepSpeed uses the lower precision for linear layers and convolutions.
        section["lower_precision_safe_modules"] = []
    return {"torch_autocast": section}


class Setup:
    """DeepSpeed, set up for one run.

    Attributes:
        sharding: Shards the parameters in stage 3.
    """

    def __init__(self, config: ZeROConfig, precision: Precision, world: World, device: torch.device) -> None:
        if world.size % config.hpz_partition_size:
            raise ConfigurationError(
                f"hpz_partition_size={config.hpz_partition_size} does not divide the {world.size} processes of the run. Set it "
                f"to the number of processes per node, hpz_partition_size={world.local_size}, or remove it."
            )
        self._config = config
        self._dtypes = _dtypes(precision, config)
        self._world = world
        self._stack = ExitStack()
        self.session = Session(world, device)
        self._folder: Folder | None = None
        with ExitStack() as failed:
            failed.callback(self.session.close)
            if config.nvme_path is not None:
                load("AsyncIOBuilder", "pin_memory", "async_io")
                self._folder = Folder(config.nvme_path)
            if config.activation_checkpointing is not None:
                options = {CHECKPOINTING[name]: value for name, value in config.activation_checkpointing.items()}
                if device.type == "cpu":
                    options.pop("checkpoint_in_cpu", None)  # activations are on the CPU already; DeepSpeed fails to move them
                self._stack.enter_context(self.session.checkpointing(options))
            failed.pop_all()
        self.sharding = Sharding(self.session, self.configuration, device, precision.parameter_dtype)

    def configuration(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
        """Returns the DeepSpeed configuration for these parameters and the optimizers of an engine.

        Raises:
            ConfigurationError: There is not enough disk space or page-locked memory for an optimizer on NVMe.
        """
        sizes = [numel(parameter) for parameter in parameters]
        if self._folder is None:
            return self._config.for_model(sizes, self._dtypes)
        if not optimizers or self._config.offload_optimizer != "nvme":
            return self._config.for_model(sizes, self._dtypes, self._folder.path)
        slots = max(map(count_slots, optimizers))
        on_disk, pinned = self._config.needs_on_nvme(sizes, self._world.size, slots)
        check_space(self._folder.path, on_disk, pinned, self._world.local_size)
        return self._config.for_model(sizes, self._dtypes, self._folder.path, slots)

    def expect_forwards(self, module: nn.Module) -> None:
        """Prepare for calls of the model and of `generate` in the user's own training loop, until the run ends.

        `transformers` is notified of ZeRO-3, and a forward that only some processes run raises an error.
        """
        self._stack.enter_context(announce_zero3())
        self._stack.callback(CollectiveChecks.of(self._world).watch(module))

    def close(self, collective: bool) -> None:
        """Release all resources of the run. Close its engines first.

        Args:
            collective: See `Sharding.release`.
        """
        with ExitStack() as rest:  # runs all callbacks, even if one fails
            rest.callback(self.session.close)
            if self._folder is not None:
                rest.callback(self._folder.close)
            self._stack.close()
            self.sharding.release(collective)
