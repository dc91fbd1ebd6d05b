"""The arguments of `Trainer`: what each may be, which contradict each other, and what settings and assignments change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from trainkit.checks import is_whole, real_number, whole_number
from trainkit.config.settings import Settings, inherited_settings
from trainkit.console import counted
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.launch.environment import DEVICE
from trainkit.launch.joining import nodes, processes
from trainkit.launch.strategy_choice import read_devices
from trainkit.module.activation_checkpointing import checkpointing_choice
from trainkit.paths import local_path
from trainkit.precision import MIXED, OVER_MASTERS, is_short
from trainkit.registry import load_callback, load_strategy

if TYPE_CHECKING:
    from trainkit.config.settings import Plugin
    from trainkit.trainer.trainer import Trainer

__all__ = ["ArgumentView", "TrainerArguments", "assign_argument", "attribute_errors", "limited", "with_settings"]


Value = TypeVar("Value")


class ArgumentView(Generic[Value]):
    """An argument of the Trainer under its name, with its default filled in; assigning it takes effect in the next run.

    Args:
        fixed: It cannot be assigned, because the Trainer has made a callback from it.
    """

    def __init__(self, fixed: bool = False) -> None:
        self._fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> ArgumentView[Value]: ...

    @overload
    def __get__(self, trainer: Trainer, owner: type) -> Value: ...

    def __get__(self, trainer: Trainer | None, owner: type) -> Any:
        return self if trainer is None else getattr(trainer._arguments, self._name)

    def __set__(self, trainer: Trainer, value: Any) -> None:
        if self._fixed:
            raise ConfigurationError(
                f"trainer.{self._name} cannot be assigned: a callback was made from it. Pass it: "
                f"Trainer({self._name}={value!r})"
            )
        assign_argument(trainer, self._name, value)


def assign_argument(trainer: Trainer, name: str, value: Any) -> None:
    """Change an argument of a Trainer, checked together with all others.

    Raises:
        ConfigurationError: A run is in progress, or the value is wrong or contradicts another argument.
    """
    if trainer.stage is not None:
        by_epoch = name == "accumulate_grad_batches"
        raise ConfigurationError(
            f"trainer.{name} cannot change during a run, whose plan is fixed. Assign it before: trainer.{name} = {value!r}"
            + (", or let it change by epoch: callbacks=[GradientAccumulationScheduler({0: 1, 4: 2})]" if by_epoch else "")
        )
    if name == "accumulate_grad_batches" and (isinstance(value, Mapping) or trainer._run.accumulation_schedule is not None):
        raise ConfigurationError(
            "trainer.accumulate_grad_batches cannot be assigned where the number changes by epoch, because a callback sets it. "
            f"Pass it: Trainer(accumulate_grad_batches={value!r})"
        )
    changed = trainer._arguments.with_value(name, value)
    if changed.fast_dev_run and getattr(changed, name) == getattr(trainer._arguments, name) != value:
        raise ConfigurationError(
            f"trainer.{name} = {value!r} has no effect, because fast_dev_run={changed.fast_dev_run!r} sets it to "
            f"{getattr(changed, name)!r}. Remove fast_dev_run."
        )
    trainer.strategy.check_arguments(changed)
    trainer._run.use_arguments(changed)


def check_switches(given: dict[str, Any]) -> dict[str, Any]:
    """Check that the switches of a Trainer are True, False or, where that is allowed, None; returns its arguments."""
    for name in (
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "slurm_requeue",
        "inference_mode",
        "detect_anomaly",
        "log_grad_norm",
        "benchmark",
    ):
        value = given[name]
        optional = name == "benchmark" or name.startswith("enable_")  # Lightning's default is None
        if not (value is None and optional) and (isinstance(value, str) or value not in (True, False)):
            raise ConfigurationError(f"{name} must be True or False, not {value!r}.")
    return given


@dataclass
class TrainerArguments:
    """The numbers among the Trainer's arguments, checked; meanings in `trainkit.Trainer`."""

    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: str | timedelta | Mapping[str, int] | None
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    fast_dev_run: int | bool
    num_sanity_val_steps: int | None
    val_check_interval: int | float | str | timedelta | Mapping[str, float] | None
    val_every_n_steps: int | None
    check_val_every_n_epoch: int | None
    accumulate_grad_batches: int
    global_batch_size: int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    log_grad_norm: bool
    log_every_n_steps: int | None
    reload_dataloaders_every_n_epochs: int
    deterministic: bool | str | None
    default_root_dir: str | Path | None
    slurm_requeue: bool
    activation_checkpointing: Any

    def __post_init__(self) -> None:
        self._given = {field.name: getattr(self, field.name) for field in fields(self)}
        self.ends_by_default = False  # no argument says when training ends
        self.accumulation_schedule: Mapping[int, int] | None = None  # if accumulate_grad_batches was one
        self._check_counts()
        self._check_fractions()
        self._check_choices()
        self._check_contradictions()
        self._unify()
        self._set_defaults()

    def with_value(self, name: str, value: Any) -> TrainerArguments:
        """These arguments with another value of one of them; defaults that depend on it follow.

        Raises:
            ConfigurationError: the value is wrong, or contradicts another argument.
        """
        return TrainerArguments(**{**self._given, name: value})

    def _check_counts(self) -> None:
        schedule: Any = self.accumulate_grad_batches
        if isinstance(schedule, Mapping):
            self.accumulation_schedule = schedule
            kind = load_callback("gradient_accumulation_scheduler")
            self.accumulate_grad_batches = kind(schedule).get_accumulate_grad_batches(0)
        for name, least, optional in (
            ("max_epochs", -1, True),
            ("min_epochs", 0, True),
            ("max_steps", -1, False),
            ("min_steps", 0, True),
            ("num_sanity_val_steps", -1, True),
            ("val_every_n_steps", 1, True),
            ("check_val_every_n_epoch", 1, True),
            ("accumulate_grad_batches", 1, False),
            ("global_batch_size", 1, True),
            ("log_every_n_steps", 0, True),
            ("reload_dataloaders_every_n_epochs", 0, False),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            hint = " (-1: no limit)" if least == -1 else ""
            setattr(self, name, whole_number(value, name, least, expected=f"an integer ≥ {least}{hint}"))

    def _check_fractions(self) -> None:
        for name in (*(f.name for f in fields(self) if f.name.startswith("limit_")), "overfit_batches"):
            value = getattr(self, name)
            value = 1.0 if value is None else _as_count(value)
            setattr(self, name, value)
            if not ((is_whole(value) and value >= 0) or (isinstance(value, float) and 0.0 <= value <= 1.0)):
                raise ConfigurationError(
                    f"{name} must be a number of batches (an integer ≥ 0) or a fraction (a float from 0.0 to 1.0), not "
                    f"{value!r}. For example: {name}=100 or {name}=0.25"
                )
        self._check_val_interval()

    def _check_val_interval(self) -> None:
        value = self.val_check_interval
        if isinstance(value, str | timedelta | Mapping):
            self.val_check_interval = time = _as_time(value)
            valid = bool(time)  # not 0 either
        else:
            self.val_check_interval = value = _as_count(value)
            fraction = isinstance(value, float) and 0.0 < value <= 1.0
            valid = value is None or fraction or (is_whole(value) and value >= 1)
        if not valid:
            raise ConfigurationError(
                "val_check_interval must be a number of training batches (an integer ≥ 1), a fraction of the epoch (a float "
                f"above 0.0 up to 1.0) or a time such as '00:00:30:00', not {value!r}. To validate every N optimizer steps: "
                "val_every_n_steps=N"
            )

    def _check_choices(self) -> None:
        checkpointing_choice(self.activation_checkpointing)
        if self.gradient_clip_algorithm not in (None, "norm", "value"):
            raise UnknownNameError(
                f"unknown gradient_clip_algorithm {self.gradient_clip_algorithm!r}; known: 'norm', 'value'."
                f"{nearest(str(self.gradient_clip_algorithm), ('norm', 'value'))}"
            )
        clip = self.gradient_clip_val
        if clip is not None:
            real_number(clip, "gradient_clip_val", least=0)
        if self.default_root_dir is not None and not isinstance(self.default_root_dir, str | os.PathLike):
            raise ConfigurationError(f"default_root_dir must be a path, not {self.default_root_dir!r}. For example: 'runs'")
        if clip is None and self.gradient_clip_algorithm == "value":
            raise ConfigurationError(
                "gradient_clip_algorithm='value' has no effect without gradient_clip_val. Add it: gradient_clip_val=0.5"
            )
        if self.deterministic not in (True, False, None, "warn"):
            raise ConfigurationError(f"deterministic must be True, False or 'warn', not {self.deterministic!r}.")
        run = self.fast_dev_run
        if not isinstance(run, bool) and not (is_whole(run) and run >= 0):
            raise ConfigurationError(f"fast_dev_run must be True, False or a number of batches, not {run!r}.")

    def _check_contradictions(self) -> None:
        self._check_validation()
        if self.global_batch_size is not None and self.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size} and accumulate_grad_batches={self.accumulate_grad_batches} both "
                "set the accumulation. Give one of them."
            )
        for low, high in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and -1 < most < least:
                raise ConfigurationError(f"{low}={least} is more than {high}={most}.")
        if self.overfit_batches and self.limit_train_batches != 1.0:
            raise ConfigurationError(
                f"overfit_batches={self.overfit_batches} and limit_train_batches={self.limit_train_batches} both limit the "
                "training batches. Give one of them."
            )

    def _check_validation(self) -> None:
        """Refuse arguments that contradict each other about when to validate."""
        if self.val_every_n_steps is not None and self.val_check_interval not in (None, 1.0):
            raise ConfigurationError(
                f"val_every_n_steps={self.val_every_n_steps} and val_check_interval={self.val_check_interval} both set when to "
                "validate. Give one of them."
            )
        if self.val_every_n_steps is not None and self.check_val_every_n_epoch not in (None, 1):
            raise ConfigurationError(
                f"val_every_n_steps={self.val_every_n_steps} counts optimizer steps across epochs, so "
                f"check_val_every_n_epoch={self.check_val_every_n_epoch} cannot be used with it. Give one of them."
            )
        across_epochs = self.check_val_every_n_epoch is None and self.val_every_n_steps is None
        if across_epochs and not isinstance(self.val_check_interval, int | timedelta):
            raise ConfigurationError(
                "check_val_every_n_epoch=None counts training batches across epochs, which needs an integer, or a time. For "
                "example: val_check_interval=1000"
            )

    def _unify(self) -> None:
        """Replace values by others that mean the same: one batch of each stage by `True`, clipping to 0 by `None`."""
        if self.fast_dev_run in (0, 1):
            self.fast_dev_run = bool(self.fast_dev_run)
        self.gradient_clip_val = self.gradient_clip_val or None

    def _set_defaults(self) -> None:
        """Set defaults, also those that depend on other arguments."""
        self.default_root_dir = local_path(self.default_root_dir or "trainkit_runs", "default_root_dir")
        if self.max_epochs is None:
            limitless = self.max_steps != -1 or self.max_time is not None
            self.max_epochs = -1 if limitless else max(1000, self.min_epochs or 0)
            self.ends_by_default = not limitless and not self.fast_dev_run
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
            self.val_check_interval, self.val_every_n_steps, self.check_val_every_n_epoch = 1.0, None, 1
            self.overfit_batches = 0.0
            self.log_every_n_steps = 0 if self.log_every_n_steps == 0 else 1  # with so few steps, log each of them
            for name in ("train", "val", "test", "predict"):
                setattr(self, f"limit_{name}_batches", batches)
        if self.overfit_batches:
            self.limit_train_batches = self.overfit_batches
            if self.limit_val_batches == 1.0:
                self.limit_val_batches = self.overfit_batches
        if self.num_sanity_val_steps is None:
            self.num_sanity_val_steps = 2
        if self.val_check_interval is None:
            self.val_check_interval = 1.0
        if self.log_every_n_steps is None:
            self.log_every_n_steps = 50


