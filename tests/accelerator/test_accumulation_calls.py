"""Several calls of `accumulate` for one batch of a prepared loader: each is a micro-batch of a window of calls.

The numbers are the gradients of optimizer steps, computed by hand. The batches are 1 to 4, 5 to 8, and so on, whose means are
2.5, 6.5, 10.5 and 14.5; the gradient of a call is the mean of what it gets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Precision, set_seed
from trainkit.errors import ConfigurationError


def batches(rows: int) -> DataLoader[Any]:
    """`rows` batches of four numbers for each process; on two processes those of a row differ by 2, around the same mean."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    values = torch.arange(1.0, 4 * rows + 1).view(rows, 1, 4) + torch.tensor([0.0] if size == 1 else [-1.0, 1.0]).view(1, -1, 1)
    return DataLoader(TensorDataset(values.flatten()), batch_size=4)


def plain(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, **options)


class Slope:
    """A model whose gradient is the mean of its inputs, with its optimizer; `found` has the gradient of each step."""

    def __init__(self, accelerator: Accelerator, prepared: Any = None, **options: Any) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(*plain(**options)) if prepared is None else prepared
        self.found: list[float] = []
        self.weight = 0.0

    def note(self) -> None:
        """Look whether the weight has changed."""
        with torch.no_grad(), self.accelerator.strategy.gathered_parameters(self.accelerator.unwrap_model(self.model)):
            weight: Any = self.accelerator.unwrap_model(self.model).weight
            now = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).item()
        if now != self.weight:
            self.found.append(round(self.weight - now, 4))
        self.weight = now

    def call(self, x: Tensor, weight: float | None = None) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(x[:, None]).mean(), weight=weight)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.note()


def trained(strategy: str, window: int, calls: list[int] | str) -> tuple[list[float], int]:
    """The gradients of an epoch: `calls` on each whole batch, or two on its halves."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=window)
    numbers = [2] * 4 if isinstance(calls, str) else calls
    slope, loader = Slope(accelerator), accelerator.prepare(batches(len(numbers)))
    for (x,), number in zip(loader, [*numbers, 0], strict=False):  # the loader ends the loop
        for part in x.split(2) if isinstance(calls, str) else [x] * number:
            slope.call(part)
    slope.note()
    updates = accelerator.updates
    accelerator.free_memory()
    return slope.found, updates


CASES: dict[str, tuple[int, list[int] | str, list[float]]] = {
    "halves": (2, "halves", [2.5, 6.5, 10.5, 14.5]),
    "three passes": (2, [3, 3, 3, 3], [2.5, 4.5, 6.5, 10.5, 12.5, 14.5]),
    "the last window is short": (2, [3, 3, 3], [2.5, 4.5, 6.5, 10.5, 10.5]),
    "a window over three batches": (4, [3, 3, 3], [3.5, 8.5, 10.5]),
    "fewer calls for the last batch": (2, [3, 3, 1], [2.5, 4.5, 6.5, 10.5]),
    "more calls for the last batch": (2, [3, 3, 5], [2.5, 4.5, 6.5, 10.5, 10.5, 10.5]),
    "more and more calls": (2, [1, 2, 4], [4.5, 8.5, 10.5, 10.5]),
    "only one batch": (2, [4], [2.5, 2.5, 2.5]),
    "windows of one call": (1, [2, 1], [2.5, 2.5, 6.5]),
}


@pytest.mark.parametrize("case", CASES)
def test_windows_count_calls(case: str) -> None:
    window, calls, gradients = CASES[case]
    assert trained("auto", window, calls) == (gradients, len(gradients))


def test_epochs_of_one_batch() -> None:
    """The first call ever ends its epoch, as in a loop with one call for each batch, whose code under `if sync_gradients:` runs
    there; from the second batch on the windows are those of the calls.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope, loader = Slope(accelerator), accelerator.prepare(DataLoader(torch.arange(1.0, 7), batch_size=6))
    for _ in range(3):
        for x in loader:
            for part in x.split(2):
                slope.call(part)
    assert slope.found == [1.5, 4.5, 2.5, 5.5, 2.5, 5.5]


SHARED = ("halves", "three passes", "the last window is short", "fewer calls for the last batch")


def shared_cases(strategy: str) -> dict[str, tuple[list[float], int]]:
    return {case: trained(strategy, *CASES[case][:2]) for case in SHARED}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_windows_count_calls_on_two_processes(strategy: str) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    expected = {case: (CASES[case][2], len(CASES[case][2])) for case in SHARED}
    assert run_world(2, shared_cases, strategy) == [expected] * 2


# ----------------------------------------------------------------------------------------------------------- weights


