"""One optimizer under ZeRO: DeepSpeed's engine, driven so that the window, the clipping and the gradients are ours.

Gradients are reduced in one of two ways. *Streamed*: in the hooks of each backward pass, a bucket as soon as it is full, so
that no process keeps whole gradients (stages 2 and 3). *Local*: each process keeps its gradients, as plain torch does, and
:meth:`Engine.finish` reduces them once, in one order on all processes, zeros where a process has none (stage 1, windows in
which processes have different numbers of micro-batches, and optimizers that the user steps himself).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import ConfigurationError, LossError
from trainkit.strategies.zero.aio import checked
from trainkit.strategies.zero.deepspeed_api import Session, quiet
from trainkit.strategies.zero.loss_scale import LossScale
from trainkit.strategies.zero.optimizer_adapter import Shadow
from trainkit.strategies.zero.swap import InMemory, Part, gradient_partition, swapping

__all__ = ["Engine"]


class Engine:
    """DeepSpeed's engine of one optimizer.

    Args:
        session: DeepSpeed.
        module: holds the parameters, and in the streamed way computes what is learnt from.
        optimizer: the user's, which keeps its groups and its parameters; what is stepped is its :class:`Shadow`.
        config: DeepSpeed's.
        local: gradients are always reduced in the local way.
        scale: of the losses whose gradients these are.

    Attributes:
        shadow: what DeepSpeed steps.
        order: a number that stands for the order in which the gradients of a window have come; of all processes the same.
        module: as given.
        clip: the largest norm of the gradients in the update to come; ``None``: any.
    """

    def __init__(
        self,
        session: Session,
        module: nn.Module,
        optimizer: Optimizer,
        config: dict[str, Any],
        *,
        local: bool,
        scale: LossScale,
    ) -> None:
        self.shadow, self.module, self._scale = Shadow(optimizer), module, scale
        self._collectives = session.collectives
        before = [(parameter, set(vars(parameter))) for parameter in module.parameters()]
        with quiet(), checked(), self.shadow.handed_over():
            self._engine, *_ = session.package.initialize(model=module, optimizer=self.shadow.inner, config=config)
        self.zero: Any = self._engine.optimizer
        self.zero.torch_autocast_gradscaler = None  # a scale of DeepSpeed's own, which no checkpoint would have
        self._swap = swapping(self.zero)
        for number, flat in enumerate(self.flats if self.shadow.begins_with_state else ()):
            with self.resident(number):
                self.shadow.make_state(flat)
        zero_config = config["zero_optimization"]
        self.stage: int = zero_config["stage"]
        self._offloaded = bool(zero_config.get("offload_optimizer"))
        self._before = before
        self._parameters = self.shadow.parameters
        self._always_local = local
        self.clip: float | None = None
        self._norm: Tensor | None = None
        self._finished = self._begun = False
        self._local = local
        self._complete = False  # a backward pass has been told that it is the last one, and gradients are where they belong
        self._order: list[tuple[Any, ...]] = []  # the calls that reduce a gradient, of the backward pass that is under way
        self._last_order: list[tuple[Any, ...]] = []
        self._seen: set[int] = set()  # ids of the parameters that the window has gradients of
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self.order = 0
        self._reduce = self._intercept()
        self.zero._coalesce_grad_reduction = local

    def _intercept(self) -> Callable[..., Any]:
        """Note which gradients are reduced, in which order, and give DeepSpeed the norm that is known already."""
        zero = self.zero
        name = "reduce_ready_partitions_and_remove_grads" if self.stage == 3 else "process_gradients"
        reduce: Callable[..., Any] = getattr(zero, name)

        def noted(*call: Any) -> None:
            self._order.append(call)
            reduce(*call)

        setattr(zero, name, noted)
        if self.stage == 3:
            self._norms = zero._get_norm_groups
            zero._get_norm_groups = lambda: [self._norm_for_step()]
        else:
            self._norms = zero.scaled_global_norm
            zero.scaled_global_norm = self._norm_for_step
        return reduce

    @property
    def flats(self) -> list[Tensor]:
        """This process's partitions of the masters, one for each group or part of one."""
        zero, three = self.zero, "fp32_partitioned_groups_flat"
        found: list[Tensor] = getattr(zero, three) if hasattr(zero, three) else zero.single_partition_of_fp32_groups
        return found

    def part(self, number: int, first: int, last: int, slot: str | None = None) -> Part:
        """A range of this process's partition of the masters, or of the optimizer's state ``slot`` for them."""
        flat = self.flats[number]
        tensor = flat if slot is None else self.shadow.inner.state[flat][slot]
        if self._swap is not None and self._swap.has(number):
            return self._swap.part(tensor, number, first, last)
        return InMemory(tensor, first, last)

    @contextmanager
    def resident(self, number: int) -> Iterator[None]:
        """Within it a partition without optimizer state is in memory; state that it gets goes where it belongs."""
        if self._swap is not None and self._swap.has(number):
            with self._swap.resident(number):
                yield
        else:
            yield

    @property
    def parameters(self) -> list[Tensor]:
        """Those that the optimizer trains."""
        return self._parameters

    def touched(self) -> None:
        """A backward pass comes that may be its parameters', in the local way: what was complete is so no more."""
        if self._finished:
            self.discard()
        self._finished, self._norm, self._begun = False, None, True

    def begin_window(self, uneven: bool) -> None:
        """Before the first forward of a window: what is left of one that made no update is dropped.

        Raises:
            OptimizerError: other parameters are to be trained than when the engine was made.
        """
        self.shadow.refuse_changes()
        if self._begun:
            self.discard()
        self._local = self._always_local or (uneven and self.stage < 3)
        self.zero._coalesce_grad_reduction = self._local
        self._begun, self._finished, self._complete, self._norm, self.clip = True, False, False, None, None
        self._seen.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, so that a backward pass may follow."""
        if self._local and self.stage < 3:
            return self.module(*args, **kwargs)
        return self._engine(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, after which no backward pass comes."""
        return self._engine(*args, **kwargs) if self.stage == 3 else self.module(*args, **kwargs)

    def backward(self, loss: Tensor, first: bool, full: bool, **kwargs: Any) -> None:
        """The backward pass of a loss that is scaled to its share of the window.

        Args:
            loss: a scalar.
            first: it is the first micro-batch of its window.
            full: it is the last one.
            **kwargs: in the streamed way only ``retain_graph``.
        """
        if self._local:
            self.zero.scale_if_loss(loss).backward(**kwargs)
            self._keep()
            return
        unknown = kwargs.keys() - {"retain_graph"}
        if unknown:
            raise ConfigurationError(
                f"backward({', '.join(sorted(unknown))}=...) does not work where ZeRO reduces gradients as they come. Use "
                "manual optimization, or strategy='zero1' or 'ddp'."
            )
        with self._collectives:
            self._engine.set_gradient_accumulation_boundary(self._completes(first, full))
            self._engine.backward(loss, scale_wrt_gas=False, **kwargs)
            self._after_pass(first)

    def backward_of_nothing(self, loss: Tensor | None, first: bool, full: bool) -> None:
        """Take part in a backward pass of the others, with gradients of zero.

        Args:
            loss: counts for nothing, and may be NaN; ``None``: there is none.
            first: it is the first micro-batch of its window.
            full: it is the last one.

        Raises:
            LossError: there is no loss, and without one this process cannot do what the others do.
        """
        if self._local:
            return
        if loss is not None:
            with self._masked():
                self.backward(loss, first, full)
            return
        if self.stage == 3 or not self._last_order:
            raise LossError(
                f"training_step returned no loss under ZeRO-{self.stage}, where the other processes wait for the gradients of "
                "this one parameter by parameter. Return a loss at every step, and give a batch that shall not count the "
                "weight 0 (batch_weight); it may be NaN then. Or use strategy='zero1' or 'ddp'."
            )
        with self._collectives:
            self.zero.clear_backward_seen_flag()
            self.zero.set_gradient_accumulation_boundary(self._completes(first, full))
            for parameter, *rest in list(self._last_order):
                parameter.grad = torch.zeros_like(parameter)
                self.zero.process_gradients(parameter, *rest)
            self.zero.overlapping_partition_gradients_reduce_epilogue()
            self._after_pass(first)

    def _completes(self, first: bool, full: bool) -> bool:
        """Whether the pass that comes is to bring the window's gradients to where they belong.

        Where they are offloaded DeepSpeed would do so for the parameters of that pass alone, so it is told to do it later,
        unless there is no other pass.
        """
        self._order = []
        self._complete = full and (first or not self._offloaded)
        return self._complete

    @contextmanager
    def _masked(self) -> Iterator[None]:
        """Within it all gradients are zero, whatever the loss is."""
        handles = [parameter.register_hook(torch.zeros_like) for parameter in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self) -> None:
        """After a backward pass in the local way."""
        if self.stage < 3:
            self.zero.backward_epilogue()  # stage 1 in bfloat16 adds gradients up in float32

    def _after_pass(self, first: bool) -> None:
        self._last_order = self._order
        places = tuple(self._places.get(id(call[0]), -1) for call in self._order)
        self.order = hash((0 if first else self.order, places))
        self._seen.update(id(call[0]) for call in self._order)
        if first and len(self._seen) < len(self._parameters):
            # DeepSpeed overwrites gradients in a window's first pass and adds to them in later ones: without a first one it
            # would add to, or even use, what was there before
            for parameter in self._unseen():
                self._forget_gradient(parameter)

    def _unseen(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters if id(parameter) not in self._seen]

    def _forget_gradient(self, parameter: Tensor) -> None:
        if self.stage == 3:
            gradient_partition(self.zero, parameter).zero_()
        elif self._offloaded:
            self.zero.accumulated_grads_in_cpu.pop(self.zero.get_param_id(parameter), None)

    def finish(self) -> None:
        """Make the gradients of the window complete; at most once, more calls do nothing. Collective in the local way."""
        if self._finished:
            return
        self._finished = True
        with self._collectives:
            if self._local:
                self._reduce_all()
            elif self._offloaded:
                self._finish_offloaded()
            elif self.stage < 3 and not self._complete:  # the last micro-batch had no loss
                self.zero.finalize_gradient_accumulation_boundary()

    def _reduce_all(self) -> None:
        """Reduce the gradients that the processes have kept, zeros where one has none."""
        zero = self.zero
        zero._coalesce_grad_reduction = False
        zero.set_gradient_accumulation_boundary(True)
        if self.stage == 3:
            for group in zero.fp16_groups:
                for parameter in group:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)
                    self._reduce(parameter)
            zero.independent_gradient_partition_epilogue()
        else:
            zero.setup_buckets()
            for index, group in enumerate(zero.bit16_groups):
                for parameter in group:
                    if zero.get_gradient_for_reduction(parameter) is None:
                        slot = "grad_accum" if zero.use_grad_accum_attribute else "grad"
                        dtype = zero.gradient_accumulation_dtype if zero.use_grad_accum_attribute else parameter.dtype
                        setattr(parameter, slot, torch.zeros_like(parameter, dtype=dtype))
                    zero.reduce_ready_partitions_and_remove_grads(parameter, index)
            zero.overlapping_partition_gradients_reduce_epilogue()
        zero._coalesce_grad_reduction = self._local

    def _finish_offloaded(self) -> None:
        """Bring the window's gradients to where the optimizer is, zeros for parameters that got none."""
        zero, unseen = self.zero, self._unseen()
        if self.stage == 3:
            missing = {parameter.ds_id for parameter in unseen if self._is_real(parameter)}  # type: ignore[attr-defined]
            zero._offload_boundary_param_ids = missing if self._complete else zero._offload_boundary_param_ids | missing
            if zero._offload_boundary_param_ids:
                zero.finalize_gradient_accumulation_boundary()
            return
        if not self._complete:
            zero.finalize_gradient_accumulation_boundary()
        for parameter in unseen:
            index = zero.grad_position.get(zero.get_param_id(parameter))
            if index is not None and zero.is_param_in_current_partition[zero.get_param_id(parameter)]:
                group, _, offset, count = index
                zero.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, count).zero_()

    def _is_real(self, parameter: Any) -> bool:
        """Whether this process has a part of a parameter of stage 3 that is not all padding."""
        rank = self.zero._get_param_partition_rank(parameter)
        return bool(parameter.partition_numel() * rank < parameter.ds_numel)

    def norm(self) -> Tensor:
        """The 2-norm of the window's gradients over all processes, without the loss scale; collective the first time.

        Where a gradient is not finite it is infinite.
        """
        return self._scaled_norm() / self._scale.value

    def _norm_for_step(self) -> Tensor:
        """What DeepSpeed clips by. It would leave out an update whose gradients are not finite, and tell nobody: that is for
        ``NonFiniteGuard`` to do.
        """
        norm = self._scaled_norm()
        return torch.where(torch.isfinite(norm), norm, 0.0)

    def _scaled_norm(self) -> Tensor:
        if self._norm is None:
            self.finish()
            with self._collectives:
                found = self._norms()
            groups = [torch.as_tensor(one, dtype=torch.float32) for one in (found if isinstance(found, list) else [found])]
            norms = torch.stack([torch.where(one < 0, torch.inf, one) for one in groups])  # below 0: not finite
            self._norm = torch.linalg.vector_norm(norms)
        return self._norm

    def step(self) -> bool:
        """Update the parameters; returns whether that happened."""
        self.finish()
        scale = self._scale.value
        if not self._scale.allows(self._scaled_norm):
            self.discard()
            return False
        self.zero.custom_loss_scaler, self.zero.external_loss_scale = True, scale  # to be divided by
        self.shadow.take_options()
        self.zero.clip_grad = self.clip or 0.0
        with self._collectives:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.step()
        self.zero.custom_loss_scaler = False  # which DeepSpeed would multiply losses by
        self._begun = self._finished = False
        self._norm = self.clip = None
        updated: bool = self._engine.was_step_applied()
        self.shadow.stepped()
        return updated

    def discard(self) -> None:
        """Drop the gradients of the window."""
        zero = self.zero
        self._begun = False
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            zero._pre_step()
            zero._partition_all_parameters()
            zero.averaged_gradients = {}
        else:
            zero.micro_step_id = -1
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
        if self._offloaded:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()

    def close(self) -> None:
        """Take DeepSpeed off the module, whose parameters have memory of their own again."""
        with quiet():
            self._engine.destroy()
        for parameter, names in self._before:
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
            if self.stage < 3:
                parameter.data = parameter.data.clone()
                parameter.grad = None
