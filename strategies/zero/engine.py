"""The optimizers that step together under ZeRO: drives DeepSpeed's engine so that trainkit controls accumulation and clipping.

Gradients are reduced in one of two modes. *Streamed*: the hooks of each backward pass reduce a bucket as soon as it is full, so
no process keeps full gradients (stages 2 and 3). *Local*: each process keeps its gradients, as plain PyTorch does, and
`TrainingEngine.finish` reduces them once, in the same order on all processes, with zeros where a process has none (stage 1,
accumulation windows in which processes have different numbers of micro-batches, and manual optimization).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.prepared_models import Wrapped
from trainkit.data.micro_batches import MicroBatch
from trainkit.distributed.world import Pending, World
from trainkit.errors import ConfigurationError, LossError, ModuleError, OptimizerError
from trainkit.precision import Precision
from trainkit.strategies.zero.deepspeed_api import Session, quiet
from trainkit.strategies.zero.nvme import InMemory, Shard, disk_checks, gradient_partition, swapping
from trainkit.strategies.zero.optimizer_adapter import Shadow
from trainkit.strategy import Strategy

__all__ = ["EngineWindow", "EvaluationEngine", "LossScale", "StepModule", "TrainingEngine", "ZeROModel", "module_with"]


class TrainingEngine:
    """DeepSpeed's engine of one optimizer, or of several that step together.

    Args:
        module: The module that holds the parameters; in streamed mode the engine runs its forward.
        optimizers: The user's optimizers, which keep their groups and parameters. DeepSpeed steps their `Shadow`.
        local: Always reduce gradients in local mode.
        scale: The loss scale.

    Attributes:
        shadow: The optimizer that DeepSpeed steps.
        order: Hash of the order of gradients in the accumulation window; it must be the same on all processes.
        clip: Maximum gradient norm in the next optimizer step; `None`: no clipping.
    """

    def __init__(
        self,
        session: Session,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        config: dict[str, Any],
        *,
        local: bool,
        scale: LossScale,
    ) -> None:
        self.shadow = Shadow(optimizers)
        self.module = module
        self._scale = scale
        self._collectives = session.collectives
        before = [(parameter, set(vars(parameter))) for parameter in module.parameters()]
        with quiet(), disk_checks(), self.shadow.class_hidden():
            self._deepspeed_engine, *_ = session.package.initialize(model=module, optimizer=self.shadow.inner, config=config)
        self.zero: Any = self._deepspeed_engine.optimizer
        self.zero.torch_autocast_gradscaler = None  # no checkpoint would contain this loss scale of DeepSpeed
        self._swap = swapping(self.zero)
        zero_config = config["zero_optimization"]
        self.stage: int = zero_config["stage"]
        for number, flat in enumerate(self.flats):
            if self.shadow.begins_with_state(self.group_of(number)):
                with self.resident(number):
                    self.shadow.make_state(self.group_of(number), flat)
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
        self._positions = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        self.order = 0
        self._reduce = self._intercept()
        self.zero._coalesce_grad_reduction = local

    def _intercept(self) -> Callable[..., Any]:
        """Record the order in which gradients are reduced, and pass the gradient norm to DeepSpeed once it is known."""
        zero = self.zero
        name = "reduce_ready_partitions_and_remove_grads" if self.stage == 3 else "process_gradients"
        reduce: Callable[..., Any] = getattr(zero, name)

        def record(*call: Any) -> None:
            self._order.append(call)
            reduce(*call)

        setattr(zero, name, record)
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
        flats: list[Tensor] = getattr(zero, three) if hasattr(zero, three) else zero.single_partition_of_fp32_groups
        return flats

    def group_of(self, number: int) -> int:
        """The parameter group of a flat shard: stage 3 has several for a large group."""
        return int(self.zero.sub_group_to_group_id[number]) if self.stage == 3 else number

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
        self._finished = False
        self._norm = None
        self._begun = True

    def begin_window(self, uneven: bool) -> None:
        """Begin an accumulation window; drop the gradients of one that ended without an optimizer step.

        Raises:
            OptimizerError: The trainable parameters have changed since the engine was created.
        """
        self.shadow.refuse_changes()
        if self._begun:
            self.discard()
        self._local = self._always_local or (uneven and self.stage < 3)
        self.zero._coalesce_grad_reduction = self._local
        self._begun = True
        self._finished = self._complete = False
        self._norm = self.clip = None
        self._seen.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, before a backward pass."""
        if self._local and self.stage < 3:
            return self.module(*args, **kwargs)
        return self._deepspeed_engine(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward without a backward pass."""
        return self._deepspeed_engine(*args, **kwargs) if self.stage == 3 else self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, first: bool, full: bool, call: Callable[..., Any] = Tensor.backward, **kwargs: Any
    ) -> None:
        """Run the backward pass of a loss that is already scaled for gradient accumulation.

        Args:
            loss: A scalar.
            first: Whether this is the first micro-batch of its accumulation window.
            full: Whether this is the last one.
            call: In local mode, what runs the backward pass.
            **kwargs: In streamed mode only `retain_graph`.
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
            self._deepspeed_engine.set_gradient_accumulation_boundary(self._completes(first, full))
            self._deepspeed_engine.backward(loss, scale_wrt_gas=False, **kwargs)
            self._after_pass(first)

    def backward_zero_gradients(self, loss: Tensor | None, first: bool, full: bool) -> None:
        """Participate in the collectives of a backward pass, with zero gradients.

        Args:
            loss: A loss with weight 0, which may be NaN; `None`: there is no loss.
            first: Whether this is the first micro-batch of its accumulation window.
            full: Whether this is the last one.
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
        positions = tuple(self._positions.get(id(call[0]), -1) for call in self._order)
        self.order = hash((0 if first else self.order, positions))
        self._seen.update(id(call[0]) for call in self._order)
        if first and len(self._seen) < len(self._parameters):
            # DeepSpeed overwrites a gradient in the first pass of an accumulation window and adds to it in later passes. If a
            # parameter has no gradient in the first pass, it would add to the gradient of the previous window, or use it
            for parameter in self._find_unseen():
                self._forget_gradient(parameter)

    def has_gradient(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a backward pass of the accumulation window, on this process, has reached one of these parameters."""
        self.finish()
        return any(id(parameter) in self._seen for parameter in parameters)

    def _find_unseen(self) -> list[Tensor]:
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
                    else:
                        self._seen.add(id(parameter))
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
                    else:
                        self._seen.add(id(parameter))
                    zero.reduce_ready_partitions_and_remove_grads(parameter, index)
            zero.overlapping_partition_gradients_reduce_epilogue()
        zero._coalesce_grad_reduction = self._local

    def _finish_offloaded(self) -> None:
        """Copy the gradients of the accumulation window to the optimizer, with zeros for parameters without gradients."""
        zero, unseen = self.zero, self._find_unseen()
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
        return self._compute_scaled_norm() / self._scale.value

    def _norm_for_step(self) -> Tensor:
        """The norm for clipping in DeepSpeed; 0 if it is not finite, because DeepSpeed would then silently skip the optimizer
        step. `NonFiniteGuard` handles gradients that are not finite.
        """
        norm = self._compute_scaled_norm()
        return torch.where(torch.isfinite(norm), norm, 0.0)

    def _compute_scaled_norm(self) -> Tensor:
        if self._norm is None:
            self.finish()
            with self._collectives:
                norms_or_norm = self._norms()
            norms = norms_or_norm if isinstance(norms_or_norm, list) else [norms_or_norm]
            groups = [torch.as_tensor(norm, dtype=torch.float32) for norm in norms]
            # DeepSpeed returns -1 for a norm that is not finite.
            self._norm = torch.linalg.vector_norm(torch.stack([torch.where(norm < 0, torch.inf, norm) for norm in groups]))
        return self._norm

    def step(self) -> bool:
        """Run the optimizer step; returns whether the parameters were updated."""
        self.finish()
        scale = self._scale.value
        if not self._scale.allows(self._compute_scaled_norm):
            self.discard()
            return False
        self.zero.custom_loss_scaler = True
        self.zero.external_loss_scale = scale  # DeepSpeed unscales by it.
        self.shadow.copy_options()
        self.zero.clip_grad = self.clip or 0.0
        with self._collectives:
            self._deepspeed_engine.set_gradient_accumulation_boundary(True)
            self._deepspeed_engine.step()
        self.zero.custom_loss_scaler = False  # Otherwise DeepSpeed would scale losses by it.
        self._begun = self._finished = False
        self._norm = self.clip = None
        self._scale.factor = 1.0
        updated: bool = self._deepspeed_engine.was_step_applied()
        self.shadow.after_step()
        return updated

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the accumulation window, which its step or `discard` ends."""
        self._scale.factor *= factor

    def discard(self) -> None:
        """Drop the gradients of the accumulation window."""
        zero = self.zero
        self._begun = False
        self._scale.factor = 1.0
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
            self._deepspeed_engine.destroy()
        for parameter, names in self._before:
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
            if self.stage < 3:
                parameter.data = parameter.data.clone()
                parameter.grad = None


# ---------------------------------------------------------------------------------------------- the accumulation window


class EngineWindow:
    """Tracks the current accumulation window of an engine.

    Args:
        engine: The engine that reduces the gradients.
        strategy: The strategy, whose `micro_batch` is the current one.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: TrainingEngine, strategy: Strategy, world: World) -> None:
        self.engine = engine
        self._strategy = strategy
        self._world = world
        self._begun = self._had_loss = False
        self._last_order = 0  # gradient order of the previous accumulation window
        self._pending: Pending | None = None  # all-reduce of whether any process had a loss

    def step(self, *args: Any) -> Any:
        """Run `training_step` in the engine's forward, once per micro-batch."""
        if self._strategy.micro_batch.first:
            self._begin()
        if self.engine.stage < 3:
            return self.engine.forward(*args)
        with self._world.collectives:  # the forward gathers parameters
            return self.engine.forward(*args)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's forward in the user's own training loop, which may call it several times per micro-batch."""
        if not torch.is_grad_enabled():
            return self.engine.evaluate(*args, **kwargs)
        if not self._begun and self._strategy.micro_batch.first:
            self._begin()
        return self.engine.forward(*args, **kwargs)

    def _begin(self) -> None:
        self.engine.begin_window(self._strategy.micro_batch.uneven)
        self._begun = True
        self._had_loss = False
        self._last_order = self.engine.order

    def backward(self, loss: Tensor, micro: MicroBatch, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch."""
        self._had_loss = True
        self.end(micro)
        self.engine.backward(loss, micro.first, micro.last, **kwargs)

    def skip(self, loss: Tensor | None, micro: MicroBatch) -> None:
        """Called instead of `backward` if there is no loss, or one with weight 0."""
        if not self._begun:
            self._begin()
        self._had_loss = self._had_loss or loss is not None
        self.end(micro)
        if self._world.size > 1:
            self.engine.backward_zero_gradients(loss, micro.first, micro.last)

    def end(self, micro: MicroBatch) -> None:
        """At the last micro-batch of an accumulation window, start to all-reduce whether any rank had a loss."""
        if micro.last:
            self._begun = False
            if self._world.size > 1:
                order = self._last_order  # compared in the same all-reduce, which overlaps the gradient reduction
                self._pending = self._world.begin_largest([self._had_loss, order, -order])

    def any_loss(self) -> bool:
        """Whether any process had a loss in the accumulation window that has just ended."""
        if self._pending is not None:
            had_loss, largest, smallest = self._pending.wait()
            self._had_loss = bool(had_loss)
            self._pending = None
            if largest != -smallest:
                raise ModuleError(
                    "in the previous optimizer step the processes computed gradients in different orders. "
                    f"ZeRO-{self.engine.stage} reduces gradients in that order, so it summed gradients of different "
                    "parameters. Run the same layers in the same order on all processes, or use strategy='zero1' or 'ddp'. "
                    "Resume from a checkpoint saved before that step."
                )
        return self._had_loss


