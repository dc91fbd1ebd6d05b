"""The parser of JSON from files: what it accepts, what it rejects, and its memory."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.resume.checkpoints import complaint
from helpers.support import run_python
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit.errors import CorruptCheckpointError
from trainkit.tagged_json.codec import MAX_DEPTH, MAX_JSON_BYTES, strict_json

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def refused(data: bytes) -> str:
    """Return the error message, which must begin with the path of the file."""
    return complaint(lambda: strict_json(data, "some/manifest.json"), "some/manifest.json")


@given(json_values, st.booleans())
def test_sound_json_is_read(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        text.decode()
    except UnicodeDecodeError:
        assert "codec can't decode" in refused(text)
    else:
        read = strict_json(text, "x")
        assert read == value
        assert repr(read) == repr(value)  # -0.0, 1 and 1.0, True and 1
        assert strict_json(memoryview(text), "x") == value


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"   ", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"[1] [2]", "Extra data: line 1 column 5 (char 4)"),
        (b"[1]\0", "Extra data"),
        (b'"\xff"', "can't decode byte 0xff in position 1"),
        (b'"\xed\xa0\x80"', "codec can't decode"),  # a lone surrogate
        (b"\xef\xbb\xbf{}", "Expecting value: line 1"),  # a byte order mark
        ("{}".encode("utf-16"), "codec can't decode"),
        (b'"a\nb"', "Invalid control character"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' occurs more than once"),
        (b'[{"x": {"a": 1, "a": 1}}]', "the key 'a' occurs more than once"),
        (b'{"a": 1, "\\u0061": 2}', "the key 'a' occurs more than once"),
        (b"NaN", "NaN is not valid JSON"),
        (b"[Infinity]", "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b"1e999", "the number 1e999 is too large"),
        (b"[-1e309]", "-1e309 is too large"),
        (b"1" * 400 + b".0", "is too large"),
        (b"1" * 100_000, "a number has 100,000 characters"),
        (b"[-" + b"1" * 100_000 + b"]", "a number has 100,001 characters"),
        (b"[0." + b"1" * 100_000 + b"]", "a number has 100,002 characters"),
        (b"[1e" + b"0" * 100_000 + b"]", "a number has 100,002 characters"),
        (b"0x10", "Extra data"),
        (b"+1", "Expecting value"),
        (b"01", "Extra data"),
        (b"'a'", "Expecting value"),
        (b"\x80\x04\x95\x10\x00.", "codec can't decode"),  # a pickle
        (b"PK\x03\x04\x14\x00\x00\x00", "Expecting value"),  # a zip file
        (b"cos\nsystem\n(S'exit'\ntR.", "Expecting value"),
    ],
)
def test_what_is_refused(data: bytes, says: str) -> None:
    assert says in refused(data)


def test_numbers_at_the_limits_are_read() -> None:
    text = b"[1.7976931348623157e308, 5e-324, -0.0, -0, 1e-999, " + b"9" * 1000 + b"]"
    largest, smallest, minus, zero, nothing, many = strict_json(text, "x")
    assert (largest, smallest, str(minus), zero, nothing) == (sys.float_info.max, 5e-324, "-0.0", 0, 0.0)
    assert many == 10**1000 - 1
    assert type(zero) is int


def test_a_digit_bomb_is_refused_where_the_interpreter_has_no_limit() -> None:
    """The user may have removed Python's own limit; int() of these digits would take minutes."""
    code = (
        "import sys; getattr(sys, 'set_int_max_str_digits', int)(0)\n"
        "from trainkit.tagged_json.codec import strict_json\n"
        "for text in (b'9' * 3_000_000, b'[1, ' + b'9' * 3_000_000 + b']'):\n"
        "    try: strict_json(text, 'f')\n"
        "    except Exception as error: print(error)"
    )
    assert run_python(code).stdout.splitlines() == ["f: a number has 3,000,000 characters, expected at most 1,100"] * 2


def test_digits_in_strings_are_not_a_number() -> None:
    text = "7" * 100_000
    assert strict_json(json.dumps([text, 12]).encode(), "x") == [text, 12]


# ------------------------------------------------------------------------------------------------- depth and size


@pytest.mark.parametrize("opened, closed", [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"\\"[":', b"}]"), (b' [\n{"\\\\": ', b"}] ")])
def test_depth_is_limited(opened: bytes, closed: bytes) -> None:
    levels = opened.count(b"[") - opened.count(b'\\"[') + opened.count(b"{")
    fits = MAX_DEPTH // levels
    strict_json(opened * fits + b"0" + closed * fits, "x")
    assert f"JSON nested {(fits + 1) * levels} levels deep" in refused(opened * (fits + 1) + b"0" + closed * (fits + 1))


