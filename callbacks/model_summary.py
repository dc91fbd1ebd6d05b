"""`ModelSummary`: a table of the model's layers, before training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.callbacks._summary import Summary, columns_as_text
from trainkit.checks import whole_number
from trainkit.console import echo, notice
from trainkit.errors import UnknownNameError, nearest

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["ModelSummary"]


class ModelSummary(Callback):
    """Prints a table of the layers with their types, numbers of parameters and modes when `fit` starts.

    If the module has an `example_input_array`, one forward runs on it, without gradients and in evaluation mode, and the
    table shows the FLOPs and the sizes of inputs and outputs of each layer. Modes and random state are restored.
    `trainkit.utilities.summary.summarize` returns the numbers.

    Args:
        max_depth: Depth of nested layers to list; -1 lists all, 0 prints nothing.
        summarize_kwargs: Further keyword arguments of `summarize`, for a subclass that overrides it.

    Raises:
        ConfigurationError: `max_depth` is not an integer of at least -1.
        UnknownNameError: A further argument, and `summarize` is not overridden.

    Example:
        ```python
        trainer = Trainer(callbacks=[ModelSummary(max_depth=2)])
        ```
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__()
        if summarize_kwargs and type(self).summarize is ModelSummary.summarize:
            name = next(iter(summarize_kwargs))
            raise UnknownNameError(
                f"ModelSummary has no argument {name!r}.{nearest(name, ('max_depth',))} Known: max_depth. Arguments of your "
                "own need a subclass: def summarize(summary_data, *counts, **options)"
            )
        self.max_depth = whole_number(max_depth, "ModelSummary(max_depth=)", -1)
        self.summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.max_depth == 0 or not trainer.is_global_zero:
            return
        placeholders = trainer.strategy.stored_weights(module) if trainer.strategy.shards_parameters else None
        summary = Summary(module, self.max_depth, precision=trainer.precision_plugin, placeholders=placeholders)
        self.summarize(
            summary.columns(),
            summary.total_parameters,
            summary.trainable_parameters,
            summary.model_size,
            summary.total_training_modes,
            total_flops=summary.total_flops,
            **self.summarize_kwargs,
        )
        for note in summary.notes():
            notice(f"ModelSummary: {note}")

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the table, on the main process. Override it to print something else.

        Args:
            summary_data: The columns of the table, each a name and its cells: `" "` (a number), `"Name"`, `"Type"`,
                `"Params"`, `"Mode"`, `"FLOPs"`, and with an example input `"In sizes"` and `"Out sizes"`.
            total_parameters: Number of elements of all parameters.
            trainable_parameters: Number of elements of those with `requires_grad`.
            model_size: Size of all parameters, in megabytes.
            total_training_modes: Number of submodules in the modes `"train"` and `"eval"`.
            total_flops: FLOPs of the forward; 0 without an example input.
            summarize_kwargs: What the constructor was given.
        """
        counts = (total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        echo(columns_as_text(summary_data, *counts), flush=True)
