"""Reads this rank's parts of the weights in a folder of safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from meshcomm.errors import ShapeError, TrainingError
from meshcomm.layout.names import did_you_mean, listed
from meshcomm.parallel.tensor import assign
from meshcomm.transfer.fused import unfused
from meshcomm.transfer.tensors import own_regions

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Names: TypeAlias = str | tuple[tuple[str, ...], ...]
"""The location of a parameter in a folder: one name or, for a parameter with three axes such as a layer's experts, the
names of separate tensors. Each row then lists the tensors of one index of axis 0, one tensor per range of axis 1."""


class Source(NamedTuple):
    """The source of a parameter in a folder.

    transposed: whether the folder stores the parameter with its two axes swapped.
    convert:    computes the parameter from the full tensors in `names`, a single row. If None, each tensor in `names` is
                a part of the parameter.
    """

    names: Names
    transposed: bool = False
    convert: Callable[[list[Tensor]], Tensor] | None = None


class Conversions(Protocol):
    """Conversions between the tensors in a folder and a model's parameters."""

    def sources(self, names: Iterable[str]) -> Mapping[str, Source]:
        """Return the source of each parameter in a folder whose tensors have these names."""

    def stored(self, name: str, value: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors, by name, that store a parameter in a folder.

        value: the parameter, or a tensor of the same shape without memory.
        """


# Tables and masks that older versions of transformers saved. No model reads them.
_IGNORED: Final = (r"rotary_emb\.inv_freq$", r"\.(attn|attention)\.(masked_)?bias$")
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
# Files are memory-mapped. The parts that were read count as this process's memory until the file is closed.
_MAPPED_BYTES: Final = 32 << 20
_LARGEST: Final = 8  # bytes per element


@torch.no_grad()
def write(module: nn.Module, value: Callable[[str, tuple[int, ...]], Any]) -> None:
    """Fill this rank's parts of all parameters of a split and sharded module. Does not communicate.

    value: (name, full shape) -> the full values, or a `Stored`, of which only this rank's parts are read. The full shape
           is the shape before the module was split.
    """
    for name, parameter in unfused(dict(module.named_parameters()), module).items():
        full = value(name, tuple(parameter.shape))
        if not isinstance(full, Stored):
            assign(parameter, full)
            continue
        for region in own_regions(parameter):
            box, values = region.box, region.held
            if region.units is not None:
                values = torch.empty(box.shape, dtype=values.dtype, device=values.device)
            full.copy(box.begin, values)
            if region.units is not None:
                region.write(box.begin, box.end, values)


@final
class Folder:
    """A folder of safetensors in transformers' layout: one file, or several files with an index.

    base:    a prefix that all names in the folder may lack, as in a folder of the model without its head.
    ignored: patterns of names that the model does not use.

    The class and its methods raise TrainingError if the folder does not exist, or a file is missing, truncated or damaged.
    """

    def __init__(self, path: Path, *, base: str = "", ignored: Sequence[str] = ()) -> None:
        self._path, self._base, self._ignored = path, base, (*_IGNORED, *ignored)
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._mapped = 0
        index = path / INDEX
        # If both exist, transformers reads the single file.
        if (path / SINGLE).is_file():
            self._places = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        elif index.is_file():
            try:
                self._places = {
                    str(name): str(file)
                    for name, file in json.loads(index.read_bytes())["weight_map"].items()
                }
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise _damaged(index, error) from error
        else:
            raise TrainingError(
                f"there are no weights in {path}",
                given=f"{path} without {SINGLE} and {INDEX}"
                if path.is_dir()
                else f"{path}, which is not a folder on this host",
                expected="a folder that save_pretrained wrote, which the hosts of all ranks can read",
                hint="call model.save_pretrained(folder), or set model.random_weights = true",
            )

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def names(self) -> list[str]:
        """The names of all tensors in the folder."""
        return list(self._places)

    def check(self, sources: Mapping[str, Source], wanted: Sequence[str], more: Sequence[str] = ()) -> None:
        """Raise TrainingError if the folder lacks any of the full model's parameters (`wanted`) or contains other tensors.

        more: buffers that the folder may contain.
        The index is trusted: only the files that this rank reads are opened.
        """
        missing = [name for name in wanted if name not in sources]
        known_names: set[str] = set()
        held = [name for name in (*wanted, *more) if name in sources]
        for stored_name in (stored for name in held for stored in _flat(sources[name].names)):
            known_names.add(self._called(stored_name))
            if self._called(stored_name) not in self._places:
                missing.append(stored_name)
        extra = [
            name
            for name in self._places
            if name not in known_names and not any(re.search(pattern, name) for pattern in self._ignored)
        ]
        if missing or extra:
            raise TrainingError(
                f"the weights in {self._path} do not match the model",
                given="\n".join(
                    f"{len(some)} {what}: {listed(some)}"
                    for what, some in (("missing", missing), ("unexpected", extra))
                    if some
                ),
                expected=f"the {len(wanted)} tensors of the model that its config.json describes",
                hint=(did_you_mean(missing[0], extra) if missing and extra else None)
                or "use config.json and weights of the same model; or [model] build, for another model",
            )

    def read(self, source: Source, shape: tuple[int, ...]) -> Stored:
        """Return a reader for slices of a parameter with this shape.

        Raises: TrainingError if a tensor is missing or does not have a floating-point dtype; ShapeError.
        """
        names, transposed, convert = source
        if convert is not None:
            return _converted(
                [self.read(Source(stored_name), ()) for stored_name in _flat(names)], convert, names, shape
            )
        if isinstance(names, str):
            return _one(self, names, shape, transposed)
        pieces = [[self.read(Source(stored_name, transposed), ()) for stored_name in row] for row in names]
        return _stacked(pieces, names, shape, self._path)

    def read_twice(self, sources: Sequence[Source], shape: tuple[int, ...]) -> Stored:
        """Like `read`, for a tensor that may be stored under several names.

        Reading a slice raises TrainingError if the copies differ in this slice.
        """
        present = [source for source in sources if self._called(_flat(source.names)[0]) in self._places]
        first, *others = (self.read(source, shape) for source in present or sources[:1])
        return (
            _twice(first, others[0], [str(source.names) for source in present], self._path)
            if others
            else first
        )

    def piece(self, name: str) -> Any:
        """Return the safetensors package's object for a tensor, from which slices can be read."""
        called = self._called(name)
        if called not in self._places:
            raise TrainingError(
                f"the weights in {self._path} have no {name}",
                given=f"{len(self._places)} tensors",
                expected="every parameter of the model",
                hint=did_you_mean(name, self._places)
                or "use the folder of the model that the configuration names",
            )
        try:
            return self._file(self._places[called]).get_slice(called)
        except SafetensorError as error:
            raise _damaged(self._path / self._places[called], error) from error

    def mapped(self, size: int) -> None:
        """Count the bytes that were read, and release the mapped pages whenever they exceed a limit."""
        self._mapped += size
        if self._mapped > _MAPPED_BYTES:
            self._close()

    def refused(
        self, name: str, what: str, expected: str, kind: type[TrainingError] | type[ShapeError]
    ) -> Exception:
        """Return the error for a tensor that does not fit the model."""
        where = self._path / self._places[self._called(name)]
        return kind(
            f"{name} does not fit the model",
            given=f"{what} in {where}",
            expected=expected,
            hint="use config.json and weights of the same model",
        )

    def _called(self, name: str) -> str:
        short = name.removeprefix(f"{self._base}.") if self._base else name
        return short if name not in self._places and short in self._places else name

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self._path / name
            try:
                self._files[name] = self._open.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return self._files[name]

    def _close(self) -> None:
        self._files.clear()
        self._open.close()
        self._mapped = 0


@final
@dataclass(frozen=True)
class Stored:
    """A full tensor on disk.

    shape: the parameter's shape. copy: copies the slice that starts at a place to a tensor, block by block. The tensor has the
    slice's shape and any dtype.
    """

    shape: tuple[int, ...]
    copy: Callable[[Sequence[int], Tensor], None]

    def whole(self) -> Tensor:
        """Return the full tensor, for a parameter that is kept in a different order."""
        full = torch.empty(self.shape, dtype=torch.float64)
        self.copy((0,) * len(self.shape), full)
        return full


def _one(folder: Folder, name: str, shape: tuple[int, ...], transposed: bool) -> Stored:
    held = folder.piece(name)
    size = tuple(held.get_shape())
    if shape and (size[::-1] if transposed else size) != shape:
        expected = f"{shape[::-1] if transposed else shape}, as in the model"
        raise folder.refused(name, f"shape {size}", expected, ShapeError)
    if held.get_dtype() not in _FLOATS:
        expected = f"one of {', '.join(_FLOATS)}; meshcomm does not train quantized weights"
        raise folder.refused(name, f"dtype {held.get_dtype()}", expected, TrainingError)
    shape = size[::-1] if transposed else size

    def copy(begins: Sequence[int], into: Tensor) -> None:
        if not into.numel():
            return
        if not into.ndim:
            into.copy_(folder.piece(name)[...])
            return
        sizes = list(into.shape)
        # Blocks are ranges of the file's first axis, so that the pages of a block are adjacent.
        along = len(sizes) - 1 if transposed else 0
        row = math.prod(shape) // shape[along] * _LARGEST
        step = max(1, _MAPPED_BYTES // row)
        for begin in range(0, sizes[along], step):
            end = min(begin + step, sizes[along])
            part = [slice(first, first + n) for first, n in zip(begins, sizes, strict=True)]
            part[along] = slice(begins[along] + begin, begins[along] + end)
            held = folder.piece(name)
            values = held[tuple(reversed(part))].T if transposed else held[tuple(part)]
            into.narrow(along, begin, end - begin).copy_(values)
            del held, values
            folder.mapped((end - begin) * row)

    return Stored(shape, copy)


def _twice(first: Stored, second: Stored, names: Sequence[str], path: Path) -> Stored:
    """Return a tensor that a folder stores under two names."""

    def copy(begins: Sequence[int], into: Tensor) -> None:
        other = torch.empty_like(into)
        first.copy(begins, into)
        second.copy(begins, other)
        if not torch.equal(into, other):
            raise TrainingError(
                f"{' and '.join(names)} are one weight in config.json, but two in the weights",
                given=f"different values under the two names in {path}",
                expected="equal values, or only one of the two; transformers does not tie different weights",
                hint='set "tie_word_embeddings": false in config.json',
            )

    return Stored(first.shape, copy)


def _converted(
    pieces: list[Stored], convert: Callable[[list[Tensor]], Tensor], names: Names, shape: tuple[int, ...]
) -> Stored:
    """Return a tensor that is computed from others, which are read in full."""

    def copy(begins: Sequence[int], into: Tensor) -> None:
        whole = convert([piece.whole().to(into.dtype) for piece in pieces])
        if tuple(whole.shape) != shape:
            raise ShapeError(
                f"the tensor made from {_flat(names)[0]} does not fit the model",
                given=f"shape {tuple(whole.shape)}",
                expected=f"{shape}, as in the model",
                hint="use config.json and weights of the same model",
            )
        into.copy_(whole[tuple(slice(first, first + n) for first, n in zip(begins, into.shape, strict=True))])

    return Stored(shape, copy)


def _stacked(pieces: list[list[Stored]], names: Names, shape: tuple[int, ...], path: Path) -> Stored:
    """Return a tensor stacked from several tensors (rows, ...), each of which is a range of rows at one index of axis 0."""
    rows = {tuple(piece.shape for piece in row) for row in pieces}
    usual = next(iter(rows))
    whole = (len(pieces), sum(shape[0] for shape in usual), *usual[0][1:])
    if len(rows) > 1 or (shape and whole != shape):
        raise ShapeError(
            f"{_flat(names)[0]} and the tensors stacked with it do not fit the model",
            given=f"{len(pieces)} times {' and '.join(map(str, usual))} in {path}",
            expected=f"{shape} together",
            hint="use config.json and weights of the same model",
        )

    def copy(begins: Sequence[int], into: Tensor) -> None:
        for place, target in enumerate(into):
            first = 0
            for piece in pieces[begins[0] + place]:
                begin = max(begins[1], first)
                end = min(begins[1] + target.shape[0], first + piece.shape[0])
                if begin < end:
                    piece.copy((begin - first, *begins[2:]), target[begin - begins[1] : end - begins[1]])
                first += piece.shape[0]

    return Stored(whole, copy)


def _flat(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(name for row in names for name in row)


def _damaged(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"{path} cannot be read",
        given=str(error) or type(error).__name__,
        expected="a complete file, as save_pretrained wrote it",
        hint="copy or download it again",
    )
