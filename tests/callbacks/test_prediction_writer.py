"""`PredictionWriter`: the files that it writes, and subclasses that write themselves."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from trainkit import Trainer
from trainkit.callbacks import PredictionWriter
from trainkit.errors import ConfigurationError


class Numbers:
    """A dataset in which each sample is its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        return float(index)


class Predicts(TinyModule):
    """`predict_step` returns `make(batch)`."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.make(batch)


def numbers(length: int = 7, batch_size: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(length), batch_size=batch_size, **options)  # type: ignore[arg-type]


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def predict(make_trainer: Any, writer: PredictionWriter, make: Any, *loaders: Any, **options: Any) -> Any:
    given = loaders[0] if len(loaders) == 1 else list(loaders)
    return make_trainer(writer, logger=False).predict(Predicts(make), given, **options)


def names(folder: str = "out") -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"write_interval": "step"}, ["'batch', 'epoch', 'batch_and_epoch'", "'step'"]),
        ({"write_interval": "out"}, ["PredictionWriter(output_dir='out')"]),
        ({"write_interval": "epochs", "output_dir": "out"}, ["Did you mean 'epoch'"]),
        ({"write_interval": "batch", "once": True}, ["once=True", "output_dir='predictions', once=True"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PredictionWriter(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_defaults() -> None:
    assert PredictionWriter().write_interval == "batch"
    assert PredictionWriter(once=True).write_interval == "epoch"
    assert PredictionWriter("batch_and_epoch", once=True).once


def test_a_folder_is_needed_before_anything_is_predicted(make_trainer) -> None:
    class Half(PredictionWriter):
        def write_on_batch_end(self, *arguments: Any) -> None:
            pass

    for writer in (PredictionWriter(), PredictionWriter("epoch"), Half("batch_and_epoch")):
        with pytest.raises(ConfigurationError, match=r"no folder to write to.*output_dir='predictions'"):
            predict(make_trainer, writer, lambda batch: 1 / 0, numbers())
    predict(make_trainer, Half(), lambda batch: batch, numbers())


@pytest.mark.parametrize(
    "left", ["batch-00000000.safetensors", "rank-3.jsonl", "predictions.jsonl", "dataloader_0/rank-0.safetensors"]
)
def test_predictions_of_an_earlier_run_are_not_mixed_with_new_ones(make_trainer, run_dir: Path, left: str) -> None:
    path = run_dir / "out" / left
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigurationError, match=rf"already contains predictions \({left.split('/')[0]}\).*'predictions-2'"):
        predict(make_trainer, PredictionWriter(output_dir="out"), lambda batch: 1 / 0, numbers())
    path.unlink()
    if path.parent.name != "out":
        path.parent.rmdir()
    (run_dir / "out" / "mine.txt").touch()  # other files do not matter
    predict(make_trainer, PredictionWriter(output_dir="out"), lambda batch: batch, numbers())


# -------------------------------------------------------------------------------------------------------------- by batch


@pytest.mark.parametrize("keep", [True, False])
def test_tensors_by_batch(make_trainer, keep: bool) -> None:
    result = predict(
        make_trainer, PredictionWriter(output_dir="out"), lambda batch: batch * 2, numbers(), return_predictions=keep
    )
    assert (result is not None) is keep
    assert names() == [f"batch-0000000{number}.safetensors" for number in range(3)]
    last = load_file("out/batch-00000002.safetensors")
    assert set(last) == {"prediction", "batch_indices"}
    assert last["prediction"].tolist() == [12.0]
    assert last["batch_indices"].tolist() == [6]
    assert load_file("out/batch-00000001.safetensors")["batch_indices"].tolist() == [3, 4, 5]


def test_nested_tensors_by_batch(make_trainer) -> None:
    def make(batch: Any) -> Any:
        view = torch.stack([batch, batch])
        return {"logits": view[0], "same": view[0], "boxes": [view.T, {"a": batch.to(torch.bfloat16)}], "batch_indices": batch}

    predict(make_trainer, PredictionWriter(output_dir="out"), make, numbers(3))
    (name,) = names()
    found = load_file(f"out/{name}")
    assert set(found) == {"logits", "same", "boxes/0", "boxes/1/a", "batch_indices"}
    assert found["boxes/0"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert found["boxes/1/a"].dtype is torch.bfloat16
    assert found["batch_indices"].dtype is torch.float64  # the entry of the prediction, not the sample indices


def test_everything_else_as_lines(make_trainer) -> None:
    def make(batch: Any) -> Any:
        first = float(batch[0])
        return {"text": f"é{first}", "value": math.nan if first else -math.inf, 3: (batch, np.float64(2.5), None, True)}

    predict(make_trainer, PredictionWriter(output_dir="out"), make, numbers(4, batch_size=2))
    assert names() == ["rank-0.jsonl"]
    assert lines("out/rank-0.jsonl") == [
        {"batch": 0, "indices": [0, 1], "prediction": {"text": "é0.0", "value": "-inf", "3": [[0, 1], 2.5, None, True]}},
        {"batch": 1, "indices": [2, 3], "prediction": {"text": "é2.0", "value": "nan", "3": [[2, 3], 2.5, None, True]}},
    ]


def test_what_cannot_be_written_is_named(make_trainer) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write prediction\['a'\]\[1\], a set: .*write_on_batch_end"):
        predict(make_trainer, PredictionWriter(output_dir="out"), lambda batch: {"a": [1, {2}]}, numbers())


@pytest.mark.filterwarnings("ignore:the loader of predict shuffles")
def test_indices_are_not_guessed(make_trainer) -> None:
    """Sample indices are written only if they are known, and not, for example, for a shuffled loader."""
    predict(make_trainer, PredictionWriter(output_dir="a"), lambda batch: batch, numbers(shuffle=True))
    assert set(load_file("a/batch-00000000.safetensors")) == {"prediction"}
    predict(make_trainer, PredictionWriter(output_dir="b"), lambda batch: "x", [torch.zeros(2)])
    assert lines("b/rank-0.jsonl") == [{"batch": 0, "indices": None, "prediction": "x"}]
    predict(make_trainer, PredictionWriter(output_dir="c"), lambda batch: batch, numbers(7, batch_size=3, drop_last=True))
    assert len(names("c")) == 2
    sampler = torch.utils.data.DistributedSampler(Numbers(5), 1, 0, shuffle=False)  # type: ignore[arg-type]
    predict(make_trainer, PredictionWriter(output_dir="d"), lambda batch: batch, numbers(5, sampler=sampler))
    assert load_file("d/batch-00000001.safetensors")["batch_indices"].tolist() == [3, 4]


def test_several_loaders_have_a_folder_each(make_trainer) -> None:
    writer = PredictionWriter("batch_and_epoch", output_dir="out")
    predict(make_trainer, writer, lambda batch: batch, numbers(2), numbers(4, batch_size=2))
    assert names() == [
        "dataloader_0/batch-00000000.safetensors",
        "dataloader_0/rank-0.safetensors",
        "dataloader_1/batch-00000000.safetensors",
        "dataloader_1/batch-00000001.safetensors",
        "dataloader_1/rank-0.safetensors",
    ]
    assert load_file("out/dataloader_1/rank-0.safetensors")["prediction"].tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ at the end


@pytest.mark.parametrize("once, stem", [(False, "rank-0"), (True, "predictions")])
def test_tensors_at_the_end(make_trainer, once: bool, stem: str) -> None:
    def make(batch: Any) -> Any:
        return {"twice": batch * 2, "mean": batch.mean(), "ragged": torch.zeros(2, len(batch))}

    predict(make_trainer, PredictionWriter("epoch", "out", once), make, numbers(), return_predictions=False)
    assert names() == [f"{stem}.safetensors"]
    found = load_file(f"out/{stem}.safetensors")
    assert found["twice"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert found["batch_indices"].tolist() == list(range(7))
    assert found["mean/00000002"].item() == 6  # scalars cannot be concatenated
    assert found["ragged/00000000"].shape == (2, 3)
    assert set(found) == {"twice", "batch_indices"} | {f"{n}/0000000{i}" for n in ("mean", "ragged") for i in range(3)}


def test_lines_at_the_end(make_trainer) -> None:
    writer = PredictionWriter(output_dir="out", once=True)
    predict(make_trainer, writer, lambda batch: "text" if batch[0] else batch, numbers(4, batch_size=2))
    assert names() == ["predictions.jsonl"]  # all predictions, if one of them is not a tensor
    assert [line["prediction"] for line in lines("out/predictions.jsonl")] == [[0.0, 1.0], "text"]


def test_a_writer_can_be_used_again(make_trainer) -> None:
    writer = PredictionWriter("epoch", "a")
    trainer = make_trainer(writer, logger=False)
    for folder in ("a", "b"):
        writer.output_dir = Path(folder)
        trainer.predict(Predicts(lambda batch: batch), numbers(4))
        assert load_file(f"{folder}/rank-0.safetensors")["prediction"].tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ subclasses


def test_a_writer_written_for_lightning(make_trainer) -> None:
    class Custom(PredictionWriter):
        def __init__(self, output_dir: str, write_interval: str) -> None:
            super().__init__(write_interval)
            self.output_dir = output_dir  # type: ignore[assignment]
            self.seen: list[Any] = []

        def write_on_batch_end(
            self,
            trainer: Any,
            pl_module: Any,
            prediction: Any,
            batch_indices: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
        ) -> None:
            self.seen.append((prediction.tolist(), batch_indices, batch.tolist(), batch_idx, dataloader_idx))

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            self.seen.append(([p.tolist() for p in predictions], batch_indices))

    writer = Custom("out", "batch_and_epoch")
    predict(make_trainer, writer, lambda batch: -batch, numbers(3, batch_size=2), return_predictions=False)
    assert writer.seen == [
        ([0, -1], [0, 1], [0, 1], 0, 0),
        ([-2], [2], [2], 1, 0),
        ([[0, -1], [-2]], [[[0, 1], [2]]]),
    ]
    assert not Path("out").exists()


def test_predictions_are_grouped_by_loader(make_trainer) -> None:
    class Counts(PredictionWriter):
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.counts = [len(own) for own in predictions], [len(own) for own in batch_indices]

    writer = Counts("epoch")
    trainer = make_trainer(writer, logger=False, limit_predict_batches=1)
    trainer.predict(Predicts(lambda batch: batch), [numbers(4), tiny_loader(4)])
    assert writer.counts == ([1, 1], [1, 1])


# ----------------------------------------------------------------------------------------------------- several processes


def written(folder: str) -> dict[str, Any]:
    """The content of every file."""
    found: dict[str, Any] = {}
    for name in names(folder):
        path = f"{folder}/{name}"
        found[name] = lines(path) if path.endswith("jsonl") else {key: value.tolist() for key, value in load_file(path).items()}
    return found


def text(batch: Any) -> str:
    return f"{batch[0]:.0f}"


def everything(strategy: str) -> None:
    """Predict with each kind of writer, each into its own folder."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": strategy, "seed": 1}
    for kind, make in (("tensors", lambda batch: {"twice": batch * 2}), ("text", text)):
        for name, writer in (
            ("batch", PredictionWriter(output_dir=f"{kind}/batch")),
            ("epoch", PredictionWriter("epoch", f"{kind}/epoch")),
            ("once", PredictionWriter(output_dir=f"{kind}/once", once=True)),
        ):
            trainer = Trainer(accelerator="cpu", callbacks=[writer], **quiet)
            given = [numbers(), numbers(1)] if name == "once" else numbers()
            trainer.predict(Predicts(make), given, return_predictions=False)


