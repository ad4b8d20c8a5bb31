"""Objects as bytes: encoding and decoding returns an equal object, and no input bytes do harm."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcomm.comm.codec import HEADER_BYTES, MAX_DEPTH, decode, encode
from meshcomm.errors import ObjectError

CPU = torch.device("cpu")
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
DTYPES = {name: each for name, each in DTYPES.items() if not name.startswith(("torch.qint", "torch.quint"))}


def to_bytes(x: object, pickle: bool = False) -> bytes:
    data = encode(x, pickle)
    assert data.dtype == torch.uint8 and data.shape == (data.numel(),)
    return data.numpy().tobytes()


def from_bytes(data: bytes, pickle: bool = False) -> Any:
    return decode(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)], CPU, pickle)


def through(x: object, pickle: bool = False) -> Any:
    return from_bytes(to_bytes(x, pickle), pickle)


def spelled(x: Any) -> Any:
    """`x` spelled out with every type and bit, so that == compares all of it; sets are unordered."""
    if isinstance(x, torch.Tensor):
        bits = [int(b) for b in x.detach().contiguous().view(-1).view(torch.uint8)]
        return ("tensor", str(x.dtype), tuple(x.shape), str(x.device), x.requires_grad, bits)
    if isinstance(x, (np.ndarray, np.generic)):
        shape = np.shape(x) if isinstance(x, np.ndarray) else None
        return (type(x).__name__, np.asarray(x).dtype.descr, shape, np.ascontiguousarray(x).tobytes())
    if isinstance(x, float):
        return (type(x).__name__, struct.pack("<d", x))
    if isinstance(x, complex):
        return (type(x).__name__, struct.pack("<dd", x.real, x.imag))
    if isinstance(x, dict):
        return (type(x).__name__, [(spelled(k), spelled(v)) for k, v in x.items()])
    if isinstance(x, (set, frozenset)):
        return (type(x).__name__, sorted(repr(spelled(each)) for each in x))
    if isinstance(x, (list, tuple)):
        return (type(x).__name__, [spelled(each) for each in x])
    return (type(x).__name__, x)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(codec=None))  # lone surrogates as well
    | st.binary()
)


@st.composite
def plain(draw: st.DrawFn, depth: int = 4, key: bool = False) -> Any:
    """Plain data, nested up to `depth` levels; with `key`, only values that can be dict keys."""
    kinds = ["scalar", "tuple", "frozenset"] if key else KINDS
    kind = draw(st.sampled_from(kinds)) if depth else "scalar"
    if kind == "scalar":
        return draw(scalars)
    if kind == "bytearray":
        return bytearray(draw(st.binary()))
    inside = plain(depth - 1, key or kind in ("set", "frozenset"))
    if kind == "dict":
        return dict(draw(st.lists(st.tuples(plain(depth - 1, True), inside), max_size=3)))
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        draw(st.lists(inside, max_size=3))
    )


KINDS = ["scalar", "bytearray", "list", "tuple", "dict", "set", "frozenset"]


@settings(max_examples=150, deadline=None)
@given(plain())
def test_plain_data_comes_out_as_it_went_in(x: Any) -> None:
    assert spelled(through(x)) == spelled(x)


def test_whole_numbers_of_any_size() -> None:
    for power in (7, 8, 15, 16, 63, 64, 1000, 100_000):
        for x in (2**power, -(2**power), 2**power - 1, -(2**power) - 1):
            assert through(x) == x


def test_floats_keep_every_bit() -> None:
    for bits in (0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000000, 0x8000000000000000, 1):
        x = struct.unpack("<d", struct.pack("<Q", bits))[0]
        for each in (x, complex(x, 1), complex(1, x), [x], {x: x}):
            assert spelled(through(each)) == spelled(each)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_of_torch_in_every_layout(dtype: str) -> None:
    kind = DTYPES[dtype]
    wide = kind.itemsize
    raw = (torch.arange(24 * wide) * 37 % 251).to(torch.uint8)
    if kind == torch.bool:
        raw %= 2
    whole = raw.view(kind).view(2, 3, 4)
    cells = raw.view(2, 3, 4, wide)  # the same bytes, permuted as bytes
    for x, expected in (
        (whole, cells),
        (whole.transpose(0, 2), cells.transpose(0, 2)),
        (whole[:, ::2, 1:], cells[:, ::2, 1:]),
        (whole[0, 0, :1].expand(5), cells[0, 0, :1].expand(5, wide)),
        (whole[1, 2, 3], cells[1, 2, 3]),
        (whole[:0], cells[:0]),
    ):
        got = through({"x": x})["x"]
        assert got.dtype == kind and got.shape == x.shape and got.is_contiguous()
        assert torch.equal(got.view(-1).view(torch.uint8), expected.reshape(-1))


def test_tensors_that_only_pretend_to_hold_their_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert z.is_conj() and through(z).tolist() == [1 - 2j, 3 + 4j]
    assert z.imag.is_neg() and through(z.imag).tolist() == [-2.0, 4.0]
    wide = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj()
    assert through(wide).tolist() == [1 - 2j, 3 + 4j]


def test_tensors_are_new_memory_without_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        y, z = through([x, x.detach().clone()])
    assert not y.requires_grad and y.untyped_storage().nbytes() == 8
    y += 1
    assert x.tolist() == z.tolist() == [1.0, 1.0]
    one, other = through([torch.ones(1), torch.ones(1)])
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12.0).reshape(3, 4)[::-1, ::2],
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.array([["a", "bcé"], ["", "d"]]),
        np.array([b"a", b"\xff\xfe"]),
        np.array(["2026-11-20", "NaT"], dtype="datetime64[s]"),
        np.array([3], dtype="timedelta64[25ms]"),
        np.array([True, False]),
        np.array(5),
        np.empty((0, 3)),
        np.ndarray((3,), "U0"),
        np.zeros(2, dtype=np.dtype([("a", "f4"), ("b", ">i8", (2,))], align=True)),
        np.float32("nan"),
        np.longdouble(1) / 3,
        np.complex64(1 - 2j),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2026-11-20"),
        np.zeros(1, dtype=[("a", "f4")])[0],
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}",
)
def test_numpy(x: Any) -> None:
    assert spelled(through([x])[0]) == spelled(x)


def test_numpy_text_keeps_what_printing_drops() -> None:
    for x in (np.str_("a\0"), np.bytes_(b"a\0"), np.str_(""), np.str_("\ud800")):
        got = through(x)
        assert type(got) is type(x) and len(got) == len(x) and got == x


def test_sizes_and_dtypes_cross() -> None:
    got = through((torch.Size([2, 0, 3]), torch.bfloat16, torch.Size([])))
    assert got == (torch.Size([2, 0, 3]), torch.bfloat16, torch.Size([]))
    assert [type(each) for each in got] == [torch.Size, torch.dtype, torch.Size]


def test_one_object_stays_one_object() -> None:
    weight, empty = torch.ones(300), ()
    x = {"a": weight, "b": [weight, weight], "t": (empty, empty)}
    got = through(x)
    assert got["a"] is got["b"][0] is got["b"][1] and got["t"] == ((), ())
    assert len(to_bytes([weight] * 50)) < len(to_bytes(weight)) + 500
    doubled: Any = [1]
    for _ in range(60):  # 2^60 elements if each reference were written out
        doubled = (doubled, doubled)
    got = through(doubled)
    for _ in range(60):
        assert got[0] is got[1]
        got = got[0]
    assert got == [1]


def test_a_view_costs_its_own_bytes_only() -> None:
    x = torch.zeros(1 << 20, dtype=torch.uint8)
    assert encode([x, x.view(1024, 1024).t()]).numel() < 2 * x.numel() + 256
    assert encode(x[:3]).numel() < 256


# -- what is refused --------------------------------------------------------------------------------


class Custom:
    pass


@dataclasses.dataclass
class Record:
    x: int


class Colour(enum.IntEnum):
    RED = 1


def cycle() -> Any:
    x: Any = {"a": [1, {}]}
    x["a"][1]["back"] = x["a"]
    return x


def nested(levels: int) -> Any:
    x: Any = 1
    for _ in range(levels):
        x = [x]
    return x


def needs_gradient() -> Any:
    return [torch.ones(1, requires_grad=True)]


BAD = [
    (
        {"model": [0, 1, 2, {"callback": test_sizes_and_dtypes_cross}]},
        'obj["model"][3]["callback"] is a function',
    ),
    ({"a": [0, 1, lambda: 0]}, 'obj["a"][2] is a lambda'),
    ((0, Custom()), "obj[1] is a tests.comm.test_codec.Custom"),
    ({(1, "k"): int}, "obj[(1, 'k')] is a type"),
    ({3: {Custom: 1}}, "list(obj[3])[0] is a type"),
    ([{(2, Custom())}], "list(obj[0])[0][1] is a tests.comm.test_codec.Custom"),
    ({torch.ones(1): 1}, "list(obj)[0] is a torch.Tensor, which cannot be a key or an element of a set"),
    (collections.OrderedDict(a=1), "obj is a collections.OrderedDict"),
    (pathlib.PurePosixPath("x"), f"obj is a {pathlib.PurePosixPath.__module__}.PurePosixPath"),
    (datetime.date(2026, 11, 22), "obj is a datetime.date"),
    (Record(1), "obj is a tests.comm.test_codec.Record"),
    (Colour.RED, "obj is a tests.comm.test_codec.Colour"),
    (torch.device("cpu"), "obj is a torch.device"),
    (torch.nn.Parameter(torch.ones(1)), "obj is a torch.nn.parameter.Parameter"),
    (
        needs_gradient(),
        "obj[0] is a torch.Tensor that requires gradients, and objects carry no gradients",
    ),
    (torch.eye(2).to_sparse(), "obj is a torch.Tensor, and sparse_coo"),
    (torch.empty(2, device="meta"), "obj is a torch.Tensor, and meta"),
    (np.array([None]), "obj is a numpy.ndarray of dtype object"),
    (np.zeros(1, dtype=[("a", "O")]), "obj is a numpy.ndarray of dtype [('a', 'O')]"),
    (np.ma.masked_array([1]), "obj is a numpy.ma.MaskedArray"),
    (cycle(), 'obj["a"][1]["back"] is a list, obj["a"] again: a cycle'),
    (nested(MAX_DEPTH + 2), "obj" + "[0]" * (MAX_DEPTH + 1) + " is a list deeper than 100 levels"),
]


@pytest.mark.parametrize(("x", "what"), BAD, ids=[what[:50] for _, what in BAD])
def test_what_cannot_cross_is_named_with_the_path_to_it(x: Any, what: str) -> None:
    with pytest.raises(ObjectError) as caught:
        encode(x)
    assert caught.value.what == what
    assert "plain data and tensors" in (caught.value.expected or "")


def test_the_deepest_that_is_allowed_crosses() -> None:
    assert spelled(through(nested(MAX_DEPTH + 1))) == spelled(nested(MAX_DEPTH + 1))
    deep_key: Any = 1
    for _ in range(MAX_DEPTH + 5):
        deep_key = (deep_key,)
    with pytest.raises(ObjectError, match="deeper than 100 levels"):
        encode({deep_key: 1})


# -- bytes that no encoder wrote --------------------------------------------------------------------

SAMPLE: Any = {
    "w": torch.arange(6.0).view(2, 3),
    "n": np.arange(3, dtype="<i2"),
    "s": [1, -(2**70), "text", b"b", bytearray(b"c"), None, True, 1.5, 2j, (1, frozenset({2})), {3}],
    "r": np.zeros(2, dtype=[("a", "f4"), ("b", "i8", (2,))]),
    "d": (torch.Size([2]), torch.int8, np.float32(1), np.str_("u")),
}
SAMPLE["again"] = SAMPLE["s"]


def test_every_truncation_and_every_flipped_bit_of_the_structure_is_an_error() -> None:
    data = to_bytes(SAMPLE)
    for length in range(len(data)):
        with pytest.raises(ObjectError, match="the received bytes are not a complete object"):
            from_bytes(data[:length])
    with pytest.raises(ObjectError, match="1 bytes are left over at the end"):
        from_bytes(data + b"\0")
    for place in range(len(data) - len(BLOBS)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(ObjectError, match=r"the received (bytes are not|object is)"):
                from_bytes(bytes(flipped))


def sealed(structure: bytes, blobs: bytes = b"", kind: bytes = b"MCO2") -> bytes:
    """A message with a valid header around any structure."""
    return struct.pack("<4sIQ", kind, zlib.crc32(structure), len(structure)) + structure + blobs


def harmless(data: bytes) -> None:
    with contextlib.suppress(ObjectError):  # and no other error
        from_bytes(data)


WHOLE = to_bytes(SAMPLE)
LENGTH = struct.unpack_from("<Q", WHOLE, 8)[0]
STRUCTURE, BLOBS = WHOLE[HEADER_BYTES : HEADER_BYTES + LENGTH], WHOLE[HEADER_BYTES + LENGTH :]


def test_the_sample_is_sealed_as_the_writer_seals_it() -> None:
    assert spelled(from_bytes(sealed(STRUCTURE, BLOBS))) == spelled(SAMPLE)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_changed_structure_under_a_right_checksum_does_no_harm(data: st.DataObject) -> None:
    text = bytearray(STRUCTURE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        change = data.draw(st.sampled_from(("set", "delete", "insert", "tag")))
        if change == "set":
            text[place] = data.draw(st.integers(0, 255))
        elif change == "delete":
            del text[place]
        elif change == "insert":
            text[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            text[place] = data.draw(st.sampled_from(b'ltdSzBxarifcsbuynDZ0123456789[],"'))
    harmless(sealed(bytes(text), BLOBS))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(list("ltdSzBxarifcsbuynDZ")),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=2), inside, max_size=2),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=64), json_values)
def test_any_bytes_and_any_json_do_no_harm(junk: bytes, blobs: bytes, tree: Any) -> None:
    harmless(junk)
    harmless(sealed(junk, blobs))
    harmless(sealed(json.dumps(tree).encode(), blobs))


def levels(tag: str, count: int, inside: str) -> str:
    return f'["{tag}",' * count + inside + "]" * count


HUGE = str(2**62)
MADE_UP = {
    "2^62 bytes": f'["b",{HUGE}]',
    "fewer than no bytes": '["b",-1]',
    "a tensor of 2^62 floats": f'["x","float32",{HUGE}]',
    "a tensor of 2^124 floats": f'["x","float32",{HUGE},{HUGE}]',
    "an empty tensor that overflows": f'["x","float32",{HUGE},{HUGE},0]',
    "a tensor of sizes below 0": '["x","uint8",-1,-1,0]',
    "an array of 2^62 bytes": f'["a","|u1",{HUGE}]',
    "an array of no bytes and many elements": f'["a","<U0",{HUGE},{HUGE}]',
    "an array of objects": '["a","|O"]',
    "an array of arrays": '["a",["t","<i4",["t",2]]]',
    "a dtype that is a number": '["a",5]',
    "a dtype of many letters": '["a","' + "i4," * 1000 + '"]',
    "a torch name that is no dtype": '["D","load"]',
    "a million axes": '["x","uint8"' + ",1" * 1_000_000 + "]",
    "a shape whose product takes forever": '["x","uint8"' + f",{HUGE}" * 200_000 + "]",
    "a whole number of 10^6 digits": "9" * 1_000_000,
    "a reference to nothing": '["r",5]',
    "a list that refers to itself": '["l",["r",0]]',
    "a list as a key": '["d",["l"],null]',
    "a key without a value": '["d",1]',
    "a key twice": '["d",null,1,null,2]',
    "an element twice": '["S",null,null]',
    "a reference as a key": '["l",["t"],["d",["r",0],null]]',
    "100,000 levels": levels("l", 100_000, "null"),
    "200 levels": levels("l", 200, "null"),
    "200 levels of key": '["S",' + levels("t", 200, "null") + "]",
    "an object of JSON": '{"a":1}',
    "no tag": "[]",
    "a tag that is a list": '[["l"]]',
    "an unknown tag": '["?",1]',
    "half a text": '["s","fff"]',
    "something behind the value": "1 1",
    "nothing": "",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("structure", MADE_UP.values(), ids=MADE_UP.keys())
def test_made_up_structures_end_at_once(structure: str) -> None:
    with pytest.raises(ObjectError, match="the received bytes are not a complete object"):
        from_bytes(sealed(structure.encode()))


def test_another_format_says_so() -> None:
    with pytest.raises(ObjectError, match="they do not begin like an object of this meshcomm version"):
        from_bytes(sealed(b"null", kind=b"MCO3"))


# -- pickle -----------------------------------------------------------------------------------------


class Attack:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def test_a_pickle_is_not_read_unless_asked_for(tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    data = to_bytes(Attack(str(mark)), pickle=True)
    with pytest.raises(ObjectError, match="the received object is a pickle, and none of it was executed"):
        from_bytes(data)
    with pytest.raises(ObjectError, match="the received bytes are not a complete object"):
        from_bytes(sealed(data[HEADER_BYTES:]))  # declared as plain data
    assert not mark.exists()
    from_bytes(data, pickle=True)
    assert mark.exists()  # the attack would have worked


def test_pickle_carries_the_rest() -> None:
    x = collections.OrderedDict(
        w=torch.nn.Parameter(torch.ones(2)), p=pathlib.PurePosixPath("a"), f=math.sqrt, n=2**5000
    )
    got = through(x, pickle=True)
    assert type(got) is collections.OrderedDict and got["f"] is math.sqrt and got["p"] == x["p"]
    assert type(got["w"]) is torch.nn.Parameter and got["w"].requires_grad and got["n"] == 2**5000
    with pytest.raises(ObjectError, match=r"obj cannot be pickled: .*lambda"):
        encode(lambda: 0, pickle=True)
    with pytest.raises(ObjectError, match="the received object cannot be unpickled"):
        from_bytes(sealed(STRUCTURE, kind=b"MCP2"), pickle=True)


def test_a_plain_message_is_read_where_a_pickle_may_be() -> None:
    assert from_bytes(to_bytes([1]), pickle=True) == [1]
