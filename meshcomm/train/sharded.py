"""One folder that holds tensors which lie spread over ranks: written by all, read on any mesh.

The format is that of torch.distributed.checkpoint, whose planner decides who writes what and which
bytes a rank reads. Its `save`, `load` and `async_save` are not used: they talk over one group of all
processes, the last of them from a thread of its own. Here the ranks tell each other their plans along
the mesh's own dims, before anything is written, so that a mesh on part of the ranks can save, and the
writing itself communicates with nobody.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.exchange import bytes_of_every_rank, is_first, together
from meshcomm.train.saved import METADATA, read_alone, unpickle

__all__ = ["METADATA", "RETRY", "WRITABLE", "Share", "prepare", "read", "read_alone", "write", "write_alone"]

WRITABLE = "a folder that every rank can write to, with space for its part"
RETRY = "make space or mend the disk, then train.resume = true; the checkpoints before this one are whole"

# A file of tensors that one process writes alone is closed when it has so many bytes, as what was
# written into it stays in memory until then.
_FILE_BYTES = 1 << 28
_TOKEN = 8

T = TypeVar("T")


@final
class Share:
    """This rank's part of a state that is being saved: planned with the others, written alone.

    Made by `prepare`. `divide`, then `write` on every rank, in any thread; then `finish` on the lowest
    one, with what `write` returned on all of them. None of these communicates.
    """

    def __init__(self, mesh: Mesh, folder: Path, token: str, planner: _Planner, writer: _Writer) -> None:
        self.folder = folder
        self.token = token
        """The same on every rank, and another in every save."""
        self._ranks = [int(rank) for rank in mesh.layout.ranks]
        self._rank = mesh.rank
        self._planner = planner
        self._writer = writer
        self._mine: Any = None
        self._metadata: Any = None

    def divide(self, plans: Sequence[bytes]) -> None:
        """Find out what this rank writes, from the plans of all: what several hold, one of them writes."""
        shares, self._metadata = self._planner.create_global_plan([unpickle(plan) for plan in plans])
        shares = self._writer.prepare_global_plan(shares)
        # Files carry the numbers of their ranks, not of places in the grid.
        mine = shares[self._ranks.index(self._rank)]
        prefix = type(mine.storage_data)(f"__{self._rank}_")
        self._mine = self._planner.finish_plan(replace(mine, storage_data=prefix))

    def stage(self) -> int:
        """Copy what this rank writes into host memory, and return its bytes: the state may change then."""
        return self._planner.stage(self._mine.items)

    def write(self) -> bytes:
        """Write this rank's files and sync them to the disk; what `finish` has to know of them.

        Raises OSError, or what DCP raises.
        """
        written = self._writer.write_data(self._mine, self._planner).wait()
        self._planner.staged = None
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
        if self._rank == min(self._ranks):
            for name, size in sizes.items():
                _check(self.folder / name, size)
            self._writer.finish(self._metadata, results)
        return sum(sizes.values())


def prepare(mesh: Mesh, state: Mapping[str, Tensor], folder: Path) -> tuple[Share, list[bytes]]:
    """Make `folder` and exchange plans; the plans of all ranks are for `Share.divide`.

    Called by: every rank of the mesh. Two gathers per dim, and one of the outcome.
    Raises: TrainingError on every rank where one of them could not.
    """
    folder = Path(folder)
    writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
    planner = _Planner()
    coordinator = is_first(mesh)

    def plan() -> bytes:
        planner.set_up_planner(dict(state), None, coordinator)
        writer.set_up_storage_writer(coordinator, rank=mesh.rank, use_collectives=True)
        return pickle.dumps(writer.prepare_local_plan(planner.create_local_plan()))

    mine = all_do(mesh, folder, plan)
    said = bytes_of_every_rank(mesh, os.urandom(_TOKEN) + mine)
    share = Share(mesh, folder, said[0][:_TOKEN].hex(), planner, writer)
    return share, [text[_TOKEN:] for text in said]


def write(mesh: Mesh, state: Mapping[str, Tensor], folder: Path) -> int:
    """Write `state` into `folder`, which is new; return the bytes of all files of tensors.

    state: name -> DTensor, or a plain tensor that is the same on every rank that has the name.
        What several ranks hold is written once, shared out evenly.
    Called by: every rank of the mesh. Returns when the metadata is written, which is last;
        everything is synced to the disk.
    Raises: TrainingError on every rank where one of them could not write.
    """
    share, plans = prepare(mesh, state, folder)

    def save() -> bytes:
        share.divide(plans)
        return share.write()

    written = bytes_of_every_rank(mesh, all_do(mesh, folder, save))
    return all_do(mesh, folder, lambda: share.finish(written))


def write_alone(state: Mapping[str, Tensor], folder: Path, load: Callable[[str], Tensor]) -> None:
    """Write a folder as `write` does, by one process that needs no mesh and little memory.

    state: name -> a tensor of the right shape and dtype, on the meta device.
    load:  gives the whole tensor of a name, on the host, when its turn has come.
    """
    writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
    planner = _Planner(load)
    planner.set_up_planner(dict(state), None, True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (mine,) = writer.prepare_global_plan(plans)
    mine = planner.finish_plan(mine)
    results = []
    for number, items in enumerate(_files(mine.items)):
        prefix = type(mine.storage_data)(f"__0_{number}_")
        results.append(writer.write_data(replace(mine, items=items, storage_data=prefix), planner).wait())
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


@final
class _Planner(DefaultSavePlanner):
    """Takes values from where they lie, or as they were when `stage` was called, or from `load`."""

    def __init__(self, load: Callable[[str], Tensor] | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._load = load
        self.staged: dict[MetadataIndex, Tensor] | None = None

    def stage(self, items: Sequence[WriteItem]) -> int:
        resolve = super().resolve_data
        self.staged = {item.index: resolve(item).detach().to("cpu", copy=True) for item in items}
        return sum(part.nbytes for part in self.staged.values())

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See SavePlanner.resolve_data."""
        if self._load is not None:
            return self._load(write_item.index.fqn)
        if self.staged is not None:
            return self.staged[write_item.index]
        return super().resolve_data(write_item)


@final
class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """None: the folder is renamed and may be moved, so its metadata does not name it."""
        return None
