"""Fixtures for wandb, MLflow and Comet without their servers, and functions that read what they have written."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from trainkit.loggers import CometLogger, WandbLogger
from trainkit.loggers.comet_logs import comet_ml

__all__ = [
    "PLAIN",
    "comet_offline",
    "comet_records",
    "history",
    "local_mlflow",
    "mlflow_records",
    "needs",
    "no_open_wandb_runs",
    "records",
    "run_files",
    "wandb_service",
]

# Options of a Comet experiment that contains only what is logged.
PLAIN: dict[str, Any] = dict(
    auto_output_logging=False, display_summary_level=0, log_code=False, log_env_details=False, log_git_metadata=False,
    log_git_patch=False, log_graph=False, parse_args=False,
)  # fmt: skip


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test if a package is not installed, without importing it: it would read the environment too early."""
    missing = importlib.util.find_spec(package) is None
    extra = {"comet_ml": "comet"}.get(package, package)
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install -e '.[{extra}]'")


def _without(prefix: str) -> pytest.MonkeyPatch:
    environment = pytest.MonkeyPatch()
    for key in [key for key in os.environ if key.startswith(prefix)]:
        environment.delenv(key)
    return environment


@pytest.fixture(scope="module")
def wandb_service() -> Iterator[None]:
    """Start the service process and threads of wandb in offline mode, once for all tests of a module; stop them afterwards."""
    import wandb

    environment = _without("WANDB_")
    environment.setenv("WANDB_MODE", "offline")
    environment.setenv("WANDB_SILENT", "true")
    wandb.setup()
    yield
    wandb.teardown()
    environment.undo()


@pytest.fixture
def no_open_wandb_runs() -> Iterator[None]:
    """After a test, finish the wandb runs that it has left open."""
    import wandb

    yield
    for started in WandbLogger._started:
        started.run.finish()
    WandbLogger._started.clear()
    wandb.finish()


@pytest.fixture(scope="module")
def local_mlflow() -> Iterator[None]:
    """MLflow without a server and without telemetry."""
    environment = _without("MLFLOW_")
    environment.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield
    environment.undo()


@pytest.fixture
def comet_offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use comet_ml without the user's own API key; after a test, end the experiment that it has left open."""
    environment = _without("COMET_")
    environment.setenv("COMET_CONFIG", str(tmp_path_factory.getbasetemp() / "no.comet.config"))
    environment.setenv("COMET_ERROR_TRACKING_ENABLE", "false")
    environment.setenv("COMET_LOGGING_CONSOLE", "CRITICAL")
    if importlib.util.find_spec("comet_ml") is not None:
        comet_ml()  # import it like the logger does
        from comet_ml.streamer.base import BaseStreamer

        # its thread waits a second for new messages before it notices that the experiment has ended
        made = BaseStreamer.__init__
        environment.setattr(BaseStreamer, "__init__", lambda self, queue_timeout: made(self, 0.01))
    yield
    last, CometLogger._open = CometLogger._open, None
    if last is not None:
        last[0].end()
    environment.undo()


def run_files(folder: Path, timeout: float = 60.0) -> list[Path]:
    """The files of all runs in the order of their start; waits until wandb's process has written the exit of each run."""
    paths = list((folder / "wandb").glob("offline-run-*/*.wandb"))
    end = time.monotonic() + timeout
    while not all(any(record.HasField("exit") for record in records(path)) for path in paths):
        assert time.monotonic() < end, "a run was never ended"
        time.sleep(0.02)
    return sorted(paths, key=started_at)


def started_at(path: Path) -> float:
    [run] = [record.run for record in records(path) if record.HasField("run")]
    return float(run.start_time.seconds + run.start_time.nanos * 1e-9)


def records(path: Path) -> Iterator[Any]:
    """The complete records of a `.wandb` file, which another process may still be writing.

    After a header of seven bytes, the file has the log format of LevelDB: blocks of 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    new_record: Any = vars(wandb_internal_pb2)["Record"]
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # a block ends with zeros where no header fits
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):  # this record is not complete yet
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = new_record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def mlflow_records(uri: str, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Metric → (step, value) of each record of a run, in the order in which they were logged."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = {}
    for key in sorted(client.get_run(run_id).data.metrics):
        rows = sorted(client.get_metric_history(run_id, key), key=lambda row: row.timestamp)
        found[key] = [(row.step, row.value) for row in rows]
    return found


def comet_records(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Metric → (step, value) of each record in the archives of a folder, in the order in which they would be uploaded."""
    parts = []
    for path in folder.glob("*.zip"):
        with ZipFile(path) as archive:
            if not archive.namelist():
                continue  # the archive of a killed process
            about = json.loads(archive.read("experiment.json"))
            parts.append((about["start_time"], archive.read("messages.json").decode()))
    found: dict[str, list[tuple[int, Any]]] = {}
    for _, text in sorted(parts):
        for line in text.splitlines():
            message = json.loads(line)
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                found.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
    return found
