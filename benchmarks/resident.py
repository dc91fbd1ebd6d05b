"""The resident memory of this process, which `fsdp.py` and `zero.py` measure. Linux only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def resident(name: str) -> float:
    """A value of `/proc/self/status` in MB."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1e3


LOOK = """
import select, sys
most = 0
print(flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    with open(f"/proc/{sys.argv[1]}/status") as file:
        most = max(most, int(file.read().split("RssAnon:")[1].split()[0]))
print(most)
"""


class Peak:
    """The peak of the private memory in MB. Another process reads it each millisecond, since a thread might have to wait."""

    def __enter__(self) -> Peak:
        pipe = subprocess.PIPE
        self._looking = subprocess.Popen([sys.executable, "-c", LOOK, str(os.getpid())], stdin=pipe, stdout=pipe, text=True)
        assert self._looking.stdout is not None
        self._looking.stdout.readline()  # wait until it has started
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.01)
        said, _nothing = self._looking.communicate()
        self.found = int(said) / 1e3
