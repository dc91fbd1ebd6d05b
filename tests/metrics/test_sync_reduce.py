"""The reports of several ranks on their metrics: whether they match, and the reduced values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainkit.errors import MetricError
from trainkit.metrics.sync import apply, check, epoch_number, groups, step_number, values_of


def told(name: str = "x", *, how: str = "mean", step: Any = None, epoch: Any = None, **other: Any) -> list[Any]:
    options = [other.get("on_step", True), other.get("on_epoch", False), False, None]
    if step is not None and len(step) == 3:
        step = [*step, step[2]]  # a window of one micro-batch
    return [name, "", options, how, other.get("main_only", False), other.get("since", 0), step, True, False, epoch]


def one(*of_ranks: list[list[Any]]) -> list[Any]:
    """The group of reports on the only metric."""
    (group,) = groups(of_ranks).values()
    return group


# ------------------------------------------------------------------------------------------- whether the reports match


def complaint(*of_ranks: list[list[Any]], last_stamps: list[int] | None = None, step: bool = False) -> str:
    with pytest.raises(MetricError) as caught:
        check(groups(of_ranks), last_stamps or [9] * len(of_ranks), step=step)
    return str(caught.value)


def test_the_same_metrics_on_all_ranks() -> None:
    check(groups([[told("a"), told("b")], [told("b"), told("a")]]), [0, 0])
    check({}, [0, 0])


def test_a_metric_that_is_missing_names_key_and_ranks() -> None:
    text = complaint([told("acc")], [], [])
    assert text.startswith("log('acc'): logged on rank 0, not on ranks 1, 2. Log it on every rank, or")
    assert "log('acc', value, rank_zero_only=True)" in text
    assert "logged on ranks 0, 2, not on rank 1." in complaint([told()], [], [told()])
    assert "logged on rank 5, not on ranks 0-4, 6-15." in complaint(*[[told()] if r == 5 else [] for r in range(16)])


def test_all_differences_are_in_the_message() -> None:
    text = complaint([told("a"), told("b")], [told("b", on_epoch=True), told("c")])
    assert [line.split(":")[0] for line in text.splitlines()] == ["log('a')", "log('b')", "log('c')"]


@pytest.mark.parametrize(
    "other, words",
    [
        ({"on_epoch": True}, "logged on rank 0 with on_epoch=False, on rank 1 with on_epoch=True. Pass the same"),
        ({"how": "sum"}, "reduce_fx='mean', on rank 1 with reduce_fx='sum'"),
        (
            {"how": "object", "on_step": False},
            "on_step=True, reduce_fx='mean', on rank 1 with on_step=False, reduce_fx='object'",
        ),
    ],
)
def test_options_that_differ(other: dict[str, Any], words: str) -> None:
    assert words in complaint([told()], [told(**other)])
    assert complaint([told()], [told(**other)], [told(**other)]).count("\n") == 0  # one line for all ranks


def test_the_main_processs_own_need_not_be_logged_by_others() -> None:
    check(groups([[told(main_only=True)], [], []]), [9, 9, 9])
    assert "rank_zero_only=True, on rank 1 with rank_zero_only=False" in complaint([told(main_only=True)], [told()])


def test_a_process_without_batches_is_exempt() -> None:
    check(groups([[told()], []]), [3, -1])
    check(groups([[told(since=7)], []]), [7, 6])  # first logged in batch 7, which rank 1 does not have
    complaint([told(since=7)], [], last_stamps=[7, 7])
    complaint([told(since=7)], [], [told(since=5)], last_stamps=[7, 6, 7])  # rank 2 logged it while rank 1 had batches
    complaint([told(since=-1)], [], last_stamps=[0, 0])
    check(groups([[told(since=-1)], []]), [-1, -1])


def test_a_process_without_batches_of_a_loader_is_exempt() -> None:
    """A rank without a batch of the first loader need not log its metrics, although it has batches of the next loader."""
    check(groups([[told(since=0)], []]), [4, 4], [[], [(0, 1)]])
    with pytest.raises(MetricError, match="not on rank 1"):
        check(groups([[told(since=1)], []]), [4, 4], [[], [(0, 1)]])
    with pytest.raises(MetricError, match="not on rank 1"):  # logged in an epoch hook, which all ranks run
        check(groups([[told(since=-1)], []]), [4, 4], [[], [(0, 1)]])


def test_of_a_step_the_newest_values_are_needed() -> None:
    """At a log boundary, every rank that had the newest batch must have logged the metric, in this or in an earlier batch."""
    check(groups([[told(step=[1.0, 1, 7])], []]), [7, 6], step=True)
    complaint([told(step=[1.0, 1, 7])], [], last_stamps=[7, 7], step=True)
    check(groups([[told(step=[1.0, 1, 7])], [told(step=[1.0, 1, 2])]]), [7, 7], step=True)


# ------------------------------------------------------------------------------------------------------ reduced values


def steps(how: str, *values: Any, last: bool = False) -> Any:
    return step_number(one(*[[told(how=how, step=value)] for value in values]), last=last)


@pytest.mark.parametrize(
    "how, number",
    [("mean", (1.0 * 1 + 4.0 * 3) / 4), ("object", 13 / 4), ("sum", 5.0), ("min", 1.0), ("max", 4.0), ("function", [1.0, 4.0])],
)
def test_the_value_of_a_step(how: str, number: Any) -> None:
    assert steps(how, [1.0, 1, 5], [4.0, 3, 5]) == (number, 5)
    assert steps(how, [1.0, 1, 5], [4.0, 3, 5], last=True) == (4.0, 5)


def test_all_values_of_a_window_count() -> None:
    """Ranks may have different numbers of micro-batches in it; a function gets the values in the order of the data."""
    assert steps("mean", [1.0, 3, 7, 4], [4.0, 1, 6, 4], [9.0, 1, 3, 0]) == (7 / 4, 7)
    assert steps("sum", [1.0, 3, 7, 4], [4.0, 1, 6, 4], [9.0, 1, 3, 0]) == (5.0, 7)
    assert steps("function", [[1.0, 3.0, 5.0], 1, 6, 4], [[2.0, 4.0], 1, 5, 4]) == ([1.0, 2.0, 3.0, 4.0, 5.0], 6)
    check(groups([[told(step=[1.0, 1, 7, 4])], []]), [7, 6], step=True)  # logged in a micro-batch that rank 1 did not have


def test_only_the_newest_values_of_a_step_count() -> None:
    assert steps("sum", [1.0, 1, 5], [2.0, 1, 6], [4.0, 1, 6], None) == (6.0, 6)
    assert steps("mean", [0.1, 3, 6], [0.2, 3, 5]) == (0.1, 6)  # unchanged, without rounding
    assert steps("function", [0.1, 3, 6], [0.2, 3, 5]) == (0.1, 6)
    assert steps("mean", None, None) is None


def test_what_was_agreed_on_is_not_reduced_again() -> None:
    """A value whose weight is None is reduced already. It is kept until a rank logs another one."""
    assert steps("sum", [6.0, None, 4], [6.0, None, 4]) == (6.0, 4)
    assert steps("sum", [6.0, None, 4], [1.0, 1, 5]) == (1.0, 5)
    assert steps("sum", [6.0, None, 4], [1.0, 1, 4]) == (1.0, 4)


def test_nan() -> None:
    for how in ("mean", "sum", "min", "max"):
        assert math.isnan(steps(how, [1.0, 1, 0], [math.nan, 1, 0])[0])
        assert math.isnan(steps(how, [math.nan, 1, 0], [1.0, 1, 0])[0])
    assert steps("max", [1.0, 1, 0], [math.inf, 1, 0])[0] == math.inf
    assert steps("mean", [1.0, 1, 0], [math.nan, 0, 0])[0] == 1.0  # a value of weight 0 does not count
    assert math.isnan(steps("mean", [1.0, 0, 0], [2.0, 0, 0])[0])


def epochs(how: str, *values: Any) -> Any:
    return epoch_number(one(*[[told(how=how, on_epoch=True, epoch=value)] for value in values]))


def test_the_value_of_an_epoch() -> None:
    assert epochs("mean", [1.0, 2], [5.0, 1], None) == 2.0
    assert math.isnan(epochs("mean", [0.0, 0], None))
    assert epochs("sum", [1.0, 2], [5.0, 1], None) == 6.0
    assert epochs("min", [1.0, 2], None, [5.0, 1]) == 1.0
    assert epochs("max", [1.0, 2], [5.0, 1]) == 5.0
    assert math.isnan(epochs("max", [1.0, 2], [math.nan, 1]))
    assert epochs("sum", None, None) is None


def test_values_for_a_function_are_in_the_order_of_the_data() -> None:
    group = one(
        [told(how="function", on_epoch=True, epoch=[[0.0, 2.0, 3.0, 5.0], [0, 1, 1, 2]])],  # two values in its second batch
        [told(how="function", on_epoch=True, epoch=[[1.0, 4.0], [0, 1]])],
        [told(how="function", on_epoch=True)],
    )
    assert values_of(group) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert apply("x", lambda values: values.median(), values_of(group)) == 2.0
    with pytest.raises(MetricError, match=r"log\('x'\): the result must be a number or a tensor with one element"):
        apply("x", lambda values: values, [1.0, 2.0])
