"""ZeRO trains like DDP: the same losses, gradient norms and parameters on the same global batches."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers.covering import covering
from helpers.runs.parity import Case, RegressionModule, train, trained
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import STAGES, NoLosses, Sometimes, Weighted, strategy
from helpers.zero.zero_parity import LIMITS, assert_parity, assert_same, expected
from torch import nn

from trainkit import Precision, Trainer
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.optim.optimizer_copy import count_slots
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero.optimizer_adapter import refuse_optimizer

_ROWS = list(product(STAGES, [1, 2], [1, 4], [None, 1.0], ["32-true", "bf16-mixed", "16-mixed"]))
_CASES = [_ROWS[place] for place in covering([[*map(repr, row)] for row in _ROWS])]


@pytest.mark.parametrize("kind, size, window, clip, precision", _CASES)
def test_parity(kind: str, size: int, window: int, clip: float | None, precision: str) -> None:
    assert_parity(kind, size, window, clip, precision)


def test_the_cases_cover_all_values() -> None:
    assert len(_CASES) < 12
    assert all({row[place] for row in _CASES} == {row[place] for row in _ROWS} for place in range(5))


def test_the_comparison_can_fail() -> None:
    other = expected(1, 1, None, "32-true")
    worse = replace(other, losses={key: loss * (1 + 1e-5) for key, loss in other.losses.items()})
    with pytest.raises(AssertionError):
        assert_same(worse, other, LIMITS["32-true"])


def overflowing(kind: str) -> list[Any]:
    """The losses with their step numbers, and the last loss scale, of a training whose first scales are too large."""
    precision = Precision("16-mixed", init_scale=2.0**33, growth_interval=4)
    case = Case(samples=40, batch_size=2, arguments={"precision": precision, "gradient_clip_val": 1.0, "max_epochs": 2})
    losses = train(case, strategy=strategy(kind)).losses
    assert precision.scaler is not None
    return [losses, precision.scaler.get_scale()]


@pytest.mark.parametrize("kind", ["zero1", "zero2-cpu", "zero3"])
def test_steps_that_overflow_are_skipped(kind: str) -> None:
    """The same on all processes and under DDP: the scale is halved until gradients are finite, and later doubled again."""
    for mine, theirs in zip(run_world(2, overflowing, kind), run_world(2, overflowing, "ddp"), strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=5e-3)
        assert mine[1] == theirs[1] < 2.0**33
        assert max(update for update, _ in mine[0]) < 19, "twenty updates, all of which were made"


@pytest.mark.parametrize("kind", list(STAGES))
@pytest.mark.parametrize(
    "samples, window", [(21, 12), *(pytest.param(*case, marks=pytest.mark.zero) for case in ((21, 4), (50, 12)))]
)
def test_uneven_windows(kind: str, samples: int, window: int) -> None:
    """In the last accumulation windows, a micro-batch is short, and some processes have fewer micro-batches or none."""
    case = Case(samples=samples, window=window, arguments={"precision": "32-true", "gradient_clip_val": 1.0})
    alone = trained(case, 1)
    for size in (2,) if window == 4 or samples == 21 else (3,):
        record = trained(case, size, strategy=strategy(kind))
        assert record.losses == pytest.approx(alone.losses, rel=2e-6)


@pytest.mark.parametrize("kind", list(STAGES))
@pytest.mark.parametrize("window", [12, pytest.param(4, marks=pytest.mark.zero)])
def test_parameters_that_get_no_gradient(kind: str, window: int) -> None:
    """No gradient of an earlier window is used for a layer that a window, or its first micro-batch, does not use."""
    case = Case(samples=48, window=window, make=Sometimes, arguments={"precision": "32-true"})
    alone = trained(case, 1)
    for size in (1, 2):
        record = trained(case, size, strategy=strategy(kind))
        assert record.losses == pytest.approx(alone.losses, rel=2e-6)


@pytest.mark.parametrize("kind", list(STAGES))
def test_weights_of_zero(kind: str) -> None:
    case = Case(samples=22, window=4, make=Weighted, arguments={"precision": "32-true"})
    alone = trained(case, 1)
    for size in (1, 2):
        record = trained(case, size, strategy=strategy(kind))
        assert record.losses == pytest.approx(alone.losses, rel=2e-6, nan_ok=True)
        assert all(torch.isfinite(p).all() for p in record.parameters[-1])


@pytest.mark.parametrize("kind", list(STAGES))
def test_modules_are_restored_after_a_run(kind: str) -> None:
    """As after a run under another strategy, all values are there, without hooks. It can be copied and trained again."""
    linear, module = nn.functional.linear, RegressionModule()
    trained_here(module, "auto")
    attributes = {name: sorted(vars(part)) for name, part in module.named_modules()}
    for _ in range(2):
        trained_here(module, kind)
        assert nn.functional.linear is linear
        assert {name: sorted(vars(part)) for name, part in module.named_modules()} == attributes
        assert [tuple(p.shape) for p in module.parameters()] == [(16, 6), (16,), (6, 16), (6,)]
        assert not any(vars(p) for p in module.parameters())
        again = copy.deepcopy(module)
        x = torch.ones(2, 6)
        assert torch.equal(again.eval().net(x), module.eval().net(x))
        module.train()


def trained_here(module: Any, kind: str, **arguments: Any) -> Trainer:
    from helpers.runs.parity import Noisy
    from torch.utils.data import DataLoader

    trainer = Trainer(
        strategy=strategy(kind),
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **arguments,
    )
    trainer.fit(module, DataLoader(Noisy(8), 2), DataLoader(Noisy(5), 2))
    return trainer


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero2-cpu"])
def test_no_loss_on_a_stage_where_no_rank_waits(kind: str) -> None:
    """In stages 1 and 2, a step without a loss counts as a zero gradient."""
    case = Case(samples=48, window=4, make=NoLosses, arguments={"precision": "32-true"})
    alone = trained(case, 1)
    assert len(alone.losses) == 2 * 24 - 4
    assert trained(case, 2, strategy=strategy(kind)).losses == pytest.approx(alone.losses, rel=2e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"stage": 0}, "stage must be 1, 2 or 3, not 0. Without sharding, use strategy='ddp'"),
        ({"stage": 2, "offload_optimizer": "nvme"}, "offload to NVMe needs stage 3, but this is stage 2"),
        ({"stage": 3, "nvme_path": "/tmp"}, "nvme_path='/tmp' is given, but nothing is offloaded to NVMe"),
        ({"stage": 3, "offload_optimizer": "nvme"}, "needs a folder on a fast local disk. .* nvme_path='/path/to/folder'"),
        ({"stage": 3, "offload_params": "nvme", "nvme_path": "/none"}, "nvme_path='/none' is not a folder. Create one"),
        ({"stage": 1, "offload_params": "cpu"}, "needs stage 3, which shards the parameters, but this is stage 1"),
        ({"offload_optimizer": "disk"}, "offload_optimizer must be None, 'cpu' or 'nvme', not 'disk'"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size must be a whole number ≥ 1, not 0"),
        ({"aio_queue_depth": None}, "aio_queue_depth must be a whole number ≥ 1, not None"),
        (
            {"stage": 2, "aio_queue_depth": 16},
            "aio_queue_depth=16 has an effect only with NVMe, but this is ZeROStrategy.stage=2",
        ),
        ({"stage": 2, "sub_group_size": 10}, "sub_group_size=10 has an effect only with stage 3, .* Remove sub_group_size"),
        ({"stage": 3, "round_robin_gradients": True}, "round_robin_gradients=True has an effect only with stages 1 and 2"),
        (
            {"stage": 3, "optimizer_buffer_count": 5},
            "optimizer_buffer_count=5 has an effect only with offload_optimizer='nvme'",
        ),
        (
            {"stage": 3, "pin_memory": False},
            "pin_memory=False has an effect only with offload, but this is .*offload_optimizer=None",
        ),
        ({"stage": 3, "max_params_in_cpu": 5}, "max_params_in_cpu=5 has an effect only with offload_params='nvme'"),
        ({"timeout": -1}, "timeout must be a timedelta or a number of seconds"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ZeROStrategy(**arguments)


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "SparseAdam"])
def test_unsupported_optimizers(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(OptimizerError, match=f"{kind} does not work under ZeRO"):
        refuse_optimizer(optimizer)


def test_optimizers_that_quantize_their_state() -> None:
    from torchao.optim import AdamW8bit

    class Adam8bit(torch.optim.Adam):  # bitsandbytes is not installed
        __module__ = "bitsandbytes.optim.adam"

    for kind in (AdamW8bit, Adam8bit):
        message = f"{kind.__name__} does not work under ZeRO.*quantizes blocks of its state.*Use an elementwise optimizer"
        with pytest.raises(OptimizerError, match=message):
            refuse_optimizer(kind([nn.Parameter(torch.ones(4, 4))]))


def test_an_unsupported_optimizer_in_a_run() -> None:
    module = RegressionModule(bias=False)
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters())  # type: ignore[method-assign]
    with pytest.raises(OptimizerError, match="Adafactor does not work under ZeRO"):
        trained_here(module, "zero2")


ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class AnyOptimizer(RegressionModule):
    """Uses an optimizer of torch with two parameter groups."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        groups = [{"params": [first], "lr": 0.02}, {"params": rest}]
        return getattr(torch.optim, self.optimizer)(groups, lr=0.01)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("kind", ["zero1", "zero2-cpu", "zero3"])
