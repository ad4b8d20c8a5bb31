"""A script that makes a Trainer is compared with itself on one process: `meshcomm parity CONFIG SCRIPT`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshcomm.testing import Pool
from tests.forked_jobs import Job

CONFIG = """
[mesh]
dims = { dp = 2, tp = 1 }
device = "cpu"
timeout_s = 60
[parallel]
data = "dp"
tensor = "tp"
[train]
steps = 30
global_batch_size = 8
micro_batch_size = 2
schedule = "constant"
"""
SCRIPT = """
import sys
import meshcomm
import torch
from torch import nn
from meshcomm.parallel import tensor_parallel
from meshcomm.train import Trainer

how = sys.argv[1]
with meshcomm.init() as mesh:
    if how == "nothing":
        sys.exit()
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    tensor_parallel(net, mesh, "tp", {"0": "column", "2": "row"})
    make = lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    trainer = Trainer(mesh, model=net, loss=nn.functional.mse_loss, optimizer=make)

    def batch(step):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        x = x.chunk(mesh.size("dp"))[0 if how == "wrong" else mesh.coord("dp")]
        return x, x.square().sum(1, keepdim=True)

    try:
        trainer.run(batch)
    except Exception:
        pass
"""


def parity(pool: Pool, folder: Path, how: str, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    (folder / "mine.toml").write_text(CONFIG)
    (folder / "mine.py").write_text(SCRIPT)
    words = ("parity", *options, "--steps", "2", "--json", "mine.toml", "mine.py", how)
    return Job(pool, folder, "-m", "meshcomm", *words, env={"OMP_NUM_THREADS": "1"}).finish()


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_a_script_is_compared_with_itself_on_one_process(pool: Pool, tmp_path: Path) -> None:
    code, out, err = parity(pool, tmp_path, "right")
    facts = json.loads(out)
    assert code == 0 and facts["agrees"] and facts["steps"] == 2, err
    assert {one["name"] for one in facts["differences"] if one["kind"] == "weight"} == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    # The command writes nothing next to the script.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "mine.py", "mine.toml", "out"]


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_samples_that_ranks_share_are_found_and_their_dim_is_named(pool: Pool, tmp_path: Path) -> None:
    code, out, err = parity(pool, tmp_path, "wrong")
    facts = json.loads(out)
    assert code == 1, err
    assert facts["first"]["kind"] == "loss" and facts["first"]["name"] == "step 1"
    assert facts["blame"]["dims"] == ["dp"]


@pytest.mark.timeout(300)
def test_a_script_without_a_trainer_is_told(pool: Pool, tmp_path: Path) -> None:
    code, _, err = parity(pool, tmp_path, "nothing")
    assert code != 0
    assert "the script runs no Trainer steps, so there is nothing to compare" in err
    assert "Traceback" not in err
