"""What a DeepSpeed configuration says of the run, held against the ``Trainer``, the module and the loaders.

A value that is given twice and differs is an error with both; ``"auto"`` takes the run's; an optimizer and a scheduler are made
as the configuration says, where the module makes none.
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

_OF_DEEPSPEED = ("adam_w_mode", "bias_correction", "torch_adam")  # how it chooses the class of an Adam
_ADAMS = ("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam")


class Claims:
    """What a configuration says.

    Args:
        config: as read; ``None``: there is none, and it says nothing.
        offloaded: the optimizer is.
    """

    def __init__(self, config: DeepSpeedConfig | None, offloaded: bool) -> None:
        self._config = config or DeepSpeedConfig("config")
        self._values, self._source = self._config.claims, self._config.source
        self._offloaded = offloaded
        self._of_trainer = self._leads = self._clipping_told = False

    @property
    def has_optimizer(self) -> bool:
        """Whether it says how to make one."""
        return self._config.optimizer is not None

    @property
    def clip(self) -> float | None:
        """The largest norm of gradients in a loop of the user's own that says nothing of it."""
        return self._values.get("gradient_clipping") or None

    def check_arguments(self, arguments: StepArguments) -> None:
        """Hold it against the ``Trainer``.

        Raises:
            ConfigurationError: they differ; with both values.
        """
        self._of_trainer = True
        theirs = {
            "gradient_clipping": ("gradient_clip_val", arguments.gradient_clip_val or 0.0),
            "gradient_accumulation_steps": ("accumulate_grad_batches", arguments.accumulate_grad_batches),
            "train_batch_size": ("global_batch_size", arguments.global_batch_size),
        }
        if arguments.global_batch_size is not None:  # from which the accumulation follows
            del theirs["gradient_accumulation_steps"]
        for key, (name, value) in theirs.items():
            if value is not None:
                self._compare(key, value, f"Trainer({name}={value!r})", f"Trainer({name}={self._values.get(key)!r})")

    def check_batches(self, micro_batch: int | None, window: int, world: World) -> None:
        """Hold it against the training loader.

        Args:
            micro_batch: samples, where the loader says so.
            window: micro-batches of a process in an update.
            world: the processes.

        Raises:
            ConfigurationError: they differ; with both values.
        """
        said = f"{window} micro-batches to an update"
        self._compare("gradient_accumulation_steps", window, said, "the same number")
        if micro_batch is None:
            sizes = [key for key in ("train_micro_batch_size_per_gpu", "train_batch_size") if key in self._values]
            if sizes:
                notice(f"{' and '.join(sizes)} of {self._source} are not compared: the loader does not say its batch_size.")
            return
        loader = f"the loader's batch_size={micro_batch}"
        self._compare("train_micro_batch_size_per_gpu", micro_batch, loader, "the same batch_size")
        product = micro_batch * window * world.size
        said = f"batch_size × micro-batches × processes = {micro_batch} × {window} × {world.size} = {product}"
        self._compare("train_batch_size", product, said, "sizes that make it so")

    def lead(self, source: str) -> None:
        """Clip by what it says, whatever a loop of the user's own clips by, as Accelerate does.

        Args:
            source: how messages call it.
        """
        self._source, self._leads = source, True

    def clipping(self, max_norm: float) -> float | None:
        """The largest norm of gradients that a loop clips by ``max_norm``; ``None``: any.

        Raises:
            ConfigurationError: the configuration has another, and does not :meth:`lead`; with both values.
        """
        said = f"clip_grad_norm_(..., {max_norm!r})"
        if not self._leads or self._values.get("gradient_clipping", max_norm) == max_norm:
            if self.clip is not None:
                self._compare("gradient_clipping", max_norm, said, "the same norm")
            return max_norm if max_norm != math.inf else None
        if not self._clipping_told:
            self._clipping_told = True
            by = "by 0, which is not at all" if self.clip is None else f"by {self.clip!r}, once with each update"
            notice(
                f"{self._source} has gradient_clipping: {self._values['gradient_clipping']!r}, and the loop has {said}: "
                f"gradients are clipped {by}. Write the same number in both places, or gradient_clipping: auto, which is the "
                "loop's."
            )
        return self.clip

    def _compare(self, key: str, value: float, said: str, fix: str) -> None:
        claimed = self._values.get(key, value)
        if claimed != value:
            raise ConfigurationError(
                f'{self._source} has {key!r}: {claimed!r}, and the run has {said}. Give {fix}, or write "auto" into the '
                "configuration."
            )

    # ------------------------------------------------------------------------------------------ optimizer and scheduler

    def configure_optimizers(self, module: Any, device: torch.device) -> Any:
        """What the module's method returns, or what the configuration says in its stead, with a scheduler of the latter's.

        Args:
            module: the user's.
            device: that it is trained on.

        Raises:
            ConfigurationError: the two contradict each other, or a value is missing.
        """
        own = is_overridden(module, "configure_optimizers", TrainModule)
        returned = module.configure_optimizers() if own or not self.has_optimizer else self._make_optimizer(module, device)
        if self._config.scheduler is None and (not own or self._config.optimizer is None):
            return returned
        optimizers, schedulers = read_optimizers(returned, module, module.automatic_optimization)
        if len(optimizers) != 1:
            raise ConfigurationError(
                f"{self._source} has one 'optimizer' or 'scheduler', and configure_optimizers returned {len(optimizers)} "
                "optimizers. Take the sections out."
            )
        self.check_optimizer(optimizers[0])
        if self._config.scheduler is None:
            return returned
        if schedulers:
            raise ConfigurationError(
                f"{self._source} has the 'scheduler' {self._config.scheduler['type']!r}, and configure_optimizers returned a "
                f"{type(schedulers[0].scheduler).__name__}. Keep one of them."
            )
        scheduler = self._make_scheduler(optimizers[0], module)
        return {"optimizer": optimizers[0], "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Hold it against an optimizer of the user's.

        Raises:
            ConfigurationError: another class or other values; or a scheduler that nobody would make.
        """
        section, kind = self._config.optimizer, type(optimizer).__name__
        if self._config.scheduler is not None and not self._of_trainer:
            raise ConfigurationError(
                f"{self._source} has the 'scheduler' {self._config.scheduler['type']!r}, and in your own loop you make it: "
                "from deepspeed.runtime.lr_schedules import WarmupLR; scheduler = accelerator.prepare(WarmupLR(optimizer)). "
                "Take the section out."
            )
        if section is None:
            return
        wanted = _ADAMS if section["type"] in _ADAMS else (section["type"],)
        if kind not in wanted:
            raise ConfigurationError(
                f"{self._source} has the 'optimizer' {section['type']!r}, and the run has {kind}. Keep one of them."
            )
        switches = self._check_adam(section, optimizer) if section["type"] in _ADAMS else ()
        for name, value in section["params"].items():
            if name in switches:
                continue
            if name not in optimizer.defaults:
                raise ConfigurationError(
                    f"{self._source} has {name!r} for the optimizer, which {kind} does not take. Take it out."
                )
            here = optimizer.defaults[name]
            same = tuple(here) == tuple(value) if isinstance(value, list | tuple) else here == value
            if value != AUTO and not same:
                raise self._another(f"{name!r}: {value!r}", optimizer, here)

    def _check_adam(self, section: dict[str, Any], optimizer: Optimizer) -> tuple[str, ...]:
        """Hold it against an Adam of the user's: what torch and DeepSpeed do not both have among the defaults.

        Returns:
            The names of these parameters.
        """
        params, defaults = section["params"], optimizer.defaults
        correction = params.get("bias_correction", True)
        if correction not in (AUTO, defaults.get("bias_correction", True)):
            raise self._another(f"'bias_correction': {correction!r}", optimizer, not correction)
        decoupled = True if section["type"] == "AdamW" else params.get("adam_w_mode", True)
        here = bool(defaults.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False)))
        decays = any(group["weight_decay"] for group in optimizer.param_groups)  # else the two are the same
        if decays and decoupled not in (AUTO, here):
            how = "" if "adam_w_mode" in params else " (what DeepSpeed takes it for)"
            raise self._another(f"{section['type']!r} with 'adam_w_mode': {decoupled!r}{how}", optimizer, here)
        return _OF_DEEPSPEED

    def _another(self, told: str, optimizer: Optimizer, here: Any) -> ConfigurationError:
        return ConfigurationError(
            f"{self._source} has {told} for the optimizer, and the run's {type(optimizer).__name__} has {here!r}. Give one "
            'value, or write "auto" into the configuration.'
        )

    def _make_optimizer(self, module: nn.Module, device: torch.device) -> Optimizer:
        section = self._config.optimizer
        assert section is not None
        params = {name: value for name, value in section["params"].items() if value != AUTO}
        if "lr" not in params:
            raise ConfigurationError(
                f"{self._source}: the optimizer's 'lr' is missing or \"auto\", and there is no configure_optimizers to take it "
                "from. Give it a number, or define configure_optimizers."
            )
        kind, more = self._optimizer_class(section["type"], params, device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        made = self._called(kind, section["type"], trained, **more, **params)
        notice(f"the optimizer is {self._source}'s: {type(made).__name__}, lr={params['lr']}.")
        return made  # type: ignore[no-any-return]

    def _optimizer_class(
        self, name: str, params: dict[str, Any], device: torch.device
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """As DeepSpeed chooses it, and the options that go with that; Adam's are taken out of ``params``."""
        if name in ("Adam", "AdamW"):
            plain = params.pop("torch_adam", False)
            decoupled = params.pop("adam_w_mode", True) or name == "AdamW"
            more = {} if "weight_decay" in params else {"weight_decay": 0.0}  # torch's AdamW has another default
            if plain or not (self._offloaded or device.type == "cuda"):
                if params.pop("bias_correction", True) is not True:
                    raise ConfigurationError(f"{self._source}: 'bias_correction' false is offered on GPUs only. Leave it out.")
                return (torch.optim.AdamW if decoupled else torch.optim.Adam), more
            require_compiler(f"the optimizer {name} of DeepSpeed", 'write "torch_adam": true into its params')
            with quiet():
                adams: Any = importlib.import_module("deepspeed.ops.adam")
            if self._offloaded:
                load("CPUAdamBuilder", "cpu_adam")
                return adams.DeepSpeedCPUAdam, {**more, "adamw_mode": decoupled}
            load("FusedAdamBuilder", "fused_adam")
            return adams.FusedAdam, {**more, "adam_w_mode": decoupled}
        kind = getattr(torch.optim, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            known = [n for n in dir(torch.optim) if n[0].isupper()]
            raise ConfigurationError(f"{self._source}: the optimizer {name!r} is not offered.{nearest(name, known)}")
        return kind, {}

    def _make_scheduler(self, optimizer: Optimizer, module: Any) -> Any:
        section = self._config.scheduler
        assert section is not None
        with quiet():
            rooms: Any = [importlib.import_module("deepspeed.runtime.lr_schedules"), torch.optim.lr_scheduler]
        name = section["type"]
        kinds = {n: kind for room in reversed(rooms) for n, kind in vars(room).items() if isinstance(kind, type)}
        if name not in kinds:
            raise ConfigurationError(f"{self._source}: the scheduler {name!r} is not known.{nearest(name, kinds)}")
        params = {key: self._resolved(key, optimizer, module) if v == AUTO else v for key, v in section["params"].items()}
        return self._called(kinds[name], name, optimizer, **params)

    def _resolved(self, key: str, optimizer: Optimizer, module: Any) -> Any:
        """The run's value for an "auto" of a scheduler's."""
        if key == "warmup_max_lr":
            return optimizer.param_groups[0]["lr"]
        if key == "warmup_min_lr":
            return 0.0
        steps = module.trainer.estimated_stepping_batches
        if key == "total_num_steps" and not math.isinf(steps):
            return steps
        why = "its length is not known: give max_steps" if key == "total_num_steps" else "nothing in the run says it"
        raise ConfigurationError(f'{self._source}: the scheduler\'s {key!r} is "auto", and {why}. Give it a number.')

    def _called(self, kind: Callable[..., Any], name: str, *args: Any, **params: Any) -> Any:
        try:
            return kind(*args, **params)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._source}: {name} does not take these params: {error}.") from error
