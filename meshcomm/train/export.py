"""Export weights from a checkpoint or a running trainer to a safetensors file, or to a folder for transformers or peft."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshcomm.comm.codec import decode
from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.config.model import LoraConfig
from meshcomm.config.pretrained import DROPPED
from meshcomm.errors import ConfigError, TrainingError, UnsupportedOp
from meshcomm.mesh.all_ranks import is_first, on_all_ranks, ranks_of
from meshcomm.models import model_of
from meshcomm.models.lora import ADAPTER, adapter_options, with_adapters
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.state import OF_MODULE, OF_PARAMETER
from meshcomm.train.checkpoint.folder import find_checkpoint, path_of
from meshcomm.train.checkpoint.lock import PRETRAINED, Lock
from meshcomm.train.checkpoint.parts import Kind
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.export_files import (
    CONFIG,
    Parameters,
    Piece,
    check_file,
    check_new,
    copy_beside,
    could_not,
    new_folder,
    shards_of,
    write_beside,
    write_file,
)
from meshcomm.train.trainer import Trainer
from meshcomm.transfer.gather import Gathered

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


def export_weights(source: Path, target: Path, *, ema: bool = False) -> Exported:
    """Write a checkpoint's weights into the safetensors file `target`, under the names in the module's state_dict.

    source: a complete checkpoint, saved on any mesh; or a run, whose last checkpoint is used.
    target: a new file, or an earlier safetensors file, which is replaced at the end. A symlink is followed.
    ema:    whether to write the moving averages of `train.ema` in place of the weights.
    Does not require a process group. Raises TrainingError; UnsupportedOp for an extra state that is not a tensor.
    """
    folder, file = find_checkpoint(source), check_file(target)
    lock, saved = Lock.read(folder), Saved(folder)
    for full in saved.kinds:
        if full.startswith(OF_MODULE):
            name = full.removeprefix(OF_MODULE)
            raise UnsupportedOp(
                f"the extra state of {name or 'the model'} is not a tensor, so a weights file cannot hold it",
                given=f"{full} in {folder}",
                expected="modules whose get_extra_state returns a tensor, or modules without get_extra_state",
            )
    names_of: dict[str, tuple[str, ...]] = {}
    for name in saved.weights:
        about = OF_PARAMETER + name
        facts = decode(saved.load(about), torch.device("cpu")) if about in saved.kinds else {}
        names_of[name] = (name, *facts.get("also", []))

    parameters = Parameters(
        saved.weights, _loaded(saved, ema), lambda name, value: dict.fromkeys(names_of[name], value)
    )
    # Larger elements first, so that each tensor is aligned.
    pieces = sorted(parameters.pieces(), key=lambda piece: (-piece.kind.dtype.itemsize, piece.name))
    with could_not(f"export {folder} to {target}"):
        write_file(file, pieces, parameters)
    return Exported(folder, target, lock.step, len(pieces), file.stat().st_size)


def export_pretrained(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    ema: bool = False,
) -> Exported:
    """Export a checkpoint of a `[model] pretrained` model to a folder that transformers' from_pretrained loads.

    With [model.lora], export only the adapters, to a folder that peft's from_pretrained loads.

    source:      a complete checkpoint, saved on any mesh; or a run, whose last checkpoint is used.
    target:      a new folder. The checkpoint's config.json is written there. All other files but the weights are copied from
                 the folder that the model was loaded from, if it still exists.
    dtype:       the dtype of the tensors. If None, the dtype of the weights.
    shard_bytes: the maximum size of a file, unless it holds a single larger tensor.
    ema:         whether to write the moving averages of `train.ema` in place of the weights.
    Does not require a process group. Raises: ConfigError if the model was not loaded from such a folder; TrainingError.
    In both cases, `target` is not created.
    """
    folder = find_checkpoint(source)
    lock, saved = Lock.read(folder), Saved(folder)
    settings, pretrained = lock.config.get(PRETRAINED), lock.config["model"].get("pretrained")
    if not settings or not pretrained:
        raise _not_pretrained(f"the model of {folder}")
    stored = _adapter if lock.config["model"].get("lora") else _model(settings).spec.stored_tensors
    kinds = {name: Kind(dtype or kind.dtype, kind.shape) for name, kind in saved.weights.items()}
    pieces = _write_folder(target, lock, Parameters(kinds, _loaded(saved, ema), stored), shard_bytes)
    return Exported(folder, target, lock.step, len(pieces), sum(piece.nbytes for piece in pieces))


def _loaded(saved: Saved, ema: bool) -> Callable[[str], Tensor]:
    """Return a function that loads a weight by its name, or its moving average. What is not trained has none."""
    if ema and "ema" not in saved.kinds:
        raise TrainingError(
            "the checkpoint has no moving averages of weights",
            given=f"{saved.folder}, of a run without train.ema",
            expected="a checkpoint of a run with train.ema",
            hint="export the weights: without --ema",
        )
    return lambda name: saved.load(f"ema.{name}" if ema and f"ema.{name}" in saved.kinds else f"model.{name}")


def _adapter(name: str, value: Tensor) -> Mapping[str, Tensor]:
    """Return an adapter's parameter by the name that peft gives it."""
    return {_PREFIX + name.replace(f".{ADAPTER}.", "."): value}


