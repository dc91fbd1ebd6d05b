"""Behind the door, requirements of other packages are met, and joblib's workers have the door too."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.support import run_python

pytest.importorskip("joblib", reason="joblib is not installed")
pytest.importorskip("lightning_utilities", reason="lightning-utilities is not installed")

PROGRAM = """
import trainkit.compat.lightning
import joblib
from lightning_utilities.core.imports import RequirementCache, module_available, package_available

def work(_):
    import lightning.pytorch, trainkit
    return lightning.pytorch.Callback is trainkit.Callback

if __name__ == "__main__":
    met = ["lightning>=2.0", "lightning>=3", "pytorch-lightning>=2.0", "pytorch_lightning<2"]
    print([bool(RequirementCache(requirement)) for requirement in met])
    print(module_available("lightning.pytorch"), package_available("lightning"))
    print(joblib.Parallel(n_jobs=2)(joblib.delayed(work)(number) for number in range(2)))
"""


def test_requirements_and_workers_of_joblib(tmp_path: Path) -> None:
    """In a new interpreter, because the door stays open until a process ends."""
    (tmp_path / "script.py").write_text(PROGRAM, "utf-8")
    done = run_python("-u", "script.py", cwd=tmp_path, bare=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["[True, False, True, False]", "True True", "[True, True]"]
