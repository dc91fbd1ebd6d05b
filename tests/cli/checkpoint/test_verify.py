"""`trainkit checkpoint verify`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainkit.cli.checkpoint.text import on_one_line
from trainkit.cli.main import main


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
