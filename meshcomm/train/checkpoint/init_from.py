"""Starting from weights alone: those of a checkpoint, of safetensors, or of a file or folder that torch has saved."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, on_all_ranks
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.weights import Folder, Source
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.state import EXTRA
from meshcomm.train.checkpoint.folder import LOCK, METADATA, find_checkpoint, read, size_of, step_of
from meshcomm.train.checkpoint.lock import Lock, check_same_function
from meshcomm.train.checkpoint.parts import Kind, kind_of
from meshcomm.train.checkpoint.reader import SAFETENSORS_NAMES, Saved
from meshcomm.transfer.placement import Box

# What programs put around a module or its state_dict before they save it, if other models may stand beside it.
_USUAL: Final = re.compile(r"(^|\b(model|module|state_dict|model_state_dict|_orig_mod)\.)$")


class _Piece(NamedTuple):
    """A tensor in a file, with the methods of the safetensors package's objects."""

    kind: Kind
    values: Callable[[Any], Tensor]

    def get_shape(self) -> list[int]:
        return list(self.kind.shape)

    def get_dtype(self) -> str:
        return SAFETENSORS_NAMES.get(self.kind.dtype, str(self.kind.dtype))

    def __getitem__(self, slices: Any) -> Tensor:  # type: ignore[override]
        return self.values(slices)


def start_from(mesh: Mesh, engine: Engine, path: Path) -> None:
    """Fill the engine's parameters, and the buffers that are saved with them, from files. Nothing else changes.

    path: a checkpoint of meshcomm, or a run, whose last checkpoint is read; a folder or file of safetensors; a file into which
        torch.save has written a state_dict; or a folder of torch.distributed.checkpoint. Floating-point values are cast.
    Called by: every rank. Each rank reads only what its parts need.
    Raises:    TrainingError on every rank, before anything is filled, if tensors are missing, unexpected or of another shape, if a
               file cannot be read, or if ranks have different files.
    """
    if mesh.is_fake:
        return
    what, mine = f"start from {path}", engine.all_weights()
    facts = [
        (name, str(kind.dtype), kind.shape)
        for name, kind in zip(mine, map(kind_of, mine.values()), strict=True)
    ]
    kinds: dict[str, Tensor] = {}
    also: dict[str, str] = {}
    for known, of_rank in of_every_rank(mesh, (facts, engine.further_names())):
        also |= of_rank
        for name, dtype, shape in known:
            dtype_of = getattr(torch, dtype.removeprefix("torch."))
            kinds[name] = torch.empty(shape, dtype=dtype_of, device="meta")

    def look() -> tuple[Folder, Mapping[str, list[Source]], bytes]:
        folder, digest = _folder(path, engine, {*kinds, *also})
        sources = _sources(folder, engine, kinds, also)
        firsts = {name: each[0] for name, each in sources.items() if name in kinds}
        more = [name for name in also if name in sources]
        folder.check({**{name: sources[name][0] for name in more}, **firsts}, kinds, more, kinds)
        return folder, sources, digest or _digest(folder)

    folder, sources, digest = on_all_ranks(mesh, what, look)
    digests = of_every_rank(mesh, digest)
    if len(set(digests)) > 1:
        raise TrainingError(
            "ranks would start from different weights",
            given=f"train.init_from = {str(path)!r}, with other values on {mesh.label} than on other ranks",
            expected="the same files on every rank",
            hint="copy them to every host again",
        )

    def fill() -> None:
        with folder:
            for name, into in mine.items():
                folder.read_twice(sources[name], into)

    on_all_ranks(mesh, what, fill)


def _sources(
    folder: Folder, engine: Engine, kinds: Collection[str], also: Mapping[str, str]
) -> dict[str, list[Source]]:
    """Return where each weight is, by each of its names: a shared weight may be in the files more than once."""
    there, model = {*folder.names}, engine.model
    own = {name: Source(name) for name in (*kinds, *also) if name in there}
    if isinstance(model, SpecModel) and model.spec.stored is not None and not own.keys() >= {*kinds}:
        own = {
            name: source for name, source in model.sources(folder).items() if name in kinds or name in also
        }
    names: dict[str, list[str]] = {name: [name] for name in kinds}
    for other, name in also.items():
        names.setdefault(name, []).append(other)
    sources = {name: [own[each] for each in names[name] if each in own] for name in kinds}
    return {name: each for name, each in sources.items() if each} | {
        name: [own[name]] for name in also if name in own
    }


