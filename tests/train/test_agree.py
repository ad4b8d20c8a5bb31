"""Ranks that would train something else are named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshcomm
from meshcomm.errors import TrainingError
from meshcomm.testing import Pool
from meshcomm.train import Callback, run
from tests.train.test_steps import tiny


def disagree(files: list[str], out: str) -> list[str]:
    """The errors on this rank if rank 2 has other settings, other text or no text, and if the folder cannot be made."""
    base = [f'train.out="{out}"', "train.steps=1", "train.warmup_steps=0", f'data.files=["{files[0]}"]']
    told = []
    with meshcomm.init(tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }")) as mesh:
        for odd in ("train.lr=0.1", f'data.files=["{files[1]}"]', 'data.files=["missing.txt"]'):
            config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *base, *([odd] if mesh.rank == 2 else []))
            with pytest.raises(TrainingError) as caught:
                run(mesh, config, Callback())
            told.append(str(caught.value))
        config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *base, f'train.out="{files[0]}/inside"')
        with pytest.raises(TrainingError) as caught:
            run(mesh, config, Callback())
        return [*told, str(caught.value)]


def test_ranks_that_would_train_something_else_are_named(pool: Pool, tmp_path: Path) -> None:
    files = [str(tmp_path / "common.txt"), str(tmp_path / "odd.txt")]
    Path(files[0]).write_text("something to read " * 10)
    Path(files[1]).write_text("something else to read " * 10)
    told = pool.run(disagree, files, str(tmp_path / "run"), ranks=4)
    for rank, (settings, data, missing, folder) in enumerate(told):
        assert settings.startswith("ranks disagree on train.lr: rank 2 against the other 3\n")
        assert "train.lr: rank 2 = 0.1, the others 0.003\n" in settings
        assert data.startswith("ranks disagree on data.sha256: rank 2 against the other 3\n")
        assert "try:      in data.files, name files that are identical on every host" in data
        others = "rank 2 (pp=0 dp=1 tp=0) could not start the training: "
        assert missing.startswith(f"{others * (rank != 2)}no training data matches 'missing.txt'\n")
        others = "rank 0 (pp=0 dp=0 tp=0) could not start the training: "
        assert folder.startswith(
            f"{others * (rank != 0)}the folder for the run cannot be created: not a directory\n"
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class OfRank:
    """A stream that is split by rank already."""

    def __iter__(self) -> Iterator[list[int]]:
        first = int(os.environ["RANK"])
        return iter([[number] * 9 for number in range(first, 20, 2)])


def split(out: str) -> str:
    """The error if each rank has another part of a stream."""
    data = f'data={{ build = "{__name__}:OfRank", seq_len = 8 }}'
    config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 1 }", f'train.out="{out}"', data)
    with meshcomm.init(config) as mesh, pytest.raises(TrainingError) as caught:
        run(mesh, config, Callback())
    return str(caught.value)


def test_a_stream_that_is_split_by_rank_is_named(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(split, str(tmp_path / "run"), ranks=2):
        assert told.startswith("ranks disagree on data.sha256") and "data.files" not in told
        assert "Leave out a split by rank, such as split_dataset_by_node" in told


def halves(out: str) -> str:
    """The error if two of four ranks have another learning rate than the other two."""
    config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", f'train.out="{out}"')
    with meshcomm.init(config) as mesh:
        mine = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *(["train.lr=0.1"] if mesh.rank > 1 else []))
        with pytest.raises(TrainingError) as caught:
            run(mesh, mine, Callback())
    return str(caught.value)


def test_in_a_tie_no_rank_is_blamed(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(halves, str(tmp_path), ranks=4):
        assert told.startswith("ranks disagree on train.lr\n")
        assert "train.lr: ranks 0 1 = 0.003, ranks 2 3 = 0.1\n" in told
        assert told.endswith("start ranks 0 1 2 3 with the same configuration")
