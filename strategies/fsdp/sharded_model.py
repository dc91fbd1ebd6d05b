"""A module whose parameters `fully_shard` has sharded: it runs the module's methods, and can restore the whole module.

A checkpoint stores whole tensors. Saving sends the parts to the rank that writes the tensor. Loading copies each rank's part
out of the whole tensor, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from trainkit.console import join_names, notice
from trainkit.distributed.parameter_placement import Range, own_range, part_at
from trainkit.distributed.world import World
from trainkit.errors import ModuleError
from trainkit.nested import leaves, map_tensors
from trainkit.strategies._collectives import broadcast
from trainkit.strategies._whole_steps import senders
from trainkit.strategies.fsdp.units import Slot, refuse_unshardable, slots
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = [
    "ShardedModel",
    "Shards",
    "allocate",
    "drop_gradients",
    "has_no_values",
    "remove_fully_shard",
    "without_forward_hooks",
]


class ShardedModel:
    """Shards a module with torch's `fully_shard`.

    The steps: move a unit to the device with rank 0's values, shard it, then the next one. So at most one whole unit is on
    the device. Buffers and ignored parameters stay whole.

    Args:
        module: The user's module; parameters may be sharded over a tensor-parallel group already.
        units: The modules to shard by themselves, by name; only those inside of `module` count.
        ignored: Parameters that are not sharded.
        options: Arguments of `fully_shard`.
        devices: Where each parameter is to be after the run.
        manual: Under manual optimization, the user's code calls the module itself, and not `call`.

    Attributes:
        units: The modules inside it that are sharded by themselves, by name.
        all_units: These, and the root.
        sharded: The sharded parameters.
        whole: The parameters that are whole on each rank.
        shards: Where the parts of the sharded parameters lie.
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
        self.module = module
        self.units = units
        self._device = device
        self._world = world
        self._unit_modules = set(units.values())
        self._slots = list(slots(module))
        self._former = [devices[slot] for slot in self._slots]
        self._steps = None if manual else Root(module, self._slots_of(module))
        self._root: nn.Module = module if self._steps is None else self._steps
        self.all_units = (*units.values(), self._root)
        self._whole_in_forward: list[Tensor] = []  # the whole parameters that torch's forward uses; always the same objects
        self._gathered = False  # inside `gather_parameters`, where the parameters are other ones
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
        parameters: dict[int, nn.Parameter] = {}
        for owner, name in self._slots_of(unit):
            parameter = owner._parameters[name]
            if parameter is not None and not parameter.is_meta and not isinstance(parameter, DTensor):
                parameters[id(parameter)] = parameter
        for parameter in parameters.values():
            parameter.data = parameter.data.to(self._device).contiguous()
        if self._world.size > 1:
            broadcast([parameter.data for parameter in parameters.values()])
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

            # This hook runs after torch's own, which makes the parameters whole.
            handles.append(unit.register_forward_pre_hook(collect))
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
            ModuleError: A parameter or buffer from the meta device has no values.
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
            self._steps.outputs = []
            self._steps.units_ran = False

    def _check_filled(self) -> None:
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.reshard()
        empty = [name for name in self._unfilled if (tensor := named.get(name)) is not None and has_no_values(tensor)]
        if empty:
            shown = join_names(empty)
            raise ModuleError(
                f"{shown}: created on the meta device, and never filled with values. Load a checkpoint: ckpt_path=… of fit, "
                "validate, test or predict; or create it outside of torch.device('meta'). A buffer that no checkpoint contains "
                "(persistent=False) cannot be loaded."
            )
        self._unfilled = []

    @property
    def temporary_ids(self) -> set[int]:
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
    def mask_gradients(self) -> Iterator[None]:
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
            reached = {id(parameter) for unit in self.all_units for parameter in self._find_reduced(unit)}
            missing = [p for p in missing if id(p) in reached]
        elif missing and all(parameter.grad is None for parameter in (*self.sharded, *self._whole_in_forward)):
            missing = []  # the window has trained other models
        self._unreduced = missing

    def _find_reduced(self, unit: nn.Module) -> list[Any]:
        """The parameters of a unit, if one of them has a reduced gradient."""
        parameters = [_parameter(slot) for slot in self._slots_of(unit)]
        return parameters if any(parameter.grad is not None for parameter in parameters) else []

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Check before an optimizer step that the gradients of its parameters were reduced in the last window."""
        if not self._unreduced:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        unreduced = {id(p) for p in self._unreduced if p.grad is None and id(p) in stepped}
        missing = [name for name, parameter in self.module.named_parameters() if id(parameter) in unreduced]
        if not missing:
            return
        shown = join_names(missing)
        raise ModuleError(
            f"the backward pass has reduced no gradient for {shown}. Expected a loss that depends on each trained parameter, "
            "and units and steps that return tensors, or lists, tuples, dicts or dataclasses of tensors. Freeze what is not "
            "used: parameter.requires_grad_(False)"
        )

    # ----------------------------------------------------------------------------------------------------- whole again

    @contextmanager
    def gather_parameters(self, module: nn.Module, modified: bool) -> Iterator[None]:
        """Within it a part of the module has whole parameters on all ranks. Collective.

        Args:
            modified: Keep rank 0's changes.
        """
        self.reshard()
        parameters = ((slot, _parameter(slot)) for slot in slots(module))
        inside: dict[Slot, Any] = {slot: parameter for slot, parameter in parameters if isinstance(parameter, DTensor)}
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
        inside = {id(p) for p in module.parameters()}
        broadcast([p.data for p in (*whole.values(), *(p for p in self.whole if id(p) in inside))])
        for parameter in shards:
            self.shards.load(parameter, parameter, whole[id(parameter)])

    def _whole(self, parameter: Any) -> nn.Parameter:
        with self._world.collectives:
            return nn.Parameter(self.shards.whole(parameter, parameter), requires_grad=parameter.requires_grad)

    def restore(self, collective: bool) -> None:
        """Remove torch's hooks. All parameters are whole again, on the devices that they were on before.

        Those of the meta device are there again, without values: the model may be larger than the memory of a process.

        Args:
            collective: All ranks call it; if not, parameters stay sharded.
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


