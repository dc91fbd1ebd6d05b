"""`trainkit launch`: the job that results from arguments, files and the environment; errors; and real runs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.docs.pages import blocks
from helpers.launch.agents import wait_until
from helpers.launch.configurations import MULTI_CPU, MULTI_GPU, ONE_CPU, TWO_MACHINES, ZERO2
from helpers.support import ROOT, run_python

from trainkit.cli.main import main
from trainkit.config.settings import VARIABLE, Settings, carry, debugging, read_process_settings
from trainkit.launch import agent, remote
from trainkit.launch.agent import Job
from trainkit.launch.environment import read_ranks
from trainkit.names import doors

Launch = Callable[..., Job]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """`launch("script.py", NAME="value")` returns the job for these arguments, with only these environment variables."""
    jobs: list[Job] = []
    monkeypatch.setattr(agent, "run_job", lambda job: jobs.append(job) or 7)  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("trainkit.config.settings_file.default_file", lambda: tmp_path / "default.yaml")
    (tmp_path / "script.py").touch()

    def run(*arguments: str, **variables: str) -> Job:
        monkeypatch.setattr(os, "environ", dict(variables))
        assert main(["launch", *arguments]) == 7
        return jobs.pop()

    return run


def test_defaults(launch: Launch) -> None:
    job = launch("script.py")
    assert job.command[0] == sys.executable
    assert job.command[-1] == "script.py"
    assert (job.per_node, job.least, job.most, job.max_restarts, job.launcher) == (1, 1, 1, 0, "trainkit launch")
    assert (job.node_rank, job.master_addr, job.master_port, job.grace, job.join_timeout) == (None, None, None, 30.0, 600.0)


def test_arguments_of_the_script_are_its_own(launch: Launch) -> None:
    job = launch("--nproc-per-node", "3", "script.py", "--max-restarts", "9", "-m", "--help", "--", "-x")
    assert job.command[-6:] == ("--max-restarts", "9", "-m", "--help", "--", "-x")
    assert (job.per_node, job.max_restarts) == (3, 0)


def test_the_doors_of_several_frameworks(launch: Launch) -> None:
    assert launch("--as", "lightning", "--as", "accelerate", "script.py").environment[doors.VARIABLE] == "accelerate,lightning"
    assert launch("--as", "accelerate", "script.py", TRAINKIT_AS="lightning").environment[doors.VARIABLE] == (
        "accelerate,lightning"
    )
    assert doors.VARIABLE not in launch("script.py").environment


def test_a_module(launch: Launch) -> None:
    assert launch("-m", "package.module", "x").command[-3:] == ("-m", "package.module", "x")


def test_output_is_not_held_back(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gets -u, so that a killed process loses no output. On a terminal, output is buffered by line instead."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert "-u" in launch("script.py").command
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "-u" not in launch("script.py").command


@pytest.mark.parametrize("text, gpus, expected", [("4", 0, 4), ("auto", 0, 1), ("auto", 8, 8), ("gpu", 2, 2)])
def test_processes_per_node(launch: Launch, text: str, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert launch("--nproc-per-node", text, "script.py").per_node == expected
    if text == "auto":
        assert launch("script.py").per_node == expected


def test_several_nodes(launch: Launch) -> None:
    job = launch(
        "--nnodes", "1:4", "--node-rank", "3", "--master-addr", "a", "--master-port", "5", "--max-restarts", "2", "script.py"
    )
    assert (job.least, job.most, job.node_rank, job.master_addr, job.master_port, job.max_restarts) == (1, 4, 3, "a", 5, 2)


def test_missing_arguments_come_from_the_environment(launch: Launch) -> None:
    pod = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "m",
        "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": "4",
    }
    job = launch("script.py", **pod, PET_MAX_RESTARTS="3", TRAINKIT_GRACE="90", TRAINKIT_JOIN_TIMEOUT="5")
    assert (job.per_node, job.most, job.node_rank, job.master_addr, job.master_port, job.max_restarts) == (
        4,
        2,
        1,
        "m",
        23456,
        3,
    )
    assert (job.grace, job.join_timeout) == (90.0, 5.0)
    job = launch("--nproc-per-node", "2", "--node-rank", "0", "--master-port", "7", "--max-restarts", "0", "script.py", **pod)
    assert (job.per_node, job.most, job.node_rank, job.master_addr, job.master_port, job.max_restarts) == (2, 2, 0, "m", 7, 0)
    alone = launch("--nnodes", "1", "--nproc-per-node", "2", "script.py", **pod)
    assert (alone.per_node, alone.most, alone.node_rank, alone.master_addr, alone.master_port) == (2, 1, None, None, None)


def test_workers_get_unchanged_variables(launch: Launch) -> None:
    assert launch("script.py", A="1").environment == {"A": "1"}
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"  # set for the agent only


def test_flags_of_accelerate_without_an_effect(launch: Launch) -> None:
    flags = ("--rdzv_backend", "c10d", "--same_network", "--main_training_function", "main")
    assert launch(*flags, "script.py", A="1") == launch("script.py", A="1")
    assert launch("--rdzv-backend", "static", "--same-network", "script.py", A="1") == launch("script.py", A="1")


def test_threads_of_a_process(launch: Launch) -> None:
    """The flag, and the key of a file, which the flag overrides."""
    assert launch("--num_cpu_threads_per_process", "3", "script.py").environment == {"OMP_NUM_THREADS": "3"}
    Path("conf.yaml").write_text("num_cpu_threads_per_process: 4")
    given = launch("--config_file", "conf.yaml", "script.py", OMP_NUM_THREADS="1")
    assert given.environment["OMP_NUM_THREADS"] == "4"
    given = launch("--config_file", "conf.yaml", "--num_cpu_threads_per_process", "2", "script.py")
    assert given.environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("arguments, words", [
    (["--nproc-node", "2", "script.py"], "unrecognized arguments: --nproc-node. Did you mean '--nproc-per-node'? Write"),
    (["--nproc_node=2", "script.py"], "Did you mean '--nproc_per_node'? Write options of the script after SCRIPT."),
    (["--node_ranks", "0", "script.py"], "Did you mean '--node_rank'?"),
    (["--num_procesess", "2", "script.py"], "Did you mean '--num_processes'?"),
    (["--use_megatron_lm", "script.py"], "--use_megatron_lm: write --use_fsdp, or --use_deepspeed --zero_stage 3."),
    (["--use_parallelism_config", "script.py"], "remove it: --parallelism_config_tp_size and the other sizes are used wit"),
    (["--parallelism_config_cp_size", "2", "script.py"], "context and sequence parallelism are not implemented; remove it"),
    (["--parallelism-config-cp-backend", "torch", "script.py"], "--parallelism-config-cp-backend: remove it."),
    (["--use_fsdp", "--use_deepspeed", "script.py"], "--use_deepspeed and --use_fsdp contradict each other."),
    (["--fsdp_offload_params", "true", "script.py"], "fsdp_offload_params belongs to fsdp_config, but distributed_type is not"),
    (["--num_cpu_threads_per_process=0", "script.py"], "--num_cpu_threads_per_process must be a whole number ≥ 1, not '0'."),
    (["--rdzv_backend", "etcd", "script.py"], "--rdzv_backend: 'etcd' is not supported; write static or c10d"),
    (["--standalone", "script.py"], "unrecognized arguments: --standalone. Write options of the script"),
    ([], "the following arguments are required: SCRIPT\n"),
    (["--nproc-per-node", "two", "script.py"], "--nproc-per-node must be an integer ≥ 1, 'gpu' or 'auto', not"),
    (["--nproc-per-node", "0", "script.py"], "--nproc-per-node must be an integer ≥ 1"),
    (["--nproc-per-node", "gpu", "script.py"], "--nproc-per-node gpu: torch finds no GPU. Pass a number"),
    (["--max-restarts", "-1", "script.py"], "--max-restarts must be an integer ≥ 0, not '-1'."),
    (["--max-restarts", "x", "script.py"], "--max-restarts must be an integer ≥ 0, not 'x'."),
    (["--master-port", "0", "script.py"], "--master-port must be an integer from 1 to 65535, not 0."),
    (["--nnodes", "x", "script.py"], "--nnodes must be a number of nodes, or a range such as 2:4"),
    (["--nnodes", "2", "script.py"], "2 nodes need the address of the node with rank 0. Pass it on all nodes"),
    (["--nnodes", "2", "--master-addr", "a", "--node-rank", "2", "script.py"], "--node-rank 2, but the ranks of 2 nodes are "),
    (["--node-rank", "1", "script.py"],
     "--node-rank 1 needs several nodes, but there is one. Set the number of nodes: --nnodes N"),
    (["scirpt.py"], "there is no file 'scirpt.py'. Did you mean 'script.py'?"),
    (["ipc.py"], "there is no file 'ipc.py'.\n"),
    (["package.module"], "there is no file 'package.module'. For a module: trainkit launch -m package.module"),
])  # fmt: skip
def test_invalid_arguments(launch: Launch, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""


def test_a_contradicting_environment_is_refused(
    launch: Launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "many")
    assert main(["launch", "script.py"]) == 2
    assert "PET_NNODES must be a number of nodes" in capsys.readouterr().err


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_PROCID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
}  # fmt: skip
POD = {"PET_NNODES": "2", "PET_NODE_RANK": "7", "PET_MASTER_ADDR": "m"}


@pytest.mark.parametrize("arguments, variables, words", [
    (["--nnodes", "2"], STEP, "--nnodes 2, but according to SLURM this is one of 3 nodes. Remove --nnodes"),
    (["--nnodes", "4:5"], STEP, "--nnodes 4:5, but according to SLURM this is one of 3 nodes"),
    (["--nnodes", "3"], POD, "--nnodes 3, but according to Kubernetes this is one of 2 nodes"),
    ([], POD, "the node rank from Kubernetes is 7, but the ranks of 2 nodes are 0 to 1."),
])  # fmt: skip
def test_a_number_of_nodes_that_differs_from_the_environment(
    launch: Launch,
    arguments: list[str],
    variables: dict[str, str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is an error, since the nodes would wait for each other forever."""
    monkeypatch.setattr(os, "environ", dict(variables))
    assert main(["launch", *arguments, "script.py"]) == 2
    assert words in capsys.readouterr().err


