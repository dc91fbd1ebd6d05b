"""`make_schedule`: learning-rate schedules by name, with the names and the formulas of `transformers.get_scheduler`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainkit.checks import choice, is_whole, real_number, whole_number
from trainkit.errors import OptimizerError, UnknownNameError, nearest

__all__ = ["make_schedule"]

_SHAPES = ("linear", "cosine", "1-sqrt")
# Schedulers of transformers that follow a metric: no formula of the step.
_WITH_METRIC = ("reduce_lr_on_plateau", "greedy")


def make_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    warmup_steps: int = 0,
    warmup_ratio: float | None = None,
    total_steps: int | float | None = None,
    **options: Any,
) -> LambdaLR:
    """A learning-rate schedule by its name, for `scheduler.step()` after each optimizer step.

    Each parameter group's learning rate is multiplied by a factor. During the warm-up the factor rises from 0 to 1 in equal
    steps; then it follows the formula of the schedule until `total_steps`. The formulas are those of
    `transformers.get_scheduler`, and their names are accepted too, also as members of `transformers.SchedulerType`.

    | name | after the warm-up | options |
    |---|---|---|
    | `"linear"` | falls to 0 in equal steps | |
    | `"cosine"` | falls to 0 along half a cosine | `num_cycles=0.5`: number of waves |
    | `"cosine_with_restarts"` | falls to 0 along half a cosine, `num_cycles` times | `num_cycles=1` |
    | `"cosine_with_min_lr"` | as `"cosine"`, but to `min_lr` | `min_lr`, or `min_lr_rate` as a fraction; `num_cycles=0.5` |
    | `"cosine_warmup_with_min_lr"` | as `"cosine_with_min_lr"`, one step ahead: the warm-up ends at 1 in its last step, and \
begins at `warmup_lr_rate` or its first part | those of `"cosine_with_min_lr"`, and `warmup_lr_rate` |
    | `"polynomial"` | falls to `lr_end` with a power of the remaining part | `power=1.0`, `lr_end=1e-7` |
    | `"constant"` | 1 from the first step; has no warm-up | |
    | `"constant_with_warmup"` | 1 | |
    | `"inverse_sqrt"` | falls with the inverse square root of the step | `timescale`: default: the warm-up, or 10,000 |
    | `"wsd"` or `"warmup_stable_decay"` | 1, then falls in the last `num_decay_steps` | `num_decay_steps` (required), \
