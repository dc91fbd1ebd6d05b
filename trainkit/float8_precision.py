"""`Float8Precision`: large linear layers compute in float8, everything else as in `bf16-mixed`.

The layers are torchao's. They compute each scale from the values of the tensor, so there is no state to save (Micikevicius et
al., FP8 Formats for Deep Learning, 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.console import counted, notice, warn
from trainkit.errors import ConfigurationError, UnknownNameError, missing_package, nearest
from trainkit.precision import Precision

__all__ = ["Float8Precision"]

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_MULTIPLE = 16  # of both dimensions of a weight, for the matrix multiplication of the GPU
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
        self._settings = ExitStack()  # of torch, until the end of the run
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
                f"precision={self.name!r}: none of the {counted(len(layers), 'linear layer')} of {type(module).__name__} was "
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
        notice(f"{len(chosen)} of {counted(len(layers), 'linear layer')} of {type(module).__name__} compute in float8.")

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
        self._linear, self._weight = linear, linear.weight
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
        if self._linear.weight is self._gathered:  # not if a strategy has replaced it
            self._linear.weight = self._weight


@cache
def _complete(kind: Any) -> Any:
    """torchao's layer, also for autocast of other devices than CUDA, and for `torch.inference_mode`."""

    class Float8Linear(kind):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            device = input.device.type
            if torch.is_autocast_enabled(device):
                input = input.to(torch.get_autocast_dtype(device))
            if torch.is_inference_mode_enabled():  # in which torchao's tensors lack operations
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
