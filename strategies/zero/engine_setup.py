"""What a run under ZeRO has from its set-up to its tear-down: DeepSpeed, a folder on a disk, and divided parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.precision import Precision
from trainkit.state.slots import count_slots
from trainkit.strategies.zero.config_file import DeepSpeedConfig, read_config
from trainkit.strategies.zero.deepspeed_api import Session, supports_float16
from trainkit.strategies.zero.deepspeed_config import CHECKPOINTING, COMMUNICATION, ZeROConfig
from trainkit.strategies.zero.extensions import load, require_async_io
from trainkit.strategies.zero.nvme import Folder, check_path, check_room
from trainkit.strategies.zero.partitions import Sharding, numel
from trainkit.strategies.zero.transformers_models import told_transformers

__all__ = ["Setup", "check_machine", "configured", "prepare_precision"]

_OTHERS = ("config", "device", "precision", "process_group_backend", "timeout")  # arguments that are no options


def configured(stage: int | None, config: Any, options: Mapping[str, Any]) -> tuple[ZeROConfig, DeepSpeedConfig | None]:
    """The options, given one by one or by a DeepSpeed configuration, and what else that one says.

    Raises:
        UnknownNameError: an option that there is not.
        ConfigurationError: both are given, or an option is wrong.
    """
    known = ZeROConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UnknownNameError(f"ZeROStrategy has no argument {name!r}.{nearest(name, [*known, *_OTHERS])}")
    if config is None:
        return ZeROConfig(**{"stage": 2 if stage is None else stage, **options}), None
    given = [f"{name}={value!r}" for name, value in {"stage": stage, **options}.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"ZeROStrategy has config= and {', '.join(given)}. Give these in the configuration, or leave config out."
        )
    told = read_config(config)
    made, unused = ZeROConfig.out_of(told.options)
    told.without_effect += unused
    if told.without_effect:
        notice(f"without effect in {told.source}: {', '.join(dict.fromkeys(told.without_effect))}.")
    return made, told


def check_machine(config: ZeROConfig) -> None:
    """Refuse what cannot work on this machine.

    Raises:
        ConfigurationError: ``nvme_path`` cannot be used, or what needs GPUs is asked for and there is none.
        MissingPackageError: what is to be compiled cannot be.
    """
    for name in ("quantized_weights", "quantized_nontrainable_weights", "quantized_gradients"):
        if getattr(config, name) and not torch.cuda.is_available():
            raise ConfigurationError(f"{name}=True works on GPUs only, and torch sees none. Leave it out.")
    if config.nvme_path is not None:
        check_path(config.nvme_path)
        require_async_io()


def prepare_precision(precision: Precision, device: torch.device) -> None:
    """Give float16 the loss scale that float32 masters are for.

    Raises:
        ConfigurationError: DeepSpeed does not compute in float16 on that device.
    """
    if precision.name == "16-true":
        if not supports_float16(device):
            raise ConfigurationError(
                f"precision='16-true' under ZeRO needs a device that computes in float16, and {device.type!r} does not. Use "
                "precision='bf16-true', or '16-mixed'."
            )
        precision.use_scaler()


def _dtypes(precision: Precision, config: ZeROConfig) -> dict[str, Any]:
    """DeepSpeed's sections for a precision.

    Raises:
        ConfigurationError: an option asks for what it does not have.
    """
    name, autocast, travel = precision.name, precision.autocast_dtype, COMMUNICATION[config.communication_dtype]
    if config.zero3_save_16bit_model and precision.parameter_dtype is torch.float32:
        raise ConfigurationError(
            f"zero3_save_16bit_model=True, and precision={name!r} has parameters in float32. Use 'bf16-true', or leave it out "
            "and export the checkpoint: trainkit checkpoint export --dtype bf16"
        )
    if autocast is None:
        sections: dict[str, dict[str, Any]] = {
            "bf16-true": {"bf16": {"enabled": True}},
            "16-true": {"fp16": {"enabled": True, "loss_scale": 1.0}},  # DeepSpeed's: what scales is ours
        }
        return sections.get(name, {})
    dtype = str(autocast).removeprefix("torch.")
    if travel not in ("", "float32", dtype):
        raise ConfigurationError(
            f"communication_dtype={config.communication_dtype!r} does not go with precision={name!r}, under which gradients "
            f"travel in float32 or {dtype}."
        )
    section: dict[str, Any] = {"enabled": True, "dtype": dtype}
    if travel != dtype:  # DeepSpeed would take the lower precision for linear layers and convolutions
        section["lower_precision_safe_modules"] = []
    return {"torch_autocast": section}


class Setup:
    """DeepSpeed, started for one run.

    Args:
        config: as the user has it.
        precision: of the run.
        world: the processes.
        device: of this process.

    Attributes:
        session: DeepSpeed.
        sharding: of the parameters, in stage 3.

    Raises:
        ConfigurationError: an option does not go with the precision or the number of processes.
    """

    def __init__(self, config: ZeROConfig, precision: Precision, world: World, device: torch.device) -> None:
        if world.size % config.hpz_partition_size:
            raise ConfigurationError(
                f"hpz_partition_size={config.hpz_partition_size} does not divide the {world.size} processes of the run. Give "
                "the processes of one machine, or leave it out."
            )
        self._config, self._dtypes, self._world = config, _dtypes(precision, config), world
        self._stack = ExitStack()
        self.session = Session(world, device)
        self._folder: Folder | None = None
        with ExitStack() as failed:
            failed.callback(self.session.close)
            if config.nvme_path is not None:
                load("AsyncIOBuilder", "pin_memory", "async_io")
                self._folder = Folder(config.nvme_path)
            if config.activation_checkpointing is not None:
                told = {CHECKPOINTING[name]: value for name, value in config.activation_checkpointing.items()}
                if device.type == "cpu":
                    told.pop("checkpoint_in_cpu", None)  # they are there; DeepSpeed fails to move them
                self._stack.enter_context(self.session.checkpointing(told))
            failed.pop_all()
        self.sharding = Sharding(self.session, self.configuration, device, precision.parameter_dtype)

    def configuration(self, parameters: Iterable[Tensor], optimizer: Optimizer | None = None) -> dict[str, Any]:
        """DeepSpeed's, for these parameters and the optimizer of an engine.

        Raises:
            ConfigurationError: an optimizer on NVMe needs more room than there is.
        """
        sizes = [numel(parameter) for parameter in parameters]
        if self._folder is None:
            return self._config.for_model(sizes, self._dtypes)
        if optimizer is None or self._config.offload_optimizer != "nvme":
            return self._config.for_model(sizes, self._dtypes, self._folder.path)
        slots = count_slots(optimizer)
        on_disk, pinned = self._config.needs_on_nvme(sizes, self._world.size, slots)
        check_room(self._folder.path, on_disk, pinned, self._world.local_size)
        return self._config.for_model(sizes, self._dtypes, self._folder.path, slots)

    def expect_forwards(self, module: nn.Module) -> None:
        """In a loop of his own a user may call his model, or generate by it, at any time: see to it until the run ends.

        transformers is told of stage 3, and a forward that not all processes come to is an error.
        """
        self._stack.enter_context(told_transformers())
        self._stack.callback(CollectiveChecks.of(self._world).watch(module))

    def close(self, collective: bool) -> None:
        """Give back what the run took, after its engines are closed.

        Args:
            collective: as of :meth:`Sharding.give_back`.
        """
        with ExitStack() as rest:  # which is done whatever fails
            rest.callback(self.session.close)
            if self._folder is not None:
                rest.callback(self._folder.close)
            self._stack.close()
            self.sharding.give_back(collective)
