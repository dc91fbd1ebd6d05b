"""A module whose parameters `fully_shard` has sharded: it runs the module's methods, and can restore the whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainkit.console import notice, shortened
from trainkit.distributed.world import World
from trainkit.errors import ModuleError
from trainkit.strategies._reduction import broadcast
from trainkit.strategies.fsdp.fsdp_root import Root
from trainkit.strategies.fsdp.shards import Shards
from trainkit.strategies.fsdp.torch_internals import (
    allocate,
    drop_gradients,
    has_no_values,
    remove_fully_shard,
    without_forward_hooks,
)
from trainkit.strategies.fsdp.units import Slot, refuse_unshardable, slots

__all__ = ["ShardedModel"]


class ShardedModel:
    """Shards a module with torch's `fully_shard`.

    The steps: move a unit to the device with rank 0's values, shard it, then the next one. So at most one whole unit is on
    the device. Buffers and ignored parameters stay whole.

    Args:
        module: the user's module; parameters may be sharded over a tensor-parallel group already.
        units: the modules to shard by themselves, by name; only those inside of `module` count.
        ignored: parameters that are not sharded.
        device: the device of this process.
        world: the processes.
        options: arguments of `fully_shard`.
        devices: where each parameter is to be after the run.
        manual: under manual optimization, the user's code calls the module itself, and not `call`.

    Attributes:
        module: the user's module.
        units: the modules inside it that are sharded by themselves, by name.
        all_units: these, and the root.
        sharded: the sharded parameters.
        whole: the parameters that are whole on each rank.
        shards: where the parts of the sharded parameters lie.
    """

    def __init__(
        self,
        module: nn.Module,
        units: dict[str, nn.Module],
        ignored: set[nn.Parameter],
        device: torch.device,
        world: World,
        options: dict[str, Any],
        devices: Mapping[Slot, torch.device],
        manual: bool = False,
    ) -> None:
        inside = set(module.modules()) - {module}
        units = {name: unit for name, unit in units.items() if unit in inside}
        refuse_unshardable({**units, "": module}, ignored)
        self.module, self.units, self._device, self._world = module, units, device, world
        self._unit_modules = set(units.values())
        self._slots = list(slots(module))
        self._former = [devices[slot] for slot in self._slots]
        self._steps = None if manual else Root(module, self._slots_of(module))
        self._root: nn.Module = module if self._steps is None else self._steps
        self.all_units = (*units.values(), self._root)
        self._whole_in_forward: list[Tensor] = []  # the whole parameters that torch's forward uses; always the same objects
        self._gathered = False  # inside `gathered`, where the parameters are other ones
        self._syncs = True
        self._unreduced: list[Any] = []  # the parameters whose gradients the last window should have reduced
        with ExitStack() as undo:  # if one fails
            for unit in (*reversed(self.all_units[:-1]), self._root):  # blocks inside of blocks first
                self._shard(unit, ignored, options)
                undo.callback(remove_fully_shard, [unit])
            undo.pop_all()
        self._unfilled = allocate(self._root, torch.device("cpu") if _offloads(options) else device)
        distinct = list({id(p): p for owner, name in self._slots if (p := owner._parameters[name]) is not None}.values())
        self.sharded = [p for p in distinct if isinstance(p, DTensor)]
        self.whole = [p for p in distinct if not isinstance(p, DTensor)]
        self.shards = Shards(self.sharded, world)
        self._handles: list[Any] = []
        self._hook_units()

    def _slots_of(self, unit: nn.Module) -> list[Slot]:
        """The places of the parameters of a unit that belong to no unit inside it."""
        return list(slots(unit, self._unit_modules.__contains__))

    def _shard(self, unit: nn.Module, ignored: set[nn.Parameter], options: dict[str, Any]) -> None:
        """Move the own parameters of a unit to the device, with rank 0's values, and shard them."""
        found: dict[int, nn.Parameter] = {}
        for owner, name in self._slots_of(unit):
            parameter = owner._parameters[name]
            if parameter is not None and not parameter.is_meta and not isinstance(parameter, DTensor):
                found[id(parameter)] = parameter
        for parameter in found.values():
            parameter.data = parameter.data.to(self._device).contiguous()
        if self._world.size > 1:
            broadcast([parameter.data for parameter in found.values()])
        fully_shard(unit, ignored_params=ignored, **options)

    def _hook_units(self) -> None:
        set_unused = getattr(self._root, "set_reduce_scatter_unused_params", None)  # torch ≥ 2.13
        if set_unused is not None:
            set_unused(True)
        for unit in self.all_units:
            handles: list[Any] = []

            def collect(unit: nn.Module, *_: Any, handles: list[Any] = handles) -> None:
                if self._gathered:
                    return
                self._whole_in_forward += [p for o, n in self._slots_of(unit) if (p := o._parameters[n]) is not None]
                handles.pop().remove()

            handles.append(unit.register_forward_pre_hook(collect))  # after torch's own, which makes them whole
            self._handles += handles
            if self._steps is not None and unit is not self._root:
                self._handles.append(unit.register_forward_pre_hook(self._check_unit, prepend=True))
                self._handles.append(unit.register_forward_hook(self._steps.keep_outputs))

    def _check_unit(self, unit: nn.Module, args: Any) -> None:
        if self._steps is not None and not self._gathered:
            self._steps.check_unit(unit, args)

    # ------------------------------------------------------------------------------------------------------- running

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function while the parameters that belong to no unit are whole. Collective.

        Raises:
            ModuleError: a parameter or buffer from the meta device has no values.
        """
        if self._unfilled:
            self._check_filled()
        if self._steps is None:
            results = run(*args, **kwargs)
        else:
            with self._world.collectives:
                results, anchor = self._steps(run, *args, **kwargs)
            if anchor is not None:
                self._steps.outputs.append(anchor)
        if not torch.is_grad_enabled():
            self.reshard()
        return results

    @property
    def outputs(self) -> list[Tensor]:
        """Outputs at which a backward pass can begin if the results are not used, since `forget`."""
        return [] if self._steps is None else self._steps.outputs

    @property
    def forwards(self) -> int:
        """Number of forwards with gradients; 0 under manual optimization."""
        return 0 if self._steps is None else self._steps.forwards

    @property
    def has_run(self) -> bool:
        """Whether a forward has run since `forget`, with the collectives that other ranks wait for."""
        return self._steps is not None and bool(self.outputs) and (not self.units or self._steps.units_ran)

    def forget(self) -> None:
        """Forget the outputs of the forwards so far."""
        if self._steps is not None:
            self._steps.outputs, self._steps.units_ran = [], False

    def _check_filled(self) -> None:
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.reshard()
        empty = [name for name in self._unfilled if (tensor := named.get(name)) is not None and has_no_values(tensor)]
        if empty:
            shown = shortened(empty)
            raise ModuleError(
                f"{shown}: created on the meta device, and never filled with values. Load a checkpoint: ckpt_path=… of fit, "
                "validate, test or predict; or create it outside of torch.device('meta'). A buffer that no checkpoint contains "
                "(persistent=False) cannot be loaded."
            )
        self._unfilled = []

    @property
    def lent(self) -> set[int]:
        """The ids of the whole parameters that are in the places of sharded ones during a forward only."""
        return {id(p) for p in self._whole_in_forward} - {id(p) for p in self.whole}

    def reshard(self) -> None:
        """Free the whole parameters that no backward pass has freed: a later forward would not see new values."""
        for unit in self.all_units:
            unit.reshard()  # type: ignore[operator]

    def drop_gradients(self) -> None:
        """Drop the gradients that no backward pass has reduced."""
        for parameter in self._whole_in_forward:
            parameter.grad = None
        drop_gradients(self.all_units)

    def sync_gradients(self, syncs: bool) -> None:
        """Set whether the next backward pass reduces the gradients over the ranks."""
        if syncs != self._syncs:
            self._root.set_requires_gradient_sync(syncs)  # type: ignore[operator]
            self._syncs = syncs

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """A context for a backward pass, which may run forwards of units again."""
        if self._steps is not None:
            self._steps.in_backward = True
        try:
            yield
        finally:
            if self._steps is not None:
                self._steps.in_backward = False

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Within it a backward pass computes zero gradients. A zero gradient of the loss would not do: 0 × NaN is NaN."""
        with ExitStack() as masks:
            for parameter in {id(p): p for p in (*self._whole_in_forward, *self.whole)}.values():
                if parameter.requires_grad:
                    masks.enter_context(parameter.register_hook(torch.zeros_like))
            yield

    def note_unreduced(self) -> None:
        """At the end of a window, note the trained parameters without a reduced gradient, if the window has trained the model.

        Under manual optimization only those in units of which other parameters have one: a step may call some of the units.
        """
        missing = [p for p in self.sharded if p.grad is None and p.requires_grad]
        if missing and self._steps is None:
            reached = {id(parameter) for unit in self.all_units for parameter in self._reached(unit)}
            missing = [p for p in missing if id(p) in reached]
        elif missing and all(parameter.grad is None for parameter in (*self.sharded, *self._whole_in_forward)):
            missing = []  # the window has trained other models
        self._unreduced = missing

    def _reached(self, unit: nn.Module) -> list[Any]:
        """The parameters of a unit, if one of them has a reduced gradient."""
        own = [_parameter(slot) for slot in self._slots_of(unit)]
        return own if any(parameter.grad is not None for parameter in own) else []

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Check before an optimizer step that the gradients of its parameters were reduced in the last window.

        Raises:
            ModuleError: one was not.
        """
        if not self._unreduced:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        unreduced = {id(p) for p in self._unreduced if p.grad is None and id(p) in stepped}
        missing = [name for name, parameter in self.module.named_parameters() if id(parameter) in unreduced]
        if not missing:
            return
        shown = shortened(missing)
        raise ModuleError(
            f"the backward pass has reduced no gradient for {shown}. Expected a loss that depends on each trained parameter, "
            "and units and steps that return tensors, or lists, tuples, dicts or dataclasses of tensors. Freeze what is not "
            "used: parameter.requires_grad_(False)"
        )

    # ----------------------------------------------------------------------------------------------------- whole again

    @contextmanager
    def gathered(self, module: nn.Module, modified: bool) -> Iterator[None]:
        """Within it a part of the module has whole parameters on all ranks. Collective.

        Args:
            module: the part.
            modified: keep rank 0's changes.
        """
        self.reshard()
        inside: dict[Slot, Any] = {slot: p for slot in slots(module) if isinstance(p := _parameter(slot), DTensor)}
        whole = {id(parameter): self._whole(parameter) for parameter in {id(p): p for p in inside.values()}.values()}
        parts = set(module.modules())
        _set(inside, lambda parameter: whole[id(parameter)])
        before, self._gathered = self._gathered, True
        try:
            with without_forward_hooks([unit for unit in self.all_units if unit in parts or unit is self._root]):
                yield
        finally:
            self._gathered = before
            _set(inside, lambda parameter: parameter)
        if modified:
            self._keep_changes(module, list({id(p): p for p in inside.values()}.values()), whole)

    def _keep_changes(self, module: nn.Module, shards: list[Any], whole: Mapping[int, nn.Parameter]) -> None:
        """Send rank 0's values to all ranks: those of gathered parameters, and of parameters that are not sharded."""
        own = {id(p) for p in module.parameters()}
        broadcast([p.data for p in (*whole.values(), *(p for p in self.whole if id(p) in own))])
        for parameter in shards:
            self.shards.load(parameter, parameter, whole[id(parameter)])

    def _whole(self, parameter: Any) -> nn.Parameter:
        with self._world.collectives:
            return nn.Parameter(self.shards.whole(parameter, parameter), requires_grad=parameter.requires_grad)

    def restore(self, collective: bool) -> None:
        """Remove torch's hooks. All parameters are whole again, on the devices that they were on before.

        Those of the meta device are there again, without values: the model may be larger than the memory of a process.

        Args:
            collective: all ranks call it; if not, parameters stay sharded.
        """
        if collective:
            self.reshard()
        for handle in self._handles:
            handle.remove()
        remove_fully_shard(self.all_units)
        made: dict[int, nn.Parameter] = {}
        for (owner, name), device in zip(self._slots, self._former, strict=True):
            parameter = owner._parameters[name]
            if not isinstance(parameter, DTensor) or not (collective or device.type == "meta"):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _empty(parameter) if device.type == "meta" else self._whole(parameter)
                made[id(parameter)].data = made[id(parameter)].data.to(device)
            owner._parameters[name] = made[id(parameter)]
        if self.forwards and any(device.type == "meta" for device in self._former):
            notice(
                f"{type(self.module).__name__} was created on the meta device, and its parameters are there again, without "
                "values. To use what was trained, load a checkpoint: ckpt_path=…"
            )


def _parameter(slot: Slot) -> Any:
    owner, name = slot
    return owner._parameters[name]


def _empty(parameter: Any) -> nn.Parameter:
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _set(parameters: dict[Slot, Any], value: Callable[[Any], Any]) -> None:
    for (owner, name), parameter in parameters.items():
        owner._parameters[name] = value(parameter)


def _offloads(options: dict[str, Any]) -> bool:
    return isinstance(options["offload_policy"], CPUOffloadPolicy)