def _folder(path: Path, engine: Engine, known: Collection[str]) -> tuple[Folder, bytes]:
    """Return the files at `path`, and the digest of a checkpoint's metadata; b"" for other files."""
    if not path.exists():
        raise TrainingError(
            f"there are no weights to start from at {path}",
            given=f"train.init_from = {str(path)!r}, which does not exist on this host",
            expected="a run or checkpoint of meshcomm, safetensors, a file of torch.save, or a folder of torch.distributed.checkpoint",
            hint="a path relative to the config file, which the hosts of all ranks can read",
        )
    # A checkpoint of a run that has lost its lock is damaged.
    of_torch = (path / METADATA).is_file() and not (path / LOCK).is_file() and step_of(path) < 0
    pieces: dict[str, _Piece] | None = None
    digest = b""
    if of_torch or (path.is_dir() and not [*path.glob("*.safetensors*")]):
        folder = path if of_torch else find_checkpoint(path)
        if not of_torch:
            check_same_function(Lock.read(folder), engine.sections.model, folder)
        saved, digest = Saved(folder, signed=not of_torch), read(folder / METADATA)
        pieces = {
            name: _Piece(kind, partial(_of_saved, saved, name, {}))
            for name, kind in saved.kinds.items()
            if of_torch or name.startswith("model.")
        }
        pieces = _within(path, pieces, known if of_torch else None)
    elif path.suffix != ".safetensors" and path.is_file():
        tensors: dict[str, Tensor] = {}
        _flatten(_loaded(path), "", tensors)
        pieces = _within(path, {n: _Piece(kind_of(x), x.__getitem__) for n, x in tensors.items()}, known)
    model = engine.model
    options = model.folder_options() if isinstance(model, SpecModel) else {}
    return Folder(path, pieces=pieces, **options), digest


def _within(path: Path, pieces: Mapping[str, _Piece], known: Collection[str] | None) -> dict[str, _Piece]:
    """Return the pieces of the model, by its names, without what was put around them. known: the model's names; None for a
    checkpoint of meshcomm. Extra state is left out.
    """
    around = "model."
    if known is not None:
        counts: dict[str, int] = {}
        for name in pieces:
            for begin in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
                counts[name[:begin]] = counts.get(name[:begin], 0) + (name[begin:] in known)
        most = max(counts.values(), default=0)
        best = [prefix for prefix, count in counts.items() if count == most]
        best = [prefix for prefix in best if _USUAL.search(prefix)] or best
        if most and len(best) > 1:
            raise TrainingError(
                f"there are several models in {path}",
                given=", ".join(repr(prefix) for prefix in best),
                expected="the weights of one model",
                hint="torch.save(model.state_dict(), path)",
            )
        around = best[0] if most else ""
    inner = {name.removeprefix(around): piece for name, piece in pieces.items() if name.startswith(around)}
    return {name: piece for name, piece in inner.items() if not name.endswith(EXTRA)}


def _of_saved(saved: Saved, name: str, held: dict[Box, Tensor], slices: Any) -> Tensor:
    """Return a box of a tensor. held: the saved parts that were read for the box before."""
    shape = saved.kinds[name].shape
    ranges = [each.indices(size) for each, size in zip(slices if shape else (), shape, strict=True)]
    box = Box(tuple(begin for begin, _, _ in ranges), tuple(end for _, end, _ in ranges))
    return saved.box(name, box, held)


def _loaded(path: Path) -> Any:
    """Return the content of a file of torch.save. Nothing but tensors and plain data is unpickled."""
    size_of(path)
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files in torch's format before 1.6 cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise TrainingError(
            f"{path} cannot be read",
            given=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            expected="a state_dict that torch.save has written: tensors by name, and no other objects",
            hint="torch.save(model.state_dict(), path)",
        ) from error


def _flatten(content: Any, name: str, tensors: dict[str, Tensor]) -> None:
    """Add the tensors in nested dictionaries to `tensors`, by their dotted names."""
    if isinstance(content, Tensor):
        tensors[name] = content.detach()
    elif isinstance(content, Mapping):
        for key, value in content.items():
            _flatten(value, f"{name}.{key}" if name else str(key), tensors)


def _digest(folder: Folder) -> bytes:
    """Return a digest of the first row of each tensor."""
    digest = hashlib.sha256()
    for name in sorted(folder.names):
        piece = folder.piece(name)
        shape = piece.get_shape()
        first = (
            piece[tuple(slice(0, min(size, 1 if number == 0 else 64)) for number, size in enumerate(shape))]
            if shape
            else piece[...]
        )
        digest.update(repr((name, piece.get_dtype(), list(shape))).encode())
        digest.update(first.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
