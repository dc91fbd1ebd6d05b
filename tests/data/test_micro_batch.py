"""`MicroBatch` is immutable."""

from __future__ import annotations

import copy
import pickle

import pytest

from trainkit.micro_batch import NO_BATCH, WHOLE_WINDOW, MicroBatch, MicroBatchKind


def test_it_cannot_be_changed() -> None:
    micro = MicroBatch("batch", 3, True, False, 0.5)
    with pytest.raises(AttributeError):
        micro.share = 1.0  # type: ignore[misc]
    rest = (MicroBatchKind.DATA, False, True, False, None, None, False)
    assert micro._replace(last=True) == ("batch", 3, True, True, 0.5, *rest)
    assert micro.index == 3


def test_outside_of_a_loader_each_backward_is_a_window_of_its_own() -> None:
    """Without a loader, each backward pass is a complete accumulation window."""
    assert (WHOLE_WINDOW.first, WHOLE_WINDOW.last, WHOLE_WINDOW.share, WHOLE_WINDOW.empty) == (True, True, 1.0, False)


def test_a_copy_of_no_batch_is_the_same_object() -> None:
    assert copy.deepcopy(NO_BATCH) is NO_BATCH
    assert pickle.loads(pickle.dumps(NO_BATCH)) is NO_BATCH
    assert not NO_BATCH
    assert repr(NO_BATCH) == "NO_BATCH"
