"""The hostfile: valid lines, and errors with the number of the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.launch import Host, read_hostfile
from trainkit.errors import ConfigurationError

TEXT = """\
# the nodes of rack 7

worker-0 slots=4
\tuser@10.0.0.7\t slots=16   # with a name
  fe80::1 slots=1
#worker-9 slots=4
"""


def test_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(TEXT)
    hosts = read_hostfile("hosts")
    assert hosts == [Host("worker-0", 4), Host("user@10.0.0.7", 16), Host("fe80::1", 1)]
    assert [host.address for host in hosts] == ["worker-0", "10.0.0.7", "fe80::1"]


def test_deepspeed_reads_the_same(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    (tmp_path / "hosts").write_text(TEXT)
    assert _parse_hostfile(TEXT.splitlines()) == {host.name: host.slots for host in read_hostfile("hosts")}


@pytest.mark.parametrize("text, words", [
    ("a slots=4\n\nb\n", "hosts, line 3: expected a host and its number of processes, such as 'node1 slots=8', not 'b'."),
    ("a slots=0", "hosts, line 1: .* not 'a slots=0'."),
    ("a slots=-1", "hosts, line 1: "),
    ("a slots = 4", "hosts, line 1: "),
    ("a slots=4 max_slots=8", "hosts, line 1: .* not 'a slots=4 max_slots=8'."),
    ("slots=4", "hosts, line 1: "),
    ("-oProxyCommand=x slots=4", "hosts, line 1: "),
    ("a slots=4\nb slots=4\na slots=2", "hosts, line 3: 'a' is already in line 1. Name each host once, with all its slots."),
    ("a slots=4\nme@a slots=4", "hosts, line 2: 'a' is already in line 1"),
    ("# nothing\n\n", "hosts contains no hosts. Expected lines such as: node1 slots=8"),
])  # fmt: skip
def test_wrong_lines(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        read_hostfile("hosts")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the hostfile 'nowhere' cannot be read: No such file"):
        read_hostfile("nowhere")
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="the hostfile 'hosts' cannot be read: it is not a text file"):
        read_hostfile("hosts")