def short_last_batch(strategy: str, listed: bool) -> list[float]:
    """Two epochs of batches of 4, 4 and 2 samples, on two processes of 8, 8 and 6 in all, in windows of three calls."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=3)
    slope, values = Slope(accelerator), torch.arange(1.0, 12 * accelerator.num_processes - 1)
    loader = accelerator.prepare([*values.split(4)] if listed else DataLoader(values, batch_size=4))
    for x in loader:
        for _ in range(2):
            slope.call(x)
    accelerator.free_memory()
    return slope.found


@pytest.mark.parametrize("listed", [False, True])
def test_a_call_counts_as_much_as_its_batch(listed: bool) -> None:
    """Whether the sizes of the batches are known beforehand or not (a list)."""
    gradients = [pytest.approx((10 + 10 + 26) / 12, abs=1e-4), pytest.approx((26 + 19 + 19) / 8, abs=1e-4)]
    assert short_last_batch("auto", listed) == gradients
    gradients = [pytest.approx((36 + 36 + 100) / 24, abs=1e-4), pytest.approx((100 + 117 + 117) / 20, abs=1e-4)]
    for strategy in ("ddp", "fsdp"):
        assert run_world(2, short_last_batch, strategy, listed) == [gradients] * 2


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_under_zero_too(strategy: str) -> None:
    pytest.importorskip("deepspeed")
    gradients = [pytest.approx((36 + 36 + 100) / 24, abs=1e-4), pytest.approx((100 + 117 + 117) / 20, abs=1e-4)]
    assert run_world(2, short_last_batch, strategy, False) == [gradients] * 2


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_weight_of_its_own_for_each_call(precision: str) -> None:
    """Ragged parts of a batch: 3 of 4 samples, then 1; the last batch has one part only, so its window ends late."""
    scale = {"init_scale": 8.0} if precision == "16-mixed" else {}
    accelerator = Accelerator(cpu=True, precision=Precision(precision, **scale), gradient_accumulation_steps=3)
    slope, loader = Slope(accelerator), accelerator.prepare(batches(3))
    for (x,) in loader:
        for part in x.split(3)[: 1 if x[0] == 9 else 2]:
            slope.call(part, weight=len(part))
    slope.note()
    assert slope.found == pytest.approx([(10 + 18) / 7, (8 + 30) / 4], abs=1e-2 if precision == "16-mixed" else 1e-4)


# ---------------------------------------------------------------------------------------------------- what a loop calls


def test_what_is_called_inside_a_window_has_no_effect() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope = Slope(accelerator)
    scheduler, loader = accelerator.prepare(torch.optim.lr_scheduler.StepLR(slope.optimizer, 1, gamma=0.5), batches(3))
    seen = []
    for (x,) in loader:
        for _ in range(3):
            with accelerator.accumulate(slope.model):
                accelerator.backward(slope.model(x[:, None]).mean())
                norm = accelerator.clip_grad_norm_(slope.model.parameters(), 100.0)
                full = accelerator.sync_gradients
                assert (slope.optimizer.step(), norm is not None) == (full, full)
                scheduler.step()
                slope.optimizer.zero_grad()
                seen.append((full, scheduler.get_last_lr()[0]))
    rates = [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert seen == [*zip([False, True] * 4, rates, strict=True), (True, 0.03125)]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_window_that_ends_late_is_clipped_and_stepped_as_the_others(guarded: bool) -> None:
    """The last batch has fewer calls than the others. Clipping under `if sync_gradients:` is what the full windows did."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope = Slope(accelerator)
    scheduler, loader = accelerator.prepare(torch.optim.lr_scheduler.StepLR(slope.optimizer, 1, gamma=0.5), batches(3))
    for (x,) in loader:
        for _ in range(1 if x[0] == 9 else 2):
            with accelerator.accumulate(slope.model):
                slope.optimizer.zero_grad()
                accelerator.backward(slope.model(x[:, None]).mean())
                if accelerator.sync_gradients or not guarded:
                    accelerator.clip_grad_norm_(slope.model.parameters(), 5.0)
                slope.optimizer.step()
                scheduler.step()
            slope.note()
        assert accelerator.sync_gradients is bool(x[0] != 9)
    assert accelerator.sync_gradients
    slope.note()
    assert slope.found == pytest.approx([2.5, 5.0 / 2, 5.0 / 4], abs=1e-4)
    assert (scheduler.get_last_lr(), accelerator.updates) == ([0.125], 3)


