"""The environment of `make test-xla` is created once, updated when versions change, and never used when incomplete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.xla import xla_environment


class Commands:
    """Replaces `subprocess.run`: records the commands, and creates the files that they would create."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.fails = False

    def __call__(self, command: list[str], check: bool) -> None:
        name = "venv" if "venv" in command else "install"
        self.names.append(name)
        if name == "venv":
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").touch(0o755)
        elif self.fails:
            (Path(command[0]).parent / "half").touch()
            raise subprocess.CalledProcessError(1, command)

    def taken(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands()
    monkeypatch.setattr("subprocess.run", made)
    return made


@pytest.fixture
def folder(run_dir: Path) -> Path:
    return run_dir / "cache" / "xla"


def test_what_it_is_made_of() -> None:
    own, every = xla_environment._lines("constraints-xla.txt"), xla_environment.constraints()
    assert [line for line in own if not re.fullmatch(r"\w+==[\w.]+", line)] == []
    assert {"torch", "torch_xla"} == {line.partition("==")[0] for line in own}
    assert [line for line in every if line.startswith("torch==")] == own[:1]
    assert [line for line in every if line.startswith("deepspeed==")] != []
    asked = xla_environment.requirements()
    assert {"torch==2.9.*", "torch_xla==2.9.*", "pytest>=9", "safetensors"} <= set(asked)


def test_it_is_made_once(folder: Path, commands: Commands) -> None:
    xla_environment.make(folder)
    assert commands.taken() == ["venv", "install"]
    assert "\ntorch==2.9.0\n" in "\n" + (folder / "constraints.txt").read_text()
    xla_environment.make(folder)
    assert commands.taken() == []


def test_what_was_half_made_is_made_again(folder: Path, commands: Commands) -> None:
    """An environment whose installation failed is created again."""
    commands.fails = True
    with pytest.raises(subprocess.CalledProcessError):
        xla_environment.make(folder)
    assert (folder / "bin" / "half").exists()
    commands.fails = False
    commands.taken()
    xla_environment.make(folder)
    assert commands.taken() == ["venv", "install"]
    assert not (folder / "bin" / "half").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_other_versions_are_installed_over_it(
    folder: Path, commands: Commands, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed versions are installed into the existing environment; if that fails, it is created again."""
    xla_environment.make(folder)
    commands.taken()
    constraints: Any = xla_environment.constraints
    monkeypatch.setattr(xla_environment, "constraints", lambda: [*constraints(), "other==1.0"])
    commands.fails = fails
    if fails:
        with pytest.raises(subprocess.CalledProcessError):
            xla_environment.make(folder)
        commands.fails = False
    else:
        xla_environment.make(folder)
    assert commands.taken() == ["install"]
    xla_environment.make(folder)
    assert commands.taken() == (["venv", "install"] if fails else [])


def test_without_its_python_it_is_made_again(folder: Path, commands: Commands) -> None:
    xla_environment.make(folder)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/gone")
    commands.taken()
    xla_environment.make(folder)
    assert commands.taken() == ["venv", "install"]


def test_a_folder_that_is_not_ours_is_left_alone(folder: Path, commands: Commands) -> None:
    folder.mkdir(parents=True)
    (folder / "theirs").touch()
    with pytest.raises(SystemExit, match="was not made by `make test-xla`"):
        xla_environment.make(folder)
    assert commands.taken() == []
    assert [file.name for file in folder.iterdir()] == ["theirs"]
