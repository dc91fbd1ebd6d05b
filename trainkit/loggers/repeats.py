"""``Repeats``: what a tracker has already of the records that a resumed run is about to log once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["Repeats"]


class Repeats:
    """For trackers from which nothing can be taken back: after a resume, each record is logged once.

    A checkpoint holds how many records of each metric there were. What the tracker has beyond that was logged by the process
    that was killed; a record of the same metric and step that comes again is skipped.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._later: dict[str, list[int]] | None = None  # by metric, steps of records that lie behind the position

    def new_run(self) -> None:
        """Nothing is there yet."""
        self.counts, self._later = {}, None

    def resume(self, counts: Mapping[str, int]) -> None:
        """The run has records; the position is after this number of each metric."""
        self.counts, self._later = dict(counts), {}

    def has(self, key: str, step: int, steps_of: Callable[[str], list[int]]) -> bool:
        """Whether the record is there from before the resume. If so, the position moves behind it.

        Args:
            key: the metric.
            step: its step.
            steps_of: asked once for each metric: the steps of all its records, in the order in which they were logged.
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
        """A record of this metric was logged."""
        self.counts[key] = self.counts.get(key, 0) + 1
