"""Arguments for FSDP in Lightning, torch and Accelerate: `FSDPStrategy` has them, or an error names what to use."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from trainkit.errors import UnknownNameError, UnsupportedArgumentError
from trainkit.names import advice_by_place, refuse_unknown
from trainkit.utils import FullyShardedDataParallelPlugin

ADVICE = advice_by_place()

OURS = {
    *("wrap", "reshard_after_forward", "mixed_precision", "offload_params", "replicas", "tensor_parallel", "ignored_modules"),
    *("accumulate", "process_group_backend", "timeout", "device", "precision"),
}
# Of FSDPStrategy and ModelParallelStrategy of Lightning 2.6 (lightning.pytorch and lightning.fabric).
LIGHTNING = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "precision"),
    *("process_group_backend", "timeout", "cpu_offload", "mixed_precision", "auto_wrap_policy", "activation_checkpointing"),
    *("activation_checkpointing_policy", "sharding_strategy", "state_dict_type", "device_mesh", "data_parallel_size"),
    *("tensor_parallel_size", "save_distributed_checkpoint", "parallelize_fn"),
}


def arguments(function: Any) -> set[str]:
    return set(list(inspect.signature(function).parameters)[1:])


def test_every_argument_is_there_or_named_with_what_to_use() -> None:
    theirs = LIGHTNING | arguments(FullyShardedDataParallel.__init__) - {"module"} | arguments(fully_shard)
    assert theirs - OURS - ADVICE["FSDPStrategy"].keys() == set()
    assert {"transformer_cls_names_to_wrap", "min_num_params"} <= arguments(FullyShardedDataParallelPlugin)
    assert not OURS & ADVICE["FSDPStrategy"].keys()


@pytest.mark.parametrize("name", sorted(ADVICE["FSDPStrategy"]))
def test_what_is_refused_and_what_to_use(name: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=rf"FSDPStrategy\({name}=...\): ") as raised:
        refuse_unknown("FSDPStrategy", {name: object()}, OURS)
    advised = set(re.findall(r"(\w+)=", str(raised.value).partition("): ")[2]))
    assert advised <= OURS | {"activation_checkpointing", "accelerator", "devices", "strategy"}, "of the Trainer"


def test_values_are_carried_over_and_misspelled_names_are_found() -> None:
    with pytest.raises(UnsupportedArgumentError, match="use tensor_parallel=4"):
        refuse_unknown("FSDPStrategy", {"tensor_parallel_size": 4}, OURS)
    with pytest.raises(UnknownNameError, match="FSDPStrategy has no argument 'replica'. Did you mean 'replicas'"):
        refuse_unknown("FSDPStrategy", {"replica": 4}, OURS)
