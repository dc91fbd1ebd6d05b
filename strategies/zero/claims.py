"""Compares a DeepSpeed configuration with the `Trainer`, the module and the loaders.

A value that differs is an error that shows both values; `"auto"` takes the run's value. If the module creates no optimizer or
scheduler, the one in the configuration is created.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, nearest
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.optim.step_arguments import StepArguments
from trainkit.strategies.zero.config_file import AUTO, DeepSpeedConfig
from trainkit.strategies.zero.deepspeed_api import quiet
from trainkit.strategies.zero.extensions import load, require_compiler

__all__ = ["Claims"]

# Options with which DeepSpeed selects a class of Adam, or how it stores its state.
_OF_DEEPSPEED = ("adam_w_mode", "bias_correction", "fp32_optimizer_states", "torch_adam")
_WARMUP = 0.1  # of the optimizer steps of the run, if the configuration leaves the length of a warm-up to it
_ADAMS = ("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam")


class Claims:
    """The settings of a run that a DeepSpeed configuration also sets.

    Args:
        config: the configuration; `None`: there is none.
        offloaded: whether the optimizer is offloaded.
    """

    def __init__(self, config: DeepSpeedConfig | None, offloaded: bool) -> None:
        self._config = config or DeepSpeedConfig("config")
        self._values, self._source = self._config.claims, self._config.source
        self._offloaded = offloaded
        self._has_trainer = self._takes_precedence = self._clipping_noticed = False

    @property
    def has_optimizer(self) -> bool:
        """Whether the configuration has an `optimizer` section."""
        return self._config.optimizer is not None

    @property
    def clip(self) -> float | None:
        """Maximum gradient norm in the user's own training loop if it does not clip; `None`: no clipping."""
        return self._values.get("gradient_clipping") or None

    def check_arguments(self, arguments: StepArguments) -> None:
        """Compare the configuration with the arguments of the `Trainer`.

        Raises:
            ConfigurationError: they differ; the message shows both values.
        """
        self._has_trainer = True
        theirs = {
            "gradient_clipping": ("gradient_clip_val", arguments.gradient_clip_val or 0.0),
            "gradient_accumulation_steps": ("accumulate_grad_batches", arguments.accumulate_grad_batches),
            "train_batch_size": ("global_batch_size", arguments.global_batch_size),
        }
        if arguments.global_batch_size is not None:  # it determines the accumulation
            del theirs["gradient_accumulation_steps"]
        for key, (name, value) in theirs.items():
            if value is not None:
                self._compare(key, value, f"Trainer({name}={value!r})", f"Trainer({name}={self._values.get(key)!r})")

    def check_batches(self, micro_batch: int | None, window: int, world: World) -> None:
        """Compare the configuration with the training loader.

        Args:
            micro_batch: number of samples in a micro-batch; `None`: the loader has no `batch_size`.
            window: number of micro-batches per process in an optimizer step.
            world: the processes.

        Raises:
            ConfigurationError: they differ; the message shows both values.
        """
        actual = f"{window} micro-batches per optimizer step"
        self._compare("gradient_accumulation_steps", window, actual, "the same number")
        if micro_batch is None:
            sizes = [key for key in ("train_micro_batch_size_per_gpu", "train_batch_size") if key in self._values]
            if sizes:
                notice(f"{' and '.join(sizes)} of {self._source} cannot be checked: the loader has no batch_size.")
            return
        loader = f"the loader's batch_size={micro_batch}"
        self._compare("train_micro_batch_size_per_gpu", micro_batch, loader, "the same batch_size")
        product = micro_batch * window * world.size
        actual = f"batch_size × micro-batches × processes = {micro_batch} × {window} × {world.size} = {product}"
        self._compare("train_batch_size", product, actual, "sizes with that product")

    def take_precedence(self, source: str) -> None:
        """Let `gradient_clipping` override the norm in the user's own training loop, as Accelerate does.

        Args:
            source: name of the configuration in messages.
        """
        self._source, self._takes_precedence = source, True

    def clipping(self, max_norm: float) -> float | None:
        """Returns the maximum gradient norm for a training loop that clips by `max_norm`; `None`: no clipping.

        Raises:
            ConfigurationError: the configuration has another norm, and does not `take_precedence`.
        """
        actual = f"clip_grad_norm_(..., {max_norm!r})"
        if not self._takes_precedence or self._values.get("gradient_clipping", max_norm) == max_norm:
            if self.clip is not None:
                self._compare("gradient_clipping", max_norm, actual, "the same norm")
            return max_norm if max_norm != math.inf else None
        if not self._clipping_noticed:
            self._clipping_noticed = True
            effect = "are not clipped" if self.clip is None else f"are clipped by {self.clip!r} in each optimizer step"
            notice(
                f"{self._source} sets gradient_clipping: {self._values['gradient_clipping']!r}, but the training loop calls "
                f"{actual}: gradients {effect}. Use the same number in both, or set gradient_clipping: auto, which uses the "
                "loop's."
            )
        return self.clip

    def _compare(self, key: str, value: float, actual: str, fix: str) -> None:
        claimed = self._values.get(key, value)
        if claimed != value:
            raise ConfigurationError(
                f'{self._source} sets {key!r}: {claimed!r}, but the run has {actual}. Use {fix}, or set it to "auto" in the '
                "configuration."
            )

    # ------------------------------------------------------------------------------------------ optimizer and scheduler

    def configure_optimizers(self, module: Any, device: torch.device) -> Any:
        """Returns the module's optimizers, or the configuration's if the module has none, with the configuration's scheduler.

        Args:
            module: the user's module.
            device: the device of the run.

        Raises:
            ConfigurationError: module and configuration differ, or a value is missing.
        """
        own = is_overridden(module, "configure_optimizers", TrainModule)
        returned = module.configure_optimizers() if own or not self.has_optimizer else self._make_optimizer(module, device)
        if self._config.scheduler is None and (not own or self._config.optimizer is None):
            return returned
        optimizers, schedulers = read_optimizers(returned, module, module.automatic_optimization)
        if len(optimizers) != 1:
            raise ConfigurationError(
                f"{self._source} has a section 'optimizer' or 'scheduler', which is for one optimizer, but "
                f"configure_optimizers returned {len(optimizers)}. Remove these sections."
            )
        self.check_optimizer(optimizers[0])
        if self._config.scheduler is None:
            return returned
        if schedulers:
            raise ConfigurationError(
                f"{self._source} has the 'scheduler' {self._config.scheduler['type']!r}, but configure_optimizers also "
                f"returned a {type(schedulers[0].scheduler).__name__}. Remove one of them."
            )
        scheduler = self._make_scheduler(optimizers[0], module)
        return {"optimizer": optimizers[0], "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Compare the configuration with the user's optimizer.

        Raises:
            ConfigurationError: class or options differ, or the user's own training loop has to create the scheduler.
        """
        section, kind = self._config.optimizer, type(optimizer).__name__
        if self._config.scheduler is not None and not self._has_trainer:
            raise ConfigurationError(
                f"{self._source} has the 'scheduler' {self._config.scheduler['type']!r}, but your own training loop must "
                "create it. Remove the section, and write: from deepspeed.runtime.lr_schedules import WarmupLR; "
                "scheduler = accelerator.prepare(WarmupLR(optimizer))"
            )
        if section is None:
            return
        wanted = _ADAMS if section["type"] in _ADAMS else (section["type"],)
        if kind not in wanted:
            raise ConfigurationError(
                f"{self._source} has the 'optimizer' {section['type']!r}, but the run has {kind}. Use the same in both, or "
                "remove the section."
            )
        switches = self._check_adam(section, optimizer) if section["type"] in _ADAMS else ()
        for name, value in section["params"].items():
            if name in switches:
                continue
            if name not in optimizer.defaults:
                raise ConfigurationError(
                    f"{self._source} has {name!r} for the optimizer, but {kind} has no such argument. Remove it."
                )
            here = optimizer.defaults[name]
            same = tuple(here) == tuple(value) if isinstance(value, list | tuple) else here == value
            if value != AUTO and not same:
                raise self._differs(f"{name!r}: {value!r}", optimizer, here)

    def _check_adam(self, section: dict[str, Any], optimizer: Optimizer) -> tuple[str, ...]:
        """Compare the options of Adam that are not in the defaults of both PyTorch's and DeepSpeed's Adam.

        Returns:
            The names of these options.
        """
        params, defaults = section["params"], optimizer.defaults
        correction = params.get("bias_correction", True)
        if correction not in (AUTO, defaults.get("bias_correction", True)):
            raise self._differs(f"'bias_correction': {correction!r}", optimizer, not correction)
        decoupled = True if section["type"] == "AdamW" else params.get("adam_w_mode", True)
        here = bool(defaults.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False)))
        decays = any(group["weight_decay"] for group in optimizer.param_groups)  # else Adam and AdamW are the same
        if decays and decoupled not in (AUTO, here):
            how = "" if "adam_w_mode" in params else " (DeepSpeed's default)"
            raise self._differs(f"{section['type']!r} with 'adam_w_mode': {decoupled!r}{how}", optimizer, here)
        return _OF_DEEPSPEED

    def _differs(self, claimed: str, optimizer: Optimizer, here: Any) -> ConfigurationError:
        return ConfigurationError(
            f"{self._source} has {claimed} for the optimizer, but the run's {type(optimizer).__name__} has {here!r}. Use the "
            'same value in both, or set it to "auto" in the configuration.'
        )

    def _make_optimizer(self, module: nn.Module, device: torch.device) -> Optimizer:
        section = self._config.optimizer
        assert section is not None
        params = {name: value for name, value in section["params"].items() if value != AUTO}
        if "lr" not in params:
            raise ConfigurationError(
                f"{self._source}: the optimizer's 'lr' is missing or \"auto\", but the module has no configure_optimizers to "
                "take it from. Set 'lr' to a number, or define configure_optimizers."
            )
        kind, more = self._optimizer_class(section["type"], params, device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        made = self._construct(kind, section["type"], trained, **more, **params)
        notice(f"created the optimizer of {self._source}: {type(made).__name__}, lr={params['lr']}.")
        return made  # type: ignore[no-any-return]

    def _optimizer_class(
        self, name: str, params: dict[str, Any], device: torch.device
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Returns the class that DeepSpeed would use, and its options; removes DeepSpeed's own options from `params`."""
        if name in ("Adam", "AdamW"):
            return self._adam_class(name, params, device)
        kind = getattr(torch.optim, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            known = [n for n in dir(torch.optim) if n[0].isupper()]
            raise ConfigurationError(
                f"{self._source}: there is no optimizer {name!r}.{nearest(name, known)} Use a class of torch.optim, or remove "
                "the section and create the optimizer in configure_optimizers."
            )
        return kind, {}

    def _adam_class(self, name: str, params: dict[str, Any], device: torch.device) -> tuple[Callable[..., Any], dict[str, Any]]:
        plain = params.pop("torch_adam", False)
        decoupled = params.pop("adam_w_mode", True) or name == "AdamW"
        of_states = params.pop("fp32_optimizer_states", True)
        if plain or not (self._offloaded or device.type == "cuda"):
            if params.pop("bias_correction", True) is not True:
                raise ConfigurationError(f"{self._source}: PyTorch's Adam has no 'bias_correction': false. Remove it.")
            # On a CPU PyTorch's class replaces FusedAdam, whose other defaults are the same.
            more = {} if plain or "weight_decay" in params else {"weight_decay": 0.0}
            return (torch.optim.AdamW if decoupled else torch.optim.Adam), more
        require_compiler(f"DeepSpeed's optimizer {name}", 'add "torch_adam": true to its params')
        with quiet():
            adams: Any = importlib.import_module("deepspeed.ops.adam")
        if self._offloaded:
            load("CPUAdamBuilder", "cpu_adam")
            return adams.DeepSpeedCPUAdam, {"adamw_mode": decoupled, "fp32_optimizer_states": of_states}
        load("FusedAdamBuilder", "fused_adam")
        return adams.FusedAdam, {"adam_w_mode": decoupled}

    def _make_scheduler(self, optimizer: Optimizer, module: Any) -> Any:
        section = self._config.scheduler
        assert section is not None
        with quiet():
            modules: Any = [importlib.import_module("deepspeed.runtime.lr_schedules"), torch.optim.lr_scheduler]
        name = section["type"]
        kinds = {n: kind for source in reversed(modules) for n, kind in vars(source).items() if isinstance(kind, type)}
        if name not in kinds:
            raise ConfigurationError(
                f"{self._source}: there is no scheduler {name!r}.{nearest(name, kinds)} Use a class of "
                "torch.optim.lr_scheduler or deepspeed.runtime.lr_schedules."
            )
        params = {key: self._resolved(key, optimizer, module) if v == AUTO else v for key, v in section["params"].items()}
        return self._construct(kinds[name], name, optimizer, **params)

    def _resolved(self, key: str, optimizer: Optimizer, module: Any) -> Any:
        """Returns the run's value for an "auto" option of the scheduler."""
        if key == "warmup_max_lr":
            return optimizer.param_groups[0]["lr"]
        if key == "warmup_min_lr":
            return 0.0
        steps = module.trainer.estimated_stepping_batches
        if key == "total_num_steps" and not math.isinf(steps):
            return steps
        if key == "warmup_num_steps" and not math.isinf(steps):
            warmup = max(1, math.ceil(_WARMUP * steps))
            notice(
                f'{self._source}: the scheduler\'s "warmup_num_steps" is "auto": {warmup}, which is {_WARMUP:.0%} of the '
                f"{steps} optimizer steps of the run. For another number, write it there."
            )
            return warmup
        if key in ("total_num_steps", "warmup_num_steps"):
            why, fix = "the length of the run is unknown", "Set it to a number, or use Trainer(max_steps=...)"
        else:
            why, fix = "the run has no such value", "Set it to a number"
        raise ConfigurationError(f'{self._source}: the scheduler\'s {key!r} is "auto", but {why}. {fix}.')

    def _construct(self, kind: Callable[..., Any], name: str, *args: Any, **params: Any) -> Any:
        try:
            return kind(*args, **params)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._source}: {name} does not accept its 'params'. Fix them: {error}.") from error
