"""`Repeats`: after a resume, no record is logged twice and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainkit.loggers.repeats import Repeats


class Store:
    """A tracker that cannot delete records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int]] = []

    def steps_of(self, key: str) -> list[int]:
        return [step for name, step in self.records if name == key]

    def log(self, repeats: Repeats, key: str, step: int) -> None:
        if not repeats.has(key, step, self.steps_of):
            self.records.append((key, step))
            repeats.note(key)


def script(first: int, last: int) -> list[tuple[str, int]]:
    """The records of a run: a loss per step; after every third step, an evaluation, which counts its batches from 0."""
    found = []
    for step in range(first, last + 1):
        found.append(("loss", step))
        if step % 3 == 0:
            found += [("batch", 0), ("batch", 1), ("val", step)]
    return found


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 3)), max_size=5))
def test_a_run_killed_anywhere_and_often_is_that_of_one_that_was_not(kills: list[tuple[int, int, int]]) -> None:
    """Each kill: the step to resume from next, the number of records until the kill, and how many of the last ones are lost."""
    store, states = Store(), {0: dict[str, int]()}
    at = 0
    for start, length, lost in [*kills, (12, 0, 0)]:
        repeats = Repeats()
        if len(states) > 1:
            repeats.resume(states[at])
        written = script(at + 1, 12)
        stop = len(written) if (start, length, lost) == (12, 0, 0) else length
        before = len(store.records)
        for done, (key, step) in enumerate(written[:stop], start=1):
            store.log(repeats, key, step)
            if written[done : done + 1] == [] or written[done][0] == "loss":  # the end of a step
                states[step] = dict(repeats.counts)
        kept = max(before, len(store.records) - lost)
        newest = [step for step, counts in states.items() if sum(counts.values()) <= kept]
        del store.records[kept:]  # records arrive in order, so those before a checkpoint are complete
        at = min(start, max(newest))
        at = max(step for step in newest if step <= at)
    assert store.records == script(1, 12)


def test_a_new_run_asks_for_nothing() -> None:
    repeats = Repeats()
    assert not repeats.has("a", 0, lambda key: 1 / 0)  # type: ignore[arg-type, return-value]
    repeats.resume({"a": 1})
    repeats.new_run()
    assert not repeats.has("a", 0, lambda key: 1 / 0)  # type: ignore[arg-type, return-value]
    assert repeats.counts == {}


def test_another_logging_interval_loses_nothing() -> None:
    store = Store()
    store.records = [("a", step) for step in (1, 2, 3, 4, 5, 6, 7, 8)]
    repeats = Repeats()
    repeats.resume({"a": 4})
    for step in (6, 8, 10, 12):
        store.log(repeats, "a", step)
    assert [step for _, step in store.records] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert repeats.counts == {"a": 10}


def test_a_tracker_that_has_less_than_the_checkpoint_says() -> None:
    store = Store()
    repeats = Repeats()
    repeats.resume({"a": 4})
    for step in (5, 6):
        store.log(repeats, "a", step)
    assert store.records == [("a", 5), ("a", 6)]
    assert repeats.counts == {"a": 2}
