"""The one parser of JSON from files: what it takes, what it refuses, and what either costs."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.resume.checkpoints import complaint
from helpers.support import run_python
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit.checkpoint.strict_json import MAX_DEPTH, MAX_JSON_BYTES, json_problem, strict_json
from trainkit.errors import CorruptCheckpointError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def refused(data: bytes) -> str:
    """What the error says; it always begins with the file."""
    return complaint(lambda: strict_json(data, "some/manifest.json"), "some/manifest.json")


@given(json_values, st.booleans())
def test_sound_json_is_read(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        text.decode()
    except UnicodeDecodeError:
        assert "not UTF-8" in refused(text)
    else:
        read = strict_json(text, "x")
        assert read == value
        assert repr(read) == repr(value)  # -0.0, 1 and 1.0, True and 1
        assert strict_json(memoryview(text), "x") == value


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "Expecting value at character 0"),
        (b"   ", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a": 1,}', "no JSON"),
        (b"[1] [2]", "Extra data at character 4"),
        (b"[1]\0", "Extra data"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        (b'"\xed\xa0\x80"', "not UTF-8"),  # a surrogate by itself
        (b"\xef\xbb\xbf{}", "Expecting value at character 0"),  # a byte order mark
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'"a\nb"', "Invalid control character"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        (b'[{"x": {"a": 1, "a": 1}}]', "the key 'a' is there twice"),
        (b'{"a": 1, "\\u0061": 2}', "the key 'a' is there twice"),
        (b"NaN", "NaN, which is no JSON"),
        (b"[Infinity]", "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b"1e999", "the number 1e999 is too large"),
        (b"[-1e309]", "-1e309 is too large"),
        (b"1" * 400 + b".0", "is too large"),
        (b"1" * 100_000, "a number of 100,000 characters"),
        (b"[-" + b"1" * 100_000 + b"]", "a number of 100,001 characters"),
        (b"[0." + b"1" * 100_000 + b"]", "a number of 100,002 characters"),
        (b"[1e" + b"0" * 100_000 + b"]", "a number of 100,002 characters"),
        (b"0x10", "Extra data"),
        (b"+1", "Expecting value"),
        (b"01", "Extra data"),
        (b"'a'", "Expecting value"),
        (b"\x80\x04\x95\x10\x00.", "not UTF-8"),  # a pickle
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
    """The user may have lifted Python's own limit; int() of these digits would take minutes."""
    code = (
        "import sys; getattr(sys, 'set_int_max_str_digits', int)(0)\n"
        "from trainkit.checkpoint.strict_json import strict_json\n"
        "for text in (b'9' * 3_000_000, b'[1, ' + b'9' * 3_000_000 + b']'):\n"
        "    try: strict_json(text, 'f')\n"
        "    except Exception as error: print(error)"
    )
    assert run_python(code).stdout.splitlines() == ["f: a number of 3,000,000 characters"] * 2


def test_digits_in_text_are_no_number() -> None:
    text = "7" * 100_000
    assert strict_json(json.dumps([text, 12]).encode(), "x") == [text, 12]


# ------------------------------------------------------------------------------------------------- depth and size


@pytest.mark.parametrize("opened, closed", [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"\\"[":', b"}]"), (b' [\n{"\\\\": ', b"}] ")])
def test_depth_is_limited(opened: bytes, closed: bytes) -> None:
    levels = opened.count(b"[") - opened.count(b'\\"[') + opened.count(b"{")
    fits = MAX_DEPTH // levels
    strict_json(opened * fits + b"0" + closed * fits, "x")
    assert f"JSON nested {(fits + 1) * levels} deep" in refused(opened * (fits + 1) + b"0" + closed * (fits + 1))


def test_brackets_in_text_are_no_depth() -> None:
    for text in ("[" * 500, '"' + "[" * 500, "\\" + "{" * 500, "\\" * 7 + '"' + "[{" * 500, "]" * 500 + "\\"):
        for value in (text, [text], {text: text}, [text, [[text]]]):
            assert strict_json(json.dumps(value).encode(), "x") == value


def test_depth_without_an_end_is_refused_unparsed() -> None:
    """10^7 open brackets: Python's parser would use up the C stack."""
    assert "JSON nested 10,000,000 deep" in refused(b"[" * 10_000_000)
    assert "deep" in refused(b'{"":' * 2_000_000)
    assert "deep" in refused(b'"\\"' + b'\\\\"' + b"[" * 200)


