"""`summarize`: the layers of a model with their types, parameters, modes, FLOPs and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from trainkit.checks import whole_number
from trainkit.console import quantity
from trainkit.nested import move
from trainkit.precision import Precision
from trainkit.rng import RandomState

__all__ = [
    "LEFTOVER_PARAMS_NAME",
    "NOT_APPLICABLE",
    "PARAMETER_NUM_UNITS",
    "UNKNOWN_SIZE",
    "LayerSummary",
    "ModelSummary",
    "Summary",
    "columns_as_text",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
    "table_rows",
    "total_lines",
]

LEFTOVER_PARAMS_NAME = "other params"
"""The name, in the table, of parameters that belong to no layer."""
NOT_APPLICABLE = "n/a"
"""What the table shows for the type, mode and sizes of these parameters."""
PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]
"""The units of `get_human_readable_count`."""
UNKNOWN_SIZE = "?"
"""The size of what is not a tensor, and of a layer that no forward has used."""


class LayerSummary:
    """A layer's class, number of parameters and mode, and the sizes of its first forward from now on.

    Args:
        module: The layer. It gets a forward hook, which its first forward or `detach_hook` removes.
        whole: `id(parameter)` → a tensor of its full shape, for sharded parameters.

    Attributes:
        in_size: Sizes of the inputs of its `forward`, `"?"` for what is not a tensor.
        out_size: Sizes of its outputs, in the same form.

    Example:
        ```python
        layer = LayerSummary(nn.Conv2d(3, 8, 3))
        print(layer.layer_type, layer.num_parameters)
        ```
    """

    def __init__(self, module: nn.Module, whole: Mapping[int, Tensor] | None = None) -> None:
        self._module = module
        self._whole = whole or {}
        self.in_size: Any = UNKNOWN_SIZE
        self.out_size: Any = UNKNOWN_SIZE
        scripted = isinstance(module, torch.jit.ScriptModule)  # it accepts no hook
        self._hook_handle = None if scripted else module.register_forward_hook(self._note, with_kwargs=True)

    @property
    def layer_type(self) -> str:
        """The name of the layer's class."""
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Number of elements of its parameters, including those of nested layers; each tensor counts once."""
        return sum(_elements(parameter, self._whole) for parameter in self._module.parameters())

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        return self._module.training

    def detach_hook(self) -> None:
        """Remove the forward hook, if no forward has."""
        if self._hook_handle is not None:
            self._hook_handle.remove()

    def _note(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = (*args, *kwargs.values())
        self.in_size = parse_batch_shape(inputs[0] if len(inputs) == 1 else inputs) or UNKNOWN_SIZE
        self.out_size = parse_batch_shape(output) or UNKNOWN_SIZE
        self.detach_hook()


class Summary:
    """What `summarize` returns; `str()` of it is the table. Its other name is `ModelSummary`, as in Lightning.

    Numbers and modes are read from the model when you ask for them; sizes and FLOPs are those of one forward on the
    `example_input_array`, when the summary was made.

    Args:
        model: Any module. If it has an `example_input_array` (a tensor, a tuple or list of positional or a dict of keyword
            arguments of `forward`) that is not None, one forward is run, in evaluation mode and without gradients. Modes and
            random state are restored.
        max_depth: Depth of nested layers to list; -1 lists all, 0 none.
        precision: Of that forward; None for float32.
        placeholders: `id(parameter)` → a tensor of its full shape, for sharded parameters; then no forward is run.

    Attributes:
        layers: Name → the `LayerSummary`, in the order of `named_modules`.
        max_depth: As given.
        total_flops: FLOPs of the forward, counted by `torch.utils.flop_counter`: matrix products, convolutions and attention,
            but not those inside of an operator such as that of `nn.LSTM`. 0 without an example.

    Raises:
        ConfigurationError: `max_depth` is not an integer of at least -1.

    Example:
        ```python
        summary = summarize(module, max_depth=-1)
        print(summary, summary.total_parameters)
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        max_depth: int = 1,
        *,
        precision: Precision | None = None,
        placeholders: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.max_depth = whole_number(max_depth, "ModelSummary(max_depth=)", -1)
        self._model = model
        self._precision = precision or Precision("32-true")
        self._whole = placeholders or {}
        self.total_flops = 0
        self._flops: dict[str, dict[Any, int]] = {}
        self._example = None if self._whole else getattr(model, "example_input_array", None)
        self.layers = self.summarize()

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The names and modules of the layers."""
        deep = self.max_depth == -1
        modules = self._model.named_modules()
        return [(name, layer) for name, layer in modules if name and (deep or name.count(".") < self.max_depth)]

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers."""
        return list(self.layers)

    @property
    def layer_types(self) -> list[str]:
        """The names of their classes."""
        return [layer.layer_type for layer in self.layers.values()]

    @property
    def param_nums(self) -> list[int]:
        """Number of elements of the parameters of each layer, including those of nested layers."""
        return [layer.num_parameters for layer in self.layers.values()]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each layer is in training mode."""
        return [layer.training for layer in self.layers.values()]

    @property
    def in_sizes(self) -> list[Any]:
        """Sizes of the inputs of each layer; `"?"` without a forward."""
        return [layer.in_size for layer in self.layers.values()]

    @property
    def out_sizes(self) -> list[Any]:
        """Sizes of the outputs of each layer; `"?"` without a forward."""
        return [layer.out_size for layer in self.layers.values()]

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """Name of a layer → operator of torch → its FLOPs in the forward."""
        return {name: self._flops.get(f"{type(self._model).__name__}.{name}", {}) for name in self.layers}

    @property
    def total_parameters(self) -> int:
        """Number of elements of all parameters; a shared one counts once, one of a lazy module without a size counts 0."""
        return sum(_elements(parameter, self._whole) for parameter in self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """Number of elements of the parameters with `requires_grad`."""
        return sum(_elements(parameter, self._whole) for parameter in self._model.parameters() if parameter.requires_grad)

    @property
    def total_layer_params(self) -> int:
        """The sum of `param_nums`."""
        return sum(self.param_nums)

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Number of submodules, at any depth, in the modes `"train"` and `"eval"`."""
        modes = [layer.training for layer in self._model.modules() if layer is not self._model]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def model_size(self) -> float:
        """Size of all parameters in megabytes (10^6 bytes), each in its own dtype."""
        sizes = ((_elements(parameter, self._whole), parameter) for parameter in self._model.parameters())
        return sum(elements * parameter.element_size() for elements, parameter in sizes if elements) / 1e6

    def summarize(self) -> dict[str, LayerSummary]:
        """Name → a new `LayerSummary` of each layer, after one forward on the example."""
        layers = {name: LayerSummary(layer, self._whole) for name, layer in self.named_modules}
        try:
            if self._example is not None:
                self._forward(self._example)
        finally:
            for layer in layers.values():
                layer.detach_hook()
        return layers

    def columns(self) -> list[tuple[str, list[str]]]:
        """The table: the name of each column and its cells."""
        flops = [sum(counts.values()) for counts in self.flop_counts.values()]
        columns = [
            (" ", [str(number) for number in range(len(self.layers))]),
            ("Name", self.layer_names),
            ("Type", self.layer_types),
            ("Params", [get_human_readable_count(number) for number in self.param_nums]),
            ("Mode", ["train" if training else "eval" for training in self.training_modes]),
            ("FLOPs", [get_human_readable_count(number) for number in flops]),
        ]
        if self._example is not None:
            columns += [("In sizes", [str(s) for s in self.in_sizes]), ("Out sizes", [str(s) for s in self.out_sizes])]
        rest = sum(_elements(parameter, self._whole) for parameter in self._model.parameters(recurse=False))
        if rest and self.max_depth != 0:
            leftover = {" ": " ", "Name": LEFTOVER_PARAMS_NAME, "Params": get_human_readable_count(rest)}
            for name, cells in columns:
                cells.append(leftover.get(name, NOT_APPLICABLE))
        return columns

    def notes(self) -> list[str]:
        """What the numbers do not show, in sentences."""
        names = sum(1 for _ in self._model.named_parameters(remove_duplicate=False))
        shared = names - sum(1 for _ in self._model.named_parameters())
        lazy = sum(isinstance(parameter, UninitializedParameter) for parameter in self._model.parameters())
        notes = []
        if shared:
            notes.append(
                f"{quantity(shared, 'parameter has', 'parameters have')} another name too and "
                f"{'counts' if shared == 1 else 'count'} once."
            )
        if lazy:
            notes.append(
                f"{quantity(lazy, 'parameter of a lazy module has', 'parameters of lazy modules have')} no size yet and "
                f"{'counts' if lazy == 1 else 'count'} as 0. For the size, set self.example_input_array to an input of forward."
            )
        return notes

    def __str__(self) -> str:
        modes = self.total_training_modes
        counts = (self.total_parameters, self.trainable_parameters, self.model_size, modes, self.total_flops)
        return "\n".join([columns_as_text(self.columns(), *counts), *self.notes()])

    def _forward(self, example: Any) -> None:
        """One forward on the example, for the sizes and FLOPs."""
        from torch.utils.flop_counter import FlopCounterMode  # slow to import

        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        example = self._precision.convert_input(move(example, device))
        counter = FlopCounterMode(display=False)
        with _preserve_state(self._model, device), torch.no_grad(), self._precision.forward_context(), counter:
            if isinstance(example, Mapping):
                self._model(**example)
            elif isinstance(example, tuple | list):
                self._model(*example)
            else:
                self._model(example)
        self._flops = {name: dict(counts) for name, counts in counter.get_flop_counts().items()}
        self.total_flops = int(counter.get_total_flops())


ModelSummary = Summary


def summarize(
    module: nn.Module,
    max_depth: int = 1,
    *,
    precision: Precision | None = None,
    placeholders: Mapping[int, Tensor] | None = None,
) -> Summary:
    """Count a module's parameters and FLOPs, layer by layer. The arguments are those of `Summary`.

    Example:
        ```python
        print(summarize(module, max_depth=-1))
        ```
    """
    return Summary(module, max_depth, precision=precision, placeholders=placeholders)


def columns_as_text(
    columns: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: Mapping[str, int],
    total_flops: int,
) -> str:
    """The table and the totals below it, as text. The arguments are those of `ModelSummary.summarize`."""
    rows = table_rows(columns, total_flops)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *table = [" | ".join(map(str.ljust, row, widths)) for row in rows]
    rule = "-" * len(header)
    totals = total_lines(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
    return "\n".join(line.rstrip() for line in [header, rule, *table, rule, *totals])


def table_rows(columns: list[tuple[str, list[str]]], total_flops: int) -> list[list[str]]:
    """The header and the rows of the table; without FLOPs, which only an example input shows, it has no such column."""
    shown = [[name, *cells] for name, cells in columns if name != "FLOPs" or total_flops]
    return [list(row) for row in zip(*shown, strict=True)]


def total_lines(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: Mapping[str, int],
    total_flops: int,
) -> list[str]:
    """The lines below the table."""
    lines = [
        (get_human_readable_count(trainable_parameters), "Trainable params"),
        (get_human_readable_count(total_parameters - trainable_parameters), "Non-trainable params"),
        (get_human_readable_count(total_parameters), "Total params"),
        (get_formatted_model_size(model_size), "Total size of the parameters (MB)"),
        (str(total_training_modes["train"]), "Modules in train mode"),
        (str(total_training_modes["eval"]), "Modules in eval mode"),
    ]
    if total_flops:
        lines.append((get_human_readable_count(total_flops), "FLOPs of one forward"))
    return [f"{number:<10}{what}" for number, what in lines]


def get_human_readable_count(number: int) -> str:
    """`1234567` as `"1.2 M"`, `132096` as `"132 K"`; a number below a thousand has two blanks instead of a unit."""
    value, units = float(number), PARAMETER_NUM_UNITS
    while round(value, 1 if value < 100 else 0) >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    whole = units[0] == " " or round(value, 1) >= 100
    return f"{value:,.0f} {units[0]}" if whole else f"{value:.1f} {units[0]}"


def get_formatted_model_size(total_model_size: float) -> str:
    """A size in megabytes with three decimals: `"5,500.000"`."""
    return f"{total_model_size:,.3f}"


def parse_batch_shape(batch: Any) -> Any:
    """The sizes of a tensor, or of those in a list, tuple or dict; `"?"` for anything else."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, list | tuple):
        return [parse_batch_shape(item) for item in batch]
    if isinstance(batch, Mapping):
        return {key: parse_batch_shape(item) for key, item in batch.items()}
    return UNKNOWN_SIZE


def _elements(parameter: Tensor, whole: Mapping[int, Tensor]) -> int:
    parameter = whole.get(id(parameter), parameter)
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.numel()


@contextmanager
def _preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
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
