"""The tests that a change reaches, for `make test-changed`: of the changed modules and of all rooms that import one of them.

Rooms that reach a changed module only through another room are left to `make test`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp
from grimp import ImportGraph

ROOT = Path(__file__).resolve().parents[2]


def changed_files(since: str) -> list[str]:
    """The files that differ from a commit, and those that git does not know yet."""
    names = ["git diff --name-only " + since, "git ls-files --others --exclude-standard"]
    return [line for each in names for line in subprocess.check_output(each.split(), cwd=ROOT, text=True).splitlines()]


def paths_of_tests(files: Iterable[str], graph: ImportGraph) -> list[str]:
    """The files and folders of tests for changed files, as arguments of pytest; `["tests"]` if the change reaches all tests."""
    paths: set[str] = set()
    for file in files:
        if file.startswith("tests/test_") or (file.startswith("tests/") and "/test_" in file):
            paths.add(file)
        elif file.startswith(("tests/", "pyproject.toml", "setup.py", "constraints")):
            return ["tests"]
        elif file.startswith(("docs/", "README", "CHANGELOG")):
            paths |= {"tests/docs", "tests/test_docs.py"}
        elif file.startswith(("examples/", "benchmarks/")):
            paths.add(f"tests/{file.partition('/')[0]}")
        elif file.endswith(".py"):
            paths |= _tests_of(_module(file), graph)
    return sorted(path for path in paths if (ROOT / path).exists())


def _module(file: str) -> str:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("trainkit") else f"trainkit.{name}"  # callbacks/ and strategies/ at the root


def _tests_of(module: str, graph: ImportGraph) -> set[str]:
    reached = {module, *(graph.find_modules_that_directly_import(module) if module in graph.modules else ())}
    rooms = {each.split(".")[1] for each in reached if "." in each}
    return {path for room in rooms for path in (f"tests/{room}", f"tests/test_{room}.py")}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("git knows no branch main to compare with. Name a commit: make test-changed SINCE=HEAD~3")
    try:
        names = changed_files(sys.argv[1])
    except subprocess.CalledProcessError:  # git has said why
        sys.exit(f"git cannot compare with SINCE={sys.argv[1]}. Name a commit or a branch: make test-changed SINCE=HEAD~3")
    print(*paths_of_tests(names, grimp.build_graph("trainkit")))
