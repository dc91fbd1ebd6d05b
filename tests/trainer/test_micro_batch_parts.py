"""`Trainer(auto_micro_batch=True)`: micro-batches that run out of memory are run in parts, with the same gradients."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of
from helpers.worlds.worlds import run_world, start_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainkit import Callback, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.data.batches import split
from trainkit.errors import ConfigurationError, DataError, LossError, OutOfMemoryError
from trainkit.strategies.ddp import DDPStrategy

WHERE = ("forward", "backward")


class Ragged(Dataset):
    """Samples with a tensor of 4 numbers, and a number of tokens from 1 to 4 that count."""

    def __init__(self, samples: int = 32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(samples, 4, generator=generator)
        self.tokens = torch.randint(1, 5, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "tokens": self.tokens[index], "name": f"sample {index}"}


class Small(TrainModule):
    """Has memory for `most` samples, of which it runs out in forward or in the middle of backward.

    Args:
        most: Number of samples that fit, on this rank.
        where: "forward" or "backward".
        dropout: Its probability.
    """

    def __init__(self, most: float = float("inf"), where: str = "forward", dropout: float = 0.0) -> None:
        super().__init__()
        self.most = most
        self.where = where
        self.first = nn.Linear(4, 8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.metric = torchmetrics.MeanMetric()
        self.sizes: list[int] = []
        self.seen: list[tuple[int, str]] = []
        self.failed: list[weakref.ref[Any]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        inputs, tokens = batch["inputs"], batch.pop("tokens")
        if torch.is_grad_enabled():  # not where losses are compared
            self.sizes.append(len(inputs))
        self.calls += 1
        hidden = self.dropout(self.first(inputs).relu())
        if len(inputs) > self.most:
            self.failed.append(weakref.ref(hidden))
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            hidden.register_hook(self._run_out)
        of_sample = self.second(hidden).squeeze(1).square()
        loss = (of_sample * tokens).sum() / tokens.sum()
        self.log("loss", loss, on_epoch=True)
        self.log("tokens", tokens.sum(), reduce_fx="sum")
        self.log("largest", of_sample.max(), reduce_fx="max")
        self.metric(of_sample.detach(), tokens)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.seen.append((batch_idx, ",".join(batch["name"])))
        return {"loss": loss, "of_sample": of_sample.detach(), "names": batch["name"]}

    def _run_out(self, gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def batch_weight(self, batch: dict[str, Any]) -> float:
        return float(batch["tokens"].sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Watch(Callback):
    """Records what the hooks see, and the metrics of each step."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.outputs: list[dict[str, Any]] = []
        self.metrics: list[dict[str, float]] = []
        self.gradients: list[list[Tensor]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.starts.append(batch_idx)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append([p.grad.clone() for p in module.parameters()])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(module: TrainModule, watch: Watch | None = None, data: Any = None, **arguments: Any) -> Any:
    """Fit with windows of two micro-batches of 4 samples, one of which is short; returns the trainer."""
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 1, "auto_micro_batch": True, **arguments}
    trainer = make_trainer(*([] if watch is None else [watch]), **options)
    trainer.fit(module, DataLoader(Ragged(30) if data is None else data, batch_size=4, shuffle=True))
    return trainer


def fresh(**options: Any) -> Small:
    torch.manual_seed(7)
    return Small(**options)


def close(one: Any, other: Any, relative: float = 1e-6, absolute: float = 1e-7) -> None:
    torch.testing.assert_close(one, other, rtol=relative, atol=absolute)


