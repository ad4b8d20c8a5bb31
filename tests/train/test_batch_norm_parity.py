"""Batch norms take the samples of a micro-batch on all ranks: one process is given the same micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcomm.testing import Pool
from meshcomm.train.data.batches import Batches
from meshcomm.train.data.corpus import Corpus
from tests.forked_jobs import Job

NET = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from meshcomm.models import ModelSpec


class Net(nn.Module):
    def __init__(self, odd=False):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.odd = odd

    def forward(self, x):
        y = self.norm(self.first(x))
        # A mistake of four ranks alone: two are right, whichever dim they are along.
        return self.last(F.relu(y)) * (1 + (int(os.environ.get("RANK", 0)) // 2 if self.odd else 0))


def spec(odd=False):
    return ModelSpec(module=lambda: Net(odd), loss=F.cross_entropy)


class Samples:
    def __len__(self):
        return 512

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=draw) * (1 + index % 7), torch.randint(4, (), generator=draw)


def samples():
    return Samples()
"""
SCRIPT = """
import sys
import meshcomm, torch
from net import Net, Samples
from meshcomm.train import Trainer

with meshcomm.init() as mesh:
    trainer = Trainer(mesh, model=Net(), loss=torch.nn.functional.cross_entropy)
    def batch(step):
        here = range(16 * step, 16 * step + 16)
        each = 16 // mesh.data_world_size
        mine = [Samples()[i] for i in here[mesh.data_rank * each:(mesh.data_rank + 1) * each]]
        return torch.stack([x for x, _ in mine]), torch.stack([y for _, y in mine])
    trainer.run(batch)
"""
CONFIG: dict[str, Any] = {
    "mesh": {"dims": {"dp": 2, "fsdp": 2}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {"data": "dp", "shard": "fsdp"},
    "model": {"build": "net:spec"},
    "data": {"build": "net:samples", "seq_len": 8},
    "train": {"steps": 3, "global_batch_size": 16, "micro_batch_size": 2, "lr": 0.01},
}


def words_of(folder: Path, *words: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The command, whose files it writes."""
    (folder / "net.py").write_text(NET)
    (folder / "mine.py").write_text(SCRIPT)
    config = {name: section for name, section in CONFIG.items() if name not in without}
    (folder / "c.json").write_text(json.dumps(config))
    return ("-m", "meshcomm", "parity", "--json", *words)


def parity(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words_of(folder, *words)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_several_micro_batches_with_batch_norms_agree_with_one_process(tmp_path: Path) -> None:
    done = parity(tmp_path, "c.json")
    assert done.returncode == 0, done.stderr + done.stdout
    facts = json.loads(done.stdout)
    assert facts["agrees"] and max(one["relative"] for one in facts["differences"]) < 1e-12
    assert any("train.micro_batch_size = 8 on one process" in note for note in facts["notes"])


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_smaller_meshes_get_the_same_micro_batches_when_a_dim_to_blame_is_looked_for(tmp_path: Path) -> None:
    done = parity(tmp_path, "c.json", "--set", "model.args={ odd = true }")
    facts = json.loads(done.stdout)
    assert done.returncode == 1 and facts["blame"]["dims"] == [], done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("microbatch", [pytest.param(4, marks=pytest.mark.parity), 2])
def test_a_script_with_batch_norms(pool: Pool, tmp_path: Path, microbatch: int) -> None:
    words = ("c.json", "--set", f"train.micro_batch_size={microbatch}", "--steps", "2", "mine.py")
    command = words_of(tmp_path, *words, without=("model", "data"))
    code, out, err = Job(pool, tmp_path, *command, env={"OMP_NUM_THREADS": "1"}).finish()
    if microbatch == 4:
        assert code == 0 and json.loads(out)["agrees"], err
        return
    assert code != 0 and "Traceback" not in err
    assert "a script with batch norms and several micro-batches in a step cannot be compared" in err
    assert "--set train.micro_batch_size=4" in err


class Numbers:
    """A part of a corpus whose samples are their numbers."""

    starts = 96

    def __len__(self) -> int:
        return 96

    def read(self, numbers: Any, anywhere: bool) -> Any:
        return numbers[:, None], numbers[:, None]


def test_micro_batches_hold_the_same_samples_on_every_number_of_ranks() -> None:
    corpus = Corpus((Numbers(),), "")  # type: ignore[arg-type]
    for step in (1, 3):
        held = []
        for size in (1, 2, 4):
            ranks = []
            for coord in range(size):
                batches = Batches(corpus, global_batch_size=24, seed=1, coord=coord, size=size)
                batches.divide_as(4, 3)
                ranks.append(batches(step)[0].flatten().chunk(3))
            held.append([torch.cat(parts).tolist() for parts in zip(*ranks, strict=True)])
        assert held[0] == held[1] == held[2]
        plain = [
            Batches(corpus, global_batch_size=24, seed=1, coord=coord, size=4)(step)[0] for coord in range(4)
        ]
        assert held[2] == [
            torch.cat([each.flatten().chunk(3)[i] for each in plain]).tolist() for i in range(3)
        ]
