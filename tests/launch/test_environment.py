"""Which launcher started this process, from the variables of launchers and batch systems, and errors if they contradict."""

from __future__ import annotations

import pytest

from trainkit.errors import ConfigurationError
from trainkit.launch.environment import RankInfo, hosts, read_ranks, stable_port, tasks_of_nodes

TORCHRUN = """
    LOCAL_RANK=1 RANK=5 GROUP_RANK=1 ROLE_RANK=5 ROLE_NAME=default LOCAL_WORLD_SIZE=4 WORLD_SIZE=8 GROUP_WORLD_SIZE=2
    ROLE_WORLD_SIZE=8 MASTER_ADDR=node03 MASTER_PORT=40781 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=3
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True OMP_NUM_THREADS=1 PATH=/usr/bin:/bin
"""
JOB = """
    SLURM_JOB_ID=258187 SLURM_JOBID=258187 SLURM_JOB_NAME=train SLURM_CLUSTER_NAME=hpc SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2
    SLURM_JOB_NODELIST=node[03-04] SLURM_NODELIST=node[03-04] SLURM_TASKS_PER_NODE=4(x2) SLURM_NTASKS=8 SLURM_NPROCS=8
    SLURM_NTASKS_PER_NODE=4 SLURM_SUBMIT_HOST=login1
"""
BATCH = f"{JOB} SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASK_PID=3391 SLURMD_NODENAME=node03"
STEP = f"""
    {JOB} SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=4(x2)
    SLURM_STEP_NODELIST=node[03-04] SLURM_PROCID=6 SLURM_LOCALID=2 SLURM_NODEID=1 SLURM_GTIDS=4,5,6,7 SLURM_MPI_TYPE=none
"""
OPEN_MPI = """
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4
    OMPI_COMM_WORLD_NODE_RANK=3 OMPI_UNIVERSE_SIZE=4 PMIX_RANK=3 PMIX_NAMESPACE=prterun-host-3391@1
"""
TWO_NODES = OPEN_MPI.replace("LOCAL_RANK=3", "LOCAL_RANK=1").replace("LOCAL_SIZE=4", "LOCAL_SIZE=2")
HYDRA = "PMI_RANK=1 PMI_SIZE=2 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 GFORTRAN_UNBUFFERED_PRECONNECTED=y"
JSRUN = """
    LSB_JOBID=1234567 LSB_BATCH_JID=1234567 LSB_DJOB_NUMPROC=85 LSB_DJOB_RANKFILE=/home/u/.lsbatch/1.hostfile
    JSM_NAMESPACE_RANK=7 JSM_NAMESPACE_SIZE=12 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6
    OMPI_COMM_WORLD_RANK=7 OMPI_COMM_WORLD_SIZE=12 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=6
"""
SUMMIT = {"LSB_MCPU_HOSTS": "batch5 1 a01n01 42 a01n02 42"}
POD = "KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_PORT=tcp://10.96.0.1:443 PYTHONUNBUFFERED=1"
PYTORCH_JOB = f"{POD} MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2"
TRAIN_JOB = f"""
    {POD} PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500
"""
NOTEBOOK = (
    "JPY_PARENT_PID=4711 JPY_SESSION_NAME=/home/u/a.ipynb MPLBACKEND=module://matplotlib_inline.backend_inline TERM=xterm"
)
PORT = stable_port("258187", "0")


def variables(text: str, **more: str) -> dict[str, str]:
    pairs = dict(word.split("=", 1) for word in text.split())
    return {**pairs, **more}


def place(*numbers: int | None, at: str, port: int, by: str) -> tuple[object, ...]:
    return (*numbers, at, port, by)


