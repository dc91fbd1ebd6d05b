"""`PartialState`, `AcceleratorState` and `GradientState`: the run as scripts written for Hugging Face Accelerate look at it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from trainkit.accelerator.processes import latest
from trainkit.config.compiling import TorchDynamoPlugin
from trainkit.config.kwargs_handlers import DynamoBackend, InitProcessGroupKwargs
from trainkit.data.combined import batch_size_of
from trainkit.errors import ConfigurationError, DataError, UnsupportedArgumentError, nearest

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator
    from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
    from trainkit.data.loader import PreparedLoader

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]

# What both have of the Accelerator, with the meaning that it has there.
_OF_PROCESSES = (
    "device",
    "distributed_type",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "local_main_process_first",
    "local_process_index",
    "main_process_first",
    "num_processes",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "print",
    "process_index",
    "split_between_processes",
    "use_distributed",
    "wait_for_everyone",
)
_OF_OPTIONS = ("deepspeed_plugin", "fsdp_plugin", "is_fsdp2", "mixed_precision", "parallelism_config")


class PartialState:
    """The processes of a run, without its precision and plugins; a view of the `Accelerator` that was created last.

    Without one, an `Accelerator` is created, which joins the processes of the launcher. So a script may ask for its rank, or
    let the main process download data first, before it creates its own.

    It has `device`, `distributed_type`, `num_processes`, `process_index`, `local_process_index`, `is_main_process`,
    `is_local_main_process`, `is_last_process`, `use_distributed`, `wait_for_everyone`, `main_process_first`,
    `local_main_process_first`, `split_between_processes`, `print`, and the decorators `on_main_process`,
    `on_local_main_process`, `on_last_process`, `on_process` and `on_local_process`, as the
    [`Accelerator`][trainkit.Accelerator] has them.

    Args:
        cpu: Use the CPU if an `Accelerator` has to be created.
        kwargs: Arguments of `InitProcessGroupKwargs` for it, such as `timeout`.

    Attributes:
        backend: The communication library of torch's processes, such as `"gloo"`; `None` with one process.
        debug: Whether the calls of all processes are compared.
        default_device: As `device`.
        fork_launched: Always `False`: no process of trainkit is forked.
        initialized: Always `True`.

    Example:
        ```python
        with PartialState().main_process_first():
            dataset = dataset.map(tokenize)
        ```
    """

    _names: tuple[str, ...] = _OF_PROCESSES
    fork_launched = False
    initialized = True

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        from trainkit.accelerator.accelerator import Accelerator  # it has a property with a state

        handlers = [InitProcessGroupKwargs(**kwargs)] if kwargs else None
        self._accelerator = latest() or Accelerator(cpu=cpu, kwargs_handlers=handlers)

    @classmethod
    def of(cls, accelerator: Accelerator) -> Any:
        """The state of an accelerator."""
        self = cls.__new__(cls)
        self._accelerator = accelerator
        return self

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return getattr(self._accelerator, name)
        known = [*self._names, *(each for each in dir(type(self)) if not each.startswith("_"))]
        more = ""
        if name in AcceleratorState._names or (not name.startswith("_") and hasattr(AcceleratorState, name)):
            more = f" AcceleratorState has it: accelerator.state.{name}."
        text = f"{type(self).__name__} has no {name!r}.{more or nearest(name, known)}"
        raise AttributeError(text, name=name, obj=None)  # With obj=self Python would add another "Did you mean".

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})

    def _shown(self) -> dict[str, Any]:
        """The values that distinguish two states."""
        names = ["distributed_type", "backend", "num_processes", "process_index", "local_process_index", "device"]
        names += [name for name in _OF_OPTIONS if name in self._names]
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._shown() == self._shown()

    def __hash__(self) -> int:
        return hash((self.num_processes, self.process_index))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!s}' for name, value in self._shown().items())})"

    @property
    def backend(self) -> str | None:
        """The communication library of torch's processes, such as `"gloo"`; `None` with one process."""
        distributed = torch.distributed
        joined = self.use_distributed and distributed.is_available() and distributed.is_initialized()
        return str(distributed.get_backend()) if joined else None

    @property
    def debug(self) -> bool:
        """Whether the calls of all processes are compared."""
        return self._accelerator.options.debug

    @property
    def default_device(self) -> torch.device:
        """As `device`."""
        return self._accelerator.device

    def set_device(self) -> None:
        """No effect: the device is set when the process joins the others."""

    def destroy_process_group(self, group: Any = None) -> None:
        """No effect: the processes leave the process group when the program ends.

        Args:
            group: No effect.
        """


