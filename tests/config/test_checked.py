"""The settings of a run, checked for contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.settings import Settings
from trainkit.config.settings_file import check_settings
from trainkit.errors import ConfigurationError


def test_values_that_mean_not_set_are_removed() -> None:
    before = Settings(
        {"distributed_type": "DEEPSPEED", "gradient_accumulation_steps": "auto"},
        {"gradient_clipping": "auto", "zero_stage": 3},
        {"dynamo_backend": "no", "dynamo_mode": "default"},
        "conf.yaml",
    )
    assert check_settings(before) == Settings({"distributed_type": "DEEPSPEED"}, {"zero_stage": 3}, {}, "conf.yaml")
    assert check_settings(check_settings(before)) == check_settings(before)
    assert check_settings(Settings()) == Settings()


def test_several_cpus_are_cpus() -> None:
    assert check_settings(Settings({"distributed_type": "MULTI_CPU"})).get("use_cpu") is True


def test_a_deepspeed_configuration_is_found_from_any_folder(tmp_path: Path) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    file = {"deepspeed_config_file": "ds.json", "zero3_init_flag": False, "gradient_clipping": "auto"}
    found = check_settings(Settings({"distributed_type": "DEEPSPEED", "gradient_accumulation_steps": 2}, file))
    assert found.get("deepspeed_config_file") == str(tmp_path / "ds.json")
    plugin = found.plugin()
    assert plugin is not None
    assert plugin.zero_stage == 1


DEEPSPEED = {"distributed_type": "DEEPSPEED"}


@pytest.mark.parametrize("values, deepspeed, words", [
    ({"machine_rank": 2, "num_machines": 2}, {}, "c: machine_rank: 2 is too large for num_machines: 2. Write a number "),
    ({"num_processes": 3, "num_machines": 2}, {}, "c: num_processes: 3 is the total of all machines, and is not divisible "
     "by num_machines: 2. Write num_processes: 4"),
    ({"main_process_port": 0, "num_machines": 2}, {}, "c: main_process_port: 0 means any free port, but num_machines: 2 "),
    ({"distributed_type": "NO", "num_processes": 2}, {}, "c: distributed_type: NO means one process, but num_processes: 2."),
    ({"distributed_type": "NO", "num_machines": 2}, {}, "c: distributed_type: NO means one process, but num_machines: 2."),
    ({"distributed_type": "MULTI_CPU", "use_cpu": False}, {}, "c: distributed_type: MULTI_CPU and use_cpu: false contradict"),
    ({}, {"zero_stage": 2}, "c: zero_stage belongs to deepspeed_config, but distributed_type is not set. Write distributed"),
    ({"distributed_type": "MULTI_GPU"}, {"zero_stage": 2, "gradient_clipping": 1.0}, "c: zero_stage, gradient_clipping belong "
     "to deepspeed_config, but distributed_type is MULTI_GPU."),
    (DEEPSPEED, {"fsdp_version": 2}, "c: fsdp_version belongs to fsdp_config, but distributed_type is DEEPSPEED. Write "
     "distributed_type: FSDP (--use_fsdp), or remove fsdp_version."),
    ({}, {"parallelism_config_tp_size": 2}, "c: parallelism_config_tp_size belongs to parallelism_config, but"),
    ({"distributed_type": "FSDP"}, {"zero_stage": 2}, "c: zero_stage belongs to deepspeed_config, but distributed_type is F"),
    ({"distributed_type": "FSDP"}, {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False},
     "c (distributed_type: FSDP, fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false): "),
    (DEEPSPEED, {"deepspeed_config_file": "ds.json", "zero_stage": 2}, "c: deepspeed_config_file and zero_stage both set "
     "the same options. Write them into ds.json, or remove deepspeed_config_file."),
    (DEEPSPEED, {"deepspeed_config_file": "ds.json"}, "c: deepspeed_config_file: the file 'ds.json' does not e"),
    ({**DEEPSPEED, "num_machines": 1}, {"deepspeed_hostfile": "h"}, "c: deepspeed_hostfile is for several machines, but num_m"),
])  # fmt: skip
def test_contradictions(values: dict[str, Any], deepspeed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_settings(Settings(values, deepspeed, {}, "c"))
    assert words in str(caught.value)


def test_a_mode_of_no_compiler() -> None:
    with pytest.raises(ConfigurationError, match="c: dynamo_mode: without dynamo_backend nothing is compiled"):
        check_settings(Settings({}, {}, {"dynamo_mode": "default"}, "c"))
