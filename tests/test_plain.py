"""Objects as bytes: what goes in comes out, and no bytes do harm."""

from __future__ import annotations

import collections
import contextlib
import math
import pathlib
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcomm.comm import pickled
from meshcomm.comm.plain import HEADER_BYTES, MAX_DEPTH, decode, encode
from meshcomm.comm.plain_read import _dtypes
from meshcomm.errors import ObjectError

CPU = torch.device("cpu")


def to_bytes(x: object, pickle: bool = False) -> bytes:
    message = encode(x, pickle)
    data = message.tensor(CPU)
    assert data.numel() == message.nbytes
    return data.numpy().tobytes()


def from_bytes(data: bytes, pickle: bool = False) -> Any:
    return decode(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)], CPU, pickle)


def through(x: object, pickle: bool = False) -> Any:
    return from_bytes(to_bytes(x, pickle), pickle)


def spelled(x: Any) -> Any:
    """`x` spelled out with every type and bit, so that == compares all of it; sets without order."""
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
    | st.text(st.characters(codec=None))  # lone surrogates too
    | st.binary()
)


@st.composite
def plain(draw: st.DrawFn, depth: int = 4, key: bool = False) -> Any:
    """Plain data up to `depth` levels deep; with `key`, what can be a key."""
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


@pytest.mark.parametrize("dtype", sorted(_dtypes()))
def test_every_dtype_of_torch_in_every_layout(dtype: str) -> None:
    kind = _dtypes()[dtype]
    wide = kind.itemsize
    raw = (torch.arange(24 * wide) * 37 % 251).to(torch.uint8)
    if kind == torch.bool:
        raw %= 2
    whole = raw.view(kind).view(2, 3, 4)
    cells = raw.view(2, 3, 4, wide)  # the same bytes, moved about as bytes
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
    weight, empty = torch.ones(3), ()
    x = {"a": weight, "b": [weight, weight], "t": (empty, empty)}
    got = through(x)
    assert got["a"] is got["b"][0] is got["b"][1] and got["t"] == ((), ())
    assert len(to_bytes([weight] * 50)) < len(to_bytes(weight)) + 200
    doubled: Any = [1]
    for _ in range(60):  # 2^60 elements, if each were written out
        doubled = (doubled, doubled)
    got = through(doubled)
    for _ in range(60):
        assert got[0] is got[1]
        got = got[0]
    assert got == [1]


def test_memory_is_copied_once_on_the_way_out() -> None:
    x = torch.zeros(1 << 20, dtype=torch.uint8)
    message = encode([x, x.view(1024, 1024).t()])
    assert message.nbytes < 2 * x.numel() + 256
    x.fill_(7)  # nothing was copied until now
    assert all((part == 7).all() for part in decode(message.tensor(CPU), CPU))


# -- what is refused --------------------------------------------------------------------------------


class Custom:
    pass


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
    ([lambda: 0], "obj[0] is a function"),
    ((0, Custom()), "obj[1] is a tests.test_plain.Custom"),
    ({(1, "k"): int}, "obj[(1, 'k')] is a type"),
    ({3: {Custom: 1}}, "list(obj[3])[0] is a type"),
    ([{(2, Custom())}], "list(obj[0])[0][1] is a tests.test_plain.Custom"),
    ({torch.ones(1): 1}, "list(obj)[0] is a torch.Tensor, which cannot be a key or an element of a set"),
    (collections.OrderedDict(a=1), "obj is a collections.OrderedDict"),
    (pathlib.PurePosixPath("x"), "obj is a pathlib.PurePosixPath"),
    (torch.nn.Parameter(torch.ones(1)), "obj is a torch.nn.parameter.Parameter"),
    (needs_gradient(), "obj[0] is a tensor that needs gradients, and no gradient crosses with an object"),
    (torch.eye(2).to_sparse(), "obj is a sparse_coo tensor"),
    (torch.empty(2, device="meta"), "obj is a meta tensor"),
    (np.array([None]), "obj is NumPy data of dtype object"),
    (np.zeros(1, dtype=[("a", "O")]), "obj is NumPy data of dtype [('a', 'O')]"),
    (np.ma.masked_array([1]), "obj is a numpy.ma.MaskedArray"),
    (cycle(), 'obj["a"][1]["back"] is obj["a"] again: a cycle'),
    (nested(MAX_DEPTH + 2), "obj[0][0][0][0][0]...[0][0][0][0][0] lies deeper than 100 levels"),
]