def _as_count(value: Any) -> Any:
    """A whole float above 1, such as `10.0`, is a number of batches and no fraction."""
    return int(value) if isinstance(value, float) and value > 1.0 and value.is_integer() else value


def _as_time(value: Any) -> timedelta | None:
    """A time in one of the forms of `max_time`; `None` if it is none of them."""
    try:
        return timedelta(seconds=load_callback("timer")(value).duration)
    except ConfigurationError:
        return None


def limited(length: int | None, limit: int | float, argument: str) -> int | None:
    """The number of batches to use of a loader of `length`; `None` if neither the length nor the limit determines it.

    Raises:
        ConfigurationError: a fraction of an unknown length, or one that leaves no batch.
    """
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 0.0:
        return 0
    if length is None:
        if limit == 1.0:
            return None
        raise ConfigurationError(
            f"{argument}={limit} is a fraction, but the loader's length is unknown. Use a number of batches: {argument}=100"
        )
    count = int(length * limit)
    if count == 0 < length:
        raise ConfigurationError(
            f"{argument}={limit} of {counted(length, 'batch')} leaves no batch. Use a fraction of at least {1 / length:.3g}, "
            f"or a number of batches: {argument}=1"
        )
    return count


_CLAIMS = ("gradient_accumulation_steps", "gradient_clipping")


