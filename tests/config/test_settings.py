"""`Settings`: which settings take precedence, and what they mean."""

from __future__ import annotations

import pytest

from trainkit.config.settings import Settings
from trainkit.errors import ConfigurationError

FILE = Settings(
    {"distributed_type": "DEEPSPEED", "num_processes": 2, "machine_rank": 1, "num_machines": 2},
    {"zero_stage": 3, "gradient_clipping": 1.0},
    {"dynamo_backend": "inductor"},
    "conf.yaml",
)


def test_the_upper_settings_count() -> None:
    """In `a.over(b)`, the settings of `a` take precedence."""
    flags = Settings({"num_processes": 4}, {"zero_stage": 2}, {"dynamo_mode": "default"}, "the command line")
    both = flags.over(FILE)
    assert both == Settings(
        {"distributed_type": "DEEPSPEED", "num_processes": 4, "machine_rank": 1, "num_machines": 2},
        {"zero_stage": 2, "gradient_clipping": 1.0},
        {"dynamo_backend": "inductor", "dynamo_mode": "default"},
        "the command line and conf.yaml",
    )
    assert Settings(source="the command line").over(FILE) == FILE
    assert flags.over(Settings()) == flags


def test_another_distributed_type_removes_deepspeed() -> None:
    assert Settings({"distributed_type": "MULTI_CPU"}).over(FILE).backend == {}
    assert Settings({"distributed_type": "DEEPSPEED"}).over(FILE).backend == FILE.backend


def test_one_machine_has_no_number() -> None:
    assert "machine_rank" not in Settings({"num_machines": 1}).over(FILE).values
    assert Settings({"num_machines": 3}).over(FILE).get("machine_rank") == 1


def test_a_key_is_found_wherever_it_is() -> None:
    assert [FILE.get(name) for name in ("num_processes", "zero_stage", "dynamo_backend", "debug")] == [2, 3, "inductor", None]
    assert FILE.get("debug", False) is False
    assert FILE
    assert not Settings(source="conf.yaml")


@pytest.mark.parametrize("kind, strategy", [("NO", "single"), ("MULTI_CPU", "ddp"), ("MULTI_GPU", "ddp"), ("XLA", "xla")])
def test_strategies(kind: str, strategy: str) -> None:
    settings = Settings({"distributed_type": kind})
    assert (settings.strategy, settings.plugin()) == (strategy, None)


def test_values_that_are_not_set() -> None:
    assert (Settings().strategy, Settings().plugin(), Settings().devices) == (None, None, None)
    assert FILE.strategy is None


def test_devices_of_one_process() -> None:
    assert Settings({"distributed_type": "XLA", "num_processes": 8, "num_machines": 2}).devices == 4
    assert Settings({"distributed_type": "XLA"}).devices is None
    assert Settings({"distributed_type": "MULTI_GPU", "num_processes": 8}).devices is None


def test_all_options_of_zero() -> None:
    settings = Settings(
        {"distributed_type": "DEEPSPEED", "gradient_accumulation_steps": 4},
        {
            "zero_stage": 3,
            "offload_optimizer_device": "nvme",
            "offload_optimizer_nvme_path": "/disk",
            "offload_param_device": "cpu",
            "gradient_clipping": 0.5,
            "zero3_save_16bit_model": True,
            "zero3_init_flag": True,
            "deepspeed_multinode_launcher": "standard",
        },
    )
    plugin = settings.plugin()
    assert plugin is not None
    assert plugin.zero3_init_flag is True
    assert plugin.deepspeed_config == {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def test_only_the_given_options_of_zero() -> None:
    plugin = Settings(
        {"distributed_type": "DEEPSPEED", "gradient_accumulation_steps": "auto"}, {"gradient_clipping": "auto"}
    ).plugin()
    assert plugin is not None
    assert plugin.deepspeed_config == {"zero_optimization": {"stage": 2}}


FSDP = Settings(
    {"distributed_type": "FSDP", "gradient_accumulation_steps": 4},
    {"fsdp_reshard_after_forward": False, "fsdp_offload_params": True, "parallelism_config_dp_replicate_size": 2},
    {},
    "conf.yaml",
)


def test_all_sections_of_fsdp() -> None:
    plugin = FSDP.plugin()
    assert plugin is not None
    assert plugin.strategy == "fsdp"
    expected = {"reshard_after_forward": False, "offload_params": "cpu", "replicas": 2}
    assert plugin.options_for(False, 4, 1, ()) == expected
    assert plugin.loop_option("gradient_accumulation_steps") is None, "it is not of its section"
    assert plugin.describe() == {
        "strategy": "fsdp",
        "reshard_after_forward": False,
        "cpu_offload": True,
        "dp_replicate_size": 2,
    }


def test_another_distributed_type_removes_the_keys_of_other_sections() -> None:
    assert Settings({"distributed_type": "FSDP"}).over(FILE).backend == {}
    assert Settings({"distributed_type": "DEEPSPEED"}, {"zero_stage": 1}).over(FSDP).backend == {"zero_stage": 1}
    assert Settings({"distributed_type": "FSDP"}, {"fsdp_version": 2}).over(FSDP).backend == {**FSDP.backend, "fsdp_version": 2}


def test_a_key_in_two_places() -> None:
    one = Settings.out_of({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}, {}, "conf.yaml")
    assert (one.values, one.backend) == ({"gradient_accumulation_steps": 2}, {})
    with pytest.raises(ConfigurationError, match="conf.yaml sets gradient_accumulation_steps twice, to 2 and to 3"):
        Settings.out_of({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}, {}, "conf.yaml")
