"""The training loop: the weights of micro-batches, steps without a gradient, and fits without an optimizer step."""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Watching, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, CombinedLoader, Precision, TrainModule
from trainkit.console import TrainkitWarning
from trainkit.errors import DataError, LossError

# ------------------------------------------------------------------------------------------------ gradient = global mean


class Tagger(TrainModule):
    """Classifies the tokens of sentences of unequal length. The loss is the mean over the tokens with a label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 5)
        self.gradients: list[dict[str, Tensor]] = []
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.head(self.embedding(batch["tokens"])), batch["labels"]
        counts = labels != -100
        losses = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (losses * counts).sum() / counts.sum()  # without labels, the loss and its gradients are NaN

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
    """The gradient of the layer's weight, computed over all samples at once."""
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
    """Without `batch_weight` the gradient is another one, so the tests above can fail."""

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
    assert all(gradient.isnan().any() for gradient in full_gradient(module, [batches[1]]).values())
    trainer = make_trainer(accumulate_grad_batches=3, precision=Precision(precision, init_scale=4.0))
    trainer.fit(module, batches)
    assert trainer.global_step == 1
    tolerance = {"32-true": 1e-6, "16-mixed": 1e-2, "bf16-mixed": 5e-2}[precision]
    assert_close(module.gradients[0], full_gradient(module, [batches[0], batches[2]]), tolerance)


class Momentum(Tagger):
    """Its optimizer changes the parameters even if the gradients are zero."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_window_without_weight_makes_no_update(accumulate: int, precision: str) -> None:
    """This holds for the first accumulation window of a run, and for a later one."""
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
    # batch_weight must return a finite number ≥ 0.
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
    """Linear regression. Records the gradient of each optimizer step."""

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
    """All batches are in one accumulation window: its gradient is that of one batch of all 22 samples."""
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
            return {"loss": None, "why": "skipped"} if self.as_dict else None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("left_out", [{0}, {1}, {2}, {0, 1}, {1, 2}])
def test_none_contributes_zero_gradient_but_keeps_its_weight(left_out: set[int], as_dict: bool) -> None:
    """A micro-batch whose loss is None adds no gradient, but its samples count in the mean."""
    module = Choosy(left_out, as_dict)
    start = copy.deepcopy(module.layer).double()
    trainer = make_trainer(accumulate_grad_batches=3, precision="64-true")
    forgotten = 0 in left_out and not as_dict  # a dict with None is meant
    with pytest.warns(TrainkitWarning, match="returned None for the first batch") if forgotten else nullcontext():
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
    assert len(module.gradients) == 2  # on_before_optimizer_step is not called for the window without a loss
    assert same(watching.after[1][2], watching.after[3][2])


def test_a_gradient_does_not_leak_into_the_next_window() -> None:
    """An accumulation window is dropped if on_train_batch_start returns -1 inside it."""

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
    assert trainer.global_step == 4  # number of accumulation windows
    assert same(before, parameters_of(module))


# --------------------------------------------------------------------------------------------------- no optimizer step


class Forgetful(TinyModule):
    """Its training_step returns the loss only in some epochs."""

    def __init__(self, returns_in: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.returns_in = returns_in

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch in self.returns_in else None


class NeverSteps(TinyModule):
    """Uses manual optimization, but its training_step never steps the optimizer."""

    automatic_optimization = False


class Weightless(TinyModule):
    """None of its batches counts."""

    def batch_weight(self, batch: Any) -> float:
        return 0.0


def no_steps(module: Any, **arguments: Any) -> list[str]:
    """The warnings of a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainkitWarning)
        make_trainer(**{"max_epochs": 3, **arguments}).fit(module, tiny_loader())
    return [str(warning.message) for warning in caught if issubclass(warning.category, TrainkitWarning)]


RETURN = (
    "no optimizer step was made in this epoch, so nothing was learned: training_step returned None for every batch, "
    "the loader yielded None, or batch_weight returned 0, as for labels that are all -100. Return the loss: return loss."
)
STEP = (
    "no optimizer step was made in this epoch, so nothing was learned: automatic_optimization is False, and training_step "
    "never called step() of an optimizer of self.optimizers(). Write in training_step: opt = self.optimizers(); "
    "opt.zero_grad(); self.manual_backward(loss); opt.step()   (or remove automatic_optimization = False)."
)


FIRST = "training_step returned None for the first batch, so it is skipped. Return the loss: return loss"


@pytest.mark.parametrize("module, told", [(Forgetful(), [FIRST, RETURN]), (NeverSteps(), [STEP]), (Weightless(), [RETURN])])
@pytest.mark.parametrize("arguments", [{"max_epochs": 1}, {"fast_dev_run": True}])
def test_a_fit_without_an_optimizer_step_says_why(module: Any, told: list[str], arguments: dict[str, Any]) -> None:
    assert no_steps(module, **arguments) == told


def test_manual_optimization_without_a_step_says_why_once() -> None:
    assert no_steps(NeverSteps(), max_epochs=3) == [STEP]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("returns_in, epoch", [((), 0), ((1, 2), 0), ((0,), 1), ((0, 1, 3), 2)])
