"""`PartialState` and `AcceleratorState`: the run as scripts written for Hugging Face Accelerate look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainkit.accelerator.processes import latest
from trainkit.config.kwargs_handlers import InitProcessGroupKwargs
from trainkit.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator
    from trainkit.config.deepspeed_plugin import DeepSpeedPlugin

__all__ = ["AcceleratorState", "PartialState", "is_initialized"]

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
_OF_OPTIONS = ("deepspeed_plugin", "fsdp_plugin", "is_fsdp2", "mixed_precision")


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
    options of ZeRO, with `zero_stage` and `deepspeed_config`; `None` without ZeRO), `fsdp_plugin` (those of FSDP; `None`
    without FSDP) and `is_fsdp2`.

    Args:
        mixed_precision: That of the run; `None`: whatever it is.
        cpu: As for `PartialState`.
        kwargs: As for `PartialState`.

    Attributes:
        deepspeed_plugins: `{"default": deepspeed_plugin}`; `None` without ZeRO.
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


def is_initialized() -> bool:
    """Whether an `Accelerator` was created, by the script or for a `PartialState`, and is still there."""
    return latest() is not None
