"""`trainkit checkpoint verify`."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers.resume.checkpoints import make
from helpers.support import TESTS

from trainkit.checkpoint import open_checkpoint
from trainkit.cli.checkpoint.text import on_one_line
from trainkit.cli.main import main

FORMAT_1 = TESTS / "checkpoint" / "format_1"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_all_good(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    newest, older = run_folder / "step-00000008", run_folder / "step-00000004"
    assert main(["checkpoint", "verify", str(newest), str(run_folder.parent), str(newest)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["good", str(newest)], ["good", str(older)]]
    assert all(line.endswith("B, XXH3-128)") for line in lines)


def test_the_commands_know_format_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "runs" / "old", make(tmp_path / "new", minute=7)
    shutil.copytree(FORMAT_1, old)
    assert main(["checkpoint", "verify", str(old), str(new)]) == 0
    assert re.findall(r"B, (.*)\)", capsys.readouterr().out) == ["SHA-256", "XXH3-128"]
    for path, title, digits in ((old, "SHA-256", "bc8af8e97850a040…"), (new, "XXH3-128", None)):
        digits = digits or open_checkpoint(new).manifest.files["model.safetensors"].digest[:16] + "…"
        assert main(["checkpoint", "show", str(path)]) == 0
        shown = capsys.readouterr().out
        assert re.search(rf"^FILE +SIZE  CONTAINS +{title}$", shown, re.MULTILINE)
        assert re.search(rf"^model.safetensors .* {digits}$", shown, re.MULTILINE)
    assert main(["checkpoint", "ls", str(old.parent), "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["format_version"], listed["checksum"], listed["problem"]) == (1, "sha256", None)
    assert listed["files"]["config.json"] == {
        "size": 22,
        "sha256": "8e9d21a8818ac672ea522cbb09b8a360ffbda0bffac44409136b5a4b11f685a9",
    }
    assert main(["checkpoint", "diff", str(old), str(new), "--all"]) == 0
    assert main(["checkpoint", "export", str(old), str(tmp_path / "out"), "--format", "safetensors"]) == 0
    flip(old / "model.safetensors", -1)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(old)]) == 1
    assert "model.safetensors: its SHA-256 is" in capsys.readouterr().out


def test_a_flipped_bit_of_any_file_is_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, path = run_folder / "step-00000004", run_folder / "step-00000008"
    names = sorted(file.name for file in path.iterdir())
    assert {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "manifest.sha256"} <= set(names)
    for name in names:
        place = (path / name).stat().st_size // 2
        flip(path / name, place)
        capsys.readouterr()
        assert main(["checkpoint", "verify", str(run_folder)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert sorted(line.split()[0] for line in lines) == ["BAD", "good"]
        [bad] = [line for line in lines if line.startswith("BAD")]
        assert bad.startswith(f"BAD   {path}: ")
        assert ("manifest" if name.startswith("manifest") else name) in bad.removeprefix(f"BAD   {path}: ")
        flip(path / name, place)
    assert main(["checkpoint", "verify", str(path), str(good)]) == 0


def test_damage_that_keeps_the_size(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run_folder / "step-00000008" / "model.safetensors", -1)
    assert main(["checkpoint", "ls", str(run_folder), "--json"]) == 0
    assert [one["problem"] for one in json.loads(capsys.readouterr().out)] == [None, None]
    assert main(["checkpoint", "verify", str(run_folder)]) == 1


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert "which contains none" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert "which does not exist" in capsys.readouterr().err
    assert main(["checkpoint", "verify"]) == 2


def test_a_message_names_files_without_their_folder() -> None:
    """For absolute and relative folders. The messages contain absolute paths."""
    text = f"{os.path.abspath('runs/step-1')}/state.json: missing\n{os.path.abspath('runs/step-1')}/model.safetensors: missing"
    for path in ("runs/step-1", os.path.abspath("runs/step-1"), Path("runs/step-1")):
        assert on_one_line(text, path) == "state.json: missing; model.safetensors: missing"
