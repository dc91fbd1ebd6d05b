"""Writing configuration files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from trainkit.config.settings import Settings
from trainkit.config.settings_file import read_settings, write_settings
from trainkit.errors import ConfigurationError
from trainkit.utils import write_basic_config

SETTINGS = Settings(
    {"distributed_type": "DEEPSPEED", "num_processes": 2, "gradient_accumulation_steps": 4, "main_process_ip": "knöten"},
    {"zero_stage": 3, "zero3_init_flag": True},
    {"dynamo_backend": "inductor"},
)


@pytest.mark.parametrize("name", ["conf.yaml", "new/folder/conf.json"])
def test_written_files_can_be_read(name: str) -> None:
    assert write_settings(SETTINGS, name) == Path(name)
    found = read_settings(name)
    assert (found.values, found.backend, found.dynamo) == (SETTINGS.values, SETTINGS.backend, SETTINGS.dynamo)


def test_the_format_is_accelerates() -> None:
    write_settings(SETTINGS, "conf.yaml")
    assert Path("conf.yaml").read_text("utf-8") == (
        "compute_environment: LOCAL_MACHINE\n"
        "deepspeed_config:\n"
        "  gradient_accumulation_steps: 4\n"
        "  zero3_init_flag: true\n"
        "  zero_stage: 3\n"
        "distributed_type: DEEPSPEED\n"
        "dynamo_config:\n"
        "  dynamo_backend: inductor\n"
        "main_process_ip: knöten\n"
        "num_processes: 2\n"
    )


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    Path("file").write_text("kept")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_settings(SETTINGS, "file/conf.yaml")
    for name in ("conf.yaml", os.devnull):
        Path("conf.yaml").mkdir(exist_ok=True)
        with pytest.raises(ConfigurationError, match=f"{name} exists and is not a file. Choose another path."):
            write_settings(SETTINGS, name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "conf.yaml"}
    assert not Path(os.devnull).is_file()


def test_a_symbolic_link_is_kept() -> None:
    Path("link.yaml").symlink_to("real.yaml")
    Path("real.yaml").write_text("")
    assert write_settings(SETTINGS, "link.yaml") == Path("link.yaml")
    assert Path("link.yaml").is_symlink()
    assert read_settings("real.yaml").values == SETTINGS.values


def test_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`write_basic_config` writes settings for the devices of this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, expected in ((1, ("NO", 1, False)), (4, ("MULTI_GPU", 4, False))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        found = read_settings(write_basic_config("bf16", f"{count}.yaml"))
        assert (found.get("distributed_type"), found.get("num_processes"), found.get("use_cpu")) == expected
        assert found.get("mixed_precision") == "bf16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert read_settings(write_basic_config(save_location="cpu.yaml")).values == {
        "distributed_type": "NO",
        "mixed_precision": "no",
        "num_processes": 1,
        "use_cpu": True,
    }
    monkeypatch.setattr("trainkit.compat.accelerate_names.this_machine.tpu_is_chosen", lambda: True)
    assert read_settings(write_basic_config(save_location="tpu.yaml")).get("distributed_type") == "XLA"


def test_one_that_is_there_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`write_basic_config` does not change a file that exists."""
    monkeypatch.setenv("TRAINKIT_CONFIG_FILE", "default.yaml")
    assert write_basic_config() == Path("default.yaml")
    before = Path("default.yaml").read_text()
    assert write_basic_config("fp16") is False
    assert Path("default.yaml").read_text() == before
    assert "default.yaml exists and was not changed." in caplog.text


def test_a_precision_that_is_none() -> None:
    """An unknown or unsupported precision is an error, and no file is written."""
    with pytest.raises(ConfigurationError, match="mixed_precision must be one of no, fp16, bf16, fp8, not 'half'"):
        write_basic_config("half", "conf.yaml")
    with pytest.raises(ConfigurationError, match="must be one of no, fp16, bf16, fp8, not 'fp9'"):
        write_basic_config("fp9", "conf.yaml")
    assert not Path("conf.yaml").exists()


def test_json_is_json() -> None:
    write_settings(Settings({"num_processes": 2}), "conf.json")
    assert json.loads(Path("conf.json").read_text()) == {"compute_environment": "LOCAL_MACHINE", "num_processes": 2}
