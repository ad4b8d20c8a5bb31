"""A checkpoint with a file, or a part of a file, from another save is refused; the foreign values are never read as its own."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.errors import TrainingError
from meshcomm.testing import Pool
from meshcomm.train.checkpoint.checkpoints import read
from meshcomm.train.checkpoint.folder import METADATA
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.export import export_weights
from tests.train.checkpoint.test_checkpoints import TWO, run_once, tiny
from tests.train.test_export import LOCK
from tests.train.test_export import checkpoint as written

SHAPES = {"model.a": (3, 4), "model.b": (3, 4), "model.c": (5,)}
SHARD = "__0_0.distcp"


def state(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def places(path: Path) -> dict[str, Any]:
    """The places of the records, as torch's own reader finds them."""
    stored = pickle.loads((path / METADATA).read_bytes()).storage_data
    return {index.fqn: place for index, place in stored.items()}


def another_step(path: Path, run: Path) -> None:
    other = written(run, state(2), dataclasses.replace(LOCK, step=20))
    shutil.copyfile(other / SHARD, path / SHARD)


def another_run(path: Path, run: Path) -> None:
    other = written(run.with_name("other"), state(3))
    shutil.copyfile(other / SHARD, path / SHARD)


def swapped(path: Path, run: Path) -> None:
    a, b = (places(path)[f"model.{name}"] for name in "ab")
    content = bytearray((path / SHARD).read_bytes())
    assert a.length == b.length
    x, y = (slice(each.offset, each.offset + each.length) for each in (a, b))
    content[x], content[y] = content[y], content[x]
    (path / SHARD).write_bytes(content)


def one_record_of_another_step(path: Path, run: Path) -> None:
    other = written(run, state(2), dataclasses.replace(LOCK, step=20))
    b = places(path)["model.b"]
    part = slice(b.offset, b.offset + b.length)
    content = bytearray((path / SHARD).read_bytes())
    content[part] = (other / SHARD).read_bytes()[part]
    (path / SHARD).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "refused", "words"),
    [
        (another_step, "abc", "have the CRC-32"),
        (another_run, "abc", "have the CRC-32"),
        (swapped, "ab", "like model."),
        (one_record_of_another_step, "b", "have the CRC-32"),
    ],
)
def test_a_record_that_was_not_saved_here_is_refused_by_name(
    damage: Callable[[Path, Path], None], refused: str, words: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    path = written(run, state(1))
    sizes = (path / SHARD).stat().st_size
    damage(path, run)
    assert (path / SHARD).stat().st_size == sizes, "a copy by size must not notice"
    for name, value in state(1).items():
        into = torch.full_like(value, -5.0)
        if name[-1] not in refused:
            Saved(path).fill({name: into})
            assert torch.equal(into, value)
            continue
        with pytest.raises(TrainingError, match=f"the checkpoint is damaged: {name} in {SHARD}") as caught:
            Saved(path).fill({name: into})
        assert (into == -5.0).all()
        given, expected = caught.value.given or "", caught.value.expected or ""
        assert given.startswith(f"{path / SHARD}: ") and words in given
        assert f"the CRC-32 {places(path)[name].crc32:08x}" in expected
        assert "of the same step and run" in expected
    with pytest.raises(TrainingError, match="the checkpoint is damaged"):
        export_weights(path, tmp_path / "weights.safetensors")


@pytest.mark.parametrize("more", [-100, 100])
def test_an_old_file_of_another_size_is_refused(more: int, tmp_path: Path) -> None:
    """An earlier version of the model or of torch has written the file, with its records at other places."""
    path = written(tmp_path / "run", state(1))
    content = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(content[-more:] if more < 0 else bytes(more) + content)
    with pytest.raises(TrainingError, match=r"the checkpoint is damaged: model\.a"):
        Saved(path).fill({"model.a": torch.zeros(3, 4)})


def test_metadata_without_checksums_are_refused(tmp_path: Path) -> None:
    """torch's own writer and earlier versions write no checksums."""
    path = written(tmp_path / "run", state(1))
    metadata = pickle.loads((path / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        del place.crc32
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(TrainingError, match=r"the checkpoint is damaged: model\.a") as caught:
        Saved(path).fill({"model.a": torch.zeros(3, 4)})
    assert "the metadata hold no checksum" in (caught.value.given or "")


def reads(path: Path) -> str:
    """The error of reading, on every rank."""
    with meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        try:
            read(mesh, {"model.a": torch.zeros(3, 4)}, path)
        except TrainingError as error:
            return str(error)
    return ""


def test_shards_and_metadata_of_another_step_do_not_fit_the_lock(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = written(run, state(1))
    assert pool.run(reads, path, ranks=2) == [""] * 2
    other = written(run, state(2), dataclasses.replace(LOCK, step=20))
    for name in (SHARD, METADATA):
        shutil.copyfile(other / name, path / name)
    with pytest.raises(TrainingError, match="cannot be read"):
        Lock.read(path)
    assert all("a checkpoint's .metadata cannot be read" in said for said in pool.run(reads, path, ranks=2))


def resumes(config: Any) -> str:
    try:
        run_once(config)
    except TrainingError as error:
        return str(error)
    return "resumed"


def test_a_run_does_not_resume_from_a_shard_of_another_step(pool: Pool, tmp_path: Path) -> None:
    """All ranks refuse, even if they read other files only."""
    config = tiny(tmp_path / "run", TWO, "train.checkpoint_every=1", "train.keep=6", "train.steps=6")
    pool.run(run_once, config, ranks=2)
    *others, before, last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    # The losses of more steps are a larger record, and the number of steps decides which file has it.
    holder = {path: places(path)["run.losses"].relative_path for path in (*others, before, last)}
    (shard,) = {f"__{rank}_0.distcp" for rank in range(2)} - {holder[last]}
    other = next(path for path in (before, *others) if holder[path] == holder[last])
    kept = (last / shard).read_bytes()
    shutil.copyfile(other / shard, last / shard)
    assert len(kept) == (last / shard).stat().st_size
    again = tiny(tmp_path / "run", TWO, "train.steps=6", "train.resume=true")
    for said in pool.run(resumes, again, ranks=2):
        assert "the checkpoint is damaged: " in said and f"{last / shard}: " in said
        assert said.endswith(f"move {last} away; train.resume = true continues from {before}")
    (last / shard).write_bytes(kept)
    assert pool.run(resumes, again, ranks=2) == ["resumed"] * 2
