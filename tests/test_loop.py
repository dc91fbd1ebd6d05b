"""The training loop: what a micro-batch counts, updates that do not happen, precisions, and what the steps see."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset
from trainers import make_trainer, parameters_of, same

from trainkit import Callback, CombinedLoader, Precision, TrainModule
from trainkit.errors import DataError

# ------------------------------------------------------------------------------------------------ gradient = global mean


class Tagger(TrainModule):
    """Classifies tokens of sentences of unequal length; returns the mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 5)
        self.gradients: list[dict[str, Tensor]] = []
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.embedding(batch["tokens"]))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def batch_weight(self, batch: dict[str, Tensor]) -> float:
        return float((batch["labels"] != -100).sum())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def sentences(*lengths: int) -> dict[str, Tensor]:
    """A padded batch; a length of 0 is a sentence without any label."""
    width = max(*lengths, 1)
    tokens = torch.randint(0, 11, (len(lengths), width))
    labels = torch.randint(0, 5, (len(lengths), width))
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"tokens": tokens, "labels": labels}


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    width = max(batch["tokens"].shape[1] for batch in batches)
    pad = {"tokens": 0, "labels": -100}
    return {
        name: torch.cat([F.pad(batch[name], (0, width - batch[name].shape[1]), value=pad[name]) for batch in batches])
        for name in pad
    }


