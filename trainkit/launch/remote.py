"""`run_hosts`: run the parts of a job on several hosts by `ssh -tt`; returns the exit code of the host that failed first.

ssh opens a terminal on each host. When ssh ends, because this process or the connection does, the terminal hangs up, which ends
the processes in it. A terminal alone merges the two output streams, cannot send SIGTERM, and does not detect a silent network.
So the other end, `trainkit.cli.launch_child`, sends lines that begin with a mark and the kind of line: `1` and `2` for
output, `v` for its versions when it is ready, `c` for its exit code; `s` requests the script. It receives `START`,
`HEARTBEAT` and `SIGNAL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit._version import __version__
from trainkit.console import echo
from trainkit.distributed.failure import names_another_failure
from trainkit.distributed.wire import decode
from trainkit.errors import ConfigurationError
from trainkit.launch.workers import INTERRUPTED, PREEMPTED, end_with_parent

__all__ = ["HEARTBEAT", "MARK", "SIGNAL", "START", "host_script", "run_hosts"]

MARK = b"\x1e"
START, HEARTBEAT, SIGNAL = b"start", b"heartbeat", b"signal "  # lines to the hosts
_EXIT_CODE = re.compile(rb"\d{1,3}")
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")  # a progress bar returns to the start of the line

# a terminal without escapes (a line "~." would close the connection); no prompts; no message when the terminal closes
_OPTIONS = ("-tt", "-enone", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10", "-oServerAliveInterval=20")
_NO_MASTER = "-oControlMaster=no"  # use the user's shared connection, but open none: it would keep the output open
# bash reads the script from the terminal, so that its values do not appear in the list of processes
_READ_SCRIPT = """exec bash -c 'stty raw -echo && printf "\\036s\\n" && eval "$(head -c {})"'"""
_STEP_S = 0.05  # seconds between two checks of the hosts
_HEARTBEAT_S = 10.0
_FAILURE_TIMEOUT_S = 15.0  # seconds for the other hosts to end by themselves after a failure
_AGENT_TIMEOUT_S = 15.0  # seconds for an agent to end, in addition to the grace period of its workers
_CLOSE_TIMEOUT_S = 2.0  # seconds for ssh to end
_SSH_FAILED = 255
_UNSPECIFIC = (1, 134)  # exit codes of processes that end because another one has failed


def host_script(python: str, folder: str, setup: str, exports: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The bash script of a host: change to the folder, export, set up, run its part of `trainkit launch`."""
    lines = [f"cd -- {shlex.quote(folder)} || exit", *(f"export {name}={shlex.quote(exports[name])}" for name in exports)]
    lines += [f"eval {shlex.quote(setup)} </dev/null || exit"] if setup else []
    part = f'exec "${{TRAINKIT_PYTHON:-$python}}" -u -m trainkit.cli.launch_child {shlex.join(arguments)}'
    return "\n".join([*lines, f"python={shlex.quote(python)}", part])


def run_hosts(scripts: Mapping[str, str], ssh: Sequence[str], grace: float, join_timeout: float) -> int:
    """Run a script on each host and show its output; signals to this process are sent to all hosts.

    Args:
        scripts: by host; see `host_script`.
        ssh: the command, with the user's options.
        grace: seconds for workers to save and end after a signal.
        join_timeout: seconds for all hosts to become ready. No worker starts before.

    Returns:
        0; 143 if the job was stopped and has saved; 130 after Ctrl-C; else the code of the host that failed first, or 1 if its
        connection was lost.

    Raises:
        ConfigurationError: ssh is missing, a host cannot be reached, its set-up failed, or its versions differ.
    """
    if shutil.which(ssh[0]) is None:
        raise ConfigurationError(
            f"the program {ssh[0]!r} was not found. Install ssh (Debian, Ubuntu: apt install openssh-client; Fedora, RHEL: dnf "
            "install openssh-clients), or set its path: --ssh '/path/to/ssh -p 2222'"
        )
    return asyncio.run(_Launcher(grace).run(scripts, ssh, join_timeout))


class _Host:
    """A host and its ssh; `code` is the exit code that it has sent, `tail` its last error lines."""

    def __init__(self, name: str, script: bytes, process: Any) -> None:
        self.name = name
        self.script = script
        self.process = process
        self.versions: dict[str, str] = {}
        self.code: int | None = None
        self.tail: deque[str] = deque(maxlen=200)

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "")

    @property
    def failed_after_another(self) -> bool:
        """Whether it failed because another host did."""
        return names_another_failure("\n".join(list(self.tail)[-8:]))


