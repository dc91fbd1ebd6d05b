"""`trainkit checkpoint ls`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.checkpoints import seal
from helpers.runs.tiny import TinyModule

from trainkit.cli.main import main


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the table, as dicts of column title → cell."""
    lines = text.splitlines()
    titles = ["NAME", "STEP", "EPOCHS", "RUN", "SAVED AT", "SIZE", "CONTAINS", "METRICS", "STATE"]
    # columns are separated by two blanks in all lines
    width = max(map(len, lines))
    blank = [all(not line[i : i + 1].strip() for line in lines) for i in range(width)] + [True]
    starts = [0] + [i for i in range(1, width) if not blank[i] and i >= 2 and blank[i - 1] and blank[i - 2]]
    assert len(starts) == len(titles), text
    ends = [*starts[1:], width]
    cells = [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines]
    assert cells[0] == titles
    return [dict(zip(titles, row, strict=True)) for row in cells[1:]]


def test_the_newest_comes_first(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(run_folder)]) == 0
    found = rows(capsys.readouterr().out)
    assert [(row["NAME"], row["STEP"], row["EPOCHS"]) for row in found] == [
        ("step-00000008", "8", "2"), ("step-00000004", "4", "1"),
    ]  # fmt: skip
    for row in found:
        assert row["CONTAINS"] == "all"
        assert row["STATE"] == "good"
        assert "val_loss=" in row["METRICS"]
        assert row["SIZE"].endswith("kB")
        assert len(row["RUN"]) == 8
    assert found[0]["RUN"] == found[1]["RUN"]


def test_a_checkpoint_that_is_not_finite_is_marked(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In `ls`, `show` and `verify`; one of an earlier version does not say."""
    for name, value in (("step-00000008", False), ("step-00000004", None)):
        seal(run_folder / name, lambda manifest, value=value: manifest.update(finite=value))
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(run_folder)]) == 0
    found = {row["NAME"]: row["STATE"] for row in rows(capsys.readouterr().out)}
    assert found == {"step-00000004": "good", "step-00000008": "not finite"}
    assert main(["checkpoint", "verify", str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(")")[2] for line in lines] == ["", ", its parameters are not finite"]
    shown = []
    for name in found:
        assert main(["checkpoint", "show", str(run_folder / name)]) == 0
        shown.append(capsys.readouterr().out)
    assert "finite    unknown" in shown[0]
    assert "finite    no, it has parameters that are infinite or NaN" in shown[1]


def test_the_default_folder_and_a_folder_above(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    root = run_folder.parent.parent.rename(run_folder.parent.parent.with_name("trainkit_runs"))
    monkeypatch.chdir(root.parent)
    shown = []
    for arguments in ([], ["trainkit_runs"], ["trainkit_runs/version_0"], ["trainkit_runs/version_0/checkpoints"]):
        assert main(["checkpoint", "ls", *arguments]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] == shown[3]
    assert "step-00000008" in shown[0]
    assert main(["checkpoint", "ls", "trainkit_runs/version_0/checkpoints/step-00000004"]) == 0
    assert [row["NAME"] for row in rows(capsys.readouterr().out)] == ["step-00000004"]


def test_all_runs_below_a_folder(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run_folder.parent.parent
    shutil.copytree(run_folder, root / "checkpoints")  # where earlier versions of trainkit wrote checkpoints
    shutil.copytree(run_folder, root / "logs" / "mine" / "version_3" / "checkpoints")
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(root / "logs")]) == 0
    assert [row["NAME"] for row in rows(capsys.readouterr().out)] == ["step-00000008", "step-00000004"]
    shutil.rmtree(root / "checkpoints" / "step-00000004")
    assert main(["checkpoint", "ls", str(root)]) == 0
    assert sorted(row["NAME"] for row in rows(capsys.readouterr().out)) == [
        "checkpoints/step-00000008",
        "logs/mine/version_3/checkpoints/step-00000004",
        "logs/mine/version_3/checkpoints/step-00000008",
        "version_0/checkpoints/step-00000004",
        "version_0/checkpoints/step-00000008",
    ]


def test_damaged_checkpoints_come_last(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "step-00000008" / "model.safetensors").unlink()
    (run_folder / "torn").mkdir()
    (run_folder / "torn" / "state.json").write_text("{}")
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(run_folder)]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["NAME"] for row in found] == ["step-00000004", "torn", "step-00000008"]
    states = [row["STATE"] for row in found]
    assert states[0] == "good"
    assert states[1].startswith("manifest.sha256: ")  # the name of the file, without its folder
    assert states[2].startswith("model.safetensors: ")
    assert "missing" in states[1]
    assert "missing" in states[2]
    assert [row["STEP"] for row in found] == ["4", "?", "8"]


def test_json(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(TinyModule(), metrics={"loss": 0.1, "bad": math.nan, "far": -math.inf}, name="ck")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "ls", str(tmp_path), "--json"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    good, torn = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert good["name"] == "ck"
    assert good["path"] == str(tmp_path / "ck")
    assert good["problem"] is None
    assert good["step"] == 7
    assert good["metrics"] == {"loss": 0.1, "bad": "nan", "far": "-inf"}
    assert good["size"] == sum(entry["size"] for entry in good["files"].values())
    assert set(torn) == {"name", "path", "problem"}
    assert "manifest" in torn["problem"]


@pytest.mark.parametrize("model, resumable, word", [
    ("all", True, "all"), ("trainable", True, "trainable"), ("all", False, "weights"),
    ("trainable", False, "trainable weights"),
])  # fmt: skip
def test_contents(
    save: Any, tmp_path: Path, model: str, resumable: bool, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # with a metric, so that no column is empty
    contents = {"model": model, "optimizer": resumable, "resumable": resumable}
    save(TinyModule(), contents=contents, metrics={"loss": 1.0})
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert [row["CONTAINS"] for row in rows(capsys.readouterr().out)] == [word]


def test_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} contains no checkpoints.\n"
    assert main(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["checkpoint", "ls", str(tmp_path / "nowhere")]) == 2
    assert "which does not exist. Fix: pass the folder that the run saved to" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["checkpoint", "ls", str(tmp_path / "file")]) == 2
    assert "which is a file" in capsys.readouterr().err


def test_names_cannot_move_the_cursor(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(TinyModule(), metrics={"\x1b[2Jloss\n": 1.0, "größe": 2.0})
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[2Jloss\n=1, größe=2" in shown
    assert "\x1b" not in shown
