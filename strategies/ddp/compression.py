"""Gradient compression: the communication hook that DDP calls instead of its all-reduce of a bucket."""

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
_POWERSGD = "powersgd"


class Compression:
    """The communication hook that `DDPStrategy(comm_hook=, comm_state=)` selects.

    Args:
        hook: `"fp16"`, `"bf16"`, `"powersgd"`, a DDP communication hook, or `None`.
        state: the first argument of the hook. For "powersgd": a `PowerSGDState` of torch, or a dict of its options.

    Attributes:
        wire: the dtype that gradients are sent in, for "fp16" and "bf16"; else `None`.

    Raises:
        ConfigurationError: the hook or its state has another type or value.
    """

    def __init__(self, hook: str | Callable[..., Any] | None, state: Any) -> None:
        known = (*_WIRES, _POWERSGD)
        if isinstance(hook, str) and hook not in known:
            raise UnknownNameError(
                f"unknown comm_hook {hook!r}; known: {', '.join(known)}, or a function (state, bucket) like those in "
                f"torch.distributed.algorithms.ddp_comm_hooks.{nearest(hook, known)}"
            )
        if hook is not None and not isinstance(hook, str) and not callable(hook):
            raise ConfigurationError(
                f"comm_hook must be one of {', '.join(known)}, or a function (state, bucket), not {hook!r}. For example: "
                "comm_hook='bf16'"
            )
        if state is not None and (hook is None or hook in _WIRES):
            raise ConfigurationError(
                f"comm_state needs comm_hook='powersgd' or a function, not {hook!r}. Remove it, or use comm_hook='powersgd'."
            )
        self._hook, self._state = hook, state
        self.wire = _WIRES.get(hook) if isinstance(hook, str) else None
        self._powersgd_state: Any = None  # the PowerSGDState, kept when DDP is created again
        if hook == _POWERSGD and isinstance(state, Mapping):
            self._make_powersgd_state(**state)  # raises now if the options are wrong, not when training begins

    def register(self, ddp: DistributedDataParallel) -> None:
        """Register the hook with DDP."""
        if self._hook is None:
            return
        if self.wire is not None:
            ddp.register_comm_hook(self.wire, _plain(_send_short))
        elif self._hook == _POWERSGD:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

            ddp.register_comm_hook(self._state_for_new_buckets(), _plain(powerSGD_hook))
        else:
            assert callable(self._hook)
            ddp.register_comm_hook(self._state, _plain(self._hook))

    def _state_for_new_buckets(self) -> Any:
        """A state for new buckets, without the errors and matrices of earlier buckets, whose shapes may differ."""
        if self._state is not None and not isinstance(self._state, Mapping):
            made = self._state
            for memory in (made.error_dict, made.p_memory_dict, made.q_memory_dict):
                memory.clear()
        else:
            made = self._make_powersgd_state(**(self._state or {}))
            made.iter = 0 if self._powersgd_state is None else self._powersgd_state.iter
        if self._powersgd_state is None:
            notice(
                "comm_hook='powersgd': checkpoints do not contain PowerSGD's state of earlier gradients, so a resumed run "
                "differs slightly from an uninterrupted one."
            )
        self._powersgd_state = made
        return made

    def _make_powersgd_state(self, **options: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        try:
            return PowerSGDState(process_group=None, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"comm_state must have options of torch's PowerSGDState for comm_hook='powersgd': {error}. For example: "
                "comm_state={'matrix_approximation_rank': 2, 'start_powerSGD_iter': 1000}"
            ) from None


def _send_short(wire: torch.dtype, bucket: Any) -> Any:
    """Average a bucket over all ranks, sent in a shorter dtype. Complex and already short values are sent unchanged."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    short = buffer.is_floating_point() and wire.itemsize < buffer.dtype.itemsize
    sent = buffer.to(wire) if short else buffer
    future: Future[Any] = dist.all_reduce(sent, async_op=True).get_future()

    def arrived(done: Future[Any]) -> Any:
        values = done.value()  # raises if the all-reduce failed
        # for a complex bucket, values[0] has the real pairs that were sent; torch 2.9 would read only half of them
        return buffer.copy_(values[0]) if short else buffer

    return future.then(arrived)


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that it passes torch's checks, which reject annotations as text, and some hook names in some builds."""

    def call(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return call
