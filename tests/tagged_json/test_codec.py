"""Tagged JSON: values are restored unchanged, unsupported ones are named, and damaged text is always an error."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from enum import Enum, IntEnum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resume.checkpoints import complaint
from helpers.support import examples, run_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from trainkit.errors import CheckpointError, CorruptCheckpointError, UnsavableError
from trainkit.tagged_json import codec
from trainkit.tagged_json.codec import _Decoder, dumps, loads

FILE = "state.safetensors"


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    data = dumps(value, tensors)
    data.decode("ascii")
    return loads(data, {FILE: tensors}, "state.json")


def same(a: Any, b: Any) -> bool:
    """Whether both are equal in type and value, recursively. nan equals nan, 0.0 does not equal -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b))
    if isinstance(a, np.ndarray):
        alike = same(a.ravel().tolist(), b.ravel().tolist()) if a.dtype.hasobject else a.tobytes() == b.tobytes()
        return a.dtype == b.dtype and a.shape == b.shape and alike
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and sorted(map(_mark, a)) == sorted(map(_mark, b))
    if isinstance(a, dict):
        keys = [(_mark(k), v) for k, v in a.items()], [(_mark(k), v) for k, v in b.items()]
        return len(a) == len(b) and all(ka == kb and same(va, vb) for (ka, va), (kb, vb) in zip(*keys, strict=True))
    return _mark(a) == _mark(b)


def _raw(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def _mark(value: Any) -> str:
    if isinstance(value, (tuple, set, frozenset)):
        parts = map(_mark, value)
        return f"{type(value).__name__}({', '.join(parts if isinstance(value, tuple) else sorted(parts))})"
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None, fold=0)!r} {value.utcoffset()!r}"
    return hex(value) if type(value) is int else f"{type(value).__name__}:{value!r}"


# ------------------------------------------------------------------------------------------------------ round trip

offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.integers(-128, 127).map(np.int8),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.complex_numbers(width=64).map(np.complex64),
    st.complex_numbers().map(np.complex128),
    st.booleans().map(np.bool_),
    st.text().map(np.str_),
    st.binary().map(np.bytes_),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers().map(lambda n: n**40),
    st.floats(),
    st.text(st.characters()),  # also lone surrogates
    st.sampled_from(["$", "$$", "$tuple", "$tensor", "$$map", "\ud800", "\0", "a\n", "__metadata__", "a/b", "a#b"]),
    st.binary(),
    st.complex_numbers(),
    st.dates(),
    st.datetimes(timezones=st.none() | offsets),
    st.timedeltas(),
    st.text(st.characters(exclude_characters="\0\\"), max_size=8).map(Path),
    st.sampled_from(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)),
    st.sampled_from(["cpu", "cuda", "cuda:7", "meta", "mps:0"]).map(torch.device),
    scalars,
)
hashables = st.recursive(
    hashable_leaves, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4
)
tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).remainder(100).to(dtype).reshape(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
    ),
)
arrays = hnp.arrays(
    st.sampled_from([np.dtype(code) for code in "?bBhHiIlLefdF"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
values = st.recursive(
    hashables | tensors | arrays | st.binary().map(bytearray) | st.sets(hashables, max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=2).map(Counter),
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
def test_every_value_is_restored_unchanged(value: Any) -> None:
    back = there_and_back(value)
    assert same(back, value), (back, value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -0.0,
        1e308,
        5e-324,
        10**308,
        -(2**1024),
        2**1024 - 1,
        10**20_000,
        True,
        "\ud83d",
        "\U0001f600",
        "\x7f\u2028",
        {"$tuple": [1]},
        {"$$": {"$": 1, "b": 2}},
        {"$tensor": "state.safetensors#x", "other": 1},
        {1: 2, "1": 3, (1,): 4, None: 5, 1.5: 6},
        {(): {frozenset(): []}},
        Counter({3: 2, 7: 1}),
        Counter({"a": 2.5}),
        [[], (), {}, set(), frozenset(), Counter(), b"", "", bytearray()],
        {frozenset({(1, "a"), (2, "b")})},
        datetime(2026, 11, 20, 15, 7, 48, 123456, timezone.utc),
        datetime(1, 1, 1),
        timedelta.max,
        timedelta.min,
        date.max,
        Path("a/../b"),
        Path("/"),
        np.float32(0.1),
        np.longlong(3).astype(np.int64),
        np.str_("a\0"),
        {np.str_("a"): 1, "b": np.str_("$c")},
        np.bytes_(b"a\0"),
        torch.empty(0, 5),
        torch.tensor(3.0),
        np.array(3),
        np.empty((0, 2)),
        np.array(["PAD", 101, (1, 2), [3], None, np.int64(4), {"a": np.arange(2), 1: torch.ones(1)}], object),
        np.array([["a", "bcd"], ["", "\ud83d"]]),
        np.array(["a"], "U7"),
        np.array([b"a\0b", b""]),
        np.array("x", object),
        np.empty((0, 3), object),
        np.empty(0, "U5"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_particular_values_are_restored_unchanged(value: Any) -> None:
    for wrapped in (value, [value], {"$k": (value,)}):
        assert same(there_and_back(wrapped), wrapped)


Point = namedtuple("Point", "x y")


@dataclass
class Settings:
    rate: float = 0.1
    inner: Any = field(default_factory=lambda: (1, 2))


@dataclass(frozen=True)
class Frozen:
    n: int = 1


class Color(IntEnum):
    RED = 1


class Mode(str, Enum):
    MIN = "min"

    def __str__(self) -> str:
        return "something else"


class Plain(Enum):
    A = 1


class Loud(str):
    def __str__(self) -> str:
        return "loud"


class Seven(int):
    def __int__(self) -> int:
        return 8


@pytest.mark.parametrize(
    "value, plainer",
    [
        (OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (UserDict(a=1), {"a": 1}),
        (Settings(), {"rate": 0.1, "inner": (1, 2)}),
        (Frozen(), {"n": 1}),
        (Namespace(lr=1, **{"$x": 2}), {"lr": 1, "$x": 2}),
        (Point(1, [2]), (1, [2])),
        (torch.Size([2, 3]), (2, 3)),
        (torch.max(torch.tensor([[1.0]]), 1)[1].shape, (1,)),
        (Color.RED, 1),
        (Mode.MIN, "min"),
        ({Mode.MIN: Color.RED}, {"min": 1}),
        (Loud("x"), "x"),
        (Seven(7), 7),
        (PurePosixPath("a/b"), Path("a/b")),
        (np.longlong(5), np.int64(5)),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="i4")),
        (np.arange(6).reshape(2, 3)[:, ::-1], np.array([[2, 1, 0], [5, 4, 3]])),
        (np.broadcast_to(np.float32(2), (2, 2)), np.full((2, 2), 2, np.float32)),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (torch.arange(4.0).view(2, 2).T, torch.tensor([[0.0, 2.0], [1.0, 3.0]])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_some_values_are_restored_as_a_plainer_type(value: Any, plainer: Any) -> None:
    assert same(there_and_back({"v": value}), {"v": plainer})


# --------------------------------------------------------------------------------------------------------- tensors


def test_tensors_are_named_by_their_path() -> None:
    found: dict[str, Tensor] = {}
    score, weight = torch.tensor(0.5), nn.Parameter(torch.ones(2))
    state = {"callbacks": {"EarlyStopping": {"best_score": score}}, "list": [1, (weight, score)], 3: np.ones(2)}
    data = dumps(state, found, file="other.safetensors")
    assert list(found) == ["callbacks/EarlyStopping/best_score", "list/1/0", "3"]
    assert json.loads(data)["$map"][0][1]["EarlyStopping"]["best_score"] == {
        "$tensor": "other.safetensors#callbacks/EarlyStopping/best_score"
    }
    assert found["list/1/0"].data_ptr() == weight.data_ptr()
    assert not found["list/1/0"].requires_grad
    back = loads(data, {"other.safetensors": found}, "x")
    assert back["list"][1][1] is back["callbacks"]["EarlyStopping"]["best_score"]


def test_a_tensor_that_occurs_twice_is_stored_and_restored_once() -> None:
    found: dict[str, Tensor] = {}
    tensor, array = torch.ones(2), np.ones(2)
    data = dumps([tensor, array, {"again": tensor, "too": array}, tensor.clone()], found)
    assert sorted(found) == ["0", "1", "3"]
    back = loads(data, {FILE: found}, "x")
    assert back[0] is back[2]["again"]
    assert back[1] is back[2]["too"]
    assert back[3] is not back[0]


def test_names_of_tensors_never_collide() -> None:
    found = {"a": torch.zeros(1)}
    state = {
        "a": torch.ones(1),
        "b/c": torch.ones(2),
        "b": {"c": torch.ones(3)},
        "__metadata__": torch.ones(4),
        "\ud800": torch.ones(5),
        "x" * 600: torch.ones(6),
        "x" * 601: torch.ones(7),
        10**5000: torch.ones(8),
        "h#i": torch.ones(9),
    }
    data = dumps(state, found)
    assert len(found) == 10
    assert "__metadata__" not in found
    assert all(len(key) < 520 and key.encode() for key in found)
    assert same(loads(data, {FILE: found}, "x"), state)
    assert same(there_and_back(torch.ones(1)), torch.ones(1))


def test_arrays_share_memory_where_they_can() -> None:
    found: dict[str, Tensor] = {}
    array = np.arange(3.0)
    dumps({"a": array, "zero": np.array(2.0)}, found)
    array[0] = 7
    assert found["a"].tolist() == [7, 1, 2]
    assert found["zero"].shape == ()


# ------------------------------------------------------------------------------------------------------- unsavable


def test_the_path_is_named() -> None:
    with pytest.raises(UnsavableError) as caught:
        dumps({"callbacks": {"Mine": {"fn": len}}}, {}, where="state")
    assert str(caught.value).startswith('state["callbacks"]["Mine"]["fn"] cannot be stored: it is code (len)')
    with pytest.raises(UnsavableError, match=r'^hparams\["a"\]\[1\]\[\(2, \'x\'\)\]\["\\ud800"\] cannot'):
        dumps({"a": [0, {(2, "x"): {"\ud800": object()}}]}, {}, where="hparams")
    with pytest.raises(UnsavableError, match=r"^state cannot be stored"):
        dumps(object(), {})
    with pytest.raises(UnsavableError, match=r"^state\[0x"):
        dumps({10**5000: object()}, {})


@dataclass
class HasCode:
    fn: Any = print


@pytest.mark.parametrize(
    "value, says",
    [
        (lambda: 0, "it is code (test_encode.<lambda>"),
        (len, "it is code (len)"),
        (Settings, "it is code (Settings)"),
        (HasCode(), '["fn"] cannot be stored'),
        (Namespace(f=len), '["f"] cannot be stored'),
        (nn.Linear(1, 1), "state_dict()"),
        (torch.Generator(), "get_state()"),
        (object(), "it is a builtins.object; store its content"),
        (deque([1]), "collections.deque; store it as a list: list(…)"),
        (range(3), "builtins.range; store it as a list: list(…)"),
        (iter([]), "store it as a list"),
        (memoryview(b"a"), "store it as a list"),
        (Plain.A, "it is a Plain; store its .value"),
        (sys, "it is a builtins.module"),
        (timezone.utc, "datetime.timezone"),
        (Ellipsis, "ellipsis"),
        (PureWindowsPath("a") if type(PurePath()) is PurePosixPath else PurePosixPath("a"), "pathlib"),
        (np.longdouble(1), "store its item()"),
        (np.datetime64("2020"), "store its item()"),
        (np.array([1, object()], object), "[1] cannot be stored: it is a builtins.object"),
        (np.ma.masked_array(["a"], [True]), "MaskedArray"),
        (np.array([("a", 1)], "O,i"), "torch has no dtype"),
        (np.array([1], "datetime64[s]"), "torch has no dtype"),
        (np.array([1j]), "safetensors does not support torch.complex128"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        (torch.ones(1, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "to_dense()"),
        (nn.UninitializedParameter(), "no values yet"),
        ({torch.ones(1): 1}, "a key is a Tensor"),
        ({Frozen()}, "an element of a set is a Frozen"),
        ({(1, (Frozen(),)): 1}, "a key is a Frozen"),
        ({Plain.A: 1}, "a key is a Plain"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_values_that_cannot_be_stored_are_named(value: Any, says: str) -> None:
    if "<lambda>" in says:
        says = "<lambda>"
    with pytest.raises(UnsavableError) as caught:
        dumps({"a": [value]}, {})
    assert str(caught.value).startswith('state["a"][0]')
    assert says in str(caught.value)


def test_cycles_are_found() -> None:
    loop: dict[str, Any] = {"a": [1]}
    loop["a"].append({"self": loop})
    with pytest.raises(UnsavableError, match=r'^state\["a"\]\[1\]\["self"\] cannot be stored: it contains itself'):
        dumps(loop, {})
    space = Namespace()
    space.me = (space,)
    with pytest.raises(UnsavableError, match="contains itself"):
        dumps(space, {})
    twice = [1]
    assert there_and_back([twice, twice, (twice,)]) == [[1], [1], ([1],)]


@pytest.mark.parametrize(
    "wrap, levels",
    [
        (lambda v: [v], 1),
        (lambda v: {"k": v}, 1),
        (lambda v: (v,), 2),
        (lambda v: {1: v}, 3),
        (lambda v: Counter({1: v}), 3),
        (lambda v: Namespace(v=v), 1),
    ],
)
@pytest.mark.parametrize(
    "leaf, own", [(0, 0), (math.nan, 1), (complex(1, math.nan), 3), (10**400, 1), (np.float32("nan"), 3), (timedelta(1), 2)]
)
def test_encoded_values_are_not_too_deep_to_be_read(wrap: Any, levels: int, leaf: Any, own: int) -> None:
    value, depth = leaf, own
    while depth + levels <= codec.MAX_DEPTH:
        value, depth = wrap(value), depth + levels
    assert dumps(value, {})
    there_and_back(value)
    for _ in range(3):
        value = wrap(value)
    with pytest.raises(UnsavableError, match="nested more than 100 levels deep"):
        dumps(value, {})


def test_too_large_json_is_an_error() -> None:
    with pytest.raises(UnsavableError, match=r"^state cannot be stored: 75,\d+,\d+ bytes of JSON.*as tensors"):
        dumps(["x" * 1_000_000] * 75, {})


def test_equal_sets_have_equal_text() -> None:
    words = [f"w{i}" for i in range(50)]
    small, larger = {0, 8}, set(range(9)) | {2**20}
    larger -= {*range(1, 8), 2**20}  # the same elements, but in a hash table with a different order
    assert small == larger
    assert dumps(small, {}) == dumps(larger, {})
    code = f"from trainkit.tagged_json.codec import dumps; print(list(set({words})), dumps(set({words}), {{}}))"
    (order, text), (other_order, other_text) = (
        run_python(code, env={"PYTHONHASHSEED": seed}).stdout.split("] ") for seed in ("1", "2")
    )
    assert order != other_order
    assert len(text) > 200
    assert text == other_text


def test_long_lists_of_numbers_are_exact() -> None:
    """Long lists of numbers take a faster path; a list with a single value of another type is restored exactly too."""
    numbers = list(range(1_000_000))
    data = dumps({"a": numbers}, {})
    assert loads(data, {}, "x") == {"a": numbers}
    for odd in (math.inf, 10**400, True, 1.5, None, "x", np.int64(3), (1,)):
        assert same(there_and_back([*range(5), odd]), [*range(5), odd])
        assert same(there_and_back([0.5, odd]), [0.5, odd])


# --------------------------------------------------------------------------------------------------- hostile input


def refused(data: bytes, known: dict[str, Tensor] | None = None) -> str:
    tensors = {"k": torch.ones(2), "half": torch.ones(2, dtype=torch.bfloat16)} | (known or {})
    return complaint(lambda: loads(data, {FILE: tensors}, "a/state.json"), "a/state.json")


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"$pickle": "gASVAAAA"}', "unknown tag '$pickle'"),
        ('{"$": 1}', "unknown tag '$'"),
        ('{"$tuple": [], "a": 1}', "the tag '$tuple' must be the only key"),
        ('{"a": 1, "$tuple": []}', "the tag '$tuple' must be the only key"),
        ('{"$$a": 1, "$tuple": []}', "must be the only key"),
        ('{"$tuple": {"a": 1}}', "malformed $tuple"),
        ('{"$tuple": "ab"}', "malformed $tuple"),
        ('{"$tuple": {"$tuple": []}}', "malformed $tuple"),
        ('{"$set": [[1]]}', "malformed $set"),
        ('{"$set": [1, 1.0]}', "an element occurs twice"),
        ('{"$set": [{"a": 1}]}', "malformed $set"),
        ('{"$frozenset": null}', "malformed $frozenset"),
        ('{"$map": [[1, 2], [1, 3]]}', "a key occurs twice"),
        ('{"$map": [[1, 2, 3]]}', "malformed $map"),
        ('{"$map": [{"$tuple": [1, 2]}]}', "malformed $map"),
        ('{"$map": ["ab"]}', "malformed $map"),
        ('{"$map": [[[], 2]]}', "malformed $map"),
        ('{"$map": {"1": 2}}', "malformed $map"),
        ('{"$counter": {"a": 1}}', "malformed $counter"),
        ('{"$float": "1.5"}', "malformed $float"),
        ('{"$float": 1.5}', "malformed $float"),
        ('{"$float": []}', "malformed $float"),
        ('{"$int": "0xg"}', "malformed $int"),
        ('{"$int": 12}', "malformed $int"),
        ('{"$bytes": "a"}', "malformed $bytes"),
        ('{"$bytes": "!!!!"}', "malformed $bytes"),
        ('{"$bytes": "\\u00e9"}', "malformed $bytes"),
        ('{"$bytes": 5}', "malformed $bytes"),
        ('{"$bytearray": 1000000000000}', "malformed $bytearray"),
        ('{"$complex": [1, 2]}', "malformed $complex"),
        ('{"$complex": [1.0]}', "malformed $complex"),
        ('{"$complex": "1j"}', "malformed $complex"),
        ('{"$date": "2020-13-01"}', "malformed $date"),
        ('{"$datetime": "yesterday"}', "malformed $datetime"),
        ('{"$datetime": null}', "malformed $datetime"),
        ('{"$timedelta": [1, 2]}', "malformed $timedelta"),
        ('{"$timedelta": [99999999999, 0, 0]}', "malformed $timedelta"),
        ('{"$timedelta": [true, 0, 0]}', "malformed $timedelta"),
        ('{"$device": "quantum"}', "malformed $device"),
        ('{"$device": 0}', "malformed $device"),
        ('{"$dtype": "save"}', "malformed $dtype"),
        ('{"$dtype": "__class__"}', "malformed $dtype"),
        ('{"$path": 1}', "malformed $path"),
        ('{"$scalar": ["object", 1]}', "malformed $scalar"),
        ('{"$scalar": ["int8", 200]}', "malformed $scalar"),
        ('{"$scalar": ["int8", true]}', "malformed $scalar"),
        ('{"$scalar": ["uint64", -1]}', "malformed $scalar"),
        ('{"$scalar": ["float32", "1"]}', "malformed $scalar"),
        ('{"$scalar": ["float32", 1]}', "malformed $scalar"),
        ('{"$scalar": ["bool", 1]}', "malformed $scalar"),
        ('{"$scalar": [[], 1]}', "malformed $scalar"),
        ('{"$scalar": "float32"}', "malformed $scalar"),
        ('{"$tensor": "state.safetensors#missing"}', "which does not exist"),
        ('{"$tensor": "/etc/passwd#k"}', "which does not exist"),
        ('{"$tensor": "k"}', "which does not exist"),
        ('{"$tensor": 1}', "malformed $tensor"),
        ('{"$array": "state.safetensors#half"}', "malformed $array"),
        ('{"$array": ["x"]}', "malformed $array"),
        ('{"$elements": ["O", [2], [1]]}', "malformed $elements"),
        ('{"$elements": ["O", [-1], [1]]}', "malformed $elements"),
        ('{"$elements": ["O", [true], [1]]}', "malformed $elements"),
        ('{"$elements": ["f4", [1], [1]]}', "malformed $elements"),
        ('{"$elements": ["U1", [1], [1]]}', "malformed $elements"),
        ('{"$elements": ["U1", [1], ["ab"]]}', "do not fit into U1"),
        ('{"$elements": ["S1", [1], ["a"]]}', "malformed $elements"),
        ('{"$elements": ["U99999999", [1], ["a"]]}', "do not fit into U99999999"),
        ('{"$elements": ["O,O", [1], ["a"]]}', "malformed $elements"),
        ('{"a": NaN}', "NaN"),
        ('{"$tuple": [1], "$tuple": [2]}', "occurs more than once"),
    ],
)
def test_malformed_tags_are_refused(text: str, says: str) -> None:
    assert says in refused(text.encode())


def test_an_array_that_is_mostly_padding_is_refused() -> None:
    texts = np.zeros(20, "U4000000")
    with pytest.raises(UnsavableError, match=r"its 320,000,000 bytes of text are more than .*store its tolist\(\)"):
        dumps(texts, {})


def test_an_array_that_contains_itself() -> None:
    array = np.empty(1, object)
    array[0] = [array]
    with pytest.raises(UnsavableError, match=r"\[0\]\[0\] cannot be stored: it contains itself"):
        dumps(array, {})


def test_many_keys_with_the_same_hash_do_not_hang() -> None:
    """Keys that all have the same hash are refused: filling a dict with a million of them would take hours."""
    modulus = sys.hash_info.modulus
    alike = [k * modulus for k in range(1, 1_000)]
    assert "same hash" in refused(json.dumps({"$set": alike}).encode())
    assert "same hash" in refused(json.dumps({"$frozenset": [{"$tuple": [k]} for k in alike]}).encode())
    assert "same hash" in refused(json.dumps({"$map": [[k, 0] for k in alike]}).encode())
    assert "same hash" in refused(json.dumps({"$counter": [[k, 0] for k in alike]}).encode())
    few = set(alike[:50])
    assert there_and_back(few) == few
    many = set(range(-5000, 5000))
    assert there_and_back(many) == many


SAMPLE = {
    "loops": {"step": 12, "epoch": 1, "rest": (1, 2.5, None)},
    "schedulers": [{"milestones": Counter({3: 1, 5: 1}), "base_lrs": [0.1], "lr": math.inf}],
    "user": {"$x": {1: "a", (2,): b"bytes"}, "when": datetime(2026, 1, 2, tzinfo=timezone.utc), "took": timedelta(1), "j": 1j},
    "types": [torch.bfloat16, torch.device("cuda:0"), Path("a/b"), {1, 2}, frozenset("ab"), np.float32(1.5), 10**400],
    "tensors": {"t": torch.ones(2), "a": np.ones(2)},
}


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(dumps(SAMPLE, {}))
    for _ in range(draw(st.integers(1, 4))):
        place, kind = draw(st.integers(0, len(data) - 1)), draw(st.sampled_from(["flip", "set", "cut", "repeat", "insert"]))
        if kind == "flip":
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            data[place] = draw(st.sampled_from(b'[]{}",:$-0129.eEtfnN\\ \0'))
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 20))]
        elif kind == "repeat":
            data[place:place] = data[place : place + draw(st.integers(1, 40))]
        else:
            parts = [b"[", b"{}", b'{"$set":[', b"1e999", b"NaN", b'"$tuple":', b"9" * 5000, b",", b'"']
            data[place:place] = draw(st.sampled_from(parts))
        if not data:
            data = bytearray(b" ")
    return bytes(data)


@given(mutated())
@settings(max_examples=examples(600))
def test_mutated_state_is_read_or_refused(data: bytes) -> None:
    found: dict[str, Tensor] = {}
    dumps(SAMPLE, found)
    try:
        value = loads(data, {FILE: found}, "x")
    except CorruptCheckpointError as error:
        message = str(error)
    else:
        message = "x: "
        there_and_back(value)  # any value that was read can be stored
    assert message.startswith("x: ")


tags = st.sampled_from(sorted(_Decoder({}, "x")._tags))
hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["cpu", "float32", "2020-01-01", f"{FILE}#k", "nan", "AAAA", "0xff", "int8", "str"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(lambda tag, payload: {tag: payload}, tags, inner | st.lists(inner, max_size=3))
    ),
    max_leaves=10,
)


@given(hostile)
@settings(max_examples=examples(600))
def test_any_nesting_of_tags_is_read_or_refused(structure: Any) -> None:
    try:
        value = loads(json.dumps(structure).encode(), {FILE: {"k": torch.ones(1)}}, "x")
    except CheckpointError:  # corrupt, or of a type whose name nobody has registered
        return
    assert there_and_back([value])
