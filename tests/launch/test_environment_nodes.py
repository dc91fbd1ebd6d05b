"""The nodes of a job, from environment variables."""

from __future__ import annotations

import pytest

from trainkit.errors import ConfigurationError
from trainkit.launch.environment import Nodes, grace, join_timeout, node_range, quietly, read_nodes, stable_port

STEP = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={tasks} SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE={each}(x2) "
    "SLURM_STEP_NODELIST=n[1-2] SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS={tasks}"
)
POD = "KUBERNETES_SERVICE_HOST=10.96.0.1"


@pytest.mark.parametrize("text, expected", [
    ("PATH=/bin", Nodes()),
    (STEP.format(tasks=2, each=1), Nodes(2, 2, 1, "n1", stable_port("7", "0"), source="SLURM")),
    (
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 MASTER_ADDR=a "
        "MASTER_PORT=5",
        Nodes(3, 3, 0, "a", 5, source="Open MPI"),
    ),
    (f"{POD} RANK=2 WORLD_SIZE=3 MASTER_ADDR=m-0 MASTER_PORT=23456", Nodes(3, 3, 2, "m-0", 23456, source="Kubernetes")),
    (f"{POD} RANK=0 WORLD_SIZE=1", Nodes()),
    (
        f"{POD} PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 RANK=1 WORLD_SIZE=8 MASTER_ADDR=m MASTER_PORT=23456",
        Nodes(2, 2, 1, "m", 23456, "4", source="Kubernetes"),
    ),
    (
        f"{POD} PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=0 PET_MASTER_ADDR=n-0-0.n PET_MASTER_PORT=29500",
        Nodes(2, 2, 0, "n-0-0.n", 29500, "auto", source="Kubernetes"),
    ),
    (
        f"{POD} PET_NNODES=1:3 PET_N_PROC_PER_NODE=2 PET_MAX_RESTARTS=9 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=w-0:23456",
        Nodes(1, 3, None, "w-0", 23456, "2", 9, "Kubernetes"),
    ),
    ("LOCAL_RANK=0 TORCHELASTIC_RUN_ID=x PET_NNODES=2 RANK=0 WORLD_SIZE=2", Nodes()),  # inside a worker
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=5", Nodes()),
])  # fmt: skip
def test_nodes_from_the_environment(text: str, expected: Nodes) -> None:
    assert read_nodes(dict(word.split("=", 1) for word in text.split())) == expected


def test_several_tasks_on_a_node() -> None:
    """`trainkit launch` must run once per node: several tasks of SLURM on a node are an error."""
    env = dict(word.split("=", 1) for word in STEP.format(tasks=4, each=2).split())
    with pytest.raises(ConfigurationError, match="SLURM has started 4 processes, several on a node.*--ntasks-per-node=1"):
        read_nodes(env)


@pytest.mark.parametrize("text, expected", [("2", (2, 2)), ("1:4", (1, 4)), (" 3 ", (3, 3))])
def test_ranges(text: str, expected: tuple[int, int]) -> None:
    assert node_range(text, "--nnodes") == expected


@pytest.mark.parametrize("text", ["", "0", "4:2", "a", "1:", ":2", "1:b", "-1", "1:2:3"])
def test_invalid_ranges(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--nnodes must be a number of nodes"):
        node_range(text, "--nnodes")


def test_times() -> None:
    """Valid and invalid values of the grace period and the join timeout."""
    assert (grace({}), join_timeout({})) == (30.0, 600.0)
    assert (grace({"TRAINKIT_GRACE": "90"}), join_timeout({"TRAINKIT_JOIN_TIMEOUT": "1.5"})) == (90.0, 1.5)
    for wrong in ("a", "0", "-1", "inf", "nan"):
        with pytest.raises(ConfigurationError, match="TRAINKIT_GRACE must be a number of seconds"):
            grace({"TRAINKIT_GRACE": wrong})


def test_variables_of_the_agent_are_not_passed_on() -> None:
    """`quietly` changes the log level of the agent only; the returned environment of the workers does not have it."""
    env = {"A": "1"}
    assert quietly(env) == {"A": "1"}
    assert env == {"A": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    assert quietly(env) == env == {"TORCH_CPP_LOG_LEVEL": "INFO"}
