"""The picture of the rooms of trainkit, drawn from the imports: layers of pyproject.toml, and what imports what by grimp.

`docs/build_hooks.py` puts it into docs/concepts/architecture.md each time the site is built.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # of import-linter

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1000  # of the picture
BOX = 38  # height of a room
GAP = 10  # between two rooms
ROW = 100  # from one row to the next
STYLE = """
  .rooms text { fill: var(--md-default-fg-color, #222); font: 14px sans-serif; text-anchor: middle; }
  .rooms .size { font-size: 11px; opacity: .7; }
  .rooms rect { fill: var(--md-code-bg-color, #eee); stroke: var(--md-primary-fg-color, #3f51b5); }
  .rooms path { fill: none; stroke: var(--md-default-fg-color--light, #888); opacity: .45; }
"""


def layers() -> list[list[str]]:
    """The rooms from top to bottom, as import-linter checks them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    [contract] = [one for one in settings["contracts"] if one["type"] == "layers"]
    return [[room.strip() for room in re.split("[:|]", layer)] for layer in contract["layers"]]


def imports(rooms: list[str]) -> dict[str, set[str]]:
    """Room → the rooms that its modules import, without those that it reaches through another of them."""
    graph = grimp.build_graph("trainkit", exclude_type_checking_imports=True)
    below = {
        room: {
            other
            for other in rooms
            if other != room and graph.find_shortest_chains(f"trainkit.{room}", f"trainkit.{other}", as_packages=True)
        }
        for room in rooms
    }
    return {room: {other for other in all_ if not any(other in below[one] for one in all_)} for room, all_ in below.items()}


def size(room: str) -> tuple[int, int]:
    """The number of files of a room, and of their lines."""
    path = ROOT / "trainkit" / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return len(files), sum(file.read_text("utf-8").count("\n") for file in files)


def picture() -> str:
    """The picture as SVG, for a page that is light or dark."""
    rows = layers()
    places: dict[str, tuple[float, float, float]] = {}  # room → left, top, width
    shapes: list[str] = []
    for number, row in enumerate(rows):
        widths = [max(8.5 * len(room) + 14, 126 if (ROOT / "trainkit" / room).is_dir() else 64) for room in row]
        left = (WIDTH - sum(widths) - GAP * (len(row) - 1)) / 2
        for room, width in zip(row, widths, strict=True):
            top = number * ROW + 4
            places[room] = (left, top, width)
            files, lines = size(room)
            middle, folder = left + width / 2, "/" if files > 1 else ""
            text = f"{files} files, {lines:,} lines" if files > 1 else f"{lines:,} lines"
            shapes.append(
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{BOX}" rx="5"/>'
                f'<text x="{middle:.0f}" y="{top + 17}">{escape(room)}{folder}</text>'
                f'<text class="size" x="{middle:.0f}" y="{top + 31}">{text}</text>'
            )
            left += width + GAP
    arrows = []
    for room, others in imports(list(places)).items():
        for other in sorted(others):
            (x, y, w), (to_x, to_y, to_w) = places[room], places[other]
            x, y, to_x = x + w / 2, y + BOX, to_x + to_w / 2
            bend = (to_y - y) / 2
            arrows.append(f'<path d="M{x:.0f} {y} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y}"/>')
    return (
        f'<svg class="rooms" viewBox="0 0 {WIDTH} {len(rows) * ROW}" role="img" aria-label="The rooms of trainkit in layers">'
        f"<style>{STYLE}</style>{''.join(arrows)}{''.join(shapes)}</svg>"
    )


if __name__ == "__main__":
    print(picture())