def test_brackets_in_strings_do_not_count() -> None:
    for text in ("[" * 500, '"' + "[" * 500, "\\" + "{" * 500, "\\" * 7 + '"' + "[{" * 500, "]" * 500 + "\\"):
        for value in (text, [text], {text: text}, [text, [[text]]]):
            assert strict_json(json.dumps(value).encode(), "x") == value


def test_depth_without_an_end_is_refused_unparsed() -> None:
    """10^7 open brackets: Python's parser would overflow the C stack."""
    assert "JSON nested 10,000,000 levels deep" in refused(b"[" * 10_000_000)
    assert "deep" in refused(b'{"":' * 2_000_000)
    assert "deep" in refused(b'"\\"' + b'\\\\"' + b"[" * 200)


@pytest.mark.parametrize("tail", ['"', "\\", '\\"', '"\\', "\\\\", "\n", '[\\"{'])
def test_depth_is_counted_across_chunks(tail: str) -> None:
    """An escape sequence across the boundary of two chunks, followed by the end of the string and open brackets."""
    for length in range(2**20 - 12, 2**20 + 2):
        text = "x" * length + tail
        data = b"[" + json.dumps(text).encode() + b"," + b"[" * 99 + b"]" * 99 + b"]"
        strict_json(data, "x")
        assert "JSON nested 101 levels deep" in refused(b"[" + data + b"]")
    assert strict_json(data, "x")[0] == text


def test_size_is_limited_before_anything_is_read() -> None:
    assert f"{MAX_JSON_BYTES + 1:,} bytes of JSON" in refused(b" " * (MAX_JSON_BYTES + 1))


@given(st.binary(max_size=200) | st.text(alphabet='[]{}"\\,:1 a', max_size=300).map(str.encode))
@example(b'"\\')
@example(b"\\" * 9)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        value = strict_json(data, "x")
    except CorruptCheckpointError:
        return
    assert value == json.loads(data)


@given(json_values)
def test_the_depth_is_that_of_the_parsed_value(value: object) -> None:
    def depth(item: object) -> int:
        if isinstance(item, dict):
            return 1 + max(map(depth, item.values()), default=0)
        return 1 + max(map(depth, item), default=0) if isinstance(item, list) else 0

    missing = MAX_DEPTH - depth(value)
    text = json.dumps(value).encode()
    strict_json(b"[" * missing + text + b"]" * missing, "x")
    assert "JSON nested 101 levels deep" in refused(b"[" * (missing + 1) + text + b"]" * (missing + 1))


def test_a_deep_stack_does_not_crash() -> None:
    text = b"[" * 90 + b"]" * 90

    def down(left: int) -> object:
        return down(left - 1) if left else strict_json(text, "x")

    with pytest.raises((CorruptCheckpointError, RecursionError)):
        down(sys.getrecursionlimit())


def test_the_hook_replaces_objects() -> None:
    seen = []

    def hook(value: dict[str, object]) -> object:
        seen.append(value)
        return tuple(value.items())

    assert strict_json(b'{"a": {"b": 1}, "c": [{}]}', "x", hook) == (("a", (("b", 1),)), ("c", [()]))
    assert seen == [{"b": 1}, {}, {"a": (("b", 1),), "c": [()]}]


# ------------------------------------------------------------------------------------------------------- memory

# Structures that need the most memory for their size, found by experiment.
WORST = [
    "[" * 99 + "]" * 99,
    '{"":' * 98 + "{}" + "}" * 98,
    '{"":[' * 49 + "]}" * 49,
    '{"\U0001f600":[0]}',  # four bytes for each character
]

MEASURE = """
import sys
from trainkit.tagged_json.codec import loads

def line(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

for unit in sys.argv[2:]:
    unit = unit.encode()
    data = b"[" + b",".join([unit] * ((int(sys.argv[1]) - 2) // (len(unit) + 1))) + b"]"
    open("/proc/self/clear_refs", "w").write("5")  # reset the peak
    before = line("VmRSS") - len(data)
    value = loads(data, {}, "x")
    print(line("VmHWM") - before, len(data))
    value = data = None
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded_by_the_size() -> None:
    """A limit on the size also limits the memory: to 80 times the size, plus what the allocator has kept from before."""
    done = run_python("-c", MEASURE, str(2 * 2**20), *WORST, env={"PYTHONUTF8": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr
    measured = [tuple(map(int, text.split())) for text in done.stdout.splitlines()]
    assert len(measured) == len(WORST)
    for unit, (peak, length) in zip(WORST, measured, strict=True):
        assert peak <= 80 * length + 32 * 2**20, (unit[:40], peak / length)
