"""Export weights from a checkpoint or a running trainer to a safetensors file, or to a folder for transformers or peft."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.comm.codec import decode
from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.config.pretrained import DROPPED
from meshcomm.errors import ConfigError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.models import model_of
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.weights import INDEX, SINGLE, Conversions
from meshcomm.parallel.state import OF_MODULE, OF_PARAMETER
from meshcomm.train.checkpoint.checkpoints import write
from meshcomm.train.checkpoint.folder import FOLDER, checkpoints_in, is_complete, name_of
from meshcomm.train.checkpoint.lock import PRETRAINED, Lock
from meshcomm.train.checkpoint.parts import Kind
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.export_adapters import ADAPTER_FILE, adapter_pieces, write_adapter_config, write_merged
from meshcomm.train.safetensors_writer import Piece, write_file
from meshcomm.train.trainer import Trainer

CONFIG: Final = "config.json"
SHARD_BYTES: Final = 5_000_000_000
# Not copied from the source folder: weights in any format and their index, the files that an export itself writes, and hidden
# entries, such as .git.
_NOT_BESIDE: Final = (
    *(
        "*.safetensors",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.h5",
        "*.msgpack",
        "*.gguf",
        "*.onnx",
        "*.onnx_data",
    ),
    *("*.index.json", CONFIG, "adapter_config.json", ".*"),
)


class Exported(NamedTuple):
    """The result of an export."""

    source: Path
    target: Path
    step: int
    tensors: int
    bytes: int


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the last checkpoint of the run in `path`. Raises TrainingError if there is none.

    The checkpoint may be damaged, in which case `Lock.read` raises.
    """
    found = checkpoints_in(path / FOLDER) or checkpoints_in(path)
    if is_complete(path) or (not found and path in checkpoints_in(path.parent)):
        return path
    if not found:
        raise TrainingError(
            f"there is no complete checkpoint in {path}",
            given=f"{path}" if path.is_dir() else f"{path}, which is not a folder",
            expected=f"a run's train.out, or one of its {FOLDER}/{name_of(100)}",
            hint="to save checkpoints, set train.checkpoint_every = 100",
        )
    return found[-1]