def test_a_loop_that_steps_after_its_calls() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    slope, loader = Slope(accelerator), accelerator.prepare(batches(3))
    for (x,) in loader:
        for part in x.split(2):
            with accelerator.accumulate(slope.model):
                accelerator.backward(slope.model(part[:, None]).mean())
        slope.optimizer.step()
        slope.optimizer.zero_grad()
        slope.note()
    assert slope.found == [4.5, 10.5]


def test_no_sync_holds_a_call() -> None:
    """In a body with two backward passes, the first of which is under `no_sync`, the window is as long as without."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope, loader = Slope(accelerator), accelerator.prepare(batches(2))
    for (x,) in loader:
        for part in x.split(2):
            with accelerator.accumulate(slope.model):
                with accelerator.no_sync(slope.model):
                    accelerator.backward(slope.model(part[:, None]).mean() / 2)
                accelerator.backward(slope.model(part[:, None]).mean() / 2)
                slope.optimizer.step()
                slope.optimizer.zero_grad()
            slope.note()
    assert slope.found == [2.5, 6.5]


# ------------------------------------------------------------------------------------------------------- several models


def two_models(strategy: str, critic_calls: int, together: bool, trained: tuple[int, ...] = (0, 1, 2, 3)) -> list[list[float]]:
    """A critic with several calls for a batch, and a generator with one for some of the batches; or both in one call."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    *prepared, loader = accelerator.prepare(*plain(), *plain(), batches(4))
    critic, generator = Slope(accelerator, prepared[:2]), Slope(accelerator, prepared[2:])
    for number, (x,) in enumerate(loader):
        for _ in range(critic_calls):
            critic.call(x)
        if together:
            for part in x.split(2):
                with accelerator.accumulate(critic.model, generator.model):
                    loss = critic.model(part[:, None]).mean() + generator.model(part[:, None]).mean()
                    accelerator.backward(loss)
                    for one in (critic, generator):
                        one.optimizer.step()
                        one.optimizer.zero_grad()
                critic.note()
                generator.note()
        elif number in trained:
            generator.call(x)
    for one in (critic, generator):
        one.note()
    accelerator.free_memory()
    return [critic.found, generator.found]


@pytest.mark.parametrize("size, strategy", [(1, "auto"), (2, "ddp"), (2, "zero2")])
@pytest.mark.parametrize(
    "options, gradients",
    [
        ((1, False), [[4.5, 12.5], [4.5, 12.5]]),
        ((3, False), [[2.5, 4.5, 6.5, 10.5, 12.5, 14.5], [4.5, 12.5]]),
        ((0, True), [[2.5, 6.5, 10.5, 14.5]] * 2),
        ((1, False, (0, 2)), [[4.5, 12.5], [6.5]]),
        ((1, False, (1, 3)), [[4.5, 12.5], [10.5]]),
        ((1, False, (1, 2, 3)), [[4.5, 12.5], [8.5, 14.5]]),
        ((2, False, (0, 1, 3)), [[2.5, 6.5, 10.5, 14.5], [4.5, 14.5]]),
    ],
)
def test_each_model_has_its_windows(size: int, strategy: str, options: tuple[Any, ...], gradients: list[list[float]]) -> None:
    """A generator and a critic with one call each have the windows of the loader; if it skips batches, those of its calls."""
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    assert run_world(size, two_models, strategy, *options) == [gradients] * size


def test_each_of_several_models_ends_late() -> None:
    """Both models have fewer calls for the last batch, and only their own gradients are corrected."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    first, second = Slope(accelerator), Slope(accelerator)
    for (x,) in accelerator.prepare(batches(3)):
        for _ in range(1 if x[0] == 9 else 2):
            first.call(x)
            second.call(2 * x)
    first.note()
    second.note()
    assert (first.found, second.found) == ([4.5, 10.5], [9.0, 21.0])


def test_models_are_counted_apart_if_no_loader_is_prepared() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = Slope(accelerator), Slope(accelerator)
    for (x,) in batches(4):
        first.call(x)
        second.call(x)
    assert first.found == second.found == [4.5, 12.5]


def test_weights_of_two_models() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = Slope(accelerator), Slope(accelerator)
    for place, (x,) in enumerate(accelerator.prepare(batches(2))):
        first.call(x, weight=1 + place)
        second.call(x, weight=3 - 2 * place)
    assert (first.found, second.found) == ([pytest.approx(15.5 / 3, abs=1e-4)], [3.5])


# -------------------------------------------------------------------------------------------------- loaders and resuming


def test_an_evaluation_between_two_calls() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope, loader, evaluation = Slope(accelerator), accelerator.prepare(batches(3)), accelerator.prepare(batches(2))
    for (x,) in loader:
        for _ in range(3):
            assert sum(accelerator.gather_for_metrics(y).sum().item() for (y,) in evaluation) == 36.0
            slope.call(x)
            assert next(iter(evaluation))[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert slope.found == [2.5, 4.5, 6.5, 10.5, 10.5]


def test_a_loop_that_is_left_keeps_its_window_open() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope, loader = Slope(accelerator), accelerator.prepare(batches(3))
    for (x,) in islice(loader, 1):
        for _ in range(3):
            slope.call(x)
    assert not accelerator.sync_gradients
    assert not slope.optimizer.step(), "between epochs too"
    for (x,) in loader:
        slope.call(x)
    slope.note()
    assert slope.found == [2.5, 2.5, 8.5], "(1, 1), (1, 1) and (2, 3)"


def test_calls_for_a_rollout_between_batches() -> None:
    """PPO: the loader yields prompts; what the model makes of them is trained on several times, in minibatches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope, loader = Slope(accelerator), accelerator.prepare(batches(2))
    for (prompts,) in loader:
        rollout = TensorDataset(prompts + 100.0)
        for _ in range(2):
            for (x,) in DataLoader(rollout, batch_size=1):
                slope.call(x)
    assert slope.found == [101.5, 103.5] * 2 + [105.5, 107.5] * 2


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(float(number)) for number in range(1, 13)])


