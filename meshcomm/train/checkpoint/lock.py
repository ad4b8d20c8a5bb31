"""A checkpoint's lock file, which records the run's settings and shows how a resumed run differs."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import einops
import numpy as np
import torch

from meshcomm import __version__
from meshcomm.config import Config, ModelConfig
from meshcomm.config.write import key_path, toml, whole_toml
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.checkpoint.folder import LOCK, METADATA, check_step, instead_of, read, write

# The number of the format, raised whenever an earlier version of meshcomm would misread a checkpoint. What the versions with the
# other numbers of `_READ` wrote is read, too. 5: with a loss scale. Formats before 4 have no checksums.
_FORMAT = 5
_READ = (4, _FORMAT)

# If one of these changes, the run is a different training run and cannot continue.
_FIXED = ("model.", "pretrained.", "train.seed", "train.dtype")
# The same applies to these keys, which determine the samples of a step, unless train.resume_changed contains their value.
_SAMPLES = {
    "data.seq_len": "seq_len",
    "train.global_batch_size": "global_batch_size",
    **{f"data.{key}": "data" for key in ("sha256", "weights", "validation", "build", "args")},
}
# The run's location and whether it resumes do not affect the training.
_LEFT_OUT = {"train": {"out", "resume"}}
# How a run is recorded does not change what it computes.
_OF_NO_EFFECT = {"data.workers"} | {
    f"train.{name}"
    for name in (
        *("checkpoint_every", "checkpoint_async", "keep", "log_every", "out", "resume", "resume_changed"),
        *("trace_steps", "log_to", "peak_flops"),
    )
}
# The key of [model] pretrained's config.json in a lock's config. These keys of that file do not affect the results:
PRETRAINED = "pretrained"
NOT_THE_MODEL = {
    f"{PRETRAINED}.{name}"
    for name in ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
}
# The location of this folder may change. Its content may not.
_MAY_MOVE = {"model.pretrained"}
# Keys of [model] that do not change what a model computes from its weights when it is evaluated.
_FREE = {
    *("build", "args", "pretrained", "random_weights", "lora"),
    *("dropout", "capacity_factor", "balance_loss", "bias_update_speed"),
}
_SECTIONS = ("mesh", "parallel", "model", "data", "train")


class _LaterFormat(ValueError):
    """The format is one that this version does not know yet."""


@dataclass(frozen=True)
class Lock:
    """The facts about one checkpoint, as plain data, without environment variables, hosts, addresses or users."""

    step: int
    seconds: float
    """Time spent on the steps so far, as in metrics.jsonl."""
    fingerprint: str
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    skipped: int = 0
    """Number of steps skipped so far because their gradients were not finite."""

    samples: int | None = None
    """Number of samples read so far from this data. None means step times global_batch_size."""

    best: tuple[Any, ...] = ()
    """The best validation loss, in the form of `callbacks.Best`. Empty if it is unknown or there was no evaluation."""

    metadata: str = ""
    """The SHA-256 of the metadata file in the same folder, which gives the location of each tensor. "" if there is none."""

    def continuing(self, saved: Lock) -> Lock:
        """Return the lock for the continued run, with the progress from `saved`.

        If the data have changed, all samples of the new data count as unread.
        """
        old, new = _flat(saved), _flat(self)
        changed = [name for name in _SAMPLES if old.get(name) != new.get(name)]
        read = saved.samples
        if read is None:
            read = int(saved.step * saved.config.get("train", {}).get("global_batch_size", 0))
        return replace(
            self,
            step=saved.step,
            seconds=saved.seconds,
            skipped=saved.skipped,
            samples=0 if _begins_again(changed) else read,
            best=() if changed else saved.best,
        )

    def write(self, folder: Path) -> None:
        """Write lock.json into `folder`, with the digest of the metadata there. Raises OSError."""
        lock = replace(self, metadata=_sha256((folder / METADATA).read_bytes()))
        write(folder / LOCK, (lock.text() + "\n").encode())

    def text(self) -> str:
        """Return the lock as JSON, with its own digest last."""
        facts = {"format": _FORMAT, **self.__dict__}
        return json.dumps({**facts, "sha256": _sha256(json.dumps(facts).encode())}, indent=2)

    @property
    def digest(self) -> str:
        """The SHA-256 of the lock. Checkpoints with equal digests have equal tensors."""
        return _sha256(self.text().encode())

    @classmethod
    def read(cls, folder: Path) -> Lock:
        """Return the lock of the checkpoint `folder`, and check the metadata and the folder's name against it. Raises
        TrainingError.
        """
        path = folder / LOCK
        try:
            lock = cls.parse(read(path).decode())
            path = folder / METADATA
            if lock.metadata != _sha256(read(path)):
                raise ValueError("the file has changed since it was written: its SHA-256 differs")
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError) and folder.is_dir()
            raise TrainingError(
                f"a checkpoint's {path.name} {'is missing' if missing else 'cannot be read'}",
                given=f"{path}: {error}",
                expected=f"format {_READ[0]} to {_FORMAT}, readable on every host",
                hint="update meshcomm"
                if isinstance(error, _LaterFormat)
                else f"{f'restore {path.name}, or ' if missing else ''}{instead_of(folder)}",
            ) from error
        check_step(folder, lock.step)
        return lock

    @classmethod
    def parse(cls, text: str) -> Lock:
        """Return the lock that `text` describes. Raises ValueError if it is not a valid lock."""
        try:
            facts = json.loads(text)
            number = facts.pop("format")
            if isinstance(number, int) and number > _FORMAT:
                raise _LaterFormat(f"format {number}, which a later version of meshcomm wrote")
            if number not in _READ:
                raise ValueError(
                    f"format {number!r}, which only the version of meshcomm that wrote it can read"
                )
            if facts.pop("sha256") != _sha256(json.dumps({"format": number, **facts}).encode()):
                raise ValueError("the text has changed since it was written: its SHA-256 differs")
            return cls(**{**facts, "best": tuple(facts.get("best", ()))})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def lock_of(mesh: Mesh, config: Config, digest: bytes) -> Lock:
    """Return the lock of a run before its first step. config: a configuration that has been checked against the mesh.
    digest: the SHA-256 of the data.
    """
    settings = {
        name: section.model_dump(mode="json", exclude=_LEFT_OUT.get(name))
        for name in _SECTIONS
        if (section := getattr(config, name)) is not None
    }
    settings["mesh"]["dims"] = dict(mesh.layout.dims)
    settings.setdefault("data", {})["sha256"] = digest.hex()
    settings |= _config_json(config.model)
    libraries = {"meshcomm": __version__, "torch": torch.__version__, "numpy": np.__version__}
    versions = {**libraries, "einops": einops.__version__, "python": platform.python_version()}
    return Lock(0, 0.0, mesh.plan.fingerprint, mesh.plan.facts(), settings, versions)


def _config_json(model: ModelConfig | None) -> dict[str, dict[str, Any]]:
    if model is None or model.pretrained is None:
        return {}
    return {PRETRAINED: json.loads((Path(model.pretrained) / "config.json").read_text())}


def check_same_function(saved: Lock, model: ModelConfig | None, folder: Path) -> None:
    """Raise ConfigError if weights of the checkpoint `folder` would compute something else in the run's model, although their
    shapes may fit. model: the run's [model].
    """
    tables: dict[str, Mapping[str, Any]] = {**_config_json(model)}
    if model is not None:
        tables["model"] = model.model_dump(mode="json", exclude=_FREE)
    changed = {
        f"{section}.{key}": (before[key], value)
        for section, table in tables.items()
        for before in [saved.config.get(section, {})]
        for key, value in table.items()
        if key in before and before[key] != value and f"{section}.{key}" not in NOT_THE_MODEL
    }
    if changed:
        raise ConfigError(
            f"weights of another model: {', '.join(changed)}",
            given=_both(changed, folder),
            expected="the model whose weights these are",
            hint=f"restore them; or, if weights of these shapes are all that you want, meshcomm export {folder} weights.safetensors, "
            'and train.init_from = "weights.safetensors"',
        )


def resume_differences(saved: Lock, now: Lock, folder: Path) -> tuple[str, ...]:
    """Return the settings that have changed since the checkpoint `folder` was saved, one per line.

    Settings that only affect how a run is recorded are omitted.

    Raises ConfigError, with both values of each setting, if the run can no longer continue with the changed settings,
    or if the checkpoint is past the last step.
    """
    old, new = _flat(saved), _flat(now)
    differences: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        # The order of mesh.dims decides which rank has which coords.
        moved = isinstance(before, dict) and before == after and list(before) != list(after)
        if name not in _OF_NO_EFFECT | NOT_THE_MODEL and (moved or before != after):
            differences |= _apart(name, before, after)
    allowed = now.config["train"].get("resume_changed", ())
    fixed = [
        name
        for name in differences
        if (name.startswith(_FIXED) and name not in _MAY_MOVE)
        or (name in _SAMPLES and _SAMPLES[name] not in allowed)
    ]
    if fixed:
        raise ConfigError(
            f"this configuration trains something different from the checkpoint: {', '.join(fixed)}",
            given=_both({name: differences[name] for name in fixed}, folder),
            expected="the checkpoint's own model, data, batch, seed and dtype",
            hint="restore them; "
            + "".join(
                f"train.resume_changed = {toml([name])}, to continue with the new value; "
                for name in dict.fromkeys(_SAMPLES[name] for name in fixed if name in _SAMPLES)
            )
            + "or set train.resume = false, or choose another train.out, for a separate run",
        )
    steps = now.config["train"]["steps"]
    if saved.step > steps:
        raise ConfigError(
            f"the checkpoint is past the last step of this training: {saved.step} > {steps}",
            given=f"train.steps = {steps}, and step {saved.step} in {folder}",
            expected=f"train.steps of {saved.step} or more",
            hint=f"train.steps = {saved.config['train']['steps']}, the old value; or another train.out",
        )
    lines = [f"{name}: {' -> '.join(_texts(*values))}" for name, values in differences.items()]
    if _begins_again(differences):
        lines.append("the samples restart at the first epoch of the new data")
    return tuple(lines)


def check_batch_size(saved: Lock, now: Lock, kind: str, folder: Path) -> None:
    """Raise ConfigError if a run that continues from `folder` on an iterable has another batch size.

    The batches of completed steps are read and skipped. With another size, other samples would be skipped.
    kind: the iterable's type.
    """
    before, size = (lock.config["train"]["global_batch_size"] for lock in (saved, now))
    if saved.step and before != size:
        raise ConfigError(
            f"a {kind} cannot go on with another batch size",
            given=f"train.global_batch_size = {size}, and {before} in {folder}",
            expected=f"the old size, whose {saved.step} batches are skipped; or data requested by step number",
            hint=f"train.global_batch_size = {before}, or trainer.run(lambda step: ...), which decides itself where it goes on",
        )


def _apart(name: str, before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Return both values of each setting that differs. In a table with the same tables, such as train.groups, these are inner ones."""
    nested = isinstance(before, dict) and any(isinstance(each, dict) for each in before.values())
    if not nested or not isinstance(after, dict) or list(before) != list(after):
        return {name: (before, after)}
    inner = [key for key in before if before[key] != after[key]]
    return dict(
        pair for key in inner for pair in _apart(f"{name}.{key_path([key])}", before[key], after[key]).items()
    )


def _both(changed: Mapping[str, tuple[Any, Any]], folder: Path) -> str:
    """Return a line for each setting, with its value now and in the checkpoint. changed: (in the checkpoint, now), by name."""
    pairs = ((name, *_texts(*values)) for name, values in changed.items())
    return "\n".join(f"{name} = {now}, and {before} in {folder}" for name, before, now in pairs)


def _texts(before: Any, after: Any) -> tuple[str, str]:
    """Return two different values as different texts, shortened if possible."""
    short = toml(before), toml(after)
    return short if short[0] != short[1] else (whole_toml(before), whole_toml(after))


def _begins_again(names: Iterable[str]) -> bool:
    return any(_SAMPLES.get(name) in ("data", "seq_len") for name in names)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _flat(lock: Lock) -> dict[str, Any]:
    """Return a mapping from `section.key` to value. A table such as mesh.dims remains a single value."""
    sections = {**lock.config, "versions": lock.versions}
    if "options" in (parallel := dict(sections.get("parallel") or {})):
        sections["parallel.options"] = parallel.pop("options")
        sections["parallel"] = parallel
    flat = {f"{section}.{key}": value for section, table in sections.items() for key, value in table.items()}
    return {**flat, "device": lock.plan.get("device")}
