"""Which cases of the large grids run in CI: a few in which each value occurs; the others are marked slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

GRIDS = ("fsdp", "zero", "xla", "grid")  # the pytest marks of the grids


def mark_others_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests with a mark of `GRIDS` that `covering` does not choose as slow.

    Of the strategies that the conformance suite tests, each function takes every third one, beginning with another one than
    the function before.
    """
    functions: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and any(item.get_closest_marker(name) for name in GRIDS)
        ):
            marks = ",".join(name for name in GRIDS if item.get_closest_marker(name))
            functions.setdefault((f"{item.path} {marks}", item.originalname), []).append(item)
    for number, cases in enumerate(functions.values()):
        if list(cases[0].callspec.params) == ["setting"]:
            chosen = range(number % 3, len(cases), 3) or range(1)
        else:
            chosen = covering([_values(case) for case in cases])
        for place in set(range(len(cases))) - set(chosen):
            cases[place].add_marker(pytest.mark.slow)


def covering(rows: Sequence[Sequence[str]]) -> list[int]:
    """The places of a few rows that contain each value of each column."""
    values = [set(enumerate(row)) for row in rows]
    missing = set().union(*values)
    used: Counter[tuple[int, str]] = Counter()
    chosen: list[int] = []
    while missing:
        # Of equally good rows, the one whose values were chosen the fewest times.
        best = max(
            range(len(rows)), key=lambda place: (len(values[place] & missing), -sum(used[at] for at in enumerate(rows[place])))
        )
        missing -= values[best]
        used.update(enumerate(rows[best]))
        chosen.append(best)
    return chosen


def _values(case: pytest.Function) -> list[str]:
    """A value for each `parametrize` of a test, or its fixtures with parameters: those of one decorator belong together.

    With the mark `grid`, those of a single decorator are taken one by one.
    """
    decorated = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [[name.strip() for name in each.split(",")] if isinstance(each, str) else [*each] for each in decorated]
    if case.get_closest_marker("grid") and len(names) == 1:
        names = [[name] for name in names[0]]
    others = set(case.callspec.params) - {name for each in names for name in each}
    return [repr([case.callspec.params[name] for name in each]) for each in (*names, *([name] for name in sorted(others)))]
