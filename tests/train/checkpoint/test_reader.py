"""The contents of an untrusted checkpoint: no value is believed before it has been checked."""

from __future__ import annotations

import pickle
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from meshcomm.errors import TrainingError
from meshcomm.train.checkpoint.parts import Kind, Part, parts_of
from meshcomm.train.checkpoint.reader import Saved, unpickle
from meshcomm.train.checkpoint.writer import write_metadata, write_part
from meshcomm.transfer.placement import Box
from meshcomm.transfer.tensors import Region


def text(value: str) -> bytes:
    return b"\x8c" + struct.pack("<B", len(value)) + value.encode()


def built(target: bytes, state: bytes) -> bytes:
    """A pickle that sets the state of the object that `target` leaves on the stack."""
    return b"\x80\x04" + target + state + b"b."


def class_of(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


METADATA = "torch.distributed.checkpoint.metadata"
# torch has no public name for the enum of memory formats, so it is taken from pickled tensor properties.
ENCODING: Any = TensorProperties().__getstate__()[3].__class__
SLOTS = b"N}" + text("__hash__") + b"Ns\x86"
FIELDS = b"}" + text("_value_") + b"K\x07s"


@pytest.mark.parametrize(
    "data",
    [
        # Runs a command of the system.
        b"\x80\x04" + class_of("posix", "system") + text("touch run-by-pickle") + b"\x85R.",
        # Sets attributes of a class, by the second part of a state, where objects with __slots__ have them.
        built(class_of(METADATA, "MetadataIndex"), SLOTS),
        built(class_of(METADATA, "MetadataIndex"), FIELDS),
        # Sets fields of an enum member, which is one for the whole process.
        built(class_of(METADATA, "_MEM_FORMAT_ENCODING") + b"K\x01\x85R", FIELDS),
        # Sets fields that an object does not have.
        built(class_of(METADATA, "ChunkStorageMetadata") + b")\x81", b"}" + text("__class__") + b"Ns"),
        built(class_of(METADATA, "ChunkStorageMetadata") + b")\x81", SLOTS),
    ],
)
def test_metadata_run_no_code_and_set_no_attribute_but_fields_of_new_objects(data: bytes) -> None:
    hash_of, members = MetadataIndex.__hash__, [each.value for each in ENCODING]
    try:
        with pytest.raises(pickle.UnpicklingError, match="is not allowed in a checkpoint of tensors"):
            unpickle(data)
        assert MetadataIndex.__hash__ is hash_of and [each.value for each in ENCODING] == members
    finally:
        MetadataIndex.__hash__ = hash_of  # type: ignore[method-assign]


def test_what_metadata_are_made_of_is_read(tmp_path: Path) -> None:
    chunk = ChunkStorageMetadata(torch.Size((1,)), torch.Size((2,)))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert unpickle(pickle.dumps(chunk, protocol)) == chunk


def saved(folder: Path, *values: torch.Tensor) -> None:
    """A checkpoint of `w`, float32 (4,), with the values as its parts in order."""
    whole = torch.cat([each.float().reshape(-1) for each in values])
    write_part(folder, 0, [(part, whole) for part in parts_of({"w": torch.empty(4, device="meta")})])
    write_metadata(folder, [0])


@contextmanager
def metadata_of(folder: Path) -> Iterator[Any]:
    """The metadata of a checkpoint, which may be changed and are then written again."""
    path = folder / ".metadata"
    yield (found := pickle.loads(path.read_bytes()))
    path.write_bytes(pickle.dumps(found))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relative_path": "../__0_0.distcp"}, "is not a file of this folder"),
        ({"relative_path": "/etc/hostname"}, "is not a file of this folder"),
        ({"relative_path": ".."}, "is not a file of this folder"),
        ({"offset": -1}, "is not an offset and a length"),
        ({"length": 0.5}, "is not an offset and a length"),
    ],
)
def test_records_lie_in_files_of_the_folder(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    saved(folder := tmp_path / "a", torch.ones(4))
    (tmp_path / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    with metadata_of(folder) as found:
        ((index, where),) = found.storage_data.items()
        found.storage_data[index] = changed = replace(where, **change)
        changed.crc32 = where.crc32
    with pytest.raises(TrainingError, match="the checkpoint is damaged: w in") as caught:
        Saved(folder).fill({"w": torch.zeros(4)})
    assert words in (caught.value.given or "")


@pytest.mark.parametrize(
    "value",
    [torch.ones(4, dtype=torch.complex64), torch.ones(1), torch.ones(4, dtype=torch.float64), [1.0] * 4],
)
def test_a_record_is_what_the_metadata_say(tmp_path: Path, value: Any) -> None:
    saved(tmp_path, torch.ones(4))
    file = tmp_path / "__0_0.distcp"
    torch.save(value, file)
    with metadata_of(tmp_path) as found:
        ((index, where),) = found.storage_data.items()
        found.storage_data[index] = changed = replace(where, offset=0, length=file.stat().st_size)
        changed.crc32 = zlib.crc32(file.read_bytes())
    into = torch.full((4,), -5.0)
    with pytest.raises(TrainingError, match="the checkpoint is damaged: w in __0_0"):
        Saved(tmp_path).fill({"w": into})
    assert into.tolist() == [-5.0] * 4


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([((0,), (2,)), ((0,), (2,))], "parts that overlap"),
        ([((0,), (3,)), ((2,), (1,))], "parts that overlap"),
        ([((0,), (2,)), ((3,), (2,))], "outside shape"),
        ([((-1,), (4,))], "outside shape"),
        ([((0,), (-4,)), ((0,), (8,))], "outside shape"),
        ([((0, 0), (4, 1))], "outside shape"),
        ([((0,), (2,))], "parts of 2 of 4 elements"),
    ],
)
def test_parts_tile_a_tensor(tmp_path: Path, chunks: list[Any], words: str) -> None:
    saved(tmp_path, torch.ones(4))
    with metadata_of(tmp_path) as found:
        found.state_dict_metadata["w"].chunks = [
            ChunkStorageMetadata(torch.Size(at) if min(at) >= 0 else at, size) for at, size in chunks
        ]
    into = torch.full((4,), -5.0)
    with pytest.raises(TrainingError, match="does not fit: w") as caught:
        Saved(tmp_path).fill({"w": into})
    assert words in (caught.value.given or "") and into.tolist() == [-5.0] * 4


