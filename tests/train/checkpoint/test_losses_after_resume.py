"""A run that is saved on one mesh and resumed on another has the same losses in float64."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcomm.config import Config, load_config
from meshcomm.testing import Pool
from tests.train.parity_cases import CASES, case
from tests.train.runs import trained

pytestmark = pytest.mark.parity

# The mesh that saves -> its model, and the meshes that resume. A case gives its mesh and its roles.
GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "pp2 dp2 tp2": (
        {**CASES["pp2 dp2 tp2"]["model"], "num_kv_heads": 8},
        "dp4 tp2 tied, tp8, pp4 dp2, pp2 dp2 tp2 zero bubble, shard4 tp2, cp2 dp2 tp2, one process",
    ),
    "shard4 tp2": (
        CASES["shard4 tp2"]["model"],
        "dp8, hsdp 2x2 tp2, pp2 shard2 tp2, shard8, pp2 dp2 tp2, one process",
    ),
    "ep4 edp2": (
        CASES["ep4 edp2"]["model"],
        "pp2 ep2 tp2, ep8 capacity, dp2 cp2 tp2 ep4, dp4 tp2 experts everywhere, hsdp 2x4 ep2, one process",
    ),
    "hsdp 2x4 ep2": (
        CASES["ep4 edp2"]["model"],
        "ep4 edp2, shard8 ep4, pp2 shard4 ep2 interleaved, shard2 cp2 tp2 ep2, one process",
    ),
    "pp2 dp4 tied": (
        CASES["pp2 dp4 tied"]["model"],
        "dp4 tp2 tied, pp4 tp2, tp4 pp2 of another order, one process",
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "pp4 dp2": case("pp=4 dp=2"),
    "one process": case("one=1"),
    "tp4 pp2 of another order": case("tp=4 pp=2"),
}
OTHERS["tp4 pp2 of another order"]["mesh"]["rank_order"] = [3, 1, 7, 0, 5, 2, 6, 4]


def job(place: str, model: dict[str, Any], out: Path, **train: Any) -> Config:
    """The mesh and the roles of a case, with another model and other settings of checkpoints."""
    on = OTHERS.get(place) or CASES[place]
    facts = {**CASES["dp8"]["train"], "steps": 8, "checkpoint_every": 4, "keep": 3, "out": str(out), **train}
    rest = {"model": model, "data": CASES["dp8"]["data"], "train": facts}
    return load_config({"mesh": on["mesh"], "parallel": on["parallel"], **rest})


def losses(config: Config) -> tuple[float, ...]:
    torch.set_num_threads(1)
    return trained(config).losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize("saved", GROUPS)
def test_losses_after_a_resume(
    pool: Pool, saved: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    model, places = GROUPS[saved]
    whole = pool.run(losses, job(saved, model, tmp_path / "whole"), timeout_s=300)[0]
    assert len(whole) == 8
    for place in places.split(", "):
        out = tmp_path / place.replace(" ", "-")
        shutil.copytree(tmp_path / "whole", out)
        shutil.rmtree(out / "checkpoints" / "step-000008")
        (out / "checkpoints" / "latest").write_text("step-000004\n")
        config = job(place, model, out, resume=True)
        found = pool.run(losses, config, ranks=1 if place == "one process" else 8, timeout_s=300)
        assert len(set(found)) == 1
        assert found[0][:4] == whole[:4]
        worst = max(abs(a - b) for a, b in zip(found[0], whole, strict=True))
        figures(f"saved on {saved}, resumed on {place}: losses within {worst:.1e}")
        assert worst < 1e-12