def export_weights(source: Path, target: Path) -> Exported:
    """Write a checkpoint's weights into the safetensors file `target`, under the names in the module's state_dict.

    source: a complete checkpoint, saved on any mesh; or a run, whose last checkpoint is used.
    Does not require a process group. Raises TrainingError; UnsupportedOp for an extra state that is not a tensor.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    pieces: list[Piece] = []
    for full, kind in saved.kinds.items():
        if full.startswith(OF_MODULE):
            name = full.removeprefix(OF_MODULE)
            raise UnsupportedOp(
                f"the extra state of {name or 'the model'} is not a tensor, so a weights file cannot hold it",
                given=f"{full} in {folder}",
                expected="modules whose get_extra_state returns a tensor, or modules without get_extra_state",
            )
        if not full.startswith("model."):
            continue
        name = full.removeprefix("model.")
        about = OF_PARAMETER + name
        facts = decode(saved.load(about), torch.device("cpu")) if about in saved.kinds else {}
        pieces += [
            Piece(each, kind, name, torch.Tensor.contiguous) for each in (name, *facts.get("also", []))
        ]
    # Larger elements first, so that each tensor is aligned.
    pieces.sort(key=lambda piece: (-piece.kind.dtype.itemsize, piece.name))
    with _could_not(f"export {folder} to {target}"):
        write_file(target, pieces, saved)
    return Exported(folder, target, lock.step, len(pieces), target.stat().st_size)


def export_pretrained(
    source: Path, target: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Export a checkpoint of a `[model] pretrained` model to a folder that transformers' from_pretrained loads.

    With [model.lora], export only the adapters, to a folder that peft's from_pretrained loads.

    source:      a complete checkpoint, saved on any mesh; or a run, whose last checkpoint is used.
    target:      a new folder. The checkpoint's config.json is written there. All other files but the weights are copied from
                 the folder that the model was loaded from, if it still exists.
    dtype:       the dtype of the tensors. If None, the dtype of the weights.
    shard_bytes: the maximum size of a file, unless it holds a single larger tensor.
    Does not require a process group. Raises: ConfigError if the model was not loaded from such a folder; TrainingError.
    In both cases, `target` is not created.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    known, came = lock.config.get(PRETRAINED), lock.config["model"].get("pretrained")
    if not known or not came:
        raise _not_pretrained(f"the model of {folder}")
    kinds = {
        name.removeprefix("model."): Kind(dtype or kind.dtype, kind.shape)
        for name, kind in saved.kinds.items()
        if name.startswith("model.")
    }
    lora = lock.config["model"].get("lora")
    if lora is not None:
        pieces = adapter_pieces(kinds)
        shards = {ADAPTER_FILE: pieces}
    else:
        model = _model(known)
        pieces = [piece for name, kind in kinds.items() for piece in pieces_of(model, name, kind)]
        shards = _shards(pieces, shard_bytes)
    with new_folder(target) as draft:
        for file, shard in shards.items():
            write_file(draft / file, shard, saved)
        if lora is not None:
            write_adapter_config(draft, came, lora, kinds)
        else:
            _write_beside(draft, known, shards, str(next(iter(kinds.values())).dtype))
        copy_beside(draft, Path(came))
    return Exported(folder, target, lock.step, len(pieces), sum(piece.nbytes for piece in pieces))


def export_merged(
    source: Path, target: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Export a model that low-rank adapters were trained on, with a checkpoint's adapters merged into its weights.

    Arguments and errors are the same as for `export_pretrained`. The full model is loaded into this process's memory.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    model = lock.config.get("model", {})
    if not model.get("lora") or not model.get("pretrained"):
        raise ConfigError(
            "there are no adapters to merge",
            given=f"{folder}, of a model without [model.lora]",
            expected="a checkpoint of adapters for a model of [model] pretrained",
            hint="meshcomm export RUN FOLDER --pretrained",
        )
    with new_folder(target) as draft:
        base = Path(model["pretrained"])
        tensors = write_merged(draft, base, model["lora"], saved, dtype, shard_bytes)
        copy_beside(draft, base)
    return Exported(folder, target, lock.step, len(tensors), sum(each.nbytes for each in tensors))


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a draft of `target`, and rename it at the end. Raises TrainingError. If the block fails, the draft is removed."""
    _check_new(target)
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with _could_not(f"write {target}"):
            yield draft
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def save_pretrained(
    trainer: Trainer, folder: Path | str, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Export the weights of a trainer that uses `[model] pretrained`, like `export_pretrained`.

    The ranks write a checkpoint of the weights next to `folder`. The first rank creates `folder` from that checkpoint.

    folder:    a new folder, on a file system that all hosts share. The other ranks wait at most mesh.timeout_s.
    Called by: every rank of the mesh, between two steps.
    Raises:    ConfigError if the model was not loaded from such a folder; TrainingError on every rank if one rank
               cannot write, or if `folder` exists. In these cases, all written files are removed.
    """
    engine, mesh, target = trainer.engine, trainer.mesh, Path(folder)
    named, what = engine.sections.model, f"write {target}"
    if named is None or named.pretrained is None or not isinstance(engine.model, SpecModel):
        raise _not_pretrained("the model of this trainer")
    parts = target.with_name(f".{target.name}.checkpoint")

    def begin() -> None:
        if is_first(mesh):
            _check_new(target)
            # Remove the remains of a call that was killed.
            shutil.rmtree(parts, ignore_errors=True)

    on_all_ranks(mesh, what, begin)
    weights = engine.own_weights()
    try:
        write(mesh, weights, parts, trainer._lock())
        make = partial(export_pretrained, parts, target, dtype=dtype, shard_bytes=shard_bytes)
        on_all_ranks(mesh, what, lambda: make() if is_first(mesh) else None)
    finally:
        if is_first(mesh):
            shutil.rmtree(parts, ignore_errors=True)
    return target


def _check_new(target: Path) -> None:
    if target.exists():
        raise TrainingError(
            f"{target} exists already",
            given=f"{target}, which is a {'folder' if target.is_dir() else 'file'}",
            expected="the name of a folder that does not exist yet",
            hint="choose another name, or remove it first",
        )


def copy_beside(folder: Path, source: Path) -> None:
    """Copy all that `source` holds beside the weights: files of tokenizer and processor, chat templates, generation settings.

    A subfolder is copied in the same way, unless it holds a model of its own.
    """
    if not source.is_dir():
        return
    for path in source.iterdir():
        if any(fnmatchcase(path.name, pattern) for pattern in _NOT_BESIDE):
            continue
        if path.is_file():
            folder.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.name)
        elif not (path / CONFIG).exists() and not path.is_symlink():
            copy_beside(folder / path.name, path)


def _write_beside(
    folder: Path, known: Mapping[str, Any], shards: Mapping[str, Sequence[Piece]], dtype: str
) -> None:
    """Write config.json and, if there are several files, the index of the weights."""
    texts: dict[str, Any] = {}
    if len(shards) > 1:
        places = {piece.name: file for file, shard in shards.items() for piece in shard}
        size = sum(piece.nbytes for shard in shards.values() for piece in shard)
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    texts[CONFIG] = {k: v for k, v in known.items() if k not in ("torch_dtype", "_name_or_path")}
    texts[CONFIG]["dtype"] = dtype.removeprefix("torch.")
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _model(known: Mapping[str, Any]) -> SpecModel:
    """Return the model that a config.json describes, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        # Turn dropout off, because it has no weights.
        plain = {
            name: 0.0 if name.endswith(DROPPED) and isinstance(value, float) else value
            for name, value in known.items()
        }
        (Path(folder) / CONFIG).write_text(json.dumps(plain))
        made = model_of(
            ModelConfig(pretrained=folder, random_weights=True),
            DataConfig(seq_len=8),
            TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1),
        )
    assert isinstance(made, SpecModel)
    return made


