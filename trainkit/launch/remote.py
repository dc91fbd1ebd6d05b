"""``run_hosts``: run the parts of a job on several hosts by ``ssh -tt``; returns the exit code of the host that failed first.

ssh opens a terminal on each host. When ssh ends, because this process or the connection does, the terminal hangs up, which ends
what runs there. A terminal alone merges the two streams of output, has no key for SIGTERM and no word for a silent network.
So the other end, :mod:`trainkit.cli.launch_child`, sends lines that begin with a mark and the kind of line: ``1`` and ``2`` for
output, ``v`` for its versions when it is ready, ``c`` for its exit code; ``s`` asks for the script. It gets :data:`START`,
:data:`HEARTBEAT` and :data:`SIGNAL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
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
from trainkit.distributed.failure import names_another_failure
from trainkit.errors import ConfigurationError
from trainkit.launch.verdict import INTERRUPTED, PREEMPTED

__all__ = ["HEARTBEAT", "LINE_END", "MARK", "SIGNAL", "START", "host_script", "run_hosts"]

MARK, LINE_END = b"\x1e", re.compile(rb"\r?\n|\r(?=[^\n])")  # a progress bar returns to the start of the line
START, HEARTBEAT, SIGNAL = b"start", b"heartbeat", b"signal "  # lines to the hosts

# a terminal without escapes, in which a line "~." would close the connection; no questions; no word when the terminal closes
_OPTIONS = ("-tt", "-enone", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10", "-oServerAliveInterval=20")
# bash reads the script from the terminal, so that no list of processes shows the values in it
_READ_SCRIPT = """exec bash -c 'stty raw -echo && printf "\\036s\\n" && eval "$(head -c {})"'"""
_HEARTBEAT = 10.0  # seconds
_FAILURE_TIMEOUT = 15.0  # seconds for the other hosts to end by themselves after a failure
_AGENT_TIMEOUT = 15.0  # seconds for an agent to end, in addition to the grace period of its workers
_CLOSE_TIMEOUT = 2.0  # seconds for ssh to end
_SSH_FAILED = 255
_UNSPECIFIC = (1, 134)  # exit codes of processes that end because another one has failed


def host_script(python: str, folder: str, setup: str, exports: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The bash script of a host: change to the folder, export, set up, run its part of ``trainkit launch``."""
    python = re.sub(r'(["$`\\])', r"\\\1", python)
    lines = [f"cd -- {shlex.quote(folder)} || exit", *(f"export {name}={shlex.quote(exports[name])}" for name in exports)]
    lines += [f"eval {shlex.quote(setup)} </dev/null || exit"] if setup else []
    return "\n".join([*lines, f'exec "${{TRAINKIT_PYTHON:-{python}}}" -u -m trainkit.cli.launch_child {shlex.join(arguments)}'])


