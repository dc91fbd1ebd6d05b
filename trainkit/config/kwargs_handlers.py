"""Options of `Accelerator` and of its components, in Accelerate's classes."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from trainkit.checks import whole_number
from trainkit.console import notice
from trainkit.errors import ConfigurationError, UnsupportedArgumentError, make_instance, nearest
from trainkit.paths import disk_path
from trainkit.precision import Float8Precision

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "find_distributed_type",
    "sort_handlers",
]


_ACTIVITIES = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
_CYCLE = ("wait", "warmup", "active")  # required in a schedule


class KwargsHandler:
    """Base class of the options in `Accelerator(kwargs_handlers=[…])`."""

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        default = type(self)()
        values: Any = vars(self)
        return {name: value for name, value in values.items() if value != getattr(default, name)}


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of `mixed_precision="fp8"` in Accelerate's form; see `Float8Precision`. No effect in other precisions.

    Args:
        config: A `Float8LinearConfig` of torchao. Default: one scale for each tensor.
        module_filter_func: A function `(module, name) -> bool` that chooses the layers. Default: that of `Float8Precision`,
            which also excludes small layers, but not the first one.
        pad_inner_dim: No effect: the batch is always padded where the GPU requires it.
        enable_fsdp_float8_all_gather: Gather weights in float8, if the strategy shards parameters. Default: `True`, or as in
            `config`.

    Example:
        ```python
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(module_filter_func=chosen)])
        ```
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def precision(self, sharded: bool) -> Float8Precision:
        """The precision, for a strategy that shards parameters or does not."""
        choose, gather = self.module_filter_func, self.enable_fsdp_float8_all_gather
        if gather is None:
            gather = self.config is None or self.config.enable_fsdp_float8_all_gather
        config = self.config
        if config is not None:
            config = replace(config, enable_fsdp_float8_all_gather=False)  # an option of the precision
        return Float8Precision(
            recipe="tensorwise" if config is None else config,
            filter=None if choose is None else lambda name, layer: choose(layer, name),
            all_gather=gather and sharded,
        )


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of the forward pass under mixed precision, for `kwargs_handlers` or `accelerator.autocast`.

    Args:
        enabled: `False`: `accelerator.autocast(handler)` computes in float32.
        cache_enabled: Keep the low-precision copies of parameters during an `autocast()`. Default: as in torch.

    Example:
        ```python
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            loss = sensitive_loss(output.float(), target)
        ```
    """

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(str, enum.Enum):
    """How DDP sends gradients: `DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)`.

    Members are also strings.
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"

    def __str__(self) -> str:
        return str(self.value)


_HOOKS = tuple(kind.value for kind in DDPCommunicationHookType)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DDP for `kwargs_handlers`, under Accelerate's names; see `DDPStrategy`.

    Args:
        dim: Only 0: the first dimension of a batch is that of the samples.
        broadcast_buffers: No effect: every optimizer step ends with rank 0's buffers on all ranks. A notice says so.
        bucket_cap_mb: Size of a bucket in MB.
        find_unused_parameters: Some parameters get no gradient in some steps.
        check_reduction: No effect, as in torch.
        gradient_as_bucket_view: Gradients are views of the buckets.
        static_graph: Each step uses the same parameters, the same number of times and in the same order.
        comm_hook: `"no"`, `"fp16"`, `"bf16"` or `"power_sgd"`, or a `DDPCommunicationHookType`.
        comm_wrapper: Only `"no"`.
        comm_state_option: Options of torch's `PowerSGDState`, for `"power_sgd"`.

    Raises:
        UnsupportedArgumentError: An argument is not supported.
        ConfigurationError: The hook is unknown.

    Example:
        ```python
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        ```
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = "no"
    comm_wrapper: Any = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dim != 0:
            raise UnsupportedArgumentError(
                f"DistributedDataParallelKwargs(dim={self.dim}): only dim=0 is supported. Put the samples first."
            )
        hook = self.hook
        if hook not in _HOOKS:
            raise ConfigurationError(
                f"DistributedDataParallelKwargs: unknown comm_hook={hook!r}. Use one of {', '.join(_HOOKS)}."
                f"{nearest(hook, _HOOKS)}"
            )
        if hook == "batched_power_sgd" or str(self.comm_wrapper) != "no":
            refused = f"comm_hook={hook!r}" if hook == "batched_power_sgd" else f"comm_wrapper={str(self.comm_wrapper)!r}"
            raise UnsupportedArgumentError(
                f"DistributedDataParallelKwargs({refused}) is not supported. Use comm_hook='power_sgd', or pass the function "
                "itself: Accelerator(strategy=DDPStrategy(comm_hook=function, comm_state=state))"
            )

        if self.comm_state_option and hook != "power_sgd":
            owner = "DistributedDataParallelKwargs(comm_state_option=...)"
            raise ConfigurationError(f"{owner} is for comm_hook='power_sgd', not for {hook!r}. Remove it.")
        if not self.broadcast_buffers:
            notice(
                "DistributedDataParallelKwargs(broadcast_buffers=False) has no effect: every optimizer step ends with rank 0's "
                "buffers on all ranks, so that a checkpoint contains the buffers that each rank evaluates with. Remove it."
            )

    @property
    def hook(self) -> str:
        """The name of the communication hook."""
        return str(getattr(self.comm_hook, "value", self.comm_hook))

    def strategy_options(self) -> dict[str, Any]:
        """Return the options of `DDPStrategy` that differ from the defaults."""
        names = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        options = {name: value for name, value in self.to_kwargs().items() if name in names}
        if self.hook != "no":
            options["comm_hook"] = self.hook.replace("_", "")
        if self.comm_state_option:
            options["comm_state"] = self.comm_state_option
        return options


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scale of `mixed_precision="fp16"`, see `torch.amp.GradScaler`.

    Args:
        init_scale: The initial scale.
        growth_factor: Multiplies the scale after `growth_interval` optimizer steps without an overflow.
        backoff_factor: Multiplies the scale after an overflow.
        growth_interval: Number of optimizer steps.
        enabled: `False`: do not scale the loss; under DeepSpeed too.

    Raises:
        ConfigurationError: A number is out of range.

    Example:
        ```python
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**12)])
        ```
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        within = {
            "init_scale": (self.init_scale > 0, "a number > 0"),
            "growth_factor": (self.growth_factor > 1, "a number > 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "a number between 0 and 1"),
            "growth_interval": (self.growth_interval >= 1, "a number of optimizer steps ≥ 1"),
        }
        for name, (fine, expected) in within.items():
            if not fine:
                raise ConfigurationError(f"GradScalerKwargs({name}={getattr(self, name)!r}): expected {expected}.")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the connection between the processes.

    Args:
        backend: `"gloo"`, `"nccl"`, … Default: nccl for CUDA, gloo for the CPU.
        init_method: Only `None` or `"env://"`: the launcher sets the address.
        timeout: How long a process waits for the others in a collective. Default: 30 minutes.

    Raises:
        UnsupportedArgumentError: Another `init_method`.

    Example:
        ```python
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=1))])
        ```
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method not in (None, "env://"):
            raise UnsupportedArgumentError(
                f"InitProcessGroupKwargs(init_method={self.init_method!r}): the launcher sets the address of the process "
                "group as MASTER_ADDR and MASTER_PORT. Remove it; or call torch.distributed.init_process_group yourself "
                "before Accelerator(), which then uses your group."
            )

    def strategy_options(self) -> dict[str, Any]:
        """Return the given options, under the names of a strategy."""
        options = {"process_group_backend": self.backend, "timeout": self.timeout}
        return {name: value for name, value in options.items() if value is not None}


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `accelerator.profile(handler)` records, see `torch.profiler.profile`.

    Args:
        activities: `"cpu"`, `"cuda"`. Default: both if there is a GPU.
        schedule_option: `wait`, `warmup`, `active`, `repeat`, `skip_first`, see `torch.profiler.schedule`.
        on_trace_ready: Called with the profile at the end of each cycle of the schedule.
        record_shapes: Record the shapes of tensors.
        profile_memory: Record memory allocations.
        with_stack: Record the source line of each operation.
        with_flops: Estimate the FLOPs of matrix products and convolutions.
        with_modules: Record the module of each operation.
        output_trace_dir: The folder for `profile_<rank>.json`, which Perfetto opens; later contexts of the same accelerator
            write `profile_<rank>-v1.json`, …

    Raises:
        ConfigurationError: An activity is unknown, or an option of the schedule is unknown or missing.

    Example:
        ```python
        with accelerator.profile(ProfileKwargs(record_shapes=True)) as profile:
            loss = model(batch)
        print(profile.key_averages().table(row_limit=10))
        ```
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        for activity in self.activities or ():
            if activity not in _ACTIVITIES:
                raise ConfigurationError(
                    f"ProfileKwargs: unknown activity {activity!r}. Use {' or '.join(map(repr, _ACTIVITIES))}."
                    f"{nearest(str(activity), _ACTIVITIES)}"
                )
        if self.schedule_option is not None:
            known = (*_CYCLE, "repeat", "skip_first", "skip_first_wait")
            for name in self.schedule_option:
                if name not in known:
                    raise ConfigurationError(f"ProfileKwargs(schedule_option=): unknown option {name!r}.{nearest(name, known)}")
            if missing := [name for name in _CYCLE if name not in self.schedule_option]:
                raise ConfigurationError(
                    f"ProfileKwargs(schedule_option=): {', '.join(missing)} must be set. Example: "
                    "{'wait': 1, 'warmup': 1, 'active': 3, 'repeat': 1, 'skip_first': 0}"
                )

    def build(self) -> torch.profiler.profile:
        """The profiler, not started. `trainkit.Accelerator.profile` uses `output_trace_dir`."""
        options: dict[str, Any] = dict(vars(self))
        del options["output_trace_dir"]
        schedule, activities = options.pop("schedule_option"), options.pop("activities")
        return torch.profiler.profile(
            activities=None if activities is None else [_ACTIVITIES[name] for name in activities],
            schedule=None if schedule is None else torch.profiler.schedule(**schedule),
            **options,
        )


def sort_handlers(handlers: Iterable[Any] | None) -> dict[type[KwargsHandler], Any]:
    """Handlers by their class; a `ConfigurationError` for another object, or for two handlers of a class."""
    by_class: dict[type[KwargsHandler], Any] = {}
    known = [kind.__name__ for kind in KwargsHandler.__subclasses__()]
    for handler in handlers or ():
        kind = next((one for one in KwargsHandler.__subclasses__() if isinstance(handler, one)), None)
        if kind is None:
            raise ConfigurationError(
                f"kwargs_handlers: expected objects of {', '.join(known)} from trainkit.utils, not {handler!r}."
                + (make_instance(handler, KwargsHandler) or nearest(type(handler).__name__, known))
            )
        if kind in by_class:
            raise ConfigurationError(f"kwargs_handlers contains two {kind.__name__}. Pass only one.")
        by_class[kind] = handler
    return by_class


@dataclass
class ProjectConfiguration:
    """Where your own training loop writes, and how it names its checkpoints.

    Args:
        project_dir: The folder of the project.
        logging_dir: The folder of trackers that write files. Default: `project_dir`.
        automatic_checkpoint_naming: `save_state()` writes to `project_dir/checkpoints/checkpoint_0`, `checkpoint_1`, …,
            and `load_state()` reads the newest complete one.
        total_limit: The number of these to keep; the oldest ones of the run are removed after each save. Default: all.
        iteration: The number of the next one; `load_state` sets it to the one after the existing ones.
        save_on_each_node: Only `False`: a checkpoint is one folder that all nodes can access.

    Raises:
        ConfigurationError: A limit or number is negative.
        UnsupportedArgumentError: `save_on_each_node=True`.

    Example:
        ```python
        project = ProjectConfiguration("runs/digits", automatic_checkpoint_naming=True, total_limit=3)
        accelerator = Accelerator(project_config=project)
        ```
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            self.total_limit = whole_number(self.total_limit, "ProjectConfiguration(total_limit=)", 1)
        self.iteration = whole_number(self.iteration, "ProjectConfiguration(iteration=)", 0)
        if self.save_on_each_node:
            raise UnsupportedArgumentError(
                "ProjectConfiguration(save_on_each_node=True): a checkpoint is one folder that all nodes can access. Remove "
                "the argument, and put project_dir on a shared disk."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the project, which is also the folder of the logs if they have none."""
        self.project_dir = _local(project_dir, "project_dir")
        self.logging_dir = self.project_dir if self.logging_dir is None else _local(self.logging_dir, "logging_dir")


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated, for `Accelerator(gradient_accumulation_plugin=)`.

    Args:
        num_steps: Number of micro-batches per optimizer step.
        adjust_scheduler: No effect, as in Accelerate: a prepared scheduler advances with optimizer steps, whatever their
            number of micro-batches.
        sync_with_dataloader: Only `True`: the last accumulation window ends with the epoch, and its gradient is the mean
            over its micro-batches.
        sync_each_batch: Only `False`: gradients are synchronized once per accumulation window.

    Raises:
        ConfigurationError: `num_steps` is not an integer ≥ 1.
        UnsupportedArgumentError: `sync_with_dataloader=False` or `sync_each_batch=True`.

    Example:
        ```python
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
        ```
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:  # Accelerate's default
            self.num_steps = 1
        self.num_steps = whole_number(self.num_steps, "GradientAccumulationPlugin(num_steps=)", 1)
        if not self.sync_with_dataloader:
            raise UnsupportedArgumentError(
                "GradientAccumulationPlugin(sync_with_dataloader=False) is not supported: no accumulation window crosses the "
                "end of an epoch. Remove it: the gradient of the last window is the mean over its micro-batches."
            )
        if self.sync_each_batch:
            raise UnsupportedArgumentError(
                "GradientAccumulationPlugin(sync_each_batch=True) is not supported: gradients are synchronized once per "
                "accumulation window. Remove it; to keep fewer gradients in memory use strategy='zero2', or "
                "FSDPStrategy(accumulate='reshard')."
            )


@dataclass
class DataLoaderConfiguration:
    """How loaders are sharded over the processes, for `Accelerator(dataloader_config=)`.

    Args:
        split_batches: As in `Accelerator`: `batch_size` is the total of all processes.
        dispatch_batches: As in `Accelerator`.
        even_batches: As in `Accelerator`.
        use_seedable_sampler: No effect: the order is always a function of the seed and the epoch.
        data_seed: Only `None`: the seed of the run determines the order.
        non_blocking: No effect: batches are always copied to a GPU while it computes.
        use_stateful_dataloader: `load_state` resumes each prepared loader at its position, as `resume_loaders=True` does.

    Raises:
        UnsupportedArgumentError: A `data_seed` is given.

    Example:
        ```python
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        ```
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.data_seed is not None:
            raise UnsupportedArgumentError(
                f"DataLoaderConfiguration(data_seed={self.data_seed!r}): the seed of the run determines the order of the data. "
                f"Use trainkit.set_seed({self.data_seed!r}) before Accelerator()."
            )


def _local(folder: str | os.PathLike[str] | None, argument: str) -> str | os.PathLike[str] | None:
    """The folder with `~` expanded."""
    if folder is None:
        return None
    path = disk_path(folder, argument, "project_dir='runs', and accelerator.save_state('s3://bucket/step-100') with a path")
    return path if os.fspath(folder).startswith("~") else folder


class DistributedType(str, enum.Enum):
    """How a run is distributed: `accelerator.distributed_type == DistributedType.MULTI_GPU`. Members are also strings.

    `NO` is one process, `MULTI_CPU` and `MULTI_GPU` are DDP, `DEEPSPEED` is ZeRO, `FSDP` is PyTorch's FSDP2, and
    `TPU` is another name for `XLA`. No run has one of the others, which exist so that scripts can compare with them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796 - an alias

    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"

    def __str__(self) -> str:
        return str(self.value)


def find_distributed_type(strategy: Strategy) -> DistributedType:
    """The type of a strategy that has joined its processes."""
    if strategy.info.distributed_type is not None:
        return DistributedType(strategy.info.distributed_type)
    if strategy.world_size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_CPU if strategy.device.type == "cpu" else DistributedType.MULTI_GPU


class _Choice(str, enum.Enum):
    """An enum whose members are strings."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)  # Messages contain the repr.

    __hash__ = str.__hash__

    @classmethod
    def list(cls) -> list[str]:
        """All values."""
        return [str(one) for one in cls]


class DynamoBackend(_Choice):
    """Names for `Accelerator(dynamo_backend=)`, which accepts every backend of `torch.compile`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class LoggerType(_Choice):
    """Names for `Accelerator(log_with=)`: `ALL`, `TENSORBOARD`, `WANDB`, `MLFLOW`, `COMETML`, `TRACKIO`; not the others."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    COMETML = "comet_ml"
    TRACKIO = "trackio"

    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(_Choice):
    """Names for `Accelerator(mixed_precision=)`: `NO`, `FP16`, `BF16`, `FP8`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
