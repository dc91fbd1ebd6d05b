"""`Trainer(auto_micro_batch=True)`: micro-batches that run out of memory are run in parts, with the same gradients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainkit import Callback, TrainModule
from trainkit.data.batches import split
from trainkit.errors import ConfigurationError, DataError, OutOfMemoryError
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


@pytest.mark.world_size(2)
def test_all_gather_in_a_step_that_may_be_split() -> None:
    class Gather(OnOneRank):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.all_gather(torch.ones(1))
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match="all_gather was called in training_step with auto_micro_batch=True"):
        loop(Gather(), Watch())
