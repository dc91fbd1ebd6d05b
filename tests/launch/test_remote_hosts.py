"""`trainkit launch --hostfile` end to end: on two simulated hosts with a network, and with real ssh if sshd is installed.

On the simulated hosts, a program that enters the other host replaces ssh. Each host has its own network, name and processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.launch.agents import alive, wait_until
from helpers.launch.hosts import ADDRESSES, NAMES, Hosts, Program
from helpers.launch.terminals import write_ssh
from helpers.launch.two_hosts import CASE, Task
from helpers.patience import PATIENCE
from helpers.resume.elastic import journal
from helpers.runs.parity import trained
from helpers.worlds.worlds import free_port

TESTS = Path(__file__).parents[1]
# The command that enters each host.
ENTER = [["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"] for name in NAMES]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as made:
        yield made


def start_task(hosts: Hosts, folder: Path, task: Task) -> Program:
    """Start the script two_hosts.py on both hosts."""
    Path(task.folder).mkdir()
    return start(hosts, folder, str(TESTS / "helpers/launch/two_hosts.py"), json.dumps(asdict(task)))


def start(hosts: Hosts, folder: Path, *script: str) -> Program:
    """Run `trainkit launch --hostfile` on host 0."""
    ssh = write_ssh(folder, f"dict(zip({ADDRESSES}, {ENTER}))[host]")
    (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "NCCL_", "TRAINKIT_"))}
    settings["PYTHONPATH"] = os.pathsep.join([str(TESTS), settings["PYTHONPATH"]])
    options = [
        "--hostfile",
        "hosts",
        "--ssh",
        ssh,
        "--export",
        "PYTHONPATH",
        "--setup",
        'echo "at $(hostname)"',
    ]
    return hosts.start(0, [sys.executable, "-m", "trainkit", "launch", *options, *script], settings)


def launcher() -> int:
    """Process ID of the launcher, as seen from outside the simulated hosts."""
    begin = [sys.executable, "-m", "trainkit", "launch", "--hostfile"]
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().decode(errors="replace").split("\0")[:5] == begin and Path.cwd() == (path.parent / "cwd").resolve()
    ]
    assert len(found) == 1, found
    return found[0]


def test_the_code_of_the_host_that_failed(hosts: Hosts, tmp_path: Path) -> None:
    """The exit code is that of the host that failed, also for a script that does not use trainkit."""
    script = "import os, sys, time; print(os.uname().nodename, sys.argv[1:]); rank = int(os.environ['RANK'])"
    (tmp_path / "script.py").write_text(f"{script}; time.sleep(0.5 * (1 - rank)); sys.exit(1 + 6 * rank)\n")
    program = start(hosts, tmp_path, "script.py", "it's")
    assert program.code() == 7, program.output
    for rank, address in enumerate(ADDRESSES):
        assert f"{address}: at host-{rank}\n" in program.output
        assert f'{address}: host-{rank} ["it\'s"]\n' in program.output


@pytest.mark.slow
def test_one_command_trains_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = start_task(hosts, tmp_path, Task(str(run)))
    assert program.code() == 0, program.output
    found = {(step, m % 10**6): entry["loss"] for (step, m), entry in journal(run).items()}
    assert found == {where: loss.hex() for where, loss in trained(CASE, 2).losses.items()}
    worlds = [json.loads((run / f"world-0-{rank}").read_text()) for rank in range(2)]
    assert [(world["host"], world["node"], world["local_size"]) for world in worlds] == [("host-0", 0, 1), ("host-1", 1, 1)]
    assert f"{ADDRESSES[0]}: trainkit: 2 processes on 2 nodes, started by trainkit launch" in program.output


@pytest.mark.slow
def test_a_launcher_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    """If the launcher is killed, both hosts save a checkpoint and leave no process running."""
    run = tmp_path / "run"
    program = start_task(hosts, tmp_path, Task(str(run), gate=3))
    gates = [run / f"gate-0-{rank}" for rank in range(2)]
    wait_until(lambda: all(gate.exists() for gate in gates) or program.process.poll() is not None)
    assert all(gate.exists() for gate in gates), program.output
    os.kill(launcher(), signal.SIGKILL)
    (run / "open").touch()
    wait_until(lambda: hosts.processes(0) == hosts.processes(1) == 0)
    assert list(run.rglob("step-*"))


# -------------------------------------------------------------------------------------------------------------- a real ssh

CONFIGURATION = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/user-key.pub
PidFile none
StrictModes no
UsePAM no
"""
CLIENT = """\
Host node
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user-key
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""
# A worker with a child process; it saves when it gets SIGTERM.
WORKER = """\
import os, signal, subprocess, sys, time
def end(number, frame):
    print("saving", flush=True)
    open("saved", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(sys.argv[1:], os.environ.get("LOCAL_WORLD_SIZE"), flush=True)
with open("new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("new", "ready")
if sys.argv[1] == "fail":
    sys.exit(7)
time.sleep(1000)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[list[str]]:
    """The ssh command that reaches this host under the name `node`."""
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no sshd (Debian: openssh-server)")
    folder, port = tmp_path / "keys", free_port()
    folder.mkdir(mode=0o700)
    for key in ("host-key", "user-key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "server").write_text(CONFIGURATION.format(folder=folder, port=port))
    (folder / "client").write_text(CLIENT.format(folder=folder, port=port))
    log = folder / "log"
    process = subprocess.Popen([sshd, "-D", "-f", str(folder / "server"), "-E", str(log)], stdin=subprocess.DEVNULL)
    command = ["ssh", "-F", str(folder / "client")]
    try:
        deadline = time.monotonic() + 20
        while subprocess.run([*command, "-o", "BatchMode=yes", "node", "true"], capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"sshd does not run here: {log.read_text()[-300:] if log.exists() else 'no log'}")
            time.sleep(0.1)
        yield command
    finally:
        process.terminate()
        process.wait()


def launch(ssh: list[str], argument: str) -> subprocess.Popen[str]:
    Path("script.py").write_text(WORKER)
    Path("hosts").write_text("node slots=1\n")
    options = ["--hostfile", "hosts", "--ssh", " ".join(ssh), "--export", "PYTHONPATH"]
    return subprocess.Popen(
        [sys.executable, "-m", "trainkit", "launch", *options, "script.py", argument, "it's\n~.\n~~"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_exit_code_by_a_real_ssh(server: list[str]) -> None:
    process = launch(server, "fail")
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output, errors) == (7, "['fail', \"it's\\n~.\\n~~\"] 1\n", "")


@pytest.mark.parametrize("sent, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_stopping_by_a_real_ssh(server: list[str], sent: signal.Signals, code: int) -> None:
    """When the launcher gets SIGTERM or is killed, the worker saves and no process is left."""
    process = launch(server, "wait")
    wait_until(lambda: Path("ready").exists() or process.poll() is not None)
    pids = [int(pid) for pid in Path("ready").read_text().split()]
    os.killpg(process.pid, sent)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    wait_until(lambda: not any(alive(pid) for pid in pids))
    assert Path("saved").exists()