class _Launcher:
    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._hosts: list[_Host] = []
        self._ended: list[_Host] = []  # Hosts in the order in which they ended.
        self._failed: list[_Host] = []  # Hosts that failed before the others were stopped.
        self._signals: list[int] = []
        self._hung_up = False  # the only signal so far is SIGHUP
        self._last_error: _Host | None = None  # the host of the last line on standard error

    async def run(self, scripts: Mapping[str, str], ssh: Sequence[str], join_timeout: float) -> int:
        self._screen = asyncio.Lock()
        self._catch_signals()
        reading: list[asyncio.Task[None]] = []
        try:
            for name, script in scripts.items():
                host = _Host(name, script.encode(), await _connect(name, script, ssh))
                self._hosts.append(host)
                reading.append(asyncio.create_task(self._read(host)))
            self._send_heartbeats()
            if not await self._wait_until_ready(join_timeout, ssh):
                return INTERRUPTED if self._signals[0] == signal.SIGINT else PREEMPTED
            self._check_versions()
            self._send(START)
            await self._wait_for_end()
            return await self._result()
        finally:
            for stop in ("terminate", "kill"):
                for host in self._hosts:
                    with contextlib.suppress(ProcessLookupError):
                        getattr(host.process, stop)()
                if reading:
                    await asyncio.wait(reading, timeout=_CLOSE_TIMEOUT_S)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup, or with & in a shell
                loop.add_signal_handler(number, self._note, number)
        loop.add_signal_handler(signal.SIGTSTP, lambda: None)  # a stopped process would send no heartbeats

    def _note(self, number: int) -> None:
        """Record a stop request. When a terminal closes, SIGHUP may come more than once, and SIGTERM after it."""
        if number == signal.SIGHUP:
            if not self._signals:
                self._hung_up = True
                self._signals.append(signal.SIGTERM)
        elif self._hung_up and number == signal.SIGTERM:
            self._hung_up = False
        else:
            self._signals.append(number)

    async def _read(self, host: _Host) -> None:
        """Show the output of a host until it has sent its exit code, or its terminal has hung up."""
        rest = b""
        try:
            while host.code is None and (data := await host.process.stdout.read(65536)):
                *lines, rest = _LINE_END.split(rest + data)
                for line in lines:
                    await self._receive(host, line)
            await self._receive(host, rest)
        finally:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(host.process.wait(), _CLOSE_TIMEOUT_S)
            self._ended.append(host)

    async def _receive(self, host: _Host, line: bytes) -> None:
        kind, rest = (line[1:2], line[2:]) if line.startswith(MARK) else (b"", line)
        if kind == b"s":
            host.process.stdin.write(host.script)
        elif kind == b"v" and (versions := _versions(rest)):
            host.versions = versions
        elif kind == b"c" and _EXIT_CODE.fullmatch(rest):
            host.code = int(rest)
        elif line:
            text = rest.decode(errors="replace")
            if kind != b"1":  # errors, and all that comes from ssh and the set-up
                host.tail.append(text)
            await self._show(1 if kind in (b"", b"1") else 2, text, host)

    async def _show(self, number: int, text: str, host: _Host | None = None) -> None:
        """Print a line in a thread, because a terminal may be stopped, and heartbeats must continue."""
        text = f"trainkit: {text}" if host is None else f"{host.name}: {text}" if len(self._hosts) > 1 else text
        async with self._screen:
            await asyncio.to_thread(echo, text, file=sys.stdout if number == 1 else sys.stderr, flush=True)
            self._last_error = host if number == 2 else self._last_error

    def _send_heartbeats(self) -> None:
        self._send(HEARTBEAT)
        asyncio.get_running_loop().call_later(_HEARTBEAT_S, self._send_heartbeats)

    def _send(self, line: bytes) -> None:
        for host in self._hosts:
            if host.versions and host not in self._ended:  # the set-up must not read it
                host.process.stdin.write(line + b"\n")

    async def _wait_until_ready(self, join_timeout: float, ssh: Sequence[str]) -> bool:
        """Whether all hosts became ready before a signal."""
        deadline = time.monotonic() + join_timeout
        while missing := [host.name for host in self._hosts if not host.versions]:
            await asyncio.sleep(_STEP_S)
            if self._signals:
                return False
            if self._ended:
                raise ConfigurationError(_why_not_ready(self._ended[0], ssh))
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"hosts that are not ready after {join_timeout:.0f} s: {', '.join(missing)}. If the set-up takes longer, "
                    "wait longer: export TRAINKIT_JOIN_TIMEOUT=1800"
                )
        return True

    def _check_versions(self) -> None:
        expected = {"trainkit": ("this host", __version__)}  # This host may have no GPU and another version of torch.
        for host in self._hosts:
            for package, version in host.versions.items():
                other, same = expected.setdefault(package, (host.name, version))
                if version != same:
                    raise ConfigurationError(
                        f"{host.name} has {package} {version}, but {other} has {same}. All hosts need the same version. To use "
                        "another Python on a host: --setup 'TRAINKIT_PYTHON=/path/to/python'"
                    )

    async def _wait_for_end(self) -> None:
        """Pass signals on, and stop the other hosts after a failure; until all have ended, or their time is up."""
        sent, deadline = 0, math.inf
        while len(self._ended) < len(self._hosts):
            await asyncio.sleep(_STEP_S)
            if not self._signals:
                self._failed = [host for host in self._ended if host.code != 0]
                if self._failed and deadline == math.inf:
                    saves = self._failed[0].code in (PREEMPTED, INTERRUPTED)
                    deadline = time.monotonic() + _FAILURE_TIMEOUT_S + (self._grace if saves else 0.0)
                if time.monotonic() > deadline:
                    self._signals.append(signal.SIGTERM)
                    deadline = math.inf
            elif time.monotonic() > deadline:
                return
            for number in self._signals[sent:]:
                self._send(SIGNAL + b"%d" % number)
                timeout = _AGENT_TIMEOUT_S + (0.0 if sent else self._grace)
                again = self._signals == [signal.SIGINT]  # the user can press Ctrl-C again
                deadline = min(deadline, math.inf if again else time.monotonic() + timeout)
                sent += 1

    async def _result(self) -> int:
        """The exit code of the job. If it is not 0, the last output is the reason."""
        await self._explain_missing_codes()
        codes = [1 if host.code is None else host.code for host in self._hosts]
        if signal.SIGINT in self._signals[:1]:
            return INTERRUPTED if any(codes) else 0
        if not self._failed:
            return PREEMPTED if PREEMPTED in codes else max(codes)
        first = min(self._failed, key=lambda host: (host.failed_after_another, host.code in _UNSPECIFIC))
        _, trace, rest = "\n".join(first.tail).rpartition("Traceback (most recent call last)")
        if trace and self._last_error is not first:
            await self._show(2, f"{first.name} failed first, with:")
            for line in (trace + rest).split("\n"):
                await self._show(2, line, first)
        return first.code or 1

    async def _explain_missing_codes(self) -> None:
        for host in (host for host in self._ended if host.code is None):
            why = f"; error of ssh: {host.last_line}" if host.process.returncode == _SSH_FAILED and host.last_line else ""
            await self._show(2, f"{host.name} ended without an exit code: connection lost, or agent killed{why}")
        if late := [host.name for host in self._hosts if host not in self._ended]:
            await self._show(2, f"hosts that did not end in time: {', '.join(late)}. Closing the connections to end them.")


