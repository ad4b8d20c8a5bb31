"""One file of tensors in the safetensors format: read by its package, written one tensor at a time.

    8 bytes    length of the header, little-endian
    header     JSON, padded with spaces to a multiple of 8:
               {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    data       the elements of each tensor, little-endian, in C order, without gaps

The package's own writer wants all tensors in memory at once. Tensors lie in the order of falling element
size, then name, so that each is aligned.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.train.saved import Kind

NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""How the format calls each dtype."""

_DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}
_METADATA: Final = "__metadata__"


def write_file(
    path: Path, kinds: Mapping[str, Kind], metadata: Mapping[str, str], load: Callable[[str], Tensor]
) -> int:
    """Write a file of the tensors `kinds`, and return its bytes. One tensor is in memory at a time.

    load: gives the whole tensor of a name; called once for each, in the file's order.
    The file appears under its name when it is whole and on the disk; one that was there is replaced.
    Raises: UnsupportedOp for a dtype that the format does not have, or on a big-endian machine; OSError.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    place = 0
    order = sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))
    for name in order:
        kind = kinds[name]
        if kind.dtype not in NAMES or name == _METADATA or sys.byteorder != "little":
            raise UnsupportedOp(
                f"a safetensors file cannot hold {name}",
                given=f"{kind}, {sys.byteorder}-endian",
                expected=f"another name than {_METADATA}, and one of {', '.join(map(str, NAMES))}, little-endian",
            )
        end = place + math.prod(kind.shape) * kind.dtype.itemsize
        entries[name] = {"dtype": NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in order:
                tensor = load(name)
                assert Kind(tensor.dtype, tuple(tensor.shape)) == kinds[name], name
                if tensor.numel():
                    file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return 8 + len(header) + place


@final
class SafetensorsFile:
    """A file that is open for reading: `kinds` of its tensors and `metadata`, and `load` for one of them.

    The package checks the header before any of it is used. As a context, it is closed when it is left.
    Raises TrainingError where the file is not there or not as the format has it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
            self.metadata: dict[str, str] = self._file.metadata() or {}
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
            self.kinds = {
                name: Kind(_DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }
        except (SafetensorError, OSError, KeyError) as error:
            raise TrainingError(
                f"{path} cannot be read as a safetensors file",
                given=f"dtype {error}" if isinstance(error, KeyError) else str(error),
                expected="a file as the format has it, of dtypes " + ", ".join(_DTYPES),
                hint="a file that `meshcomm export` wrote; or copy it again, if it was cut short",
            ) from error

    def load(self, name: str) -> Tensor:
        """The tensor `name`, in memory of its own."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
