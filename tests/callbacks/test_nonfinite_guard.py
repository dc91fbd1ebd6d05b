from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit.callbacks import NonFiniteGuard, nonfinite_guard
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, NonFiniteError
from trainkit.precision import Precision

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"action": "warn"}, ["'raise', 'skip'", "'warn'"]),
        ({"check": ()}, ["'loss', 'grad' or both"]),
        ({"check": ("loss", "grads")}, ["'grads'", "Did you mean 'grad'"]),
        ({"check": "gradient"}, ["'gradient'"]),
        ({"warn_after": 0}, ["warn_after", "≥ 1"]),
        ({"max_consecutive": 0}, ["max_consecutive", "or None"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        NonFiniteGuard(**arguments)
    for word in words:
        assert word in str(caught.value)


def update(
    callback: NonFiniteGuard, trainer: Any, module: Any, losses: list[float], gradient: float = 1.0
) -> torch.optim.Optimizer:
    """One optimizer step: the hook before each backward, then the hook before the step."""
    optimizer = torch.optim.SGD(module.parameters())
    for loss in losses:
        callback.on_before_backward(trainer, module, torch.tensor(loss))
    module.weight.grad = torch.tensor([[1.0, gradient]])
    module.bias.grad = torch.ones(1)
    callback.on_before_optimizer_step(trainer, module, optimizer)
    trainer.global_step += 1
    return optimizer


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "grad"])
def test_raises_one_update_later_and_names_what_it_was(trainer, module, where: str, value: float) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0])
    update(callback, trainer, module, [1.0, value] if where == "loss" else [1.0], value if where == "grad" else 1.0)
    with pytest.raises(NonFiniteError) as caught:
        update(callback, trainer, module, [1.0])
    what = {
        "loss": "in optimizer step 2: the loss.",
        "grad": "in optimizer step 2: the gradient of weight (1 of 2 parameters).",
    }
    for word in (what[where], "gradient_clip_val=1.0", "NonFiniteGuard(action='skip')"):
        assert word in str(caught.value)


def test_the_last_update_is_read_when_training_ends(trainer, module) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0], NAN)
    with pytest.raises(NonFiniteError, match="in optimizer step 1"):
        callback.on_train_end(trainer, module)
    callback.on_train_end(trainer, module)  # reported only once


def test_check_now_reads_at_once(trainer, module) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    callback.check_now()
    update(callback, trainer, module, [1.0])
    callback.check_now()
    update(callback, trainer, module, [NAN], INF)
    with pytest.raises(NonFiniteError, match="the loss; the gradient of weight"):
        callback.check_now()


def test_no_checkpoint_is_written_of_what_is_known_to_be_broken(trainer, module) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0])
    checkpoint: dict[str, Any] = {}
    callback.on_save_checkpoint(trainer, module, checkpoint)
    update(callback, trainer, module, [NAN])
    with pytest.raises(NonFiniteError, match="in optimizer step 2: the loss"):
        callback.on_save_checkpoint(trainer, module, checkpoint)
    assert checkpoint == {}


def test_a_checkpoint_within_a_window_forgets_no_loss(trainer, module) -> None:
    callback = NonFiniteGuard(action="skip")
    callback.on_train_start(trainer, module)
    callback.on_before_backward(trainer, module, torch.tensor(NAN))
    callback.on_save_checkpoint(trainer, module, {})
    update(callback, trainer, module, [1.0])
    assert callback.skipped_updates == 1


def test_the_loss_of_a_closure_is_read_when_training_ends(trainer, module) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [])
    callback.on_before_backward(trainer, module, torch.tensor(NAN))  # within optimizer.step(closure)
    with pytest.raises(NonFiniteError, match="in optimizer step 1: the loss"):
        callback.on_train_end(trainer, module)


def test_what_is_not_asked_for_is_not_watched(trainer, module) -> None:
    for check, losses, gradient in [(("loss",), [1.0], NAN), (("grad",), [NAN], 1.0)]:
        callback = NonFiniteGuard(check=check)
        callback.on_train_start(trainer, module)
        update(callback, trainer, module, losses, gradient)
        callback.check_now()