def test_elementwise_optimizers(optimizer: str, kind: str) -> None:
    case = Case(samples=16, window=4, make=AnyOptimizer, options={"optimizer": optimizer}, arguments={"precision": "32-true"})
    assert trained(case, 1, strategy=strategy(kind)).losses == pytest.approx(trained(case, 1).losses, rel=2e-5)


def test_the_number_of_state_tensors_of_an_optimizer() -> None:
    """They are counted in a step of a copy, which does not affect the optimizer."""
    parameter = nn.Parameter(torch.ones(4))
    plain, adam = torch.optim.SGD([parameter], lr=0.1), torch.optim.AdamW([parameter], amsgrad=True)
    adam.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
    assert (count_slots(plain), count_slots(adam)) == (0, 3)
    assert count_slots(torch.optim.Rprop([{"params": [parameter]}, {"params": [nn.Parameter(torch.ones(2))]}])) == 2
    assert torch.equal(parameter, torch.ones(4))
    assert parameter.grad is None
    assert not adam.state


def test_clipping_by_value_is_refused_when_the_trainer_is_created() -> None:
    with pytest.raises(ConfigurationError, match="cannot be clipped by value under ZeRO.*gradient_clip_algorithm='norm'"):
        Trainer(strategy="zero2", accelerator="cpu", gradient_clip_val=0.5, gradient_clip_algorithm="value")


def test_synchronized_batchnorm_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="works with strategy='ddp' only, not with ZeROStrategy"):
        Trainer(strategy="zero2", accelerator="cpu", sync_batchnorm=True)