# Name of the case: variables, and (rank, size, local rank, local size, node, nodes, address, port, launcher) or None.
PLACES = {
    "torchrun": (TORCHRUN, place(5, 8, 1, 4, 1, 2, at="node03", port=40781, by="torchrun")),
    "torchrun, one process": (
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 "
        "MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none",
        place(0, 1, 0, 1, 0, 1, at="127.0.0.1", port=29500, by="torchrun"),
    ),
    "trainkit launch": (
        f"{TORCHRUN.replace('none', '3f2a')} TRAINKIT_LAUNCHER=trainkit-launch",
        place(5, 8, 1, 4, 1, 2, at="node03", port=40781, by="trainkit-launch"),
    ),
    "torchrun in a task of SLURM": (f"{STEP} {TORCHRUN}", place(5, 8, 1, 4, 1, 2, at="node03", port=40781, by="torchrun")),
    "torchrun in a pod": (f"{PYTORCH_JOB} {TORCHRUN}", place(5, 8, 1, 4, 1, 2, at="node03", port=40781, by="torchrun")),
    "deepspeed": (
        "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        place(3, 4, 1, 2, 1, 2, at="10.0.0.1", port=29500, by="deepspeed"),
    ),
    "deepspeed, one process": (
        "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_SIZE=1 CROSS_RANK=0 CROSS_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
        place(0, 1, 0, 1, 0, 1, at="127.0.0.1", port=29500, by="deepspeed"),
    ),
    "deepspeed, more processes on one node": (  # the other node has 3 processes
        "RANK=3 LOCAL_RANK=1 WORLD_SIZE=5 LOCAL_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        place(3, 5, 1, 2, 1, 2, at="10.0.0.1", port=29500, by="deepspeed"),
    ),
    "torchrun in a process of deepspeed": (
        f"LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 {TORCHRUN}",
        place(5, 8, 1, 4, 1, 2, at="node03", port=40781, by="torchrun"),
    ),
    "by hand, on one node": (
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
        place(1, 2, 1, 2, 0, 1, at="127.0.0.1", port=29500, by="a launcher"),
    ),
    "by hand, with LOCAL_RANK": (
        "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=localhost MASTER_PORT=29500",
        place(1, 2, 1, 2, 0, 1, at="localhost", port=29500, by="a launcher"),
    ),
    "by hand, on several nodes": (
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        place(1, 2, None, None, None, None, at="10.0.0.1", port=29500, by="a launcher"),
    ),
    "by hand, one process": ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500", None),
    "SLURM, task of srun": (STEP, place(6, 8, 2, 4, 1, 2, at="node03", port=PORT, by="SLURM")),
    "SLURM, with an address": (
        f"{STEP} MASTER_ADDR=10.1.1.16 MASTER_PORT=12345",
        place(6, 8, 2, 4, 1, 2, at="10.1.1.16", port=12345, by="SLURM"),
    ),
    "SLURM, as torch's documents set it": (
        f"{STEP} RANK=6 WORLD_SIZE=8 MASTER_ADDR=node03 MASTER_PORT=29500",
        place(6, 8, 2, 4, 1, 2, at="node03", port=29500, by="SLURM"),
    ),
    "SLURM, with the number of processes": (
        f"{STEP} WORLD_SIZE=8",
        place(6, 8, 2, 4, 1, 2, at="node03", port=PORT, by="SLURM"),
    ),
    "SLURM, one node with a loopback address": (
        "SLURM_JOB_ID=258187 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NNODES=1 "
        "SLURM_NTASKS_PER_NODE=2 SLURM_NODELIST=gpu7 MASTER_ADDR=localhost",
        place(1, 2, 1, 2, 0, 1, at="localhost", port=PORT, by="SLURM"),
    ),
    "SLURM, --mpi=pmi2": (
        f"{STEP} PMI_RANK=6 PMI_SIZE=8 PMI_FD=13",
        place(6, 8, 2, 4, 1, 2, at="node03", port=PORT, by="SLURM"),
    ),
    "SLURM, uneven": (
        variables(STEP, SLURM_STEP_TASKS_PER_NODE="3,1", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="3", SLURM_LOCALID="0"),
        place(3, 4, 0, 1, 1, 2, at="node03", port=PORT, by="SLURM"),
    ),
    "SLURM, --ntasks-per-node alone": (
        "SLURM_JOB_ID=258187 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_NNODES=2 "
        "SLURM_NTASKS_PER_NODE=2 SLURM_NODELIST=gpu7,node[03-05,9]",
        place(1, 4, 1, 2, 0, 2, at="gpu7", port=PORT, by="SLURM"),
    ),
    "SLURM, the script of a batch job": (BATCH, None),
    "SLURM, the shell of salloc": (JOB, None),
    "SLURM, the interactive step of salloc": (f"{BATCH} SLURM_STEP_ID=4294967290 SLURM_STEPID=4294967290", None),
    "SLURM, the shell of srun --pty": (f"{STEP} SLURM_PTY_PORT=46112 SLURM_PTY_WIN_COL=236", None),
    "SLURM, a single task": (variables(STEP, SLURM_STEP_NUM_TASKS="1", SLURM_NTASKS="1", SLURM_PROCID="0"), None),
    "SLURM, a batch job sent from a task": (f"{BATCH} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1", None),
    "Open MPI": (
        OPEN_MPI,
        place(3, 4, 3, 4, 0, 1, at="127.0.0.1", port=stable_port("mpi", "prterun-host-3391@1"), by="Open MPI"),
    ),
    "Open MPI in a job of SLURM": (
        # SLURM's variables belong to the daemon that mpirun started with srun
        f"{TWO_NODES} {JOB} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1",
        place(3, 4, 1, 2, None, None, at="node03", port=stable_port("mpi", "258187"), by="Open MPI"),
    ),
    "Open MPI, a single process": ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0", None),
    "MPICH": (HYDRA, place(1, 2, 1, 2, 0, 1, at="127.0.0.1", port=stable_port("mpi", ""), by="MPI (Hydra)")),
    "Intel MPI under LSF": (
        variables(
            "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 I_MPI_HYDRA_BOOTSTRAP=lsf LSB_JOBID=77",
            LSB_MCPU_HOSTS="hostA 2 hostB 2",
        ),
        place(2, 4, 0, 2, None, None, at="hostA", port=stable_port("mpi", "77"), by="MPI (Hydra)"),
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2 "
        "PMI_RANK=1 PMI_SIZE=2",
        place(1, 2, 1, 2, 0, 1, at="127.0.0.1", port=stable_port("mpi", ""), by="MVAPICH"),
    ),
    "LSF, jsrun": (
        variables(JSRUN, **SUMMIT),
        place(7, 12, 1, 6, None, None, at="a01n01", port=stable_port("lsf", "1234567"), by="LSF"),
    ),
    "LSF, the script of a batch job": (
        variables("LSB_JOBID=1234567 LSB_BATCH_JID=1234567 LSB_DJOB_NUMPROC=85", **SUMMIT),
        None,
    ),
    "Kubernetes, PyTorchJob": (PYTORCH_JOB, place(2, 3, 0, 1, 2, 3, at="job-master-0", port=23456, by="Kubernetes")),
    "Kubernetes, PyTorchJob with PET_ variables": (
        f"{PYTORCH_JOB} PET_NNODES=3 PET_NPROC_PER_NODE=auto PET_NODE_RANK=2",
        place(2, 3, 0, 1, 2, 3, at="job-master-0", port=23456, by="Kubernetes"),
    ),
    "Kubernetes, TrainJob": (TRAIN_JOB, place(1, 2, 0, 1, 1, 2, at="job-node-0-0.job", port=29500, by="Kubernetes")),
    "Kubernetes, one pod": (f"{POD} PET_NNODES=1 PET_NPROC_PER_NODE=4 PET_NODE_RANK=0 RANK=0 WORLD_SIZE=1", None),
    "a pod of something else": (POD, None),
    "a notebook": (NOTEBOOK, None),
    "a notebook in an allocation": (f"{NOTEBOOK} {BATCH}", None),
    "a shell": ("PATH=/usr/bin:/bin HOME=/home/u SHELL=/bin/bash MASTER_ADDR=node03", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize("env, expected", PLACES.values(), ids=PLACES.keys())
def test_places(env: str | dict[str, str], expected: tuple[object, ...] | None) -> None:
    found = read_ranks(variables(env) if isinstance(env, str) else env)
    if expected is None:
        assert found is None
        return
    assert isinstance(found, RankInfo)
    numbers = (found.rank, found.size, found.local_rank, found.local_size, found.node, found.nodes)
    assert (*numbers, found.master_addr, found.master_port, found.launcher) == expected
    assert found.reason


def test_enough_places_are_tested() -> None:
    assert len(PLACES) >= 20
    assert sum(expected is None for _, expected in PLACES.values()) >= 4


# Name of the case: variables, and words of the error message.
CONTRADICTIONS = {
    "RANK alone": ("RANK=0", ["RANK=0 is set, but WORLD_SIZE is not", "trainkit launch --nproc-per-node"]),
    "WORLD_SIZE alone": ("WORLD_SIZE=4", ["WORLD_SIZE=4 is set, but RANK is not", "unset"]),
    "WORLD_SIZE=0": ("RANK=0 WORLD_SIZE=0", ["WORLD_SIZE=0"]),
    "rank too large": (
        "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1",
        ["RANK=2", "WORLD_SIZE=2", "allows 0 to 1"],
    ),
    "rank too large, by hand": ("RANK=1 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1", ["RANK=1", "WORLD_SIZE=1"]),
    "no number": ("RANK=a WORLD_SIZE=2", ["RANK must be an integer ≥ 0", "'a'"]),
    "negative": ("RANK=-1 WORLD_SIZE=2", ["RANK must be an integer ≥ 0", "'-1'"]),
    "local rank too large": (
        "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
        ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"],
    ),
    "more local processes than processes": (
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1",
        ["LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"],
    ),
    "local rank too large, under deepspeed": (
        "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
        ["LOCAL_RANK=2", "LOCAL_SIZE=2"],
    ),
    "node too large": (
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 GROUP_RANK=2 GROUP_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
        ["rank of the node=2", "number of nodes=2"],
    ),
    "no address": ("RANK=0 WORLD_SIZE=2 MASTER_PORT=29500", ["MASTER_ADDR is not set"]),
    "no port": ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=node03", ["MASTER_PORT is not set"]),
    "neither": ("RANK=0 WORLD_SIZE=2", ["MASTER_ADDR and MASTER_PORT are not set"]),
    "no such port": ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=70000", ["MASTER_PORT", "70000"]),
    "left over in a task of SLURM": (
        f"{STEP} RANK=0 WORLD_SIZE=2 MASTER_ADDR=node03 MASTER_PORT=29500",
        ["two launchers disagree", "RANK=0 and WORLD_SIZE=2", "process 6 of 8", "Unset RANK"],
    ),
    "left over, without a rank": (f"{STEP} WORLD_SIZE=16", ["WORLD_SIZE=16 is set", "SLURM has started 8", "Unset WORLD_SIZE"]),
    "left over, under mpirun": (f"{OPEN_MPI} WORLD_SIZE=2", ["WORLD_SIZE=2 is set", "Open MPI has started 4 processes"]),
    "a loopback address": (
        f"{STEP} MASTER_ADDR=localhost",
        ["MASTER_ADDR=localhost is a loopback address", "SLURM has started the processes on several nodes", "unset it"],
    ),
    "a loopback address, under mpirun": (
        f"{TWO_NODES} MASTER_ADDR=127.0.0.1",
        ["MASTER_ADDR=127.0.0.1 is a loopback address", "Open MPI has started the processes on several nodes"],
    ),
    "two MPIs": (f"{OPEN_MPI} PMI_RANK=0 PMI_SIZE=2", ["two launchers disagree", "3 of 4", "0 of 2"]),
    "MPI without a size": ("OMPI_COMM_WORLD_RANK=0", ["OMPI_COMM_WORLD_SIZE is not"]),
    "MPI on several nodes": (TWO_NODES, ["the node of rank 0 is unknown", "mpirun -x MASTER_ADDR=$(hostname)"]),
    "task number too large": (variables(STEP, SLURM_PROCID="8"), ["SLURM_PROCID=8", "SLURM_STEP_NUM_TASKS=8"]),
    "SLURM without a number of tasks": ("SLURM_STEP_ID=0 SLURM_PROCID=0", ["SLURM_NTASKS is not", "srun"]),
    "SLURM without nodes": (
        "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2",
        ["the node of rank 0 is unknown", "export MASTER_ADDR=$(scontrol show hostnames"],
    ),
    "a list of nodes that is none": (variables(STEP, SLURM_STEP_NODELIST="node[3-"), ["list of nodes", "'node[3-'"]),
    "jsrun without hosts": (JSRUN, ["LSB_MCPU_HOSTS", "jsrun -E MASTER_ADDR=host"]),
    "jsrun without a size": ("JSM_NAMESPACE_RANK=1", ["JSM_NAMESPACE_SIZE is not"]),
    "a pod for several processes": (
        f"{PYTORCH_JOB.replace('SIZE=3', 'SIZE=12')} PET_NPROC_PER_NODE=4",
        ["PET_NPROC_PER_NODE=4", "trainkit launch script.py"],
    ),
    "a TrainJob for several processes": (TRAIN_JOB.replace("NODE=1", "NODE=4"), ["PET_NPROC_PER_NODE=4", "trainkit launch"]),
    "an elastic PyTorchJob": (
        f"{POD} PET_NNODES=1:3 PET_RDZV_ENDPOINT=job-worker-0:23456",
        ["PET_NNODES=1:3", "trainkit launch"],
    ),
}


@pytest.mark.parametrize("env, words", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradictions(env: str | dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_ranks(variables(env) if isinstance(env, str) else env)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("text, expected", [
    ("node[03-05,9],gpu7", ["node03", "node04", "node05", "node9", "gpu7"]),
    ("gpu7", ["gpu7"]),
    ("a,b-1,c", ["a", "b-1", "c"]),
    ("r[1-2]n[08-10]-ib", ["r1n08-ib", "r1n09-ib", "r1n10-ib", "r2n08-ib", "r2n09-ib", "r2n10-ib"]),
    ("n[099-101].x.org", ["n099.x.org", "n100.x.org", "n101.x.org"]),
    ("node[7]", ["node7"]),
])  # fmt: skip
def test_lists_of_nodes(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected


@pytest.mark.parametrize("text", ["node[", "node]", "node[3-1]", "node[a-b]", "node[]", "a,,node[1", "node[1]]"])
def test_invalid_lists_of_nodes(text: str) -> None:
    with pytest.raises(ConfigurationError, match="list of nodes"):
        list(hosts(text))


@pytest.mark.parametrize(
    "text, expected", [("2(x3)", [2, 2, 2]), ("4", [4]), ("2(x2),1", [2, 2, 1]), ("5,4(x3)", [5, 4, 4, 4])]
)
def test_tasks_of_nodes(text: str, expected: list[int]) -> None:
    assert tasks_of_nodes(text) == expected


def test_an_invalid_number_of_tasks() -> None:
    with pytest.raises(ConfigurationError, match="2\\(x3\\),1.*'2x3'"):
        tasks_of_nodes("2x3")


def test_the_port_of_a_job() -> None:
    assert stable_port("258187", "0") == stable_port("258187", "0") == 17169
    ports = {stable_port(str(job), "0") for job in range(2000)}
    assert len(ports) > 1800
    assert min(ports) >= 12000
    assert max(ports) < 28000