def of_a_stream(strategy: str) -> list[float]:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    slope, loader = Slope(accelerator), accelerator.prepare(DataLoader(Stream(), batch_size=4))
    for x in loader:
        for _ in range(3):
            slope.call(x)
    slope.note()
    accelerator.free_memory()
    return slope.found


def test_a_loader_of_unknown_length() -> None:
    """Its last batch is known after it only, so the last window ends when the loop asks for the next batch."""
    assert of_a_stream("auto") == [2.5, 4.5, 6.5, 10.5, 10.5]
    row = (2.5 + 6.5) / 2
    for strategy in ("ddp", "fsdp"):
        found = run_world(2, of_a_stream, strategy)
        assert found[0] == found[1]
        assert found[0][:1] == [row]


@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize("window", [2, 3])
def test_a_loop_resumes_exactly(window: int, done: int) -> None:
    """Saved at the end of a batch: after the first one in windows of 2 that is inside of a window."""

    def epoch(slope: Slope, loader: Any, save_after: int | None = None) -> None:
        for place, (x,) in enumerate(loader, 1):
            for _ in range(3):
                slope.call(x)
            if place == save_after:
                slope.accelerator.save_state("there")
                return
        slope.note()

    def start() -> tuple[Slope, Any]:
        set_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        return Slope(accelerator, momentum=0.5), accelerator.prepare(batches(3))

    whole, loader = start()
    epoch(whole, loader)
    epoch(*start(), save_after=done)
    resumed, loader = start()
    resumed.accelerator.load_state("there", resume_loaders=True)
    resumed.note()
    resumed.found.clear()
    epoch(resumed, loader)
    steps = done * 3 // window
    if done * 3 % window == 0:
        assert resumed.found == whole.found[steps:]
        assert resumed.weight == whole.weight
    else:
        assert len(resumed.found) == len(whole.found), "the batch in which the open window begins is repeated"


def test_a_model_that_skips_batches_repeats_none() -> None:
    """After a resume the critic continues with its next window, though the generator has begun a longer one."""

    def start() -> tuple[Accelerator, Slope, Slope, Any]:
        set_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        return accelerator, Slope(accelerator), Slope(accelerator), accelerator.prepare(batches(6))

    accelerator, critic, generator, loader = start()
    for number, (x,) in enumerate(islice(loader, 4)):
        critic.call(x)
        if number in (0, 2, 3):
            generator.call(x)
        if number == 3:
            accelerator.save_state("there")
    assert (critic.found, generator.found) == ([4.5, 12.5], [6.5])
    accelerator, critic, generator, loader = start()
    accelerator.load_state("there", resume_loaders=True)
    critic.note()
    for (x,) in loader:
        critic.call(x)
    assert critic.found[1:] == [20.5]


def test_other_loops_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """`backward` outside of `accumulate`: each step is an optimizer step, also several for one batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    slope, loader = Slope(accelerator), accelerator.prepare(batches(2))
    for (x,) in loader:
        for part in x.split(2):
            accelerator.backward(slope.model(part[:, None]).mean())
            slope.optimizer.step()
            slope.optimizer.zero_grad()
            slope.note()
    assert slope.found == [0.75, 1.75, 2.75, 3.75], "each loss is divided by 2"
    assert "backward is called outside of accumulate()" in caplog.text
    with pytest.raises(ConfigurationError, match="accumulate: Linear has not been prepared"):
        accelerator.accumulate(nn.Linear(1, 1))
