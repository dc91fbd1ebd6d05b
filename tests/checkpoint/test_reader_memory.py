"""The memory for reading is bounded by the sizes of the files, whatever their content is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.resume.checkpoints import digest, make, names, seal
from helpers.support import run_python

from trainkit.checkpoint.checksum import DEFAULT_CHECKSUM
from trainkit.checkpoint.manifest import MANIFEST

# In a separate process, for each checkpoint: the error, and by how many bytes the peak memory grew.
MEASURE = """
import os, sys
import torch
from trainkit.checkpoint import Checkpoint, open_checkpoint
from trainkit.errors import TrainkitError

def peak():
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0]) * 1024

ordinary, *paths = sys.argv[1:]
open_checkpoint(ordinary).read()  # modules that are loaded on first use
for path in paths:
    for action in (Checkpoint.read, Checkpoint.verify, lambda checkpoint: checkpoint.read(mapped=True)):
        child = os.fork()
        if child == 0:
            before, said = peak(), "read"
            try:
                result = action(open_checkpoint(path))
            except TrainkitError as error:
                said = type(error).__name__
            print(said, peak() - before, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


def measure(ordinary: Path, *paths: Path) -> list[tuple[str, int]]:
    """Return (error, growth of the memory in bytes) three times per checkpoint: for reading, verifying and mapped reading."""
    done = run_python("-W", "ignore", "-c", MEASURE, str(ordinary), *map(str, paths))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * len(paths), done.stderr
    return [(said, int(grown)) for said, grown in lines]


LARGE: dict[str, Callable[[], bytes]] = {
    "empty maps": lambda: b'{"x":[' + b"{}," * 1_000_000 + b"{}]}",
    "empty lists": lambda: b'{"x":[' + b"[]," * 1_000_000 + b"[]]}",
    "small maps": lambda: b'{"x":[' + b'{"":0},' * 400_000 + b"0]}",
    "numbers": lambda: b'{"x":[' + b"1.5," * 800_000 + b"0]}",
    "texts": lambda: b'{"x":["' + b'","'.join(b"%05x" % number for number in range(400_000)) + b'"]}',
    "keys": lambda: b'{"x":{"' + b'":0,"'.join(b"%05x" % number for number in range(400_000)) + b'":0}}',
    "tuples": lambda: b'{"x":[' + b'{"$tuple":[]},' * 200_000 + b"0]}",
    "one text": lambda: b'{"x":"' + b"x" * 8_000_000 + b'"}',
    "escapes": lambda: b'{"x":"' + b"\\ud83d\\ude00" * 500_000 + b'"}',
}


def file_of_tensors(path: Path, size: int) -> None:
    """Write a sparse file with one large tensor."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [size - 136], "data_offsets": [0, size - 136]}}).encode().ljust(128)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, size)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of the memory is read from /proc")
@pytest.mark.parametrize("kinds", [["tuples"], pytest.param([*LARGE], marks=pytest.mark.slow)])
def test_memory_is_bounded(run_dir: Path, kinds: list[str]) -> None:
    """Reading needs at most 64 MiB, plus 40 times the size of the JSON files, plus the tensor files that are read."""
    paths = {kind: make(run_dir / kind) for kind in ("ordinary", "tensors", "manifest", *kinds)}
    file_of_tensors(paths["tensors"] / "model.safetensors", 200 * 2**20)
    seal(paths["tensors"], lambda manifest: manifest.update(aliases={}))
    entry = {"size": 0, DEFAULT_CHECKSUM: digest(b"")}
    seal(paths["manifest"], lambda manifest: manifest["files"].update({f"{number:x}": entry for number in range(20_000)}))
    for kind in kinds:
        (paths[kind] / "state.json").write_bytes(LARGE[kind]())
        seal(paths[kind])
    measured = measure(paths["ordinary"], *paths.values())
    for number, (kind, path) in enumerate(paths.items()):
        for action, (said, grown) in zip(("read", "verify", "map"), measured[3 * number : 3 * number + 3], strict=True):
            assert said == ("CorruptCheckpointError" if kind == "manifest" else "read"), (kind, action)
            files = {name: (path / name).stat().st_size for name in names(path)}
            json_size = files[MANIFEST] + files["state.json"]
            tensor_size = sum(size for name, size in files.items() if name.endswith(".safetensors") and action == "read")
            assert grown <= 64 * 2**20 + 40 * json_size + tensor_size, (kind, action)
