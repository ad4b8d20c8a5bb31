"""A checkpoint as one safetensors file, and back: by one process, one tensor in memory at a time.

    8 bytes    length of the header, little-endian
    header     JSON, padded with spaces to a multiple of 8:
               {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    data       the elements of each tensor, little-endian, in C order, without gaps

The package's own writer wants all tensors in memory at once. Tensors lie in the order of falling element
size, then name, so that each is aligned.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshcomm.comm.codec import decode
from meshcomm.errors import MeshcommError, TrainingError, UnsupportedOp
from meshcomm.parallel.state import OF_MODULE, OF_PARAMETER
from meshcomm.parallel.tensor.parameters import joined
from meshcomm.train.checkpoint_folder import FOLDER, commit, complete, is_complete, name_of, saving
from meshcomm.train.checkpoint_reader import SAFETENSORS_NAMES, Kind, Saved
from meshcomm.train.checkpoint_writer import parts_of, write_metadata, write_part
from meshcomm.train.lock import Lock

_LOCK: Final = "meshcomm.lock"
_METADATA: Final = "__metadata__"
_DTYPES: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


class Moved(NamedTuple):
    """What went from where to where."""

    source: Path
    target: Path
    step: int
    tensors: int
    bytes: int


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint `path`, or the last one of the run `path`. Raises TrainingError."""
    if is_complete(path):
        return path
    found = complete(path / FOLDER) or complete(path)
    if not found:
        raise TrainingError(
            f"there is no complete checkpoint in {path}",
            given=f"{path}" if path.is_dir() else f"{path}, which is no folder",
            expected=f"a run's train.out, or one of its {FOLDER}/{name_of(100)}",
            hint="train.checkpoint_every = 100 saves some",
        )
    return found[-1]


def export_checkpoint(source: Path, target: Path, *, weights: bool = False) -> Moved:
    """Write the tensors of a checkpoint into the safetensors file `target`, whole, by their global names.

    source:  a complete checkpoint, or a run, whose last one it is then.
    weights: only the model's, with the names and shapes of its state_dict: `layers.0.attn.wq.weight`. Without, the
             file has everything that `import_checkpoint` needs.
    Needs no process group, whatever mesh the checkpoint was saved on. Raises TrainingError.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    if weights:
        kinds, load = _of_modules(saved, folder)
    else:
        kinds, load = saved.kinds, saved.load
    metadata = {"format": "pt"} if weights else {"format": "pt", _LOCK: replace(lock, metadata="").text()}
    with could_not(f"export {folder} to {target}"):
        size = write_file(target, kinds, metadata, load)
    return Moved(folder, target, lock.step, len(kinds), size)


def _of_modules(saved: Saved, folder: Path) -> tuple[dict[str, Kind], Callable[[str], Tensor]]:
    """The names and kinds of a module's state_dict, and what loads one: parts of a weight are joined."""
    kinds: dict[str, Kind] = {}
    # The name in the checkpoint, and the sizes of its parts, of each name in the state dict.
    of: dict[str, tuple[str, list[int]]] = {}
    for full, kind in saved.kinds.items():
        if full.startswith(OF_MODULE):
            name = full.removeprefix(OF_MODULE)
            raise UnsupportedOp(
                f"the extra state of {name or 'the model'} is no tensor, and a file of weights cannot hold it",
                given=f"{full} in {folder}",
                expected="modules whose get_extra_state gives a tensor, or none",
                hint="meshcomm export without --weights, which meshcomm import reads",
            )
        if not full.startswith("model."):
            continue
        name = full.removeprefix("model.")
        about = OF_PARAMETER + name
        facts = decode(saved.load(about), torch.device("cpu")) if about in saved.kinds else {}
        sizes = facts.get("parts", [])
        if sizes:
            kind = Kind(kind.dtype, (sum(sizes), *kind.shape[2:]))
        for each in (name, *facts.get("also", [])):
            kinds[each], of[each] = kind, (full, sizes)

    def load(name: str) -> Tensor:
        full, sizes = of[name]
        tensor = saved.load(full)
        return joined(tensor, sizes) if sizes else tensor

    return kinds, load


