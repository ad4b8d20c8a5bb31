"""One folder that holds tensors which lie spread over ranks: written by all, read on any mesh.

The format is that of torch.distributed.checkpoint, whose planner says which parts a tensor has and which bytes
a rank reads. Its `save`, `load` and `async_save` are not used: they talk over one group of all processes, the
last of them from a thread of its own, and gather every rank's plan on one. Here ranks that have the same part
agree along one dim of the mesh after the other on who writes it, by 8 bytes a part; the writing itself
communicates with nobody; and what each has written lies in a file beside it, until the lowest rank has made the
metadata of all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, final

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.exchange import is_first, together
from meshcomm.train.saved import read_alone, unpickle

__all__ = ["RETRY", "WRITABLE", "Division", "Share", "all_do", "read", "read_alone", "write", "write_alone"]

WRITABLE = "a folder that every rank can write to, with space for its part"
RETRY = "make space or mend the disk, then train.resume = true; the checkpoints before this one are whole"

# A file of tensors that one process writes alone is closed when it has so many bytes, as what was
# written into it stays in memory until then.
_FILE_BYTES = 1 << 28
_KEY_BYTES: Final = 8

T = TypeVar("T")


@final
class Division:
    """Which parts of a state this rank writes: what several ranks have, one of them writes.

    One for all saves of a run: parts of tensors that have the shape and place of the last save are known.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[str, tuple[tuple[Any, ...], list[WriteItem]]] = {}

    def divide(self, state: Mapping[str, Tensor]) -> list[WriteItem]:
        """This rank's part of the parts that all ranks of the mesh have.

        state: name -> DTensor, or a plain tensor that is the same on every rank that has the name.
        Called by: every rank. One gather of objects per dim of more than one rank, of 8 bytes for each part
            that a rank has: it grows with the ranks of a dim, not with those of the mesh.
        Raises: TrainingError on every rank where one cannot say what it has.
        """
        mine = together(self._mesh, "divide a checkpoint", lambda: self._parts(state))
        for dim, size in self._mesh.layout.dims.items():
            if size == 1:
                continue
            holders: dict[bytes, list[int]] = {}
            for coord, keys in enumerate(self._mesh.objects.all_gather(dim, b"".join(mine))):
                for at in range(0, len(keys), _KEY_BYTES):
                    holders.setdefault(keys[at : at + _KEY_BYTES], []).append(coord)
            # Along each dim another share of the parts for each, and the same one on all ranks beside it.
            mine = {
                key: item
                for key, item in mine.items()
                if holders[key][_number(key, dim) % len(holders[key])] == self._mesh.coord(dim)
            }
        return list(mine.values())

    def _parts(self, state: Mapping[str, Tensor]) -> dict[bytes, WriteItem]:
        known, self._known = self._known, {}
        found: dict[bytes, WriteItem] = {}
        for name, tensor in state.items():
            kind = _kind(tensor)
            if name not in known or known[name][0] != kind:
                known[name] = (kind, _Planner({name: tensor}).create_local_plan().items)
            self._known[name] = known[name]
            for item in known[name][1]:
                sizes = item.tensor_data.chunk.sizes if item.tensor_data else ()
                text = repr((name, item.index.offset, tuple(sizes)))
                found[hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()] = item
        return found


@final
class Share:
    """This rank's part of a state that is being saved. `write` on every rank, then `finish` on the lowest one.

    copy: put what is written aside in host memory, so that the state may change before it is written.
    None of these communicates, and both may be called in any thread.
    """

    def __init__(
        self,
        mesh: Mesh,
        state: Mapping[str, Tensor],
        items: list[WriteItem],
        folder: Path,
        *,
        copy: bool = False,
    ) -> None:
        self.folder = folder
        self._rank = mesh.rank
        self._ranks = sorted(int(rank) for rank in mesh.layout.ranks.flat)
        self._items = items
        self._planner = _Planner(state)
        if copy:
            self._planner.copy(items)

    def write(self) -> None:
        """Write this rank's files and sync them to the disk. Raises OSError, or what DCP raises."""
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = _Writer(self.folder, thread_count=1, sync_files=True, overwrite=False)
        # Files carry the numbers of their ranks, not of places in the grid.
        plan = _plan(writer, self._items, f"__{self._rank}_")
        with _disk_errors():
            written = writer.write_data(plan, self._planner).wait()
        self._planner.forget()
        _written(self.folder, self._rank).write_bytes(pickle.dumps((SavePlan(self._items), written)))

    def finish(self) -> None:
        """The lowest rank: look for each rank's files, and write the metadata of all.

        Raises TrainingError where a file is missing or short, ValueError where the ranks' states do not go
        together, OSError.
        """
        parts = [_written(self.folder, rank) for rank in self._ranks]
        for part in parts:
            _check(part, 1)
        plans, results = zip(*(unpickle(part.read_bytes()) for part in parts), strict=True)
        sizes: dict[str, int] = {}
        for place in (each.storage_data for result in results for each in result):
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        for name, size in sizes.items():
            _check(self.folder / name, size)
        _, metadata = _Planner({}).create_global_plan(list(plans))
        _Writer(self.folder, sync_files=True).finish(metadata, list(results))
        for part in parts:
            part.unlink()


