"""Write sharded tensors into one folder. Each rank writes its part, and any mesh can read the result.

The format is that of torch.distributed.checkpoint. The `save` and `async_save` functions in that package are
not used. Both functions communicate over a group of all processes (`async_save` from a thread) and gather the plans of all
ranks on one rank. Instead, ranks that hold the same part decide along one mesh dim at a time which of them writes that part,
with 16 bytes of communication per part. Writing itself needs no communication. Each rank lists its written parts in a file
next to its data. At the end, the lowest rank combines these lists into the metadata.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import pickle
import shutil
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, of_every_rank, on_all_ranks, ranks_of
from meshcomm.parallel.state import EXTRA
from meshcomm.train.checkpoint.folder import (
    CLAIM,
    LOCK,
    METADATA,
    claim,
    go_on_without,
    is_claimed,
    sync,
    write,
)
from meshcomm.train.checkpoint.lease import LeaseLost
from meshcomm.train.checkpoint.parts import Part, parts_of, untiled
from meshcomm.train.checkpoint.reader import unpickle
from meshcomm.train.data import STATE
from meshcomm.train.torch_private import storage_info
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.placement import Box
from meshcomm.transfer.tensors import Region

T = TypeVar("T")

_KEY_BYTES: Final = 8
# The state of a loader has the same name on ranks with the same samples. One of them saves its own, which may differ in length.
_OF_ONE_READER: Final = STATE.partition("{")[0]
_PAUSE_S: Final = 0.01


def divide(mesh: Mesh, state: Mapping[str, Tensor | Kept]) -> list[Part]:
    """Return the parts of the state that this rank writes. If several ranks hold a part, only one of them writes it.

    state: a DTensor for each name, or a plain tensor that is equal on every rank that has the name; `Kept` if a
        weight's layout in memory differs from its layout in the checkpoint. Plain data and the optimizer's scalars are
        compared between ranks, see `_is_compared`.
    Called by: every rank. Gathers objects once along each dim with more than one rank, using 16 bytes for each part
        that a rank holds. The cost grows with the size of a dim, not with the size of the mesh.
    Raises: TrainingError on every rank if one rank cannot list its parts, or if compared values differ between ranks.
    """
    mine = on_all_ranks(mesh, "divide a checkpoint", partial(_keyed, state))
    names = {key: part.name for key, (part, _) in mine.items()}
    contents = {key: content for key, (_, content) in mine.items()}
    different: list[str] = []
    for dim, size in mesh.layout.dims.items():
        if size == 1:
            continue
        holders: dict[bytes, list[int]] = {}
        text = b"".join(key + contents[key] for key in mine)
        for coord, keys in enumerate(mesh.objects.all_gather(dim, text)):
            for at in range(0, len(keys), 2 * _KEY_BYTES):
                key, content = keys[at : at + _KEY_BYTES], keys[at + _KEY_BYTES : at + 2 * _KEY_BYTES]
                holders.setdefault(key, []).append(coord)
                if contents.get(key, content) != content:
                    different.append(f"{names[key]} along {dim}")
        # Each rank along a dim gets a different share of the parts. Ranks with the same coord get the same share.
        mine = {
            key: each
            for key, each in mine.items()
            if holders[key][_number(key, dim) % len(holders[key])] == mesh.coord(dim)
        }
    on_all_ranks(mesh, "divide a checkpoint", partial(_check_equal, list(dict.fromkeys(different))))
    return [part for part, _ in mine.values()]


def _check_equal(different: list[str]) -> None:
    if different:
        raise TrainingError(
            f"ranks that hold the same state differ in {different[0].split(' ')[0]}",
            given=", ".join(different[:8]),
            expected="the same numbers on every rank, because only one rank saves them",
            hint="compute them from data that all ranks have, such as reduced values or unsharded tensors, not from a rank's "
            "own part or samples",
        )


def _keyed(state: Mapping[str, Tensor | Kept]) -> dict[bytes, tuple[Part, bytes]]:
    """Return each part with the value to compare between ranks: a digest of the part's bytes or of its kind, or zeros."""
    keyed: dict[bytes, tuple[Part, bytes]] = {}
    for part in parts_of(state):
        at, sizes, content = part.box.begin, part.box.shape, bytes(_KEY_BYTES)
        if not isinstance(state[part.name], (DTensor, Kept)):
            # A plain tensor is one part. Ranks that hold it in different sizes differ, so they need the same key.
            sizes = ()
            if _is_compared(part.name, state[part.name]):
                content = _digest(bytes(part.on_host().reshape(-1).view(torch.uint8).numpy()))
            elif not part.name.startswith(_OF_ONE_READER):
                content = _digest(repr(part.kind).encode())
        keyed[_digest(repr((part.name, at, sizes)).encode())] = part, content
    return keyed


def _is_compared(name: str, tensor: Tensor | Kept) -> bool:
    """Return whether a value must be equal on all ranks: plain data, extra state, or a scalar of the optimizer."""
    if isinstance(tensor, (DTensor, Kept)):
        return False
    number = name.startswith("optimizer.") and not tensor.ndim
    return number or name.startswith("plain.") or name.endswith(f".{EXTRA}")


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_KEY_BYTES).digest()


