"""What tensors does a checkpoint's folder hold? Read by one process, without running code from it.

DCP's metadata is a pickle: here it goes through a reader that knows the few classes that metadata of
tensors is made of and refuses everything else, so that a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from meshcomm.errors import TrainingError

METADATA: Final = ".metadata"

DTYPES: Final = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2"),
    }
)
"""Of the tensors that a checkpoint can hold, as torch names them."""

# The classes that plans and metadata of tensors are made of (torch 2.13). Nothing in them is a
# pickled object of its own: entries that are not tensors (BytesStorageMetadata) are left out, as
# reading one would unpickle it.
_KNOWN: Final = {
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
    "torch": {"Size", *DTYPES},
}


class Kind(NamedTuple):
    """What a whole tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@final
class Saved:
    """The tensors of one folder that `sharded.write` made, on whatever mesh.

    Raises TrainingError where the metadata is not there or is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._reader = _Reader(self.folder)
        self._metadata = self._reader.read_metadata()

    @property
    def kinds(self) -> dict[str, Kind]:
        """Every tensor by its global name. What is no tensor is left out."""
        return {
            name: Kind(saved.properties.dtype, tuple(saved.size))
            for name, saved in self._metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Write into the tensors of `state`, DTensors or whole ones, only reading what they need.

        Raises TrainingError where a name, shape or dtype differs or parts are missing; OSError or
        what DCP raises where a file cannot be read.
        """
        for name, tensor in state.items():
            self._check(name, tensor)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(state), self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def _check(self, name: str, tensor: Tensor) -> None:
        saved = self._metadata.state_dict_metadata.get(name)
        kind = Kind(tensor.dtype, tuple(tensor.shape))
        if saved is None:
            given = "nothing"
        elif not isinstance(saved, TensorStorageMetadata):
            given = f"a {type(saved).__name__}"
        elif (there := Kind(saved.properties.dtype, tuple(saved.size))) != kind:
            given = str(there)
        else:
            # Nothing else would notice a part that nobody saved: the tensor would keep what it had.
            parts = sum(chunk.sizes.numel() for chunk in saved.chunks)
            if parts == saved.size.numel():
                return
            given = f"parts of {parts} of {saved.size.numel()} elements"
        raise TrainingError(
            f"the checkpoint does not fit: {name}",
            given=f"{given} in {self.folder}",
            expected=str(kind),
            hint="resume with the configuration of the checkpoint; its lock.json has it",
        )


def read_alone(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of `state` from `folder`, as Saved.fill."""
    Saved(folder).fill(state)


def unpickle(text: bytes) -> Any:
    """A plan, metadata, or what became of them. Raises UnpicklingError where it holds anything else."""
    return _Plain(io.BytesIO(text)).load()


@final
class _Plain(pickle.Unpickler):
    """Reads plans and metadata, and refuses every other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for a name that plans and metadata do not need."""
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint of tensors")
        return super().find_class(module, name)


@final
class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, by a reader that runs no code. Raises TrainingError where it is none."""
        path = Path(self.path) / METADATA
        try:
            metadata = unpickle(path.read_bytes())
        except (pickle.UnpicklingError, OSError, EOFError, AttributeError, ValueError, IndexError) as error:
            raise TrainingError(
                "the checkpoint's metadata cannot be read",
                given=f"{path}: {error}",
                expected="the metadata of tensors, as torch.distributed.checkpoint writes it",
                hint="remove the checkpoint, so that the one before it is used",
            ) from error
        assert isinstance(metadata, Metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