@final
class _Reverted:
    """Computes all stored tensors of a parameter together and only once."""

    def __init__(self, stored: Conversions, name: str) -> None:
        self._stored, self._name = stored, name
        self._of: Tensor | None = None

    def take(self, wanted: str, dtype: torch.dtype, value: Tensor) -> Tensor:
        """Return one of these tensors."""
        if self._of is not value:
            self._of, self._made = value, dict(self._stored.stored(self._name, value))
        return self._made.pop(wanted).to(dtype).contiguous()


def pieces_of(model: SpecModel, name: str, kind: Kind) -> Iterator[Piece]:
    """Yield the tensors that store a parameter in the folder."""
    shape, stored = kind.shape, model.spec.stored
    if stored is not None and not callable(stored):
        without_memory = torch.empty(shape, dtype=kind.dtype, device="meta")
        reverted = _Reverted(stored, name)
        for each, made in stored.stored(name, without_memory).items():
            take = partial(reverted.take, each, kind.dtype)
            yield Piece(each, Kind(kind.dtype, tuple(made.shape)), name, take)
        return
    names, transposed = (name, False) if stored is None else stored(name)

    def taken(value: Tensor, at: tuple[Any, ...] = ()) -> Tensor:
        value = value[at].to(kind.dtype)
        return (value.T if transposed else value).contiguous()

    if isinstance(names, str):
        yield Piece(names, Kind(kind.dtype, shape[::-1] if transposed else shape), name, taken)
        return
    for place, row in enumerate(names):
        rows = shape[1] // len(row)
        part = (rows, *shape[2:])
        lying = Kind(kind.dtype, part[::-1] if transposed else part)
        for run, each in enumerate(row):
            at = (place, slice(run * rows, (run + 1) * rows))
            yield Piece(each, lying, name, partial(taken, at=at))


def _shards(pieces: Sequence[Piece], most: int) -> dict[str, list[Piece]]:
    """Return the tensors in each file, which holds at most `most` bytes or a single larger tensor."""
    found: list[list[Piece]] = []
    used = 0
    for piece in pieces:
        if not found or used + piece.nbytes > most:
            found.append([])
            used = 0
        found[-1].append(piece)
        used += piece.nbytes
    if len(found) == 1:
        return {SINGLE: found[0]}
    return {f"model-{n:05}-of-{len(found):05}.safetensors": shard for n, shard in enumerate(found, 1)}


@contextlib.contextmanager
def _could_not(what: str) -> Iterator[None]:
    """Convert errors from other libraries or the disk into a TrainingError with the message: could not `what`."""
    try:
        yield
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            f"could not {what}",
            given=f"{type(error).__name__}: {error}",
            expected="complete files, and a writable folder with enough space",
        ) from error


def _not_pretrained(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be written in transformers' format",
        given="a built-in model, or a model that is built by code",
        expected="a model loaded with [model] pretrained, which has a config.json",
        hint="use meshcomm export RUN FILE to write its tensors to a single safetensors file",
    )
