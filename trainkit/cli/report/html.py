"""Pieces of HTML, in which all text from the user's files is escaped.

With the colors and style sheets, for light and dark, wide and narrow.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from trainkit.masking import escape_controls

__all__ = [
    "CHART",
    "COLORS",
    "DASHES",
    "PAGE",
    "card",
    "data",
    "definitions",
    "duration",
    "element",
    "number",
    "safe",
    "section",
    "table",
    "time_text",
]


def safe(text: object) -> str:
    """Text with special characters of HTML and control characters escaped."""
    return html.escape(escape_controls(str(text), keep=""))


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


# Legible on white and on nearly black; neighbors differ in hue.
COLORS = (
    "#3b82d0", "#e0772b", "#2f9e6e", "#d1495b", "#8a63c9", "#a9762f", "#d25fa0", "#7b8794", "#94981f", "#1fa3b5",
)  # fmt: skip
DASHES = ("solid", "dashed", "dotted", "dotdash")

# Bokeh reads these variables when it draws.
CHART = """
:host {
  --ink: #5b6470; --rule: #e3e6ea;
  --bk-major-label-text-color: var(--ink); --bk-axis-label-text-color: var(--ink);
  --bk-major-label-text-font-size: 11px; --bk-axis-label-text-font-size: 11px;
  --bk-axis-line-color: var(--rule); --bk-major-tick-line-color: var(--rule); --bk-grid-line-color: var(--rule);
}
@media (prefers-color-scheme: dark) { :host { --ink: #a3acb8; --rule: #343a43; } }
"""

PAGE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1d2129; --soft: #5b6470; --rule: #e3e6ea;
  --mark: #fff3d6; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #121418; --card: #1a1d22; --ink: #e4e7eb; --soft: #a3acb8;
  --rule: #343a43; --mark: #3d3317; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
p { margin: 0 0 12px; }
header p { margin: 0 0 4px; overflow-wrap: anywhere; }
header { margin-bottom: 20px; }
.soft, figcaption { color: var(--soft); font-size: 13px; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }
figure, .card { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 14px 8px;
  min-width: 0; }
.wide { overflow-x: auto; padding: 4px 14px; }
.card + .card, figure + .card, .card + h3, h3 + .card { margin-top: 12px; }
.card h3 { margin: 4px 0; }
.card > p { margin: 0 0 6px; }
.card > pre + p { margin-top: 10px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px; margin: 2px 0 6px; }
.keys span { overflow-wrap: anywhere; }
.keys i { display: inline-block; width: 22px; border-top: 2px solid; margin-right: 6px; vertical-align: middle; }
.keys .dotdash { border-top-style: double; border-top-width: 4px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 18px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
.group th { padding-top: 14px; font-weight: 600; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
tbody th { font-weight: 500; }
td, tbody th { overflow-wrap: break-word; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.nowrap { white-space: nowrap; }
.differs td { background: var(--mark); }
.bad { color: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px 20px; margin: 6px 0; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { margin: 0; padding: 2px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.argument { display: inline-block; max-width: 100%; }
@media (max-width: 600px) { main { padding: 16px 12px 32px; } h1 { font-size: 20px; } h2 { margin-top: 28px; }
  figure, .card { padding: 12px 10px 6px; } .wide { padding: 4px 10px; }
  dl { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); } }
@media print { body { background: none; } figure, .card { break-inside: avoid; } }
"""