@pytest.mark.parametrize("tail", ['"', "\\", '\\"', '"\\', "\\\\", "\n", '[\\"{'])
def test_depth_is_counted_across_chunks(tail: str) -> None:
    """An escape on both sides of where the bytes are cut, with the end of the text and open brackets after it."""
    for length in range(2**20 - 12, 2**20 + 2):
        text = "x" * length + tail
        data = b"[" + json.dumps(text).encode() + b"," + b"[" * 99 + b"]" * 99 + b"]"
        assert json_problem(data) is None
        assert "JSON nested 101 deep" in refused(b"[" + data + b"]")
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
def test_the_scan_agrees_with_the_parser_about_depth(value: object) -> None:
    def depth(item: object) -> int:
        if isinstance(item, dict):
            return 1 + max(map(depth, item.values()), default=0)
        return 1 + max(map(depth, item), default=0) if isinstance(item, list) else 0

    missing = MAX_DEPTH - depth(value)
    text = json.dumps(value).encode()
    assert json_problem(b"[" * missing + text + b"]" * missing) is None
    assert "deep" in str(json_problem(b"[" * (missing + 1) + text + b"]" * (missing + 1)))


def test_a_deep_stack_is_no_crash() -> None:
    text = b"[" * 90 + b"]" * 90

    def down(left: int) -> object:
        return down(left - 1) if left else strict_json(text, "x")

    with pytest.raises((CorruptCheckpointError, RecursionError)):
        down(sys.getrecursionlimit())


def test_the_hook_takes_the_place_of_objects() -> None:
    seen = []

    def hook(value: dict[str, object]) -> object:
        seen.append(value)
        return tuple(value.items())

    assert strict_json(b'{"a": {"b": 1}, "c": [{}]}', "x", hook) == (("a", (("b", 1),)), ("c", [()]))
    assert seen == [{"b": 1}, {}, {"a": (("b", 1),), "c": [()]}]


# ------------------------------------------------------------------------------------------------------- memory

# Structures that take the most memory for their size, found by trying: {repeated part: is it refused beforehand}.
WORST = {
    "[" * 99 + "]" * 99: True,
    "[" * 75 + "]" * 75 + " " * 45: False,  # just below what is refused
    '{"":' * 98 + "{}" + "}" * 98: False,
    '{"":[' * 49 + "]}" * 49: True,
    '{"":[' * 45 + "]}" * 45 + ',"a"' * 14: False,
    '{"\U0001f600":[0]}': False,  # four bytes for each character
}

MEASURE = """
import sys
from trainkit.checkpoint.tagged import loads
from trainkit.errors import CorruptCheckpointError

def line(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

for unit, size in zip(sys.argv[2:], [int(sys.argv[1])] * len(sys.argv)):
    unit = unit.encode()
    data = b"[" + b",".join([unit] * ((size - 2) // (len(unit) + 1))) + b"]"
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = line("VmRSS") - len(data)
    refused = False
    try:
        value = loads(data, {}, "x")
    except CorruptCheckpointError as error:
        refused = "next to nothing in them" in str(error)
    print(line("VmHWM") - before, len(data), refused)
    value = data = None
"""


def peaks(size: int, units: list[str]) -> list[tuple[int, int, bool]]:
    done = run_python("-c", MEASURE, str(size), *units, env={"PYTHONUTF8": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr
    return [(int(peak), int(length), refused == "True") for peak, length, refused in map(str.split, done.stdout.splitlines())]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded() -> None:
    """Within 40 times the size and half of the 64 MiB on top; the rest is for what the allocator keeps from before."""
    size = 2 * 2**20
    measured = peaks(size, list(WORST))
    assert len(measured) == len(WORST)
    for unit, (peak, length, _) in zip(WORST, measured, strict=True):
        assert peak <= 40 * length + 32 * 2**20, (unit[:40], peak / length)
    assert max(peak / length for peak, length, _ in measured) > 20, "these are not the worst structures"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "unit", ["[" * 75 + "]" * 75 + " " * 45, '{"":[' * 45 + "]}" * 45 + ',"a"' * 14, '{"":' * 98 + "{}" + "}" * 98]
)
def test_memory_is_bounded_at_the_largest_size(unit: str) -> None:
    ((peak, length, refused),) = peaks(MAX_JSON_BYTES - 100, [unit])
    assert peak <= 40 * length + 64 * 2**20, peak / length
    assert not (refused and unit.startswith("[["))  # measured, not just refused; objects are larger before Python 3.11


@pytest.mark.parametrize("unit", ["[]", "{}", "[0]", "[[0,1],[2,3]]", "[[[0]]]", '{"a":0}', '{"a":{"b":[0]}}', '[{"lr":[]}]'])
def test_large_amounts_of_ordinary_state_pass(unit: str) -> None:
    """The bound on empty containers must not hit anything that somebody would store."""
    count = 24 * 2**20 // (len(unit) + 1)
    assert json_problem(b"[" + b",".join([unit.encode()] * count) + b"]") is None
