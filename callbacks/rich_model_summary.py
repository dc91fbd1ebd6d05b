"""`RichModelSummary`: the table of the model's layers, drawn by rich."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import Any

from trainkit.callbacks._summary import table_rows, total_lines
from trainkit.callbacks.model_summary import ModelSummary
from trainkit.console import echo
from trainkit.errors import missing_package

__all__ = ["RichModelSummary"]


class RichModelSummary(ModelSummary):
    """Prints the table of `ModelSummary` with the package rich. Install it with `pip install 'trainkit-torch[rich]'`.

    The `Trainer` then adds no `ModelSummary`. On a narrow terminal, long cells are wrapped.

    Args:
        max_depth: Depth of nested layers to list; -1 lists all, 0 prints nothing.
        header_style: Style of the first line, a text such as `"bold magenta"` or a `rich.style.Style`.

    Raises:
        ConfigurationError: `max_depth` is not an integer of at least -1.
        MissingPackageError: rich is not installed.

    Example:
        ```python
        trainer = Trainer(callbacks=[RichModelSummary(max_depth=2)])
        ```
    """

    def __init__(self, max_depth: int = 1, header_style: Any = "bold magenta") -> None:
        if importlib.util.find_spec("rich") is None:
            raise missing_package("rich", "rich", "RichModelSummary")
        super().__init__(max_depth, header_style=header_style)

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
        from rich import get_console
        from rich.console import Capture
        from rich.table import Table
        from rich.text import Text

        header, *rows = table_rows(summary_data, total_flops)
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        numbers = ("Params", "FLOPs", "In sizes", "Out sizes")
        for name in header:
            table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        totals = total_lines(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        console = get_console()
        captured = nullcontext() if console.is_jupyter else console.capture()
        with captured:  # because rich exits the program if a pipe is closed
            console.print(table, markup=False)
            console.print(Text("\n".join(totals)))
        if isinstance(captured, Capture):
            echo(captured.get(), end="", file=console.file, flush=True)
