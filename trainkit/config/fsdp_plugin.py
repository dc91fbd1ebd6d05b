"""`FullyShardedDataParallelPlugin` and `ParallelismConfig`: the options of FSDP under Accelerate's names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainkit.checks import whole_number
from trainkit.console import warn
from trainkit.errors import ConfigurationError, UnsupportedArgumentError, nearest

__all__ = ["SMALLEST_UNIT", "FullyShardedDataParallelPlugin", "ParallelismConfig", "fsdp_plugin_of_keys", "wrap_of_policy"]


_CLASS = "FullyShardedDataParallelPlugin"
# Sharding strategy of FSDP1 → (reshard_after_forward of FSDPStrategy, whether each node has a replica of its own).
_SHARDING = {
    "FULL_SHARD": (None, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (None, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_NUMBERED = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # 1, 2, …
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
# Key of Accelerate's files → argument, where it is not the key without `fsdp_`.
_OF_KEYS = {"fsdp_offload_params": "cpu_offload", "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
_OF_PARALLELISM = "parallelism_config_"
_SHOWN = (
    *("sharding_strategy", "reshard_after_forward", "mixed_precision_policy", "auto_wrap_policy", "cpu_offload"),
    *("ignored_modules", "transformer_cls_names_to_wrap", "min_num_params"),
)


@dataclass
class FullyShardedDataParallelPlugin:
    """FSDP for `Accelerator(fsdp_plugin=)`, under Accelerate's names; `FSDPStrategy` has more options.

    It is PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`), also with `fsdp_version=1`, whose options have the same
    meaning there.

    Args:
        fsdp_version: No effect: 1 and 2 are both FSDP2.
        sharding_strategy: `"FULL_SHARD"` is `reshard_after_forward=True`, `"SHARD_GRAD_OP"` is `False`. `"HYBRID_SHARD"` and
            `"HYBRID_SHARD_ZERO2"` are the same two with a replica on each node. Also a `ShardingStrategy` of torch, or its
            number.
        reshard_after_forward: `True`: free the gathered parameters of a block after its forward, and gather them again in
            the backward; those of the root stay. `False`: keep all of them until the backward, which is faster and needs
            more memory. Also the values of `sharding_strategy`. Default: `True`.
        backward_prefetch: No effect: FSDP2 always gathers the next parameters during the backward.
        mixed_precision_policy: A `MixedPrecisionPolicy` or `MixedPrecision` of torch, a dict of its dtypes, or `"bf16"`,
            `"fp16"` or `"fp32"` for all dtypes. Buffers keep their dtype. Default: the precision of `Accelerator`.
        auto_wrap_policy: Which modules are sharded one by one. `"transformer_based_wrap"`: those of
            `transformer_cls_names_to_wrap`. `"size_based_wrap"`: those with `min_num_params` parameters. `"no_wrap"`: only
            the model. Also a policy of `torch.distributed.fsdp.wrap`; a function gets the number of all parameters of the
            module. Default: the repeated blocks of the model.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory. Also `CPUOffload` and
            `CPUOffloadPolicy` of torch.
        ignored_modules: Modules that are not sharded: a list, or a regular expression that matches a whole name.
        state_dict_type: No effect: a checkpoint is the same for every strategy, and each rank writes a part of it.
        state_dict_config: No effect: as `state_dict_type`.
        optim_state_dict_config: No effect: as `state_dict_type`.
        limit_all_gathers: No effect: FSDP2 always limits them.
        use_orig_params: No effect: FSDP2 always keeps the parameters of the model.
        param_init_fn: Only `None`.
        sync_module_states: No effect: the values of rank 0 are always sent to all ranks.
        forward_prefetch: No effect: on a GPU, FSDP2 gathers the next parameters during the forward.
        activation_checkpointing: Recompute the activations of the blocks in the backward.
        activation_checkpointing_offload: Only `False`.
        cpu_ram_efficient_loading: No effect: each process loads the model that the script creates.
        transformer_cls_names_to_wrap: Names of classes, in a list or separated by commas. Default: the repeated blocks.
        min_num_params: For `"size_based_wrap"`. Default: 100_000_000, as in torch.

    Attributes:
        parallelism: The `parallelism_config` of the `Accelerator`.

    Raises:
        ConfigurationError: Arguments are wrong or contradict each other.
        UnsupportedArgumentError: An argument is not supported; the message says what to use instead.

    Example:
        ```python
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_offload=True)
        accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
        ```
    """

    fsdp_version: int | str | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[Any], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self.fsdp_version = 2 if self.fsdp_version is None else _one_of(self.fsdp_version, ("1", "2"), "fsdp_version", int)
        self._refuse_unsupported()
        values = {name: getattr(self, name) for name in _SHOWN}
        self._written = {name: value for name, value in values.items() if isinstance(value, str | int)}
        reshard, self._replica_per_node = self._sharding()
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.set_state_dict_type()
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = self.transformer_cls_names_to_wrap.split(",")
            self.transformer_cls_names_to_wrap = [name.strip() for name in names if name.strip()]
        options = {
            "wrap": self._wrap(),
            "reshard_after_forward": reshard,
            "mixed_precision": _convert_mixed_precision(self.mixed_precision_policy),
            "offload_params": _offload(self.cpu_offload),
            "ignored_modules": _convert_ignored_modules(self.ignored_modules),
        }
        self._options = {name: value for name, value in options.items() if value is not None}
        self.parallelism = ParallelismConfig()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`, which has no effect: a checkpoint is the same for every strategy.

        Args:
            state_dict_type: No effect: only checked. `"FULL_STATE_DICT"`, `"SHARDED_STATE_DICT"`, `"LOCAL_STATE_DICT"`, or
                torch's `StateDictType`.

        Raises:
            ConfigurationError: Another value.
        """
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        self.state_dict_type = None if chosen is None else _one_of(_name(chosen), _STATES, "state_dict_type")

    @property
    def strategy(self) -> str:
        """The short name of the strategy."""
        return "fsdp"

    @property
    def source(self) -> str | None:
        """`None`: the options are not in a file of their own."""
        return None

    @property
    def divides_at_once(self) -> bool:
        """Whether `transformers` models are sharded while they are built: they are not."""
        return False

    def loop_option(self, name: str) -> Any:
        """Return `True` for `"activation_checkpointing"` if it was given; `None` for all other options of the loop."""
        return True if name == "activation_checkpointing" and self.activation_checkpointing else None

    def describe(self) -> dict[str, Any]:
        """Return the strategy, and the arguments with an effect that were given as text or numbers."""
        sizes = {name: size for name, size in vars(self.parallelism).items() if size is not None}
        return {"strategy": self.strategy, **self._written, **sizes}

    def options_for(self, short: bool, processes: int, nodes: int | None, without: Collection[str]) -> dict[str, Any]:
        """Return the options of `FSDPStrategy` for a run.

        Args:
            short: No effect: whether parameters have 16 bits.
            processes: Number of processes of the run.
            nodes: Number of nodes of the run; `None`: unknown.
            without: No effect: FSDP has no options of the loop, which its arguments would replace.

        Raises:
            ConfigurationError: The number of processes does not fit `parallelism`, or the number of nodes is unknown.
        """
        options = {**self._options, **self.parallelism.options_for(processes)}
        if self._replica_per_node and self.parallelism.dp_replicate_size is None:
            if nodes is None:
                raise ConfigurationError(
                    f"{_CLASS}(sharding_strategy='HYBRID_SHARD') makes a replica on each node, and the launcher does not say "
                    "how many nodes there are. Write it: Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))"
                )
            options |= {"replicas": nodes} if nodes > 1 else {}
        return options

    def _refuse_unsupported(self) -> None:
        if self.param_init_fn is not None:
            raise UnsupportedArgumentError(
                f"{_CLASS}(param_init_fn=) is not supported: each rank would initialize its own shard, so that values depend "
                "on the number of ranks. Remove it, and initialize the model where it is created."
            )
        if self.activation_checkpointing_offload:
            raise UnsupportedArgumentError(
                f"{_CLASS}(activation_checkpointing_offload=True) is not supported. Remove it, or offload in the forward of "
                "the model: with torch.autograd.graph.save_on_cpu(pin_memory=True): ..."
            )
        if self.backward_prefetch is not None:
            _one_of(_name(self.backward_prefetch), _PREFETCH, "backward_prefetch")

    def _sharding(self) -> tuple[bool | None, bool]:
        """`reshard_after_forward` of the strategy, and whether each node has a replica of its own."""
        choices = {
            name: _sharding_of(value, name)
            for name in ("sharding_strategy", "reshard_after_forward")
            if (value := getattr(self, name)) is not None
        }
        if len(set(choices.values())) > 1:
            raise ConfigurationError(
                f"{_CLASS}(sharding_strategy={self.sharding_strategy!r}, reshard_after_forward="
                f"{self.reshard_after_forward!r}) contradict each other. Remove sharding_strategy."
            )
        return next(iter(choices.values()), (None, False))

    def _wrap(self) -> Any:
        """`wrap` of the strategy: `None` for the repeated blocks."""
        policy, names = self.auto_wrap_policy, self.transformer_cls_names_to_wrap
        if policy is not None and not isinstance(policy, str):
            wrap, used = wrap_of_policy(policy, f"{_CLASS}(auto_wrap_policy="), ""
        else:
            kind = None if policy is None else _one_of(policy, _POLICIES, "auto_wrap_policy")
            wrap, used = names or None, "transformer_cls_names_to_wrap"
            if kind == "NO_WRAP":
                wrap, used = False, ""
            elif kind == "SIZE_BASED_WRAP":
                least = SMALLEST_UNIT if self.min_num_params is None else self.min_num_params
                wrap, used = whole_number(least, f"{_CLASS}(min_num_params=)", 1), "min_num_params"
        for name in ("transformer_cls_names_to_wrap", "min_num_params"):
            if getattr(self, name) and name != used:
                needed = "transformer" if name.startswith("transformer") else "size"
                warn(
                    f"{_CLASS}({name}=) has no effect with auto_wrap_policy={policy!r}. Remove it, or use "
                    f"auto_wrap_policy='{needed}_based_wrap'."
                )
        return wrap


def fsdp_plugin_of_keys(**keys: Any) -> FullyShardedDataParallelPlugin:
    """The plugin for keys of `fsdp_config` and `parallelism_config` in Accelerate's files."""
    sizes = {name.removeprefix(_OF_PARALLELISM): value for name, value in keys.items() if name.startswith(_OF_PARALLELISM)}
    options = {
        _OF_KEYS.get(name, name.removeprefix("fsdp_") if name != "fsdp_version" else name): value
        for name, value in keys.items()
        if not name.startswith(_OF_PARALLELISM)
    }
    plugin = FullyShardedDataParallelPlugin(**options)
    plugin.parallelism = ParallelismConfig(**sizes)
    return plugin