def import_checkpoint(source: Path, out: Path) -> Moved:
    """Make a checkpoint of the run `out` from a file that `export_checkpoint` wrote; `resume` starts there.

    Raises TrainingError where the file is not one, or the run has a checkpoint of that step or a
    later one, with which a run that resumes would go on.
    """
    with opened(source) as (file, kinds):
        text = (file.metadata() or {}).get(_LOCK)
        try:
            if text is None:
                raise ValueError("weights of something, without what a run goes on from")
            lock = Lock.parse(text)
        except ValueError as error:
            raise TrainingError(
                f"{source} is not an exported checkpoint",
                given=f"{_LOCK} in its metadata: {error}",
                expected="the lock of a checkpoint, as this version of meshcomm writes it",
                hint="meshcomm export RUN FILE, without --weights",
            ) from error
        path = out / FOLDER / name_of(lock.step)
        later = [found for found in complete(path.parent) if Lock.read(found).step >= lock.step]
        if later:
            raise TrainingError(
                f"the run has a checkpoint of step {lock.step} or later already",
                given=f"{later[-1]}, and step {lock.step} in {source}",
                expected="a run that the imported one is the last of",
                hint="import into another folder, and train.out = that one",
            )
        with could_not(f"import {source} into {path}"):
            write_checkpoint(path, lock, kinds, partial(_loaded, file))
    return Moved(source, path, lock.step, len(kinds), sum(part.stat().st_size for part in path.iterdir()))


def write_checkpoint(
    path: Path, lock: Lock, kinds: Mapping[str, Kind], load: Callable[[str], Tensor]
) -> None:
    """Make the complete checkpoint `path` in one process. load: gives a tensor when its turn has come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = saving(path)
    shutil.rmtree(draft, ignore_errors=True)
    state = {name: torch.empty(kind.shape, dtype=kind.dtype, device="meta") for name, kind in kinds.items()}
    try:
        write_part(draft, 0, parts_of(state), lambda item: load(item.index.fqn))
        write_metadata(draft, [0])
        lock.write(draft)
        commit(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_file(
    path: Path,
    kinds: Mapping[str, Kind],
    metadata: Mapping[str, str],
    load: Callable[[str], Tensor],
    *,
    in_order: bool = False,
) -> int:
    """Write a safetensors file of the tensors `kinds`, and return its bytes. One tensor is in memory at a time.

    load:     gives the whole tensor of a name; called once for each, in the file's order.
    in_order: that is the order of `kinds`; else that of falling element size, then name.
    The file appears under its name when it is whole and on the disk; one that was there is replaced.
    Raises: UnsupportedOp for a dtype that the format does not have, or on a big-endian machine; OSError.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    place = 0
    order = list(kinds) if in_order else sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))
    for name in order:
        kind = kinds[name]
        if kind.dtype not in SAFETENSORS_NAMES or name == _METADATA or sys.byteorder != "little":
            raise UnsupportedOp(
                f"a safetensors file cannot hold {name}",
                given=f"{kind}, {sys.byteorder}-endian",
                expected=f"another name than {_METADATA}, one of {', '.join(_DTYPES)}, little-endian",
            )
        end = place + math.prod(kind.shape) * kind.dtype.itemsize
        dtype, shape = SAFETENSORS_NAMES[kind.dtype], list(kind.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in order:
                tensor = load(name)
                if tensor.numel():
                    file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return 8 + len(header) + place


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, dict[str, Kind]]]:
    """A safetensors file that is open for reading, and its tensors; the package checks the header before any use.

    Raises TrainingError where the file is not there or not as the format has it.
    """
    with contextlib.ExitStack() as stack:
        try:
            file: Any = stack.enter_context(cast(Any, safe_open(path, framework="pt")))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {
                name: Kind(_DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }
        except (SafetensorError, OSError, KeyError) as error:
            raise TrainingError(
                f"{path} cannot be read as a safetensors file",
                given=f"dtype {error}" if isinstance(error, KeyError) else str(error),
                expected="a file as the format has it, of dtypes " + ", ".join(_DTYPES),
                hint="a file that `meshcomm export` wrote; or copy it again, if it was cut short",
            ) from error
        yield file, kinds


def _loaded(file: Any, name: str) -> Tensor:
    """In memory of its own: the file is mapped."""
    found: Tensor = file.get_tensor(name).clone()
    return found


@contextlib.contextmanager
def could_not(what: str) -> Iterator[None]:
    """Raise what another library or the disk raises as a TrainingError: could not `what`."""
    try:
        yield
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            f"could not {what}",
            given=f"{type(error).__name__}: {error}",
            expected="files that are whole, and a folder with space that can be written to",
        ) from error
