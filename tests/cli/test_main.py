"""The command `trainkit`: subcommands, exit codes, and errors as one message."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.support import run_python

from trainkit._version import __version__
from trainkit.cli import main as command
from trainkit.cli.main import SUBCOMMANDS, _parser, _subparser, main
from trainkit.errors import ConfigurationError


@pytest.fixture
def subcommand(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Adds a subcommand `try` with an option `--number` that calls a function."""

    def add(run: Callable[[argparse.Namespace], int]) -> None:
        module: Any = types.ModuleType("tried")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=1)
        module.run = run
        monkeypatch.setitem(sys.modules, "tried", module)
        monkeypatch.setitem(command.SUBCOMMANDS, "try", ("tried", "try it"))

    return add


def options() -> dict[str, list[str]]:
    """Every subcommand with its options and positional arguments, sorted; "" is `trainkit` itself."""
    found: dict[str, list[str]] = {}

    def add(name: str, parser: argparse.ArgumentParser) -> None:
        found[name] = sorted(string for action in parser._actions for string in action.option_strings or [_metavar(action)])
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner, subparser in action.choices.items():
                    add(f"{name} {inner}", subparser)

    add("", _parser())
    for name in SUBCOMMANDS:
        add(name, _subparser(name))
    return found


def _metavar(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest


def test_options_are_frozen() -> None:
    """A new option is a decision: add it here and to the documentation."""
    found = options()
    subcommands = [f"checkpoint {name}" for name in ("ls", "show", "verify", "diff", "export", "import")]
    names = ["demo", "env", "estimate-memory", "launch", "merge-weights", "plan", "plot", "report", "test"]
    assert list(found) == ["", "checkpoint", *subcommands, "config", *names, "to-fsdp2", "tpu-config", "verify-resume"]
    assert found[""] == ["--help", "--version", "-h"]
    assert found["checkpoint ls"] == ["--help", "--json", "-h", "FOLDER"]
    assert found["checkpoint show"] == ["--help", "--json", "--state", "--tensors", "-h", "PATH"]
    assert found["checkpoint verify"] == ["--help", "-h", "PATH"]
    assert found["checkpoint diff"] == ["--all", "--help", "-h", "A", "B"]
    assert found["checkpoint export"] == [
        "--attribute", "--dtype", "--format", "--help", "--max-shard-size", "--overwrite", "-h", "OUT", "PATH",
    ]  # fmt: skip
    assert found["checkpoint import"] == ["--help", "--names", "--optimizer", "--prefix", "--scheduler", "-h", "NEW", "OLD"]
    planning = ["--device-memory", "--help", "--host-memory", "--per-host", "--processes", "--real", "-h", "ARGS", "SCRIPT"]
    assert found["plan"] == planning
    assert found["verify-resume"] == ["--help", "--more", "--steps", "-h", "SCRIPT"]
    assert found["env"] == ["--help", "-h"]
    assert found["demo"] == ["--help", "--max-steps", "--root", "--seed", "--small", "-h"]
    settings = [
        "--config_file", "--cpu", "--debug", "--deepspeed_config_file", "--deepspeed_hostfile",
        "--deepspeed_multinode_launcher", "--distributed_type", "--dynamo_backend", "--dynamo_mode", "--dynamo_use_dynamic",
        "--dynamo_use_fullgraph", "--dynamo_use_regional_compilation", "--no-dynamo_use_regional_compilation",
        "--fsdp_activation_checkpointing", "--fsdp_auto_wrap_policy", "--fsdp_backward_prefetch",
        "--fsdp_cpu_ram_efficient_loading", "--fsdp_forward_prefetch", "--fsdp_ignored_modules", "--fsdp_min_num_params",
        "--fsdp_offload_params", "--fsdp_reshard_after_forward", "--fsdp_sharding_strategy", "--fsdp_state_dict_type",
        "--fsdp_sync_module_states", "--fsdp_transformer_layer_cls_to_wrap", "--fsdp_use_orig_params", "--fsdp_version",
        "--parallelism_config_dp_replicate_size", "--parallelism_config_dp_shard_size", "--parallelism_config_tp_size",
        "--use_fsdp", "--gpu_ids", "--gradient_accumulation_steps", "--gradient_clipping", "--machine_rank",
        "--main_process_ip", "--main_process_port", "--main_training_function", "--mixed_precision", "--multi_gpu",
        "--no-debug",
        "--no-dynamo_use_dynamic", "--no-dynamo_use_fullgraph", "--no-use_cpu", "--num_machines", "--num_processes",
        "--num_cpu_threads_per_process", "--offload_optimizer_device", "--offload_optimizer_nvme_path",
        "--offload_param_device", "--offload_param_nvme_path", "--rdzv_backend", "--same_network", "--tpu",
        "--use_cpu", "--use_deepspeed", "--zero3_init_flag", "--zero3_save_16bit_model", "--zero_stage",
    ]  # fmt: skip
    assert found["config"] == sorted([*settings, "--help", "-h"])
    launching = [
        "--as", "--export", "--help", "--hostfile", "--master-addr", "--master-port", "--max-restarts", "--module", "--nnodes",
        "--node-rank", "--nproc-per-node", "--setup", "--ssh", "-h", "-m", "ARGS", "SCRIPT",
    ]  # fmt: skip
    assert found["launch"] == sorted([*settings, *launching])
    assert found["test"] == ["--backend", "--config_file", "--help", "--nproc-per-node", "--strategy", "-h"]
    assert found["estimate-memory"] == ["--dtypes", "--help", "--library_name", "--trust_remote_code", "-h", "MODEL"]
    assert found["merge-weights"] == [
        "--help", "--remove_checkpoint_dir", "--unsafe_serialization", "-h", "CHECKPOINT", "OUT",
    ]  # fmt: skip
    assert found["to-fsdp2"] == ["--config_file", "--help", "--output_file", "--overwrite", "-h"]
    assert found["tpu-config"] == [
        "--accelerate_version", "--command", "--command_file", "--config_file", "--debug", "--help", "--install_accelerate",
        "--tpu_name", "--tpu_zone", "--use_alpha", "-h",
    ]  # fmt: skip
    assert found["plot"] == ["--help", "--metrics", "--out", "--x", "-h", "RUN_DIR"]
    assert found["report"] == ["--help", "--metrics", "--out", "-h", "RUN_DIR"]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_equals_the_list_of_subcommands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help contains the description in the list of subcommands, with a capital first letter."""
    purpose = SUBCOMMANDS[name][1]
    assert main([name, "--help"]) == 0
    assert f"{purpose[0].upper()}{purpose[1:]}." in " ".join(capsys.readouterr().out.split())


HELPS = [[], *([name] for name in SUBCOMMANDS), *(["checkpoint", name] for name in ("ls", "show", "verify", "diff", "export"))]


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_where_the_output_has_no_unicode(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main([*arguments, "--help"]) == 0
    stdout.flush()
    text = stdout.buffer.getvalue().decode("ascii")
    assert text.startswith(f"usage: {' '.join(['trainkit', *arguments])}")
    assert "?" not in text
    assert stdout.errors == "strict"  # unchanged


def test_an_error_where_the_output_has_no_unicode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["demo", "--max-steps", "0"]) == 2
    stderr.flush()
    assert b"expected a number >= 1, got 0" in stderr.buffer.getvalue()


def test_a_process_whose_output_has_no_unicode() -> None:
    done = run_python("-m", "trainkit", "--help", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "<subcommand> ..." in done.stdout


def test_a_subcommand_gets_its_arguments_and_returns_the_exit_code(subcommand: Any) -> None:
    subcommand(lambda args: args.number)
    assert main(["try", "--number", "7"]) == 7
    assert main(["try"]) == 1


def test_arguments_come_from_the_command_line_of_the_process(subcommand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subcommand(lambda args: args.number)
    monkeypatch.setattr(sys, "argv", ["trainkit", "try", "--number", "5"])
    assert main() == 5


def test_an_error_of_trainkit_is_one_message(
    subcommand: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ConfigurationError("Expected a, got b. Fix: c")

    subcommand(fail)
    monkeypatch.delenv("TRAINKIT_TRACEBACK", raising=False)
    assert main(["try"]) == 2
    assert capsys.readouterr() == ("", "trainkit: Expected a, got b. Fix: c\n")
    monkeypatch.setenv("TRAINKIT_TRACEBACK", "1")
    assert main(["try"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.rstrip().endswith("ConfigurationError: Expected a, got b. Fix: c")


def test_other_errors_are_not_hidden(subcommand: Any) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    subcommand(fail)
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_ctrl_c(subcommand: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    subcommand(interrupt)
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "arguments, words", [
    (["plto", "x"], "trainkit: Unknown subcommand 'plto'. Did you mean 'plot'? Subcommands: checkpoint, config, demo, env"),
    (["zzz"], "trainkit: Unknown subcommand 'zzz'. Subcommands: checkpoint, config, demo, env, estimate-memory, launch, "),
    ([], "usage: trainkit [-h] [--version] <subcommand>"),
    (["--vers"], "unrecognized arguments: --vers"),
    (["plot"], "the following arguments are required: RUN_DIR"),
    (["plot", "x", "--metric", "a"], "unrecognized arguments: --metric a"),
    (["plot", "x", "--x", "time"], "invalid choice: 'time'"),
])  # fmt: skip
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "  plot             draw the metrics of runs to a PNG file" in shown
    for name in ("checkpoint", "demo", "estimate-memory", "verify-resume"):
        assert f"\n  {name} " in shown
    assert main(["plot", "--help"]) == 0
    assert "usage: trainkit plot [-h] [--out FILE]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [(["--help"], "subcommands:"), (["--version"], __version__), (["launch", "--help"], "usage: trainkit launch")],
)
def test_as_a_module_without_loading_torch(arguments: list[str], words: str, tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('trainkit', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'matplotlib', 'tensorboard', 'wandb'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


def test_python_m_trainkit_returns_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-m", "trainkit", "plot", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("trainkit: Expected the folder of a run, got 'nowhere', which does not exist.")
    assert done.stderr.count("\n") == 1
