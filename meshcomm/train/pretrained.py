"""A folder that transformers opens, of a running trainer or a checkpoint: written tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.mesh.all_ranks import is_first, of_every_rank, on_all_ranks, ranks_of
from meshcomm.models import model_of
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.weights import INDEX, SINGLE
from meshcomm.parallel.build import on_meta
from meshcomm.parallel.tensor import whole
from meshcomm.parallel.tensor.parameters import fused_sizes, joined
from meshcomm.parallel.tensor.plan import sizes_of_parts
from meshcomm.train.checkpoint_reader import Kind, Saved
from meshcomm.train.export import Moved, could_not, find_checkpoint, write_file
from meshcomm.train.lock import PRETRAINED, Lock
from meshcomm.train.trainer import Trainer

CONFIG: Final = "config.json"
SHARD_BYTES: Final = 5_000_000_000
# What belongs to a model beside its weights, where the folder that it came from has it.
_BESIDE: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class _Piece(NamedTuple):
    """A tensor of the folder. of: the parameter that it is taken from."""

    name: str
    kind: Kind
    of: str
    take: Callable[[Tensor], Tensor]


def save_pretrained(
    trainer: Trainer, folder: Path | str, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the weights of a trainer of `[model] pretrained` as a folder that transformers' from_pretrained opens.

    Each pipeline stage writes its own files; a rank has one whole tensor in memory at a time. config.json and what
    there is of a tokenizer come from the folder that the model came from.

    folder:      new, on a file system that all hosts share.
    dtype:       of the tensors; None: that of the weights.
    shard_bytes: no file is larger, but for one of a single tensor.
    Called by:   every rank of the mesh, between two steps.
    Raises:      ConfigError where the model is of no such folder; TrainingError on every rank where one of them could
                 not write, or `folder` is there. Nothing is left of it then.
    """
    engine, mesh, target = trainer.engine, trainer.mesh, Path(folder)
    named, model, what = engine.sections.model, engine.model, f"write {Path(folder)}"
    if named is None or named.pretrained is None or not isinstance(model, SpecModel):
        raise _not_pretrained("the model of this trainer")
    source = Path(named.pretrained)
    parameters = dict(engine.own_parameters())

    def plan() -> tuple[_Target, list[list[_Piece]]]:
        fused: dict[str, tuple[int, ...]] = {}
        for module in engine.modules:
            fused |= fused_sizes(module)
        kinds = {name: Kind(each.dtype, tuple(each.shape)) for name, each in parameters.items()}
        out = _Target(target, source, json.loads((source / CONFIG).read_text()), _dtype(kinds, dtype))
        if is_first(mesh):
            out.begin()
        return out, _shards(model, kinds, fused, dtype, shard_bytes)

    out, shards = on_all_ranks(mesh, what, plan)
    pipeline = engine.sections.parallel.pipeline
    writes = all(coord == 0 for dim, coord in mesh.coords.items() if dim != pipeline)
    counts = of_every_rank(mesh, len(shards) if writes else 0)
    first = sum(counts[: ranks_of(mesh).index(mesh.rank)])
    names = [_file_name(first + place, sum(counts)) for place in range(len(shards))]
    failure = _write_own(
        out.draft if writes else None, names, shards, lambda name: whole(parameters[name]).cpu()
    )

    def end() -> None:
        if failure is not None:
            raise failure

    try:
        on_all_ranks(mesh, what, end)
        table = of_every_rank(mesh, [_places(names, shards), _bytes(shards)] if writes else [{}, 0])
        files = {name: file for places, _ in table for name, file in places.items()}
        size = sum(size for _, size in table)
        on_all_ranks(mesh, what, lambda: out.finish(files, size) if is_first(mesh) else None)
    except BaseException:
        if is_first(mesh):
            shutil.rmtree(out.draft, ignore_errors=True)
        raise
    return target