def full_gradient(module: Tagger, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    twin = copy.deepcopy(module)
    twin.loss(joined(batches)).backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def mean_gradient(module: Regression, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of the layer's weight, over all samples at once."""
    (gradient,) = torch.autograd.grad(F.mse_loss(module.layer(inputs.double()), targets.double()), [module.layer.weight])
    return gradient


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> None:
    for name in first:
        error = (first[name] - second[name]).norm() / second[name].norm()
        assert error <= tolerance, (name, float(error))


RAGGED = [(7, 2, 9), (1,), (3, 3), (12, 1, 1, 1), (5,), (2, 2, 2, 2, 8)]


@pytest.mark.parametrize("accumulate", [1, 2, 4, 6, 8])
def test_the_gradient_is_the_mean_over_all_tokens_of_the_window(accumulate: int) -> None:
    batches = [sentences(*lengths) for lengths in RAGGED]
    module = Tagger()
    make_trainer(accumulate_grad_batches=accumulate, precision="64-true").fit(module, batches)
    windows = [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
    assert len(module.gradients) == len(windows)
    for gradient, window in zip(module.gradients, windows, strict=True):
        assert_close(gradient, full_gradient(module, window), 1e-13)


def test_in_single_precision_within_a_millionth() -> None:
    batches = [sentences(*lengths) for lengths in RAGGED]
    module = Tagger().float()
    make_trainer(accumulate_grad_batches=6).fit(module, batches)
    assert_close(module.gradients[0], full_gradient(module, batches), 1e-6)


def test_without_batch_weight_it_would_not_be() -> None:
    """So that the tests above can fail."""

    class Unweighted(Tagger):
        batch_weight = TrainModule.batch_weight

    batches = [sentences(*lengths) for lengths in RAGGED]
    module = Unweighted()
    make_trainer(accumulate_grad_batches=6, precision="64-true").fit(module, batches)
    with pytest.raises(AssertionError):
        assert_close(module.gradients[0], full_gradient(module, batches), 1e-2)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_micro_batch_without_weight_adds_nothing_though_its_loss_is_nan(precision: str) -> None:
    batches = [sentences(3, 2), sentences(0, 0), sentences(4)]
    module = Tagger().float()
    assert module.loss(batches[1]).isnan()
    trainer = make_trainer(accumulate_grad_batches=3, precision=Precision(precision, init_scale=4.0))
    trainer.fit(module, batches)
    assert trainer.global_step == 1
    tolerance = {"32-true": 1e-6, "16-mixed": 1e-2, "bf16-mixed": 5e-2}[precision]
    assert_close(module.gradients[0], full_gradient(module, [batches[0], batches[2]]), tolerance)


class Momentum(Tagger):
    """With an optimizer that moves parameters even where gradients are zero."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


class Watching(Callback):
    """The parameters, the learning rate and ``global_step`` after each micro-batch."""

    def __init__(self) -> None:
        self.after: list[tuple[int, float, dict[str, Tensor]]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.after.append((trainer.global_step, rate, parameters_of(module)))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_window_without_weight_makes_no_update(accumulate: int, precision: str) -> None:
    """The first window of a run, and one in the middle."""
    empty, full = [sentences(0, 0)] * accumulate, [sentences(3)] * accumulate
    module, watching = Momentum().float(), Watching()
    trainer = make_trainer(
        watching, accumulate_grad_batches=accumulate, precision=Precision(precision, init_scale=4.0), max_epochs=1
    )
    before = parameters_of(module)
    trainer.fit(module, [*empty, *full, *empty, *full])
    ends = watching.after[accumulate - 1 :: accumulate]
    assert [step for step, _, _ in ends] == [0, 1, 1, 2]
    assert [rate for _, rate, _ in ends] == [0.1, 0.05, 0.05, 0.025]
    assert same(ends[0][2], before)
    assert same(ends[1][2], ends[2][2])
    assert not same(ends[0][2], ends[1][2])
    assert not same(ends[2][2], ends[3][2])


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, None, "many", torch.ones(2)])
def test_a_weight_that_is_none(weight: Any) -> None:
    module = Tagger()
    module.batch_weight = None
    wrong = type("Wrong", (Tagger,), {"batch_weight": lambda self, batch: weight})()
    with pytest.raises(DataError, match="batch_weight must return a finite number"):
        make_trainer(accumulate_grad_batches=2).fit(wrong, [sentences(3), sentences(2)])


def test_batch_weight_sees_the_batch_before_its_transfer() -> None:
    seen = []

    class Transferred(Tagger):
        def batch_weight(self, batch: Any) -> float:
            seen.append(type(batch))
            return 1.0

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return dict(batch)

    class Own(dict): ...

    make_trainer().fit(Transferred(), [Own(sentences(3))])
    assert seen == [Own]


class Regression(TrainModule):
    """A line through the samples, in float64; keeps the gradient of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.layer.weight.grad.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = list(tiny_loader(samples).dataset)

    def __iter__(self) -> Any:
        return iter(self.samples)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: tiny_loader(22),
        lambda: DataLoader(Stream(22), batch_size=4),
        lambda: list(tiny_loader(22)),
        lambda: DataLoader(tiny_loader(22).dataset, batch_sampler=[[*range(9)], [*range(9, 20)], [20, 21]]),
    ],
)
def test_micro_batches_count_by_their_samples(loader: Callable[[], Any]) -> None:
    """Four to a window, the last batch short: each way of giving 22 samples is one full batch of them."""
    module = Regression()
    make_trainer(accumulate_grad_batches=8, precision="64-true").fit(module, loader())
    (gradient,) = module.gradients
    torch.testing.assert_close(gradient, mean_gradient(module, *tiny_loader(22).dataset.tensors), rtol=1e-13, atol=0)


def test_a_limit_that_leaves_the_short_batch_out() -> None:
    module = Regression()
    make_trainer(accumulate_grad_batches=8, precision="64-true", limit_train_batches=5).fit(module, tiny_loader(22))
    inputs, targets = (part[:20] for part in tiny_loader(22).dataset.tensors)
    torch.testing.assert_close(module.gradients[0], mean_gradient(module, inputs, targets), rtol=1e-13, atol=0)


def test_combined_batches_count_by_all_their_samples() -> None:
    class Both(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = (torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True))
            return F.mse_loss(self.layer(inputs), targets)

    module = Both()
    loaders = CombinedLoader({"a": tiny_loader(10), "b": tiny_loader(10, batch_size=5)}, mode="min_size")
    make_trainer(accumulate_grad_batches=2, precision="64-true").fit(module, loaders)
    inputs, targets = (torch.cat([part[:8], part]) for part in tiny_loader(10).dataset.tensors)
    torch.testing.assert_close(module.gradients[0], mean_gradient(module, inputs, targets), rtol=1e-13, atol=0)


# ---------------------------------------------------------------------------------------------------------- no gradient


class Choosy(Regression):
    """Returns None for some micro-batches."""

    def __init__(self, left_out: set[int], as_dict: bool = False) -> None:
        super().__init__()
        self.left_out, self.as_dict = left_out, as_dict

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.left_out:
            return {"loss": None, "why": "left out"} if self.as_dict else None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("left_out", [{0}, {1}, {2}, {0, 1}, {1, 2}])
def test_none_contributes_zero_gradient_but_keeps_its_weight(left_out: set[int], as_dict: bool) -> None:
    module = Choosy(left_out, as_dict)
    start = copy.deepcopy(module.layer).double()
    trainer = make_trainer(accumulate_grad_batches=3, precision="64-true")
    trainer.fit(module, tiny_loader(12))
    assert trainer.global_step == 1
    total = 0.0
    for place, (inputs, targets) in enumerate(tiny_loader(12)):
        if place not in left_out:
            total = total + F.mse_loss(start(inputs.double()), targets.double()) * (4 / 12)
    total.backward()
    torch.testing.assert_close(module.gradients[0], start.weight.grad, rtol=1e-13, atol=0)


def test_none_everywhere_in_a_window_makes_no_update() -> None:
    module, watching = Choosy({2, 3}), Watching()
    trainer = make_trainer(watching, accumulate_grad_batches=2)
    trainer.fit(module, tiny_loader(24))
    assert trainer.global_step == 2
    assert len(module.gradients) == 2  # on_before_optimizer_step is not called for it
    assert same(watching.after[1][2], watching.after[3][2])


def test_a_gradient_does_not_leak_into_the_next_window() -> None:
    """A window that is left in the middle (by -1) is dropped."""

    class Leaving(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 1 else None

    module = Leaving()
    trainer = make_trainer(accumulate_grad_batches=2, max_epochs=2, precision="64-true")
    trainer.fit(module, tiny_loader(8))
    assert trainer.global_step == 1
    torch.testing.assert_close(module.gradients[0], mean_gradient(module, *tiny_loader(8).dataset.tensors), rtol=1e-13, atol=0)


def test_gradients_can_be_read_until_the_next_window() -> None:
    seen = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(module.layer.weight.grad is not None)

        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append("zero")

    make_trainer(Reading(), accumulate_grad_batches=2).fit(TinyModule(), tiny_loader(16))
    assert seen == ["zero", True, True, "zero", True, True]


def test_training_without_an_optimizer() -> None:
    class Untrained(TinyModule):
        def configure_optimizers(self) -> None:
            return None

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("seen", float(batch_idx))

    module = Untrained()
    before = parameters_of(module)
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, tiny_loader(16), tiny_loader(4))
    assert trainer.global_step == 4  # windows
    assert same(before, parameters_of(module))


# ------------------------------------------------------------------------------------------------------ skipped updates


class Exploding(TinyModule):
    """AdamW with a scheduler; the gradient of the update with the number in ``overflow`` is infinite in half precision."""

    def __init__(self, *overflow: int) -> None:
        super().__init__()
        self.overflow = overflow

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1e38 if batch_idx in self.overflow else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


class WatchingState(Watching):
    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[Any, Any]] = []
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.states.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))
        self.skipped.append(trainer.accelerator.optimizer_step_was_skipped)
        if trainer.precision.scaler is not None:
            self.scales.append(trainer.precision.scaler.get_scale())


