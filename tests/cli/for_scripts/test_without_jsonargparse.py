"""The command `trainkit` neither needs nor loads jsonargparse; `TrainkitCLI` says how to install it."""

from __future__ import annotations

from helpers.support import run_python


def test_without_jsonargparse() -> None:
    program = """
import sys
sys.modules["jsonargparse"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jsonargparse" else found(name, *rest)
from trainkit.cli.main import main
assert main(["--help"]) == 0
import trainkit.cli
try:
    from trainkit.cli import TrainkitCLI
except ImportError as error:
    print(type(error).__name__, error)
try:
    from trainkit.cli import TrainkitCLY
except ImportError as error:
    print(error)
"""
    done = run_python(program, bare=True)
    assert done.returncode == 0, done.stderr
    assert "MissingPackageError TrainkitCLI needs the package 'jsonargparse[signatures]'" in done.stdout
    assert "pip install 'trainkit-torch[cli]'" in done.stdout
    assert "Did you mean 'TrainkitCLI'?" in done.stdout


def test_the_command_does_not_load_it() -> None:
    program = "import sys; from trainkit.cli.main import main; main(['--help']); print('jsonargparse' in sys.modules)"
    assert run_python(program, bare=True).stdout.endswith("False\n")
