"""DeepSpeed's extensions: errors name missing packages, and locks of dead processes are removed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from trainkit.errors import MissingPackageError
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero import extensions as _extensions
from trainkit.strategies.zero.extensions import _MARK, _clear, require_async_io


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(
        MissingPackageError,
        match=r"needs a C\+\+ compiler, and 'no-such-compiler -O2' is not installed. Install one: apt install g\+\+",
    ):
        require_async_io()


def test_missing_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """libaio's headers are missing. Creating the strategy raises the error."""
    monkeypatch.setenv("CXX", "g++ -nostdinc")
    with pytest.raises(MissingPackageError, match="libaio with its headers, which is not installed.*apt install libaio-dev"):
        ZeROStrategy(stage=3, offload_optimizer="nvme", nvme_path=tmp_path)


def test_prebuilt_extensions_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_extensions, "_prebuilt", lambda name: name == "async_io")
    require_async_io()


def test_without_a_lock(tmp_path: Path) -> None:
    _clear(tmp_path)


def test_the_lock_of_a_killed_process_of_trainkit(tmp_path: Path) -> None:
    """It is removed immediately, since the caller holds the lock that excludes live processes."""
    (tmp_path / "lock").touch()
    (tmp_path / _MARK).touch()
    _clear(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_an_abandoned_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "half.o").touch()
    for name in ("lock", "half.o"):
        os.utime(tmp_path / name, (time.time() - 3600, time.time() - 3600))
    _clear(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_lock_of_a_process_that_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    waiting = threading.Thread(target=_clear, args=(tmp_path,))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert lock.exists()
    lock.unlink()
    waiting.join()
    assert f"waiting for another program that compiles in {tmp_path}" in caplog.text