def test_several_processes(run_dir: Path) -> None:
    everything("auto")
    alone = {kind: written(kind) for kind in ("tensors", "text")}
    for size in (2, 4):
        folder = run_dir / str(size)
        folder.mkdir()
        os.chdir(folder)
        run_world(size, everything, "ddp")
        tensors, texts = written("tensors"), written("text")
        for file in ("once/dataloader_0/predictions", "once/dataloader_1/predictions"):
            assert tensors[f"{file}.safetensors"] == alone["tensors"][f"{file}.safetensors"]
            assert texts[f"{file}.jsonl"] == alone["text"][f"{file}.jsonl"]
        for m in range(3):
            assert tensors[f"batch/batch-0000000{m}.safetensors"] == alone["tensors"][f"batch/batch-0000000{m}.safetensors"]
        second = list(range(3, 6))
        assert tensors["epoch/rank-1.safetensors"] == {"batch_indices": second, "twice": [6, 8, 10]}
        for kind in ("batch", "epoch"):
            assert texts[f"{kind}/rank-1.jsonl"] == [{"batch": 1, "indices": second, "prediction": "3"}]
        assert len(tensors) == 2 + 3 + min(size, 3)  # a process without a batch writes no file
        assert len(texts) == 2 + 2 * min(size, 3)