def same_state(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[key][slot], second[key][slot]) for key in first for slot in first[key]
    )


def test_an_overflow_skips_the_update() -> None:
    watching = WatchingState()
    trainer = make_trainer(watching, precision=Precision("16-mixed", init_scale=8.0, growth_interval=2))
    trainer.fit(Exploding(1, 2), tiny_loader(24))
    assert [step for step, _, _ in watching.after] == [1, 1, 1, 2, 3, 4]
    assert [rate for _, rate, _ in watching.after] == [0.05, 0.05, 0.05, 0.025, 0.0125, 0.00625]
    assert watching.scales == [8.0, 4.0, 2.0, 2.0, 4.0, 4.0]
    assert watching.skipped == [False, True, True, False, False, False]
    for place in (1, 2):
        assert same(watching.after[place][2], watching.after[0][2])
        assert same_state(watching.states[place], watching.states[0])
    assert not same(watching.after[3][2], watching.after[2][2])
    assert all(value.isfinite().all() for value in parameters_of(trainer.model).values())


def test_an_overflow_in_one_micro_batch_skips_the_whole_window() -> None:
    watching = WatchingState()
    trainer = make_trainer(watching, precision=Precision("16-mixed", init_scale=8.0), accumulate_grad_batches=2)
    trainer.fit(Exploding(2), tiny_loader(24))
    assert [step for step, _, _ in watching.after] == [0, 1, 1, 1, 1, 2]
    assert same(watching.after[3][2], watching.after[1][2])


