"""Write parts of a checkpoint to a safetensors file, with only one tensor in memory at a time.

The safetensors package would need all tensors in memory. The format of the file is:

8 bytes    length of the header, little-endian
header     JSON, padded with spaces to a multiple of 8:
           {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
data       the elements of each tensor, little-endian, in C order, without gaps
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshcomm.errors import UnsupportedOp
from meshcomm.train.checkpoint.parts import Kind
from meshcomm.train.checkpoint.reader import SAFETENSORS_NAMES, Saved

_METADATA: Final = "__metadata__"


class Piece(NamedTuple):
    """A tensor in a file. of: the parameter from which the tensor is taken."""

    name: str
    kind: Kind
    of: str
    take: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.kind.shape) * self.kind.dtype.itemsize


def write_file(path: Path, pieces: Sequence[Piece], saved: Saved) -> None:
    """Write pieces of a checkpoint to a safetensors file. Adjacent pieces of a parameter share one load of that parameter.

    The file appears under its name once it is complete and on disk. An existing file is replaced.
    Raises: UnsupportedOp for a dtype that the format does not support, or on a big-endian machine; OSError.
    """
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    place = 0
    for piece in pieces:
        kind = piece.kind
        if kind.dtype not in SAFETENSORS_NAMES or piece.name == _METADATA or sys.byteorder != "little":
            raise UnsupportedOp(
                f"a safetensors file cannot hold {piece.name}",
                given=f"{kind}, {sys.byteorder}-endian",
                expected=f"another name than {_METADATA}, one of {', '.join(SAFETENSORS_NAMES.values())}, "
                "little-endian",
            )
        offsets = [place, place + piece.nbytes]
        dtype, shape = SAFETENSORS_NAMES[kind.dtype], list(kind.shape)
        entries[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        place += piece.nbytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            of, whole = "", torch.empty(0)
            for piece in pieces:
                if piece.of != of:
                    del whole
                    of, whole = piece.of, saved.load(f"model.{piece.of}")
                tensor = piece.take(whole)
                if tensor.numel():
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
