"""`trainkit env`: the versions and settings for a bug report."""

from __future__ import annotations

import platform
import sys
import types
from collections.abc import Callable

import pytest
import torch
from helpers.support import run_python

from trainkit._version import __version__
from trainkit.cli import env
from trainkit.cli.main import main

Report = Callable[..., list[str]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Report:
    """`report(NAME="value", …)` runs the command with only these environment variables, and returns its lines."""

    def lines(**variables: str) -> list[str]:
        monkeypatch.setattr("os.environ", variables)
        assert main(["env"]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out.splitlines()

    return lines


def value(lines: list[str], name: str) -> str:
    return next(line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} "))


def test_versions_and_machine(report: Report) -> None:
    lines = report()
    assert value(lines, "trainkit") == __version__
    assert value(lines, "python").startswith(platform.python_version())
    assert value(lines, "torch").startswith(torch.__version__)
    for name in ("platform", "cpu", "memory", "cuda", "numpy", "safetensors"):
        assert value(lines, name)
    assert "gloo" in value(lines, "distributed")
    assert value(lines, "started by") == "no launcher: a single process"
    assert lines[-1] == "variables"


def test_the_launcher(report: Report) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    lines = report(TORCHELASTIC_RUN_ID="x", LOCAL_WORLD_SIZE="2", **torchrun)
    assert value(lines, "started by") == "torchrun: rank 1 of 2, 1 node (TORCHELASTIC_RUN_ID is set)"
    assert lines[-7:] == [
        "  LOCAL_RANK='1'",
        "  LOCAL_WORLD_SIZE='2'",
        "  MASTER_ADDR='127.0.0.1'",
        "  MASTER_PORT='29500'",
        "  RANK='1'",
        "  TORCHELASTIC_RUN_ID='x'",
        "  WORLD_SIZE='2'",
    ]
    assert value(report(RANK="1"), "started by").startswith("contradictory variables: RANK=1 is set, but WORLD_SIZE is not")


def test_no_secret_is_shown(report: Report) -> None:
    secret = "hunter2"
    lines = report(
        WANDB_API_KEY=secret,
        WANDB_MODE=secret,
        TRAINKIT_TOKEN=secret,
        PET_PASSWORD=secret,
        TORCH_AUTH=secret,
        SLURM_JOB_USER=secret,
        KUBERNETES_SERVICE_HOST=secret,
        AWS_SECRET_ACCESS_KEY=secret,
        HF_TOKEN=secret,
        HOME=secret,
        NCCL_DEBUG="INFO",
    )
    assert not [line for line in lines if secret in line]
    after = lines[lines.index("variables") + 1 :]
    assert after == [
        "  KUBERNETES_SERVICE_HOST is set",
        "  NCCL_DEBUG='INFO'",
        "  PET_PASSWORD is set",
        "  SLURM_JOB_USER is set",
        "  TORCH_AUTH is set",
        "  TRAINKIT_TOKEN is set",
        "  WANDB_API_KEY is set",
        "  WANDB_MODE is set",
    ]


def test_a_value_that_is_shown_has_no_secret_in_it(report: Report) -> None:
    lines = report(
        TRAINKIT_STAGING="s3://me:hush@bucket", NCCL_DEBUG_FILE="x?token=hush", TORCH_X='{"api_key": "hush", "a": 1}'
    )
    assert [line for line in lines if "***" in line] == [
        "  NCCL_DEBUG_FILE='x?token=***'",
        """  TORCH_X='{"api_key": "***", "a": 1}'""",
        "  TRAINKIT_STAGING='s3://***@bucket'",
    ]
    assert "hush" not in "".join(lines)


def test_a_size_of_no_launcher_is_not_shown(report: Report) -> None:
    assert report(SIZE="12", NODE_SIZE="3")[-1] == "variables"


def test_gpus(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    about = types.SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    lines = report()
    assert value(lines, "gpu 1") == "NVIDIA H200, 139.0 GiB, 9.0"


def test_a_torch_that_is_broken(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot be imported: ModuleNotFoundError" in value(report(), "torch")


def test_a_torch_without_distributed(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert value(report(), "distributed") == "not in this build of torch"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise env.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(env.importlib.metadata, "version", version)
    assert env._version("numpy") == "not installed"
    assert env._version("deepspeed") is None


def test_as_a_program() -> None:
    done = run_python("-m", "trainkit", "env")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trainkit")
