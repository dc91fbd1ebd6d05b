"""Python runs this before a script: it opens the doors of `TRAINKIT_AS`, and runs the `sitecustomize` that it hides.

A process that unpickles a class, a spawned worker for instance, imports the user's script first, and that imports `lightning`.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _open() -> None:
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    missing = PathFinder.find_spec("trainkit") is None  # It may lie next to the script, whose folder comes later.
    if missing:
        sys.path.append(root)
    import trainkit.names.doors  # noqa: F401 - trainkit opens them

    if missing:
        sys.path.remove(root)


def _run_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("TRAINKIT_AS"):
    _open()
_run_next()
