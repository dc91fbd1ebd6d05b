"""One optimizer under ZeRO: drives DeepSpeed's engine so that trainkit controls accumulation, clipping and gradients.

Gradients are reduced in one of two modes. *Streamed*: the hooks of each backward pass reduce a bucket as soon as it is full, so
no process keeps full gradients (stages 2 and 3). *Local*: each process keeps its gradients, as plain PyTorch does, and
`Engine.finish` reduces them once, in the same order on all processes, with zeros where a process has none (stage 1,
accumulation windows in which processes have different numbers of micro-batches, manual optimization, and several optimizers).
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
from trainkit.strategies.zero.swap import InMemory, Shard, gradient_partition, swapping

__all__ = ["Engine"]


class Engine:
    """DeepSpeed's engine of one optimizer.

    Args:
        session: the DeepSpeed session.
        module: the module that holds the parameters; in streamed mode the engine runs its forward.
        optimizer: the user's optimizer, which keeps its groups and parameters. DeepSpeed steps its `Shadow`.
        config: the DeepSpeed configuration.
        local: always reduce gradients in local mode.
        scale: the loss scale.

    Attributes:
        shadow: the optimizer that DeepSpeed steps.
        order: hash of the order of gradients in the accumulation window; it must be the same on all processes.
        module: the module.
        clip: maximum gradient norm in the next optimizer step; `None`: no clipping.
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
        with quiet(), checked(), self.shadow.class_hidden():
            self._engine, *_ = session.package.initialize(model=module, optimizer=self.shadow.inner, config=config)
        self.zero: Any = self._engine.optimizer
        self.zero.torch_autocast_gradscaler = None  # no checkpoint would contain this loss scale of DeepSpeed
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
        self._complete = False  # the last backward pass has passed all gradients on to the optimizer
        self._order: list[tuple[Any, ...]] = []  # calls that reduce a gradient, in the current backward pass
        self._last_order: list[tuple[Any, ...]] = []
        self._seen: set[int] = set()  # ids of the parameters with gradients in this accumulation window
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self.order = 0
        self._reduce = self._intercept()
        self.zero._coalesce_grad_reduction = local

    def _intercept(self) -> Callable[..., Any]:
        """Record the order in which gradients are reduced, and pass the gradient norm to DeepSpeed once it is known."""
        zero = self.zero
        name = "reduce_ready_partitions_and_remove_grads" if self.stage == 3 else "process_gradients"
        reduce: Callable[..., Any] = getattr(zero, name)

        def recorded(*call: Any) -> None:
            self._order.append(call)
            reduce(*call)

        setattr(zero, name, recorded)
        if self.stage == 3:
            self._norms = zero._get_norm_groups
            zero._get_norm_groups = lambda: [self._norm_for_step()]
        else:
            self._norms = zero.scaled_global_norm
            zero.scaled_global_norm = self._norm_for_step
        return reduce

    @property
    def flats(self) -> list[Tensor]:
        """This process's shards of the master weights, one per parameter group or sub-group."""
        zero, three = self.zero, "fp32_partitioned_groups_flat"
        found: list[Tensor] = getattr(zero, three) if hasattr(zero, three) else zero.single_partition_of_fp32_groups
        return found

    def shard(self, number: int, first: int, last: int, slot: str | None = None) -> Shard:
        """A range of this process's shard of the master weights, or of their optimizer state `slot`."""
        flat = self.flats[number]
        tensor = flat if slot is None else self.shadow.inner.state[flat][slot]
        if self._swap is not None and self._swap.has(number):
            return self._swap.shard(tensor, number, first, last)
        return InMemory(tensor, first, last)

    @contextmanager
    def resident(self, number: int) -> Iterator[None]:
        """Context manager that keeps a shard without optimizer state in memory; afterwards new state is offloaded with it."""
        if self._swap is not None and self._swap.has(number):
            with self._swap.resident(number):
                yield
        else:
            yield

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the optimizer trains."""
        return self._parameters

    def before_backward(self) -> None:
        """Called in local mode before a backward pass that may add to this engine's gradients."""
        if self._finished:
            self.discard()
        self._finished, self._norm, self._begun = False, None, True

    def begin_window(self, uneven: bool) -> None:
        """Begin an accumulation window; drop the gradients of one that ended without an optimizer step.

        Raises:
            OptimizerError: the trainable parameters have changed since the engine was created.
        """
        self.shadow.refuse_changes()
        if self._begun:
            self.discard()
        self._local = self._always_local or (uneven and self.stage < 3)
        self.zero._coalesce_grad_reduction = self._local
        self._begun, self._finished, self._complete, self._norm, self.clip = True, False, False, None, None
        self._seen.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, before a backward pass."""
        if self._local and self.stage < 3:
            return self.module(*args, **kwargs)
        return self._engine(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward without a backward pass."""
        return self._engine(*args, **kwargs) if self.stage == 3 else self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, first: bool, full: bool, call: Callable[..., Any] = Tensor.backward, **kwargs: Any
    ) -> None:
        """Run the backward pass of a loss that is already scaled for gradient accumulation.

        Args:
            loss: a scalar.
            first: whether this is the first micro-batch of its accumulation window.
            full: whether this is the last one.
            call: in local mode, what runs the backward pass.
            **kwargs: in streamed mode only `retain_graph`.
        """
        if self._local:
            call(self.zero.scale_if_loss(loss), **kwargs)
            self._accumulate_local()
            return
        unknown = kwargs.keys() - {"retain_graph"}
        if unknown:
            raise ConfigurationError(
                f"backward({', '.join(sorted(unknown))}=...) is not supported where ZeRO reduces gradients during the "
                "backward pass. Call backward(loss), or use manual optimization, strategy='zero1' or 'ddp'."
            )
        with self._collectives:
            self._engine.set_gradient_accumulation_boundary(self._completes(first, full))
            self._engine.backward(loss, scale_wrt_gas=False, **kwargs)
            self._after_pass(first)

    def backward_zero_gradients(self, loss: Tensor | None, first: bool, full: bool) -> None:
        """Participate in the collectives of a backward pass, with zero gradients.

        Args:
            loss: a loss with weight 0, which may be NaN; `None`: there is no loss.
            first: whether this is the first micro-batch of its accumulation window.
            full: whether this is the last one.

        Raises:
            LossError: there is no loss, and this process needs one to run the same collectives as the other processes.
        """
        if self._local:
            return
        if loss is not None:
            with self._zero_gradients():
                self.backward(loss, first, full)
            return
        if self.stage == 3 or not self._last_order:
            raise LossError(
                f"training_step returned no loss. Under ZeRO-{self.stage} every process must run the backward pass, because "
                "the other processes wait for its gradients. Return a loss in every step; to skip a batch, give it weight 0 "
                "with batch_weight (its loss may then be NaN). Or use strategy='zero1' or 'ddp'."
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
        """Whether the next backward pass completes the gradients of the accumulation window.

        With offload, DeepSpeed would complete only the parameters of that pass. So `finish` completes them later, unless
        the accumulation window has only one pass.
        """
        self._order = []
        self._complete = full and (first or not self._offloaded)
        return self._complete

    @contextmanager
    def _zero_gradients(self) -> Iterator[None]:
        """Context manager in which a backward pass computes zero gradients, even if the loss is NaN."""
        handles = [parameter.register_hook(torch.zeros_like) for parameter in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _accumulate_local(self) -> None:
        """Accumulate the gradients of a backward pass in local mode."""
        if self.stage < 3:
            self.zero.backward_epilogue()  # stage 1 in bfloat16 accumulates gradients in float32

    def _after_pass(self, first: bool) -> None:
        self._last_order = self._order
        places = tuple(self._places.get(id(call[0]), -1) for call in self._order)
        self.order = hash((0 if first else self.order, places))
        self._seen.update(id(call[0]) for call in self._order)
        if first and len(self._seen) < len(self._parameters):
            # DeepSpeed overwrites a gradient in the first pass of an accumulation window and adds to it in later passes. If a
            # parameter has no gradient in the first pass, it would add to the gradient of the previous window, or use it
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
        """Complete the gradients of the accumulation window. Further calls do nothing. Collective in local mode."""
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
        """Reduce the local gradients, with zeros where a process has none."""
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
        """Copy the gradients of the accumulation window to the optimizer, with zeros for parameters without gradients."""
        zero, unseen = self.zero, self._unseen()
        if self.stage == 3:
            missing = {parameter.ds_id for parameter in unseen if self._has_elements(parameter)}  # type: ignore[attr-defined]
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

    def _has_elements(self, parameter: Any) -> bool:
        """Whether this process's shard of a stage 3 parameter is more than padding."""
        rank = self.zero._get_param_partition_rank(parameter)
        return bool(parameter.partition_numel() * rank < parameter.ds_numel)

    def norm(self) -> Tensor:
        """The unscaled 2-norm of the gradients over all processes; infinite if a gradient is not finite.

        The first call in an accumulation window is collective.
        """
        return self._scaled_norm() / self._scale.value

    def _norm_for_step(self) -> Tensor:
        """The norm for clipping in DeepSpeed; 0 if it is not finite, because DeepSpeed would then silently skip the optimizer
        step. `NonFiniteGuard` handles gradients that are not finite.
        """
        norm = self._scaled_norm()
        return torch.where(torch.isfinite(norm), norm, 0.0)

    def _scaled_norm(self) -> Tensor:
        if self._norm is None:
            self.finish()
            with self._collectives:
                found = self._norms()
            groups = [torch.as_tensor(one, dtype=torch.float32) for one in (found if isinstance(found, list) else [found])]
            norms = torch.stack([torch.where(one < 0, torch.inf, one) for one in groups])  # DeepSpeed's -1: not finite
            self._norm = torch.linalg.vector_norm(norms)
        return self._norm

    def step(self) -> bool:
        """Run the optimizer step; returns whether the parameters were updated."""
        self.finish()
        scale = self._scale.value
        if not self._scale.allows(self._scaled_norm):
            self.discard()
            return False
        self.zero.custom_loss_scaler, self.zero.external_loss_scale = True, scale  # DeepSpeed unscales by it
        self.shadow.copy_options()
        self.zero.clip_grad = self.clip or 0.0
        with self._collectives:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.step()
        self.zero.custom_loss_scaler = False  # else DeepSpeed would scale losses by it
        self._begun = self._finished = False
        self._norm = self.clip = None
        self._scale.factor = 1.0
        updated: bool = self._engine.was_step_applied()
        self.shadow.after_step()
        return updated

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the accumulation window, which its step or `discard` ends."""
        self._scale.factor *= factor

    def discard(self) -> None:
        """Drop the gradients of the accumulation window."""
        zero = self.zero
        self._begun, self._scale.factor = False, 1.0
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
        """Remove DeepSpeed from the module and copy its parameters out of DeepSpeed's buffers."""
        with quiet():
            self._engine.destroy()
        for parameter, names in self._before:
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
            if self.stage < 3:
                parameter.data = parameter.data.clone()
                parameter.grad = None
