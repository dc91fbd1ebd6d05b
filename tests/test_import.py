"""Importing trainkit is cheap: it loads no optional package, and nothing large except torch.

`benchmarks/import_time.py` measures the time; a test must not depend on the speed of the machine.
"""

from __future__ import annotations

import json

import pytest
from helpers.support import run_python

OPTIONAL = {
    "PIL",
    "comet_ml",
    "deepspeed",
    "matplotlib",
    "mlflow",
    "sklearn",
    "tensorboard",
    "torch_xla",
    "torchmetrics",
    "wandb",
}
PACKAGES = [
    "trainkit",
    *(f"trainkit.{name}" for name in ("callbacks", "data", "errors", "loggers", "logging", "strategies", "tracking", "utils")),
]


def modules_after(program: str) -> set[str]:
    """The modules that are loaded when a program ends."""
    done = run_python(f"{program}\nimport json, sys\nprint(json.dumps(list(sys.modules)))", bare=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_importing_loads_nothing_optional() -> None:
    modules = modules_after("import trainkit")
    assert packages(modules) & OPTIONAL == set()
    assert "torch.utils.tensorboard" not in modules


def test_using_every_public_name_loads_nothing_optional() -> None:
    program = f"import importlib\nfor package in map(importlib.import_module, {PACKAGES}):\n"
    modules = modules_after(f"{program}    [getattr(package, name) for name in package.__all__]")
    assert packages(modules) & OPTIONAL == set()
    assert "torch.utils.tensorboard" not in modules


@pytest.mark.slow
def test_every_public_name_can_be_the_first_that_is_imported() -> None:
    """Circular imports would fail for some names only. Of the names that one module defines, one is imported first."""
    program = f"""
import importlib, os, sys
import torch

for name in {PACKAGES}:
    process = os.fork()
    if not process:
        package = importlib.import_module(name)
        modules = {{getattr(getattr(package, each), "__module__", each): each for each in package.__all__}}
        print(*(f"{{name}}.{{each}}" for each in modules.values()), flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""
    names = run_python(program, bare=True).stdout.split()
    assert len(names) > 40
    program = f"""
import importlib, os, sys, traceback
import torch, torch._dynamo

for name in {names}:
    process = os.fork()
    if not process:
        package, _, each = name.rpartition(".")
        try:
            getattr(importlib.import_module(package), each)
        except BaseException:
            print(f"{{name}} cannot be imported first:", file=sys.stderr)
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(process, 0)
"""
    done = run_python(program, bare=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("package", sorted(OPTIONAL & {"tensorboard", "wandb", "matplotlib", "sklearn"}))
def test_what_is_optional_would_be_seen(package: str) -> None:
    """The test of optional packages can fail: it sees a package that is imported."""
    assert package in packages(modules_after(f"import {package}"))


def test_importing_adds_no_package_to_those_of_torch() -> None:
    """After `import torch`, `import trainkit` loads only modules of trainkit. This keeps the import fast."""
    added = modules_after("import torch, trainkit") - modules_after("import torch")
    assert {module for module in added if not module.startswith("trainkit")} == set()
