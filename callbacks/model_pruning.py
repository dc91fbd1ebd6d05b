"""`ModelPruning`: prunes parameters during training, with `torch.nn.utils.prune`."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from trainkit.callback import Callback
from trainkit.callbacks._averaged_weights import AveragedWeights
from trainkit.checks import choice, function, is_number
from trainkit.console import notice
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.optim.parameter_names import clean_paths
from trainkit.rng import Purpose, Stage, mix, seed_generators

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["ModelPruning"]

Pairs = Sequence[tuple[nn.Module, str]]

_PRUNED = "pruned_parameters"  # The key of `<name>_orig` and `<name>_mask` in a checkpoint.

# Name → the function for one parameter, and the method for all of them together.
_METHODS: dict[str, tuple[Callable[..., Any], Any]] = {
    "l1_unstructured": (prune.l1_unstructured, prune.L1Unstructured),
    "ln_structured": (prune.ln_structured, prune.LnStructured),
    "random_structured": (prune.random_structured, prune.RandomStructured),
    "random_unstructured": (prune.random_unstructured, prune.RandomUnstructured),
}


class ModelPruning(Callback):
    """Prunes parameters at the end of each epoch: sets a part of their elements to zero, and keeps them there.

    It uses `torch.nn.utils.prune`. During the run a pruned parameter `weight` is the product of a parameter `weight_orig`
    and a buffer `weight_mask`. After the run the module has a plain `weight` again.

    A checkpoint contains the pruned `weight` as a weight of the model (`model.safetensors`), so `load_from_checkpoint`,
    `trainer.test(ckpt_path=...)`, a `fit` without this callback and other programs get it. `weight_orig` and `weight_mask`
    are in `state.safetensors`, and `trainer.fit(ckpt_path=...)` with this callback continues with them: a resumed run is
    bit-identical to one that was never interrupted.

    All ranks make the same masks. ZeRO is refused: its processes do not have whole parameters to be compared and masked. So
    are callbacks that average the weights: a checkpoint would not contain the averages of pruned parameters.

    Args:
        pruning_fn: `"l1_unstructured"`, `"random_unstructured"`, `"ln_structured"`, `"random_structured"`, or with
            `use_global_unstructured` a subclass of `torch.nn.utils.prune.BasePruningMethod`.
        parameters_to_prune: Pairs of a layer of the module and the name of its parameter. Default: all parameters of the
            names in `parameter_names`.
        parameter_names: `"weight"`, `"bias"` or both, the default.
        use_global_unstructured: Compare the elements of all parameters with each other, so that some parameters lose more
            elements than others. `False`: prune each parameter by `amount`.
        amount: What to prune each time: a fraction (float) or a number of elements (int) of what is not pruned yet, or a
            function of the epoch that returns one. 0 prunes nothing.
        apply_pruning: Whether to prune; or a function of the epoch that returns it.
        make_pruning_permanent: After the run, replace `weight_orig` and `weight_mask` by the pruned `weight`.
        use_lottery_ticket_hypothesis: After pruning, reset the parameters to their values at the start of training (Frankle,
            Carbin: The Lottery Ticket Hypothesis, ICLR 2019); or a function of the epoch that returns whether to. The values
            are stored in checkpoints.
        resample_parameters: Reset them to new initial values of `reset_parameters()` instead, in layers that have it.
        pruning_dim: The dimension along which structured pruning removes channels.
        pruning_norm: The norm of `"ln_structured"`.
        verbose: 0: print nothing; 1: print the part that is pruned, each time; 2: of each parameter too.
        prune_on_train_epoch_end: `False`: prune at the end of each validation instead.

    Raises:
        ConfigurationError: An argument is wrong, the strategy shards the optimizer state, or another callback averages the
            weights.
        ModuleError: The module does not have one of `parameters_to_prune`. Raised before training starts.

    Example:
        ```python
        pruning = ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)
        trainer = Trainer(callbacks=[pruning])
        ```
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: str | type[prune.BasePruningMethod],
        parameters_to_prune: Pairs = (),
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: float | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        super().__init__()
        for name in parameter_names or ():
            choice(name, "ModelPruning(parameter_names=)", self.PARAMETER_NAMES)
        if not is_number(amount):
            function(amount if amount is not None else False, "ModelPruning(amount=)", "0.5")
        if verbose not in (0, 1, 2):
            raise ConfigurationError(f"ModelPruning(verbose=) must be 0, 1 or 2, not {verbose!r}. For example: verbose=1")
        self._prune = _pruning(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self.pruning_fn = pruning_fn
        self.amount = amount
        self._given, self._names = parameters_to_prune, tuple(parameter_names or self.PARAMETER_NAMES)
        self._applies = apply_pruning
        self._permanent = make_pruning_permanent
        self._resets = use_lottery_ticket_hypothesis
        self._resamples = resample_parameters
        self._verbose = verbose
        self._at_epoch_end = prune_on_train_epoch_end
        self._pairs: dict[str, tuple[nn.Module, str]] = {}  # name in the module → layer and attribute
        self._plain: set[str] = set()  # Names of the parameters that the module did not prune itself.
        self._originals: dict[str, Tensor] = {}  # name → value at the start of training
        self._fresh: dict[int, nn.Module] = {}  # id of a layer → a copy whose parameters can be reset
        self._last: list[int] = []  # epoch and optimizer step of the last pruning

    def filter_parameters_to_prune(self, parameters_to_prune: Pairs = ()) -> Pairs:
        """Return those of the pairs that are pruned; override it to choose."""
        return parameters_to_prune

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Pairs = (), parameter_names: Sequence[str] = ()
    ) -> Pairs:
        """Return the pairs, or without pairs all layers of a module with the names of their parameters.

        Args:
            pl_module: The module.
            parameters_to_prune: Pairs of a layer and the name of its parameter.
            parameter_names: The names to look for if there are no pairs. Default: `"weight"` and `"bias"`.
        """
        return parameters_to_prune or _all_pairs(pl_module, parameter_names or ModelPruning.PARAMETER_NAMES)

    def apply_pruning(self, amount: float) -> None:
        """Prune all parameters; override it to prune in another way.

        Args:
            amount: The fraction, or the number of elements, to prune.
        """
        self._prune(list(self._pairs.values()), amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the parameters to the values of the start of training, or to new initial ones; override it to add to that.

        Called after pruning, if `use_lottery_ticket_hypothesis` says so. The masks stay.
        """
        for layer in self._fresh.values():
            layer.reset_parameters()  # type: ignore[operator]
        for name, (layer, attribute) in self._pairs.items():
            fresh = self._fresh.get(id(layer))
            value = self._originals[name] if fresh is None else getattr(fresh, attribute)
            _original(layer, attribute).copy_(value)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Replace the pruned parameters in a module, and in its children, by plain ones without masks."""
        for layer in module.modules():
            for name in [
                buffer[: -len("_mask")] for buffer, _ in layer.named_buffers(recurse=False) if buffer.endswith("_mask")
            ]:
                if hasattr(layer, f"{name}_orig"):
                    prune.remove(layer, name)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._pairs = {}
        if stage != "fit":
            return
        if trainer.strategy.shards_optimizer_state or trainer.strategy.shards_parameters:
            raise ConfigurationError(
                f"ModelPruning needs whole parameters on each process, but {type(trainer.strategy).__name__} shards them or "
                "their optimizer, which a mask does not reach. Use strategy='ddp'; or prune after the run: "
                "torch.nn.utils.prune.global_unstructured(...)"
            )
        if averages := [one for one in trainer.callbacks if isinstance(one, AveragedWeights)]:
            raise ConfigurationError(
                f"ModelPruning and {type(averages[0]).__name__} cannot be combined: a checkpoint would not contain the "
                "averages of pruned parameters. Keep one of them."
            )
        self._originals = {}
        self._last = []
        layers = [layer for layer in module.modules() if hasattr(layer, "reset_parameters")] if self._resamples else []
        self._fresh = {id(layer): copy.deepcopy(layer) for layer in layers}

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Save the pruned parameters under their own names, and what a resumed run needs in addition."""
        saved, kept = dict(checkpoint["state_dict"]), dict[str, Tensor]()
        names_of: dict[int, list[str]] = defaultdict(list)  # a tied parameter is stored under one of its names
        for name in [name for name in self._pairs if name in self._plain]:  # All ranks have the same order.
            names_of[id(_original(*self._pairs[name]))].append(name)
        uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        for key, names in names_of.items():
            if uses[key] == len(names):  # otherwise it is tied to one that is not pruned
                kept |= _make_plain(saved, names)
        checkpoint["state_dict"] = saved
        if kept and checkpoint["callbacks"]:  # it is not a checkpoint of weights only
            checkpoint[_PRUNED] = kept

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        saved, pruned = checkpoint["state_dict"], checkpoint.get(_PRUNED)
        kept = {n: t for n, t in pruned.items() if isinstance(t, Tensor)} if isinstance(pruned, Mapping) else {}
        for name, (layer, attribute) in self._parameter_slots(module).items():
            original, mask, masked = f"{name}_orig", f"{name}_mask", hasattr(layer, f"{attribute}_mask")
            if trainer.stage == "fit" and not masked and (mask in saved or mask in kept):
                prune.identity(layer, attribute)  # the mask and the values are loaded after this hook
                masked = True
            if masked and name in saved:
                value = saved.pop(name)
                saved[original], saved[mask] = kept.get(original, value), kept.get(mask, torch.ones_like(value))

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        pairs = self._parameter_slots(module)
        if self._resets and not self._originals:
            self._originals = {name: _original(*pair).detach().clone() for name, pair in pairs.items()}

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._at_epoch_end:
            self._run(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not self._at_epoch_end and trainer.stage == "fit" and not trainer.sanity_checking:
            self._run(trainer)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._permanent:
            self.make_pruning_permanent(module)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "originals": self._originals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last, self._originals = list(state_dict["last"]), dict(state_dict["originals"])

    def _run(self, trainer: Trainer) -> None:
        epoch, now = trainer.current_epoch, [trainer.current_epoch, trainer.global_step]
        if now == self._last:
            return  # the run has resumed in the hooks that follow this one
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not (self._applies(epoch) if callable(self._applies) else self._applies) or not amount:
            return
        # masks may be random, and the generators differ after a resume
        seed_generators(
            mix(trainer.seed, Stage.TRAIN, Purpose.INIT, epoch, 1 + trainer.global_step), trainer.strategy.generators()
        )
        with torch.inference_mode(False), torch.no_grad():
            self._refresh()
            before = self._count_pruned()
            self.apply_pruning(amount)
            if self._resets(epoch) if callable(self._resets) else self._resets:
                self.apply_lottery_ticket_hypothesis()
            self._refresh()
            if self._verbose:
                self._report(epoch, before)
        self._last = now

    def _refresh(self) -> None:
        """Compute the pruned parameters again: they are those of the last forward, before the optimizer step."""
        for layer, name in self._pairs.values():
            if hasattr(layer, f"{name}_mask"):
                setattr(layer, name, getattr(layer, f"{name}_orig") * getattr(layer, f"{name}_mask"))

    def _count_pruned(self) -> dict[str, tuple[int, int]]:
        """For each parameter the number of elements that are pruned, and of all."""
        masks = {name: getattr(layer, f"{attribute}_mask", None) for name, (layer, attribute) in self._pairs.items()}
        return {
            name: (0 if mask is None else int((mask == 0).sum()), _original(*self._pairs[name]).numel())
            for name, mask in masks.items()
        }

    def _report(self, epoch: int, before: dict[str, tuple[int, int]]) -> None:
        after = self._count_pruned()
        total = sum(number for _, number in after.values())
        first, second = (sum(number for number, _ in counts.values()) for counts in (before, after))
        notice(f"epoch {epoch}: ModelPruning: {first} → {second} of {total} elements are zero ({second / total:.1%}).")
        for name, (number, whole) in after.items() if self._verbose == 2 else ():
            notice(f"  {name}: {before[name][0]} → {number} of {whole}")

    def _parameter_slots(self, module: TrainModule) -> dict[str, tuple[nn.Module, str]]:
        """The parameters to prune, by name, now that the strategy has prepared the module."""
        if not self._pairs:
            layers = dict(module.named_modules())
            names = {id(layers[raw]): name for raw, name in clean_paths(module, layers).items()}
            chosen = self.filter_parameters_to_prune(self.sanitize_parameters_to_prune(module, self._given, self._names))
            for layer, attribute in chosen:
                if id(layer) not in names or not isinstance(_original(layer, attribute), nn.Parameter):
                    raise ModuleError(
                        f"ModelPruning: {type(module).__name__} has no layer {type(layer).__name__} with a parameter "
                        f"{attribute!r}. Pass layers of the module: parameters_to_prune=[(module.layer, 'weight')]"
                    )
                name = f"{names[id(layer)]}.{attribute}".lstrip(".")
                self._pairs[name] = layer, attribute
                if not hasattr(layer, f"{attribute}_mask"):
                    self._plain.add(name)
        return self._pairs


def _original(layer: nn.Module, name: str) -> Any:
    """The parameter that is trained, pruned or not."""
    return getattr(layer, f"{name}_orig", None) if hasattr(layer, f"{name}_orig") else getattr(layer, name, None)


@torch.no_grad()
def _make_plain(saved: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Replace the original and the masks of one parameter, which may have several names, by the product; returns them."""
    stored = [saved[f"{name}_orig"] for name in names if f"{name}_orig" in saved]
    masks = {f"{name}_mask": saved[f"{name}_mask"] for name in names if f"{name}_mask" in saved}
    if not stored or len(masks) < len(names):
        return {}  # it is not pruned, or it is frozen and not saved
    kept = masks | {f"{name}_orig": stored[0] for name in names}
    for name in kept:
        saved.pop(name, None)
    saved |= dict.fromkeys(names, prod(masks.values(), start=stored[0]))
    return kept


def _all_pairs(module: nn.Module, names: Sequence[str]) -> Pairs:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    layers = [layer for layer in module.modules() if layer is not module and not isinstance(layer, containers)]
    return [(layer, name) for name in names for layer in layers if isinstance(_original(layer, name), nn.Parameter)]


def _pruning(
    function: Any, together: bool, dim: int | None, norm: float | None
) -> Callable[[list[tuple[nn.Module, str]], float], None]:
    """A function of the parameters and the amount that prunes them."""
    options: dict[str, Any] = {}
    if isinstance(function, str):
        choice(function, "ModelPruning(pruning_fn)", tuple(_METHODS))
        if function.endswith("_structured"):
            options = {"dim": dim, **({"n": norm} if function == "ln_structured" else {})}
            missing = [
                f"pruning_{name}=..." for name, value in zip(("dim", "norm"), options.values(), strict=False) if value is None
            ]
            if missing:
                raise ConfigurationError(
                    f"ModelPruning({function!r}) needs {' and '.join(missing)}. For example: pruning_dim=0"
                )
        one, method = _METHODS[function]
    elif inspect.isclass(function) and issubclass(function, prune.BasePruningMethod):
        one, method = None, function
    else:
        raise ConfigurationError(
            f"ModelPruning(pruning_fn) must be one of {', '.join(_METHODS)}, or a subclass of BasePruningMethod, not "
            f"{function!r}. For example: ModelPruning('l1_unstructured')"
        )
    if together and method.PRUNING_TYPE != "unstructured":
        raise ConfigurationError(f"ModelPruning({function!r}) is not unstructured. Add: use_global_unstructured=False")
    if together:
        return partial(_prune_together, method, "amount" in inspect.signature(method).parameters)
    if one is None:
        raise ConfigurationError("ModelPruning with a BasePruningMethod needs use_global_unstructured=True.")
    return partial(_prune_each, one, options)


def _prune_together(method: Any, with_amount: bool, pairs: list[tuple[nn.Module, str]], amount: float) -> None:
    prune.global_unstructured(pairs, pruning_method=method, **({"amount": amount} if with_amount else {}))


def _prune_each(one: Callable[..., Any], options: dict[str, Any], pairs: list[tuple[nn.Module, str]], amount: float) -> None:
    for layer, name in pairs:
        one(layer, name, amount=amount, **options)
