"""Run cells in a real Jupyter kernel: `from helpers.launch.notebooks import run_cells`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from helpers.patience import PATIENCE
from helpers.support import run_python

__all__ = ["Outputs", "run_cells"]


class Outputs(NamedTuple):
    """The outputs of a cell.

    Attributes:
        stdout: Standard output.
        stderr: Standard error.
        value: Value of the last expression, as text.
        error: The exception, such as `"ValueError: no"`.
    """

    stdout: str
    stderr: str
    value: str
    error: str


def run_cells(folder: Path, cells: list[str]) -> list[Outputs]:
    """Run cells in a new kernel. If a cell raises an exception, the next cells still run.

    Args:
        folder: Working directory of the kernel, also for files of Jupyter.
        cells: Source code of the cells.
    """
    (folder / "cells.json").write_text(json.dumps(cells))
    places = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    env = {name: str(folder / "jupyter") for name in places}
    done = run_python(__file__, str(folder), cwd=folder, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return [Outputs(*one) for one in json.loads((folder / "outputs.json").read_text())]


def _run(folder: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source) for source in json.loads((folder / "cells.json").read_text())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=PATIENCE, allow_errors=True, kernel_name="python3").execute()
    (folder / "outputs.json").write_text(json.dumps([_shown(cell.outputs) for cell in notebook.cells]))


def _shown(outputs: list[Any]) -> Outputs:
    found = dict.fromkeys(Outputs._fields, "")
    for one in outputs:
        if one.output_type == "stream":
            found[one.name] += one.text
        elif one.output_type == "error":
            found["error"] = f"{one.ename}: {one.evalue}"
        elif "data" in one:
            found["value"] = one.data["text/plain"]
    return Outputs(**found)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
