"""`trainkit to-fsdp2`: configuration files of Accelerate for FSDP1, and what Accelerate makes of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cli.main import main
from trainkit.config.settings_file import read_settings

OLD = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_processes": 4,
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_use_orig_params": True,
    },
}


def convert(tmp_path: Path, section: dict[str, Any], *options: str) -> Any:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(yaml.safe_dump({**OLD, "fsdp_config": section}))
    assert main(["to-fsdp2", "--config_file", str(old), "--output_file", str(new), *options]) == 0
    return yaml.safe_load(new.read_text())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_the_file_is_that_of_accelerate(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = pytest.importorskip("accelerate.commands.to_fsdp2")
    section: dict[str, Any] = {**OLD["fsdp_config"], "fsdp_sharding_strategy": strategy}  # type: ignore[dict-item]
    converted = convert(tmp_path, section)
    assert converted == theirs.convert_config_to_fsdp2(copy.deepcopy({**OLD, "fsdp_config": section}))
    shown = capsys.readouterr().out
    assert "without fsdp_backward_prefetch: FSDP2 does not have it\n" in shown
    assert ("parallelism_config_dp_replicate_size" in shown) == strategy.startswith("HYBRID")
    read_settings(tmp_path / "new.yaml")


def test_other_spellings(tmp_path: Path) -> None:
    """Keys without `fsdp_`, and strategies by number, which Accelerate leaves as they are."""
    converted = convert(tmp_path, {"sharding_strategy": 2, "offload_params": True})
    assert converted["fsdp_config"] == {"fsdp_offload_params": True, "fsdp_reshard_after_forward": False, "fsdp_version": 2}
    converted = convert(tmp_path, {"fsdp_reshard_after_forward": "FULL_SHARD"}, "--overwrite")
    assert converted["fsdp_config"] == {"fsdp_reshard_after_forward": True, "fsdp_version": 2}


@pytest.mark.parametrize(
    "section, words", [({}, "no fsdp_config"), ({"fsdp_version": 2, "fsdp_use_orig_params": True}, "FSDP2")]
)
def test_nothing_to_convert(section: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(tmp_path, section) == {**OLD, "fsdp_config": section}
    assert f"{words}, so nothing was changed" in capsys.readouterr().out


def test_files_are_replaced_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "file.yaml", tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump(OLD))
    other.write_text("")
    command = ["to-fsdp2", "--config_file", str(file)]
    for arguments in (command, [*command, "--output_file", str(other)]):
        assert main(arguments) == 2
        assert "exists. Fix: --output_file NEW.yaml, or --overwrite" in capsys.readouterr().err
    assert yaml.safe_load(file.read_text()) == OLD
    assert other.read_text() == ""
    assert main([*command, "--overwrite"]) == 0
    assert yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_version"] == 2


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-fsdp2", "--config_file", str(tmp_path / "fsdp.yaml")]) == 2
    told = capsys.readouterr().err
    assert "fsdp.yaml" in told
    assert "exists. Fix" not in told


def test_what_is_not_sharded_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accelerate's command makes a file of it that shards."""
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}))
    assert main(["to-fsdp2", "--config_file", str(file), "--overwrite"]) == 2
    assert "NO_SHARD is not supported; for DDP, write distributed_type: MULTI_GPU" in capsys.readouterr().err
