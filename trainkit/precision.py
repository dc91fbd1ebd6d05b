"""``Precision``: the dtype of parameters and inputs, autocast, the loss scale.

The six names are Lightning's. ``*-true`` converts parameters and floating-point inputs; ``*-mixed`` keeps float32
parameters and runs the forward under autocast; ``16-mixed`` scales the loss and skips the update when a scaled gradient
overflows (Micikevicius et al., Mixed Precision Training, ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.console import notice
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.nested import map_tensors

__all__ = ["MIXED", "OVER_MASTERS", "PRECISIONS", "Precision", "is_short"]


class _Kind(NamedTuple):
    parameters: torch.dtype
    autocast: torch.dtype | None = None
    scaled: bool = False


PRECISIONS: dict[str, _Kind] = {
    "32-true": _Kind(torch.float32),
    "64-true": _Kind(torch.float64),
    "bf16-mixed": _Kind(torch.float32, autocast=torch.bfloat16),
    "16-mixed": _Kind(torch.float32, autocast=torch.float16, scaled=True),
    "bf16-true": _Kind(torch.bfloat16),
    "16-true": _Kind(torch.float16),
}

# What Lightning accepts besides, for the same six.
_ALIASES: dict[str, str] = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}
# Accelerate's names; and what they mean to DeepSpeed, which keeps parameters in 16 bits and masters of them in float32.
MIXED: dict[str, str] = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
OVER_MASTERS: dict[str, str] = {"no": "32-true", "fp16": "16-true", "bf16": "bf16-true"}
_NULL = nullcontext()


class Precision:
    """Numbers of one run: what the parameters, the inputs and the forward are computed in.

    Args:
        name: ``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"`` or ``"16-true"``; the short
            forms ``32``, ``64``, ``16`` (16-mixed) and ``"bf16"`` (bf16-mixed) work too.
        init_scale: first loss scale of ``16-mixed`` (a power of two).
        growth_interval: updates without an overflow before the scale grows.
        growth_factor: by which it is multiplied then.
        backoff_factor: by which it is multiplied after an overflow.
        enabled: scale the loss in ``16-mixed``, and in ``16-true`` under ZeRO, at all.

    Raises:
        UnknownNameError: the name is none of these.
    """

    def __init__(
        self,
        name: str | int = "32-true",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        enabled: bool = True,
    ) -> None:
        resolved = _ALIASES.get(str(name), str(name))
        if resolved not in PRECISIONS:
            raise UnknownNameError(
                f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}.{nearest(str(name), PRECISIONS)}"
            )
        self.name = resolved
        self.parameter_dtype, self.autocast_dtype, self._scaled = PRECISIONS[resolved]
        self._enabled = enabled
        self._scaled = self._scaled and enabled
        self._scaling: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_interval": growth_interval,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
        }
        self.device_type = "cpu"
        self.scaler: torch.amp.GradScaler | None = None
        self.several_optimizers = False  # that share the loss scale
        self.entered = False  # a forward has been computed in it
        self._unscaled: set[int] = set()  # optimizers whose gradients have lost the scale and wait for their update
        self._over: set[int] = set()  # optimizers whose update is over since the scale was last updated

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    def setup(self, device: torch.device) -> None:
        """Make what depends on the device.

        Raises:
            ConfigurationError: the device cannot compute in this precision.
        """
        if device.type == "mps" and self.name == "64-true":
            raise ConfigurationError(
                "precision='64-true' does not work on MPS, which has no float64. Use precision='32-true' or accelerator='cpu'."
            )
        self.device_type = device.type
        if self.scaler is None:
            self.reset()

    def use_scaler(self) -> None:
        """Scale the loss in this precision too, unless it is not to be: float32 masters hold what float16 cannot."""
        self._scaled = self._enabled
        if self.scaler is None:
            self.reset()

    def reset(self) -> None:
        """The loss scale as it is at the start of a run."""
        self.entered = False
        self._unscaled.clear()
        self._over.clear()
        if self._scaled:
            self.scaler = torch.amp.GradScaler(self.device_type, **self._scaling)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module with its floating-point parameters and buffers in the parameter dtype (in place)."""
        if self.parameter_dtype is not torch.float32:
            module.to(self.parameter_dtype)
        return module

    def note_other_dtypes(self, module: nn.Module) -> None:
        """Name the dtypes of parameters that this precision leaves unchanged."""
        odd = {str(p.dtype) for p in module.parameters() if p.is_floating_point() and p.dtype != self.parameter_dtype}
        if odd:
            notice(
                f"precision {self.name} leaves parameters as they are, and some are {', '.join(sorted(odd))}. To train in "
                "that dtype name it: precision='bf16-true'; for float32: module.float()."
            )

    def convert_input(self, batch: Any) -> Any:
        """The batch with its floating-point tensors in the parameter dtype; mixed precisions leave it as it is."""
        if self.parameter_dtype is torch.float32:
            return batch
        return map_tensors(batch, lambda t: t.to(self.parameter_dtype) if t.is_floating_point() else t)

    def init_context(self) -> AbstractContextManager[Any]:
        """Within it, new floating-point tensors have the parameter dtype: ``configure_model`` runs in it."""
        if self.parameter_dtype is torch.float32:
            return _NULL
        return _default_dtype(self.parameter_dtype)

    def forward_context(self, **autocast: Any) -> AbstractContextManager[Any]:
        """Within it the forward runs: autocast for mixed precisions, the default dtype for the others but float32.

        Args:
            **autocast: options of ``torch.autocast``: ``enabled``, ``cache_enabled``.
        """
        self.entered = True
        if self.autocast_dtype is not None:
            return torch.autocast(self.device_type, dtype=self.autocast_dtype, **autocast)
        return self.init_context()

    @property
    def plain(self) -> bool:
        """Whether inputs and forward need nothing done (``32-true``)."""
        return self.autocast_dtype is None and self.parameter_dtype is torch.float32

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as backward must see it."""
        if self.scaler is None:
            return loss
        self.settle()
        return self.scaler.scale(loss)

    def settle(self) -> None:
        """Update the scale, if no gradient is left that was computed under it.

        With several optimizers that is known when the next loss is scaled: until then the second one's gradients may still
        have the old scale.
        """
        if self.scaler is not None and self._over and not self._unscaled:
            self.scaler.update()
            self._over.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of the optimizer's gradients; at most once per update, more calls do nothing."""
        if self.scaler is not None and id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            if id(optimizer) in self._over:
                self.settle()
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters, unless a scaled gradient overflowed.

        Returns:
            Whether the update happened. A skipped one changed neither parameters nor optimizer state.

        Raises:
            ConfigurationError: a closure under ``16-mixed``, whose scaler has to see the gradients before the update.
        """
        if self.scaler is None:
            optimizer.step(closure)
            return True
        if closure is not None:
            raise ConfigurationError(
                "an optimizer step with a closure (LBFGS) does not work with precision='16-mixed', whose loss scaler must see "
                "the gradients before the update. Use precision='bf16-mixed' or '32-true'."
            )
        self.unscale(optimizer)
        if id(optimizer) not in self._unscaled:  # no gradient at all, which torch's scaler refuses
            optimizer.step()
            return True
        done: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: done.append(True))
        try:
            self.scaler.step(optimizer)
        finally:
            hook.remove()
            self.discard(optimizer)
        return bool(done)

    def discard(self, optimizer: Optimizer) -> None:
        """Tell the scaler that an update whose gradients it has seen is over, or will not happen."""
        if self.scaler is not None and id(optimizer) in self._unscaled:
            self._unscaled.discard(id(optimizer))
            self._over.add(id(optimizer))
            if not self.several_optimizers:
                self.settle()


def is_short(precision: Precision | str | int) -> bool:
    """Whether it has parameters in 16 bits."""
    made = precision if isinstance(precision, Precision) else Precision(precision)
    return made.parameter_dtype.itemsize < 4


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
