"""Reads this rank's parts of the weights in a folder of safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshcomm.errors import ShapeError, TrainingError
from meshcomm.layout.names import did_you_mean, listed
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.placement import Box
from meshcomm.transfer.tensors import Cut, Cutout, Region, own_regions

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
# What helps if a tensor does not fit the model.
_SAME: Final = "use config.json and weights of the same model"


@final
class Folder:
    """A folder of safetensors in transformers' layout: one file, or several files with an index.

    path:    the folder, or one file of safetensors.
    base:    a prefix that all names in the folder may lack, as in a folder of the model without its head.
    ignored: patterns of names that the model does not use.
    pieces:  the tensors by name, if the files have another format: objects like those of `piece`.

    The class and its methods raise TrainingError if the folder does not exist, or a file is missing, truncated or damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        base: str = "",
        ignored: Sequence[str] = (),
        pieces: Mapping[str, Any] | None = None,
    ) -> None:
        self._path, self._given = path, path
        self._base, self._ignored = base, (*_IGNORED, *ignored)
        self._pieces = pieces
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._mapped = 0
        index = path / INDEX
        if pieces is not None:
            self._places = dict.fromkeys(pieces, "")
            return
        if path.suffix == ".safetensors" and path.is_file():
            self._path = path.parent
            self._places = dict.fromkeys(self._file(path.name).keys(), path.name)
            return
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

    def check(
        self,
        sources: Mapping[str, Source],
        wanted: Collection[str],
        more: Sequence[str] = (),
        kinds: Mapping[str, Tensor | Kept] | None = None,
    ) -> None:
        """Raise TrainingError if the folder lacks any of the full model's parameters (`wanted`) or contains other tensors.

        more: buffers that the folder may contain.
        kinds: tensors whose shapes and kinds of dtype are compared too, except for conversions.
        The index is trusted: only the files of `kinds` are opened.
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
        unfit: list[str] = []
        for name, kind in (kinds or {}).items():
            if name in sources and name not in missing and sources[name].convert is None:
                try:
                    self._cuts(sources[name], kind)
                except (ShapeError, TrainingError) as error:
                    unfit.append(f"{name}, {error.given} instead of {error.expected}")
        if missing or extra or unfit:
            raise TrainingError(
                f"the weights in {self._given} do not match the model",
                given="\n".join(
                    f"{len(some)} {what}: {listed(some)}"
                    for what, some in (
                        ("missing", missing),
                        ("unexpected", extra),
                        ("that do not fit", unfit),
                    )
                    if some
                ),
                expected=f"the {len(wanted)} tensors of the model"
                + (" that its config.json describes" if kinds is None else ""),
                hint=(did_you_mean(missing[0], extra) if missing and extra else None)
                or (
                    "use config.json and weights of the same model; or [model] build, for another model"
                    if kinds is None
                    else "the configuration of the model whose weights these are"
                ),
            )

    @torch.no_grad()
    def read(self, source: Source, into: Tensor | Kept) -> None:
        """Write a parameter into this rank's parts of it. Only these parts are read, except for a conversion.

        Raises: TrainingError if a tensor is missing, or if that of a floating-point parameter has another kind of dtype; ShapeError.
        """
        self._pass(source, into, Region.write)

    @torch.no_grad()
    def read_twice(self, sources: Sequence[Source], into: Tensor | Kept) -> None:
        """Like `read`, for a tensor that may be stored under several names.

        Raises TrainingError if the copies differ in this rank's parts.
        """
        present = [source for source in sources if self._called(_flat(source.names)[0]) in self._places]

        def check(region: Region, begin: Sequence[int], end: Sequence[int], values: Tensor) -> None:
            own = region.read(begin, end)
            if not torch.equal(own, values.to(own)):
                raise TrainingError(
                    f"{' and '.join(str(source.names) for source in present)} are one weight in the model, but two in the files",
                    given=f"different values under the two names in {self._given}",
                    expected="equal values, or only one of the two; transformers does not tie different weights",
                    hint='set "tie_word_embeddings": false in config.json, or model.tied_embeddings = false for the built-in model',
                )

        first, *others = present or sources[:1]
        self.read(first, into)
        for other in others:
            self._pass(other, into, check)

    def _pass(
        self,
        source: Source,
        into: Tensor | Kept,
        take: Callable[[Region, Sequence[int], Sequence[int], Tensor], None],
    ) -> None:
        """Pass the values of each of this rank's parts to `take`, block by block: a region, the box of a block within it, its values."""
        if source.convert is not None:
            pieces = [
                torch.empty(self.piece(name).get_shape(), dtype=into.dtype) for name in _flat(source.names)
            ]
            for name, piece in zip(_flat(source.names), pieces, strict=True):
                self.read(Source(name), piece)
            whole = source.convert(pieces)
            if tuple(whole.shape) != into.shape:
                what = f"the tensor made from {_flat(source.names)[0]} does not fit the model"
                expected = f"{tuple(into.shape)}, as in the model"
                raise ShapeError(what, given=f"shape {tuple(whole.shape)}", expected=expected, hint=_SAME)
            for region in own_regions(into):
                take(region, *region.box[:2], whole[region.box.slices])
            return
        for name, cut in self._cuts(source, into).items():
            # Blocks are ranges of the file's first axis, so that the pages of a block are adjacent.
            row = math.prod(cut.shape[1:]) * _LARGEST
            step = max(1, _MAPPED_BYTES // max(1, row))
            for region in own_regions(Cutout(into, cut)):
                if not cut.shape:
                    take(region, (), (), self.piece(name)[...])
                    continue
                (first, *begin), (last, *end), _ = region.box
                for place in range(first, last, step):
                    block = Box((place, *begin), (min(place + step, last), *end))
                    take(region, block.begin, block.end, self.piece(name)[block.slices])
                    self._count(block.shape[0] * row)

    def _cuts(self, source: Source, into: Tensor | Kept) -> dict[str, Cut]:
        """Return the part of a parameter that each tensor in the folder is. Raises the errors of `read`."""
        names, shape, turn = source.names, tuple(into.shape), -1 if source.transposed else 1
        sizes = {name: tuple(self.piece(name).get_shape())[::turn] for name in _flat(names)}
        if isinstance(names, str):
            if sizes[names] != shape:
                given = f"shape {sizes[names][::turn]} in {self._place(names)}"
                expected = f"{shape[::turn]}, as in the model"
                raise ShapeError(
                    f"{names} does not fit the model", given=given, expected=expected, hint=_SAME
                )
            cuts = {names: Cut((0,) * len(shape), shape, tuple(range(len(shape)))[::turn])}
        else:
            cuts = {}
            rows = {tuple(sizes[name] for name in row) for row in names}
            usual = next(iter(rows))
            if len(rows) > 1 or (len(names), sum(size[0] for size in usual), *usual[0][1:]) != shape:
                what = f"{_flat(names)[0]} and the tensors stacked with it do not fit the model"
                given = f"{len(names)} times {' and '.join(map(str, usual))} in {self._given}"
                raise ShapeError(what, given=given, expected=f"{shape} together", hint=_SAME)
            for index, row in enumerate(names):
                first = 0
                for name, size in zip(row, usual, strict=True):
                    begin, first = (index, first, *(0,) * (len(shape) - 2)), first + size[0]
                    cuts[name] = Cut(
                        begin, (index + 1, first, *shape[2:]), tuple(range(1, len(shape)))[::turn]
                    )
        # A buffer, such as the count of a batch norm's samples, may have integers.
        for name in sizes if into.dtype.is_floating_point else ():
            if (dtype := self.piece(name).get_dtype()) not in _FLOATS:
                expected = f"one of {', '.join(_FLOATS)}; meshcomm does not train quantized weights"
                given = f"dtype {dtype} in {self._place(name)}"
                raise TrainingError(
                    f"{name} does not fit the model", given=given, expected=expected, hint=_SAME
                )
        return cuts

    def piece(self, name: str) -> Any:
        """Return the safetensors package's object for a tensor, from which slices can be read."""
        called = self._called(name)
        if self._pieces is not None and called in self._pieces:
            return self._pieces[called]
        if called not in self._places:
            raise TrainingError(
                f"the weights in {self._given} have no {name}",
                given=f"{len(self._places)} tensors",
                expected="every parameter of the model",
                hint=did_you_mean(name, self._places)
                or "use the folder of the model that the configuration names",
            )
        try:
            return self._file(self._places[called]).get_slice(called)
        except SafetensorError as error:
            raise _damaged(self._place(called), error) from error

    def _count(self, size: int) -> None:
        """Count the bytes that were read, and release the mapped pages whenever they exceed a limit."""
        self._mapped += size
        if self._mapped > _MAPPED_BYTES:
            self._close()

    def _place(self, name: str) -> Path:
        return self._path / self._places[self._called(name)]

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


def _flat(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(name for row in names for name in row)


def _damaged(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"{path} cannot be read",
        given=str(error) or type(error).__name__,
        expected="a complete file, as save_pretrained wrote it",
        hint="copy or download it again",
    )
