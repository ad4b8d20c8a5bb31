"""One folder that holds tensors which lie spread over ranks: written by all, read on any mesh.

The format is that of torch.distributed.checkpoint, whose planner decides who writes what and which
bytes a rank reads. Two things are done here instead of by its `save` and `load`. The ranks tell each
other their plans along the mesh's own dims, so no group over all processes is needed, and a mesh on
part of the ranks can save. And DCP's metadata, which is a pickle, is read by a reader that knows its
few classes and refuses everything else: a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final

from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.exchange import bytes_of_every_rank, is_first, together

METADATA = ".metadata"

WRITABLE = "a folder that every rank can write to, with space for its part"
RETRY = "make space or mend the disk, then train.resume = true; the checkpoints before this one are whole"

T = TypeVar("T")

# The classes that plans and metadata of tensors are made of (torch 2.13). Nothing in them is a
# pickled object of its own: entries that are not tensors (BytesStorageMetadata) are left out, as
# reading one would unpickle it.
_KNOWN = {
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
}


def write(mesh: Mesh, state: Mapping[str, Tensor], folder: Path) -> int:
    """Write `state` into `folder`, which is new; return the bytes of all files of tensors.

    state: name -> DTensor, or a plain tensor that is the same on every rank that has the name.
        What several ranks hold is written once, shared out evenly.
    Called by: every rank of the mesh. Returns when the metadata is written, which is last;
        everything is synced to the disk.
    Raises: TrainingError on every rank where one of them could not write.
    """
    folder = Path(folder)
    writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    coordinator = is_first(mesh)
    ranks = [int(rank) for rank in mesh.layout.ranks]

    def plan() -> Any:
        planner.set_up_planner(dict(state), None, coordinator)
        writer.set_up_storage_writer(coordinator, rank=mesh.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def all_do(action: Callable[[], T]) -> T:
        return together(mesh, f"save into {folder}", action, expected=WRITABLE, hint=RETRY)

    plans = _plain_of_every_rank(mesh, all_do(plan))

    def save() -> tuple[Any, Any]:
        # Every rank computes the plan of all from the same list, so nobody has to send it out.
        shares, metadata = planner.create_global_plan(plans)
        shares = writer.prepare_global_plan(shares)
        # Files carry the numbers of their ranks, not of places in the grid.
        mine = shares[ranks.index(mesh.rank)]
        prefix = type(mine.storage_data)(f"__{mesh.rank}_")
        mine = planner.finish_plan(replace(mine, storage_data=prefix))
        return metadata, writer.write_data(mine, planner).wait()

    metadata, written = all_do(save)
    results = _plain_of_every_rank(mesh, written)

    def finish() -> int:
        sizes: dict[str, int] = {}
        for result in (result for part in results for result in part):
            place = result.storage_data
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        if coordinator:
            for name, size in sizes.items():
                _check(folder / name, size)
            writer.finish(metadata, results)
        return sum(sizes.values())

    return all_do(finish)


def read(mesh: Mesh, state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of `state` in place from a folder that `write` wrote on this or any mesh.

    Each rank reads what its own parts need; nothing is communicated but the outcome.
    Raises: TrainingError on every rank where one could not read, or a name, shape or dtype differs.
    """
    together(mesh, f"resume from {folder}", lambda: read_alone(state, folder))


def read_alone(state: Mapping[str, Tensor], folder: Path) -> None:
    """As `read`, by this process alone. Raises TrainingError, OSError, or what DCP raises."""
    reader = _Reader(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    for name, tensor in state.items():
        saved = metadata.state_dict_metadata.get(name)
        given = "nothing" if saved is None else _kind(saved)
        if given != (expected := f"{tensor.dtype} of shape {tuple(tensor.shape)}"):
            raise TrainingError(
                f"the checkpoint does not fit: {name}",
                given=f"{given} in {folder}",
                expected=expected,
                hint="resume with the configuration of the checkpoint; its lock.json has it",
            )
    planner.set_up_planner(dict(state), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _kind(saved: Any) -> str:
    if not isinstance(saved, TensorStorageMetadata):
        return f"a {type(saved).__name__}"
    return f"{saved.properties.dtype} of shape {tuple(saved.size)}"


def _check(file: Path, size: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found is None or found < size:
        raise TrainingError(
            f"a part of the checkpoint is missing: {file.name}",
            given=f"{file} " + ("is not there" if found is None else f"has {found} bytes"),
            expected=f"{size} bytes, as its rank wrote them",
            hint="train.out must be on a file system that all hosts share",
        )


def _plain_of_every_rank(mesh: Mesh, mine: Any) -> list[Any]:
    return [_Plain(io.BytesIO(text)).load() for text in bytes_of_every_rank(mesh, pickle.dumps(mine))]


@final
class _Plain(pickle.Unpickler):
    """Reads plans and metadata, and refuses every other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for a name that plans and metadata do not need."""
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint of tensors")
        return super().find_class(module, name)


@final
class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """None: the folder is renamed and may be moved, so its metadata does not name it."""
        return None


@final
class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, by a reader that runs no code. Raises TrainingError where it is none."""
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Plain(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError) as error:
            raise TrainingError(
                "the checkpoint's metadata cannot be read",
                given=f"{path}: {error}",
                expected="the metadata of tensors, as torch.distributed.checkpoint writes it",
                hint="remove the checkpoint, so that the one before it is used",
            ) from error
        assert isinstance(metadata, Metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
