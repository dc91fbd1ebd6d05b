"""Every argument that takes a folder expands `~`, and takes URLs that fsspec can open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.saving import saved, saving
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit import Accelerator, ProjectConfiguration, Trainer, paths
from trainkit.callbacks import ModelCheckpoint, PredictionWriter
from trainkit.checkpoint import list_checkpoints, open_checkpoint
from trainkit.cli.main import main
from trainkit.errors import ConfigurationError
from trainkit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger
from trainkit.loggers.run_files import read_metrics
from trainkit.paths import disk_path, local_path, remote_url, url_of
from trainkit.profilers import SimpleProfiler


@pytest.fixture
def home(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of the user that is not the working directory."""
    there = run_dir / "home"
    there.mkdir()
    monkeypatch.setenv("HOME", str(there))
    return there


def fit(path: Any = None, **arguments: Any) -> Trainer:
    trainer = saving(max_epochs=1, **arguments)
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path=path)
    return trainer


REFUSED: dict[str, Callable[[Any], Any]] = {
    "default_root_dir": lambda url: Trainer(default_root_dir=url),
    "dirpath": lambda url: ModelCheckpoint(url),
    "save_dir": lambda url: CSVLogger(url),
    "ckpt_path": lambda url: fit(url),
    "ckpt_path of an evaluation": lambda url: saving().validate(TinyModule(), tiny_loader(), ckpt_path=url),
    "filepath": lambda url: fit().save_checkpoint(url),
    "output_dir": lambda url: Accelerator().save_state(url),
    "input_dir": lambda url: Accelerator().load_state(url),
    "save_directory": lambda url: Accelerator().save_model(TinyModule(), url),
    "path": lambda url: TinyModule.load_from_checkpoint(url),
    "folder": lambda url: list_checkpoints(url),
}


