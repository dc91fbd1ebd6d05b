"""`AveragedWeights`: what callbacks have in common that keep a second, averaged set of the module's weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.callback import Callback
from trainkit.distributed.parameter_placement import is_dtensor, own_range, part_at
from trainkit.errors import ConfigurationError
from trainkit.optim.parameter_names import clean_paths
from trainkit.state.training_objects import TRAINED_WEIGHTS, read_trained_weights
from trainkit.tagged_json.tensors import ShardedTensor, is_sharded_tensor

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["AveragedWeights", "local_part", "part_of", "wrap_part"]


class AveragedWeights(Callback):
    """Keeps an average of a module's weights, shows it in the module for a while, and saves both in one checkpoint.

    While the module shows the average, the trained weights are kept here. In-place copies move the values, so the optimizer,
    DDP's buckets, ZeRO's flat buffers, FSDP's shards and compiled graphs still see the same memory. Of a parameter that is
    sharded as a `DTensor`, each rank keeps and averages its own part.

    Args:
        device: Where the average is kept; `None`: where the module is.
        use_buffers: Average the buffers too.
    """

    averages_parts = True
    """Whether it works on parts of sharded parameters."""

    def __init__(self, device: torch.device | str | int | None, use_buffers: bool) -> None:
        super().__init__()
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise ConfigurationError(
                f"{type(self).__name__}(device={device!r}): expected a device, where the average is kept, such as "
                "device='cpu'. Name the other arguments, such as decay=0.99."
            ) from None
        self.use_buffers = use_buffers
        self._forget()

    def _forget(self) -> None:
        """Return to the state before the first average."""
        self._average: dict[str, Tensor] = {}  # The keys are clean names.
        self._trained: dict[str, Tensor] | None = None  # while the module shows the average
        self._found: dict[str, Tensor] = {}  # averages in a checkpoint that is being restored
        self._parameters: dict[str, nn.Parameter] = {}  # The keys are clean names.
        self._buffers: dict[str, tuple[nn.Module, str]] = {}  # clean name → owner and attribute: a buffer may be replaced
        self._converted = (0, False)  # number of averages, and whether any has another device or dtype than its parameter
        self._restored = False
        self._borrowed = False  # the module shows the average only until the validation ends
        self._owner: TrainModule | None = None
        self._rank = 0

    # ------------------------------------------------------------------------------------------------------------- set-up

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        name = type(self).__name__
        strategy = trainer.strategy
        hidden = strategy.info.shape_attribute is not None  # parameters are empty outside of a forward
        if strategy.shards_parameters and (hidden or not self.averages_parts):
            raise ConfigurationError(
                f"{name} averages whole parameters, but {strategy!r} shards them. Use a strategy that keeps them whole on each "
                "device: Trainer(strategy='zero2') or Trainer(strategy='ddp')"
                + (". Or one whose shards it can average: Trainer(strategy='fsdp')" if self.averages_parts else "")
            )
        if len([one for one in trainer.callbacks if isinstance(one, AveragedWeights)]) > 1:
            raise ConfigurationError(
                f"{name}: two callbacks average the weights, but the module can show only one average. Keep one of them: "
                f"Trainer(callbacks=[{name}(...)])"
            )
        self._forget()
        self._owner = module
        self._rank = strategy.world.rank

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._found = {}
        self._parameters, self._buffers = _find_averaged(module, self.use_buffers)
        self._average = {n: value for n, value in self._average.items() if n in self._parameters or n in self._buffers}

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._end_validation()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._end_validation()  # a signal or an error ended it
        if any(map(is_dtensor, self._parameters.values())):
            # the strategy makes the module's parameters whole next: they have the average if training ended
            self._average = {}
            self._trained = None
            self._parameters = {}

    # ---------------------------------------------------------------------------------------- the average in the module

    def _begin_validation(self) -> None:
        """Show the average until `_end_validation`."""
        if self._average and self._trained is None:
            self._show()
            self._borrowed = True

    def _end_validation(self) -> None:
        if self._borrowed:
            self._hide()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _show(self) -> None:
        """Copy the average into the module, and keep the trained values."""
        self._trained = {}
        for name, average in self._average.items():
            value = self._value(name)
            self._trained[name] = value.detach().to(average.device, copy=True)
            value.copy_(average)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _hide(self) -> None:
        """Copy the trained values back into the module."""
        trained, self._trained, self._borrowed = self._trained or {}, None, False
        for name, value in trained.items():
            self._value(name).copy_(value)

    def _value(self, name: str) -> Tensor:
        """The parameter or buffer of this name, as the module has it now; of a sharded parameter, this rank's part."""
        if name in self._parameters:
            return local_part(self._parameters[name])
        value: Tensor = getattr(*self._buffers[name])
        return value

    # ------------------------------------------------------------------------------------------------------- averaging

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Average the current values: a name that has no average yet gets a copy of its value."""
        assert self._trained is None, "the module shows the average"
        known, averages, values = self._average, list[Tensor](), list[Tensor]()
        for name, parameter in self._parameters.items():
            if name in known:
                averages.append(known[name])
                values.append(local_part(parameter))
            elif parameter.requires_grad:
                known[name] = _copy(local_part(parameter), self.device or parameter.device)
        if self._converts():
            values = [value.to(average.device, average.dtype) for average, value in zip(averages, values, strict=True)]
        first_buffer = len(averages)
        for name in self._buffers:
            value = self._value(name)
            if name in known:
                averages.append(known[name])
                values.append(value.to(known[name].device, known[name].dtype))
            else:
                known[name] = _copy(value, self.device or value.device)
        if averages:
            self._merge(averages, values)
        for average, value in zip(averages[first_buffer:], values[first_buffer:], strict=True):
            # masks contain infinities, whose difference is not a number
            average.copy_(torch.where(average.isnan(), value, average))

    def _converts(self) -> bool:
        """Whether a parameter must be converted to the device and dtype of its average; determined again for new averages."""
        count, converts = self._converted
        if count != len(self._average):
            known = [name for name in self._parameters if name in self._average]
            pairs = [(self._average[name], self._value(name)) for name in known]
            converts = any(value.device != average.device or value.dtype != average.dtype for average, value in pairs)
            self._converted = len(self._average), converts
        return converts

    def _merge(self, averages: list[Tensor], values: list[Tensor]) -> None:
        """Change the averages in place."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _average_is_for_inference(self) -> bool:
        """Whether a checkpoint of this moment has the average as the weights of the model."""
        return bool(self._average)

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if module is not self._owner or not self._average_is_for_inference():
            return
        shown, trained = dict(checkpoint["state_dict"]), {}
        for name, average in self._average.items():
            if name not in shown:
                continue
            stored, shown[name] = shown[name], average
            parameter = self._parameters.get(name)
            if parameter is not None and is_dtensor(parameter):
                shown[name] = wrap_part(average, parameter, self._rank)
                if self._trained is not None:
                    stored = wrap_part(self._trained[name], parameter, self._rank)
            elif self._trained is not None and not is_sharded_tensor(stored):
                stored = self._trained[name]
            if is_sharded_tensor(stored):  # ZeRO's are master weights, which showing the average has not changed
                whole = stored.collect(0)
                if whole is not None:
                    trained[name] = whole.cpu()
            else:
                trained[name] = stored
        checkpoint["state_dict"] = shown
        if checkpoint["callbacks"]:  # it is not a checkpoint of weights only
            checkpoint[TRAINED_WEIGHTS] = trained

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        training_is_over = self._trained is not None and not self._borrowed
        if trainer.stage != "fit" or training_is_over:
            self._forget()  # the weights that are loaded now stay in the module
            return
        shown = checkpoint["state_dict"]
        self._found = {name: shown[name] for name in read_trained_weights(checkpoint) if name in shown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = True
        self._take(self._found)

    def _take(self, averages: Mapping[str, Tensor]) -> None:
        """Use the averages of a checkpoint."""
        assert self._owner is not None
        self._average = {}
        self._parameters, self._buffers = _find_averaged(self._owner, self.use_buffers)
        for name, value in averages.items():
            parameter = self._parameters.get(name, value)
            device = self.device or (parameter.device if is_dtensor(parameter) else self._owner.device)
            self._average[name] = part_of(value.detach(), parameter).to(device, copy=True)


def _find_averaged(module: nn.Module, buffers: bool) -> tuple[dict[str, nn.Parameter], dict[str, tuple[nn.Module, str]]]:
    """The floating-point parameters and buffers that a checkpoint stores, by clean name; see `AveragedWeights._forget`."""
    saved, seen, named_values = module.state_dict(), set(), {}
    for prefix, owner in module.named_modules():
        named: list[tuple[str, Tensor]] = [*owner.named_parameters(recurse=False)]
        if buffers:
            named += owner.named_buffers(recurse=False)
        for attribute, value in named:
            name = f"{prefix}.{attribute}" if prefix else attribute
            numeric = value.is_floating_point() or value.is_complex()
            if numeric and name in saved and id(value) not in seen and not is_lazy(value):
                seen.add(id(value))  # a tied parameter has several names
                named_values[name] = owner, attribute, value
    parameters, buffers_by_name = {}, {}
    for raw, name in clean_paths(module, named_values).items():
        owner, attribute, value = named_values[raw]
        if isinstance(value, nn.Parameter):
            parameters[name] = value
        else:
            buffers_by_name[name] = owner, attribute
    return parameters, buffers_by_name


def _copy(value: Tensor, device: torch.device) -> Tensor:
    """A copy with at least 32 bits: steps of an average are too small for 16 bits."""
    narrow = value.is_floating_point() and value.element_size() < 4
    return value.detach().to(device, torch.float32 if narrow else value.dtype, copy=True)


# ------------------------------------------------------------------------------------------ parts of sharded parameters


def local_part(value: Any) -> Tensor:
    """This rank's part of a parameter, in the same memory; all of it if it is not sharded. Called under `torch.no_grad`."""
    part: Tensor = value.to_local() if is_dtensor(value) else value
    return part


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor with the shape of a parameter; all of it if the parameter is not sharded."""
    return part_at(whole, own_range(parameter)) if is_dtensor(parameter) else whole


def wrap_part(part: Tensor, parameter: Tensor, rank: int) -> Tensor:
    """A part of a tensor with the shape of a parameter, in the form in which checkpoints save the whole tensor.

    Args:
        part: This rank's part.
    """
    if not is_dtensor(parameter):
        return part
    return ShardedTensor(parameter.shape, part.dtype, partial(_whole, part, parameter, rank))


@torch.no_grad()
def _whole(part: Tensor, parameter: Any, rank: int, owner: int | None) -> Tensor | None:
    """The whole tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = parameter.device_mesh
    tensor = part.to(mesh.device_type)  # The mesh's device is the one that communicates: an average may be on the host.
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        one = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dimension]]
        shape = torch.Size(end - start for start, end in own_range(parameter, dimension + 1))
        stride = torch.empty(shape, device="meta").stride()
        along = [Shard(placement.dim)]
        tensor = DTensor.from_local(tensor, one, along, run_check=False, shape=shape, stride=stride).full_tensor()
    return tensor if owner in (None, rank) else None