def test_a_skipped_update_is_not_logged_as_one() -> None:
    """The log boundary waits for the update."""
    from trainers import Memory

    logger = Memory()
    trainer = make_trainer(logger=logger, log_every_n_steps=1, precision=Precision("16-mixed", init_scale=8.0))
    trainer.fit(Exploding(1), tiny_loader(12))
    assert sorted(logger.of("train_loss")) == [1, 2]


class SkippingAt(Callback):
    def __init__(self, hook: str, *batches: int) -> None:
        self.batches = batches
        setattr(self, hook, self._skip)

    def _skip(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.batch_idx in self.batches:
            trainer.accelerator.skip_update()


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_start", "on_after_backward"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_skip_update(hook: str, precision: str) -> None:
    watching = WatchingState()
    trainer = make_trainer(SkippingAt(hook, 1, 2), watching, precision=Precision(precision, init_scale=8.0))
    trainer.fit(Exploding(), tiny_loader(24))
    assert [step for step, _, _ in watching.after] == [1, 1, 1, 2, 3, 4]
    assert [rate for _, rate, _ in watching.after] == [0.05, 0.05, 0.05, 0.025, 0.0125, 0.00625]
    assert watching.skipped == [False, True, True, False, False, False]
    for place in (1, 2):
        assert same(watching.after[place][2], watching.after[0][2])
        assert same_state(watching.states[place], watching.states[0])


def test_skipping_is_for_one_window() -> None:
    """Also if that window has no loss, or is left."""

    class Module(Choosy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 5 else None

    trainer = make_trainer(SkippingAt("on_train_batch_start", 0, 4), accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(Module({0, 1}), tiny_loader(24))
    # epoch 0: no loss (and a request), an update, left with a request; epoch 1: no loss, an update, skipped
    assert trainer.global_step == 2


def test_nothing_of_an_error_in_the_middle_of_an_update_is_left() -> None:
    """Under 16-mixed the gradients have been unscaled then; the next fit starts with a scaler of its own."""

    class Failing(Callback):
        armed = True

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if self.armed:
                raise KeyError("mine")

    failing = Failing()
    trainer = make_trainer(failing, precision=Precision("16-mixed", init_scale=8.0))
    with pytest.raises(KeyError):
        trainer.fit(Exploding(), tiny_loader(8))
    failing.armed = False
    again, fresh = Exploding(), Exploding()
    again.load_state_dict(fresh.state_dict())
    trainer.fit(again, tiny_loader(24))
    make_trainer(precision=Precision("16-mixed", init_scale=8.0)).fit(fresh, tiny_loader(24))
    assert same(parameters_of(again), parameters_of(fresh))


def test_the_loss_scale_starts_anew_with_every_fit() -> None:
    trainer = make_trainer(precision=Precision("16-mixed", init_scale=8.0))
    for _ in range(2):
        trainer.fit(Exploding(0), tiny_loader(16))
        assert trainer.precision.scaler.get_scale() == 4.0


def test_an_optimizer_whose_parameters_got_no_gradient() -> None:
    class Unused(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.other.parameters(), lr=0.1)

    for precision in ("32-true", "16-mixed"):
        trainer = make_trainer(precision=precision)
        trainer.fit(Unused(), tiny_loader(8))
        assert trainer.global_step == 2


# ------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    "name, parameters, inputs, computed",
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-mixed", torch.float32, torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
    ],
)
def test_precisions(name: str, parameters: torch.dtype, inputs: torch.dtype, computed: torch.dtype) -> None:
    class Looking(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("statistics", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.dtypes: dict[str, Any] = {}

        def configure_model(self) -> None:
            self.late = nn.Linear(1, 1)

        def look(self, batch: Any) -> Tensor:
            outputs = self(batch["inputs"])
            self.dtypes |= {"inputs": batch["inputs"].dtype, "computed": outputs.dtype, "labels": batch["labels"].dtype}
            self.dtypes["new"] = torch.zeros(1).dtype
            return self.late(outputs).float().pow(2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.look(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.look(batch))

    module = Looking()
    batches = [{"inputs": torch.randn(3, 4), "labels": torch.arange(3)}]
    trainer = make_trainer(precision=name, max_epochs=2)
    before = copy.deepcopy(module.layer)
    trainer.fit(module, batches, batches)
    mixed = name.endswith("mixed")
    expected = {"inputs": inputs, "computed": computed, "labels": torch.int64, "new": torch.float32 if mixed else parameters}
    assert module.dtypes == expected
    assert {p.dtype for p in module.parameters()} == {parameters}
    assert module.dtype is parameters
    assert (module.statistics.dtype, module.count.dtype) == (parameters, torch.int64)
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {parameters}
    assert trainer.precision.name == name
    assert not torch.equal(before.weight.to(parameters), module.layer.weight)
    assert torch.get_default_dtype() is torch.float32
    assert math.isfinite(trainer.callback_metrics["val"])
    trainer.validate(module, batches, verbose=False)
    assert module.dtypes == expected
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("short", "name"), [(32, "32-true"), ("16", "16-mixed"), ("bf16", "bf16-mixed"), (64, "64-true")])
def test_lightnings_short_names(short: Any, name: str) -> None:
    assert make_trainer(precision=short).precision.name == name


# ----------------------------------------------------------------------------------------------------------- randomness


def test_dropout_and_augmentation_are_keyed_by_the_micro_batch() -> None:
    """What a step draws does not depend on what the steps and hooks before it drew."""
    drawn: dict[str, list[float]] = {}

    class Drawing(TinyModule):
        def __init__(self, name: str, extra: int) -> None:
            super().__init__()
            self.name, self.extra = name, extra

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            drawn.setdefault(self.name, []).append(float(torch.rand(())))
            torch.rand(self.extra)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            torch.rand(self.extra)

    for name, extra in (("a", 0), ("b", 1000)):
        make_trainer(max_epochs=2).fit(Drawing(name, extra), tiny_loader(16))
    assert drawn["a"] == drawn["b"]
    assert len(set(drawn["a"])) == 8
    make_trainer(max_epochs=2, seed=2).fit(Drawing("c", 0), tiny_loader(16))
    assert not set(drawn["a"]) & set(drawn["c"])


def test_validation_draws_the_same_each_time_within_an_epoch() -> None:
    drawn: list[float] = []

    class Drawing(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            drawn.append(float(torch.rand(())))

    trainer = make_trainer(val_check_interval=2)
    trainer.fit(Drawing(), tiny_loader(16), tiny_loader(8))
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