@pytest.mark.parametrize("url", ["nothing://bucket/run", Path("nothing://host/run")], ids=str)
@pytest.mark.parametrize("argument", list(REFUSED))
def test_an_unknown_scheme_is_refused_and_no_folder_is_made_of_it(argument: str, url: Any, run_dir: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        REFUSED[argument](url)
    for part in (f"{argument.split()[0]}: expected a folder, or a URL that fsspec can open", "nothing:/", "register_impl"):
        assert part in str(caught.value)
    assert not [path.name for path in run_dir.iterdir() if ":" in path.name]


ON_DISK: dict[str, Callable[[Any], Any]] = {
    "project_dir": lambda url: Accelerator(project_dir=url),
    "logging_dir": lambda url: ProjectConfiguration(project_dir="runs", logging_dir=url),
    "PredictionWriter(output_dir=)": lambda url: PredictionWriter(output_dir=url),
    "SimpleProfiler(dirpath=)": lambda url: SimpleProfiler(dirpath=url),
}


@pytest.mark.parametrize("url", ["memory://bucket/run", Path("memory://bucket/run")], ids=["text", "path"])
@pytest.mark.parametrize("argument", list(ON_DISK))
def test_a_folder_that_must_be_on_a_disk(argument: str, url: Any, run_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a folder on a disk, got the URL 'memory:/.*\. Fix: ") as caught:
        ON_DISK[argument](url)
    assert str(caught.value).startswith(argument)
    assert list(run_dir.iterdir()) == []


def test_a_url_is_a_staging_folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_schemes", {})
    assert local_path("memory://bucket/run/", "x") == run_dir / "trainkit_remote/memory/bucket/run"
    assert local_path(Path("memory://bucket/run"), "x") == run_dir / "trainkit_remote/memory/bucket/run"
    assert local_path("file:///data/run", "x") == Path("/data/run")
    assert url_of("trainkit_remote/memory/bucket/run/version_0") == "memory://bucket/run/version_0"
    assert url_of("trainkit_remote/memory") is None
    assert url_of("runs") is None
    monkeypatch.setattr(paths, "_schemes", {})
    monkeypatch.setenv("TRAINKIT_STAGING", "/scratch/staging")
    assert local_path("memory://bucket", "x") == Path("/scratch/staging/memory/bucket")


@pytest.mark.parametrize("url, folder, shown", [
    ("ftp://me:S@host/run", "ftp/me@host/run", "ftp://me@host/run"),
    ("ftp://me:S@ss@host:21/run/", "ftp/me@host:21/run", "ftp://me@host:21/run"),
    ("ftp://:S@host/run", "ftp/host/run", "ftp://host/run"),
    ("ftp://me@host/run", "ftp/me@host/run", "ftp://me@host/run"),
    ("http://S@host/run", "http/host/run", "http://host/run"),
    ("http://me:S@host/run", "http/host/run", "http://host/run"),
    ("memory://me:S@host", "memory/me@host", "memory://me@host"),
])  # fmt: skip
def test_a_password_is_kept_in_memory_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, url: str, folder: str, shown: str
) -> None:
    monkeypatch.setattr(paths, "_schemes", {})
    monkeypatch.setattr(paths, "_passwords", {})
    monkeypatch.setattr(paths, "_check_scheme", lambda *_: None)  # a package for it may be missing
    for given in (url, Path(url)):
        assert local_path(given, "x") == run_dir / "trainkit_remote" / folder
    assert url_of(f"trainkit_remote/{folder}") == shown
    assert remote_url(f"trainkit_remote/{folder}/step-1") == url.rstrip("/") + "/step-1"
    assert remote_url("runs") is None
    assert remote_url(local_path("memory://bucket/run", "x")) == "memory://bucket/run"


@pytest.mark.parametrize("call", [local_path, disk_path], ids=["local_path", "disk_path"])
@pytest.mark.parametrize("url", ["nothing://me:S3cr-t@host/run", "https://h/run?X-Amz-Signature=S3cr-t", "s3://me:S3cr-t@h/.."])
def test_an_error_shows_no_password(call: Callable[..., Any], url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call(url, "default_root_dir", *(["fix"] if call is disk_path else []))
    assert "S3cr-t" not in str(caught.value)
    assert "***" in str(caught.value)


def test_home_is_expanded_for_a_trainer(home: Path) -> None:
    trainer = fit(default_root_dir="~/runs", logger=CSVLogger())
    assert trainer.default_root_dir == str(home / "runs")
    assert trainer.log_dir == str(home / "runs/logs/default/version_0")
    [found] = list_checkpoints("~/runs/logs/default/version_0/checkpoints")
    assert found.path.is_relative_to(home)
    saved_to = "~/mine"
    trainer.save_checkpoint(saved_to)
    assert open_checkpoint(saved_to).path == home / "mine"
    assert fit(saved_to, default_root_dir="~/others")._save_policy.resumed_from == home / "mine"
    assert isinstance(TinyModule.load_from_checkpoint(saved_to), TinyModule)
    trainer.validate(TinyModule(), tiny_loader(8), ckpt_path=saved_to, verbose=False)
    assert not Path("~").exists()


def test_home_is_expanded_for_callbacks_and_loggers(home: Path) -> None:
    assert ModelCheckpoint("~/mine").dirpath == str(home / "mine")
    for kind in (CSVLogger, JSONLLogger, TensorBoardLogger):
        assert kind("~/logs").save_dir == str(home / "logs")


def test_home_is_expanded_for_an_accelerator(home: Path) -> None:
    accelerator = Accelerator(project_dir="~/project")
    assert str(accelerator.project_dir) == str(accelerator.logging_dir) == str(home / "project")
    accelerator.prepare(TinyModule())
    assert accelerator.save_state("~/state") == home / "state"
    accelerator.load_state("~/state")
    accelerator.save_model(TinyModule(), "~/model")
    assert (home / "model" / "model.safetensors").is_file()
    assert not Path("~").exists()


def test_home_is_expanded_on_the_command_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(default_root_dir="~/runs", logger=CSVLogger(), max_epochs=1, log_every_n_steps=1)
    assert main(["checkpoint", "ls", "~/runs"]) == 0
    assert "step-00000004" in capsys.readouterr().out
    assert main(["checkpoint", "show", "~/runs/logs/default/version_0/checkpoints/step-00000004"]) == 0
    assert read_metrics("~/runs")


def test_a_folder_that_was_given_stays_as_it_was() -> None:
    assert Accelerator(project_dir="runs/first").project_dir == "runs/first"
    for path in ("runs", "C:/runs", "C:\\runs", "a:b", Path("runs")):
        assert local_path(path, "x") == Path(path)
