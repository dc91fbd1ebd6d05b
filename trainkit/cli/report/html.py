"""Pieces of HTML, in which all text from the user's files is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from trainkit.masking import escaped

__all__ = ["card", "data", "definitions", "duration", "element", "number", "safe", "section", "table", "time_text"]


def safe(text: object) -> str:
    """Text with special characters of HTML and control characters escaped."""
    return html.escape(escaped(str(text), keep=""))


def element(tag: str, *content: str, css: str = "") -> str:
    """An HTML element with this content."""
    return f"<{tag}{f' class={css!r}' if css else ''}>{''.join(content)}</{tag}>"


def section(heading: str, content: str) -> str:
    """A section with a heading; empty without content."""
    return f"<section><h2>{safe(heading)}</h2>{content}</section>\n" if content else ""


def card(content: str, css: str = "") -> str:
    """A box with this content."""
    return f"<div class='card {css}'>{content}</div>" if css else f"<div class='card'>{content}</div>"


def table(header: Sequence[str], rows: Iterable[str], right: Sequence[str] = ()) -> str:
    """A table that scrolls horizontally if it does not fit.

    Args:
        header: The titles of the columns.
        rows: HTML of `<tr>` elements.
        right: The titles of right-aligned columns.
    """
    cells = "".join(f"<th{' class=number' if title in right else ''}>{safe(title)}</th>" for title in header)
    return card(f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>", "wide")


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values; the values are HTML."""
    return f"<dl>{''.join(f'<div><dt>{safe(name)}</dt><dd>{value}</dd></div>' for name, value in pairs)}</dl>"


def data(value: float) -> str:
    """A rounded number as text, with the exact value of the log in the attribute `value`."""
    return f"<data value='{value!r}'>{number(value)}</data>"


def number(value: float) -> str:
    """Six significant digits; whole numbers with commas."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.6g}"


def time_text(seconds: float) -> str:
    """A time as text, such as `2026-11-20 15:07:48 UTC`."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """A duration as text, such as `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
