"""`ModelSummary`: a table of the model's layers, before training starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from trainkit.callback import Callback
from trainkit.checks import whole_number
from trainkit.errors import HookError
from trainkit.nested import move
from trainkit.precision import Precision
from trainkit.rng import RandomState

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["LayerSummary", "ModelSummary", "Summary", "summarize"]

_UNKNOWN = "?"


class ModelSummary(Callback):
    """Prints a table of the layers with their types, numbers of parameters and modes when `fit` starts.

    If the module has an `example_input_array`, one forward runs on it, without gradients and in evaluation mode, and the
    table shows the sizes of inputs and outputs of each layer. Modes and random state are restored.

    Args:
        max_depth: Depth of nested layers to list; -1 lists all, 0 prints nothing.

    Raises:
        ConfigurationError: `max_depth` is not an integer of at least -1.
        HookError: A subclass defines Lightning's `summarize`; define `show`.

    Example:
        ```python
        trainer = Trainer(callbacks=[ModelSummary(max_depth=2)])
        ```
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__()
        if hasattr(type(self), "summarize"):
            raise HookError(
                f"{type(self).__name__}.summarize would not be called: the arguments of Lightning's summarize are one object "
                f"here. Fix: rename it, def show(self, summary): print(summary.total, summary.layers)"
            )
        self.max_depth = whole_number(max_depth, "ModelSummary(max_depth=)", -1)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.max_depth == 0 or not trainer.is_global_zero:
            return
        placeholders = trainer.strategy.stored_weights(module) if trainer.strategy.shards_parameters else None
        self.show(summarize(module, self.max_depth, precision=trainer.precision_plugin, placeholders=placeholders))

    def show(self, summary: Summary) -> None:
        """Print the table, on the main process. Override it to print something else.

        Args:
            summary: What was counted.
        """
        print(summary, flush=True)


@dataclass
class LayerSummary:
    """One line of the table.

    Attributes:
        name: The layer's name in the module, with dots.
        kind: Its class.
        parameters: Number of elements of its parameters, including those of nested layers; each tensor once.
        training: Whether it is in training mode; None for the line of parameters that belong to no layer.
        in_size: Sizes of the inputs of its `forward`, `"?"` if not a tensor; None without an example input.
        out_size: Sizes of its outputs, in the same form.
    """

    name: str
    kind: str
    parameters: int
    training: bool | None
    in_size: Any = None
    out_size: Any = None


