"""`NonFiniteGuard`: checks for losses and gradients that are infinite or NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.checks import choice, whole_number
from trainkit.console import quantity, warn
from trainkit.errors import ConfigurationError, NonFiniteError
from trainkit.nested import copy_to_host

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["NonFiniteGuard"]

_NAMED = 8  # parameters named in a message, at most


class _Findings(NamedTuple):
    """The results for one optimizer step, which may still be on the device."""

    update: int  # the optimizer step, from 1
    finite: Tensor  # scalar bool, valid after `ready`
    ready: Any  # an event of the device, or None if `finite` can be read directly
    loss_finite: Tensor | None
    largest: Tensor | None  # The largest absolute gradient value of each parameter.
    names: list[str]


class NonFiniteGuard(Callback):
    """Stops training, or skips the optimizer step, if the loss or a gradient is infinite or NaN.

    `action="raise"` computes a flag on the device and reads it one optimizer step later, or when training ends, so that the
    device does not wait. The optimizer step has then been made: do not use the parameters. `action="skip"` reads the flag
    immediately (one host read per step) and skips the optimizer step: parameters, optimizer state and schedulers do not change.
    With several processes all skip it, which takes one small all-reduce per step.

    Under `16-mixed` gradients overflow while the loss scale adapts, and the loss scaler skips those steps: only the loss is
    checked, whatever `check` is.

    Args:
        action: `"raise"` or `"skip"`.
        check: `"loss"` (of each micro-batch), `"grad"` (of each parameter of the optimizer), or both. Large finite
            gradients pass.
        warn_after: With `"skip"`, warn after this number of skipped steps in a row.
        max_consecutive: With `"skip"`, raise after this number of skipped steps in a row; None for no limit.

    Attributes:
        skipped_updates: Number of optimizer steps skipped so far.
        consecutive_skips: Number of optimizer steps skipped in a row.

    Raises:
        ConfigurationError: An argument out of its range; `check=("grad",)` under `16-mixed` (when training starts).
        NonFiniteError: While training; names the optimizer step, and the loss or the parameters with such a gradient.

    Example:
        ```python
        trainer = Trainer(callbacks=[NonFiniteGuard(action="skip", max_consecutive=10)])
        ```
    """

    def __init__(
        self,
        action: str = "raise",
        check: Sequence[str] = ("loss", "grad"),
        warn_after: int = 3,
        max_consecutive: int | None = 50,
    ) -> None:
        super().__init__()
        choice(action, "NonFiniteGuard(action=)", ("raise", "skip"))
        parts = (check,) if isinstance(check, str) else tuple(check)
        if not parts:
            raise ConfigurationError(
                "NonFiniteGuard(check=...) expected 'loss', 'grad' or both, got nothing. Fix: NonFiniteGuard()"
            )
        for part in parts:
            choice(part, "NonFiniteGuard(check=)", ("loss", "grad"))
        self.action = action
        self.check = parts
        self.warn_after = whole_number(warn_after, "NonFiniteGuard(warn_after=)", 1)
        self.max_consecutive = whole_number(max_consecutive, "NonFiniteGuard(max_consecutive=)", 1, optional=True)
        self.skipped_updates = 0
        self.consecutive_skips = 0
        self._watch_gradients = "grad" in parts
        self._update = 0  # the last optimizer step that was checked
        self._losses: Tensor | None = None  # whether all losses since the last optimizer step are finite
        self._pending: _Findings | None = None
        self._names: dict[int, str] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_updates": self.skipped_updates, "consecutive_skips": self.consecutive_skips}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_updates = int(state_dict["skipped_updates"])
        self.consecutive_skips = int(state_dict["consecutive_skips"])

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        scaled = trainer.scaler is not None
        if scaled and "loss" not in self.check:
            raise ConfigurationError(
                "NonFiniteGuard(check=('grad',)) has no effect with precision='16-mixed', whose loss scaler skips steps "
                "whose gradient overflows. Fix: NonFiniteGuard(check=('loss',)), or precision='bf16-mixed'"
            )
        self._watch_gradients = "grad" in self.check and not scaled
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._losses = self._pending = None

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        if "loss" in self.check:
            finite = torch.isfinite(loss.detach()).all()
            self._losses = finite if self._losses is None else self._losses & finite

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        if self.action == "raise":
            self._read_pending()
        norm = trainer.strategy.gradient_norm(optimizer) if self._watch_gradients else None
        findings = self._examine(optimizer, trainer.global_step + 1, norm)
        if self.action == "raise":
            self._pending = findings
        else:
            self._skip_if_needed(trainer, findings)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.check_now()

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Raise before a checkpoint with broken parameters is saved."""
        self.check_now()

    def check_now(self) -> None:
        """Read the flag of the last optimizer step now, before a save or when training ends; waits for the device.

        Raises:
            NonFiniteError: Its loss or gradient was not finite.
        """
        self._read_pending()
        if self.action != "raise" or self._losses is None:
            return
        # losses of a closure, which runs after the gradients were checked, or of a window that is not full yet
        losses, self._losses = self._losses, None
        self._pending = _Findings(max(self._update, 1), losses, None, losses, None, [])
        self._read_pending()

    def _examine(self, optimizer: Optimizer, update: int, norm: Tensor | None) -> _Findings | None:
        """Compute on the device whether loss and gradient are finite; with `norm`, use it instead of the gradients."""
        losses, self._losses, self._update = self._losses, None, update
        gradients, names = ([], []) if norm is None else ([norm], ["all parameters together"])
        if self._watch_gradients and norm is None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        gradients.append(_dense(parameter.grad))
                        names.append(self._names.get(id(parameter), "a parameter that is not the module's"))
        largest = _largest(gradients) if gradients else None
        flags = [] if losses is None else [losses]
        if largest is not None:
            flags.append(torch.isfinite(largest).all().to(losses.device if losses is not None else largest.device))
        if not flags:
            return None
        finite = flags[0] if len(flags) == 1 else flags[0] & flags[1]
        host, ready = copy_to_host(finite) if self.action == "raise" else (finite, None)
        return _Findings(update, host, ready, losses, largest, names)

    def _read_pending(self) -> None:
        findings, self._pending = self._pending, None
        if findings is None:
            return
        if findings.ready is not None:
            # the previous step: a whole forward and backward are queued after it, which keep the device busy meanwhile
            findings.ready.synchronize()
        if not bool(findings.finite):
            raise NonFiniteError(
                f"{_describe_all(findings.update, [_causes(findings)])} The optimizer step has been made, so do not use the "
                "parameters. Fix: lower the learning rate or clip, Trainer(gradient_clip_val=1.0); to skip such steps, "
                "NonFiniteGuard(action='skip'); to find the operation, Trainer(detect_anomaly=True)"
            )

    def _skip_if_needed(self, trainer: Trainer, findings: _Findings | None) -> None:
        world = trainer.strategy.world
        bad = findings is not None and not bool(findings.finite)
        if world.size > 1:  # losses differ between processes; one without a loss participates too
            bad = any(world.largest([bad]))
        if not bad:
            if findings is not None or world.size > 1:
                self.consecutive_skips = 0
            return
        trainer.accelerator.skip_update()
        self.skipped_updates += 1
        self.consecutive_skips += 1
        too_many = self.max_consecutive is not None and self.consecutive_skips >= self.max_consecutive
        if not too_many and self.consecutive_skips != self.warn_after:
            return
        described = _describe_all(self._update, world.exchange(_causes(findings)))
        if self.max_consecutive is not None and too_many:
            raise NonFiniteError(
                f"NonFiniteGuard skipped {quantity(self.consecutive_skips, 'optimizer step')} in a row "
                f"(max_consecutive={self.max_consecutive}). The last: {described} Fix: lower the learning rate, check the "
                f"data, or raise the limit, NonFiniteGuard(action='skip', max_consecutive={2 * self.max_consecutive})"
            )
        warn(
            f"NonFiniteGuard skipped {quantity(self.consecutive_skips, 'optimizer step')} in a row, {self.skipped_updates} in "
            f"all. The last: {described}"
        )


