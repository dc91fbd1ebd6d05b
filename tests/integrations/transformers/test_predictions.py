"""`Predictions`: in memory or in files, of one rank or of several, padded, and removed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hugging_face.tiny_models import loader, make_model, rows_for

from trainkit import Trainer
from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.integrations.transformers import TransformersModule, predictions
from trainkit.integrations.transformers.predictions import Predictions


@pytest.fixture
def temporary(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = run_dir / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "predictions": (torch.randn(2, width, 3, generator=generator), torch.randn(2, generator=generator)),
            "label_ids": torch.randint(0, 9, (2, width), generator=generator),
        }
        for width in (4, 2, 5, 5)
    ]


@pytest.mark.parametrize("limit", [0, 300, 10**9])  # in files from the start, from the third batch on, and never
def test_batches_are_padded_to_the_longest(limit: int, temporary: Path) -> None:
    collected = Predictions(limit)
    for batch in batches():
        collected.add(batch)
    arrays = collected.gather(World(), {"label_ids": 0})
    assert arrays is not None
    logits, scores = arrays["predictions"]
    assert logits.shape == (8, 5, 3)
    for index, batch in enumerate(batches()):
        rows, width = slice(2 * index, 2 * index + 2), batch["label_ids"].shape[1]
        np.testing.assert_array_equal(logits[rows, :width], batch["predictions"][0])
        np.testing.assert_array_equal(scores[rows], batch["predictions"][1])
        np.testing.assert_array_equal(arrays["label_ids"][rows, :width], batch["label_ids"])
        assert (logits[rows, width:] == -100).all()
        assert (arrays["label_ids"][rows, width:] == 0).all()
    assert isinstance(logits, np.memmap) == (limit < 10**9)
    assert bool(list(temporary.iterdir())) == (limit < 10**9)
    logits[0] = 1.0  # a user may change them
    collected.close()
    assert not list(temporary.iterdir())


def test_kinds_of_numbers() -> None:
    """numpy has no bfloat16; a number of each batch is a row."""
    collected = Predictions()
    collected.add({"a": torch.tensor([1.5], dtype=torch.bfloat16), "b": torch.tensor(2.0), "c": torch.tensor([True])})
    collected.add({"a": torch.tensor([2.5], dtype=torch.bfloat16), "b": torch.tensor(3.0), "c": torch.tensor([False])})
    arrays = collected.gather(World(), {})
    assert arrays is not None
    assert (arrays["a"].dtype, arrays["a"].tolist()) == (np.float32, [1.5, 2.5])
    assert (arrays["b"].tolist(), arrays["c"].tolist()) == ([2.0, 3.0], [True, False])


def test_later_changes_of_a_tensor_have_no_effect() -> None:
    collected, tensor = Predictions(), torch.ones(2)
    collected.add({"a": tensor})
    tensor.zero_()
    arrays = collected.gather(World(), {})
    assert arrays is not None
    assert arrays["a"].tolist() == [1.0, 1.0]


def test_no_batches() -> None:
    assert Predictions().gather(World(), {}) is None


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"a": (torch.ones(2), torch.ones(2))}, "a batch has 2 tensors"),
        ({"a": torch.ones(2, 3)}, "different numbers of dimensions"),
        ({"a": "text"}, "returned str among the a"),
    ],
)
def test_batches_of_another_form(second: dict[str, Any], words: str) -> None:
    collected = Predictions()
    collected.add({"a": torch.ones(2)})
    with pytest.raises(MetricError, match=words):
        (collected.add(second), collected.gather(World(), {}))


def validate(compute: Any, **options: Any) -> None:
    module = TransformersModule(make_model("gpt2"), compute_metrics=compute)
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    Trainer(**{**settings, **options}).validate(module, loader(rows_for("gpt2", 9), 2))


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "MEMORY_LIMIT", 0)


@pytest.mark.usefixtures("no_memory")
def test_metrics_from_files(temporary: Path) -> None:
    seen: list[Any] = []

    def look(prediction: Any) -> dict[str, float]:
        folders = list(temporary.iterdir())
        seen.append((isinstance(prediction.predictions, np.memmap), len(folders), oct(folders[0].stat().st_mode)[-3:]))
        return {}

    validate(look)
    assert seen == [(True, 1, "700")]
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("no_memory")
def test_files_are_removed_after_an_error(temporary: Path) -> None:
    def fail(prediction: Any) -> dict[str, float]:
        assert list(temporary.iterdir())
        raise KeyError("no such class")

    with pytest.raises(KeyError):
        validate(fail)
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("no_memory")
def test_files_are_removed_after_an_error_in_a_batch(temporary: Path) -> None:
    def fail_late(logits: Any, labels: Any) -> Any:
        if list(temporary.iterdir()):
            raise KeyError("in a batch")
        return logits

    module = TransformersModule(make_model("gpt2"), compute_metrics=dict, preprocess_logits_for_metrics=fail_late)
    run = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(KeyError, match="in a batch"):
        run.validate(module, loader(rows_for("gpt2", 9), 2))
    assert not list(temporary.iterdir())


@pytest.mark.world_size(2)
def test_files_of_two_processes(run_dir: Path) -> None:
    folder = run_dir / f"temporary{os.environ['RANK']}"  # the ranks of two hosts see different ones
    folder.mkdir()
    tempfile.tempdir = str(folder)
    predictions.MEMORY_LIMIT = 0
    seen: list[Any] = []

    def look(prediction: Any) -> dict[str, float]:
        seen.append((isinstance(prediction.predictions, np.memmap), prediction.label_ids.shape[0]))
        return {"sum": prediction.label_ids.sum()}

    validate(look, strategy="ddp")
    assert seen in ([(True, 9)], [])
    assert not list(folder.iterdir())