def test_a_part_that_has_no_record_is_named(tmp_path: Path) -> None:
    saved(tmp_path, torch.ones(4))
    with metadata_of(tmp_path) as found:
        found.storage_data.clear()
    with pytest.raises(TrainingError, match="the checkpoint is damaged: w"):
        Saved(tmp_path).fill({"w": torch.zeros(4)})


def test_complex_numbers_come_back(tmp_path: Path) -> None:
    value = torch.randn(3, dtype=torch.complex128)
    write_part(tmp_path, 0, [(part, value) for part in parts_of({"w": value})])
    write_metadata(tmp_path, [0])
    again, found = torch.zeros_like(value), Saved(tmp_path)
    assert found.kinds == {"w": Kind(torch.complex128, (3,))}
    found.fill({"w": again})
    assert torch.equal(again, value)


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (torch.zeros(4, dtype=torch.float8_e8m0fnu), None, "not allowed"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "torch.float32 of shape (4,) on one rank"),
    ],
)
def test_what_no_reader_accepts_is_not_written(
    tmp_path: Path, first: Tensor, other: Tensor | None, said: str
) -> None:
    """A dtype that no reader knows, and parts of one tensor with different dtypes."""
    values = [first] if other is None else [first, other]
    for rank, value in enumerate(values):
        part = Part("w", Kind(value.dtype, (4,)), Region(Box.at((2 * rank,), value.shape), value))
        write_part(tmp_path, rank, [(part, value)])
    with pytest.raises((ValueError, pickle.UnpicklingError), match=re.escape(said)):
        write_metadata(tmp_path, range(len(values)))
    assert not (tmp_path / ".metadata").exists()