def _name(value: Any) -> str:
    """The name of a member of one of torch's enumerations, or the text."""
    return str(getattr(value, "name", value)).lstrip("_")


def _one_of(value: Any, known: Collection[str], argument: str, read: Callable[[str], Any] = str) -> Any:
    """The spelling in `known` of a value in any case."""
    text = str(value).upper()
    if text not in known:
        words = ", ".join(map(repr, map(read, known)))
        raise ConfigurationError(f"{_CLASS}({argument}={value!r}): expected one of {words}.{nearest(text, known)}")
    return read(text)


def _sharding_of(value: Any, argument: str) -> tuple[bool | None, bool]:
    """The meaning of a truth value, a sharding strategy of FSDP1, or its number."""
    truth = None
    if argument == "reshard_after_forward":
        truth = value if isinstance(value, bool) else _TRUTH.get(str(value).lower())
    if truth is not None:  # True frees what belongs to blocks: the root's own parameters are needed first in the backward
        return (None if truth else False), False
    name = _name(value).upper()
    if name in ("1", "2", "3", "4", "5"):
        name = _NUMBERED[int(name) - 1]
    if name == "NO_SHARD":
        raise UnsupportedArgumentError(
            f"{_CLASS}({argument}={value!r}): without shards it is DDP. Remove the plugin, and use Accelerator(strategy='ddp')."
        )
    if name not in _SHARDING:
        expected = ("True, False, " if argument == "reshard_after_forward" else "") + ", ".join(map(repr, _SHARDING))
        raise ConfigurationError(f"{_CLASS}({argument}={value!r}): expected {expected}.{nearest(name, _SHARDING)}")
    return _SHARDING[name]


