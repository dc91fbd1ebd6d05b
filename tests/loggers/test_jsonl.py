"""`JSONLLogger`: strict JSON, one object per line."""

from __future__ import annotations

import json
import math
from pathlib import Path

from trainkit.loggers import JSONLLogger
from trainkit.loggers.metrics_reader import read_metrics


def strict(text: str) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_file_as_a_whole(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path, prefix="p")
    logger.log_metrics({"loss": 0.1, "epoch": 0}, 10)
    logger.log_metrics({"loss": math.nan, "zähler\n": math.inf, "epoch": 1}, 20)
    logger.log_metrics({"loss": -math.inf}, 30)
    path = tmp_path / "default" / "version_0" / "metrics.jsonl"
    assert path.read_text("utf-8") == (
        '{"step": 10, "epoch": 0, "p-loss": 0.1}\n'
        '{"step": 20, "epoch": 1, "p-loss": "nan", "p-zähler\\n": "inf"}\n'
        '{"step": 30, "p-loss": "-inf"}\n'
    )
    assert [strict(line) for line in path.read_text("utf-8").splitlines()]
    logger.finalize()
    read = read_metrics(tmp_path)
    assert list(read) == ["epoch", "p-loss", "p-zähler\n"]
    assert str(read["p-loss"]) == "[(10, 0.1), (20, nan), (30, -inf)]"
    assert read["p-zähler\n"] == [(20, math.inf)]


def test_text_has_a_file_of_its_own(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log_metrics({"loss": 1}, 4)
    logger.log_text("sample", "two\nlines, “quoted”")
    logger.log_text("sample", "nan", 5)
    logger.finalize()
    lines = (tmp_path / "default" / "version_0" / "text.jsonl").read_text("utf-8").splitlines()
    assert [strict(line) for line in lines] == [
        {"step": 4, "key": "sample", "text": "two\nlines, “quoted”"},
        {"step": 5, "key": "sample", "text": "nan"},
    ]
    assert read_metrics(tmp_path) == {"loss": [(4, 1.0)]}


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log_metrics({"loss": 1}, 1)
    logger.finalize()
    path = tmp_path / "default" / "version_0" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "loss": 0.')
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0)]}
    logger.log_metrics({"loss": 2}, 2)
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0), (2, 2.0)]}
