"""Names that scripts written for Accelerate import from `trainkit.utils` and from `trainkit`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import trainkit
from trainkit import utils
from trainkit.names import advice_by_place, use_instead

ADVICE = advice_by_place()

# Arguments and their defaults, in Accelerate's order.
SIGNATURES: dict[str, dict[str, Any]] = {
    "AutocastKwargs": {"enabled": True, "cache_enabled": None},
    "DataLoaderConfiguration": {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
    },
    "DeepSpeedPlugin": {
        "hf_ds_config": None,
        "gradient_accumulation_steps": None,
        "gradient_clipping": None,
        "zero_stage": None,
        "is_train_batch_min": True,
        "offload_optimizer_device": None,
        "offload_param_device": None,
        "offload_optimizer_nvme_path": None,
        "offload_param_nvme_path": None,
        "zero3_init_flag": None,
        "zero3_save_16bit_model": None,
        "transformer_moe_cls_names": None,
        "enable_msamp": False,
        "msamp_opt_level": None,
    },
    "DistributedDataParallelKwargs": {
        "dim": 0,
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        "find_unused_parameters": False,
        "check_reduction": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "comm_hook": "no",
        "comm_wrapper": "no",
        "comm_state_option": inspect.Parameter.empty,  # a new empty dict for each object
    },
    "GradScalerKwargs": {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    "GradientAccumulationPlugin": {
        "num_steps": 1,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    },
    "InitProcessGroupKwargs": {"backend": None, "init_method": None, "timeout": None},
    "ProfileKwargs": {
        "activities": None,
        "schedule_option": None,
        "on_trace_ready": None,
        "record_shapes": False,
        "profile_memory": False,
        "with_stack": False,
        "with_flops": False,
        "with_modules": False,
        "output_trace_dir": None,
    },
    "ProjectConfiguration": {
        "project_dir": None,
        "logging_dir": None,
        "automatic_checkpoint_naming": False,
        "total_limit": None,
        "iteration": 0,
        "save_on_each_node": False,
    },
    "broadcast": {"tensor": inspect.Parameter.empty, "from_process": 0},
    "broadcast_object_list": {"object_list": inspect.Parameter.empty, "from_process": 0},
    "find_executable_batch_size": {"function": None, "starting_batch_size": 128, "reduce_batch_size_fn": None},
    "extract_model_from_parallel": {
        "model": inspect.Parameter.empty,
        "keep_fp32_wrapper": True,
        "keep_torch_compile": False,  # True in Accelerate
        "recursive": False,
    },
    "gather": {"tensor": inspect.Parameter.empty},
    "gather_object": {"object": inspect.Parameter.empty},
    "load_checkpoint_in_model": {
        "model": inspect.Parameter.empty,
        "checkpoint": inspect.Parameter.empty,
        "device_map": None,
        "offload_folder": None,
        "dtype": None,
        "offload_state_dict": False,
        "offload_buffers": False,
        "keep_in_fp32_modules": None,
        "offload_8bit_bnb": False,
        "strict": False,
        "full_state_dict": True,
        "broadcast_from_rank0": False,
    },
    "pad_across_processes": {"tensor": inspect.Parameter.empty, "dim": 0, "pad_index": 0, "pad_first": False},
    "reduce": {"tensor": inspect.Parameter.empty, "reduction": "mean", "scale": 1.0},
    "send_to_device": {
        "tensor": inspect.Parameter.empty,
        "device": inspect.Parameter.empty,
        "non_blocking": False,
        "skip_keys": None,
    },
    "set_seed": {"seed": inspect.Parameter.empty, "device_specific": False, "deterministic": False},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_accelerates(name: str) -> None:
    parameters = inspect.signature(getattr(utils, name)).parameters
    found = {key: p.default for key, p in parameters.items()}
    if name == "DistributedDataParallelKwargs":
        assert getattr(utils, name)().comm_state_option == {}
        found["comm_state_option"] = inspect.Parameter.empty
    assert list(found.items()) == list(SIGNATURES[name].items())


def test_names_are_those_of_trainkit() -> None:
    shared = {*utils.__all__} & {*trainkit.__all__}
    assert {name for name in shared if getattr(utils, name) is getattr(trainkit, name)} == shared
    only_there = {*utils.__all__} - shared
    assert {"broadcast_object_list", "gather", "gather_object", "is_wandb_available", "load", "reduce", "tqdm"} <= only_there
    assert {*utils.__all__} <= {*dir(utils)}


@pytest.mark.parametrize("package", ["trainkit", "trainkit.utils", "trainkit.state"])
def test_what_is_not_there_says_what_to_use(package: str) -> None:
    same = {*ADVICE["trainkit"]} & {*utils.__all__, *trainkit.__all__}
    assert same == {"load_state_dict"}  # trainkit's takes a checkpoint, and is not in utils
    for name, use in ADVICE["trainkit"].items():
        if package == "trainkit" and name in same:
            continue
        with pytest.raises(ImportError) as raised:
            exec(f"from {package} import {name}")
        assert str(raised.value) == f"{package} has no {name}. Use: {use_instead(package, name)}"
        if package != "trainkit":
            assert use_instead(package, name) == use


def test_a_misspelt_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DistributedTyp'. Did you mean 'DistributedType'?"):
        utils.DistributedTyp
    with pytest.raises(ImportError):
        exec("from trainkit.utils import nonsense")
    assert not hasattr(utils, "nonsense")
