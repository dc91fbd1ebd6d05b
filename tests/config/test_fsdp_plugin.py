"""`FullyShardedDataParallelPlugin`: each argument as an option of `FSDPStrategy`, as no effect, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from trainkit.config.fsdp_plugin import fsdp_plugin_of_keys
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.module.blocks import select_modules
from trainkit.utils import FullyShardedDataParallelPlugin, ParallelismConfig


def options(processes: int = 8, nodes: int | None = 2, **arguments: Any) -> dict[str, Any]:
    return FullyShardedDataParallelPlugin(**arguments).options_for(False, processes, nodes, ())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)


def chosen(choice: Any) -> list[str]:
    return list(select_modules(Model(), choice, "wrap"))


def test_the_default_is_that_of_the_strategy() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.options_for(True, 3, None, ()) == {}
    assert (plugin.strategy, plugin.source, plugin.divides_at_once) == ("fsdp", None, False)
    assert (plugin.fsdp_version, plugin.activation_checkpointing) == (2, False)
    assert plugin.describe() == {"strategy": "fsdp"}


@pytest.mark.parametrize("given, reshard, replicas", [
    ("FULL_SHARD", None, 1),
    ("full_shard", None, 1),
    ("1", None, 1),
    (1, None, 1),
    (ShardingStrategy.FULL_SHARD, None, 1),
    ("SHARD_GRAD_OP", False, 1),
    (2, False, 1),
    (ShardingStrategy.SHARD_GRAD_OP, False, 1),
    ("HYBRID_SHARD", None, 2),
    (ShardingStrategy.HYBRID_SHARD, None, 2),
    ("HYBRID_SHARD_ZERO2", False, 2),
    (ShardingStrategy._HYBRID_SHARD_ZERO2, False, 2),
])  # fmt: skip
def test_the_sharding_strategies_of_fsdp1(given: Any, reshard: bool | None, replicas: int) -> None:
    expected = {"reshard_after_forward": reshard, "replicas": replicas}
    expected = {name: value for name, value in expected.items() if value not in (None, 1) or value is False}
    for argument in ("sharding_strategy", "reshard_after_forward"):
        assert options(**{argument: given}) == expected
    assert options(sharding_strategy=given, reshard_after_forward=given) == expected


@pytest.mark.parametrize("given, expected", [(True, {}), ("true", {}), (False, {"reshard_after_forward": False}), ("no", {
    "reshard_after_forward": False})])  # fmt: skip
def test_truth_of_fsdp2(given: Any, expected: dict[str, Any]) -> None:
    assert options(fsdp_version=2, reshard_after_forward=given) == expected


def test_replicas_on_each_node() -> None:
    hybrid = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")
    assert hybrid.options_for(False, 8, 4, ()) == {"replicas": 4}
    assert hybrid.options_for(False, 8, 1, ()) == {}, "one node: one replica"
    with pytest.raises(ConfigurationError, match=r"does not say how many nodes there are. .*dp_replicate_size=2"):
        hybrid.options_for(False, 8, None, ())
    hybrid.parallelism = ParallelismConfig(dp_replicate_size=4, dp_shard_size=2)
    assert hybrid.options_for(False, 8, None, ()) == {"replicas": 4}


def test_offload() -> None:
    for on in (True, CPUOffload(offload_params=True), CPUOffloadPolicy()):
        assert options(cpu_offload=on) == {"offload_params": "cpu"}
    for off in (None, False, CPUOffload(), OffloadPolicy()):
        assert options(cpu_offload=off) == {}


def test_mixed_precision() -> None:
    bf16 = torch.bfloat16
    ready = MixedPrecisionPolicy(param_dtype=bf16)
    assert options(mixed_precision_policy=ready)["mixed_precision"] is ready
    every = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16)
    assert options(mixed_precision_policy="bf16") == {"mixed_precision": every}
    dtypes = {"param_dtype": bf16, "reduce_dtype": torch.float32, "buffer_dtype": bf16}
    expected = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    assert options(mixed_precision_policy=dtypes) == {"mixed_precision": expected}
    assert options(mixed_precision_policy=MixedPrecision(**dtypes)) == {"mixed_precision": expected}
    uncast = MixedPrecision(param_dtype=bf16, cast_root_forward_inputs=False)
    assert not options(mixed_precision_policy=uncast)["mixed_precision"].cast_forward_inputs


def test_which_modules_are_sharded_one_by_one() -> None:
    assert options(auto_wrap_policy="transformer_based_wrap") == {}
    for names in (["Block", "Linear"], "Block, Linear"):
        assert options(transformer_cls_names_to_wrap=names) == {"wrap": ["Block", "Linear"]}
        given = options(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=names)
        assert given == {"wrap": ["Block", "Linear"]}
    assert options(auto_wrap_policy="size_based_wrap") == {"wrap": 100_000_000}
    assert options(auto_wrap_policy="size_based_wrap", min_num_params=20) == {"wrap": 20}
    assert options(auto_wrap_policy="no_wrap") == {"wrap": False}


def test_policies_of_torch() -> None:
    partial = functools.partial
    assert options(auto_wrap_policy=transformer_auto_wrap_policy) == {}
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, Block})
    assert options(auto_wrap_policy=by_class) == {"wrap": [Block, nn.Linear]}
    assert options(auto_wrap_policy={Block}) == {"wrap": [Block]}
    assert options(auto_wrap_policy=size_based_auto_wrap_policy) == {"wrap": 100_000_000}
    assert options(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=7)) == {"wrap": 7}
    blocks = ["layers.0", "layers.1"]
    assert chosen(options(auto_wrap_policy=ModuleWrapPolicy([Block]))["wrap"]) == blocks
    assert chosen(options(auto_wrap_policy=always_wrap_policy)["wrap"]) == [
        *("layers.0", "layers.0.linear", "layers.1", "layers.1.linear", "head")
    ], "but not the list, which has no forward"

    def of_blocks(module: nn.Module) -> bool:
        return isinstance(module, Block)

    assert chosen(options(auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=of_blocks))["wrap"]) == blocks

    def large(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        assert not recurse
        return nonwrapped_numel >= 20 and isinstance(module, nn.Linear)

    assert chosen(options(auto_wrap_policy=large)["wrap"]) == ["layers.0.linear", "layers.1.linear"]


def test_modules_that_are_not_sharded() -> None:
    assert chosen(options(ignored_modules=r".*\.linear")["ignored_modules"]) == ["layers.0.linear", "layers.1.linear"]
    model = Model()
    found = options(ignored_modules=iter([model.head]))["ignored_modules"]
    assert list(select_modules(model, found, "ignored_modules")) == ["head"]
    assert options(ignored_modules=[]) == {}


def test_what_fsdp2_always_does() -> None:
    """These arguments have no effect, whatever their value."""
    for on in (True, False):
        names = ("limit_all_gathers", "use_orig_params", "sync_module_states", "forward_prefetch", "cpu_ram_efficient_loading")
        assert options(**dict.fromkeys(names, on)) == {}
    assert options(fsdp_version="1", state_dict_type="sharded_state_dict", state_dict_config=object()) == {}
    assert options(optim_state_dict_config=object(), state_dict_type=StateDictType.LOCAL_STATE_DICT) == {}
    for prefetch in ("BACKWARD_PRE", "no_prefetch", BackwardPrefetch.BACKWARD_POST):
        assert options(backward_prefetch=prefetch) == {}
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type == "FULL_STATE_DICT"


def test_activation_checkpointing_is_for_the_loop() -> None:
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    assert plugin.loop_option("activation_checkpointing") is True
    assert plugin.loop_option("gradient_clipping") is None
    assert plugin.options_for(False, 1, 1, ()) == {}
    assert FullyShardedDataParallelPlugin().loop_option("activation_checkpointing") is None


@pytest.mark.parametrize("arguments, words", [
    ({"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": "Block"}, "use auto_wrap_policy='transformer_based_"),
    ({"auto_wrap_policy": "transformer_based_wrap", "min_num_params": 9}, "or use auto_wrap_policy='size_based_wrap'"),
    ({"auto_wrap_policy": ModuleWrapPolicy([Block]), "min_num_params": 9}, "min_num_params=. has no effect with"),
])  # fmt: skip
def test_arguments_of_another_policy(arguments: dict[str, Any], words: str) -> None:
    with pytest.warns(TrainkitWarning, match=words):
        FullyShardedDataParallelPlugin(**arguments)


@pytest.mark.parametrize("arguments, kind, words", [
    ({"fsdp_version": 3}, ConfigurationError, r"fsdp_version=3\): expected one of 1, 2"),
    ({"sharding_strategy": "NO_SHARD"}, UnsupportedArgumentError, r"use Accelerator\(strategy='ddp'\)"),
    ({"sharding_strategy": 3}, UnsupportedArgumentError, "strategy='ddp'"),
    ({"sharding_strategy": True}, ConfigurationError, "expected 'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD', "),
    ({"reshard_after_forward": "FULL_SHARDS"}, ConfigurationError, "expected True, False, .* Did you mean 'FULL_SHARD'"),
    ({"reshard_after_forward": 8}, ConfigurationError, "expected True, False, 'FULL_SHARD'"),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, ConfigurationError, "Remove sharding_strategy"),
    ({"backward_prefetch": "PRE"}, ConfigurationError, "expected one of 'BACKWARD_PRE', 'BACKWARD_POST', 'NO_PREFETCH'"),
    ({"state_dict_type": "full"}, ConfigurationError, "expected one of 'FULL_STATE_DICT'"),
    ({"auto_wrap_policy": "size_based"}, ConfigurationError, "Did you mean 'SIZE_BASED_WRAP'"),
    ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 0}, ConfigurationError, "min_num_params=. must be an integer"),
    ({"auto_wrap_policy": Block}, ConfigurationError, r"such as ModuleWrapPolicy\(\{Block\}\)"),
    ({"auto_wrap_policy": CustomPolicy(bool)}, UnsupportedArgumentError, "lambda_auto_wrap_policy, lambda_fn="),
    ({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, force_leaf_modules={Block})}, UnsupportedArgumentError,
     "force_leaf_modules of size_based_auto_wrap_policy is not supported"),
    ({"cpu_offload": "cpu"}, ConfigurationError, "expected True or False"),
    ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, UnsupportedArgumentError, "Use cpu_offload=True"),
    ({"mixed_precision_policy": "fp8"}, ConfigurationError, "expected 'bf16', 'fp16', 'fp32'"),
    ({"mixed_precision_policy": {"param_dtype": "bf16"}}, ConfigurationError, r"MixedPrecisionPolicy\(param_dtype="),
    ({"mixed_precision_policy": MixedPrecision(keep_low_precision_grads=True)}, UnsupportedArgumentError, "keep_low_"),
    ({"ignored_modules": "("}, ConfigurationError, "is not a regular expression"),
    ({"param_init_fn": lambda module: None}, UnsupportedArgumentError, "initialize the model where it is created"),
    ({"activation_checkpointing_offload": True}, UnsupportedArgumentError, "save_on_cpu"),
])  # fmt: skip
def test_what_is_refused(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        FullyShardedDataParallelPlugin(**arguments)


@pytest.mark.parametrize("sizes, processes, expected", [
    ({}, 3, {}),
    ({"dp_shard_size": 4}, 4, {}),
    ({"dp_replicate_size": 2}, 8, {"replicas": 2}),
    ({"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 1, "sp_size": 1}, 8,
     {"replicas": 2, "tensor_parallel": 2}),
    ({"tp_size": 2, "dp_shard_size": 1, "cp_backend": "torch", "sp_backend": "deepspeed"}, 2, {"tensor_parallel": 2}),
])  # fmt: skip
def test_sizes(sizes: dict[str, Any], processes: int, expected: dict[str, int]) -> None:
    config = ParallelismConfig(**sizes)
    assert config.options_for(processes) == expected
    assert config.is_set is any(isinstance(size, int) and size > 1 for size in sizes.values())


@pytest.mark.parametrize("make, kind, words", [
    (lambda: ParallelismConfig(dp_shard_size=4).options_for(2), ConfigurationError,
     "dp_replicate_size=1 × dp_shard_size=4 × tp_size=1 does not fit the number of processes, 2. .* --nproc-per-node 4"),
    (lambda: ParallelismConfig(tp_size=2).options_for(3), ConfigurationError, "tp_size=2 does not fit the number of proc"),
    (lambda: ParallelismConfig(dp_replicate_size=2, dp_shard_size=1), UnsupportedArgumentError, "strategy='ddp'"),
    (lambda: ParallelismConfig(tp_size=0), ConfigurationError, r"ParallelismConfig\(tp_size=\) must be an integer ≥ 1"),
    (lambda: ParallelismConfig(cp_size=2), UnsupportedArgumentError, "attention kernels of the CPU, only for those of a GPU"),
    (lambda: ParallelismConfig(sp_size=2), UnsupportedArgumentError, "sequences are not sharded. Remove sp_size"),
])  # fmt: skip
def test_sizes_that_are_refused(make: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_keys_of_files() -> None:
    plugin = fsdp_plugin_of_keys(
        fsdp_version=1,
        fsdp_sharding_strategy="SHARD_GRAD_OP",
        fsdp_offload_params=True,
        fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        fsdp_transformer_layer_cls_to_wrap="Block,Head",
        fsdp_backward_prefetch="BACKWARD_PRE",
        fsdp_activation_checkpointing=True,
        parallelism_config_dp_replicate_size=2,
        parallelism_config_dp_shard_size=2,
    )
    assert plugin.options_for(False, 4, 1, ()) == {
        "reshard_after_forward": False,
        "offload_params": "cpu",
        "wrap": ["Block", "Head"],
        "replicas": 2,
    }
    assert plugin.fsdp_version == 1
    assert plugin.loop_option("activation_checkpointing")
    assert plugin.describe() == {
        "strategy": "fsdp",
        "sharding_strategy": "SHARD_GRAD_OP",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_offload": True,
        "transformer_cls_names_to_wrap": "Block,Head",
        "dp_replicate_size": 2,
        "dp_shard_size": 2,
    }
