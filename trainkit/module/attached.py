"""`AttachedModule`: what a module shows of the run that it is attached to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.console import echo
from trainkit.errors import NotAvailableError

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["AttachedModule"]


class AttachedModule(nn.Module):
    """A `torch.nn.Module` that a `Trainer` attaches itself to when a run starts."""

    # Lightning's, for Fabric and for strategies with a device mesh; a Trainer sets neither
    fabric: None = None
    device_mesh: None = None
    _trainer: Trainer | None = None

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            modules = self.__dict__.get("_modules")
            if modules is not None and name in modules:  # the usual case in a step, without another call
                return modules[name]
            try:
                return super().__getattr__(name)
            except AttributeError:
                if isinstance(getattr(type(self), name, None), property):
                    return object.__getattribute__(self, name)  # it has raised an AttributeError: show that
                raise

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module; before the first run, a `NotAvailableError`.

        Assign it only in tests of your module: a run sets it.
        """
        if self._trainer is None:
            raise NotAvailableError(f"{type(self).__name__} is not attached to a Trainer yet. Call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, AttachedModule):
                module._trainer = trainer

    @property
    def loggers(self) -> list[Any]:
        """The loggers of the trainer; empty without a trainer."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def logger(self) -> Any | None:
        """The first logger, or `None`."""
        return self.loggers[0] if self.loggers else None

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters."""
        tensor: Tensor | None = next(self.parameters(), None)
        if tensor is None:
            tensor = next(self.buffers(), None)
        if tensor is not None:
            return tensor.device
        return torch.device("cpu") if self._trainer is None else self._trainer.strategy.device

    @property
    def on_gpu(self) -> bool:
        """Whether the module's parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's floating-point parameters in the forward; between forwards they may be master weights."""
        trainer = self._trainer
        if trainer is not None and trainer.stage is not None and trainer.strategy.owns_masters:
            return trainer.strategy.precision.parameter_dtype
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch, from 0."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return 0 if self._trainer is None else self._trainer.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return 0 if self._trainer is None else self._trainer.strategy.local_rank

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only, above the progress bar; the arguments are those of `print`."""
        if self._trainer is None:
            echo(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # a copy, or a worker process, needs the module without its run
        return {**self.__dict__, "_trainer": None}
