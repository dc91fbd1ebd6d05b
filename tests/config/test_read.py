"""Reading configuration files of Accelerate and of trainkit: each key, and values that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.configurations import (
    DEFAULT,
    FSDP,
    FSDP1,
    MULTI_CPU,
    MULTI_GPU,
    ONE_CPU,
    SIZES,
    TPU,
    TWO_MACHINES,
    ZERO2,
    ZERO3,
    accelerates,
)

from trainkit.config.settings import Settings
from trainkit.config.settings_file import default_file, read_settings
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError

MACHINE = {"debug": False, "machine_rank": 0, "num_machines": 1}


def read(text: str, name: str = "conf.yaml") -> Settings:
    Path(name).write_text(text)
    return read_settings(name)


@pytest.mark.parametrize("text, values, deepspeed, dynamo", [
    (ONE_CPU, {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "no", "use_cpu": True}, {}, {}),
    (DEFAULT, {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "no", "use_cpu": True}, {}, {}),
    (MULTI_CPU, {"distributed_type": "MULTI_CPU", "num_processes": 2, "mixed_precision": "no", "use_cpu": True}, {}, {}),
    (MULTI_GPU, {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16", "use_cpu": False,
                 "gpu_ids": "all"}, {}, {}),
    (TWO_MACHINES, {"distributed_type": "MULTI_GPU", "num_processes": 16, "num_machines": 2, "machine_rank": 1,
                    "main_process_ip": "10.0.0.1", "main_process_port": 29500, "mixed_precision": "fp16", "use_cpu": False,
                    "gpu_ids": "all"}, {}, {"dynamo_backend": "inductor"}),
    (ZERO2, {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16", "use_cpu": False,
             "gradient_accumulation_steps": 4},
     {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "none", "gradient_clipping": 1.0,
      "zero3_init_flag": False}, {}),
    (ZERO3, {"distributed_type": "DEEPSPEED", "num_processes": 1, "mixed_precision": "no", "use_cpu": False,
             "gradient_accumulation_steps": 1},
     {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "gradient_clipping": 1.0,
      "zero3_init_flag": True, "zero3_save_16bit_model": False}, {}),
    (FSDP, {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "use_cpu": False},
     {"fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
      "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": True, "fsdp_reshard_after_forward": True,
      "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_version": 2}, {}),
    (FSDP1, {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "no", "use_cpu": False},
     {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": False,
      "fsdp_min_num_params": 1000, "fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_sync_module_states": True,
      "fsdp_use_orig_params": True, "fsdp_version": 1}, {}),
    (SIZES, {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "no", "use_cpu": False},
     {"fsdp_version": 2, "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2,
      "parallelism_config_tp_size": 2}, {}),
    (TPU, {"distributed_type": "XLA", "num_processes": 8, "mixed_precision": "no", "use_cpu": False}, {}, {}),
])  # fmt: skip
def test_files_of_accelerate(text: str, values: dict[str, Any], deepspeed: dict[str, Any], dynamo: dict[str, Any]) -> None:
    assert read(text) == Settings({**MACHINE, **values}, deepspeed, dynamo, "conf.yaml")


@pytest.mark.parametrize("text, expected", [
    ("distributed_type: NO\nmixed_precision: no\ndynamo_backend: no", {"distributed_type": "NO", "mixed_precision": "no"}),
    ("distributed_type: fsdp", {"distributed_type": "FSDP"}),
    ("distributed_type: tpu", {"distributed_type": "XLA"}),
    ("distributed_type: multi_cpu\nmixed_precision: BF16", {"distributed_type": "MULTI_CPU", "mixed_precision": "bf16"}),
    ("num_processes: '3'\nuse_cpu: 'yes'\ngpu_ids: 0, 2", {"num_processes": 3, "use_cpu": True, "gpu_ids": "0,2"}),
    ("num_processes:\nmain_process_ip: none\nmixed_precision: null", {}),
    ("gradient_accumulation_steps: auto", {"gradient_accumulation_steps": "auto"}),
    ("commands: null\nfsdp_config: {}\ntpu_name: ''\nsame_network: false\nmain_training_function: train", {}),
    ("", {}),
])  # fmt: skip
def test_values(text: str, expected: dict[str, Any]) -> None:
    assert read(text).values == expected


def test_json() -> None:
    assert read(json.dumps({"num_processes": 2}), "conf.json").values == {"num_processes": 2}


def test_the_compiler_at_the_top_and_in_a_section() -> None:
    assert read("dynamo_backend: INDUCTOR").dynamo == {"dynamo_backend": "inductor"}
    section = (
        "dynamo_config: {backend: eager, dynamo_mode: default, use_fullgraph: true, dynamo_use_regional_compilation: false}"
    )
    assert read(section).dynamo == {
        "dynamo_backend": "eager",
        "dynamo_mode": "default",
        "dynamo_use_fullgraph": True,
        "dynamo_use_regional_compilation": False,
    }


@pytest.mark.parametrize("text, expected", [
    ("{version: 2, sharding_strategy: 2}", {"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
    ("{fsdp_sharding_strategy: hybrid_shard}", {"fsdp_sharding_strategy": "HYBRID_SHARD"}),
    ("{fsdp_reshard_after_forward: 'false'}", {"fsdp_reshard_after_forward": False}),
    ("{fsdp_reshard_after_forward: full_shard}", {"fsdp_reshard_after_forward": "FULL_SHARD"}),
    ("{fsdp_transformer_layer_cls_to_wrap: [Block, Head]}", {"fsdp_transformer_layer_cls_to_wrap": "Block,Head"}),
    ("{fsdp_ignored_modules: '.*adapter'}", {"fsdp_ignored_modules": ".*adapter"}),
    ("{fsdp_activation_checkpointing_offload: false}", {}),
])  # fmt: skip
def test_spellings_of_fsdp(text: str, expected: dict[str, Any]) -> None:
    """Keys without `fsdp_`, values in lower case and numbers of sharding strategies mean what they mean in Accelerate."""
    assert read(f"fsdp_config: {text}").backend == expected


@pytest.mark.parametrize("text, words", [
    ("num_procesess: 2", "conf.yaml: unknown key 'num_procesess'. Did you mean 'num_processes'?"),
    ("zero_stage: 2", "conf.yaml: unknown key 'zero_stage'."),
    ("deepspeed_config: {zero_stag: 2}", "conf.yaml: deepspeed_config: unknown key 'zero_stag'. Did you mean 'zero_stage'?"),
    ("deepspeed_config: {same_network: true}", "conf.yaml: deepspeed_config: unknown key 'same_network'."),
    ("fsdp_config: {offload_param: true}", "conf.yaml: fsdp_config: unknown key 'fsdp_offload_param'. Did you mean 'fsdp_"),
    ("dynamo_config: {dynamo_made: x}", "conf.yaml: dynamo_config: unknown key 'dynamo_made'. Did you mean 'dynamo_mode'?"),
])  # fmt: skip
def test_unknown_keys(text: str, words: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read(text)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("text, words", [
    ("num_processes: 0", "conf.yaml: num_processes must be a whole number ≥ 1, not 0."),
    ("num_processes: -1", "conf.yaml: num_processes must be a whole number ≥ 1, not -1."),
    ("num_processes: true", "num_processes must be a whole number ≥ 1, not True."),
    ("main_process_port: 70000", "main_process_port must be a whole number from 0 to 65535, not 70000."),
    ("mixed_precision: bf61", "mixed_precision must be one of no, fp16, bf16, fp8, not 'bf61'. Did you mean 'bf16'?"),
    ("distributed_type: 3", "distributed_type must be one of NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, XLA, not 3."),
    ("use_cpu: perhaps", "use_cpu must be true or false, not 'perhaps'."),
    ("gpu_ids: 0,0", "gpu_ids must be all, or different GPU numbers such as 0,1, not '0,0'."),
    ("gradient_accumulation_steps: 0", "gradient_accumulation_steps must be a whole number ≥ 1, or auto, not 0."),
    ("main_process_ip: [a]", "main_process_ip must be text, not ['a']."),
    ("deepspeed_config: {zero_stage: 4}", "conf.yaml: deepspeed_config: zero_stage must be a whole number from 1 to 3, not 4."),
    ("deepspeed_config: {gradient_clipping: -1}", "gradient_clipping must be a number ≥ 0, or auto, not -1."),
    ("deepspeed_config: {gradient_clipping: .inf}", "gradient_clipping must be a number ≥ 0, or auto, not inf."),
    ("deepspeed_config: {offload_param_device: disk}", "offload_param_device must be one of none, cpu, nvme, not 'disk'."),
    ("fsdp_config: {fsdp_version: 3}", "conf.yaml: fsdp_config: fsdp_version must be a whole number from 1 to 2, not 3."),
    ("fsdp_config: {fsdp_reshard_after_forward: 8}", "fsdp_reshard_after_forward must be one of FULL_SHARD, SHARD_GRAD_OP, "),
    ("deepspeed_config: 3", "conf.yaml: deepspeed_config must contain keys and values, not 3."),
    ("[1, 2]", "conf.yaml must contain keys and values, such as num_processes: 2, not '[1, 2]'."),
    ("a: b: c", "conf.yaml is not valid YAML: mapping values are not allowed here"),
    ("gradient_accumulation_steps: 2\ndeepspeed_config: {gradient_accumulation_steps: 4}",
     "conf.yaml sets gradient_accumulation_steps twice, to 2 and to 4. Remove one of them."),
    ("dynamo_backend: eager\ndynamo_config: {dynamo_backend: inductor}", "conf.yaml sets dynamo_backend twice, to inductor an"),
])  # fmt: skip
def test_wrong_values(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text, words", [
    (accelerates(distributed_type="MEGATRON_LM"), "MEGATRON_LM is not supported; to shard parameters write distributed_type"),
    (accelerates(tp_config={"tp_size": 2}), "write parallelism_config: {parallelism_config_tp_size: 2}"),
    (accelerates(fsdp_config={"fsdp_sharding_strategy": 3}), "fsdp_sharding_strategy: 3 is not supported; for DDP, write dis"),
    (accelerates(fsdp_config={"fsdp_activation_checkpointing_offload": True}), "in the forward of the model: with torch.autog"),
    (accelerates(parallelism_config={"parallelism_config_cp_size": 2}), "parallelism_config_cp_size: 2 is not supported; con"),
    (accelerates(distributed_type="MULTI_XPU"), "distributed_type: MULTI_XPU is not supported; there is no strategy for these"),
    (accelerates(fp8_config={"backend": "TE"}), "fp8_config: backend: TE is not supported; write AO, which is torchao, or"),
    (accelerates(deepspeed_config={"zero_stage": 0}), "deepspeed_config: zero_stage: 0 is not supported; for DDP, write dis"),
    (accelerates(deepspeed_config={"deepspeed_multinode_launcher": "openmpi"}), "start the script with mpirun, which trainkit"),
    (accelerates(deepspeed_config={"deepspeed_moe_layer_cls_names": "A"}), "call DeepSpeed yourself, before the model is prep"),
    (accelerates(dynamo_config={"dynamo_backend": "OFI"}), "dynamo_config: dynamo_backend: OFI is not supported; write induct"),
    (accelerates(enable_cpu_affinity=True), "enable_cpu_affinity: True is not supported; start the script with numactl."),
    (accelerates(tpu_use_cluster=True), "start each machine of a TPU slice with gcloud"),
    (accelerates(mpirun_config={"mpirun_hostfile": "x"}), "start the script with mpirun, which trainkit detects"),
    (accelerates(rdzv_backend="etcd"), "rdzv_backend: 'etcd' is not supported; write static or c10d,"),
    ("fp16: true", "fp16 is a key of an old version of Accelerate; write mixed_precision: fp16."),
    ("base_job_name: x\ncompute_environment: AMAZON_SAGEMAKER\nec2_instance_type: y", "compute_environment: 'AMAZON_SAGEMAKER"),
])  # fmt: skip
def test_unsupported_values_of_accelerate(text: str, words: str) -> None:
    with pytest.raises(UnsupportedArgumentError) as caught:
        read(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("more", [
    {"ipex_config": {"ipex": False}},
    {"ipex_config": "no", "megatron_lm_config": None},
    {"tp_config": {"tp_size": 1}},
    {"mpirun_config": {"mpirun_hostfile": "", "mpirun_ccl": False}},
    {"mpirun_config": {"enabled": False, "mpirun_hostfile": "x"}},
    {"rdzv_backend": "c10d", "same_network": False, "main_training_function": "train"},
    {"downcast_bf16": False, "enable_cpu_affinity": "no"},
    {"fsdp_config": "no", "deepspeed_config": False, "fp8_config": "none"},
    {"fsdp_config": {"fsdp_activation_checkpointing_offload": "false"}},
    {"parallelism_config": {"parallelism_config_cp_size": 1}},
    {"fp16": False},
])  # fmt: skip
def test_what_is_off_is_accepted(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert read(accelerates(**more)) == read(accelerates())
    assert not caplog.messages


def test_a_notice_about_unknown_keys_that_are_off(caplog: pytest.LogCaptureFixture) -> None:
    """The keys of versions to come that turn something off are no reason to stop."""
    more = {"hpu_config": {"enabled": False, "a": 1}, "deepspeed_config": {"zero_stage": 2, "deepspeed_new": None}}
    assert read(accelerates(**more)).get("zero_stage") == 2
    assert caplog.messages == [
        "these keys of conf.yaml are unknown and have no effect: deepspeed_config: deepspeed_new.",
        "these keys of conf.yaml are unknown and have no effect: hpu_config.",
    ]


def test_the_float8_section_of_accelerate(caplog: pytest.LogCaptureFixture) -> None:
    own = {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True}
    assert read(accelerates(mixed_precision="fp8", fp8_config=own)).get("mixed_precision") == "fp8"
    assert not caplog.messages
    read(accelerates(mixed_precision="fp8", fp8_config={**own, "fp8_enable_fsdp_float8_all_gather": True}))
    assert "enable_fsdp_float8_all_gather has no effect in a file. In the script: precision=Float8P" in caplog.text
    with pytest.raises(ConfigurationError, match="fp8_config must contain keys and values, not 3. Write: backend: AO"):
        read("fp8_config: 3")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError,
        match="the configuration file x.yaml does not exist. Create it with: trainkit config --config_file x",
    ):
        read_settings("x.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_settings(tmp_path)
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="bytes cannot be read"):
        read_settings("bytes")


def test_the_default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINKIT_CONFIG_FILE", "own.yaml")
    assert default_file() == Path("own.yaml")
    monkeypatch.delenv("TRAINKIT_CONFIG_FILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_file() == tmp_path / "trainkit" / "default_config.yaml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_file() == tmp_path / ".cache" / "trainkit" / "default_config.yaml"