`decay_type="cosine"` and `warmup_type="linear"` (or `"1-sqrt"`), `min_lr_ratio=0.0`, `num_cycles=0.5` |

    Sources: cosine: Loshchilov and Hutter, SGDR, ICLR 2017; inverse square root: Vaswani et al., Attention Is All You Need,
    NeurIPS 2017; warm-up, stable, decay: Hu et al., MiniCPM, 2024.

    In `configure_optimizers` you can return the name instead: `{"scheduler": "cosine", "warmup_steps": 100}`, with these
    arguments as further keys. `total_steps` is then the number of optimizer steps of the run.

    Args:
        name: The schedule.
        optimizer: Its groups' learning rates are the largest ones of the schedule.
        warmup_steps: Number of optimizer steps of the warm-up.
        warmup_ratio: The warm-up as a fraction of `total_steps`, rounded up. Give this or `warmup_steps`.
        total_steps: Number of optimizer steps of the whole run. `"constant"`, `"constant_with_warmup"` and `"inverse_sqrt"`
            need it only for `warmup_ratio`.
        options: See the table.

    Returns:
        Torch's `LambdaLR`. A checkpoint contains the number of its steps, not the formula: a resumed run follows the
        schedule of its script.

    Raises:
        UnknownNameError: An unknown name or option.
        OptimizerError: A number of steps that is missing or infinite, or more warm-up than steps.
        ConfigurationError: An argument out of its range.

    Example:
        ```python
        import torch
        from trainkit.optim import make_schedule

        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = make_schedule("linear", optimizer, warmup_steps=2, total_steps=10)
        assert optimizer.param_groups[0]["lr"] == 0.0  # of the first step
        ```
    """
    shape = _formula(name)
    known = inspect.signature(shape).parameters
    if warmup_ratio is not None:
        real_number(warmup_ratio, "warmup_ratio", least=0.0, example=0.1)
        if warmup_steps:
            raise OptimizerError(
                f"{name!r} got warmup_steps={warmup_steps} and warmup_ratio={warmup_ratio}, which set the same thing. Give "
                "one of them: warmup_ratio=0.1"
            )
        warmup_steps = math.ceil(_total(name, total_steps) * warmup_ratio)
    numbers = {"num_warmup_steps": whole_number(warmup_steps, "warmup_steps", 0, fix="warmup_steps=100 or warmup_ratio=0.1")}
    if "num_warmup_steps" not in known:
        numbers = {}
        if warmup_steps:
            raise OptimizerError("The schedule 'constant' has no warm-up. Use 'constant_with_warmup' or remove warmup_steps.")
    if "num_training_steps" in known:
        numbers["num_training_steps"] = total = _total(name, total_steps)
        if warmup_steps > total:
            raise OptimizerError(
                f"The schedule {name!r} has {warmup_steps} steps of warm-up, but only {total} steps in total. Use fewer: "
                "warmup_ratio=0.1"
            )
    _check_options(name, options, [option for option in known if option != "step" and not option.endswith("ing_steps")])
    if "lr_init" in known:
        options["lr_init"] = optimizer.defaults["lr"]
    formula = partial(shape, **numbers, **options)
    formula(0)  # an option that is missing or out of range is an error here
    return LambdaLR(optimizer, formula)


def _formula(name: str) -> Callable[..., float]:
    name = str(getattr(name, "value", name))  # it may be a member of transformers.SchedulerType
    if name in _FORMULAS:
        return _FORMULAS[name]
    known = ", ".join(map(repr, _FORMULAS))
    fix = (
        "It follows a metric; use torch's: {'scheduler': ReduceLROnPlateau(optimizer), 'monitor': 'val_loss'}."
        if name in _WITH_METRIC
        else "For another one, create torch's scheduler: torch.optim.lr_scheduler.StepLR(optimizer, 30)."
    )
    raise UnknownNameError(f"There is no schedule {name!r}; known: {known}.{nearest(name, _FORMULAS)} {fix}")


def _total(name: str, total_steps: int | float | None) -> int:
    if total_steps is None or total_steps == math.inf:
        raise OptimizerError(
            f"The schedule {name!r} needs the number of optimizer steps of the whole run, which is "
            f"{'infinite' if total_steps else 'not given'}. Set it: Trainer(max_steps=10_000), or total_steps=10_000."
        )
    return whole_number(total_steps, "total_steps", 1, fix="total_steps=10_000", error=OptimizerError)


def _check_options(name: str, options: dict[str, Any], known: list[str]) -> None:
    known = [option for option in known if option not in ("num_warmup_steps", "lr_init")]
    for option in options:
        if option not in known:
            every = ["warmup_steps", "warmup_ratio", "total_steps", *known]
            raise UnknownNameError(
                f"The schedule {name!r} has no option {option!r}; it has {', '.join(every)}.{nearest(option, every)}"
            )


# ------------------------------------------------------------------------- formulas: the factor of the learning rate


def _warmup(step: int, num_warmup_steps: int) -> float:
    return step / max(1, num_warmup_steps)


def _progress(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    """The part of the steps after the warm-up that is done."""
    return (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def _linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def _cosine(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    done = _progress(step, num_warmup_steps, num_training_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * done)))


def _cosine_with_min_lr(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    lr_init: float = 1.0,
) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise OptimizerError("A cosine schedule with a least rate needs min_lr or min_lr_rate. For example: min_lr_rate=0.1")
    least = float(min_lr_rate) if min_lr_rate is not None else float(min_lr or 0.0) / lr_init
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * _progress(step, num_warmup_steps, num_training_steps)))
    return max(0.0, wave * (1.0 - least) + least)


def _cosine_warmup_with_min_lr(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
    lr_init: float = 1.0,
) -> float:
    counts = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    shape: dict[str, Any] = {"num_cycles": num_cycles, "min_lr": min_lr, "min_lr_rate": min_lr_rate, "lr_init": lr_init}
    ahead = _cosine_with_min_lr(step + 1, **counts, **shape)
    if step >= num_warmup_steps:
        return ahead
    if warmup_lr_rate is None:
        return (step + 1) / num_warmup_steps
    return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)


def _cosine_with_restarts(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    done = _progress(step, num_warmup_steps, num_training_steps)
    return 0.0 if done >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * done) % 1.0))))


def _polynomial(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    power: float = 1.0,
    lr_end: float = 1e-7,
    lr_init: float = 1.0,
) -> float:
    if lr_init <= lr_end:
        raise OptimizerError(
            f"The schedule 'polynomial' falls from lr={lr_init} to lr_end={lr_end}, which must be smaller. Set it: lr_end=0.0"
        )
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    left = max(0.0, 1.0 - _progress(step, num_warmup_steps, num_training_steps))
    return float(((lr_init - lr_end) * left**power + lr_end) / lr_init)


def _constant(step: int) -> float:
    return 1.0


def _constant_with_warmup(step: int, *, num_warmup_steps: int) -> float:
    return min(1.0, _warmup(step, num_warmup_steps)) if num_warmup_steps else 1.0


def _inverse_sqrt(step: int, *, num_warmup_steps: int, timescale: int | None = None) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    scale = timescale or num_warmup_steps or 10_000
    return 1.0 / math.sqrt((step + scale - num_warmup_steps) / scale)


def _wsd(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_decay_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    stable_until = num_training_steps - (num_decay_steps or 0)
    if not is_whole(num_decay_steps) or not num_warmup_steps <= stable_until <= num_training_steps:
        raise OptimizerError(
            f"The schedule 'wsd' needs num_decay_steps, an integer from 0 to {num_training_steps - num_warmup_steps}, not "
            f"{num_decay_steps!r}. For example: num_decay_steps={max(1, num_training_steps // 10)}"
        )
    choice(warmup_type, "warmup_type", _SHAPES)
    choice(decay_type, "decay_type", _SHAPES)
    if step < num_warmup_steps:
        part = _warmup(step, num_warmup_steps)
        rises = {"linear": part, "cosine": 0.5 * (1.0 - math.cos(math.pi * part)), "1-sqrt": 1.0 - math.sqrt(1.0 - part)}
        return max(0.0, rises[warmup_type] * (1.0 - min_lr_ratio) + min_lr_ratio)
    if step < stable_until:
        return 1.0
    if step >= num_training_steps:
        return min_lr_ratio
    part = (step - stable_until) / max(1, num_decay_steps)
    wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * part))
    falls = {"linear": 1.0 - part, "cosine": wave, "1-sqrt": 1.0 - math.sqrt(part)}
    return max(0.0, falls[decay_type] * (1.0 - min_lr_ratio) + min_lr_ratio)


_FORMULAS: dict[str, Callable[..., float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
    "warmup_stable_decay": _wsd,
}