def write(mesh: Mesh, state: Mapping[str, Tensor], folder: Path, division: Division | None = None) -> None:
    """Write `state`, as in `Division.divide`, into `folder`, which is new.

    division: the one of the save before, so that what has not changed is known.
    Called by: every rank of the mesh. Returns when the metadata is written, which is last;
        everything is synced to the disk.
    Raises: TrainingError on every rank where one of them could not write.
    """
    share = Share(mesh, state, (division or Division(mesh)).divide(state), Path(folder))
    all_do(mesh, share.folder, share.write)
    all_do(mesh, share.folder, lambda: share.finish() if is_first(mesh) else None)


def write_alone(kinds: Mapping[str, Tensor], folder: Path, load: Callable[[str], Tensor]) -> None:
    """Write a folder as `write` does, by one process that needs no mesh and little memory.

    kinds: name -> a tensor of the right shape and dtype, on the meta device.
    load:  gives the whole tensor of a name, on the host, when its turn has come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planner = _Planner(kinds, load)
    writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    with _disk_errors():
        results = [
            writer.write_data(_plan(writer, items, f"__0_{number}_"), planner).wait()
            for number, items in enumerate(_files(plan.items))
        ]
    writer.finish(metadata, results)


def read(mesh: Mesh, state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of `state` in place from a folder that `write` wrote on this or any mesh.

    Each rank reads what its own parts need; nothing is communicated but the outcome.
    Raises: TrainingError on every rank where one could not read, or a name, shape or dtype differs.
    """
    together(mesh, f"resume from {folder}", lambda: read_alone(state, folder))


def all_do(mesh: Mesh, folder: Path, action: Callable[[], T]) -> T:
    """One step of a save into `folder`, done by every rank; see `together`."""
    return together(mesh, f"save into {folder}", action, expected=WRITABLE, hint=RETRY)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """The disk's own error in place of torch's, which only says that fewer bytes were written."""
    try:
        yield
    except RuntimeError as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        raise found or error from error


def _number(key: bytes, dim: str) -> int:
    return int.from_bytes(hashlib.blake2b(key + dim.encode(), digest_size=4).digest(), "little")


def _written(folder: Path, rank: int) -> Path:
    """Where a rank says what it has written."""
    return folder / f"__{rank}.written"


def _check(file: Path, size: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found is None or found < size:
        raise TrainingError(
            f"a part of the checkpoint is missing: {file.name}",
            given=f"{file} " + ("is not there" if found is None else f"has {found} bytes"),
            expected=f"{size} bytes, as its rank wrote them",
            hint="train.out must be on a file system that all hosts share",
        )


def _files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """The items of each file."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        file.append(item)
        size += item.tensor_storage_size() or 0
        if size >= _FILE_BYTES:
            yield file
            file, size = [], 0
    if file:
        yield file


def _plan(writer: _Writer, items: Sequence[WriteItem], prefix: str) -> SavePlan:
    """Items for files whose names begin with `prefix`."""
    (plan,) = writer.prepare_global_plan([SavePlan(list(items))])
    return replace(plan, storage_data=type(plan.storage_data)(prefix))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor that its parts depend on."""
    if isinstance(tensor, DTensor):
        place = (tensor.placements, tensor.device_mesh, tensor.to_local().shape)
        return (tensor.dtype, tensor.shape, *place)
    return (tensor.dtype, tensor.shape)


@final
class _Planner(DefaultSavePlanner):
    """Gives values of `state` as they are, as they were when `copy` was called, or what `load` gives."""

    def __init__(self, state: Mapping[str, Tensor], load: Callable[[str], Tensor] | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(state), None, True)
        self._load = load
        self._copies: dict[MetadataIndex, Tensor] | None = None

    def copy(self, items: Sequence[WriteItem]) -> None:
        """Copy the values of `items` into host memory, and let the state go."""
        resolve: Callable[[WriteItem], Any] = super().resolve_data
        self._copies = {item.index: resolve(item).detach().to("cpu", copy=True) for item in items}
        self.state_dict = {}

    def forget(self) -> None:
        """Let all values go."""
        self._copies = None
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See SavePlanner.resolve_data."""
        if self._load is not None:
            return self._load(write_item.index.fqn)
        if self._copies is not None:
            return self._copies[write_item.index]
        return super().resolve_data(write_item)


@final
class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """None: the folder is renamed and may be moved, so its metadata does not name it."""
        return None
