"""Objects that are not plain data, by pickle: only where both sides asked for it."""

from __future__ import annotations

import io
import pickle
from typing import Any, final

import torch
from torch import Tensor

from meshcomm.errors import ObjectError


def write_pickle(x: object) -> tuple[bytes, list[tuple[Tensor, bool]]]:
    """The pickle of `x`, and the tensors on accelerators that it refers to, with their requires_grad.

    Such tensors stay out of the pickle, which would bring each back on the sender's device: with one
    process per device that is a CUDA context of every device in every process.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(x)
    except Exception as error:  # an object's own code ran, and may raise anything
        raise ObjectError(
            f"obj cannot be pickled: {type(error).__name__}: {error}",
            expected="an object that pickle.dumps takes",
            hint="look for a lambda, an open file or a process group inside it",
        ) from error
    return file.getvalue(), [(x.detach(), x.requires_grad) for x in pickler.tensors]


def read_pickle(data: bytes, tensors: list[tuple[Tensor, bool]]) -> Any:
    """The object. This runs what the bytes say: the caller has checked that it was asked for."""
    try:
        return _Unpickler(io.BytesIO(data), tensors).load()
    except Exception as error:
        raise ObjectError(
            f"what arrived cannot be unpickled: {type(error).__name__}: {error}",
            expected="a pickle whose modules this rank can import",
            hint="look whether all ranks run the same code",
        ) from error


def stays_out(x: object) -> bool:
    """Whether pickle would tie `x` to the sender's device."""
    return type(x) is Tensor and x.layout is torch.strided and x.device.type not in ("cpu", "meta")


@final
class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, x: object) -> int | None:
        if not stays_out(x):
            return None
        assert isinstance(x, Tensor)
        place = self._places.get(id(x))
        if place is None:
            place = self._places[id(x)] = len(self.tensors)
            self.tensors.append(x)  # kept alive, so that no other object gets its id
        return place


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[tuple[Tensor, bool]]) -> None:
        super().__init__(file)
        self._tensors = [x.requires_grad_(needed) for x, needed in tensors]

    def persistent_load(self, pid: Any) -> Tensor:
        found: Tensor = self._tensors[pid]
        return found