def with_settings(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments of a `Trainer`, completed by the settings that this process was started with.

    Args:
        given: the arguments; the settings replace those that are `None` or `"auto"`.

    Returns:
        The arguments, and a notice of what the settings have set, to be printed when the processes are connected; empty if
        they have set nothing.

    Raises:
        ConfigurationError: the settings ask for something that is not available here.
    """
    settings = inherited_settings()
    plugin, mixed = settings.plugin(), settings.get("mixed_precision")
    taken = _place(settings, given) | _optimizer_step(settings, plugin, given)
    created: dict[str, Any] = {}
    masters = False
    if plugin is not None and given["strategy"] == "auto" and not _elsewhere(settings, given):
        created, chosen = _by_plugin(settings, plugin, {**given, **taken})
        taken |= chosen
        masters = created["strategy"].owns_masters
    if given["precision"] is None and mixed is not None:
        taken |= _precision(given["strategy"], OVER_MASTERS.get(mixed, MIXED[mixed]) if masters else MIXED[mixed])
    notes = [f"{name}={value!r}" for name, value in taken.items()] + _compilation(settings, given)
    complete = given | {name: taken[name] for name in taken.keys() & given.keys()} | created
    if complete["accumulate_grad_batches"] is None:
        complete["accumulate_grad_batches"] = 1
    return complete, f"settings of {settings.source}: {', '.join(notes)}." if notes else ""


def _precision(strategy: Any, precision: str) -> dict[str, Any]:
    """The precision of the settings as an argument; a strategy object without a precision gets it immediately."""
    if isinstance(strategy, str):
        return {"precision": precision}
    if hasattr(strategy, "use_precision"):
        strategy.use_precision(precision, given=False)
    return {}


def _compilation(settings: Settings, given: dict[str, Any]) -> list[str]:
    """What the settings compile, in words; `setup.requested_compilation` reads them."""
    backend = settings.get("dynamo_backend")
    return [] if backend is None or given["compile"] is not None else [f"compiled by {backend!r}"]


def attribute_errors(given: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it an error names the settings, if they set what the arguments of a `Trainer` do not.

    Args:
        given: the arguments.
    """
    settings = inherited_settings()
    names = settings.of_place if (given["strategy"], given["accelerator"]) == ("auto", "auto") else ()
    return settings.attribute_errors(*names, *(() if given["precision"] is not None else ("mixed_precision",)))


def _place(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """What the settings say about where to run, in addition to `Settings.plugin`."""
    taken: dict[str, Any] = {}
    accelerator, name = given["accelerator"], settings.strategy
    if accelerator == "auto" and settings.get("use_cpu"):
        taken["accelerator"] = "cpu"
    elif accelerator == "auto" and settings.get("distributed_type") == "MULTI_GPU":
        taken["accelerator"] = "gpu"
    if name is not None and given["strategy"] == "auto" and not _elsewhere(settings, given):
        taken["strategy"] = name
        if settings.devices is not None and given["devices"] == "auto":
            taken["devices"] = settings.devices
    return taken


def _elsewhere(settings: Settings, given: dict[str, Any]) -> bool:
    """Whether the arguments ask for devices that the strategy of the settings does not run on."""
    accelerator, info = given["accelerator"], settings.info
    if info is None:
        return False
    if accelerator == "tpu":
        return DEVICE not in info.devices
    if accelerator not in ("auto", "cpu") and DEVICE in info.devices:
        return True
    return info.one_device and (given["devices"] not in ("auto", 1, "1") or given["num_nodes"] not in (None, 1))


def _optimizer_step(settings: Settings, plugin: Plugin | None, given: dict[str, Any]) -> dict[str, Any]:
    """What the settings say about an optimizer step, by themselves or in the options of the strategy."""
    of_plugin = {} if plugin is None else {name: plugin.claimed(name) for name in _CLAIMS}
    claimed = {name: value for name, value in of_plugin.items() if value is not None}
    steps, clip = settings.get(_CLAIMS[0], claimed.get(_CLAIMS[0])), claimed.get(_CLAIMS[1])
    taken: dict[str, Any] = {}
    if steps is not None and given["accumulate_grad_batches"] is None and given["global_batch_size"] is None:
        taken["accumulate_grad_batches"] = steps
    if clip and given["gradient_clip_val"] is None and not _clips(given["callbacks"]):
        taken["gradient_clip_val"] = clip
    return taken


def _clips(callbacks: Any) -> bool:
    kind = load_callback("gradient_clipping")
    return any(isinstance(callback, kind) for callback in (callbacks if isinstance(callbacks, list | tuple) else [callbacks]))


def _by_plugin(settings: Settings, plugin: Plugin, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plugin's strategy as an argument, and what else it sets.

    The strategy does not get accumulation, clipping and activation checkpointing, which are arguments of the Trainer.
    """
    short = is_short(arguments["precision"] or OVER_MASTERS[settings.get("mixed_precision") or "no"])
    with settings.attribute_errors(*settings.of_place):
        wanted = read_devices(arguments["accelerator"], arguments["devices"], arguments["num_nodes"])
        options = plugin.options_for(short, processes(wanted), nodes(wanted), _CLAIMS)
        strategy = load_strategy(plugin.strategy)(device=wanted.accelerator, **options)
    chosen = plugin.described()
    if arguments.get("activation_checkpointing") is None and plugin.claimed("activation_checkpointing"):
        chosen["activation_checkpointing"] = True
    return {"strategy": strategy}, chosen