def _convert_mixed_precision(policy: Any) -> Any:
    """The `MixedPrecisionPolicy` of FSDP2."""
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, MixedPrecision):
        if policy.keep_low_precision_grads:
            raise UnsupportedArgumentError(
                f"{_CLASS}(mixed_precision_policy=): keep_low_precision_grads=True is not supported: gradients have the dtype "
                "of the parameters. Remove it."
            )
        return MixedPrecisionPolicy(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=policy.cast_forward_inputs or policy.cast_root_forward_inputs,
        )
    if isinstance(policy, str) and policy in _DTYPES:
        dtype = getattr(torch, _DTYPES[policy])
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    names = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
    if isinstance(policy, dict) and all(
        name in names and (value is None or isinstance(value, torch.dtype)) for name, value in policy.items()
    ):
        return MixedPrecisionPolicy(**{name: value for name, value in policy.items() if name != "buffer_dtype"})
    raise ConfigurationError(
        f"{_CLASS}(mixed_precision_policy={policy!r}): expected 'bf16', 'fp16', 'fp32', a dict of dtypes with the keys "
        f"{', '.join(names)}, or torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
    )


def _offload(value: Any) -> str | None:
    """`offload_params` of the strategy."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, CPUOffloadPolicy):
        if not value.pin_memory:
            raise UnsupportedArgumentError(
                f"{_CLASS}(cpu_offload=CPUOffloadPolicy(pin_memory=False)) is not supported: memory is page-locked where there "
                "is a GPU. Use cpu_offload=True."
            )
        return "cpu"
    if isinstance(value, CPUOffload):
        return "cpu" if value.offload_params else None
    if value is None or isinstance(value, OffloadPolicy):
        return None
    if not isinstance(value, bool):
        raise ConfigurationError(f"{_CLASS}(cpu_offload={value!r}): expected True or False, or a CPUOffloadPolicy of torch.")
    return "cpu" if value else None


def _convert_ignored_modules(value: Any) -> Any:
    """`ignored_modules` of the strategy: a function of a name and a module."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            pattern = re.compile(value)
        except re.error as error:
            raise ConfigurationError(
                f"{_CLASS}(ignored_modules={value!r}) is not a regular expression: {error}. Write one such as '.*adapter'"
            ) from error
        return lambda name, module: pattern.fullmatch(name) is not None
    modules = list(value)
    return (lambda name, module: any(module is one for one in modules)) if modules else None