def _versions(line: bytes) -> dict[str, str]:
    """The versions of a host by package; empty if the line is something else, such as output of its set-up."""
    try:
        versions = decode(line)
    except ValueError:
        return {}
    known = isinstance(versions, dict) and all(isinstance(value, str) for value in versions.values())
    return versions if known else {}


async def _connect(name: str, script: str, ssh: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*ssh, *_OPTIONS, _NO_MASTER, name, _READ_SCRIPT.format(len(script.encode()))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # ssh must not get the Ctrl-C of the terminal, which this process passes on
        preexec_fn=end_with_parent,  # elsewhere than on Linux the heartbeats end
    )


def _why_not_ready(host: _Host, ssh: Sequence[str]) -> str:
    why = host.last_line
    code = host.process.returncode
    if code == _SSH_FAILED:
        return (
            f"{host.name} cannot be reached: {why or 'ssh printed no error'}. This command must work without a prompt: "
            f"{shlex.join(ssh)} -o BatchMode=yes {host.name} true"
        )
    hint = ""
    if "No module named" in why or ": cd: " in why or code in (126, 127):
        hint = (
            f" trainkit {__version__}, its Python and the working directory must exist there, under the same paths as on this "
            "host. To use another Python: --setup 'TRAINKIT_PYTHON=/path/to/python'; for missing packages: --export PYTHONPATH"
        )
    return f"the set-up of {host.name} ended with exit code {code}: {why or 'it printed no error'}.{hint}"
