"""One folder that holds tensors which lie spread over ranks: written by all, read on any mesh.

The format is that of torch.distributed.checkpoint, whose planner decides who writes what and which
bytes a rank reads. Its `save`, `load` and `async_save` are not used: they talk over one group of all
processes, the last of them from a thread of its own. Here the ranks tell each other their plans along
the mesh's own dims, before anything is written, so that a mesh on part of the ranks can save, and the
writing itself communicates with nobody.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.division import Division, Heard
from meshcomm.train.exchange import bytes_of_every_rank, is_first, together
from meshcomm.train.saved import read_alone, unpickle

__all__ = ["RETRY", "WRITABLE", "Share", "prepare", "read", "read_alone", "write", "write_alone"]

WRITABLE = "a folder that every rank can write to, with space for its part"
RETRY = "make space or mend the disk, then train.resume = true; the checkpoints before this one are whole"

# A file of tensors that one process writes alone is closed when it has so many bytes, as what was
# written into it stays in memory until then.
_FILE_BYTES = 1 << 28

T = TypeVar("T")


@final
class Share:
    """This rank's part of a state that is being saved: planned with the others, written alone.

    Made by `prepare`. `divide` and `write` on every rank, in any thread; then `finish` on the lowest
    one, with what `write` returned on all of them. None of these communicates.
    """

    def __init__(
        self, mesh: Mesh, state: Mapping[str, Tensor], folder: Path, division: Division, heard: Heard
    ) -> None:
        self.folder = folder
        self.token = heard.token
        """The same on every rank, and another in every save."""
        self._rank = mesh.rank
        self._coordinator = is_first(mesh)
        self._planner = _Planner(state)
        self._writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
        self._division, self._heard = division, heard
        self._items: list[WriteItem] = []
        self._metadata = Metadata({})

    def divide(self, *, copy: bool = False) -> None:
        """Make the folder, and find out what this rank writes: what several have, one of them writes.

        copy: put that aside in host memory, so that the state may change before it is written.
        Raises as Division.divide; OSError.
        """
        self._writer.set_up_storage_writer(self._coordinator, rank=self._rank, use_collectives=True)
        self._writer.prepare_local_plan(SavePlan([]))
        self._items, self._metadata = self._division.divide(self._heard)
        if copy:
            self._planner.copy(self._items)

    def write(self) -> bytes:
        """Write this rank's files and sync them to the disk; what `finish` has to know of them.

        Raises OSError, or what DCP raises.
        """
        # Files carry the numbers of their ranks, not of places in the grid.
        plan = _plan(self._writer, self._items, f"__{self._rank}_")
        with _disk_errors():
            written = self._writer.write_data(plan, self._planner).wait()
        self._planner.forget()
        return pickle.dumps(written)

    def finish(self, written: Sequence[bytes]) -> int:
        """Return the bytes of all files; the lowest rank looks for each of them and writes the metadata.

        Raises TrainingError where a file is missing or short, OSError.
        """
        results = [unpickle(part) for part in written]
        sizes: dict[str, int] = {}
        for result in (result for part in results for result in part):
            place = result.storage_data
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        if self._coordinator:
            for name, size in sizes.items():
                _check(self.folder / name, size)
            self._writer.finish(self._metadata, results)
        return sum(sizes.values())


def prepare(mesh: Mesh, state: Mapping[str, Tensor], folder: Path, division: Division | None = None) -> Share:
    """Tell the other ranks what this one has.

    division: the one of the save before, so that what has not changed is not planned again.
    Called by: every rank of the mesh. Two gathers per dim.
    """
    division = division or Division(mesh)
    return Share(mesh, state, Path(folder), division, division.exchange(state))


def write(mesh: Mesh, state: Mapping[str, Tensor], folder: Path, division: Division | None = None) -> int:
    """Write `state` into `folder`, which is new; return the bytes of all files of tensors.

    state: name -> DTensor, or a plain tensor that is the same on every rank that has the name.
        What several ranks hold is written once, shared out evenly.
    division: as in `prepare`.
    Called by: every rank of the mesh. Returns when the metadata is written, which is last;
        everything is synced to the disk.
    Raises: TrainingError on every rank where one of them could not write.
    """
    share = prepare(mesh, state, folder, division)

    def save() -> bytes:
        share.divide()
        return share.write()

    written = bytes_of_every_rank(mesh, all_do(mesh, share.folder, save))
    return all_do(mesh, share.folder, lambda: share.finish(written))


def write_alone(kinds: Mapping[str, Tensor], folder: Path, load: Callable[[str], Tensor]) -> None:
    """Write a folder as `write` does, by one process that needs no mesh and little memory.

    kinds: name -> a tensor of the right shape and dtype, on the meta device.
    load:  gives the whole tensor of a name, on the host, when its turn has come.
    """
    planner = _Planner(kinds, load)
    writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    (plan,), metadata = planner.create_global_plan([local])
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


def _check(file: Path, size: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found is None or found < size:
        raise TrainingError(
            f"a part of the checkpoint is missing: {file.name}",
            given=f"{file} " + ("is not there" if found is None else f"has {found} bytes"),
            expected=f"{size} bytes, as its rank wrote them",
            hint="train.out must be on a file system that all hosts share",
        )


def _files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items of each file."""
    files: list[list[WriteItem]] = [[]]
    size = 0
    for item in items:
        if size >= _FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.tensor_storage_size() or 0
    return files


def _plan(writer: _Writer, items: Sequence[WriteItem], prefix: str) -> SavePlan:
    """Items for files whose names begin with `prefix`."""
    (plan,) = writer.prepare_global_plan([SavePlan(list(items))])
    return replace(plan, storage_data=type(plan.storage_data)(prefix))


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
