"""A local replacement for the program `ssh -tt`, with a terminal: `from helpers.launch.terminals import write_ssh`."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["write_ssh"]

# Processes of the command get SIGHUP when this program ends, because its terminal closes, like with ssh.
_SSH = """\
#!{python}
import os, pty, sys
words = sys.argv[1:]
options = [word for word in words if word.startswith("-")]
assert {{"-tt", "-enone", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no"}} <= {{*options}}, options
del words[: len(options)]
host, command = words
if host == "away":
    sys.exit(print("ssh: connect to host away port 22: Connection refused", file=sys.stderr) or 255)
code = os.waitstatus_to_exitcode(pty.spawn([*{enter}, "sh", "-c", command]))
sys.exit(code if code >= 0 else 255)
"""


def write_ssh(folder: Path, enter: str = "[]") -> str:
    """Write the program to a file; returns its path.

    Args:
        folder: Folder for the file.
        enter: Python expression for a list: the command that runs the rest of its arguments on the host `host`.
    """
    path = folder / "ssh"
    path.write_text(_SSH.format(python=sys.executable, enter=enter))
    path.chmod(0o755)
    return str(path)
