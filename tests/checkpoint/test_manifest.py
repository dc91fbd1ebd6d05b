"""A manifest is read as it was written, and an error names the invalid field."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.checkpoints import write_manifest
from helpers.support import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.checkpoint.manifest import DIGEST, MANIFEST, FileEntry, Manifest, digest_line, is_file_name
from trainkit.errors import CheckpointError, CorruptCheckpointError, UnsavableError

EXAMPLE = Manifest(
    run_id="a1b2-c3_d4",
    save_counter=7,
    step=1200,
    epoch=2,
    position={"train": {"samples": 38400, "batches": [1, None, True, 0.5, "x"]}},
    seed=2**64 - 1,
    order_version=1,
    key_version=1,
    world_size=2,
    strategy="single",
    precision="bf16-mixed",
    contents={"model": "all", "optimizer": True, "resumable": True},
    aliases={"model": {"head.weight": "embedding.weight"}},
    irregular=["0/weight/row"],
    metrics={"val_loss": 0.1, "nan": math.nan, "up": math.inf, "down": -math.inf, "zero": -0.0},
    saved_by="ModelCheckpoint",
    saved_at="2026-11-20T15:07:48.123456Z",
    trainkit_version="0.1.0",
    format_version=2,
    checksum="xxh3-128",
    files={"state.json": FileEntry(12, "0" * 32), "model.safetensors": FileEntry(0, "af" * 16)},
)


def as_json(**changes: Any) -> dict[str, Any]:
    return {**json.loads(EXAMPLE.to_bytes()), **changes}


def read(values: Any) -> Manifest:
    return Manifest.from_bytes(json.dumps(values).encode(), "run/manifest.json")


def test_a_manifest_is_read_as_written() -> None:
    back = Manifest.from_bytes(EXAMPLE.to_bytes(), MANIFEST)
    assert replace(back, metrics={}) == replace(EXAMPLE, metrics={})
    assert {name: repr(value) for name, value in back.metrics.items()} == {
        name: repr(value) for name, value in EXAMPLE.metrics.items()
    }
    assert all(type(value) is float for value in back.metrics.values())


def test_it_is_strict_json_in_ascii() -> None:
    data = replace(EXAMPLE, metrics={"Verlust ☃": math.nan}, saved_by="\ud800").to_bytes()
    assert data.isascii()
    values = json.loads(data, parse_constant=lambda name: pytest.fail(f"a bare {name}"))
    assert values["metrics"] == {"Verlust ☃": "nan"}
    assert Manifest.from_bytes(data, MANIFEST).saved_by == "\ud800"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
counts = st.integers(0, 2**63 - 1)


@given(
    position=st.dictionaries(st.text(), plain, max_size=3),
    metrics=st.dictionaries(st.text(), st.floats(), max_size=3),
    aliases=st.dictionaries(st.text(), st.dictionaries(st.text(), st.text(), max_size=2), max_size=2),
    irregular=st.lists(st.text(), max_size=3),
    step=counts,
    seed=st.integers(-(2**63), 2**64 - 1),
)
def test_any_fields_are_read_as_written(metrics: dict[str, float], **fields: Any) -> None:
    before = replace(EXAMPLE, metrics=metrics, **fields)
    back = Manifest.from_bytes(before.to_bytes(), MANIFEST)
    assert replace(back, metrics={}) == replace(before, metrics={})
    assert list(map(repr, back.metrics.items())) == list(map(repr, metrics.items()))


def test_the_digest_is_what_sha256sum_reads(run_dir: Path) -> None:
    data = EXAMPLE.to_bytes()
    assert digest_line(data).split() == [hashlib.sha256(data).hexdigest().encode(), MANIFEST.encode()]
    if shutil.which("sha256sum"):
        write_manifest(run_dir, data)
        assert subprocess.run(["sha256sum", "--status", "--strict", "-c", DIGEST]).returncode == 0


# -------------------------------------------------------------------------------------------- manifests that are refused

BAD_FIELDS: list[tuple[str, Any]] = [
    *[("format_version", value) for value in (0, -1, True, 1.0, "1", None)],
    *[("checksum", value) for value in ("", "crc32", "XXH3-128", "SHA256", None, 7, [], {})],
    *[("run_id", value) for value in ("", "../x", "a/b", "a b", "x" * 65, "ü", "a\n", 7, None)],
    *[
        (name, value)
        for name in ("save_counter", "step", "epoch", "order_version", "key_version")
        for value in (-1, True, 1.0, "1", None, 2**63, [])
    ],
    *[("position", value) for value in ([], None, "x", 3)],
    *[("seed", value) for value in (None, True, 0.5, "7", 2**64, -(2**63) - 1)],
    *[("world_size", value) for value in (0, -1, True, "2")],
    *[(name, value) for name in ("strategy", "precision", "trainkit_version") for value in (None, 7, [], {})],
    *[("contents", value) for value in ([], None, 7)],
    *[("aliases", value) for value in ([], {"model": []}, {"model": {"a": 7}}, None)],
    *[("irregular", value) for value in ({}, [7], "name", None)],
    *[("metrics", value) for value in ([], {"a": None}, {"a": "1"}, {"a": "NaN"}, {"a": True}, {"a": [1]}, {"a": 2**5000})],
    *[("saved_by", value) for value in (7, [], True)],
    *[
        ("saved_at", value)
        for value in (
            None,
            7,
            "2026-11-20T15:07:48Z",
            "2026-11-20T15:07:48.123456",
            "2026-13-20T15:07:48.123456Z",
            "2026-11-20 15:07:48.123456Z",
            "0000-11-20T15:07:48.123456Z",
            "٢٠٢٦-11-20T15:07:48.123456Z",
            "2026-11-20T15:07:48.123456Z\n",
        )
    ],
    *[
        ("files", value)
        for value in (
            None,
            [],
            {"a": None},
            {"a": {}},
            {"a": {"size": 1}},
            {"a": {"size": -1, "xxh3-128": "0" * 32}},
            {"a": {"size": 1.0, "xxh3-128": "0" * 32}},
            {"a": {"size": True, "xxh3-128": "0" * 32}},
            {"a": {"size": 2**63, "xxh3-128": "0" * 32}},
            {"a": {"size": 1, "xxh3-128": "0" * 31}},
            {"a": {"size": 1, "xxh3-128": "F" * 32}},
            {"a": {"size": 1, "xxh3-128": "g" * 32}},
            {"a": {"size": 1, "xxh3-128": None}},
            {"a": {"size": 1, "xxh3-128": "0" * 32}, "A": {"size": 1, "xxh3-128": "0" * 32}},
        )
    ],
]


@pytest.mark.parametrize("field, value", BAD_FIELDS, ids=lambda value: repr(value)[:40])
def test_a_field_that_is_wrong_is_named(field: str, value: Any) -> None:
    with pytest.raises(CorruptCheckpointError) as raised:
        read(as_json(**{field: value}))
    assert str(raised.value).startswith("run/manifest.json")
    assert field in str(raised.value) or isinstance(
        value, dict
    )  # a number of 5000 digits is an error before its field is known
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("field", sorted(as_json().keys() - {"finite"}))
def test_a_field_that_is_missing_is_named(field: str) -> None:
    values = as_json()
    del values[field]
    with pytest.raises(CorruptCheckpointError, match=rf"run/manifest\.json.*'{field}'.* missing"):
        read(values)


def in_format_1(**changes: Any) -> dict[str, Any]:
    """As version 0.1 wrote it: it names no algorithm."""
    values = as_json(format_version=1, files={"state.json": {"size": 12, "sha256": "0" * 64}})
    del values["checksum"]
    return {**values, **changes}


def test_a_manifest_in_format_1_has_sha256() -> None:
    manifest = read(in_format_1())
    assert (manifest.format_version, manifest.checksum) == (1, "sha256")
    assert manifest.files == {"state.json": FileEntry(12, "0" * 64)}
    assert json.loads(manifest.to_bytes())["files"] == {"state.json": {"size": 12, "sha256": "0" * 64}}


@pytest.mark.parametrize(
    "values, message",
    [
        # the name of a faster algorithm over the same digests, and the other way round
        (as_json(checksum="sha256"), r"\['files'\]\['state.json'\]\['sha256'\]: expected a SHA-256 of 64 hexadecimal digits"),
        (
            as_json(files={"state.json": {"size": 12, "sha256": "0" * 64}}),
            r"\['state.json'\]\['xxh3-128'\]: expected a XXH3-128 of 32 hexadecimal digits, got 'none'",
        ),
        (as_json(files={"state.json": {"size": 12, "xxh3-128": "0" * 64}}), "expected a XXH3-128 of 32 hexadecimal digits"),
        # one that no version has had
        (
            as_json(checksum="crc32"),
            r"\['checksum'\]: expected the name of a checksum, one of 'xxh3-128', 'sha256', got 'crc32'",
        ),
        # an old format with a check that it did not have
        (
            in_format_1(checksum="xxh3-128", files={"state.json": {"size": 12, "xxh3-128": "0" * 32}}),
            r"\['checksum'\]: expected 'sha256' in format 1, got 'xxh3-128'",
        ),
        (in_format_1(files={"state.json": {"size": 12, "xxh3-128": "0" * 32}}), "expected a SHA-256 of 64 hexadecimal digits"),
        # a new one with the entries of the old one
        (in_format_1(format_version=2), r"\['checksum'\] is missing"),
    ],
)
def test_digests_must_be_those_of_the_algorithm_that_it_names(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        read(values)


def test_a_manifest_of_an_earlier_version_does_not_say_whether_it_is_finite() -> None:
    values = as_json()
    assert values.pop("finite") is None
    assert read(values).finite is None
    assert [read(as_json(finite=value)).finite for value in (True, False)] == [True, False]
    for value in (0, 1, "true"):
        with pytest.raises(CorruptCheckpointError, match=r"\['finite'\]: expected true, false or null"):
            read(as_json(finite=value))


BAD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "/etc/passwd",
    "../model.safetensors",
    "a\\b",
    "C:evil",
    "a:stream",
    "a..b",
    "dot.",
    "space ",
    "new\nline",
    "nul\0",
    "escape\x1b",
    "ü.json",
    "CON",
    "nul.json",
    "Lpt1.safetensors",
    "com0",
    "manifest.json",
    "manifest.sha256",
    "Manifest.txt",
    "x" * 201,
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_is_not_a_plain_file_name_is_refused(name: str) -> None:
    assert not is_file_name(name)
    with pytest.raises(CorruptCheckpointError, match=r"run/manifest\.json.*'files'"):
        read(as_json(files={name: {"size": 1, "xxh3-128": "0" * 32}}))


def test_plain_names_pass() -> None:
    names = ["state.json", "model.safetensors", "model_1-00001-of-00002.safetensors", "model.safetensors.index.json"]
    names += ["config.json", "README", "console.txt", "manifests.json"]
    assert all(map(is_file_name, names))
    assert not is_file_name(7)
    assert list(read(as_json(files={name: {"size": 1, "xxh3-128": "0" * 32} for name in names})).files) == names


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"\x80\x04N.",
        b'{"step": NaN}',
        b'{"step": 1, "step": 2}',
        b"{" + b'"a":{' * 200 + b"}" * 201,
        EXAMPLE.to_bytes()[:-3],
        EXAMPLE.to_bytes() + b"x",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^run/manifest\.json"):
        Manifest.from_bytes(data, "run/manifest.json")


def test_a_newer_format_is_not_called_corrupt() -> None:
    with pytest.raises(
        CheckpointError, match=r"run/manifest\.json: .*newer trainkit \(format 5; this one reads 4\).*upgrade"
    ) as raised:
        read({"format_version": 5, "files": "now something else"})
    assert not isinstance(raised.value, CorruptCheckpointError)


def test_files_of_the_model() -> None:
    """They are written and read in format 4 only: an earlier reader would ignore them, and misread the names."""
    files = {"model": {"prefix": "model."}, "module": {"prefix": ""}}
    manifest = replace(EXAMPLE, format_version=4, model_files=files)
    assert Manifest.from_bytes(manifest.to_bytes(), MANIFEST).model_files == files
    assert manifest.files_of("model") == files
    assert manifest.files_of("optimizer") == {"optimizer": {"prefix": ""}}
    assert "model_files" not in json.loads(EXAMPLE.to_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"\['model_files'\]: expected none in format 2"):
        read(as_json(model_files=files))
    with pytest.raises(CorruptCheckpointError, match=r"\['model_files'\].*expected an object with 'model'"):
        read(as_json(format_version=4, model_files={"optimizer": {"prefix": ""}}))


def test_files_of_hooks() -> None:
    """A name may have a folder; a checkpoint without them has no field for them."""
    assert "hook_files" not in json.loads(EXAMPLE.to_bytes())
    with_files = replace(EXAMPLE, hook_files={"unet/config.json": FileEntry(1, "0" * 32)}, format_version=3, metrics={})
    assert Manifest.from_bytes(with_files.to_bytes(), "manifest") == with_files
    assert set(with_files.all_files) == {*EXAMPLE.files, "unet/config.json"}
    assert with_files.total_size == EXAMPLE.total_size + 1


@pytest.mark.parametrize(
    "names",
    [
        ["../x"],
        ["/x"],
        ["a/b/c"],
        ["a//b"],
        ["a/../b"],
        ["a/.b"],
        ["a\\b"],
        ["x/manifest.json"],
        ["unet/x", "Unet/X"],
        ["unet", "unet/x"],
        ["STATE.json"],
        ["state.json/x"],
    ],
)
def test_names_that_files_of_hooks_must_not_have(names: list[str]) -> None:
    entry = {"size": 1, "xxh3-128": "0" * 32}
    with pytest.raises(CorruptCheckpointError, match="hook_files"):
        read(as_json(format_version=3, hook_files=dict.fromkeys(names, entry)))


def test_fields_of_a_later_version_are_ignored() -> None:
    extended = as_json(mood="good")
    extended["files"]["state.json"]["blake3"] = "00"
    assert read(extended).files == EXAMPLE.files


@given(st.data())
@settings(max_examples=examples(300))
def test_a_damaged_manifest_never_does_worse_than_an_error(data: st.DataObject) -> None:
    """Reading a damaged manifest raises a `CheckpointError` or returns a manifest that can be written again."""
    damaged = bytearray(EXAMPLE.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(damaged)))
        stop = data.draw(st.integers(start, min(len(damaged), start + 8)))
        damaged[start:stop] = data.draw(st.binary(max_size=8))
    try:
        manifest = Manifest.from_bytes(bytes(damaged), MANIFEST)
    except CheckpointError:
        return
    assert Manifest.from_bytes(manifest.to_bytes(), MANIFEST).files == manifest.files


@pytest.mark.parametrize(
    "field, value",
    [
        ("position", {0: 1}),
        ("position", {"a": {1, 2}}),
        ("position", {"a": (1, 2)}),
        ("position", {"a": math.nan}),
        ("contents", {"a": b"x"}),
        ("run_id", "../../etc"),
        ("step", True),
        ("metrics", {"a": "x"}),
        ("metrics", {"a": 10**400}),
        ("metrics", {7: 1.0}),
        ("files", {"../x": FileEntry(1, "0" * 32)}),
        ("files", {"x": FileEntry(1, "short")}),
        ("saved_at", "yesterday"),
        ("format_version", 5),
        ("checksum", "crc32"),
        ("checksum", "sha256"),
    ],
    ids=repr,
)
def test_invalid_fields_are_not_written(field: str, value: Any) -> None:
    with pytest.raises(UnsavableError, match="files" if value == "sha256" else field):
        replace(EXAMPLE, **{field: value}).to_bytes()


def test_the_order_of_the_texts_is_that_of_the_times() -> None:
    """Sorting `saved_at` as text sorts by time."""
    times = ["2026-01-02T03:04:05.000006Z", "2026-01-02T03:04:05.100000Z", "2026-01-10T00:00:00.000000Z"]
    assert [read(as_json(saved_at=time)).saved_at for time in sorted(times)] == times
