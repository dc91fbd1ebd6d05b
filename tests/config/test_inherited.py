"""The settings that the processes of `trainkit launch` inherit."""

from __future__ import annotations

import pytest

from trainkit.config.settings import VARIABLE, Settings, carry, debugging, read_process_settings, with_environment
from trainkit.console import TrainkitWarning

SETTINGS = Settings(
    {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 4,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "é",
        "main_process_port": 1,
        "gpu_ids": "0,1",
        "debug": True,
    },
    {"zero_stage": 3, "gradient_clipping": 0.1, "deepspeed_hostfile": "h", "deepspeed_multinode_launcher": "pdsh"},
    {"dynamo_backend": "eager"},
    "größe.yaml",
)


def test_settings_without_the_launchers_keys_are_inherited() -> None:
    sent = carry(SETTINGS)
    assert read_process_settings(sent) == Settings(
        {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"},
        {"zero_stage": 3, "gradient_clipping": 0.1},
        {"dynamo_backend": "eager"},
        "größe.yaml",
    )
    assert sent[VARIABLE].isascii()
    assert debugging(sent)


def test_a_process_that_drives_all_devices_knows_how_many() -> None:
    settings = Settings({"distributed_type": "XLA", "num_processes": 8, "num_machines": 2})
    assert read_process_settings(carry(settings)).devices == 4


def test_empty_settings() -> None:
    assert carry(Settings(source="x")) == {}
    assert carry(Settings({"num_processes": 2})) == {}
    assert read_process_settings({}) == Settings()
    assert not debugging({})


@pytest.mark.parametrize("name", ["TRAINKIT_DEBUG_MODE", "ACCELERATE_DEBUG_MODE"])
def test_debugging(name: str) -> None:
    assert all(debugging({name: value}) for value in ("1", "true", "yes", "YES"))
    assert not any(debugging({name: value}) for value in ("0", "false", "no", ""))


def test_the_precedence_of_debug_mode() -> None:
    """A flag takes precedence over environment variables, and these over a configuration file.

    TRAINKIT_DEBUG_MODE takes precedence over ACCELERATE_DEBUG_MODE.
    """
    both = {"TRAINKIT_DEBUG_MODE": "0", "ACCELERATE_DEBUG_MODE": "yes"}
    assert not debugging(both)
    for env, on in ((both, False), ({"ACCELERATE_DEBUG_MODE": "yes"}, True)):
        for said in (True, False):
            given = Settings({"debug": said})
            assert debugging(env | carry(with_environment(given, given, env))) is said
            assert debugging(env | carry(with_environment(given, Settings(), env))) is on
            assert debugging(carry(with_environment(given, Settings(), {}))) is said
        assert debugging(env | carry(with_environment(Settings(), Settings(), env))) is on


def test_accelerates_launcher_is_a_warning() -> None:
    quiet = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_DEEPSPEED": "false"}
    assert read_process_settings(quiet) == Settings()
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        with pytest.warns(TrainkitWarning, match=f"{name}, which trainkit ignores"):
            assert read_process_settings({name: "true"}) == Settings()
    with pytest.warns(
        TrainkitWarning, match="ACCELERATE_MIXED_PRECISION, which trainkit ignores. Start the script with: trainkit l"
    ):
        assert read_process_settings({"ACCELERATE_MIXED_PRECISION": "bf16"}) == Settings()
