"""The records that `verify-resume` writes for each micro-batch, and the search for the first difference between two runs."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.cli.resume_child import fingerprint, first_difference, loss_of, read_records

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Any
    y: Any


def record(step: int = 1, batch: int = 0, leaves: Any = None, loss: Any = 1.0, **values: Any) -> dict[str, Any]:
    own = {"step": step, "epoch": 0, "batch": batch, "rates": [0.1], "parameters": None}
    loss = loss_of(torch.tensor(loss)) if loss is not None else None
    return {**own, "leaves": fingerprint(torch.zeros(3) if leaves is None else leaves), "loss": loss, **values}


X = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("batch, paths", [
    (X, ["batch"]),
    ([X, X], ["[0]", "[1]"]),
    ({"a": X, "b": (X, None)}, ["['a']", "['b'][0]", "['b'][1]"]),
    (Pair(X, 1), ["[0]", "[1]"]),
    (Sample(X, np.arange(3)), [".x", ".y"]),
    (SimpleNamespace(x=X, name="n"), [".x", ".name"]),
    (["one", "two"], ["batch"]),
    (X.to_sparse(), ["batch"]),
    (None, ["batch"]),
])  # fmt: skip
def test_every_leaf_is_found(batch: Any, paths: list[str]) -> None:
    assert list(fingerprint(batch)) == paths


@pytest.mark.parametrize("first, second", [
    (X, X.double()),
    (X, X.reshape(2, 3)),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor(1), torch.tensor(2)),
    (torch.zeros(0, 2), torch.zeros(0, 3)),
    (np.arange(3), np.arange(3.0)),
    (np.array(1.0), np.array(2.0)),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (["one", "two"], ["one", "too"]),
    (["one"], ("one",)),
    (1, True),
    ({"a": X}, {"b": X}),
    (torch.tensor([1.0]).bfloat16(), torch.tensor([1.5]).bfloat16()),
    (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]).conj()),
])  # fmt: skip
def test_different_values_have_different_fingerprints(first: Any, second: Any) -> None:
    assert fingerprint(first) == fingerprint(first)
    assert fingerprint(first) != fingerprint(second)
    difference = first_difference([record(leaves=first)], [record(leaves=second)], name="the resumed run", killed=False)
    assert difference is not None
    assert difference.kind == "batch"


def test_strides_and_copies_make_no_difference() -> None:
    assert fingerprint(X.t()) == fingerprint(X.t().contiguous())
    assert fingerprint({"x": X, "y": [np.ones(2), math.nan]}) == fingerprint({"x": X.clone(), "y": [np.ones(2), math.nan]})


def test_unknown_types_are_marked() -> None:
    [digests] = fingerprint(X.to_sparse()).values()
    assert digests == ["not compared: Tensor"]
    [digests] = fingerprint(np.array([object()])).values()
    assert digests == ["not compared: ndarray"]


def test_the_sample_is_named() -> None:
    other = X.clone()
    other[1, 0] = 9.0

    def text(first: Any, second: Any) -> str:
        found = first_difference([record(4, 2, first)], [record(4, 2, second)], name="the resumed run", killed=False)
        assert found is not None
        assert found.step == 4
        return found.text

    assert text({"x": X}, {"x": other}) == "step 4 (epoch 0, batch 2): the batch differs: ['x'], sample 1 of 3"
    other[2] = 7.0
    assert text([X], [other]).endswith("[0], sample 1 and 1 more of 3")
    assert text([X], [X[:2]]).endswith("[0] has 3 and 2 samples")
    assert text(["a", "b"], ["a", "c"]).endswith("batch, sample 1 of 2")
    assert text([X], [X, X]).endswith("only one of the batches has [1]")
    assert text([X], [X.long()]).endswith("[0], sample 0 and 2 more of 3")


def test_the_loss_by_its_bits() -> None:
    assert loss_of({"loss": torch.tensor(0.5)}) == {"value": "0.5", "bits": "torch.float32 0000003f"}
    assert loss_of(torch.tensor([0.5]).bfloat16()) == {"value": "0.5", "bits": "torch.bfloat16 003f"}
    assert loss_of(None) is loss_of({"x": 1}) is loss_of(torch.ones(2)) is loss_of({"loss": 1.0}) is None
    nan = torch.tensor(math.nan)
    assert loss_of(nan) == loss_of(nan.clone())
    zeros = [record(loss=0.0)], [record(loss=-0.0)]
    found = first_difference(*zeros, name="the resumed run", killed=False)
    assert found is not None
    assert found.text == "step 1 (epoch 0, batch 0): the loss is 0.0, in the resumed run -0.0"


def test_the_first_difference_of_a_run() -> None:
    run = [record(step=n, batch=n) for n in range(1, 6)]

    def kind(second: list[dict[str, Any]], killed: bool = False) -> str | None:
        found = first_difference(run, second, name="the resumed run", killed=killed)
        return None if found is None else f"{found.kind} {found.step}"

    assert kind(run) is None
    assert kind(run[:3], killed=True) is None
    assert kind(run[:3]) == "length 4"
    assert kind([*run, record(step=6, batch=6)]) == "length 6"
    assert kind([run[0], {**run[1], "rates": [0.2]}, run[2]], killed=True) == "rate 2"
    assert kind([run[0], {**run[1], "batch": 7}]) == "order 2"
    assert kind([run[0], {**run[1], "epoch": 1}]) == "order 2"
    assert kind([run[0], record(step=2, batch=2, loss=None)]) == "loss 2"
    assert kind([run[0], {**run[1], "parameters": ["a"]}]) == "loss 2"
    # if several values of a step differ, the first one is reported: the loss depends on the batch
    assert kind([run[0], {**record(2, 2, torch.ones(3), 3.0), "rates": [1.0]}]) == "batch 2"


def test_a_line_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step')
    assert read_records(path) == [{"step": 1}, {"step": 2}]
