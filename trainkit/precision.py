"""`Precision`: the dtype of parameters and inputs, autocast, the loss scale.

The built-in names are Lightning's: `*-true` converts parameters and floating-point inputs; `*-mixed` keeps float32
parameters and runs the forward under autocast; `16-mixed` scales the loss and skips the optimizer step if a scaled gradient
overflows (Micikevicius et al., Mixed Precision Training, ICLR 2018). `register_precision` adds another precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.console import notice, quantity, warn
from trainkit.errors import (
    ConfigurationError,
    UnknownNameError,
    UnsupportedArgumentError,
    make_instance,
    missing_package,
    nearest,
)
from trainkit.names import advice
from trainkit.nested import map_tensors
from trainkit.optim.torch_step import step_of
from trainkit.registry import load

__all__ = [
    "MIXED",
    "OVER_MASTERS",
    "PRECISIONS",
    "Float8Precision",
    "Precision",
    "PrecisionSpec",
    "is_short",
    "register_precision",
]


@dataclass(frozen=True)
class PrecisionSpec:
    """The definition of a precision, for `register_precision`.

    Attributes:
        name: The name in `precision=`; Lightning's name if Lightning has it.
        parameter_dtype: Dtype of parameters and floating-point inputs.
        autocast_dtype: Dtype of the forward under `torch.autocast`; `None`: no autocast.
        scaler: Makes the loss scaler from a device and the options of `torch.amp.GradScaler`; `None`: the loss is not
            scaled.
        aliases: Other names in `precision=`.
        mixed_precision: Accelerate's name in `mixed_precision=`; `None`: it has none.
        over_masters: Accelerate's name where the backend keeps float32 copies of 16-bit parameters, as DeepSpeed does.
        refused: Types of devices that cannot compute in it, each with the reason.
        path: Path of a subclass of `Precision`, `"module:attribute"`, that `Precision(name)` makes; `None`: `Precision`.
    """

    name: str
    parameter_dtype: torch.dtype
    autocast_dtype: torch.dtype | None = None
    scaler: Callable[..., torch.amp.GradScaler] | None = None
    aliases: tuple[str, ...] = ()
    mixed_precision: str | None = None
    over_masters: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None


PRECISIONS: dict[str, PrecisionSpec] = {}
"""The precisions by name."""

MIXED: dict[str, str] = {}
"""Accelerate's names → ours, the most precise first."""

OVER_MASTERS: dict[str, str] = {}
"""Accelerate's names → ours, for backends that keep float32 copies of 16-bit parameters."""

_ALIASES: dict[str, str] = {}
_MEANT = {  # names of Accelerate's and torch's → the precision that they mean in those
    **dict.fromkeys(("fp16", "float16", "half", "amp"), "16-mixed"),
    "bfloat16": "bf16-mixed",
    "fp8": "fp8-mixed",
    **dict.fromkeys(("fp32", "float32", "no"), "32-true"),
    "float64": "64-true",
}


def register_precision(spec: PrecisionSpec) -> None:
    """Register a precision under its names, for `Trainer(precision="mine")`.

    Call it before the first `Trainer`, `Accelerator` or `Strategy` that uses it.

    Args:
        spec: The definition of the precision.

    Raises:
        ConfigurationError: A precision with one of its names exists.
    """
    taken = [name for name in (spec.name, *spec.aliases) if name in PRECISIONS or name in _ALIASES]
    taken += [name for name, table in _of_accelerate(spec) if name in table]
    if taken:
        raise ConfigurationError(
            f"register_precision: the name {taken[0]!r} is taken, and names of precisions must be unique. Choose another: "
            f"PrecisionSpec('my-{taken[0]}', ...)"
        )
    PRECISIONS[spec.name] = spec
    _ALIASES.update(dict.fromkeys(spec.aliases, spec.name))
    for name, table in _of_accelerate(spec):
        table[name] = spec.name
        by_precision = sorted(table.items(), key=lambda item: _epsilon(PRECISIONS[item[1]]))
        table.clear()
        table.update(by_precision)


