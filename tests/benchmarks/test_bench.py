"""`benchmarks/bench.py`: a real run of one program, and what it does with programs that fail, hang or miss a limit."""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import house
from helpers.support import run_python

BENCHMARKS = house.ROOT / "benchmarks"

WRITES = """
import sys
sys.path.insert(0, {benchmarks!r})
from report import Column, Report, Spread

report = Report(about="test")
table = report.table("ms a step", Column("it", 2), Column("ratio (range)", 3))
table.add("Trainer | bare", 0.25, Spread.of([1.01, 1.04, 1.03]), judged=1.03, most={most})
table.add("by hand", 0.24, None)
from pathlib import Path
sys.exit(report.finish(Path(sys.argv[sys.argv.index("--json") + 1])))
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with programs in the folder of the test."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("bench")
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def run_main(
    bench: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, scripts: dict[str, str], *options: str
) -> tuple[int, Any]:
    """`main` with these programs; returns its code and the JSON."""
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(bench, "PROGRAMS", [bench.Program(name, f"About {name}", f"{name}.py") for name in scripts])
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(folder / "out.md"), *options])
    code = bench.main()
    return code, json.loads((folder / "out.json").read_text("utf-8"))


def test_a_real_program_becomes_a_document(tmp_path: Path) -> None:
    options = ("--quick", "--only", "import_time", "--out", str(tmp_path / "bench.md"))
    done = run_python(str(BENCHMARKS / "bench.py"), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    assert document["machine"]["processor"]
    assert document["versions"]["torch"] != "not installed"
    (program,) = document["programs"]
    (table,) = program["tables"]
    seconds = {row["name"]: row["cells"][0] for row in table["rows"]}
    both, alone = seconds["import torch, trainkit"]["median"], seconds["import torch"]["median"]
    assert alone > 0
    assert seconds["difference, pair by pair"]["values"] == [pytest.approx(both - alone)]
    text = (tmp_path / "bench.md").read_text("utf-8")
    assert "these figures mean nothing" in text
    assert f"| commit | {document['commit']} |" in text
    assert "| import | ms (range) | limit |  |" in text
    assert f"| import torch | {alone:,.1f} ({alone:,.1f}–{alone:,.1f}) |" in text


def test_it_goes_on_after_a_failure_and_names_it(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (WRITES.format(benchmarks=str(BENCHMARKS), most=most) for most in (1.05, 1.02))
    code, document = run_main(bench, monkeypatch, tmp_path, {"breaks": "raise SystemExit(3)", "slow": bad, "fine": good})
    assert code == 1
    assert [each["result"] for each in document["programs"]] == ["failed", "missed", "held"]
    assert "breaks: failed: ended with code 3, without figures" in (said := capsys.readouterr().err)
    assert "slow: missed: ms a step: Trainer | bare: 1.03, limit ≤ 1.02" in said
    text = (tmp_path / "out.md").read_text("utf-8")
    assert "| Trainer \\| bare | 0.25 | 1.030 (1.010–1.040) | ≤ 1.02 | MISSED |" in text
    assert "| Trainer \\| bare | 0.25 | 1.030 (1.010–1.040) | ≤ 1.05 | held |" in text
    assert "| About fine | all limits held |" in text
    assert "| About slow | missed: ms a step: Trainer \\| bare: 1.03, limit ≤ 1.02 |" in text


def test_a_program_that_exceeds_its_time_is_ended(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The processes that it has started too: they have its end of a pipe."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    monkeypatch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, close_fds=False))
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'], close_fds=False)"
    code, document = run_main(bench, monkeypatch, tmp_path, {"hangs": child}, "--minutes", "0.03")
    assert code == 1
    assert described(document) == "out of time: took more than 0.03 minutes"
    os.close(writing)
    assert select.select([reading], [], [], 10)[0], "a process that the program has started is still there"
    os.close(reading)


def described(document: Any) -> str:
    (program,) = document["programs"]
    return f"{program['result']}: {program['reason']}"


def test_a_quick_run_ignores_limits_but_not_failures(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missed = WRITES.format(benchmarks=str(BENCHMARKS), most=1.0)
    assert run_main(bench, monkeypatch, tmp_path, {"missed": missed}, "--quick")[0] == 0
    assert run_main(bench, monkeypatch, tmp_path, {"missed": missed, "breaks": "1 / 0"}, "--quick")[0] == 1


def test_what_the_machine_lacks_is_skipped_and_named(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = bench.Program("none", "None", "none.py", needs="no_such_package")
    monkeypatch.setattr(bench, "PROGRAMS", [program])
    result = bench.run(program, bench.parse_arguments([]))
    assert (result["result"], result["reason"]) == ("skipped", "needs no_such_package")


def test_the_programs_exist() -> None:
    """Each program of the list is in the folder, and each program of the folder is in the list or imported by one."""
    text = (BENCHMARKS / "bench.py").read_text("utf-8")
    readme = (BENCHMARKS / "README.md").read_text("utf-8")
    parts = {"bench", "pairs", "report", "resident", "checkpoint_cases", "faults_contenders", "overhead_contenders"}
    for path in BENCHMARKS.glob("*.py"):
        if path.stem not in parts:
            assert f'"{path.name}"' in text, f"bench.py does not run {path.name}"
            assert f"| `{path.name}` |" in readme, f"README.md has no line about {path.name}"


def test_an_interpreter_that_does_not_exist_is_named(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.parse_arguments(["--xla-python", "/no/python"])
    assert "--xla-python: /no/python is not a program" in capsys.readouterr().err