@dataclass
class Summary:
    """The result of `summarize`; `str()` of it is the table.

    Attributes:
        layers: The lines, in the order of `named_modules`.
        trainable: Number of elements of parameters with `requires_grad`.
        non_trainable: Number of elements of the others.
        size_bytes: Bytes of all parameters, each in its own dtype.
        modules_in_train_mode: Number of submodules in training mode, at any depth.
        modules_in_eval_mode: Number of the others.
        shared: Number of parameters with more than one name; each counts once.
        uninitialized: Number of parameters of lazy modules, whose size is not known yet; they count 0.
        has_sizes: Whether a forward was run for the sizes.
    """

    layers: list[LayerSummary] = field(default_factory=list)
    trainable: int = 0
    non_trainable: int = 0
    size_bytes: int = 0
    modules_in_train_mode: int = 0
    modules_in_eval_mode: int = 0
    shared: int = 0
    uninitialized: int = 0
    has_sizes: bool = False

    @property
    def total(self) -> int:
        """Number of elements of all parameters."""
        return self.trainable + self.non_trainable

    @property
    def size_mb(self) -> float:
        """Size of all parameters in megabytes (10^6 bytes)."""
        return self.size_bytes / 1e6

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The names of the columns, and the cells of each line."""
        header = ["", "Name", "Type", "Params", "Mode"] + (["In sizes", "Out sizes"] if self.has_sizes else [])
        return header, [self._row(number, layer) for number, layer in enumerate(self.layers)]

    def __str__(self) -> str:
        header, rows = self.table()
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        table = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
        rule = "-" * max(len(line) for line in table)
        return "\n".join(line.rstrip() for line in [table[0], rule, *table[1:], rule, *self.totals()])

    def _row(self, number: int, layer: LayerSummary) -> list[str]:
        mode = {True: "train", False: "eval", None: ""}[layer.training]
        row = [str(number), layer.name, layer.kind, readable_count(layer.parameters), mode]
        if self.has_sizes:
            row += [_UNKNOWN if size is None else str(size) for size in (layer.in_size, layer.out_size)]
        return row

    def totals(self) -> list[str]:
        """The lines below the table."""
        lines = [
            (readable_count(self.trainable), "Trainable params"),
            (readable_count(self.non_trainable), "Non-trainable params"),
            (readable_count(self.total), "Total params"),
            (f"{self.size_mb:.3f}", "Total size of the parameters (MB)"),
            (str(self.modules_in_train_mode), "Modules in train mode"),
            (str(self.modules_in_eval_mode), "Modules in eval mode"),
        ]
        if self.shared:
            lines.append((str(self.shared), "Shared parameters, counted once"))
        if self.uninitialized:
            lines.append((str(self.uninitialized), "Parameters of unknown size (lazy modules), counted as 0"))
        return [f"{number:<10}{what}" for number, what in lines]


def summarize(
    module: nn.Module,
    max_depth: int = 1,
    *,
    precision: Precision | None = None,
    placeholders: Mapping[int, Tensor] | None = None,
) -> Summary:
    """Count a module's parameters, layer by layer.

    Args:
        module: Any module; if it has an `example_input_array` (a tensor, a tuple of positional or a dict of keyword
            arguments of `forward`) that is not None, one forward is run for the sizes.
        max_depth: Depth of nested layers to list; -1 lists all, 0 none.
        precision: Of that forward; None for float32.
        placeholders: `id(parameter)` → a tensor of its full shape, for sharded parameters; then no forward is run.

    Returns:
        The summary; print it.

    Example:
        ```python
        print(summarize(module, max_depth=-1))
        ```
    """
    max_depth = whole_number(max_depth, "summarize(max_depth=)", -1)
    listed = {
        name: layer for name, layer in module.named_modules() if name and (max_depth == -1 or name.count(".") < max_depth)
    }

    def size(parameter: Tensor) -> int:
        whole = (placeholders or {}).get(id(parameter), parameter)
        return 0 if isinstance(whole, UninitializedParameter) else whole.numel()

    summary = Summary(
        [
            LayerSummary(n, type(layer).__name__, sum(map(size, layer.parameters())), layer.training)
            for n, layer in listed.items()
        ]
    )
    _count(module, summary, size)
    own = sum(size(parameter) for parameter in module.parameters(recurse=False))
    if own and max_depth != 0:
        summary.layers.append(LayerSummary("(no layer)", "parameters", own, None))
    example = getattr(module, "example_input_array", None)
    if example is not None and listed and not placeholders:
        sizes = _sizes(module, listed, example, precision or Precision("32-true"))
        for line in summary.layers:
            line.in_size, line.out_size = sizes.get(line.name, (None, None))
        summary.has_sizes = True
    return summary


def readable_count(number: int) -> str:
    """`1234567` as `1.2 M`; numbers below a thousand are unchanged."""
    value, units = float(number), ["", "K", "M", "B", "T"]
    while round(value, 1) >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return str(number) if units[0] == "" else f"{value:.1f} {units[0]}"


def _count(module: nn.Module, summary: Summary, size: Callable[[Tensor], int]) -> None:
    for parameter in module.parameters():
        if isinstance(parameter, UninitializedParameter):
            summary.uninitialized += 1
            continue
        if parameter.requires_grad:
            summary.trainable += size(parameter)
        else:
            summary.non_trainable += size(parameter)
        summary.size_bytes += size(parameter) * parameter.element_size()
    names = sum(1 for _ in module.named_parameters(remove_duplicate=False))
    summary.shared = names - sum(1 for _ in module.named_parameters())
    modes = [layer.training for layer in module.modules() if layer is not module]
    summary.modules_in_train_mode = sum(modes)
    summary.modules_in_eval_mode = len(modes) - sum(modes)


def _sizes(
    module: nn.Module, listed: Mapping[str, nn.Module], example: Any, precision: Precision
) -> dict[str, tuple[Any, Any]]:
    """The sizes of inputs and outputs of each listed layer, by one forward on the example."""
    sizes: dict[str, tuple[Any, Any]] = {}

    def hook_for(name: str) -> Any:
        def note(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = [_size_of(value) for value in (*args, *kwargs.values())]
            sizes.setdefault(name, (inputs[0] if len(inputs) == 1 else inputs, _size_of(output)))

        return note

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    example = precision.convert_input(move(example, device))
    handles = [layer.register_forward_hook(hook_for(name), with_kwargs=True) for name, layer in listed.items()]
    try:
        with _unchanged(module, device), torch.no_grad(), precision.forward_context():
            if isinstance(example, Mapping):
                module(**example)
            elif isinstance(example, tuple):
                module(*example)
            else:
                module(example)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Set evaluation mode; restore modes and random state at the end."""
    modes = [(layer, layer.training) for layer in module.modules()]
    generators = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    random_state = RandomState(generators)
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
        random_state.restore()


def _size_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, list | tuple):
        return [_size_of(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _size_of(item) for key, item in value.items()}
    return _UNKNOWN