def by_subclass() -> Any:
    class Counts(PredictionWriter):
        seen: Any = None

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.seen = [text(prediction) for prediction in predictions], batch_indices

    found = []
    for once in (False, True):
        writer = Counts("epoch", once=once)
        Trainer(accelerator="cpu", callbacks=[writer], logger=False, enable_progress_bar=False, strategy="ddp", seed=1).predict(
            Predicts(lambda batch: batch), numbers(400, batch_size=4), return_predictions=False
        )
        found.append(writer.seen)
    return found


def test_a_subclass_writes_on_every_process_or_once() -> None:
    (first, all_of_them), (second, nothing) = run_world(2, by_subclass)
    assert first == ([str(n) for n in range(0, 400, 8)], [[list(range(n, n + 4)) for n in range(0, 400, 8)]])
    assert second[0] == [str(n) for n in range(4, 400, 8)]
    assert all_of_them == ([str(n) for n in range(0, 400, 4)], [[list(range(n, n + 4)) for n in range(0, 400, 4)]])
    assert nothing is None


@pytest.mark.world_size(2)
def test_a_folder_with_predictions_is_refused_by_all_processes(run_dir: Path) -> None:
    if os.environ["RANK"] == "0":
        (run_dir / "out").mkdir()
        (run_dir / "out" / "rank-0.jsonl").touch()
    writer = PredictionWriter(output_dir="out")
    trainer = Trainer(accelerator="cpu", callbacks=[writer], logger=False, enable_progress_bar=False, strategy="ddp")
    with pytest.raises(ConfigurationError, match="already contains predictions"):
        trainer.predict(Predicts(lambda batch: 1 / 0), numbers())