class _ZeroGradient(torch.autograd.Function):
    """A zero whose backward pass gives a parameter a zero gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        return torch.zeros_like(parameter)


def _without_base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor.clone()


class Root(nn.Module):
    """The outermost module that `fully_shard` is called with. Its forward calls a function, such as a step of the module.

    So any method of the user's module can run while the parameters that belong to no unit are whole.

    Args:
        slots: The places of these parameters.

    Attributes:
        outputs: Outputs of forwards that a backward pass can begin at, if their results are not used.
        units_ran: A unit has run in one of these forwards.
        forwards: Number of forwards with gradients.
        in_backward: A backward pass runs, which may run forwards of units again.
    """

    def __init__(self, module: nn.Module, slots: list[Slot]) -> None:
        super().__init__()
        self.module = module
        self._slots = slots
        self._runs = self._keeps = self.units_ran = self._has_run = False
        self.in_backward = False
        self.outputs: list[Tensor] = []
        self.forwards = 0

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `run`, and a tensor that depends on a parameter of the root, or `None`."""
        before = self._runs, self._keeps  # a method may be called inside another
        trains = torch.is_grad_enabled()
        self._runs = True
        self._keeps = trains
        self._has_run = True
        try:
            results = run(*args, **kwargs)
        finally:
            self._runs, self._keeps = before
        if not trains:
            return results, None
        self.forwards += 1
        if any(isinstance(leaf, Tensor) and leaf._base is not None for leaf in leaves(results)):
            results = map_tensors(results, _without_base)  # torch warns about each view, in each step
        return results, self._anchor()

    def _anchor(self) -> Tensor | None:
        """With it, a backward pass that does not reach the results still reaches torch's hooks of the root."""
        trained = (owner._parameters[name] for owner, name in self._slots)
        first = next((p for p in trained if p is not None and p.requires_grad), None)
        if first is None:
            return None
        anchor: Tensor = _ZeroGradient.apply(first)  # type: ignore[no-untyped-call]
        return anchor

    def check_unit(self, unit: nn.Module, args: Any) -> None:
        """Check that the unit is called in a forward of the root. A forward pre-hook of the unit, before torch's."""
        if self._runs or self.in_backward or (self._has_run and not torch.is_grad_enabled()):
            return
        name = next(name for name, part in self.module.named_modules() if part is unit)
        raise ModuleError(
            f"{name}, which FSDP shards by itself, was called outside of a forward of the model. Call the model "
            "that prepare returned, or name the method that calls it: FSDPStrategy(forward_methods=['encode']). To call a part "
            "by itself: with accelerator.strategy.gathered_parameters(model):"
        )

    def keep_outputs(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        """Keep the outputs of a unit in the current forward. A forward hook of the unit."""
        if self._keeps:  # It is False where activation checkpointing runs the forward again.
            self.units_ran = True
            self.outputs += [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]


# ----------------------------------------------------------------------------------------------------- parts of tensors


def _is_empty(place: Range) -> bool:
    return any(start == end for start, end in place)


class Shards:
    """Where the parts of sharded parameters lie, of all ranks. Making one is a collective.

    Args:
        parameters: The sharded parameters, the same ones on all ranks.
    """

    def __init__(self, parameters: Iterable[DTensor], world: World) -> None:
        listed = list(parameters)
        self._world = world
        by_rank = world.exchange([own_range(parameter) for parameter in listed])
        self._places: dict[int, list[Range]] = {
            id(parameter): [tuple((start, end) for start, end in one) for one in each]
            for parameter, each in zip(listed, zip(*by_rank, strict=True), strict=True)
        }

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._places

    def places(self, parameter: Tensor) -> list[Range]:
        """Where the part of each rank lies in the whole parameter."""
        return self._places[id(parameter)]

    def make_sharded_tensor(self, tensor: DTensor, parameter: Tensor) -> ShardedTensor:
        """A parameter, or optimizer state that is sharded like it, in the form in which checkpoints save it."""
        return ShardedTensor(tensor.shape, tensor.dtype, partial(self._collect, tensor, parameter))

    @torch.no_grad()
    def _collect(self, tensor: DTensor, parameter: Tensor, owner: int | None) -> Tensor | None:
        """The whole tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
        if owner is None:
            return self.whole(tensor, parameter)
        rank, part = self._world.rank, tensor.to_local().detach()
        places = self._places[id(parameter)]
        sending = senders(places, owner)
        # The mesh's device is the one that communicates: an offloaded part is on the host.
        device = torch.device(tensor.device_mesh.device_type)
        if rank != owner:
            if rank in sending:
                dist.send(part.to(device).contiguous(), owner)
            return None
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for sender in sending:
            target = part_at(whole, places[sender])
            if sender == rank:
                target.copy_(part)
            elif target.is_contiguous():
                dist.recv(target, sender)
            else:
                received = torch.empty_like(target, memory_format=torch.contiguous_format)
                dist.recv(received, sender)
                target.copy_(received)
        return whole

    @torch.no_grad()
    def whole(self, tensor: DTensor, parameter: Tensor) -> Tensor:
        """The values of a parameter, or of optimizer state that is sharded like it, on all ranks. Collective."""
        if sum(not isinstance(placement, Replicate) for placement in tensor.placements) == 1:
            gathered: Tensor = tensor.full_tensor()
            return gathered.detach()
        made = self._collect(tensor, parameter, 0)  # sharded over two dimensions of the mesh: torch would gather twice
        if made is None:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
        dist.broadcast(made, 0)
        return made

    @torch.no_grad()
    def load(self, tensor: DTensor, parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor into its shard."""
        place = self._places[id(parameter)][self._world.rank]
        if not _is_empty(place):
            tensor.to_local().copy_(part_at(whole, place))


# ------------------------------------------------------------------------------------- what torch has no public way for


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_STATES = "__composable_api_state_key"


def _state(unit: nn.Module) -> Any:
    return torch.distributed.fsdp.fully_shard.state(unit)  # type: ignore[attr-defined]


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch ≥ 2.13
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def allocate(module: nn.Module, device: torch.device) -> list[str]:
    """Give parameters and buffers on the meta device memory. `to_empty` would also empty all others.

    Returns their names without "module.". Until they are filled, they are NaN or the least integer, see `has_no_values`.
    """
    names = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]

    def memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        made, unset = torch.empty_like(tensor, device=device), _unset_value(tensor.dtype)
        return made if unset is None else made.fill_(unset)

    if names:
        with torch.no_grad():
            module._apply(memory)
    return [name.removeprefix("module.") for name in names]