def _write_folder(target: Path, lock: Lock, parameters: Parameters, shard_bytes: int) -> list[Piece]:
    """Write a new folder in transformers' or peft's format. Parameters are loaded once, in their order."""
    kinds, pieces = parameters.kinds, parameters.pieces()
    lora, pretrained = lock.config["model"].get("lora"), lock.config["model"]["pretrained"]
    shards = {ADAPTER_FILE: pieces} if lora else shards_of(pieces, shard_bytes)
    with new_folder(target) as draft:
        for file, shard in shards.items():
            write_file(draft / file, shard, parameters)
        if lora:
            _write_adapter_config(draft, pretrained, lora, kinds)
        else:
            write_beside(draft, lock.config[PRETRAINED], shards, str(next(iter(kinds.values())).dtype))
        copy_beside(draft, Path(pretrained))
    return pieces


@torch.no_grad()
def export_merged(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    ema: bool = False,
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
    targets, loaded = _adapted(weights), _loaded(saved, ema)
    with new_folder(target) as draft:
        from transformers import AutoModelForCausalLM

        from meshcomm.models.hf import without_bars

        with without_bars():
            merged = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
            with_adapters(merged, LoraConfig(**model["lora"]), targets)
            for name, parameter in merged.named_parameters():
                if name in weights:
                    parameter.copy_(loaded(name))
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

    The first rank receives one parameter after another, and writes it. The other ranks send their parts meanwhile.

    folder:    a new folder, which only the first rank has to reach.
    Called by: every rank of the mesh, between two steps.
    Raises:    ConfigError if the model was not loaded from such a folder; TrainingError on every rank if one rank
               cannot write, or if `folder` exists. In these cases, all written files are removed.
    """
    engine, mesh = trainer.engine, trainer.mesh
    named, what = engine.sections.model, f"write {folder}"
    if named is None or named.pretrained is None or not isinstance(engine.model, SpecModel):
        raise _not_pretrained("the model of this trainer")

    def look() -> Path:
        path = path_of(folder)
        if is_first(mesh):
            check_new(path)
        return path

    target = on_all_ranks(mesh, what, look)
    lock, first = trainer._lock(), min(ranks_of(mesh))
    own = {name.removeprefix("model."): tensor for name, tensor in engine.own_weights().items()}
    weights = Gathered(mesh, own, first)
    stored = _adapter if named.lora else engine.model.spec.stored_tensors

    def send_and_write() -> None:
        arriving = iter(weights)
        try:
            if is_first(mesh):
                kinds = {name: Kind(dtype or held, shape) for name, (held, shape) in weights.kinds.items()}
                _write_folder(
                    target, lock, Parameters(kinds, partial(_next_of, arriving), stored), shard_bytes
                )
        finally:
            # Ranks that send wait for this one, also if it cannot write.
            for _ in arriving:
                pass

    on_all_ranks(mesh, what, send_and_write)
    return target


def _next_of(arriving: Iterator[tuple[str, Tensor]], name: str) -> Tensor:
    """Return the next tensor, which has this name. Tensors without elements are not written, and passed over."""
    return next(tensor for arrived, tensor in arriving if arrived == name)


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