class LossScale:
    """The loss scale of one engine's gradients.

    Args:
        precision: The precision, whose scaler, if it has one, scales the losses before the backward pass.
        device: The device of the gradient norm.

    Attributes:
        factor: What the true gradients are multiplied by.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self.factor = 1.0
        self._norm = nn.Parameter(torch.zeros((), device=device))
        # the scaler steps this optimizer, which changes nothing
        self._optimizer = torch.optim.SGD([self._norm], lr=0.0)

    @property
    def value(self) -> float:
        """The factor by which the gradients of this accumulation window are scaled."""
        scaler = self._precision.scaler
        return (1.0 if scaler is None else float(scaler.get_scale())) / self.factor

    def allows(self, norm: Callable[[], Tensor]) -> bool:
        """Whether to run the optimizer step: `False` if the scaled norm is not finite. Also updates the scale.

        Args:
            norm: Returns the scaled gradient norm; called only if there is a scaler.
        """
        if self._precision.scaler is None:
            return True
        self._norm.grad = norm().to(self._norm, copy=True)
        return self._precision.optimizer_step(self._optimizer)


class EvaluationEngine:
    """Runs the forward of a module with sharded parameters, which it gathers when they are needed.

    Args:
        module: The module to run; its parameters are sharded.
    """

    def __init__(self, session: Session, module: nn.Module, config: dict[str, Any]) -> None:
        with quiet(), disk_checks():
            self._deepspeed_engine, *_ = session.package.initialize(model=module, config=config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self._deepspeed_engine(*args, **kwargs)

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the module."""
        with quiet():
            self._deepspeed_engine.destroy()


