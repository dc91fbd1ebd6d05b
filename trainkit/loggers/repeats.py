"""`Repeats`: which records of a resumed run a service already has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["Repeats"]


class Repeats:
    """For services that cannot remove records: after a resume, each record is logged once.

    A checkpoint contains the number of records of each metric. The killed process may have logged more: if the resumed run
    logs a record with the same metric and step again, it is skipped.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._later: dict[str, list[int]] | None = None  # by metric, steps of the records after the position

    def new_run(self) -> None:
        """Start without records."""
        self.counts, self._later = {}, None

    def resume(self, counts: Mapping[str, int]) -> None:
        """Continue a run after this number of records of each metric."""
        self.counts, self._later = dict(counts), {}

    def has(self, key: str, step: int, steps_of: Callable[[str], list[int]]) -> bool:
        """Whether the service has the record from before the resume. If so, the position moves past it.

        Args:
            key: the metric.
            step: its step.
            steps_of: called once for each metric; returns the steps of all its records, in the order of logging.
        """
        if self._later is None:
            return False
        if key not in self._later:
            steps = steps_of(key)
            at = min(self.counts.get(key, 0), len(steps))
            self.counts[key], self._later[key] = at, steps[at:]
        later = self._later[key]
        if step not in later:
            return False
        passed = later.index(step) + 1
        del later[:passed]
        self.counts[key] += passed
        return True

    def note(self, key: str) -> None:
        """Count a record that was logged."""
        self.counts[key] = self.counts.get(key, 0) + 1