def test_large_finite_gradients_pass(trainer, module) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [3e38], 3e38)  # its 2-norm would be inf
    callback.check_now()


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_several_kinds(trainer, bad: bool) -> None:
    module = nn.Module()
    module.plain = nn.Parameter(torch.zeros(2))
    module.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    module.narrow = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    module.scattered = nn.Parameter(torch.zeros(3, 2))
    module.empty = nn.Parameter(torch.zeros(0))
    module.unused = nn.Parameter(torch.zeros(2))
    module.plain.grad = torch.ones(2)
    module.wide.grad = torch.full((2,), 1e300, dtype=torch.float64)  # would overflow in float32
    module.narrow.grad = torch.tensor([1.0, NAN if bad else 1.0], dtype=torch.bfloat16)
    values = torch.tensor([[1.0, INF if bad else 1.0]])
    module.scattered.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), values, (3, 2), check_invariants=True)
    module.empty.grad = torch.zeros(0)
    callback = NonFiniteGuard(check=("grad",))
    callback.on_train_start(trainer, module)
    callback.on_before_optimizer_step(trainer, module, torch.optim.SGD(module.parameters()))
    if not bad:
        callback.check_now()
        return
    with pytest.raises(NonFiniteError, match=r"gradient of narrow, scattered \(2 of 5 parameters\)"):
        callback.check_now()


def test_only_the_first_few_parameters_are_named(trainer) -> None:
    module = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(12))
    for parameter in module:
        parameter.grad = torch.tensor([NAN])
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    callback.on_before_optimizer_step(trainer, module, torch.optim.SGD(module.parameters()))
    with pytest.raises(NonFiniteError, match=r"0, 1, 2, 3, 4, 5, 6, 7 and 4 more \(12 of 12 parameters\)"):
        callback.check_now()


def test_the_flag_is_not_read_before_the_next_update(trainer, module, monkeypatch) -> None:
    reads: list[Tensor] = []
    original = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: reads.append(tensor) or original(tensor))
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    for number in range(3):
        update(callback, trainer, module, [1.0, 1.0])
        assert len(reads) == number


def test_a_flag_on_its_way_from_a_device_is_read_when_it_has_arrived(trainer, module, monkeypatch) -> None:
    class Copy:
        """A queued copy from the device; the value arrives at `synchronize`."""

        def __init__(self, flag: Tensor) -> None:
            self.flag, self.host = flag, torch.tensor(True)

        def synchronize(self) -> None:
            self.host.copy_(self.flag)

    copies: list[Copy] = []

    def queue(flag: Tensor) -> tuple[Tensor, Copy]:
        copies.append(Copy(flag))
        return copies[-1].host, copies[-1]

    monkeypatch.setattr(nonfinite_guard, "copy_to_host", queue)
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0])
    update(callback, trainer, module, [NAN])
    with pytest.raises(NonFiniteError, match="step 2"):
        update(callback, trainer, module, [1.0])


def test_skip_leaves_out_the_update_and_counts(trainer, module) -> None:
    callback = NonFiniteGuard("skip")
    callback.on_train_start(trainer, module)
    for losses, gradient, in_a_row, in_all in [
        ([1.0], 1.0, 0, 0),
        ([1.0, NAN], 1.0, 1, 1),
        ([1.0], INF, 2, 2),
        ([1.0], 1.0, 0, 2),
        ([INF], 1.0, 1, 3),
    ]:
        update(callback, trainer, module, losses, gradient)
        assert (callback.consecutive_skips, callback.skipped_updates) == (in_a_row, in_all)
        assert len(trainer.accelerator.skips) == in_all
    callback.on_train_end(trainer, module)


def test_skip_warns_and_then_raises(trainer, module) -> None:
    callback = NonFiniteGuard("skip", warn_after=2, max_consecutive=3)
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [NAN])
    with pytest.warns(
        TrainkitWarning,
        match=r"skipped 2 optimizer steps in a row, 2 in all. The last: Not finite in optimizer step 2: the loss",
    ):
        update(callback, trainer, module, [NAN])
    with pytest.raises(NonFiniteError, match=r"3 optimizer steps in a row.*max_consecutive=3.*max_consecutive=6"):
        update(callback, trainer, module, [NAN])


def test_skip_without_a_limit(trainer, module) -> None:
    callback = NonFiniteGuard("skip", warn_after=1000, max_consecutive=None)
    callback.on_train_start(trainer, module)
    for _ in range(100):
        update(callback, trainer, module, [NAN])
    assert callback.skipped_updates == 100


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_under_a_loss_scaler_gradients_are_its_business(trainer, module, action: str) -> None:
    """With a loss scaler, the scaler handles overflows of gradients; the guard checks only the loss."""
    precision = Precision("16-mixed")
    precision.setup(torch.device("cpu"))
    trainer.scaler = precision.scaler
    callback = NonFiniteGuard(action)
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0], INF)
    callback.check_now()
    assert callback.skipped_updates == 0
    if action == "raise":
        update(callback, trainer, module, [INF], INF)
        with pytest.raises(NonFiniteError, match="in optimizer step 2: the loss"):
            callback.check_now()
    else:
        update(callback, trainer, module, [INF], INF)
        assert callback.skipped_updates == 1
    with pytest.raises(ConfigurationError, match=r"check=\('loss',\)"):
        NonFiniteGuard(action, check=("grad",)).on_train_start(trainer, module)


