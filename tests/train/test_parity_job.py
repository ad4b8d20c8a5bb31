"""A batch norm uses the samples of a microbatch from all ranks. One process gets the same microbatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshcomm.testing import Pool
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
    "train": {"steps": 3, "global_batch_size": 16, "micro_batch_size": 4, "lr": 0.01},
}


def parity(pool: Pool, folder: Path, microbatch: int, *more: str, script: bool) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, with the script or with the configuration's own model and data."""
    (folder / "net.py").write_text(NET)
    (folder / "mine.py").write_text(SCRIPT)
    config = {name: each for name, each in CONFIG.items() if not script or name not in ("model", "data")}
    (folder / "c.json").write_text(json.dumps(config))
    micro = f"train.micro_batch_size={microbatch}"
    words = ("-m", "meshcomm", "parity", "--json", "--steps", "2", "--set", micro)
    env = {"OMP_NUM_THREADS": "1"}
    if script:
        return Job(pool, folder, *words, *more, "c.json", "mine.py", env=env).finish()
    # The reference runs in the command's own process with torch's threads, so its ranks cannot be forked from there.
    done = subprocess.run(
        [sys.executable, *words, *more, "c.json"],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parity
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", [False, True])
def test_one_micro_batch_with_batch_norms_agrees(pool: Pool, tmp_path: Path, script: bool) -> None:
    code, out, err = parity(pool, tmp_path, 4, script=script)
    assert code == 0, err + out
    facts = json.loads(out)
    assert facts["agrees"] and max(one["relative"] for one in facts["differences"]) < 1e-12
    assert any("one microbatch on every mesh" in note for note in facts["notes"])


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_smaller_meshes_of_a_search_for_blame_get_the_same_micro_batch(pool: Pool, tmp_path: Path) -> None:
    code, out, err = parity(pool, tmp_path, 4, "--set", "model.args={ odd = true }", script=False)
    assert code == 1 and json.loads(out)["blame"]["dims"] == [], err


@pytest.mark.timeout(300)
def test_several_micro_batches_with_batch_norms_are_refused(pool: Pool, tmp_path: Path) -> None:
    code, _, err = parity(pool, tmp_path, 2, script=True)
    assert code != 0 and "Traceback" not in err
    assert "batch norms with several microbatches in a step cannot be compared with one process" in err
    assert "--set train.micro_batch_size=4" in err