SMALLEST_UNIT = 100_000_000
"""Number of parameters from which torch's `size_based_auto_wrap_policy` makes a module a unit, by default."""


def wrap_of_policy(policy: Any, argument: str) -> Any:
    """The value of `wrap` of `FSDPStrategy` for a wrap policy.

    Args:
        policy: `transformer_auto_wrap_policy`, `size_based_auto_wrap_policy` or `lambda_auto_wrap_policy` of torch, alone or
            in a `functools.partial`; a `ModuleWrapPolicy`; a function with the arguments of these; or classes.
        argument: The name of the user's argument, for messages.

    Raises:
        ConfigurationError: It is none of these.
        UnsupportedArgumentError: A `CustomPolicy`, or an option of a policy that trainkit does not have.
    """
    from torch.distributed.fsdp import wrap

    function = policy.func if isinstance(policy, functools.partial) else policy
    options = dict(policy.keywords) if isinstance(policy, functools.partial) else {}
    if function is wrap.transformer_auto_wrap_policy:
        return _sort_classes(options["transformer_layer_cls"]) if options.get("transformer_layer_cls") else None
    if function is wrap.size_based_auto_wrap_policy:
        more = sorted(options.keys() - {"min_num_params"})
        if more:
            raise UnsupportedArgumentError(
                f"{argument}: {', '.join(more)} of size_based_auto_wrap_policy is not supported. Choose the modules by a "
                "function: FSDPStrategy(wrap=lambda name, module: ...)"
            )
        return int(options.get("min_num_params", SMALLEST_UNIT))
    if isinstance(policy, wrap.CustomPolicy):
        raise UnsupportedArgumentError(
            f"{argument}: CustomPolicy is not supported: its options per module are those of FSDP1. Choose the modules by a "
            f"function: {argument.rstrip('=')}=functools.partial(lambda_auto_wrap_policy, lambda_fn=...)"
        )
    if isinstance(policy, set | frozenset | list | tuple):
        return _sort_classes(policy)
    if isinstance(policy, type) or not callable(policy):
        raise ConfigurationError(
            f"{argument}{policy!r}: expected 'transformer_based_wrap', 'size_based_wrap', 'no_wrap', or a policy of "
            "torch.distributed.fsdp.wrap, such as ModuleWrapPolicy({Block})."
        )
    return _by_function(policy)


