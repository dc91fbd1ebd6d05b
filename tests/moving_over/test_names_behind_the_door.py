"""Every public name of the real packages is there behind the door, or an error of ours; the versions are those we follow.

The names are read from the files of the packages, which are not imported. The imports run in a fresh Python with an open door.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.names import table

LEFT_OUT = (".test_utils", ".commands", "_graveyard", "__version__", "__about__", "__setup__")
PROGRAM = """
import importlib, json, sys
importlib.import_module("trainkit.compat." + sys.argv[1])
wrong = []
for module, name in json.load(sys.stdin):
    try:
        exec(f"from {module} import {name}")
    except ImportError as error:
        if f"{error}".endswith((".py)", "(unknown location)")) or str(error) == f"No module named {module!r}":
            wrong.append(str(error))
print(json.dumps(wrong))
"""


def names_of(package: Path, root: Path) -> list[tuple[str, str]]:
    """Module and public name of all classes, functions and values that the files of a package define."""
    pairs = set()
    for file in package.rglob("*.py"):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if any(text in module for text in LEFT_OUT):
            continue
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.ImportFrom) and file.name == "__init__.py":
                names = [alias.asname or alias.name for alias in node.names if node.level or package.name in str(node.module)]
            else:
                targets = node.targets if isinstance(node, ast.Assign) else []
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            pairs.update((module, name) for name in names if name[0] not in "_*")
    return sorted(pairs)


def check(framework: str, package: Path, root: Path, least: int) -> None:
    pairs = names_of(package, root)
    assert len(pairs) > least
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, framework]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.lightning
def test_names_of_lightning() -> None:
    root = Path(os.environ.get("TRAINKIT_LIGHTNING", ""))
    if not (root / "lightning").is_dir():
        pytest.skip("Lightning is not there: make test-lightning installs it")
    check("lightning", root / "lightning" / "pytorch", root, 350)
    assert [path.name for path in root.glob("lightning-*.dist-info")] == [
        f"lightning-{table('lightning')['version']}.dist-info"
    ]


def test_names_of_accelerate() -> None:
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        pytest.skip("Accelerate is not installed")
    if importlib.metadata.version("accelerate").rpartition(".")[0] != table("accelerate")["version"].rpartition(".")[0]:
        pytest.skip("another version of Accelerate is installed than the one that we follow")
    folder = Path(spec.origin).parent
    check("accelerate", folder, folder.parent, 500)
