"""`RichModelSummary`: the table of the model's layers, drawn by rich."""

from __future__ import annotations

import importlib.util
from typing import Any

from trainkit.callbacks.model_summary import ModelSummary, Summary
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
        super().__init__(max_depth)
        self.header_style = header_style

    def show(self, summary: Summary) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        header, rows = summary.table()
        table = Table(header_style=self.header_style)
        for name in header:
            table.add_column(name, justify="right" if name in ("Params", "In sizes", "Out sizes") else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))  # as they are: "[1, 2]" is not markup
        console = Console()
        console.print(table)
        for line in summary.totals():
            console.print(Text(line))