def _number(key: bytes, dim: str) -> int:
    return int.from_bytes(hashlib.blake2b(key + dim.encode(), digest_size=4).digest(), "little")


def write_part(folder: Path, rank: int, values: Iterable[tuple[Part, Tensor]]) -> None:
    """Write this rank's file and sync it to disk, and write a list of its content for `write_metadata`.

    values: the parts with their values in host memory. They are requested one at a time, so that only one is in memory.
    Does not communicate, and may be called from any thread. Raises an OSError that names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = _data(folder, rank)
    written = []
    try:
        with path.open("xb") as file:
            for part, value in values:
                if value.untyped_storage().nbytes() != value.nbytes:
                    value = value.clone()  # otherwise the full storage behind the view would be written
                record = io.BytesIO()
                torch.save(value, record)
                dtype, shape = part.kind
                place = (path.name, file.tell(), record.tell(), zlib.crc32(record.getbuffer()))
                written.append(
                    (
                        part.name,
                        str(dtype).removeprefix("torch."),
                        shape,
                        (part.box.begin, part.box.shape),
                        place,
                    )
                )
                file.write(record.getbuffer())
        sync(path)
        path = _written(folder, rank)
        path.write_text(json.dumps(written), encoding="utf-8")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_metadata(folder: Path, ranks: Iterable[int]) -> None:
    """Check the files of each rank, and write the metadata for all ranks. Called on the lowest rank after all ranks have
    written.

    Raises TrainingError if a file is missing or too short, ValueError if the ranks' states are inconsistent, and
    OSError.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    ends: dict[str, int] = {}
    lists = [_written(folder, rank) for rank in ranks]
    for path in lists:
        _check(path, 1)
        for name, dtype, shape, (at, sizes), (file, offset, length, crc32) in json.loads(path.read_bytes()):
            whole = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(shape), [])
            chunk = ChunkStorageMetadata(torch.Size(at), torch.Size(sizes))
            first = tensors.setdefault(name, whole)
            if (first.properties.dtype, first.size) != (whole.properties.dtype, whole.size):
                raise ValueError(
                    f"{name} is {first.properties.dtype} of shape {tuple(first.size)} on one rank, and "
                    f"{whole.properties.dtype} of shape {tuple(whole.size)} on another"
                )
            first.chunks.append(chunk)
            places[MetadataIndex(name, at)] = storage_info(file, offset, length, crc32)
            ends[file] = max(ends.get(file, 0), offset + length)
    for file, end in ends.items():
        _check(folder / file, end)
    for name, tensor in tensors.items():
        if why := untiled(
            [Box.at(chunk.offsets, chunk.sizes) for chunk in tensor.chunks], tuple(tensor.size)
        ):
            raise ValueError(f"the ranks hold {why} of {name}")
    text = pickle.dumps(Metadata(tensors, storage_data=places))
    # What no reader accepts, such as a dtype that it does not know, must not replace earlier checkpoints.
    unpickle(text)
    write(folder / METADATA, text)
    for path in lists:
        path.unlink()


