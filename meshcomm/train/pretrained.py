"""A folder that transformers opens, of a running trainer or a checkpoint: written tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.mesh.all_ranks import is_first, of_every_rank, on_all_ranks, ranks_of
from meshcomm.models import model_of
from meshcomm.models.declared import Declared
from meshcomm.models.weights import INDEX, SINGLE
from meshcomm.parallel.meta import on_meta
from meshcomm.parallel.tensor import whole
from meshcomm.parallel.tensor.parameters import fused_sizes, joined
from meshcomm.parallel.tensor.plan import sizes_of_parts
from meshcomm.train.checkpoint_reader import Kind, Saved
from meshcomm.train.export import Moved, find_checkpoint, write_file
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
    engine = trainer.engine
    target, mesh, model = Path(folder), trainer.mesh, engine.model
    what = f"write {target}"
    named = engine.sections.model
    source = None if named is None else named.pretrained
    if source is None or not isinstance(model, Declared):
        raise _not_pretrained("the model of this trainer")
    parameters = dict(engine.own_parameters())
    draft = target.with_name(f".{target.name}.part")

    def plan() -> tuple[dict[str, Any], list[list[_Piece]]]:
        known = json.loads((Path(source) / CONFIG).read_text())
        fused: dict[str, tuple[int, ...]] = {}
        for module in engine.modules:
            fused |= fused_sizes(module)
        pieces = [
            piece
            for name, each in parameters.items()
            for piece in pieces_of(model, name, Kind(dtype or each.dtype, tuple(each.shape)), fused.get(name))
        ]
        if is_first(mesh):
            _begin(target, draft)
        return known, _shards(pieces, shard_bytes)

    known, shards = on_all_ranks(mesh, what, plan)
    pipeline = engine.sections.parallel.pipeline
    writes = all(coord == 0 for dim, coord in mesh.coords.items() if dim != pipeline)
    counts = of_every_rank(mesh, len(shards) if writes else 0)
    first = sum(counts[: ranks_of(mesh).index(mesh.rank)])
    names = [_file_name(first + place, sum(counts)) for place in range(len(shards))]
    failure: Exception | None = None
    for file, shard in zip(names, shards, strict=True):
        # Gathered by every rank that has a part, whatever becomes of the file.
        values = _values(shard, lambda name: whole(parameters[name]).cpu())
        if writes and failure is None:
            try:
                _write(draft / file, shard, values)
            except Exception as error:
                failure = error
        for _ in values:
            pass

    def end() -> None:
        if failure is not None:
            raise failure

    places = {piece.name: file for file, shard in zip(names, shards, strict=True) for piece in shard}
    try:
        on_all_ranks(mesh, what, end)
        every = of_every_rank(mesh, places if writes else {})
        files = {name: file for each in every for name, file in each.items()}
        sizes = of_every_rank(mesh, _bytes(shards) if writes else 0)

        def finish() -> None:
            if is_first(mesh):
                _finish(
                    draft,
                    target,
                    known,
                    files,
                    sum(sizes),
                    next(iter(parameters.values())).dtype,
                    dtype,
                    Path(source),
                )

        on_all_ranks(mesh, what, finish)
    except BaseException:
        if is_first(mesh):
            shutil.rmtree(draft, ignore_errors=True)
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
    pieces = [
        piece
        for name, kind in kinds.items()
        for piece in pieces_of(model, name, Kind(dtype or kind.dtype, kind.shape), fused.get(name))
    ]

    def load(name: str) -> Tensor:
        return saved.load(f"model.{name}")

    draft, shards = target.with_name(f".{target.name}.part"), _shards(pieces, shard_bytes)
    _begin(target, draft)
    try:
        places: dict[str, str] = {}
        for place, shard in enumerate(shards):
            file = _file_name(place, len(shards))
            _write(draft / file, shard, _values(shard, load))
            places |= {piece.name: file for piece in shard}
        own = next(iter(kinds.values())).dtype
        _finish(draft, target, known, places, _bytes(shards), own, dtype, Path(came))
    except OSError as error:
        raise TrainingError(
            f"could not write {target}",
            given=f"{error.strerror or error}: {error.filename or draft}",
            expected="a folder that can be written to, with space for the weights",
            hint="make space, or name another folder",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Moved(folder, target, lock.step, len(places), _bytes(shards))


def _model(known: Mapping[str, Any]) -> Declared:
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
    assert isinstance(made, Declared)
    return made


def pieces_of(model: Declared, name: str, kind: Kind, sizes: Sequence[int] | None) -> Iterator[_Piece]:
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
        for run, each in enumerate(row):
            at = (place, slice(run * rows, (run + 1) * rows))
            form = (rows, *shape[2:])
            yield _Piece(
                each,
                Kind(kind.dtype, form[::-1] if transposed else form),
                name,
                partial(taken, at=at),
            )


def _shards(pieces: Sequence[_Piece], most: int) -> list[list[_Piece]]:
    found: list[list[_Piece]] = []
    used = 0
    for piece in pieces:
        size = _bytes([[piece]])
        if not found or used + size > most:
            found.append([])
            used = 0
        found[-1].append(piece)
        used += size
    return found


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


def _begin(target: Path, draft: Path) -> None:
    if target.exists():
        raise TrainingError(
            f"{target} is there already",
            given=f"{target}, which is a {'folder' if target.is_dir() else 'file'}",
            expected="the name of a folder that is not there yet",
            hint="another name; or remove it first",
        )
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def _finish(
    draft: Path,
    target: Path,
    known: Mapping[str, Any],
    places: Mapping[str, str],
    size: int,
    own: torch.dtype,
    dtype: torch.dtype | None,
    source: Path,
) -> None:
    """Write what belongs to the weights, and give the folder its name."""
    files = set(places.values())
    if lacking := sorted(file for file in files if not (draft / file).is_file()):
        raise TrainingError(
            f"files of {target} are missing",
            given=", ".join(lacking),
            expected="what every stage's first rank has written",
            hint="a folder on a file system that all hosts share",
        )
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    left = {name: value for name, value in known.items() if name not in ("torch_dtype", "_name_or_path")}
    left["dtype"] = str(dtype or own).removeprefix("torch.")
    (draft / CONFIG).write_text(json.dumps(left, indent=2) + "\n")
    for name in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source / name, draft / name)
    draft.rename(target)


def _not_pretrained(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be written as transformers has it",
        given="a model that is built in, or by code",
        expected="one of [model] pretrained, whose config.json says what it is",
        hint="meshcomm export RUN FILE --weights, for one safetensors file of its tensors",
    )