def _of_accelerate(spec: PrecisionSpec) -> list[tuple[str, dict[str, str]]]:
    """Accelerate's names of a precision, each with the table that contains it."""
    names = ((spec.mixed_precision, MIXED), (spec.over_masters, OVER_MASTERS))
    return [(name, table) for name, table in names if name is not None]


def _epsilon(spec: PrecisionSpec) -> float:
    """The relative rounding error of the forward."""
    return torch.finfo(spec.autocast_dtype or spec.parameter_dtype).eps


for _spec in (
    PrecisionSpec("32-true", torch.float32, aliases=("32",), mixed_precision="no", over_masters="no"),
    PrecisionSpec("64-true", torch.float64, aliases=("64",), refused={"mps": "which has no float64"}),
    PrecisionSpec("bf16-mixed", torch.float32, torch.bfloat16, aliases=("bf16",), mixed_precision="bf16"),
    PrecisionSpec("16-mixed", torch.float32, torch.float16, torch.amp.GradScaler, aliases=("16",), mixed_precision="fp16"),
    PrecisionSpec("bf16-true", torch.bfloat16, over_masters="bf16"),
    PrecisionSpec("16-true", torch.float16, over_masters="fp16"),
    PrecisionSpec(
        "fp8-mixed",
        torch.float32,
        torch.bfloat16,
        mixed_precision="fp8",
        refused={"mps": "which has no float8"},
        path="trainkit.precision:Float8Precision",
    ),
):
    register_precision(_spec)

_NULL = nullcontext()

# Methods of a module; its `to` would make complex tensors real.
_CONVERSIONS = {torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}


