"""Parity's job: smaller meshes that find the dim to blame, and batch norms, which use the samples of all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, load_config
from meshcomm.errors import LaunchError
from meshcomm.testing import Pool
from meshcomm.train.parity import Difference
from meshcomm.train.parity_job import Blame, blame, only, suspected
from tests.forked_jobs import Job
from tests.train.parity_cases import CASES
from tests.train.test_parity import TOLERANCE

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


@pytest.mark.parametrize(
    ("case", "dims", "sizes", "view"),
    [
        ("pp2 dp2 tp2", ["tp"], {"pp": 1, "dp": 1, "tp": 2}, None),
        ("pp2 dp2 tp2", ["pp", "tp"], {"pp": 2, "dp": 1, "tp": 2}, None),
        ("ep4 edp2", ["dp"], {"dp": 8}, None),
        ("ep4 edp2", ["ep"], {"dp": 4}, {"edp": 1, "ep": 4}),
        ("ep4 edp2", ["dp", "ep"], {"dp": 8}, {"edp": 2, "ep": 4}),
        ("pp2 ep2 tp2", ["ep"], {"pp": 1, "dp": 2, "tp": 1}, {"pp": 1, "edp": 1, "ep": 2, "tp": 1}),
        ("dp2 cp2 tp2 ep4", ["ep"], {"dp": 4, "cp": 1, "tp": 1}, {"edp": 1, "ep": 4, "tp": 1}),
        ("dp2 cp2 tp2 ep4", ["cp", "ep"], {"dp": 2, "cp": 2, "tp": 1}, {"edp": 1, "ep": 4, "tp": 1}),
        ("hsdp 2x2 tp2", ["fsdp"], {"dp": 1, "fsdp": 2, "tp": 1}, None),
    ],
)
def test_a_mesh_of_few_dims(case: str, dims: list[str], sizes: dict[str, int], view: Any) -> None:
    config = only(load_config(CASES[case]), dims)
    assert dict(config.mesh.dims) == sizes
    assert config.mesh.views.get("expert") == view
    config.plan(None)


def test_every_case_can_be_taken_apart() -> None:
    for case in CASES.values():
        config = load_config(case)
        for dim in suspected(config):
            only(config, [dim])
    assert suspected(load_config(CASES["pp2 ep2 tp2"])) == ("pp", "dp", "tp", "ep")
    assert suspected(load_config(CASES["dp8"])) == ("dp",)


@pytest.mark.parametrize(
    ("guilty", "dims", "words"),
    [
        (({"tp"},), ("tp",), "first dim to blame: tp (alone, 2 ranks: weight of a, 3.1e-02)"),
        (({"dp"}, {"tp"}), ("dp",), "first dim to blame: dp (alone, 2 ranks: weight of a, 3.1e-02)"),
        (
            ({"pp", "tp"},),
            ("pp", "tp"),
            "first dims to blame: pp and tp (together, neither alone, 4 ranks: weight of a, 3.1e-02)",
        ),
        (({"pp", "dp", "tp"},), (), "first dim to blame: no single dim and no pair, only all dims together"),
    ],
)
def test_the_first_dim_alone_then_two(
    guilty: tuple[set[str], ...], dims: tuple[str, ...], words: str
) -> None:
    def run(config: Config) -> list[Difference]:
        used = {dim for dim, size in config.mesh.dims.items() if size > 1}
        wrong = any(needed <= used for needed in guilty)
        return [Difference("weight", "a", 0.031 if wrong else 0.0, 0.031 if wrong else 1e-16)]

    found = blame(load_config(CASES["pp2 dp2 tp2"]), run, TOLERANCE)
    assert (found.dims, found.words) == (dims, words)


def test_a_dim_that_cannot_run_alone_is_to_blame() -> None:
    def run(config: Config) -> list[Difference]:
        if config.mesh.dims["dp"] > 1:
            raise LaunchError("failed", given="exit code 1")
        return [Difference("loss", "step 1", 0.0, 0.0)]

    found = blame(load_config(CASES["pp2 dp2 tp2"]), run, TOLERANCE)
    assert found == Blame(("dp",), 2, None)
    assert found.words == "first dim to blame: dp (alone, 2 ranks: the run failed)"