def _dense(gradient: Tensor) -> Tensor:
    """The values of a gradient; of a sparse one, the non-zero values."""
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _largest(gradients: list[Tensor]) -> Tensor:
    """The largest absolute value of each gradient, in one vector. NaN stays NaN; unlike a 2-norm it cannot overflow."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, gradient in enumerate(gradients):
        groups.setdefault((gradient.device, gradient.dtype), []).append(position)
    device = gradients[0].device
    result: list[Tensor] = [torch.empty(0)] * len(gradients)
    for positions in groups.values():
        used = [i for i in positions if gradients[i].numel()]
        for i in set(positions) - set(used):
            result[i] = gradients[i].new_zeros(())
        for i, norm in zip(used, torch._foreach_norm([gradients[i] for i in used], float("inf")), strict=True):
            result[i] = norm
    if len(groups) > 1:
        result = [r.to(device=device, dtype=torch.float64 if device.type != "mps" else torch.float32) for r in result]
    return torch.stack(result)


def _causes(findings: _Findings | None) -> str:
    """What was not finite; waits for the device."""
    causes = []
    if findings is not None and findings.loss_finite is not None and not bool(findings.loss_finite):
        causes.append("the loss")
    if findings is not None and findings.largest is not None:
        bad = [n for n, ok in zip(findings.names, torch.isfinite(findings.largest).tolist(), strict=True) if not ok]
        if bad:
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            causes.append(
                f"the gradient of {', '.join(bad[:_NAMED])}{more} ({len(bad)} of {quantity(len(findings.names), 'parameter')})"
            )
    return "; ".join(causes)


def _describe_all(update: int, causes: list[str]) -> str:
    """What was not finite on each rank, or once if it is the same on all."""
    if len(set(causes)) == 1:
        return f"Not finite in optimizer step {update}: {causes[0]}."
    named = [f"on rank {rank}, {text}" for rank, text in enumerate(causes) if text]
    return f"Not finite in optimizer step {update}: {'; '.join(named)}."
