"""Gradients sent in fewer bytes: what DDP calls instead of summing a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainkit.console import notice
from trainkit.errors import ConfigurationError, UnknownNameError, nearest

__all__ = ["Compression"]

_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWER = "powersgd"


class Compression:
    """What ``DDPStrategy(comm_hook=, comm_state=)`` asks for.

    Args:
        hook: ``"fp16"``, ``"bf16"``, ``"powersgd"``, a hook of torch's kind, or ``None``.
        state: for a hook: its first argument; for "powersgd": options of torch's ``PowerSGDState``, or one of these.

    Attributes:
        wire: the dtype that gradients are sent in, where that is all.

    Raises:
        ConfigurationError: it is none of these.
    """

    def __init__(self, hook: str | Callable[..., Any] | None, state: Any) -> None:
        known = (*_WIRES, _POWER)
        if isinstance(hook, str) and hook not in known:
            raise UnknownNameError(
                f"unknown comm_hook {hook!r}; known: {', '.join(known)}, or a function (state, bucket) as torch has them in "
                f"torch.distributed.algorithms.ddp_comm_hooks.{nearest(hook, known)}"
            )
        if hook is not None and not isinstance(hook, str) and not callable(hook):
            raise ConfigurationError(
                f"comm_hook must be one of {', '.join(known)}, or a function (state, bucket), not {hook!r}."
            )
        if state is not None and (hook is None or hook in _WIRES):
            raise ConfigurationError(
                f"comm_state belongs to comm_hook='powersgd' or to a function, not to {hook!r}. Leave it out."
            )
        self._hook, self._state = hook, state
        self.wire = _WIRES.get(hook) if isinstance(hook, str) else None
        self._power: Any = None  # torch's state, kept when DDP is made anew
        if hook == _POWER and isinstance(state, Mapping):
            self._power_state(**state)  # what is wrong with the options is said here, not when training begins

    def register(self, ddp: DistributedDataParallel) -> None:
        """Make DDP use it."""
        if self._hook is None:
            return
        if self.wire is not None:
            ddp.register_comm_hook(self.wire, _plain(_send_short))
        elif self._hook == _POWER:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

            ddp.register_comm_hook(self._begin_power(), _plain(powerSGD_hook))
        else:
            assert callable(self._hook)
            ddp.register_comm_hook(self._state, _plain(self._hook))

    def _begin_power(self) -> Any:
        """A state for new buckets: what it remembers of others does not fit them."""
        if self._state is not None and not isinstance(self._state, Mapping):
            made = self._state
            for memory in (made.error_dict, made.p_memory_dict, made.q_memory_dict):
                memory.clear()
        else:
            made = self._power_state(**(self._state or {}))
            made.iter = 0 if self._power is None else self._power.iter
        if self._power is None:
            notice(
                "comm_hook='powersgd': what it remembers of earlier gradients is not in the checkpoints, so a resumed run "
                "differs from one that was never stopped."
            )
        self._power = made
        return made

    def _power_state(self, **options: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        try:
            return PowerSGDState(process_group=None, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"comm_state for comm_hook='powersgd' takes options of torch's PowerSGDState, such as "
                f"{{'matrix_approximation_rank': 2, 'start_powerSGD_iter': 1000}}: {error}"
            ) from None


def _send_short(wire: torch.dtype, bucket: Any) -> Any:
    """The mean of a bucket, sent in a shorter dtype; complex numbers, and what is short already, as they are."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    short = buffer.is_floating_point() and wire.itemsize < buffer.dtype.itemsize
    sent = buffer.to(wire) if short else buffer
    future: Future[Any] = dist.all_reduce(sent, async_op=True).get_future()

    def arrived(done: Future[Any]) -> Any:
        values = done.value()  # where the reduction has failed, this says so
        # of complex numbers these are the pairs that were sent, of which torch 2.9 would take half
        return buffer.copy_(values[0]) if short else buffer

    return future.then(arrived)


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch's checks have nothing against: of annotations (as text), of a name, of the build of torch."""

    def call(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return call