def _sort_classes(classes: Any) -> list[Any]:
    """Classes in an order that is equal on all ranks, which that of a set is not."""
    return sorted(classes, key=lambda one: getattr(one, "__qualname__", str(one)))


def _by_function(policy: Callable[..., Any]) -> Callable[[str, nn.Module], bool]:
    def should_shard(name: str, module: nn.Module) -> bool:
        """Ask the policy about one module. Containers have no forward to shard around."""
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return False
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return should_shard


@dataclass
class ParallelismConfig:
    """How many replicas FSDP trains, over how many processes each is sharded, and the size of tensor parallelism.

    For `Accelerator(parallelism_config=)`. The product of the sizes is the number of processes.

    Args:
        dp_replicate_size: Number of replicas of the model (HSDP). Default: 1.
        dp_shard_size: Number of processes over which a replica is sharded. Default: all that the other sizes leave.
        tp_size: Number of processes that compute a layer together (tensor parallelism). Default: 1.
        cp_size: Only 1: context parallelism is not implemented.
        cp_backend: No effect: there is no context parallelism.
        sp_size: Only 1: sequences are not sharded.
        sp_backend: No effect: there is no sequence parallelism.
        tp_handler: No effect: it has no options.
        cp_handler: No effect: as `cp_backend`.
        sp_handler: No effect: as `sp_backend`.

    Raises:
        ConfigurationError: A size is not an integer ≥ 1.
        UnsupportedArgumentError: Context or sequence parallelism, or replicas that are not sharded.

    Example:
        ```python
        accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=4))
        ```
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if getattr(self, name) is not None:
                setattr(self, name, whole_number(getattr(self, name), f"ParallelismConfig({name}=)", 1))
        if (self.cp_size or 1) > 1:
            raise UnsupportedArgumentError(
                f"ParallelismConfig(cp_size={self.cp_size}) is not implemented: context parallelism of torch has no rule "
                "for the attention kernels of the CPU, only for those of a GPU. Remove cp_size; for long sequences use "
                "activation checkpointing."
            )
        if (self.sp_size or 1) > 1:
            raise UnsupportedArgumentError(
                f"ParallelismConfig(sp_size={self.sp_size}) is not implemented: sequences are not sharded. Remove sp_size; "
                "for long sequences use activation checkpointing."
            )
        if (self.dp_replicate_size or 1) > 1 and self.dp_shard_size == 1:
            raise UnsupportedArgumentError(
                f"ParallelismConfig(dp_replicate_size={self.dp_replicate_size}, dp_shard_size=1): without shards it is DDP. "
                "Use Accelerator(strategy='ddp') without a parallelism_config; or shard each replica: dp_shard_size=2"
            )

    @property
    def is_set(self) -> bool:
        """Whether a size is larger than 1."""
        return any(size not in (None, 1) for size in (self.dp_replicate_size, self.dp_shard_size, self.tp_size))

    def options_for(self, processes: int) -> dict[str, Any]:
        """Return the options of `FSDPStrategy` for a run with a number of processes.

        Raises:
            ConfigurationError: The product of the sizes is another number.
        """
        replicas, parallel = self.dp_replicate_size or 1, self.tp_size or 1
        if self.dp_shard_size is None:
            whole = processes % (replicas * parallel) == 0
        else:
            whole = self.dp_shard_size * replicas * parallel == processes
        if not whole:
            sizes = (("dp_replicate_size", replicas), ("dp_shard_size", self.dp_shard_size), ("tp_size", parallel))
            written = " × ".join(f"{name}={size}" for name, size in sizes if size is not None)
            raise ConfigurationError(
                f"ParallelismConfig: {written} does not fit the number of processes, {processes}. Change a size; or start the "
                f"script with trainkit launch --nproc-per-node {replicas * parallel * (self.dp_shard_size or 1)}"
            )
        options = {"replicas": replicas, "tensor_parallel": parallel}
        return {name: size for name, size in options.items() if size > 1}
