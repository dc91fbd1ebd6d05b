"""Accelerate writes the files that other tests read, and reads the files that trainkit writes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import yaml
from helpers.launch.configurations import DEFAULT, FILES
from helpers.support import run_python

from trainkit.config.settings_file import read_settings, write_settings

PROGRAM = """\
import json, sys
from pathlib import Path
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config

for path in sorted(Path().glob("*.yaml")):
    load_config_from_file(str(path)).to_yaml_file(f"{path}.theirs")
write_basic_config(save_location="default")
"""


@pytest.mark.slow
def test_files_of_accelerate_and_for_it(tmp_path: Path) -> None:
    if importlib.metadata.version("accelerate") < "1.15":
        pytest.skip("an older one writes other keys")
    ours = []
    for name, text in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        ours.append(write_settings(read_settings(path), tmp_path / f"our_{name}.yaml"))
    done = run_python("-c", PROGRAM, cwd=tmp_path, env={"ACCELERATE_USE_CPU": "1"})
    assert done.returncode == 0, done.stderr
    for name, text in FILES.items():
        assert (tmp_path / f"{name}.yaml.theirs").read_text() == text
    assert (tmp_path / "default").read_text() == DEFAULT
    for path in ours:  # Accelerate writes all keys of our file, and others that it always writes
        theirs = yaml.safe_load(Path(f"{path}.theirs").read_text())
        assert yaml.safe_load(path.read_text()).items() <= theirs.items()
