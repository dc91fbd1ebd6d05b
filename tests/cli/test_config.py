"""`trainkit config`: writes a file from flags or from the answers to its questions, also on a real terminal."""

from __future__ import annotations

import builtins
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainkit.cli.main import main
from trainkit.config.settings_file import read_settings
from trainkit.launch import environment

Said = Callable[..., list[str]]


def content(path: str = "conf.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(path).read_text())
    return found


# ------------------------------------------------------------------------------------------------------------------- flags


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--use_deepspeed",
        "--zero-stage",
        "3",
        "--zero3_init_flag",
        "true",
        "--gradient_clipping",
        "1",
        "--num_processes=2",
    ]
    assert main(["config", "--config_file", "conf.yaml", *flags, "--dynamo_backend", "NO"]) == 0
    assert content() == {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {"gradient_clipping": 1.0, "zero3_init_flag": True, "zero_stage": 3},
        "distributed_type": "DEEPSPEED",
        "dynamo_config": {"dynamo_backend": "no"},
        "num_processes": 2,
    }
    assert capsys.readouterr().out == "Wrote conf.yaml\nUse it with: trainkit launch --config_file conf.yaml script.py\n"


def test_an_existing_file_is_replaced_with_a_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINKIT_CONFIG_FILE", "cache/default.yaml")
    assert main(["config", "--cpu"]) == 0
    assert capsys.readouterr().out == "Wrote cache/default.yaml\nUse it with: trainkit launch script.py\n"
    assert main(["config", "--mixed_precision", "bf16"]) == 0
    assert "Replaced cache/default.yaml\n" in capsys.readouterr().out
    assert content("cache/default.yaml") == {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16"}


@pytest.mark.parametrize("flags, words", [
    (["--num_processes", "3", "--num_machines", "2"], "the command line: num_processes: 3 is the total of all machines"),
    (["--zero_stage", "9"], "--zero_stage must be a whole number from 1 to 3, not '9'."),
    (["--zero_stage", "2"], "zero_stage belongs to deepspeed_config, but distributed_type is not set."),
    (["--mixed", "bf16"], "unrecognized arguments: --mixed"),
    (["--zero_stege", "2"], "unrecognized arguments: --zero_stege 2. Did you mean '--zero_stage'?\n"),
    ([], "Questions need a terminal, and this command does not run in one. Pass flags: trainkit config --num_processes 2"),
])  # fmt: skip
def test_refused_flags_keep_the_file(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf.yaml").write_text("num_processes: 1\n")
    assert main(["config", "--config_file", "conf.yaml", *flags]) == 2
    assert words in capsys.readouterr().err
    assert content() == {"num_processes": 1}


# ----------------------------------------------------------------------------------------------------------------- answers


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Said:
    """`say("cpu", "", …)` runs the command with these answers, and returns its exit code and the questions asked."""

    def answered(*answers: str | type[BaseException], gpus: int = 0) -> list[str]:
        asked: list[str] = []
        left = list(answers)

        def stand_in(question: str) -> str:
            asked.append(question)
            answer = left.pop(0)
            if not isinstance(answer, str):
                raise answer
            return answer

        monkeypatch.setattr(builtins, "input", stand_in)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        code = main(["config", "--config_file", "conf.yaml"])
        assert not left, asked
        return [str(code), *asked]

    return answered


def test_default_answers(say: Said) -> None:
    assert say(*[""] * 6) == [
        "0",
        "Run on cpu, gpu or tpu [cpu]: ",
        "Number of nodes [1]: ",
        "Processes on all nodes together [1]: ",
        "Shard the model: no, fsdp, stage 1, 2 or 3 of DeepSpeed's ZeRO, or the path of a DeepSpeed configuration [no]: ",
        "Precision: no (float32), fp16, bf16 or fp8 [no]: ",
        "Compile the model: no, or a backend of torch.compile such as inductor [no]: ",
    ]
    assert content() == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": True,
    }


def test_gpus_of_this_node(say: Said) -> None:
    asked = say("", "", "", "0,1,2,3", "", "bf16", "inductor", gpus=4)
    assert asked[1] == "Run on cpu, gpu or tpu [gpu]: "
    assert asked[3:5] == ["Processes on all nodes together [4]: ", "GPUs to use, such as 0,1, or all [all]: "]
    assert content() == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "dynamo_config": {"dynamo_backend": "inductor"},
        "gpu_ids": "0,1,2,3",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 4,
        "use_cpu": False,
    }


def test_wrong_answers_are_asked_again(say: Said, capsys: pytest.CaptureFixture[str]) -> None:
    wrong_place = ["cpus", "gpu"]
    machines = ["x", "2", "2", "1", "", "node1", "0", "29501"]
    zero = ["3", "4"]
    offload = ["nvme", "cpu"]
    last = ["0", "4", "x", "", "fp9", "fp16"]
    say(*wrong_place, *machines, *zero, "5", "nowhere.json", "2", *offload, *last, gpus=2)
    told = capsys.readouterr().out
    for words in (
        "  expected cpu, gpu or tpu, not 'cpus'.\n",
        "  num_machines must be a whole number ≥ 1, not 'x'.\n",
        "  machine_rank cannot be 2: the ranks are 0 to 1.\n",
        "  main_process_ip must be text, not ''.\n",
        "  main_process_port cannot be 0: all nodes need the port.\n",
        "  num_processes cannot be 3: it must be divisible by the number of nodes, 2.\n",
        "  the stage must be a whole number from 1 to 3, not '5'.\n",
        "  expected no, fsdp, 1, 2, 3 or the path of a file, but there is no file 'nowhere.json'.\n",
        "  expected none or cpu, not 'nvme'.\n",
        "  gradient_accumulation_steps must be a whole number ≥ 1, or auto, not '0'.\n",
        "  gradient_clipping must be a number ≥ 0, or auto, not 'x'.\n",
        "  mixed_precision must be one of no, fp16, bf16, fp8, not 'fp9'.",
    ):
        assert words in told