@pytest.mark.parametrize(
    ("where", "most", "precision"),
    [
        ("forward", 3, "32-true"),
        ("forward", 1, "32-true"),
        ("backward", 2, "32-true"),
        ("forward", 2, "bf16-mixed"),
        ("backward", 2, "bf16-mixed"),
        ("forward", 2, "16-mixed"),
        ("backward", 1, "16-mixed"),
    ],
)
def test_a_split_changes_no_number(where: str, most: int, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients, parameters, metrics of steps and epochs, outputs and torchmetrics are those of whole micro-batches."""
    rough = {} if precision == "32-true" else {"relative": 5e-2, "absolute": 2e-3}
    whole, seen_whole = fresh(), Watch()
    expected = train(whole, seen_whole, auto_micro_batch=False, precision=precision)
    module, seen = fresh(most=most, where=where), Watch()
    trainer = train(module, seen, precision=precision)
    assert trainer.global_step == expected.global_step >= 7  # 16-mixed skips one
    assert seen.starts == seen_whole.starts
    assert [index for index, _ in module.seen if index == 0].count(0) > 2  # it was split
    if precision == "32-true":
        for one, other in zip(seen.gradients, seen_whole.gradients, strict=True):
            close(one, other)
    close(parameters_of(module)["first.weight"], parameters_of(whole)["first.weight"], **rough)
    for one, other in zip(seen.metrics, seen_whole.metrics, strict=True):
        close(one, other, **rough)
    for one, other in zip(seen.outputs, seen_whole.outputs, strict=True):
        close(one["loss"].float(), other["loss"].float(), **rough)
        close(one["of_sample"].float(), other["of_sample"].float(), **rough)
        assert one["names"] == other["names"]
    close({name: float(value) for name, value in trainer.callback_metrics.items()}, seen_last(expected), **rough)
    line = "micro-batch of 4 samples ran out of memory; those of its size are split in 2 from now on."
    assert caplog.text.count(line) == 1


def seen_last(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_nothing_is_done_twice_where_everything_fits() -> None:
    whole, module = fresh(dropout=0.5), fresh(dropout=0.5)
    train(whole, auto_micro_batch=False)
    train(module)
    assert module.sizes == whole.sizes
    assert module.calls == len(module.sizes)
    for name, value in parameters_of(whole).items():
        assert torch.equal(parameters_of(module)[name], value), name


@pytest.mark.parametrize("where", WHERE)
def test_a_failed_try_leaves_nothing(where: str) -> None:
    """Its buffers and gradients are restored, its activations are freed, and no shape is tried again."""
    module = fresh(most=2, where=where)
    gc.disable()
    try:
        train(module)
        assert module.failed
        assert all(hidden() is None for hidden in module.failed)
    finally:
        gc.enable()
    assert module.sizes.count(4) == 1  # the try; all others had 2 samples
    assert module.calls == len(module.sizes) - 1
    assert [size for size in module.sizes[1:] if size != 2] == []


@pytest.mark.parametrize("where", WHERE)
def test_memory_runs_out_in_a_later_micro_batch_of_a_window(where: str) -> None:
    """The gradients of the earlier micro-batches survive."""

    class Later(Small):
        splits = False

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            self.most = 2 if batch_idx % 2 and self.splits else 4
            return super().training_step(batch, batch_idx)

    torch.manual_seed(7)
    whole, seen_whole = Later(), Watch()
    train(whole, seen_whole, auto_micro_batch=False)
    torch.manual_seed(7)
    module, seen = Later(where=where), Watch()
    module.splits = True
    train(module, seen)
    assert module.sizes[:4] == [4, 4, 2, 2]
    for one, other in zip(seen.gradients, seen_whole.gradients, strict=True):
        close(one, other)


def test_each_part_has_random_numbers_of_its_own() -> None:
    class Draw(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            if torch.is_grad_enabled():
                drawn.append(float(torch.rand(())))
            return super().training_step(batch, batch_idx)

    drawn: list[float] = []
    module = Draw(most=2)
    train(module, max_epochs=1)
    assert len(set(drawn)) == len(drawn)
    again, drawn = drawn, []
    train(Draw(most=2), max_epochs=1)
    assert drawn == again


def test_one_sample_that_does_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match=r"a single sample, .*\[1, 4\].*activation_checkpointing=True.*Tried to alloc"):
        train(fresh(most=0))


def test_a_shape_that_has_passed_runs_out_of_memory() -> None:
    class Leaking(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            self.most = 1 if self.trainer.global_step == 3 else 4
            return super().training_step(batch, batch_idx)

    with pytest.raises(OutOfMemoryError, match="although one at least as large has passed before"):
        train(Leaking())


def test_what_passes_in_the_first_step_is_tried_again() -> None:
    """The optimizer's state, which the first step creates, takes memory too."""

    class Grows(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            self.most = 4 if self.trainer.global_step == 0 else 2
            return super().training_step(batch, batch_idx)

    module = Grows()
    train(module, max_epochs=1)
    assert module.sizes[:5] == [4, 4, 4, 2, 2]


class SumOfSamples(Small):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * len(batch["inputs"])


class Contrastive(Small):
    """Compares each sample with all others."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        features = nn.functional.normalize(self.first(batch["inputs"]))
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


class CountsSamples(Small):
    """Its loss is a weighted mean, of whose weights batch_weight knows nothing."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return super().training_step({**batch, "tokens": batch["inputs"][:, 0].exp()}, batch_idx)

    def batch_weight(self, batch: dict[str, Any]) -> float:
        return float(len(batch["inputs"]))


@pytest.mark.parametrize("kind", [SumOfSamples, Contrastive, CountsSamples])
def test_a_loss_that_is_no_mean_is_refused_when_it_would_be_split(kind: type[Small]) -> None:
    train(kind(), max_steps=1)  # nothing is split
    with pytest.raises(LossError, match=r"the loss of 2 samples is .*the mean loss of their two halves is .*batch_weight"):
        train(kind(most=2), max_steps=1)


def test_losses_with_random_numbers_are_not_compared() -> None:
    class Noisy(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * torch.rand(())

    assert train(Noisy(most=2)).global_step > 0


def test_the_comparison_leaves_no_trace() -> None:
    """Modes, metrics and buffers are as before; a step that does not run in eval mode is not compared."""

    class Trained(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            if not self.training:
                raise RuntimeError("in eval mode")
            assert not self.dropout.training
            return super().training_step(batch, batch_idx)

    module, whole = fresh(most=2, dropout=0.9), fresh()
    kinds = [(module, whole), (Trained(most=2, dropout=0.9), Trained())]
    for split_one, one in kinds:
        split_one.dropout.eval()
        one.dropout.eval()
        one.load_state_dict(split_one.state_dict())
        assert seen_last(train(split_one)).keys() == seen_last(train(one)).keys()
        assert split_one.training
        assert not split_one.dropout.training
        close(parameters_of(split_one)["first.weight"], parameters_of(one)["first.weight"])


def test_hooks_after_the_backward_pass_see_the_gradient_of_the_whole() -> None:
    class Clipping(Small):
        def on_after_backward(self) -> None:
            self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))

    whole, module = Clipping(), Clipping(most=2)
    module.load_state_dict(whole.state_dict())
    whole.norms, module.norms = [], []
    train(whole)
    train(module)
    close(torch.tensor(module.norms), torch.tensor(whole.norms))
    close(parameters_of(module)["first.weight"], parameters_of(whole)["first.weight"])


def test_a_failed_try_restores_buffers_that_the_step_replaces(caplog: pytest.LogCaptureFixture) -> None:
    class Replacing(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            self.total = self.total + len(batch["inputs"])
            return super().training_step(batch, batch_idx)

    module = Replacing(most=2)
    module.register_buffer("total", torch.zeros(()))
    train(module)
    assert module.total == 60  # 30 samples in each of two epochs
    assert caplog.text.count("training_step changes Replacing.calls, Replacing.total: in a split micro-batch each part") == 1


def test_counts_in_the_outputs_are_not_averaged(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return {**super().training_step(batch, batch_idx), "samples": len(batch["inputs"])}

    watch = Watch()
    train(Counting(most=2), watch, max_steps=1)
    assert watch.outputs[0]["samples"] == [2, 2]
    assert "training_step returned 'samples', whose values of the parts" in caplog.text


def test_batch_norm_that_is_trained_later_is_refused() -> None:
    class Later(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled() and len(batch[0]) > 2:
                self.norm.train()
                raise torch.OutOfMemoryError("out of memory")
            return self(batch[0]).mean()

    module = Later()
    module.norm.eval()
    with pytest.raises(ConfigurationError, match=r"does not work with norm \(BatchNorm1d\)"):
        refused(module)


def test_without_it_a_line_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(fresh(most=2), auto_micro_batch=False)
    assert caplog.text.count("memory ran out at step 0. Trainer(auto_micro_batch=True) runs a micro-batch that does not") == 1

    class Validating(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(auto_micro_batch=True).fit(Validating(), tiny_loader(), tiny_loader())
    assert "memory ran out at step 4. Use a smaller batch_size with a larger" in caplog.text


def test_other_errors_are_raised() -> None:
    class Broken(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train(Broken())


class Sizes(Small):
    """Its memory holds a number of elements; records the shapes that it was given."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.elements = most
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            self.shapes.append(tuple(batch.shape))
        if batch.numel() > self.elements:
            torch.empty(1 << 62, dtype=torch.uint8)  # the CPU's allocator raises its own error
        return self.second(self.first(batch.reshape(-1, 4)).relu()).mean()

    def batch_weight(self, batch: Tensor) -> float:
        return float(len(batch))


def test_shapes_differ() -> None:
    """Only a shape that is larger than any before in some dimension is tried; small ones are not split."""
    shapes = [(4, 4), (2, 8), (4, 8), (4, 4), (8, 4), (2, 16), (8, 8)]
    module = Sizes(most=20)
    trainer = make_trainer(auto_micro_batch=True)
    trainer.fit(module, [torch.ones(shape) for shape in shapes])
    #           whole   whole   tried   parts           whole   parts           parts           parts
    expected = [(4, 4), (2, 8), (4, 8), (2, 8), (2, 8), (4, 4), (4, 4), (4, 4), (1, 16), (1, 16)]
    assert module.shapes == [*expected, (2, 8), (2, 8), (2, 8), (2, 8)]
    assert trainer.global_step == len(shapes)


class Everything(TinyModule):
    """Returns a loss of each part of a batch, and runs out of memory with 4 samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        inputs = batch[0]
        if len(inputs) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return self(inputs).mean()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (object(), "contains an object"),
        (torch.ones(3, 2), r"tensor of shape \(3, 2\)"),
        (torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged), "nested"),
    ],
)
def test_what_cannot_be_split(more: Any, message: str) -> None:
    trainer = make_trainer(auto_micro_batch=True)
    with pytest.raises(DataError, match=rf"a micro-batch ran out of memory, and a batch .*{message}"):
        trainer.fit(Everything(), [[torch.ones(4, 4), more]])


def test_what_has_no_samples_to_split() -> None:
    class Words(Everything):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
            return super().training_step([torch.ones(4, 4)], batch_idx)

    trainer = make_trainer(auto_micro_batch=True)
    with pytest.raises(DataError, match="ran out of memory, and a batch contains no tensor with a batch dimension"):
        trainer.fit(Words(), [["a", "b", "c", "d"]])
    with pytest.raises(DataError, match=r"a batch of 1 sample contains a tensor of shape \(4, 4\)"):
        trainer.fit(Words(), [{"positions": torch.arange(4)[None], "inputs": torch.ones(4, 4)}])


@pytest.mark.parametrize(
    ("rows", "second"),
    [
        ([[1, 2], [3], [4, 5, 6]], [[4, 5, 6]]),
        ([[[1], [2]], [[3]], []], [[]]),
        ([{"id": 1}, {"id": 2}, {"id": "x"}], [{"id": "x"}]),
        (([1, 2, 3], ["a", "b", "c"]), ([3], ["c"])),  # columns
        ([["a", "b", "c"], ["d"]], [["c"], ["d"]]),
    ],
)
def test_lists_with_an_item_for_each_sample_are_split(rows: Any, second: Any) -> None:
    assert split({"inputs": torch.ones(3, 2), "rows": rows}, 2)[1]["rows"] == second


def test_lists_that_may_be_rows_or_columns_are_refused() -> None:
    with pytest.raises(DataError, match="a list of 2 items with lists of 2 in each, so it is not clear"):
        split([torch.ones(2, 3), [[1, 2], [3, 4]]], 2)


def test_parts_are_whole_samples() -> None:
    batch = {
        "x": torch.arange(5),
        "names": ["a", "b", "c", "d", "e"],
        "pair": (torch.ones(5, 2), 3),
        "scale": torch.tensor(2.0),
    }
    first, second = split(batch, 2)
    assert first["x"].tolist() == [0, 1, 2]
    assert second["x"].tolist() == [3, 4]
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert second["pair"][0].shape == (2, 2)
    assert (second["pair"][1], second["scale"]) == (3, 2.0)


def test_a_batch_encoding_is_split() -> None:
    transformers = pytest.importorskip("transformers")
    first, second = split(transformers.BatchEncoding({"input_ids": torch.ones(3, 2), "labels": torch.ones(3)}), 2)
    assert isinstance(first, transformers.BatchEncoding)
    assert (first["input_ids"].shape, second["labels"].shape) == ((2, 2), (1,))


def refused(module: TrainModule) -> Any:
    trainer = make_trainer(auto_micro_batch=True)
    trainer.fit(module, tiny_loader())
    return trainer


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="auto_micro_batch=True needs automatic optimization"):
        refused(ManualModule())


class Normed(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.norm(inputs))


def test_batch_norm_is_refused_unless_it_is_frozen() -> None:
    with pytest.raises(ConfigurationError, match=r"does not work with norm \(BatchNorm1d\).*GroupNorm.*model.norm.eval\(\)"):
        refused(Normed())
    module = Normed()
    module.norm.eval()
    assert refused(module).global_step == 4


class Closure(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class OwnStep(TinyModule):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [Closure, OwnStep])
def test_closures_are_refused(kind: type[TinyModule]) -> None:
    with pytest.raises(ConfigurationError, match=rf"does not work with {kind.__name__}.optimizer_step"):
        refused(kind())


def test_strategies_that_communicate_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="auto_micro_batch=True does not work with FSDPStrategy"):
        make_trainer(auto_micro_batch=True, strategy="fsdp")
    with pytest.raises(ConfigurationError, match="static_graph=True"):
        make_trainer(auto_micro_batch=True, strategy=DDPStrategy(static_graph=True))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_the_choice_is_in_the_checkpoint(tmp_path: Any) -> None:
    """A run that is resumed after a split has the same parts, and is bit-identical, also with dropout."""
    watch = Watch()
    through = fresh(most=2, dropout=0.5)
    train(through, watch)
    ended = train(fresh(most=2, dropout=0.5), max_epochs=-1, max_steps=3)
    ended.save_checkpoint(tmp_path / "at")
    again, resumed = fresh(dropout=0.5), Watch()  # it has enough memory now
    trainer = make_trainer(resumed, max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=1, auto_micro_batch=True)
    trainer.fit(again, DataLoader(Ragged(30), batch_size=4, shuffle=True), ckpt_path=tmp_path / "at")
    assert max(again.sizes) == 2
    assert [float(one["loss"]) for one in resumed.outputs] == [float(one["loss"]) for one in watch.outputs[6:]]
    for name, value in parameters_of(through).items():
        if name != "calls":
            assert torch.equal(parameters_of(again)[name], value), name
    assert trainer._run.progress.largest_part == ended._run.progress.largest_part == 2 * 5


# -------------------------------------------------------------------------------------------------------- several ranks


class Lengths(Dataset):
    """Samples of different lengths, padded to the longest of their batch by `pad`."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Tensor:
        return torch.linspace(-1, 1, 4 * (1 + index * 7 % 5)) * (1 + index / 10)


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class OnOneRank(Small):
    """Runs out of memory on rank 1 only, with more than `most` elements."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            self.sizes.append(len(batch))
        self.calls += 1
        hidden = self.dropout(self.first(batch.unflatten(1, (-1, 4))).relu())
        if self.trainer.global_rank == 1 and batch.numel() > self.most:
            if self.where == "forward":
                raise torch.OutOfMemoryError("out of memory")
            hidden.register_hook(self._run_out)
        loss = self.second(hidden).square().mean((1, 2)).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def batch_weight(self, batch: Tensor) -> float:
        return float(len(batch))


def lengths() -> DataLoader:
    return DataLoader(Lengths(), batch_size=4, collate_fn=pad)


def loop(module: TrainModule, watch: Watch, **options: Any) -> Any:
    options = {"max_epochs": 3, "log_every_n_steps": 1, "auto_micro_batch": True, "strategy": "ddp", **options}
    devices = 2 if options["strategy"] != "single" else 1
    trainer = make_trainer(watch, devices=devices, **options)
    trainer.fit(module, lengths())
    return trainer


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("where", "window", "options"),
    [
        ("forward", 1, {}),
        ("backward", 2, {}),
        ("backward", 1, {"find_unused_parameters": True}),
        ("forward", 2, {"gradient_as_bucket_view": True}),
    ],
)
def test_memory_runs_out_on_one_rank(where: str, window: int, options: dict[str, bool]) -> None:
    """Shapes are ragged, so only one rank tries: no rank waits, and the numbers are those of whole micro-batches."""

    def run(**more: Any) -> tuple[OnOneRank, Watch, Any]:
        torch.manual_seed(7)
        module, watch = OnOneRank(**more), Watch()
        small = "most" in more
        trainer = loop(module, watch, auto_micro_batch=small, accumulate_grad_batches=window, strategy=DDPStrategy(**options))
        return module, watch, trainer

    whole, seen_whole, expected = run()
    module, seen, trainer = run(most=30, where=where)
    assert trainer.global_step == expected.global_step > 3
    for one, other in zip(seen.gradients, seen_whole.gradients, strict=True):
        close(one, other)
    for one, other in zip(seen.metrics, seen_whole.metrics, strict=True):
        close(one, other)
    close(parameters_of(module)["first.weight"], parameters_of(whole)["first.weight"])
    if trainer.global_rank == 1:
        assert len(module.sizes) > len(whole.sizes)
    limits = trainer.strategy.world.exchange(trainer._run.progress.largest_part)
    assert limits[0] == limits[1] is not None
    assert limits[0] <= 30
    assert module.sizes[-1] <= 2  # rank 0 splits too


@pytest.mark.world_size(2)
def test_ranks_agree_before_a_checkpoint_is_saved(tmp_path: Any) -> None:
    """Rank 1 fails in the step that is saved, before the step flags have told rank 0."""
    module = OnOneRank(most=30, dropout=0.5)
    trainer = make_trainer(
        max_steps=1, devices=2, strategy="ddp", auto_micro_batch=True, enable_checkpointing=True, default_root_dir=tmp_path
    )
    trainer.fit(module, lengths())
    limits = trainer.strategy.world.exchange(trainer._run.progress.largest_part)
    assert limits[0] == limits[1] is not None


class Killed(Callback):
    """Kills rank 1 in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_in(folder: str, most: float, kill_at: int = -1, devices: int = 2, sharing: bool = False) -> dict[str, Any]:
    """Train on all processes from the newest checkpoint in `folder`; returns the losses by step, and the parameters."""
    torch.manual_seed(7)
    module, watch = OnOneRank(most=most, dropout=0.0 if sharing else 0.5), Watch()
    trainer = make_trainer(
        *(watch, Killed(kill_at), ModelCheckpoint(every_n_train_steps=2)),
        max_epochs=2,
        accumulate_grad_batches=2 if devices == 1 and sharing else 1,
        log_every_n_steps=1,
        auto_micro_batch=True,
        strategy="ddp",
        devices=devices,
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    trainer.fit(module, lengths(), ckpt_path="auto")
    losses = [float(one["loss"]) for one in watch.outputs]
    parameters = {name: value.tolist() for name, value in parameters_of(module).items() if name != "calls"}
    return {"losses": losses, "parameters": parameters, "limit": trainer._run.progress.largest_part, "sizes": module.sizes}


def test_a_killed_run_on_two_ranks_is_resumed_bit_for_bit() -> None:
    """Rank 1 has split, and is killed; both are started again."""
    through = run_world(2, train_in, "through", 30)
    ends = start_world(2, train_in, "killed", 30, 4).ends()
    assert ends[1] == (False, "ended with -9")
    assert not ends[0][0]
    resumed = run_world(2, train_in, "killed", 30)
    for one, whole in zip(resumed, through, strict=True):
        assert 0 < len(one["losses"]) < len(whole["losses"])
        assert one["losses"] == whole["losses"][-len(one["losses"]) :]
        assert one["parameters"] == whole["parameters"]
        assert one["limit"] == whole["limit"] <= 30


def test_a_run_that_was_split_goes_on_with_another_number_of_ranks() -> None:
    """The parts are smaller than the shares of one rank; the gradients are the same."""
    through = run_world(2, train_in, "through", 30, -1, 2, True)[0]
    start_world(2, train_in, "killed", 30, 4, 2, True).ends()
    alone = run_world(1, train_in, "killed", 30, -1, 1, True)[0]
    assert max(alone["sizes"]) <= 2
    for name, value in through["parameters"].items():
        close(torch.tensor(alone["parameters"][name]), torch.tensor(value), relative=1e-4, absolute=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("verb", ["all_gather", "strategy.barrier", "strategy.broadcast"])
def test_collectives_in_a_step_that_may_be_split(verb: str) -> None:
    class Waiting(OnOneRank):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            strategy = self.trainer.strategy
            calls = {
                "all_gather": lambda: self.all_gather(torch.ones(1)),
                "strategy.barrier": strategy.barrier,
                "strategy.broadcast": lambda: strategy.broadcast(1),
            }
            calls[verb]()
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=f"{verb} was called in training_step with auto_micro_batch=True"):
        loop(Waiting(), Watch())
