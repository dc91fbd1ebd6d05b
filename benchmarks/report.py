"""The tables of a benchmark: printed as they are measured, written as JSON, and turned into Markdown.

All programs write the same JSON: `facts` about the machine, and `tables`, each with its title, its columns and its rows. A row
has its cells and, if there is a limit, the limit and whether it is held. No package is needed, so `bench.py` runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Column", "Report", "Spread", "Table", "json_option", "markdown", "missed", "progress", "version"]


class Column(NamedTuple):
    """A heading, and the number of digits after the decimal point."""

    title: str
    digits: int = 1


@dataclass(frozen=True)
class Spread:
    """The median and the range of what was measured several times."""

    median: float
    lowest: float
    highest: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), tuple(values))


Cell = Spread | float | str | None


class Table:
    """Rows under headings. Each row is printed when it is added."""

    def __init__(self, title: str, columns: Sequence[Column]) -> None:
        self.title, self.columns = title, columns
        self.rows: list[dict[str, Any]] = []
        self._widths: list[int] = []

    def add(
        self, name: str, *cells: Cell, judged: float | None = None, most: float | None = None, least: float | None = None
    ) -> None:
        """Add and print a row.

        Args:
            name: what was measured.
            cells: one for each column; None for an empty one.
            judged: the figure that is compared with the limits.
            most: its maximum, if there is a limit.
            least: its minimum, if there is a limit.
        """
        held = None
        if judged is not None and not (most is None and least is None):
            held = (most is None or judged <= most) and (least is None or judged >= least)
        plain = [asdict(cell) if isinstance(cell, Spread) else cell for cell in cells]
        row = {"name": name, "cells": plain, "judged": judged, "most": most, "least": least, "held": held}
        self.rows.append(row)
        texts = [_text(cell, column.digits) for cell, column in zip(plain, self.columns, strict=True)]
        if not self._widths:
            pairs = zip(texts, self.columns, strict=True)
            self._widths = [max(len(text) + 2, len(column.title), 8) + 2 for text, column in pairs]
            print("\n" + self._line(self.title, [column.title for column in self.columns]))
        print(f"{self._line(name, texts)}  {_limit(row)} {_verdict(row)}".rstrip(), flush=True)

    def _line(self, name: str, texts: list[str]) -> str:
        return f"{name:<46}" + "".join(f"{text:>{width}}" for text, width in zip(texts, self._widths, strict=True))


class Report:
    """The tables of one program. Prints the facts about the machine at once.

    Args:
        facts: further facts.
    """

    def __init__(self, **facts: Any) -> None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self.facts: dict[str, Any] = {"python": platform.python_version(), "torch": version("torch")}
        self.facts |= {"machine": platform.machine(), "cores": os.cpu_count(), "load": load, **facts}
        print(", ".join(f"{name} {value}" for name, value in self.facts.items() if value is not None))
        self.tables: list[Table] = []

    def table(self, title: str, *columns: Column) -> Table:
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def finish(self, path: Path | None) -> int:
        """Write the JSON if there is a path; returns 1 if a limit is missed."""
        tables = [
            {"title": each.title, "columns": [c._asdict() for c in each.columns], "rows": each.rows} for each in self.tables
        ]
        document = {"facts": self.facts, "tables": tables}
        if path is not None:
            path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        return int(any(missed(document)))


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def progress(text: str = "") -> None:
    """Show what is being measured, on a terminal."""
    if sys.stderr.isatty():
        print("\r" + text.ljust(60) + "\r" * (not text), end="", file=sys.stderr, flush=True)


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missed(document: dict[str, Any]) -> Iterator[str]:
    """The rows of a program's JSON whose limit is not held."""
    for table in document["tables"]:
        for row in table["rows"]:
            if row["held"] is False:
                yield f"{table['title']}: {row['name']}: {row['judged']:.4g}, limit {_limit(row)}"


def markdown(document: dict[str, Any]) -> str:
    """The tables of a program's JSON as Markdown."""
    return "\n\n".join(_markdown_table(table) for table in document["tables"] if table["rows"])


def _markdown_table(table: dict[str, Any]) -> str:
    limited = any(row["held"] is not None for row in table["rows"])
    lines = [[table["title"], *(column["title"] for column in table["columns"]), *(["limit", ""] if limited else [])]]
    lines.append(["---"] * len(lines[0]))
    for row in table["rows"]:
        texts = [_text(cell, column["digits"]) for cell, column in zip(row["cells"], table["columns"], strict=True)]
        lines.append([row["name"], *texts, *([_limit(row), _verdict(row)] if limited else [])])
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def _text(cell: Any, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, dict):
        return f"{cell['median']:,.{digits}f} ({cell['lowest']:,.{digits}f}–{cell['highest']:,.{digits}f})"
    return cell if isinstance(cell, str) else f"{cell:,.{digits}f}"


def _limit(row: dict[str, Any]) -> str:
    least, most = row["least"], row["most"]
    if row["held"] is None:
        return ""
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    return f"≤ {most:g}" if least is None else f"≥ {least:g}"


def _verdict(row: dict[str, Any]) -> str:
    return {None: "", True: "held", False: "MISSED"}[row["held"]]