@final
class Save:
    """One folder that all ranks write: `write_part` on each, then `write_metadata` and `complete` on the lowest.

    `now` writes the folder between two steps. `start` writes it in a thread on each rank, and the lowest rank continues once
    every rank has finished `write_part`. Calls from another thread would disturb the sequence of calls on the training's
    process groups, so ranks communicate only in `poll`, which runs in the training thread.

    parts:     the parts that this rank writes, from `divide`.
    copy:      copy the data to host memory first, so that the state may change before it is written.
    Called by: every rank of the mesh, at the same point of the program. The same applies to all methods except `settle`.
    Raises:    TrainingError on every rank if any rank cannot write, or if another save has the folder. The error names the
               lowest such rank, its error, the file, and the free disk space. All files of this save, and no others, are then
               removed.
    """

    def __init__(
        self,
        mesh: Mesh,
        parts: list[Part],
        folder: Path,
        *,
        copy: bool = False,
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._mesh, self._folder, self._complete = mesh, folder, complete
        self._what = f"save into {folder}"
        # The first rank takes the folder for this save, and the others look for its token there.
        self._token = of_every_rank(mesh, uuid.uuid4().hex)[0]
        self._claimed = self._made = False
        self._together(self._claim)
        # With copies, this object keeps none of the state's memory: another engine may need the room.
        self._parts = (
            self._together(lambda: [p._replace(region=Region(p.box, p.on_host(True))) for p in parts])
            if copy
            else parts
        )
        self._left = [self._write, self._finish]

    def now(self) -> None:
        """Write everything. Returns when all files are on disk."""
        for piece in self._left:
            self._together(piece)

    def start(self) -> None:
        """Start writing in the background."""
        self._began = time.monotonic()
        self._next()

    def poll(self, in_time: bool = True) -> bool:
        """Return whether the save is complete. The result is the same on all ranks. Costs an all_reduce of two numbers per
        dim, and does not wait for the save.

        in_time: False on a rank that has given up waiting. All ranks then raise if any rank is not done.
        """
        flags = torch.tensor([self._ended.is_set(), in_time], dtype=torch.int32, device=self._mesh.device)
        for dim in self._mesh.layout.dims:
            self._mesh.all_reduce(dim, flags, op="min")
        ended, in_time = map(bool, flags.tolist())
        if not ended and in_time:
            return False
        self._together(self._outcome)
        if not self._left:
            return True
        self._next()
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the save to complete."""
        deadline = time.monotonic() + timeout_s
        while not self.poll(time.monotonic() < deadline):
            self._ended.wait(_PAUSE_S)

    def settle(self, timeout_s: float, grace_s: float) -> None:
        """Like `wait`, but waits on this rank only, because this rank is about to end with another error.

        grace_s: how long to wait for the other ranks once this one is done. Their progress is visible only in the folder.
        """
        deadline = time.monotonic() + timeout_s
        self._ended.wait(timeout_s)
        deadline = min(deadline, time.monotonic() + grace_s)
        while self._folder.is_dir() and time.monotonic() < deadline:
            self._tried(self._finish)
            time.sleep(_PAUSE_S)

    def _next(self) -> None:
        self._failure: Exception | None = None
        self._ended = threading.Event()
        # A daemon, so that the process can end even if a disk hangs.
        threading.Thread(
            target=self._tried, args=(self._left.pop(0),), name=f"meshcomm: {self._what}", daemon=True
        ).start()

    def _tried(self, piece: Callable[[], None]) -> None:
        try:
            piece()
        except Exception as error:
            self._failure = error
        self._ended.set()

    def _outcome(self) -> None:
        if not self._ended.is_set():
            raise TrainingError(
                f"{self._mesh.label} could not {self._what}",
                given=f"not done {time.monotonic() - self._began:.1f} s after it began",
                expected="a disk that answers within mesh.timeout_s",
            )
        if self._failure is not None:
            raise self._failure

    def _claim(self) -> None:
        if is_first(self._mesh):
            self._made = claim(self._folder, self._token)
            self._claimed = True

    def _write(self) -> None:
        if not is_claimed(self._folder, self._token):
            raise TrainingError(
                f"{self._mesh.label} could not {self._what}",
                given=f"{self._folder} is {'another folder' if self._folder.is_dir() else 'not there'}: this rank does not see "
                "the folder that the first rank has created",
                expected="one folder, on a file system that all hosts share",
                hint="give every rank the same folder, as an absolute path if their working directories differ",
            )
        write_part(self._folder, self._mesh.rank, self._values())

    def _values(self) -> Iterator[tuple[Part, Tensor]]:
        while self._parts:
            # A copy is freed once it is written.
            part = self._parts.pop(0)
            yield part, part.on_host()

    def _finish(self) -> None:
        if is_first(self._mesh):
            write_metadata(self._folder, ranks_of(self._mesh))
            (self._folder / CLAIM).unlink(missing_ok=True)
            self._complete()

    def _together(self, action: Callable[[], T]) -> T:
        def on_disk() -> T:
            try:
                return action()
            except OSError as error:
                raise self._disk_error(error) from error

        try:
            return on_all_ranks(self._mesh, self._what, on_disk)
        except LeaseLost:
            raise  # another job may write into a folder of this name
        except TrainingError:
            # Free the disk space, because an incomplete checkpoint is useless.
            if self._claimed:
                self._remove()
            raise

    def _remove(self) -> None:
        files = [file(self._folder, rank) for rank in ranks_of(self._mesh) for file in (_data, _written)]
        with contextlib.suppress(OSError):
            for path in (*files, *(self._folder / name for name in (METADATA, LOCK, CLAIM))):
                path.unlink(missing_ok=True)
            if self._made:
                self._folder.rmdir()

    def _disk_error(self, error: OSError) -> TrainingError:
        place = self._folder if self._folder.is_dir() else self._folder.parent
        free = f"; {shutil.disk_usage(place).free / 1e6:.1f} MB are free there" if place.is_dir() else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return TrainingError(
            f"{self._mesh.label} could not {self._what}",
            given=f"{error.strerror or error}: {error.filename or self._folder}{free}",
            expected="a folder that every rank can write to, with space for its part",
            hint=f"{'make space' if full else 'repair the disk'}, then {go_on_without(self._folder)}",
        )


def _data(folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its parts."""
    return folder / f"__{rank}_0.distcp"


def _written(folder: Path, rank: int) -> Path:
    """Return the file in which a rank lists the parts that it has written."""
    return folder / f"__{rank}.written"


def _check(file: Path, size: int) -> None:
    nbytes = file.stat().st_size if file.is_file() else None
    if nbytes is None or nbytes < size:
        raise TrainingError(
            f"a part of the checkpoint is missing: {file.name}",
            given=f"{file} " + ("is not there" if nbytes is None else f"has {nbytes} bytes"),
            expected=f"{size} bytes, as its rank wrote them",
            hint="train.out must be on a file system that all hosts share",
        )
