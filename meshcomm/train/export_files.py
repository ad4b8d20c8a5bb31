"""Write parameters to a folder of safetensors files, with only one parameter in memory at a time.

The safetensors package would need all tensors in memory. The format of a file is:

8 bytes    length of the header, little-endian
header     JSON, padded with spaces to a multiple of 8:
           {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
data       the elements of each tensor, little-endian, in C order, without gaps
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.errors import MeshcommError, TrainingError, UnsupportedOp
from meshcomm.models.weights import INDEX, SINGLE
from meshcomm.train.checkpoint.folder import FOLDER, checkpoints_in, is_complete
from meshcomm.train.checkpoint.parts import Kind
from meshcomm.train.checkpoint.reader import SAFETENSORS_NAMES
from meshcomm.transfer.naming import Naming

CONFIG: Final = "config.json"
_METADATA: Final = "__metadata__"
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


class Piece(NamedTuple):
    """A tensor in a file. of: the parameter of which it is a part."""

    name: str
    kind: Kind
    of: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.kind.shape) * self.kind.dtype.itemsize


@final
class Parameters:
    """Parameters to write, of which only one is in memory at a time.

    kinds:  of the full parameters, by name.
    load:   returns a full parameter in host memory. It is called once for adjacent pieces of a parameter.
    stored: returns the tensors that store a parameter, by their names in the files.
    """

    def __init__(self, kinds: Mapping[str, Kind], load: Callable[[str], Tensor], stored: Naming) -> None:
        self.kinds, self._load, self._stored = kinds, load, stored
        self._of = ""
        self._left: dict[str, Tensor] = {}

    def pieces(self) -> list[Piece]:
        """Return the tensors in the files, in the order of the parameters."""
        return [
            Piece(stored_name, Kind(dtype, tuple(tensor.shape)), name)
            for name, (dtype, shape) in self.kinds.items()
            for stored_name, tensor in self._stored(name, torch.empty(shape, device="meta")).items()
        ]

    def take(self, piece: Piece) -> Tensor:
        """Return the values of a piece, contiguous and in its dtype. They are not kept."""
        if piece.of != self._of:
            self._of = piece.of
            self._left.clear()
            self._left.update(self._stored(piece.of, self._load(piece.of)))
        return self._left.pop(piece.name).to(piece.kind.dtype).contiguous()


def write_file(path: Path, pieces: Sequence[Piece], parameters: Parameters) -> None:
    """Write pieces to a safetensors file.

    The file appears under its name once it is complete and on disk. An existing file is replaced; see `check_file`.
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
    draft = _draft_of(path)
    try:
        with draft.open("xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for piece in pieces:
                if piece.nbytes:
                    file.write(parameters.take(piece).reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def shards_of(pieces: Sequence[Piece], most: int) -> dict[str, list[Piece]]:
    """Return the tensors in each file, which holds at most `most` bytes or a single larger tensor."""
    shards: list[list[Piece]] = []
    used = 0
    for piece in pieces:
        if not shards or used + piece.nbytes > most:
            shards.append([])
            used = 0
        shards[-1].append(piece)
        used += piece.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05}-of-{len(shards):05}.safetensors": shard for n, shard in enumerate(shards, 1)}


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a draft of `target`, and rename it at the end. Raises TrainingError. If the block fails, the draft is removed."""
    check_new(target)
    draft = _draft_of(target)
    with could_not(f"write {target}"):
        draft.mkdir(parents=True)
    try:
        with could_not(f"write {target}"):
            yield draft
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _draft_of(target: Path) -> Path:
    """Return a hidden name next to `target` that no other export uses."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")


def check_new(target: Path) -> None:
    """Raise TrainingError if a folder cannot be created as `target`."""
    with could_not(f"write {target}"):
        if os.path.lexists(target):
            raise TrainingError(
                f"{target} exists already",
                given=f"{target}, which is a {'folder' if target.is_dir() else 'file'}",
                expected="the name of a folder that does not exist yet",
                hint="choose another name, or remove it first",
            )
        _check_outside(target.resolve())


def check_file(target: Path) -> Path:
    """Return the path of the file to write as `target`: of a symlink, the path that it leads to.

    Raises TrainingError if the path lies in a checkpoint, or if something is there that is not a safetensors file or an empty
    file. An export replaces only an earlier one.
    """
    with could_not(f"write {target}"):
        path = target.resolve()
        _check_outside(path)
        # A pipe has no path to which it could be resolved.
        if target.is_dir():
            what = "a folder"
        elif target.exists() and not target.is_file():
            what = "not a regular file"
        elif target.is_file() and not _is_replaceable(path):
            what = "no safetensors file"
        else:
            return path
        raise TrainingError(
            f"an export cannot be written as {target}, which is {what}",
            given=f"{target}, which leads to {path}"
            if target.is_symlink() or not target.name
            else f"{target}",
            expected="the name of a new file, or of an earlier safetensors file",
            hint="meshcomm export RUN FILE.safetensors; for a new folder, --pretrained or --merged"
            if target.is_dir()
            else "choose another name, or remove it first",
        )


def _is_replaceable(path: Path) -> bool:
    """Return whether a file is empty, or begins like a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length, first = int.from_bytes(file.read(8), "little"), file.read(1)
    return size == 0 or (first == b"{" and 8 + length <= size)


def _check_outside(target: Path) -> None:
    """Raise TrainingError if `target` lies in a checkpoint, or in a run's folder of checkpoints."""
    for folder in target.parents:
        if is_complete(folder) or (folder.name == FOLDER and checkpoints_in(folder)):
            raise TrainingError(
                f"an export is not written into {'a checkpoint' if is_complete(folder) else 'the checkpoints of a run'}",
                given=f"{target}, which is in {folder}",
                expected="a path outside of it",
                hint=f"choose another folder, such as {folder.parent.parent / target.name}",
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


def write_beside(
    folder: Path, settings: Mapping[str, Any], shards: Mapping[str, Sequence[Piece]], dtype: str
) -> None:
    """Write config.json and, if there are several files, the index of the weights."""
    texts: dict[str, Any] = {}
    if len(shards) > 1:
        places = {piece.name: file for file, shard in shards.items() for piece in shard}
        size = sum(piece.nbytes for shard in shards.values() for piece in shard)
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    texts[CONFIG] = {k: v for k, v in settings.items() if k not in ("torch_dtype", "_name_or_path")}
    texts[CONFIG]["dtype"] = dtype.removeprefix("torch.")
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def could_not(what: str) -> Iterator[None]:
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
