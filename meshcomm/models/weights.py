"""Weights in a folder of safetensors: this rank's parts are read, and nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshcomm.errors import ShapeError, TrainingError
from meshcomm.layout.names import did_you_mean
from meshcomm.parallel.tensor import assign, whole_shape
from meshcomm.parallel.tensor.parameters import fused_sizes, kept

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@torch.no_grad()
def write(module: nn.Module, value: Callable[..., Any]) -> None:
    """Write this rank's parts of all parameters of a module that is split and sharded.

    value: (name, whole shape) -> the whole values, or what gives them by slices. Nothing is communicated.
    """
    fused = fused_sizes(module)
    for name, parameter in module.named_parameters():
        sizes, shape = fused.get(name), whole_shape(parameter)
        if sizes is None:
            assign(parameter, value(name, shape))
        else:
            rows = value(name, (shape[0] * shape[1], *shape[2:]))
            assign(parameter, kept(rows[:], sizes))


@final
class Folder:
    """A folder of safetensors as transformers writes it: one file, or several with an index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        index = path / INDEX
        if index.is_file():
            self._places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (path / SINGLE).is_file():
            self._places = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise TrainingError(
                f"there are no weights in {path}",
                given=f"{path} without {SINGLE} and {INDEX}",
                expected="a folder that save_pretrained wrote",
                hint="model.save_pretrained(folder, safe_serialization=True)",
            )

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, name: str, shape: tuple[int, ...], transposed: bool = False) -> Any:
        """What gives slices of a parameter of this shape, read from the disk when they are asked for.

        transposed: its two axes lie the other way round in the file. Raises ShapeError, TrainingError.
        """
        if name not in self._places:
            raise TrainingError(
                f"the weights in {self._path} have no {name}",
                given=f"{len(self._places)} tensors",
                expected="every parameter of the model",
                hint=did_you_mean(name, self._places)
                or "the folder of the model that the configuration names",
            )
        held = self._file(self._places[name]).get_slice(name)
        found = tuple(held.get_shape())
        if (found[::-1] if transposed else found) != shape:
            raise ShapeError(
                f"{name} has another shape in {self._path}",
                given=f"{found} in the file",
                expected=f"{shape[::-1] if transposed else shape}, as the model has it",
                hint="the configuration and the weights of one model",
            )
        return _Transposed(held) if transposed else held

    def names(self) -> list[str]:
        """Of all tensors in it."""
        return list(self._places)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._open.enter_context(safe_open(self._path / name, "pt"))
        return self._files[name]


class _Transposed:
    def __init__(self, held: Any) -> None:
        self._held = held

    def __getitem__(self, at: Any) -> Tensor:
        found: Tensor = self._held[tuple(reversed(at)) if isinstance(at, tuple) else slice(None)]
        return found.T