def test_a_run_that_failed_leaves_nothing_for_the_next(trainer, module) -> None:
    callback = NonFiniteGuard()
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [NAN])
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0])
    callback.check_now()


def test_state_comes_back() -> None:
    first = NonFiniteGuard("skip")
    first.skipped_updates, first.consecutive_skips = 5, 2
    second = NonFiniteGuard("skip")
    second.load_state_dict(first.state_dict())
    assert (second.skipped_updates, second.consecutive_skips) == (5, 2)


def test_looks_at_gradients_before_they_are_clipped() -> None:
    assert not NonFiniteGuard.runs_last


def loader_with(bad: dict[int, float], batches: int = 4) -> Any:
    """Batches of four samples. `bad` gives, for some batches, a value in the targets that is not finite."""
    inputs, targets = tiny_loader(samples=4 * batches).dataset.tensors
    targets = targets.clone()
    for batch, value in bad.items():
        targets[4 * batch] = value
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


def test_a_fit_ends_one_update_after_a_loss_that_is_not_finite(make_trainer) -> None:
    trainer = make_trainer(NonFiniteGuard())
    with pytest.raises(NonFiniteError, match=r"step 2: the loss; the gradient of layer.weight, layer.bias \(2 of 2"):
        trainer.fit(TinyModule(), loader_with({1: NAN}))
    assert trainer.global_step == 2


def test_a_fit_whose_last_update_was_not_finite_does_not_end_well(make_trainer) -> None:
    with pytest.raises(NonFiniteError, match="step 4"):
        make_trainer(NonFiniteGuard()).fit(TinyModule(), loader_with({3: INF}))


def test_a_micro_batch_inside_a_window_is_seen(make_trainer) -> None:
    with pytest.raises(NonFiniteError, match="step 1: the loss"):
        make_trainer(NonFiniteGuard(check=("loss",)), accumulate_grad_batches=4).fit(TinyModule(), loader_with({1: NAN}))


class Momentum(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_fit_that_skips_is_as_if_the_batch_had_not_been_there(make_trainer) -> None:
    results = []
    for loader, skipped in [(loader_with({1: NAN}), 1), (loader_with({}), 0)]:
        torch.manual_seed(0)
        module, guard = Momentum(), NonFiniteGuard("skip")
        if not skipped:
            tensors = loader.dataset.tensors
            kept = [i for i in range(16) if i // 4 != 1]
            loader = DataLoader(TensorDataset(*(tensor[kept] for tensor in tensors)), batch_size=4)
        trainer = make_trainer(guard)
        trainer.fit(module, loader)
        assert guard.skipped_updates == skipped
        assert trainer.global_step == 3
        optimizer = trainer.optimizers[0]
        state = [optimizer.state[parameter]["momentum_buffer"] for parameter in module.parameters()]
        results.append([*module.parameters(), *state, torch.tensor(optimizer.param_groups[0]["lr"])])
    for with_skip, without in zip(*results, strict=True):
        assert torch.equal(with_skip, without)


def test_a_fit_with_too_many_skips_ends(make_trainer) -> None:
    guard = NonFiniteGuard("skip", warn_after=9, max_consecutive=3)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row"):
        make_trainer(guard).fit(TinyModule(), loader_with({0: NAN, 1: NAN, 2: NAN}))


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_fit_in_which_only_the_loss_scale_overflows_continues(make_trainer, action: str) -> None:
    guard, precision = NonFiniteGuard(action), Precision("16-mixed", init_scale=2.0**125)
    trainer = make_trainer(guard, precision=precision, max_epochs=3)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step < 12  # otherwise the scaler has skipped nothing, and nothing is tested
    assert guard.skipped_updates == 0


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_watching_changes_nothing(make_trainer, action: str) -> None:
    weights = []
    for callbacks in ([], [NonFiniteGuard(action)]):
        torch.manual_seed(0)
        module = TinyModule()
        make_trainer(*callbacks, gradient_clip_val=0.5).fit(module, tiny_loader())
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)