@pytest.mark.parametrize(("x", "what"), BAD, ids=[what[:50] for _, what in BAD])
def test_what_cannot_cross_is_named_with_the_path_to_it(x: Any, what: str) -> None:
    with pytest.raises(ObjectError) as caught:
        encode(x)
    assert caught.value.what == what
    assert "plain data and tensors" in (caught.value.expected or "")
    text = str(caught.value)
    assert "pickle=True" in text or "tensor" in caught.value.what or "NumPy data" in caught.value.what


def test_the_deepest_that_is_allowed_crosses() -> None:
    assert spelled(through(nested(MAX_DEPTH + 1))) == spelled(nested(MAX_DEPTH + 1))
    deep_key: Any = 1
    for _ in range(MAX_DEPTH + 5):
        deep_key = (deep_key,)
    with pytest.raises(ObjectError, match="lies deeper than 100 levels"):
        encode({deep_key: 1})


# -- bytes that no writer wrote ---------------------------------------------------------------------

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
        with pytest.raises(ObjectError, match="what arrived is not a whole object"):
            from_bytes(data[:length])
    with pytest.raises(ObjectError, match="its header says"):
        from_bytes(data + b"\0")
    tree_bytes = struct.unpack_from("<Q", data, 12)[0]
    for place in range(HEADER_BYTES + tree_bytes):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(ObjectError, match="what arrived is"):
                from_bytes(bytes(flipped))


def sealed(tree: bytes, blobs: bytes = b"", kind: int = 0, version: int = 1) -> bytes:
    """A message with a right header around any tree."""
    head = struct.pack("<4sBBHIQQ", b"MCOB", version, kind, 0, zlib.crc32(tree), len(tree), len(blobs))
    body = head + tree
    return body + b"\0" * (-len(body) % 64) + blobs if blobs else body