# ---------------------------------------------------------------------------------------- the modules that engines wrap


class StepModule(nn.Module):
    """Wraps the user's module; its forward calls one of the module's steps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Returns `run(*args)`."""
        return run(*args)


class ZeROModel(Wrapped):
    """Wraps the user's model in their own training loop.

    Attributes:
        call: Called instead of the module; `None` before the engine exists, when the module itself is called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.call: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the user's model."""
        return (self.module if self.call is None else self.call)(*args, **kwargs)


def module_with(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> nn.Module:
    """Returns a module with exactly these parameters, made of the largest submodules of `modules` that have no others."""
    keys = {id(parameter) for parameter in parameters}
    parts: list[nn.Module] = []
    for module in modules:
        _collect(module, keys, parts)
    missing = keys - {id(parameter) for part in parts for parameter in part.parameters() if parameter.requires_grad}
    if missing:
        raise OptimizerError(
            f"{len(missing)} of the {len(keys)} parameters of an optimizer are in no layer whose parameters are all "
            "in that optimizer. With several optimizers, ZeRO needs all parameters of a layer in the same optimizer: "
            "torch.optim.AdamW(self.generator.parameters())."
        )
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def _collect(module: nn.Module, keys: set[int], parts: list[nn.Module]) -> None:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not any(id(parameter) in keys for parameter in trained):
        return
    if all(id(parameter) in keys for parameter in trained):
        parts.append(module)
        return
    for child in module.children():
        _collect(child, keys, parts)