def test_zero(say: Said) -> None:
    asked = say("", "", "2", "3", "nvme", "/disk", "cpu", "4", "1.0", "", "yes", "")
    assert asked[10:12] == [
        "Shard a transformers model while it is created (yes or no) [yes]: ",
        "Let save_model write 16-bit parameters (yes or no) [no]: ",
    ]
    assert content() == {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "nvme",
            "offload_optimizer_nvme_path": "/disk",
            "offload_param_device": "cpu",
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            "zero_stage": 3,
        },
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
    }
    assert read_settings("conf.yaml").plugin() is not None


def test_fsdp(say: Said) -> None:
    asked = say("", "", "2", "FSDP", "yes", "", "bf16", "inductor")
    assert asked[5:7] == [
        "Keep parameters and optimizer state in host memory (yes or no) [no]: ",
        "Recompute activations in the backward (yes or no) [no]: ",
    ]
    assert content() == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "dynamo_config": {"dynamo_backend": "inductor"},
        "fsdp_config": {"fsdp_activation_checkpointing": False, "fsdp_offload_params": True},
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
    }


def test_fsdp_by_flags() -> None:
    flags = ["--use_fsdp", "--fsdp-offload-params", "true", "--fsdp_version=2", "--parallelism_config_tp_size", "2"]
    assert main(["config", "--config_file", "conf.yaml", *flags]) == 0
    assert content() == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_offload_params": True, "fsdp_version": 2},
        "parallelism_config": {"parallelism_config_tp_size": 2},
    }
    assert read_settings("conf.yaml").plugin() is not None


def test_a_deepspeed_configuration(say: Said) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    say("", "", "2", "ds.json")
    assert content()["deepspeed_config"] == {"deepspeed_config_file": "ds.json"}
    assert "mixed_precision" not in content()


def test_a_tpu(say: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "tpu_is_chosen", lambda: True)
    assert say("", "", "bf16")[1] == "Run on cpu, gpu or tpu [tpu]: "
    assert (content()["distributed_type"], content()["mixed_precision"]) == ("XLA", "bf16")


@pytest.mark.parametrize("end, code, words", [
    (EOFError, "2", "trainkit: The input ended before the last answer, so nothing was written. Run trainkit config again.\n"),
    (KeyboardInterrupt, "130", "interrupted\n"),
])  # fmt: skip
def test_an_end_before_the_last_answer_writes_nothing(
    say: Said, end: type[BaseException], code: str, words: str, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    Path("conf.yaml").write_text("num_processes: 1\n")
    assert say("", "", end)[0] == code
    shown = capsys.readouterr()
    assert shown.out.startswith("conf.yaml exists and will be replaced after the last answer. Press Ctrl-C to keep it.\n")
    assert shown.err == words
    assert content() == {"num_processes": 1}
    assert [path.name for path in run_dir.iterdir()] == ["conf.yaml"]


# ------------------------------------------------------------------------------------------------------- a real terminal


class Terminal:
    """A process of `trainkit config` on its own pseudo-terminal."""

    def __init__(self) -> None:
        import fcntl
        import pty
        import termios

        self._ours, theirs = pty.openpty()
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainkit", "config", "--config_file", "conf.yaml"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PJRT_DEVICE": "CPU"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(theirs)

    def until(self, words: bytes) -> None:
        """Read until the terminal shows these words."""
        while words not in self.shown:
            part = os.read(self._ours, 1000)
            assert part, self.shown
            self.shown += part

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Read until the process ends; returns its exit code."""
        with contextlib.suppress(OSError):  # Linux raises this when the other end is closed
            while part := os.read(self._ours, 1000):
                self.shown += part
        os.close(self._ours)
        return self.process.wait()


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_a_terminal() -> None:
    terminal = Terminal()
    terminal.until(b"Run on cpu, gpu or tpu [")
    terminal.type("cpu\n\n4 \nno\nbf61\n")
    terminal.until(b"Did you mean 'bf16'?")
    terminal.type("bf16\n\n")
    assert terminal.end() == 0, terminal.shown
    assert terminal.shown.endswith(b"Use it with: trainkit launch --config_file conf.yaml script.py\r\n")
    expected = {"distributed_type": "MULTI_CPU", "mixed_precision": "bf16", "num_processes": 4, "use_cpu": True}
    assert expected.items() <= content().items()


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_ctrl_c_on_a_terminal(run_dir: Path) -> None:
    terminal = Terminal()
    terminal.until(b"Run on cpu, gpu or tpu [")
    terminal.type("cpu\n\x03\n")  # newline: Python handles a signal that arrives just before a read only after it
    assert terminal.end() == 130, terminal.shown
    assert terminal.shown.endswith(b"interrupted\r\n")
    assert list(run_dir.iterdir()) == []