class Precision:
    """The dtypes of a run: of the parameters, the inputs and the forward; and the loss scale of `16-mixed`.

    Pass a name to the `Trainer`; make an object to change the options of the loss scale.

    Args:
        name: `"32-true"`, `"64-true"`, `"bf16-mixed"`, `"16-mixed"`, `"bf16-true"`, `"16-true"` or `"fp8-mixed"`; the
            short forms `32`, `64`, `16` (16-mixed) and `"bf16"` (bf16-mixed) work too.
        init_scale: Initial loss scale of `16-mixed`, a power of two.
        growth_interval: Number of optimizer steps without an overflow before the scale grows.
        growth_factor: Factor by which the scale grows.
        backoff_factor: Factor for the scale after an overflow.
        enabled: `False`: do not scale the loss in `16-mixed`, nor in `16-true` under ZeRO.

    Raises:
        UnknownNameError: The name is unknown.
        UnsupportedArgumentError: It is a precision of Lightning that is not supported.

    Example:
        ```python
        trainer = Trainer(precision=Precision("16-mixed", init_scale=2.0**12))
        ```
    """

    def __new__(cls, name: str | int = "32-true", **_: Any) -> Precision:
        spec = PRECISIONS.get(_ALIASES.get(str(name), str(name)))
        path = None if spec is None or cls is not Precision else spec.path
        made: Precision = object.__new__(cls if path is None else load(path))
        return made

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
        if (fix := advice("precision", resolved)) is not None:
            raise UnsupportedArgumentError(f"precision={resolved!r}: {fix}.")
        if resolved not in PRECISIONS:
            raise UnknownNameError(
                f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}."
                + make_instance(name, Precision)
                + (f" Did you mean {_MEANT[str(name)]!r}?" if str(name) in _MEANT else nearest(str(name), PRECISIONS))
            )
        self.name = resolved
        self.spec = PRECISIONS[resolved]
        self.parameter_dtype, self.autocast_dtype = self.spec.parameter_dtype, self.spec.autocast_dtype
        self._enabled = enabled
        self._scaled = self.spec.scaler is not None and enabled
        self._scaling: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_interval": growth_interval,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
        }
        self.device_type = "cpu"
        self.scaler: torch.amp.GradScaler | None = None
        self.several_optimizers = False  # Whether several optimizers share the loss scale.
        self.entered = False  # a forward has run in it
        self._unscaled: set[int] = set()  # optimizers whose gradients are unscaled, before their step
        self._stepped: set[int] = set()  # optimizers that have made their step since the scale was last updated

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    def setup(self, device: torch.device) -> None:
        """Create what depends on the device.

        Raises:
            ConfigurationError: The device cannot compute in this precision.
        """
        if device.type in self.spec.refused:
            raise ConfigurationError(
                f"precision={self.name!r} does not work on {device.type.upper()}, {self.spec.refused[device.type]}. Use "
                "precision='32-true' or accelerator='cpu'."
            )
        self.device_type = device.type
        if self.scaler is None:
            self.reset()

    def use_scaler(self) -> None:
        """Scale the loss in this precision too, unless `enabled=False`: float32 master weights hold what float16 cannot."""
        self._scaled = self._enabled
        if self.scaler is None:
            self.reset()

    def reset(self) -> None:
        """Set the loss scale to its initial value."""
        self.entered = False
        self._unscaled.clear()
        self._stepped.clear()
        if self._scaled:
            self.scaler = (self.spec.scaler or torch.amp.GradScaler)(self.device_type, **self._scaling)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert floating-point parameters and buffers to the parameter dtype, in place; complex ones stay as they are."""
        convert = _CONVERSIONS.get(self.parameter_dtype)
        if convert is not None:
            getattr(module, convert)()
        elif self.parameter_dtype is not torch.float32:
            module.to(self.parameter_dtype)
        return module

    def convert_layers(self, module: nn.Module) -> None:
        """Change how layers compute, in place; parameters and their names stay. A strategy calls it before it wraps a module.

        If the weights are gathered in the precision (`needs_sharded_parameters`), these parameters are replaced by others that
        are views of them.
        """

    def restore_layers(self) -> None:
        """Undo `convert_layers`, at the end of a run, when the strategy has released the modules."""

    def weights_changed(self, module: nn.Module) -> None:
        """Called after each optimizer step and load of weights under strategies that shard parameters. Collective.

        Callbacks that write other weights into the module for a while, such as averages, call it too.
        """

    def note_other_dtypes(self, module: nn.Module) -> None:
        """Print a notice that names parameters with other dtypes, which this precision leaves unchanged."""
        odd = {str(p.dtype) for p in module.parameters() if p.is_floating_point() and p.dtype != self.parameter_dtype}
        if odd:
            notice(
                f"precision={self.name!r} does not convert parameters, and some are {', '.join(sorted(odd))}. To train in "
                "another dtype, for example: precision='bf16-true'; to train in float32: module.float()."
            )

    def convert_input(self, batch: Any) -> Any:
        """Convert floating-point tensors of a batch to the parameter dtype; mixed precisions return the batch unchanged."""
        if self.parameter_dtype is torch.float32:
            return batch
        return map_tensors(batch, lambda t: t.to(self.parameter_dtype) if t.is_floating_point() else t)

    def init_context(self) -> AbstractContextManager[Any]:
        """A context in which new floating-point tensors have the parameter dtype; `configure_model` runs in it."""
        if self.parameter_dtype is torch.float32:
            return _NULL
        return _default_dtype(self.parameter_dtype)

    def forward_context(self, **autocast: Any) -> AbstractContextManager[Any]:
        """A context for the forward: autocast for mixed precisions; the default dtype for the others, except float32.

        Args:
            **autocast: Options of `torch.autocast`: `enabled`, `cache_enabled`.
        """
        self.entered = True
        if self.autocast_dtype is not None:
            return torch.autocast(self.device_type, dtype=self.autocast_dtype, **autocast)
        return self.init_context()

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step function in this precision: its batch is converted, and it runs in `forward_context`."""

        def wrapper(batch: Any, *rest: Any) -> Any:
            with self.forward_context():
                return step(self.convert_input(batch), *rest)

        return wrapper

    @property
    def needs_sharded_parameters(self) -> bool:
        """Whether it works only with strategies that shard parameters."""
        return False

    @property
    def plain(self) -> bool:
        """Whether inputs and forward need no change (`32-true`)."""
        return self.autocast_dtype is None and self.parameter_dtype is torch.float32

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass, multiplied by the loss scale."""
        if self.scaler is None:
            return loss
        self.settle()
        return self.scaler.scale(loss)

    def settle(self) -> None:
        """Update the loss scale, if no gradient is left that was computed with it.

        With several optimizers this is known when the next loss is scaled: until then the second one's gradients may still
        have the old scale.
        """
        if self.scaler is not None and self._stepped and not self._unscaled:
            self.scaler.update()
            self._stepped.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, at most once per optimizer step; more calls do nothing."""
        if self.scaler is not None and id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            if id(optimizer) in self._stepped:
                self.settle()
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run the optimizer step, unless a scaled gradient overflowed.

        Returns:
            Whether the step was made. A skipped one changes neither parameters nor optimizer state.

        Raises:
            ConfigurationError: A closure under `16-mixed`, whose scaler has to read the gradients before the step.
        """
        if self.scaler is None:
            step_of(optimizer)(closure)
            return True
        if closure is not None:
            raise ConfigurationError(
                "an optimizer step with a closure (LBFGS) does not work with precision='16-mixed', whose loss scaler checks "
                "the gradients before the step. Use precision='bf16-mixed' or '32-true'."
            )
        self.unscale(optimizer)
        if id(optimizer) not in self._unscaled:  # Without any gradient, torch's scaler raises an error.
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
        """Tell the scaler that the optimizer step whose gradients it has read is over, or will not happen."""
        if self.scaler is not None and id(optimizer) in self._unscaled:
            self._unscaled.discard(id(optimizer))
            self._stepped.add(id(optimizer))
            if not self.several_optimizers:
                self.settle()


def is_short(precision: Precision | str | int) -> bool:
    """Whether parameters have 16 bits in this precision."""
    chosen = precision if isinstance(precision, Precision) else Precision(precision)
    return chosen.parameter_dtype.itemsize < 4


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


# -------------------------------------------------------------------------------------------------------------- float8
# The layers are torchao's. They compute each scale from the values of the tensor, so there is no state to save (Micikevicius et
# al., FP8 Formats for Deep Learning, 2022).

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_MULTIPLE = 16  # The GPU's matrix multiplication needs multiples of 16 in both dimensions.
_HARDWARE = "a GPU of CUDA capability 8.9 or higher (Ada, Hopper, Blackwell), or an MI300"


class Float8Precision(Precision):
    """Large linear layers compute in float8, everything else as in `bf16-mixed`. What `precision="fp8-mixed"` makes.

    Parameters, their gradients and the state of the optimizer stay float32, under the same names, so a checkpoint loads in
    every other precision. During a run the chosen `nn.Linear` layers are torchao's `Float8Linear`: the same objects, with the
    same parameters and hooks. After the run they are `nn.Linear` again. Float8 is faster only in large layers, and with
    `torch.compile`.

    It needs the package torchao (`pip install 'trainkit-torch[fp8]'`), and a GPU of CUDA capability 8.9 or higher or an MI300.

    Args:
        name: `"fp8-mixed"`.
        recipe: Which values share a scale. `"tensorwise"`: a whole tensor; the fastest. `"rowwise"`: a row; more accurate.
            `"rowwise_with_gw_hp"`: a row, and gradients of weights are computed in bfloat16; the most accurate. Or a
            `Float8LinearConfig` of torchao.
        filter: A function `(name, layer) -> bool` that chooses `nn.Linear` layers. Default: those whose dimensions are
            multiples of 16, except small ones, which would be slower, and the last one, which usually computes the logits.
        all_gather: Gather the weights in float8. For the recipe `"tensorwise"`, and strategies that shard parameters.
        emulate: Compute in float32 with the values of float8, on any device. Slow: to try a model without such a GPU.

    Raises:
        UnknownNameError: The recipe is unknown.

    Example:
        ```python
        def chosen(name, layer):
            return name.startswith("blocks.") and layer.out_features >= 1024

        trainer = Trainer(precision=Float8Precision(recipe="rowwise", filter=chosen))
        ```
    """

    def __init__(
        self,
        name: str = "fp8-mixed",
        *,
        recipe: Any = "tensorwise",
        filter: Callable[[str, nn.Linear], bool] | None = None,
        all_gather: bool = False,
        emulate: bool = False,
    ) -> None:
        super().__init__(name)
        self.recipe = recipe
        self.filter = filter
        self.all_gather = all_gather or getattr(recipe, "enable_fsdp_float8_all_gather", False)
        self.emulate = emulate or getattr(recipe, "emulate", False)
        self._config: Any = None
        self._layers: list[_Float8Layer] = []
        self._settings = ExitStack()  # Settings of torch that are restored at the end of the run.
        if isinstance(recipe, str) and recipe not in _RECIPES:
            raise UnknownNameError(f"unknown recipe {recipe!r}; known: {', '.join(_RECIPES)}.{nearest(recipe, _RECIPES)}")

    def __repr__(self) -> str:
        recipe = repr(self.recipe) if isinstance(self.recipe, str) else f"{type(self.recipe).__name__}(...)"
        options = "".join(f", {name}=True" for name in ("all_gather", "emulate") if getattr(self, name))
        return f"Float8Precision(recipe={recipe}{options})"

    @property
    def needs_sharded_parameters(self) -> bool:
        """See `trainkit.Precision.needs_sharded_parameters`."""
        return bool(self.all_gather)

    def setup(self, device: torch.device) -> None:
        """See `trainkit.Precision.setup`.

        Raises:
            ConfigurationError: The device does not compute in float8, or the recipe does not support `all_gather`.
            MissingPackageError: torchao is not installed.
        """
        super().setup(device)
        if not (self.emulate or _computes_float8(device)):
            where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"
            raise ConfigurationError(
                f"precision={self.name!r} does not work on {where}: float8 needs {_HARDWARE}. Use precision='bf16-mixed'; or, "
                "to try it slowly on any device: precision=Float8Precision(emulate=True)"
            )
        self._config = self._torchao_config()

    def _torchao_config(self) -> Any:
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise missing_package("torchao", "fp8", f"precision={self.name!r}") from error
        named = isinstance(self.recipe, str)
        config = Float8LinearConfig.from_recipe_name(self.recipe) if named else self.recipe
        if self.all_gather and _by_rows(config):
            raise ConfigurationError(
                f"{self!r}: a weight can be gathered in float8 only if it has one scale. Use recipe='tensorwise', or "
                "all_gather=False."
            )
        # padded, because the gradient of a weight is a sum over the batch, and a short last batch is no multiple of 16
        return replace(config, pad_inner_dim=True, enable_fsdp_float8_all_gather=self.all_gather, emulate=self.emulate)

    def convert_layers(self, module: nn.Module) -> None:
        """See `trainkit.Precision.convert_layers`.

        Raises:
            ConfigurationError: `filter` has chosen a layer that cannot compute in float8.
        """
        from torchao.float8 import convert_to_float8_training

        layers = {name.replace("_orig_mod.", ""): one for name, one in module.named_modules() if _is_plain_linear(one)}
        choice = self.filter or _default_filter(layers, by_rows=_by_rows(self._config))
        chosen = {name: layer for name, layer in layers.items() if choice(name, layer)}
        self._check(chosen, module)
        if not chosen:
            warn(
                f"precision={self.name!r}: none of the {quantity(len(layers), 'linear layer')} of {type(module).__name__} was "
                "chosen for float8, so this is the same as precision='bf16-mixed'. By default, small layers and the last one "
                "are not chosen. To choose others: precision=Float8Precision(filter=lambda name, layer: ...)"
            )
            return
        made = {name: convert_to_float8_training(layer, config=self._config) for name, layer in chosen.items()}
        self._layers += [_Float8Layer(layer, made[name]) for name, layer in chosen.items()]
        if _by_rows(self._config):
            from torch._inductor import config

            # otherwise compiled code skips a cast to bfloat16, and scales differ from those of eager mode
            self._settings.enter_context(config.patch(emulate_precision_casts=True))
        notice(f"{len(chosen)} of {quantity(len(layers), 'linear layer')} of {type(module).__name__} compute in float8.")

    def _check(self, chosen: dict[str, nn.Linear], module: nn.Module) -> None:
        for name, layer in chosen.items():
            if not _fits(layer):
                raise ConfigurationError(
                    f"Float8Precision(filter=...) has chosen {name!r} of shape {tuple(layer.weight.shape)}, but in float8 both "
                    f"dimensions must be multiples of {_MULTIPLE}. Exclude it: filter=lambda name, layer: name != {name!r}"
                )
        if self.all_gather:
            weights = {id(layer.weight) for layer in chosen.values()}
            owners = [id(weight) for _, weight in module.named_parameters(remove_duplicate=False) if id(weight) in weights]
            shared = [name for name, layer in chosen.items() if owners.count(id(layer.weight)) > 1]
            if shared:
                raise ConfigurationError(
                    f"Float8Precision(all_gather=True): the weight of {shared[0]!r} is shared with another layer, so it "
                    f"cannot be gathered in float8. Exclude it: filter=lambda name, layer: name != {shared[0]!r}"
                )

    def restore_layers(self) -> None:
        """See `trainkit.Precision.restore_layers`."""
        while self._layers:
            self._layers.pop().restore()
        self._settings.close()

    def weights_changed(self, module: nn.Module) -> None:
        """See `trainkit.Precision.weights_changed`. With `all_gather`, computes all scales with one all-reduce."""
        if self.all_gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(module)


class _Float8Layer:
    """A linear layer that computes in float8 until `restore`.

    It changes the class of the layer. torchao would put another object in its place, and hooks, attributes and other references
    to the layer would be lost.

    Args:
        linear: The layer.
        made: What torchao makes of it.
    """

    def __init__(self, linear: nn.Linear, made: nn.Linear) -> None:
        self._linear = linear
        self._weight = linear.weight
        self._added = {name: value for name, value in vars(made).items() if name not in vars(linear)}
        self._gathered = made.weight  # another parameter if it is gathered in float8
        kind: Any = type(made)
        linear.__class__ = _complete(kind)
        vars(linear).update(self._added)
        linear.weight = self._gathered

    def restore(self) -> None:
        """Make it a `nn.Linear` again."""
        self._linear.__class__ = nn.Linear
        for name in self._added:
            vars(self._linear).pop(name, None)
        if self._linear.weight is self._gathered:  # A strategy may have replaced it.
            self._linear.weight = self._weight


@cache
def _complete(kind: Any) -> Any:
    """torchao's layer, also for autocast of other devices than CUDA, and for `torch.inference_mode`."""

    class Float8Linear(kind):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            device = input.device.type
            if torch.is_autocast_enabled(device):
                input = input.to(torch.get_autocast_dtype(device))
            if torch.is_inference_mode_enabled():  # torchao's tensors lack operations in inference mode.
                with torch.inference_mode(False), torch.no_grad():
                    return super().forward(input)  # type: ignore[no-any-return]
            return super().forward(input)  # type: ignore[no-any-return]

    return Float8Linear


def _computes_float8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= ((9, 4) if torch.version.hip else (8, 9))


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether it is a `nn.Linear` and not of a subclass, whose forward may differ, with a parameter as its weight."""
    return type(module) is nn.Linear and isinstance(module.weight, nn.Parameter)


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _by_rows(config: Any) -> bool:
    return str(config.cast_config_weight.scaling_granularity.value) == "axiswise"


def _default_filter(layers: dict[str, nn.Linear], *, by_rows: bool) -> Callable[[str, nn.Linear], bool]:
    """Choose the layers that are faster in float8, by torchao's measurements on H100, except the last layer."""
    last = next(reversed(layers), None)

    def choose(name: str, layer: nn.Linear) -> bool:
        n, k = layer.out_features, layer.in_features
        small = (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)) if by_rows else (n <= 1024 and k <= 4096)
        return _fits(layer) and name != last and not small

    return choose
