"""Write a safetensors file of pieces of a checkpoint with one tensor in memory at a time. The safetensors package needs all.

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
from meshcomm.train.checkpoint_reader import SAFETENSORS_NAMES, Kind, Saved

_METADATA: Final = "__metadata__"


class Piece(NamedTuple):
    """A tensor of a file. of: the parameter that it is taken from."""

    name: str
    kind: Kind
    of: str
    take: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.kind.shape) * self.kind.dtype.itemsize


def write_file(path: Path, pieces: Sequence[Piece], saved: Saved) -> None:
    """Write a safetensors file of pieces of a checkpoint. A parameter is loaded once for adjacent pieces taken from it.

    The file appears under its name when it is complete and on the disk. An existing file is replaced.
    Raises: UnsupportedOp for a dtype that the format does not have, or on a big-endian machine; OSError.
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
