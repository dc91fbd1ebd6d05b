"""What a run under ZeRO has from its set-up to its tear-down: DeepSpeed, a folder on a disk, and divided parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.distributed import World
from trainkit.strategies._deepspeed import Session
from trainkit.strategies._extensions import load, require_async_io
from trainkit.strategies._nvme import Folder, check_path, check_room
from trainkit.strategies._transformers import told_transformers
from trainkit.strategies._zero_optimizer import count_slots
from trainkit.strategies._zero_sharding import Sharding, numel
from trainkit.strategies.zero_config import ZeROConfig

__all__ = ["Setup", "check_machine"]


def check_machine(config: ZeROConfig) -> None:
    """Refuse what cannot work on this machine.

    Raises:
        ConfigurationError: ``nvme_path`` cannot be used.
        MissingPackageError: what is to be compiled cannot be.
    """
    if config.nvme_path is not None:
        check_path(config.nvme_path)
        require_async_io()


class Setup:
    """DeepSpeed, started for one run.

    Args:
        config: as the user has it.
        dtypes: DeepSpeed's sections for the precision.
        world: the processes.
        device: of this process.

    Attributes:
        session: DeepSpeed.
        sharding: of the parameters, in stage 3.
    """

    def __init__(self, config: ZeROConfig, dtypes: dict[str, Any], world: World, device: torch.device) -> None:
        self._config, self._dtypes, self._world = config, dtypes, world
        self._stack = ExitStack()
        self.session = Session(world, device)
        self._folder: Folder | None = None
        if config.nvme_path is not None:
            with ExitStack() as failed:
                failed.callback(self.session.close)
                load("AsyncIOBuilder", "pin_memory", "async_io")
                self._folder = Folder(config.nvme_path)
                failed.pop_all()
        dtype = torch.bfloat16 if "bf16" in dtypes else torch.float32
        self.sharding = Sharding(self.session, self.configuration, device, dtype)

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

    def tell_transformers(self) -> None:
        """Let it know of stage 3 until the run ends: in a loop of his own a user may generate at any time."""
        self._stack.enter_context(told_transformers())

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
