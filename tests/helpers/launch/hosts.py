"""`Hosts`: two simulated hosts on one machine: two network namespaces, connected by a virtual cable.

Each host has its own network, host name and processes. The hosts share the file system, but a program can have another folder
mounted at a path. All programs run in the namespaces of one small process that reads from a pipe. When the pipe closes, also
because the test process was killed, the kernel ends all processes in the namespaces and removes them. The namespaces have no
names outside, so several tests can run at the same time. With user namespaces, no root is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

import pytest
from helpers.patience import PATIENCE

__all__ = ["ADDRESSES", "NAMES", "Hosts", "Program"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_ADMIN = ":/usr/sbin:/sbin"  # some of the tools are here, which may not be in PATH
_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
NAMES = ("host-0", "host-1")
_NOWHERE = "02:00:00:00:00:99"  # a hardware address that does not exist

# `ip netns` keeps names in /var/run/netns. The one that is mounted here is visible only in these namespaces.
_SET_UP = f"""
mkdir -p /var/run/netns 2> /dev/null || {{ mount -t tmpfs none /run; mkdir -p /var/run/netns; }}
mount -t tmpfs none /var/run/netns
for host in {" ".join(NAMES)}; do ip netns add $host; done
ip link add eth0 netns {NAMES[0]} type veth peer name eth0 netns {NAMES[1]}
ip -n {NAMES[0]} addr add {ADDRESSES[0]}/24 dev eth0
ip -n {NAMES[1]} addr add {ADDRESSES[1]}/24 dev eth0
for host in {" ".join(NAMES)}; do ip -n $host link set lo up; ip -n $host link set eth0 up; done
echo ready
cat
"""

# $1: host name, $2: working directory, $3: folder to mount at the path $4 (may be empty); the rest is the program
_ENTER = 'hostname "$1"; [ -z "$3" ] || mount --bind "$3" "$4"; cd "$2"; shift 4; exec "$@"'


class Program:
    """A program that runs on a host.

    Attributes:
        process: The process that the test has started to run the program.
        file: File with its output.
    """

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process, self.file = process, file

    @property
    def output(self) -> str:
        """Its output so far."""
        return self.file.read_text()

    def code(self, patience: float = PATIENCE) -> int:
        """Wait until the program exits, at most `patience` seconds; returns its exit code, negative for a signal."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {patience} s:\n{self.output}") from None


class Hosts:
    """Two hosts, 0 and 1, with the addresses `ADDRESSES`; a context manager.

    The test is skipped if the tools are missing or the system does not allow such namespaces.

    Args:
        folder: Folder for the output files of programs.
    """

    def __init__(self, folder: Path) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=os.environ["PATH"] + _ADMIN) is None]
        if missing:
            pytest.skip(f"network namespaces need {', '.join(missing)} (of iproute2 and util-linux)")
        self._folder = folder
        self._programs: list[Program] = []
        reasons = []
        for self._as_root in [True, False] if os.geteuid() == 0 else [False]:
            self._keeper = self._keep()
            assert self._keeper.stdout is not None
            if self._keeper.stdout.readline() == "ready\n":
                break
            reasons.append(self._keeper.communicate()[1].strip())
        else:
            pytest.skip(f"the system allows no network namespaces: {'; '.join(reasons)}")
        self._first = _child_of(self._keeper.pid)

    def _keep(self) -> subprocess.Popen[str]:
        """Start the process whose namespaces all programs use."""
        user = [] if self._as_root else ["--user", "--map-root-user"]
        return subprocess.Popen(
            ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--mount-proc", "sh", "-ec", _SET_UP],
            env=_with_tools(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()  # this ends all processes
        self._keeper.stdin = None
        for program in self._programs:
            program.code()
        self._keeper.communicate()

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str],
        instead: tuple[Path, Path] | None = None,
    ) -> Program:
        """Start a program on a host.

        Args:
            host: 0 or 1.
            command: Command line of the program.
            env: All environment variables of the program.
            instead: `(this, that)`: mount the folder `this` at the path `that`.
        """
        file = self._folder / f"host-{host}-{len(self._programs)}.txt"
        this, that = map(str, instead or ("", ""))
        enter = ["sh", "-ec", _ENTER, "sh", NAMES[host], os.getcwd(), this, that]
        with file.open("wb") as output:
            process = subprocess.Popen(
                [*self._inside, "ip", "netns", "exec", NAMES[host], "unshare", "--uts", *enter, *command],
                env=_with_tools(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._programs.append(Program(process, file))
        return self._programs[-1]

    def cut(self) -> None:
        """Drop all packets between the hosts; neither gets an error."""
        for host, other in ((0, 1), (1, 0)):
            self._ip(host, "neigh", "replace", ADDRESSES[other], "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def mend(self) -> None:
        """Undo `cut`."""
        for host, other in ((0, 1), (1, 0)):
            self._ip(host, "neigh", "del", ADDRESSES[other], "dev", "eth0")

    def unplug(self, host: int) -> None:
        """Take down the network interface of a host, as if its cable was pulled out."""
        self._ip(host, "link", "set", "eth0", "down")

    def plug_in(self, host: int) -> None:
        """Undo `unplug`."""
        self._ip(host, "link", "set", "eth0", "up")

    def kill(self, host: int) -> None:
        """SIGKILL to all processes of a host."""
        self._run("sh", "-c", f"kill -9 $(ip netns pids {NAMES[host]})")

    def processes(self, host: int) -> int:
        """Number of processes of a host."""
        return len(self._run("ip", "netns", "pids", NAMES[host]).split())

    @property
    def _inside(self) -> list[str]:
        user = [] if self._as_root else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self._first}", *user, "--mount", "--net", "--pid"]

    def _ip(self, host: int, *command: str) -> None:
        self._run("ip", "-n", NAMES[host], *command)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            [*self._inside, *command], env=_with_tools(os.environ), capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


def _with_tools(env: Mapping[str, str]) -> dict[str, str]:
    return {**env, "PATH": env["PATH"] + _ADMIN}


def _child_of(parent: int) -> int:
    """The process id of a process's first child."""
    deadline = monotonic() + 10
    while monotonic() < deadline:
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                found = int(file.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has exited
                continue
            if found == parent:
                return int(file.parent.name)
        sleep(0.01)
    raise AssertionError("unshare has started nothing")