def run_hosts(scripts: Mapping[str, str], ssh: Sequence[str], grace: float, join_timeout: float) -> int:
    """Run a script on each host and show its output; signals to this process are sent to all hosts.

    Args:
        scripts: by host; see :func:`host_script`.
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
    return asyncio.run(_Launcher(ssh, grace).run(scripts, join_timeout))


class _Host:
    """A host and its ssh; ``code`` is its exit code, ``lost`` that it has sent none, ``tail`` its last error lines."""

    def __init__(self, name: str, script: bytes, process: Any) -> None:
        self.name, self.script, self.process = name, script, process
        self.versions: dict[str, str] = {}
        self.sent_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.code: int | None = None
        self.lost = False
        self.tail: deque[str] = deque(maxlen=200)

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "")

    @property
    def has_followed(self) -> bool:
        """Whether it failed because another host did."""
        return names_another_failure("\n".join(list(self.tail)[-8:]))


class _Launcher:
    def __init__(self, ssh: Sequence[str], grace: float) -> None:
        self._ssh, self._grace = ssh, grace
        self._hosts: list[_Host] = []
        self._failed: list[_Host] = []  # in this order
        self._signals: list[int] = []
        self._last_error: _Host | None = None  # the host of the last line on standard error

    async def run(self, scripts: Mapping[str, str], join_timeout: float) -> int:
        self._changed, self._screen = asyncio.Event(), asyncio.Lock()
        self._catch_signals()
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        # in a session of its own ssh does not get the Ctrl-C of the terminal, which this process passes on
        options: dict[str, Any] = {"start_new_session": True, "preexec_fn": _end_with_parent, **pipes}
        watching: list[asyncio.Task[None]] = []
        try:
            for name, script in scripts.items():
                read_script = _READ_SCRIPT.format(len(script.encode()))
                process = await asyncio.create_subprocess_exec(*self._ssh, *_OPTIONS, name, read_script, **options)
                self._hosts.append(_Host(name, script.encode(), process))
            watching += [asyncio.create_task(self._watch(host)) for host in self._hosts]
            heartbeat = asyncio.create_task(self._heartbeat())
            if not await self._wait_until_ready(join_timeout):
                return INTERRUPTED if self._signals[0] == signal.SIGINT else PREEMPTED
            self._send(START)
            await self._wait_for_end()
            heartbeat.cancel()
            return await self._result()
        finally:
            for stop in ("terminate", "kill"):
                for host in self._hosts:
                    with contextlib.suppress(ProcessLookupError):
                        getattr(host.process, stop)()
                if watching:
                    await asyncio.wait(watching, timeout=_CLOSE_TIMEOUT)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup, or with & in a shell
                loop.add_signal_handler(number, self._note, signal.SIGTERM if number == signal.SIGHUP else number)
        loop.add_signal_handler(signal.SIGTSTP, lambda: None)  # a stopped process would send no heartbeats

    def _note(self, number: int) -> None:
        self._signals.append(int(number))
        self._changed.set()

    async def _watch(self, host: _Host) -> None:
        """Show the output of a host until it has sent its exit code, or its terminal has hung up."""
        reads = [self._read(host, number, getattr(host.process, name)) for number, name in ((1, "stdout"), (2, "stderr"))]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(each) for each in (*reads, host.process.wait())]
        await asyncio.wait({tasks[0], host.sent_code}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT)  # another process may hold the output of ssh open
        host.lost = not host.sent_code.done()
        host.code = 1 if host.lost else host.sent_code.result()
        self._changed.set()

    async def _read(self, host: _Host, number: int, stream: asyncio.StreamReader) -> None:
        """Read the terminal of the host (number 1), or what ssh itself prints (number 2)."""
        rest = b""
        while data := await stream.read(65536):
            *lines, rest = LINE_END.split(rest + data)
            for line in lines:
                await self._receive(host, number, line)
        await self._receive(host, number, rest)

    async def _receive(self, host: _Host, number: int, line: bytes) -> None:
        kind = line[1:2] if number == 1 and line.startswith(MARK) else b""
        if kind == b"s":
            host.process.stdin.write(host.script)
        elif kind == b"v":
            host.versions = json.loads(line[2:])
            self._changed.set()
        elif kind == b"c":
            host.sent_code.set_result(int(line[2:]))
        elif kind or line:
            text = (line[2:] if kind else line).decode(errors="replace")
            if kind != b"1":  # errors, and all that comes from the set-up
                host.tail.append(text)
            await self._show(int(kind or number), text, host)

    async def _show(self, number: int, text: str, host: _Host | None = None) -> None:
        """Print a line in a thread, because a terminal may be stopped, and heartbeats must continue."""
        text = f"trainkit: {text}" if host is None else f"{host.name}: {text}" if len(self._hosts) > 1 else text
        async with self._screen:
            await asyncio.to_thread(print, text, file=sys.stdout if number == 1 else sys.stderr, flush=True)
            self._last_error = host if number == 2 else self._last_error

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT)
            self._send(HEARTBEAT)

    def _send(self, line: bytes) -> None:
        for host in self._hosts:
            if host.versions and host.code is None:  # the set-up must not read it
                host.process.stdin.write(line + b"\n")

    async def _wait(self, deadline: float) -> None:
        """Wait for a change until a time on the monotonic clock."""
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()

    async def _wait_until_ready(self, join_timeout: float) -> bool:
        """Whether all hosts became ready before a signal."""
        deadline = time.monotonic() + join_timeout
        while missing := [host for host in self._hosts if not host.versions]:
            await self._wait(deadline)
            if self._signals:
                return False
            for host in self._hosts:
                if host.code is not None:
                    raise ConfigurationError(_why_not_ready(host, self._ssh))
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"not ready after {join_timeout:.0f} s: {', '.join(host.name for host in missing)}. If the set-up takes "
                    "longer, set more seconds: export TRAINKIT_JOIN_TIMEOUT=1800"
                )
        expected = {"trainkit": ("this host", __version__)}  # which may have no GPU, and another torch
        for host in self._hosts:
            for package, version in host.versions.items():
                other, same = expected.setdefault(package, (host.name, version))
                if version != same:
                    raise ConfigurationError(
                        f"{host.name} has {package} {version}, but {other} has {same}. All hosts must have the same. To use "
                        "another Python on a host: --setup 'TRAINKIT_PYTHON=/path/to/python'"
                    )
        return True

    async def _wait_for_end(self) -> None:
        """Pass signals on, and stop the other hosts after a failure; until all have ended, or their time is up."""
        passed, stopping, deadline = 0, False, math.inf
        while any(host.code is None for host in self._hosts):
            await self._wait(deadline)
            for number in self._signals[passed:]:
                self._send(SIGNAL + b"%d" % number)
                timeout = _AGENT_TIMEOUT + (0.0 if passed else self._grace)
                again = self._signals == [signal.SIGINT]  # the user can press Ctrl-C again
                deadline, stopping = min(deadline, math.inf if again else time.monotonic() + timeout), True
                passed += 1
            failed = [host for host in self._hosts if host.code and host not in self._failed]
            if failed and not stopping:
                self._failed += failed
                saving = any(host.code in (PREEMPTED, INTERRUPTED) for host in failed)
                deadline = min(deadline, time.monotonic() + _FAILURE_TIMEOUT + (self._grace if saving else 0.0))
            if time.monotonic() > deadline:
                if stopping:
                    return
                self._send(SIGNAL + b"%d" % signal.SIGTERM)
                deadline, stopping = time.monotonic() + self._grace + _AGENT_TIMEOUT, True

    async def _result(self) -> int:
        """The exit code of the job; the user reads last why it is not 0."""
        explained = await self._explain_missing_codes()
        codes = [1 if host.code is None else host.code for host in self._hosts]
        if signal.SIGINT in self._signals[:1]:
            return INTERRUPTED if any(codes) else 0
        if not self._failed:
            return PREEMPTED if PREEMPTED in codes else max(codes)
        first = min(self._failed, key=lambda host: (host.has_followed, host.code in _UNSPECIFIC and not host.lost))
        _, trace, rest = "\n".join(first.tail).rpartition("Traceback (most recent call last)")
        if trace and not explained and self._last_error is not first:
            await self._show(2, f"{first.name} failed first, with:")
            for line in (trace + rest).split("\n"):
                await self._show(2, line, first)
        return first.code or 1

    async def _explain_missing_codes(self) -> bool:
        """Name the hosts that have sent no exit code; returns whether there are any."""
        for host in (lost := [host for host in self._hosts if host.lost]):
            why = f"; ssh says: {host.last_line}" if host.process.returncode == _SSH_FAILED and host.last_line else ""
            await self._show(2, f"{host.name} ended without an exit code: connection lost, or agent killed{why}")
        if late := [host.name for host in self._hosts if host.code is None]:
            await self._show(2, f"not ended in time: {', '.join(late)}. Closing the connection ends what runs there.")
        return bool(lost or late)


def _end_with_parent() -> None:
    """Before a process becomes ssh: let the kernel end it when this process is killed. Elsewhere the heartbeats end."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _why_not_ready(host: _Host, ssh: Sequence[str]) -> str:
    why = host.last_line
    code = host.process.returncode
    if code == _SSH_FAILED:
        return (
            f"{host.name} cannot be reached: {why or 'ssh gives no reason'}. This must work without a question: "
            f"{shlex.join(ssh)} -o BatchMode=yes {host.name} true"
        )
    hint = ""
    if "No module named" in why or ": cd: " in why or code in (126, 127):
        hint = (
            f" trainkit {__version__}, its Python and the working directory must be there under the same paths as here. To use "
            "another Python: --setup 'TRAINKIT_PYTHON=/path/to/python'; for packages that are missing: --export PYTHONPATH"
        )
    return f"the set-up of {host.name} ended with exit code {code}: {why or 'it gives no reason'}.{hint}"
