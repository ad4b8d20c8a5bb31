"""torch.profiler in a window of steps: a Chrome trace and a table from each rank that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcomm.config import Config
from meshcomm.errors import ConfigError
from meshcomm.testing import Pool
from tests.train.runs import losses_or_error, trained
from tests.train.test_cost import on


@pytest.mark.parametrize(
    ("ranks", "found"), [pytest.param("[]", [0, 1], marks=pytest.mark.deep), ("[1]", [1])]
)
def test_the_steps_of_the_window_are_traced(pool: Pool, tmp_path: Path, ranks: str, found: list[int]) -> None:
    more = ("train.profile_steps=[2, 4]", f"train.profile_ranks={ranks}")
    pool.run(trained, on("dp=2", *more, out=tmp_path), ranks=2)
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank{rank}.{kind}" for rank in found for kind in ("json", "txt")
    ]
    for rank in found:
        events = json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        assert names.count("Optimizer.step#AdamW.step") == 3
        assert "aten::mm" in names
        table = (folder / f"rank{rank}.txt").read_text()
        assert "Self CPU %" in table and "aten::mm" in table


def watched_twice(config: Config) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return losses_or_error(config)


def test_another_profiler_in_the_process_is_an_error_with_a_way_out(pool: Pool, tmp_path: Path) -> None:
    config = on("one=1", "train.profile_steps=[2, 3]", out=tmp_path)
    (text,) = pool.run(watched_twice, config, ranks=1)
    assert text.startswith("torch.profiler cannot be started on rank 0\n")
    assert "try:      remove train.profile_steps, or the other one" in text


def test_windows_and_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps 3 to 9 are no steps of this training"):
        on("dp=2", "train.profile_steps=[3, 9]")
    with pytest.raises(ConfigError, match=r"no effect without train.profile_steps"):
        on("dp=2", "train.profile_ranks=[0]")
    with pytest.raises(ConfigError, match="rank 2 is not in the mesh"):
        on("dp=2", "train.profile_steps=[2, 3]", "train.profile_ranks=[0, 2]")