def test_a_number_of_nodes_as_in_the_environment(launch: Launch) -> None:
    for text, least, most in (("3", 3, 3), ("2:4", 2, 4)):
        job = launch("--nnodes", text, "script.py", **STEP)
        assert (job.least, job.most, job.node_rank, job.master_addr) == (least, most, 2, "n1")
    job = launch("--nnodes", "5", "--node-rank", "4", "script.py", **STEP)  # for example, nodes of several SLURM steps
    assert (job.most, job.node_rank) == (5, 4)
    assert launch("--nnodes", "2", "--master-addr", "m", "script.py", PET_NNODES="1:3").most == 2  # without a node rank


def test_the_rendezvous_address_comes_from_the_arguments(launch: Launch) -> None:
    """mpirun does not set the address, so it comes from --master-addr."""
    each = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    job = launch("--master-addr", "h", "script.py", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", **each)
    assert (job.most, job.node_rank, job.master_addr) == (2, 1, "h")


# ------------------------------------------------------------------------------------------------ settings of the processes


def write(text: str, name: str = "conf.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_the_processes_get_the_settings(launch: Launch) -> None:
    job = launch("--config_file", write(MULTI_CPU), "script.py", A="1")
    assert (job.per_node, job.most) == (2, 1)
    assert job.environment["A"] == "1"
    expected = Settings({"distributed_type": "MULTI_CPU", "mixed_precision": "no", "use_cpu": True}, {}, {}, "conf.yaml")
    assert read_process_settings(job.environment) == expected


def test_flags_override_the_file(launch: Launch) -> None:
    flags = ["--mixed-precision=fp16", "--zero_stage", "3", "--num_processes", "4", "--no-use-cpu", "--debug"]
    job = launch("--config-file", write(ZERO2), *flags, "script.py", "--zero_stage", "1")
    assert job.command[-2:] == ("--zero_stage", "1")
    assert job.per_node == 4
    assert job.environment["TRAINKIT_DEBUG_MODE"] == "1"
    told = read_process_settings(job.environment)
    assert told.source == "the command line and conf.yaml"
    assert told.values["mixed_precision"] == "fp16"
    assert told.backend == {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_clipping": 1.0,
        "zero3_init_flag": False,
    }


def test_debug_mode_of_the_environment(launch: Launch) -> None:
    file = ["--config_file", write(MULTI_CPU + "debug: false\n"), "script.py"]
    for name in ("TRAINKIT_DEBUG_MODE", "ACCELERATE_DEBUG_MODE"):
        assert debugging(launch(*file, **{name: "yes"}).environment)
        assert not debugging(launch("--no-debug", *file, **{name: "yes"}).environment)
    assert not debugging(launch(*file).environment)


def test_flags_without_a_file(launch: Launch) -> None:
    job = launch("--cpu", "--use_deepspeed", "--offload_optimizer_device", "cpu", "script.py")
    told = read_process_settings(job.environment)
    assert (told.values, told.backend) == (
        {"distributed_type": "DEEPSPEED", "use_cpu": True},
        {"offload_optimizer_device": "cpu"},
    )
    assert launch("--nproc_per_node=3", "--mixed_precision", "bf16", "script.py").per_node == 3
    assert launch("--num_processes", "3", "script.py").environment == {}


def test_the_default_file(launch: Launch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    write(MULTI_CPU, "default.yaml")
    assert launch("script.py").per_node == 2
    assert (
        f"using the settings in {tmp_path / 'default.yaml'}. For other settings: --config_file FILE; for none: " in caplog.text
    )
    caplog.clear()
    assert launch("--config_file", os.devnull, "script.py").environment == {}
    assert launch("--config_file", write("num_processes: 3"), "script.py").per_node == 3
    write("", "default.yaml")
    launch("script.py")
    assert caplog.text == ""


def test_the_default_file_is_not_read_on_other_nodes(launch: Launch) -> None:
    """A node started by ssh uses the settings sent to it. A worker that calls `trainkit launch` does not pass its own on."""
    theirs = carry(Settings({"mixed_precision": "bf16"}, source="theirs.yaml"))
    assert VARIABLE not in launch("script.py", **theirs, LOCAL_RANK="0", TORCHELASTIC_RUN_ID="x").environment
    write(MULTI_CPU, "default.yaml")
    assert read_process_settings(launch("script.py", **theirs).environment).source == "theirs.yaml"


@pytest.mark.parametrize("flags, expected", [
    ([], (8, 2, 1, "10.0.0.1", 29500)),
    (["--machine_rank", "0", "--main_process_port", "5"], (8, 2, 0, "10.0.0.1", 5)),
    (["--node-rank", "0", "--master-addr", "h", "--nproc-per-node", "2"], (2, 2, 0, "h", 29500)),
    (["--num_machines", "1"], (16, 1, None, None, 29500)),
    (["--nnodes", "1", "--num_processes", "3", "--main_process_port", "0"], (3, 1, None, None, None)),
    (["--num_machines", "4", "--num_processes", "8"], (2, 4, 1, "10.0.0.1", 29500)),
])  # fmt: skip
def test_nodes_of_a_configuration(
    launch: Launch, flags: list[str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    job = launch("--config_file", write(TWO_MACHINES), *flags, "script.py")
    assert (job.per_node, job.most, job.node_rank, job.master_addr, job.master_port) == expected


def test_a_configuration_for_one_node_does_not_set_nodes(launch: Launch) -> None:
    """Accelerate writes num_machines: 1 and machine_rank: 0 to every file, so these do not contradict --nnodes."""
    job = launch("--config_file", write(MULTI_CPU), "--nnodes", "2", "--master-addr", "h", "script.py")
    assert (job.per_node, job.most, job.node_rank) == (1, 2, None)
    job = launch("--config_file", "conf.yaml", "--nnodes", "3", "--nproc-per-node", "4", "--master-addr", "h", "script.py")
    assert (job.per_node, job.most) == (4, 3)
    job = launch(
        "--config_file", write("mixed_precision: no\nnum_machines: 1"), "script.py", PET_NNODES="1", PET_MASTER_PORT="7"
    )
    assert (job.most, job.master_port) == (1, 7)


def test_gpus_of_a_configuration(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    job = launch("--multi_gpu", "--gpu_ids", "1,3", "script.py")
    assert (job.per_node, job.environment["CUDA_VISIBLE_DEVICES"]) == (2, "1,3")
    assert launch("--multi_gpu", "script.py").per_node == 8
    assert launch("--distributed_type", "NO", "script.py").per_node == 1
    assert launch("--cpu", "--gpu_ids", "1,3", "script.py").environment.keys() == {VARIABLE}
    assert launch("--cpu", "script.py").per_node == 1
    assert launch("--tpu", "--num_processes", "8", "script.py").per_node == 1


@pytest.mark.parametrize("text, arguments, words", [
    (MULTI_CPU, ["--nproc-per-node", "2", "--num_processes", "3"], "--nproc-per-node 2 on 1 node and --num_processes 3 con"),
    (MULTI_CPU, ["--nnodes", "3", "--num_machines", "2"], "--nnodes 3 and --num_machines 2 contradict each other. Pass only"),
    (MULTI_CPU, ["--cpu", "--no-use_cpu"], "--no-use_cpu and --cpu contradict each other. Pass only one of them."),
    (MULTI_CPU, ["--multi_gpu", "--use_deepspeed"], "--multi_gpu and --use_deepspeed contradict each other."),
    (MULTI_CPU, ["--multi_gpu", "--distributed_type", "NO"], "--distributed_type NO and --multi_gpu contradict each other."),
    (MULTI_CPU, ["--zero_stage", "2"], "the command line and conf.yaml: zero_stage belongs to deepspeed_config, but dist"),
    (MULTI_CPU, ["--mixed_precision", "fp17"], "--mixed_precision must be one of no, fp16, bf16, fp8, not 'fp17'. Did"),
    (MULTI_CPU, ["--nnodes", "1:2", "--master-addr", "h"],
     "num_processes: 2 is the total of all nodes, but there may be 1 to 2 nodes. Pass "),
    (MULTI_CPU, ["--nnodes", "4", "--master-addr", "h"], "num_processes: 2 is the total of all machines, and is not divisible"),
    (ONE_CPU, ["--nproc-per-node", "2"], "conf.yaml: distributed_type: NO means one process, not 2. Pass --distributed_"),
    (MULTI_GPU, [], "conf.yaml: distributed_type: MULTI_GPU, but torch finds no GPU here. Write MULTI_CPU, or pass --cpu."),
    ("distributed_type: MULTI_CPU", [], "conf.yaml: distributed_type: MULTI_CPU needs a number of processes."),
    ("num_machines: 2", [], "2 nodes need the address of the node with rank 0. Pass it on all nodes"),
    ("num_processes: 3\ngpu_ids: 0,1", [], "conf.yaml: gpu_ids: 0,1 has fewer GPUs than a node has processes, 3. List 3 GPUs"),
    ("num_process: 3", [], "conf.yaml: unknown key 'num_process'. Did you mean 'num_processes'?"),
])  # fmt: skip
def test_settings_that_are_refused(
    launch: Launch, text: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config_file", write(text), *arguments, "script.py"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text, words", [
    (MULTI_CPU,
     "conf.yaml: num_machines: 1, but according to SLURM this is one of 3 nodes. Remove num_machines and machine_rank"),
    (TWO_MACHINES.replace("num_machines: 2", "num_machines: 4"),
     "num_machines: 4, but according to SLURM this is one of 3 nodes"),
    ("num_processes: 4", "conf.yaml: num_processes: 4 is not divisible by 3 nodes. Pass --nproc-per-node N."),
    ("machine_rank: 1", "conf.yaml: machine_rank: 1, but according to SLURM this is node 2. Remove machine_rank from the file"),
])  # fmt: skip
def test_a_file_with_a_different_number_of_nodes(
    launch: Launch, text: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is an error: with num_machines: 1, for example, each node would train alone."""
    monkeypatch.setattr(os, "environ", dict(STEP))
    assert main(["launch", "--config_file", write(text), "script.py"]) == 2
    assert words in capsys.readouterr().err


def test_a_file_without_nodes_under_slurm(launch: Launch) -> None:
    job = launch("--config_file", write("distributed_type: DEEPSPEED\nnum_processes: 6\nuse_cpu: true"), "script.py", **STEP)
    assert (job.per_node, job.most, job.node_rank, job.master_addr) == (2, 3, 2, "n1")
    assert launch("--config_file", write(MULTI_CPU), "--num_machines", "1", "script.py", **STEP).most == 1


# --------------------------------------------------------------------------------------------------- nodes of a hostfile


@pytest.fixture
def hosts(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`hosts("--ssh", "x", "script.py")` returns what `run_hosts` gets: scripts of the nodes, ssh command, timeouts.

    The nodes are those of the file `hosts`. See `launch` for the environment variables.
    """
    found: list[Any] = []
    monkeypatch.setattr(remote, "run_hosts", lambda *given: found.append(given) or 7)  # type: ignore[func-returns-value]
    (tmp_path / "hosts").write_text("node1 slots=8\nme@node2 slots=4\n")
    (tmp_path / "one").write_text("node1 slots=2\n")

    def run(*arguments: str, file: str = "hosts", **variables: str) -> Any:
        monkeypatch.setattr(os, "environ", dict(variables))
        assert main(["launch", "--hostfile", file, *arguments]) == 7
        return found.pop()

    return run


def told(script: str) -> list[str]:
    """The arguments of `trainkit launch` in the script for a node."""
    (line,) = [line for line in script.splitlines() if line.startswith("exec ") and "launch_child" in line]
    return shlex.split(line)[5:]


def test_each_node_gets_its_arguments(hosts: Any, tmp_path: Path) -> None:
    scripts, ssh, grace, join_timeout = hosts("script.py", "--hostfile", "x", TRAINKIT_GRACE="5")
    assert (ssh, grace, join_timeout) == (["ssh"], 5.0, 600.0)
    assert list(scripts) == ["node1", "me@node2"]
    meet = ["--nnodes", "2", "--master-addr", "node1"]
    for rank, (script, slots) in enumerate(zip(scripts.values(), "84", strict=True)):
        place = ["--node-rank", str(rank), "--nproc-per-node", slots]
        assert told(script) == [*meet, *place, "script.py", "--hostfile", "x"]
        assert f"cd -- {tmp_path}\n" in script.replace(" || exit", "")
        assert f"{sys.executable}" in script
        assert "export TRAINKIT_GRACE=5\n" in script


def test_options_for_all_nodes(hosts: Any) -> None:
    options = ["--master-addr", "10.0.0.1", "--master-port", "5", "--max-restarts", "2", "--setup", "source a.sh"]
    scripts, ssh, _, _ = hosts(
        *options, "--ssh", "ssh -p '22 2'", "--export", "A", "--export", "B=b c", "-m", "m", A="1", X="2"
    )
    assert ssh == ["ssh", "-p", "22 2"]
    script = scripts["me@node2"]
    shared = ["--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "5", "--max-restarts", "2"]
    assert told(script) == [*shared, "--node-rank", "1", "--nproc-per-node", "4", "-m", "m"]
    assert "export A=1\nexport B='b c'\n" in script
    assert "export X" not in script
    assert "eval 'source a.sh' </dev/null || exit\n" in script


def test_a_hostfile_with_one_node(hosts: Any) -> None:
    scripts, *_ = hosts("script.py", file="one")
    assert told(scripts["node1"]) == ["--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2", "script.py"]


def test_settings_are_sent_to_all_nodes(hosts: Any) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 12\nmachine_rank: 0\n"
    more = "main_process_ip: 10.0.0.1\nmain_process_port: 7\ndebug: true\ngpu_ids: 0,1,2,3,4,5,6,7\n"
    scripts, *_ = hosts("--config_file", write(text + more), "script.py")
    for script in scripts.values():
        assert told(script)[:6] == ["--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "7"]
        (line,) = [line for line in script.splitlines() if VARIABLE in line]
        name, _, value = shlex.split(line)[1].partition("=")
        expected = Settings({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, {}, {}, "conf.yaml")
        assert read_process_settings({name: value}) == expected
        assert "export TRAINKIT_DEBUG_MODE=1\n" in script
        assert "export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n" in script


def test_a_hostfile_in_the_configuration(hosts: Any, launch: Launch) -> None:
    text = "distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config: {deepspeed_hostfile: one}\n"
    assert list(hosts("--config_file", write(text), "script.py")[0]) == ["node1", "me@node2"]  # --hostfile takes precedence
    with pytest.MonkeyPatch.context() as patch:
        ran: list[Any] = []
        patch.setattr(remote, "run_hosts", lambda *given: ran.append(given) or 7)  # type: ignore[func-returns-value]
        assert main(["launch", "--config_file", write(text), "script.py"]) == 7
        assert list(ran[0][0]) == ["node1"]
    standard = text.replace("hostfile: one", "hostfile: one, deepspeed_multinode_launcher: standard")
    assert launch("--config_file", write(standard), "script.py").most == 1


def test_each_node_accepts_its_arguments(hosts: Any, launch: Launch) -> None:
    job = launch(*told(hosts("--max-restarts", "3", "script.py", "x")[0]["me@node2"]))
    assert (job.per_node, job.least, job.most, job.node_rank, job.master_addr, job.max_restarts) == (4, 2, 2, 1, "node1", 3)
    assert launch(*told(hosts("script.py", file="one")[0]["node1"])).per_node == 2


@pytest.mark.parametrize("arguments, words", [
    (["--hostfile", "nowhere", "script.py"], "the hostfile 'nowhere' cannot be read"),
    (["--hostfile", "hosts", "--nnodes", "2", "script.py"], "--nnodes cannot be combined with --hostfile, which sets it"),
    (["--hostfile", "hosts", "--nproc-per-node", "2", "script.py"], "--nproc-per-node cannot be combined with"),
    (["--hostfile", "hosts", "--node-rank", "0", "script.py"], "--node-rank cannot be combined with --ho"),
    (["--hostfile", "hosts", "--machine_rank", "0", "script.py"], "--machine_rank cannot be combined with"),
    (["--hostfile", "hosts", "--num_machines", "3", "script.py"], "the command line: num_machines: 3, but hosts has 2. Write"),
    (["--hostfile", "hosts", "--num_processes", "2", "script.py"], "num_processes: 2, but hosts has 12. Write num_processes: "),
    (["--hostfile", "hosts", "--master-addr", "localhost", "script.py"],
     "localhost is a different host on each of the 2 nodes"),
    (["--hostfile", "hosts", "--master-port", "x", "script.py"], "--master-port must be an integer from 1 to 65535"),
    (["--hostfile", "hosts", "scirpt.py"], "there is no file 'scirpt.py'. Did you mean 'script.py'?"),
    (["--hostfile", "hosts", "--export", "NOT_SET", "script.py"],
     "--export NOT_SET: the variable is not set here. Set it, or pass a value: --export NOT_SET=VALUE"),
    (["--hostfile", "hosts", "--export", "A B=1", "script.py"], "--export must be the name of a variable, or NAME=VALUE"),
    (["--hostfile", "hosts", "--ssh", "ssh 'x", "script.py"], "is not a valid command line: No closing quotation."),
    (["--hostfile", "hosts", "--ssh", "", "script.py"], "--ssh must be a command, such as 'ssh -p 2222'"),
    (["--setup", "x", "script.py"], "--setup needs nodes that are started by ssh. List them in a file: --hostfile FILE"),
    (["--export", "x", "script.py"], "--export needs nodes that are started by ssh"),
    (["--ssh", "x", "script.py"], "--ssh needs nodes that are started by ssh"),
    (["--hostfiel", "hosts", "script.py"], "Did you mean '--hostfile'?"),
])  # fmt: skip
def test_refused_together_with_a_hostfile(
    hosts: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments]) == 2
    assert words in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- real runs

SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"{sys.argv[1:]} {total.item()}", flush=True)
dist.barrier()
if sys.argv[1] == "wait":
    open(f"ready-{dist.get_rank()}", "w").close()
    time.sleep(1000)
if dist.get_rank() == 1 and sys.argv[1] == "fail":
    raise ValueError("of rank 1")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return "script.py"


def test_a_plain_torch_script(script: str, tmp_path: Path) -> None:
    """A script that does not use trainkit."""
    done = run_python("-m", "trainkit", "launch", "--nproc-per-node", "2", script, "ok", "--x", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("['ok', '--x'] 3.0") == 2


def test_the_traceback_comes_last(script: str, tmp_path: Path) -> None:
    done = run_python("-m", "trainkit", "launch", "--nproc-per-node", "2", script, "fail", cwd=tmp_path)
    assert done.returncode == 1
    lines = [re.sub(r"^\[rank\d\]:\s*", "", line) for line in done.stderr.splitlines()]
    assert "ValueError: of rank 1" in lines
    assert not [line for line in lines if line.startswith("trainkit")]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_in_a_terminal(script: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trainkit", "launch", "--nproc-per-node", "2", script, "wait"],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.count("KeyboardInterrupt") == 2  # one from each worker, none from the agent


# ------------------------------------------------------------------------------------------------------- files for clusters

FILES = {block.title: block.text for block in blocks((ROOT / "docs/how-to/kubernetes-and-slurm.md").read_text("utf-8"))}
TRAINER = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}  # fields of Kubeflow's API


def test_the_train_job_of_the_how_to_page(launch: Launch) -> None:
    """With the variables that Kubeflow's torch runtime sets from the fields."""
    file = yaml.safe_load(FILES["trainjob.yaml"])
    assert (file["apiVersion"], file["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(file["spec"]) == {"runtimeRef", "trainer"}
    trainer, name = file["spec"]["trainer"], file["metadata"]["name"]
    assert set(trainer) <= TRAINER
    assert all(isinstance(word, str) for word in trainer["command"])
    assert trainer["command"][:2] == ["trainkit", "launch"]
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    Path("train.py").touch()
    job = launch(*trainer["command"][2:], **pod)
    assert (job.least, job.most, job.node_rank, job.per_node, job.max_restarts) == (2, 2, 1, 8, 3)
    assert (job.master_addr, job.master_port, job.command[-1]) == ("digits-node-0-0.digits", 29500, "train.py")


@pytest.mark.parametrize("name", ["train.sbatch", "launch.sbatch"])
def test_the_batch_scripts_of_the_how_to_page(name: str, launch: Launch) -> None:
    text = FILES[name]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue"}  # of `man sbatch`
    assert set(options) <= known
    srun, *command = shlex.split(text.splitlines()[-1])
    assert srun == "srun"
    nodes, each = int(options["nodes"]), int(options["ntasks-per-node"])
    task = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * each),
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]", "SLURM_PROCID": str(each), "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    }  # fmt: skip
    if command[0] == "python":
        ranks = read_ranks(task)
        assert ranks is not None
        assert (ranks.rank, ranks.size, ranks.local_size, ranks.node, ranks.master_addr) == (8, 16, 8, 1, "n1")
    else:
        assert command[:2] == ["trainkit", "launch"]
        Path("train.py").touch()
        job = launch(*command[2:], **task)
        assert (job.least, job.node_rank, job.per_node, job.max_restarts) == (2, 1, 8, 3)
        assert (job.master_addr, job.command[-1]) == ("n1", "train.py")