def test_an_epoch_of_nothing_but_none_is_an_error_before_the_next_one(
    returns_in: tuple[int, ...], epoch: int, accumulate: int
) -> None:
    class Ends(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            seen.append(f"start {trainer.current_epoch}")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(f"end {trainer.current_epoch}")

    seen: list[str] = []
    module = Forgetful(returns_in)
    trainer = make_trainer(Ends(), max_epochs=4, accumulate_grad_batches=accumulate)
    said = rf"batch of epoch {epoch}, the loader .* batch_weight .* so nothing was learned. Return the loss: return loss\. "
    told = nullcontext() if 0 in returns_in else pytest.warns(TrainkitWarning, match=re.escape(FIRST))
    with told, pytest.raises(LossError, match=said):
        trainer.fit(module, tiny_loader())
    assert seen == [f"{word} {number}" for number in range(epoch + 1) for word in ("start", "end")]


def test_an_epoch_without_any_weight_is_an_error_before_the_next_one() -> None:
    """With max_steps alone the fit would never end."""
    with pytest.raises(LossError, match="epoch 0, the loader yielded None, or batch_weight returned 0"):
        make_trainer(max_steps=3, max_epochs=2).fit(Weightless(), tiny_loader())


def test_the_first_batch_without_a_loss_is_reported_at_once() -> None:
    class Ending(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise AssertionError("too late")

    with pytest.raises(TrainkitWarning, match=re.escape(FIRST)):
        make_trainer(Ending(), max_epochs=3).fit(Forgetful(), tiny_loader())


def test_a_batch_that_is_skipped_later_is_not_reported() -> None:
    class Skipping(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx == 0 else None

    assert no_steps(Skipping(), max_epochs=2) == []


def test_an_epoch_without_a_loss_on_one_rank_only() -> None:
    """The other rank has losses, so that there are steps: only the first batch of the main process is reported."""
    assert run_world(2, without_a_loss_on, 1) == [([], 4)] * 2
    assert run_world(2, without_a_loss_on, 0) == [([FIRST], 4), ([], 4)]


def without_a_loss_on(rank: int) -> tuple[list[str], int]:
    class OnOthers(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if self.global_rank == rank else loss

    trainers = []

    class Keeping(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainers.append(trainer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainkitWarning)
        make_trainer(Keeping(), max_epochs=2, devices=2, strategy="ddp").fit(OnOthers(), tiny_loader())
    return [str(one.message) for one in caught if issubclass(one.category, TrainkitWarning)], trainers[0].global_step


def test_an_epoch_that_never_ends_is_reported_too(monkeypatch: Any) -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            while True:
                yield torch.ones(4), torch.ones(1)

    class Ending(Forgetful):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 9:
                raise KeyboardInterrupt

    monkeypatch.setattr("trainkit.trainer.train_loop._MANY_BATCHES", 5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            make_trainer(max_epochs=-1, max_steps=100).fit(Ending(), DataLoader(Endless(), batch_size=2))
    assert [str(one.message) for one in warned] == [FIRST, RETURN]


def test_a_fit_that_steps_says_nothing() -> None:
    """There is no warning if the last epoch makes steps, if all batches are skipped, or if there is no optimizer."""

    class Leaving(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    class NoOptimizer(Forgetful):
        def configure_optimizers(self) -> None:
            return None

    class ManualNoOptimizer(NeverSteps):
        def configure_optimizers(self) -> None:
            return None

    for module in (Forgetful((0, 1, 2)), Leaving(), NoOptimizer(), ManualNoOptimizer()):
        assert no_steps(module) == []


@pytest.mark.parametrize("automatic", [True, False])
def test_steps_that_were_skipped_are_no_mistake(automatic: bool, monkeypatch: Any) -> None:
    """There is no warning if the user, or the loss scaler of 16-mixed, has skipped the steps."""

    class Skipping(TinyModule):
        automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.accelerator.skip_update()
            if automatic:
                return self.loss(batch)
            optimizer, loss = self.optimizers(), self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

    class Overflowing(Skipping):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch[0] * 1e30, batch[1]], batch_idx)

    monkeypatch.setattr("trainkit.trainer.train_loop._MANY_BATCHES", 2)
    assert no_steps(Skipping()) == []
    assert no_steps(Overflowing(), precision="16-mixed") == []


def no_steps_on_each_rank() -> list[list[str]]:
    one_rank = Forgetful((0, 1, 2) if os.environ["RANK"] == "1" else ())
    return [no_steps(module, strategy="ddp", max_epochs=1) for module in (Forgetful(), NeverSteps(), one_rank)]


def test_a_fit_without_an_optimizer_step_on_several_processes() -> None:
    """Only one rank prints the warning. A loss on any rank makes an optimizer step on all ranks."""
    assert run_world(2, no_steps_on_each_rank) == [[[FIRST, RETURN], [STEP], [FIRST]], [[], [], []]]