def export_pretrained(
    source: Path, target: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> Moved:
    """Write a checkpoint of a model of `[model] pretrained` as `save_pretrained` does, in one process.

    source: a complete checkpoint, or a run, whose last one it is then; saved on any mesh.
    Needs no process group, and of the folder that the model came from only the tokenizer, where it is still there.
    Raises: ConfigError where the model is of no such folder, TrainingError.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    known, came = lock.config.get(PRETRAINED), lock.config["model"].get("pretrained")
    if not known or not came:
        raise _not_pretrained(f"the model of {folder}")
    model = _model(known)
    with on_meta():
        fused = sizes_of_parts(model.spec.module(), model.spec.split)
    kinds = {
        name.removeprefix("model."): kind for name, kind in saved.kinds.items() if name.startswith("model.")
    }
    shards = _shards(model, kinds, fused, dtype, shard_bytes)
    names = [_file_name(place, len(shards)) for place in range(len(shards))]
    out = _Target(target, Path(came), known, _dtype(kinds, dtype))
    out.begin()
    try:
        with could_not(f"write {target}"):
            for file, shard in zip(names, shards, strict=True):
                _write(out.draft / file, shard, _values(shard, lambda name: saved.load(f"model.{name}")))
            out.finish(places := _places(names, shards), _bytes(shards))
    finally:
        shutil.rmtree(out.draft, ignore_errors=True)
    return Moved(folder, target, lock.step, len(places), _bytes(shards))


@final
class _Target:
    """A folder while it is written. source, known: the folder that the model came from, and its config.json."""

    def __init__(self, path: Path, source: Path, known: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._path, self._source, self._known, self._dtype = path, source, known, dtype
        self.draft = path.with_name(f".{path.name}.part")

    def begin(self) -> None:
        """Make the draft, an empty folder. Raises TrainingError where the folder is there."""
        if self._path.exists():
            raise TrainingError(
                f"{self._path} is there already",
                given=f"{self._path}, which is a {'folder' if self._path.is_dir() else 'file'}",
                expected="the name of a folder that is not there yet",
                hint="another name; or remove it first",
            )
        shutil.rmtree(self.draft, ignore_errors=True)
        self.draft.mkdir(parents=True)

    def finish(self, places: Mapping[str, str], size: int) -> None:
        """Write what belongs to the weights, and give the folder its name. places: the file of each tensor."""
        files = set(places.values())
        if lacking := sorted(file for file in files if not (self.draft / file).is_file()):
            raise TrainingError(
                f"files of {self._path} are missing",
                given=", ".join(lacking),
                expected="what every stage's first rank has written",
                hint="a folder on a file system that all hosts share",
            )
        texts: dict[str, Any] = {}
        if len(files) > 1:
            texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        texts[CONFIG] = {k: v for k, v in self._known.items() if k not in ("torch_dtype", "_name_or_path")}
        texts[CONFIG]["dtype"] = str(self._dtype).removeprefix("torch.")
        for name, content in texts.items():
            (self.draft / name).write_text(json.dumps(content, indent=2) + "\n")
        for name in _BESIDE:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self._source / name, self.draft / name)
        self.draft.rename(self._path)


def _model(known: Mapping[str, Any]) -> SpecModel:
    """The model that a config.json describes, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        # Trained or not, what is dropped in training is no part of the weights.
        plain = {
            name: 0.0 if name.endswith(("dropout", "_pdrop")) else value for name, value in known.items()
        }
        (Path(folder) / CONFIG).write_text(json.dumps(plain))
        made = model_of(
            ModelConfig(pretrained=folder, random_weights=True),
            DataConfig(sequence=8),
            TrainConfig(steps=1, global_batch=1, microbatch=1),
        )
    assert isinstance(made, SpecModel)
    return made


def pieces_of(model: SpecModel, name: str, kind: Kind, sizes: Sequence[int] | None) -> Iterator[_Piece]:
    """The tensors of the folder that a parameter becomes. sizes: of its parts, where it is kept by units."""
    names, transposed = model.stored(name)
    shape = (kind.shape[0] * kind.shape[1], *kind.shape[2:]) if sizes else kind.shape

    def taken(value: Tensor, at: tuple[Any, ...] = ()) -> Tensor:
        value = (joined(value, sizes) if sizes else value)[at].to(kind.dtype)
        return (value.T if transposed else value).contiguous()

    if isinstance(names, str):
        yield _Piece(names, Kind(kind.dtype, shape[::-1] if transposed else shape), name, taken)
        return
    for place, row in enumerate(names):
        rows = shape[1] // len(row)
        part = (rows, *shape[2:])
        stored = Kind(kind.dtype, part[::-1] if transposed else part)
        for run, each in enumerate(row):
            at = (place, slice(run * rows, (run + 1) * rows))
            yield _Piece(each, stored, name, partial(taken, at=at))


def _write_own(
    folder: Path | None,
    names: Sequence[str],
    shards: Sequence[Sequence[_Piece]],
    load: Callable[[str], Tensor],
) -> Exception | None:
    """Write this rank's files, or none without a folder, and return the error that ended it.

    Every value is loaded, whatever becomes of the file: all ranks that have a part of it take part in that.
    """
    failure: Exception | None = None
    for file, shard in zip(names, shards, strict=True):
        values = _values(shard, load)
        if folder is not None and failure is None:
            try:
                _write(folder / file, shard, values)
            except Exception as error:
                failure = error
        for _ in values:
            pass
    return failure


def _dtype(kinds: Mapping[str, Kind], wanted: torch.dtype | None) -> torch.dtype:
    return wanted or next(iter(kinds.values())).dtype


def _shards(
    model: SpecModel,
    kinds: Mapping[str, Kind],
    fused: Mapping[str, Sequence[int]],
    dtype: torch.dtype | None,
    most: int,
) -> list[list[_Piece]]:
    """The tensors of each file, of `most` bytes or a single one. fused: sizes of the parts of weights that are fused."""
    found: list[list[_Piece]] = []
    used = 0
    for name, kind in kinds.items():
        for piece in pieces_of(model, name, Kind(dtype or kind.dtype, kind.shape), fused.get(name)):
            size = _bytes([[piece]])
            if not found or used + size > most:
                found.append([])
                used = 0
            found[-1].append(piece)
            used += size
    return found


def _places(files: Sequence[str], shards: Sequence[Sequence[_Piece]]) -> dict[str, str]:
    """The file of each tensor."""
    return {piece.name: file for file, shard in zip(files, shards, strict=True) for piece in shard}


def _bytes(shards: Sequence[Sequence[_Piece]]) -> int:
    return sum(torch.Size(p.kind.shape).numel() * p.kind.dtype.itemsize for shard in shards for p in shard)


def _values(shard: Sequence[_Piece], load: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """The pieces one by one; a parameter is loaded once for all that are taken from it."""
    name, value = "", torch.empty(0)
    for piece in shard:
        if piece.of != name:
            del value
            name, value = piece.of, load(piece.of)
        yield piece.take(value)


def _write(path: Path, shard: Sequence[_Piece], values: Iterator[Tensor]) -> None:
    kinds = {piece.name: piece.kind for piece in shard}
    write_file(path, kinds, {"format": "pt"}, lambda _: next(values), in_order=True)


def _file_name(place: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{place + 1:05}-of-{count:05}.safetensors"


def _not_pretrained(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be written as transformers has it",
        given="a model that is built in, or by code",
        expected="one of [model] pretrained, whose config.json says what it is",
        hint="meshcomm export RUN FILE --weights, for one safetensors file of its tensors",
    )
