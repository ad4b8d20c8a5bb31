"""Export weights from a checkpoint or a running trainer to a safetensors file, or to a folder for transformers or peft."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from meshcomm.comm.codec import decode
from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.config.model import LoraConfig
from meshcomm.config.pretrained import DROPPED
from meshcomm.errors import ConfigError, TrainingError, UnsupportedOp
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.models import model_of
from meshcomm.models.lora import ADAPTER, adapter_options, with_adapters
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.state import OF_MODULE, OF_PARAMETER
from meshcomm.train.checkpoint.checkpoints import write
from meshcomm.train.checkpoint.folder import FOLDER, checkpoints_in, is_complete, name_of
from meshcomm.train.checkpoint.lock import PRETRAINED, Lock
from meshcomm.train.checkpoint.parts import Kind
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.export_files import (
    CONFIG,
    Piece,
    check_new,
    copy_beside,
    could_not,
    new_folder,
    pieces_of,
    shards_of,
    write_beside,
    write_file,
)
from meshcomm.train.trainer import Trainer

SHARD_BYTES: Final = 5_000_000_000
ADAPTER_FILE: Final = "adapter_model.safetensors"
# The prefix that peft puts before the names of a transformers model.
_PREFIX: Final = "base_model.model."


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
    saved = checkpoints_in(path / FOLDER) or checkpoints_in(path)
    if is_complete(path) or (not saved and path in checkpoints_in(path.parent)):
        return path
    if not saved:
        raise TrainingError(
            f"there is no complete checkpoint in {path}",
            given=f"{path}" if path.is_dir() else f"{path}, which is not a folder",
            expected=f"a run's train.out, or one of its {FOLDER}/{name_of(100)}",
            hint="to save checkpoints, set train.checkpoint_every = 100",
        )
    return saved[-1]


def export_weights(source: Path, target: Path) -> Exported:
    """Write a checkpoint's weights into the safetensors file `target`, under the names in the module's state_dict.

    source: a complete checkpoint, saved on any mesh; or a run, whose last checkpoint is used.
    Does not require a process group. Raises TrainingError; UnsupportedOp for an extra state that is not a tensor.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    pieces: list[Piece] = []
    for full in saved.kinds:
        if full.startswith(OF_MODULE):
            name = full.removeprefix(OF_MODULE)
            raise UnsupportedOp(
                f"the extra state of {name or 'the model'} is not a tensor, so a weights file cannot hold it",
                given=f"{full} in {folder}",
                expected="modules whose get_extra_state returns a tensor, or modules without get_extra_state",
            )
    for name, kind in saved.weights.items():
        about = OF_PARAMETER + name
        facts = decode(saved.load(about), torch.device("cpu")) if about in saved.kinds else {}
        pieces += [Piece(parameter, kind, name) for parameter in (name, *facts.get("also", []))]
    # Larger elements first, so that each tensor is aligned.
    pieces.sort(key=lambda piece: (-piece.kind.dtype.itemsize, piece.name))
    with could_not(f"export {folder} to {target}"):
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
    settings_of_model, pretrained = lock.config.get(PRETRAINED), lock.config["model"].get("pretrained")
    if not settings_of_model or not pretrained:
        raise _not_pretrained(f"the model of {folder}")
    kinds = {name: Kind(dtype or kind.dtype, kind.shape) for name, kind in saved.weights.items()}
    lora = lock.config["model"].get("lora")
    if lora is not None:
        pieces = [
            Piece(_PREFIX + name.replace(f".{ADAPTER}.", "."), kind, name) for name, kind in kinds.items()
        ]
        shards = {ADAPTER_FILE: pieces}
    else:
        model = _model(settings_of_model)
        pieces = [piece for name, kind in kinds.items() for piece in pieces_of(model, name, kind)]
        shards = shards_of(pieces, shard_bytes)
    with new_folder(target) as draft:
        for file, shard in shards.items():
            write_file(draft / file, shard, saved)
        if lora is not None:
            _write_adapter_config(draft, pretrained, lora, kinds)
        else:
            write_beside(draft, settings_of_model, shards, str(next(iter(kinds.values())).dtype))
        copy_beside(draft, Path(pretrained))
    return Exported(folder, target, lock.step, len(pieces), sum(piece.nbytes for piece in pieces))


@torch.no_grad()
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
    base, weights = Path(model["pretrained"]), saved.weights
    targets = _adapted(weights)
    with new_folder(target) as draft:
        from transformers import AutoModelForCausalLM

        from meshcomm.models.hf import without_bars

        with without_bars():
            merged = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
            with_adapters(merged, LoraConfig(**model["lora"]), targets)
            for name, parameter in merged.named_parameters():
                if name in weights:
                    parameter.copy_(saved.load(f"model.{name}"))
            # Replace each adapted weight W by W + (alpha / rank) B A.
            for name in targets:
                layer: Any = merged.get_submodule(name)
                layer.merge()
                merged.set_submodule(name, layer.base_layer)
            merged.save_pretrained(draft, max_shard_size=shard_bytes)
        copy_beside(draft, base)
    tensors = merged.state_dict().values()
    return Exported(folder, target, lock.step, len(tensors), sum(tensor.nbytes for tensor in tensors))


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
            check_new(target)
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


def _model(settings: Mapping[str, Any]) -> SpecModel:
    """Return the model that a config.json describes, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        # Turn dropout off, because it has no weights.
        plain = {
            name: 0.0 if name.endswith(DROPPED) and isinstance(value, float) else value
            for name, value in settings.items()
        }
        (Path(folder) / CONFIG).write_text(json.dumps(plain))
        model = model_of(
            ModelConfig(pretrained=folder, random_weights=True),
            DataConfig(seq_len=8),
            TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1),
        )
    assert isinstance(model, SpecModel)
    return model


def _adapted(names: Mapping[str, Any]) -> list[str]:
    """Return the layers that adapters with these names belong to."""
    return [name.partition(".lora_A.")[0] for name in names if ".lora_A." in name]


def _write_adapter_config(
    folder: Path, base: str, lora: Mapping[str, Any], kinds: Mapping[str, Kind]
) -> None:
    """Write adapter_config.json. base: the folder of the model without adapters."""
    settings = LoraConfig(**lora)
    options = adapter_options(settings, settings.targets or _adapted(kinds))
    options.lora_dropout = settings.dropout
    options.base_model_name_or_path, options.task_type, options.inference_mode = base, "CAUSAL_LM", True
    options.save_pretrained(folder)


def _not_pretrained(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be written in transformers' format",
        given="a built-in model, or a model that is built by code",
        expected="a model loaded with [model] pretrained, which has a config.json",
        hint="use meshcomm export RUN FILE to write its tensors to a single safetensors file",
    )