def harmless(data: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(ObjectError):  # and nothing else
        from_bytes(data)
    assert time.process_time() - started < 5


WHOLE = to_bytes(SAMPLE)
TREE_BYTES = struct.unpack_from("<Q", WHOLE, 12)[0]
TREE = WHOLE[HEADER_BYTES : HEADER_BYTES + TREE_BYTES]
BLOBS = WHOLE[-(-(HEADER_BYTES + TREE_BYTES) // 64) * 64 :]


def test_the_sample_is_sealed_as_the_writer_seals_it() -> None:
    assert spelled(from_bytes(sealed(TREE, BLOBS))) == spelled(SAMPLE)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_changed_tree_under_a_right_checksum_does_no_harm(data: st.DataObject) -> None:
    tree = bytearray(TREE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(tree) - 1))
        change = data.draw(st.sampled_from(("set", "delete", "insert", "tag")))
        if change == "set":
            tree[place] = data.draw(st.integers(0, 255))
        elif change == "delete":
            del tree[place]
        elif change == "insert":
            tree[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            tree[place] = data.draw(st.sampled_from(b"NTFifcsbuynZDBltdSzxar"))
    harmless(sealed(bytes(tree), BLOBS))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=64))
def test_any_bytes_do_no_harm(tree: bytes, blobs: bytes) -> None:
    harmless(tree)
    harmless(sealed(tree, blobs))


def count(n: int) -> bytes:
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


HUGE = count(2**62)
MADE_UP = {
    "a list of 2^62 elements": b"l" + HUGE,
    "2^62 bytes": b"b" + HUGE,
    "an integer of 2^62 bytes": b"i" + HUGE,
    "a count without end": b"l" + b"\xff" * 40,
    "a tensor of 2^62 floats": b"xD\x07float32" + b"\x01" + HUGE,
    "a tensor of 2^124 floats": b"xD\x07float32" + b"\x02" + HUGE + HUGE,
    "an empty tensor that overflows": b"xD\x07float32" + b"\x03" + HUGE + HUGE + b"\0",
    "an array of 2^62 bytes": b"as\x03|u1" + b"\x01" + HUGE,
    "an array of no bytes and many elements": b"as\x03<U0" + b"\x02" + HUGE + HUGE,
    "an array of objects": b"as\x02|O" + b"\x00",
    "a dtype that is a number": b"ai\x01\x05" + b"\x00",
    "a dtype of many letters": b"as" + count(3000) + b"i4," * 1000 + b"\x00",
    "an unknown torch dtype": b"D\x05qint8",
    "a million axes": b"xD\x05uint8" + count(1_000_000) + b"\x01" * 1_000_000,
    "a shape whose product takes forever": b"xD\x05uint8" + count(200_000) + HUGE * 200_000,
    "a reference to nothing": b"r\x05",
    "a list that refers to itself": b"l\x01r\x00",
    "a list as a key": b"d\x01l\x00N",
    "a key twice": b"d\x02NTNF",
    "an element twice": b"S\x02NN",
    "a reference as a key": b"l\x02t\x00d\x01r\x00N",
    "100,000 levels": b"l\x01" * 100_000 + b"N",
    "100,000 levels of key": b"S\x01" + b"t\x01" * 100_000 + b"N",
    "text that is not UTF-8": b"s\x01\xff",
    "something behind the value": b"NN",
    "nothing": b"",
}


@pytest.mark.parametrize("tree", MADE_UP.values(), ids=MADE_UP.keys())
def test_made_up_trees_end_at_once(tree: bytes) -> None:
    started = time.process_time()
    with pytest.raises(ObjectError, match="what arrived is not a whole object"):
        from_bytes(sealed(tree))
    assert time.process_time() - started < 5


def test_another_format_or_kind_says_so() -> None:
    with pytest.raises(ObjectError, match="it is in format 2, this meshcomm reads format 1"):
        from_bytes(sealed(b"N", version=2))
    with pytest.raises(ObjectError, match="unknown kind 7"):
        from_bytes(sealed(b"N", kind=7))


# -- pickle -----------------------------------------------------------------------------------------


class Attack:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def test_a_pickle_is_not_read_unless_asked_for(tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    data = to_bytes(Attack(str(mark)), pickle=True)
    with pytest.raises(ObjectError, match="what arrived is a pickle, and nothing of it was run"):
        from_bytes(data)
    relabelled = sealed(data[HEADER_BYTES : HEADER_BYTES + struct.unpack_from("<Q", data, 12)[0]])
    from_bytes(relabelled)  # the pickle as plain data is but bytes
    assert not mark.exists()
    from_bytes(data, pickle=True)
    assert mark.exists()  # the attack would have worked


def test_pickle_carries_the_rest() -> None:
    x = collections.OrderedDict(
        w=torch.nn.Parameter(torch.ones(2)), p=pathlib.PurePosixPath("a"), f=math.sqrt
    )
    got = through(x, pickle=True)
    assert type(got) is collections.OrderedDict and got["f"] is math.sqrt and got["p"] == x["p"]
    assert type(got["w"]) is torch.nn.Parameter and got["w"].requires_grad
    with pytest.raises(ObjectError, match=r"obj cannot be pickled: .*lambda"):
        encode(lambda: 0, pickle=True)
    broken = sealed(TREE, BLOBS, kind=1)
    with pytest.raises(ObjectError, match="a pickled message without a pickle"):
        from_bytes(broken, pickle=True)


def test_tensors_of_an_accelerator_stay_out_of_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an accelerator: treat every plain tensor as if it lay on one.
    monkeypatch.setattr(pickled, "stays_out", lambda x: type(x) is torch.Tensor)
    w = torch.arange(3.0, requires_grad=True)
    data, tensors = pickled.write_pickle({"a": w, "b": w, "c": torch.ones(2)})
    assert [x.tolist() for x, _ in tensors] == [[0.0, 1.0, 2.0], [1.0, 1.0]] and b"FloatStorage" not in data
    got = through({"a": w, "b": w, "c": torch.ones(2)}, pickle=True)
    assert got["a"] is got["b"] and got["a"].requires_grad and not got["c"].requires_grad
    assert got["a"].tolist() == [0.0, 1.0, 2.0] and got["c"].tolist() == [1.0, 1.0]