def has_no_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor from `allocate` have never been set, as far as this rank can see."""
    local, unset = tensor.to_local() if isinstance(tensor, DTensor) else tensor, _unset_value(tensor.dtype)
    if unset is None or not local.numel():
        return False
    first = local.detach().reshape(-1)[0].item()
    return first != first if unset != unset else first == unset


def _unset_value(dtype: torch.dtype) -> float | None:
    """What a tensor without values is filled with; `None`: each value of the dtype is an ordinary one, as of `bool`."""
    if dtype.is_floating_point:
        return math.nan
    return torch.iinfo(dtype).min if dtype.is_signed and not dtype.is_complex else None


def drop_gradients(units: Iterable[nn.Module]) -> None:
    """Drop the gradients that torch has accumulated in another dtype than that of the parameters, and not reduced."""
    for unit in units:
        for group in _groups(_state(unit)):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None


def remove_fully_shard(units: Iterable[nn.Module]) -> None:
    """Remove torch's hooks, class and attributes from modules that `fully_shard` was called with; parameters stay.

    Args:
        units: The modules, each passed to `fully_shard` by itself.
    """
    for unit in units:
        state = _state(unit)
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in _groups(state):
            handles = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
            for handle in [handle for table in handles for handle in table.values()]:
                handle.remove()
            for parameter in group.fsdp_params:
                parameter._post_load_hook_handle.remove()
        kind = type(unit)
        if issubclass(kind, FSDPModule):
            unit.__class__ = kind.__mro__[2]  # [the sharded class, FSDPModule, the user's class, …]
        for part in unit.modules():
            for name in _MARKS:
                vars(part).pop(name, None)
        for name in [name for name in vars(unit) if name.startswith(_STATES)]:
            del vars(unit)[name]
        _composable_state._module_state_mapping.pop(unit, None)


@contextmanager
def without_forward_hooks(units: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the forward of these modules gathers and frees no parameters."""
    kept: list[tuple[dict[int, Any], dict[int, Any], int]] = []
    for unit in units:
        state = _state(unit)
        for table, handle in (
            (unit._forward_pre_hooks, state._pre_forward_hook_handle),
            (unit._forward_hooks, state._post_forward_hook_handle),
        ):
            kept.append((table, dict(table), handle.id))
            table.pop(handle.id, None)
    try:
        yield
    finally:
        for table, before, torch_hook in kept:
            now = dict(table)  # the user may have registered or removed hooks
            table.clear()
            table.update({key: hook for key, hook in before.items() if key == torch_hook or key in now} | now)