class AcceleratorState(PartialState):
    """The device, the processes, the precision and the plugins of a run: `accelerator.state`.

    It has what `PartialState` has, and `mixed_precision` (`"no"`, `"fp16"`, `"bf16"` or `"fp8"`), `deepspeed_plugin` (the
    options of ZeRO, with `zero_stage` and `deepspeed_config`; `None` without ZeRO), `fsdp_plugin` and `parallelism_config`
    (those of FSDP; `None` without FSDP) and `is_fsdp2`.

    Args:
        mixed_precision: That of the run; `None`: whatever it is.
        cpu: As for `PartialState`.
        kwargs: As for `PartialState`.

    Attributes:
        deepspeed_plugins: `{"default": deepspeed_plugin}`; `None` without ZeRO.
        device_mesh: The device mesh of FSDP, see `FSDPStrategy.mesh`; `None` without one.
        dynamo_plugin: How models are compiled; its `backend` is `"NO"` if they are not.
        torch_tp_plugin: Always `None`: tensor parallelism is an option of `fsdp_plugin`.

    Raises:
        ConfigurationError: The run has another precision.
    """

    _names = _OF_PROCESSES + _OF_OPTIONS
    torch_tp_plugin = None

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu, **kwargs)
        if mixed_precision is not None and mixed_precision != self.mixed_precision:
            raise ConfigurationError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}): the run has {self.mixed_precision!r}. Choose it once: "
                f"Accelerator(mixed_precision={mixed_precision!r})"
            )

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """No effect: a state is a view of the accelerator. `TrainingArguments` of transformers calls it.

        Args:
            reset_partial_state: No effect.
        """

    @property
    def device_mesh(self) -> Any:
        """The device mesh of a strategy that has one; `None` without one."""
        return self._accelerator.strategy.device_mesh

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How models are compiled; its `backend` is `"NO"` if they are not."""
        compiled = self._accelerator.options.compile
        if compiled is None:
            return TorchDynamoPlugin(backend=DynamoBackend.NO)
        known = {one.name for one in fields(TorchDynamoPlugin)}
        options: dict[str, Any] = {name: value for name, value in compiled.options.items() if name in known}
        backend = str(options.get("backend", "inductor")).upper()
        if backend in DynamoBackend.__members__:
            options["backend"] = DynamoBackend[backend]
        return TorchDynamoPlugin(**options, use_regional_compilation=compiled.regional)

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """`{"default": deepspeed_plugin}`; `None` without ZeRO."""
        plugin = self._accelerator.deepspeed_plugin
        return None if plugin is None else {"default": plugin}

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """The options of ZeRO by their name in `deepspeed_plugins`.

        Args:
            name: `"default"`.

        Raises:
            ConfigurationError: There is none of this name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ConfigurationError(
                f"there is no DeepSpeedPlugin {name!r}: an accelerator has one set of options, which is named 'default', "
                f"and {'this run has it' if plugins else 'this run has none, as it does not use ZeRO'}."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Check that the options of ZeRO have this name: an accelerator has one set of them.

        Args:
            name: `"default"`.

        Raises:
            ConfigurationError: There is none of this name.
        """
        self.get_deepspeed_plugin(name)


class GradientState:
    """The accumulation window and the loader that is being read: `accelerator.gradient_state`, as in Accelerate.

    Args:
        gradient_accumulation_plugin: Only `None`: pass it to the `Accelerator`.

    Attributes:
        adjust_scheduler: Always `False`, as in Accelerate: prepared schedulers are not adjusted.
        initialized: Always `True`.
        is_xla_gradients_synced: Always `False`: the strategy averages the gradients.
        sync_with_dataloader: Always `True`: the last window ends with the epoch.

    Raises:
        UnsupportedArgumentError: A plugin is given.

    Example:
        ```python
        if accelerator.gradient_state.end_of_dataloader:
            print("the last batch of the epoch")
        ```
    """

    adjust_scheduler = is_xla_gradients_synced = False
    initialized = sync_with_dataloader = True

    def __init__(self, gradient_accumulation_plugin: None = None) -> None:
        if gradient_accumulation_plugin is not None:
            raise UnsupportedArgumentError(
                "GradientState(gradient_accumulation_plugin=...) is not supported. Pass it to "
                "Accelerator(gradient_accumulation_plugin=...), and read accelerator.gradient_state."
            )
        self._accelerator = PartialState()._accelerator

    @classmethod
    def of(cls, accelerator: Accelerator) -> GradientState:
        """The state of an accelerator."""
        self = cls.__new__(cls)
        self._accelerator = accelerator
        return self

    def __getattr__(self, name: str) -> Any:
        known = [each for each in dir(type(self)) if not each.startswith("_")]
        raise AttributeError(f"a GradientState has no {name!r}.{nearest(name, known)}", name=name, obj=None)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """As in Accelerate, but only what is so: `accumulate` knows the last batch of each window, also of a short one.

        Raises:
            ConfigurationError: It is not so.
        """
        if bool(sync_gradients) != self.sync_gradients:
            here, due = ("the last", "") if self.sync_gradients else ("not the last", "not ")
            raise ConfigurationError(
                f"_set_sync_gradients({sync_gradients}): this batch is {here} one of its accumulation window, so an optimizer "
                f"step is {due}due. The last window of an epoch may be short. Remove the line: accumulate(model) decides it."
            )

    def __repr__(self) -> str:
        names = ("num_steps", "sync_gradients", "in_dataloader")
        return f"GradientState({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def num_steps(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self._accelerator.gradient_accumulation_steps

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of gradient accumulation that may differ from their defaults."""
        return {"num_steps": self.num_steps}

    @property
    def sync_gradients(self) -> bool:
        """Whether an optimizer step is due after the current micro-batch."""
        return self._accelerator.sync_gradients

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """`None`, and the prepared loaders that are being read, from the outer to the inner one."""
        return [None, *self._accelerator.open_loaders.reading]

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The prepared loader that has yielded the current batch; `None`: none is being read."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader; `False` if no prepared loader is being read.

        Raises:
            DataError: The loader has no certain length.
        """
        if not self.in_dataloader:
            return False
        left = self._accelerator.open_loaders.remaining()
        if left is None:
            raise DataError(
                "end_of_dataloader: the loader has no certain length, so its last batch is not known before the epoch ends. "
                "Write what the last batch is needed for after the loop over the loader."
            )
        return left == 0

    @property
    def remainder(self) -> int:
        """Number of samples in the last batches of all processes; 0 if they are full, -1 if it is unknown or none is read."""
        loader = self.active_dataloader
        size = None if loader is None else batch_size_of(loader.source)
        if loader is None or size is None or getattr(loader, "drop_last", False):
            return -1
        try:
            return len(loader.dataset) % (size * self._accelerator.num_processes)
        except (AttributeError, TypeError):  # no dataset, or one without a length
            return -1


def is_initialized() -> bool:
    """Whether an `Accelerator` was created, by the script or for a `PartialState`, and is still there."""
    return latest() is not None
